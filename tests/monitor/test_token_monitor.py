# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
from composer.algorithms import GradientClipping
from composer.core import Algorithm, Callback, Event
from composer.loggers import ProgressBarLogger

from composer_tokacc import TokenAccumulation, TokenMonitor, token_data_spec
from composer_tokacc.row_counts import RowCounts, with_rows
from tests.support.launch import ROOT
from tests.support.text import collate, text_model, text_rows
from tests.support.training import assert_exact, fit, loader, reference_gradients

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2)]
REAL, TOKENS, WIDTH = 41, 23, 14


def run(data, **kwargs):
    options = {'algorithms': [], 'callbacks': [TokenMonitor()], 'max_duration': '2ba', **kwargs}
    return fit(text_model(), data, **options)


def test_an_unknown_rule_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"`loss_tokens` must be .*, got: 'shifted'"):
        TokenMonitor(loss_tokens='shifted')


def test_stock_split_pays_for_the_width_of_the_device_batch():
    batch = collate(text_rows(SHAPE))
    recorder = run(loader(batch, batch), microbatch_size=1)
    ratio = 1 - REAL / (6 * WIDTH)
    assert recorder.logged('token_monitor/padding_ratio') == pytest.approx([ratio] * 2)
    assert recorder.logged('token_monitor/device_batch_padding_ratio') == pytest.approx([ratio] * 2)
    assert recorder.logged('token_monitor/loss_generating_share') == pytest.approx([TOKENS / REAL] * 2)
    assert recorder.logged('token_monitor/empty_microbatches') == [1, 1]
    assert recorder.logged('token_monitor/microbatches') == [6, 6]
    assert recorder.logged('token_monitor/rank_imbalance') == [1, 1]
    assert all(rate > 0 for rate in recorder.logged('token_monitor/real_tokens_per_second'))
    # One row a microbatch: sample weights are 1/6, token weights t/T.
    distance = sum(abs(1 / 6 - labelled / TOKENS) for _, labelled in SHAPE) / 2
    assert recorder.logged('token_monitor/sample_weighting_error') == pytest.approx([distance])


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('microbatch_size', [1, 2, 4])
def test_rows_of_equal_length_have_no_padding(microbatch_size, side):
    batch = collate(text_rows([(9, 7), (9, 1), (9, 4), (9, 8)]), side=side)
    for data in (loader(batch, batch), token_data_spec(loader(batch, batch))):
        recorder = run(data, algorithms=[TokenAccumulation()], microbatch_size=microbatch_size)
        assert recorder.logged('token_monitor/padding_ratio') == [0, 0]
        assert recorder.logged('token_monitor/device_batch_padding_ratio') == [0, 0]


def test_all_that_is_logged_is_listed_where_users_look():
    batch = {**collate(text_rows(SHAPE)), 'source': ['a', 'b', 'a', 'b', 'a', 'b']}
    recorder = run(token_data_spec(loader(batch, batch)), algorithms=[TokenAccumulation()], microbatch_size=2)
    keys = {key.removeprefix('token_monitor/') for key in recorder.memory.data if key.startswith('token_monitor/')}
    by_source = {key.rpartition('/')[2] for key in keys if key.startswith('source/')}
    assert {'padding_ratio', 'rank_imbalance'} < keys
    assert 'loss' in by_source
    panel = (ROOT / 'docs/watching.md').read_text()
    for key in keys - {key for key in keys if key.startswith('source/')}:
        assert f'/{key}``' in TokenMonitor.__doc__ or f'..._{key.rpartition("_")[2]}``' in TokenMonitor.__doc__, key
        assert f'`{key}`' in panel, key
    assert all(f'/source/NAME/{key}``' in TokenMonitor.__doc__ for key in by_source)


def test_regrouping_split_computes_less_padding():
    batch = collate(text_rows(SHAPE))
    recorder = run(token_data_spec(loader(batch, batch)), algorithms=[TokenAccumulation()], microbatch_size=2)
    ratio, untrimmed = (
        recorder.logged(f'token_monitor/{name}') for name in ('padding_ratio', 'device_batch_padding_ratio')
    )
    assert untrimmed == pytest.approx([1 - REAL / (6 * WIDTH)] * 2)
    assert max(ratio) < untrimmed[0]
    assert ratio == pytest.approx([ratio[0]] * 2)


def test_rows_that_are_no_samples_are_told_apart_and_hold_no_real_tokens():
    batch = with_rows(collate(text_rows(SHAPE)), [RowCounts()] * 5 + [RowCounts(samples=0)])
    # Each row by itself, at its own width, but for the first two, which share one.
    data = token_data_spec(loader(batch, batch), slot_tokens=WIDTH, regroup=False)
    recorder = run(data, algorithms=[TokenAccumulation()], microbatch_size=1)
    positions = [5 + 5, 9, 14, 6 + 6]
    assert recorder.logged('token_monitor/dummy_ratio') == pytest.approx([6 / sum(positions)] * 2)
    assert recorder.logged('token_monitor/padding_ratio') == pytest.approx([1 - (REAL - 3) / sum(positions)] * 2)


def test_one_microbatch_has_no_weighting_error():
    batch = collate(text_rows(SHAPE))
    recorder = run(loader(batch, batch), microbatch_size=6)
    assert recorder.logged('token_monitor/sample_weighting_error') == pytest.approx([0.0])


class MadeUpFlops:
    """Ten operations a position, and 1,000 for all media of a batch."""

    def text(self, rows, width):
        return 10.0 * rows * width

    def media(self, batch):
        return 1000.0


def test_use_of_the_device_is_operations_over_what_it_can_do():
    monitor = TokenMonitor(flops=MadeUpFlops(), device_tflops=0.5)
    batch = collate(text_rows(SHAPE))
    recorder = run(loader(batch, batch), callbacks=[monitor])
    rates, seconds = (recorder.logged(f'token_monitor/{name}') for name in ('tokens_per_second', 'seconds_p99'))
    operations = 10 * 6 * WIDTH + 1000
    for rate, mfu, tera in zip(
        rates, *(recorder.logged(f'token_monitor/{n}') for n in ('mfu', 'tflops_per_second')), strict=True
    ):
        assert mfu == pytest.approx(operations * rate / (6 * WIDTH) / 0.5e12)
        assert tera == pytest.approx(mfu * 0.5)
    assert seconds[0] == pytest.approx(6 * WIDTH / rates[0])
    assert recorder.logged('token_monitor/hours_left')[-1] == 0
    assert min(recorder.logged('token_monitor/loader_seconds')) > 0
    with pytest.raises(ValueError, match='`device_tflops` must be a positive number, got: -1'):
        TokenMonitor(device_tflops=-1)


@pytest.mark.parametrize('others', [[], [GradientClipping('norm', 1e-3)]], ids=['plain', 'clipped'])
def test_gradient_norm_is_that_of_one_forward_whatever_is_clipped(others):
    batch, model = collate(text_rows(SHAPE)), text_model()
    expected, _ = reference_gradients(model, batch)
    norm = float(sum(value.double().square().sum() for value in expected.values()).sqrt())
    algorithms = [*others, TokenAccumulation()]
    recorder = fit(model, loader(batch), algorithms=algorithms, callbacks=[TokenMonitor()], max_duration='1ba')
    assert norm > 0.1
    assert recorder.logged('token_monitor/gradient_norm') == pytest.approx([norm], rel=1e-5)


class ShownNumbers(Callback):
    """What stands behind the bar at the end of each step."""

    def __init__(self):
        self.found = []

    def batch_end(self, state, logger):
        (bar,) = (one.train_pbar for one in logger.destinations if isinstance(one, ProgressBarLogger))
        self.found.append(dict(bar.metrics))


def test_progress_bar_has_the_shortest_of_it(capfd):
    batch, shown = collate(text_rows(SHAPE)), ShownNumbers()
    options = {'progress_bar': True, 'callbacks': [TokenMonitor(), shown], 'max_duration': '3ba'}
    recorder = run(loader(batch, batch, batch), microbatch_size=6, **options)
    assert 'loss/train/total=' in capfd.readouterr().err
    for step, found in enumerate(shown.found):
        rate, padding, norm = (
            recorder.logged(f'token_monitor/{name}')[step]
            for name in ('tokens_per_second', 'padding_ratio', 'gradient_norm')
        )
        assert found['tok/s'] == f'{rate:,.0f}'
        assert found['padding'] == f'{padding:.0%}'
        assert found['|grad|'] == f'{norm:.3g}'


class OutOfMemoryUntil(Algorithm):
    """Raises, as the GPU would, in every microbatch of more than so many positions."""

    def __init__(self, most):
        self.most = most

    def match(self, event, state):
        return event == Event.BEFORE_LOSS

    def apply(self, event, state, logger):
        state.auto_microbatching = True
        if state.batch['input_ids'].numel() > self.most:
            raise RuntimeError('CUDA out of memory')


def test_attempts_that_ran_out_of_memory_leave_no_trace_in_the_figures():
    """Composer halves 6 to 3 to 1 row of 14 tokens: 84 and 42 positions do not fit, 14 do."""
    batch = collate(text_rows(SHAPE))
    recorder = run(loader(batch), algorithms=[OutOfMemoryUntil(14)], microbatch_size=6, max_duration='1ba')
    assert recorder.trainer.state.device_train_microbatch_size == 1
    assert recorder.logged('token_monitor/microbatches') == [6]
    assert recorder.logged('token_monitor/padding_ratio') == pytest.approx([1 - REAL / (6 * WIDTH)])


# Keys of others in the batch.

NAMES = ('loss_generating_tokens', 'total_tokens', 'real_tokens', 'num_microbatches', 'counted_by', 'packed')


@pytest.fixture(params=['all names', 'those of llm-foundry'])
def foreign_batch(request):
    found = collate(text_rows(SHAPE))
    names = NAMES if request.param == 'all names' else NAMES[:2]
    return {**found, **{name: [7] * len(SHAPE) for name in names}}


def test_monitor_alone_counts_for_itself_beside_keys_of_others(foreign_batch):
    recorder = fit(text_model(), loader(foreign_batch), algorithms=[], callbacks=[TokenMonitor()], microbatch_size=1)
    assert recorder.logged('token_monitor/loss_generating_share') == pytest.approx([TOKENS / REAL])
    assert recorder.logged('token_monitor/empty_microbatches') == [1]


@pytest.mark.parametrize('split', ['stock', 'ours'])
def test_algorithm_counts_for_itself_beside_keys_of_others(split, foreign_batch):
    model = text_model()
    data = token_data_spec(loader(foreign_batch)) if split == 'ours' else loader(foreign_batch)
    recorder = assert_exact(model, data, batch=collate(text_rows(SHAPE)), callbacks=[TokenMonitor()])
    assert recorder.logged('token_accumulation/loss_generating_tokens') == [TOKENS]
    assert recorder.logged('token_monitor/loss_generating_share') == pytest.approx([TOKENS / REAL])
