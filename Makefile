# Two commands matter: `make serve` and `make test`. Both make .venv when it is not there.
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2-135m-instruct
PORT   ?= 8000
ARGS   ?=
# Extras that a development environment gets; `make test DEV=dev,aot` adds the compilers for TPUs and GPUs.
DEV    ?= dev
CLIENTS_VENV ?= .venv-clients

BIN := $(VENV)/bin
# --no-compile: Python writes the bytecode of the modules it imports when it first imports them; that of
# every module of jax, scipy and the rest would add 100 MB that nothing reads.
INSTALL := -m pip --disable-pip-version-check install --no-compile --quiet
PIP := $(BIN)/python $(INSTALL)

.PHONY: help serve test test-clients lint typecheck format bench notebook clean
.DEFAULT_GOAL := help

help:  ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# The stamps are older than pyproject.toml exactly when the dependencies may have changed.
$(VENV)/.stamp-run: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing jaxserve into $(VENV)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing jaxserve and its development tools into $(VENV)"
	@$(PIP) -e '.[$(DEV)]'
	@touch $@

# Client libraries are large and narrow one another's versions: an environment of their own.
$(CLIENTS_VENV)/.stamp: pyproject.toml
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@echo "installing jaxserve and client libraries into $(CLIENTS_VENV)"
	@$(CLIENTS_VENV)/bin/python $(INSTALL) -e '.[clients]'
	@touch $@

serve: $(VENV)/.stamp-run  ## serve MODEL on PORT with the flags in ARGS
	@exec $(BIN)/jaxserve serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.stamp-dev  ## run the tests; ARGS goes to pytest
	$(BIN)/python -m pytest $(ARGS)

test-clients: $(CLIENTS_VENV)/.stamp  ## run the tests with real client libraries; ARGS goes to pytest
	# What the libraries warn of is theirs to mend: here alone a warning is no error.
	REQUIRE_CLIENTS=1 $(CLIENTS_VENV)/bin/python -m pytest -W default tests/clients $(ARGS)

lint: $(VENV)/.stamp-dev  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.stamp-dev  ## check types
	$(BIN)/mypy

format: $(VENV)/.stamp-dev  ## put the files in style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.stamp-dev  ## the fixed trace on the engine alone, beside the roofline
	$(BIN)/jaxserve bench offline $(MODEL) $(ARGS)

notebook: $(VENV)/.stamp-dev  ## execute the notebooks and keep their outputs
	MPLBACKEND=agg $(BIN)/python -m jupyter execute --inplace notebooks/*.ipynb

clean:  ## remove the environments and the tools' caches (not the downloaded models)
	rm -rf $(VENV) $(CLIENTS_VENV) .venv313 dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
