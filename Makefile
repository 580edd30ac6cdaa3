# Every target sets up what it needs; `make setup` alone makes .venv.
# A second run is quick: setup repeats only when pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long check stubs bench clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.octavo-installed
# The first of these that is Python 3.11 or later makes the environment.
PYTHONS := $(PYTHON) python3.11 python3.12 python3.13 python3 python

help:
	@echo "make setup      make .venv with everything"
	@echo "make demo       a real model, a real node, kill -9, and the same answers"
	@echo "make test       the tests (12 minutes at most on two cores)"
	@echo "make test-long  the long half: kill rounds, many seeds, timing (15 minutes at most)"
	@echo "make check      ruff, mypy, pyright, and whether the stubs are up to date"
	@echo "make stubs      the protocol's stubs from the .proto files"
	@echo "make bench      the benchmarks, each beside its ceiling"
	@echo "make clean      remove .venv, caches and the demo's checkpoint"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@python=""; \
	for each in $(PYTHONS); do \
	  if command -v "$$each" >/dev/null \
	    && "$$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then python="$$each"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Octavo needs Python 3.11 or later: install it, or say where: make setup PYTHON=..." >&2; \
	  exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  rm -rf $(VENV); \
	  if "$$python" -c 'import ensurepip' 2>/dev/null; then \
	    "$$python" -m venv $(VENV); \
	  elif "$$python" -m venv --without-pip $(VENV) \
	    && "$$python" -m pip --python $(BIN)/python install --quiet pip; then :; \
	  else \
	    rm -rf $(VENV); \
	    echo "This Python cannot make virtual environments." >&2; \
	    echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/octavo demo

test: setup
	$(BIN)/python -m pytest -m "not long"

test-long: setup
	$(BIN)/python -m pytest -m long

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
	$(BIN)/octavo bench nvme --json

clean:
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find proto server client tests -name __pycache__ -type d -prune -exec rm -rf {} +
