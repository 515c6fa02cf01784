# Everything runs in .venv, which is made once and again when the project file or the pins change.
PYTHON ?= python3
JOBS ?= auto

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What a torch demands in one version each; the compiler's pins stay, nvcc's and its runtime's.
DEMANDED := torch|triton|setuptools|cuda-(bindings|toolkit)|nvidia-(cublas|cuda-(cupti|nvrtc)|cudnn.*|cufft|cufile|curand|cusolver|cusparse.*)
DEMANDED := $(DEMANDED)|nvidia-(nccl.*|nvjitlink|nvshmem.*|nvtx)

BROWSERS := chromium chromium-browser google-chrome chrome

.PHONY: help demo test test-torch bench lint browser clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(STAMP)  ## Fuse a function, show its kernel and check it; needs no GPU
	$(BIN)/wideload demo

test: lint browser  ## Lint, then run the tests; those that need a GPU run where there is one
	$(BIN)/pytest -n $(JOBS) --maxprocesses 8

test-torch: $(if $(TORCH),.venv-$(TORCH)/.installed)  ## Run the tests with another torch, in a folder of its own: make test-torch TORCH=2.11.0
	@test -n "$(TORCH)" || { echo "which torch? make test-torch TORCH=2.11.0" >&2; exit 2; }
	.venv-$(TORCH)/bin/pytest -n $(JOBS) --maxprocesses 8

bench: $(STAMP)  ## Run every benchmark on this GPU and sum up; what they write goes to build/benchmarks
	$(BIN)/python benchmarks/run_all.py --out build/benchmarks

lint: $(STAMP)  ## Check style, types and the import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The test of the report page skips without a browser, and fails without one in CI.
browser:  ## Get a browser for the report's test, if there is none and apt may install one
	@for name in $(BROWSERS); do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	fi || echo "apt cannot install chromium" >&2

clean:  ## Remove .venv and everything that a run leaves behind
	rm -rf $(VENV) .venv-* build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes in at its pinned version: left free, pip would take the newest.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("wideload needs Python >= 3.11: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[cu13,dev]"
	@touch $@

# torch 2.10 is built for CUDA 12, those after it for 13.
.venv-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -Ev '^($(DEMANDED))==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt \
		--editable ".[$(if $(filter 2.10.%,$*),cu12,cu13),dev]" torch==$*
	@touch $@
