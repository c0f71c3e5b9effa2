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
from tests.support.text import one_layer_model, text_rows
from tests.support.training import On, assert_exact, fit

LLAVA = FAMILIES['llava']()


def image_tokens_in(batch) -> int:
    return int((batch['input_ids'] == LLAVA.config.image_token_id).sum())


def labels_in(batch) -> int:
    return int((batch['labels'] != -100).sum())


@dataclass
class CappedRows(Dataset):
    """Rows, and how a test counts the size that has a cap."""

    size: str
    """What has a cap: ``'image_tokens'`` or ``'loss_tokens'``."""
    model: Any
    rows: list[dict[str, Any]]
    count: Callable[[Any], int]
    """Returns the size of a row or of a microbatch."""

    def __post_init__(self):
        self.rows = [{**row, 'sample_ids': [str(number)]} for number, row in enumerate(self.rows)]
        self.layout = BatchLayout.for_model(self.model)
        self.option = f'max_{self.size}'
        # The cap is the size of the largest row, so that no row is over it by itself.
        self.sizes = [self.count(row) for row in self.rows]
        self.cap = max(self.sizes)
        self.lengths = [row['input_ids'].shape[1] for row in self.rows]
        self.width = max(self.lengths)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def batch(self, rows=None):
        """Returns a batch of some rows, by default of all."""
        if rows is None:
            rows = self.rows
        return self.layout.concat(rows, pad_token_id=LLAVA.pad_token_id)

    def spec(self, cap=None, **options):
        """Returns a spec with this cap."""
        return token_data_spec([], layout=self.layout, **{self.option: cap}, **options)

    def sampler(self, table, cap, **options):
        """Returns a sampler of all rows in one step. ``table`` has the size of each row."""
        return RegroupingBatchSampler(
            self,
            lengths=self.lengths,
            global_batch_size=len(self),
            max_tokens=len(self) * self.width,
            **{self.size: table, self.option: cap},
            **options,
        )

    def largest(self, microbatches):
        """Returns the size of the largest microbatch."""
        return max(self.count(microbatch) for microbatch in microbatches)

    def record_sizes(self):
        """Keeps the size of every microbatch that reaches the model."""
        return On(Event.BEFORE_FORWARD, lambda state: self.count(state.batch))


LABELS = CappedRows(
    size='loss_tokens',
    model=one_layer_model(),
    rows=text_rows([(14, 11), (12, 2), (9, 7), (6, 5), (6, 1), (5, 3), (4, 2), (3, 2)]),
    count=labels_in,
)
IMAGES = CappedRows(
    size='image_tokens',
    model=LLAVA.model,
    rows=LLAVA.rows + LLAVA.rows[1:4],
    count=image_tokens_in,
)
for_each_cap = pytest.mark.parametrize('capped_rows', [IMAGES, LABELS], ids=['images', 'labels'])


def ids_of(microbatches):
    """Returns the ids of all samples, sorted."""
    ids = []
    for microbatch in microbatches:
        ids += microbatch['sample_ids']
    return sorted(ids)


@for_each_cap
@pytest.mark.parametrize('regroup', [True, False])
def test_batch_is_cut_under_cap(capped_rows, regroup):
    batch = capped_rows.batch()
    microbatch_size = len(capped_rows)
    spec_without_cap = capped_rows.spec(regroup=regroup)
    spec_with_cap = capped_rows.spec(capped_rows.cap, regroup=regroup)

    uncapped = spec_without_cap.split_batch(batch, microbatch_size)
    capped = spec_with_cap.split_batch(batch, microbatch_size)

    assert capped_rows.largest(uncapped) > capped_rows.cap
    assert capped_rows.largest(capped) == capped_rows.cap
    assert ids_of(uncapped) == ids_of([batch])
    assert ids_of(capped) == ids_of([batch])


@for_each_cap
@pytest.mark.parametrize('microbatch_size', [9, 2])
def test_planned_microbatches_are_cut_again(capped_rows, microbatch_size):
    first_part = capped_rows.batch(capped_rows.rows[:5])
    second_part = capped_rows.batch(capped_rows.rows[5:])
    batch = PreSplitBatch([first_part, second_part], max_tokens=10_000)
    assert capped_rows.largest(batch.microbatches) > capped_rows.cap
    spec = capped_rows.spec(capped_rows.cap, slot_tokens=capped_rows.width)

    microbatches = spec.split_batch(batch, microbatch_size)

    assert capped_rows.largest(microbatches) <= capped_rows.cap
    for microbatch in microbatches:
        assert microbatch['input_ids'].numel() <= microbatch_size * capped_rows.width
    assert ids_of(microbatches) == ids_of(batch.microbatches)


def test_dummy_image_row_keeps_the_cap(two_ranks):
    text = IMAGES.rows[0]
    long_text = IMAGES.rows[4]
    with_images = IMAGES.rows[1:4]
    batch = IMAGES.batch([text, long_text, text, *with_images])
    spec = IMAGES.spec(IMAGES.cap)

    microbatches = spec.split_batch(batch, 3)

    sizes = [image_tokens_in(microbatch) for microbatch in microbatches]
    assert min(sizes) > 0  # every microbatch uses the encoder
    assert max(sizes) <= IMAGES.cap


@pytest.mark.parametrize('packing', [False, True])
@pytest.mark.parametrize(('capped_rows', 'logits'), [(IMAGES, 'auto'), (LABELS, 'all'), (LABELS, 'labels')])
def test_capped_microbatches_are_exact(capped_rows, logits, packing):
    sizes = capped_rows.record_sizes()

    assert_exact(
        capped_rows.model,
        capped_rows.batch(),
        microbatch_size=len(capped_rows),
        packing=packing,
        logits=logits,
        callbacks=[sizes],
        **{capped_rows.option: capped_rows.cap},
    )

    assert len(sizes.values) > 1
    assert sum(sizes.values) == sum(capped_rows.sizes)
    assert max(sizes.values) <= capped_rows.cap


@for_each_cap
@pytest.mark.parametrize(('objective', 'sizes_are_right'), [('ddp', True), ('fsdp', True), ('ddp', False)])
def test_planned_microbatches_keep_the_cap(capped_rows, objective, sizes_are_right):
    """If the table of sizes is wrong, the split cuts the planned microbatches again."""
    table = capped_rows.sizes if sizes_are_right else [0] * len(capped_rows)
    sampler = capped_rows.sampler(table, capped_rows.cap, objective=objective)
    dataloader = RegroupingDataLoader(capped_rows, batch_sampler=sampler, collate_fn=capped_rows.batch)
    planned = next(iter(dataloader)).microbatches
    plan_keeps_the_cap = capped_rows.largest(planned) <= capped_rows.cap
    assert plan_keeps_the_cap == sizes_are_right
    cap = {capped_rows.option: capped_rows.cap}
    data = token_data_spec(dataloader, slot_tokens=capped_rows.width, **cap)
    sizes = capped_rows.record_sizes()

    fit(capped_rows.model, data, microbatch_size=len(capped_rows), callbacks=[sizes])

    assert sum(sizes.values) == sum(capped_rows.sizes)
    assert max(sizes.values) <= capped_rows.cap
    if sizes_are_right:
        assert len(sizes.values) == len(planned)


@for_each_cap
def test_sampler_refuses_row_over_cap(capped_rows):
    with pytest.raises(ValueError, match=rf'`{capped_rows.option}` must be at least the size of the largest sample'):
        capped_rows.sampler(capped_rows.sizes, capped_rows.cap - 1)


def test_exchanged_microbatches_keep_the_cap():
    exchange = partial(
        ExchangingDataLoader,
        LABELS,
        batch_size=len(LABELS),
        collate_fn=LABELS.batch,
        max_tokens=len(LABELS) * LABELS.width,
    )

    [uncapped] = exchange()
    [capped] = exchange(max_loss_tokens=LABELS.cap)

    assert LABELS.largest(uncapped.microbatches) > LABELS.cap
    assert LABELS.largest(capped.microbatches) <= LABELS.cap
    assert ids_of(capped.microbatches) == ids_of(uncapped.microbatches)


@for_each_cap
def test_row_over_the_cap(capped_rows, caplog):
    """Such a row is refused, or it comes into a microbatch by itself."""
    cap = capped_rows.cap - 1
    batch = capped_rows.batch()
    spec = capped_rows.spec(cap)
    warning_spec = capped_rows.spec(cap, on_oversize='warn')
    counted = capped_rows.size.replace('_', ' ')
    message = f'of {capped_rows.cap} {counted}, over the cap of {cap} '

    with pytest.raises(ValueError, match=message + rf'\(`{capped_rows.option}`\)'):
        spec.split_batch(batch, 4)
    with caplog.at_level(logging.WARNING, logger='composer_tokacc'):
        microbatches = warning_spec.split_batch(batch, 4)

    assert message in caplog.text
    over_the_cap = [microbatch for microbatch in microbatches if capped_rows.count(microbatch) > cap]
    assert over_the_cap
    for microbatch in over_the_cap:
        assert len(microbatch['input_ids']) == 1


def test_image_cap_needs_a_model():
    spec = token_data_spec([], max_image_tokens=4)

    with pytest.raises(ValueError, match='Image tokens must be known to count them'):
        spec.split_batch(IMAGES.batch(), 4)


def test_videos_are_counted_with_images():
    case = FAMILIES['qwen2_5_vl']()
    layout = BatchLayout.for_model(case.model)
    image = case.config.image_token_id
    video = case.config.video_token_id
    batch = {'input_ids': torch.tensor([[1, image, video], [1, 1, image]])}

    assert layout.image_tokens_per_row(batch) == [2, 1]
