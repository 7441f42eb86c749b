# Replayground. `make` lists what can be made. All logic is in Python: deploy/install.py sets up, `replayground` does the rest.
.DEFAULT_GOAL := help
.PHONY: help setup run up down status test check docs bench escapes torture lock clean distclean

FOLDERS := replayground schemas producers sandboxes streams trainer consumers deploy tests bench
BIN := .venv/bin

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: setup ## install, start the field, run the default job on it, show it live (make run ARGS="--seed 1 --exit")
	@$(BIN)/replayground run $(ARGS)

test: check ## install, check, then the whole test suite on its own real broker, registry and servers (ARGS="tests/deploy -k port")
ifdef ARGS
	@$(BIN)/pytest $(ARGS)
else
	@$(BIN)/python -m tests
endif

check: setup ## format, lint, types and imports
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary replayground tests bench
	@$(BIN)/lint-imports > /dev/null || $(BIN)/lint-imports

docs: setup ## write the reference from source, then build the documentation into site/ (dead links are errors)
	@$(BIN)/python -m replayground.deploy.documentation
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

bench: setup ## measure this system beside its peers and the bare parts (ARGS="--quick")
	@$(BIN)/python -m bench $(ARGS)

# `make torture escapes` is one subject of the torture: the attempts are then not made by themselves, too.
TORTURE_ESCAPES := $(and $(filter torture,$(MAKECMDGOALS)),$(filter escapes,$(MAKECMDGOALS)))

escapes: setup ## every attempt to get out of a sandbox, on every isolation here (ARGS="--isolation gvisor")
	@$(if $(TORTURE_ESCAPES),:,$(BIN)/python -m tests.sandboxes.escapes $(ARGS))

torture: setup ## kills, fuzz and simulation at length (ARGS="--quick"); `make torture escapes ARGS="--minutes 5"`: mutated escapes
	@$(BIN)/python -m tests.torture $(if $(TORTURE_ESCAPES),escapes) $(ARGS)

up: setup ## start the field in the background: log, blobs, traces and the web page
	@$(BIN)/replayground up $(ARGS)

down: ## drain and stop the runs and the field
	@$(BIN)/replayground down $(ARGS)

status: ## what is running: the field and its runs
	@$(BIN)/replayground status $(ARGS)

setup: ## install all that is needed, once; nothing is downloaded twice
	@python3 deploy/install.py

lock: ## resolve the Python environment anew and write requirements.lock
	@python3 deploy/install.py lock

clean: ## remove what the tools left behind (environment, downloads and the field stay)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis site
	find $(FOLDERS) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove the environment and the downloads (the field stays)
	rm -rf .venv .tools .cache
