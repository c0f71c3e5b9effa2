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

from composer_tokacc import BatchLayout, invariance, verify_invariance, verify_isolation
from composer_tokacc.invariance import InvarianceCase, InvarianceReport, relative_error
from tests.checks.test_written_state import Cache, spectral_norm, with_layers
from tests.ranks.invariance import mean_of_means, step_mean
from tests.support.families import FAMILIES
from tests.support.image_codes import (
    collate_with_codes,
    gradients_of_single_rows,
    image_codes_model,
    rows_with_codes,
)
from tests.support.launch import launch_json
from tests.support.text import collate, packed_row, ragged_batch, text_model, text_row, text_rows
from tests.support.training import hugging_face, reference_gradients

ROWS = [(4, 2), (14, 11), (9, 9), (6, 1), (5, 0)]
FEW_CUTS = {'microbatch_sizes': [2], 'padding_sides': ['right']}
"""For mistakes that any cut shows."""


def test_mean_over_the_step_is_exact():
    loop = step_mean(text_model())

    report = verify_invariance(loop, text_rows(ROWS))

    assert report.is_exact, report
    cuts = {(case.cut, case.microbatch_size) for case in report.cases}
    expected_cuts = {('again', 5), ('uneven', 4)}
    for size in (1, 2, 3, 5):
        expected_cuts |= {('in order', size), ('by length', size)}
    assert cuts == expected_cuts
    assert {case.padding for case in report.cases} == {'right', 'left'}
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
    undivided = changed_step(lambda gradient, name, microbatches: len(microbatches) * gradient)
    report = verify_invariance(undivided, text_rows(ROWS), microbatch_sizes=[1])
    factors = [case.factor for case in report.cases if case.microbatch_size == 1]
    assert factors == pytest.approx([5.0] * 4)


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
        gradients, _ = reference_gradients(model, batch)
        return {name.removeprefix('model.'): gradient for name, gradient in gradients.items()}

    report_without_reference = verify_invariance(halved, rows, **FEW_CUTS)
    report = verify_invariance(halved, rows, reference=reference, **FEW_CUTS)
    report_of_right = verify_invariance(right, rows, reference=reference, **FEW_CUTS)

    assert report_without_reference.is_exact
    assert report.worst.error == pytest.approx(0.5, rel=1e-4)
    assert report_of_right.is_exact


@pytest.mark.parametrize('family', ['llava', 'qwen2_5_vl', 'idefics3'])
def test_rows_keep_their_images(family):
    case = FAMILIES[family]()
    layout = BatchLayout.for_model(case.model)

    report = verify_invariance(step_mean(case.model), case.rows, layout=layout, padding_sides=['right'])
    report_of_means = verify_invariance(mean_of_means(case.model), case.rows, **FEW_CUTS)

    assert report.is_exact, report
    assert not report_of_means.is_exact


@pytest.mark.parametrize(
    ('images', 'is_collated'),
    [
        ((1, 1, 0), True),
        ((1, 1, 2), True),
        ((1, 1, 1), False),  # joined, they have the shape of the text. Only the shorter rows by themselves do not
    ],
)
def test_rows_keep_their_image_codes(images, is_collated):
    """An image has 6 codes, and the widest row 6 tokens. Only all batches together show that the codes are not text."""
    model = image_codes_model()
    rows = rows_with_codes([(4, 2), (5, 4), (6, 6)], images)
    expected = gradients_of_single_rows(model, rows)

    report = verify_invariance(
        step_mean(model),
        collate_with_codes(rows) if is_collated else rows,
        reference=lambda batch: expected,
    )

    assert report.is_exact, report


def test_first_row_has_none_in_place_of_images():
    """It has as many keys as the others, but does not tell the family."""
    case = FAMILIES['idefics3']()
    first, *others = sorted(case.rows, key=len)
    assert 'pixel_values' not in first
    none_of_each_key = dict.fromkeys(others[-1])
    rows = [{**none_of_each_key, **first}, *others]

    report = verify_invariance(step_mean(case.model), rows, padding_sides=['right'])

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
        mask = microbatches[0]['attention_mask']
        is_padded_left = not mask[:, 0].all()
        return torch.full_like(gradient, math.inf) if is_padded_left else gradient

    with pytest.raises(ValueError, match=r'reference gradient must be .* finite'):
        verify_invariance(changed_step(infinite_if_padded_left), text_rows(ROWS))


@pytest.mark.parametrize(
    ('rows', 'options', 'message'),
    [
        pytest.param([(4, 3), (9, 3)], {}, r'differ .* labels.* 3 in each of 2 rows', id='equal numbers of labels'),
        # Only few models count the label of a first token.
        pytest.param([(4, 4), (9, 3)], {}, r'3 in each of 2 rows, counted causal', id='a label more, not counted'),
        pytest.param(ROWS, {'microbatch_sizes': [-1]}, r'`microbatch_sizes` .* positive .* -1', id='negative size'),
        pytest.param([(4, 3)], {}, r'at least 2, got: \[1\]', id='one row'),
        pytest.param([], {}, r'at least 2, got: \[0\]', id='no row'),
        pytest.param(ROWS, {'microbatch_sizes': 2}, '`microbatch_sizes` must be a list', id='one size'),
        pytest.param(ROWS, {}, 'reference gradient must be above zero', id='gradient of zero'),
    ],
)
def test_rows_that_prove_nothing_are_refused(rows, options, message):
    def zero_gradients(microbatches):
        return {'a': torch.zeros(2)}

    with pytest.raises(ValueError, match=message):
        verify_invariance(zero_gradients, text_rows(rows), **options)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            {'microbatch_sizes': torch.tensor([1, 2])},
            r'`microbatch_sizes` .* positive integer, got: tensor\(1\)',
        ),
        ({'microbatch_sizes': torch.tensor(2)}, r'`microbatch_sizes` must be a list .*, got: tensor\(2\)'),
        ({'microbatch_sizes': 0}, '`microbatch_sizes` must be a list .*, got: 0'),
        ({'microbatch_sizes': []}, '`microbatch_sizes` must be a list .*, but it is empty'),
        ({'padding_sides': torch.tensor([1, 2])}, "`padding_sides` must be 'right' or 'left'"),
        ({'padding_sides': None}, '`padding_sides` must be a list'),
        ({'tolerance': '1e-6'}, "`tolerance` must be a finite number, at least 0, got: '1e-6'"),
        ({'tolerance': torch.tensor([1e-6, 1e-6])}, r'`tolerance` must be a finite number, at least 0, got: tensor\('),
        ({'tolerance': 10**400}, '`tolerance` must be a finite number, at least 0, got: 10'),
        ({'tolerance': math.inf}, '`tolerance` must be a finite number'),  # every error would be within it
        ({'tolerance': math.nan}, '`tolerance` must be a finite number'),
        ({'reference': {'a': torch.ones(2)}}, '`reference` must be a function'),
    ],
)
def test_unusable_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        verify_invariance(step_mean(text_model()), text_rows(ROWS), **options)


@pytest.mark.parametrize('as_sizes', [np.array, iter], ids=['array', 'iterator'])
def test_sizes_may_be_of_other_types(as_sizes):
    """An iterator can be read only once, so its sizes must not be used up by their check."""
    report = verify_invariance(
        step_mean(text_model()),
        text_rows(ROWS),
        microbatch_sizes=as_sizes([1, 2]),
        padding_sides='right',
    )
    sizes_in_order = [case.microbatch_size for case in report.cases if case.cut == 'in order']
    assert sizes_in_order == [1, 2]


@pytest.mark.parametrize('tolerance', [np.float32(1e-5), np.array(1e-5), torch.tensor(1e-5)])
def test_tolerance_may_be_of_other_types(tolerance):
    report = verify_invariance(step_mean(text_model()), text_rows(ROWS), padding_sides='right', tolerance=tolerance)
    assert report.tolerance == pytest.approx(1e-5)
    assert report.is_exact is True


def ids_of_bytes(row):
    return {**row, 'input_ids': row['input_ids'].to(torch.uint8)}


def ids_of_codebooks(row):
    return {**row, 'input_ids': row['input_ids'][:, :, None].expand(-1, -1, 4)}


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
    return {**row, 'attention_mask': torch.ones(1, width, width, dtype=torch.long).tril()}


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
    ('change', 'message'),
    [
        ({'attention_mask': [[1] * 4]}, '`attention_mask` must be a tensor, got: list'),
        ({'labels': torch.ones(1, 4, dtype=torch.uint8)}, '`labels` must be of a type that can hold -100'),
        ({'input_ids': torch.ones(4, dtype=torch.long)}, '`input_ids` must have the rows of `labels`, 1, .*\\(4,\\)'),
        ({'input_ids': torch.ones(2, 4, dtype=torch.long)}, '`input_ids` must have the rows of `labels`, 1, '),
        ({'attention_mask': torch.ones(4)}, '`attention_mask` must have the rows of `labels`, 1, '),
        ({'attention_mask': torch.zeros(1, 4)}, '`attention_mask` must be 1 where tokens are'),
        (
            {'inputs_embeds': torch.zeros(1, 4, 2, requires_grad=True)},
            '`.*inputs_embeds.*` must be .* without a gradient',
        ),
        (dict.fromkeys(text_row(4, 2), torch.ones(1, 0, dtype=torch.long)), 'at least one row of one token'),
    ],
    ids=[
        'list',
        'labels without a sign',
        'ids without rows',
        'ids of two rows',
        'mask without rows',
        'inverted',
        'with gradient',
        'no column',
    ],
)
def test_unusable_rows_are_refused(change, message):
    first, *others = text_rows(ROWS)
    with pytest.raises(ValueError, match=message):
        verify_invariance(step_mean(text_model()), [{**first, **change}, *others])


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
    verdict = str(report).splitlines()[-1]
    assert verdict.startswith('exact')
    assert '1.4e-04' in verdict


@pytest.mark.parametrize('options', [{}, {'reference': lambda batch: {'a': torch.ones(2)}}])
@pytest.mark.parametrize(
    ('gradients', 'message'), [({'a': torch.ones(2), 'frozen': None}, 'None for `frozen`'), (None, 'NoneType')]
)
def test_gradients_must_be_tensors(gradients, message, options):
    with pytest.raises(TypeError, match=message):
        verify_invariance(lambda microbatches: gradients, text_rows(ROWS), **options)


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
    batch = ragged_batch(ROWS * 8)
    views = []
    copies = []
    for row in range(40):
        view = {key: tensor[row : row + 1] for key, tensor in batch.items()}
        views.append(view)
        copies.append({key: tensor.clone() for key, tensor in view.items()})
    sent_bytes = []

    def counting_gather(value):
        sent_bytes.append(len(pickle.dumps(value)))
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
    """The expected gradient is (3, 4), so its norm is 5."""
    expected = {'a': torch.tensor([3.0]), 'b': torch.tensor([4.0])}
    without_a = {'b': expected['b']}
    with_c = {**expected, 'c': torch.tensor([5.0])}

    error, _ = relative_error(dict(expected), expected)
    assert error == 0.0

    error, reason = relative_error(without_a, expected)
    assert error == pytest.approx(3 / 5)
    assert reason == 'most of all, a is off'

    error, reason = relative_error(with_c, expected)
    assert error == pytest.approx(5 / 5)
    assert reason == 'most of all, c is off'


# Isolation of documents in a packed row.


def pairs_of(report):
    """Returns (row, document that sees, document that is seen) of each leak."""
    return [leak[:3] for leak in report.leaks]


@pytest.mark.parametrize('is_wrapped', [False, True])
def test_isolation_of_documents(is_wrapped):
    """Positions that start again isolate documents. With running positions a document sees those before it."""
    packed = packed_row(text_rows([(4, 2), (6, 3), (5, 5)]))
    running = {**packed, 'position_ids': torch.arange(15)[None]}
    documents = torch.tensor([[0] * 4 + [1] * 6 + [2] * 5])
    model = text_model()
    if is_wrapped:
        model = hugging_face(model)

    report = verify_isolation(model, packed, documents)
    assert report.is_isolated, report
    assert str(report) == 'isolated: 0 leaks'

    report = verify_isolation(model, running, documents)
    assert pairs_of(report) == [(0, 1, 0), (0, 2, 0), (0, 2, 1)]
    assert 'row 0: document 1 sees document 0: ' in str(report)
    with torch.no_grad():
        report_without_grad = verify_isolation(model, running, documents)
    assert pairs_of(report_without_grad) == pairs_of(report)

    with pytest.raises(ValueError, match=r'`documents` must be integers'):
        verify_isolation(model, running, torch.zeros_like(documents))
    with pytest.raises(ValueError, match=r'`documents` must be integers .* got: \[\[0, 1\], \[0\]\]'):
        verify_isolation(model, running, [[0, 1], [0]])
    with pytest.raises(ValueError, match=r'`documents` must be integers .* in the shape \(\)'):
        verify_isolation(model, running, torch.tensor(3))


def test_isolation_needs_called_embeddings():
    """If a batch holds ``inputs_embeds`` instead of ids, no layer of the model embeds anything."""
    packed = packed_row(text_rows([(4, 2), (6, 3)]))
    documents = torch.tensor([[0] * 4 + [1] * 6])
    model = text_model()
    embed = model.get_input_embeddings()
    ids = packed.pop('input_ids')
    packed['inputs_embeds'] = embed(ids)
    with pytest.raises(TypeError, match=r'must call its input embeddings, got: no call of Embedding'):
        verify_isolation(model, packed, documents)


class HashedBigrams(torch.nn.Module):
    """Embeds the hash of each token and the token before it.

    The hash has no gradient, so only other ids show that a document sees the last token of the document before it.
    """

    def __init__(self, *, is_isolated):
        super().__init__()
        self.llama = text_model()
        self.is_isolated = is_isolated
        torch.manual_seed(1)
        self.hashed = torch.nn.Embedding(97, 32)

    def get_input_embeddings(self):
        return self.llama.get_input_embeddings()

    def forward(self, input_ids, position_ids):
        ids_before = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1]
        if self.is_isolated:
            ids_before = ids_before.masked_fill(position_ids == 0, 0)
        hashes = (ids_before * 31 + input_ids) % 97
        embeddings = self.get_input_embeddings()(input_ids)
        return self.llama.lm_head(self.hashed(hashes) + embeddings)


class CappedExperts(torch.nn.Module):
    """Routes tokens to experts that take at most ``capacity`` tokens of a row, from the left.

    So documents on the left decide, without a gradient, which tokens of a later document are dropped.
    """

    def __init__(self, capacity):
        super().__init__()
        self.llama = text_model()
        self.capacity = capacity
        torch.manual_seed(1)
        self.router = torch.nn.Linear(32, 4, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 64) for _ in range(4))

    def get_input_embeddings(self):
        return self.llama.get_input_embeddings()

    def forward(self, input_ids, position_ids):
        embeddings = self.get_input_embeddings()(input_ids)
        hidden = self.llama.model(inputs_embeds=embeddings, position_ids=position_ids)[0]
        logits = self.llama.lm_head(hidden)
        choices = self.router(embeddings).argmax(dim=-1)
        for number, expert in enumerate(self.experts):
            is_chosen = choices == number
            num_so_far = is_chosen.flatten().cumsum(0).view_as(is_chosen)
            is_kept = is_chosen & (num_so_far <= self.capacity)
            logits = logits + expert(hidden) * is_kept[..., None]
        return logits


PACKED = {
    'input_ids': torch.tensor([[5, 9, 7, 12, 30, 8, 41, 22, 17, 3, 5, 28, 11, 19]]),
    'position_ids': torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]]),
}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 5])


def change_of_logits(model, reader, source):
    """Returns the relative change of the logits of document ``reader`` if every id of ``source`` becomes 50."""
    changed_ids = PACKED['input_ids'].masked_fill(source == DOCUMENTS, 50)
    changed = {**PACKED, 'input_ids': changed_ids}
    is_read = reader == DOCUMENTS
    with torch.no_grad():
        before = model(**PACKED)[is_read]
        after = model(**changed)[is_read]
    change = (after - before).norm() / before.norm()
    return float(change)


class FaintMean(torch.nn.Module):
    """Adds the mean of the row to its states, times a number whose square is 0 in float32."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, position_ids):
        states = self.embedding(input_ids)
        return states + 1e-30 * states.mean(dim=1, keepdim=True)


def test_faint_leaks_are_found():
    report = verify_isolation(FaintMean(), PACKED, DOCUMENTS)
    leaks = [(document, seen) for _, document, seen, _ in report.leaks]
    assert leaks == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


class WrittenEmbeddings(FaintMean):
    """Writes into the tensor of its embedding, as Kosmos-2 and Ovis 2 write the features of their images."""

    def forward(self, input_ids, position_ids):
        states = self.embedding(input_ids)
        states[:, 0] = 1.0
        return states + states.mean(dim=1, keepdim=True)


def test_embeddings_may_be_written_in_place():
    report = verify_isolation(WrittenEmbeddings(), PACKED, DOCUMENTS)
    assert pairs_of(report) == [(0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 2), (0, 2, 0), (0, 2, 1)]


class NoGradEmbedding(FaintMean):
    """Computes its frozen embeddings without a graph."""

    def forward(self, input_ids, position_ids):
        with torch.no_grad():
            states = self.embedding(input_ids)
        return states + 1e-30 * states.mean(dim=1, keepdim=True)


def test_embeddings_may_be_made_without_a_graph():
    report = verify_isolation(NoGradEmbedding(), PACKED, DOCUMENTS)
    assert len(report.leaks) == 6


class DetachedEmbedding(FaintMean):
    """Detaches its embeddings, so that no gradient shows what its logits depend on."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(32, 64)

    def forward(self, input_ids, position_ids):
        states = self.embedding(input_ids).detach()
        return self.head(states + 1e-30 * states.mean(dim=1, keepdim=True))


def test_detached_embeddings_prove_nothing():
    with pytest.raises(TypeError, match='no gradient by them'):
        verify_isolation(DetachedEmbedding(), PACKED, DOCUMENTS)


class UnknownEmbedding(torch.nn.Module):
    """A module that cannot tell its input embedding, as Transformers raises it, around a model that can."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_input_embeddings(self):
        raise NotImplementedError('not auto-handled')

    def forward(self, **inputs):
        return self.model(**inputs)


def test_outer_module_without_embedding():
    report = verify_isolation(UnknownEmbedding(FaintMean()), PACKED, DOCUMENTS)
    assert len(report.leaks) == 6
    with pytest.raises(TypeError, match='`model` must be a Hugging Face model, or hold one'):
        verify_isolation(UnknownEmbedding(torch.nn.Linear(2, 2)), PACKED, DOCUMENTS)


class SecondEmbedding(FaintMean):
    """Embeds the ids twice, and uses only the second result."""

    def forward(self, input_ids, position_ids):
        self.embedding(input_ids)
        return super().forward(input_ids, position_ids)


def test_leaks_through_a_second_embedding():
    """The gradient shows them, although they are too small to change the logits."""
    report = verify_isolation(SecondEmbedding(), PACKED, DOCUMENTS)
    assert len(report.leaks) == 6


def test_hashed_bigrams_leak_without_gradient():
    model = HashedBigrams(is_isolated=False)
    report = verify_isolation(model, PACKED, DOCUMENTS)
    assert pairs_of(report) == [(0, 1, 0), (0, 2, 1)]
    for _, reader, source, size in report.leaks:
        assert change_of_logits(model, reader, source) > 1e-2
        assert size > 1e-2


# With the capacity 8, experts overflow only if a document has one id at all its positions.
@pytest.mark.parametrize('capacity', [4, 8])
def test_capped_experts_leak_without_gradient(capacity):
    model = CappedExperts(capacity)
    report = verify_isolation(model, PACKED, DOCUMENTS)
    assert report.leaks
    for _, reader, source, _ in report.leaks:
        assert reader > source, 'experts fill up from the left'


def test_leak_between_documents_of_one_id():
    """Three tokens in the middle of each document have one id, so the first document fills their expert."""
    packed = {
        'input_ids': torch.tensor([[1, 9, 9, 9, 2, 1, 9, 9, 9, 2]]),
        'position_ids': torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]),
    }
    documents = torch.tensor([[0] * 5 + [1] * 5])
    report = verify_isolation(CappedExperts(capacity=3), packed, documents)
    assert report.leaks


@pytest.mark.parametrize(
    'make_model',
    [
        pytest.param(lambda: HashedBigrams(is_isolated=True), id='bigrams'),
        pytest.param(lambda: CappedExperts(capacity=1000), id='experts'),
    ],
)
@pytest.mark.parametrize('dropout', [0.0, 0.5])
def test_isolated_models_pass(make_model, dropout):
    model = make_model().train()

    def drop(module, args, output):
        return torch.nn.functional.dropout(output, dropout)

    model.llama.model.layers[0].register_forward_hook(drop)
    if not dropout:
        for reader, source in [(0, 1), (1, 0), (2, 0), (2, 1)]:
            assert change_of_logits(model, reader, source) < 1e-6

    report = verify_isolation(model, PACKED, DOCUMENTS)

    assert report.is_isolated, report


@pytest.mark.parametrize('mask', [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    ('is_isolated', 'expected_pairs'),
    [
        pytest.param(True, [], id='isolated'),
        pytest.param(False, [(0, 1, 0), (0, 2, 1)], id='leaking'),
    ],
)
def test_isolation_with_masked_logits(is_isolated, expected_pairs, mask):
    """Some models mask the logits of ids that no text has. Their size says nothing about the others."""
    model = HashedBigrams(is_isolated=is_isolated)

    def mask_last_id(module, args, logits):
        num_ids = logits.shape[-1]
        is_last_id = torch.arange(num_ids) == num_ids - 1
        return logits.masked_fill(is_last_id, mask)

    model.register_forward_hook(mask_last_id)

    report = verify_isolation(model, PACKED, DOCUMENTS)

    assert pairs_of(report) == expected_pairs


def test_cache_that_grows():
    """The width of the cache is a plain number, and must fit its table in every forward."""
    packed = packed_row(text_rows([(4, 2), (6, 3)]))
    documents = torch.tensor([[0] * 4 + [1] * 6])
    report = verify_isolation(with_layers(Cache()), packed, documents)
    assert report.is_isolated


def test_random_logits_are_refused():
    """The second call has logits that are twice as large."""
    model = text_model()
    num_calls = 0

    def scale_by_calls(module, args, outputs):
        nonlocal num_calls
        num_calls += 1
        outputs.logits = outputs.logits * num_calls

    model.register_forward_hook(scale_by_calls)
    batch = {**PACKED, 'use_cache': False}
    with pytest.raises(ValueError, match=r'same logits, got: a change of 5\.0e-01'):
        verify_isolation(model, batch, DOCUMENTS)
