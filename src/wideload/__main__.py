"""``python -m wideload``: the command line."""

from __future__ import annotations

from wideload.cli import app

app()
