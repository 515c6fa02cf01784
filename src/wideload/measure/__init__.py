"""Turns callables and GPUs into times: what was measured, how often, and how it varied; never what it should have been."""
