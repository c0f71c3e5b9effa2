# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``max_image_tokens`` and ``max_loss_tokens`` wherever a cut is made.

Placeholders and labels of every microbatch are counted again, from its tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from composer.core import Event
from torch.utils.data import Dataset

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, token_data_spec
from composer_tokacc.layout import BatchLayout, PreSplitBatch
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.families import FAMILIES
from tests.support.text import text_model, text_rows
from tests.support.training import On, assert_exact, fit

LLAVA = FAMILIES['llava']()


def images_in(batch) -> int:
    return int((batch['input_ids'] == LLAVA.config.image_token_id).sum())


def labels_in(batch) -> int:
    return int((batch['labels'] != -100).sum())


@dataclass
class CappedRows(Dataset):
    """Rows, and how a test counts the size that has a cap."""

    size: str
    model: Any
    rows: list[dict[str, Any]]
    count: Callable[[Any], int]

    def __post_init__(self):
        self.rows = [{**row, 'sample_ids': [str(number)]} for number, row in enumerate(self.rows)]
        self.layout = BatchLayout.for_model(self.model)
        # The cap is the size of the largest row, so that no row is over it by itself.
        self.sizes = [self.count(row) for row in self.rows]
        self.cap = max(self.sizes)
        self.lengths = [row['input_ids'].shape[1] for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def batch(self, rows=None):
        return self.layout.concat(self.rows if rows is None else rows, pad_token_id=LLAVA.pad_token_id)

    def spec(self, cap=None, **options):
        return token_data_spec([], layout=self.layout, **{f'max_{self.size}': cap}, **options)

    def largest(self, microbatches):
        return max(map(self.count, microbatches))


LABELS = CappedRows(
    'loss_tokens',
    text_model(),
    text_rows([(14, 11), (12, 2), (9, 7), (6, 5), (6, 1), (5, 3), (4, 2), (3, 2)]),
    labels_in,
)
IMAGES = CappedRows('image_tokens', LLAVA.model, LLAVA.rows + LLAVA.rows[1:4], images_in)
for_each_cap = pytest.mark.parametrize('capped_rows', [IMAGES, LABELS], ids=['images', 'labels'])


def ids_of(microbatches):
    return sorted(name for microbatch in microbatches for name in microbatch['sample_ids'])


def reached_sizes(capped_rows):
    """Keeps the size of every microbatch that reaches the model."""
    return On(Event.BEFORE_FORWARD, lambda state: capped_rows.count(state.batch))


@for_each_cap
@pytest.mark.parametrize('regroup', [True, False])
def test_batch_is_cut_under_cap(capped_rows, regroup):
    batch = capped_rows.batch()
    size = len(capped_rows)
    free = capped_rows.spec(regroup=regroup).split_batch(batch, size)
    capped = capped_rows.spec(capped_rows.cap, regroup=regroup).split_batch(batch, size)
    assert capped_rows.largest(free) > capped_rows.cap
    assert capped_rows.largest(capped) == capped_rows.cap
    assert ids_of(capped) == ids_of(free) == ids_of([batch])


@for_each_cap
@pytest.mark.parametrize('size', [9, 2])
def test_planned_microbatches_are_cut_again(capped_rows, size):
    batch = PreSplitBatch(
        [capped_rows.batch(capped_rows.rows[:5]), capped_rows.batch(capped_rows.rows[5:])], max_tokens=10_000
    )
    width = max(capped_rows.lengths)
    assert capped_rows.largest(batch.microbatches) > capped_rows.cap
    microbatches = capped_rows.spec(capped_rows.cap, slot_tokens=width).split_batch(batch, size)
    assert capped_rows.largest(microbatches) <= capped_rows.cap
    assert max(microbatch['input_ids'].numel() for microbatch in microbatches) <= size * width
    assert ids_of(microbatches) == ids_of(batch.microbatches)


def test_dummy_image_row_is_under_the_cap(monkeypatch):
    monkeypatch.setattr('composer_tokacc.data_spec.split.get_world_size', lambda: 2)
    monkeypatch.setattr('composer_tokacc.data_spec.split.max_over_ranks', list)
    rows = IMAGES.rows
    batch = IMAGES.batch([rows[0], rows[4], rows[0], *rows[1:4]])
    sizes = [images_in(microbatch) for microbatch in IMAGES.spec(IMAGES.cap).split_batch(batch, 3)]
    assert min(sizes) > 0  # every microbatch uses the encoder
    assert max(sizes) <= IMAGES.cap


@pytest.mark.parametrize('packing', [False, True])
@pytest.mark.parametrize(('capped_rows', 'logits'), [(IMAGES, 'auto'), (LABELS, 'all'), (LABELS, 'labels')])
def test_capped_microbatches_are_exact(capped_rows, logits, packing):
    reached = reached_sizes(capped_rows)
    options = {f'max_{capped_rows.size}': capped_rows.cap, 'packing': packing, 'logits': logits}
    assert_exact(
        capped_rows.model, capped_rows.batch(), microbatch_size=len(capped_rows), callbacks=[reached], **options
    )
    assert len(reached.values) > 1
    assert sum(reached.values) == sum(capped_rows.sizes)
    assert max(reached.values) <= capped_rows.cap


@for_each_cap
@pytest.mark.parametrize('objective', ['ddp', 'fsdp'])
@pytest.mark.parametrize('is_known', [True, False])
def test_planned_microbatches_keep_the_cap(capped_rows, objective, is_known):
    """Without a true table the split cuts them again."""
    plan = partial(
        RegroupingBatchSampler,
        capped_rows,
        lengths=capped_rows.lengths,
        global_batch_size=len(capped_rows),
        max_tokens=len(capped_rows) * max(capped_rows.lengths),
        objective=objective,
        **{capped_rows.size: capped_rows.sizes if is_known else [0] * len(capped_rows)},
    )
    option = f'max_{capped_rows.size}'
    sampler = plan(**{option: capped_rows.cap})
    dataloader = RegroupingDataLoader(capped_rows, batch_sampler=sampler, collate_fn=capped_rows.batch)
    planned = [capped_rows.count(microbatch) for microbatch in next(iter(dataloader)).microbatches]
    assert (max(planned) <= capped_rows.cap) == is_known
    reached = reached_sizes(capped_rows)
    data = token_data_spec(dataloader, slot_tokens=max(capped_rows.lengths), **{option: capped_rows.cap})
    fit(capped_rows.model, data, microbatch_size=len(capped_rows), callbacks=[reached])
    assert sum(reached.values) == sum(capped_rows.sizes)
    assert max(reached.values) <= capped_rows.cap
    if is_known:
        assert len(reached.values) == len(planned)
        with pytest.raises(ValueError, match=rf'`{option}` must be at least the longest sample'):
            plan(**{option: capped_rows.cap - 1})


def test_exchanged_microbatches_keep_the_cap():
    options = {'batch_size': len(LABELS), 'collate_fn': LABELS.batch, 'max_tokens': len(LABELS) * max(LABELS.lengths)}
    [free] = ExchangingDataLoader(LABELS, **options)
    [capped] = ExchangingDataLoader(LABELS, max_loss_tokens=LABELS.cap, **options)
    assert LABELS.largest(free.microbatches) > LABELS.cap
    assert LABELS.largest(capped.microbatches) <= LABELS.cap
    assert ids_of(capped.microbatches) == ids_of(free.microbatches)


@for_each_cap
def test_row_over_the_cap(capped_rows, caplog):
    unit = capped_rows.size.replace('_', ' ')
    words = f'of {capped_rows.cap} {unit}, over the cap of {capped_rows.cap - 1} '
    with pytest.raises(ValueError, match=words + rf'\(`max_{capped_rows.size}`\)'):
        capped_rows.spec(capped_rows.cap - 1).split_batch(capped_rows.batch(), 4)
    with caplog.at_level(logging.WARNING, logger='composer_tokacc'):
        microbatches = capped_rows.spec(capped_rows.cap - 1, on_oversize='warn').split_batch(capped_rows.batch(), 4)
    assert words in caplog.text
    over = [microbatch for microbatch in microbatches if capped_rows.count(microbatch) >= capped_rows.cap]
    assert over
    assert all(len(microbatch['input_ids']) == 1 for microbatch in over)


def test_image_cap_needs_a_model():
    with pytest.raises(ValueError, match='Image tokens must be known to count them'):
        token_data_spec([], max_image_tokens=4).split_batch(IMAGES.batch(), 4)
    with pytest.raises(ValueError, match='`max_image_tokens` must be a positive integer, got: 0'):
        token_data_spec([], max_image_tokens=0)


def test_videos_are_counted_with_images():
    case = FAMILIES['qwen2_5_vl']()
    image, video = case.config.image_token_id, case.config.video_token_id
    batch = {'input_ids': torch.tensor([[1, image, video], [1, 1, image]])}
    assert BatchLayout.for_model(case.model).image_tokens_per_row(batch) == [2, 1]
