# `make demo` and `make test` work on a fresh clone: each first makes .venv, once, from pyproject.toml and constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep ^torch== constraints.txt)
JOBS ?= 2
DRAW := $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
SAMPLE ?= --sample=16 --draw=$(DRAW)
NEWEST := 3.9.0
RELEASES ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
# What breaks most often, of each layer: the language, the API, every backend, modules, rules of graphs, imports and caches.
CORE := tests/ir tests/conformance/test_conformance.py tests/api/test_sdpa*.py tests/api/test_jagged*.py tests/api/test_errors.py \
	tests/nn/test_attention*.py tests/fusion/test_rules.py tests/fusion/test_functionalize.py tests/test_layers.py tests/test_masks.py tests/test_scores.py \
	tests/test_blocks.py tests/test_caches.py
say = @printf '== %s\n'

# Progress is seen as it is made, into a file too. Bytecode is kept: tests start many processes that import foci.
export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv wheel kernels-wheel hub resolve demo check test test-all check-cache interpreted newest matrix matrix-quick matrix-install docs gallery reference notebooks site site-check lint format bench gate clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## the environment that every other target uses

# torch comes first and alone: the constraint names a build without CUDA packages where the machine's pip offers one.
$(STAMP): pyproject.toml constraints.txt
	$(say) "environment 1/3: $(VENV), with `$(PYTHON) --version`"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(say) "environment 2/3: $(TORCH), a download of 200 MB or, built for CUDA, 3 GB"
	@$(BIN)/python -m pip install --quiet $(TORCH)
	$(say) "environment 3/3: foci and what its demo and its tests need"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,test]'
	@touch $@

# No settings of this machine's pip count: a wheel or an index that others lack would hide a pin that PyPI cannot meet.
resolve: $(STAMP) ## check that pip can install foci and its tests from PyPI alone
	$(say) "what pip would install from PyPI alone"
	@PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT=/dev/null PIP_EXTRA_INDEX_URL= PIP_FIND_LINKS= $(BIN)/python -m pip install --quiet \
		--dry-run --ignore-installed --constraint constraints.txt '.[demo,docs,test]'

demo: $(STAMP) ## a trained transformer on foci; pictures in demo-output/
	$(say) "demo: one to four minutes on two cores; pictures go to demo-output/"
	@$(BIN)/foci demo

check: $(STAMP) ## lint, types and a core of the tests, in two minutes
	@$(MAKE) --no-print-directory lint
	$(say) "core of the tests on $(JOBS) processes, each of which first imports torch and collects"
	@$(PYTEST) -q --sample=24 --draw=$(DRAW) $(CORE) $(ARGS)

test: $(STAMP) ## the suite, with a sixteenth of the largest tests' cases and a quarter of the slow tests
	$(say) "tests with $(SAMPLE) on $(JOBS) processes: half a minute to collect, then a line for every 70 tests"
	@$(PYTEST) --durations=15 $(SAMPLE) $(ARGS)

test-all: $(STAMP) ## every case of every test: more than an hour
	$(say) "all cases of all tests on $(JOBS) processes: a minute to collect, then a line for every 70 tests"
	@$(PYTEST) --durations=15 $(ARGS)

# Conformance tests call kernels directly; these call the library, again and again, through every entry point.
check-cache: $(STAMP) ## tests of repeated calls, in which every cache builds anew what it returns and compares
	$(say) "repeated calls with FOCI_CHECK_CACHE=1 and $(SAMPLE) on $(JOBS) processes"
	@FOCI_CHECK_CACHE=1 $(PYTEST) -q $(SAMPLE) tests/test_cache_check.py tests/api/test_recall.py tests/api/test_call_spec.py \
		tests/api/test_handed_over.py tests/api/test_flex.py tests/nn/test_search.py tests/backends/test_aten.py \
		tests/backends/test_dropout_backends.py $(ARGS)

# Without a GPU these tests are skipped by `make test`: they launch kernels.
interpreted: $(STAMP) ## tests that launch GPU kernels, in Triton's interpreter
	$(say) "GPU kernels in Triton's interpreter with $(SAMPLE) on $(JOBS) processes"
	@TRITON_INTERPRET=1 $(PYTEST) -q $(SAMPLE) tests/backends/hopper/test_sums.py tests/backends/hopper/test_ranks.py \
		$(addprefix tests/backends/triton_backend/test_triton_,rows.py splits.py visits.py streams.py slopes.py learned.py) $(ARGS)

newest: $(STAMP) .newest/triton-$(NEWEST).dist-info ## GPU kernels of every kind, compiled by the newest Triton
	PYTHONPATH=.newest $(BIN)/python -c "import triton; assert triton.__version__ == '$(NEWEST)', triton.__file__"
	PYTHONPATH=.newest OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/backends/hopper/test_forward_compile.py \
		tests/backends/hopper/test_backward_compile.py tests/backends/triton_backend/test_triton_compile.py \
		tests/backends/triton_backend/test_triton_compiling.py tests/backends/triton_backend/test_triton_launcher.py \
		-k "compiling or launcher or (bounds and (dropout or 256 or decode or (document and (long or 64))))" $(ARGS)

.newest/triton-$(NEWEST).dist-info:
	rm -rf .newest
	$(BIN)/python -m pip install --quiet --no-deps --target .newest triton==$(NEWEST)

matrix: ## contract tests on each torch, or on RELEASES="2.11.0 newest"
	$(PYTHON) tests/matrix.py --releases "$(RELEASES)" -n $(JOBS) $(SAMPLE) $(ARGS)

matrix-quick: ## the tests that a new release breaks first, on the same releases
	$(PYTHON) tests/matrix.py --only quick --releases "$(RELEASES)" -n $(JOBS) $(SAMPLE) $(ARGS)

matrix-install: ## the environments of matrix, without running tests
	$(PYTHON) tests/matrix.py --only install --releases "$(RELEASES)"

# The wheel is built from the sdist, as PyPI's users do, and tried in an environment that holds torch and nothing else.
wheel: $(STAMP) ## sdist and wheel in dist/, tried in a new environment with torch alone
	rm -rf dist .wheel
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .wheel
	.wheel/bin/python -m pip install --quiet $(TORCH)
	.wheel/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd .wheel && bin/python ../tests/try_wheel.py

ARCH ?= sm_90
SET ?= common

kernels-wheel: $(STAMP) ## dist/foci_kernels_*.whl: compiled kernels for ARCH (sm_90 by default), see docs/kernel-packs.md
	$(BIN)/python kernels_wheel/build.py $(ARCH) dist "$(SET)"

# Without site (-S) the environment's packages are there and foci, which is linked into them, is not.
hub: $(STAMP) ## build for the kernels library in kernels_hub/dist, tried without foci
	$(BIN)/python kernels_hub/build.py kernels_hub/dist
	PYTHONPATH=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") $(BIN)/python -S \
		kernels_hub/try_build.py kernels_hub/dist

docs: $(STAMP) ## the examples in README.md, docs/, notebooks and docstrings
	$(BIN)/python -m pytest tests/test_readme.py tests/test_docstrings.py tests/test_notebooks.py $(ARGS)

gallery: $(STAMP) ## docs/gallery.md and its pictures, from the examples of masks and scores
	$(BIN)/python docs/gallery.py

reference: $(STAMP) ## docs/api/, an entry for each public name
	$(BIN)/python docs/reference.py

notebooks: $(STAMP) ## run docs/notebooks/ and keep their outputs
	$(BIN)/python docs/notebooks.py

site: $(VENV)/.site-installed ## the documentation as a site, in site/: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

site-check: site ## pages, links and search of site/ in a headless Chromium
	$(BIN)/python docs/check_site.py

$(VENV)/.site-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

lint: $(STAMP) ## ruff and strict mypy
	$(say) "ruff: rules and format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(say) "mypy --strict"
	@$(BIN)/mypy

format: $(STAMP) ## mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## the benchmarks, on an idle machine
	set -e; for script in $(filter-out benchmarks/gate.py benchmarks/gate_cases.py benchmarks/attending.py benchmarks/measure.py benchmarks/pages.py benchmarks/report.py benchmarks/speed_plot.py benchmarks/bench_report.py $(wildcard benchmarks/gpu_*.py) $(wildcard benchmarks/hopper_*.py) benchmarks/padding.py,$(wildcard benchmarks/*.py)) benchmarks/report.py benchmarks/speed_plot.py; do echo "== $$script"; $(BIN)/python $$script; done

gate: $(STAMP) ## the speed of this checkout beside the last tag or commit, or BASE=v0.1.0; fails where a case is 5 % slower
	$(say) "speed, two commits in turns: about a minute"
	@$(BIN)/python benchmarks/gate.py $(BASE) $(ARGS)

clean: ## caches and results, not the environments
	rm -rf build dist demo-output site .newest .wheel .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
