# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Token weights in models of many families and in many losses: the gradient is exact, or the run is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer_tokacc import TokenAccumulation
from tests.matrix.harness import measure
from tests.matrix.native_models import LOSSES, MEANS_OVER_TOKENS, SMOOTHING, Z_WEIGHT, NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.text import ragged_batch
from tests.support.weights import column, weighted_gradients

SHAPE = [(4, 2), (9, 0), (5, 5), (14, 11), (6, 1), (3, 2)]
UNSHIFTED = ('bert', 't5')
MICROBATCH_SIZE = 2


def weighted(token_weights, **options):
    """Returns the options of ``measure`` for token weights, and the reference for them.

    Takes the options of :func:`tests.support.weights.weighted_losses`.
    """
    return {
        'algorithms': [TokenAccumulation(token_weights=token_weights)],
        'reference': partial(weighted_gradients, token_weights=token_weights, **options),
    }


def with_random_weights(batch):
    return {**batch, 'loss_weights': column(batch)}


# Shifted by the model, left padding and absolute positions, masked language model, encoder-decoder, MoE, media.
@pytest.mark.parametrize(
    ('family', 'token_weights', 'side', 'packing'),
    [
        ('gpt2', 'column', 'left', False),
        ('gpt2', 'sample', 'right', True),
        ('bert', 'sqrt', 'right', False),
        ('t5', 'column', 'right', False),
        ('mixtral', 'sqrt', 'right', False),
        ('gemma3', 'sample', 'right', True),
        ('qwen2_vl', 'column', 'left', False),
        ('mllama_mixed', 'column', 'right', False),
        pytest.param('qwen2_vl', 'sample', 'right', True, marks=pytest.mark.slow),
        pytest.param('blip2', 'sqrt', 'right', False, marks=pytest.mark.slow),
        pytest.param('idefics3', 'column', 'left', False, marks=pytest.mark.slow),
        pytest.param('qwen2_audio', 'sqrt', 'right', False, marks=pytest.mark.slow),
    ],
)
def test_weighted_families_are_exact_or_refused(family, token_weights, side, packing):
    subject = SUBJECTS[family]
    batch = subject.batch(1, side=side)
    shift = 0 if family in UNSHIFTED else 1
    options = weighted(token_weights, shift=shift)

    weighted_batch = with_random_weights(batch)
    outcome = measure(subject.model('large'), weighted_batch, MICROBATCH_SIZE, packing=packing, **options)

    if outcome.kind == 'exact':
        return
    # Only a packed batch may be refused, and only if it is refused without weights too.
    assert packing, outcome
    assert outcome.kind == 'refused', outcome
    outcome_without_weights = measure(subject.model('large'), batch, MICROBATCH_SIZE, packing=True)
    assert outcome_without_weights.kind == 'refused'


def weighted_batch_of_text():
    batch = ragged_batch(SHAPE)
    return with_random_weights(batch)


# How the reference computes losses of tokens that are not plain shifted cross-entropies.
REFERENCE_OPTIONS = {
    'unshifted': {'shift': 0},
    'label smoothing': {'label_smoothing': SMOOTHING},
    'z-loss': {'z_weight': Z_WEIGHT},
}
CASES = [(loss, 'always', True) for loss in LOSSES]
CASES += [(loss, 'always', False) for loss in ('causal', 'unshifted', 'per row', 'label smoothing')]
CASES += [('causal', 'eval', True), ('fused', 'never', True), ('fused', 'never', False)]
"""The loss, when the model returns logits, and whether the loss is checked."""


@pytest.mark.parametrize(('loss', 'logits', 'check_loss'), CASES)
def test_loss_is_exact_or_refused(loss, logits, check_loss):
    """Weights are applied to losses that the package computes from the logits, so it needs them in training."""
    algorithm_options = {}
    if not check_loss:
        rule = 'unshifted' if loss == 'unshifted' else 'causal'
        algorithm_options = {'check_loss': False, 'loss_tokens': rule}
    algorithm = TokenAccumulation(token_weights='column', **algorithm_options)
    reference_options = REFERENCE_OPTIONS.get(loss, {})
    reference = partial(weighted_gradients, token_weights='column', **reference_options)
    model = NativeModel(loss, logits=logits)

    outcome = measure(model, weighted_batch_of_text(), MICROBATCH_SIZE, algorithms=[algorithm], reference=reference)

    if loss in MEANS_OVER_TOKENS and logits == 'always':
        assert outcome.kind == 'exact', outcome
    else:
        assert outcome.kind == 'refused', outcome


# The same mean over tokens, written in several ways.


def masked_sum(logits, labels):
    """Computes the losses of all positions, and multiplies those without a label by 0."""
    next_labels = labels[:, 1:]
    predictions = logits[:, :-1].transpose(1, 2)
    mask = (next_labels != -100).float()
    losses = F.cross_entropy(predictions, next_labels.clamp(min=0), reduction='none')
    return (losses * mask).sum() / mask.sum()


def rolled(logits, labels):
    """Moves the labels instead of the logits."""
    targets = torch.roll(labels, shifts=-1, dims=1)
    targets[:, -1] = -100
    cross_entropy = torch.nn.CrossEntropyLoss(reduction='none')
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten())
    return losses.sum() / (targets != -100).sum()


def selected(logits, labels):
    next_labels = labels[:, 1:]
    has_label = next_labels != -100
    predictions = logits[:, :-1][has_label]
    return F.cross_entropy(predictions, next_labels[has_label])


def chunked(logits, labels):
    next_labels = labels[:, 1:].flatten()
    predictions = logits[:, :-1].flatten(0, 1)
    total = torch.zeros(())
    for chunk, chunk_labels in zip(predictions.split(7), next_labels.split(7), strict=True):
        total = total + F.cross_entropy(chunk, chunk_labels, reduction='sum')
    return total / (next_labels != -100).sum()


def twice(logits, labels):
    return (selected(logits, labels) + masked_sum(logits, labels)) / 2


class Copying(NativeModel):
    """Hands out a copy of its logits in another type, as FSDP and accelerate do."""

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        return {**outputs, 'logits': outputs['logits'].double()}


@pytest.mark.parametrize('token_weights', ['token', 'column'])
def test_copied_logits_are_weighted(token_weights, caplog):
    model = Copying('causal')
    batch = weighted_batch_of_text()

    with caplog.at_level('INFO', logger='composer_tokacc'):
        outcome = measure(model, batch, MICROBATCH_SIZE, **weighted(token_weights))

    assert outcome.kind == 'exact', outcome
    assert 'not measured in training' not in caplog.text


@pytest.mark.parametrize('token_mean', [masked_sum, rolled, selected, chunked, twice])
def test_ways_to_write_token_means(token_mean):
    """The loss may use all positions, some of them, pieces of them, or the same one twice."""
    model = NativeModel(token_mean)

    outcome = measure(model, ragged_batch(SHAPE), MICROBATCH_SIZE)
    weighted_outcome = measure(model, weighted_batch_of_text(), MICROBATCH_SIZE, **weighted('column'))

    assert outcome.kind == 'exact'
    assert weighted_outcome.kind == 'exact', weighted_outcome
