"""Turns figures of a kernel and of a GPU into what limits it; computed, so that no GPU is needed, and never measured."""
