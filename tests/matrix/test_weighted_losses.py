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
from tests.support.text import collate, text_rows
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
    weighted_batch = {**batch, 'loss_weights': column(batch)}
    options = weighted(token_weights, shift=0 if family in UNSHIFTED else 1)
    outcome = measure(subject.model('large'), weighted_batch, MICROBATCH_SIZE, packing=packing, **options)
    if outcome.kind == 'exact':
        return
    # Only a packed batch may be refused, and only if it is refused without weights too.
    assert packing, outcome
    assert outcome.kind == 'refused', outcome
    assert measure(subject.model('large'), batch, MICROBATCH_SIZE, packing=True).kind == 'refused'


def weighted_batch_of_text():
    batch = collate(text_rows(SHAPE))
    return {**batch, 'loss_weights': column(batch)}


# How the reference computes losses of tokens that are not plain shifted cross-entropies.
REFERENCE_OPTIONS = {
    'unshifted': {'shift': 0},
    'label smoothing': {'label_smoothing': SMOOTHING},
    'z-loss': {'z_weight': Z_WEIGHT},
}
CASES = [(loss, 'always', True) for loss in LOSSES]
CASES += [(loss, 'always', False) for loss in ('causal', 'unshifted', 'per row', 'label smoothing')]
CASES += [('causal', 'eval', True), ('fused', 'never', True), ('fused', 'never', False)]


@pytest.mark.parametrize(('loss', 'logits', 'check_loss'), CASES)
def test_loss_is_exact_or_refused(loss, logits, check_loss):
    """Weights are applied to losses that the package computes from the logits, so it needs them in training."""
    algorithm_options = {}
    if not check_loss:
        rule = 'unshifted' if loss == 'unshifted' else 'causal'
        algorithm_options = {'check_loss': False, 'loss_tokens': rule}
    algorithm = TokenAccumulation(token_weights='column', **algorithm_options)
    reference = partial(weighted_gradients, token_weights='column', **REFERENCE_OPTIONS.get(loss, {}))
    model = NativeModel(loss, logits=logits)
    outcome = measure(model, weighted_batch_of_text(), MICROBATCH_SIZE, algorithms=[algorithm], reference=reference)
    is_exact = loss in MEANS_OVER_TOKENS and logits == 'always'
    assert outcome.kind == ('exact' if is_exact else 'refused'), outcome


def masked_sum(logits, labels):
    mask = (labels[:, 1:] != -100).float()
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:].clamp(min=0), reduction='none')
    return (losses * mask).sum() / mask.sum()


def rolled(logits, labels):
    targets = torch.roll(labels, shifts=-1, dims=1)
    targets[:, -1] = -100
    losses = torch.nn.CrossEntropyLoss(reduction='none')(logits.flatten(0, 1), targets.flatten())
    return losses.sum() / (targets != -100).sum()


def selected(logits, labels):
    has_label = labels[:, 1:] != -100
    return F.cross_entropy(logits[:, :-1][has_label], labels[:, 1:][has_label])


def chunked(logits, labels):
    logit_chunks = logits[:, :-1].flatten(0, 1).split(7)
    label_chunks = labels[:, 1:].flatten().split(7)
    total = torch.zeros(())
    for chunk, chunk_labels in zip(logit_chunks, label_chunks, strict=True):
        total = total + F.cross_entropy(chunk, chunk_labels, reduction='sum')
    return total / (labels[:, 1:] != -100).sum()


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
    with caplog.at_level('INFO', logger='composer_tokacc'):
        outcome = measure(model, weighted_batch_of_text(), MICROBATCH_SIZE, **weighted(token_weights))
    assert outcome.kind == 'exact', outcome
    assert 'not measured in training' not in caplog.text


@pytest.mark.parametrize('token_mean', [masked_sum, rolled, selected, chunked, twice])
def test_ways_to_write_token_means(token_mean):
    """The loss may use all positions, some of them, pieces of them, or the same one twice."""
    model = NativeModel(token_mean)
    assert measure(model, collate(text_rows(SHAPE)), MICROBATCH_SIZE).kind == 'exact'
    outcome = measure(model, weighted_batch_of_text(), MICROBATCH_SIZE, **weighted('column'))
    assert outcome.kind == 'exact', outcome
