# Two commands that set everything up: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Two processes of one thread each are faster than one of two, and small models gain nothing from threads.
# The GPU is hidden from them: only tests marked gpu use it, in a single process.
PYTEST := OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= $(BIN)/pytest --numprocesses 2 --dist loadfile

.PHONY: demo check test test-all slow gpu clean

demo: .venv/.ready
	$(BIN)/evalkit run --model demo --sample 50

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# About 10 minutes on two cores; tests in a browser are skipped, with the reason, where no Chromium is found
test: check
	$(PYTEST) -m "not slow and not cluster and not gpu"

# All tests, with new random examples; those whose checkpoint, browser, cluster or GPU is missing are skipped with a reason
test-all: check
	$(PYTEST) --hypothesis-profile random -m "not gpu"
	$(BIN)/pytest -m gpu

slow: .venv/.ready
	$(PYTEST) -m "slow and not gpu"

gpu: .venv/.ready
	$(BIN)/pytest -m gpu

# The environment is rebuilt when its requirements change
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
