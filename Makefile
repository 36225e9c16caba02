# Two commands, each from nothing: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow clean

demo: .venv/.ready
	$(BIN)/evalkit run --model demo --limit 50

test: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow and not gpu"

slow: .venv/.ready
	$(BIN)/pytest -m slow

# The environment is made anew when what it should hold changes
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
