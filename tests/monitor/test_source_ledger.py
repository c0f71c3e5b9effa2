# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The ledger by source, compared with one forward for each row and with a plain count."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import TokenMonitor
from composer_tokacc.checks import logits
from composer_tokacc.monitor.source_ledger import MOST_SOURCES, OTHERS, _token_losses
from composer_tokacc.row_counts import with_counts
from tests.ranks.source_ledger import SHAPE as RANK_SHAPE
from tests.ranks.source_ledger import STEPS
from tests.support.launch import launch_json
from tests.support.text import collate, next_token_loss, text_model, text_rows
from tests.support.training import fit, loader

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2), (12, 5)]
SOURCES = ['a', 'b', 'b', 'a', 'c', 'a', 'b']
TOKENS = {'a': 15, 'b': 12, 'c': 1}
NUM_TOKENS = 28


def batch_of(shape=SHAPE, sources=SOURCES, side='right'):
    return {**collate(text_rows(shape), side=side), 'source': list(sources)}


def fit_unplanned(*batches, **options):
    """Trains on a stock loader."""
    options = {'callbacks': [TokenMonitor()], 'max_duration': f'{len(batches)}ba', **options}
    return fit(text_model(), loader(*batches), **options)


def field(recorder, name, source='a'):
    return recorder.logged(f'token_monitor/source/{source}/{name}')


def loss_of(source):
    """Token mean of the rows of one source, each computed by itself in float64."""
    model = text_model().double()
    total = 0.0
    for row, source_of_row in zip(text_rows(SHAPE), SOURCES, strict=True):
        if source_of_row == source:
            logits = model(input_ids=row['input_ids']).logits
            loss = next_token_loss(logits, row['labels'], reduction='sum')
            total += float(loss)
    return total / TOKENS[source]


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('cut', [{'regroup': False}, {}, {'packing': True}], ids=['in order', 'regrouped', 'packed'])
def test_loss_of_a_source(cut, side):
    recorder = fit(text_model(), batch_of(side=side), slot_tokens=14, callbacks=[TokenMonitor()], **cut)
    mean_loss = 0.0
    sum_of_positions = 0.0
    for source, count in TOKENS.items():
        loss = loss_of(source)
        weight = count / NUM_TOKENS
        assert field(recorder, 'tokens', source) == [count]
        assert field(recorder, 'weight', source) == pytest.approx([weight], abs=1e-12)
        assert field(recorder, 'loss', source) == pytest.approx([loss], rel=1e-6)
        mean_loss += weight * loss
        (positions,) = field(recorder, 'positions', source)
        sum_of_positions += positions
    assert recorder.logged('loss/train/total') == pytest.approx([mean_loss], rel=1e-6)
    # Without dummy rows, each computed position belongs to a source.
    assert sum_of_positions == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize('chunk', [7, 300])
def test_losses_do_not_depend_on_chunks(chunk, monkeypatch):
    """The losses of one position at a time, or of several."""
    monkeypatch.setattr(logits, 'CHUNK', chunk)
    recorder = fit(text_model(), batch_of(), slot_tokens=14, callbacks=[TokenMonitor()])
    for source in TOKENS:
        assert field(recorder, 'loss', source) == pytest.approx([loss_of(source)], rel=1e-6)


def test_losses_are_computed_only_at_labels(monkeypatch):
    """With a large vocabulary and few labels, losses at all positions would take most of the step."""
    sizes = []
    cross_entropy = torch.nn.functional.cross_entropy

    def recorded(logits, targets, **options):
        sizes.append(len(logits))
        return cross_entropy(logits, targets, **options)

    monkeypatch.setattr(torch.nn.functional, 'cross_entropy', recorded)
    batch = batch_of()
    all_logits = torch.randn(*batch['labels'].shape, 64)
    losses = _token_losses(with_counts(batch), {'logits': all_logits}, NUM_TOKENS)
    assert sizes == [NUM_TOKENS]
    expected = next_token_loss(all_logits, batch['labels'], reduction='sum')
    assert float(losses.sum()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(('token_weights', 'power'), [('sqrt', 0.5), ('sample', 1.0)])
def test_shares_of_weight(token_weights, power):
    recorder = fit(text_model(), batch_of(), token_weights=token_weights, callbacks=[TokenMonitor()])
    weights = dict.fromkeys(TOKENS, 0.0)
    for (_, labelled), source in zip(SHAPE, SOURCES, strict=True):
        if labelled:
            weights[source] += labelled ** (1 - power)
    sum_of_weights = sum(weights.values())
    for source, weight in weights.items():
        share = weight / sum_of_weights
        assert field(recorder, 'weight', source) == pytest.approx([share], rel=1e-6)


def test_source_that_comes_late():
    all_of_a = batch_of(sources=['a'] * 7)
    first_unnamed = batch_of(sources=[None, *['a'] * 6])
    all_late = batch_of(sources=['late'] * 7)
    recorder = fit_unplanned(all_of_a, first_unnamed, all_late)
    tokens_of_first_row = 2
    assert field(recorder, 'tokens') == [NUM_TOKENS, NUM_TOKENS - tokens_of_first_row, 0]
    assert field(recorder, 'tokens', 'late') == [NUM_TOKENS]
    assert len(field(recorder, 'loss')) == 2, 'no tokens have no mean'


@pytest.mark.parametrize(
    ('source', 'options'),
    [
        pytest.param(['a'] * 7, {'callbacks': [TokenMonitor(sources=False)]}, id='switched off'),
        pytest.param(['a'] * 7, {'algorithms': []}, id='not counted'),
        pytest.param(torch.zeros(7), {}, id='a tensor of the user'),
        pytest.param([1] * 7, {}, id='numbers of the user'),
    ],
)
def test_nothing_is_logged_without_a_source(source, options):
    recorder = fit_unplanned({**batch_of(), 'source': source}, microbatch_size=7, **options)
    assert not [name for name in recorder.memory.data if '/source/' in name]


NUM_TOO_MANY = MOST_SOURCES + 9


def batch_of_too_many_sources():
    """Returns a batch in which each row has a source by itself, and two labels."""
    sources = [f'{row:03d}' for row in range(NUM_TOO_MANY)]
    return batch_of([(4, 2)] * NUM_TOO_MANY, sources)


def test_too_many_sources_are_counted_together(caplog):
    batch = batch_of_too_many_sources()
    recorder = fit_unplanned(batch, batch)
    assert field(recorder, 'tokens', '000') == [2, 2]
    num_together = NUM_TOO_MANY - MOST_SOURCES
    assert field(recorder, 'tokens', OTHERS) == [2 * num_together] * 2
    assert caplog.text.count(f'logged together, as `{OTHERS}`') == 1


def test_source_may_be_named_others(caplog):
    """It does not end the list of names. If there are too many, the further ones count together with it."""
    all_of_others = batch_of(sources=[OTHERS] * 7)
    all_late = batch_of(sources=['late'] * 7)
    recorder = fit_unplanned(all_of_others, all_late, batch_of_too_many_sources())
    assert field(recorder, 'tokens', 'late') == [NUM_TOKENS, 0]
    num_added = MOST_SOURCES - 2  # two names are known already
    assert field(recorder, 'tokens', f'{num_added - 1:03d}') == [2]
    assert f'token_monitor/source/{num_added:03d}/tokens' not in recorder.memory.data
    num_together = NUM_TOO_MANY - num_added
    assert field(recorder, 'tokens', OTHERS) == [NUM_TOKENS, 0, 2 * num_together]
    assert caplog.text.count(f'logged together, as `{OTHERS}`') == 1


@pytest.mark.slow
@pytest.mark.parametrize('options', ['{}', '{"packing": true}'])
def test_sources_that_only_one_rank_has(options):
    """Ranks must learn of a source together, or one would wait for another: on any rank, and in any step."""
    [result] = launch_json('tests/ranks/source_ledger.py', f'[{options}]', ranks=2)
    assert result['norms'][0] == pytest.approx(result['first_norm'], rel=1e-5)
    num_tokens = sum(labelled for _, labelled in RANK_SHAPE)
    for logged, sources in zip(result['logged'], STEPS, strict=True):
        counts = dict.fromkeys(sources, 0)
        losses = dict.fromkeys(sources, 0.0)
        for row, source in enumerate(sources):
            _, labelled = RANK_SHAPE[row]
            counts[source] += labelled
            losses[source] += result['losses'][row]
        for source, count in counts.items():
            assert logged[f'{source}/tokens'] == count
            assert logged[f'{source}/weight'] == pytest.approx(count / num_tokens, abs=1e-9)
            if count:
                mean = losses[source] / count
                assert logged[f'{source}/loss'] == pytest.approx(mean, rel=1e-6)
        logged_weights = [value for name, value in logged.items() if name.endswith('/weight')]
        assert sum(logged_weights) == pytest.approx(1, abs=1e-9)
