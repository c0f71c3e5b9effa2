# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Weights of tokens in models of many families, and in losses of many kinds: exact, or refused with a cause."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer_tokacc import TokenAccumulation
from tests.matrix.harness import measure
from tests.matrix.native_models import LOSSES, SMOOTHING, Z_WEIGHT, NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.text import collate, text_rows
from tests.support.weights import column, weighted_gradients

SHAPE = [(4, 2), (9, 0), (5, 5), (14, 11), (6, 1), (3, 2)]
UNSHIFTED = ('bert', 't5')


def weighted(token_weights, **options):
    return {
        'algorithms': [TokenAccumulation(token_weights=token_weights, **options)],
        'reference': partial(weighted_gradients, token_weights=token_weights),
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
        ('qwen2_vl', 'sample', 'right', True),
        ('mllama_mixed', 'column', 'right', False),
        ('blip2', 'sqrt', 'right', False),
        ('idefics3', 'column', 'left', False),
        ('qwen2_audio', 'sqrt', 'right', False),
    ],
)
def test_weighted_families_are_exact_or_refused(family, token_weights, side, packing):
    subject = SUBJECTS[family]
    batch = subject.batch(1, side=side)
    options = weighted(token_weights)
    options['reference'] = partial(options['reference'], shift=0 if family in UNSHIFTED else 1)
    outcome = measure(subject.model('large'), {**batch, 'loss_weights': column(batch)}, 2, packing=packing, **options)
    if outcome.kind != 'exact':
        assert packing
        assert measure(subject.model('large'), batch, 2, packing=True).kind == outcome.kind == 'refused', outcome


@pytest.mark.parametrize('check_loss', [True, False])
@pytest.mark.parametrize(
    ('loss', 'logits'), [*((loss, 'always') for loss in LOSSES), ('causal', 'eval'), ('fused', 'never')]
)
def test_loss_is_exact_or_refused(loss, logits, check_loss):
    model, batch = NativeModel(loss, logits=logits), collate(text_rows(SHAPE))
    batch['loss_weights'] = column(batch)
    rule = 'unshifted' if loss == 'unshifted' else 'causal'
    options = weighted('column', **({} if check_loss else {'check_loss': False, 'loss_tokens': rule}))
    smoothing = SMOOTHING if loss == 'label smoothing' else 0.0
    z_weight = Z_WEIGHT if loss == 'z-loss' else 0.0
    reference = partial(
        options.pop('reference'), shift=int(rule == 'causal'), label_smoothing=smoothing, z_weight=z_weight
    )

    def with_logits(model: Any, batch: Any) -> Any:
        model = copy.deepcopy(model)
        model.logits = 'always'
        return reference(model, batch)

    outcome = measure(model, batch, 2, reference=with_logits, **options)
    # The others divide by another number than that of the tokens; weights go by the logits, and nowhere else.
    is_mean = loss in ('causal', 'unshifted', 'label smoothing', 'fused', 'z-loss')
    assert outcome.kind == ('exact' if is_mean and logits == 'always' else 'refused'), outcome


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
    kept = labels[:, 1:] != -100
    return F.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept])


def transposed(logits, labels):
    return F.cross_entropy(logits[:, :-1].transpose(0, 1).flatten(0, 1), labels[:, 1:].t().flatten())


def chunked(logits, labels):
    parts = zip(logits[:, :-1].flatten(0, 1).split(7), labels[:, 1:].flatten().split(7), strict=True)
    losses = [F.cross_entropy(*part, reduction='sum') for part in parts]
    return torch.stack(losses).sum() / (labels[:, 1:] != -100).sum()


def other_ignore_index(logits, labels):
    targets = labels[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.masked_fill(targets == -100, -1), ignore_index=-1)


def likelihood(logits, labels):
    return F.nll_loss(logits[:, :-1].flatten(0, 1).log_softmax(dim=-1), labels[:, 1:].flatten())


def one_hot(logits, labels):
    counted = labels[:, 1:] != -100
    hot = F.one_hot(labels[:, 1:].clamp(min=0), logits.shape[-1])
    return -((logits[:, :-1].log_softmax(dim=-1) * hot).sum(dim=-1) * counted).sum() / counted.sum()


def copied(logits, labels):
    targets = torch.full(labels.shape, -100)
    targets[:, :-1] = labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def class_weights(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=torch.ones(logits.shape[-1]))


def twice(logits, labels):
    return (selected(logits, labels) + transposed(logits, labels)) / 2


class Copying(NativeModel):
    """Hands out a copy of its logits in another type, as FSDP and accelerate do."""

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        return {**outputs, 'logits': outputs['logits'].double()}


@pytest.mark.parametrize('token_weights', ['token', 'column'])
def test_copied_logits_are_weighted(token_weights, caplog):
    model, batch = Copying('causal'), collate(text_rows(SHAPE))
    batch['loss_weights'] = column(batch)
    with caplog.at_level('INFO', logger='composer_tokacc'):
        outcome = measure(model, batch, 2, **weighted(token_weights))
    assert outcome.kind == 'exact', outcome
    assert 'not measured in training' not in caplog.text


@pytest.mark.parametrize(
    'of',
    [
        *(masked_sum, rolled, selected, transposed, chunked, other_ignore_index, likelihood),
        *(one_hot, copied, class_weights, twice),
    ],
)
def test_ways_to_write_token_means(of):
    model, batch = NativeModel(of), collate(text_rows(SHAPE))
    assert measure(model, batch, 2).kind == 'exact'
    outcome = measure(model, {**batch, 'loss_weights': column(batch)}, 2, **weighted('column'))
    assert outcome.kind == 'exact', outcome
