# Everything runs in .venv, which is made once and again when the project file or the pins change.
PYTHON ?= python3
JOBS ?= auto

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test lint clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

demo: $(STAMP)  ## Fuse a function, show its kernel and check it; needs no GPU
	$(BIN)/wideload demo

test: lint  ## Lint, then run the tests; those that need a GPU run where there is one
	$(BIN)/pytest -n $(JOBS) --maxprocesses 8

lint: $(STAMP)  ## Check style, types and the import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## Remove .venv and everything that a run leaves behind
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in at its pinned version: left free, pip would take the newest.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("wideload needs Python >= 3.11: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[cu13,dev]"
	@touch $@
