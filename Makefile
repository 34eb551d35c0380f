# One command each: setup demo test lint bench soak services
PYTHON ?= python3.11
TORCH  ?= torch==2.13.0
# Extra pip arguments for another build, e.g. PIP_ARGS="--index-url https://…" with TORCH=torch==2.13.0+cu130
PIP_ARGS ?=
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test lint bench soak services clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check hatchling editables -c constraints.txt
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/samerun demo

lint: setup
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600 $(PYTEST_ARGS)

bench: setup
	@echo "no figures are measured yet"

services:
	@echo "no services are needed yet"

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
