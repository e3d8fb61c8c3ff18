# make demo: environment, a real search on 4 CPU ranks, its table and comparison
# make test: environment and tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: env demo test test-all lint clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "autotune needs Python 3.11 or newer, found " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,prove]'
	touch $@

demo: env
	$(BIN)/autotune search search_spaces/quickstart.yaml --sampler grid --final 1 --final-rounds 3 --fresh
	$(BIN)/autotune results results/quickstart
	$(BIN)/autotune compare results/quickstart

test: env
	$(BIN)/python -m pytest

test-all: env
	$(BIN)/python -m pytest -m 'slow or not slow'

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
