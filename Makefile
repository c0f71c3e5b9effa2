# Everything runs in .venv. It is made from PyPI on first use, and again if the dependencies change.
VENV ?= .venv
PYTHON ?= python3
STAMP := $(VENV)/.installed
# Models are small, and cores are few. With more than one thread each, ranks would only compete for the cores.
export OMP_NUM_THREADS ?= 1

# mosaicml-streaming wants transformers<5 and an older numpy, so it has an environment of its own.
VENV_STREAMING ?= .venv-streaming
STAMP_STREAMING := $(VENV_STREAMING)/.installed

# Composer's last release pins torch below 2.7.1 and numpy below 2.3. For newer GPUs it is installed without its pins.
VENV_NEWEST ?= .venv-newest
STAMP_NEWEST := $(VENV_NEWEST)/.installed

# Every lower bound that setup.cfg declares.
VENV_OLDEST ?= .venv-oldest
STAMP_OLDEST := $(VENV_OLDEST)/.installed

# llm-foundry pins torch 2.7.0 and transformers 4.51. It takes 7 GB, so only its own example uses this environment.
VENV_FOUNDRY ?= .venv-llmfoundry
STAMP_FOUNDRY := $(VENV_FOUNDRY)/.installed

# The other trainers of benchmarks/rivals and examples/prove (TRL, Lightning, accelerate, ODB, DeepSpeed).
VENV_RIVALS ?= .venv-rivals
STAMP_RIVALS := $(VENV_RIVALS)/.installed

# The tests that break first with other releases of other packages; `SLICE=` for all tests. Tests of our own losses are left out,
# because they use little of other packages. So is Qwen2.5-Omni, because its processor takes minutes on Transformers 4.57.
SLICE ?= tests/sizing/test_trace.py tests/checks tests/algorithm tests/data_spec tests/layout tests/data/test_media_training.py \
	tests/programs/test_models.py tests/programs/test_errors.py --ignore=tests/algorithm/test_token_weights.py \
	--ignore=tests/algorithm/test_loss_terms.py --ignore=tests/checks/test_changing_losses.py \
	--deselect='tests/data/test_media_training.py::test_gradient_is_that_of_one_forward[qwen2_5_omni'

# If Python may not write bytecode, as in many containers, each process compiles torch and Transformers again: 19 s instead of 5.
unexport PYTHONDONTWRITEBYTECODE

# uv takes seconds instead of pip's minutes, and keeps downloads. It is the one of the machine, or else one for all environments.
UV := $(or $(shell command -v uv),.uv/bin/uv)

# $(call install,FOLDER,WHAT) makes an environment, and installs WHAT in it.
define install
	$(UV) venv --quiet --seed --clear --python "$$(command -v $(PYTHON))" $(1)
	$(UV) pip install --quiet --python $(1)/bin/python $(2)
	@touch $(1)/.installed
endef

# Made again each time, with only the wheel, as a user installs it.
VENV_DIST ?= .venv-dist

.PHONY: demo test test-slow test-gpu test-streaming test-newest test-oldest test-rivals lint model-types bench bench-rivals docs dist \
	example-llm-foundry

# Trains a small LLaVA to read scanned digits on two ranks. Ends with a summary and a picture.
demo: $(STAMP)
	$(VENV)/bin/composer -n 2 -m composer_tokacc.train yamls/digits.yaml

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 -m 'not slow'

# Runs of two and four ranks under the real launcher.
test-slow: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -m slow

# Tests that need a GPU. They are skipped on a machine without one.
test-gpu: $(STAMP)
	$(VENV)/bin/python -m pytest -m gpu

# Tests of MDS shards, also with runs of up to four ranks (six minutes). MARKED='not slow' leaves these runs out. The tests of loggers
# are here, because only this environment has the packages of the loggers.
MARKED ?= slow or not slow
test-streaming: $(STAMP_STREAMING)
	$(VENV_STREAMING)/bin/python -m pytest tests/streaming tests/monitor/test_loggers.py -m '$(MARKED)'

# Worker processes of the next two targets; 0: no worker, only pytest itself. In a new environment each process compiles for 20 s.
SLICE_WORKERS ?= 2
test-newest: $(STAMP_NEWEST)
	$(VENV_NEWEST)/bin/python -m pytest -n $(SLICE_WORKERS) -m 'not slow' $(SLICE)

# Keeps its compiled planner in its own folder, because a release of numba deletes what another one has compiled.
test-oldest: export NUMBA_CACHE_DIR = $(abspath $(VENV_OLDEST))/numba
test-oldest: $(STAMP_OLDEST)
	$(VENV_OLDEST)/bin/python -m pytest -n $(SLICE_WORKERS) -m 'not slow' $(SLICE)

# Runs every command of examples/llm_foundry/README.md: llm-foundry's own `train` with our entry points, on one and two ranks,
# and with token_data_spec. Then checks the gradient of its first step.
example-llm-foundry: $(STAMP_FOUNDRY)
	$(VENV_FOUNDRY)/bin/python examples/llm_foundry/make_inputs.py
	$(VENV_FOUNDRY)/bin/llmfoundry train examples/llm_foundry/tiny.yaml
	$(VENV_FOUNDRY)/bin/composer -n 2 -c $(VENV_FOUNDRY)/bin/llmfoundry train examples/llm_foundry/tiny.yaml variables.model=llama
	$(VENV_FOUNDRY)/bin/llmfoundry train examples/llm_foundry/tiny.yaml 'code_paths=[examples/llm_foundry/token_data_spec.py]'
	for ranks in 1 2; do for model in mpt llama t5; do \
		$(VENV_FOUNDRY)/bin/composer -n $$ranks examples/llm_foundry/check_exactness.py examples/llm_foundry/tiny.yaml \
			variables.model=$$model || exit 1; \
	done; done

# Tries a tiny model of every type of transformers, and compares it with docs/families.md (half an hour). TRY=1 writes this page.
model-types: $(STAMP)
ifdef TRY
	$(VENV)/bin/python -m tests.model_types.table try multimodal
	$(VENV)/bin/python -m tests.model_types.table try text
	$(VENV)/bin/python -m tests.model_types.table try masked
	$(VENV)/bin/python -m tests.model_types.table try seq2seq
	$(VENV)/bin/python -m tests.model_types.table page
else
	$(VENV)/bin/python -m pytest -n 2 tests/model_types/all_types.py
endif

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

bench: $(STAMP)
	$(VENV)/bin/python -m benchmarks.invariance

# A warning, a broken link or a broken reference is an error.
docs: $(STAMP)
	$(VENV)/bin/python -m sphinx -E -W -n --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

# Builds the sdist, and the wheel from it. Installs the wheel in an empty environment, and tries it outside of the checkout.
dist: | $(UV)
	rm -rf dist && $(UV) build --quiet --out-dir dist
	$(UV) venv --quiet --clear --python "$$(command -v $(PYTHON))" $(VENV_DIST)
	$(UV) pip install --quiet --python $(VENV_DIST)/bin/python dist/*.whl
	.ci/smoke "$(CURDIR)/$(VENV_DIST)"
	@ls -l dist

# Takes hours on two cores. A part: RIVALS="--sets 'lognormal 0.9' --ranks 1". COMPOSER_TOKACC_LENGTHS: folder of real tables.
RIVALS ?=
bench-rivals: $(STAMP_RIVALS)
	$(VENV_RIVALS)/bin/python -m benchmarks.rivals $(RIVALS)

test-rivals: $(STAMP_RIVALS)
	$(VENV_RIVALS)/bin/python -m pytest tests/benchmarks/test_rivals.py tests/benchmarks/test_prove.py tests/benchmarks/test_logits.py

# Variables, because a comma would end an argument of $(call).
EVERYTHING := '.[demo,bench,datasets,lora,media,dev]'
HERE := '.[demo,bench,datasets,lora,media,dev,docs]'
# Composer's logger for W&B uses a part of wandb that 0.20 removed. MLflow's store needs SQLAlchemy before 2.1.
LOGGERS := tensorboard 'wandb>=0.18,<0.20' 'mlflow-skinny>=2.14.1,<3' alembic 'sqlalchemy<2.1'
STREAMING := '.[streaming,demo,media,dev]' $(LOGGERS)
RIVAL_PACKAGES := '.[rivals,bench,dev]'

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv

# Packages of .venv are compiled when they are installed, because its commands are also typed by hand. `COMPILE=` leaves this to the
# first import.
COMPILE ?= --compile-bytecode
$(STAMP): setup.cfg pyproject.toml | $(UV)
	$(call install,$(VENV),$(COMPILE) -e $(HERE))

$(STAMP_STREAMING): setup.cfg pyproject.toml | $(UV)
	$(call install,$(VENV_STREAMING),-e $(STREAMING))

$(STAMP_NEWEST): setup.cfg pyproject.toml overrides.txt | $(UV)
	$(call install,$(VENV_NEWEST),--overrides overrides.txt -e $(EVERYTHING))

$(STAMP_OLDEST): setup.cfg pyproject.toml | $(UV)
	$(call install,$(VENV_OLDEST),--resolution lowest-direct -e $(EVERYTHING))

$(STAMP_RIVALS): setup.cfg pyproject.toml | $(UV)
	$(call install,$(VENV_RIVALS),-e $(RIVAL_PACKAGES))

$(STAMP_FOUNDRY): setup.cfg pyproject.toml examples/llm_foundry/overrides.txt | $(UV)
	$(call install,$(VENV_FOUNDRY),--overrides examples/llm_foundry/overrides.txt -e . 'llm-foundry==0.22.0')
