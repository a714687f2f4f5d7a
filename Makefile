# make demo and make test set up what they need in .venv; make test-gpu and make bench use the python that is there.
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo check test test-more test-slow test-torch test-all lint docs fuzz soak test-gpu sanitize bench coverage clean

help: ## list these commands
	@echo "make TORCH=torch==2.13.0 COMMAND picks a build of torch for .venv; PYTHON=python3.12 the Python that makes it."
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

demo: $(VENV)/ready-demo ## train a small Llama under eager, Inductor and fx_fusion: ARGS="--layers 6 --steps 20 --device cpu"
	$(BIN)/python -m fx_fusion demo $(ARGS)

# Two workers, a file on one of them, the longest first. Which tests belong to which target: tests/seconds.py.
PYTEST := $(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder
check: $(VENV)/ready ## the quickest tests, a case of each fusion and a model: about a minute
	$(PYTEST) -m "not slow and not gpu" --tier check

test: $(VENV)/ready ## the tests that a change needs, in 6 minutes on two quiet cores; no GPU needed
	$(PYTEST) -m "not slow and not gpu" --tier test

test-more: $(VENV)/ready ## the tests that make test leaves out and that are not slow, 13 minutes more
	$(PYTEST) -m "not slow and not gpu" --tier rest

# In another order of files each time, so that a CI whose time is short comes to all of them.
MINUTES ?= 600
ORDER ?= $(shell date +%s)
test-slow: $(VENV)/ready ## the slow tests, 45 minutes on two quiet cores: MINUTES=40 begins none after that
	$(PYTEST) -m slow --minutes $(MINUTES) --shuffle $(ORDER)

# What the package asks of torch's private names, and a model through Inductor.
test-torch: $(VENV)/ready-demo ## a short test on another torch: TORCH=torch==2.15.0 VENV=.venv-2.15.0
	$(BIN)/python -m pip install -q "$(TORCH)" "pytest>=9" "pytest-xdist>=3.8" hypothesis
	$(BIN)/python -m pytest tests/engine/test_torch_contract.py tests/fusions/test_linear_rows.py -n 2 -m "not slow"
	$(BIN)/python -m fx_fusion demo --layers 1 --steps 3 --device cpu

test-all: test test-more test-slow ## all tests: an hour on two quiet cores

lint: $(VENV)/ready ## ruff, codespell and mypy
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy

# Judged against eager and float64; what was found so far: tests/fuzz/RESULTS.md.
SEEDS ?= 0-2000
REST ?= eager
fuzz: $(VENV)/ready ## random programs: SEEDS=0-2000 REST=eager, aot_eager, partitioned or inductor
	$(BIN)/python -m tests.fuzz --seeds $(SEEDS) --rest $(REST) --brief

# After it neither memory nor the number of objects may have grown.
STEPS ?= 10000
soak: $(VENV)/ready ## a long run in which nothing may grow: STEPS=10000
	$(BIN)/python -m tests.soak --steps $(STEPS)

# It needs no network to be built or read.
docs: $(VENV)/ready-docs ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/ready-docs: $(VENV)/ready-demo
	$(BIN)/python -m pip install -q "$(TORCH)" -e ".[docs]"
	touch $@

# What the demo needs. TORCH=torch==2.13.0 picks a build; with torch there first, nothing else pulls in another one.
$(VENV)/ready-demo: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools wheel
	$(BIN)/python -m pip install -q "$(TORCH)"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q "triton>=3.6" -e ".[demo]"
	@$(BIN)/python -c "from fx_fusion.doctor import cpp_compiler as c; c() or print('no C++ compiler: Inductor on CPU needs g++ or clang++ (Debian, Ubuntu: apt-get install g++)')"
	touch $@

# The rest, for tests and linters, in the same place.
$(VENV)/ready: $(VENV)/ready-demo
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q "$(TORCH)" -e ".[test]"
	touch $@

ON_GPU := $(addprefix tests/fusions/test_,every_fusion.py layouts.py group_norm.py group_norm_swish.py evonorm_s0.py evonorm_b0.py) \
	tests/kernels tests/system/test_training.py tests/gpu

# Most of the time goes to compilers, so several processes share the GPU where pytest-xdist is there.
WORKERS = $$($(PYTHON) -c "import xdist; print('-n 8 --dist loadgroup -v')" 2>&- || true)

# On a machine with a GPU, in its own environment: nothing is downloaded.
test-gpu: ## the tests that use a GPU, in the python that is there
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	$(PYTHON) -m pytest $(ON_GPU) -m "gpu or not slow" $(WORKERS)

# Where it finds something the exit code is not 0. Without torch's cache a tensor is an allocation of its own, and nothing is
# behind its end. A process a file: under the sanitizer workers of one process do not get as far as their first test.
CASES ?= 4
TOOLS ?= memcheck racecheck
PROCESSES ?= 8
sanitize: export PATH := $(PATH):/usr/local/cuda/bin
sanitize: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
sanitize: ## tests of kernels under compute-sanitizer, on a GPU: wrong accesses to memory, then races; CASES=1000 of a test: all
	@command -v compute-sanitizer > /dev/null || { echo "make sanitize: needs compute-sanitizer of the CUDA toolkit, in PATH or /usr/local/cuda/bin"; exit 1; }
	@$(PYTHON) -c "import torch; raise SystemExit(not torch.cuda.is_available())" || { echo "make sanitize: needs a GPU; torch of $(PYTHON) sees none"; exit 1; }
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	for tool in $(TOOLS); do ls tests/kernels/test_*.py | grep -v compile_h200 | xargs -P $(PROCESSES) -n 1 compute-sanitizer \
		--tool $$tool --error-exitcode 1 $(PYTHON) -m pytest -v -m "not slow" --at-most $(CASES) || exit 1; done

bench: ## the benchmarks, on a GPU, in the python that is there
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	$(PYTHON) -m bench.run
	$(PYTHON) -m bench.models llama-1b --batch 8 --length 2048 --mask none,ones
	$(PYTHON) -m bench.models llama-8b --batch 1 --length 4096 --mask none,ones

# Every class of the installed transformers, resumable: rows are appended to coverage.jsonl.
coverage: $(VENV)/ready ## a training step of every class of transformers, beside eager's
	$(BIN)/python -m tests.coverage.run

clean: ## remove .venv and what was built
	rm -rf $(VENV) build dist *.egg-info
