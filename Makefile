# LookOnce. `make serve` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: setup serve test check format soak clean

setup: $(STAMP)

KERNEL := $(wildcard lookonce/model/attention/*.cpp lookonce/model/attention/*.h)

$(STAMP): pyproject.toml setup.py $(KERNEL)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing LookOnce into $(VENV) (PyTorch is large; the first time takes a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(STAMP)

serve: $(STAMP)
	@$(BIN)/lookonce serve

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/size_report.py

test: check
	@$(BIN)/python -m pytest

soak: $(STAMP)
	@SOAK_REQUESTS=10000 $(BIN)/python -m pytest tests/end_to_end/test_soak.py

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info
