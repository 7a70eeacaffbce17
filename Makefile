# Each target works alone on a bare clone: it makes the virtual environment first, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DEMO := demo

export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE = # modules stay compiled, whatever a container says: processes start half a second sooner

.DEFAULT_GOAL := help
.PHONY: help setup demo test pytest coverage lint bench docs clean

help:
	@echo "make setup     create .venv and install flyby with its development tools"
	@echo "make demo      five sites on digits, five methods side by side, one report"
	@echo "make test      lint, types and all tests"
	@echo "make coverage  all tests, and which lines they reach; at least 90 %"
	@echo "make lint      ruff and mypy only"
	@echo "make bench     flyby's training loop against its limit and an ordinary DataLoader script"
	@echo "make docs      the documentation as a site that can be read from a disk: build/site/index.html"
	@echo "make clean     remove .venv, caches and the demo"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "flyby needs Python 3.11 or newer; name one with PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet -c constraints.txt -e ".[dev,prune,track,ray,flower,privacy,tiff,onnx,space,backbones,docs]"
	$(BIN)/flyby methods >/dev/null # which compiles what a command imports, and not the thousands of modules that none does
	touch $@

demo: $(STAMP)
	rm -rf $(DEMO)
	$(BIN)/flyby run --method local,fedavg,ensemble,fafi,aurora --data digits --clients 5 --alpha 0.1 --epochs 20 --seed 0 --out $(DEMO)
	@echo "Open the report in a browser: $(DEMO)/report.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint pytest

# Three workers for two cores: tests that wait, for a deadline or for a process to start, leave theirs to another.
pytest: $(STAMP)
	$(BIN)/python -m pytest -n 3 --durations=15

coverage: $(STAMP)
	$(BIN)/python -m pytest -n 3 --cov=flyby --cov-report=term-missing:skip-covered --cov-fail-under=90

bench: $(STAMP)
	$(BIN)/flyby bench

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open it in a browser: build/site/index.html"

clean:
	rm -rf .venv $(DEMO) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
