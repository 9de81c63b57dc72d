# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# Both can be run again at once: what is done is not done twice.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.10,$(if $(shell python$(v) -c 'print(1)' 2>/dev/null),python$(v))))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The pinned set is that of Python 3.11; some of its versions do not exist for 3.10.
PINNED = $(shell $(BIN)/python -c 'import sys; print("--constraint constraints-cpu.txt" * (sys.version_info[:2] == (3, 11)))')

RUN := runs/quickstart
DATA := data/quickstart
SAMPLE := data_prep/sample/medserl_sample.csv

.PHONY: help quickstart test lint format clean

help:
	@echo "make quickstart  install, prepare the sample data, train 12 steps on the CPU, show a game"
	echo "make test        install, run all tests"
	echo "make lint        install, ruff and mypy --strict"
	echo "make format      install, reformat the code"
	echo "make clean       remove the environment and what the quickstart made"

quickstart: $(RUN)/.complete
	@$(BIN)/medserl show $(RUN)

test: $(VENV)/.dev
	@echo "== tests"
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	@echo "== ruff, mypy"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	@rm -rf $(VENV) $(RUN) $(DATA)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed; give one with PYTHON=/path/to/python" >&2; exit 1; }
	echo "== virtual environment in $(VENV), from $(PYTHON)"
	$(PYTHON) -m venv $(VENV)

# torch first and by exact version: verl's open range would take another build of it.
$(VENV)/.cpu: pyproject.toml constraints-cpu.txt | $(VENV)/bin/python
	@echo "== installing torch"
	$(PIP) install torch==2.13.0
	echo "== installing medserl-agentloop[cpu] (about 2 GB, 2 to 4 minutes)"
	$(PIP) install $(PINNED) --editable '.[cpu]'
	touch $@

$(VENV)/.dev: $(VENV)/.cpu
	@echo "== installing what the tests need"
	$(PIP) install $(PINNED) --editable '.[cpu,dev,eval]'
	touch $@

$(DATA)/train.parquet: $(SAMPLE) $(wildcard prompts/medserl/*/*.jinja) | $(VENV)/.cpu
	@echo "== sample notes to parquet"
	$(BIN)/python data_prep/medec_to_parquet.py --input $(SAMPLE) --output $(DATA)

$(RUN)/.complete: | $(DATA)/train.parquet
	@echo "== training; the full log is $(RUN)/train.log"
	mkdir -p $(RUN)
	$(BIN)/python -m verl.trainer.main_ppo +recipes=quickstart 2>&1 | tee -a $(RUN)/train.log \
		| sed -nu 's/.*\(\[medserl\].*\)/\1/p' \
		|| { tail -n 40 $(RUN)/train.log >&2; exit 1; }
	touch $@
