# Two commands on a fresh clone: `make demo` paints four pictures, `make test` runs the tests.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
DEMO := demo

PROMPTS := \
  --prompt "a large red circle on a white background" \
  --prompt "a small green star above a large blue square on a yellow background" \
  --prompt "to the left of a purple triangle there is an orange circle, white background" \
  --prompt "a large yellow square below a small red triangle on a black background"

QUANTIZED := build/quantized

.PHONY: demo test test-quantized check format clean

demo: $(INSTALLED)
	$(BIN)/exeunt z-image $(PROMPTS) --seed 7 --output $(DEMO)
	@echo && echo "The pictures lie in $(CURDIR)/$(DEMO). Run 'make demo' again: nothing is computed twice."

# A file's tests stay in one process, since they share what is costly to set up.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Beside the environment: diffusers imports whichever of these it finds, in every process.
test-quantized: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(QUANTIZED) -c constraints.txt \
	  torchao optimum-quanto gguf bitsandbytes peft
	PYTHONPATH=$(QUANTIZED) $(BIN)/python -m pytest tests/ddo/test_quantized.py \
	  tests/ddo/test_quantized_loading.py tests/ddo/test_adapters.py tests/ddo/test_compile.py \
	  tests/stages/test_quantized_components.py

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.hpp')

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.hpp')

$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.cpp native/src/*.cpp native/include/native/*.hpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "exeunt needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V); set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "the environment needs Python's venv module: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build $(DEMO)
