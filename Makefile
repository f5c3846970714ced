# `make demo` and `make test` work on a fresh machine with Python >= 3.11: each makes .venv and installs what it needs.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin

.PHONY: demo test fast lint clean

demo: .venv/installed  ## train a small GPT for a minute, compress it under a budget, score the file
	$(BIN)/birdie demo

test: .venv/installed  ## everything that must hold: lint, types, all tests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

fast: .venv/installed  ## the tests worth running after every change
	$(BIN)/pytest -n auto -m "not slow"

lint: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check --lint

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "birdie needs Python 3.11 or newer on the PATH" >&2; exit 1; }
	@echo "Installing into .venv (a minute or two, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
