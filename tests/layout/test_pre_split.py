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
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset, default_convert

from composer_tokacc.layout import BatchLayout, PreSplitBatch, microbatches_of
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.row_counts import ROWS_KEY, RowCounts, attach_row_counts, num_samples, row_counts_of, with_counts
from tests.layout.test_families import assert_same_batch
from tests.support.small_batches import text_batch

for_each_side = pytest.mark.parametrize('side', ['left', 'right'])


def microbatch(lengths, *, side='right', images=(), **entries):
    """Returns rows of these lengths, named after them. Each row in ``images`` has an image of 2 x 2 ones."""
    batch = text_batch(lengths, side=side)
    batch['names'] = [str(length) for length in lengths]
    if images:
        num_images = [0] * len(lengths)
        for row in images:
            num_images[row] = 1
        batch['num_images'] = num_images
        batch['pixel_values'] = torch.ones(len(images), 3, 2, 2, dtype=torch.bfloat16)
    return {**batch, **entries}


def pre_split(*microbatches):
    """Returns a pre-split batch of these microbatches. The indices of the samples begin with 0 in each of them."""
    indices = []
    for rows in microbatches:
        num_rows = len(rows['names'])
        indices.append(list(range(num_rows)))
    return PreSplitBatch(microbatches, max_tokens=20, indices=indices)


def sent_to_another_process(batch):
    pickled = pickle.dumps(batch)
    return pickle.loads(pickled)


def loss_tokens_of_rows(batch):
    """Returns the number of loss tokens in the counts of each row."""
    return [row.loss_tokens for row in row_counts_of(batch)]


def assert_same_microbatches(batch, expected):
    assert batch.max_tokens == expected.max_tokens
    assert batch.indices == expected.indices
    for microbatch, expected_microbatch in zip(batch.microbatches, expected.microbatches, strict=True):
        assert_same_batch(microbatch, expected_microbatch)


@for_each_side
def test_reads_as_one_batch(side):
    two_rows = microbatch([5, 5], side=side)
    three_rows = microbatch([2, 3, 1], side=side)
    one_row = microbatch([4], side=side)
    collated_at_once = microbatch([5, 5, 2, 3, 1, 4], side=side)

    batch = pre_split(two_rows, three_rows, one_row)
    layout = BatchLayout.infer(batch)

    assert_same_batch(dict(batch), collated_at_once)
    assert_same_batch(batch.joined(layout), collated_at_once)
    assert list(batch) == list(collated_at_once)
    assert batch['labels'] is batch['labels'], 'joined once'


@pytest.mark.parametrize(
    ('side', 'column_of_placeholder'),
    [
        pytest.param('left', 1, id='left'),
        pytest.param('right', 3, id='right'),
    ],
)
def test_padding_is_no_hidden_placeholder(side, column_of_placeholder):
    """If a batch has no image, LLaMA-Factory hides placeholders of a dummy image between text and padding."""
    placeholder = 99
    with_dummy = text_batch([3], side=side, width=5)
    with_dummy['input_ids'][0, column_of_placeholder] = placeholder
    longer_row = text_batch([7])
    family = BatchLayout.infer(with_dummy).family
    config = SimpleNamespace(image_token_id=placeholder)
    layout = BatchLayout(family=family, config=config)
    batch = PreSplitBatch([with_dummy, longer_row], max_tokens=20)

    joined = batch.joined(layout)
    wider = widened(with_dummy, 8)  # in a worker, which does not know the placeholder

    # New padding repeats the outermost hidden id, a pad, and not the placeholder.
    assert layout.image_tokens_per_row(joined) == [1, 0]
    assert layout.image_tokens_per_row(wider) == [1]


def test_ids_of_another_type():
    """A custom model may have ids that are no tensor. They tell no id for padding."""
    short_row = {
        'input_ids': ['ab'],
        'labels': torch.tensor([[1, 2]]),
    }
    long_row = {
        'input_ids': ['abc'],
        'labels': torch.tensor([[1, 2, 3]]),
    }

    batch = PreSplitBatch([short_row, long_row], max_tokens=20)

    assert batch['labels'].tolist() == [
        [1, 2, -100],
        [1, 2, 3],
    ]


def test_reads_patch_numbers_of_all_microbatches():
    """Molmo 2 counts patches over the batch, so numbers of the second microbatch go on after those of the first."""
    one_image = text_batch([4])
    one_image['pixel_values'] = torch.rand(1, 3, 5)  # (images, patches, values)
    one_image['image_token_pooling'] = torch.arange(3)[:, None]
    two_images = text_batch([4, 4])
    two_images['pixel_values'] = torch.rand(2, 3, 5)
    two_images['image_token_pooling'] = torch.arange(6)[:, None]

    batch = PreSplitBatch([one_image, two_images], max_tokens=20)

    pooling = batch['image_token_pooling'].flatten()
    assert pooling.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_reads_patches_side_by_side():
    """MiniCPM-V has the patches of all images in one row of patches, and a tensor with the size of each image."""
    pixels_of_small = torch.rand(1, 3, 2, 4)  # (1, colours, side of a patch, 2 patches of side 2)
    pixels_of_large = torch.rand(1, 3, 2, 6)
    small_image = text_batch([4], pixel_values=pixels_of_small)
    large_image = text_batch([4], pixel_values=pixels_of_large)
    small_image['target_sizes'] = torch.tensor([[1, 2]])
    large_image['target_sizes'] = torch.tensor([[1, 3]])

    batch = PreSplitBatch([small_image, large_image], max_tokens=20)

    expected_pixels = torch.cat([pixels_of_small, pixels_of_large], dim=3)
    assert torch.equal(batch['pixel_values'], expected_pixels)
    assert batch['target_sizes'].tolist() == [
        [1, 2],
        [1, 3],
    ]


def test_is_a_read_only_mapping():
    batch = pre_split(microbatch([5, 2]))

    assert batch.get('missing', 7) == 7
    with pytest.raises(KeyError):
        batch['missing']
    with pytest.raises(TypeError, match=r'item assignment.*a new .labels'):
        batch['labels'] = torch.zeros(2, 5)


def test_changed_copies_are_refused():
    """A callback may read the batch, but the model would not see what it writes."""
    batch = pre_split(microbatch([5, 2]), microbatch([3]))

    batch['labels']
    assert microbatches_of(batch) is batch.microbatches

    batch['labels'][:, 0] = -100
    with pytest.raises(ValueError, match=r"The entries \['labels'\] .* are copies"):
        microbatches_of(batch)
    assert microbatches_of(copy.deepcopy(batch))  # it has no copies yet


def test_written_tensor_without_rows_is_no_copy():
    """It is the tensor of a microbatch, so the model sees what is written."""
    batch = pre_split({**microbatch([5, 2]), 'temperature': torch.tensor(1.0)})
    assert batch['temperature'] is batch.microbatches[0]['temperature']
    batch['temperature'].fill_(2)
    assert microbatches_of(batch) is batch.microbatches


def test_tuples_of_rows_are_joined():
    """``zip(*samples)`` in a collator makes tuples."""
    two_rows = microbatch([5, 2], names=('5', '2'))
    one_row = microbatch([3], names=('3',))

    batch = pre_split(two_rows, one_row)

    assert batch['names'] == ['5', '2', '3']


def test_rows_without_media_bring_none():
    without_images = microbatch([4, 4])
    with_image = microbatch([3, 2], images=[1])

    batch = pre_split(without_images, with_image)

    assert batch['pixel_values'].shape == (1, 3, 2, 2)
    assert 'pixel_values' in batch
    assert len(batch) == 6


def test_lists_have_a_value_per_row():
    """Also if a microbatch lacks the list: its rows must not get the values of others."""
    without_lists = microbatch([4, 4])
    with_lists = microbatch([3, 2], images=[1])
    with_lists['sources'] = ['charts', 'tables']

    batch = pre_split(without_lists, with_lists)

    assert batch['num_images'] == [0, 0, 0, 1]
    assert batch['sources'] == [None, None, 'charts', 'tables']


def test_empty_list_adds_no_value():
    """A list with one value per image: the rows of a microbatch without images must not get one."""
    text = microbatch([4, 4], files=[])
    images = microbatch([3, 2], images=[1], files=['chart.png'])

    batch = pre_split(text, images)

    assert batch['files'] == ['chart.png']


def test_counting_joins_no_tensor(monkeypatch):
    def fail_to_join(self, key, layout):
        pytest.fail(f'joined {key}')

    monkeypatch.setattr(PreSplitBatch, '_joined_tensor', fail_to_join)
    batch = pre_split(microbatch([5, 2]), microbatch([3]))

    counted = with_counts(batch)

    assert 'labels' in batch
    assert batch['names'] == ['5', '2', '3']
    assert loss_tokens_of_rows(counted) == [4, 1, 2]  # the first label of a row is not predicted
    assert counted[ROWS_KEY] == row_counts_of(counted)
    assert num_samples(counted) == 3
    assert num_samples(batch) == 3
    assert ROWS_KEY not in batch


# Copies.


def test_deep_copies_share_nothing():
    batch = pre_split(microbatch([5, 2]), microbatch([3]))

    copied = copy.deepcopy(batch)

    assert_same_microbatches(copied, batch)
    labels = batch.microbatches[0]['labels']
    labels_of_copy = copied.microbatches[0]['labels']
    labels.zero_()
    assert labels_of_copy.any()


def test_counts_travel_with_their_microbatch():
    """The second row is a repeated sample, which counts as no sample and has no loss."""
    batch = pre_split(microbatch([5, 2]), microbatch([3]))
    repeated_sample = RowCounts(samples=0)
    with_row_counts = attach_row_counts(batch, [RowCounts(), repeated_sample, RowCounts()])
    counted = with_counts(with_row_counts)

    received = sent_to_another_process(counted)

    first, second = received.microbatches
    assert row_counts_of(received) == row_counts_of(counted)
    assert loss_tokens_of_rows(received) == [4, 0, 2]
    assert num_samples(first) == 1
    assert num_samples(second) == 1


def test_pickled_and_back():
    with_image = microbatch([5, 2], images=[0])
    with_empty_entries = microbatch([3], empty=torch.zeros(0, 4), none=None)
    batch = pre_split(with_image, with_empty_entries)

    received = sent_to_another_process(batch)

    assert_same_microbatches(received, batch)
    # Composer deep-copies each microbatch of a step, which copies whole storages: they must not be shared.
    received_with_image = received.microbatches[0]
    for key in ('input_ids', 'attention_mask', 'labels', 'pixel_values'):
        tensor = received_with_image[key]
        storage = tensor.untyped_storage()
        assert storage.nbytes() == tensor.nbytes


def special_tensor(kind):
    if kind == 'sparse':
        return torch.eye(2).to_sparse()
    if kind == 'nested':
        rows = [torch.ones(2), torch.ones(3)]
        return torch.nested.nested_tensor(rows)
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors')
@pytest.mark.parametrize('kind', ['sparse', 'nested', 'quantized'])
def test_worker_sends_tensors_to_be_refused(kind):
    """The main process says which tensor cannot be divided among rows. An error in a worker would not say it."""
    special = special_tensor(kind)
    batch = pre_split(microbatch([5, 2], special=special))

    state = batch.__getstate__()

    [sent_microbatch] = state['microbatches']
    assert sent_microbatch['special'] is special


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


def num_open_files():
    return len(os.listdir('/proc/self/fd'))


def test_batch_from_workers_is_uncopied():
    """A worker writes all tensors of a batch side by side into one file of shared memory."""
    dataset = BatchesOfManyMicrobatches()
    loader = DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=uncollated)
    files_before = num_open_files()

    batches = list(loader)

    # Each tensor sent by itself would be a file: 160 a batch.
    assert num_open_files() - files_before < 60
    assert len(batches) == len(dataset)
    most_bytes_of_tensor = 8 * 8 * 2  # 2 rows of at most 8 numbers of 8 bytes
    most_bytes_of_batch = 40 * 4 * most_bytes_of_tensor
    for index, batch in enumerate(batches):
        assert_same_microbatches(batch, dataset[index])
        addresses = [part['labels'].data_ptr() for part in batch.microbatches]
        distance = max(addresses) - min(addresses)
        assert distance < most_bytes_of_batch


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
    """A width of 5 is a multiple of 5 and of 1 already, so the batch is not copied."""
    positions = torch.zeros(3, 2, 5)
    batch = microbatch([5, 2], side=side, images=[0], position_ids=positions)
    text_of_width_8 = text_batch([5, 2], side=side, width=8)

    wide = widened(batch, 8)
    as_wide_as_before = widened(batch, 5)

    for key, expected in text_of_width_8.items():
        assert torch.equal(wide[key], expected), key
    assert wide['position_ids'].shape == (3, 2, 8)
    assert wide['pixel_values'] is batch['pixel_values']
    assert as_wide_as_before['input_ids'] is batch['input_ids']
    assert widened(batch, 1) is batch


def test_labels_without_ids_keep_their_width():
    """A batch of audio has no text as input. Its labels stay as wide as the loader made them."""
    batch = {
        'input_features': torch.zeros(2, 4, 6),
        'labels': torch.ones(2, 5, dtype=torch.long),
    }

    assert widened(batch, 8) is batch


@pytest.mark.parametrize(
    'shape',
    [
        pytest.param((2, 5, 4), id='of each row'),
        pytest.param((1, 5), id='shared by the rows'),
    ],
)
def test_unknown_entries_keep_the_width(shape):
    """Boxes of the tokens (LayoutLM) would keep their width, so the ids keep it, too."""
    boxes = torch.zeros(shape)
    batch = microbatch([5, 2], bbox=boxes)

    assert widened(batch, 8) is batch


def test_batch_that_a_trainer_moves_as_one():
    """Transformers and accelerate make a batch again from its entries. Torch takes a dict instead."""
    batch = pre_split(microbatch([4, 3]), microbatch([2]))

    converted = default_convert(batch)

    assert type(converted) is dict
    assert converted.keys() == batch.keys()
    with pytest.raises(TypeError, match='for microbatch, weight in weighted_microbatches'):
        send_to_device(batch, 'cpu')
