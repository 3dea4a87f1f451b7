# make aot        a fresh clone to a compiled cache of the shipped tables and decode layers
# make test       the test suite, without what is marked slow
# make test-slow  what is marked slow
# make lint       ruff and black

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: aot test test-slow lint venv

venv: $(STAMP)

# Exactly this torch: the plain name resolves to a CUDA build of several gigabytes.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0 -e '.[linker,dev]'
	touch $@

aot: $(STAMP)
	$(BIN)/python -m aiter.aot.flydsl.moe
	$(BIN)/python -m atom.mono.aot

test: $(STAMP)
	$(BIN)/python -m pytest op_tests -q -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest op_tests -q -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/black --check -q . || { $(BIN)/black --diff -q .; exit 1; }
