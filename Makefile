# Every target first prepares the virtual environment and the servers for the tests.

# The Python for .venv. If it is empty, scripts/choose-python selects the fastest one on this machine.
PYTHON ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
LEFT_OUT := chaos or soak
# Many tests wait for a deadline or a server, so each core runs two workers.
WORKERS ?= $(shell expr 2 '*' $$(nproc))

# The tests start hundreds of Python programs, and each would compile all of limitforge again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-lowest check lint format generate bench chaos soak mutants servers

help: ## show this list
	@echo "limitforge: targets (ARGS=... is passed on, as in: make test ARGS='-k window')"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything for development

demo: $(STAMP) ## run the service with a tenant to try, on nothing but Python
	@$(BIN)/limitforge demo $(ARGS)

test: $(STAMP) servers ## the whole suite, as CI runs it
	@LIMITFORGE_TEST_PROFILE=ci $(PYTEST) -n $(WORKERS) --dist worksteal --durations 10 --durations-min 1 \
		-m "not ($(LEFT_OUT))" $(ARGS)

test-fast: $(STAMP) servers ## the suite without tests that start programs, in under a minute
	@LIMITFORGE_TEST_PROFILE=fast $(PYTEST) -n auto --dist worksteal -m "not slow and not chaos and not soak" $(ARGS)

test-lowest: $(STAMP) servers ## a small suite with the lowest, then with the newest versions of all dependencies
	@scripts/test-versions lowest $(ARGS)
	@scripts/test-versions newest $(ARGS)

check: LEFT_OUT := chaos or soak or lint
check: lint test ## lint, then test; run it before you push

lint: $(STAMP) ## check formatting, lint, types and import layers
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

generate: $(STAMP) ## write limiter_sync.py and docs/reference/settings.md from their sources
	@$(BIN)/python scripts/generate_sync.py
	@$(BIN)/python scripts/generate_reference.py

format: $(STAMP) ## format the code and fix lint errors
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) servers ## compare limitforge with its peers in one run
	@scripts/ensure-servers wrk
	@$(BIN)/python -m bench $(ARGS)

chaos: $(STAMP) servers ## kill, pause and restart servers under load; MINUTES=... and SEED=... as for soak
	@$(call only,chaos)

soak: $(STAMP) servers ## random search for errors; MINUTES=10 sets its duration, SEED=... repeats a run
	@$(call only,soak)

mutants: $(STAMP) servers ## plant deliberate bugs and verify that tests find them (ARGS='lua': only in files with this name)
	@$(BIN)/python -m tests.mutants $(ARGS)

# pytest exits with 5 when no test has the marker.
define only
status=0; LIMITFORGE_TEST_PROFILE=soak LIMITFORGE_TEST_MINUTES=$(MINUTES) LIMITFORGE_TEST_SEED=$(SEED) $(PYTEST) -m $(1) $(ARGS) || status=$$?; \
if [ $$status -eq 5 ]; then echo "No test is marked '$(1)' (or ARGS deselected all): nothing was run."; else exit $$status; fi
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
