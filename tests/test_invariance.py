# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The checks for any trainer: plain loops that are right, and loops with the mistakes that trainers make."""

from __future__ import annotations

import math
import pickle
import re

import pytest
import torch

from composer_tokacc import BatchLayout, verify_invariance, verify_isolation
from composer_tokacc.invariance import InvarianceCase, InvarianceReport, relative_error
from tests.checks.test_written_state import Cache, spectral_norm, with_layers
from tests.ranks.invariance import mean_of_means, step_mean
from tests.support.families import FAMILIES
from tests.support.launch import launch_json
from tests.support.process_group import group_of_one_rank
from tests.support.text import collate, packed_row, ragged_batch, text_model, text_rows
from tests.support.training import hugging_face, reference_gradients

ROWS = [(4, 2), (14, 11), (9, 9), (6, 1), (5, 0)]
FEW_CUTS = {'microbatch_sizes': [2], 'padding_sides': ['right']}
"""For mistakes that any cut shows."""


def test_mean_over_the_step_is_exact():
    model = text_model()
    report = verify_invariance(step_mean(model), text_rows(ROWS))
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
    batch = ragged_batch(ROWS[:4])
    report = verify_invariance(mean_of_means(text_model()), batch, microbatch_sizes=[1, 9])
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
    loop = step_mean(text_model())

    def without_smaller_last(microbatches):
        is_smaller = len(microbatches[-1]['labels']) < len(microbatches[0]['labels'])
        return loop(microbatches[:-1] if is_smaller else microbatches)

    report = verify_invariance(without_smaller_last, text_rows([*ROWS, (8, 3)]), padding_sides=['right'])
    assert report.worst.cut == 'uneven'
    assert not report.is_exact


def test_step_that_differs_from_itself():
    report = verify_invariance(step_mean(text_model(), keep=True), text_rows(ROWS))
    repeated_step = report.cases[0]
    assert repeated_step.cut == 'again'
    assert repeated_step.factor == pytest.approx(2.0)
    with_state = with_layers(spectral_norm())
    repeated_step = verify_invariance(step_mean(with_state), text_rows(ROWS)).cases[0]
    assert repeated_step.error > 1e-6


def test_trainer_that_writes_into_batches():
    right_gradients = step_mean(text_model())

    def gradients_of(microbatches):
        gradients = right_gradients(microbatches)
        for microbatch in microbatches:
            microbatch['labels'][:, 1:-1] = microbatch['labels'][:, 2:].clone()
        return gradients

    report = verify_invariance(gradients_of, text_rows(ROWS), padding_sides='left')
    assert report.is_exact, report
    assert {case.padding for case in report.cases} == {'left'}


def test_factor_on_every_step_needs_reference():
    """A trainer that halves every gradient is the same for every cut. Only a reference shows the mistake."""
    model = text_model()
    halved = changed_step(lambda gradient, name, microbatches: gradient / 2, model)

    def reference(batch):
        gradients, _ = reference_gradients(model, batch)
        return {name.removeprefix('model.'): gradient for name, gradient in gradients.items()}

    rows = text_rows(ROWS)
    assert verify_invariance(halved, rows, **FEW_CUTS).is_exact
    report = verify_invariance(halved, rows, reference=reference, **FEW_CUTS)
    assert report.worst.error == pytest.approx(0.5, rel=1e-4)
    assert verify_invariance(step_mean(model), rows, reference=reference, **FEW_CUTS).is_exact


@pytest.mark.parametrize('family', ['llava', 'qwen2_5_vl', 'idefics3'])
def test_rows_keep_their_images(family):
    case = FAMILIES[family]()
    layout = BatchLayout.for_model(case.model)
    report = verify_invariance(step_mean(case.model), case.rows, layout=layout, padding_sides=['right'])
    assert report.is_exact, report
    report_of_means = verify_invariance(mean_of_means(case.model), case.rows, **FEW_CUTS)
    assert not report_of_means.is_exact


def test_first_row_has_none_in_place_of_images():
    """It has as many keys as the others, but does not tell the family."""
    case = FAMILIES['idefics3']()
    rows = sorted(case.rows, key=len)
    assert 'pixel_values' not in rows[0]
    rows[0] = {**dict.fromkeys(rows[-1]), **rows[0]}
    report = verify_invariance(step_mean(case.model), rows, padding_sides=['right'])
    assert report.is_exact, report


def test_lost_or_nan_gradient_is_off():
    changed_name = 'lm_head.weight'

    def without_head(gradient, name, microbatches):
        return None if name == changed_name and len(microbatches) > 1 else gradient

    def nan_in_cuts(gradient, name, microbatches):
        return gradient * math.nan if len(microbatches) > 1 else gradient

    rows = text_rows(ROWS)
    report = verify_invariance(changed_step(without_head), rows, **FEW_CUTS)
    assert changed_name in report.worst.reason
    report = verify_invariance(changed_step(nan_in_cuts), rows, **FEW_CUTS)
    assert report.worst.error == float('inf')


def test_step_of_other_batches_is_refused():
    """Its gradient is the same in every cut, so all errors are 0."""
    rows = text_rows(ROWS)
    loop = step_mean(text_model())
    with pytest.raises(ValueError, match='the same gradient for one row as for all rows'):
        verify_invariance(lambda microbatches: loop([collate(rows)]), rows, **FEW_CUTS)


def test_infinite_reference_is_refused():
    """The error would be infinity divided by infinity, which is no larger than any tolerance."""

    def infinite_if_padded_left(gradient, name, microbatches):
        is_padded_left = not microbatches[0]['attention_mask'][:, 0].all()
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
        pytest.param(ROWS, {}, 'reference gradient must be above zero', id='gradient of zero'),
    ],
)
def test_rows_that_prove_nothing_are_refused(rows, options, message):
    def zero_gradients(microbatches):
        return {'a': torch.zeros(2)}

    with pytest.raises(ValueError, match=message):
        verify_invariance(zero_gradients, text_rows(rows), **options)


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
    # What Composer's token-weighted flag and most trainers do: each rank is exact, but then its mean weighs as much as
    # that of a rank with more tokens.
    assert results['mean of each rank'] > 1e-2
    assert results['images on one rank'] < 1e-6
    assert 'as many rows on every rank, and at least 2, got: [3, 2]' in results['a row less on rank 1']
    # With equal numbers of labels on all ranks, a mean of the means of ranks would be right.
    assert re.search(r'differ .* labels, got: 22 in each of 2 ranks', results['same rows'])


def test_ranks_send_each_row_once(monkeypatch, tmp_path):
    """Rows may be views of one large batch. Pickle would send the whole batch for each of them."""
    batch = ragged_batch(ROWS * 8)
    views = [{key: tensor[row : row + 1] for key, tensor in batch.items()} for row in range(40)]
    gather = torch.distributed.all_gather_object
    sent_bytes = []

    def counting(values, value):
        sent_bytes.append(len(pickle.dumps(value)))
        gather(values, value)

    monkeypatch.setattr(torch.distributed, 'all_gather_object', counting)
    with group_of_one_rank(tmp_path):
        verify_invariance(step_mean(text_model()), views, **FEW_CUTS)
        most_for_views = max(sent_bytes)
        sent_bytes.clear()
        rows = [{key: tensor.clone() for key, tensor in view.items()} for view in views]
        verify_invariance(step_mean(text_model()), rows, **FEW_CUTS)
    assert most_for_views <= max(sent_bytes)


def test_parameters_without_a_gradient():
    expected = {'a': torch.tensor([3.0]), 'b': torch.tensor([4.0])}
    error, _ = relative_error(dict(expected), expected)
    assert error == 0.0
    error, reason = relative_error({'b': expected['b']}, expected)
    assert error == pytest.approx(0.6)
    assert reason == 'most of all, a is off'
    error, reason = relative_error({**expected, 'c': torch.tensor([5.0])}, expected)
    assert error == pytest.approx(1.0)
    assert reason == 'most of all, c is off'


# Isolation of documents in a packed row.


def pairs_of(report):
    """Returns (row, document that sees, document that is seen) of each leak."""
    return [leak[:3] for leak in report.leaks]


@pytest.mark.parametrize('is_wrapped', [False, True])
def test_isolation_of_documents(is_wrapped):
    """Positions that start again isolate documents. With running positions a document sees those before it."""
    packed = packed_row(text_rows([(4, 2), (6, 3), (5, 5)]))
    documents = torch.tensor([[0] * 4 + [1] * 6 + [2] * 5])
    model = text_model()
    if is_wrapped:
        model = hugging_face(model)
    report = verify_isolation(model, packed, documents)
    assert report.is_isolated, report
    assert str(report) == 'isolated: 0 leaks'
    packed['position_ids'] = torch.arange(15)[None]
    report = verify_isolation(model, packed, documents)
    assert pairs_of(report) == [(0, 1, 0), (0, 2, 0), (0, 2, 1)]
    assert 'row 0: document 1 sees document 0: ' in str(report)
    with torch.no_grad():
        assert pairs_of(verify_isolation(model, packed, documents)) == pairs_of(report)
    with pytest.raises(ValueError, match=r'`documents` must be integers'):
        verify_isolation(model, packed, torch.zeros_like(documents))


def test_isolation_needs_called_embeddings():
    """If a batch holds ``inputs_embeds`` instead of ids, no layer of the model embeds anything."""
    packed = packed_row(text_rows([(4, 2), (6, 3)]))
    model = text_model()
    packed['inputs_embeds'] = model.get_input_embeddings()(packed.pop('input_ids'))
    with pytest.raises(TypeError, match=r'must call its input embeddings, got: no call of Embedding'):
        verify_isolation(model, packed, torch.tensor([[0] * 4 + [1] * 6]))


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
    with torch.no_grad():
        before = model(**PACKED)[reader == DOCUMENTS]
        after = model(input_ids=changed_ids, position_ids=PACKED['position_ids'])[reader == DOCUMENTS]
    return float((after - before).norm() / before.norm())


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
    report = verify_isolation(CappedExperts(capacity), PACKED, DOCUMENTS)
    assert report.leaks
    for _, reader, source, _ in report.leaks:
        assert reader > source, 'experts fill up from the left'


def test_leak_between_documents_of_one_id():
    ids = torch.tensor([[1, 9, 9, 9, 2] * 2])
    packed = {'input_ids': ids, 'position_ids': torch.arange(5).repeat(2)[None]}
    documents = torch.arange(2).repeat_interleave(5)[None]
    assert verify_isolation(CappedExperts(capacity=3), packed, documents).leaks


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
    model.llama.model.layers[0].register_forward_hook(
        lambda module, args, output: torch.nn.functional.dropout(output, dropout)
    )
    if not dropout:
        for reader, source in [(0, 1), (1, 0), (2, 0), (2, 1)]:
            assert change_of_logits(model, reader, source) < 1e-6
    report = verify_isolation(model, PACKED, DOCUMENTS)
    assert report.is_isolated, report


@pytest.mark.parametrize('mask', [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize('is_isolated', [True, False])
def test_isolation_with_masked_logits(is_isolated, mask):
    """Some models mask the logits of ids that no text has. Their size says nothing about the others."""
    model = HashedBigrams(is_isolated=is_isolated)

    def mask_last_id(module, args, logits):
        is_last_id = torch.arange(logits.shape[-1]) == logits.shape[-1] - 1
        return logits.masked_fill(is_last_id, mask)

    model.register_forward_hook(mask_last_id)
    report = verify_isolation(model, PACKED, DOCUMENTS)
    assert pairs_of(report) == ([] if is_isolated else [(0, 1, 0), (0, 2, 1)])


def test_cache_that_grows():
    """The width of the cache is a plain number, and must fit its table in every forward."""
    packed = packed_row(text_rows([(4, 2), (6, 3)]))
    documents = torch.tensor([[0] * 4 + [1] * 6])
    assert verify_isolation(with_layers(Cache()), packed, documents).is_isolated


def test_random_logits_are_refused():
    model = text_model()
    num_calls = 0

    def scale_by_calls(module, args, outputs):
        nonlocal num_calls
        num_calls += 1
        outputs.logits = outputs.logits * num_calls

    model.register_forward_hook(scale_by_calls)
    with pytest.raises(ValueError, match=r'same logits, got: a change of 5\.0e-01'):
        verify_isolation(model, {**PACKED, 'use_cache': False}, DOCUMENTS)
