# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Losses that become another one in step 12 of 40: every step is exact, or refused before the optimizer moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer.core import Callback
from composer.models import ComposerModel

from tests.matrix.subjects import SUBJECTS
from tests.support.text import collate, text_rows
from tests.support.training import fit, relative_error

NUM_STEPS, BEGINS = 40, 12
RARE = 63
"""A token that no label is before the effect begins."""


class Changing(ComposerModel):
    """A Llama whose loss is ``of(logits, states, labels, heads, has begun)``."""

    def __init__(self, of: Callable[..., torch.Tensor], begins: int) -> None:
        super().__init__()
        self.model, self.of, self.begins, self.step = SUBJECTS['llama'].model('large').model, of, begins, 0
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleDict({'next': torch.nn.Linear(32, 64), 'value': torch.nn.Linear(32, 1)})

    def forward(self, batch: Any) -> Any:
        states = self.model.model(batch['input_ids'], batch['attention_mask']).last_hidden_state
        logits = self.model.lm_head(states)
        loss = self.of(logits, states, batch['labels'], self.heads, self.step >= self.begins)
        return {'loss': loss, 'logits': logits}

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs['loss']

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return outputs or self(batch)


def token_losses(logits, labels, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def rare_label_weighted(logits, states, labels, heads, has_begun):
    weight = torch.ones(64).index_fill(0, torch.tensor([RARE]), 0.1)
    return token_losses(logits, labels, weight=weight)


def rare_label_weighted_by_number(logits, states, labels, heads, has_begun):
    weight = torch.ones(64).index_fill(0, torch.tensor([RARE]), 0.1)
    return token_losses(logits, labels, weight=weight, reduction='sum') / (labels[:, 1:] != -100).sum()


def focal(logits, states, labels, heads, has_begun):
    losses = token_losses(logits, labels, reduction='none')
    factors = (1 - (-losses).exp()).square() if has_begun else torch.ones_like(losses)
    return (factors * losses).sum() / (labels[:, 1:] != -100).sum()


def label_smoothing(logits, states, labels, heads, has_begun):
    return token_losses(logits, labels, label_smoothing=0.1 * has_begun)


def z_loss(logits, states, labels, heads, has_begun):
    counted = labels[:, 1:] != -100
    return token_losses(logits, labels) + 1e-2 * has_begun * logits[:, :-1][counted].logsumexp(dim=-1).square().mean()


def z_loss_of_rows(logits, states, labels, heads, has_begun):
    counted = labels[:, 1:] != -100
    squares = logits[:, :-1].logsumexp(dim=-1).square() * counted
    return token_losses(logits, labels) + 1e-2 * has_begun * (squares.sum(1) / counted.sum(1).clamp(min=1)).mean()


def distillation(logits, states, labels, heads, has_begun):
    teacher = torch.randn(64, generator=torch.Generator().manual_seed(1)).log_softmax(dim=0)
    counted = labels[:, 1:] != -100
    distances = F.kl_div(
        logits[:, :-1][counted].log_softmax(dim=-1), teacher[None], log_target=True, reduction='none'
    ).sum(dim=-1)
    return token_losses(logits, labels) + 0.5 * has_begun * distances.mean()


def multi_token_prediction(logits, states, labels, heads, has_begun):
    if not has_begun:
        return token_losses(logits, labels)
    ahead = F.cross_entropy(heads['next'](states)[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
    return token_losses(logits, labels) + 0.3 * ahead


def value_head(logits, states, labels, heads, has_begun):
    if not has_begun:
        return token_losses(logits, labels)
    return token_losses(logits, labels) + 0.3 * heads['value'](states[:, -1]).square().mean()


LOSSES = [
    rare_label_weighted, rare_label_weighted_by_number, focal, label_smoothing, z_loss, z_loss_of_rows, distillation,
    multi_token_prediction, value_head,
]  # fmt: skip


def batches():
    rng = random.Random(0)
    for step in range(NUM_STEPS):
        lengths = [rng.randint(4, 20) for _ in range(6)]
        batch = collate(text_rows([(n, rng.randint(1, n - 1)) for n in lengths]))
        batch['labels'][batch['labels'] == RARE] = 5
        if step >= BEGINS:
            row = rng.randrange(6)
            place = int((batch['labels'][row] != -100).nonzero()[-1])
            batch['labels'][row, place] = RARE
        yield batch


QUICK = [(rare_label_weighted_by_number, BEGINS), (value_head, BEGINS)]
CELLS = [
    pytest.param(
        loss, begins, marks=[] if (loss, begins) in QUICK else pytest.mark.slow,
        id=f'{loss.__name__} from step {begins} on',
    )
    for loss in LOSSES for begins in (0, BEGINS)
]  # fmt: skip


@pytest.mark.parametrize(('loss', 'begins'), CELLS)
def test_every_step_is_exact_or_refused(loss, begins):
    model, data = Changing(loss, begins), list(batches())
    if begins == 0:
        data = [{**batch, 'labels': batch['labels'].masked_fill(batch['labels'] == 5, RARE)} for batch in data]

    class Counting(Callback):
        def batch_start(self, state, logger):
            model.step = int(state.timestamp.batch)

    class Recording(Callback):
        def after_train_batch(self, state, logger):
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    found: list[dict[str, torch.Tensor]] = []
    refused = None
    try:
        fit(model, *data, callbacks=[Counting(), Recording()])
    except RuntimeError as error:
        refused = str(error)
        assert 'must' in refused
    for step, gradients in enumerate(found):
        model.step = step
        model.zero_grad()
        model(data[step])['loss'].backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert relative_error(gradients, expected) < 1e-6, step
    assert len(found) == NUM_STEPS or refused
    assert begins == 0 or len(found) >= BEGINS  # what is healthy until then is not refused before
