# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The ledger by source, compared with one forward for each row and with a plain count."""

from __future__ import annotations

import math

import pytest
import torch

from composer_tokacc import TokenMonitor
from composer_tokacc.checks import logits
from composer_tokacc.monitor.source_ledger import MOST_SOURCES, OTHERS, _token_losses
from composer_tokacc.row_counts import with_counts
from tests.ranks.source_ledger import SHAPE as RANK_SHAPE
from tests.ranks.source_ledger import STEPS
from tests.support.launch import launch_json
from tests.support.text import next_token_loss, ragged_batch, text_model, text_rows
from tests.support.training import fit, hugging_face, loader

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2), (12, 5)]
"""Length and number of labels of each row."""
SOURCES = ['a', 'b', 'b', 'a', 'c', 'a', 'b']
"""The source of each row."""
LABELS_PER_ROW = [num_labels for _, num_labels in SHAPE]
TOKENS = {'a': 15, 'b': 12, 'c': 1}
"""The number of loss tokens of each source."""
NUM_TOKENS = 28


def batch_of(sources=SOURCES, shape=SHAPE, side='right'):
    """Returns a batch whose rows have these sources."""
    batch = ragged_batch(shape, side=side)
    batch['source'] = list(sources)
    return batch


def batch_of_one_source(source):
    """Returns a batch in which all rows have the same source."""
    return batch_of([source] * len(SHAPE))


def fit_monitored(batch, **options):
    """Trains a step on a batch that ``token_data_spec`` splits. A microbatch has room for two rows of 14 tokens."""
    return fit(text_model(), batch, slot_tokens=14, callbacks=[TokenMonitor()], **options)


def fit_unplanned(*batches, **options):
    """Trains a step on each batch. Composer itself splits it."""
    options = {'callbacks': [TokenMonitor()], 'max_duration': f'{len(batches)}ba', **options}
    return fit(text_model(), loader(*batches), **options)


def field(recorder, name, source='a'):
    """Returns the logged values of a figure of a source."""
    return recorder.logged(f'token_monitor/source/{source}/{name}')


def assert_field(recorder, name, source, expected, **tolerance):
    """Compares the one logged value of a figure of a source."""
    logged = field(recorder, name, source)
    assert logged == pytest.approx([expected], **tolerance)


def logged_tokens(recorder):
    """Returns the first logged number of tokens of each source, by the name in the log."""
    tokens = {}
    for name, values in recorder.memory.data.items():
        if '/source/' in name and name.endswith('/tokens'):
            _, _, source, _ = name.split('/')
            _, tokens[source] = values[0]
    return tokens


def loss_of(source):
    """Returns the token mean of the rows of one source, each computed by itself in float64."""
    model = text_model().double()
    total = 0.0
    for row, source_of_row in zip(text_rows(SHAPE), SOURCES, strict=True):
        if source_of_row == source:
            outputs = model(input_ids=row['input_ids'])
            loss = next_token_loss(outputs.logits, row['labels'], reduction='sum')
            total += float(loss)
    return total / TOKENS[source]


@pytest.mark.parametrize('side', ['right', 'left'])
@pytest.mark.parametrize(
    'cut',
    [
        pytest.param({'regroup': False}, id='in order'),
        pytest.param({}, id='regrouped'),
        pytest.param({'packing': True}, id='packed'),
    ],
)
def test_loss_of_a_source(cut, side):
    batch = batch_of(side=side)

    recorder = fit_monitored(batch, **cut)

    mean_loss = 0.0
    sum_of_positions = 0.0
    for source, count in TOKENS.items():
        expected_weight = count / NUM_TOKENS
        expected_loss = loss_of(source)
        assert field(recorder, 'tokens', source) == [count]
        assert_field(recorder, 'weight', source, expected_weight, abs=1e-12)
        assert_field(recorder, 'loss', source, expected_loss, rel=1e-6)
        mean_loss += expected_weight * expected_loss
        (positions,) = field(recorder, 'positions', source)
        sum_of_positions += positions
    assert recorder.logged('loss/train/total') == pytest.approx([mean_loss], rel=1e-6)
    # Without dummy rows, each computed position belongs to a source.
    assert sum_of_positions == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize('chunk', [7, 300])
def test_losses_do_not_depend_on_chunks(chunk, monkeypatch):
    """The losses of one position at a time, or of several."""
    monkeypatch.setattr(logits, 'CHUNK', chunk)
    recorder = fit_monitored(batch_of())
    for source in TOKENS:
        assert_field(recorder, 'loss', source, loss_of(source), rel=1e-6)


def test_losses_are_computed_only_at_labels(monkeypatch):
    """With a large vocabulary and few labels, losses at all positions would take most of the step."""
    batch = batch_of()
    all_logits = torch.randn(*batch['labels'].shape, 64)
    expected_sum = next_token_loss(all_logits, batch['labels'], reduction='sum')
    num_positions = []
    cross_entropy = torch.nn.functional.cross_entropy

    def counting_cross_entropy(logits, targets, **options):
        num_positions.append(len(logits))
        return cross_entropy(logits, targets, **options)

    monkeypatch.setattr(torch.nn.functional, 'cross_entropy', counting_cross_entropy)
    losses = _token_losses(with_counts(batch), {'logits': all_logits}, NUM_TOKENS)

    assert num_positions == [NUM_TOKENS]
    assert float(losses.sum()) == pytest.approx(float(expected_sum), rel=1e-6)


@pytest.mark.parametrize(
    ('token_weights', 'power'),
    [
        ('sqrt', 0.5),
        ('sample', 1.0),
    ],
)
def test_shares_of_weight(token_weights, power):
    """A token of a row with n labels weighs n ** -power. So the n labels weigh n ** (1 - power)."""
    recorder = fit_monitored(batch_of(), token_weights=token_weights)

    weights = dict.fromkeys(TOKENS, 0.0)
    for num_labels, source in zip(LABELS_PER_ROW, SOURCES, strict=True):
        if num_labels > 0:
            weights[source] += num_labels ** (1 - power)
    sum_of_weights = sum(weights.values())
    for source, weight in weights.items():
        share = weight / sum_of_weights
        assert_field(recorder, 'weight', source, share, rel=1e-6)


def test_source_that_comes_late():
    all_of_a = batch_of_one_source('a')
    first_unnamed = batch_of_one_source('a')
    first_unnamed['source'][0] = None
    all_late = batch_of_one_source('late')

    recorder = fit_unplanned(all_of_a, first_unnamed, all_late)

    tokens_of_first_row = 2
    assert field(recorder, 'tokens') == [NUM_TOKENS, NUM_TOKENS - tokens_of_first_row, 0]
    assert field(recorder, 'tokens', 'late') == [NUM_TOKENS]
    assert len(field(recorder, 'loss')) == 2, 'no tokens have no mean'


def test_loss_of_a_diverged_run():
    """It must not seem to be that of an earlier step."""
    model = hugging_face(text_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)

    recorder = fit(model, batch_of(), batch_of(), callbacks=[TokenMonitor()], optimizer=optimizer)

    first_loss, last_loss = field(recorder, 'loss')
    assert math.isfinite(first_loss)
    assert math.isnan(last_loss)


def test_rows_without_a_source_have_weight():
    """The share is of the weight of the step, also if a microbatch has no source at all."""
    batch = batch_of_one_source('a')
    batch['source'][0] = None
    all_of_a = batch_of_one_source('a')

    recorder = fit_unplanned(batch, all_of_a, microbatch_size=1)

    tokens_of_first_row = 2
    share = (NUM_TOKENS - tokens_of_first_row) / NUM_TOKENS
    assert field(recorder, 'weight') == pytest.approx([share, 1.0])


@pytest.mark.parametrize(
    ('sources', 'options'),
    [
        pytest.param(['a'] * 7, {'callbacks': [TokenMonitor(sources=False)]}, id='switched off'),
        pytest.param(['a'] * 7, {'algorithms': []}, id='not counted'),
        pytest.param(torch.zeros(7), {}, id='a tensor of the user'),
        pytest.param([1] * 7, {}, id='numbers of the user'),
    ],
)
def test_nothing_is_logged_without_a_source(sources, options):
    batch = batch_of()
    batch['source'] = sources
    recorder = fit_unplanned(batch, microbatch_size=7, **options)
    for name in recorder.memory.data:
        assert '/source/' not in name


NUM_TOO_MANY = MOST_SOURCES + 9


def batch_of_too_many_sources():
    """Returns a batch of rows with two labels. Each row has another source: ``000``, ``001`` and so on."""
    sources = [f'{row:03d}' for row in range(NUM_TOO_MANY)]
    return batch_of(sources, shape=[(4, 2)] * NUM_TOO_MANY)


def test_too_many_sources_are_counted_together(caplog):
    batch = batch_of_too_many_sources()

    recorder = fit_unplanned(batch, batch)

    tokens_of_others = 2 * (NUM_TOO_MANY - MOST_SOURCES)
    assert field(recorder, 'tokens', '000') == [2, 2]
    assert field(recorder, 'tokens', OTHERS) == [tokens_of_others, tokens_of_others]
    assert caplog.text.count(f'logged together, as `{OTHERS}`') == 1


def test_source_may_be_named_others(caplog):
    """It does not end the list of names. If there are too many, the further ones count together with it."""
    all_of_others = batch_of_one_source(OTHERS)
    all_late = batch_of_one_source('late')

    recorder = fit_unplanned(all_of_others, all_late, batch_of_too_many_sources())

    assert field(recorder, 'tokens', 'late') == [NUM_TOKENS, 0]
    num_added = MOST_SOURCES - 2  # two names are known already
    last_added = f'{num_added - 1:03d}'
    first_not_added = f'{num_added:03d}'
    assert field(recorder, 'tokens', last_added) == [2]
    assert f'token_monitor/source/{first_not_added}/tokens' not in recorder.memory.data
    tokens_of_rest = 2 * (NUM_TOO_MANY - num_added)
    assert field(recorder, 'tokens', OTHERS) == [NUM_TOKENS, 0, tokens_of_rest]
    assert caplog.text.count(f'logged together, as `{OTHERS}`') == 1


def test_sources_that_are_paths():
    """A logger refuses a part that is `..`, and names of more than 250 characters."""
    long_folder = 'long/' * 50
    sources = ['..', f'{long_folder}first.json', f'{long_folder}second.json']
    batch = batch_of(sources, shape=[(4, 2), (5, 1), (9, 7)])

    recorder = fit_unplanned(batch)

    for name in recorder.memory.data:
        assert len(name) <= 250
    tokens_by_end = {}
    for source, num_tokens in logged_tokens(recorder).items():
        end_of_name = source[-11:]
        tokens_by_end[end_of_name] = num_tokens
    assert tokens_by_end == {
        '_': 2,
        '_first.json': 1,
        'second.json': 7,
    }


def test_sources_whose_names_become_the_same():
    """Loggers refuse these characters. The names do not depend on the order of the rows."""
    shape = [(4, 2), (5, 1), (9, 7)]
    batch = batch_of(['图表', '图表', '文档'], shape)
    swapped_batch = batch_of(['文档', '文档', '图表'], shape)

    tokens = logged_tokens(fit_unplanned(batch))
    swapped_tokens = logged_tokens(fit_unplanned(swapped_batch))

    assert sorted(tokens.values()) == [3, 7]
    assert tokens.keys() == swapped_tokens.keys()


@pytest.mark.slow
@pytest.mark.parametrize('options', ['{}', '{"packing": true}'])
def test_sources_that_only_one_rank_has(options):
    """Ranks must learn of a source together, or one would wait for another: on any rank, and in any step."""
    (result,) = launch_json('tests/ranks/source_ledger.py', f'[{options}]', ranks=2)
    assert result['norms'][0] == pytest.approx(result['first_norm'], rel=1e-5)
    labels_per_row = [num_labels for _, num_labels in RANK_SHAPE]
    num_tokens = sum(labels_per_row)
    for logged, sources in zip(result['logged'], STEPS, strict=True):
        counts = dict.fromkeys(sources, 0)
        losses = dict.fromkeys(sources, 0.0)
        for row, source in enumerate(sources):
            counts[source] += labels_per_row[row]
            losses[source] += result['losses'][row]

        for source, count in counts.items():
            expected_weight = count / num_tokens
            assert logged[f'{source}/tokens'] == count
            assert logged[f'{source}/weight'] == pytest.approx(expected_weight, abs=1e-9)
            if count > 0:
                expected_loss = losses[source] / count
                assert logged[f'{source}/loss'] == pytest.approx(expected_loss, rel=1e-6)

        sum_of_weights = 0.0
        for name, value in logged.items():
            if name.endswith('/weight'):
                sum_of_weights += value
        assert sum_of_weights == pytest.approx(1, abs=1e-9)
