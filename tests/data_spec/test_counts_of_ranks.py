# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How many microbatches a rank makes of its batch if another rank makes more."""

from __future__ import annotations

import pytest

from composer_tokacc import token_data_spec
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.row_counts import num_samples
from tests.support.text import collate, text_rows
from tests.support.training import loader

NUM_OWN, NUM_OF_OTHER_RANK = 3, 5


@pytest.mark.parametrize(
    ('equal_counts', 'reduces_once', 'expected'),
    [
        (True, False, NUM_OF_OTHER_RANK),
        (True, True, NUM_OF_OTHER_RANK),
        ('auto', False, NUM_OF_OTHER_RANK),
        ('auto', True, NUM_OWN),
        (False, False, NUM_OWN),
        (False, True, NUM_OWN),
    ],
)
def test_counts_are_equal_if_needed(equal_counts, reduces_once, expected, monkeypatch):
    """``'auto'``: ranks need equal counts unless DDP reduces in the last microbatch only."""
    monkeypatch.setattr('composer_tokacc.data_spec.split.get_world_size', lambda: 2)
    monkeypatch.setattr(
        'composer_tokacc.data_spec.split.max_over_ranks',
        lambda values: [max(*values, NUM_OF_OTHER_RANK)] if len(values) == 1 else values,
    )
    batch = collate(text_rows([(6, 3)] * NUM_OWN))
    batches = loader(batch)
    spec = token_data_spec(batches, equal_counts=equal_counts)
    split = split_of(batches)
    split.adopt(split.rules)
    split.reduces_once = reduces_once
    microbatches = spec.split_batch(batch, 1)
    samples = [num_samples(microbatch) for microbatch in microbatches]
    assert samples == [1] * NUM_OWN + [0] * (expected - NUM_OWN)
    assert all((microbatch['labels'] == -100).all() for microbatch in microbatches[NUM_OWN:])
