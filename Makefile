# make setup      an environment in .venv, with shardplan installed in it
# make plan       plans Llama-3.1-8B on 8 H100s, prints the plan, writes plan.json
# make test       everything that CI runs
# make test-slow  the long tests as well
# make docs       the documentation as a site, in build/site
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# A file's tests share what is made once for the file (a server, a plan), so they stay together.
# One thread in each process: two workers and the processes that they start fill two cores; idle OpenMP threads spin.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile
STAMP := .venv/.installed

.PHONY: setup plan test test-slow lint format docs clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

plan: $(STAMP)
	$(BIN)/shardplan plan llama-3.1-8b --cluster 1x8xh100-sxm-80gb --batch 64 --seq 4096 -o plan.json

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(PYTEST) -m "not slow"

test-slow: lint
	$(PYTEST)

docs: $(STAMP)
	$(BIN)/python -m typer api.cli.main utils docs --name shardplan --output docs/reference/cli.md
	$(BIN)/mkdocs build --strict

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
