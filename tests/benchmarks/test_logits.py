# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of logits at labels, with a tiny model."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from benchmarks import logits
from composer_tokacc import TokenAccumulation

SHAPE = logits.Shape(
    vocabulary=512,
    hidden_size=32,
    inner_size=64,
    num_layers=1,
)


@pytest.fixture
def batches():
    lengths = np.array([60, 80, 100])
    return logits.make_batches(SHAPE, lengths, num_steps=2)


def test_answers_end_the_rows(batches):
    for batch in batches:
        has_label = batch['labels'] != -100
        num_labels = has_label.sum(1)
        assert num_labels.min() >= 4
        assert num_labels.max() <= 48
        last = batch['attention_mask'].sum(1) - 1
        assert has_label.gather(1, last[:, None]).all()
        assert not (has_label & (batch['attention_mask'] == 0)).any()


def test_stock_composer_keeps_all_logits(batches):
    speed, saved_mib = logits.measure('stock', SHAPE, batches)
    assert speed > 0
    width = batches[0]['input_ids'].shape[1]
    bytes_of_logits = 4 * logits.MICROBATCH * width * SHAPE.vocabulary
    assert saved_mib > bytes_of_logits / 2**20


@pytest.mark.skipif(
    'logits' not in inspect.signature(TokenAccumulation).parameters,
    reason='TokenAccumulation has no argument `logits`',
)
def test_logits_at_labels_keep_less_memory(batches):
    _, all_mib = logits.measure('all', SHAPE, batches)
    _, auto_mib = logits.measure('auto', SHAPE, batches)
    assert auto_mib < all_mib
