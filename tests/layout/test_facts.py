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
from composer_tokacc.batch import lengths_of_runs
from composer_tokacc.layout import describe
from composer_tokacc.layout.facts import is_ragged, largest_positions
from tests.support.small_batches import IMAGE, LLAVA, QWEN, drawn_batch, layout_of_model, text_batch

LAYOUT = BatchLayout(family=QWEN, config=SimpleNamespace(image_token_id=IMAGE))


@pytest.mark.parametrize(('side', 'start'), [('right', 1), ('left', 4)])
def test_types_are_padded_like_the_ids(side, start):
    """Types on the padding would be trimmed, and the model would number an image as text."""
    batch = text_batch([7, 4], side=side, sample_ids=['a', 'b'])
    batch['input_ids'][1, start : start + 2] = IMAGE  # in the middle of the four tokens of this row
    types = (batch['input_ids'] == IMAGE).long()
    types_on_padding = types.flip(1)

    facts = describe(LAYOUT, {**batch, 'mm_token_type_ids': types})

    assert facts.lengths == [7, 4]
    with pytest.raises(ValueError, match=r"mm_token_type_ids.*sample 'b'.*on which `input_ids` are padded"):
        describe(LAYOUT, {**batch, 'mm_token_type_ids': types_on_padding})
    # A list is a note of the user, not a tensor for the model.
    describe(LAYOUT, {**batch, 'mm_token_type_ids': types_on_padding.tolist()})
    # An image that is neither attended nor labelled may have types.
    nothing_attended = torch.zeros_like(types)
    no_labels = torch.full_like(types, -100)
    hidden_image = {'attention_mask': nothing_attended, 'labels': no_labels, 'mm_token_type_ids': types}
    describe(LAYOUT, {**batch, **hidden_image})


def test_largest_image_of_each_row():
    """The first row has as many runs as images. The second has one run of two images, so only their mean is known."""
    batch = drawn_batch('1ii2iiii', 'iiiiii', '12', pixel_values=torch.zeros(4, 3), num_images=[2, 2, 0])
    layout = BatchLayout(family=LLAVA, config=LAYOUT.config)

    facts = describe(layout, batch)

    assert facts.media_sizes('image') == [4, 3, None]


def test_patches_side_by_side_are_not_padded():
    """The pixels of MiniCPM-V are as wide as all patches of the batch, so their width says nothing about padding."""
    layout = layout_of_model('new_vl', image_token_id=IMAGE)
    facts_of_microbatches = []
    for num_patches in (2, 3):
        pixels = torch.rand(1, 3, 4, 4 * num_patches)
        batch = drawn_batch('ii1', pixel_values=pixels, target_sizes=torch.tensor([[1, num_patches]]))
        facts_of_microbatches.append(describe(layout, batch))

    assert not is_ragged('image', facts_of_microbatches)


def test_facts_hold_until_an_entry_changes():
    batch = text_batch([7, 4])
    another_layout = BatchLayout(family=QWEN, config=LAYOUT.config)
    with_another_key = {**batch, 'more': torch.zeros(2)}

    facts = describe(LAYOUT, batch)

    assert facts.describes(LAYOUT, batch)
    assert facts.describes(LAYOUT, dict(batch))
    assert not facts.describes(another_layout, batch)
    assert not facts.describes(LAYOUT, with_another_key)
    # The entry is replaced in the batch itself. The facts must have a copy of the old batch.
    batch['labels'] = batch['labels'].clone()
    assert not facts.describes(LAYOUT, batch)


@pytest.mark.parametrize(
    ('positions', 'expected'),
    [
        pytest.param(None, [4, 3], id='none'),
        pytest.param([[0, 1, 2, 3], [0, 1, 0, 1]], [4, 2], id='of each row'),
        pytest.param([[0, 1, 2, 3]], [4, 4], id='shared'),
        pytest.param([[[0, 1, 2, 3], [0, 1, 0, 1]], [[0, 0, 0, 0], [0, 5, 0, 0]]], [4, 6], id='several axes'),
    ],
)
def test_largest_positions_of_rows(positions, expected):
    """The result is the largest position plus one. Without positions it is the length of the row."""
    batch = text_batch([4, 3])
    if positions is not None:
        batch['position_ids'] = torch.tensor(positions)

    facts = describe(LAYOUT, batch)

    assert largest_positions(facts) == expected


def test_facts_without_rows():
    one_row = drawn_batch('1ii2')
    no_rows = {key: value[:0] for key, value in one_row.items()}

    facts = describe(LAYOUT, no_rows)

    assert facts.side == 'right'
    assert facts.width == 4
    assert not facts.is_padded
    assert facts.lengths == []
    assert facts.has_hole == []
    assert facts.media == []


class WalkedRow:
    """A row, looked at position by position."""

    def __init__(self, mask: list[int], labels: list[int]):
        self.mask = mask
        self.labels = labels
        self.width = len(mask)
        self.attended = []
        self.used = []  # attended or labelled: these columns may not be trimmed
        for column in range(self.width):
            has_label = labels[column] != -100
            if mask[column]:
                self.attended.append(column)
            if mask[column] or has_label:
                self.used.append(column)

    def has_hole(self) -> bool:
        """Returns whether a position between two attended ones is not attended."""
        return any(later - earlier > 1 for earlier, later in pairwise(self.attended))

    def length(self, side: str) -> int:
        """Returns the width without the padding on one side. An empty row keeps one position."""
        if not self.used:
            return 1
        if side == 'left':
            return self.width - self.used[0]
        return self.used[-1] + 1


def drawn_rows(rng: random.Random) -> list[WalkedRow]:
    """Returns a few narrow rows with random padding, holes and labels on padding. One row in eight is empty."""
    num_rows = rng.randint(1, 3)
    width = rng.randint(1, 5)
    rows = []
    for _ in range(num_rows):
        mask = rng.choices([0, 1, 1], k=width)
        labels = rng.choices([-100, -100, 7], k=width)
        if rng.random() < 1 / 8:
            mask = [0] * width
            labels = [-100] * width
        rows.append(WalkedRow(mask, labels))
    return rows


def side_of_padding(rows: list[WalkedRow]) -> str:
    """Returns ``'left'`` only if all rows use the last column, and not all rows use the first one.

    An empty row says nothing about the side.
    """
    rows_in_use = [row for row in rows if row.used]
    all_use_first = all(0 in row.used for row in rows_in_use)
    all_use_last = all(row.width - 1 in row.used for row in rows_in_use)
    if all_use_last and not all_use_first:
        return 'left'
    return 'right'


def test_facts_of_random_rows():
    layout = BatchLayout(family=QWEN)
    for seed in range(200):
        rows = drawn_rows(random.Random(seed))
        side = side_of_padding(rows)
        mask = torch.tensor([row.mask for row in rows])
        labels = torch.tensor([row.labels for row in rows])
        batch = {'input_ids': torch.ones_like(mask), 'attention_mask': mask, 'labels': labels}

        facts = describe(layout, batch)

        assert facts.side == side, seed
        assert facts.lengths == [row.length(side) for row in rows], seed
        assert facts.has_hole == [row.has_hole() for row in rows], seed
        assert facts.is_padded == any(len(row.used) < row.width for row in rows), seed


def test_lengths_of_runs():
    rows = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]]
    is_in_run = torch.tensor(rows).bool()

    assert lengths_of_runs(is_in_run) == [[2, 1], [], [3], [1, 1]]


def test_rows_without_ids_are_not_trimmed():
    """In Whisper the labels are all that is text, and nothing tells which positions are padding."""
    batch = {'labels': torch.tensor([[3, 4, -100], [3, 4, 5]])}
    layout = BatchLayout(family=LLAVA)

    facts = describe(layout, batch)

    assert not facts.may_be_trimmed
