# Two commands, each from nothing: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Two processes of one thread each are faster than one of two, and small models gain nothing from threads
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile

.PHONY: demo test slow clean

demo: .venv/.ready
	$(BIN)/evalkit run --model demo --limit 50

test: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow and not gpu"

slow: .venv/.ready
	$(PYTEST) -m slow

# The environment is made anew when what it should hold changes
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
