# `make demo` and `make test` do all the set-up they need: a virtual environment, llama-server
# (found, or built once into the user's cache) and the models.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test check fast format

help:
	@echo "make demo    three conversations on two slots of a real llama-server, with kills in between"
	@echo "make test    every test: format, lint, types, unit, integration, contract, acceptance on the real server"
	@echo "make check   format, lint, types and the fast tests (no llama-server needed)"
	@echo "make format  rewrite the sources in the project's format"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	PYTHONWARNINGS='ignore:Editable installation' \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python scripts/demo.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m 'not real'

test: check
	$(BIN)/python scripts/llama_server.py
	$(BIN)/python -m pytest -q -m real

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
