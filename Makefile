# Everything runs in .venv, which `make` makes, and makes again when pyproject.toml changes.
# A variable may be given on the command line: make test ARGS="-k registry" PYTHON=python3.12

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))))
VENV ?= .venv
WORKERS ?= 2
# More arguments for the programs below.
ARGS ?=
# More arguments for installing torch, such as the index that has the build for your hardware.
TORCH_ARGS ?=

BIN := $(VENV)/bin
TORCH := 2.13.0
TORCH_STAMP := $(VENV)/.torch-$(TORCH)
DEMO_STAMP := $(VENV)/.installed-demo
TEST_STAMP := $(VENV)/.installed-test
DOCS_STAMP := $(VENV)/.installed-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all test-slow-sample lint format types imports bench docs check-python clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-22s %s\n", $$1, $$2}'

demo: $(DEMO_STAMP)  ## the main job: embeddings, a conv net and a GPT-2 on the port device, compared with CPU eager
	$(BIN)/torchport demo $(ARGS)

test: $(TEST_STAMP)  ## every test that is not slow
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-all: $(TEST_STAMP)  ## every test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --runslow $(ARGS)

test-slow-sample: $(TEST_STAMP)  ## a random sample of the slow tests; the seed is printed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --slow-sample 20 --slow-budget 420 $(ARGS)

lint: $(TEST_STAMP)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TEST_STAMP)  ## ruff, writing what it can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(TEST_STAMP)  ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(TEST_STAMP)  ## which module may import which
	$(BIN)/lint-imports

bench: $(TEST_STAMP)  ## ratios against PyTorch's own lazy core, CPU eager and torch.compile
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(DOCS_STAMP)  ## the pages as a site, in site/; a link or a name that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

setup: $(TEST_STAMP)  ## .venv with everything the other targets need

clean:  ## remove .venv and caches
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache

check-python:
	@test -n "$(PYTHON)" || { echo "torchport needs Python 3.11 or newer; install one, or say which: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "torchport needs Python 3.11 or newer, but $(PYTHON) is older (or missing); say which to use: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) comes without venv or ensurepip; install them (Debian, Ubuntu: apt install python3-venv; Fedora: dnf install python3-pip)" >&2; exit 1; }

# torch goes first and alone: installed together with packages that take any torch, pip may fetch another one first.
$(TORCH_STAMP): | check-python
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==$(TORCH) $(TORCH_ARGS)
	@touch $@

$(DEMO_STAMP): pyproject.toml $(TORCH_STAMP)
	$(PIP) install -e ".[demo]"
	@touch $@

$(TEST_STAMP): pyproject.toml $(TORCH_STAMP)
	$(PIP) install -e ".[demo,test]"
	@touch $@ $(DEMO_STAMP)

$(DOCS_STAMP): pyproject.toml $(TORCH_STAMP)
	$(PIP) install -e ".[docs]"
	@touch $@
