# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Layouts of models without an entry: rows get the entries that their placeholders say, or the batch is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.layout import Entry, PreSplitBatch, describe
from composer_tokacc.layout.item_counts import entries_per_row
from composer_tokacc.layout.readings import Reading, joined_readings
from tests.support.small_batches import (
    IMAGE,
    VIDEO,
    drawn_batch,
    layout_of_model,
    numbered,
    numbered_images,
    numbers_of,
    text_batch,
)

VISION_CONFIG = SimpleNamespace()
LAYOUT = layout_of_model(
    'new_vl',
    vision_config=VISION_CONFIG,
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=88,
    image_newline_id=87,
)
TEXT_LAYOUT = layout_of_model('new_text')
ENCODER_LAYOUT = layout_of_model('new', vision_config=VISION_CONFIG)


def three_rows(**entries):
    """Returns rows with two images, no image, and one. Each image has two placeholders."""
    return drawn_batch('1ii2ii', '12', 'ii3', **entries)


def parts_of_rows(batch, layout=LAYOUT):
    """Returns each of the three rows as a batch."""
    return layout.split(batch, [[0], [1], [2]])


def numbers_of_rows(batch, key='pixel_values'):
    """Returns which entries each of the three rows gets. None: the row has no such key."""
    numbers = []
    for part in parts_of_rows(batch):
        numbers.append(numbers_of(part[key]) if key in part else None)
    return numbers


def values_of_rows(layout, batch, key):
    """Returns the value that each of the three rows has in a column, which has one value for each row."""
    values = []
    for part in parts_of_rows(batch, layout):
        [value] = part[key].tolist()
        values.append(value)
    return values


def trimmed_last_row(layout, batch):
    """Returns the third row of a batch, without the columns that only the other rows need."""
    last_row = layout.select(batch, [2])
    return layout.trim(last_row)


# Entries of images.


@pytest.mark.parametrize(
    ('key', 'entries_per_image', 'entry_shape'),
    [
        pytest.param('pixel_values', 1, (3, 4, 4), id='an image each, as LLaVA and Gemma 3'),
        pytest.param('pixel_values', 2, (5,), id='a patch a placeholder, as Molmo 2'),
        pytest.param('pixel_values', 8, (5,), id='4 merged patches a placeholder, as Qwen'),
        pytest.param('image_sizes', 1, (2,), id='sizes'),
        pytest.param('patch_attention_mask', 1, (2, 2), id='masks of patches'),
    ],
)
def test_entries_follow_their_placeholders(key, entries_per_image, entry_shape):
    num_in_first = 2 * entries_per_image
    num_entries = 3 * entries_per_image
    entries = numbered(num_entries, *entry_shape)
    batch = three_rows(**{key: entries})

    first, middle, last = numbers_of_rows(batch, key)
    last_and_first = LAYOUT.select(batch, [2, 0])
    is_placeholder = batch['input_ids'] == IMAGE
    counts = entries_per_row(batch, is_placeholder, 'image', num_entries)

    assert first == list(range(num_in_first))
    assert middle is None
    assert last == list(range(num_in_first, num_entries))
    assert numbers_of(last_and_first[key]) == last + first
    assert LAYOUT.images_per_row(batch)[1] == 0
    assert counts == [num_in_first, 0, entries_per_image]
    for count in counts:
        assert type(count) is int


def test_grid_tells_unequal_images():
    """A token stands for four patches. The first row has two images without a token between them."""
    grid = torch.tensor(
        [
            [1, 4, 4],  # 16 patches, 4 placeholders
            [1, 2, 4],  # 8 patches, 2 placeholders
            [1, 4, 4],
        ]
    )
    batch = drawn_batch('iiiiii', '1', 'iiii')
    batch['pixel_values'] = numbered(40, 3)
    batch['image_grid_thw'] = grid

    patches_of_first, patches_of_second, patches_of_third = numbers_of_rows(batch)
    first_row = LAYOUT.select(batch, [0])

    assert patches_of_first == list(range(24))
    assert patches_of_second is None
    assert patches_of_third == list(range(24, 40))
    assert torch.equal(first_row['image_grid_thw'], grid[:2])


def test_image_sizes_settle_the_count():
    """One large image and three small ones fill as many placeholders. By runs, each row could have two images."""
    grid = torch.tensor(
        [
            [1, 2, 6],
            [1, 2, 2],
            [1, 2, 2],
            [1, 2, 2],
        ]
    )
    batch = drawn_batch('1iii2', '1i2i2i', image_grid_thw=grid)

    assert LAYOUT.images_per_row(batch) == [1, 3]


def test_tiles_are_told_by_their_number():
    """There are about five placeholders a tile, but no fixed number."""
    row_of_two_images = 'i' * 16 + '1' + 'i' * 5
    row_of_one_image = 'i' * 11
    batch = drawn_batch(row_of_two_images, '1', row_of_one_image)
    batch['pixel_values'] = numbered_images(6)
    batch['num_image_tiles'] = torch.tensor([3, 1, 2])

    first, middle, last = numbers_of_rows(batch)

    assert first == [0, 1, 2, 3]
    assert middle is None
    assert last == [4, 5]


def test_videos_are_told_by_their_frames():
    """Each frame has a run of placeholders, and the runs have unequal lengths."""
    batch = drawn_batch('vv1vv1vv', '1', 'v1v')
    batch['pixel_values_videos'] = numbered(2, 3, 2)
    batch['num_frames_per_video'] = torch.tensor([3, 2])

    first, middle, last = numbers_of_rows(batch, 'pixel_values_videos')

    assert first == [0]
    assert middle is None
    assert last == [1]


def test_tiles_that_some_images_lack():
    """The first of two images of the first row has four tiles. The two other images of the batch have none."""
    batch = three_rows()
    batch['pixel_values_local'] = numbered_images(4)
    batch['num_local_patches'] = torch.tensor([4, 0, 0])

    first, middle, last = numbers_of_rows(batch, 'pixel_values_local')

    assert first == [0, 1, 2, 3]
    assert middle is None
    assert last is None


def test_mask_is_no_grid():
    """It has three columns, as a grid of patches, but a grid has no 0."""
    mask = torch.tensor(
        [
            [1, 1, 0],
            [1, 1, 1],
            [1, 0, 0],
        ]
    )
    batch = three_rows(pixel_values=numbered(3, 3, 4), pixel_mask=mask)

    last_row = LAYOUT.select(batch, [2])

    assert last_row['pixel_mask'].tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    'numbers',
    [
        pytest.param([-1, 1, 3], id='a number'),
        pytest.param([[-1, -1], [-1, -1], [-1, -2]], id='two numbers with a positive product'),
    ],
)
def test_negative_numbers_are_no_sizes(numbers):
    """Each image has four tiles. Another tensor has numbers for each image, but they are no numbers of tiles."""
    batch = three_rows()
    batch['pixel_values'] = numbered(12, 4, 4)
    batch['image_ranks'] = torch.tensor(numbers)

    first, middle, last = numbers_of_rows(batch)

    assert first == [0, 1, 2, 3, 4, 5, 6, 7]
    assert middle is None
    assert last == [8, 9, 10, 11]


def test_mask_of_images_is_no_size():
    """The last image is masked, but it has two tiles as the others."""
    batch = three_rows()
    batch['pixel_values'] = numbered_images(6)
    batch['image_mask'] = torch.tensor([True, True, False])

    first, middle, last = numbers_of_rows(batch)
    last_row = LAYOUT.select(batch, [2])

    assert first == [0, 1, 2, 3]
    assert middle is None
    assert last == [4, 5]
    assert last_row['image_mask'].tolist() == [False]


def test_sizes_tell_adjacent_patches():
    """MiniCPM-V puts the patches of all images side by side into one tensor. Each patch is 4 pixels wide.

    Four patches make a token. So the first row has the first 12 patches, and the last row the other 16.
    """
    sizes = torch.tensor(
        [
            [2, 4],  # 8 patches, 2 placeholders
            [2, 2],
            [4, 4],
        ]
    )
    total_width = 4 * (8 + 4 + 16)
    columns = torch.arange(total_width)
    batch = drawn_batch('ii1i', '1', 'iiii')
    batch['pixel_values'] = columns.expand(1, 3, 4, total_width)
    batch['target_sizes'] = sizes

    first, middle, last = parts_of_rows(batch)

    pixels_of_last = last['pixel_values']
    assert first['pixel_values'].shape == (1, 3, 4, 48)
    assert 'pixel_values' not in middle
    assert pixels_of_last.shape == (1, 3, 4, 64)
    assert pixels_of_last[0, 0, 0, 0] == 48


def test_padded_patches_are_not_adjacent():
    """LFM2-VL pads each image to 64 patches of 768 numbers. Here 3 x 4 patches times 64 happen to be 768, too."""
    sizes = torch.tensor([[3, 4]])
    pixels_of_first = torch.rand(1, 64, 768)
    pixels_of_second = torch.rand(1, 64, 768)
    first = drawn_batch('iii', pixel_values=pixels_of_first, spatial_shapes=sizes)
    second = drawn_batch('iii', pixel_values=pixels_of_second, spatial_shapes=sizes)

    joined = LAYOUT.concat([first, second])
    second_again = LAYOUT.select(joined, [1])

    assert joined['pixel_values'].shape == (2, 64, 768)
    assert torch.equal(second_again['pixel_values'], pixels_of_second)


def test_patch_indices_of_selected_rows():
    """Molmo 2 numbers the patches over the batch, so the numbers change when rows are selected.

    Each image has two tokens, so two rows of indices, and four patches. An index of -1 is padding.
    """
    key = 'image_token_pooling'
    pooling = torch.tensor(
        [
            [0, 1],  # the first image of the first row
            [2, -1],
            [4, 5],  # its second image
            [6, 7],
            [8, 9],  # the image of the third row
            [10, -1],
        ]
    )
    batch = three_rows(pixel_values=numbered(3, 4, 5), image_token_pooling=pooling)

    parts = parts_of_rows(batch)
    third_and_first = LAYOUT.select(batch, [2, 0])
    joined = LAYOUT.concat(parts)

    third = parts[2]
    assert third[key].tolist() == [
        [0, 1],
        [2, -1],
    ]
    assert third_and_first[key].tolist() == [
        [0, 1],  # the image of the third row
        [2, -1],
        [4, 5],
        [6, -1],
        [8, 9],
        [10, 11],
    ]
    assert torch.equal(joined[key], pooling)


def test_two_modalities_in_one_batch():
    batch = drawn_batch('i1vv', 'vv2', 'ii')
    batch['pixel_values'] = numbered(3, 2)
    batch['pixel_values_videos'] = numbered(2, 3, 2)

    facts = describe(LAYOUT, batch)
    second = LAYOUT.select(batch, [1])

    assert facts.counts == {
        'image': [1, 0, 2],
        'video': [1, 1, 0],
    }
    assert 'pixel_values' not in second
    assert second['pixel_values_videos'].tolist() == [[[1, 1], [1, 1], [1, 1]]]


def test_runs_count_images_unless_carried():
    pixels = numbered(3, 3, 4, 4)
    batch = drawn_batch('iii1', '12', 'i1i', pixel_values=pixels)
    batch_with_counts = {**batch, 'num_images': [2, 0, 1]}

    assert LAYOUT.images_per_row(batch) == [1, 0, 2]  # only the number of runs fits
    assert LAYOUT.images_per_row(batch_with_counts) == [2, 0, 1]


NUMBERS_OF_OTHER_TYPES = [np.int64(2), np.array([1]), torch.tensor([0])]


@pytest.mark.parametrize(
    ('counts', 'expected'),
    [
        pytest.param([2, 0, 1], [2, 0, 1], id='list'),
        pytest.param(torch.tensor([0, 3, 0]), [0, 3, 0], id='tensor'),
        pytest.param(torch.tensor([[2], [0], [1]]), [2, 0, 1], id='column'),
        pytest.param(NUMBERS_OF_OTHER_TYPES, [2, 1, 0], id='arrays and tensors'),
    ],
)
def test_carried_counts_come_first(counts, expected):
    """Three images in three rows would be one a row if the batch did not carry their numbers."""
    pixels = numbered_images(3)
    batch = text_batch([3, 2, 4], pixel_values=pixels, num_images=counts)

    assert ENCODER_LAYOUT.images_per_row(batch) == expected


@pytest.mark.parametrize(
    'counts',
    [
        pytest.param([torch.tensor(1.5), torch.tensor(1)], id='fraction'),
        pytest.param([torch.tensor([1, 2]), torch.tensor([1])], id='two in one'),
        pytest.param([1, -1], id='negative'),
        pytest.param([1, '1'], id='text'),
    ],
)
def test_carried_counts_must_be_integers(counts):
    pixels = numbered_images(2)
    batch = text_batch([3, 2], pixel_values=pixels, num_images=counts)

    with pytest.raises(ValueError, match='`num_images` must be a list of ints'):
        ENCODER_LAYOUT.images_per_row(batch)


def test_numbers_of_entries_in_a_column():
    """A `batch_num_images` of shape ``(rows, 1)`` may also be a tensor with one entry for each image."""
    batch = drawn_batch('i1i', 'i11')
    batch['pixel_values'] = numbered(3, 3, 4, 4)
    batch['batch_num_images'] = torch.tensor([[2], [1]])

    with pytest.raises(ValueError, match='batch_num_images'):
        LAYOUT.images_per_row(batch)


def test_encoder_without_placeholders():
    batch = text_batch([3, 2], pixel_values=numbered_images(2))

    second = ENCODER_LAYOUT.select(batch, [1])

    assert numbers_of(second['pixel_values']) == [1]


def test_rows_without_ids():
    """As Pix2Struct has them."""
    batch = {
        'labels': torch.ones(3, 2, dtype=torch.long),
        'flattened_patches': numbered(3, 4, 5),
    }

    second = LAYOUT.select(batch, [1])

    assert numbers_of(second['flattened_patches']) == [1]


# Entries of rows.


@pytest.mark.parametrize(
    ('key', 'value', 'expected'),
    [
        pytest.param(
            'sample_weight',
            torch.tensor([1.0, 2.0, 3.0]),
            torch.tensor([3.0]),
            id='a number a row',
        ),
        pytest.param(
            'teacher_logits',
            numbered(3, 6, 5).float(),
            torch.full((1, 3, 5), 2.0),
            id='logits along the text',
        ),
        pytest.param(
            'moe_mm_token_type_ids',
            numbered(3, 6),
            torch.full((1, 3), 2),
            id='integers along the text',
        ),
        pytest.param(
            'num_items_in_batch',
            torch.tensor(7),
            torch.tensor(7),
            id='a number without dimensions',
        ),
        pytest.param(
            'temperature',
            torch.tensor([0.5]),
            torch.tensor([0.5]),
            id='one number of all rows',
        ),
        pytest.param(
            'position_ids',
            torch.arange(6)[None],
            torch.arange(3)[None],
            id='positions of all rows',
        ),
    ],
)
def test_unregistered_tensors_of_rows(key, value, expected):
    """The batch is 6 wide, and its last row has 3 tokens. Shared values stay whole, except along the text."""
    batch = text_batch([6, 2, 3], **{key: value})

    last_row = trimmed_last_row(TEXT_LAYOUT, batch)

    torch.testing.assert_close(last_row[key], expected)


AUDIO_LAYOUT = layout_of_model('asr', audio_token_id=IMAGE)


@pytest.mark.parametrize(
    ('layout', 'key', 'shape', 'mask_key'),
    [
        pytest.param(LAYOUT, 'pixel_values', (3, 6, 12), 'pixel_attention_mask', id='LFM2-VL'),
        pytest.param(AUDIO_LAYOUT, 'input_features', (3, 5, 6), 'input_features_mask', id='GLM-ASR'),
    ],
)
def test_media_mask_as_wide_as_text(layout, key, shape, mask_key):
    """Three items in three rows, with as many patches or frames as the text has columns."""
    media = torch.rand(shape)
    mask = torch.arange(18).view(3, 6)
    batch = three_rows()
    batch[key] = media
    batch[mask_key] = mask

    last_row = trimmed_last_row(layout, batch)

    assert last_row['input_ids'].shape == (1, 3)
    assert torch.equal(last_row[mask_key], mask[2:])
    assert torch.equal(last_row[key], media[2:])


@pytest.mark.parametrize(
    'shape',
    [
        pytest.param((3, 3, 4, 4), id='as many images as rows'),
        pytest.param((6, 5, 6), id='as wide as the text'),
    ],
)
def test_text_integers_named_after_a_modality(shape):
    """The integers are not a mask of the images, because only one of the two sizes fits."""
    pixels = torch.rand(shape)
    marks = torch.arange(18).view(3, 6)
    batch = three_rows(pixel_values=pixels, image_marks=marks)

    last_row = trimmed_last_row(LAYOUT, batch)

    assert last_row['image_marks'].tolist() == [[12, 13, 14]]


INFERRED_LAYOUT = BatchLayout.infer(text_batch([3]))


@pytest.mark.parametrize('layout', [ENCODER_LAYOUT, INFERRED_LAYOUT], ids=['model', 'inferred'])
def test_audio_codes_keep_the_width(layout):
    """Without placeholders each token has its audio codes, as in Moshi. These are not trimmed, so the text is not."""
    codes = torch.zeros(1, 8, 12)
    row = text_batch([2], width=4, user_audio_codes=codes)

    trimmed = layout.trim(row)
    facts = describe(layout, row)

    assert trimmed['input_ids'].shape == (1, 4)
    assert not facts.may_be_trimmed


@pytest.mark.parametrize(
    'values',
    [
        pytest.param([11, 12, 13], id='ids'),
        pytest.param([True, False, True], id='booleans'),
        pytest.param([0.5, 0.25, 1.0], id='fractions'),
    ],
)
def test_column_named_after_a_modality(values):
    """A dataset's own column, such as `image_id`, has one value a row. A batch without images shows it."""
    column = torch.tensor(values)
    text_only = text_batch([3, 2, 3], image_id=column)
    with_images = drawn_batch('1ii', '12', '3ii', image_id=column)
    with_images['pixel_values'] = numbered(2, 3, 4, 4)

    first_readings = LAYOUT.readings_of(with_images)
    layout_after_first = LAYOUT.with_readings(first_readings)
    second_readings = layout_after_first.readings_of(text_only)
    readings_of_both = joined_readings(first_readings, second_readings)
    layout = LAYOUT.with_readings(readings_of_both)

    facts_of_text = describe(LAYOUT, text_only)
    assert facts_of_text.counts == {}
    assert layout.images_per_row(with_images) == [1, 0, 1]
    assert values_of_rows(layout, with_images, 'image_id') == values


@pytest.mark.parametrize(
    'entries',
    [
        pytest.param({}, id='no tensor of images'),
        pytest.param({'pixel_values': torch.zeros(0, 3, 4, 4)}, id='empty tensor of images'),
    ],
)
def test_numbers_show_that_a_column_is_no_media(entries):
    """Without a config, numbers of images that are all 0 show that `image_id` has one value for each row."""
    image_ids = torch.tensor([11, 12, 13])
    batch = text_batch([3, 2, 3], image_id=image_ids, num_images=[0, 0, 0], **entries)
    layout = BatchLayout.infer(batch)

    assert values_of_rows(layout, batch, 'image_id') == [11, 12, 13]


for_each_column = pytest.mark.parametrize(
    ('key', 'values', 'images_per_row'),
    [
        pytest.param('image_id', [0, 1, 1, 2], 1, id='an id'),
        pytest.param('image_id', [0, 1, 1, 2], 2, id='an id, tiles'),
        pytest.param('image_count', [2, 1, 0, 1], 2, id='a number'),
        pytest.param('num_images', [0, 1, 1, 2], 2, id='a wrong number'),
    ],
)
"""Columns of a dataset, with one value for each of four rows."""


def four_rows_with_images(images_per_row):
    batch = drawn_batch('1ii', '2ii', '3ii', '4ii')
    batch['pixel_values'] = torch.rand(4 * images_per_row, 3, 4, 4)
    return batch


@for_each_column
def test_declared_column_divides_no_images(key, values, images_per_row):
    layout = LAYOUT.with_entries(**{key: Entry()})
    batch = four_rows_with_images(images_per_row)
    batch[key] = torch.tensor(values)

    assert layout.images_per_row(batch) == [images_per_row] * 4


@for_each_column
def test_column_of_rows_divides_no_images(key, values, images_per_row):
    """A batch without images has shown that the column has a value for each row."""
    column = torch.tensor(values)
    text_only = text_batch([2, 2, 2, 2], **{key: column})
    readings = LAYOUT.readings_of(text_only)
    layout = LAYOUT.with_readings(readings)
    batch = four_rows_with_images(images_per_row)
    batch[key] = column

    assert layout.images_per_row(batch) == [images_per_row] * 4


@pytest.mark.parametrize('key', ['supervision', 'percentile', 'dispatch_weights'])
def test_words_that_end_in_a_modality(key):
    """``vision``, ``tile`` and ``patch`` name images only at the start of a word, so this tensor is of the tokens."""
    value_of_tokens = torch.rand(2, 4)
    batch = text_batch([2, 1], width=4, **{key: value_of_tokens})

    trimmed = LAYOUT.trim(batch)

    assert trimmed[key].shape == (2, 2)


def test_value_of_each_image():
    """In a batch with images, one value a row is taken for one value an image, until the data shows otherwise."""
    batch = three_rows()
    batch['pixel_values'] = numbered(3, 3, 4, 4)
    batch['image_scale'] = torch.tensor([0.5, 2.0, 3.0])

    first, middle, last = numbers_of_rows(batch, 'image_scale')

    assert first == [0.5, 2.0]
    assert middle is None
    assert last == [3.0]


def test_frame_counts_without_a_config():
    """Gemma 4's `num_frames_per_video` is `(videos,)`. Its other tensors have one entry a frame."""
    video = text_batch([4])
    video['pixel_values_videos'] = torch.rand(3, 2, 5)
    video['num_frames_per_video'] = torch.tensor([3])
    text = text_batch([2])
    layout = BatchLayout.infer(video)

    joined = layout.concat([video, text], padding_side='right', pad_token_id=0)
    pre_split = PreSplitBatch([video, text], max_tokens=8)

    for batch_of_both in (joined, pre_split):
        assert batch_of_both['num_frames_per_video'].tolist() == [3]


# The meaning of a key.


def test_earlier_meaning_of_a_key_decides():
    """A tensor that is as wide as the text in one batch, but not in another, does not lie along the text."""
    memory = torch.zeros(3, 8, 5)
    wide = text_batch([12, 2, 3], memory=memory)
    as_wide_as_memory = text_batch([8, 2, 3], memory=memory)
    readings = TEXT_LAYOUT.readings_of(wide)
    layout = TEXT_LAYOUT.with_readings(readings)

    last_rows = layout.select(as_wide_as_memory, [1, 2])
    trimmed = layout.trim(last_rows)

    entry = layout.entry_of(as_wide_as_memory, 'memory')
    assert entry.seq_dims == ()
    assert trimmed['input_ids'].shape == (2, 3)
    assert trimmed['memory'].shape == (2, 8, 5)
    # By the shapes of one batch:
    entry_by_shapes = TEXT_LAYOUT.entry_of(as_wide_as_memory, 'memory')
    entry_by_shapes_of_wide = TEXT_LAYOUT.entry_of(wide, 'memory')
    assert entry_by_shapes.seq_dims == (1,)
    assert entry_by_shapes_of_wide.seq_dims == ()


def test_changed_meaning_of_a_key():
    tags_of_rows = torch.zeros(3, 4)
    tag_of_batch = torch.zeros(1)
    first_batch = text_batch([6, 2, 3], tags=tags_of_rows)
    second_batch = text_batch([6, 2, 3], tags=tag_of_batch)
    readings = TEXT_LAYOUT.readings_of(first_batch)
    layout = TEXT_LAYOUT.with_readings(readings)

    with pytest.raises(ValueError, match=r"batch\['tags'\].*one value for all rows.*one entry per row"):
        layout.entry_of(second_batch, 'tags')


def test_two_batches_agree():
    """With one row, a tensor may be of the row or shared. A batch of two rows decides."""
    tags = torch.zeros(1, 4)
    one_row = text_batch([4], tags=tags)
    two_rows = text_batch([4, 3], tags=tags)

    ambiguous = TEXT_LAYOUT.readings_of(one_row)
    shared = TEXT_LAYOUT.readings_of(two_rows)

    assert shared == {'tags': (Reading.SHARED_TEXT,)}
    assert joined_readings(ambiguous, shared) == shared
    assert joined_readings(shared, ambiguous) == shared
