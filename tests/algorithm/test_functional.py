# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The functional form, in a loop without Composer."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader
from composer_tokacc.algorithm import (
    apply_token_weights,
    sample_weight,
    step_loss_weights,
    token_weight,
    weighted_microbatches,
)
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.row_counts import RowCounts, attach_row_counts
from composer_tokacc.weights import warn_of_unused_weights_once
from tests.support.text import collate, next_token_loss, one_layer_model, packed_row, ragged_batch, text_rows
from tests.support.training import composer_gradients, gradients_of, reference_gradients, relative_error

SHAPE = [(4, 2), (14, 11), (9, 9), (3, 1), (6, 1), (7, 2)]
"""Length and number of labels of each of six rows."""


def weighted_backward(model, microbatch, weight):
    """Computes one microbatch: multiplies the model's loss by a weight, and calls the backward. Returns the product."""
    outputs = model(**microbatch)
    weighted_loss = outputs.loss * weight
    weighted_loss.backward()
    return weighted_loss


def without_rows(batch):
    """Returns a batch of no rows, with the entries of this one."""
    return {key: value[:0] for key, value in batch.items()}


def collate_with_targets(rows):
    batch = collate(rows)
    batch['targets'] = batch.pop('labels')
    return batch


def test_copy_with_labels_of_another_key():
    """docs/trainer.md names this way. The loader cannot mask labels that it does not know, but it marks the copy."""
    rows = text_rows([(9, 3), (5, 4)])
    microbatches = []
    for rank in range(4):
        sampler = RegroupingBatchSampler(
            rows,
            lengths=[9, 5],
            global_batch_size=4,
            max_tokens=32,
            num_replicas=4,
            rank=rank,
        )
        loader = RegroupingDataLoader(rows, batch_sampler=sampler, collate_fn=collate_with_targets)
        for batch in loader:
            microbatches += batch.microbatches
    assert len(microbatches) == 4
    for microbatch in microbatches:
        microbatch['labels'] = microbatch['targets']

    weights = step_loss_weights(microbatches)

    assert sorted(weights) == [0, 0, 3 / 7, 4 / 7]


def test_weights_of_a_step_by_hand():
    # One rank has microbatches of 3 and 5 tokens, the other rank one of 2 tokens. DDP averages the gradients over two
    # ranks. So a mean over all 10 tokens needs the weights 3 / 10 * 2 and 5 / 10 * 2.
    assert token_weight(3, 10, world_size=2) == 0.6
    assert token_weight(5, 10, world_size=2) == 1.0
    # Composer's own weight of a microbatch with one of the four samples of a step.
    assert sample_weight(1, 4, world_size=2) == 0.5
    # A step without any token moves nothing.
    assert token_weight(0, 0) == 0.0


@pytest.mark.parametrize('size', [1, 2, 4])
def test_plain_loop_is_exact(size):
    model = one_layer_model()
    rows = text_rows(SHAPE)
    whole_batch = collate(rows)
    expected, _ = reference_gradients(model, whole_batch)
    microbatches = []
    for start in range(0, len(rows), size):
        rows_of_microbatch = rows[start : start + size]
        microbatches.append(collate(rows_of_microbatch))

    weights = step_loss_weights(microbatches)
    for microbatch, weight in zip(microbatches, weights, strict=True):
        weighted_backward(model, microbatch, weight)

    assert relative_error(composer_gradients(model), expected) < 1e-6


def test_unknown_rule_is_refused():
    batch = ragged_batch(SHAPE)
    with pytest.raises(ValueError, match=r"`loss_tokens` must be .*, got: 'auto'"):
        step_loss_weights([batch], loss_tokens='auto')

    logits = torch.zeros(6, 14, 9)
    with pytest.raises(ValueError, match=r"`loss_tokens` must be .*, got: 'shifted'"):
        apply_token_weights(logits, batch, 'sqrt', loss_tokens='shifted')


def repeated_samples():
    """Returns a microbatch of two rows that count nothing."""
    batch = ragged_batch([(6, 4), (5, 3)])
    return attach_row_counts(batch, [RowCounts(samples=0)] * 2)


@pytest.mark.parametrize(
    'other_microbatch',
    [
        pytest.param(ragged_batch([(5, 0)]), id='no loss tokens'),
        pytest.param(without_rows(ragged_batch([(5, 3)])), id='no rows'),
        pytest.param(repeated_samples(), id='repeated samples'),
    ],
)
def test_microbatch_that_weighs_nothing(other_microbatch):
    weights = step_loss_weights([ragged_batch([(5, 3)]), other_microbatch])
    assert weights == [1.0, 0.0]


@pytest.mark.parametrize('side', ['left', 'right'])
def test_loss_of_no_labels_is_a_number(side):
    """Also if the row has a single token, so that no label has a token and a token before it."""
    model = one_layer_model()
    padded = ragged_batch([(6, 0), (1, 0)], side=side)
    single_token = {key: value[1:] for key, value in padded.items()}
    for batch in (padded, single_token):
        [(microbatch, weight)] = weighted_microbatches([batch])
        weighted_loss = weighted_backward(model, microbatch, weight)
        assert weighted_loss == 0
    for gradient in composer_gradients(model).values():
        assert not gradient.any()


@pytest.mark.parametrize(
    ('rule', 'first_count', 'second_count'),
    [
        ('causal', 3, 1),
        ('causal_attended', 2, 1),
        ('unshifted', 4, 2),
    ],
)
def test_each_rule_counts_other_labels(rule, first_count, second_count):
    """Neither causal rule counts the first label of a row. ``causal_attended`` also leaves out labels on padding."""
    first = {
        'labels': torch.tensor([[7, 8, 9, 9]]),
        'attention_mask': torch.tensor([[1, 1, 1, 0]]),
    }
    second = {
        'labels': torch.tensor([[7, 8, -100, -100]]),
        'attention_mask': torch.ones(1, 4),
    }
    total = first_count + second_count
    weights = step_loss_weights([first, second], loss_tokens=rule)
    assert weights == [first_count / total, second_count / total]


def test_microbatch_without_rows_is_refused():
    """It can get no label, so its mean loss would be NaN."""
    rows = ragged_batch([(5, 5)])
    with pytest.raises(ValueError, match='at least one row of one token each'):
        listed_microbatches([rows, without_rows(rows)])


def listed_microbatches(batch, **options):
    """Returns the pairs of ``weighted_microbatches``, which is a generator."""
    return list(weighted_microbatches(batch, **options))


both_functions = pytest.mark.parametrize('function', [step_loss_weights, listed_microbatches])


def padded_on_the_left(*, unlabelled_rows):
    """Returns rows of 9 and 4 tokens. All tokens have labels, except the first ones of some rows."""
    batch = ragged_batch([(9, 9), (4, 4)], side='left')
    first_columns = [0, 5]
    for row in unlabelled_rows:
        batch['labels'][row, first_columns[row]] = -100
    return batch


def padded_on_both_sides():
    """Returns a row of 6 tokens in the width 9. All of its tokens have labels."""
    batch = ragged_batch([(9, 9)])
    padded_columns = [0, 1, 8]
    batch['labels'][0, padded_columns] = -100
    batch['attention_mask'][0, padded_columns] = 0
    return batch


UNPADDED = ragged_batch([(5, 5)])


@both_functions
@pytest.mark.parametrize(
    'microbatches',
    [
        pytest.param([padded_on_the_left(unlabelled_rows=[]), UNPADDED], id='in the first microbatch'),
        # In one batch of all rows, the row of the second microbatch would get padding.
        pytest.param([padded_on_the_left(unlabelled_rows=[1]), UNPADDED], id='in a longer batch'),
        pytest.param([padded_on_the_left(unlabelled_rows=[0, 1]), padded_on_both_sides()], id='both sides'),
    ],
)
def test_first_label_after_padding_is_refused(microbatches, function):
    """Whether a pad predicts it depends on the cut into microbatches."""
    batch = PreSplitBatch(microbatches, max_tokens=18)
    with pytest.raises(ValueError, match='first token of a row must have no label'):
        function(batch)


@both_functions
def test_first_label_after_padding_if_unshifted(function):
    microbatches = [padded_on_the_left(unlabelled_rows=[]), UNPADDED]
    batch = PreSplitBatch(microbatches, max_tokens=18)
    assert len(function(batch, loss_tokens='unshifted')) == 2


@both_functions
def test_first_label_before_padding(function):
    padded_on_the_right = ragged_batch([(9, 9), (4, 4)])
    batch = PreSplitBatch([padded_on_the_right, UNPADDED], max_tokens=18)
    assert len(function(batch)) == 2


@pytest.fixture
def padded_halves():
    """Returns two halves of a batch that is padded on the left. Each row has labels on all of its tokens."""
    whole_batch = ragged_batch([(9, 9), (4, 4), (6, 6), (5, 5)], side='left')
    first = {key: value[:2] for key, value in whole_batch.items()}
    second = {key: value[2:] for key, value in whole_batch.items()}
    return first, second


def without_first_columns(microbatch, num_columns):
    """Returns a narrower microbatch, as a collator makes it that pads each microbatch by itself."""
    return {key: value[:, num_columns:] for key, value in microbatch.items()}


@both_functions
def test_first_labels_in_microbatches_of_one_width(function, padded_halves):
    """All microbatches are as wide as the longest row of the step, so the cut decides nothing."""
    assert len(function(padded_halves)) == 2


@both_functions
def test_first_labels_in_microbatches_of_unequal_widths(function, padded_halves):
    """The collator of Hugging Face for language models pads each microbatch by itself, and labels all tokens."""
    first, second = padded_halves
    narrow = without_first_columns(second, 3)
    with pytest.raises(ValueError, match='first token of a row must have no label'):
        function([first, narrow])
    assert len(function([first, narrow], loss_tokens='unshifted')) == 2
    assert len(function([narrow])) == 1


@both_functions
def test_masked_first_labels_in_microbatches_of_unequal_widths(function, padded_halves):
    first, second = padded_halves
    microbatches = [first, without_first_columns(second, 3)]
    for microbatch in microbatches:
        microbatch['labels'] = microbatch['labels'].clone()
        microbatch['labels'][:, :6] = -100
    assert len(function(microbatches)) == 2


@both_functions
def test_hidden_token_predicts_first_label(function):
    """A mask of ``input_ids != pad`` hides a BOS that is the pad, too. It stays before its row in every cut.

    All rows are padded on the right to one width.
    """
    first = ragged_batch([(9, 9), (4, 4), (6, 6)])
    second = ragged_batch([(9, 9), (5, 5)])
    microbatches = []
    for microbatch in (first, second):
        microbatch['attention_mask'][:, 0] = 0
        microbatch['labels'][:, 0] = -100
        microbatches.append({key: value[1:] for key, value in microbatch.items()})
    batch = PreSplitBatch(microbatches, max_tokens=18)
    assert len(function(batch)) == 2


def packed_by_user():
    """Returns two microbatches of a packed row each. The first token of every document has a label.

    Plain collators leave these labels.
    """
    documents = text_rows([(5, 5), (9, 9), (4, 4), (3, 3), (6, 6)])
    first_row = packed_row(documents[:3])
    second_row = packed_row(documents[3:])
    return [first_row, second_row]


LABELS_OF_DOCUMENTS = [(4, 9, 4), (2, 6)]
"""The number of labels that are predicted in each document. Nothing predicts the first token of a row."""


def token_losses(model, microbatch):
    """Returns the cross-entropy at every label that the model's own loss averages, by plain torch."""
    outputs = model(
        input_ids=microbatch['input_ids'],
        position_ids=microbatch['position_ids'],
    )
    return next_token_loss(outputs.logits, microbatch['labels'], reduction='none')


@pytest.mark.parametrize(
    ('token_weights', 'power'),
    [
        ('token', 0.0),
        ('sqrt', 0.5),
        ('sample', 1.0),
    ],
)
def test_packed_rows_of_the_user(token_weights, power):
    """Factors count every label that the caller's loss averages, also the first one of a document."""
    model = one_layer_model()
    microbatches = packed_by_user()
    weighted_sum = 0.0
    total_weight = 0.0
    for microbatch, label_counts in zip(microbatches, LABELS_OF_DOCUMENTS, strict=True):
        losses_of_documents = token_losses(model, microbatch).split(label_counts)
        for losses in losses_of_documents:
            weight = len(losses) ** -power
            weighted_sum = weighted_sum + weight * losses.sum()
            total_weight += weight * len(losses)
    expected = gradients_of(model, weighted_sum / total_weight)

    factors = step_loss_weights(microbatches, token_weights=token_weights)
    for microbatch, factor in zip(microbatches, factors, strict=True):
        outputs = model(**microbatch)
        apply_token_weights(outputs.logits, microbatch, token_weights)
        weighted_loss = outputs.loss * factor
        weighted_loss.backward()

    assert relative_error(composer_gradients(model), expected) < 1e-6


def test_packed_rows_are_returned_masked():
    """``weighted_microbatches`` returns the batches, so it masks the labels that another document would predict."""
    model = one_layer_model()
    microbatches = packed_by_user()
    losses_within_documents = []
    for microbatch in microbatches:
        # Position 0 of the labels has no loss, so the losses belong to positions 1, 2 and so on.
        is_within_document = microbatch['position_ids'][0, 1:] > 0
        losses = token_losses(model, microbatch)
        losses_within_documents.append(losses[is_within_document])
    expected_loss = torch.cat(losses_within_documents).mean()
    expected = gradients_of(model, expected_loss)

    for microbatch, factor in weighted_microbatches(microbatches):
        weighted_backward(model, microbatch, factor)

    assert relative_error(composer_gradients(model), expected) < 1e-6


def loader_of(microbatches):
    return DataLoader(microbatches, batch_size=None)


@pytest.mark.parametrize('as_iterable', [iter, loader_of])
def test_microbatches_that_are_no_list(as_iterable):
    """An iterator would be used up when the loop comes, and a loader may give other batches."""
    microbatches = as_iterable([ragged_batch(SHAPE)])
    with pytest.raises(TypeError, match='must be a list of batches'):
        step_loss_weights(microbatches)


@both_functions
def test_number_of_items_is_refused(function):
    """The model would divide its loss by this number, and the factor would weigh it again: an error of 66 %."""
    first = ragged_batch(SHAPE[:2])
    second = ragged_batch(SHAPE[2:])
    second['num_items_in_batch'] = torch.tensor(26)
    with pytest.raises(ValueError, match=r'must not hold `num_items_in_batch`, got: 26'):
        function([first, second])


def test_step_of_zero_weights_is_refused():
    microbatch = ragged_batch(SHAPE)
    microbatch['loss_weights'] = [0.0] * len(SHAPE)
    with pytest.raises(RuntimeError, match='weights of a step must not all be 0, got: 0 for each of its 50'):
        step_loss_weights([microbatch, microbatch], token_weights='column')


@both_functions
def test_unused_weights_are_warned_of_once(function, caplog):
    warn_of_unused_weights_once.cache_clear()
    microbatch = ragged_batch(SHAPE)
    microbatch['loss_weights'] = [0.5] * len(SHAPE)

    step_loss_weights([microbatch], token_weights='column')
    assert not caplog.records

    function([microbatch])
    function([microbatch])
    assert caplog.text.count('`loss_weights`, which is not used') == 1


@both_functions
def test_other_ignored_labels_are_refused(function):
    """A model with `ignore_index=-1` would leave out labels that are counted."""
    microbatch = ragged_batch(SHAPE)
    microbatch['labels'] = microbatch['labels'].clamp(min=-1)
    with pytest.raises(ValueError, match='`labels` must be -100 or ids of the vocabulary, got: -1'):
        function([microbatch])


class OtherLogits(torch.nn.Module):
    """Returns a part of the logits that its loss is made of, as models with a padded vocabulary do."""

    def __init__(self):
        super().__init__()
        self.model = one_layer_model()

    def forward(self, **batch):
        outputs = self.model(**batch)
        outputs.logits = outputs.logits.float()[..., :-1]
        return outputs


def compiled_model():
    """Returns a model whose loss is compiled with it, to one node of the graph."""
    return torch.compile(one_layer_model(), backend='aot_eager')


@pytest.mark.parametrize(
    'make_model',
    [
        OtherLogits,
        pytest.param(compiled_model, marks=pytest.mark.slow),
    ],
)
def test_loss_of_other_logits_is_refused(make_model):
    """The hook on the returned logits would change no gradient, so all tokens would weigh the same."""
    model = make_model()
    microbatch = ragged_batch(SHAPE)
    try:
        outputs = model(**microbatch)
        apply_token_weights(outputs.logits, microbatch, 'sqrt')
        with pytest.raises(RuntimeError, match='its gradient does not pass through them'):
            outputs.loss.backward()
    finally:
        torch._dynamo.reset()


def test_equal_weights_need_no_logits():
    apply_token_weights(None, ragged_batch(SHAPE), 'token')


@pytest.mark.parametrize(
    'unsuitable',
    [
        pytest.param(lambda logits: logits.detach(), id='without a graph'),
        pytest.param(lambda logits: None, id='none'),
        pytest.param(lambda logits: logits[:, 1:], id='too few positions'),
    ],
)
def test_unsuitable_logits_are_refused(unsuitable):
    microbatch = ragged_batch(SHAPE)
    model = one_layer_model()
    outputs = model(**microbatch)
    logits = unsuitable(outputs.logits)
    with pytest.raises(ValueError, match='`logits` must be a tensor of shape'):
        apply_token_weights(logits, microbatch, 'sqrt')


def test_second_term_of_hidden_states_keeps_its_gradient():
    """A backward that comes to the hidden states through the logits and in another way is not refused."""
    model = one_layer_model()
    inputs = ragged_batch(SHAPE)
    equal_weights = torch.ones(len(SHAPE))  # they change nothing
    microbatch = {**inputs, 'loss_weights': equal_weights}

    def gradients_of_two_terms(*, is_weighted):
        outputs = model(**inputs, output_hidden_states=True)
        if is_weighted:
            apply_token_weights(outputs.logits, microbatch, 'column')
        second_term = outputs.hidden_states[-1].square().mean()
        return gradients_of(model, outputs.loss + second_term)

    expected = gradients_of_two_terms(is_weighted=False)
    gradients = gradients_of_two_terms(is_weighted=True)
    assert relative_error(gradients, expected) < 1e-6
