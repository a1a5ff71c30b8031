# Two commands: `make bench` measures this machine and draws the figure, `make test` runs everything that must hold.
# `make selfcheck` measures the measuring, for five minutes, on a machine with nothing else to do; then it tries to break
# what reads files, and kills runs, for twenty minutes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch, without the CUDA packages: make bench PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_OPTIONS ?=
RUN_OPTIONS ?=

.PHONY: bench peers test selfcheck lint clean

bench: $(VENV)/installed
	$(BIN)/attnbench run lra
	$(BIN)/attnbench plot results/lra

# The public packages, as variants peer.NAME, beside ours. RUN_OPTIONS goes to attnbench run: --process as-shipped, say.
peers: $(VENV)/installed-peers
	$(BIN)/attnbench run peers $(RUN_OPTIONS)
	$(BIN)/attnbench plot results/peers --figure peers

test: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q

selfcheck: $(VENV)/installed-dev
	$(BIN)/pytest -q -s --timeout=1800 $(wildcard tests/benchmarks/live_*.py)
	ATTNBENCH_SECONDS=1 $(BIN)/pytest -q tests/suite/test_hostile.py
	ATTNBENCH_CASES=20000 ATTNBENCH_KILLS=200 $(BIN)/pytest -q --timeout=3600 --durations=0 --durations-min=1 \
	  tests/test_fuzz.py tests/test_fuzz_commands.py tests/suite/test_suite_fuzz.py tests/run/test_survival.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnbench needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -c constraints.txt $(PIP_OPTIONS) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install -q -c constraints.txt $(PIP_OPTIONS) -e '.[dev]'
	touch $@

# Without looking for dependencies: the list is complete, and torch stays the one that is there. fast-transformers is
# compiled, for minutes: without a C++ compiler its rows are unsupported. It is not shown nvcc, since its CUDA code is
# for GPUs that CUDA no longer knows.
$(VENV)/installed-peers: $(VENV)/installed plugins/peers/pyproject.toml plugins/peers/requirements.txt
	$(BIN)/python -m pip install -q --no-deps $(PIP_OPTIONS) -r plugins/peers/requirements.txt -e plugins/peers
	PATH=$(abspath $(BIN)):/usr/bin:/bin $(BIN)/python -m pip install -q --no-deps --no-build-isolation \
	  pytorch-fast-transformers==0.4.0 || echo "going on without fast-transformers, which could not be compiled"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
