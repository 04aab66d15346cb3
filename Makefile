# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-slow lint format types gpu-test bench bench-quick dist docs docs-outputs clean

demo: $(VENV)/installed
	$(BIN)/steady demo

# Tests that need the cores to themselves run first; then a file per core. Their many processes
# share the bytecode of our modules, even where PYTHONDONTWRITEBYTECODE is set.
PYTEST   := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
ALONE    := $$(grep -rl --include='*.py' mark.alone tests)

test: $(VENV)/installed-dev  # a sample of each sweep, and all that is quick; GPUs: gpu-test
	$(PYTEST) -m "alone and not slow and not gpu" $(ALONE)
	$(PYTEST) -n auto --dist loadfile -m "not alone and not slow and not gpu"

test-slow: $(VENV)/installed-dev  # real compilations, many processes and whole sweeps
	$(PYTEST) -m "alone and slow" $(ALONE)
	$(PYTEST) -n auto --dist worksteal -m "not alone and (slow or hypothesis)" --hypothesis-profile thorough

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/installed-dev
	$(BIN)/pyright

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu-test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "gpu and alone" tests/gpu
	$(BIN)/python -m pytest -n auto -m "gpu and not alone" tests/gpu

bench: $(VENV)/installed  # on a machine with an NVIDIA GPU; about 90 minutes
	$(BIN)/python benchmarks/rivals

bench-quick: $(VENV)/installed  # CPU or GPU; five minutes, beside the published results
	$(BIN)/python benchmarks/rivals --quick

dist: $(VENV)/installed-dev  # wheel and sdist in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

docs: $(VENV)/installed-docs  # the site, in build/site; every link is checked
	$(BIN)/python -m mkdocs build --strict

docs-outputs: $(VENV)/installed-dev  # outputs that pages and notebooks show, by running them
	$(BIN)/python docs/outputs/regenerate.py
	$(BIN)/python docs/notebooks.py

clean:
	rm -rf $(VENV) dist

# A marker file each, so that pip runs again only when the requirements change.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[cpu]
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[docs]
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]
	touch $@
