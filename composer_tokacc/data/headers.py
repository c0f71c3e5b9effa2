# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sizes of samples from their text and the headers of their images, no image decoded.

What an image adds to a sample depends on its size, and on how many others stand beside it. So the processor is asked
once about each size, with a blank image; the rest is the text, whose tokens a fast tokenizer counts in batches. What
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

__all__ = ['rows_from_headers']

Size = tuple[int, int]
"""Width and height in pixels."""
Row = tuple[int, ...]
"""Tokens, image tokens, positions with loss, patches."""
Outline = tuple[Row, list[Size]]
"""The row of a sample whose placeholders are not expanded, and the sizes of its images."""
Shares = Mapping[Any, Row | None]
"""What an image of each size adds to a sample; under None, what a sample without images has besides its text."""
Mapped = Callable[[Callable[[Any], Any], Sequence[Any], int], Iterable[Any]]

CHUNK = 128
"""Samples whose text goes through the tokenizer together."""
FEWEST_CHUNKS, FEWEST_SIZES, FEWEST_FILMS = 16, 128, 32
"""Starting processes takes longer than fewer of these."""
ODD_SIZES = ((57, 33), (640, 427), (1280, 96), (97, 1280), (1500, 1500))
"""Small, usual, wide, tall and large: where these are all the same, every image is."""


def rows_from_headers(
    dataset: Any, indices: Sequence[int], row_of: Callable[[Mapping[str, Any]], Row], mapped: Mapped
) -> list[Row | None]:
    """Rows of a length table, None for a sample that has to be read.

    Args:
        dataset: Has an ``encoder``, ``outlines(indices)`` and ``outline_of_films(index)``, as :class:`.LlavaDataset`.
        indices: Of its samples.
        row_of: The row of a sample.
        mapped: Runs a function on each of some items, in several processes if they are more than the given number.
    """
    chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
    outlines = [one for chunk in mapped(partial(_outline, dataset, row_of), chunks, FEWEST_CHUNKS) for one in chunk]
    sizes_of: dict[int, set[Size]] = {}
    for one in outlines:
        if one is not None:
            sizes_of.setdefault(len(one[1]), set()).update(one[1])
    probe = _Probe(dataset.encoder, row_of)
    shares = _shares(probe, sizes_of, mapped)
    rows = [
        None if one is None else _expanded(one[0], one[1], shares[len(one[1])], probe.num_marks) for one in outlines
    ]
    longest = dataset.encoder.max_length
    rows = [row if row and (longest is None or row[0] <= longest) else None for row in rows]
    places = [place for place, row in enumerate(rows) if row is None]
    films = mapped(partial(_with_films, dataset, row_of), [indices[place] for place in places], FEWEST_FILMS)
    for place, row in zip(places, films, strict=True):
        rows[place] = row
    return rows


def _with_films(dataset: Any, row_of: Callable[[Mapping[str, Any]], Row], index: int) -> Row | None:
    with suppress(Exception):  # who reads it is told by name
        sample = dataset.outline_of_films(index)
        return None if sample is None else row_of(sample)
    return None


def _outline(dataset: Any, row_of: Callable[[Mapping[str, Any]], Row], chunk: Sequence[int]) -> list[Outline | None]:
    return [one and (row_of(one[0]), one[1]) for one in dataset.outlines(chunk)]


def _shares(probe: _Probe, sizes_of: Mapping[int, set[Size]], mapped: Mapped) -> dict[int, Shares]:
    """What an image adds to a sample, by how many the sample holds and by its size.

    A processor may treat an image among several in another way (LLaVA-OneVision cuts it into no tiles then). Whether
    it does is asked with the costliest and the cheapest image in turns; if it does, with several of each size, and if
    those do not explain what was seen, the samples have to be read.
    """
    sizes = sorted(set().union(*sizes_of.values()))
    alone = dict(zip(sizes, _asked(probe, sizes, 1, mapped), strict=True))
    shares: dict[int, Shares] = {}
    for count, used in sizes_of.items():
        known = sorted((size for size in used if alone[size] is not None), key=lambda size: alone[size] or ())
        shares[count] = alone
        if count == 0:
            shares[count] = {None: probe([])}
        elif count > 1 and known:
            mixed = [known[-(position % 2)] for position in range(1, count + 1)]
            together = probe(mixed)
            if together != _sum([alone[size] for size in mixed]):
                answers = dict(zip(known, _asked(probe, known, count, mapped), strict=True))
                explained = together is not None and together == _sum([answers[size] for size in mixed])
                shares[count] = answers if explained else {}
    return shares


def _asked(probe: _Probe, sizes: Sequence[Size], count: int, mapped: Mapped) -> list[Row | None]:
    """The share of an image of each size among so many of the same size."""
    if len(sizes) > len(ODD_SIZES):
        odd = {probe([size] * count) for size in ODD_SIZES}
        if len(odd) == 1:
            return [_divided(row, count) for row in odd] * len(sizes)
    rows = mapped(probe, [[size] * count for size in sizes], FEWEST_SIZES)
    return [_divided(row, count) for row in rows]


def _divided(row: Row | None, count: int) -> Row | None:
    """One of several equal shares, None where they cannot be equal."""
    return None if row is None or any(value % count for value in row) else tuple(value // count for value in row)


def _expanded(row: Row, sizes: Sequence[Size], shares: Shares, num_marks: int) -> Row | None:
    """The row of a sample, from that before its placeholders are expanded."""
    if row[1] != num_marks * len(sizes):  # another placeholder stands in the text
        return None
    return _sum([row, *(shares.get(size) for size in sizes or [None])])


def _sum(rows: Sequence[Row | None]) -> Row | None:
    known = [row for row in rows if row is not None]
    return tuple(map(sum, zip(*known, strict=True))) if len(known) == len(rows) else None


class _Probe:
    """Asks the processor what images of given sizes add to a sample: a row, or None where only reading can say.

    The images hold nothing, and the tensors made of them neither, where the processor computes with torch.
    """

    def __init__(self, encoder: ConversationEncoder, row_of: Callable[[Mapping[str, Any]], Row]) -> None:
        self.encoder = copy(encoder)
        self.encoder.max_length = None
        self.row_of = row_of
        self.kinds_of_blank = [_shape_alone, _black]
        plain = encoder.encode_unexpanded([_conversation(1)])[0] if 'image' in encoder.parts else None
        self.num_marks = 0 if plain is None else row_of(plain)[1]

    def __call__(self, sizes: Sequence[Size]) -> Row | None:
        conversation = _conversation(len(sizes))
        plain = self.encoder.encode_unexpanded([conversation])[0]
        sample = self._encode(conversation, sizes)
        if plain is None or sample is None:
            return None
        if len(sizes) < 2 and not self._is_separate(plain['input_ids'][0], sample['input_ids'][0]):
            return None
        row = tuple(after - before for before, after in zip(self.row_of(plain), self.row_of(sample), strict=True))
        return None if row[2] else row

    def _encode(self, conversation: Sequence[Mapping[str, Any]], sizes: Sequence[Size]) -> dict[str, Any] | None:
        # Among images of several sizes there may be tiles that only fill up, and are known by what they hold.
        for blank in self.kinds_of_blank if len(set(sizes)) < 2 else [_black]:
            with suppress(Exception):  # who reads a sample of such images is told by name
                sample = self.encoder(conversation, [blank(*size) for size in sizes])
                if len(sizes) == 1:
                    self.kinds_of_blank = [blank]
                return sample
        return None

    def _is_separate(self, plain: torch.Tensor, expanded: torch.Tensor) -> bool:
        """Whether tokens that no tokenizer joins with a neighbour stand at both ends of what was exchanged.

        Only then do placeholders grow by as much in another text. Gemma 3 puts line breaks there.
        """
        before = _num_equal(plain, expanded)
        behind = _num_equal(plain[before:].flip(0), expanded[before:].flip(0))
        new = expanded[before : len(expanded) - behind].tolist()
        ends = {*new[:1], *new[-1:], *plain[before : len(plain) - behind].tolist()}
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
    """How many tokens agree before the first that does not."""
    size = min(len(first), len(second))
    differs = (first[:size] != second[:size]).nonzero()
    return int(differs[0]) if len(differs) else size
