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
from tests.matrix.native_models import (
    LOSSES,
    MEANS_OVER_TOKENS,
    SMOOTHING,
    Z_WEIGHT,
    NativeModel,
)
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

    outcome = measure(
        subject.model('large'),
        with_random_weights(batch),
        MICROBATCH_SIZE,
        packing=packing,
        **options,
    )

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
UNCHECKED = {
    'causal': 'causal',
    'unshifted': 'unshifted',
    'per row': 'causal',
    'label smoothing': 'causal',
}
"""Losses that are also tried without a check, and the rule that the user names."""


def outcome_of_loss(loss, *, logits='always', **options):
    """Returns the outcome of a step with weights of a column. Takes the options of TokenAccumulation.

    ``logits``: when the model returns logits, see :class:`.NativeModel`.
    """
    reference_options = REFERENCE_OPTIONS.get(loss, {})
    return measure(
        NativeModel(loss, logits=logits),
        weighted_batch_of_text(),
        MICROBATCH_SIZE,
        algorithms=[TokenAccumulation(token_weights='column', **options)],
        reference=partial(weighted_gradients, token_weights='column', **reference_options),
    )


@pytest.mark.parametrize('loss', LOSSES)
def test_checked_loss_is_exact_or_refused(loss):
    outcome = outcome_of_loss(loss)
    expected = 'exact' if loss in MEANS_OVER_TOKENS else 'refused'
    assert outcome.kind == expected, outcome


@pytest.mark.parametrize('loss', UNCHECKED)
def test_unchecked_loss_is_exact_or_refused(loss):
    outcome = outcome_of_loss(loss, check_loss=False, loss_tokens=UNCHECKED[loss])
    expected = 'exact' if loss in MEANS_OVER_TOKENS else 'refused'
    assert outcome.kind == expected, outcome


@pytest.mark.parametrize(
    ('loss', 'logits', 'options'),
    [
        pytest.param('causal', 'eval', {}, id='logits in evaluation'),
        pytest.param('fused', 'never', {}, id='no logits'),
        pytest.param('fused', 'never', {'check_loss': False, 'loss_tokens': 'causal'}, id='no logits, unchecked'),
    ],
)
def test_weights_need_logits_in_training(loss, logits, options):
    """Weights are applied to losses that the package computes from the logits."""
    outcome = outcome_of_loss(loss, logits=logits, **options)
    assert outcome.kind == 'refused', outcome


# The same mean over tokens, written in several ways.


def masked_sum(logits, labels):
    """Computes the losses of all positions, and multiplies those without a label by 0."""
    next_labels = labels[:, 1:]
    predictions = logits[:, :-1].transpose(1, 2)
    has_label = next_labels != -100
    label_ids = next_labels.clamp(min=0)
    losses = F.cross_entropy(predictions, label_ids, reduction='none')
    masked_losses = losses * has_label
    return masked_losses.sum() / has_label.sum()


def rolled(logits, labels):
    """Moves the labels instead of the logits."""
    targets = torch.roll(labels, shifts=-1, dims=1)
    targets[:, -1] = -100
    cross_entropy = torch.nn.CrossEntropyLoss(reduction='none')
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten())
    num_labels = (targets != -100).sum()
    return losses.sum() / num_labels


def selected(logits, labels):
    next_labels = labels[:, 1:]
    has_label = next_labels != -100
    predictions = logits[:, :-1][has_label]
    return F.cross_entropy(predictions, next_labels[has_label])


def chunked(logits, labels):
    next_labels = labels[:, 1:].flatten()
    predictions = logits[:, :-1].flatten(0, 1)
    total = torch.zeros(())
    for start in range(0, len(next_labels), 7):
        chunk = slice(start, start + 7)
        total = total + F.cross_entropy(predictions[chunk], next_labels[chunk], reduction='sum')
    num_labels = (next_labels != -100).sum()
    return total / num_labels


def twice(logits, labels):
    loss = selected(logits, labels)
    same_loss = masked_sum(logits, labels)
    return (loss + same_loss) / 2


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
