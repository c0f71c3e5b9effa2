# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tokens with unequal weights, compared with one float64 forward whose weighted mean is written out."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from composer.algorithms import GradientClipping
from composer.callbacks import FreeOutputs, NaNMonitor
from transformers.loss.loss_utils import ForCausalLMLoss

from composer_tokacc import (
    BatchLayout,
    RegroupingBatchSampler,
    RegroupingDataLoader,
    TokenAccumulation,
    token_data_spec,
)
from composer_tokacc.algorithm import apply_token_weights, step_loss_weights
from composer_tokacc.checks.logits import token_losses_at, weigh_tokens
from composer_tokacc.checks.step import MicrobatchRecord
from composer_tokacc.counting import LossRule
from composer_tokacc.row_counts import RowCounts
from composer_tokacc.weights import token_weights_of
from tests.matrix.native_models import Terms, by_token
from tests.support.exactness import family_batch
from tests.support.families import FAMILIES
from tests.support.length_dataset import LONGEST, LengthDataset, collate_samples
from tests.support.text import (
    RAGGED,
    VOCABULARY,
    collate,
    named_batch,
    one_layer_model,
    packed_row,
    ragged_batch,
    text_rows,
)
from tests.support.training import TOLERANCE, composer_gradients, fit, in_double, loader, relative_error
from tests.support.weights import column, weighted_reference

WEIGHTS = ['sqrt', 'sample', 'column']


@pytest.fixture
def model():
    return one_layer_model()


def batch_of(shape=RAGGED, side='right'):
    """Returns rows of these (length, number of labels). Each position has a random weight, and some weigh 0."""
    batch = named_batch(shape, side=side)
    batch['loss_weights'] = column(batch)
    return batch


def with_weights(batch, weights):
    """Returns the batch with these values as its ``loss_weights``."""
    return {**batch, 'loss_weights': weights}


def weighted_gradient(model, batch, token_weights):
    """Returns the gradient of the weighted mean of one float64 forward over the batch."""
    gradient, _, _ = weighted_reference(model, batch, token_weights)
    return gradient


def assert_weighted_exactly(model, batch, data, token_weights, *, microbatch_size):
    """Compares gradient and logged losses of a step on ``data`` with one forward over ``batch``."""
    expected, weighted_mean, plain_mean = weighted_reference(model, batch, token_weights)

    recorder = fit(
        model,
        data,
        callbacks=[NaNMonitor()],
        token_weights=token_weights,
        microbatch_size=microbatch_size,
    )

    assert relative_error(recorder.gradients, expected) < TOLERANCE
    logged_total = recorder.logged('loss/train/total')
    assert logged_total == pytest.approx([weighted_mean], rel=TOLERANCE)
    logged_plain_mean = recorder.logged('token_accumulation/token_mean_loss')
    assert logged_plain_mean == pytest.approx([plain_mean], rel=TOLERANCE)


def stock_split(data):
    """Returns the loader itself, so Composer splits its batches."""
    return data


def split_in_order(data):
    return token_data_spec(data, regroup=False)


def packed(data):
    return token_data_spec(data, packing=True)


@pytest.mark.parametrize(
    ('token_weights', 'make_data', 'microbatch_size'),
    [
        ('column', stock_split, 1),
        ('column', stock_split, 3),
        ('column', split_in_order, 2),
        ('column', packed, 2),
        ('sqrt', stock_split, 3),
        ('sqrt', split_in_order, 2),
        ('sqrt', packed, 2),
        ('sample', stock_split, 1),
        ('sample', packed, 2),
    ],
)
def test_gradient_of_the_weighted_mean(model, token_weights, make_data, microbatch_size):
    batch = batch_of()
    data = make_data(loader(batch))
    assert_weighted_exactly(model, batch, data, token_weights, microbatch_size=microbatch_size)


@pytest.mark.parametrize(
    ('token_weights', 'microbatch_size'),
    [
        ('column', 1),
        ('column', 3),
        ('sample', 3),
    ],
)
def test_weighted_mean_of_regrouped_rows(model, token_weights, microbatch_size):
    """Rows are padded on the left, so their columns of weights are trimmed there."""
    batch = batch_of(side='left')
    data = token_data_spec(loader(batch))
    assert_weighted_exactly(model, batch, data, token_weights, microbatch_size=microbatch_size)


def test_outputs_that_a_callback_frees(model):
    """Composer's callback empties `state.outputs` as soon as the loss is computed."""
    batch = batch_of()
    expected = weighted_gradient(model, batch, 'sqrt')
    recorder = fit(model, batch, token_weights='sqrt', callbacks=[FreeOutputs()])
    assert relative_error(recorder.gradients, expected) < TOLERANCE


def test_weights_change_the_gradient(model):
    """Otherwise the tests of this file would pass without any weights."""
    batch = batch_of()
    unweighted = weighted_gradient(model, batch, 'token')
    for token_weights in WEIGHTS:
        weighted = weighted_gradient(model, batch, token_weights)
        assert relative_error(weighted, unweighted) > 0.05


MAX_NORM = 0.1
SHAPES_OF_STEPS = [
    RAGGED,
    [(7, 1), (3, 2), (12, 9), (8, 3), (2, 1), (5, 4)],
    [(3, 1), (16, 13), (4, 2), (6, 5)],
]


@pytest.mark.parametrize('token_weights', WEIGHTS)
def test_clipped_gradients_of_three_steps(model, token_weights):
    """Compared with a plain loop: one forward in a step, torch's own clipping, then the optimizer."""
    batches = [batch_of(shape) for shape in SHAPES_OF_STEPS]
    plain_model = in_double(model)
    plain_optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.5)

    recorder = fit(
        model,
        *batches,
        algorithms=[
            GradientClipping('norm', clipping_threshold=MAX_NORM),
            TokenAccumulation(token_weights=token_weights),
        ],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    )

    for clipped, batch in zip(recorder.steps, batches, strict=True):
        expected = weighted_gradient(plain_model, batch, token_weights)
        for name, parameter in plain_model.named_parameters():
            parameter.grad = expected[f'model.{name}']
        norm = torch.nn.utils.clip_grad_norm_(plain_model.parameters(), MAX_NORM)
        assert norm > 2 * MAX_NORM, 'clipping changes the gradients'
        # clip_grad_norm_ has also changed `expected`, which holds the same tensors.
        assert relative_error(clipped, expected) < 5 * TOLERANCE
        plain_optimizer.step()


@cache
def family(name):
    """Returns a tiny model of a family with its rows of images and text."""
    return FAMILIES[name]()


@pytest.mark.parametrize(
    ('name', 'packing', 'token_weights', 'microbatch_size'),
    [
        ('llava', False, 'column', 1),
        ('llava', True, 'sample', 3),
        ('qwen2_5_vl', False, 'sqrt', 3),
    ],
)
def test_images_and_text(name, packing, token_weights, microbatch_size):
    case = family(name)
    layout = BatchLayout.for_model(case.config)
    rows = [dict(row) for row in case.rows]
    row_without_labels = rows[2]
    row_without_labels['labels'] = torch.full_like(row_without_labels['labels'], -100)
    batch = layout.concat(rows, pad_token_id=case.pad_token_id)
    batch['loss_weights'] = column(batch)
    model = case.model
    if name == 'llava':
        # With torch 2.6 the error of its float32 forward is already 1.1e-6.
        model = in_double(model)
        batch['pixel_values'] = batch['pixel_values'].double()
    data = token_data_spec(loader(batch), packing=packing)
    assert_weighted_exactly(model, batch, data, token_weights, microbatch_size=microbatch_size)


def test_text_without_gradient():
    """Only the projector of images is trained, so microbatches of text change no gradient. Their loss is logged."""
    case = family('llava')
    model = in_double(case.model)
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    batch = family_batch(case)
    batch['pixel_values'] = batch['pixel_values'].double()
    data = token_data_spec(loader(batch))
    assert_weighted_exactly(model, batch, data, 'sqrt', microbatch_size=1)


@pytest.mark.parametrize('seed', range(5))
def test_random_rows_and_weights(model, seed):
    rng = random.Random(seed)
    shape = [(6, 4)]  # at least one row has labels
    num_random_rows = rng.randint(1, 8)
    for _ in range(num_random_rows):
        length = rng.randint(2, 20)
        num_labels = rng.randint(0, length - 1)
        shape.append((length, num_labels))
    side = rng.choice(['left', 'right'])
    regroup = rng.choice([True, False])
    packing = rng.choice([True, False])
    token_weights = rng.choice(WEIGHTS)
    microbatch_size = rng.randint(1, 4)

    batch = batch_of(shape, side=side)
    data = token_data_spec(loader(batch), regroup=regroup, packing=packing)
    assert_weighted_exactly(model, batch, data, token_weights, microbatch_size=microbatch_size)


ROW_WEIGHTS = [0.5, 2.0, 0.0, 1.0, 3.0, 0.25]


@pytest.mark.parametrize(
    ('weights', 'packing'),
    [
        pytest.param(torch.tensor(ROW_WEIGHTS), False, id='tensor'),
        pytest.param(torch.tensor(ROW_WEIGHTS)[:, None], False, id='column'),
        pytest.param(ROW_WEIGHTS, False, id='list'),
        pytest.param(torch.tensor([1, 2, 0, 1, 3, 4]), False, id='integers'),
        pytest.param(torch.tensor(ROW_WEIGHTS), True, id='packed'),
        pytest.param(torch.tensor(ROW_WEIGHTS), 'auto', id='perhaps packed'),
    ],
)
def test_row_weight_holds_for_all_tokens(model, weights, packing):
    batch = named_batch(RAGGED)
    weight_of_each_row = torch.as_tensor(weights).float().flatten()
    expected_batch = with_weights(batch, weight_of_each_row)
    data = loader(with_weights(batch, weights))
    data = token_data_spec(data, packing=packing)
    assert_weighted_exactly(model, expected_batch, data, 'column', microbatch_size=2)


@pytest.mark.parametrize('token_weights', ['sqrt', 'sample'])
def test_packed_documents_keep_their_weights(model, token_weights):
    rows = text_rows(RAGGED)
    padded_batch = collate(rows)
    data = loader(packed_row(rows))
    assert_weighted_exactly(model, padded_batch, data, token_weights, microbatch_size=1)


def test_column_in_a_plain_loop(model):
    """``test_functional.py`` has the other token weights."""
    batch = batch_of()
    expected = weighted_gradient(model, batch, 'column')
    layout = BatchLayout.for_model(model)
    rows_of_microbatches = [[0, 3], [1, 2, 4], [5]]
    microbatches = [layout.select(batch, rows) for rows in rows_of_microbatches]

    weights = step_loss_weights(microbatches, token_weights='column')
    for microbatch, weight in zip(microbatches, weights, strict=True):
        outputs = model(
            input_ids=microbatch['input_ids'],
            attention_mask=microbatch['attention_mask'],
            labels=microbatch['labels'],
        )
        apply_token_weights(outputs.logits, microbatch, 'column')
        weighted_loss = outputs.loss * weight
        weighted_loss.backward()

    assert relative_error(composer_gradients(model), expected) < TOLERANCE


@pytest.mark.parametrize(
    ('key', 'values', 'first_weight', 'second_weight'),
    [
        pytest.param('position_ids', [0, 1, 2, 3, 0, 1, 0, 0], 1 / 3, 1, id='positions'),
        pytest.param('sequence_id', [0, 0, 0, 0, 1, 1, -1, -1], 1 / 3, 1, id='numbers of documents'),
        # Positions of zero tell no documents. All four labels belong to one.
        pytest.param('position_ids', [0, 0, 0, 0, 0, 0, 0, 0], 1 / 4, 1 / 4, id='positions of zero'),
    ],
)
def test_padded_packed_documents_are_samples(key, values, first_weight, second_weight):
    """Two documents with 3 and 1 loss-generating tokens, and some padding, as other collators pack them.

    Each document weighs 1, so the tokens of the first weigh 1 / 3, and the token of the second weighs 1.
    """
    batch = {
        'labels': torch.tensor([[-100, 5, 6, 7, -100, 8, -100, -100]]),
        'attention_mask': torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]),
        key: torch.tensor([values]),
    }
    expected = torch.zeros(1, 8)
    expected[0, 1:4] = first_weight
    expected[0, 5] = second_weight
    weights = token_weights_of(batch, 'sample')
    torch.testing.assert_close(weights, expected)


# Mistakes.


def assert_refused(model, batch, message):
    """Fails unless the batch is refused with a message of one line."""
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        fit(model, loader(batch), token_weights='column')
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('weight', 'message'),
    [
        pytest.param(-0.5, "must be 0, or from 1e-30 .*got: -0.5 for sample 'sample-2'", id='negative'),
        pytest.param(1e37, r"to 1e\+30, got: 1e\+37 for sample 'sample-2'", id='too large'),
        pytest.param(float('nan'), "got: nan for sample 'sample-2'", id='nan'),
        pytest.param(float('inf'), "got: inf for sample 'sample-2'", id='inf'),
        pytest.param(None, "got: nan for sample 'sample-2' .*no weight", id='no weight'),
        pytest.param('1.0', "got: '1.0' for sample 'sample-2'", id='text'),
        pytest.param(torch.ones(2), r"got: tensor\(\[1., 1.\]\) for sample 'sample-2'", id='tensor of two weights'),
    ],
)
def test_bad_weight_of_a_sample(model, weight, message):
    batch = named_batch(RAGGED)
    batch['loss_weights'] = [1.0, 1.0, weight, 1.0, 1.0, 1.0]
    assert_refused(model, batch, message)


@pytest.mark.parametrize(
    ('weights', 'message'),
    [
        pytest.param([1e-42] * 6, "must be 0, or from 1e-30 .* for sample 'sample-0'", id='too small'),
        pytest.param([0.0] * 6, "must not all be 0, .*26 loss-generating tokens, sample 'sample-0'", id='all 0'),
        pytest.param(
            torch.ones(6, 3),
            r"\(6,\) or \(6, 14\), .*got: Tensor of shape \(6, 3\), .* 'sample-0'",
            id='other shape',
        ),
    ],
)
def test_bad_weights_of_a_batch(model, weights, message):
    batch = named_batch(RAGGED)
    batch['loss_weights'] = weights
    assert_refused(model, batch, message)


def test_tiny_weight_in_float64(model):
    """In float32 it would be 0."""
    batch = named_batch(RAGGED)
    batch['loss_weights'] = torch.ones(6, dtype=torch.float64)
    batch['loss_weights'][2] = 1e-50
    assert_refused(model, batch, "got: 1e-50 for sample 'sample-2'")


def test_batch_without_weights(model):
    assert_refused(model, named_batch(RAGGED), "`loss_weights` in every batch, .* 'sample-0'")


def column_weights(batch, weights):
    """Returns the weights of all positions, read from these ``loss_weights``."""
    return token_weights_of(with_weights(batch, weights), 'column')


def test_row_without_tokens_needs_no_weight():
    batch = ragged_batch([(4, 2), (5, 0)])
    weights = column_weights(batch, [0.5, None])
    # Two labels weigh 0.5 each.
    assert weights.sum(dim=1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize('make_number', [np.float32, np.int64, np.array, torch.tensor])
def test_weights_in_a_list_of_numbers(make_number):
    batch = ragged_batch([(4, 2), (5, 3)])
    expected = column_weights(batch, [2.0, 0.5])
    weights = column_weights(batch, [make_number(2), 0.5])
    assert torch.equal(weights, expected)


def test_single_weight_for_batch_is_refused():
    with pytest.raises(ValueError, match='or a list of floats'):
        column_weights(named_batch(RAGGED), 0.5)


def test_hidden_token_does_not_end_a_document():
    """Its position is 0, like the positions of padding. Further documents begin only at attended tokens."""
    batch = {
        'input_ids': torch.arange(1, 7)[None],
        'labels': torch.tensor([[1, 2, -100, 4, 5, 6]]),
        'attention_mask': torch.tensor([[1, 1, 0, 1, 1, 1]]),
        'position_ids': torch.tensor([[0, 1, 0, 2, 3, 4]]),
    }
    carries_loss = torch.tensor([[0, 1, 0, 1, 1, 1]])
    weights = token_weights_of(batch, 'sample')
    assert torch.equal(weights, carries_loss / 4)


def test_bad_weights_without_loss_are_ignored(model):
    expected_batch = batch_of()
    has_no_label = expected_batch['labels'] == -100
    weights = expected_batch['loss_weights'].masked_fill(has_no_label, float('nan'))
    batch = with_weights(expected_batch, weights)
    data = token_data_spec(loader(batch))
    assert_weighted_exactly(model, expected_batch, data, 'column', microbatch_size=1)


def test_unused_weight_column_is_named(model, caplog):
    fit(model, loader(batch_of()))
    assert 'token_weights=column' in caplog.text


def without_weights(batch):
    """Returns the batch without its ``loss_weights``."""
    return {key: value for key, value in batch.items() if key != 'loss_weights'}


def without_weights_of_every_second_row(batch):
    """Returns the batch with weights of 0 in rows 0, 2 and so on."""
    is_odd = torch.arange(len(batch['labels'])) % 2
    weights = batch['loss_weights'] * is_odd[:, None]
    return with_weights(batch, weights)


@pytest.mark.parametrize(
    ('transform', 'message'),
    [
        (without_weights, 'must carry the `loss_weights`'),
        (without_weights_of_every_second_row, 'token weights must not change'),
    ],
)
def test_weights_changed_by_transform_are_refused(model, transform, message):
    batch = batch_of()
    with pytest.raises(RuntimeError, match=message):
        fit(model, batch, microbatch_transforms=transform, token_weights='sqrt', microbatch_size=6)


@pytest.mark.parametrize('token_weights', ['token', 'column'])
def test_logits_are_kept_once(token_weights):
    """With weights the backward keeps only one tensor as large as the logits, as the plain mean does."""
    batch = batch_of()
    leaf = torch.randn(*batch['labels'].shape, VOCABULARY, requires_grad=True)
    logits = leaf * 1  # has a graph, like the logits of a model
    size_of_address = {}

    def record(tensor):
        size_of_address[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        apply_token_weights(logits, batch, token_weights)
        ForCausalLMLoss(logits, batch['labels'], VOCABULARY)

    large_sizes = [size for size in size_of_address.values() if size >= logits.numel()]
    assert len(large_sizes) == 1


def compiled_run(model, batch, backend):
    """Returns the recorder of a step of a model that Composer compiles."""
    compile_config = {'backend': backend}
    torch._dynamo.reset()
    try:
        return fit(model, batch, token_weights='column', microbatch_size=3, compile_config=compile_config)
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_forward(model):
    batch = batch_of()
    expected = weighted_gradient(model, batch, 'column')
    recorder = compiled_run(model, batch, 'eager')
    assert relative_error(recorder.gradients, expected) < TOLERANCE


@pytest.mark.slow
def test_compiled_loss_and_logits_are_refused(model):
    """If the loss is compiled with the model, weights cannot be applied to the gradient by the logits."""
    with pytest.raises(RuntimeError, match='leave out `compile_config` or the term'):
        compiled_run(model, batch_of(), 'aot_eager')


@pytest.mark.parametrize('measures_all', [True, False])
def test_weighting_reads_no_values(measures_all):
    """The tensors have no content, so `.item()` and the like would raise. On a GPU they would make the host wait."""
    with torch.device('meta'):
        labels = torch.zeros(6, 14, dtype=torch.long)
        weights = torch.ones(6, 14)
        leaf = torch.zeros(6, 14, VOCABULARY, requires_grad=True)
        logits = leaf * 1  # has a graph, like the logits of a model
        all_positions = torch.arange(6 * 14)
    batch = {'labels': labels}
    rows = [RowCounts(rule=LossRule.CAUSAL, loss_tokens=26)]
    record = MicrobatchRecord(batch=batch, rows=rows)

    weigh_tokens(logits, weights)
    record.watch(logits, weights, 1.0, batch=batch, measures_all=measures_all)
    losses = token_losses_at(logits, all_positions, labels.flatten())
    loss = ForCausalLMLoss(logits, labels, VOCABULARY) + losses.sum()
    loss.backward()

    assert record.was_reached
    assert record.deviations.device.type == 'meta'


def test_bfloat16_adds_no_noise(model):
    """The weighted gradient has about as much round-off as the gradient of the plain mean."""
    batch = batch_of()
    expected_weighted = weighted_gradient(model, batch, 'sqrt')
    expected_plain = weighted_gradient(model, batch, 'token')

    model.bfloat16()
    weighted = fit(model, batch, token_weights='sqrt')
    plain = fit(model, batch)

    noise = relative_error(plain.gradients, expected_plain)
    assert noise < 0.03
    assert relative_error(weighted.gradients, expected_weighted) < 3 * noise


@pytest.mark.slow
def test_weights_of_pre_split_batches(model):
    """Each sample has its own weight, and the last global batch is smaller."""
    dataset = LengthDataset(10)

    def collate_with_weights(samples):
        batch = collate_samples(samples)
        batch['loss_weights'] = [0.5 + int(name) for name in batch['sample_ids']]
        return batch

    sampler = RegroupingBatchSampler(
        dataset,
        lengths=dataset.lengths,
        global_batch_size=8,
        max_tokens=2 * LONGEST,
        shuffle=False,
        drop_last=False,
    )
    data = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate_with_weights)
    spec = token_data_spec(data, slot_tokens=LONGEST)

    recorder = fit(model, spec, token_weights='column', max_duration='2ba')

    indices_of_steps = (range(8), range(8, 10))
    for indices, gradients in zip(indices_of_steps, recorder.steps, strict=True):
        samples = [dataset[index] for index in indices]
        batch = collate_with_weights(samples)
        batch['loss_weights'] = torch.tensor(batch['loss_weights'])
        expected = weighted_gradient(model, batch, 'column')
        assert relative_error(gradients, expected) < TOLERANCE


def dict_loss(*losses):
    """Returns the mean over tokens as the only term of a dict."""
    return {'lm': by_token(*losses)}


@pytest.mark.parametrize(
    ('loss', 'token_weights', 'units'),
    [
        (by_token, 'sqrt', None),
        (dict_loss, 'column', {'lm': 'tokens'}),
        (dict_loss, 'sqrt', None),
    ],
)
def test_loss_computed_by_composer_model(loss, token_weights, units):
    """Weights are applied once, even if the loss is computed several times."""
    model = Terms(loss)
    batch = batch_of()
    expected = weighted_gradient(model.model, batch, token_weights)
    recorder = fit(model, batch, token_weights=token_weights, loss_units=units)
    assert relative_error(recorder.gradients, expected) < TOLERANCE


def one_number(*losses):
    return 3 * by_token(*losses)


def one_named_term(*losses):
    return {'lm': 3 * by_token(*losses)}


def two_numbers(*losses):
    return by_token(*losses), 2 * by_token(*losses)


def three_terms(*losses):
    """Returns two terms whose tokens are weighted, behind a constant."""
    mean = by_token(*losses)
    constant = torch.tensor(CONSTANT)
    return {'constant': constant, 'half': 0.5 * mean, 'lm': 2.5 * mean}


CONSTANT = 0.5
UNITS_OF_THREE_TERMS = dict.fromkeys(['constant', 'half', 'lm'], 'tokens')


def assert_logged(recorder, expected):
    """Compares the logged values of terms, by their names."""
    logged = {}
    for name in expected:
        [logged[name]] = recorder.logged(f'loss/train/{name}')
    assert logged == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    ('loss', 'factors'),
    [
        pytest.param(one_number, {'total': 3}, id='one number'),
        pytest.param(one_named_term, {'lm': 3, 'total': 3}, id='one named term'),
        pytest.param(two_numbers, {'loss0': 1, 'loss1': 2, 'total': 3}, id='two numbers'),
    ],
)
def test_logged_value_of_each_term(loss, factors):
    """Terms are multiples of the mean over tokens."""
    model = Terms(loss)
    batch = batch_of()
    _, weighted_mean, _ = weighted_reference(model.model, batch, 'column')

    recorder = fit(model, batch, token_weights='column')

    expected = {name: factor * weighted_mean for name, factor in factors.items()}
    assert_logged(recorder, expected)


def test_constant_term_is_not_weighted():
    model = Terms(three_terms)
    batch = batch_of()
    _, weighted_mean, _ = weighted_reference(model.model, batch, 'column')

    recorder = fit(model, batch, token_weights='column', loss_units=UNITS_OF_THREE_TERMS)

    expected = {
        'constant': CONSTANT,
        'half': 0.5 * weighted_mean,
        'lm': 2.5 * weighted_mean,
        'total': 3 * weighted_mean + CONSTANT,
    }
    assert_logged(recorder, expected)
