# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sizes of samples from their text and the headers of their images, no image decoded.

What an image adds to a sample depends on its size, and on how many others stand beside it. So the processor is run
once for each size, with a black image; the rest is the text, whose tokens a fast tokenizer counts in batches. What
cannot be known in this way is left open, and the sample has to be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import torch
from PIL import Image

from composer_tokacc.data.conversation import ConversationEncoder

Size = tuple[int, int]
"""Width and height in pixels."""
TableRow = tuple[int, ...]
"""Tokens, image tokens, positions with loss, patches, steps by which media were made smaller."""
Unexpanded = tuple[TableRow, list[Size]]
"""The row of a sample whose placeholders are not expanded, and the sizes of its images."""
PerSize = Mapping[Any, TableRow | None]
"""What an image of each size adds to a sample; under None, what a sample without images has besides its text."""
MapSamples = Callable[[Callable[[Any], Any], Sequence[Any], int], Iterable[Any]]

TEXTS_TOGETHER = 128
"""Samples whose text goes through the tokenizer together."""
FEWEST_CHUNKS, FEWEST_SIZES, FEWEST_VIDEOS = 16, 128, 32
"""Starting processes takes longer than fewer of these."""
ODD_SIZES = ((57, 33), (640, 427), (1280, 96), (97, 1280), (1500, 1500))
"""Small, usual, wide, tall and large: where these are all the same, every image is."""


def rows_from_headers(
    dataset: Any, indices: Sequence[int], row_of: Callable[[Mapping[str, Any]], TableRow], map_samples: MapSamples
) -> list[TableRow | None]:
    """Returns rows of a length table, None for a sample that has to be read.

    ``map_samples`` runs a function on items, in several processes if they are more than the given number.
    """
    chunks = [indices[start : start + TEXTS_TOGETHER] for start in range(0, len(indices), TEXTS_TOGETHER)]
    found = map_samples(partial(_unexpanded, dataset, row_of), chunks, FEWEST_CHUNKS)
    unexpanded = [one for chunk in found for one in chunk]
    sizes_of: dict[int, set[Size]] = {}
    for _, sizes in filter(None, unexpanded):
        sizes_of.setdefault(len(sizes), set()).update(sizes)
    processed = _SizesProcessed(dataset.encoder, row_of)
    added = _added_by_images(processed, sizes_of, map_samples)
    rows = [one and _expanded(one, added[len(one[1])], processed.num_marks) for one in unexpanded]
    rows = [row if row and dataset.encoder.has_room(*row[:2]) else None for row in rows]
    places = [place for place, row in enumerate(rows) if row is None]
    found = map_samples(partial(_with_videos, dataset, row_of), [indices[place] for place in places], FEWEST_VIDEOS)
    for place, row in zip(places, found, strict=True):
        rows[place] = row
    return rows


def _with_videos(dataset: Any, row_of: Callable[[Mapping[str, Any]], TableRow], index: int) -> TableRow | None:
    with suppress(Exception):  # who reads it is told by name
        sample = dataset.shapes_of_videos(index)
        return None if sample is None else row_of(sample)
    return None


def _unexpanded(
    dataset: Any, row_of: Callable[[Mapping[str, Any]], TableRow], chunk: Sequence[int]
) -> list[Unexpanded | None]:
    return [one and (row_of(one[0]), one[1]) for one in dataset.unexpanded(chunk)]


def _added_by_images(
    processed: _SizesProcessed, sizes_of: Mapping[int, set[Size]], map_samples: MapSamples
) -> dict[int, PerSize]:
    """Returns what an image adds to a sample, by how many the sample holds and by its size.

    A processor may treat an image among several in another way (LLaVA-OneVision cuts it into no tiles then). Whether
    it does is seen with the costliest and the cheapest image in turns; if it does, with several of each size, and if
    those do not explain what was seen, the samples have to be read.
    """
    sizes = sorted(set().union(*sizes_of.values()))
    alone = dict(zip(sizes, _added_by_each(processed, sizes, 1, map_samples), strict=True))
    added: dict[int, PerSize] = {}
    for count, used in sizes_of.items():
        known = sorted((size for size in used if alone[size] is not None), key=lambda size: alone[size] or ())
        added[count] = {None: processed([])} if count == 0 else alone
        if count > 1 and known:
            mixed = [known[-(position % 2)] for position in range(1, count + 1)]
            together = processed(mixed)
            if together != _sum([alone[size] for size in mixed]):
                each = dict(zip(known, _added_by_each(processed, known, count, map_samples), strict=True))
                is_explained = together is not None and together == _sum([each[size] for size in mixed])
                added[count] = each if is_explained else {}
    return added


def _added_by_each(
    processed: _SizesProcessed, sizes: Sequence[Size], count: int, map_samples: MapSamples
) -> list[TableRow | None]:
    """Returns what an image of each size adds among so many of the same size."""
    if len(sizes) > len(ODD_SIZES):
        odd = {processed([size] * count) for size in ODD_SIZES}
        if len(odd) == 1:
            return [_divided(row, count) for row in odd] * len(sizes)
    rows = map_samples(processed, [[size] * count for size in sizes], FEWEST_SIZES)
    return [_divided(row, count) for row in rows]


def _divided(row: TableRow | None, count: int) -> TableRow | None:
    """Returns one of several equal parts, None where they cannot be equal."""
    return None if row is None or any(value % count for value in row) else tuple(value // count for value in row)


def _expanded(unexpanded: Unexpanded, added: PerSize, num_marks: int) -> TableRow | None:
    """Returns the row of a sample from that before its placeholders are expanded."""
    row, sizes = unexpanded
    if row[1] != num_marks * len(sizes):  # another placeholder stands in the text
        return None
    return _sum([row, *(added.get(size) for size in sizes or [None])])


def _sum(rows: Sequence[TableRow | None]) -> TableRow | None:
    known = [row for row in rows if row is not None]
    return tuple(map(sum, zip(*known, strict=True))) if len(known) == len(rows) else None


class _SizesProcessed:
    """Returns what images of given sizes add to a sample: a row, or None where only reading can say.

    The images hold nothing, and the tensors made of them neither, where the processor computes with torch.
    """

    def __init__(self, encoder: ConversationEncoder, row_of: Callable[[Mapping[str, Any]], TableRow]) -> None:
        self.encoder = copy(encoder)
        self.encoder.max_length = None
        self.row_of = row_of
        self.blank_images = [_shape_alone, _black]
        text = encoder.encode_unexpanded([_conversation(1)])[0] if 'image' in encoder.parts else None
        self.num_marks = 0 if text is None else row_of(text)[1]

    def __call__(self, sizes: Sequence[Size]) -> TableRow | None:
        conversation = _conversation(len(sizes))
        text = self.encoder.encode_unexpanded([conversation])[0]
        sample = self._encode(conversation, sizes)
        if text is None or sample is None:
            return None
        if len(sizes) < 2 and not self._is_separate(text['input_ids'][0], sample['input_ids'][0]):
            return None
        row = tuple(after - before for before, after in zip(self.row_of(text), self.row_of(sample), strict=True))
        return None if row[2] else row

    def _encode(self, conversation: Sequence[Mapping[str, Any]], sizes: Sequence[Size]) -> dict[str, Any] | None:
        # Among images of several sizes there may be tiles that only fill up, and are known by what they hold.
        for blank in self.blank_images if len(set(sizes)) < 2 else [_black]:
            with suppress(Exception):  # who reads a sample of such images is told by name
                sample = self.encoder(conversation, [blank(*size) for size in sizes])
                if len(sizes) == 1:
                    self.blank_images = [blank]
                return sample
        return None

    def _is_separate(self, text: torch.Tensor, expanded: torch.Tensor) -> bool:
        """Tells whether tokens that no tokenizer joins with a neighbour stand at both ends of what was exchanged.

        Only then do placeholders grow by as much in another text. Gemma 3 puts line breaks there.
        """
        before = _num_equal(text, expanded)
        behind = _num_equal(text[before:].flip(0), expanded[before:].flip(0))
        new = expanded[before : len(expanded) - behind].tolist()
        ends = {*new[:1], *new[-1:], *text[before : len(text) - behind].tolist()}
        known = self.encoder.tokenizer.added_tokens_decoder
        return all(end in known and not (known[end].lstrip or known[end].rstrip) for end in ends)


def _conversation(num_images: int) -> list[dict[str, Any]]:
    content = [*({'type': 'image'} for _ in range(num_images)), {'type': 'text', 'text': 'q'}]
    return [{'role': 'user', 'content': content}, {'role': 'assistant', 'content': [{'type': 'text', 'text': 'a'}]}]


def _shape_alone(width: int, height: int) -> torch.Tensor:
    return torch.empty(3, height, width, dtype=torch.uint8, device='meta')


def _black(width: int, height: int) -> Image.Image:
    return Image.new('RGB', (width, height))


def _num_equal(first: torch.Tensor, second: torch.Tensor) -> int:
    """Counts the tokens that agree before the first that does not."""
    size = min(len(first), len(second))
    differs = (first[:size] != second[:size]).nonzero()
    return int(differs[0]) if len(differs) else size
