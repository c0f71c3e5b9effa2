# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about rows: a tensor that disagrees with the padding of the ids is refused."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from composer_tokacc import BatchLayout
from composer_tokacc.layout import describe
from composer_tokacc.layout.facts import largest_positions
from composer_tokacc.layout.found import lengths_of_runs
from tests.support.small_batches import IMAGE, LLAVA, QWEN, drawn_batch, text_batch

LAYOUT = BatchLayout(family=QWEN, config=SimpleNamespace(image_token_id=IMAGE))


@pytest.mark.parametrize(('side', 'start'), [('right', 1), ('left', 4)])
def test_types_are_padded_like_the_ids(side, start):
    """Others would be trimmed, and the model would number an image as text. A hidden image may have types."""
    batch = text_batch([7, 4], side=side, sample_ids=['a', 'b'])
    batch['input_ids'][1, start : start + 2] = IMAGE
    batch['mm_token_type_ids'] = (batch['input_ids'] == IMAGE).long()
    assert describe(LAYOUT, batch).lengths == [7, 4]
    hidden = {**batch, 'attention_mask': batch['mm_token_type_ids'] * 0, 'labels': batch['labels'] * 0 - 100}
    describe(LAYOUT, hidden)
    batch['mm_token_type_ids'] = batch['mm_token_type_ids'].flip(1)
    describe(LAYOUT, {**batch, 'mm_token_type_ids': batch['mm_token_type_ids'].tolist()})  # a note of the user
    with pytest.raises(ValueError, match=r"mm_token_type_ids.*sample 'b'.*on which `input_ids` are padded"):
        describe(LAYOUT, batch)


def test_largest_image_of_each_row():
    """The first row has as many runs as images. The second has one run of two images, so only their mean is known."""
    batch = drawn_batch('1ii2iiii', 'iiiiii', '12', pixel_values=torch.zeros(4, 3), num_images=[2, 2, 0])
    layout = BatchLayout(family=LLAVA, config=LAYOUT.config)
    assert describe(layout, batch).media_sizes('image') == [4, 3, None]


def test_facts_hold_until_an_entry_changes():
    batch = text_batch([7, 4])
    facts = describe(LAYOUT, batch)
    assert facts.describes(LAYOUT, batch)
    assert facts.describes(LAYOUT, dict(batch))
    another_layout = BatchLayout(family=QWEN, config=LAYOUT.config)
    assert not facts.describes(another_layout, batch)
    assert not facts.describes(LAYOUT, {**batch, 'more': torch.zeros(2)})
    batch['labels'] = batch['labels'].clone()
    assert not facts.describes(LAYOUT, batch)


@pytest.mark.parametrize(
    ('positions', 'expected'),
    [
        (None, [4, 3]),
        ([[0, 1, 2, 3], [0, 1, 0, 1]], [4, 2]),
        ([[0, 1, 2, 3]], [4, 4]),
        ([[[0, 1, 2, 3], [0, 1, 0, 1]], [[0, 0, 0, 0], [0, 5, 0, 0]]], [4, 6]),
    ],
    ids=['none', 'of each row', 'shared', 'several axes'],
)
def test_largest_positions_of_rows(positions, expected):
    batch = text_batch([4, 3])
    if positions is not None:
        batch['position_ids'] = torch.tensor(positions)
    assert largest_positions(describe(LAYOUT, batch)) == expected


def test_facts_without_rows():
    facts = describe(LAYOUT, {key: value[:0] for key, value in drawn_batch('1ii2').items()})
    assert (facts.side, facts.width, facts.is_padded) == ('right', 4, False)
    assert facts.lengths == facts.has_hole == facts.media == []


def drawn_rows(rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Returns random masks and labels of a few narrow rows. They have padding, holes and labels on padding."""
    num_rows, width = rng.randint(1, 3), rng.randint(1, 5)
    masks = [[rng.choice([0, 1, 1]) for _ in range(width)] for _ in range(num_rows)]
    labels = [[rng.choice([-100, -100, 7]) for _ in range(width)] for _ in range(num_rows)]
    return masks, labels


def walked_facts(masks: list[list[int]], labels: list[list[int]]) -> tuple[str, list[int], list[bool], bool]:
    """Returns side, lengths, holes and whether there is padding, by a plain walk over the positions of each row."""
    width = len(masks[0])
    columns_of_rows = []
    has_hole = []
    for mask, row_labels in zip(masks, labels, strict=True):
        attended = [column for column in range(width) if mask[column]]
        has_hole.append(any(later - column > 1 for column, later in pairwise(attended)))
        columns_of_rows.append([column for column in range(width) if mask[column] or row_labels[column] != -100])
    # An empty row says nothing about the side.
    end_last = all(width - 1 in columns for columns in columns_of_rows if columns)
    begin_first = all(0 in columns for columns in columns_of_rows if columns)
    side = 'left' if end_last and not begin_first else 'right'
    lengths = []
    for columns in columns_of_rows:
        if not columns:
            lengths.append(1)
        elif side == 'left':
            lengths.append(width - columns[0])
        else:
            lengths.append(columns[-1] + 1)
    is_padded = any(len(columns) < width for columns in columns_of_rows)
    return side, lengths, has_hole, is_padded


def test_facts_of_random_rows():
    layout = BatchLayout(family=QWEN)
    for seed in range(200):
        masks, labels = drawn_rows(random.Random(seed))
        mask = torch.tensor(masks)
        batch = {'input_ids': torch.ones_like(mask), 'attention_mask': mask, 'labels': torch.tensor(labels)}
        facts = describe(layout, batch)
        found = (facts.side, facts.lengths, facts.has_hole, facts.is_padded)
        assert found == walked_facts(masks, labels), seed


def test_lengths_of_runs():
    rows = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]]
    assert lengths_of_runs(torch.tensor(rows).bool()) == [[2, 1], [], [3], [1, 1]]


def test_rows_without_ids_are_not_trimmed():
    """In Whisper the labels are all that is text, and nothing tells which positions are padding."""
    batch = {'labels': torch.tensor([[3, 4, -100], [3, 4, 5]])}
    assert not describe(BatchLayout(family=LLAVA), batch).may_be_trimmed
