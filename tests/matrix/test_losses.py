# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses other than the family's own: exact, or refused with a cause and a remedy."""

from __future__ import annotations

import random

import pytest
import torch

from composer_tokacc import TokenAccumulation
from tests.matrix.harness import measure, plain_gradients
from tests.matrix.native_models import LOSSES, NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.text import collate, text_rows
from tests.support.training import relative_error

# One row without loss tokens, one whose label at position 0 only an unshifted loss counts.
SHAPE = [(4, 2), (9, 0), (5, 5), (14, 11), (6, 1), (3, 2)]
MEANS_OVER_TOKENS = ('causal', 'unshifted', 'fused', 'label smoothing', 'z-loss')


@pytest.fixture(scope='module')
def batch():
    return collate(text_rows(SHAPE))


def test_oracle_tells_the_losses_apart(batch):
    """Were two of them the same on this batch, the wrong rule would pass."""
    causal = plain_gradients(NativeModel('causal'), batch)
    for name in ('unshifted', 'all positions', 'per row', 'label smoothing', 'z-loss'):
        assert relative_error(plain_gradients(NativeModel(name), batch), causal) > 1e-3, name


@pytest.mark.parametrize(('init', 'microbatch_size'), [('large', 1), ('fresh', 2)])
@pytest.mark.parametrize('logits', ['always', 'eval', 'never'])
@pytest.mark.parametrize('loss', LOSSES)
def test_loss_is_exact_or_refused(loss, logits, init, microbatch_size, batch):
    outcome = measure(NativeModel(loss, logits=logits, init=init), batch, microbatch_size)
    assert outcome.kind in ('exact', 'refused'), outcome
    if loss in ('causal', 'unshifted', 'fused'):
        assert outcome.kind == 'exact', outcome
    if loss in ('all positions', 'per row'):
        assert outcome.kind == 'refused', outcome


@pytest.mark.parametrize('loss', MEANS_OVER_TOKENS)
def test_explicit_rule_makes_every_mean_over_tokens_exact(loss, batch):
    rule = 'unshifted' if loss == 'unshifted' else 'causal'
    algorithm = TokenAccumulation(loss_tokens=rule, check_loss=False)
    outcome = measure(NativeModel(loss, logits='never'), batch, 2, algorithms=[algorithm])
    assert outcome.kind == 'exact', outcome


@pytest.mark.parametrize('logits', ['always', 'never'])
@pytest.mark.parametrize('wrong', ['unshifted', 'causal'])
def test_wrong_explicit_rule_is_refused(wrong, logits, batch):
    right = 'causal' if wrong == 'unshifted' else 'unshifted'
    model = NativeModel(right, logits=logits)
    outcome = measure(model, batch, 2, algorithms=[TokenAccumulation(loss_tokens=wrong)])
    assert outcome.kind == 'refused', outcome


def test_router_loss_changes_the_gradient():
    """Were it nothing, being exact without it would prove nothing."""
    subject = SUBJECTS['mixtral']
    batch = subject.batch(0, side='right')
    without = plain_gradients(subject.model('large'), batch)
    model = subject.model('large')
    model.model.config.output_router_logits = True
    assert relative_error(plain_gradients(model, batch), without) > 1e-4


def test_random_empty_microbatches_of_a_fused_loss_send_no_nan():
    outcomes = []
    for seed in range(8):
        rows = SUBJECTS['llama'].batch(seed, side='right')
        empty = random.Random(seed).sample(range(len(rows['labels'])), 2)
        rows['labels'][empty] = -100
        if (rows['labels'][:, 1:] != -100).any():
            outcomes.append(measure(NativeModel('fused', logits='never'), rows, 1))
    assert len(outcomes) > 4
    assert all(outcome.kind == 'exact' for outcome in outcomes), list(map(str, outcomes))


def test_no_model_of_the_matrix_drops_out():
    for name, subject in SUBJECTS.items():
        rates = [module.p for module in subject.model('fresh').modules() if isinstance(module, torch.nn.Dropout)]
        assert not any(rates), name
