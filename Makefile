# VENV=folder uses another environment; PYTHON=path makes it with another interpreter;
# ARGS=... is passed on to pytest or to the notebook runner.
VENV ?= .venv
ARGS ?=
CONSTRAINTS ?= constraints.txt

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.ddtree-jax-installed
PYTEST := JAX_PLATFORMS=cpu $(RUN) -m pytest -n 2 --dist worksteal --timeout 600

.PHONY: help venv demo test slow lint notebooks clean

help:
	@echo 'make demo       generate with the bundled model'
	@echo 'make test       fast tests          make slow       slow tests'
	@echo 'make lint       ruff                make notebooks  run them in place (ARGS=--check: only run)'
	@echo 'make venv       only install        make clean      remove caches and build outputs'

venv: $(STAMP)
$(VENV): $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@if ! $(RUN) -c 'import pip, sys; assert sys.version_info >= (3, 12)' 2>/dev/null; then \
	  python=$$(scripts/find_python.sh) && \
	  { ! test -e $(VENV)/pyvenv.cfg || rm -rf $(VENV); } && \
	  echo "creating $(VENV) with $$python" && "$$python" -m venv $(VENV); \
	fi
	@echo 'installing into $(VENV) (a few minutes the first time)'
	@$(RUN) -m pip install -qq --disable-pip-version-check \
	  -c $(CONSTRAINTS) -e '.[dev,notebooks]'
	@touch $@

demo: $(STAMP)
	$(RUN) -m ddtree_jax demo

test: $(STAMP)
	$(PYTEST) $(ARGS)

# pytest exits with 5 when it selects no test: an empty slow tier is fine.
slow: $(STAMP)
	$(PYTEST) -m 'slow and not gpu' $(ARGS) || test $$? -eq 5

lint: $(STAMP)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

notebooks: $(STAMP)
	$(RUN) scripts/run_notebooks.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .venv-newest
	find ddtree_jax tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
