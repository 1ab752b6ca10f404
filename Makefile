# make demo | make test | make check | make demo-llm; `make help` lists the rest.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
# The installed set follows pyproject.toml: a newer file means a new install.
DEV    := $(VENV)/.installed-dev
LLM    := $(VENV)/.installed-llm

.PHONY: help install install-llm demo demo-llm test check proto format bench clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvserve needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

$(LLM): pyproject.toml $(DEV)
	$(BIN)/python -m pip install --quiet -e '.[dev,llm]'
	@touch $@

install: $(DEV)  ## the environment with everything but the real model

install-llm: $(LLM)  ## the environment with torch and the real model

demo: $(DEV)  ## prefill and decode processes over a real server, Llama-3.1-8B geometry
	$(BIN)/kvserve demo

demo-llm: $(LLM)  ## a real model: process A prefills, process B continues from fetched KV
	HF_HUB_OFFLINE=1 $(BIN)/kvserve demo-llm

test: $(DEV)  ## the whole test suite (with the real model where the llm extra is installed)
	$(BIN)/python -m pytest $(TESTS)

check: $(DEV)  ## format, lint, types, import contracts, stubs up to date, tests importable
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_stubs.py
	$(BIN)/python -m pytest --collect-only -qqq tests

proto: $(DEV)  ## regenerate kvserve/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. kvserve/v1/kvserve.proto

format: $(DEV)  ## apply formatting and safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV)  ## fetch, store, lookup, planes, concurrency and metadata, against ceilings taken in the same run
	$(BIN)/kvserve bench fetch
	$(BIN)/kvserve bench store
	$(BIN)/kvserve bench lookup
	$(BIN)/kvserve bench planes --geometry all
	$(BIN)/kvserve bench concurrency --workers 1 --workers 2
	$(BIN)/kvserve bench metadata --root /dev/shm

clean:  ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
