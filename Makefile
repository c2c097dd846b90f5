# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0

.PHONY: setup demo check test bench clean

setup: $(VENV)/.ready

# torch first and pinned: an unpinned one would bring several GB of GPU packages along.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/craft demo

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: check
	$(BIN)/pytest

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	# Both run, whatever the first one finds; a missed bar in either shows in the exit code.
	$(BIN)/python bench/recovery.py; first=$$?; $(BIN)/python bench/overhead.py && exit $$first

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
