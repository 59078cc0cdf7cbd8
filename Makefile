# LookOnce. `make serve` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVES := $(VENV)/.serves
STAMP := $(VENV)/.installed

.PHONY: setup serve wheel test types lint test-models test-cuda test-tensor-parallel test-overlapped test-lmcache test-page page-pictures test-openapi test-clients test-open-webui test-fleet test-whisper test-alerts test-otel check structure format attack fuzz soak clean

# Tests run side by side, so numeric libraries get one thread each in them; a server uses all cores.
check types lint test test-tensor-parallel test-overlapped test-lmcache test-page test-openapi test-clients test-open-webui test-fleet test-whisper test-alerts test-otel attack fuzz soak: export OMP_NUM_THREADS ?= 1

# Some images say that Python shall keep no bytecode: each process would compile 3,000 modules again.
unexport PYTHONDONTWRITEBYTECODE

setup: $(SERVES)

COMPILED := $(wildcard lookonce/*/*.c lookonce/model/*/*.cpp lookonce/model/*/*.h)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
FAILED = { echo "make setup: pip failed, see above. Run it again: what was downloaded is kept. Behind a proxy set HTTPS_PROXY; for an index of your own, PIP_INDEX_URL." >&2; exit 1; }
NEEDS = import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; x = p["optional-dependencies"]; print($(1), sep="\n")
TO_SERVE := *p["dependencies"], *x["film"], *x["documents"]

# What it does and how far it is; a Python that cannot do it is refused before anything is fetched. The kernels
# are compiled while pip works. pip compiles no bytecode: of 10,000 modules a server imports a third, and the
# last step has those compiled.
$(SERVES): pyproject.toml setup.py $(COMPILED)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make setup: $(PYTHON) is not Python 3.11 or newer. Install one, then: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "[1/4] creating $(VENV)"; $(PYTHON) -m venv $(VENV); } || { rm -rf $(VENV); \
	  echo "make setup: $(PYTHON) cannot create an environment. Install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@command -v c++ >/dev/null || echo "No C++ compiler: kernels will not be compiled, and torch is slower (Debian: apt install g++, then make setup again)"
	@$(PIP) "setuptools>=77" || $(FAILED)
	@$(BIN)/python -c '$(call NEEDS,$(TO_SERVE))' > $(VENV)/needs.txt
	@nice $(BIN)/python setup.py --quiet build_ext --inplace > $(VENV)/kernels.log 2>&1 & kernels=$$!; \
	  trap 'kill $$kernels 2>/dev/null' EXIT; trap 'exit 1' INT TERM; \
	  echo "[2/4] installing PyTorch: half a minute, more where it is downloaded. CPU kernels are compiled meanwhile"; \
	  $(PIP) --no-compile "torch==2.13.0" || $(FAILED); \
	  echo "[3/4] installing the other libraries"; \
	  $(PIP) --no-compile -r $(VENV)/needs.txt || $(FAILED); \
	  LOOKONCE_COMPILE=0 $(PIP) --no-build-isolation --no-deps -e . || $(FAILED); \
	  echo "[4/4] waiting for the kernels"; \
	  wait $$kernels || { cat $(VENV)/kernels.log >&2; exit 1; }
	@$(BIN)/python -c 'import lookonce.engine.process.build, lookonce.server.process'
	@touch $(SERVES)
	@echo "Ready: make serve, or $(BIN)/lookonce --help"

# What checks and tests need beside.
$(STAMP): $(SERVES)
	@echo "installing what checks and tests need"
	@$(BIN)/python -c '$(call NEEDS,*x["dev"])' > $(VENV)/needs.txt
	@$(PIP) --no-compile -r $(VENV)/needs.txt || $(FAILED)
	@touch $(STAMP)

serve: $(SERVES)
	@$(BIN)/lookonce serve

# Types take longest: the rest is checked beside them.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types lint

types: $(STAMP)
	@$(BIN)/mypy

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

# How the package is built: files, lines, imports, names, and the way of one picture on a real server.
structure: $(STAMP)
	@$(BIN)/python tools/structure.py --walk

# Types are checked in time that the tests leave: they wait for servers, with one core or the other.
test: lint
	@nice -n 19 $(BIN)/mypy > $(VENV)/mypy.log 2>&1 & types=$$!; \
	  trap 'kill $$types 2>/dev/null' EXIT; trap 'exit 1' INT TERM; \
	  $(BIN)/python -m pytest --numprocesses 2 --dist loadfile; tests=$$?; \
	  wait $$types; types_found=$$?; cat $(VENV)/mypy.log; exit $$((tests ? tests : types_found))

# LMCache pins older libraries than ours and takes 2 GB: it gets an environment of its own.
LMCACHE_VENV := .venv-lmcache

$(LMCACHE_VENV)/.installed: pyproject.toml setup.py
	@test -x $(LMCACHE_VENV)/bin/python || $(PYTHON) -m venv $(LMCACHE_VENV)
	@$(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	@$(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,lmcache]"
	@touch $@

test-lmcache: $(LMCACHE_VENV)/.installed
	@$(LMCACHE_VENV)/bin/python -m pytest tests/kv/test_lmcache.py tests/kv/test_tiers.py

# Every text-only type that transformers knows, served as listed or refused, all types with media that the
# general family serves, and what `make test` tries with some types, with all.
test-models: $(STAMP)
	@ALL_MODELS=1 $(BIN)/python -m pytest --numprocesses 2 --timeout 3600 $(addprefix tests/model/test_,general_text.py general_media.py states.py lora.py parity.py parity_chat.py parity_controls.py device_waits.py) \
	  $(addprefix tests/model/test_,film.py int8_weights.py loader_rope.py media_adapters.py) tests/test_llm.py \
	  tests/benchmarks/test_cpu.py tests/render/test_sandbox.py tests/server/routes/test_render.py tests/end_to_end/test_general_media.py

# On the first NVIDIA GPU: the answers of a CPU, from every family, with graphs and without; tiers, offloads and
# kills on a real server in float32, which the reference attention computes; one answer of a server as it is by
# default there (paged attention, graphs); then what it reaches. What follows a failure is run all the same. Skipped by
# name without a GPU; TEST_DEVICE=cpu does the same on a CPU.
TEST_DEVICE ?= cuda
CUDA_TESTS := $(addprefix tests/model/test_,device_waits.py overlapped_steps.py decode_graphs.py attention_varlen.py parity.py) \
  $(addprefix tests/end_to_end/test_,kv_tiers.py chaos.py default_dtype.py)
CUDA_DOCTOR := $(if $(filter cpu,$(TEST_DEVICE)),,--gpu)
CUDA_ENGINE := $(if $(filter cpu,$(TEST_DEVICE)),--scale tiny --batches 1 8 --turns 1,--batches 1 8 64 256)
CUDA_SERVE := $(if $(filter cpu,$(TEST_DEVICE)),--requests 16 --warm-up 4,--requests 256)
test-cuda: $(STAMP)
	@test "$(TEST_DEVICE)" = cpu || $(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'; found=$$?; \
	  test $$found -ne 3 || { echo "test-cuda: skipped, torch finds no NVIDIA GPU here"; exit 0; }; \
	  test $$found -eq 0 || { echo "test-cuda: torch cannot be imported, see above" >&2; exit 1; }; \
	  failed=; \
	  $(BIN)/lookonce doctor $(CUDA_DOCTOR) || failed="$$failed doctor"; \
	  TEST_DEVICE=$(TEST_DEVICE) ALL_MODELS=1 $(BIN)/python -m pytest --timeout 900 -n0 $(CUDA_TESTS) || failed="$$failed tests"; \
	  $(BIN)/lookonce bench engine --device $(TEST_DEVICE) $(CUDA_ENGINE) || failed="$$failed bench-engine"; \
	  $(BIN)/lookonce bench look --device $(TEST_DEVICE) --counts 1 --repeats 5 || failed="$$failed bench-look"; \
	  $(BIN)/lookonce bench serve --device $(TEST_DEVICE) $(CUDA_SERVE) || failed="$$failed bench-serve"; \
	  test -z "$$failed" || { echo "test-cuda: failed:$$failed" >&2; exit 1; }

# Two processes that compute one model, on the CPU: a real server's answers, and what becomes of it when one dies.
test-tensor-parallel: $(STAMP)
	@$(BIN)/python -m pytest -n0 -m soak tests/end_to_end/test_tensor_parallel.py

# Tests of the scheduler and of the models' answers with each step planned ahead of the last one's result.
test-overlapped: $(STAMP)
	@TEST_OVERLAPPED=1 $(BIN)/python -m pytest tests/core tests/model/test_parity.py

# The web page in a real browser, and axe-core over it. Skipped by name where Chromium cannot be installed.
test-page: $(STAMP)
	@$(PIP) "playwright>=1.50,<2" "axe-playwright-python>=0.1.8,<0.2"
	@command -v chromium >/dev/null || apt-get install --yes --quiet chromium || true
	@$(BIN)/python -m pytest tests/page -rs

# The pictures of the page in docs/, taken anew.
page-pictures: $(STAMP)
	@$(PIP) "playwright>=1.50,<2"
	@command -v chromium >/dev/null || apt-get install --yes --quiet chromium || true
	@$(BIN)/python tools/page_picture.py docs --lookonce $(BIN)/lookonce

# Every route with requests that Schemathesis generates.
test-openapi: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,dev-openapi]"
	@$(BIN)/python -m pytest tests/clients/test_schemathesis.py -rs

# An environment of its own that sees the packages of ours.
PURELIB = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
SEES_OURS = $(BIN)/python $(PURELIB) > $$($(1)/bin/python $(PURELIB))/lookonce.pth

# Clients of other makers, unmodified, of pinned versions. They get an environment of their own, which sees this
# one's packages; those for Node.js are skipped by name where it is absent.
CLIENTS_VENV := .venv-clients
CLIENTS := tests/clients
CLIENT_TESTS := $(CLIENTS) $(addprefix tests/end_to_end/test_,openai_client.py responses.py documents.py)
# What clients leave open when they end is no fault of ours.
CLIENT_OPTIONS := -rs -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning
CLIENTS_TABLE = $(CLIENTS_VENV)/bin/python tools/clients_table.py .venv-*/clients.xml

$(CLIENTS_VENV)/.installed: $(STAMP) $(CLIENTS)/requirements.txt $(CLIENTS)/constraints.txt $(CLIENTS)/node/package.json
	@test -x $(CLIENTS_VENV)/bin/python || $(BIN)/python -m venv $(CLIENTS_VENV)
	@$(call SEES_OURS,$(CLIENTS_VENV))
	@echo "installing other makers' clients: three minutes"
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(CLIENTS)/requirements.txt
	@if command -v npm >/dev/null; then cd $(CLIENTS)/node && npm install --silent --no-audit --no-fund --no-package-lock; fi
	@touch $@

test-clients: $(CLIENTS_VENV)/.installed
	@PYTHONPATH=. $(CLIENTS_VENV)/bin/python -m pytest $(CLIENT_TESTS) --ignore $(CLIENTS)/test_schemathesis.py --ignore $(CLIENTS)/test_open_webui.py $(CLIENT_OPTIONS) --junitxml $(CLIENTS_VENV)/clients.xml
	@$(CLIENTS_TABLE)

# Open WebUI takes 2 GB, and pip minutes to resolve: uv installs it, in an environment of its own.
OPEN_WEBUI_VENV := .venv-open-webui

$(OPEN_WEBUI_VENV)/.installed: Makefile
	@test -x $(OPEN_WEBUI_VENV)/bin/python || $(PYTHON) -m venv $(OPEN_WEBUI_VENV)
	@$(OPEN_WEBUI_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
	@echo "torch==2.13.0" > $(OPEN_WEBUI_VENV)/override.txt
	@$(OPEN_WEBUI_VENV)/bin/uv pip install --quiet --system-certs --python $(OPEN_WEBUI_VENV)/bin/python --override $(OPEN_WEBUI_VENV)/override.txt $(addprefix --find-links ,$(PIP_FIND_LINKS)) "open-webui==0.12.4"
	@touch $@

test-open-webui: $(CLIENTS_VENV)/.installed $(OPEN_WEBUI_VENV)/.installed
	@OPEN_WEBUI=$(CURDIR)/$(OPEN_WEBUI_VENV)/bin/open-webui $(BIN)/python -m pytest $(CLIENTS)/test_open_webui.py -rs --junitxml $(OPEN_WEBUI_VENV)/clients.xml
	@$(CLIENTS_TABLE)

# A fleet on a local Ray. ray pins libraries of its own: it gets an environment, which sees this one's packages.
FLEET_VENV := .venv-fleet

$(FLEET_VENV)/.installed: $(STAMP) pyproject.toml
	@test -x $(FLEET_VENV)/bin/python || $(BIN)/python -m venv $(FLEET_VENV)
	@$(call SEES_OURS,$(FLEET_VENV))
	@$(BIN)/python -c '$(call NEEDS,*x["fleet"])' > $(FLEET_VENV)/needs.txt
	@$(FLEET_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(FLEET_VENV)/needs.txt
	@touch $@

test-fleet: $(FLEET_VENV)/.installed
	@PYTHONPATH=. $(FLEET_VENV)/bin/python -m pytest tests/fleet -m "fleet or not fleet" --timeout 900 -rs

# whisper-tiny.en, made by tools/whisper_tiny.py, hears espeak-ng's speech as it does in transformers. Skipped by
# name where the speech or the package cannot be installed.
test-whisper: $(STAMP)
	@command -v espeak-ng >/dev/null || apt-get install --yes --quiet espeak-ng || true
	@WHISPER=1 $(BIN)/python -m pytest --timeout 900 tests/tools/test_whisper_tiny.py -rs

# Alert rules and Prometheus' configuration in the real promtool. Skipped by name where it is absent.
test-alerts: $(STAMP)
	@command -v promtool >/dev/null || apt-get install --yes --quiet prometheus || true
	@$(BIN)/python -m pytest tests/deploy -rs

# Traces and metrics against a collector, with OpenTelemetry, and traces against Arize Phoenix, unmodified, in an
# environment of its own: it takes 700 MB, and pip minutes to resolve.
PHOENIX_VENV := .venv-phoenix

$(PHOENIX_VENV)/.installed: Makefile
	@test -x $(PHOENIX_VENV)/bin/python || $(PYTHON) -m venv $(PHOENIX_VENV)
	@$(PHOENIX_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"
	@$(PHOENIX_VENV)/bin/uv pip install --quiet --system-certs --python $(PHOENIX_VENV)/bin/python "arize-phoenix==20.26.1"
	@touch $@

test-otel: $(STAMP) $(PHOENIX_VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,otel]"
	@PHOENIX=$(CURDIR)/$(PHOENIX_VENV)/bin/phoenix $(BIN)/python -m pytest tests/server/test_tracing.py tests/server/test_otlp.py tests/end_to_end/test_observability.py -rs

# A wheel in dist/, tried in an empty environment in another folder.
wheel: $(STAMP)
	@rm -rf build dist
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(BIN)/python tools/wheel_smoke.py dist/lookonce-*.whl

# Attacks on a real server, on loopback: canaries are answered meanwhile, memory stays.
attack: $(STAMP)
	@$(BIN)/python -m pytest --timeout 900 -m "attack or not attack" tests/attack

soak: $(STAMP)
	@SOAK_REQUESTS=10000 $(BIN)/python -m pytest --timeout 3600 $(addprefix tests/end_to_end/test_,soak.py counters.py look_once.py many_items.py)
	@ACCOUNTED_REQUESTS=5000 $(BIN)/python -m pytest --timeout 3600 tests/kv/test_accounting_random.py
	@CHAOS_KILLS=200 $(BIN)/python -m pytest --timeout 3600 tests/end_to_end/test_chaos.py
	@LEAVING_ROUNDS=84 $(BIN)/python -m pytest --timeout 3600 -m "soak or not soak" $(addprefix tests/end_to_end/test_,voxtral_realtime.py nano_ear.py)
	@FAULT_REQUESTS=10000 $(BIN)/python -m pytest --timeout 7200 -m soak tests/end_to_end/test_faults.py
	@$(MAKE) --no-print-directory fuzz

# Each parser of strangers' bytes, guided by coverage. atheris gets an environment of its own, which sees this one's packages.
FUZZ_VENV := .venv-fuzz
FUZZ_SECONDS ?= 60

$(FUZZ_VENV)/.installed: $(STAMP)
	@test -x $(FUZZ_VENV)/bin/python || $(BIN)/python -m venv $(FUZZ_VENV)
	@$(call SEES_OURS,$(FUZZ_VENV))
	@$(FUZZ_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "atheris>=3,<4"
	@touch $@

fuzz: $(FUZZ_VENV)/.installed
	@for target in $$($(FUZZ_VENV)/bin/python tools/fuzz.py); do \
	  echo "fuzzing $$target"; $(FUZZ_VENV)/bin/python tools/fuzz.py $$target --seconds $(FUZZ_SECONDS) || exit 1; done

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(LMCACHE_VENV) $(FUZZ_VENV) $(CLIENTS_VENV) $(OPEN_WEBUI_VENV) $(FLEET_VENV) $(PHOENIX_VENV) $(CLIENTS)/node/node_modules build dist *.egg-info
