# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""BatchLayout selects, trims and joins rows of hand-written batches: masks, positions, labels, media, other entries."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.batch import padding_side
from composer_tokacc.layout import FAMILIES, Entry, Family, describe, tensors
from composer_tokacc.layout.joining import with_masks
from tests.support.small_batches import (
    IMAGE,
    LLAVA,
    QWEN,
    TEXT,
    additive,
    drawn_batch,
    layout_of_model,
    numbered,
    numbered_images,
    numbers_of,
    square_mask,
    text_batch,
)

TEXT_LAYOUT = BatchLayout(family=TEXT)
LLAVA_LAYOUT = BatchLayout(family=LLAVA)
QWEN_LAYOUT = BatchLayout(family=QWEN)
for_each_side = pytest.mark.parametrize('side', ['left', 'right'])
SHARED_MASK = Entry(unit='shared', seq_dims=(-2, -1))
"""How all rows of a batch share one square mask."""


def causal_mask(width):
    """Returns a mask that all rows of a batch share, bool of shape (1, 1, width, width)."""
    return torch.ones(1, 1, width, width).tril().bool()


def three_rows(**options):
    """Returns rows of 3, 5 and 2 tokens. Takes the options of :func:`.text_batch`."""
    return text_batch([3, 5, 2], **options)


def lengths_of(batch, layout=TEXT_LAYOUT):
    """Returns the width of each row without its padding, at least 1."""
    return describe(layout, batch).lengths


def images_of_rows(layout, batch, rows):
    """Returns the numbers of the entries of ``pixel_values`` that some rows get."""
    selected = layout.select(batch, rows)
    return numbers_of(selected['pixel_values'])


def trimmed_rows(layout, batch, rows):
    """Returns some rows of a batch without the columns that only the other rows need, as a split cuts them."""
    selected = layout.select(batch, rows)
    return layout.trim(selected)


@pytest.mark.parametrize('model', [3, None, torch.nn.Linear(1, 1)])
def test_layout_needs_a_config(model):
    with pytest.raises(TypeError, match='`model` must have a `config` with a `model_type`, got: '):
        BatchLayout.for_model(model)


def test_config_beside_a_child_named_module():
    """A `module` is the model itself if nothing around it has a config, as in DDP and AveragedModel."""
    model = torch.nn.Module()
    model.module = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(model_type='llava')
    in_data_parallel = torch.nn.DataParallel(model)
    in_averaged_model = torch.optim.swa_utils.AveragedModel(model)

    for wrapped_model in (model, in_data_parallel, in_averaged_model):
        layout = BatchLayout.for_model(wrapped_model)
        assert layout.config == model.config


# The tokens of a row, without its padding.


@for_each_side
def test_lengths_and_trim(side):
    batch = three_rows(side=side, width=8)
    without_common_padding = three_rows(side=side)  # as wide as the longest row

    trimmed = TEXT_LAYOUT.trim(batch)
    last_row = trimmed_rows(TEXT_LAYOUT, batch, [2])

    assert padding_side(batch) == side
    assert lengths_of(batch) == [3, 5, 2]
    for key, expected in without_common_padding.items():
        torch.testing.assert_close(trimmed[key], expected)
        assert trimmed[key].is_contiguous()
    assert last_row['input_ids'].tolist() == [[1, 2]]


@for_each_side
def test_width_multiple_stays_inside_batch(side):
    """The longest row has 5 tokens, and the batch is 9 wide. A width of 16 would need new padding."""
    batch = three_rows(side=side, width=9)
    num_tokens = batch['attention_mask'].sum()
    width_of_multiple = {4: 8, 7: 7, 16: 9}

    for multiple, expected_width in width_of_multiple.items():
        trimmed = TEXT_LAYOUT.trim(batch, width_multiple=multiple)
        widths = {value.shape[1] for value in trimmed.values()}
        assert widths == {expected_width}
        assert trimmed['attention_mask'].sum() == num_tokens


@dataclass(frozen=True, kw_only=True)
class UnusualValue:
    """One value of a row of 3 tokens. Padding is on the right."""

    key: str
    column: int
    value: int
    length: int
    """The length that the row gets."""


UNUSUAL_VALUES = {
    'a token with the id of pads': UnusualValue(key='input_ids', column=1, value=0, length=3),
    'a pad with the id of a token': UnusualValue(key='input_ids', column=5, value=4, length=3),
    'an attended pad, as if pads are end tokens (Qwen-7B)': UnusualValue(
        key='attention_mask', column=3, value=1, length=4
    ),
    'a label just behind the tokens': UnusualValue(key='labels', column=4, value=1, length=5),
    'a label far behind the tokens': UnusualValue(key='labels', column=6, value=1, length=7),
}


def num_attended_and_labelled(batch):
    """Returns how many positions are attended, and how many have a label."""
    is_attended = batch['attention_mask'] != 0
    is_labelled = batch['labels'] != -100
    return int(is_attended.sum()), int(is_labelled.sum())


@pytest.mark.parametrize('situation', UNUSUAL_VALUES)
@for_each_side
def test_lengths_of_unusual_padding(situation, side):
    """Trimming removes nothing that is attended or labelled."""
    unusual = UNUSUAL_VALUES[situation]
    batch = text_batch([3, 2], width=8)
    batch[unusual.key][0, unusual.column] = unusual.value
    if side == 'left':
        batch = {key: value.flip(1) for key, value in batch.items()}
    expected = num_attended_and_labelled(batch)

    trimmed = TEXT_LAYOUT.trim(batch)

    assert lengths_of(batch) == [unusual.length, 2]
    assert trimmed['input_ids'].shape == (2, unusual.length)
    assert num_attended_and_labelled(trimmed) == expected


@for_each_side
def test_empty_rows_keep_one_position(side):
    batch = text_batch([0, 0], side=side, width=4)

    trimmed = TEXT_LAYOUT.trim(batch)

    assert lengths_of(batch) == [1, 1]
    assert trimmed['input_ids'].shape == (2, 1)


@for_each_side
def test_empty_decoder_key_changes_nothing(side):
    """Labels lie along the text if the key of the decoder's ids is there, but without a value."""
    short_row = text_batch([3], side=side, width=4, decoder_input_ids=None)
    long_row = text_batch([5], decoder_input_ids=None)
    both_rows = text_batch([3, 5], side=side)

    trimmed = TEXT_LAYOUT.trim(short_row)
    joined = TEXT_LAYOUT.concat([short_row, long_row], padding_side=side)

    expected_labels = both_rows['labels']
    assert trimmed['labels'].tolist() == [[1, 2, 3]]
    torch.testing.assert_close(joined['labels'], expected_labels)


PHOTO_AXES = [
    [0, 0, 0, 0, 2],
    [0, 0, 1, 1, 2],
    [0, 1, 0, 1, 2],
]
"""Multimodal positions of a row: an image of 2 x 2 placeholders, then a token. The axes are time, height and width."""
TWO_PHOTO_AXES = [axis * 2 for axis in PHOTO_AXES]


@pytest.mark.parametrize(
    ('positions', 'has_mask'),
    [
        pytest.param([2, 3, 4], True, id='one document'),
        pytest.param([0, 1, 0], False, id='two documents'),
        pytest.param([1, 2, 1], False, id='two documents from 1'),
        pytest.param(PHOTO_AXES, True, id='image'),
        pytest.param(TWO_PHOTO_AXES, False, id='two documents with images'),
    ],
)
def test_only_packed_rows_get_no_mask(positions, has_mask):
    position_ids = torch.tensor(positions)
    position_ids = position_ids.unsqueeze(-2)  # (rows, width), or (axes, rows, width)
    width = position_ids.shape[-1]
    batch = text_batch([width], position_ids=position_ids)
    del batch['attention_mask']

    [masked] = with_masks([batch])

    assert ('attention_mask' in masked) == has_mask


def row_of_codebooks(length):
    """Returns a row of this many tokens, each with an id of four codebooks, as models of audio have them."""
    return {
        'input_ids': torch.ones(1, length, 4, dtype=torch.long),
        'labels': torch.arange(1, length + 1)[None],
    }


def test_mask_of_padded_codebooks():
    """The mask has one value for each token, not one for each codebook."""
    short_row = row_of_codebooks(3)
    long_row = row_of_codebooks(5)

    joined = TEXT_LAYOUT.concat([short_row, long_row])

    assert joined['attention_mask'].tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1],
    ]


def test_hidden_label_of_codebooks_stays():
    """The third token has no attention, but a label, which some models count."""
    batch = row_of_codebooks(5)
    batch['attention_mask'] = torch.tensor([[1, 1, 0, 0, 0]])
    batch['labels'][:, 3:] = -100

    trimmed = TEXT_LAYOUT.trim(batch)

    assert trimmed['labels'].tolist() == [[1, 2, 3]]


def test_batch_without_mask_is_never_trimmed():
    batch = text_batch([3, 5], width=7)
    del batch['attention_mask']

    assert lengths_of(batch) == [7, 7]


MASK_FORMS = {
    'boolean': lambda mask: mask,
    'additive': additive,
    'integer': lambda mask: mask.long(),
    'three-dimensional': lambda mask: mask[:, 0],
}
"""Functions that turn a mask of :func:`.square_mask` into another form that models take."""


@pytest.mark.parametrize('form', MASK_FORMS)
@for_each_side
def test_square_masks_are_trimmed_twice(form, side):
    """The last two dimensions of the mask lie along the text. Only the mask tells where the padding is."""
    batch = three_rows(side=side, width=8)
    in_form = MASK_FORMS[form]
    mask = in_form(square_mask(batch))
    batch['attention_mask'] = mask
    batch['labels'].fill_(-100)
    first_row = trimmed_rows(TEXT_LAYOUT, batch, [0])
    second_row = trimmed_rows(TEXT_LAYOUT, batch, [1])

    joined = TEXT_LAYOUT.concat([first_row, second_row], padding_side=side)

    tokens_of_first = slice(5, 8) if side == 'left' else slice(0, 3)
    mask_of_first = mask[:1, ..., tokens_of_first, tokens_of_first]
    mask_of_both = joined['attention_mask']
    assert padding_side(batch) == side
    assert lengths_of(batch) == [3, 5, 2]
    torch.testing.assert_close(first_row['attention_mask'], mask_of_first)
    # No real position of the first row may attend to the two new pads, or its length would be 5.
    assert mask_of_both.shape[-2:] == (5, 5)
    assert lengths_of(joined) == [3, 5]


# Entries along the text.


@for_each_side
def test_rotary_positions_of_three_axes(side):
    """Qwen's positions have the shape (axes, rows, width)."""
    positions = torch.arange(3 * 3 * 6).view(3, 3, 6)
    batch = three_rows(side=side, width=6, position_ids=positions)
    columns_of_first = slice(3, 6) if side == 'left' else slice(0, 3)

    last_and_first = trimmed_rows(QWEN_LAYOUT, batch, [2, 0])
    middle = QWEN_LAYOUT.select(batch, [1])
    joined = QWEN_LAYOUT.concat([last_and_first, middle], padding_side=side)

    expected_positions = positions[:, [2, 0], columns_of_first]
    torch.testing.assert_close(last_and_first['position_ids'], expected_positions)
    positions_of_all = joined['position_ids']
    assert positions_of_all.shape == (3, 3, 6)
    torch.testing.assert_close(positions_of_all[:, 2], positions[:, 1])


@pytest.mark.parametrize(
    'key',
    [
        'token_type_ids',
        'mm_token_type_ids',
        'loss_mask',
        'sequence_id',
        'special_tokens_mask',
    ],
)
def test_token_wise_entries_are_selected(key):
    batch = three_rows(width=6)
    batch[key] = torch.arange(18).view(3, 6)

    last_and_first = trimmed_rows(TEXT_LAYOUT, batch, [2, 0])

    assert last_and_first[key].tolist() == [
        [12, 13, 14],
        [0, 1, 2],
    ]


# Other entries.


def test_keys_that_are_no_strings():
    batch = three_rows()
    batch[7] = ['a', 'b', 'c']
    batch['tags', 1] = torch.tensor([1, 2, 3])
    batch_without_text = {7: 1, 'tags': 2}

    parts = TEXT_LAYOUT.split(batch, [[2, 0], [1]])
    joined = TEXT_LAYOUT.concat(parts)

    assert joined[7] == ['c', 'a', 'b']
    assert joined['tags', 1].tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match=r'must have tensors `input_ids` or `labels`'):
        TEXT_LAYOUT.num_rows(batch_without_text)


def test_lists_none_and_plain_values():
    batch = three_rows(
        sample_ids=['a', 'b', 'c'],
        weights=(1, 2, 3),
        pixel_values=None,
        task='ocr',
        step=3,
    )

    last_and_first = TEXT_LAYOUT.select(batch, [2, 0])

    assert last_and_first['sample_ids'] == ['c', 'a']
    assert last_and_first['weights'] == [3, 1]
    assert last_and_first['pixel_values'] is None
    assert last_and_first['task'] == 'ocr'
    assert last_and_first['step'] == 3


def test_wrong_number_of_videos_is_refused():
    batch = batch_with_videos()
    batch['num_videos'] = [0, 1, 1]

    with pytest.raises(ValueError, match=r'3 videos .*`num_videos`=\[0, 1, 1\].*Carry `num_videos`'):
        QWEN_LAYOUT.select(batch, [1])


@pytest.mark.parametrize('rows', [[1], [0, 1, 2]], ids=['one row', 'all rows'])
def test_unknown_tensor_is_refused_by_name(rows):
    boxes = torch.zeros(4, 4)
    batch = three_rows(ocr_boxes=boxes)

    with pytest.raises(ValueError, match=r"batch\['ocr_boxes'\].*with_entries\(ocr_boxes=Entry\(unit=\.\.\.\)\)"):
        TEXT_LAYOUT.select(batch, rows)


@pytest.mark.parametrize('value', [['a', 'b'], {'a': 1}, object()])
def test_values_without_rows_are_refused(value):
    batch = three_rows(boxes=value)

    with pytest.raises(ValueError, match=r"batch\['boxes'\].*got: (list|dict|object)"):
        TEXT_LAYOUT.select(batch, [1])


def test_registered_tensors_are_selected():
    layout = LLAVA_LAYOUT.with_entries(
        ocr_boxes=Entry(unit='box'),
        image_tags=Entry(unit='image'),
        image_tags_side_by_side=Entry(unit='image', row_dim=1),
        class_weights=Entry(unit='shared'),
    )
    batch = three_rows(
        num_images=[1, 0, 2],
        num_boxs=[0, 3, 1],  # `num_{unit}s`
        pixel_values=numbered_images(3),
        ocr_boxes=numbered(4),
        image_tags=numbered(3),
        image_tags_side_by_side=torch.arange(3).expand(5, 3),
        class_weights=numbered(7),
    )

    last_and_middle = layout.select(batch, [2, 1])

    assert numbers_of(last_and_middle['ocr_boxes']) == [3, 0, 1, 2]
    assert numbers_of(last_and_middle['image_tags']) == [1, 2]
    assert last_and_middle['image_tags_side_by_side'].tolist() == [[1, 2]] * 5
    assert numbers_of(last_and_middle['pixel_values']) == [1, 2]
    assert len(last_and_middle['class_weights']) == 7


@pytest.mark.parametrize('count', [list, torch.tensor], ids=['list', 'tensor'])
def test_image_numbers_go_with_their_rows(count):
    batch = text_batch([3, 5, 2, 4])
    batch['num_images'] = count([1, 2, 0, 1])
    batch['pixel_values'] = numbered_images(4)

    third_and_second = LLAVA_LAYOUT.select(batch, [2, 1])
    fourth = LLAVA_LAYOUT.select(batch, [3])
    joined = LLAVA_LAYOUT.concat([fourth, third_and_second])

    no_image, two_images = third_and_second['num_images']
    assert no_image == 0
    assert two_images == 2
    assert images_of_rows(LLAVA_LAYOUT, third_and_second, [1]) == [1, 2]
    assert joined['num_images'] == [1, 0, 2]
    assert numbers_of(joined['pixel_values']) == [3, 1, 2]


def processed_by_onevision(lengths, images):
    """Returns rows as LLaVA-OneVision's processor does, which counts the images only of rows that have some."""
    batch = text_batch(lengths, num_images=images)
    counts = [count for count in images if count > 0]
    if counts:
        batch['batch_num_images'] = torch.tensor(counts)
        batch['pixel_values'] = numbered(sum(counts), 1, 3, 2, 2)
    return batch


def test_image_numbers_without_rows_of_text():
    """Without the counts of text rows, a batch cannot be cut."""
    batch = processed_by_onevision([3, 2, 4], images=[1, 0, 2])

    with pytest.raises(ValueError, match=r'batch_num_images.*concat'):
        LLAVA_LAYOUT.select(batch, [1])


@pytest.mark.parametrize(
    'numbers',
    [
        pytest.param([1, 1], id='list of two'),
        pytest.param(torch.tensor([1, 1]), id='tensor of two'),
        pytest.param(torch.tensor(2), id='their sum'),
    ],
)
def test_image_numbers_of_other_rows(numbers):
    """Placeholders tell the row of each image, but nothing tells to which rows the numbers belong."""
    config = SimpleNamespace(image_token_id=IMAGE)
    layout = BatchLayout(family=LLAVA, config=config)
    batch = drawn_batch('ii1', '12', 'ii3')
    batch['pixel_values'] = numbered_images(2)
    batch['num_images'] = numbers

    with pytest.raises(ValueError, match=r'num_images.* got: '):
        layout.select(batch, [0])


def test_registered_entry_comes_before_shapes():
    """An entry says that all rows share a mask or positions. In a batch of one row, their shape would fit the row."""
    shared_positions = Entry(unit='shared', seq_dims=(1,))
    layout = TEXT_LAYOUT.with_entries(attention_mask=SHARED_MASK, position_ids=shared_positions)
    batch = three_rows()
    batch['attention_mask'] = causal_mask(5)
    batch['position_ids'] = torch.arange(5)[None]

    last_and_first = layout.select(batch, [2, 0])
    narrow = layout.narrow(last_and_first, 0, 3)
    one_row = layout.select(batch, [0])

    assert narrow['input_ids'].shape == (2, 3)
    assert torch.equal(narrow['attention_mask'], causal_mask(3))
    assert layout.entry_of(one_row, 'position_ids') == shared_positions
    assert layout.entry_of(one_row, 'attention_mask') == SHARED_MASK
    # Without the entry, shapes decide: the mask is of the row in a batch of one row, and shared in a batch of three.
    entry_in_one_row = TEXT_LAYOUT.entry_of(one_row, 'attention_mask')
    entry_in_three_rows = TEXT_LAYOUT.entry_of(batch, 'attention_mask')
    assert entry_in_one_row.unit == 'row'
    assert entry_in_three_rows == SHARED_MASK


def test_registered_entries_keep_readings():
    """A first batch shows that a tensor does not go along the text. In a later batch it is as wide as the text."""
    memory = torch.zeros(3, 8, 5)
    first_batch = text_batch([12, 2, 3], memory=memory)
    later_batch = text_batch([8, 2, 3], memory=memory)
    readings = TEXT_LAYOUT.readings_of(first_batch)
    layout_of_run = TEXT_LAYOUT.with_readings(readings)

    layout = layout_of_run.with_entries(tags=Entry())

    entry = layout.entry_of(later_batch, 'memory')
    assert entry.seq_dims == ()


@pytest.mark.parametrize(
    ('key', 'value', 'words'),
    [
        pytest.param('position_ids', torch.arange(5), 'one entry for each .*shape', id='positions without rows'),
        pytest.param(
            'position_ids',
            torch.zeros(3, 2, 5).long(),  # (axes, rows, width)
            '3 entries along dimension -2',
            id='rotary positions of two rows',
        ),
        pytest.param('pixel_values', torch.tensor(1.0), 'one entry for each .*shape', id='a number as images'),
        pytest.param('token_type_ids', torch.tensor(1), 'one entry for each .*shape', id='a number as types'),
    ],
)
def test_tensor_without_its_rows_is_refused(key, value, words):
    batch = three_rows(**{key: value})

    with pytest.raises(ValueError, match=rf"batch\['{key}'\].*{words}"):
        LLAVA_LAYOUT.select(batch, [1])


def test_unknown_family_can_be_passed():
    image = Entry(unit='image')
    family = Family(name='new', entries={'pixel_values': image})
    layout = BatchLayout(family=family)
    batch = text_batch([3, 2], num_images=[2, 1], pixel_values=numbered(3, 1))

    assert images_of_rows(layout, batch, [1]) == [2]


@pytest.mark.parametrize('family', FAMILIES, ids=lambda family: family.name)
def test_layout_travels_to_loader_workers(family):
    layout = BatchLayout(family=family, config=SimpleNamespace(image_token_id=IMAGE))

    copy_in_worker = pickle.loads(pickle.dumps(layout))

    assert copy_in_worker == layout


# Joining.


def test_padding_side_is_checked():
    with pytest.raises(ValueError, match="'left' or 'right', got: 'middle'"):
        TEXT_LAYOUT.concat([text_batch([3])], padding_side='middle')


@pytest.mark.parametrize(
    ('key', 'value'),
    [
        pytest.param('token_type_ids', torch.zeros(1, 3).long(), id='tensor'),
        pytest.param('sample_ids', ['a'], id='list'),
    ],
)
def test_entry_of_some_samples_is_refused(key, value):
    without_entry = text_batch([3])
    with_entry = text_batch([3], **{key: value})

    with pytest.raises(ValueError, match=f'`{key}` must be in every batch or in none, got: 1 of 2'):
        TEXT_LAYOUT.concat([without_entry, with_entry])


@pytest.mark.parametrize('count', [list, torch.tensor], ids=['list', 'tensor'])
def test_text_rows_lack_counts(count):
    """A collator may leave `num_images` out of a batch without images."""
    num_images = count([2, 1])
    with_images = text_batch([3, 2], num_images=num_images, pixel_values=numbered_images(3))
    without_images = text_batch([4])

    joined = LLAVA_LAYOUT.concat([without_images, with_images])

    assert joined['num_images'] == [0, 2, 1]


def test_text_rows_lack_image_entries():
    text = text_batch([2, 1])
    with_image = text_batch([3])
    with_image['pixel_values'] = torch.ones(1, 3, 3, 2, 2)
    with_image['image_sizes'] = torch.ones(1, 2)
    with_image['batch_num_images'] = torch.tensor([1])

    joined = LLAVA_LAYOUT.concat([text, with_image], pad_token_id=7)

    assert joined['batch_num_images'].tolist() == [0, 0, 1]
    assert joined['input_ids'].tolist() == [
        [1, 2, 7],
        [1, 0, 7],  # its own padding is kept
        [1, 2, 3],
    ]
    assert len(joined['pixel_values']) == 1


def test_concat_loses_no_plain_value():
    """A value that all batches share stays plain. Other values become a list with a value for each row."""
    batches = [
        text_batch([3], source='ai2d', version=2),
        text_batch([4, 2], source='chartqa', version=2),
        text_batch([5]),
    ]

    joined = TEXT_LAYOUT.concat(batches)
    second_and_first = TEXT_LAYOUT.select(joined, [1, 0])

    assert joined['source'] == ['ai2d', 'chartqa', 'chartqa', None]
    assert joined['version'] == 2
    assert second_and_first['source'] == ['chartqa', 'ai2d']


def test_plain_value_of_a_shared_key_stays_plain():
    layout = TEXT_LAYOUT.with_entries(temperature=Entry(unit='shared'))
    first = text_batch([3], temperature=0.5)
    second = text_batch([4], temperature=0.5)

    joined = layout.concat([first, second])

    assert joined['temperature'] == 0.5


def joined_entry(key, first, second):
    """Joins a sample of 3 tokens and one of 4 tokens, which have these values. Returns the entry of the batch."""
    sample_of_3 = text_batch([3], **{key: first})
    sample_of_4 = text_batch([4], **{key: second})
    joined = TEXT_LAYOUT.concat([sample_of_3, sample_of_4])
    return joined[key]


def test_arrays_are_kept_by_row():
    boxes = np.arange(4)

    first, second = joined_entry('boxes', boxes, boxes)

    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [0, 1, 2, 3]


def test_list_is_joined_with_plain_value():
    """Samples of one source share its name, so a batch of them has a string, and another batch a list."""
    two_sources = text_batch([3, 4], source=['ai2d', 'chartqa'])
    one_source = text_batch([2, 1], source='ocr')

    list_first = TEXT_LAYOUT.concat([two_sources, one_source])
    string_first = TEXT_LAYOUT.concat([one_source, two_sources])

    assert list_first['source'] == ['ai2d', 'chartqa', 'ocr', 'ocr']
    assert string_first['source'] == ['ocr', 'ocr', 'ai2d', 'chartqa']


@pytest.mark.parametrize(
    ('first', 'second'),
    [
        pytest.param(torch.ones(1), [1.0], id='tensor and list'),
        pytest.param([1.0], torch.ones(1), id='list and tensor'),
        pytest.param(1.0, torch.ones(1), id='number and tensor'),
    ],
)
def test_tensor_joins_no_other_type(first, second):
    with pytest.raises(ValueError, match=r'`scores` must be a tensor .* and a (list|float)'):
        joined_entry('scores', first, second)


@pytest.mark.parametrize('key', ['loss_weights', 'scores'])
@pytest.mark.parametrize(
    ('first', 'second'),
    [
        pytest.param(2, 0.5, id='int first'),
        pytest.param(0.5, 2, id='float first'),
    ],
)
def test_joined_numbers_are_not_rounded(key, first, second):
    first_value = torch.tensor([first])
    second_value = torch.tensor([second])

    joined = joined_entry(key, first_value, second_value)

    assert joined.tolist() == [first, second]


def test_integer_weights_of_some_samples():
    """The missing weight is NaN, which an integer tensor cannot hold."""
    with_weight = text_batch([3], loss_weights=torch.tensor([2]))
    without_weight = text_batch([4])

    joined = TEXT_LAYOUT.concat([with_weight, without_weight])

    weight, no_weight = joined['loss_weights']
    assert weight == 2
    assert no_weight.isnan()


@pytest.mark.parametrize(
    ('key', 'first', 'second'),
    [
        pytest.param(
            'loss_weights',
            torch.ones(1),
            torch.ones(1, 4),
            id='by row and by position',
        ),
        pytest.param(
            'attention_mask',
            torch.ones(1, 3),
            torch.ones(1, 1, 4, 4),
            id='masks of two and four dimensions',
        ),
        pytest.param(
            'attention_mask',
            torch.ones(1, 1, 3, 3).bool(),
            torch.zeros(1, 1, 4, 4),
            id='boolean and additive masks',
        ),
    ],
)
def test_tensors_of_two_forms_are_refused(key, first, second):
    width = second.shape[-1]

    with pytest.raises(ValueError, match=f'`{key}` .*same form.*{width}'):
        joined_entry(key, first, second)


def test_joining_counts_images_of_text_rows():
    one_image = processed_by_onevision([3], images=[1])
    no_image = processed_by_onevision([2], images=[0])
    two_images = processed_by_onevision([4], images=[2])

    joined = LLAVA_LAYOUT.concat([one_image, no_image, two_images])
    last_and_middle = LLAVA_LAYOUT.select(joined, [2, 1])

    assert last_and_middle['batch_num_images'].tolist() == [2, 0]
    assert numbers_of(last_and_middle['pixel_values']) == [0, 1]


WIDE_POSITIONS = torch.tensor([[0, 1, 2, 3]])
FROM_0 = torch.tensor([[0, 1, 2]])
FROM_1 = torch.tensor([[1, 2, 3]])
FROM_10 = torch.tensor([[10, 11, 12]])


@pytest.mark.parametrize(
    ('side', 'agreeing', 'other'),
    [
        pytest.param('right', FROM_0, FROM_10, id='right'),
        pytest.param('left', FROM_1, FROM_0, id='left'),
    ],
)
def test_shared_positions_must_agree(side, agreeing, other):
    """New padding on the left moves the tokens of the narrow batch by one position."""
    wide = text_batch([4, 2], side=side, position_ids=WIDE_POSITIONS)
    narrow_that_agrees = text_batch([3], position_ids=agreeing)
    narrow_that_differs = text_batch([3], position_ids=other)

    joined = TEXT_LAYOUT.concat([narrow_that_agrees, wide], padding_side=side)

    assert torch.equal(joined['position_ids'], WIDE_POSITIONS)
    with pytest.raises(ValueError, match=r'position_ids.*same for all rows'):
        TEXT_LAYOUT.concat([narrow_that_differs, wide], padding_side=side)


def test_shared_positions_and_own_ones():
    """Positions of one row can be joined with positions of each row. Positions that several rows share cannot."""
    positions_of_one_row = torch.arange(4)[None]
    positions_of_each_row = torch.tensor(
        [
            [0, 1, 2],
            [5, 6, 0],
        ]
    )
    one_row = text_batch([4], position_ids=positions_of_one_row)
    two_rows = text_batch([3, 2], position_ids=positions_of_each_row)
    two_rows_that_share = text_batch([4, 4], position_ids=positions_of_one_row)

    joined = TEXT_LAYOUT.concat([one_row, two_rows])

    assert joined['position_ids'].tolist() == [
        [0, 1, 2, 3],
        [0, 1, 2, 0],
        [5, 6, 0, 0],
    ]
    with pytest.raises(ValueError, match=r'position_ids.*same form'):
        TEXT_LAYOUT.concat([two_rows_that_share, two_rows])


# Media.


def images_of(*rows, count, **entries):
    """Returns the number of entries of ``pixel_values`` of each row, by the placeholders of LLaVA.

    In a row ``i`` is a placeholder, and a digit a word.
    """
    vision_config = SimpleNamespace(patch_size=2)
    config = SimpleNamespace(image_token_id=IMAGE, vision_config=vision_config)
    layout = BatchLayout(family=LLAVA, config=config)
    pixels = torch.rand(count, 3, 2, 2)
    batch = drawn_batch(*rows, pixel_values=pixels, **entries)
    return layout.images_per_row(batch)


def test_placeholders_tell_tiles_of_carried_images():
    assert images_of('iii1', 'i123', count=4, num_images=[1, 1]) == [3, 1]


@pytest.mark.parametrize(
    ('rows', 'image_sizes', 'expected'),
    [
        pytest.param(['1iiii2', '345678', 'ii1'], None, [2, 0, 1], id='touching images of equal size'),
        pytest.param(['ii1ii1', 'ii1ii'], None, [1, 1], id='an image over two lines is one'),
        pytest.param(
            ['iii1iii', 'iiiiiiiiiiii1'],
            [[2, 6], [6, 2], [4, 12]],
            [2, 1],
            id='sizes of Pixtral, by the mean size it would be 1 and 2',
        ),
    ],
)
def test_placeholders_tell_the_images(rows, image_sizes, expected):
    entries = {} if image_sizes is None else {'image_sizes': torch.tensor(image_sizes)}
    num_images = sum(expected)

    assert images_of(*rows, count=num_images, **entries) == expected


UNEQUAL = ['iii1', 'ii12']
"""Rows with 3 and 2 placeholders. Three images of one size cannot have 5 placeholders."""


@pytest.mark.parametrize(
    ('rows', 'entries', 'words'),
    [
        pytest.param(UNEQUAL, {}, r'\(pixel_values\), got: \[3, 2\] placeholders', id='images of unequal size'),
        pytest.param(UNEQUAL, {'num_images': [1, 1]}, r'got: \[3, 2\] placeholders', id='wrong numbers carried'),
        pytest.param(
            ['i1', 'i1'],
            {'image_sizes': torch.tensor([[2, 2], [2, 1], [2, 2]])},
            'no way to share them',
            id='an image without placeholders could belong to either row',
        ),
        pytest.param(
            ['iiii111', 'iii1iii'],
            {'image_sizes': torch.tensor([[2, 4], [2, 4], [4, 6]])},
            r"'image_sizes': \[2, 1\], 'runs of placeholders': \[1, 2\]",
            id='touching images and lines: sizes and runs disagree',
        ),
    ],
)
def test_ambiguous_images_are_refused(rows, entries, words):
    with pytest.raises(ValueError, match=f'{words}.*Carry `num_images`'):
        images_of(*rows, count=3, **entries)


def test_one_row_has_all_the_images():
    pixels = torch.rand(3, 3, 2, 2)
    batch = drawn_batch('iiii', pixel_values=pixels)

    assert LLAVA_LAYOUT.images_per_row(batch) == [3]


SLOT_LAYOUT = layout_of_model('idefics3')
"""Idefics3 has a slot for each image of a row."""


def batch_with_empty_slots(form):
    """Returns two rows of three slots, with an image in the second and in the first slot. ``form`` marks the others."""
    is_image = torch.tensor(
        [
            [0, 1, 0],
            [1, 0, 0],
        ]
    )
    is_pixel = is_image[:, :, None, None].expand(2, 3, 4, 4)
    batch = text_batch([3, 2])
    batch['pixel_values'] = torch.rand(2, 3, 3, 4, 4)
    if form == 'mask of pixels':
        batch['pixel_attention_mask'] = is_pixel
    elif form == 'empty slots are zeros':
        batch['pixel_values'] *= is_pixel[:, :, None]
    else:
        batch['pixel_attention_mask'] = is_image
    return batch


@pytest.mark.parametrize('form', ['mask of pixels', 'mask of images, as in Granite Docling', 'empty slots are zeros'])
@pytest.mark.parametrize(
    ('rows', 'num_slots'),
    [
        pytest.param([0], 2, id='the row with an empty slot before its image'),
        pytest.param([1], 1, id='the other row'),
        pytest.param([1, 0], 2, id='both rows'),
    ],
)
def test_empty_slot_before_image_is_kept(form, rows, num_slots):
    """Empty slots after the last image are cut off."""
    batch = batch_with_empty_slots(form)

    selected = SLOT_LAYOUT.select(batch, rows)

    assert SLOT_LAYOUT.images_per_row(batch) == [2, 1]
    for key in ('pixel_values', 'pixel_attention_mask'):
        if key in batch:
            expected = batch[key][rows, :num_slots]
            assert torch.equal(selected[key], expected)
    assert selected['pixel_values'].is_contiguous(), 'the model views rows and slots as one dimension'


def test_mask_of_slots_stays_boolean():
    """A batch without images is joined with one whose mask of pixels is boolean."""
    with_image = text_batch([3])
    with_image['pixel_values'] = torch.rand(1, 1, 3, 2, 2)
    with_image['pixel_attention_mask'] = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    with_image['tile_fine_mask'] = torch.tensor([True])  # of the rows
    text = text_batch([2])

    joined = SLOT_LAYOUT.concat([with_image, text])

    assert joined['pixel_attention_mask'].dtype == torch.bool
    assert joined['tile_fine_mask'].tolist() == [True, False]
    assert SLOT_LAYOUT.images_per_row(joined) == [1, 0]


def batch_with_videos():
    """Returns rows with an image, with two videos, and with an image and a video, as Qwen's processor makes them.

    The images have 4 and 8 patches, the videos 8, 4 and 12: the products of their time, height and width.
    """
    image_grids = [
        [1, 2, 2],
        [1, 2, 4],
    ]
    video_grids = [
        [2, 2, 2],
        [1, 2, 2],
        [3, 2, 2],
    ]
    return three_rows(
        num_images=[1, 0, 1],
        num_videos=[0, 2, 1],
        image_grid_thw=torch.tensor(image_grids),
        video_grid_thw=torch.tensor(video_grids),
        pixel_values=numbered(12, 1),
        pixel_values_videos=numbered(24, 1),
        second_per_grid_ts=torch.tensor([0.5, 1.0, 2.0]),
    )


def test_videos_go_with_their_rows():
    batch = batch_with_videos()
    second_image = list(range(4, 12))
    first_two_videos = list(range(12))
    last_video = list(range(12, 24))

    last_and_middle = QWEN_LAYOUT.select(batch, [2, 1])
    middle = QWEN_LAYOUT.select(batch, [1])

    assert QWEN_LAYOUT.media_per_row(batch) == [1, 2, 2]
    assert numbers_of(last_and_middle['pixel_values']) == second_image
    assert numbers_of(last_and_middle['pixel_values_videos']) == last_video + first_two_videos
    assert last_and_middle['second_per_grid_ts'].tolist() == [2.0, 0.5, 1.0]
    assert 'pixel_values' not in middle
    assert 'image_grid_thw' not in middle


@pytest.mark.parametrize(
    ('key', 'unit'),
    [
        ('pixel_values', 'image'),
        ('crops', 'image'),
        ('crops', 'box'),
        ('crops', 'shared'),
    ],
)
def test_list_of_media_is_refused(key, unit):
    """Two entries for two rows, but both may be of the first row: a list would give each row one of them."""
    layout = LLAVA_LAYOUT.with_entries(crops=Entry(unit=unit))
    wide_image = torch.zeros(3, 2, 2)
    high_image = torch.zeros(3, 4, 2)
    batch = text_batch([3, 2], num_images=[2, 0], num_boxs=[2, 0])
    batch[key] = [wide_image, high_image]

    with pytest.raises(ValueError, match=rf"batch\['{key}'\].* got: list of 2 {unit} entries for 2 rows"):
        layout.select(batch, [0])


def test_patches_without_grid_are_refused():
    batch = text_batch([3, 2], num_images=[1, 0], pixel_values=numbered(4, 1))

    with pytest.raises(ValueError, match=r'`image_grid_thw` must be in the batch.*patches of each image'):
        QWEN_LAYOUT.select(batch, [0])


# Rows without ids.


WHISPER_BATCH = {
    'input_features': torch.rand(3, 8, 16),
    'labels': torch.tensor(
        [
            [3, 4, 5, 2],
            [6, 2, -100, -100],
            [7, 8, 2, -100],
        ]
    ),
    'sample_ids': ['a', 'b', 'c'],
}
for_each_whisper_layout = pytest.mark.parametrize(
    'layout', [layout_of_model('whisper'), BatchLayout.infer(WHISPER_BATCH)], ids=['of the model', 'inferred']
)


@for_each_whisper_layout
def test_rows_without_ids_keep_their_width(layout):
    trimmed = layout.trim(WHISPER_BATCH)

    assert layout.num_rows(WHISPER_BATCH) == 3
    assert layout.width(WHISPER_BATCH) == 4
    assert lengths_of(WHISPER_BATCH, layout) == [4, 4, 4]
    assert layout.media_per_row(WHISPER_BATCH) == [0, 0, 0]
    assert padding_side(WHISPER_BATCH) == 'right'
    assert trimmed.keys() == WHISPER_BATCH.keys()


@for_each_whisper_layout
def test_labels_without_ids_are_padded(layout):
    wide, narrow = layout.split(WHISPER_BATCH, [[2, 0], [1]])
    narrow['labels'] = narrow['labels'][:, :2]  # without its padding

    joined = layout.concat([narrow, wide])

    expected_labels = WHISPER_BATCH['labels'][[1, 2, 0]]
    assert torch.equal(joined['labels'], expected_labels)


def test_batch_without_any_text():
    batch = {'input_features': torch.rand(2, 4, 20)}

    with pytest.raises(ValueError, match=r"must have tensors `input_ids` or `labels`.*got: \['input_features'\]"):
        TEXT_LAYOUT.num_rows(batch)


# Memory.


@pytest.fixture
def image_batch():
    """Four rows with an image each."""
    pixels = torch.rand(4, 3, 2, 2)
    return text_batch([3, 3, 3, 3], num_images=[1, 1, 1, 1], pixel_values=pixels)


def test_split_needs_numbers_of_rows(image_batch):
    for rows in ([0, True], [4], [-1]):
        with pytest.raises(ValueError, match=f'`rows` must be .*got: {rows[-1]}'):
            LLAVA_LAYOUT.split(image_batch, [[0], rows])


@pytest.mark.parametrize('as_mask', [list, np.array, torch.tensor])
def test_mask_of_rows_is_refused(image_batch, as_mask):
    """Its entries would be taken for the rows 1, 0, 0 and 1."""
    with pytest.raises(ValueError, match=r'`rows` must be numbers of the 4 rows .*True'):
        LLAVA_LAYOUT.select(image_batch, as_mask([True, False, False, True]))


def test_each_group_keeps_its_columns():
    """Also of tensors that all rows share. Tensors without text are kept as they are."""
    layout = TEXT_LAYOUT.with_entries(attention_mask=SHARED_MASK)
    batch = three_rows()
    batch['attention_mask'] = causal_mask(5)
    batch['position_ids'] = torch.arange(5)[None]
    batch['scores'] = torch.tensor([0.1, 0.2, 0.3])
    groups = [[2, 0], [0, 1, 2]]
    columns = [range(1, 4), range(3)]

    last_and_first, all_rows = layout.split(batch, groups, columns)

    assert last_and_first['input_ids'].tolist() == [
        [2, 0, 0],
        [2, 3, 0],
    ]
    assert last_and_first['position_ids'].tolist() == [[1, 2, 3]]
    assert torch.equal(last_and_first['attention_mask'], causal_mask(3))
    assert torch.equal(last_and_first['scores'], torch.tensor([0.3, 0.1]))
    assert all_rows['labels'].tolist() == [
        [1, 2, 3],
        [1, 2, 3],
        [1, 2, -100],
    ]
    # Models and metrics may view them with another shape.
    assert last_and_first['attention_mask'].is_contiguous()
    assert all_rows['labels'].is_contiguous()


def test_shared_mask_is_not_copied():
    """A mask that is expanded to all heads has gaps in memory. A copy for each group would be much larger."""
    mask_of_heads = causal_mask(5).expand(1, 4, 5, 5)
    batch = three_rows(attention_mask=mask_of_heads)

    groups = TEXT_LAYOUT.split(batch, [[0], [2, 1]])

    for group in groups:
        assert group['attention_mask'] is mask_of_heads


def test_rows_are_counted_once(monkeypatch, image_batch):
    """Counting placeholders reads the ids, so a split must not count them for each of its parts."""
    counted_units = []
    original = BatchLayout.units_per_row

    def units_per_row(self, batch, unit):
        counted_units.append(unit)
        return original(self, batch, unit)

    monkeypatch.setattr(BatchLayout, 'units_per_row', units_per_row)

    LLAVA_LAYOUT.split(image_batch, [[0], [1], [3, 2]])

    assert sorted(counted_units) == ['image', 'row']


class PageLocks:
    """Stands in for page-locked memory, which needs a GPU: remembers which tensors would be locked."""

    def __init__(self):
        self.tensors = []  # kept, so that no other tensor gets their memory

    def is_locked(self, tensor):
        address = tensor.untyped_storage().data_ptr()
        return any(address == locked.untyped_storage().data_ptr() for locked in self.tensors)

    def empty(self, shape, like):
        tensor = torch.empty(shape, dtype=like.dtype)
        if self.is_locked(like):
            self.tensors.append(tensor)
        return tensor


@pytest.mark.parametrize('rows', [[3, 1], [2, 3]], ids=['rows in another order', 'consecutive rows'])
def test_copies_stay_page_locked(monkeypatch, image_batch, rows):
    locks = PageLocks()
    monkeypatch.setattr(tensors, '_is_page_locked', locks.is_locked)
    monkeypatch.setattr(tensors, '_empty', locks.empty)
    text = text_batch([3, 2, 1, 2], width=5)
    batch = {**image_batch, **text}
    locked_keys = ['input_ids', 'attention_mask', 'labels', 'pixel_values']
    for key in locked_keys:
        locks.tensors.append(batch[key])
    batch['loss_mask'] = text['labels'].clone()  # not page-locked

    selected = trimmed_rows(LLAVA_LAYOUT, batch, rows)

    assert selected['input_ids'].shape == (2, 2)
    for key in locked_keys:
        assert locks.is_locked(selected[key]), key
    assert not locks.is_locked(selected['loss_mask'])


@dataclass(frozen=True, kw_only=True)
class UnregisteredText:
    """A tensor along the text, of a row of 1 token and of a row of 3. The longer row fills its width."""

    key: str
    of_first: list
    """Its second value, if it has one, is on padding."""
    of_second: list
    fill: float
    """The value that pads the first row."""


UNREGISTERED_TEXT = {
    'value on padding': UnregisteredText(
        key='tags',
        of_first=[1, -7],
        of_second=[2, 3, 4],
        fill=-7,
    ),
    'NaN on padding': UnregisteredText(
        key='scores',
        of_first=[1.0, math.nan],
        of_second=[2.0, 3.0, 4.0],
        fill=math.nan,
    ),
    'has ignored labels': UnregisteredText(
        key='tags',
        of_first=[1],
        of_second=[-100, 3, 4],
        fill=-100,
    ),
    'name of labels': UnregisteredText(
        key='ner_labels',
        of_first=[1],
        of_second=[2, 3, 4],
        fill=-100,
    ),
    'name of a mask': UnregisteredText(
        key='label_mask',
        of_first=[1],
        of_second=[1, 1, 4],
        fill=0,
    ),
    'other name': UnregisteredText(
        key='is_target',
        of_first=[1],
        of_second=[1, 0, 4],
        fill=0,
    ),
}


@pytest.mark.parametrize('situation', UNREGISTERED_TEXT)
def test_fill_of_unregistered_text(situation):
    """The value on the collator's own padding, -100 for labels, or 0."""
    text = UNREGISTERED_TEXT[situation]
    first = text_batch([1], width=len(text.of_first))
    second = text_batch([3])
    first[text.key] = torch.tensor([text.of_first])
    second[text.key] = torch.tensor([text.of_second])

    joined = TEXT_LAYOUT.concat([first, second])

    joined_first, _ = joined[text.key].tolist()
    assert joined_first[-1] == pytest.approx(text.fill, nan_ok=True)


def test_hole_does_not_tell_the_fill():
    """A token that is hidden from attention may have a label of a second task."""
    with_hole = {
        'input_ids': torch.tensor([[1, 2, 3]]),
        'attention_mask': torch.tensor([[1, 0, 1]]),
        'labels': torch.tensor([[1, -100, 3]]),
        'ner_labels': torch.tensor([[1, 5, 2]]),
    }
    longer = text_batch([4])
    longer['ner_labels'] = torch.tensor([[1, 2, 3, 4]])

    joined = TEXT_LAYOUT.concat([with_hole, longer])

    assert joined['ner_labels'].tolist() == [
        [1, 5, 2, -100],
        [1, 2, 3, 4],
    ]
