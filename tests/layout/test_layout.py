# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of hand-written batches: masks, positions, labels, media, unknown entries; joined again."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.batch import padding_side
from composer_tokacc.layout import FAMILIES, Entry, Family, describe, tensors
from tests.support.families import FAMILIES as CASES
from tests.support.small_batches import LLAVA, QWEN, TEXT, text_batch
from tests.support.text import whisper_model

IMAGE = 9


@pytest.mark.parametrize('model', [3, None, torch.nn.Linear(1, 1)])
def test_layout_needs_a_config(model):
    with pytest.raises(TypeError, match='`model` must have a `config` with a `model_type`, got: '):
        BatchLayout.for_model(model)


# The real span.


@pytest.mark.parametrize('side', ['left', 'right'])
def test_lengths_and_trim_on_either_side(side):
    batch, layout = text_batch([3, 5, 2], side=side, width=8), BatchLayout(family=TEXT)
    assert padding_side(batch) == side
    assert describe(layout, batch).lengths == [3, 5, 2]
    trimmed = layout.trim(batch)
    expected = text_batch([3, 5, 2], side=side)
    for key, value in expected.items():
        torch.testing.assert_close(trimmed[key], value)
        assert trimmed[key].is_contiguous()
    one = layout.trim(layout.select(batch, [2]))
    assert one['input_ids'].tolist() == [[1, 2]]


@pytest.mark.parametrize(('multiple', 'width'), [(1, 5), (2, 6), (4, 8), (7, 7), (16, 9)])
def test_width_multiple_stays_inside_the_batch(multiple, width):
    layout = BatchLayout(family=TEXT)
    for side in ('left', 'right'):
        batch = text_batch([3, 5, 2], side=side, width=9)
        trimmed = layout.trim(batch, width_multiple=multiple)
        assert {value.shape[1] for value in trimmed.values()} == {width}
        assert trimmed['attention_mask'].sum() == batch['attention_mask'].sum()


@pytest.mark.parametrize(
    ('lengths', 'width', 'changes', 'expected'),
    [
        # A real token with the id of the pads, and pads with the id of a real token.
        ([3, 5], 7, [('input_ids', (0, 1), 0), ('input_ids', (slice(None), slice(5, 7)), 4)], [3, 5]),
        # The first pad is attended: Monkey and other Qwen-7B trainings pad with the end token.
        ([3, 5], 7, [('attention_mask', (0, 3), 1), ('attention_mask', (1, 5), 1)], [4, 6]),
        ([3, 2], 8, [('labels', (0, 6), 1)], [7, 2]),  # a label on a pad is never trimmed
        ([3, 2], 8, [('labels', (0, 4), 1)], [5, 2]),
        ([0, 0], 4, [], [1, 1]),  # an empty row keeps a column
    ],
)
@pytest.mark.parametrize('side', ['right', 'left'])
def test_lengths_of_unusual_padding(lengths, width, changes, expected, side):
    batch, layout = text_batch(lengths, width=width), BatchLayout(family=TEXT)
    for key, place, value in changes:
        batch[key][place] = value
    if side == 'left':
        batch = {key: value.flip(1) for key, value in batch.items()}
    assert describe(layout, batch).lengths == expected
    trimmed = layout.trim(batch)
    assert trimmed['input_ids'].shape == (2, max(expected))
    assert trimmed['attention_mask'].sum() == batch['attention_mask'].sum()
    assert (trimmed['labels'] != -100).sum() == (batch['labels'] != -100).sum()


def test_batch_without_mask_is_never_trimmed():
    batch, layout = text_batch([3, 5], width=7), BatchLayout(family=TEXT)
    del batch['attention_mask']
    assert describe(layout, batch).lengths == [7, 7]


@pytest.mark.parametrize('form', ['boolean', 'additive', 'integer', 'three-dimensional'])
@pytest.mark.parametrize('side', ['left', 'right'])
def test_masks_that_carry_the_width_twice(form, side):
    layout = BatchLayout(family=TEXT)
    flat = text_batch([3, 5, 2], side=side, width=8)
    causal = torch.ones(8, 8).tril().bool()
    square = (causal & flat['attention_mask'].bool()[:, None, :])[:, None]
    mask = {
        'boolean': square,
        'integer': square.long(),
        'additive': torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min),
        'three-dimensional': square[:, 0],
    }[form]
    batch = {**flat, 'attention_mask': mask, 'labels': torch.full_like(flat['labels'], -100)}
    assert padding_side(batch) == side
    assert describe(layout, batch).lengths == [3, 5, 2]
    row = layout.trim(layout.select(batch, [0]))
    assert row['attention_mask'].shape[-2:] == (3, 3)
    span = slice(5, 8) if side == 'left' else slice(0, 3)
    torch.testing.assert_close(row['attention_mask'], mask[:1, ..., span, span])
    # Joined again, no real position may attend to the new pads.
    joined = layout.concat([row, layout.trim(layout.select(batch, [1]))], padding_side=side)
    assert joined['attention_mask'].shape[-2:] == (5, 5)
    assert describe(layout, joined).lengths == [3, 5]


def assert_parts_keep_the_loss(case, layout, batch):
    """The loss of parts, of rows by themselves and of parts joined again."""
    with torch.no_grad():
        parts = [layout.trim(layout.select(batch, rows)) for rows in ([4, 0], [1, 5, 3], [2])]
        own = sum(case.loss_sum(row) for row in case.rows)
        rejoined = layout.concat(parts, pad_token_id=case.pad_token_id)
        for loss in (case.loss_sum(batch), sum(map(case.loss_sum, parts)), case.loss_sum(rejoined)):
            torch.testing.assert_close(loss, own, rtol=1e-5, atol=0)


def test_additive_mask_keeps_the_loss():
    case = CASES['llama']()
    layout = BatchLayout.for_model(case.model)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    width = batch['input_ids'].shape[1]
    allowed = (torch.ones(width, width).tril().bool() & batch['attention_mask'].bool()[:, None, :])[:, None]
    square = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    assert_parts_keep_the_loss(case, layout, {**batch, 'attention_mask': square})


# Entries.


@pytest.mark.parametrize('side', ['left', 'right'])
def test_rotary_positions_of_three_axes(side):
    layout = BatchLayout(family=QWEN)
    flat = text_batch([3, 5, 2], side=side, width=6)
    positions = torch.arange(3 * 3 * 6).view(3, 3, 6)
    batch = {**flat, 'position_ids': positions}
    part = layout.trim(layout.select(batch, [2, 0]))
    span = slice(3, 6) if side == 'left' else slice(0, 3)
    torch.testing.assert_close(part['position_ids'], positions[:, [2, 0], span])
    rest = layout.select(batch, [1])
    joined = layout.concat([part, rest], padding_side=side)
    assert joined['position_ids'].shape == (3, 3, 6)
    torch.testing.assert_close(joined['position_ids'][:, 2], positions[:, 1])


def test_rotary_positions_keep_the_loss():
    case = CASES['qwen2_vl']()
    layout = BatchLayout.for_model(case.model)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    core = getattr(case.model, 'model', case.model)
    core = core if hasattr(core, 'get_rope_index') else case.model  # up to 4.51 it is the outer model's
    named = {'mm_token_type_ids': batch['mm_token_type_ids']} if 'mm_token_type_ids' in batch else {}
    positions, _ = core.get_rope_index(
        batch['input_ids'], image_grid_thw=batch['image_grid_thw'], attention_mask=batch['attention_mask'], **named
    )
    assert positions.shape == (3, 6, batch['input_ids'].shape[1])
    assert_parts_keep_the_loss(case, layout, {**batch, 'position_ids': positions})


@pytest.mark.parametrize(
    'key', ['token_type_ids', 'mm_token_type_ids', 'loss_mask', 'sequence_id', 'special_tokens_mask']
)
def test_token_wise_entries_are_selected(key):
    layout, batch = BatchLayout(family=TEXT), text_batch([3, 5, 2], width=6)
    batch[key] = torch.arange(18).view(3, 6)
    part = layout.trim(layout.select(batch, [2, 0]))
    assert part[key].tolist() == [[12, 13, 14], [0, 1, 2]]


def test_lists_none_and_plain_values():
    layout, batch = BatchLayout(family=TEXT), text_batch([3, 5, 2])
    batch |= {'sample_ids': ['a', 'b', 'c'], 'pixel_values': None, 'task': 'ocr', 'step': 3, 'weights': (1, 2, 3)}
    part = layout.select(batch, [2, 0])
    assert part['sample_ids'] == ['c', 'a']
    assert part['weights'] == [3, 1]
    assert (part['pixel_values'], part['task'], part['step']) == (None, 'ocr', 3)


@pytest.mark.parametrize('rows', [[1], [0, 1, 2]])
def test_unknown_tensor_is_refused_by_name(rows):
    layout, batch = BatchLayout(family=TEXT), text_batch([3, 5, 2])
    batch['ocr_boxes'] = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"batch\['ocr_boxes'\].*with_entries\(ocr_boxes=Entry\(unit=\.\.\.\)\)"):
        layout.select(batch, rows)


def test_registered_tensors_are_selected():
    layout = BatchLayout(family=LLAVA).with_entries(
        ocr_boxes=Entry(unit='box'), image_tags=Entry(unit='image'), class_weights=Entry(unit='shared')
    )
    batch = text_batch([3, 5, 2], num_images=[1, 0, 2], num_boxs=[0, 3, 1])
    batch |= {'pixel_values': torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2)}
    batch |= {'ocr_boxes': torch.arange(4), 'image_tags': torch.arange(3), 'class_weights': torch.arange(7)}
    part = layout.select(batch, [2, 1])
    assert part['ocr_boxes'].tolist() == [3, 0, 1, 2]
    assert part['image_tags'].tolist() == part['pixel_values'][:, 0, 0, 0].tolist() == [1, 2]
    assert len(part['class_weights']) == 7


@pytest.mark.parametrize('value', [['a', 'b'], {'a': 1}, object()])
def test_values_without_rows_are_refused(value):
    layout, batch = BatchLayout(family=TEXT), text_batch([3, 5, 2], boxes=value)
    with pytest.raises(ValueError, match=r"batch\['boxes'\].*got: (list|dict|object)"):
        layout.select(batch, [1])


def test_encoder_decoder_labels_keep_their_width():
    layout = BatchLayout(family=TEXT)
    for width in (4, 8):  # the encoder's width by chance, too
        batch = text_batch([3, 5, 2], width=8)
        batch |= {'labels': torch.ones(3, width).long(), 'decoder_input_ids': torch.ones(3, width).long()}
        batch['labels'][:, 1:] = -100
        part = layout.trim(layout.select(batch, [2, 0]))
        assert part['input_ids'].shape == (2, 3)
        assert part['labels'].shape == part['decoder_input_ids'].shape == (2, width)


def test_unknown_family_can_be_passed():
    family = Family(name='new', entries={'pixel_values': Entry(unit='image')})
    batch = {**text_batch([3, 2]), 'num_images': [2, 1], 'pixel_values': torch.arange(3.0)[:, None]}
    assert BatchLayout(family=family).select(batch, [1])['pixel_values'].tolist() == [[2.0]]


@pytest.mark.parametrize('family', FAMILIES, ids=lambda family: family.name)
def test_layout_travels_to_loader_workers(family):
    layout = BatchLayout(family=family, config=SimpleNamespace(image_token_id=IMAGE))
    assert pickle.loads(pickle.dumps(layout)) == layout


# Joining.


def test_padding_side_is_checked():
    with pytest.raises(ValueError, match="'left' or 'right', got: 'middle'"):
        BatchLayout(family=TEXT).concat([text_batch([3])], padding_side='middle')


def test_entry_of_some_samples_is_refused():
    layout = BatchLayout(family=TEXT)
    for key, value in (('token_type_ids', torch.zeros(1, 3).long()), ('sample_ids', ['a'])):
        with pytest.raises(ValueError, match=f'`{key}` must be in every batch or in none, got: 1 of 2'):
            layout.concat([text_batch([3]), {**text_batch([3]), key: value}])


def test_text_rows_lack_image_entries():
    layout = BatchLayout.for_model(CASES['llava_onevision']().model)
    with_image = {**text_batch([3]), 'pixel_values': torch.ones(1, 3, 3, 2, 2), 'image_sizes': torch.ones(1, 2)}
    with_image['batch_num_images'] = torch.tensor([1])
    joined = layout.concat([text_batch([2, 1]), with_image], pad_token_id=7)
    assert joined['batch_num_images'].tolist() == [0, 0, 1]
    assert joined['input_ids'].tolist() == [[1, 2, 7], [1, 0, 7], [1, 2, 3]]
    assert len(joined['pixel_values']) == 1


# Media.


def llava_batch(ids, num_pixels, **entries):
    ids = torch.tensor(ids)
    batch = {'input_ids': ids, 'attention_mask': (ids != 0).long(), 'labels': ids}
    return {**batch, 'pixel_values': torch.rand(num_pixels, 3, 2, 2), **entries}


def layout_with_id(patch_size=2):
    config = SimpleNamespace(image_token_id=IMAGE, vision_config=SimpleNamespace(patch_size=patch_size))
    return BatchLayout(family=LLAVA, config=config)


@pytest.mark.parametrize(
    ('ids', 'sizes', 'expected'),
    [
        # Touching images of equal size.
        ([[1, 9, 9, 9, 9, 2], [3, 4, 5, 6, 7, 8], [9, 9, 1, 0, 0, 0]], None, [2, 0, 1]),
        # An image over two lines is one image.
        ([[9, 9, 1, 9, 9, 1], [9, 9, 1, 9, 9, 0]], None, [1, 1]),
        # Pixtral: rows of 3 + 3 and 12 placeholders have the same mean size of 6 as rows of one and two images.
        ([[9] * 3 + [1] + [9] * 3 + [0] * 6, [9] * 12 + [1]], [[2, 6], [6, 2], [4, 12]], [2, 1]),
        # Two touching images, and one over two lines: as many runs as one and two images would be.
        ([[9, 9, 9, 9, 1, 1, 1], [9, 9, 9, 1, 9, 9, 9]], [[2, 4], [2, 4], [4, 6]], [2, 1]),
    ],
)
def test_images_told_by_placeholders(ids, sizes, expected):
    entries = {} if sizes is None else {'image_sizes': torch.tensor(sizes)}
    assert layout_with_id().images_per_row(llava_batch(ids, sum(expected), **entries)) == expected


def test_carried_number_counts_images():
    """The processor has cut them into tiles."""
    batch = llava_batch([[9, 9, 9, 1], [9, 1, 2, 3]], 4, num_images=[1, 1])
    assert layout_with_id().images_per_row(batch) == [3, 1]


@pytest.mark.parametrize(
    ('ids', 'num_images', 'entries', 'message'),
    [
        ([[9, 9, 9, 1], [9, 9, 1, 2]], 3, {}, r'placeholders of 3 whole images, got: \[3, 2\] by row'),
        ([[9, 9, 9, 1], [9, 9, 1, 2]], 3, {'num_images': [1, 1]}, r'of 3 whole images, got: \[3, 2\] by row'),
        # A row is cut inside of an image.
        ([[9, 9, 1, 1, 1, 1], [9] * 6], 2, {}, r'got: \[2, 6\] by row, where the images fill \[4, 4\]'),
        # An image without placeholders could belong to either row.
        ([[9, 1], [9, 1]], 3, {'image_sizes': torch.tensor([[2, 2], [2, 1], [2, 2]])}, 'whole images'),
    ],
)
def test_images_that_nothing_tells_apart(ids, num_images, entries, message):
    with pytest.raises(ValueError, match=f'{message}.*Carry `num_images`'):
        layout_with_id().images_per_row(llava_batch(ids, num_images, **entries))


def test_qwen_images_found_by_grids():
    layout = BatchLayout(family=QWEN, config=SimpleNamespace(image_token_id=IMAGE))
    ids = torch.tensor([[9, 9, 9, 1], [1, 2, 3, 4], [9, 1, 9, 9]])
    grid = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2], [1, 4, 2]])  # 1, 2, 1, 2 tokens
    batch = {'input_ids': ids, 'image_grid_thw': grid, 'pixel_values': torch.arange(24.0)[:, None]}
    assert layout.images_per_row(batch) == [2, 0, 2]
    assert layout.select(batch, [2])['pixel_values'][:, 0].tolist() == list(range(12, 24))


def test_one_row_has_all_the_images():
    layout = BatchLayout(family=LLAVA)
    assert layout.images_per_row(llava_batch([[9, 9, 9, 9]], 3)) == [3]


def test_videos_go_with_their_rows():
    layout = BatchLayout(family=QWEN)
    batch = text_batch([3, 5, 2], num_images=[1, 0, 1], num_videos=[0, 2, 1])
    batch |= {'image_grid_thw': torch.tensor([[1, 2, 2], [1, 2, 4]]), 'pixel_values': torch.arange(12.0)[:, None]}
    batch |= {'video_grid_thw': torch.tensor([[2, 2, 2], [1, 2, 2], [3, 2, 2]])}
    batch |= {'pixel_values_videos': torch.arange(24.0)[:, None], 'second_per_grid_ts': torch.tensor([0.5, 1.0, 2.0])}
    assert layout.media_per_row(batch) == [1, 2, 2]
    part = layout.select(batch, [2, 1])
    assert part['pixel_values'][:, 0].tolist() == list(range(4, 12))
    assert part['pixel_values_videos'][:, 0].tolist() == [*range(12, 24), *range(12)]
    assert part['second_per_grid_ts'].tolist() == [2.0, 0.5, 1.0]
    assert not {'pixel_values', 'image_grid_thw'} & layout.select(batch, [1]).keys()
    with pytest.raises(ValueError, match=r'which of 3 videos .* `num_videos`=\[0, 1, 1\]. Carry `num_videos`'):
        layout.select({**batch, 'num_videos': [0, 1, 1]}, [1])


def test_audio_goes_with_its_rows():
    batch = text_batch([3, 5, 2], num_audios=[1, 0, 2])
    batch |= {'input_features': torch.arange(3.0)[:, None, None].expand(3, 4, 6)}
    batch |= {'feature_attention_mask': torch.ones(3, 6)}
    layout = BatchLayout.infer(batch)
    assert layout.media_per_row(batch) == [1, 0, 2]
    part = layout.select(batch, [2, 1])
    assert part['input_features'][:, 0, 0].tolist() == [1, 2]
    assert len(part['feature_attention_mask']) == 2
    del batch['num_audios']
    with pytest.raises(ValueError, match=r'which of 3 audios .*Carry `num_audios`'):
        layout.select(batch, [1])


def test_list_of_media_is_refused():
    """Two clips of unequal length cannot be told from one list entry a row."""
    layout = BatchLayout(family=LLAVA)
    batch = text_batch([3, 2], pixel_values=[torch.zeros(3, 2, 2), torch.zeros(3, 4, 2)])
    with pytest.raises(ValueError, match=r"batch\['pixel_values'\].* got: list of .* media"):
        layout.select(batch, [1])


# Rows without ids.


def test_rows_of_whisper():
    model = whisper_model().eval()
    labels = torch.tensor([[3, 4, 5, 2], [6, 2, -100, -100], [7, 8, 2, -100]])
    batch = {'input_features': torch.rand(3, 8, 16), 'labels': labels, 'sample_ids': ['a', 'b', 'c']}
    for layout in (BatchLayout.for_model(model), BatchLayout.infer(batch)):
        assert (layout.num_rows(batch), layout.width(batch), describe(layout, batch).lengths) == (3, 4, [4, 4, 4])
        assert (layout.media_per_row(batch), padding_side(batch)) == ([0] * 3, 'right')
        assert layout.trim(batch).keys() == batch.keys()
        parts = [layout.trim(part) for part in layout.split(batch, [[2, 0], [1]])]
        assert parts[0]['sample_ids'] == ['c', 'a']

        def loss_sum(part):
            named = {key: value for key, value in part.items() if key != 'sample_ids'}
            return model(**named).loss * (part['labels'] != -100).sum()

        with torch.no_grad():
            torch.testing.assert_close(sum(loss_sum(part) for part in parts), loss_sum(batch))
        joined = layout.concat(
            [{key: value[:, :2] if key == 'labels' else value for key, value in parts[1].items()}, parts[0]]
        )
        assert joined['labels'].tolist() == [[6, 2, -100, -100], labels[2].tolist(), labels[0].tolist()]


def test_batch_without_any_text():
    with pytest.raises(ValueError, match=r"must have tensors `input_ids` or `labels`.*got: \['input_features'\]"):
        BatchLayout(family=TEXT).num_rows({'input_features': torch.rand(2, 4, 20)})


# Memory.


def image_batch(num_rows=4):
    return {**text_batch([3] * num_rows), 'num_images': [1] * num_rows, 'pixel_values': torch.rand(num_rows, 3, 2, 2)}


def test_split_equals_select():
    layout, batch = BatchLayout(family=LLAVA), image_batch()
    groups = [[2, 0], [1], [0, 1, 2, 3], [3, 2]]
    for part, rows in zip(layout.split(batch, groups), groups, strict=True):
        expected = layout.select(batch, rows)
        assert part.keys() == expected.keys()
        assert part['num_images'] == expected['num_images']
        torch.testing.assert_close(part['pixel_values'], batch['pixel_values'][rows], rtol=0, atol=0)
        torch.testing.assert_close(part['input_ids'], batch['input_ids'][rows], rtol=0, atol=0)


def test_rows_are_counted_once(monkeypatch):
    layout, batch, calls = BatchLayout(family=LLAVA), image_batch(), []
    count = BatchLayout.units_per_row
    monkeypatch.setattr(BatchLayout, 'units_per_row', lambda self, *args: calls.append(args[1]) or count(self, *args))
    layout.split(batch, [[0], [1], [3, 2]])
    assert sorted(calls) == ['image', 'row']


@pytest.mark.parametrize(
    ('to_gpu', 'rows', 'is_view'), [(True, [1, 2], True), (True, [2, 1], False), (False, [1, 2], False)]
)
def test_consecutive_rows_are_a_view(monkeypatch, to_gpu, rows, is_view):
    monkeypatch.setattr(tensors, '_on_the_way_to_a_gpu', lambda value: to_gpu)
    layout, batch = BatchLayout(family=LLAVA), image_batch()
    batch['position_ids'] = torch.arange(36).view(3, 4, 3)
    part = layout.trim(layout.select(batch, rows))
    for key in ('pixel_values', 'input_ids'):
        shares = part[key].untyped_storage().data_ptr() == batch[key].untyped_storage().data_ptr()
        assert shares == is_view, key
        torch.testing.assert_close(part[key], batch[key][rows], rtol=0, atol=0)
        assert part[key].is_contiguous()
    torch.testing.assert_close(part['position_ids'], batch['position_ids'][:, rows])
    assert part['position_ids'].is_contiguous()


@pytest.mark.parametrize('has_gpu', [True, False])
def test_microbatches_on_a_cpu_are_copies(monkeypatch, has_gpu):
    """Composer deep-copies each microbatch, and the copy of a view would hold the whole batch."""
    monkeypatch.setattr(tensors, '_has_gpu', lambda: has_gpu)
    monkeypatch.setattr(tensors, '_is_page_locked', lambda value: False)
    batch = image_batch()
    part = BatchLayout(family=LLAVA).select(batch, [1, 2])
    num_bytes = part['pixel_values'].untyped_storage().nbytes()
    assert num_bytes == (batch['pixel_values'].nbytes if has_gpu else part['pixel_values'].nbytes)


def test_copies_stay_page_locked(monkeypatch):
    """Without a GPU nothing can be page-locked: the test stands in for the three calls that need one."""
    batch, locked = image_batch(), set()
    batch |= text_batch([3, 1, 1, 2], width=5)
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            locked.add(value.untyped_storage().data_ptr())

    def empty(shape, like):
        made = torch.empty(shape, dtype=like.dtype)
        if tensors._is_page_locked(like):
            locked.add(made.untyped_storage().data_ptr())
        return made

    monkeypatch.setattr(tensors, '_is_page_locked', lambda value: value.untyped_storage().data_ptr() in locked)
    monkeypatch.setattr(tensors, '_empty', empty)
    layout = BatchLayout(family=LLAVA)
    part = layout.trim(layout.select(batch, [3, 1]))
    assert part['input_ids'].shape == (2, 2)
    for key, value in part.items():
        assert not isinstance(value, torch.Tensor) or tensors._is_page_locked(value), key
    batch['labels'] = batch['labels'].clone()
    assert not tensors._is_page_locked(layout.select(batch, [3, 1])['labels'])


def test_concat_loses_no_plain_value():
    layout = BatchLayout(family=TEXT)
    batches = [
        {**text_batch([3]), 'source': 'ai2d', 'version': 2},
        {**text_batch([4, 2]), 'source': 'chartqa', 'version': 2},
    ]
    joined = layout.concat([*batches, text_batch([5])])
    assert joined['source'] == ['ai2d', 'chartqa', 'chartqa', None]
    assert joined['version'] == 2
    assert layout.select(joined, [1, 0])['source'] == ['chartqa', 'ai2d']


def test_concat_of_shared_positions():
    layout = BatchLayout(family=TEXT)
    shared = {**text_batch([4, 2]), 'position_ids': torch.arange(4)[None]}
    narrower = {**text_batch([3]), 'position_ids': torch.arange(3)[None]}
    assert layout.concat([narrower, shared])['position_ids'].tolist() == [[0, 1, 2, 3]]
    other = {**text_batch([3]), 'position_ids': torch.arange(10, 13)[None]}
    with pytest.raises(ValueError, match=r'position_ids.*same for all rows'):
        layout.concat([other, shared])
