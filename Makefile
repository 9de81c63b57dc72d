# Two commands do everything on a fresh machine: `make quickstart` and `make test`; `make quickstart-sglang` and
# `make test-sglang` do it with the real SGLang engine. Each can be run again; it skips the steps that are done.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach v,3.11 3.12,$(if $(shell python$(v) -c 'print(1)' 2>/dev/null),python$(v))))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINNED := --constraint constraints-cpu.txt

# SGLang has an environment of its own: nothing else needs its packages.
SGLANG_VENV ?= .venv-sglang

# And so has the set for GPUs, which is tested here without one: 10 GB.
SHIPPED_VENV ?= .venv-shipped

# Three processes, for real runs mostly wait for Ray to start; they take the files of tests in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: help quickstart test test-all test-fast test-mutations learn test-learn quickstart-sglang test-sglang sglang-env test-shipped lint format clean

help:
	@echo "make quickstart  install, train both roles for 16 steps on the CPU, write the page, say what was gained"
	echo "make test        install, run the tests, some real runs among them"
	echo "make test-all    the same with the longest real runs, which CI leaves out"
	echo "make test-fast   the same without real runs and other processes"
	echo "make test-mutations  install, give parsers, readers, records, judge clients and templates 1,000,000 mutated inputs"
	echo "                 each, damage 5,000 files, and draw all examples of the property tests, in a quarter of an hour"
	echo "make quickstart-sglang, make test-sglang, make sglang-env"
	echo "                 the same with rollouts by SGLang, in an environment of its own; or that environment alone"
	echo "make test-shipped  install the packages of a GPU run on Python 3.12 (10 GB) and run here, without a GPU, the quickstart"
	echo "                 and the fast tests; compile the kernels of a run for two cards"
	echo "make learn       install, train both roles in the toy clinic from three seeds, measure and draw them"
	echo "make lint        install, ruff and mypy --strict"
	echo "make format      install, reformat the code"
	echo "make clean       remove the environment and what the quickstart made"

quickstart: $(VENV)/.cpu
	@$(BIN)/medserl quickstart

test: $(VENV)/.dev
	@echo "== tests"
	$(PYTEST) -m 'not long and not learn and not mutate'

test-all: $(VENV)/.dev
	@echo "== tests, with the longest runs"
	$(PYTEST)

test-fast: $(VENV)/.dev
	@echo "== tests without real runs"
	$(PYTEST) -m 'not slow and not learn and not mutate'

test-mutations: $(VENV)/.dev
	@echo "== 1,000,000 mutated inputs for each of the five targets of tests/fuzz"
	printf '%s\n' parsers templates readers records judge_answers \
		| xargs -P 2 -I{} $(BIN)/python tests/fuzz/run.py {} --runs 1000000
	echo "== all examples of the property tests"
	$(PYTEST) --hypothesis-profile=thorough -m 'not slow and not learn and not mutate'

learn: $(VENV)/.dev
	@$(BIN)/python -m experiments.learning.run headline --results runs/learn/results
	$(BIN)/python -m experiments.learning.pictures headline --results runs/learn/results

test-learn: $(VENV)/.dev
	@echo "== self-play that learns"
	$(BIN)/python -m pytest -m learn --capture=no

quickstart-sglang: sglang-env
	@$(SGLANG_VENV)/bin/medserl quickstart --recipe '[quickstart,sglang_cpu]' --folder runs/quickstart_sglang

test-sglang: sglang-env
	@echo "== tests of the SGLang rollout"
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang_cpu

sglang-env: $(SGLANG_VENV)/.sglang

test-shipped: $(SHIPPED_VENV)/.shipped
	@source $(SHIPPED_VENV)/bin/activate
	rm -rf runs/shipped
	medserl quickstart --folder runs/shipped
	python -m pytest -m 'not slow and not learn and not mutate'
	python -m pytest --capture=no tests/planning/test_kernels.py

lint: $(VENV)/.dev
	@echo "== ruff, mypy"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	@rm -rf $(VENV) $(SGLANG_VENV) $(SHIPPED_VENV) runs/quickstart runs/quickstart_sglang runs/shipped runs/learn data/learn data/learn_no_rewordings data/quickstart

$(VENV)/bin/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
		|| { echo "Python 3.11 or 3.12 is needed; give one with PYTHON=/path/to/python" >&2; exit 1; }
	echo "== virtual environment in $(VENV), from $(PYTHON)"
	$(PYTHON) -m venv $(VENV)

# What the tests need comes in one go with the rest: pip takes half a minute to look through it again.
$(VENV)/.cpu: EXTRAS := cpu
$(VENV)/.dev: EXTRAS := cpu,dev,eval

# torch first and by exact version: verl's open range would take another build of it. pip would compile on one core only;
# nobody imports the packages' tests, and some packages hold files that this Python cannot compile.
$(VENV)/.cpu $(VENV)/.dev: pyproject.toml constraints-cpu.txt | $(VENV)/bin/python
	@echo "== installing torch"
	$(PIP) install --no-compile torch==2.13.0
	echo "== installing medserl-agentloop[$(EXTRAS)] (about 2 GB, 2 to 4 minutes)"
	$(PIP) install --no-compile $(PINNED) --editable '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -qq --workers 0 -x /tests/ $(VENV)/lib || true
	touch $(VENV)/.cpu $@

$(SGLANG_VENV)/.sglang: pyproject.toml constraints-cpu.txt constraints-sglang.txt
	@test "$$($(PYTHON) -c 'import sys; print(sys.version_info[:2])')" = "(3, 11)" \
		|| { echo "SGLang's pinned set is for Python 3.11; give one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(MAKE) --no-print-directory VENV=$(SGLANG_VENV) $(SGLANG_VENV)/.dev
	echo "== installing SGLang (about 350 MB, 1 minute)"
	$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --requirement constraints-sglang.txt
	touch $@

$(SHIPPED_VENV)/.shipped: pyproject.toml constraints-gpu.txt
	@echo "== installing constraints-gpu.txt (10 GB, 3 minutes)"
	python3.12 -m venv $(SHIPPED_VENV)
	$(SHIPPED_VENV)/bin/pip install --quiet --no-deps --requirement constraints-gpu.txt --editable .
	$(SHIPPED_VENV)/bin/pip install --quiet hatchling hypothesis matplotlib pytest-timeout pytest-xdist rouge scikit-learn
	touch $@ $(SHIPPED_VENV)/.cpu
