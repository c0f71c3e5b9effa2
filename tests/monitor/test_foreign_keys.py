# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches of llm-foundry's collator carry counts of their own, under names that were ours once."""

from __future__ import annotations

import pytest

from composer_tokacc import TokenMonitor, token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import assert_exact, loader, logged, train

SHAPE = [(4, 2), (5, 0), (9, 7), (14, 11), (6, 1), (3, 2)]
REAL, TOKENS = 41, 23
NAMES = ('loss_generating_tokens', 'total_tokens', 'real_tokens', 'num_microbatches', 'counted_by', 'packed')


@pytest.fixture(params=['all names', 'those of llm-foundry'])
def batch(request):
    found = collate(text_rows(SHAPE))
    names = NAMES if request.param == 'all names' else NAMES[:2]
    return {**found, **{name: [7] * len(SHAPE) for name in names}}


def test_monitor_alone_counts_for_itself(batch):
    _, memory, _ = train(text_model(), loader(batch), callbacks=[TokenMonitor()], microbatch_size=1)
    assert logged(memory, 'token_monitor/loss_generating_share') == pytest.approx([TOKENS / REAL])
    assert logged(memory, 'token_monitor/empty_microbatches') == [1]


@pytest.mark.parametrize('split', ['stock', 'ours'])
def test_algorithm_counts_for_itself(split, batch):
    model = text_model()
    data = token_data_spec(loader(batch)) if split == 'ours' else loader(batch)
    recorder = assert_exact(model, data, batch=collate(text_rows(SHAPE)), callbacks=[TokenMonitor()])
    assert recorder.logged('token_accumulation/loss_generating_tokens') == [TOKENS]
    assert recorder.logged('token_monitor/loss_generating_share') == pytest.approx([TOKENS / REAL])
