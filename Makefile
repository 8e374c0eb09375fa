# The commands of the README. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo quick test test-long test-slurm test-browser parity compiled kills resumes brute-force grids frozen versions systems null-gpu check format-check docs dist bench gpu gpu-kit clean

VENV := .venv
STAMP := $(VENV)/.ready
PACKAGES := core $(patsubst %/pyproject.toml,%,$(sort $(wildcard stages/*/pyproject.toml)))
SOURCES := $(wildcard $(addsuffix /src,$(PACKAGES)))
WORKFLOW := Snakefile workflow/Snakefile $(wildcard workflow/rules/*.smk)

# Extra arguments, such as CORES=2 or PYTEST="-k search -x".
CORES ?= all
PYTEST ?=
# The versions of torch that the packages declare.
TORCH_VERSIONS ?= 2.11.0 2.12.0 2.13.0
# The version of torch for CUDA that `make null-gpu` runs, and its parts, such as PARTS="context LoRA"; all by default.
NULL_GPU_TORCH ?= 2.11.0
PARTS ?=
# Where `make gpu-kit` rehearses.
REHEARSAL ?= results/rehearsal
# Where `make dist` writes.
DIST ?= dist
# Where pip finds torch, if not where pip looks anyway, such as https://download.pytorch.org/whl/cpu (a smaller download).
TORCH_INDEX ?=

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Several processes share the cores here; without this, each would start a thread for every core.
demo quick test test-long test-slurm test-browser parity compiled kills resumes brute-force grids frozen bench: export OMP_NUM_THREADS := 1
# Compiled modules are kept, whatever the caller's environment says: without them each process compiles all anew.
quick test test-long: export PYTHONDONTWRITEBYTECODE :=

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP) ## make .venv with everything in it (the other commands do it by themselves)

demo: $(STAMP) ## measure this machine and a small model, plan, train, report: results/report.html
	@workflow/scripts/demo.sh $(CORES)

# Files are named, so that no other one is imported.
QUICK := $(addprefix tests/formats/test_formats_,$(addsuffix .py,axes columns context display errors examples expert_load hostile_json messages schedule tables)) \
	$(addprefix tests/models/test_,$(addsuffix .py,config_keys frozen_parts low_rank)) $(wildcard tests/search/test_search_costs_*.py) \
	$(addprefix tests/search/test_search_,$(addsuffix .py,context marks rounding simulation_by_hand simulation_of_plans)) \
	$(addprefix tests/search/test_search_brute_force.py::test_,solver_equals_brute_force_on_every_tiny_case price_equals_the_enumeration least_memory_is_exact) \
	tests/train/test_two_ranks.py

quick: $(STAMP) ## after each change: files' types, cost model, tiny searches, one plan on two ranks (under a minute)
	@python -m pytest -q --numprocesses 2 --dist loadfile -m "not long" $(QUICK) $(PYTEST)

# Of three processes one often waits, for time-outs or for ranks.
test: $(STAMP) ## run all tests but the long ones
	@python -m pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder -m "not long" $(PYTEST)

test-long: $(STAMP) ## the long ones: parity on 4 and 8 ranks, real profiles of every family, saves and trials of many plans (minutes)
	@python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder -m long $(PYTEST)

test-slurm: $(STAMP) ## the workflow on a real Slurm on loopback, of Debian's packages, which it installs (root; minutes)
	@tests/slurm/loopback.sh install
	@python -m pytest -q tests/slurm --timeout 1200 $(PYTEST)

test-browser: $(STAMP) ## pages in a real browser, 1,280 and 420 pixels wide: Debian's chromium, which it installs (root)
	@tests/browser/chromium.sh
	@python -m pytest -q tests/browser $(PYTEST)

parity: $(STAMP) ## random plans of every family on 2, 4 and 8 ranks, and every causal type of transformers as its stock class on 2, against one process, in float64 (an hour; types go on where they were cut)
	@python tests/train/run_parity.py
	@python tests/train/run_types.py

compiled: $(STAMP) ## a plan of every family under torch.compile against one process, in float32 (minutes)
	@python tests/train/run_compiled.py

kills: $(STAMP) ## a run killed at 100 random moments and gone on with comes to the bits of an unbroken one (minutes; goes on where it was cut)
	@PYTHONPATH=tests python tests/train/run_kills.py

resumes: $(STAMP) ## what plans save, others on 2, 4 and 8 ranks go on from, in float64 (minutes)
	@PYTHONPATH=tests python tests/train/run_resumes.py

brute-force: $(STAMP) ## the planner against every plan of 94,000 tiny problems, and 20,000 forged certificates (hours; goes on where it was cut)
	@python tests/search/run_brute_force.py

grids: $(STAMP) ## tables of all grids of config/grids in results/grids; two need a package index once, one measures this machine
	@snakemake --cores all grids

frozen: $(STAMP) ## what searches and other commands give, to the byte what was frozen (2 minutes)
	@python tests/frozen check

versions: ## a short suite under each declared version of torch, in environments of their own (4 GB and 5 minutes each)
	@.ci/versions "$(TORCH_INDEX)" $(TORCH_VERSIONS)

null-gpu: ## plans of all families on a CUDA device that computes nothing, with torch for CUDA (gcc; 4 GB once; 10 minutes)
	@.ci/null-gpu "$(TORCH_INDEX)" $(NULL_GPU_TORCH) $(PARTS)

systems: ## what is exported, read by Megatron's, torchtitan's, DeepSpeed's and accelerate's own classes, old and new, in an environment of its own (20 minutes; resumes where it was cut)
	@.ci/systems "$(TORCH_INDEX)"

format-check: $(STAMP) ## what ruff and snakefmt would write otherwise
	@ruff format -q --check . || { ruff format --check .; exit 1; }
	@snakefmt --check $(WORKFLOW) 2>&1 | { grep -v -E '^\[INFO\]' || true; }

check: format-check ## formats, ruff, mypy --strict, import-linter, schemas
	@ruff check -q .
	@mypy $(SOURCES) workflow docs/site
	@lint-imports --no-logo | tail -n 3
	@python -m shardwright.schema.generate --check
	@python -m shardwright_search.space.schema --check
	@python workflow/configuration_types.py --check
	@python workflow/configuration_defaults.py --check
	@python workflow/environments.py --check
	@python docs/site/types_table.py --check
	@python tests/architecture/count_code.py
	@echo "all checks passed"

docs: $(STAMP) ## the documentation as a site in build/docs, with every link checked: docs/testing.md
	@rm -rf build/docs
	@sphinx-build --quiet --fail-on-warning --keep-going -c docs/site . build/docs
	@python docs/site/check_links.py build/docs

dist: $(STAMP) ## wheels in dist/, of all in one and of core and each stage: docs/install.md
	@mkdir -p $(DIST) && rm -f $(DIST)/shardwright*.whl
	@python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) . $(addprefix ./,$(PACKAGES))
	@ls $(DIST)

bench: $(STAMP) ## the side-by-side runs of benchmarks/ (long; on a quiet machine)
	@for run in benchmarks/*.py; do echo "$$run"; python "$$run"; done

gpu: $(STAMP) ## what only NVIDIA GPUs can show, for as long as it takes; goes on where it was cut: docs/gpu.md
	@PYTHONPATH=benchmarks python -m gpu_kit.prepare --here
	@KIT_WORK=results/gpu/work bash benchmarks/gpu_kit/run.sh --limit 0

gpu-kit: $(STAMP) ## what travels to a GPU that is there for 15 minutes (.whl, .kit), and its rehearsal on the processor (5 minutes)
	@PYTHONPATH=benchmarks python -m gpu_kit.prepare --wheels
	@rm -rf $(REHEARSAL)
	@OUT=$(REHEARSAL) bash benchmarks/gpu_kit/run.sh --rehearse
	@PYTHONPATH=benchmarks python -m gpu_kit.adopt $(REHEARSAL) --into $(REHEARSAL)/adopted

clean: ## remove .venv, results and caches
	@rm -rf $(VENV) .venvs results .snakemake .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): VERSION constraints.txt requirements-dev.txt pyproject.toml workflow/plugins/pyproject.toml
	@.ci/venv $(VENV) "$(TORCH_INDEX)"
	@touch $@
