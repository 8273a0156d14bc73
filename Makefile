# `make demo` and `make test` are the two commands of the README. Both set up ./.venv by themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
VENV := .venv
RUN := $(VENV)/bin/python
# Test files are dealt to so many processes, whole, since the tests of a file share runs of verl. 0 runs them one by one.
WORKERS ?= 2

.PHONY: demo demo-seeds test test-long lint setup clean

setup: $(VENV)/.complete

# constraints-cpu.txt holds all versions; PIP_ARGS may name an index with CPU builds of torch.
$(VENV)/.complete: pyproject.toml constraints-cpu.txt
	$(PYTHON) -c "import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 12), f'Python 3.11 or 3.12 is needed, not {sys.version}; set PYTHON=...'"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints-cpu.txt -e '.[cpu,megatron-cpu,dev]'
	touch $@

demo: setup
	$(RUN) -m verl_dppo.cli demo

demo-seeds: setup
	$(RUN) -m verl_dppo.cli demo --seeds 0 1 2 --out runs/demo-seeds

test: setup
	$(RUN) -m pytest -m 'not long' -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-long: setup
	$(RUN) -m pytest -m long

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) runs outputs multirun
