# Two commands that set everything up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Two processes of one thread each are faster than one of two, and small models gain nothing from threads.
# The GPU is hidden from them: only tests marked gpu use it, in a single process.
PYTEST := OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(BIN)/pytest --numprocesses 2 --dist loadfile

.PHONY: demo check test test-all clean

demo: .venv/.ready
	$(BIN)/evalkit run --model demo --sample 50

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.lint

# Tests of one kind of evidence, such as `make test-browser`: see the markers in pyproject.toml
KINDS := simulation hostile browser latex training cluster slow

# Tests whose checkpoint, browser or TeX is missing are skipped with the reason
test: check
	$(PYTEST) --durations 10 -m "not gpu $(KINDS:%=and not %)"

# All tests, with new random examples
test-all: check
	$(PYTEST) --hypothesis-profile random -m "not gpu"
	$(BIN)/pytest -m gpu

test-gpu: .venv/.ready
	$(BIN)/pytest -m gpu

test-%: .venv/.ready
	$(PYTEST) -m "$* and not gpu"

# The environment is rebuilt when its requirements change
.venv/.ready: pyproject.toml constraints.txt
	@echo "Installing evalkit and its libraries into .venv with pip, silently: about 1 GB to download and 3 GB on disk, some"
	@echo "minutes; on Linux PyTorch's CUDA libraries are several GB more (README.md: how to do without them)."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
