.DELETE_ON_ERROR:
.PHONY: help demo docs test core-alone test-newest test-oldest lint size compiled clean

PYTHON ?= python3
BIN := .venv/bin
COMPILE = $(BIN)/python -m perseus_planner.solver.compiling

help: ## list the targets
	@awk -F ': .*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

demo: .venv/installed-plot ## profile a simulated GPU, solve, plan and report; writes to demo/
	@$(COMPILE) > /dev/null
	mkdir -p demo
	$(BIN)/planner profile --gpu simulated:a100-sxm --stages 4 -o demo/profile.yaml
	$(BIN)/planner solve demo/profile.yaml --schedule 1f1b --microbatches 16 -o demo/frontier.npz
	$(BIN)/planner plan demo/frontier.npz --slowdown 1.00 -o demo/plan.yaml
	$(BIN)/planner report demo/frontier.npz demo/plan.yaml demo/profile.yaml -o demo/report.html
	@echo
	@$(BIN)/python -c "from perseus_planner import Plan; plan = Plan.load('demo/plan.yaml'); \
		print(f'Saved: {100 * (1 - plan.energy_j / plan.baseline_energy_j):.1f} % of the energy, at', \
		f'{plan.time_s / plan.baseline_time_s:.4f}x the time of full clocks ({plan.origin}).')"
	@echo "Look:  demo/report.html shows where the energy goes, and what the plan changes."
	@echo "Next:  source $(BIN)/activate, and then the README, from \"Install\" on."

docs: .venv/installed-docs ## build docs/ into site/, and fail on warnings
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# A worker more than CPUs, as tests wait for their processes a third of the time; but one thread for each, as threads of
# several workers wait for each other. Bytecode is written, or each worker and its processes would compile all anew.
# tests/conftest.py has the order of the files.
test: .venv/installed-test ## run all checks and tests
	$(MAKE) --no-print-directory lint compiled
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 \
		$(BIN)/pytest --numprocesses=$$(($$(nproc) + 1)) --dist=loadfile --no-loadscope-reorder

# Each in an environment of its own, .venv-newest and .venv-oldest. Without the Python or the releases that it needs, a
# sentence says so; with REQUIRED=1 it fails. RESULTS=benchmarks/results writes the table of engines there.
test-newest: ## run the tests of the engines with their newest releases
	@$(PYTHON) tests/worlds/environment.py $(if $(REQUIRED),--required) newest \
		python tests/worlds/engines.py $(if $(RESULTS),--output $(RESULTS))

test-oldest: ## run the demo with the oldest releases of all that it needs
	@$(PYTHON) tests/worlds/environment.py $(if $(REQUIRED),--required) oldest \
		sh -c 'mkdir -p build/oldest && $(MAKE) -C build/oldest -f ../../Makefile \
		--assume-old=.venv/installed-plot demo BIN=$(CURDIR)/.venv-oldest/bin'

# A copy without extensions and their tests. Tests of the core that need an extension say so (`needs`), and are skipped
# there. FOLDERS=... runs fewer: CI takes those that do not start ranks, as `make test` runs the others with extensions.
CORE := base profiles schedules plans solver gpu runs views cli profiler runtime
FOLDERS ?= $(CORE)
core-alone: .venv/installed-test ## run the tests of the core without any extension
	rm -rf build/core-alone
	mkdir -p build/core-alone
	cp -a Makefile pyproject.toml README.md perseus_planner profiler runtime tests benchmarks docs examples deploy build/core-alone
	rm -rf build/core-alone/perseus_planner/extensions build/core-alone/tests/extensions
	cd build/core-alone && env PYTHONPATH=$(CURDIR)/build/core-alone OMP_NUM_THREADS=1 \
		$(CURDIR)/$(BIN)/pytest --numprocesses=$$(($$(nproc) + 1)) --dist=loadfile --no-loadscope-reorder \
		$(FOLDERS:%=tests/%)

lint: .venv/installed-test ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p perseus_planner

size: ## print how large product and tests are, and which imports run in circles or up
	@$(PYTHON) tests/support/house.py

compiled: | $(BIN)/python ## compile the kernels, where their sources have changed since the installation
	@$(COMPILE)

clean: ## remove the environment, the demo and all caches
	rm -rf .venv .venv-newest .venv-oldest build demo site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find perseus_planner profiler runtime tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
	find perseus_planner -name 'kernels-*.so' -delete

.venv/installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/pip install -qq --disable-pip-version-check -e '.[$*]'
	touch $@

# The engines that the tests need. torch is installed first and alone, so that pip takes its CPU build if there is one.
.venv/installed-test: | .venv/engines
.venv/engines: | $(BIN)/python
	$(BIN)/pip install -qq --disable-pip-version-check torch==2.13.0
	DS_BUILD_OPS=0 $(BIN)/pip install -qq --disable-pip-version-check deepspeed==0.19.8 megatron-core==0.16.1
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
