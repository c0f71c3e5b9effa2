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
from tests.support.training import composer_gradients, reference_gradients, relative_error

RAGGED = [(4, 2), (14, 11), (9, 9), (3, 1), (6, 1), (7, 2)]


def test_weights_of_a_step_by_hand():
    # One rank has microbatches of 3 and 5 tokens, the other rank one of 2 tokens. DDP averages the gradients over two
    # ranks. So a mean over all 10 tokens needs the weights 3 / 10 * 2 and 5 / 10 * 2.
    assert token_weight(3, 10, world_size=2) == 0.6
    assert token_weight(5, 10, world_size=2) == 1.0
    # Composer's own weight of a microbatch with one of the four samples of a step.
    assert sample_weight(1, 4, world_size=2) == 0.5
    # A step without any token moves nothing.
    assert token_weight(0, 0) == 0.0


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize('size', [1, 2, 4])
def test_plain_loop_is_exact(size):
    model = text_model()
    rows = text_rows(RAGGED)
    expected, _ = reference_gradients(model, collate(rows))
    microbatches = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
    for microbatch, weight in zip(microbatches, step_loss_weights(microbatches), strict=True):
        (model(**microbatch).loss * weight).backward()
    assert relative_error(composer_gradients(model), expected) < 1e-6


def test_unknown_rule_is_refused():
    batch = collate(text_rows(RAGGED))
    with pytest.raises(ValueError, match=r"`loss_tokens` must be .*, got: 'auto'"):
        step_loss_weights([batch], loss_tokens='auto')
    with pytest.raises(ValueError, match=r"`loss_tokens` must be .*, got: 'shifted'"):
        apply_token_weights(torch.zeros(6, 14, 9), batch, 'sqrt', loss_tokens='shifted')


def test_microbatch_without_loss_tokens():
    with_labels = collate(text_rows([(5, 3)]))
    without_labels = collate(text_rows([(5, 0)]))
    assert step_loss_weights([with_labels, without_labels]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ('rule', 'first_count', 'second_count'),
    [('causal', 3, 1), ('causal_attended', 2, 1), ('unshifted', 4, 2)],
)
def test_each_rule_counts_other_labels(rule, first_count, second_count):
    first = {'labels': torch.tensor([[7, 8, 9, 9]]), 'attention_mask': torch.tensor([[1, 1, 1, 0]])}
    second = {'labels': torch.tensor([[7, 8, -100, -100]]), 'attention_mask': torch.ones(1, 4)}
    total = first_count + second_count
    assert step_loss_weights([first, second], loss_tokens=rule) == [first_count / total, second_count / total]


def listed_microbatches(batch, **options):
    return list(weighted_microbatches(batch, **options))


@pytest.mark.parametrize('function', [step_loss_weights, listed_microbatches])
def test_first_label_after_padding_is_refused(function):
    """Whether a pad predicts it depends on the cut into microbatches."""
    padded_left = collate(text_rows([(9, 9), (4, 4)]), side='left')
    padded_right = collate(text_rows([(9, 9), (4, 4)]))
    unpadded = collate(text_rows([(5, 5)]))
    batch = PreSplitBatch([padded_left, unpadded], max_tokens=18)
    with pytest.raises(ValueError, match='first token of a row must have no label'):
        function(batch)
    assert len(function(batch, loss_tokens='unshifted')) == 2
    batch = PreSplitBatch([padded_right, unpadded], max_tokens=18)
    assert len(function(batch)) == 2


def packed_by_user() -> list[dict[str, torch.Tensor]]:
    """Returns two microbatches of a packed row each. The first token of every document has a label.

    Plain collators leave these labels.
    """
    microbatches = []
    for seed, lengths in enumerate([(5, 9, 4), (3, 6)]):
        rows = [text_row(length, length, seed=10 * seed + length) for length in lengths]
        ids = torch.cat([row['input_ids'] for row in rows], dim=1)
        positions = torch.cat([torch.arange(length) for length in lengths])
        microbatches.append({'input_ids': ids, 'labels': ids.clone(), 'position_ids': positions[None]})
    return microbatches


def token_losses(model, microbatch) -> torch.Tensor:
    """Returns the cross-entropy at every label that the model's own loss averages, by plain torch."""
    logits = model(input_ids=microbatch['input_ids'], position_ids=microbatch['position_ids']).logits
    labels = microbatch['labels']
    return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction='none')


def labels_per_document(microbatch) -> list[int]:
    """Returns how many labels of each document are predicted. Nothing predicts the first token of a row."""
    is_start = microbatch['position_ids'][0] == 0
    starts = is_start.nonzero().flatten().tolist()
    ends = [*starts[1:], len(is_start)]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    counts[0] -= 1
    return counts


def gradients_by_autograd(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize(('token_weights', 'power'), [('token', 0.0), ('sqrt', 0.5), ('sample', 1.0)])
def test_packed_rows_of_the_user(token_weights, power):
    """Factors count every label that the caller's loss averages, also the first one of a document."""
    model = text_model()
    microbatches = packed_by_user()
    losses = []
    weights = []
    for microbatch in microbatches:
        losses.append(token_losses(model, microbatch))
        for num_labels in labels_per_document(microbatch):
            weights += [num_labels**-power] * num_labels
    weights = torch.tensor(weights)
    weighted_mean = (torch.cat(losses) * weights).sum() / weights.sum()
    expected = gradients_by_autograd(model, weighted_mean)
    factors = step_loss_weights(microbatches, token_weights=token_weights)
    for microbatch, factor in zip(microbatches, factors, strict=True):
        outputs = model(**microbatch)
        apply_token_weights(outputs.logits, microbatch, token_weights)
        (outputs.loss * factor).backward()
    assert relative_error(gradients_of(model), expected) < 1e-6


def test_packed_rows_are_returned_masked():
    """``weighted_microbatches`` returns the batches, so it masks the labels that another document would predict."""
    model = text_model()
    microbatches = packed_by_user()
    losses = []
    for microbatch in microbatches:
        # Position 0 of the labels has no loss, so the losses belong to positions 1, 2 and so on.
        is_within_document = microbatch['position_ids'][0, 1:] > 0
        losses.append(token_losses(model, microbatch)[is_within_document])
    expected = gradients_by_autograd(model, torch.cat(losses).mean())
    for microbatch, factor in weighted_microbatches(microbatches):
        (model(**microbatch).loss * factor).backward()
    assert relative_error(gradients_of(model), expected) < 1e-6


@pytest.mark.parametrize('function', [step_loss_weights, listed_microbatches])
def test_number_of_items_is_refused(function):
    """The model would divide its loss by this number, and the factor would weigh it again: an error of 66 %."""
    microbatches = [collate(text_rows(RAGGED[:2])), collate(text_rows(RAGGED[2:]))]
    microbatches[1]['num_items_in_batch'] = torch.tensor(26)
    with pytest.raises(ValueError, match=r'must not hold `num_items_in_batch`, got: 26'):
        function(microbatches)
