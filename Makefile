# One command each: setup demo test lint bench soak services
PYTHON ?= python3.11
TORCH  ?= torch==2.13.0
# Extra pip arguments for another build, e.g. PIP_ARGS="--index-url https://…" with TORCH=torch==2.13.0+cu130
PIP_ARGS ?=
VENV   ?= .venv
# Processes that tests are dealt out to; most of a test's time is one core or waiting for ranks
TEST_WORKERS ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SERVICES := .services
MOTO     := "moto[s3]==5.2.5" flask==3.1.3 flask-cors==6.0.5
AZURITE  := azurite@3.35.0

.PHONY: setup demo test lint bench soak services clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check hatchling editables -c constraints.txt
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c $(VENV)/constraints.txt -e '.[dev,cloud]'
	touch $@

demo: setup
	$(BIN)/samerun demo

lint: setup
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

soak: setup
	$(BIN)/python -m pytest -m soak --timeout 3600 $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/property --hypothesis-profile=search --timeout 3600 $(PYTEST_ARGS)

bench: setup
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/health.py
	$(BIN)/python benchmarks/saves.py $(BENCH_ARGS)

# What tests start and stop themselves: an S3 API (moto), Azure Blob (Azurite, where npm exists), Slurm (where root may)
services: $(SERVICES)/.moto $(SERVICES)/.azurite $(SERVICES)/.slurm

$(SERVICES)/.moto:
	$(PYTHON) -m venv $(SERVICES)/venv
	$(SERVICES)/venv/bin/pip install --quiet --disable-pip-version-check $(MOTO)
	touch $@

$(SERVICES)/.azurite:
	mkdir -p $(SERVICES)
	if command -v npm >/dev/null; then npm install --silent --no-fund --no-audit --prefix $(SERVICES) $(AZURITE); \
	else echo "npm is not installed: tests against Azure Blob will be skipped"; fi
	touch $@

$(SERVICES)/.slurm:
	mkdir -p $(SERVICES)
	if command -v slurmctld >/dev/null && command -v munged >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null; \
	else echo "Slurm is not installed and apt-get is not for this user: its tests will be skipped"; fi
	touch $@

clean:
	rm -rf $(VENV) $(SERVICES) .mypy_cache .ruff_cache .pytest_cache .hypothesis
