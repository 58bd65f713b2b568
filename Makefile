# Every target sets itself up from nothing: Python 3.11 or newer with the venv module is all that a machine needs.
# Every pip install applies constraints.txt, so that a machine gets the set of packages that CI runs.

PYTHON ?= python3
PYTEST_ARGS ?=
THREADS ?= 1
WORKERS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RUN := outputs/demo
PROMPT := a red circle moves left

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint fmt bench clean

help: ## Show this list
	@echo "fastvideo-train: the loop that trains a model is the loop that serves it"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12          the interpreter that make venv starts from"
	@echo "  PYTEST_ARGS='-k nft -x'    more arguments for pytest in make test"
	@echo "  THREADS=1                  torch threads of each process in make test"
	@echo "  WORKERS=2                  test files that make test runs at a time; 0 runs all in one process"

venv: $(STAMP) ## Create .venv and install the pinned packages; at once when nothing has changed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "got Python %d.%d, expected 3.11 or newer: make venv PYTHON=<path>" % v[:2])'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing the packages of constraints.txt into $(VENV) (minutes, once)"
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv ## Train the bundled Wan2.1 with DiffusionNFT, export it and generate one video from the export
	$(PY) train.py method=diffusion_nft card=wan21 run=demo overwrite=true
	$(PY) -m fastvideo_train.generate ckpt=$(RUN)/export prompt="$(PROMPT)" seed=1 out=$(RUN)/demo.mp4
	@$(PY) scripts/demo_summary.py $(RUN)

test: lint ## Run the linters, then the whole test suite
	OMP_NUM_THREADS=$(THREADS) HF_HUB_OFFLINE=1 WANDB_MODE=offline $(PY) -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: venv ## Run ruff, mypy and import-linter
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

fmt: venv ## Format the code and apply ruff's safe fixes
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

bench: venv ## Run each benchmark in scripts/bench; each ends with one JSON line
	@rc=0; for script in scripts/bench/[a-z]*.py; do echo "== $$script"; $(PY) $$script || rc=1; done; exit $$rc

clean: ## Remove build products and caches; .venv and outputs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
