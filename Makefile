# Everything runs in .venv, which `install` makes. PYTHON picks the interpreter, TORCH the torch requirement
# (torch goes in first, so that a CPU build found by pip is not replaced by a dependency's choice).
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What serving needs; a developers' install has it, too.
SERVING := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.serving)
PIP := $(BIN)/python -m pip --disable-pip-version-check

define check_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tidemill needs Python 3.11 or newer (PYTHON=... picks one)"; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
endef

.PHONY: install serve serve-cpu test test-all clients check docs site models native floors wheel bench chaos ray-check gpu-check vllm-check clean

# Recipe of an environment with the extras $(1). torch includes setuptools, which builds the kernels here, in sight; pip
# would hide that. Without WHEELS (a folder or an address), wheels in dist/ are looked at.
define set_up
$(check_python)
@echo "1/4 install torch into $(VENV) (from $(if $(TORCH_INDEX),$(TORCH_INDEX),PyPI: 4 GB with the CUDA libraries)); behind 'Installing', pip says nothing for a minute or two"
$(PYTHON) -m venv $(VENV)
$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
@echo "2/4 CPU kernels"
$(if $(WHEELS),-$(PIP) download --no-index --no-deps --find-links "$(WHEELS)" --dest dist tidemill)
-@$(BIN)/python setup.py --quiet build_ext --inplace
@echo "3/4 install tidemill; behind 'Installing', pip says nothing for up to 30 s"
$(PIP) install --editable ".$(1)"
@touch $@
endef

install: $(STAMP)

$(STAMP): pyproject.toml
	$(call set_up,[dev])

serve: $(SERVING)
	@echo "4/4 start: load the model, measure step times (at most 30 s, once for each model and number of threads), serve"
	$(BIN)/tidemill serve $(MODEL) $(ARGS)

# The same with torch's CPU build, which is 4 GB smaller.
serve-cpu:
	@test -n "$(TORCH_INDEX)" || { echo "make serve-cpu TORCH_INDEX=ADDRESS: pytorch.org shows the address of its CPU builds under 'Get started', with Pip and CPU"; exit 1; }
	@$(MAKE) --no-print-directory serve

$(VENV)/.serving: pyproject.toml
	$(call set_up,$(if $(shell command -v nvidia-smi),[gpu]))

# pytest caches the modules whose assertions it rewrites; without the cache each process rewrites all of the modules.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

test: install
	$(PYTEST) $(ARGS)

# The tests that `make test` leaves out because each takes more than 2 s of processor time, and random tests at full size.
test-all: test
	TEST_ALL=1 $(PYTEST) -m "(slow or fuzz) and not (manual or gpu or clients)" $(ARGS)

# Real clients in environments of their own (TIDEMILL_CLIENTS=FOLDER; first use installs them), and the page of results.
clients: install
	CLIENTS_PAGE=1 $(BIN)/python -m pytest -m clients $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/size_report.py
	$(BIN)/python tools/reference.py --check
	$(BIN)/python tools/grafana_dashboard.py --check

docs: install
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/grafana_dashboard.py

# The documentation as a site in build/site; a link that leads nowhere is an error.
site: install
	$(BIN)/zensical build --clean --strict

# The table of models that transformers' modules run; TYPES="granite phi" renews some rows. Takes minutes.
models: install
	$(BIN)/python tests/model_sweep.py $(TYPES)

# The native CPU kernels anew, after a change of their sources; install builds them for the first time.
native: install
	$(BIN)/python setup.py --quiet build_ext --inplace --force

# A wheel for other machines in dist/. Its kernels serve every x86-64 processor: they choose AVX2, AVX-512 or AMX at
# run time. `make serve` takes them if it finds the wheel in dist/ or WHEELS and their sources are its own.
wheel:
	$(check_python)
	@echo "build a wheel, up to a minute"
	$(PYTHON) -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

# The tests beside the lowest versions of what serving needs that pyproject.toml allows.
floors:
	$(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python -m pip install --quiet "$(TORCH)" $$($(PYTHON) tools/floors.py) --editable ".[dev]"
	.venv-floors/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

bench: install
	$(BIN)/python -m benchmarks $(ARGS)

# A server whose engine process is killed, hangs and fails for ten minutes; exits 1 on a broken promise.
chaos: install
	$(BIN)/python -m benchmarks chaos $(ARGS)

# Two engines as actors of a Ray cluster on this machine, one of them killed; needs the extra `ray`.
ray-check: install
	$(BIN)/python -m pytest -m manual tests/test_fleet_ray.py

# From a source tree, without an install: needs a Python with torch, triton and transformers (PYTHON=... picks one).
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

# The scheduler for vLLM against releases of vLLM's CPU build, each in an environment of its own (VLLM="0.32.0").
vllm-check:
	integrations/vllm/check.sh $(ARGS)

clean:
	rm -rf $(VENV) build dist engine/execution/cpu/native/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
