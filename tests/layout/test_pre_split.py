# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches that come in microbatches: read as one, sent between processes, page-locked, copied."""

from __future__ import annotations

import copy
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.layout import BatchLayout, PreSplitBatch
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.row_counts import ROWS_KEY, RowCounts, attach_row_counts, num_samples, row_counts_of, with_counts
from tests.layout.test_families import assert_same_batch
from tests.support.small_batches import text_batch

for_each_side = pytest.mark.parametrize('side', ['left', 'right'])


def microbatch(lengths, *, side='right', images=()):
    """Returns rows of these lengths. Each row in `images` has an image of 2 x 2 ones."""
    batch = text_batch(lengths, side=side, names=[str(length) for length in lengths])
    if images:
        batch['num_images'] = [int(row in images) for row in range(len(lengths))]
        batch['pixel_values'] = torch.ones(len(images), 3, 2, 2, dtype=torch.bfloat16)
    return batch


def pre_split(*microbatches):
    indices = [list(range(len(microbatch['names']))) for microbatch in microbatches]
    return PreSplitBatch(microbatches, max_tokens=20, indices=indices)


def assert_same_microbatches(batch, expected):
    assert batch.max_tokens == expected.max_tokens
    assert batch.indices == expected.indices
    for microbatch, expected_microbatch in zip(batch.microbatches, expected.microbatches, strict=True):
        assert_same_batch(microbatch, expected_microbatch)


@for_each_side
def test_reads_as_one_batch(side):
    microbatches = [microbatch(lengths, side=side) for lengths in ([5, 5], [2, 3, 1], [4])]
    batch = pre_split(*microbatches)
    collated_at_once = microbatch([5, 5, 2, 3, 1, 4], side=side)
    assert_same_batch(dict(batch), collated_at_once)
    assert_same_batch(batch.joined(BatchLayout.infer(batch)), collated_at_once)
    assert list(batch) == list(collated_at_once)
    assert batch['labels'] is batch['labels'], 'joined once'


def test_padding_is_no_hidden_placeholder():
    """LLaMA-Factory hides the placeholders of a dummy image behind the first row of a batch without images."""
    placeholder = 99
    with_dummy = text_batch([3], width=5)
    with_dummy['input_ids'][0, 3] = placeholder
    layout = BatchLayout.infer(with_dummy)
    layout = BatchLayout(family=layout.family, config=SimpleNamespace(image_token_id=placeholder))
    joined = PreSplitBatch([with_dummy, text_batch([7])], max_tokens=20).joined(layout)
    assert int(layout.is_placeholder(joined).sum()) == 1
    wider = widened(with_dummy, 8)  # in a worker, which does not know the placeholder
    assert int(layout.is_placeholder(wider).sum()) == 1


def test_reads_numbers_of_patches_of_all_microbatches():
    """Molmo 2 counts patches over the batch, so numbers of the second microbatch go on after those of the first."""
    one_image = text_batch(
        [4],
        pixel_values=torch.rand(1, 3, 5),  # (images, patches, values)
        image_token_pooling=torch.arange(3)[:, None],
    )
    two_images = text_batch(
        [4, 4],
        pixel_values=torch.rand(2, 3, 5),
        image_token_pooling=torch.arange(6)[:, None],
    )
    batch = PreSplitBatch([one_image, two_images], max_tokens=20)
    assert batch['image_token_pooling'].flatten().tolist() == list(range(9))


def test_reads_patches_that_lie_side_by_side():
    """MiniCPM-V has the patches of all images in one row of patches, and a tensor with the size of each image."""
    microbatches = []
    for num_patches in (2, 3):
        pixels = torch.rand(1, 3, 2, 2 * num_patches)  # (1, colours, side of a patch, side * patches)
        sizes = torch.tensor([[1, num_patches]])
        microbatches.append(text_batch([4], pixel_values=pixels, target_sizes=sizes))
    batch = PreSplitBatch(microbatches, max_tokens=20)
    for key, dim in (('pixel_values', 3), ('target_sizes', 0)):
        expected = torch.cat([microbatch[key] for microbatch in microbatches], dim)
        assert torch.equal(batch[key], expected), key


def test_is_a_read_only_mapping():
    batch = pre_split(microbatch([5, 2]))
    assert batch.get('missing', 7) == 7
    with pytest.raises(KeyError):
        batch['missing']
    with pytest.raises(TypeError, match='item assignment'):
        batch['labels'] = torch.zeros(2, 5)


def test_tuples_of_rows_are_joined():
    """``zip(*samples)`` in a collator makes tuples."""
    batch = pre_split(microbatch([5, 2]), microbatch([3]))
    as_tuples = batch.map(lambda rows: {**rows, 'names': tuple(rows['names'])})
    assert as_tuples['names'] == ['5', '2', '3']


def test_rows_without_media_bring_none():
    batch = pre_split(microbatch([4, 4]), microbatch([3, 2], images=[1]))
    assert batch['pixel_values'].shape == (1, 3, 2, 2)
    assert 'pixel_values' in batch
    assert len(batch) == 6


def test_lists_have_a_value_per_row():
    """Also if a microbatch lacks the list: its rows must not get the values of others."""
    last = {**microbatch([3, 2], images=[1]), 'sources': ['charts', 'tables']}
    batch = pre_split(microbatch([4, 4]), last)
    assert batch['num_images'] == [0, 0, 0, 1]
    assert batch['sources'] == [None, None, 'charts', 'tables']


def test_empty_list_adds_no_value():
    """A list with one value per image: the rows of a microbatch without images must not get one."""
    text = {**microbatch([4, 4]), 'files': []}
    images = {**microbatch([3, 2], images=[1]), 'files': ['chart.png']}
    assert pre_split(text, images)['files'] == ['chart.png']


def test_counting_joins_no_tensor(monkeypatch):
    batch = pre_split(microbatch([5, 2]), microbatch([3]))
    monkeypatch.setattr(PreSplitBatch, '_joined_tensor', lambda self, key, layout: pytest.fail(f'joined {key}'))
    assert 'labels' in batch
    assert batch['names'] == ['5', '2', '3']
    counted = with_counts(batch)
    assert [row.loss_tokens for row in row_counts_of(counted)] == [4, 1, 2]
    assert counted[ROWS_KEY] == row_counts_of(counted)
    assert num_samples(counted) == num_samples(batch) == 3
    assert ROWS_KEY not in batch


# Copies.


def test_deep_copies_share_nothing():
    batch = pre_split(microbatch([5, 2]), microbatch([3]))
    copied = copy.deepcopy(batch)
    assert_same_microbatches(copied, batch)
    batch.microbatches[0]['labels'].zero_()
    assert copied.microbatches[0]['labels'].any()


def test_counts_travel_with_their_microbatch():
    batch = pre_split(microbatch([5, 2]), microbatch([3]))
    counted = with_counts(attach_row_counts(batch, [RowCounts(), RowCounts(samples=0), RowCounts()]))
    received = pickle.loads(pickle.dumps(counted))
    assert row_counts_of(received) == row_counts_of(counted)
    assert [row.loss_tokens for row in row_counts_of(received)] == [4, 0, 2]
    assert [num_samples(part) for part in received.microbatches] == [1, 1]


def test_pickled_and_back():
    last = {**microbatch([3]), 'empty': torch.zeros(0, 4), 'none': None}
    batch = pre_split(microbatch([5, 2], images=[0]), last)
    received = pickle.loads(pickle.dumps(batch))
    assert_same_microbatches(received, batch)
    # Composer deep-copies each microbatch of a step, which copies whole storages: they must not be shared.
    for key in ('input_ids', 'attention_mask', 'labels', 'pixel_values'):
        tensor = received.microbatches[0][key]
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


SPECIAL_TENSORS = {
    'sparse': lambda: torch.eye(2).to_sparse(),
    'nested': lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    'quantized': lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
@pytest.mark.parametrize('kind', SPECIAL_TENSORS)
def test_worker_sends_tensors_to_be_refused(kind):
    """The main process says which tensor cannot be divided among rows. An error in a worker would not say it."""
    special = SPECIAL_TENSORS[kind]()
    state = pre_split({**microbatch([5, 2]), 'special': special}).__getstate__()
    assert state['microbatches'][0]['special'] is special


class BatchesOfManyMicrobatches(Dataset):
    """Six batches of 40 microbatches with 4 tensors each."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        microbatches = []
        for number in range(40):
            length = index + 1 + number % 3
            microbatches.append(microbatch([length, 2], images=[0]))
        return pre_split(*microbatches)


def uncollated(batch):
    return batch


def test_batch_from_workers_is_uncopied():
    dataset = BatchesOfManyMicrobatches()
    num_open_files = len(os.listdir('/proc/self/fd'))
    batches = list(DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=uncollated))
    # Each tensor sent by itself would be a file: 160 a batch.
    assert len(os.listdir('/proc/self/fd')) - num_open_files < 60
    assert len(batches) == len(dataset)
    most_bytes_of_tensor = 8 * 8 * 2  # 2 rows of at most 8 numbers of 8 bytes
    for index, batch in enumerate(batches):
        assert_same_microbatches(batch, dataset[index])
        addresses = [part['labels'].data_ptr() for part in batch.microbatches]
        distance = max(addresses) - min(addresses)
        assert distance < 40 * 4 * most_bytes_of_tensor, 'side by side in the memory that the worker wrote'


def test_page_locking_keeps_the_microbatches(monkeypatch):
    """Without a GPU torch cannot lock pages: the test counts which tensors it asks to lock."""
    locked = []

    def pin_memory(tensor):
        locked.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, 'pin_memory', pin_memory)
    batch = pre_split(microbatch([5, 2], images=[0]), microbatch([3]))
    pinned = batch.pin_memory()
    assert isinstance(pinned, PreSplitBatch)
    assert len(locked) == 4 + 3  # only the first microbatch has images
    assert_same_microbatches(pinned, batch)


# Widths.


@for_each_side
def test_widths_round_up_when_padded(side):
    batch = microbatch([5, 2], side=side, images=[0])
    batch['position_ids'] = torch.zeros(3, 2, 5)
    wide = widened(batch, 8)
    expected = text_batch([5, 2], side=side, width=8)
    for key, value in expected.items():
        assert torch.equal(wide[key], value), key
    assert wide['position_ids'].shape == (3, 2, 8)
    assert wide['pixel_values'] is batch['pixel_values']
    assert widened(batch, 5)['input_ids'] is batch['input_ids']
    assert widened(batch, 1) is batch


def test_labels_without_ids_keep_their_width():
    """A batch of audio has no text as input. Its labels stay as wide as the loader made them."""
    batch = {'input_features': torch.zeros(2, 4, 6), 'labels': torch.ones(2, 5, dtype=torch.long)}
    assert widened(batch, 8) is batch


@pytest.mark.parametrize('shape', [(2, 5, 4), (1, 5)], ids=['of each row', 'shared by the rows'])
def test_unknown_entries_keep_the_width(shape):
    """Boxes of the tokens (LayoutLM) would keep their width, so the ids keep it, too."""
    batch = microbatch([5, 2])
    batch['bbox'] = torch.zeros(shape)
    assert widened(batch, 8) is batch
