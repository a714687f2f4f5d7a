# make demo and make test set up everything they need in .venv; make test-gpu and make bench use the python that is there.
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all lint docs fuzz soak test-gpu bench coverage clean

demo: $(VENV)/ready
	$(BIN)/python -m fx_fusion demo

# Minutes: without the tests that are marked slow. Two workers, a file on one of them.
test: $(VENV)/ready
	$(BIN)/python -m pytest tests -n 2 --dist loadfile -m "not slow"

test-all: $(VENV)/ready
	$(BIN)/python -m pytest tests -n 2 --dist loadfile

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

# Random programs near the patterns, judged against eager and float64; what was found so far: tests/fuzz/RESULTS.md.
SEEDS ?= 0-2000
REST ?= eager
fuzz: $(VENV)/ready
	$(BIN)/python -m tests.fuzz --seeds $(SEEDS) --rest $(REST) --brief

# A long training run, after which neither memory nor the number of objects may have grown.
STEPS ?= 10000
soak: $(VENV)/ready
	$(BIN)/python -m tests.soak --steps $(STEPS)

# The documentation as a site, in build/site. It needs no network to be built or read.
docs: $(VENV)/ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/ready-docs: $(VENV)/ready
	$(BIN)/python -m pip install -q -e ".[docs]"
	touch $@

# TORCH=torch==2.13.0 picks a build; with torch there first, nothing else pulls in another one.
$(VENV)/ready: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools wheel
	$(BIN)/python -m pip install -q "$(TORCH)"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q "triton>=3.6" -e ".[demo,test]"
	@$(BIN)/python -c "from fx_fusion.doctor import cpp_compiler as c; c() or print('no C++ compiler: Inductor on CPU needs g++ or clang++ (Debian, Ubuntu: apt-get install g++)')"
	touch $@

ON_GPU := $(addprefix tests/fusions/test_,every_fusion.py layouts.py group_norm.py group_norm_swish.py evonorm_s0.py evonorm_b0.py) \
	tests/kernels tests/system/test_training.py tests/gpu

# On a machine with a GPU, in its own environment: nothing is downloaded.
test-gpu:
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	$(PYTHON) -m pytest $(ON_GPU) -m "gpu or not slow"

bench:
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation -e .
	$(PYTHON) -m bench.run
	$(PYTHON) -m bench.models llama-1b --batch 8 --length 2048 --mask none,ones
	$(PYTHON) -m bench.models llama-8b --batch 1 --length 4096 --mask none,ones

# Every class of the installed transformers, resumable: rows are appended to coverage.jsonl.
coverage: $(VENV)/ready
	$(BIN)/python -m tests.coverage.run

clean:
	rm -rf $(VENV) build dist *.egg-info
