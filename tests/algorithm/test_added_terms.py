# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Small terms in a model's own loss: over other positions than its loss tokens they are refused, over these exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.matrix.harness import measure
from tests.matrix.native_models import NativeModel, causal
from tests.support.text import collate, text_rows

SHAPE = [(4, 2), (9, 3), (5, 4), (14, 11), (6, 1), (3, 2)]


def entropy(logits, labels):
    return -(logits.softmax(dim=-1) * logits.log_softmax(dim=-1)).sum(dim=-1)


def z_loss(logits, labels):
    return logits.logsumexp(dim=-1).square()


def uniform(logits, labels):
    """What label smoothing adds to the loss of a position."""
    return -logits.log_softmax(dim=-1).mean(dim=-1)


def of_reference(logits, labels):
    """Distance to a frozen model's probabilities."""
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(logits.shape[-1], generator=generator).log_softmax(dim=-1)
    return (reference.exp() * (reference - logits.log_softmax(dim=-1))).sum(dim=-1)


def square(logits, labels):
    return logits.square().mean(dim=-1)


TERMS = {'entropy': entropy, 'z-loss': z_loss, 'smoothing': uniform, 'reference': of_reference, 'square': square}


def over_all(values, labels):
    return values.mean()


def over_padding(values, labels):
    return values[:, 1:][labels[:, 1:] == -100].mean().nan_to_num()


def over_rows(values, labels):
    """The mean of the rows' means over their loss tokens."""
    counted = labels[:, 1:] != -100
    return ((values[:, :-1] * counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)).mean()


def over_tokens(values, labels):
    counted = labels[:, 1:] != -100
    return (values[:, :-1] * counted).sum() / counted.sum().clamp(min=1)


def with_term(term: str, over: Callable[..., torch.Tensor], weight: float) -> Callable[..., torch.Tensor]:
    return lambda logits, labels: causal(logits, labels) + weight * over(TERMS[term](logits, labels), labels)


def native(loss: Callable[..., torch.Tensor], **options: Any) -> NativeModel:
    model = NativeModel('causal', **options)
    model.loss_of = loss
    return model


def outcome_of(model, *, rows=SHAPE, microbatch_size=2, side='right', **options):
    return measure(model, collate(text_rows(rows), side=side), microbatch_size, **options)


@pytest.mark.parametrize('init', ['large', 'fresh'])
@pytest.mark.parametrize('weight', [1e-2, 1e-3, 1e-4])
@pytest.mark.parametrize('over', [over_all, over_padding, over_rows])
@pytest.mark.parametrize('term', TERMS)
def test_small_term_over_other_positions_is_refused(term, over, weight, init):
    outcome = outcome_of(native(with_term(term, over, weight), init=init))
    assert outcome.kind == 'refused', outcome


@pytest.mark.parametrize('init', ['large', 'fresh'])
@pytest.mark.parametrize('weight', [1.0, 1e-3])
@pytest.mark.parametrize('term', TERMS)
def test_term_over_the_loss_tokens_is_exact(term, weight, init):
    outcome = outcome_of(native(with_term(term, over_tokens, weight), init=init))
    assert outcome.kind == 'exact', outcome
