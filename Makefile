# From a fresh clone:  make train   trains the first-voyage model      make test   tests it
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One test process a core, a file's tests in one of them, in the order that tests/conftest.py gives.
SIDE_BY_SIDE := -n auto --dist loadfile --no-loadscope-reorder
# These mostly wait, for Slurm, ssh and limits of silence.
TIMED := -n 2 --dist loadfile --no-loadscope-reorder

# The tests start thousands of processes: all find compiled modules, where the environment would keep Python from writing them too.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-ci test-all test-fast check format bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(STAMP)  ## make .venv and install Seatrial with its tools into it

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $@

train: $(STAMP) first-voyage.toml  ## train a small Qwen2.5-shaped model over a virtual cluster of two nodes
	$(BIN)/seatrial train first-voyage.toml

first-voyage.toml: | $(STAMP)
	$(BIN)/seatrial init --preset first-voyage --out $@

test: $(STAMP)  ## static checks, then the tests to run before a commit (15 minutes on two cores)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not timed and not ci and not long"
	$(BIN)/pytest $(TIMED) -m "timed and not ci and not long"

test-ci: test  ## and the other tests that CI runs
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "ci and not timed and not long"
	$(BIN)/pytest $(TIMED) -m "ci and timed and not long"

test-all: test-ci  ## and those that take long and show little more
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "long and not timed"
	$(BIN)/pytest $(TIMED) -m "long and timed"

test-fast: $(STAMP)  ## the tests that start no cluster (two minutes on two cores)
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not cluster and not ci and not long"

check: $(STAMP)  ## static checks only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

format: $(STAMP)  ## format and fix what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## the benchmarks, each as a ratio in one run
	$(BIN)/python bench/start.py
	$(BIN)/python bench/overhead.py

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache
