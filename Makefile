# Each target works on a fresh machine that has Python >= 3.10 with pip and venv, and GNU make.
# The first call builds .venv; later calls re-use it until pyproject.toml or constraints.txt change.
PYTHON ?= python3
# `make test TORCH=2.8.0` tests with another torch than that of constraints.txt, in an environment of its own.
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
# What the demo needs is a part of what development needs.
DEMO := $(VENV)/.demo-installed
DEV := $(VENV)/.dev-installed
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
# One rank a GPU; two on the CPU. A broken driver prints its complaint to stdout, so only lines that name a GPU count.
NPROC ?= $(shell gpus=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU '); [ "$$gpus" -gt 0 ] && echo $$gpus || echo 2)

# Tests that run at once: half of the time of those that launch jobs is waiting for processes and clocks, so two cores are busy with four.
WORKERS ?= 4
# Tests that last for seconds stand beside each other: a worker that has no more takes half of what another one has left. By the usual way workers get
# more the faster their tests are, and one of them is left with hundreds of slow ones.
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal

.PHONY: help demo test test-fast test-gpu smoke lint bench docs site release clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO)  ## train a digit classifier on NPROC ranks (default: one a GPU, or two on the CPU)
	$(BIN)/rankwise run --nproc-per-node $(NPROC) examples/digits/train.py --out digits-model.pt

test: $(DEV)  ## run the tests
	$(PYTEST)

test-fast: $(DEV)  ## run what an edit breaks first, in two minutes: rules, parsers, the doctor, and some launches
	$(PYTEST) tests/unit tests/lint tests/doctor tests/contracts/test_house.py tests/launch/test_run.py tests/launch/test_kill.py

test-gpu:  ## run the tests that need a GPU, by PYTHON (python3) as it is: nothing is installed
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

smoke: $(DEV)  ## run the demo and the README with what its install line gives today, nothing pinned
	.ci/smoke $(PYTHON) $(BIN)/pytest $(NPROC) $(WORKERS)

lint: $(DEV)  ## check style, formatting, types and layers
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && $(BIN)/lint-imports

bench: $(DEV)  ## measure every speed claim
	set -e; for file in $(sort $(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file; done

site: $(DEV)  ## build the site of docs/ into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(DEV)  ## write the reference and draw the pictures anew, and build the site
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_errors.py
	$(BIN)/python docs/generate_rules.py
	$(BIN)/python docs/generate_probes.py
	$(BIN)/python docs/draw_permutation.py
	$(BIN)/python docs/draw_commit.py
	$(BIN)/python docs/pictures.py
	$(MAKE) site

release: $(DEV)  ## build wheel and sdist of this commit, check them, and run the tour with the wheel in a fresh environment
	$(INSTALL) twine
	.ci/release $(PYTHON) $(BIN) $(NPROC) $(WORKERS)

clean:  ## remove what was built, trained or cached; .venv stays
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis digits-model.pt
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

.venv-torch-$(TORCH)/constraints.txt: constraints.txt | $(BIN)/python
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

$(DEMO): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) -e '.[demo]'
	touch $@

$(DEV): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	touch $@ $(DEMO)
