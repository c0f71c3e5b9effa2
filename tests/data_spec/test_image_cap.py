# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``max_image_tokens`` wherever a cut is made: placeholders of every microbatch are counted again, from its ids."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from composer.core import Callback, Event
from torch.utils.data import Dataset

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, token_data_spec
from composer_tokacc.layout import BatchLayout, PreSplitBatch
from composer_tokacc.planning import pack_lengths
from tests.support.families import FAMILIES
from tests.support.training import assert_exact, fit

CASE = FAMILIES['llava']()
LAYOUT = BatchLayout.for_model(CASE.model)
ROWS = CASE.rows + CASE.rows[1:4]


def images_in(batch) -> int:
    return int((batch['input_ids'] == CASE.config.image_token_id).sum())


CAP = max(map(images_in, ROWS))
"""That of the row with most, so that none is over it by itself."""


def joined(rows=None):
    return LAYOUT.concat(ROWS if rows is None else rows, pad_token_id=CASE.pad_token_id)


def ids_of(microbatches):
    return sorted(name for microbatch in microbatches for name in microbatch['sample_ids'])


class Reached(Callback):
    """Image tokens of every microbatch that reaches the model, over all steps."""

    def __init__(self):
        self.counts = []

    def run_event(self, event, state, logger):
        if event == Event.BEFORE_FORWARD and state.model.training:
            self.counts.append(images_in(state.batch))


@pytest.mark.parametrize('kwargs', [{}, {'regroup': False}])
def test_foreign_batch_under_both_caps(kwargs):
    free, capped = (
        token_data_spec([], layout=LAYOUT, max_image_tokens=cap, **kwargs).split_batch(joined(), len(ROWS))
        for cap in (None, CAP)
    )
    assert max(map(images_in, free)) > CAP
    assert max(map(images_in, capped)) == CAP
    assert ids_of(capped) == ids_of(free) == ids_of([joined()])


@pytest.mark.parametrize('size', [len(ROWS), 2])
def test_pre_split_batch_under_both_caps(size):
    batch = PreSplitBatch([joined(ROWS[:5]), joined(ROWS[5:])], max_tokens=10_000)
    width = max(one['input_ids'].shape[1] for one in batch.microbatches)
    assert min(map(images_in, batch.microbatches)) > CAP
    spec = token_data_spec([], layout=LAYOUT, slot_tokens=width, max_image_tokens=CAP)
    microbatches = spec.split_batch(batch, size)
    assert max(map(images_in, microbatches)) <= CAP
    assert max(one['input_ids'].numel() for one in microbatches) <= size * width
    assert ids_of(microbatches) == ids_of(batch.microbatches)


def test_dummy_image_row_under_the_cap(monkeypatch):
    monkeypatch.setattr('composer_tokacc.data_spec.split.get_world_size', lambda: 2)
    monkeypatch.setattr('composer_tokacc.data_spec.split.max_over_ranks', list)
    batch = joined([ROWS[0], ROWS[4], ROWS[0], *ROWS[1:4]])
    spec = token_data_spec([], layout=LAYOUT, max_image_tokens=CAP)
    counts = [images_in(one) for one in spec.split_batch(batch, 3)]
    assert min(counts) > 0  # every microbatch uses the tower
    assert max(counts) <= CAP


def test_packed_groups_keep_both_caps():
    lengths, images = [9, 8, 7, 3, 3, 2], [6, 6, 0, 2, 0, 2]
    groups = pack_lengths(lengths, 20, images, 8)
    assert sorted(row for group in groups for row in group) == list(range(6))
    assert all(sum(images[row] for row in group) <= 8 and sum(lengths[row] for row in group) <= 20 for group in groups)
    assert any(sum(images[row] for row in group) > 8 for group in pack_lengths(lengths, 20))


@pytest.mark.parametrize('packing', [False, True])
def test_every_microbatch_keeps_the_cap(packing):
    reached = Reached()
    assert_exact(
        CASE.model, joined(), max_image_tokens=CAP, packing=packing, microbatch_size=len(ROWS), callbacks=[reached]
    )
    assert len(reached.counts) > 1
    assert sum(reached.counts) == images_in(joined())
    assert max(reached.counts) <= CAP


class Samples(Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


def test_planned_microbatches_keep_the_cap():
    lengths = [row['input_ids'].shape[1] for row in ROWS]
    for table in (list(map(images_in, ROWS)), [0] * len(ROWS)):
        sampler = RegroupingBatchSampler(
            Samples(),
            lengths=lengths,
            image_tokens=table,
            global_batch_size=len(ROWS),
            max_image_tokens=CAP,
            max_tokens=len(ROWS) * max(lengths),
            num_replicas=1,
            rank=0,
        )
        collate = partial(LAYOUT.concat, pad_token_id=CASE.pad_token_id)
        dataloader = RegroupingDataLoader(Samples(), batch_sampler=sampler, collate_fn=collate)
        planned = [images_in(one) for one in next(iter(dataloader)).microbatches]
        assert (max(planned) <= CAP) == any(table)
        reached = Reached()
        data = token_data_spec(dataloader, slot_tokens=max(lengths), max_image_tokens=CAP)
        fit(CASE.model, data, microbatch_size=len(ROWS), callbacks=[reached])
        assert sum(reached.counts) == images_in(joined())
        assert max(reached.counts) <= CAP


def test_row_over_the_cap(caplog):
    words = f'of {CAP} image tokens, over the cap of {CAP - 1} '
    with pytest.raises(ValueError, match=words + r'\(`max_image_tokens`\)'):
        token_data_spec([], layout=LAYOUT, max_image_tokens=CAP - 1).split_batch(joined(), 4)
    spec = token_data_spec([], layout=LAYOUT, max_image_tokens=CAP - 1, on_oversize='warn')
    with caplog.at_level(logging.WARNING, logger='composer_tokacc'):
        microbatches = spec.split_batch(joined(), 4)
    assert words in caplog.text
    over = [one for one in microbatches if images_in(one) >= CAP]
    assert over
    assert all(len(one['input_ids']) == 1 for one in over)


def test_cap_needs_a_model():
    with pytest.raises(ValueError, match='Image tokens must be known to count them'):
        token_data_spec([], max_image_tokens=4).split_batch(joined(), 4)
    with pytest.raises(ValueError, match='`max_image_tokens` must be a positive integer, got: 0'):
        token_data_spec([], max_image_tokens=0)


def test_videos_are_counted_with_images():
    case = FAMILIES['qwen2_5_vl']()
    layout = BatchLayout.for_model(case.model)
    ids = torch.tensor(
        [[1, case.config.image_token_id, case.config.video_token_id], [1, 1, case.config.image_token_id]]
    )
    assert layout.image_tokens_per_row({'input_ids': ids}) == [2, 1]
