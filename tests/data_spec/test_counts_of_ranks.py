# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How many microbatches a rank makes of its batch if another rank makes more."""

from __future__ import annotations

import pytest

from composer_tokacc import token_data_spec
from composer_tokacc.data_spec import split
from composer_tokacc.row_counts import num_samples
from tests.support.text import ragged_batch
from tests.support.training import loader

NUM_ROWS, NUM_OF_OTHER_RANK = 3, 5


@pytest.mark.parametrize(
    ('equal_counts', 'reduces_once', 'expected'),
    [
        (True, False, NUM_OF_OTHER_RANK),
        (True, True, NUM_OF_OTHER_RANK),
        ('auto', False, NUM_OF_OTHER_RANK),
        ('auto', True, NUM_ROWS),
        (False, False, NUM_ROWS),
        (False, True, NUM_ROWS),
    ],
)
def test_counts_are_equal_if_needed(equal_counts, reduces_once, expected, two_ranks, monkeypatch):
    """``'auto'``: ranks need equal counts unless DDP reduces in the last microbatch only."""

    def max_over_ranks(values):
        is_count = len(values) == 1
        return [max(*values, NUM_OF_OTHER_RANK)] if is_count else values

    monkeypatch.setattr(split, 'max_over_ranks', max_over_ranks)
    batch = ragged_batch([(6, 3)] * NUM_ROWS)
    spec = token_data_spec(loader(batch), equal_counts=equal_counts)
    microbatch_split = split.split_of(spec.dataloader)
    microbatch_split.adopt(microbatch_split.rules)
    microbatch_split.reduces_once = reduces_once
    microbatches = spec.split_batch(batch, 1)
    samples = [num_samples(microbatch) for microbatch in microbatches]
    assert samples == [1] * NUM_ROWS + [0] * (expected - NUM_ROWS)
    for empty in microbatches[NUM_ROWS:]:
        assert (empty['labels'] == -100).all()
