# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The ledger by source, held to one forward for each source and to a plain count."""

from __future__ import annotations

import pytest
import torch

from composer_tokacc import TokenMonitor
from composer_tokacc.monitor import source_ledger
from composer_tokacc.monitor.source_ledger import MOST_SOURCES, OTHERS
from tests.ranks.source_ledger import SHAPE as RANK_SHAPE
from tests.ranks.source_ledger import STEPS
from tests.support.launch import launch_json
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2), (12, 5)]
SOURCES = ['a', 'b', 'b', 'a', 'c', 'a', 'b']
TOKENS = {'a': 15, 'b': 12, 'c': 1}


def batch_of(shape=SHAPE, sources=SOURCES, **kwargs):
    return {**collate(text_rows(shape), **kwargs), 'source': list(sources)}


def field(recorder, name, source='a'):
    return recorder.logged(f'token_monitor/source/{source}/{name}')


def loss_of(model, rows, wanted):
    """Token mean of one plain forward in float64 over the rows of one source, each by itself."""
    total, count = 0.0, 0
    for row, source in zip(rows, SOURCES, strict=True):
        if source == wanted:
            logits = model(input_ids=row['input_ids']).logits[0, :-1]
            labels = row['labels'][0, 1:]
            total += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction='sum').item()
            count += int((labels != -100).sum())
    return total / count


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize('cut', [{'regroup': False}, {}, {'packing': True}], ids=['in order', 'regrouped', 'packed'])
def test_loss_of_a_source(cut, side):
    model = text_model()
    expected = {source: loss_of(text_model().double(), text_rows(SHAPE), source) for source in TOKENS}
    recorder = fit(model, batch_of(side=side), slot_tokens=14, **cut, callbacks=[TokenMonitor()])
    for source, count in TOKENS.items():
        assert field(recorder, 'tokens', source) == [count]
        assert field(recorder, 'weight', source) == pytest.approx([count / sum(TOKENS.values())], abs=1e-12)
        assert field(recorder, 'loss', source) == pytest.approx([expected[source]], rel=1e-6)
    together = sum(field(recorder, 'loss', source)[0] * count for source, count in TOKENS.items())
    assert together / sum(TOKENS.values()) == pytest.approx(recorder.logged('loss/train/total')[0], rel=1e-6)
    # Every computed position is of some source, as there are no dummy rows.
    assert sum(field(recorder, 'positions', source)[0] for source in TOKENS) == pytest.approx(1, abs=1e-9)


def test_ways_to_read_losses_agree(monkeypatch):
    found = []
    for most_unread, chunk in [(2**20, 2**23), (0, 7), (300, 50)]:
        monkeypatch.setattr(source_ledger, 'MOST_UNREAD', most_unread)
        monkeypatch.setattr(source_ledger, 'CHUNK', chunk)
        recorder = fit(text_model(), batch_of(), slot_tokens=14, callbacks=[TokenMonitor()])
        found.append([field(recorder, 'loss', source)[0] for source in TOKENS])
    assert all(one == pytest.approx(found[0], rel=1e-6) for one in found)


@pytest.mark.parametrize('power', [0.5, 1.0])
def test_shares_of_weight(power):
    name = {0.5: 'sqrt', 1.0: 'sample'}[power]
    recorder = fit(text_model(), batch_of(), token_weights=name, callbacks=[TokenMonitor()])
    weights = dict.fromkeys(TOKENS, 0.0)
    for (_, labelled), source in zip(SHAPE, SOURCES, strict=True):
        weights[source] += labelled ** (1 - power) if labelled else 0.0
    for source, weight in weights.items():
        assert field(recorder, 'weight', source) == pytest.approx([weight / sum(weights.values())], rel=1e-6)


def test_monitor_alone_counts_sources():
    expected = loss_of(text_model().double(), text_rows(SHAPE), 'b')
    recorder = fit(text_model(), loader(batch_of()), algorithms=[], callbacks=[TokenMonitor()], microbatch_size=3)
    assert field(recorder, 'tokens', 'b') == [TOKENS['b']]
    assert field(recorder, 'loss', 'b') == pytest.approx([expected], rel=1e-6)


def test_source_that_comes_late():
    batches = [batch_of(sources=['a'] * 7), batch_of(sources=[None, *'aaaaaa']), batch_of(sources=['late'] * 7)]
    recorder = fit(text_model(), loader(*batches), algorithms=[], callbacks=[TokenMonitor()], max_duration='3ba')
    assert field(recorder, 'tokens') == [28, 26, 0]
    assert field(recorder, 'tokens', 'late') == [28]
    assert len(field(recorder, 'loss')) == 2, 'of no tokens there is no mean'


@pytest.mark.parametrize(
    ('source', 'monitor'),
    [(['a'] * 7, TokenMonitor(sources=False)), (torch.zeros(7), TokenMonitor()), ([1] * 7, TokenMonitor())],
    ids=['switched off', 'a tensor of the user', 'numbers of the user'],
)
def test_nothing_is_logged_without_a_source(source, monitor):
    batch = {**batch_of(), 'source': source}
    recorder = fit(text_model(), loader(batch), algorithms=[], callbacks=[monitor], microbatch_size=7)
    assert not [name for name in recorder.memory.data if '/source/' in name]
    with pytest.raises(ValueError, match="`sources` must be 'auto' or False, got: 'files'"):
        TokenMonitor(sources='files')


def test_too_many_sources_are_counted_together(caplog):
    shape = [(4, 2)] * (MOST_SOURCES + 9)
    batch = batch_of(shape, [f'{index:03d}' for index in range(len(shape))])
    recorder = fit(text_model(), loader(batch, batch), algorithms=[], callbacks=[TokenMonitor()], max_duration='2ba')
    assert field(recorder, 'tokens', '000') == [2, 2]
    assert field(recorder, 'tokens', OTHERS) == [18, 18]
    assert caplog.text.count(f'logged together, as `{OTHERS}`') == 1


@pytest.mark.slow
def test_sources_that_one_rank_alone_has():
    """Ranks learn of a source together: none waits for another, whichever of them sees it, and in whichever step."""
    for found in launch_json('tests/ranks/source_ledger.py', '[{}, {"packing": true}]', ranks=2):
        assert found['norms'][0] == pytest.approx(found['first_norm'], rel=1e-5)
        for values, sources in zip(found['logged'], STEPS, strict=True):
            for source in set(sources):
                rows = [row for row, name in enumerate(sources) if name == source]
                count = sum(RANK_SHAPE[row][1] for row in rows)
                assert values[f'{source}/tokens'] == count
                assert values[f'{source}/weight'] == pytest.approx(count / sum(n for _, n in RANK_SHAPE), abs=1e-9)
                if count:
                    mean = sum(found['losses'][row] for row in rows) / count
                    assert values[f'{source}/loss'] == pytest.approx(mean, rel=1e-6)
            assert sum(value for name, value in values.items() if name.endswith('/weight')) == pytest.approx(
                1, abs=1e-9
            )
