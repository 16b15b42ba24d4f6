# Everything a visitor or a developer does, one word each. Needs Python 3.11 or newer and make; `make help` lists it all.

PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
WATCHED := .venv/.watched
PEER   := .venv/.peer
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Of those that need a GPU bench.py runs three, and the rest is run by hand; record.py is what the others share; the soak has
# a target of its own.
BENCHMARKS := $(filter-out benchmarks/gpu_% benchmarks/record.py benchmarks/soak.py, $(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help demo test table lint bench soak docs clean

help:  ## list these targets
	@sed -n 's/^\([a-z][a-z]*\):.*## \(.*\)/  make \1@\2/p' Makefile | awk -F@ '{ printf "%-14s%s\n", $$1, $$2 }'

demo: $(READY)  ## train a small Llama in BF16 and in three kinds of FP8, then open demo/report.html
	$(BIN)/narrowgauge compare --out demo
	@echo "The report is $(CURDIR)/demo/report.html: one file, opens offline."

test: lint $(WATCHED)  ## lint, then run every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/integrations  # a module's programs run once

table: $(WATCHED)  ## watch other packages' own loops, and write what passed into the README's table
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/integrations --write-outcomes
	$(BIN)/python docs/generate.py

lint: $(READY)  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(PEER)  ## run the benchmarks, on the GPU if there is one, write benchmarks/results/
	for file in $(BENCHMARKS); do echo "== $$file"; PYTHONPATH=. $(BIN)/python "$$file" || exit 1; done

soak: $(READY)  ## train 100 000 steps under the watch: does anything grow? Some minutes
	PYTHONPATH=. $(BIN)/python benchmarks/soak.py --export

docs: $(READY)  ## write the pages that are generated from the code
	$(BIN)/python docs/generate.py

clean:  ## remove what demo, tests and tools leave behind; .venv stays
	rm -rf demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The environment is built once, and again whenever what it is built from changes. torch comes first and by its exact
# version: whatever build of it lies ready on this machine is then taken as it is, and nothing later replaces it. Nothing
# is compiled beforehand: of 20,000 modules few are ever imported, and those are compiled then.
INSTALL := $(BIN)/python -m pip install -q --no-compile -c constraints.txt
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e ".[dev]"
	@touch $@

# What only the benchmarks need: the energy counter, and the peer, which asks for no other package and no CUDA. If they
# cannot be had, the benchmarks say what is missing, and the next `make bench` tries again.
PEERED := $(INSTALL) -e '.[bench]' torchao
$(PEER): $(READY)
	@$(PEERED) && touch $@ || echo "make: the peer's rows and the energy will be missing; to have them: $(PEERED)"

# What only tests/integrations needs, half a gigabyte.
$(WATCHED): $(READY)
	$(INSTALL) -e ".[integrations]" || \
	  echo "make: what tests/integrations watches cannot be installed here; those tests are skipped"
	@touch $@
