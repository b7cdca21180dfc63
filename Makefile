# `make demo` and `make test` do everything on a fresh machine; both go through `make venv`.
PYTHON ?= python3
TORCH  := torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
DOCS   := $(VENV)/.stamp-docs
NEWEST := .venv-newest
PROJECTS := .venv-projects
# What depends on how models of Transformers are written.
CLIENT := tests/clients tests/unit/fusion tests/unit/tensor_parallel tests/unit/sequence \
          tests/distributed/fusion tests/distributed/tensor_parallel tests/distributed/sequence
# Else every process that a test starts compiles the whole package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv demo test test-all newest projects quick kernels lint types unit format bench docs clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

venv: $(STAMP) ## create .venv with torch, this package and the development tools (quick when nothing changed)

$(STAMP): pyproject.toml Makefile
	@echo "==> creating $(VENV) with $(TORCH) and the development tools"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) --editable '.[dev]'
	@touch $@

$(DOCS): $(STAMP)
	@echo "==> adding the documentation tools to $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) --editable '.[docs]'
	@touch $@

demo: venv ## install, then train a small GPT on two processes (a few minutes)
	@echo "==> 1/3 the config, explained: python -m deepspeed.config explain examples/gpt/ds_config.json --changed"
	@$(BIN)/python -m deepspeed.config explain examples/gpt/ds_config.json --world-size 2 --changed
	@echo "==> 2/3 memory of each ZeRO stage: deepspeed --num_gpus 2 examples/gpt/memory.py"
	@DS_ACCELERATOR=cpu $(BIN)/deepspeed --num_gpus 2 examples/gpt/memory.py
	@echo "==> 3/3 training at stage 3: deepspeed --num_gpus 2 examples/gpt/train.py --deepspeed_config examples/gpt/ds_config.json"
	@DS_ACCELERATOR=cpu $(BIN)/deepspeed --num_gpus 2 examples/gpt/train.py --deepspeed_config examples/gpt/ds_config.json

test: venv ## lint, types, import contract, and tests that cover every behaviour (15 minutes on two cores)
	@$(MAKE) --no-print-directory -j 2 lint types
	@echo "==> tests: covering samples, without tests/full.txt"
	@$(BIN)/python -m pytest -n 2 --dist worksteal --sample --budget tests

test-all: venv ## what CI runs: every test, the newest Transformers, projects of others
	@$(MAKE) --no-print-directory -j 2 lint types
	@$(MAKE) --no-print-directory unit newest projects

# Environments over .venv: in one only Transformers and what that needs are newer, the other has projects of others.
$(NEWEST)/.stamp $(PROJECTS)/.stamp: $(STAMP)
	@rm -rf $(@D)
	@$(BIN)/python -m venv --without-pip $(@D)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	@touch $@

# All of these tests run with the version that is pinned.
newest: $(NEWEST)/.stamp
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) --upgrade transformers
	@echo "==> tests with Transformers $$($(NEWEST)/bin/python -c 'import transformers; print(transformers.__version__)')"
	@$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal --sample $(CLIENT)

# Without dependencies: `.venv` has the large ones, and stand-ins take the place of others. OpenRLHF also installs its
# own package `tests`.
projects: $(PROJECTS)/.stamp ## start projects of others with this package (3 minutes)
	@$(PROJECTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--requirement tests/projects/requirements.txt
	@rm -rf "$$($(PROJECTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests"
	@echo "==> tests of projects"
	@$(PROJECTS)/bin/python -m pytest -n 2 tests/projects tests/distributed/elasticity/test_ray_train.py

# What is marked slow is left to `make test`.
quick: lint types ## what to run after every change: lint, types, and the tests of one process (2 minutes)
	@echo "==> quick tests"
	@$(BIN)/python -m pytest -n 2 --sample -m "not slow" tests/architecture tests/unit tests/docs/test_snippets.py

kernels: venv ## compile for GPUs, without one, the kernels that tests interpret (5 minutes)
	@echo "==> tests of operations, and their kernels for GPUs"
	@$(BIN)/python -m pytest -n 2 --sample --compile-kernels tests/unit/ops

lint: venv
	@echo "==> lint, format, import contract"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --config .importlinter

types: venv
	@echo "==> strict type check of the package"
	@$(BIN)/mypy --num-workers 2

unit: venv
	@echo "==> tests: all, but of products of three or more parameters covering samples"
	@$(BIN)/python -m pytest -n 2 --dist worksteal --pairs tests

format: venv ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: venv ## compare with real DeepSpeed and plain PyTorch (builds an environment of its own in .bench)
	@$(BIN)/python -m benchmarks

docs: $(DOCS) ## build the documentation into site/ and fail on any warning
	@$(BIN)/python -m docs.generate
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "==> site/index.html"

clean: ## remove everything that the other targets made
	rm -rf $(VENV) $(NEWEST) $(PROJECTS) .bench site build dist .mypy_cache .ruff_cache .hypothesis .import_linter_cache
