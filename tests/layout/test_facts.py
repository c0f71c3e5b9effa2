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

CONFIG = SimpleNamespace(image_token_id=IMAGE)
LAYOUT = BatchLayout(family=QWEN, config=CONFIG)


def batch_with_image(side):
    """Returns rows of 7 and 4 tokens. The two tokens in the middle of the second row are placeholders of an image."""
    batch = text_batch([7, 4], side=side, sample_ids=['a', 'b'])
    start = 4 if side == 'left' else 1
    batch['input_ids'][1, start : start + 2] = IMAGE
    is_image = batch['input_ids'] == IMAGE
    batch['mm_token_type_ids'] = is_image.long()
    return batch


@pytest.mark.parametrize('side', ['right', 'left'])
def test_types_are_padded_like_the_ids(side):
    """Types on the padding would be trimmed, and the model would number an image as text."""
    batch = batch_with_image(side)
    types = batch['mm_token_type_ids']
    types_on_padding = types.flip(1)
    refused_batch = {**batch, 'mm_token_type_ids': types_on_padding}

    facts = describe(LAYOUT, batch)

    assert facts.lengths == [7, 4]
    with pytest.raises(ValueError, match=r"mm_token_type_ids.*sample 'b'.*on which `input_ids` are padded"):
        describe(LAYOUT, refused_batch)


@pytest.mark.parametrize('side', ['right', 'left'])
def test_types_that_may_be_anywhere(side):
    """A list is a note of the user, not a tensor for the model. A placeholder on padding may have its type."""
    batch = batch_with_image(side)
    types = batch['mm_token_type_ids']
    types_on_padding = types.flip(1)
    no_mask = torch.zeros_like(types)
    no_labels = torch.full_like(types, -100)
    with_a_list = {**batch, 'mm_token_type_ids': types_on_padding.tolist()}
    with_padding_only = {**batch, 'attention_mask': no_mask, 'labels': no_labels}

    describe(LAYOUT, with_a_list)  # raises nothing
    describe(LAYOUT, with_padding_only)


def test_largest_image_of_each_row():
    """The first row has as many runs as images. The second has one run of two images, so only their mean is known."""
    layout = BatchLayout(family=LLAVA, config=CONFIG)
    batch = drawn_batch('1ii2iiii', 'iiiiii', '12')
    batch['pixel_values'] = torch.zeros(4, 3)
    batch['num_images'] = [2, 2, 0]

    facts = describe(layout, batch)

    assert facts.media_sizes('image') == [4, 3, None]


def test_patches_side_by_side_are_not_padded():
    """The pixels of MiniCPM-V are as wide as all patches of the batch, so their width says nothing about padding."""
    layout = layout_of_model('new_vl', image_token_id=IMAGE)
    facts_of_microbatches = []
    for num_patches in (2, 3):
        batch = drawn_batch('ii1')
        batch['pixel_values'] = torch.rand(1, 3, 4, 4 * num_patches)
        batch['target_sizes'] = torch.tensor([[1, num_patches]])
        facts = describe(layout, batch)
        facts_of_microbatches.append(facts)

    assert not is_ragged('image', facts_of_microbatches)


def test_facts_hold_until_an_entry_changes():
    batch = text_batch([7, 4])
    another_layout = BatchLayout(family=QWEN, config=CONFIG)
    with_another_key = {**batch, 'more': torch.zeros(2)}

    facts = describe(LAYOUT, batch)

    assert facts.describes(LAYOUT, batch)
    assert facts.describes(LAYOUT, dict(batch))
    assert not facts.describes(another_layout, batch)
    assert not facts.describes(LAYOUT, with_another_key)
    # The entry is replaced in the batch itself. The facts must have a copy of the old batch.
    batch['labels'] = batch['labels'].clone()
    assert not facts.describes(LAYOUT, batch)


POSITIONS = [
    [0, 1, 2, 3],
    [0, 1, 0, 1],
]
POSITIONS_ON_SECOND_AXIS = [
    [0, 0, 0, 0],
    [0, 5, 0, 0],
]


@pytest.mark.parametrize(
    ('positions', 'expected'),
    [
        pytest.param(POSITIONS, [4, 2], id='of each row'),
        pytest.param([[0, 1, 2, 3]], [4, 4], id='shared'),
        pytest.param([POSITIONS, POSITIONS_ON_SECOND_AXIS], [4, 6], id='several axes'),
    ],
)
def test_largest_positions_of_rows(positions, expected):
    """The result is the largest position plus one."""
    position_ids = torch.tensor(positions)
    batch = text_batch([4, 3], position_ids=position_ids)

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


def test_rows_without_positions_count_their_tokens():
    batch = text_batch([4, 3])

    facts = describe(LAYOUT, batch)

    assert largest_positions(facts) == [4, 3]


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
        row = WalkedRow(mask, labels)
        rows.append(row)
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
        rng = random.Random(seed)
        rows = drawn_rows(rng)
        side = side_of_padding(rows)
        mask = torch.tensor([row.mask for row in rows])
        labels = torch.tensor([row.labels for row in rows])
        ids = torch.ones_like(mask)
        batch = {'input_ids': ids, 'attention_mask': mask, 'labels': labels}
        expected_lengths = [row.length(side) for row in rows]
        expected_holes = [row.has_hole() for row in rows]
        some_row_is_padded = any(len(row.used) < row.width for row in rows)

        facts = describe(layout, batch)

        assert facts.side == side, seed
        assert facts.lengths == expected_lengths, seed
        assert facts.has_hole == expected_holes, seed
        assert facts.is_padded == some_row_is_padded, seed


def test_lengths_of_runs():
    is_in_run = torch.tensor(
        [
            [1, 1, 0, 1],
            [0, 0, 0, 0],
            [0, 1, 1, 1],
            [1, 0, 1, 0],
        ]
    )

    lengths = lengths_of_runs(is_in_run.bool())

    assert lengths == [
        [2, 1],
        [],
        [3],
        [1, 1],
    ]


def test_rows_without_ids_are_not_trimmed():
    """In Whisper the labels are all that is text, and nothing tells which positions are padding."""
    labels = torch.tensor(
        [
            [3, 4, -100],
            [3, 4, 5],
        ]
    )
    layout = BatchLayout(family=LLAVA)

    facts = describe(layout, {'labels': labels})

    assert not facts.may_be_trimmed
