# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
# What tests of several hosts and of alerts need beside Python, as command:package of Debian.
PACKAGES := ip:iproute2 tc:iproute2 nft:nftables nsenter:util-linux prometheus:prometheus prometheus-alertmanager:prometheus-alertmanager

.PHONY: setup packages demo check reference site wheel test test-long fuzz simulate test-gpu pairs suites bench poster clean

setup: $(VENV)/.ready

# torch first and pinned: an unpinned one would bring several GB of GPU packages along.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# Installs what is missing, if it may, and starts no service of it (policy-rc.d). The tests that need it say so themselves
# where it is not there.
packages:
	@missing=$$(for each in $(PACKAGES); do \
	    PATH=$$PATH:/usr/sbin:/sbin command -v $${each%%:*} >/dev/null || echo $${each##*:}; done | sort -u | xargs); \
	test -n "$$missing" || exit 0; \
	if ! command -v apt-get >/dev/null || test $$(id -u) != 0; then \
	    echo "Tests of several hosts and of alerts need the Debian packages $$missing, which only root can install with apt-get."; exit 0; fi; \
	policy=/usr/sbin/policy-rc.d; \
	if ! test -e $$policy; then printf '#!/bin/sh\nexit 101\n' >$$policy; chmod +x $$policy; trap "rm -f $$policy" EXIT; fi; \
	export DEBIAN_FRONTEND=noninteractive; install="apt-get install -qq --no-install-recommends $$missing"; \
	$$install >/dev/null 2>&1 || { apt-get update -qq && $$install >/dev/null; } \
	    || echo "Tests of several hosts and of alerts need the Debian packages $$missing, and apt-get could not install them."

demo: setup
	$(BIN)/craft demo

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/house.py
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/reference.py --check
	$(BIN)/python tools/figures.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Pages of docs/reference that are made from the code, and the figures.
reference: setup
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/figures.py
	$(BIN)/python tools/house.py --draw

# The pages in docs/ as a site, in build/site.
site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel, in build/wheel, and a job that runs from it outside of this folder.
wheel: setup
	$(BIN)/python -m tests.distribution.smoke

# Several at a time: most of a test is a job that starts, and that keeps one core busy at best.
test: check packages
	@echo "Variants that are marked as long are left out here; 'make test-long' runs them."
	@echo "Tests that need a GPU are left out here; 'make test-gpu' runs them."
	$(BIN)/pytest -n 3 --dist worksteal -m 'not long' --ignore tests/gpu

# Every two techniques together; makes the table in docs/reference/technique_pairs.md from what comes out.
pairs: setup packages
	rm -rf .pairs && mkdir .pairs
	PAIRS_RESULTS=$(CURDIR)/.pairs $(BIN)/pytest -n 3 --dist worksteal tests/integration/test_pairs.py; \
	    $(BIN)/python -m tests.integration.pairs_table .pairs docs/reference/technique_pairs.md

# Frameworks' own tests, with their own class and with CRAFT's: HF_TESTS=... LIGHTNING_TESTS=... DCP_TESTS=... (docs/reference/framework_tests.md).
suites: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[suites]'
	HF_TESTS='$(HF_TESTS)' LIGHTNING_TESTS='$(LIGHTNING_TESTS)' DCP_TESTS='$(DCP_TESTS)' \
	    $(BIN)/python -m tests.suites.run $(SUITES_OPTIONS)

test-long: setup packages
	$(BIN)/pytest -n 3 --dist worksteal -m long --ignore tests/gpu

# Generated scripts under random kills; one at a time, about 10 s each on an idle machine.
fuzz: setup
	$(BIN)/python -m tests.fuzz --seed $(or $(FUZZ_SEED),0) --runs $(or $(FUZZ_RUNS),100)

# Whole jobs in virtual time, with faults of all kinds (docs/explanation/simulation.md): SEEDS=... FIRST=...
simulate: setup
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0)

# With a Python that has a CUDA build of torch: PYTHON=...
test-gpu:
	PYTHON=$(PYTHON) tests/gpu/run.sh

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	# All run, whatever the first ones find; a missed bar in any shows in the exit code.
	status=0; for each in recovery overhead healing transfer checkpoints control alerts techniques stragglers lightning_overhead huggingface_overhead; do $(BIN)/python bench/$$each.py || status=1; done; exit $$status

# Six systems, two faults, 20 times each: about 45 minutes on a machine that does nothing else.
poster: setup
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python bench/poster.py

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
