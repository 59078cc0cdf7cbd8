# LookOnce. `make serve` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup serve test test-lmcache test-page test-openapi test-clients check format soak clean

# Tests run side by side, so numeric libraries get one thread each in them; a server uses all cores.
check test test-lmcache test-page test-openapi test-clients soak: export OMP_NUM_THREADS ?= 1

setup: $(STAMP)

COMPILED := $(wildcard lookonce/core/*.c lookonce/model/*.c lookonce/model/*/*.cpp lookonce/model/*/*.h)

$(STAMP): pyproject.toml setup.py $(COMPILED)
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

test: check
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

# LMCache pins older libraries than ours and takes 2 GB: it gets an environment of its own.
LMCACHE_VENV := .venv-lmcache

$(LMCACHE_VENV)/.installed: pyproject.toml setup.py
	@test -x $(LMCACHE_VENV)/bin/python || $(PYTHON) -m venv $(LMCACHE_VENV)
	@$(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	@$(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,lmcache]"
	@touch $@

test-lmcache: $(LMCACHE_VENV)/.installed
	@$(LMCACHE_VENV)/bin/python -m pytest tests/kv/test_lmcache.py tests/kv/test_tiers.py

# The web page in a real browser. Skipped by name where Chromium cannot be installed.
test-page: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "playwright>=1.50,<2"
	@command -v chromium >/dev/null || apt-get install --yes --quiet chromium || true
	@$(BIN)/python -m pytest tests/page -rs

# Every route with requests that Schemathesis generates.
test-openapi: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,dev-openapi]"
	@$(BIN)/python -m pytest tests/clients/test_schemathesis.py -rs

# LiteLLM and LangChain's OpenAI client, unmodified.
test-clients: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,dev-clients]"
	@$(BIN)/python -m pytest tests/clients/test_other_clients.py -rs

soak: $(STAMP)
	@SOAK_REQUESTS=10000 $(BIN)/python -m pytest --timeout 3600 tests/end_to_end/test_soak.py

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LMCACHE_VENV) build *.egg-info
