# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The check for any trainer: plain loops that are right, and loops that are wrong in the ways that trainers are."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import BatchLayout, verify_invariance, verify_isolation
from composer_tokacc.invariance import relative_error
from tests.checks.test_written_state import RunningMean, with_layers
from tests.ranks.invariance import mean_of_means, step_mean
from tests.support.families import FAMILIES
from tests.support.launch import launch_json
from tests.support.text import collate, text_model, text_rows
from tests.support.training import hugging_face, reference_gradients

ROWS = [(4, 2), (14, 11), (9, 9), (6, 1), (5, 0)]


def test_mean_over_the_step_is_exact():
    model = text_model()
    report = verify_invariance(step_mean(model), text_rows(ROWS))
    assert report.is_exact, report
    cuts = {(case.cut, case.microbatch_size) for case in report.cases}
    assert cuts == {('again', 5), ('uneven', 1), *((cut, k) for cut in ('in order', 'by length') for k in (1, 2, 3, 5))}
    assert {case.padding for case in report.cases} == {'right', 'left'}
    assert 'exact: largest relative gradient error' in str(report)


def test_mean_of_means_is_off():
    """The table says in which cut."""
    report = verify_invariance(mean_of_means(text_model()), collate(text_rows(ROWS[:4])), microbatch_sizes=[1, 9])
    assert not report.is_exact
    whole = [case for case in report.cases if case.cut == 'in order' and case.microbatch_size == 4]
    assert all(case.error < 1e-6 for case in whole)
    ones = [case for case in report.cases if case.cut == 'in order' and case.microbatch_size == 1]
    assert all(case.error > 1e-2 for case in ones)
    assert report.worst.reason.startswith('most of all, ')
    assert 'NOT exact' in str(report)
    assert 'over tolerance; most of all, ' in str(report)


def test_undivided_sum_shows_its_factor():
    model = text_model()
    right = step_mean(model)

    def undivided(microbatches):
        return {name: len(microbatches) * value for name, value in right(microbatches).items()}

    report = verify_invariance(undivided, text_rows(ROWS), microbatch_sizes=[1])
    ones = [case for case in report.cases if case.microbatch_size == 1 and case.cut != 'uneven']
    assert [case.factor for case in ones] == pytest.approx([5.0] * 4)


def test_step_that_differs_from_itself():
    model = text_model()
    report = verify_invariance(step_mean(model, keep=True), text_rows(ROWS))
    again = report.cases[0]
    assert (again.cut, again.factor) == ('again', pytest.approx(2.0))


def test_trainer_that_writes_into_batches():
    model = text_model()
    right = step_mean(model)

    def writes(microbatches):
        found = right(microbatches)
        for microbatch in microbatches:
            microbatch['labels'][:, 1:-1] = microbatch['labels'][:, 2:].clone()
        return found

    report = verify_invariance(writes, text_rows(ROWS), padding_sides='left')
    assert report.is_exact, report
    assert {case.padding for case in report.cases} == {'left'}


def test_wrong_whole_needs_a_reference():
    model = text_model()
    halved = lambda microbatches: {n: v / 2 for n, v in step_mean(model)(microbatches).items()}  # noqa: E731
    assert verify_invariance(halved, text_rows(ROWS)).is_exact
    reference = lambda batch: {n.removeprefix('model.'): g for n, g in reference_gradients(model, batch)[0].items()}  # noqa: E731
    report = verify_invariance(halved, text_rows(ROWS), reference=reference)
    assert report.worst.error == pytest.approx(0.5, rel=1e-4)
    assert verify_invariance(step_mean(model), text_rows(ROWS), reference=reference).is_exact


@pytest.mark.parametrize('family', ['llava', 'qwen2_5_vl', 'idefics3'])
def test_rows_keep_their_images(family):
    case = FAMILIES[family]()
    layout = BatchLayout.for_model(case.model)
    exact = verify_invariance(step_mean(case.model), case.rows, layout=layout, padding_sides=['right'])
    assert exact.is_exact, exact
    assert not verify_invariance(mean_of_means(case.model), case.rows, padding_sides=['right']).is_exact


def test_lost_or_nan_parameter_is_off():
    model = text_model()
    right = step_mean(model)
    name = next(iter(dict(model.named_parameters())))

    def loses(microbatches):
        found = right(microbatches)
        return {key: value for key, value in found.items() if key != name or len(microbatches) == 1}

    def breaks(microbatches):
        found = right(microbatches)
        return found if len(microbatches) == 1 else {**found, name: found[name] * float('nan')}

    report = verify_invariance(loses, text_rows(ROWS))
    assert report.worst.reason == f'most of all, {name} has no gradient'
    assert verify_invariance(breaks, text_rows(ROWS)).worst.error == float('inf')


@pytest.mark.parametrize(
    ('rows', 'options', 'message'),
    [
        ([(4, 3), (9, 3)], {}, r'differ in their numbers of labels, got: 3 in each of 2 rows'),
        # The label of a first token is counted by few models.
        ([(4, 4), (9, 3)], {}, r'numbers of labels, got: 3 in each of 2 rows, counted causal'),
        (ROWS, {'microbatch_sizes': [-1]}, r'`microbatch_sizes` must be a positive integer, got: -1'),
        ([(4, 3)], {}, r'at least 2, got: \[1\]'),
        ([], {}, r'at least 2, got: \[0\]'),
        (ROWS, {}, 'reference gradient must be above zero'),
    ],
)
def test_rows_that_prove_nothing_are_refused(rows, options, message):
    with pytest.raises(ValueError, match=message):
        verify_invariance(lambda microbatches: {'a': torch.zeros(2)}, text_rows(rows), **options)


@pytest.mark.slow
def test_means_averaged_over_ranks_are_off():
    results = launch_json('tests/ranks/invariance.py', ranks=2)
    assert results['step mean'] < 1e-6
    # Composer's token-weighted flag and most trainers: exact on each rank, and a mean over ranks of unlike counts.
    assert results['mean of each rank'] > 1e-2
    assert 'as many rows on every rank, and at least 2, got: [3, 2]' in results['refused']
    # Of equally many labels on every rank, where rows are dealt anew.
    assert results['step mean of the same rows'] < 1e-6
    assert results['mean of each rank, of the same rows'] > 1e-2


def test_parameters_without_a_gradient():
    expected = {'a': torch.tensor([3.0]), 'b': torch.tensor([4.0])}
    assert relative_error(dict(expected), expected)[0] == 0.0
    assert relative_error({'b': expected['b']}, expected) == (pytest.approx(0.6), 'most of all, a has no gradient')
    extra = {**expected, 'c': torch.tensor([5.0])}
    error, reason = relative_error(extra, expected)
    assert error == pytest.approx(1.0)
    assert reason == 'most of all, c has a gradient, but not in the reference'


@pytest.mark.parametrize('wrapped', [False, True])
def test_isolation_of_documents(wrapped):
    """By name: a later document sees the former ones, which see nothing of it."""
    rows, model = text_rows([(4, 2), (6, 3), (5, 5)]), text_model()
    lengths = [row['input_ids'].shape[1] for row in rows]
    packed = {
        'input_ids': torch.cat([row['input_ids'] for row in rows], dim=1),
        'labels': torch.cat([row['labels'] for row in rows], dim=1),
        'position_ids': torch.cat([torch.arange(length) for length in lengths])[None],
    }
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    host = hugging_face(model) if wrapped else model
    report = verify_isolation(host, packed, documents)
    assert report.is_isolated, report
    assert str(report) == 'isolated: 0 leaks'
    packed['position_ids'] = torch.arange(sum(lengths))[None]
    report = verify_isolation(host, packed, documents)
    assert [leak[:3] for leak in report.leaks] == [(0, 1, 0), (0, 2, 0), (0, 2, 1)]
    assert 'row 0: document 1 sees document 0: ' in str(report)
    with pytest.raises(ValueError, match=r'`documents` must number those of a packed row'):
        verify_isolation(host, packed, documents * 0)


class Leaky(torch.nn.Module):
    """A model of Hugging Face whose documents see each other in a way that has no gradient."""

    def __init__(self, kind):
        super().__init__()
        self.llama, self.kind = text_model(), kind
        torch.manual_seed(1)
        self.hashed = torch.nn.Embedding(97, 32)
        self.router = torch.nn.Linear(32, 4, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 64) for _ in range(4))

    def get_input_embeddings(self):
        return self.llama.get_input_embeddings()

    def forward(self, input_ids, position_ids):
        embeddings = self.get_input_embeddings()(input_ids)
        if self.kind == 'hashed bigrams':
            before = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1]
            return self.llama.lm_head(self.hashed((before * 31 + input_ids) % 97) + embeddings)
        if self.kind == 'bigrams of each document':
            before = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1].masked_fill(position_ids == 0, 0)
            return self.llama.lm_head(self.hashed((before * 31 + input_ids) % 97) + embeddings)
        hidden = self.llama.model(inputs_embeds=embeddings, position_ids=position_ids)[0]
        logits = self.llama.lm_head(hidden)
        choices = self.router(embeddings).argmax(dim=-1)
        capacity = 4 if self.kind == 'experts with a capacity' else 1000
        for number, expert in enumerate(self.experts):
            chosen = choices == number
            kept = chosen & (chosen.flatten().cumsum(0).view_as(chosen) <= capacity)
            logits = logits + expert(hidden) * kept[..., None]
        return logits


PACKED = {
    'input_ids': torch.tensor([[5, 9, 7, 12, 30, 8, 41, 22, 17, 3, 5, 28, 11, 19]]),
    'position_ids': torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]]),
}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 5])


def change_of_logits(model, seer, seen):
    """The relative change of a document's logits if every id of another one is 50, by plain torch."""
    with torch.no_grad():
        before = model(**PACKED)[seer == DOCUMENTS]
        ids = PACKED['input_ids'].masked_fill(seen == DOCUMENTS, 50)
        after = model(**{**PACKED, 'input_ids': ids})[seer == DOCUMENTS]
    return float((after - before).norm() / before.norm())


def test_leaks_without_gradient():
    """Ids that are hashed together with those of the document before; experts that drop tokens of a later document."""
    model = Leaky('hashed bigrams')
    report = verify_isolation(model, PACKED, DOCUMENTS)
    assert [leak[:3] for leak in report.leaks] == [(0, 1, 0), (0, 2, 1)]
    for _, seer, seen, size in report.leaks:
        assert change_of_logits(model, seer, seen) > 1e-2
        assert size > 1e-2
    model = Leaky('experts with a capacity')
    report = verify_isolation(model, PACKED, DOCUMENTS)
    assert not report.is_isolated
    assert {seer > seen for _, seer, seen, _ in report.leaks} == {True}, 'experts fill up from the left'


@pytest.mark.parametrize('kind', ['bigrams of each document', 'experts without a capacity'])
@pytest.mark.parametrize('dropout', [0.0, 0.5])
def test_isolated_models_of_the_same_kinds(kind, dropout):
    model = Leaky(kind).train()
    model.llama.model.layers[0].register_forward_hook(
        lambda module, args, output: torch.nn.functional.dropout(output, dropout)
    )
    for seer, seen in [(0, 1), (1, 0), (2, 0), (2, 1)]:
        assert dropout or change_of_logits(model, seer, seen) < 1e-6
    report = verify_isolation(model, PACKED, DOCUMENTS)
    assert report.is_isolated, report


def test_random_logits_are_refused():
    model, calls = text_model(), []

    def scale(module, args, outputs):
        calls.append(1)
        outputs.logits = outputs.logits * len(calls)

    model.register_forward_hook(scale)
    with pytest.raises(ValueError, match=r'same rows the same logits, got: a change of 5\.0e-01'):
        verify_isolation(model, {**PACKED, 'use_cache': False}, DOCUMENTS)


@pytest.mark.parametrize(
    ('layer', 'name'), [('spectral norm', '_SpectralNorm._u'), ('running mean', 'RunningMean.running')]
)
def test_state_that_forwards_write_is_named(layer, name):
    """Each forward writes it, so the gradient of a step depends on the number of its microbatches."""
    spectral_norm = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(32, 32))
    model = with_layers(spectral_norm if layer == 'spectral norm' else RunningMean())
    report = verify_invariance(step_mean(model), text_rows(ROWS))
    assert not report.is_exact
    assert f'`{name}`' in report.note
    assert report.note in str(report)
