# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The split cuts as the sampler planned, as long as the measured rows keep the cap."""

from __future__ import annotations

import itertools

import pytest

from composer_tokacc import token_data_spec
from composer_tokacc.counting import carried
from composer_tokacc.data_spec.replay import replay_cut
from tests.support.text import collate, text_rows
from tests.support.training import loader

LENGTHS = [4, 5, 9, 14, 6, 3]
# Nobody would cut like this by himself, so that a replay cannot be taken for an own cut.
PLANNED = [0, 1, 1, 2, 2, 0]


def split(ids, size, lengths=LENGTHS, **kwargs):
    batch = collate(text_rows([(length, 2) for length in lengths]))
    if ids is not None:
        batch['microbatch_ids'] = ids
    spec = token_data_spec(loader(batch), **kwargs)
    return spec.split_batch(spec.batch_transforms(batch), size)


def real_tokens(microbatches):
    return [carried(microbatch)['real_tokens'] for microbatch in microbatches]


def test_planned_microbatches_are_made_as_planned():
    microbatches = split(PLANNED, 2)
    assert real_tokens(microbatches) == [[4, 3], [5, 9], [14, 6]]
    assert [microbatch['input_ids'].shape for microbatch in microbatches] == [(2, 4), (2, 9), (2, 14)]
    assert all('microbatch_ids' not in microbatch for microbatch in microbatches)


@pytest.mark.parametrize(
    ('ids', 'size', 'kwargs'),
    [
        (PLANNED, 1, {}),  # halved by 'auto': 2 rows of 14 are over a cap of 14
        ([0] * 6, 2, {}),  # lengths were estimated too short
        (PLANNED, 2, {'slot_tokens': 13}),
        (PLANNED, 2, {'regroup': False}),
        (PLANNED[:5], 2, {}),  # a collate function that dropped or added rows
        (None, 2, {}),
    ],
)
def test_other_plans_are_cut_anew_under_the_cap(ids, size, kwargs):
    microbatches = split(ids, size, **kwargs)
    assert real_tokens(microbatches) == real_tokens(split(None, size, **kwargs))
    assert sorted(itertools.chain(*real_tokens(microbatches))) == sorted(LENGTHS)
    budget = size * kwargs.get('slot_tokens', 14)
    for microbatch in microbatches:
        rows, width = microbatch['input_ids'].shape
        assert rows == 1 or rows * width <= budget


def test_rounded_widths_are_held_to_the_cap_as_well():
    batch = {'microbatch_ids': [0, 0, 1]}
    assert replay_cut(batch, [5, 5, 20], 16, width_multiple=8, max_width=20) == [[0, 1], [2]]
    assert replay_cut(batch, [5, 5, 20], 15, width_multiple=8, max_width=20) is None
    assert replay_cut(batch, [5, 5, 7], 15, width_multiple=8, max_width=7) == [[0, 1], [2]]
