# PYTHON: the interpreter .venv is built on. One that has torch >= 2.11 lends it to .venv.
PYTHON ?= python3
BUDGET ?= 90s
# Files of tests side by side: most keep one of two cores busy.
STREAMS := --numprocesses 2 --dist loadfile --no-loadscope-reorder
VENV := .venv/bin/python
APT := apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends

.PHONY: help venv test test-all test-bridges test-hosts test-pages test-ray test-slow test-slurm fuzz faults check pictures reference demo clean always

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

venv: .venv/stamp ## make .venv (PYTHON=... reuses that interpreter's torch)

# An interpreter named by the caller is looked at anew; otherwise a finished .venv is taken as it is.
.venv/stamp: pyproject.toml requirements.lock requirements-torch.lock tools/venv.py $(if $(filter file,$(origin PYTHON)),,always)
	@$(PYTHON) tools/venv.py
	@touch $@

.venv/check-stamp: .venv/stamp requirements-check.lock
	@$(VENV) -m pip install --quiet --disable-pip-version-check \
		--require-hashes -r requirements-check.lock
	@touch $@

.venv/ray-stamp: .venv/stamp requirements-ray.lock
	@$(VENV) -m pip install --quiet --disable-pip-version-check \
		--require-hashes -r requirements-ray.lock
	@touch $@

# vLLM asks for another torch and for CUDA's packages: its Python part does without. It gets an
# environment of its own, which sees that of .venv.
.venv-bridges/stamp: .venv/stamp requirements-bridges.lock
	@$(VENV) tools/bridges_venv.py
	@touch $@

test: .venv/stamp ## run the tests: unit, golden, gloo on the CPU, GPU where there is one
	@$(VENV) -m pytest $(STREAMS)

test-all: .venv/stamp ## run the tests that make test leaves out, too
	@$(VENV) -m pytest $(STREAMS) -m "whole or not whole"

test-bridges: .venv-bridges/stamp ## install vLLM and Megatron-core and move weights into their models
	@.venv-bridges/bin/python -m pytest --numprocesses 0 -rs tests/bridges

test-hosts: .venv/stamp ## run commands on two hosts of this machine: network namespaces, where root may make them
	@command -v tc > /dev/null || { $(APT) iproute2 > /dev/null; }
	@$(VENV) -m pytest --numprocesses 0 -rs tests/hosts

test-pages: .venv/stamp ## install Chromium from Debian's packages if it is missing, open every kind of page in it
	@command -v chromium > /dev/null || { $(APT) chromium fonts-dejavu-core > /dev/null; }
	@$(VENV) -m pytest --numprocesses 0 -rs tests/pages

test-ray: .venv/ray-stamp ## install Ray and run the tests on several raylets of this host
	@$(VENV) -m pytest --numprocesses 0 tests/ray

test-slow: .venv/stamp ## run the tests of launches, ranks, jobs and faults beside 40 busy processes
	@$(VENV) -m tests.busy

test-slurm: .venv/stamp ## install Slurm from Debian's packages if it is missing, run jobs on two nodes of it
	@command -v slurmctld > /dev/null || { $(APT) slurm-wlm munge > /dev/null; }
	@$(VENV) -m pytest --numprocesses 0 -rs tests/slurm

fuzz: .venv/stamp ## run 100,000 damaged inputs of every kind: ./fuzz.json (OUT=...)
	@$(VENV) -m tests.fuzz --cases 100000 --out $(or $(OUT),fuzz.json)

faults: .venv/stamp ## strike 200 jobs with signals, going on where it stopped: ./faults (OUT=...)
	@$(VENV) -m tests.faults --count 200 --out $(or $(OUT),faults)

check: .venv/check-stamp ## lint, format, types, layers, sizes, words, spelling, the reference
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy
	$(VENV) -c "from importlinter.cli import lint_imports_command as main; main()"
	$(VENV) tools/size_gate.py
	$(VENV) tools/docstrings.py
	$(VENV) -m codespell_lib
	PYTHONPATH=. $(VENV) tools/reference.py reference

pictures: .venv/stamp ## draw the pictures of docs/calibrate.md and docs/search.md anew
	@PYTHONPATH=. $(VENV) tools/pictures.py
	@PYTHONPATH=. $(VENV) tools/search_pictures.py

reference: .venv/check-stamp ## write the reference of the Python API from its docstrings: ./reference
	@PYTHONPATH=. $(VENV) tools/reference.py reference

demo: .venv/stamp ## measure this machine, plan a GPT for it, run it, compare: ./demo/report.html
	@mkdir -p demo && cd demo && begin=$$(date +%s) && \
	for stage in "detect" "measure profile --budget $(BUDGET)" "calibrate" "plan" \
	             "run plan.json --rivals 2" "report"; do \
		start=$$(date +%s); echo "--- meshwise $$stage"; \
		../$(VENV) -m meshwise $$stage || [ $$? -eq 4 ] || exit 1; \
		echo "--- $$(($$(date +%s) - start)) s"; \
	done; \
	echo "demo: $$(($$(date +%s) - begin)) s in all; open demo/report.html"

clean: ## remove .venv, caches and the demo
	rm -rf .venv .venv-bridges demo reference .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
