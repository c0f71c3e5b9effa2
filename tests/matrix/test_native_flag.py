# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""token_data_spec and Composer's own ``accumulate_train_batch_on_tokens``, without the algorithm."""

from __future__ import annotations

import pytest

from tests.matrix.harness import measure
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.training import COMPOSERS_FLAG

NUM_BATCHES = 2


def run(model, batch, /, **options):
    return measure(model, batch, 2, algorithms=[], trainer_options=COMPOSERS_FLAG, **options)


def batches(name):
    for seed in range(NUM_BATCHES):
        batch = SUBJECTS[name].batch(seed, side='right')
        if name == 'bert':  # the label in column 0 is what tells the rules apart
            batch['labels'][:, 0] = batch['input_ids'][:, 0]
        yield batch


@pytest.mark.parametrize('name', ['llama', 't5', 'bert'])
def test_flag_with_a_model_is_exact(name):
    model = SUBJECTS[name].model('large')
    for batch in batches(name):
        outcome = run(model, batch, model=model)
        assert outcome.kind == 'exact', outcome


@pytest.mark.parametrize('rule', ['causal', 'auto'])
@pytest.mark.parametrize('name', ['t5', 'bert'])
def test_flag_with_a_wrong_rule(name, rule):
    model = SUBJECTS[name].model('large')
    for batch in batches(name):
        outcome = run(model, batch, loss_tokens=rule)
        assert outcome.kind == 'refused', outcome
        assert 'model=' in outcome.message, outcome


def test_flag_without_logits():
    model = NativeModel('unshifted', logits='never')
    batch = SUBJECTS['llama'].batch(0, side='right')
    batch['labels'][:, 0] = batch['input_ids'][:, 0]
    outcome = run(model, batch, model=model)
    assert outcome.kind == 'exact', outcome
