# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The checks for any trainer: plain loops that are right, and loops with the mistakes that trainers make."""

from __future__ import annotations

import math
import pickle
import re

import numpy as np
import pytest
import torch

from composer_tokacc import BatchLayout, invariance, verify_invariance
from composer_tokacc.invariance import InvarianceCase, InvarianceReport, relative_error
from tests.checks.test_written_state import spectral_norm, with_layers
from tests.ranks.invariance import mean_of_means, step_mean
from tests.support.families import FAMILIES
from tests.support.image_codes import (
    collate_with_codes,
    gradients_of_single_rows,
    image_codes_model,
    rows_with_codes,
)
from tests.support.launch import launch_json
from tests.support.text import collate, ragged_batch, single_rows, text_model, text_rows
from tests.support.training import reference_gradients

ROWS = [(4, 2), (14, 11), (9, 9), (6, 1), (5, 0)]
FEW_CUTS = {'microbatch_sizes': [2], 'padding_sides': ['right']}
"""For mistakes that any cut shows."""


def test_mean_over_the_step_is_exact():
    loop = step_mean(text_model())

    report = verify_invariance(loop, text_rows(ROWS))

    assert report.is_exact, report
    cuts_of_a_side = [('again', 5)]
    for size in (1, 2, 3, 5):
        cuts_of_a_side += [('in order', size), ('by length', size)]
    cuts_of_a_side.append(('uneven', 4))
    cuts = [(case.cut, case.microbatch_size) for case in report.cases]
    assert cuts == 2 * cuts_of_a_side
    sides = [case.padding for case in report.cases]
    assert sides == 10 * ['right'] + 10 * ['left']
    assert 'exact: largest relative gradient error' in str(report)


def test_mean_of_means_is_off():
    """The report says in which cuts."""
    loop = mean_of_means(text_model())
    batch = ragged_batch(ROWS[:4])

    report = verify_invariance(loop, batch, microbatch_sizes=[1, 9])

    assert not report.is_exact
    errors_by_size = {1: [], 4: []}  # there are only 4 rows, so 9 becomes 4
    for case in report.cases:
        if case.cut == 'in order':
            errors_by_size[case.microbatch_size].append(case.error)
    assert min(errors_by_size[1]) > 1e-2
    assert max(errors_by_size[4]) < 1e-6
    assert report.worst.reason.startswith('most of all, ')
    assert 'NOT exact' in str(report)
    assert 'over tolerance; most of all, ' in str(report)


def test_row_whose_only_label_is_never_predicted():
    """A causal model never learns the first token. So one row has the gradient of both, and the step is right."""
    learned, not_learned = text_rows([(6, 5), (3, 0)])
    not_learned['labels'][0, 0] = not_learned['input_ids'][0, 0]

    report = verify_invariance(step_mean(text_model()), [learned, not_learned], padding_sides=['right'])

    assert report.is_exact


def changed_step(change, model=None):
    """Returns a right step whose gradients are changed: ``change(gradient, name, microbatches)``. None: it is lost."""
    right_gradients = step_mean(model or text_model())

    def gradients_of(microbatches):
        gradients = {}
        for name, gradient in right_gradients(microbatches).items():
            changed = change(gradient, name, microbatches)
            if changed is not None:
                gradients[name] = changed
        return gradients

    return gradients_of


def test_undivided_sum_shows_its_factor():
    def undivided(gradient, name, microbatches):
        return len(microbatches) * gradient

    report = verify_invariance(changed_step(undivided), text_rows(ROWS), microbatch_sizes=[1])

    cases_of_five_microbatches = [case for case in report.cases if case.microbatch_size == 1]
    assert len(cases_of_five_microbatches) == 4  # in order and by length, padded on the right and on the left
    for case in cases_of_five_microbatches:
        assert case.factor == pytest.approx(5.0)


def test_dropped_smaller_microbatch_is_off():
    """All sizes that are tried divide the number of rows. Only the uneven cut has a smaller microbatch."""
    right_gradients = step_mean(text_model())
    rows = text_rows([*ROWS, (8, 3)])

    def without_smaller_last(microbatches):
        rows_of_first = len(microbatches[0]['labels'])
        rows_of_last = len(microbatches[-1]['labels'])
        if rows_of_last < rows_of_first:
            microbatches = microbatches[:-1]
        return right_gradients(microbatches)

    report = verify_invariance(without_smaller_last, rows, padding_sides=['right'])

    assert report.worst.cut == 'uneven'
    assert not report.is_exact


def case_of_repeated_step(loop):
    """Returns the case that compares a step with the same step, made again. It is the first one of the report."""
    report = verify_invariance(loop, text_rows(ROWS))
    case = report.cases[0]
    assert case.cut == 'again'
    return case


def test_step_that_differs_from_itself():
    keeps_gradient = step_mean(text_model(), keep=True)
    has_state = step_mean(with_layers(spectral_norm()))

    assert case_of_repeated_step(keeps_gradient).factor == pytest.approx(2.0)
    assert case_of_repeated_step(has_state).error > 1e-6


def test_trainer_that_writes_into_batches():
    right_gradients = step_mean(text_model())

    def gradients_of(microbatches):
        gradients = right_gradients(microbatches)
        for microbatch in microbatches:
            labels = microbatch['labels']
            labels[:, 1:-1] = labels[:, 2:].clone()
        return gradients

    report = verify_invariance(gradients_of, text_rows(ROWS), padding_sides='left')

    assert report.is_exact, report
    assert {case.padding for case in report.cases} == {'left'}


def test_factor_on_every_step_needs_reference():
    """A trainer that halves every gradient is the same for every cut. Only a reference shows the mistake."""
    model = text_model()
    rows = text_rows(ROWS)
    right = step_mean(model)
    halved = changed_step(lambda gradient, name, microbatches: gradient / 2, model)

    def reference(batch):
        gradients_of_wrapped_model, _ = reference_gradients(model, batch)
        gradients = {}
        for name, gradient in gradients_of_wrapped_model.items():
            gradients[name.removeprefix('model.')] = gradient
        return gradients

    report_without_reference = verify_invariance(halved, rows, **FEW_CUTS)
    report = verify_invariance(halved, rows, reference=reference, **FEW_CUTS)
    report_of_right = verify_invariance(right, rows, reference=reference, **FEW_CUTS)

    assert report_without_reference.is_exact
    assert report.worst.error == pytest.approx(0.5, rel=1e-4)
    assert report_of_right.is_exact


@pytest.mark.parametrize('family', ['llava', 'qwen2_5_vl', 'idefics3'])
def test_rows_keep_their_images(family):
    case = FAMILIES[family]()
    right_loop = step_mean(case.model)
    wrong_loop = mean_of_means(case.model)
    layout = BatchLayout.for_model(case.model)

    report = verify_invariance(right_loop, case.rows, layout=layout, padding_sides=['right'])
    report_of_wrong = verify_invariance(wrong_loop, case.rows, **FEW_CUTS)

    assert report.is_exact, report
    assert not report_of_wrong.is_exact


@pytest.mark.parametrize(
    ('images', 'is_collated'),
    [
        pytest.param([1, 1, 0], True, id='row without image'),
        pytest.param([1, 1, 2], True, id='row of two images'),
        # Joined, the codes would have the shape of the text. Only the shorter rows by themselves do not.
        pytest.param([1, 1, 1], False, id='single rows'),
    ],
)
def test_rows_keep_their_image_codes(images, is_collated):
    """An image has 6 codes, and the widest row 6 tokens. Only all batches together show that the codes are not text."""
    model = image_codes_model()
    rows = rows_with_codes([(4, 2), (5, 4), (6, 6)], images)
    expected = gradients_of_single_rows(model, rows)
    if is_collated:
        rows = collate_with_codes(rows)

    report = verify_invariance(step_mean(model), rows, reference=lambda batch: expected)

    assert report.is_exact, report


def test_first_row_has_none_in_place_of_images():
    """It has as many keys as the others, but does not tell the family."""
    case = FAMILIES['idefics3']()
    first, *others = sorted(case.rows, key=len)
    assert 'pixel_values' not in first
    none_of_each_key = dict.fromkeys(others[-1])
    first = {**none_of_each_key, **first}

    report = verify_invariance(step_mean(case.model), [first, *others], padding_sides=['right'])

    assert report.is_exact, report


def test_lost_or_nan_gradient_is_off():
    """The gradient is lost, or NaN, only in cuts with several microbatches."""
    changed_name = 'lm_head.weight'
    rows = text_rows(ROWS)

    def without_head(gradient, name, microbatches):
        is_lost = name == changed_name and len(microbatches) > 1
        return None if is_lost else gradient

    def nan_in_cuts(gradient, name, microbatches):
        return gradient * math.nan if len(microbatches) > 1 else gradient

    report_of_lost = verify_invariance(changed_step(without_head), rows, **FEW_CUTS)
    report_of_nan = verify_invariance(changed_step(nan_in_cuts), rows, **FEW_CUTS)

    assert changed_name in report_of_lost.worst.reason
    assert report_of_nan.worst.error == float('inf')


def test_step_of_other_batches_is_refused():
    """Its gradient is the same in every cut, so all errors are 0."""
    rows = text_rows(ROWS)
    whole_batch = collate(rows)
    right_gradients = step_mean(text_model())

    def always_the_whole_batch(microbatches):
        return right_gradients([whole_batch])

    with pytest.raises(ValueError, match='the same gradient for one row as for all rows'):
        verify_invariance(always_the_whole_batch, rows, **FEW_CUTS)


def test_infinite_reference_is_refused():
    """The error would be infinity divided by infinity, which is no larger than any tolerance."""

    def infinite_if_padded_left(gradient, name, microbatches):
        first_column = microbatches[0]['attention_mask'][:, 0]
        is_padded_left = not first_column.all()
        return torch.full_like(gradient, math.inf) if is_padded_left else gradient

    with pytest.raises(ValueError, match=r'reference gradient must be .* finite'):
        verify_invariance(changed_step(infinite_if_padded_left), text_rows(ROWS))


@pytest.mark.parametrize(
    ('row_sizes', 'message'),
    [
        pytest.param([(4, 3), (9, 3)], r'differ .* labels.* 3 in each of 2 rows', id='equal numbers of labels'),
        # Only few models count the label of a first token.
        pytest.param([(4, 4), (9, 3)], r'3 in each of 2 rows, counted causal', id='a label more, not counted'),
        pytest.param([(4, 3)], r'at least 2, got: \[1\]', id='one row'),
        pytest.param([], r'at least 2, got: \[0\]', id='no row'),
    ],
)
def test_rows_that_prove_nothing_are_refused(row_sizes, message):
    with pytest.raises(ValueError, match=message):
        verify_invariance(step_mean(text_model()), text_rows(row_sizes))


def test_zero_reference_is_refused():
    def zero_gradients(microbatches):
        return {'a': torch.zeros(2)}

    with pytest.raises(ValueError, match='reference gradient must be above zero'):
        verify_invariance(zero_gradients, text_rows(ROWS))


@pytest.mark.parametrize(
    ('argument', 'value', 'message'),
    [
        ('microbatch_sizes', torch.tensor([1, 2]), r'`microbatch_sizes` .* positive integer, got: tensor\(1\)'),
        ('microbatch_sizes', torch.tensor(2), r'`microbatch_sizes` must be a list .*, got: tensor\(2\)'),
        ('microbatch_sizes', [-1], r'`microbatch_sizes` .* positive .* -1'),
        ('microbatch_sizes', 0, '`microbatch_sizes` must be a list .*, got: 0'),
        ('microbatch_sizes', [], '`microbatch_sizes` must be a list .*, but it is empty'),
        ('padding_sides', torch.tensor([1, 2]), "`padding_sides` must be 'right' or 'left'"),
        ('padding_sides', None, '`padding_sides` must be a list'),
        ('tolerance', '1e-6', "`tolerance` must be a finite number, at least 0, got: '1e-6'"),
        ('tolerance', torch.tensor([1e-6, 1e-6]), r'`tolerance` must be a finite number, at least 0, got: tensor\('),
        ('tolerance', 10**400, '`tolerance` must be a finite number, at least 0, got: 10'),
        ('tolerance', math.inf, '`tolerance` must be a finite number'),  # every error would be within it
        ('tolerance', math.nan, '`tolerance` must be a finite number'),
        ('reference', {'a': torch.ones(2)}, '`reference` must be a function'),
    ],
)
def test_unusable_arguments_are_refused(argument, value, message):
    loop = step_mean(text_model())
    with pytest.raises(ValueError, match=message):
        verify_invariance(loop, text_rows(ROWS), **{argument: value})


@pytest.mark.parametrize('as_sizes', [np.array, iter], ids=['array', 'iterator'])
def test_sizes_may_be_of_other_types(as_sizes):
    """An iterator can be read only once, so its sizes must not be used up by their check."""
    loop = step_mean(text_model())
    sizes = as_sizes([1, 2])

    report = verify_invariance(loop, text_rows(ROWS), microbatch_sizes=sizes, padding_sides='right')

    sizes_in_order = [case.microbatch_size for case in report.cases if case.cut == 'in order']
    assert sizes_in_order == [1, 2]


@pytest.mark.parametrize('as_number', [np.float32, np.array, torch.tensor], ids=['float32', 'array', 'tensor'])
def test_tolerance_may_be_of_other_types(as_number):
    loop = step_mean(text_model())
    tolerance = as_number(1e-5)

    report = verify_invariance(loop, text_rows(ROWS), padding_sides='right', tolerance=tolerance)

    assert report.tolerance == pytest.approx(1e-5)
    assert report.is_exact is True


def ids_of_bytes(row):
    return {**row, 'input_ids': row['input_ids'].to(torch.uint8)}


def ids_of_codebooks(row):
    ids = row['input_ids']
    ids_of_four_codebooks = torch.stack([ids, ids, ids, ids], dim=-1)
    return {**row, 'input_ids': ids_of_four_codebooks}


def ids_of_codebooks_without_mask(row):
    codebooks = ids_of_codebooks(row)
    del codebooks['attention_mask']
    return codebooks


def ids_of_codebooks_with_mask_of_pairs(row):
    return mask_of_pairs(ids_of_codebooks(row))


def short_labels(row):
    return {**row, 'labels': row['labels'].to(torch.int16)}


def mask_of_pairs(row):
    width = row['labels'].shape[1]
    all_pairs = torch.ones(1, width, width, dtype=torch.long)
    return {**row, 'attention_mask': all_pairs.tril()}


@pytest.mark.parametrize(
    'change',
    [
        ids_of_bytes,
        ids_of_codebooks,
        ids_of_codebooks_without_mask,
        ids_of_codebooks_with_mask_of_pairs,
        short_labels,
        mask_of_pairs,
    ],
)
def test_rows_that_only_the_users_loop_can_read(change):
    """TokenAccumulation refuses such rows, but a loop of the user may read them."""
    loop = step_mean(text_model())

    def read(microbatches):
        read_microbatches = []
        for microbatch in microbatches:
            ids = microbatch['input_ids'].long()
            if ids.dim() == 3:
                ids = ids[:, :, 0]
            labels = microbatch['labels'].long()
            mask = torch.ones_like(ids)  # padding is on the right, behind all tokens
            read_microbatches.append({'input_ids': ids, 'attention_mask': mask, 'labels': labels})
        return loop(read_microbatches)

    rows = [change(row) for row in text_rows(ROWS)]
    report = verify_invariance(read, rows, padding_sides='right')
    assert report.is_exact, report


@pytest.mark.parametrize(
    ('key', 'value', 'message'),
    [
        pytest.param(
            'attention_mask',
            [[1, 1, 1, 1]],
            '`attention_mask` must be a tensor, got: list',
            id='list',
        ),
        pytest.param(
            'attention_mask',
            torch.ones(4),
            '`attention_mask` must have the rows of `labels`, 1, ',
            id='mask without rows',
        ),
        pytest.param(
            'attention_mask',
            torch.zeros(1, 4),
            '`attention_mask` must be 1 where tokens are',
            id='inverted mask',
        ),
        pytest.param(
            'labels',
            torch.ones(1, 4, dtype=torch.uint8),
            '`labels` must be of a type that can hold -100',
            id='labels without a sign',
        ),
        pytest.param(
            'input_ids',
            torch.ones(4, dtype=torch.long),
            '`input_ids` must have the rows of `labels`, 1, .*\\(4,\\)',
            id='ids without rows',
        ),
        pytest.param(
            'input_ids',
            torch.ones(2, 4, dtype=torch.long),
            '`input_ids` must have the rows of `labels`, 1, ',
            id='ids of two rows',
        ),
        pytest.param(
            'inputs_embeds',
            torch.zeros(1, 4, 2, requires_grad=True),
            '`.*inputs_embeds.*` must be .* without a gradient',
            id='tensor with gradient',
        ),
    ],
)
def test_unusable_rows_are_refused(key, value, message):
    first, *others = text_rows(ROWS)
    changed = {**first, key: value}
    with pytest.raises(ValueError, match=message):
        verify_invariance(step_mean(text_model()), [changed, *others])


def test_row_without_tokens_is_refused():
    first, *others = text_rows(ROWS)
    without_tokens = {key: tensor[:, :0] for key, tensor in first.items()}
    with pytest.raises(ValueError, match='at least one row of one token'):
        verify_invariance(step_mean(text_model()), [without_tokens, *others])


def test_gradients_must_be_comparable():
    """Without a refusal, the reference of another name would be lost, and the one of another shape repeated."""
    model = text_model()
    rows = text_rows(ROWS)
    loop = step_mean(model)
    expected = loop([collate(rows)])
    of_wrapped_model = {f'module.{name}': gradient for name, gradient in expected.items()}
    of_one_shard = {name: gradient[:1] for name, gradient in expected.items()}

    with pytest.raises(ValueError, match=r"must have the same names .* got: 'lm_head\.weight' .* 'module\."):
        verify_invariance(loop, rows, reference=lambda batch: of_wrapped_model)
    with pytest.raises(ValueError, match=r'`lm_head.weight` must have the same shape .* \(64, 32\) and \(1, 32\)'):
        verify_invariance(loop, rows, reference=lambda batch: of_one_shard)


def test_arguments_in_another_order_are_refused():
    with pytest.raises(ValueError, match='`rows` must be one-row batches'):
        verify_invariance(text_rows(ROWS), changed_step)


def test_verdict_shows_the_tolerance():
    case = InvarianceCase(cut='again', padding='right', microbatch_size=1, error=1.2e-4, factor=1.0, reason='')
    report = InvarianceReport(cases=(case,), tolerance=1.4e-4)

    *_, verdict = str(report).splitlines()

    assert verdict.startswith('exact')
    assert '1.4e-04' in verdict


@pytest.mark.parametrize('has_reference', [False, True])
@pytest.mark.parametrize(
    ('gradients', 'message'),
    [
        pytest.param({'a': torch.ones(2), 'frozen': None}, 'None for `frozen`', id='a gradient is None'),
        pytest.param(None, 'NoneType', id='all gradients are None'),
    ],
)
def test_gradients_must_be_tensors(gradients, message, has_reference):
    def loop(microbatches):
        return gradients

    def reference(batch):
        return {'a': torch.ones(2)}

    with pytest.raises(TypeError, match=message):
        verify_invariance(loop, text_rows(ROWS), reference=reference if has_reference else None)


@pytest.mark.slow
def test_means_averaged_over_ranks_are_off():
    results = launch_json('tests/ranks/invariance.py', ranks=2)
    assert results['step mean'] < 1e-6
    # As in Composer's token-weighted flag and most trainers: each rank is exact, but then its mean weighs as much as
    # the mean of a rank with more tokens.
    assert results['mean of each rank'] > 1e-2
    assert results['images on one rank'] < 1e-6
    assert 'as many rows on every rank, and at least 2, got: [3, 2]' in results['a row less on rank 1']
    # With equal numbers of labels on all ranks, a mean of the means of ranks would be right.
    assert re.search(r'differ .* labels, got: 22 in each of 2 ranks', results['same rows'])


def test_ranks_send_each_row_once(monkeypatch):
    """Rows may be views of one large batch. Pickle would send the whole batch for each of them."""
    views = single_rows(ragged_batch(ROWS * 8))
    copies = []
    for view in views:
        copy = {key: tensor.clone() for key, tensor in view.items()}
        copies.append(copy)
    sent_bytes = []

    def counting_gather(value):
        pickled = pickle.dumps(value)
        sent_bytes.append(len(pickled))
        return [value]

    def most_sent_bytes(rows):
        sent_bytes.clear()
        verify_invariance(step_mean(text_model()), rows, **FEW_CUTS)
        return max(sent_bytes)

    monkeypatch.setattr(invariance, 'all_gather_object', counting_gather)
    bytes_of_views = most_sent_bytes(views)
    bytes_of_copies = most_sent_bytes(copies)

    assert bytes_of_views <= bytes_of_copies


def test_parameters_without_a_gradient():
    """The expected gradient is (3, 4), so its norm is 5, and without the 3 the error is 3 / 5."""
    expected = {'a': torch.tensor([3.0]), 'b': torch.tensor([4.0])}
    without_a = {'b': expected['b']}
    with_c = {**expected, 'c': torch.tensor([5.0])}

    error, _ = relative_error(dict(expected), expected)
    assert error == 0.0

    error, reason = relative_error(without_a, expected)
    assert error == pytest.approx(0.6)
    assert reason == 'most of all, a is off'

    error, reason = relative_error(with_c, expected)
    assert error == pytest.approx(1.0)
    assert reason == 'most of all, c is off'
