# The commands that people type. Each is idempotent; what is done costs seconds.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Addresses and credentials only (see .env.example); values of a run are in params.yaml.
-include .env
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PREFECT_HOME ?= $(CURDIR)/.prefect
export PREFECT_API_URL MLFLOW_TRACKING_URI
export DVC_NO_ANALYTICS = 1
export DO_NOT_TRACK = 1
ifeq ($(strip $(PREFECT_API_URL)),)
unexport PREFECT_API_URL
endif
ifeq ($(strip $(MLFLOW_TRACKING_URI)),)
unexport MLFLOW_TRACKING_URI
endif

.PHONY: help setup demo test lint prefect mlflow lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## .venv with the locked requirements

$(READY): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
	touch $@

demo: setup ## the whole pipeline on params.yaml, through Prefect
	$(BIN)/python -m flows.demo

test: lint ## format, lint, types, tests
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: setup ## format, lint and types alone
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

prefect: setup ## Prefect's UI and the deployment behind Run and Retry
	@$(BIN)/python -m flows.ui prefect

mlflow: setup ## MLflow's UI
	@$(BIN)/python -m flows.ui mlflow

lock: setup ## requirements.lock from pyproject.toml (on the oldest Python supported, 3.11)
	$(BIN)/pip-compile --quiet --extra dev --strip-extras --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file requirements.lock pyproject.toml
	sed -i -e 's/^torch==\([0-9.]*\)+.*/torch==\1/' -e '/^#/d' -e '/^$$/d' requirements.lock # any build of that version

# Engine environment (make engine, make test-engine): its own file, if it is there.
-include engine.mk

clean: setup ## work that no stage can use any more
	$(BIN)/eagle3 clean
