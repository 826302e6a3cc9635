# make demo    quantize, prove and ask SmolLM2-135M-Instruct, from nothing: two cores, no GPU, about five minutes
# make test    the tests that need no GPU
# make lint    ruff, pyright, and who may import whom
# make setup   the virtual environment the others use
#
# PYTHON=python3.12 picks the interpreter, VENV=dir another environment.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PYTHON_BIN := $(VENV)/bin/python
PIP := $(PYTHON_BIN) -m pip
ARGS ?=

.PHONY: setup references demo test lint

setup: $(VENV)/.installed

# A version of the constraints or of the project's metadata installs once; the stamp makes the next time quick.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(PYTHON_BIN) || $(PYTHON) -m venv $(VENV)
	$(PYTHON_BIN) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fp4pipe needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# FlashInfer's plain-PyTorch references, which tests hold our numerics against; its CUDA dependencies are left out.
references: $(VENV)/.references

$(VENV)/.references: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --no-deps flashinfer-python apache-tvm-ffi
	touch $@

demo: setup
	$(PYTHON_BIN) -m fp4pipe run recipes/smollm2-135m.yaml $(ARGS)

test: setup
	$(PYTHON_BIN) -m pytest $(ARGS)

lint: setup
	$(PYTHON_BIN) -m ruff check
	$(PYTHON_BIN) -m ruff format --check
	$(PYTHON_BIN) -m pyright --pythonpath $(PYTHON_BIN)
	$(PYTHON_BIN) -m pytest --quiet tests/test_imports.py
