# Everything the project needs beyond Python 3.10 or newer and make, these targets install into .venv by themselves.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# the Debian package of the browser that opens the HTML reports in a test; empty = install none, skip that test
BROWSER ?= chromium

JOBS ?= 2  # test processes

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -q
# strict: an editable install that maps the four code folders into one package, as a tree of links to their files
EDITABLE := --no-build-isolation --config-settings editable_mode=strict -e

# A new or removed file changes this number, an edit does not: the tree of links is remade only when it has to be.
FILES_ID := $(shell find svdq cli calibration kernels -type f ! -path '*/__pycache__/*' | LC_ALL=C sort | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed
LINKED := $(VENV)/.linked-$(FILES_ID)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test lint typecheck demo model texts browser gpu-test clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo '  PYTHON=python3.12 picks the interpreter, TORCH="torch==2.13.0" the build of torch, both at the first set-up'

setup: $(LINKED)  ## virtual environment with all dependencies, in .venv

$(INSTALLED): pyproject.toml
	@echo "set-up: virtual environment in $(VENV) (about 2.1 GB and 3 minutes the first time; several GB with a CUDA build of torch)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up: installing $(TORCH)"
	@$(PIP) install "pip>=23.1" "setuptools>=77" $(TORCH)
	@echo "set-up: installing the other dependencies"
	@$(PIP) install $(EDITABLE) '.[dev]'
	@rm -f $(VENV)/.linked-*
	@touch $@ $(LINKED)

$(LINKED): $(INSTALLED)
	@test -e $@ || { echo "set-up: files were added or removed, linking the package anew (seconds)" && \
		$(PIP) install --no-deps $(EDITABLE) . && rm -f $(VENV)/.linked-*; }
	@touch $@

# pytest, not python -m pytest: that would put the repository's folders svdq and kernels before the installed packages.
test: lint typecheck model texts browser  ## what CI runs: lint, types, and every test that needs no GPU
	@echo "test: pytest"
	@$(VENV)/bin/pytest -m "not gpu" -n $(JOBS) --dist loadfile

lint: setup  ## ruff
	@echo "lint: ruff"
	@$(VENV)/bin/ruff check .

# From inside .venv, where mypy finds the installed package: at the top level it would take the folder svdq for all of it.
typecheck: setup  ## mypy
	@echo "typecheck: mypy (half a minute the first time)"
	@cd $(VENV) && bin/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p svdq

model: setup
	@$(VENV)/bin/python examples/fetch_smollm2.py

texts: setup
	@$(VENV)/bin/python examples/fetch_texts.py

# Where it cannot be installed (no root, no apt-get) the tests that need it are skipped and say so; where it should be
# and is not, that is an error.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		! command -v $$name >/dev/null || exit 0; done; \
	test -n "$(BROWSER)" && test "$$(id -u)" = 0 && command -v apt-get >/dev/null || exit 0; \
	echo "set-up: installing $(BROWSER) for the tests of HTML reports (half a minute; make test BROWSER= goes without)"; \
	install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(BROWSER) >/dev/null; }; \
	install 2>/dev/null || { apt-get update -qq && install; }

demo: model texts  ## quantize a small real language model and measure it (downloads 140 MB the first time)
	@$(VENV)/bin/python examples/demo.py

gpu-test: setup  ## tests of the kernels, on an NVIDIA GPU (installs the cuda extra)
	@$(PIP) install $(EDITABLE) '.[dev,cuda]'
	@$(VENV)/bin/pytest -m gpu tests/gpu

clean:  ## remove the environment, the demo's downloads and every build product
	rm -rf $(VENV) build dist svdq.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
