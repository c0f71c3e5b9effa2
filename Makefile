# Everything runs in .venv, which is made on first use from PyPI and again when the dependencies change.
VENV ?= .venv
PYTHON ?= python3
STAMP := $(VENV)/.installed
# Small models on few cores: more than one thread a rank only makes the ranks fight for them.
export OMP_NUM_THREADS ?= 1

# mosaicml-streaming wants transformers<5 and an older numpy, so it has an environment of its own.
VENV_STREAMING ?= .venv-streaming
STAMP_STREAMING := $(VENV_STREAMING)/.installed

.PHONY: demo test test-slow test-gpu test-streaming lint bench

# A small LLaVA learns to read scanned digits on two ranks; ends with a summary and a picture.
demo: $(STAMP)
	$(VENV)/bin/composer -n 2 -m composer_tokacc.train yamls/digits.yaml

test: $(STAMP)
	$(VENV)/bin/python -m pytest -m 'not slow'

# Runs of two and four ranks under the real launcher.
test-slow: $(STAMP)
	$(VENV)/bin/python -m pytest -m slow

# What only a GPU can show; all of it is skipped where there is none.
test-gpu: $(STAMP)
	$(VENV)/bin/python -m pytest -m gpu

# Everything about MDS shards, runs of up to four ranks included (six minutes); MARKED='not slow' leaves those out.
MARKED ?= slow or not slow
test-streaming: $(STAMP_STREAMING)
	$(VENV_STREAMING)/bin/python -m pytest tests/streaming -m '$(MARKED)'

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

bench: $(STAMP)
	$(VENV)/bin/python -m benchmarks.invariance

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[demo,bench,dev]'
	@touch $@

$(STAMP_STREAMING): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV_STREAMING)
	$(VENV_STREAMING)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[streaming,demo,dev]'
	@touch $@
