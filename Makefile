# Coatcheck's tasks. A machine with Python 3.11+ and make is enough: every target that needs the
# environment builds it first, from the lock, and rebuilds it when the lock has changed.
#
# The environment has two stages. The demo needs the first: the runtime and a Postgres. Everything else
# needs the second too, which adds the packages for tests and checks to the same .venv.

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
REPLICAS ?= 3
TASKS ?= 2000
MINUTES ?= 1.2
SEED ?=
SIMULATE_ARGS ?=
CHAOS_ARGS ?=
BENCH_ARGS ?=
SCALE_ARGS ?=
SOAK_ARGS ?=
HOSTILE_ARGS ?=
NEWCOMER_ARGS ?=
PEERS_ARGS ?=
PYTHONS_ARGS ?=
N ?= 20000
FIRST ?= 0

VENV := .venv
BIN := $(VENV)/bin
SOURCES := worker broker store
# Directories that appear in every checkout sooner or later; the linter takes the ones that hold Python.
LINTED := $(SOURCES) tests $(wildcard examples bench)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z][a-z-]*:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.project ## Three workers, slow peers, one kill -9 on the way: see that nothing is lost
	$(BIN)/coatcheck demo $(DEMO_ARGS)

.PHONY: test
test: patience venv ## Run the tests (PYTEST_ARGS="-k park -x" narrows them)
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

.PHONY: test-pythons
test-pythons: venv ## Test engine and flows on every Python 3.11+ of this machine (PYTHONS_ARGS="--only 3.13")
	$(BIN)/python -m tests.pythons $(PYTHONS_ARGS)

.PHONY: newcomer
newcomer: venv ## Walk a newcomer's path in a fresh clone: demo, README, a new project, examples in any order (SEED=1)
	$(BIN)/python -m tests.first_run $(if $(SEED),--seed $(SEED)) $(NEWCOMER_ARGS)

.PHONY: hostile
hostile: MINUTES = 60
hostile: venv ## Attack replicas in every known way at once, beside clients that behave (MINUTES=60)
	$(BIN)/python -m tests.hostile --minutes $(MINUTES) $(HOSTILE_ARGS)

.PHONY: check
check: venv ## Lint, formatting, types and import arrows: what CI checks
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

.PHONY: fmt
fmt: venv ## Fix what the linter can fix, then format
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

.PHONY: simulate
simulate: venv ## Simulate N schedules of faults from seed FIRST, then every crash there is for one task
	$(BIN)/python -m tests.simulation --first $(FIRST) --count $(N) $(SIMULATE_ARGS)
	$(BIN)/python -m tests.simulation --exhaustive $(SIMULATE_ARGS)
	$(BIN)/python -m tests.simulation --bugs --count 6000 $(SIMULATE_ARGS)

.PHONY: chaos
chaos: venv ## Kill, freeze, cut and fill up everything, then check (TASKS=50000 MINUTES=30 SEED=1)
	$(BIN)/python -m tests.chaos --tasks $(TASKS) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

.PHONY: bench
bench: venv ## Measure speed and cost beside hand-written loops (BENCH_ARGS="--quick --rows fan-4,batched")
	$(BIN)/python -m bench $(BENCH_ARGS)

.PHONY: scale
scale: TASKS = 1000000
scale: venv ## Measure what a million parked tasks cost and slow down (TASKS=1000000 SCALE_ARGS="--timeouts 10000")
	$(BIN)/python -m bench.scale --tasks $(TASKS) $(SCALE_ARGS)

.PHONY: bench-peers
bench-peers: venv ## Measure other frameworks beside Coatcheck (PEERS_ARGS="--only dbos --rounds 1" narrows it)
	$(BIN)/python -m bench.peers --docs docs/performance-peers.md $(PEERS_ARGS)

.PHONY: soak
soak: MINUTES = 10
soak: venv ## Keep it busy for a while and plot what it holds (MINUTES=10)
	$(BIN)/python -m bench.soak --minutes $(MINUTES) $(SOAK_ARGS)

.PHONY: up
up: ## Start RabbitMQ, Postgres, workers, sweeper and a peer in containers (REPLICAS=3)
	docker compose up --build --scale worker=$(REPLICAS)

.PHONY: down
down: ## Stop the containers and remove their volumes
	docker compose down --volumes

.PHONY: patience
patience:
	@echo "The whole suite takes a while: it starts servers, kills processes and waits for them." \
		'PYTEST_ARGS="-k park -x" narrows it.'
	@test -e $(VENV)/.dev || echo "Before that, once: $(call count,dev) packages for tests and checks, one to three minutes."

.PHONY: venv
venv: $(VENV)/.project $(VENV)/.dev ## Build the environment in .venv from the lock, with all that tests and checks need

count = $(shell grep -c '^[a-z].*==' requirements/$(1).txt)
INSTALL := $(BIN)/python -m pip install --require-hashes --requirement

# The lock decides what is installed, so a changed lock starts from an empty environment.
$(VENV)/.runtime: requirements/demo.txt requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"Coatcheck needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12" \
		% sys.version_info[:2])'
	@echo "Installing $(call count,demo) packages into $(VENV), the runtime and a Postgres: about half a minute, once"
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) requirements/demo.txt
	@touch $@

# The build backend comes from the lock too; build isolation would fetch an unpinned one.
$(VENV)/.project: pyproject.toml $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing what tests and checks need beside them, $(call count,dev) packages in all: a minute or two, once"
	$(INSTALL) requirements/dev.txt
	@touch $@

UV_VENV := .cache/uv
COMPILE := UV_CUSTOM_COMPILE_COMMAND="make lock" $(UV_VENV)/bin/uv pip compile --quiet --upgrade --universal \
	--python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links

.PHONY: lock
lock: ## Resolve the newest allowed versions and write the lock
	$(PYTHON) -m venv --clear $(UV_VENV)
	$(UV_VENV)/bin/python -m pip install --quiet uv
	$(COMPILE) --group build --output-file requirements/build.txt
	$(COMPILE) pyproject.toml --extra fast --output-file requirements/runtime.txt
	$(COMPILE) pyproject.toml --extra fast --extra embedded --group build --constraint requirements/runtime.txt \
		--constraint requirements/build.txt --output-file requirements/demo.txt
	$(COMPILE) pyproject.toml --all-extras --group dev --constraint requirements/demo.txt \
		--output-file requirements/dev.txt

.PHONY: clean
clean: ## Remove the environment, caches and build output
	rm -rf $(VENV) .cache .coatcheck .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find $(LINTED) -name __pycache__ -type d -prune -exec rm -rf {} +
