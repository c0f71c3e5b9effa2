# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The functional form, in a loop without Composer."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc.algorithm import (
    apply_token_weights,
    sample_weight,
    step_loss_weights,
    token_weight,
    weighted_microbatches,
)
from composer_tokacc.layout import PreSplitBatch
from tests.support.text import collate, text_model, text_row, text_rows
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
def test_plain_loop_is_exact(size):
    model, rows = text_model(), text_rows(RAGGED)
    expected, _ = reference_gradients(model, collate(rows))
    microbatches = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    for microbatch, weight in zip(microbatches, step_loss_weights(microbatches), strict=True):
        (model(**microbatch).loss * weight).backward()
    found = {f'model.{name}': p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative_error(found, expected) < 1e-6


def test_unknown_rule_is_refused():
    batch = collate(text_rows(RAGGED))
    with pytest.raises(ValueError, match=r"`loss_tokens` must be .*, got: 'auto'"):
        step_loss_weights([batch], loss_tokens='auto')
    with pytest.raises(ValueError, match=r"`loss_tokens` must be .*, got: 'shifted'"):
        apply_token_weights(torch.zeros(6, 14, 9), batch, 'sqrt', loss_tokens='shifted')


def test_microbatch_without_loss_tokens():
    rows = text_rows([(5, 3), (5, 0)])
    assert step_loss_weights([collate(rows[:1]), collate(rows[1:])]) == [1.0, 0.0]


def test_labels_that_do_not_count():
    batch = {'labels': torch.tensor([[7, 8, 9, 9]]), 'attention_mask': torch.tensor([[1, 1, 1, 0]])}
    other = {'labels': torch.tensor([[7, 8, -100, -100]]), 'attention_mask': torch.ones(1, 4)}
    # causal 3 and 1, causal_attended 2 and 1, unshifted 4 and 2
    assert step_loss_weights([batch, other]) == [3 / 4, 1 / 4]
    assert step_loss_weights([batch, other], loss_tokens='causal_attended') == [2 / 3, 1 / 3]
    assert step_loss_weights([batch, other], loss_tokens='unshifted') == [4 / 6, 2 / 6]


def listed(planned, **options):
    return list(weighted_microbatches(planned, **options))


@pytest.mark.parametrize('factors_of', [step_loss_weights, listed])
def test_first_label_behind_padding_of_planned_rows(factors_of):
    """Whether a pad predicts it depends on the cut into microbatches."""
    microbatches = [collate(text_rows([(9, 9), (4, 4)]), side='left'), collate(text_rows([(5, 5)]))]
    planned = PreSplitBatch(microbatches, max_tokens=18)
    with pytest.raises(ValueError, match='first token of a row must have no label'):
        factors_of(planned)
    assert len(factors_of(planned, loss_tokens='unshifted')) == 2
    on_the_right = PreSplitBatch([collate(text_rows([(9, 9), (4, 4)])), microbatches[1]], max_tokens=18)
    assert len(factors_of(on_the_right)) == 2


def packed_by_user() -> list[dict[str, torch.Tensor]]:
    """Two microbatches of packed rows. The first token of every document has a label, as a plain collator leaves it."""
    microbatches = []
    for seed, lengths in enumerate([(5, 9, 4), (3, 6)]):
        rows = [text_row(length, length, seed=10 * seed + length) for length in lengths]
        ids = torch.cat([row['input_ids'] for row in rows], dim=1)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        microbatches.append({'input_ids': ids, 'labels': ids.clone(), 'position_ids': positions})
    return microbatches


def token_losses(model, microbatch) -> torch.Tensor:
    """Cross-entropy at every label that the model's own loss averages, by plain torch."""
    logits = model(input_ids=microbatch['input_ids'], position_ids=microbatch['position_ids']).logits
    labels = microbatch['labels']
    return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction='none')


@pytest.mark.parametrize('token_weights', ['token', 'sqrt', 'sample'])
def test_packed_rows_of_the_user(token_weights):
    """Factors count every label that the caller's loss averages, also the first one of a document."""
    model, microbatches = text_model(), packed_by_user()
    losses, weights = [], []
    for microbatch in microbatches:
        losses.append(token_losses(model, microbatch))
        starts = (microbatch['position_ids'][0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], microbatch['labels'].shape[1]]
        for start, end in zip(starts, ends, strict=True):
            num_labels = end - start - (start == 0)  # nothing predicts the first token of a row
            power = {'token': 0.0, 'sqrt': 0.5, 'sample': 1.0}[token_weights]
            weights += [num_labels**-power] * num_labels
    weights = torch.tensor(weights)
    loss = (torch.cat(losses) * weights).sum() / weights.sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    factors = step_loss_weights(microbatches, token_weights=token_weights)
    for microbatch, factor in zip(microbatches, factors, strict=True):
        outputs = model(**microbatch)
        apply_token_weights(outputs.logits, microbatch, token_weights)
        (outputs.loss * factor).backward()
    actual = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_error(actual, expected) < 1e-6


def test_packed_rows_come_back_masked():
    """``weighted_microbatches`` returns the batches, so it may mask what no document should predict."""
    model, microbatches = text_model(), packed_by_user()
    masked = []
    for microbatch in microbatches:
        is_inner_start = (microbatch['position_ids'] == 0) & (torch.arange(microbatch['labels'].shape[1]) > 0)
        masked.append({**microbatch, 'labels': microbatch['labels'].masked_fill(is_inner_start, -100)})
    losses = torch.cat([token_losses(model, microbatch) for microbatch in masked])
    num_labels = sum(int((microbatch['labels'][:, 1:] != -100).sum()) for microbatch in masked)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(losses.sum() / num_labels, parameters)
    for microbatch, factor in weighted_microbatches(microbatches):
        (model(**microbatch).loss * factor).backward()
    actual = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_error(actual, dict(zip(names, gradients, strict=True))) < 1e-6


@pytest.mark.parametrize('function', [step_loss_weights, lambda batches: list(weighted_microbatches(batches))])
def test_number_of_items_beside_factors(function):
    """The model divides a sum by it, and the factor would weigh this again: 66 % off."""
    microbatches = [collate(text_rows(RAGGED[:2])), collate(text_rows(RAGGED[2:]))]
    microbatches[1]['num_items_in_batch'] = torch.tensor(26)
    with pytest.raises(ValueError, match=r'must not hold `num_items_in_batch`, got: 26'):
        function(microbatches)
