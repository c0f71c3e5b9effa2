# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of a size that was not checked before: every step is exact, or refused before the optimizer moves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from composer.models import ComposerModel, HuggingFaceModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from composer_tokacc import BatchLayout
from composer_tokacc.layout import Family, Media, describe
from composer_tokacc.layout.facts import RowRanges, ranges_of
from tests.matrix.harness import measure_steps
from tests.matrix.subjects import SUBJECTS
from tests.model_types.tiny import tiny_config
from tests.support.small_batches import TEXT, text_batch
from tests.support.text import collate, next_token_loss, text_rows

TOP_K = 8
"""The number of keys that a model attends to, as soon as there are more columns."""


def top_k_model(model_type: str, *, scales: bool) -> HuggingFaceModel:
    """A tiny model that attends to at most 8 keys. With ``scales``, the scales of Doge's keys differ between heads."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    for name in ('index_topk', 'keep_window_size'):
        if hasattr(config, name):
            setattr(config, name, TOP_K)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif scales and name.endswith('.A'):
            torch.nn.init.normal_(parameter)
    return HuggingFaceModel(model, shift_labels=True, use_logits=True)


def growing_batches(side: str) -> list[dict[str, Any]]:
    """One batch with rows of at most 8 tokens, then two with rows of up to 40."""
    rng = random.Random(0)
    batches = []
    for step in range(3):
        longest = TOP_K if step == 0 else 40
        lengths = [rng.randint(3, longest) for _ in range(6)]
        batches.append(collate(text_rows([(length, rng.randint(1, length - 1)) for length in lengths]), side=side))
    return batches


@pytest.mark.parametrize(
    ('side', 'options'),
    [('right', {}), ('left', {}), ('right', {'packing': True}), ('right', {'regroup': False})],
    ids=['right', 'left', 'packed', 'in order'],
)
@pytest.mark.parametrize(('model_type', 'scales'), [('deepseek_v32', False), ('glm_moe_dsa', False), ('doge', True)])
def test_width_that_changes_the_model(model_type, scales, side, options):
    """The first batch is narrower than the width from which on keys are selected."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip('this release of transformers does not have it')
    outcomes = measure_steps(top_k_model(model_type, scales=scales), growing_batches(side), 2, **options)
    kinds = [outcome.kind for outcome in outcomes]
    # Doge of Transformers 4 is refused in the first batch already.
    assert kinds[0] == 'exact' or transformers.__version__.startswith('4.')
    assert set(kinds) <= {'exact', 'refused'}, [str(outcome) for outcome in outcomes]
    if options.get('packing'):
        assert kinds[-1] == 'refused'


@pytest.mark.parametrize('side', ['right', 'left'])
def test_equal_keys_are_refused_at_once(side):
    """Doge chooses between equal keys. Most rows show that only by chance."""
    if 'doge' not in CONFIG_MAPPING:
        pytest.skip('this release of transformers does not have it')
    for scales in (False, True):
        outcomes = measure_steps(top_k_model('doge', scales=scales), growing_batches(side), 2)
        assert outcomes[-1].kind == 'refused'
        assert len(outcomes) <= 2


class AddsMemory(ComposerModel):
    """A Llama that adds the sum of a row's memory to its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SUBJECTS['llama'].model('large').model
        self.config = self.model.config

    def added(self, batch: Any) -> torch.Tensor:
        return batch['encoder_hidden_states'].tanh().cumsum(dim=1)[:, -1]

    def forward(self, batch: Any) -> Any:
        embeddings = self.model.get_input_embeddings()(batch['input_ids']) + self.added(batch)[:, None]
        return self.model(inputs_embeds=embeddings, attention_mask=batch['attention_mask']).logits

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return next_token_loss(outputs, batch['labels'])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs


NUM_STATES = 16


def batch_with_memory(lengths: list[int], width: int, seed: int) -> dict[str, Any]:
    """Text padded to a width, and 16 states of a memory for each row."""
    batch = collate(text_rows([(length, length - 1) for length in lengths]))
    for key, fill in (('input_ids', 0), ('attention_mask', 0), ('labels', -100)):
        batch[key] = F.pad(batch[key], (0, width - batch[key].shape[1]), value=fill)
    generator = torch.Generator().manual_seed(seed)
    batch['encoder_hidden_states'] = torch.randn(len(lengths), NUM_STATES, 32, generator=generator)
    return batch


@pytest.mark.parametrize('widths', [(24, 16, 8, 16), (16, 24, 16, 16), (16, 16, 32, 16)])
def test_memory_as_wide_as_some_texts(widths):
    """A tensor of 16 states per row is not text, although the text of a batch has 16 columns."""
    batches = []
    for step, width in enumerate(widths):
        batches.append(batch_with_memory([3, 5, width - 1, width - 3], width, seed=step))
    outcomes = measure_steps(AddsMemory(), batches, 2)
    assert [outcome.kind for outcome in outcomes] == ['exact'] * len(widths), [str(outcome) for outcome in outcomes]


class AddsImages(AddsMemory):
    """Adds the sum of a row's images. The batch has the number of images of each row."""

    def added(self, batch: Any) -> torch.Tensor:
        if 'pixel_values' not in batch:
            return torch.zeros(len(batch['input_ids']), 32)
        images_of_rows = batch['pixel_values'].split(list(batch['num_images']))
        return torch.stack([images.sum(dim=0) for images in images_of_rows])


def test_as_many_images_as_rows():
    """Three rows have three images, but not one each."""
    rows = text_rows([(4, 2), (9, 7), (6, 3)])
    batches = []
    for counts in ([2, 0, 1], [1, 1, 1], [0, 3, 0]):
        generator = torch.Generator().manual_seed(len(batches))
        pixels = torch.randn(sum(counts), 32, generator=generator)
        batches.append({**collate(rows), 'pixel_values': pixels, 'num_images': counts})
    model = AddsImages()
    layout = BatchLayout(family=Family(name='of images', media={'image': Media()}))
    outcomes = measure_steps(model, batches, 1, layout=layout)
    assert [outcome.kind for outcome in outcomes] == ['exact'] * 3, [str(outcome) for outcome in outcomes]


# The ranges themselves.


def ranges_of_batch(lengths: list[int], packed_total: int = 0, **options: Any) -> RowRanges:
    batch = text_batch(lengths, **options)
    return ranges_of([describe(BatchLayout(family=TEXT), batch)], packed_total)


@pytest.mark.parametrize(
    ('lengths', 'options', 'missing'),
    [
        ([5, 10, 20], {}, []),
        ([7, 20, 9], {}, []),
        ([10, 10], {}, []),  # no padding
        ([6, 21], {}, ['rows padded on the right']),  # wider
        ([4, 20], {}, ['rows padded on the right']),  # shorter than any
        ([6, 11, 20], {}, ['rows padded on the right']),  # a longer row that has padding
        ([6, 11], {'width': 40}, ['rows padded on the right']),
        ([5, 10, 20], {'side': 'left'}, ['rows padded on the left']),
        ([5, 10, 20], {'packed_total': 30}, ['packed rows']),
    ],
)
def test_rows_outside_of_proven_ranges(lengths, options, missing):
    assert ranges_of_batch([5, 10, 20]).missing(ranges_of_batch(lengths, **options)) == missing


def test_packed_rows_outside_of_proven():
    proven = ranges_of_batch([5, 20], packed_total=40)
    assert proven.missing(ranges_of_batch([5, 20], packed_total=40)) == []
    assert proven.missing(ranges_of_batch([5, 20], packed_total=41)) == ['packed rows']
    assert proven.missing(ranges_of_batch([21, 21], packed_total=40)) == ['packed rows']


def test_padding_with_positions_is_new():
    batch = text_batch([5, 20], side='left')
    with_positions = {**batch, 'position_ids': torch.arange(20).expand(2, 20)}
    layout = BatchLayout(family=TEXT)
    proven = ranges_of([describe(layout, batch)])
    missing = proven.missing(ranges_of([describe(layout, with_positions)]))
    assert missing == ['rows padded on the left, with position_ids']


def test_joined_ranges_cover_both():
    first = ranges_of_batch([5, 20])
    second = ranges_of_batch([3, 9, 10], side='left')
    joined = first.joined(second)
    assert joined.missing(first) == joined.missing(second) == []
    assert first.missing(joined) == ['rows padded on the left']


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
