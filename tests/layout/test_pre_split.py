# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches that come in microbatches: read as one, sent between processes, page-locked, copied."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.layout import BatchLayout, PreSplitBatch
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.row_counts import ROWS_KEY, RowCounts, num_samples, rows_of, with_counts, with_rows

PAD, IMAGE = 0, 99


def microbatch(lengths, *, left=False, images=()):
    """Rows of ``10 * length + position``, padded; a 2 x 2 image of ones for each row in `images`."""
    width = max(lengths)
    rows = [[PAD] * (width - n) + [10 * n + k for k in range(n)] for n in lengths]
    rows = rows if left else [[*row[width - n :], *row[: width - n]] for row, n in zip(rows, lengths, strict=True)]
    ids = torch.tensor(rows)
    batch = {
        'input_ids': ids,
        'attention_mask': (ids != PAD).long(),
        'labels': ids.masked_fill(ids == PAD, -100),
        'names': [f'{n}' for n in lengths],
    }
    if images:
        batch['num_images'] = [int(row in images) for row in range(len(lengths))]
        batch['pixel_values'] = torch.ones(len(images), 3, 2, 2, dtype=torch.bfloat16)
    return batch


def equal(first, second):
    assert first.keys() == second.keys()
    for key, value in first.items():
        same = torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        assert same, key


def ready(*microbatches):
    return PreSplitBatch(microbatches, max_tokens=20, indices=[list(range(len(one['names']))) for one in microbatches])


@pytest.mark.parametrize('left', [False, True])
def test_joined_batch_is_collated_at_once(left):
    batch = ready(microbatch([5, 5], left=left), microbatch([2, 3, 1], left=left), microbatch([4], left=left))
    together = microbatch([5, 5, 2, 3, 1, 4], left=left)
    equal(dict(batch), together)
    equal(batch.joined(BatchLayout.infer(batch)), together)
    assert batch['labels'] is batch['labels'], 'joined once'
    assert list(batch) == list(together)
    assert batch.get('missing', 7) == 7
    with pytest.raises(KeyError):
        batch['missing']
    with pytest.raises(TypeError, match='item assignment'):
        batch['labels'] = together['labels']


def test_rows_without_media_bring_none():
    batch = ready(microbatch([4, 4]), {**microbatch([3, 2], images=[1]), 'names': ['3', '2']})
    assert batch['pixel_values'].shape == (1, 3, 2, 2)
    assert 'pixel_values' in batch
    assert len(batch) == 6


def test_counting_joins_no_tensor(monkeypatch):
    batch = ready(microbatch([5, 2]), microbatch([3]))
    monkeypatch.setattr(PreSplitBatch, '_joined_tensor', lambda self, key: pytest.fail(f'joined {key}'))
    assert 'labels' in batch
    assert batch['names'] == ['5', '2', '3']
    counted = with_counts(batch)
    assert [row.loss_tokens for row in rows_of(counted)] == [4, 1, 2]
    assert counted[ROWS_KEY] == rows_of(counted)
    assert num_samples(counted) == num_samples(batch) == 3
    assert ROWS_KEY not in batch


def test_deep_copies_share_nothing():
    batch = ready(microbatch([5, 2]), microbatch([3]))
    copied = copy.deepcopy(batch)
    batch.microbatches[0]['labels'].zero_()
    assert copied.microbatches[0]['labels'].any()
    assert (copied.max_tokens, copied.indices) == (20, [[0, 1], [0]])


def test_counts_travel_with_their_microbatch():
    marks = [RowCounts(), RowCounts(samples=0), RowCounts()]
    counted = with_counts(with_rows(ready(microbatch([5, 2]), microbatch([3])), marks))
    again = pickle.loads(pickle.dumps(counted))
    assert rows_of(again) == rows_of(counted)
    assert [num_samples(part) for part in again.microbatches] == [1, 1]
    assert [row.loss_tokens for row in rows_of(again)] == [4, 0, 2]


def test_pickled_and_back():
    batch = ready(microbatch([5, 2], images=[0]), {**microbatch([3]), 'empty': torch.zeros(0, 4), 'none': None})
    again = pickle.loads(pickle.dumps(batch))
    assert (again.max_tokens, again.indices) == (batch.max_tokens, batch.indices)
    for one, other in zip(batch.microbatches, again.microbatches, strict=True):
        equal(one, other)
    # Composer deep-copies each microbatch of a step: that must not copy the others with it.
    sizes = [value.untyped_storage().nbytes() for value in again.microbatches[0].values() if torch.is_tensor(value)]
    assert sizes == [value.nbytes for value in batch.microbatches[0].values() if torch.is_tensor(value)]


class Made(Dataset):
    """Ready batches of 40 microbatches."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return ready(*(microbatch([index + 1 + k % 3, 2], images=[0]) for k in range(40)))


def as_it_is(batch):
    return batch


def test_batch_from_workers_is_uncopied():
    open_files, batches = len(os.listdir('/proc/self/fd')), []
    for index, batch in enumerate(DataLoader(Made(), batch_size=None, num_workers=2, collate_fn=as_it_is)):
        batches.append(batch)
        for one, other in zip(batch.microbatches, Made()[index].microbatches, strict=True):
            equal(one, other)
        places = [value.data_ptr() for one in batch.microbatches for value in one.values() if torch.is_tensor(value)]
        assert max(places) - min(places) < 8 * 64 * 40, 'side by side in the memory that the worker wrote'
    assert len(batches) == len(Made())
    # Each tensor sent by itself would be a file: 160 a batch.
    assert len(os.listdir('/proc/self/fd')) - open_files < 60


def test_page_locking_keeps_the_microbatches(monkeypatch):
    # Without a GPU torch cannot lock pages: tensors that are asked to be are marked instead.
    locked = []
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda tensor: locked.append(tensor) or tensor.clone())
    batch = ready(microbatch([5, 2], images=[0]), microbatch([3]))
    pinned = batch.pin_memory()
    assert isinstance(pinned, PreSplitBatch)
    assert len(locked) == 7
    for one, other in zip(batch.microbatches, pinned.microbatches, strict=True):
        equal(one, other)
    assert (pinned.max_tokens, pinned.indices) == (batch.max_tokens, batch.indices)


@pytest.mark.parametrize('left', [False, True])
def test_widths_round_up_when_padded(left):
    batch = {**microbatch([5, 2], left=left, images=[0]), 'position_ids': torch.zeros(3, 2, 5)}
    wide = widened(batch, 8)
    expected = microbatch([8, 5, 2], left=left)
    for key in ('input_ids', 'attention_mask', 'labels'):
        assert torch.equal(wide[key], expected[key][1:]), key
    assert wide['position_ids'].shape == (3, 2, 8)
    assert wide['pixel_values'] is batch['pixel_values']
    assert widened(batch, 5)['input_ids'] is batch['input_ids']
    assert widened(batch, 1) is batch


def test_labels_without_ids_keep_their_width():
    """A batch of sounds has no text that the model is given; its labels are as wide as the loader made them."""
    batch = {'input_features': torch.zeros(2, 4, 6), 'labels': torch.ones(2, 5, dtype=torch.long)}
    assert widened(batch, 8) is batch
