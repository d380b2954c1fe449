# Every task of the repository; `make` alone lists them. Environments are made
# when missing, and again when pyproject.toml or the Python version changes.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install
PYTHON_VERSION := $(shell $(PYTHON) -c \
  'import platform; print(platform.python_version())' 2>/dev/null)
# One stamp for each thing installed; the version in its name makes it stale.
STAMP := $(VENV)/.$(PYTHON_VERSION)
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n auto --maxprocesses 4 \
  --dist worksteal
SOURCES := pallas_kernels modeling lstraw_jax experiments tests
# A pyenv shim exists for every installed version but runs only the chosen one.
FIND_PYTHON_NEXT = show='import sys; print(sys.executable)'; \
  python3.12 -c "$$show" 2>/dev/null || PYENV_VERSION=$$(pyenv versions --bare \
  2>/dev/null | grep '^3\.12\.' | tail -1) python3.12 -c "$$show" 2>/dev/null

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:  # two pips in one environment would break it
.PHONY: help demo plan-env test test-next run-next lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' \
	  $(MAKEFILE_LIST)
	@echo 'Options: PYTHON=python3.11 (any of them), ARGS="-k name" (tests)'

demo: $(STAMP)-base  ## train the tiny model on this machine, into runs/demo
	$(BIN)/python -m experiments.train_grpo \
	  --config=experiments/configs/tiny.py --workdir=runs/demo $(ARGS)

plan-env:  ## make .venv-plan: compilers for GPUs and TPUs that are not there
	@$(MAKE) --no-print-directory VENV=.venv-plan .venv-plan/.$(PYTHON_VERSION)-plan

test: $(STAMP)-reference  ## run all tests on 8 virtual CPU devices
	$(PYTEST) $(ARGS)

test-next:  ## run a case of each test on Python 3.12 with jax 0.11, if found
	@python=$$($(FIND_PYTHON_NEXT)); if [ -n "$$python" ]; then \
	  $(MAKE) --no-print-directory run-next VENV=.venv-next PYTHON="$$python"; \
	else echo "test-next: skipped, this machine has no Python 3.12" \
	  "(looked for python3.12, then in pyenv)"; fi

run-next: $(STAMP)-test
	@$(BIN)/python -c 'import jax; assert jax.__version__.startswith("0.11.")'
	$(PYTEST) --one-case -m "not reference and not first_class" $(ARGS)

lint: $(STAMP)-lint  ## check style and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/pyink --quiet --check --diff $(SOURCES)
	$(BIN)/pyright

format: $(STAMP)-lint  ## rewrite the sources in style
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/pyink --quiet $(SOURCES)

clean:  ## remove environments and caches; runs/ stays
	rm -rf .venv .venv-next .venv-plan *.egg-info build dist
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(STAMP)-base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  2>/dev/null || { echo "lstraw_jax needs Python 3.11 or newer, but" \
	  "$(PYTHON) is $(or $(PYTHON_VERSION),not found)." \
	  "Name another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@echo "$(VENV): creating, Python $(PYTHON_VERSION)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "$(VENV): installing lstraw_jax and what it needs"
	@$(PIP) -e .
	@touch $@

$(STAMP)-test: $(STAMP)-base
	@echo "$(VENV): installing the test tools"
	@$(PIP) -e '.[test]'
	@touch $@

$(STAMP)-reference: $(STAMP)-test
	@echo "$(VENV): installing the PyTorch reference models"
	@# First and alone: a resolver that sees torch unpinned fetches CUDA.
	@$(PIP) torch==2.13.0
	@$(PIP) -e '.[reference]'
	@touch $@

$(STAMP)-plan: $(STAMP)-base
	@echo "$(VENV): installing the compilers, about 2 GB"
	@$(PIP) -e '.[plan-gpu,plan-tpu]'
	@touch $@

$(STAMP)-lint: $(STAMP)-base
	@echo "$(VENV): installing the linters"
	@$(PIP) -e '.[lint]'
	@touch $@
