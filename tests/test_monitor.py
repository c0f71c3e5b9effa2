# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re

import pytest
import torch
from composer.core import Algorithm, Event
from composer_tokacc.memory import GIB, MemoryModel, StaticBytes
from composer_tokacc.memory.fit import ActivationFit

from composer_tokacc import TokenAccumulation, TokenMonitor, token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import loader, logged, train

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2)]
REAL, TOKENS, WIDTH = 41, 23, 14


def run(data, **kwargs):
    monitor = TokenMonitor()
    _, memory, _ = train(text_model(), data, callbacks=[monitor], max_duration='2ba', **kwargs)
    return memory, monitor


def test_stock_split_pays_for_the_width_of_the_device_batch():
    batch = collate(text_rows(SHAPE))
    memory, monitor = run(loader(batch, batch), microbatch_size=1)
    ratio = 1 - REAL / (6 * WIDTH)
    assert logged(memory, 'token_monitor/padding_ratio') == pytest.approx([ratio] * 2)
    assert logged(memory, 'token_monitor/device_batch_padding_ratio') == pytest.approx([ratio] * 2)
    assert logged(memory, 'token_monitor/loss_generating_share') == pytest.approx([TOKENS / REAL] * 2)
    assert logged(memory, 'token_monitor/empty_microbatches') == [1, 1]
    assert logged(memory, 'token_monitor/microbatches') == [6, 6]
    assert logged(memory, 'token_monitor/rank_imbalance') == [1, 1]
    assert all(rate > 0 for rate in logged(memory, 'token_monitor/real_tokens_per_second'))
    # One row a microbatch: sample weights are 1/6, token weights t/T.
    distance = sum(abs(1 / 6 - labelled / TOKENS) for _, labelled in SHAPE) / 2
    assert logged(memory, 'token_monitor/sample_weighting_error') == pytest.approx([distance])
    assert monitor.summary()['sample_weighting_error'] == pytest.approx(distance)


def test_regrouping_split_computes_less_padding():
    batch = collate(text_rows(SHAPE))
    memory, monitor = run(token_data_spec(loader(batch, batch)), algorithms=[TokenAccumulation()], microbatch_size=2)
    ratio, untrimmed = (
        logged(memory, f'token_monitor/{name}') for name in ('padding_ratio', 'device_batch_padding_ratio')
    )
    assert untrimmed == pytest.approx([1 - REAL / (6 * WIDTH)] * 2)
    assert max(ratio) < untrimmed[0]
    summary = monitor.summary()
    assert summary['padding_ratio'] == pytest.approx(ratio[0])
    assert summary['steps'] == 2


def test_one_microbatch_has_no_weighting_error():
    batch = collate(text_rows(SHAPE))
    memory, _ = run(loader(batch, batch), microbatch_size=6)
    assert logged(memory, 'token_monitor/sample_weighting_error') == pytest.approx([0.0])


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


MEMORY = MemoryModel(
    static=StaticBytes(
        parameters=GIB,
        buffers=0,
        gradients=GIB,
        optimizer=2 * GIB,
        optimizer_step=0,
        block=0,
        outside=0,
        trained_outside=0,
        compute_bytes=4,
    ),
    phases={
        'backward': ActivationFit(
            coefficients={'text': {'tokens': GIB / 8}, 'logits': {}, 'vision': {}, 'weights': {}},
            area='never',
            residual=0.0,
        )
    },
    vocab_size=10,
)


@pytest.mark.parametrize('actual', [20 * GIB, 10 * GIB])
def test_attempts_that_ran_out_of_memory_are_told_with_what_was_predicted_for_them(
    actual, tmp_path, caplog, monkeypatch
):
    """Composer halves 6 to 3 to 1 row of 14 tokens: 84 and 42 positions do not fit, 14 do."""
    MEMORY.save(tmp_path / 'memory.json')
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda: actual)
    monitor = TokenMonitor(memory=tmp_path / 'memory.json')
    batch = collate(text_rows(SHAPE))
    with caplog.at_level('WARNING', logger='composer_tokacc'):
        _, memory, trainer = train(
            text_model(), loader(batch), algorithms=[OutOfMemoryUntil(14)], callbacks=[monitor], microbatch_size=6
        )
    assert trainer.state.device_train_microbatch_size == 1
    told = [record.getMessage() for record in caplog.records if 'Out of memory' in record.getMessage()]
    assert [re.search(r'size=(\d), rank 0, (\d) rows of 14 tokens', line).groups() for line in told] == [
        ('6', '6'),
        ('3', '3'),
    ]
    # The model's own bytes, an eighth of a GiB for each position; ids, mask and labels are of no weight.
    predicted = [4 + 84 / 8, 4 + 42 / 8]
    for line, gib in zip(told, predicted, strict=True):
        assert f'predicted {gib:.2f} GiB, actual at least {actual / GIB:.2f} GiB' in line
        assert ('too low' in line) == (actual / GIB > gib)
    assert logged(memory, 'token_monitor/oom_predicted_gib') == pytest.approx(predicted, rel=1e-5)
    assert logged(memory, 'token_monitor/oom_actual_gib') == [actual / GIB] * 2
    # The attempts that failed leave no trace in the step's own figures.
    assert logged(memory, 'token_monitor/microbatches') == [6]
