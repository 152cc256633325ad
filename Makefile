# make demo    train a real 135M model until anyone can see that it learned
# make classic the stages of docs/from_scratch.md: SFT, reward model, PPO, DPO
# make test    everything that runs on a CPU machine
# make check   format, lint, types, import layers, fast tests
# make lint    check without its tests
# make bench   every benchmark, side by side with its peer (alone on the machine, please)
# make docs    pages and figures that are made from the code
# make clean   what the others built; runs/ and models/ stay
#
# MODEL=path make demo      takes a model that is already here: a folder or a .gguf file; nothing is downloaded
# GSM8K=folder SOLUTIONS=file STEPS=2 make classic    data that is already here; fewer steps
# WORKERS=4 make test       test processes; 2 unless said otherwise

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo classic test check lint style types fast bench docs clean

PYTHON  ?= python3
WORKERS ?= 2
MODEL   ?=
BIN     := .venv/bin
# The versions that the tests ran with; docs/install.md has torch for a CPU or a GPU.
INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
# Two test processes with two threads each fight over the cores; one thread each does not. Bytecode is written, because
# many tests start processes that would compile every module anew.
SINGLE  := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
# Every test run writes checkpoints and waits for the disk; in memory, where a gigabyte is free, it does not wait.
FREE_KB := df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }'
MEMORY   = $(shell test -w /dev/shm && test "$$($(FREE_KB))" -gt 1000000 && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)
PYTEST   = $(SINGLE) $(MEMORY) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; set PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[demo]'
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[dev]'
	@touch $@ .venv/demo.stamp

demo: .venv/demo.stamp
	@$(BIN)/python scripts/demo.py $(if $(MODEL),--model '$(MODEL)')

classic: .venv/dev.stamp
	@$(BIN)/python scripts/classic.py $(if $(GSM8K),--gsm8k '$(GSM8K)') $(if $(SOLUTIONS),--solutions '$(SOLUTIONS)') $(if $(STEPS),--steps '$(STEPS)')

test: .venv/dev.stamp
	$(PYTEST)

# mypy needs one core: it runs beside the tests.
check: style
	@$(MAKE) --no-print-directory --jobs=2 types fast

lint: style types

style: .venv/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/dev.stamp
	@text=$$({ $(BIN)/mypy && PYTHONPATH=src $(BIN)/lint-imports; } 2>&1); code=$$?; printf '\n%s\n' "$$text"; exit $$code

fast: .venv/dev.stamp
	$(PYTEST) -m 'not slow'

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks

docs: .venv/dev.stamp
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python scripts/bias_page.py

clean:
	rm -rf build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .venv
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
