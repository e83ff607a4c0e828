# Every target prepares what it needs: the virtual environment, and the servers that the tests talk to.

# Which Python .venv is made with. If it is empty, scripts/choose-python takes the fastest one here.
PYTHON ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
LEFT_OUT := chaos or soak
# Many tests wait for a deadline or a server, so each core has two of them.
WORKERS ?= $(shell expr 2 '*' $$(nproc))

# The tests start hundreds of Python programs: each would compile all of limitforge anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-lowest check lint format bench chaos soak mutants servers

help: ## show this list
	@echo "limitforge: what make can do (ARGS=... is handed on, as in: make test ARGS='-k window')"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything that development needs

demo: $(STAMP) ## run the service with a tenant to try, on nothing but Python
	@$(BIN)/limitforge demo $(ARGS)

test: $(STAMP) servers ## the whole suite, as CI runs it
	@LIMITFORGE_TEST_PROFILE=ci $(PYTEST) -n $(WORKERS) --dist worksteal --durations 10 --durations-min 1 \
		-m "not ($(LEFT_OUT))" $(ARGS)

test-fast: $(STAMP) servers ## the suite without what starts programs, in under a minute
	@LIMITFORGE_TEST_PROFILE=fast $(PYTEST) -n auto --dist worksteal -m "not slow and not chaos and not soak" $(ARGS)

test-lowest: $(STAMP) servers ## a small suite with the lowest versions of all dependencies, then with the newest
	@scripts/test-versions lowest $(ARGS)
	@scripts/test-versions newest $(ARGS)

check: LEFT_OUT := chaos or soak or lint
check: lint test ## lint, then test: run it before you push

lint: $(STAMP) ## formatting, ruff, mypy and the import layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP) ## let ruff format the code and mend what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) servers ## limitforge beside its peers, in one run
	@scripts/ensure-servers wrk
	@$(BIN)/python -m bench $(ARGS)

chaos: $(STAMP) servers ## servers are killed, paused and restarted under load; MINUTES=... and SEED=... as for soak
	@$(call only,chaos)

soak: $(STAMP) servers ## random search for disagreements; MINUTES=10 ends it by itself, SEED=... draws the same again
	@$(call only,soak)

mutants: $(STAMP) servers ## plant deliberate bugs and see that tests find them (ARGS='lua': only those in files named so)
	@$(BIN)/python -m tests.mutants $(ARGS)

# pytest answers 5 when nothing carries the marker.
define only
status=0; LIMITFORGE_TEST_PROFILE=soak LIMITFORGE_TEST_MINUTES=$(MINUTES) LIMITFORGE_TEST_SEED=$(SEED) $(PYTEST) -m $(1) $(ARGS) || status=$$?; \
if [ $$status -eq 5 ]; then echo "No test is marked '$(1)' yet (or ARGS left none): nothing was run."; else exit $$status; fi
endef

servers:
	@scripts/ensure-servers redis-server openssl postgres nginx

$(STAMP): pyproject.toml constraints.txt
	@if [ -n "$(PYTHON)" ] || ! $(BIN)/python -c '' 2>/dev/null; then \
		python=$$(scripts/choose-python $(PYTHON)) && \
		PYTHON="$$python" scripts/ensure-servers python-venv && \
		"$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing into $(VENV) (a minute or so the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@
	@echo "$(VENV) is ready."
