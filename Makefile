# make setup   create .venv and install the versions that CI tests
# make demo    pre-train, fine-tune and score a small world; write the calibration table (no GPU, no hub)
# make test    run the tests, one process for each core
# make lint    ruff and mypy, check only
# make docs    build the site into .site/html; fails on a link that leads nowhere
SHELL  := /bin/bash -o pipefail
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --constraint configs/constraints-cpu.txt
# One line a package instead of silence or pages; pip's errors and warnings stay visible.
STEPS  := awk '!/^(Requirement already|Looking in|Obtaining|  |Processing|Using cached|Building wheels)/ {print; fflush()}'

.PHONY: setup demo test lint docs
setup: $(VENV)/.ready
	@$(BIN)/python -c 'import os, sweeps; assert os.path.samefile(sweeps.__path__[0], "slurm/sweeps")' 2>/dev/null || { echo "setup: $(VENV) was made for another copy of this folder, or for this one before it was moved; rm -r $(VENV) and repeat"; exit 1; }
	@echo "setup: $(VENV) is ready"

$(VENV)/.ready: $(wildcard */pyproject.toml) tests/requirements.txt tests/requirements-lint.txt configs/constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("setup: Python 3.11 or later is needed, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=/path/to/python3 …")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "setup: $(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@test $$(df -Pk . | awk 'NR==2 {print $$4}') -gt 4000000 || { echo "setup: less than 4 GB free on $$(df -P . | awk 'NR==2 {print $$6}')"; exit 1; }
	@echo "setup 1/3: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup 2/3: torch (the largest download)"
	@$(PIP) torch | $(STEPS)
	@echo "setup 3/3: this project and what it needs"
	@$(PIP) --editable ./kernel --editable ./eval --editable ./patches --editable './slurm[lora]' --requirement tests/requirements.txt --requirement tests/requirements-lint.txt triton | $(STEPS)
	@touch $@

demo: setup
	@$(BIN)/python -m studies.demo

test: setup
	@$(BIN)/python -m pytest -m 'not slow' -n auto --dist loadfile

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.venv-docs/.ready: docs/requirements.txt
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install --requirement $< | $(STEPS)
	@touch $@

docs: .venv-docs/.ready
	@.venv-docs/bin/python docs/gather.py .site/pages
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --config-file docs/mkdocs.yml
	@echo "docs: open .site/html/index.html"
