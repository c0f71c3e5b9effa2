# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The functional form, in a loop without Composer."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc.algorithm import apply_token_weights, sample_weight, step_loss_weights, token_weight
from tests.support.text import collate, text_model, text_rows
from tests.support.training import reference_gradients, relative_error

RAGGED = [(4, 2), (14, 11), (9, 9), (3, 1), (6, 1), (7, 2)]


def test_weights_of_a_step_by_hand():
    # Two ranks: 3 and 5 loss tokens here, 2 there; a mean over all ten, of gradients that are averaged over two ranks.
    assert token_weight(3, 10, world_size=2) == 0.6
    assert token_weight(5, 10, world_size=2) == 1.0
    # Composer's own weight of one of four samples a step.
    assert sample_weight(1, 4, world_size=2) == 0.5
    # A step without any token moves nothing.
    assert token_weight(0, 0) == 0.0


@pytest.mark.parametrize('size', [1, 2, 4])
def test_a_plain_loop_has_the_gradient_of_the_whole_batch(size):
    model, rows = text_model(), text_rows(RAGGED)
    expected, _ = reference_gradients(model, collate(rows))
    microbatches = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    for microbatch, weight in zip(microbatches, step_loss_weights(microbatches), strict=True):
        (model(**microbatch).loss * weight).backward()
    found = {f'model.{name}': p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(found, expected) < 1e-6


def test_an_unknown_rule_is_refused_rather_than_counted_as_causal():
    batch = collate(text_rows(RAGGED))
    with pytest.raises(ValueError, match=r"`loss_tokens` must be one of .*, got: 'auto'"):
        step_loss_weights([batch], loss_tokens='auto')
    with pytest.raises(ValueError, match=r"`loss_tokens` must be one of .*, got: 'shifted'"):
        apply_token_weights(torch.zeros(6, 14, 9), batch, 'sqrt', loss_tokens='shifted')


def test_a_microbatch_without_loss_tokens_weighs_nothing():
    rows = text_rows([(5, 3), (5, 0)])
    assert step_loss_weights([collate(rows[:1]), collate(rows[1:])]) == [1.0, 0.0]


def test_labels_that_the_model_does_not_count_are_not_counted():
    batch = {'labels': torch.tensor([[7, 8, 9, 9]]), 'attention_mask': torch.tensor([[1, 1, 1, 0]])}
    other = {'labels': torch.tensor([[7, 8, -100, -100]]), 'attention_mask': torch.ones(1, 4)}
    # causal 3 and 1, causal_attended 2 and 1, unshifted 4 and 2
    assert step_loss_weights([batch, other]) == [3 / 4, 1 / 4]
    assert step_loss_weights([batch, other], loss_tokens='causal_attended') == [2 / 3, 1 / 3]
    assert step_loss_weights([batch, other], loss_tokens='unshifted') == [4 / 6, 2 / 6]
