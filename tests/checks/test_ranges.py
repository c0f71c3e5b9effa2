# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a size that was not checked before: every step is exact, or refused before the optimizer moves."""

from __future__ import annotations

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
    rng = random.Random(0)
    batches = []
    for longest in (TOP_K, 40, 40):
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
@pytest.mark.parametrize('model_type', ['deepseek_v32', 'doge', pytest.param('glm_moe_dsa', marks=pytest.mark.slow)])
def test_width_that_changes_the_model(model_type, side, options):
    """The first batch is so narrow that the model attends to all keys. It cannot show how wider batches behave."""
    model = top_k_model(model_type)
    batches = growing_batches(side)

    kinds = kinds_of_steps(model, batches, **options)

    # Doge of Transformers 4 is refused in the first batch already.
    may_refuse_first = transformers.__version__.startswith('4.')
    assert kinds[0] == 'exact' or may_refuse_first
    must_refuse_wider = options.get('packing') or model_type == 'doge'
    if must_refuse_wider:
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
    short_rows = [0, 1, 4, 5]  # padding on the left makes them no longer than the row of 9 tokens
    later = {}
    for key, tensor in first.items():
        later[key] = tensor.clone()
        later[key][short_rows] = tensor[short_rows].roll(2, dims=1)
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
        vectors = self.vectors_of_rows(batch)[:, None]
        logits = self.model(inputs_embeds=embeddings + vectors, attention_mask=batch['attention_mask']).logits
        loss = self.loss_of(logits, batch['labels'])
        return {'loss': loss, 'logits': logits}


NUM_STATES = 16


def batch_with_memory(lengths: list[int], width: int, seed: int) -> dict[str, Any]:
    """Returns text padded to a width, and 16 states of a memory for each row."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(lengths), NUM_STATES, HIDDEN_SIZE, generator=generator)
    return text_batch(lengths, width=width, encoder_hidden_states=states)


@pytest.mark.parametrize('widths', [(24, 16, 8, 16), (16, 24, 16, 16), (16, 16, 32, 16)])
def test_memory_as_wide_as_some_texts(widths):
    """A tensor of 16 states per row is not text, although the text of a batch has 16 columns."""
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
    batches = []
    for num_images in ([2, 0, 1], [1, 1, 1], [0, 3, 0]):
        batches.append({**batch, 'num_images': num_images})

    kinds = kinds_of_steps(AddsImages(), batches, layout=LAYOUT_OF_IMAGES)

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
    batch = ragged_batch([(4, 2), (9, 2), (6, 2), (12, 2), (7, 2), (10, 2), (5, 2), (8, 2)])
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


def drawn_batch_of_images(drawings: Sequence[str], images: torch.Tensor, num_images: list[int]) -> dict[str, Any]:
    """Returns rows as :func:`.drawn_batch` draws them. Their placeholders have an id that the tiny Llama knows."""
    batch = drawn_batch(*drawings, pixel_values=images, num_images=num_images)
    is_placeholder = batch['input_ids'] == IMAGE
    batch['input_ids'][is_placeholder] = IMAGE_ID
    return batch


def test_unequal_images_with_equal_means():
    """All rows have images of four placeholders on average. The second batch has rows without a large image."""
    row_of_unequal_images = '12ii34iiiiii56'
    row_of_equal_images = '12iiii34iiii56'
    batches = []
    for row in (row_of_unequal_images, row_of_equal_images):
        drawings = (row_of_unequal_images, row_of_unequal_images, row, row, '123456', '1234')
        batch = drawn_batch_of_images(drawings, numbered(8, 3), num_images=[2, 2, 2, 2, 0, 0])
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
        pytest.param(('12iiii345', '1ii2345', '123iiiiii2345', 'iii12345'), LAYOUT_OF_IMAGES, id='in the text'),
        pytest.param(('12iiii3', '1ii2', '123iiiiii5', 'iii7'), LAYOUT_WITH_CONFIG, id='directly behind'),
    ],
)
def test_one_label_behind_each_image(drawings, layout):
    """The check puts labels on a row. None of them may be at a placeholder."""
    num_rows = len(drawings)
    batch = drawn_batch_of_images(drawings, random_images(num_rows), num_images=[1] * num_rows)
    for row, drawing in enumerate(drawings):
        last_token = len(drawing) - 1
        batch['labels'][row, :last_token] = -100

    kinds = kinds_of_steps(IgnoresLabelsOfImages(), [batch, batch], layout=layout)

    assert kinds == ['exact', 'exact']


# Ranges of widths and lengths. Rows within them need no new check.


TEXT_LAYOUT = BatchLayout(family=TEXT)


def ranges_of_batch(lengths: list[int], largest_packed_row: int = 0, **options: Any) -> RowRanges:
    """Returns the ranges of a batch of text. Takes the options of :func:`.text_batch`."""
    batch = text_batch(lengths, **options)
    batch['labels'] = batch['labels'].masked_fill(batch['input_ids'] == 1, -100)  # of first tokens
    facts = describe(TEXT_LAYOUT, batch)
    return ranges_of([facts], largest_packed_row)


PADDED_RIGHT = PaddedRows('right', has_positions=False)
PADDED_LEFT = PaddedRows('left', has_positions=False)
PROVEN = ranges_of_batch([5, 10, 20])


@pytest.mark.parametrize('lengths', [[5, 10, 20], [7, 20, 9], [10, 10]])
def test_rows_inside_proven_ranges(lengths):
    ranges = ranges_of_batch(lengths)
    assert PROVEN.missing(ranges) == []


@pytest.mark.parametrize(
    ('ranges', 'missing'),
    [
        pytest.param(ranges_of_batch([6, 21]), PADDED_RIGHT, id='wider'),
        pytest.param(ranges_of_batch([4, 20]), PADDED_RIGHT, id='shorter row'),
        pytest.param(ranges_of_batch([6, 11, 20]), PADDED_RIGHT, id='longer row with padding'),
        pytest.param(ranges_of_batch([6, 11], width=40), PADDED_RIGHT, id='all rows padded'),
        pytest.param(ranges_of_batch([5, 10, 20], side='left'), PADDED_LEFT, id='other side'),
        pytest.param(ranges_of_batch([5, 10, 20], largest_packed_row=30), Trait.PACKED_ROWS, id='packed'),
    ],
)
def test_rows_outside_of_proven_ranges(ranges, missing):
    assert PROVEN.missing(ranges) == [missing]


def test_packed_rows_outside_of_proven():
    proven = ranges_of_batch([5, 20], largest_packed_row=40)
    equal_rows = ranges_of_batch([5, 20], largest_packed_row=40)
    larger_packed_row = ranges_of_batch([5, 20], largest_packed_row=41)
    longer_documents = ranges_of_batch([21, 21], largest_packed_row=40)

    assert proven.missing(equal_rows) == []
    assert proven.missing(larger_packed_row) == [Trait.PACKED_ROWS]
    assert proven.missing(longer_documents) == [Trait.PACKED_ROWS]


def test_larger_microbatches_of_packed_rows_are_new(caplog):
    """A callback raises the microbatch size after the first step, so packed rows become longer."""

    def grow(state: State) -> None:
        state.device_train_microbatch_size = 5

    with caplog.at_level('INFO', logger='composer_tokacc.checks.first_batch'):
        batches = [ragged_batch()] * 3
        callbacks = [On(Event.BATCH_END, grow)]
        fit(one_layer_model(), *batches, packing=True, microbatch_size=1, callbacks=callbacks)
    assert caplog.text.count('After the first-batch check') == 2


@pytest.mark.parametrize(
    ('readings', 'is_new'),
    [
        ({}, False),
        ({'tags': (Reading.TEXT, Reading.ROWS)}, False),
        ({'tags': (Reading.TEXT,)}, False),
        ({'tags': (Reading.ROWS,)}, True),
        ({'tags': (Reading.TEXT,), 'scores': (Reading.ROWS,)}, True),
    ],
)
def test_meaning_of_a_key(readings, is_new):
    """It is new if no batch had the key, or if its most likely reading changes."""
    proven = RowRanges(readings={'tags': (Reading.TEXT, Reading.ROWS)})
    last_key = list(readings)[-1:]

    missing = proven.missing(RowRanges(readings=readings))

    assert missing == ([KeyMeaning(*last_key)] if is_new else [])


def test_padding_with_positions_is_new():
    positions = torch.arange(20).expand(2, 20)
    proven = ranges_of_batch([5, 20], side='left')
    ranges = ranges_of_batch([5, 20], side='left', position_ids=positions)

    assert proven.missing(ranges) == [PaddedRows('left', has_positions=True)]


def test_label_behind_padding_says_nothing_about_trimming():
    """On another rank, rows that can be trimmed must not count as checked because of such rows."""
    facts = describe(TEXT_LAYOUT, text_batch([4, 9, 14], side='left'))
    assert all(facts.has_first_label)
    assert PADDED_LEFT not in ranges_of([facts]).limits


@pytest.mark.parametrize('has_media', [False, True])
def test_holes_beside_media(has_media):
    """A model may handle a hole in another way if any row of the batch has media."""
    rows = ['1ii2', '12'] if has_media else ['1342', '12']
    batch = drawn_batch(*rows)
    if has_media:
        batch['pixel_values'] = numbered(1, 3, 4, 4)
    batch['attention_mask'][1] = torch.tensor([1, 0, 0, 1])
    layout = layout_of_model('new_vl', vision_config=SimpleNamespace(), image_token_id=IMAGE)

    limits = ranges_of([describe(layout, batch)]).limits

    assert (Trait.HOLES_BESIDE_MEDIA in limits) is has_media
    assert (Trait.HOLES in limits) is not has_media


def test_row_with_the_largest_position_is_chosen():
    """If positions beyond the rotary limit are new. The longest row holds two documents, with smaller positions."""
    two_documents = [*range(5), *range(5)]
    one_document = [*range(8), 0, 0]
    positions = torch.tensor([two_documents, one_document, two_documents])
    batch = text_batch([10, 8, 4], position_ids=positions)
    longest = 0
    largest_position = 1

    def first_row(missing):
        return chosen_rows(TEXT_LAYOUT, batch, missing, max_rows=4)[0]

    assert first_row(missing=[]) == longest
    assert first_row(missing=[BeyondRotaryLimit(has_positions=True)]) == largest_position


@pytest.mark.parametrize(
    ('rows', 'is_mixed'),
    [(['1ii2', '1i23'], False), (['1342', '12'], False), (['1ii2', '12'], True)],
)
def test_rows_with_and_without_media(rows, is_mixed):
    """Rows that all have media say nothing about rows of text beside them."""
    batch = drawn_batch(*rows)
    num_images = sum('i' in row for row in rows)
    if num_images:
        batch['pixel_values'] = numbered(num_images, 3, 4, 4)
    layout = layout_of_model('new_vl', vision_config=SimpleNamespace(), image_token_id=IMAGE)
    assert (Trait.PARTLY_WITH_MEDIA in ranges_of([describe(layout, batch)]).limits) is is_mixed


@pytest.mark.parametrize('missing', [Trait.UNLABELLED_ROWS, Trait.PARTLY_UNLABELLED])
def test_row_without_labels_is_chosen(missing):
    """It is neither the longest nor the shortest row, and not of medium length."""
    batch = text_batch([20, 4, 5, 6, 7, 12, 18])
    unlabelled_row = 4
    batch['labels'][unlabelled_row] = -100

    assert unlabelled_row in chosen_rows(TEXT_LAYOUT, batch, [missing], max_rows=3)
    assert unlabelled_row not in chosen_rows(TEXT_LAYOUT, batch, [], max_rows=3)


def test_codes():
    """Codes are small integers of rows or of tokens with labels."""
    batch = text_batch(
        [2, 3],
        phases=torch.ones(2, dtype=torch.complex64),
        scores=torch.ones(2),
        num_images=torch.zeros(2, dtype=torch.long),
        flags=torch.tensor([True, False]),
        answers=torch.tensor([[4, -100, 4], [17, 16, -999]]),
        token_tasks=torch.tensor([[1, 2, 3], [2, 1, 1]]),
        boxes=torch.ones(2, 3, 4, dtype=torch.long),
    )

    facts = describe(TEXT_LAYOUT, batch)

    assert facts.codes == {
        'flags': [[1], [0]],
        'answers': [[-100, 4], [-128, 16]],
        'token_tasks': [[1, 2], [1, 2]],
    }
    assert facts.lowest_values == {'flags': [1, 0], 'answers': [-100, -128], 'token_tasks': [1, 1]}


@pytest.mark.parametrize(
    ('value', 'lowest'),
    [
        pytest.param(torch.tensor(6), None, id='number of items in the batch'),
        pytest.param(torch.zeros(2, 0, dtype=torch.long), None, id='no values'),
        pytest.param(torch.tensor([[7, 3], [1, 0]], dtype=torch.uint16), [3, 0], id='unsigned'),
        pytest.param(torch.tensor([[True, True], [True, False]]), [1, 0], id='bools'),
    ],
)
def test_lowest_of_unusual_integers(value, lowest):
    facts = describe(TEXT_LAYOUT, text_batch([5, 20], further=value))

    assert facts.lowest_values.get('further') == lowest


def test_ranges_keep_readings_of_the_layout():
    """Both images have 6 codes, and both rows 6 tokens. The layout knows from a larger batch that codes are no text."""
    batch = text_batch([4, 6], num_images=[1, 1], image_codes=torch.ones(2, 6, dtype=torch.long))
    inferred = BatchLayout.infer(batch)
    informed = inferred.with_readings({'image_codes': (Reading.MEDIA,)})

    assert ranges_of([describe(inferred, batch)]).readings == {'image_codes': (Reading.TEXT, Reading.MEDIA)}
    assert ranges_of([describe(informed, batch)]).readings == {'image_codes': (Reading.MEDIA,)}


def test_ranges_keep_readings_of_all_microbatches():
    """Only the first microbatch has the key."""
    first = text_batch([4, 6], tags=torch.ones(2))
    second = text_batch([3])
    facts = [describe(BatchLayout.infer(batch), batch) for batch in (first, second)]
    assert ranges_of(facts).readings == {'tags': (Reading.ROWS,)}


def test_joined_ranges_cover_both():
    first = ranges_of_batch([5, 20])
    second = ranges_of_batch([3, 9, 10], side='left')

    joined = first.joined(second)

    assert joined.missing(first) == []
    assert joined.missing(second) == []
    assert first.missing(joined) == [PADDED_LEFT]


def test_small_ids_and_counts_are_not_new():
    """In a column with higher numbers only 0 and negative ones may have a meaning of their own."""
    batches = []
    for ids, tasks in [([30, 5], [1, 2]), ([7, -1], [1, 3])]:
        batches.append(text_batch([5, 20], ids=torch.tensor(ids), tasks=torch.tensor(tasks)))
    # The microbatches of a pre-split batch are one batch.
    facts_of_microbatches = [describe(TEXT_LAYOUT, batch) for batch in batches]

    properties = ranges_of(facts_of_microbatches).limits.keys()

    codes = {row_property for row_property in properties if isinstance(row_property, Code)}
    assert codes == {Code('ids', -1), Code('tasks', 1), Code('tasks', 2), Code('tasks', 3)}


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
    layout = BatchLayout.for_model(LlamaConfig())
    proven = RowRanges()
    steps_with_new_rows = []
    samples = lengths_of_samples.draw(200 * rows_per_step, seed=0)
    for step, samples_of_step in enumerate(samples.global_batches(rows_per_step)):
        lengths = torch.from_numpy(samples_of_step.lengths)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.ones_like(mask, dtype=torch.long)
        batch = {'input_ids': ids, 'attention_mask': mask.long(), 'labels': ids.masked_fill(~mask, -100)}
        ranges = ranges_of([describe(layout, batch)])
        if proven.missing(ranges):
            steps_with_new_rows.append(step)
            proven = proven.joined(ranges)
    assert 5 <= len(steps_with_new_rows) <= 15
