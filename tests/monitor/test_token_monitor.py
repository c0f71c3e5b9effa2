# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The figures that the monitor logs in each step: padding, weights, use of the device, the gradient's norm."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.core import Algorithm, Callback, DataSpec, Event
from composer.loggers import ProgressBarLogger

from composer_tokacc import TokenAccumulation, TokenMonitor, token_data_spec
from composer_tokacc.compat import TorchDispatchMode
from composer_tokacc.monitor.token_monitor import GradientNorm
from composer_tokacc.row_counts import RowCounts, attach_row_counts
from tests.support.launch import ROOT, launch_json
from tests.support.mixtures import mixture_of_experts
from tests.support.text import ragged_batch, text_model
from tests.support.training import assert_exact, fit, hugging_face, loader, reference_gradients

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2)]
"""Length and number of labels of each row."""
LENGTHS = [length for length, _ in SHAPE]
ROWS = 6
REAL = 41
"""The number of tokens, the sum of the lengths."""
TOKENS = 23
"""The number of loss tokens, the sum of the labels."""
WIDTH = 14
POSITIONS = ROWS * WIDTH
PADDING = 1 - REAL / POSITIONS


def run(data, **options):
    """Trains for two steps with the monitor, without TokenAccumulation unless `algorithms` has it."""
    options = {'algorithms': [], 'callbacks': [TokenMonitor()], 'max_duration': '2ba', **options}
    return fit(text_model(), data, **options)


def figures(recorder, name):
    """Returns the values of a figure of the monitor, one for each step."""
    return recorder.logged(f'token_monitor/{name}')


def assert_figures(recorder, name, *expected):
    """Compares the values of a figure. ``expected``: one for each step."""
    assert figures(recorder, name) == pytest.approx(list(expected))


def with_dummy_row(batch):
    """Returns the batch. Its last row, of three tokens, does not count as a sample."""
    counts_of_samples = [RowCounts()] * (ROWS - 1)
    dummy_row = RowCounts(samples=0)
    return attach_row_counts(batch, [*counts_of_samples, dummy_row])


def operations_of_step(recorder, positions):
    """Returns the operations of the first step, from the logged rates. ``positions``: how many the step computed.

    The run needs a monitor with ``flops``. Otherwise ``tflops_per_second`` is not logged.
    """
    positions_per_second, *_ = figures(recorder, 'tokens_per_second')
    teraflops, *_ = figures(recorder, 'tflops_per_second')
    seconds = positions / positions_per_second
    return 1e12 * teraflops * seconds


@pytest.fixture
def batch():
    return ragged_batch(SHAPE)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'loss_tokens': 'shifted'}, r"`loss_tokens` must be .*, got: 'shifted'"),
        ({'device_tflops': -1}, '`device_tflops` must be a positive number, got: -1'),
        ({'flops': len}, '`flops` must have the methods `text` and `media`'),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenMonitor(**options)


# Padding.


def test_figures_of_a_stock_split(batch):
    """Composer's own split pads each microbatch to the width of the device batch."""
    recorder = run(loader(batch, batch), microbatch_size=1)

    share_of_labels = TOKENS / REAL
    assert_figures(recorder, 'padding_ratio', PADDING, PADDING)
    assert_figures(recorder, 'device_batch_padding_ratio', PADDING, PADDING)
    assert_figures(recorder, 'loss_generating_share', share_of_labels, share_of_labels)
    assert figures(recorder, 'empty_microbatches') == [1, 1]
    assert figures(recorder, 'microbatches') == [6, 6]
    assert figures(recorder, 'rank_imbalance') == [1, 1]
    assert min(figures(recorder, 'real_tokens_per_second')) > 0
    # One row a microbatch: the weight of each is 1/6 by samples, and its share of the labels by tokens.
    # The error belongs to the previous step, so only the second step logs it.
    distance = 0.0
    for _, num_labels in SHAPE:
        distance += abs(1 / ROWS - num_labels / TOKENS)
    assert_figures(recorder, 'sample_weighting_error', distance / 2)


@pytest.mark.parametrize('side', ['left', 'right'])
@pytest.mark.parametrize('make_spec', [DataSpec, token_data_spec])
def test_equally_long_rows_have_no_padding(make_spec, side):
    batch = ragged_batch([(9, 7), (9, 1), (9, 4), (9, 8)], side=side)
    data = make_spec(loader(batch, batch))
    recorder = run(data, algorithms=[TokenAccumulation()], microbatch_size=2)
    assert figures(recorder, 'padding_ratio') == [0, 0]
    assert figures(recorder, 'device_batch_padding_ratio') == [0, 0]


def test_regrouping_split_computes_less_padding(batch):
    data = token_data_spec(loader(batch, batch))

    recorder = run(data, algorithms=[TokenAccumulation()], microbatch_size=2)

    assert_figures(recorder, 'device_batch_padding_ratio', PADDING, PADDING)
    first, second = figures(recorder, 'padding_ratio')
    assert first < PADDING
    assert second == pytest.approx(first)


def test_dummy_rows_have_their_own_figure(batch):
    """They are computed, but they do not count as samples or real tokens."""
    batch = with_dummy_row(batch)
    data = loader(batch, batch)

    # One microbatch, because a split would leave out the dummy row.
    recorder = run(data, algorithms=[TokenAccumulation()], microbatch_size=ROWS)

    share_of_dummies = 1 / ROWS
    assert_figures(recorder, 'dummy_ratio', share_of_dummies, share_of_dummies)
    num_real = REAL - 3  # the dummy row has three tokens
    padding = 1 - num_real / POSITIONS
    assert_figures(recorder, 'padding_ratio', padding, padding)


class OutOfMemoryOver(Algorithm):
    """Raises, as the GPU would, in every microbatch with more positions than a limit."""

    def __init__(self, limit):
        self.limit = limit

    def match(self, event, state):
        return event == Event.BEFORE_LOSS

    def apply(self, event, state, logger):
        state.auto_microbatching = True
        if state.batch['input_ids'].numel() > self.limit:
            raise RuntimeError('CUDA out of memory')


def test_attempts_without_memory_are_not_counted(batch):
    """Composer halves 6 to 3 to 1 row of 14 tokens: 84 and 42 positions do not fit, 14 do."""
    limit = OutOfMemoryOver(14)
    recorder = run(loader(batch), algorithms=[limit], microbatch_size=ROWS, max_duration='1ba')
    assert recorder.trainer.state.device_train_microbatch_size == 1
    assert figures(recorder, 'microbatches') == [6]
    assert_figures(recorder, 'padding_ratio', PADDING)


# Use of the device, and the gradient.


class MadeUpFlops:
    """Ten operations a position, and 1,000 for all media of a batch."""

    def text(self, rows, width):
        return 10.0 * rows * width

    def media(self, batch):
        return 1000.0


def test_use_of_the_device(batch):
    """It is the operations of a second over those that the device can do in a second."""
    monitor = TokenMonitor(flops=MadeUpFlops(), device_tflops=0.5)

    recorder = run(loader(batch, batch), callbacks=[monitor])

    operations = 10 * POSITIONS + 1000
    seconds_of_steps = [POSITIONS / rate for rate in figures(recorder, 'tokens_per_second')]
    used_shares = figures(recorder, 'mfu')
    teraflops = figures(recorder, 'tflops_per_second')
    for step, seconds in enumerate(seconds_of_steps):
        operations_per_second = operations / seconds
        assert used_shares[step] == pytest.approx(operations_per_second / 0.5e12)
        assert teraflops[step] == pytest.approx(operations_per_second / 1e12)
    assert figures(recorder, 'seconds_p99')[0] == pytest.approx(seconds_of_steps[0])
    assert figures(recorder, 'hours_left')[-1] == 0
    assert min(figures(recorder, 'loader_seconds')) > 0


class AttentionFlops:
    """One operation for each pair of positions of a row."""

    def text(self, rows, width):
        return float(rows * width**2)

    def media(self, batch):
        return 0.0


PAIRS_OF_POSITIONS = sum(length**2 for length in LENGTHS)
"""The pairs of positions of the same row."""


def test_packed_documents_attend_to_themselves(batch):
    monitor = TokenMonitor(flops=AttentionFlops(), device_tflops=1.0)
    recorder = fit(text_model(), batch, packing=True, callbacks=[monitor])
    assert operations_of_step(recorder, REAL) == pytest.approx(PAIRS_OF_POSITIONS)


def test_packed_dummy_row_is_computed(batch):
    batch = with_dummy_row(batch)
    monitor = TokenMonitor(flops=AttentionFlops(), device_tflops=1.0)

    recorder = fit(text_model(), batch, packing=True, callbacks=[monitor])

    *_, dummy_length = LENGTHS
    assert_figures(recorder, 'dummy_ratio', dummy_length / REAL)
    assert operations_of_step(recorder, REAL) == pytest.approx(PAIRS_OF_POSITIONS)


class FlopsOfLogits(MadeUpFlops):
    """The logits of a position take eight of its ten operations."""

    def logits(self, positions):
        return 8.0 * positions


@pytest.mark.parametrize(
    ('logits', 'num_logits'),
    [
        ('labels', TOKENS + 1),  # the model shifts one more position away, see LabelledPositions
        ('all', POSITIONS),
    ],
)
def test_operations_of_logits_that_are_computed(logits, num_logits, batch):
    monitor = TokenMonitor(flops=FlopsOfLogits(), device_tflops=1.0)
    algorithm = TokenAccumulation(logits=logits)

    recorder = run(
        loader(batch),
        algorithms=[algorithm],
        callbacks=[monitor],
        max_duration='1ba',
        microbatch_size=ROWS,
    )

    expected = 2 * POSITIONS + 8 * num_logits + 1000
    assert operations_of_step(recorder, POSITIONS) == pytest.approx(expected)


def test_hours_left_of_epochs(batch):
    """Composer's elapsed duration counts whole epochs, also in the middle of one."""
    recorder = run(loader(batch, batch, batch), max_duration='2ep')

    expected_hours = []
    for step, median_seconds in enumerate(figures(recorder, 'seconds_p50')):
        steps_left = 5 - step
        expected_hours.append(steps_left * median_seconds / 3600)
    assert len(expected_hours) == 6
    assert_figures(recorder, 'hours_left', *expected_hours)


def norm_of(gradients):
    entries = torch.cat([gradient.flatten() for gradient in gradients.values()])
    return float(entries.double().norm())


@pytest.mark.parametrize(
    'algorithms',
    [
        pytest.param([TokenAccumulation()], id='plain'),
        pytest.param([GradientClipping('norm', 1e-3), TokenAccumulation()], id='clipped'),
    ],
)
def test_gradient_norm_is_before_clipping(algorithms, batch):
    model = text_model()
    expected, _ = reference_gradients(model, batch)
    expected_norm = norm_of(expected)
    assert expected_norm > 0.1, 'clipping to 0.001 changes it'

    recorder = fit(model, loader(batch), algorithms=algorithms, callbacks=[TokenMonitor()])

    (norm,) = figures(recorder, 'gradient_norm')
    assert norm == pytest.approx(expected_norm, rel=1e-5)


def test_gradient_norm_of_a_step_without_loss_tokens():
    """The router has a gradient, but TokenAccumulation drops it, so that the step changes no weight."""
    without_labels = ragged_batch([(4, 0), (6, 0)])

    recorder = fit(mixture_of_experts(), ragged_batch(), without_labels, callbacks=[TokenMonitor()])

    first_norm, second_norm = figures(recorder, 'gradient_norm')
    expected_norm = norm_of(recorder.steps[0])
    assert first_norm == pytest.approx(expected_norm, rel=1e-5)
    assert second_norm == 0.0


def test_gradient_norm_of_a_diverged_run(batch):
    """It must not seem to be that of an earlier step."""
    model = hugging_face(text_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)

    recorder = fit(model, batch, batch, callbacks=[TokenMonitor()], optimizer=optimizer)

    first_norm, last_norm = figures(recorder, 'gradient_norm')
    assert math.isfinite(first_norm)
    assert math.isnan(last_norm)


def test_gradient_norm_if_no_optimizer_has_some_parameters():
    """Nothing drops the gradients of such parameters, but they change no weight."""
    model = hugging_face(mixture_of_experts())
    embedding = model.model.get_input_embeddings()
    others = [parameter for parameter in model.parameters() if parameter is not embedding.weight]
    optimizer = torch.optim.SGD(others, lr=0.1)
    without_labels = ragged_batch([(4, 0), (6, 0)])

    recorder = fit(model, ragged_batch(), without_labels, callbacks=[TokenMonitor()], optimizer=optimizer)

    first_norm, last_norm = figures(recorder, 'gradient_norm')
    assert first_norm > 0
    assert last_norm == 0


def test_gradient_norm_of_sparse_gradients(batch):
    dense_model = text_model(tie_word_embeddings=False)
    sparse_model = copy.deepcopy(dense_model)
    sparse_model.get_input_embeddings().sparse = True

    def norm_of_step(model):
        recorder = fit(model, loader(batch), callbacks=[TokenMonitor()])
        (norm,) = figures(recorder, 'gradient_norm')
        return norm

    expected_norm = norm_of_step(dense_model)
    assert norm_of_step(sparse_model) == pytest.approx(expected_norm)


class WithoutFloat64(TorchDispatchMode):
    """A device without float64, such as MPS."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        dtype = getattr(result, 'dtype', None)
        if dtype == torch.float64:
            raise TypeError(f'{func} returns float64')
        return result


def test_gradient_norm_without_float64(batch):
    model = text_model()
    outputs = model(input_ids=batch['input_ids'], labels=batch['labels'])
    outputs.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    expected_norm = torch.nn.utils.get_total_norm(gradients)
    norm = GradientNorm()
    state = SimpleNamespace(model=model)

    with WithoutFloat64():
        norm.apply(Event.AFTER_TRAIN_BATCH, state, None)

    expected_square = float(expected_norm) ** 2
    assert norm.square_on_rank() == pytest.approx(expected_square)


@pytest.mark.slow
def test_gradient_norm_under_fsdp1():
    """Its gradients are plain tensors. They hold a part of the gradient on each rank, or nothing if it is frozen."""
    result = launch_json('tests/ranks/fsdp1_norm.py', ranks=2)
    for strategy, norm in result['measured'].items():
        assert norm == pytest.approx(result['expected'], rel=1e-5), strategy
    assert result['measured_part_frozen'] == pytest.approx(result['expected_part_frozen'], rel=1e-5)


# Where users look.


def test_all_figures_are_documented(batch):
    batch['source'] = ['a', 'b', 'a', 'b', 'a', 'b']
    data = token_data_spec(loader(batch, batch))

    recorder = run(data, algorithms=[TokenAccumulation()], microbatch_size=2)

    names = set()
    names_by_source = set()
    for key in recorder.memory.data:
        if key.startswith('token_monitor/source/'):
            _, _, name = key.rpartition('/')
            names_by_source.add(name)
        elif key.startswith('token_monitor/'):
            names.add(key.removeprefix('token_monitor/'))
    assert {'padding_ratio', 'rank_imbalance'} < names
    assert 'loss' in names_by_source

    docstring = TokenMonitor.__doc__
    page = (ROOT / 'docs/watching.md').read_text()
    for name in names:
        _, _, suffix = name.rpartition('_')  # the docstring shortens a second name to `..._p99`
        assert f'/{name}``' in docstring or f'..._{suffix}``' in docstring, name
        assert f'`{name}`' in page, name
    for name in names_by_source:
        assert f'/source/NAME/{name}``' in docstring, name


class BarReader(Callback):
    """Keeps the figures behind the progress bar at the end of each step."""

    def __init__(self):
        self.figures_of_steps = []

    def batch_end(self, state, logger):
        for destination in logger.destinations:
            if isinstance(destination, ProgressBarLogger):
                self.figures_of_steps.append(dict(destination.train_pbar.metrics))


def test_progress_bar_has_three_figures(capfd, batch):
    reader = BarReader()
    data = loader(batch, batch, batch)

    recorder = run(
        data,
        microbatch_size=ROWS,
        progress_bar=True,
        callbacks=[TokenMonitor(), reader],
        max_duration='3ba',
    )

    assert 'loss/train/total=' in capfd.readouterr().err
    assert len(reader.figures_of_steps) == 3
    rates = figures(recorder, 'tokens_per_second')
    padding_ratios = figures(recorder, 'padding_ratio')
    gradient_norms = figures(recorder, 'gradient_norm')
    for step, shown_figures in enumerate(reader.figures_of_steps):
        assert shown_figures['tok/s'] == f'{rates[step]:,.0f}'
        assert shown_figures['padding'] == f'{padding_ratios[step]:.0%}'
        assert shown_figures['|grad|'] == f'{gradient_norms[step]:.3g}'


# Keys of other programs in the batch.

FOREIGN_NAMES = [
    'loss_generating_tokens',
    'total_tokens',
    'real_tokens',
    'num_microbatches',
    'counted_by',
    'packed',
]


@pytest.fixture
def foreign_batch(batch):
    """A batch with entries of other programs. They have the names of our own counts."""
    for name in FOREIGN_NAMES:
        batch[name] = [7] * ROWS
    return batch


def test_monitor_ignores_keys_of_others(foreign_batch):
    recorder = run(loader(foreign_batch), microbatch_size=1, max_duration='1ba')
    assert_figures(recorder, 'loss_generating_share', TOKENS / REAL)
    assert figures(recorder, 'empty_microbatches') == [1]


@pytest.mark.parametrize('make_spec', [DataSpec, token_data_spec])
def test_algorithm_ignores_keys_of_others(make_spec, foreign_batch):
    data = make_spec(loader(foreign_batch))
    own_batch = ragged_batch(SHAPE)
    recorder = assert_exact(text_model(), data, batch=own_batch, callbacks=[TokenMonitor()])
    assert recorder.logged('token_accumulation/loss_generating_tokens') == [TOKENS]
    assert_figures(recorder, 'loss_generating_share', TOKENS / REAL)
