# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a size that was not checked before: every step is exact, or refused before the optimizer moves."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from composer.core import Event, State
from composer.models import HuggingFaceModel
from transformers import LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.length_sets import read_tables
from composer_tokacc import BatchLayout
from composer_tokacc.checks.row_ranges import (
    BeyondRotaryLimit,
    Code,
    KeyMeaning,
    PaddedRows,
    RowRanges,
    Trait,
    chosen_rows,
    ranges_of,
)
from composer_tokacc.layout import Family, Media, describe
from composer_tokacc.layout.readings import Reading
from tests.matrix.harness import kinds_of_steps
from tests.matrix.native_models import NativeModel
from tests.model_types.tiny import tiny_config
from tests.support.small_batches import IMAGE, TEXT, drawn_batch, layout_of_model, numbered, text_batch
from tests.support.text import gpt2, one_layer_model, ragged_batch
from tests.support.training import On, fit, hugging_face

TOP_K = 8
"""In a wider batch the model attends only to this many keys."""


def top_k_model(model_type: str) -> HuggingFaceModel:
    """Returns a tiny model that attends to at most 8 keys."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip('this release of transformers does not have it')
    torch.manual_seed(0)
    config = tiny_config(model_type)
    for name in ('index_topk', 'keep_window_size'):
        if hasattr(config, name):
            setattr(config, name, TOP_K)

    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        is_matrix = parameter.dim() > 1
        if is_matrix:
            torch.nn.init.normal_(parameter, std=0.15)
    return HuggingFaceModel(model, shift_labels=True, use_logits=True)


def growing_batches(side: str) -> list[dict[str, Any]]:
    """Returns one batch with rows of at most 8 tokens, then two with rows of up to 40."""
    longest_rows = [TOP_K, 40, 40]
    rng = random.Random(0)
    batches = []
    for longest in longest_rows:
        lengths = [rng.randint(3, longest) for _ in range(6)]
        row_sizes = []
        for length in lengths:
            num_labels = rng.randint(1, length - 1)
            row_sizes.append((length, num_labels))
        batch = ragged_batch(row_sizes, side=side)
        batches.append(batch)
    return batches


CUTS = [
    pytest.param('right', {}, id='right'),
    pytest.param('left', {}, id='left'),
    pytest.param('right', {'packing': True}, id='packed'),
    pytest.param('right', {'regroup': False}, id='in order'),
]


@pytest.mark.parametrize(('side', 'options'), CUTS)
@pytest.mark.parametrize(
    'model_type',
    [
        'deepseek_v32',
        'doge',
        pytest.param('glm_moe_dsa', marks=pytest.mark.slow),
    ],
)
def test_width_that_changes_the_model(model_type, side, options):
    """The first batch is so narrow that the model attends to all keys. It cannot show how wider batches behave."""
    model = top_k_model(model_type)
    batches = growing_batches(side)

    kinds = kinds_of_steps(model, batches, **options)

    # Doge of Transformers 4 is refused in the first batch already.
    may_refuse_first = transformers.__version__.startswith('4.')
    assert kinds[0] == 'exact' or may_refuse_first
    is_packed = 'packing' in options
    if is_packed or model_type == 'doge':
        assert kinds[-1] == 'refused'


def test_window_of_a_users_model():
    """The model has no `config`, but its part does."""
    model = NativeModel('causal')
    model.model.config.keep_window_size = TOP_K
    batch = ragged_batch([(TOP_K + 1, 3), (4, 2)])

    with pytest.raises(RuntimeError, match='keep_window_size'):
        fit(model, batch)


@pytest.mark.parametrize(
    ('make_model', 'packing', 'second_step'),
    [
        pytest.param(gpt2, False, 'exact', id='gpt2 padded'),
        pytest.param(gpt2, True, 'refused', id='gpt2 packed'),
        pytest.param(one_layer_model, True, 'exact', id='llama packed'),
    ],
)
def test_padding_on_both_sides_comes_later(make_model, packing, second_step):
    """GPT-2 counts positions from the first column. In a packed row they would begin at the first token."""
    first = ragged_batch()
    # Two columns of padding move to the left. With them, these rows are no longer than the row of 9 tokens.
    short_rows = [0, 1, 4, 5]
    later = copy.deepcopy(first)
    for tensor in later.values():
        tensor[short_rows] = tensor[short_rows].roll(2, dims=1)
    model = hugging_face(make_model())

    kinds = kinds_of_steps(model, [first, later], packing=packing)

    assert kinds == ['exact', second_step]


HIDDEN_SIZE = 32
"""Of the Llama of :class:`NativeModel`."""


class AddsMemory(NativeModel):
    """A Llama that adds one vector to all embeddings of a row: a sum over its memory.

    Subclasses make other vectors.
    """

    def __init__(self):
        super().__init__('causal')
        self.config = self.model.config

    def vectors_of_rows(self, batch: Any) -> torch.Tensor:
        """Returns the vector of each row, of shape ``(rows, HIDDEN_SIZE)``."""
        running_sums = batch['encoder_hidden_states'].tanh().cumsum(dim=1)
        return running_sums[:, -1]

    def forward(self, batch):
        embed = self.model.get_input_embeddings()
        embeddings = embed(batch['input_ids'])
        vectors = self.vectors_of_rows(batch)
        outputs = self.model(
            inputs_embeds=embeddings + vectors[:, None],
            attention_mask=batch['attention_mask'],
        )
        loss = self.loss_of(outputs.logits, batch['labels'])
        return {'loss': loss, 'logits': outputs.logits}


NUM_STATES = 16


def batch_with_memory(lengths: list[int], width: int, seed: int) -> dict[str, Any]:
    """Returns text padded to a width, and 16 states of a memory for each row."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(lengths), NUM_STATES, HIDDEN_SIZE, generator=generator)
    return text_batch(lengths, width=width, encoder_hidden_states=states)


@pytest.mark.parametrize(
    'widths',
    [
        pytest.param([24, 16, 8, 16], id='second batch'),
        pytest.param([16, 24, 16, 16], id='first batch'),
        pytest.param([16, 16, 32, 16], id='first two batches'),
    ],
)
def test_memory_as_wide_as_some_texts(widths):
    """A tensor of 16 states per row is not text, although the text of some batches has 16 columns."""
    batches = []
    for step, width in enumerate(widths):
        lengths = [3, 5, width - 1, width - 3]
        batch = batch_with_memory(lengths, width, seed=step)
        batches.append(batch)

    kinds = kinds_of_steps(AddsMemory(), batches)

    assert kinds == ['exact'] * len(widths)


FAMILY_OF_IMAGES = Family(name='of images', media={'image': Media()})
LAYOUT_OF_IMAGES = BatchLayout(family=FAMILY_OF_IMAGES)


def random_images(num_images: int) -> torch.Tensor:
    """Returns images that are vectors, of shape ``(num_images, HIDDEN_SIZE)``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_images, HIDDEN_SIZE, generator=generator)


class AddsImages(AddsMemory):
    """Adds the sum of a row's images. The batch has the number of images of each row."""

    def vectors_of_rows(self, batch: Any) -> torch.Tensor:
        num_rows = len(batch['input_ids'])
        if 'pixel_values' not in batch:
            return torch.zeros(num_rows, HIDDEN_SIZE)
        images_of_rows = batch['pixel_values'].split(list(batch['num_images']))
        sums_of_rows = [images.sum(dim=0) for images in images_of_rows]
        return torch.stack(sums_of_rows)


def test_as_many_images_as_rows():
    """Three rows have three images, but not one each."""
    batch = ragged_batch([(4, 2), (9, 7), (6, 3)])
    batch['pixel_values'] = random_images(3)
    first = {**batch, 'num_images': [2, 0, 1]}
    second = {**batch, 'num_images': [1, 1, 1]}
    third = {**batch, 'num_images': [0, 3, 0]}

    kinds = kinds_of_steps(AddsImages(), [first, second, third], layout=LAYOUT_OF_IMAGES)

    assert kinds == ['exact'] * 3


class SeesImagesOfOtherRows(AddsImages):
    """Adds the mean of all images of a microbatch to each row that has one."""

    def vectors_of_rows(self, batch: Any) -> torch.Tensor:
        sums_of_rows = super().vectors_of_rows(batch)
        has_image = sums_of_rows.any(dim=1, keepdim=True)
        num_rows_with_image = has_image.sum().clamp(min=1)
        mean_of_images = sums_of_rows.sum(dim=0) / num_rows_with_image
        return has_image * mean_of_images


def batch_with_images(num_images: list[int]) -> dict[str, Any]:
    """Returns eight rows of different lengths. All images have the same size."""
    lengths = [4, 9, 6, 12, 7, 10, 5, 8]
    row_sizes = [(length, 2) for length in lengths]
    batch = ragged_batch(row_sizes)
    batch['pixel_values'] = random_images(sum(num_images))
    batch['num_images'] = num_images
    return batch


@pytest.mark.parametrize(
    ('num_images', 'have_labels'),
    [
        # One row with an image does not show that a model mixes the images of several rows.
        pytest.param([0, 0, 1, 0, 1, 0, 0, 0], True, id='few rows'),
        # Rows that lost their labels to truncation are checked too, if no other rows have images.
        pytest.param([0, 1, 1, 1, 0, 0, 0, 0], False, id='without labels'),
    ],
)
def test_rows_with_images_of_one_size(num_images, have_labels):
    first = batch_with_images(num_images)
    later = batch_with_images(num_images)
    if not have_labels:
        has_image = torch.tensor(num_images) > 0
        first['labels'][has_image] = -100

    kinds = kinds_of_steps(SeesImagesOfOtherRows(), [first, later], layout=LAYOUT_OF_IMAGES)

    assert kinds == ['refused']


IMAGE_ID = 40
"""Id of a placeholder, in the vocabulary of the tiny Llama."""


class PadsToLargestImage(AddsMemory):
    """Adds to each row with images a number that depends on the largest image of the microbatch."""

    def vectors_of_rows(self, batch: Any) -> torch.Tensor:
        is_placeholder = batch['input_ids'] == IMAGE_ID
        longest_run = 0
        begins_longer_run = is_placeholder  # whether a run longer than `longest_run` begins at a position
        while begins_longer_run.any():
            longest_run += 1
            begins_longer_run = begins_longer_run[:, :-1] & is_placeholder[:, longest_run:]

        vector = 0.1 * longest_run * torch.linspace(-1, 1, HIDDEN_SIZE)
        has_images = is_placeholder.any(dim=1, keepdim=True)
        return has_images * vector


CONFIG_OF_IMAGES = SimpleNamespace(model_type='of images', image_token_id=IMAGE_ID)
LAYOUT_WITH_CONFIG = replace(LAYOUT_OF_IMAGES, config=CONFIG_OF_IMAGES)
"""The config tells the placeholders."""


def drawn_batch_of_images(drawings: Sequence[str], **entries: Any) -> dict[str, Any]:
    """Returns rows as :func:`.drawn_batch` draws them. Their placeholders have an id that the tiny Llama knows."""
    batch = drawn_batch(*drawings, **entries)
    is_placeholder = batch['input_ids'] == IMAGE
    batch['input_ids'][is_placeholder] = IMAGE_ID
    return batch


def test_unequal_images_with_equal_means():
    """All rows have images of four placeholders on average. The second batch has rows without a large image."""
    unequal = '12ii34iiiiii56'
    equal = '12iiii34iiii56'
    batches = []
    for row in (unequal, equal):
        batch = drawn_batch_of_images(
            [unequal, unequal, row, row, '123456', '1234'],
            pixel_values=numbered(8, 3),
            num_images=[2, 2, 2, 2, 0, 0],
        )
        is_placeholder = batch['input_ids'] == IMAGE_ID
        batch['labels'][is_placeholder] = -100
        batches.append(batch)

    kinds = kinds_of_steps(PadsToLargestImage(), batches, layout=LAYOUT_WITH_CONFIG)

    assert kinds == ['exact', 'refused']


class IgnoresLabelsOfImages(AddsImages):
    """Counts no label at a placeholder."""

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        is_placeholder = batch['input_ids'] == IMAGE_ID
        labels = batch['labels'].masked_fill(is_placeholder, -100)
        return super().forward({**batch, 'labels': labels})


@pytest.mark.parametrize(
    ('drawings', 'layout'),
    [
        pytest.param(
            ['12iiii345', '1ii2345', '123iiiiii2345', 'iii12345'],
            LAYOUT_OF_IMAGES,
            id='in the text',
        ),
        pytest.param(
            ['12iiii3', '1ii2', '123iiiiii5', 'iii7'],
            LAYOUT_WITH_CONFIG,
            id='directly behind',
        ),
    ],
)
def test_one_label_behind_each_image(drawings, layout):
    """The check puts labels on a row. None of them may be at a placeholder."""
    batch = drawn_batch_of_images(
        drawings,
        pixel_values=random_images(4),
        num_images=[1, 1, 1, 1],
    )
    for row, drawing in enumerate(drawings):
        last_token = len(drawing) - 1
        batch['labels'][row, :last_token] = -100

    kinds = kinds_of_steps(IgnoresLabelsOfImages(), [batch, batch], layout=layout)

    assert kinds == ['exact', 'exact']


# Ranges of widths and lengths. Rows within them need no new check.


TEXT_LAYOUT = BatchLayout(family=TEXT)


def ranges_in(layout: BatchLayout, batch: dict[str, Any]) -> RowRanges:
    """Returns the ranges of a batch that the layout describes."""
    facts = describe(layout, batch)
    return ranges_of([facts])


def ranges_of_batch(lengths: list[int], largest_packed_row: int = 0, **options: Any) -> RowRanges:
    """Returns the ranges of a batch of text. Takes the options of :func:`.text_batch`."""
    batch = text_batch(lengths, **options)
    is_first_token = batch['input_ids'] == 1
    batch['labels'][is_first_token] = -100
    facts = describe(TEXT_LAYOUT, batch)
    return ranges_of([facts], largest_packed_row)


PADDED_RIGHT = PaddedRows('right', has_positions=False)
PADDED_LEFT = PaddedRows('left', has_positions=False)


@pytest.mark.parametrize(
    ('rows', 'missing'),
    [
        pytest.param({'lengths': [5, 10, 20]}, [], id='same rows'),
        pytest.param({'lengths': [7, 20, 9]}, [], id='lengths in between'),
        pytest.param({'lengths': [10, 10]}, [], id='no padding'),
        pytest.param({'lengths': [6, 21]}, [PADDED_RIGHT], id='wider'),
        pytest.param({'lengths': [4, 20]}, [PADDED_RIGHT], id='shorter row'),
        pytest.param({'lengths': [6, 11, 20]}, [PADDED_RIGHT], id='longer row with padding'),
        pytest.param({'lengths': [6, 11], 'width': 40}, [PADDED_RIGHT], id='all rows padded'),
        pytest.param({'lengths': [5, 10, 20], 'side': 'left'}, [PADDED_LEFT], id='other side'),
        pytest.param({'lengths': [5, 10, 20], 'largest_packed_row': 30}, [Trait.PACKED_ROWS], id='packed'),
    ],
)
def test_rows_outside_of_proven_ranges(rows, missing):
    proven = ranges_of_batch([5, 10, 20])
    ranges = ranges_of_batch(**rows)
    assert proven.missing(ranges) == missing


@pytest.mark.parametrize(
    ('lengths', 'largest_packed_row', 'missing'),
    [
        pytest.param([5, 20], 40, [], id='same rows'),
        pytest.param([5, 20], 41, [Trait.PACKED_ROWS], id='larger packed row'),
        pytest.param([21, 21], 40, [Trait.PACKED_ROWS], id='longer documents'),
    ],
)
def test_packed_rows_outside_of_proven(lengths, largest_packed_row, missing):
    proven = ranges_of_batch([5, 20], largest_packed_row=40)
    ranges = ranges_of_batch(lengths, largest_packed_row)
    assert proven.missing(ranges) == missing


def test_larger_microbatches_of_packed_rows_are_new(caplog):
    """A callback raises the microbatch size after the first step, so packed rows become longer."""

    def grow(state: State) -> None:
        state.device_train_microbatch_size = 5

    batches = [ragged_batch()] * 3
    callback = On(Event.BATCH_END, grow)

    with caplog.at_level('INFO', logger='composer_tokacc.checks.first_batch'):
        fit(one_layer_model(), *batches, packing=True, microbatch_size=1, callbacks=[callback])

    assert caplog.text.count('After the first-batch check') == 2


@pytest.mark.parametrize(
    ('readings', 'missing'),
    [
        pytest.param({}, [], id='no key'),
        pytest.param({'tags': (Reading.TEXT, Reading.ROWS)}, [], id='same readings'),
        pytest.param({'tags': (Reading.TEXT,)}, [], id='only the most likely reading'),
        pytest.param({'tags': (Reading.ROWS,)}, [KeyMeaning('tags')], id='only the other reading'),
        pytest.param({'tags': (Reading.TEXT,), 'scores': (Reading.ROWS,)}, [KeyMeaning('scores')], id='new key'),
    ],
)
def test_meaning_of_a_key(readings, missing):
    """It is new if no batch had the key, or if its most likely reading changes."""
    proven = RowRanges(readings={'tags': (Reading.TEXT, Reading.ROWS)})
    ranges = RowRanges(readings=readings)
    assert proven.missing(ranges) == missing


def test_padding_with_positions_is_new():
    positions = torch.arange(20).expand(2, 20)
    proven = ranges_of_batch([5, 20], side='left')
    ranges = ranges_of_batch([5, 20], side='left', position_ids=positions)

    assert proven.missing(ranges) == [PaddedRows('left', has_positions=True)]


def test_label_behind_padding_says_nothing_about_trimming():
    """On another rank, rows that can be trimmed must not count as checked because of such rows."""
    batch = text_batch([4, 9, 14], side='left')
    facts = describe(TEXT_LAYOUT, batch)
    assert all(facts.has_first_label)

    ranges = ranges_of([facts])

    assert PADDED_LEFT not in ranges.limits


LAYOUT_OF_VL = layout_of_model('new_vl', vision_config=SimpleNamespace(), image_token_id=IMAGE)


def ranges_of_images(drawings: list[str], **entries: Any) -> RowRanges:
    """Returns the ranges of drawn rows. A row with placeholders has one image."""
    batch = drawn_batch(*drawings, **entries)
    rows_with_image = [drawing for drawing in drawings if 'i' in drawing]
    if rows_with_image:
        batch['pixel_values'] = numbered(len(rows_with_image), 3, 4, 4)
    return ranges_in(LAYOUT_OF_VL, batch)


@pytest.mark.parametrize(
    ('first_row', 'present', 'absent'),
    [
        pytest.param('1342', Trait.HOLES, Trait.HOLES_BESIDE_MEDIA, id='text'),
        pytest.param('1ii2', Trait.HOLES_BESIDE_MEDIA, Trait.HOLES, id='image'),
    ],
)
def test_holes_beside_media(first_row, present, absent):
    """A model may handle a hole in another way if any row of the batch has media."""
    mask_with_hole = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]])

    ranges = ranges_of_images([first_row, '12'], attention_mask=mask_with_hole)

    assert present in ranges.limits
    assert absent not in ranges.limits


def test_row_with_the_largest_position_is_chosen():
    """If positions beyond the rotary limit are new. The longest row holds two documents, with smaller positions."""
    positions = torch.tensor(
        [
            [0, 1, 2, 3, 4, 0, 1, 2, 3, 4],
            [0, 1, 2, 3, 4, 5, 6, 7, 0, 0],
            [0, 1, 2, 3, 0, 0, 0, 0, 0, 0],
        ]
    )
    batch = text_batch([10, 8, 4], position_ids=positions)
    longest_row = 0
    row_with_largest_position = 1

    first_chosen, *_ = chosen_rows(TEXT_LAYOUT, batch, [], max_rows=4)
    assert first_chosen == longest_row

    missing = [BeyondRotaryLimit(has_positions=True)]
    first_chosen, *_ = chosen_rows(TEXT_LAYOUT, batch, missing, max_rows=4)
    assert first_chosen == row_with_largest_position


@pytest.mark.parametrize(
    ('drawings', 'is_mixed'),
    [
        pytest.param(['1ii2', '1i23'], False, id='only images'),
        pytest.param(['1342', '12'], False, id='only text'),
        pytest.param(['1ii2', '12'], True, id='both'),
    ],
)
def test_rows_with_and_without_media(drawings, is_mixed):
    """Rows that all have media say nothing about rows of text beside them."""
    ranges = ranges_of_images(drawings)
    assert (Trait.PARTLY_WITH_MEDIA in ranges.limits) is is_mixed


@pytest.mark.parametrize('missing', [Trait.UNLABELLED_ROWS, Trait.PARTLY_UNLABELLED])
def test_row_without_labels_is_chosen(missing):
    """It is neither the longest nor the shortest row, and not of medium length."""
    batch = text_batch([20, 4, 5, 6, 7, 12, 18])
    unlabelled_row = 4
    batch['labels'][unlabelled_row] = -100

    rows_by_length = chosen_rows(TEXT_LAYOUT, batch, [], max_rows=3)
    rows_by_labels = chosen_rows(TEXT_LAYOUT, batch, [missing], max_rows=3)

    assert unlabelled_row not in rows_by_length
    assert unlabelled_row in rows_by_labels


def test_codes():
    """Codes are small integers of rows or of tokens with labels."""
    without_codes = {
        'phases': torch.ones(2, dtype=torch.complex64),
        'scores': torch.ones(2),
        'num_images': torch.zeros(2, dtype=torch.long),
        'boxes': torch.ones(2, 3, 4, dtype=torch.long),
    }
    with_codes = {
        'flags': torch.tensor([True, False]),
        'answers': torch.tensor([[4, -100, 4], [17, 16, -999]]),
        'token_tasks': torch.tensor([[1, 2, 3], [2, 1, 1]]),
    }
    batch = text_batch([2, 3], **without_codes, **with_codes)

    facts = describe(TEXT_LAYOUT, batch)

    assert facts.codes == {
        'flags': [[1], [0]],
        'answers': [[-100, 4], [-128, 16]],
        'token_tasks': [[1, 2], [1, 2]],
    }
    assert facts.lowest_values == {
        'flags': [1, 0],
        'answers': [-100, -128],
        'token_tasks': [1, 1],
    }


@pytest.mark.parametrize(
    ('value', 'dtype', 'lowest'),
    [
        pytest.param(6, torch.long, None, id='number of items in the batch'),
        pytest.param([[], []], torch.long, None, id='no values'),
        pytest.param([[7, 3], [1, 0]], torch.uint16, [3, 0], id='unsigned'),
        pytest.param([[1, 1], [1, 0]], torch.bool, [1, 0], id='bools'),
    ],
)
def test_lowest_of_unusual_integers(value, dtype, lowest):
    batch = text_batch([5, 20], further=torch.tensor(value, dtype=dtype))
    facts = describe(TEXT_LAYOUT, batch)
    assert facts.lowest_values.get('further') == lowest


def test_ranges_keep_readings_of_the_layout():
    """Both images have 6 codes, and both rows 6 tokens. The layout knows from a larger batch that codes are no text."""
    codes = torch.ones(2, 6, dtype=torch.long)
    batch = text_batch([4, 6], num_images=[1, 1], image_codes=codes)
    inferred = BatchLayout.infer(batch)
    informed = inferred.with_readings({'image_codes': (Reading.MEDIA,)})

    inferred_ranges = ranges_in(inferred, batch)
    informed_ranges = ranges_in(informed, batch)

    assert inferred_ranges.readings == {'image_codes': (Reading.TEXT, Reading.MEDIA)}
    assert informed_ranges.readings == {'image_codes': (Reading.MEDIA,)}


def test_ranges_keep_readings_of_all_microbatches():
    """Only the first microbatch has the key."""
    first = text_batch([4, 6], tags=torch.ones(2))
    second = text_batch([3])
    facts = []
    for batch in (first, second):
        layout = BatchLayout.infer(batch)
        facts.append(describe(layout, batch))

    ranges = ranges_of(facts)

    assert ranges.readings == {'tags': (Reading.ROWS,)}


@pytest.mark.parametrize(
    ('side', 'missing'),
    [
        pytest.param('right', [PADDED_RIGHT], id='shorter but narrower rows'),
        pytest.param('left', [PADDED_LEFT], id='other side'),
    ],
)
def test_joined_ranges_cover_both(side, missing):
    first = ranges_of_batch([5, 20])
    second = ranges_of_batch([3, 9, 10], side=side)

    joined = first.joined(second)

    assert joined.missing(first) == []
    assert joined.missing(second) == []
    assert first.missing(joined) == missing


def test_small_ids_and_counts_are_not_new():
    """In a column with higher numbers only 0 and negative ones may have a meaning of their own."""
    first = text_batch(
        [5, 20],
        ids=torch.tensor([30, 5]),
        tasks=torch.tensor([1, 2]),
    )
    second = text_batch(
        [5, 20],
        ids=torch.tensor([7, -1]),
        tasks=torch.tensor([1, 3]),
    )

    # The microbatches of a pre-split batch are one batch.
    facts = [describe(TEXT_LAYOUT, microbatch) for microbatch in (first, second)]
    ranges = ranges_of(facts)

    codes = {row_property for row_property in ranges.limits if isinstance(row_property, Code)}
    assert codes == {
        Code('ids', -1),
        Code('tasks', 1),
        Code('tasks', 2),
        Code('tasks', 3),
    }


def test_random_lengths_are_seldom_outside():
    """A running maximum of n random numbers is exceeded about log(n) times."""
    rng = random.Random(0)
    proven = RowRanges()
    num_checks = 0
    for _ in range(200):
        lengths = [8 + int(rng.lognormvariate(5.0, 0.8)) for _ in range(32)]
        ranges = ranges_of_batch(lengths)
        if proven.missing(ranges):
            num_checks += 1
            proven = proven.joined(ranges)

    assert 5 <= num_checks <= 25


@pytest.mark.parametrize('rows_per_step', [16, 64, pytest.param(256, marks=pytest.mark.slow)])
def test_new_rows_become_seldom(rows_per_step):
    """Lengths as in AI2D, ChartQA and DocVQA, on one rank. `docs/limits.md` has this number of steps."""
    lengths_of_samples, _ = read_tables()
    samples = lengths_of_samples.draw(200 * rows_per_step, seed=0)
    layout = BatchLayout.for_model(LlamaConfig())
    proven = RowRanges()
    num_checks = 0
    for samples_of_step in samples.global_batches(rows_per_step):
        batch = text_batch(samples_of_step.lengths.tolist())
        ranges = ranges_in(layout, batch)
        if proven.missing(ranges):
            num_checks += 1
            proven = proven.joined(ranges)

    assert 5 <= num_checks <= 15
