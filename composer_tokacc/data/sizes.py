# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Sizes of samples: of what a processor made, or of their text and the headers of their images, none decoded.

What images add to a sample depends on their sizes. So the processor is run once for the sizes of each sample, all that
are the same together, with black images; the rest is the text, whose tokens a fast tokenizer counts in batches. What
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

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, check_ids
from composer_tokacc.data.identity import check_sample
from composer_tokacc.data.records import BadSampleError

ImageSizes = tuple[tuple[int, int], ...]
"""Width and height of each image of a sample, in pixels."""
TableRow = tuple[int, ...]
"""Tokens, image tokens, positions with loss, patches, steps by which media were made smaller."""
MapSamples = Callable[[Callable[[Any], Any], Sequence[Any], int], Iterable[Any]]
"""Runs a function on items, in several processes if they are more than the given number."""

SHRINK_STEPS = 'shrink_steps'
"""Entry of a sample whose media are made to fit, a list of one, while its dataset is measured."""
DEFAULT_PATCH_SIZE = 14
"""The commonest side of a patch, in pixels, for where neither model nor processor names one."""
TEXTS_TOGETHER = 128
"""Samples whose text goes through the tokenizer together."""
FEWEST_CHUNKS, FEWEST_SIZES, FEWEST_VIDEOS = 16, 128, 32
"""Starting processes takes longer than fewer of these."""
ODD_SIZES = ((57, 33), (640, 427), (1280, 96), (97, 1280), (1500, 1500))
"""Small, usual, wide, tall and large: where these are all the same, every image is."""


def image_token_ids(processor: Any) -> tuple[int, ...]:
    """Returns ids of the tokens that stand for images, videos and audio, as the processor declares them."""
    tokenizer = getattr(processor, 'tokenizer', None)
    found = {getattr(owner, f'{name}_token_id', None) for owner in (processor, tokenizer) for name in MODALITIES}
    if tokenizer is not None:  # some processors have no more than the text of the token
        texts = [getattr(processor, f'{name}_token', None) for name in MODALITIES]
        found |= {tokenizer.convert_tokens_to_ids(str(text)) for text in texts if text is not None}
    # SmolVLM's name for a video is no token: its frames are images.
    found.discard(getattr(tokenizer, 'unk_token_id', None))
    return tuple(sorted(token_id for token_id in found if isinstance(token_id, int)))


def patch_size_of(*owners: Any) -> int:
    """Returns the side of a patch in pixels that the first of some owners names, else the commonest.

    Args:
        *owners: A number; a model's config, or its ``vision_config``; a processor, or its ``image_processor``; None.
    """
    for owner in owners:
        parts = (getattr(owner, 'vision_config', None), owner, getattr(owner, 'image_processor', None))
        for named in (owner, *(getattr(part, 'patch_size', None) for part in parts)):
            if isinstance(named, Mapping):
                named = named.get('height')
            elif isinstance(named, list | tuple):
                named = next(iter(named), None)
            named = getattr(named, 'height', named)  # SizeDict of transformers 5
            if isinstance(named, int) and named > 0:
                return named
    return DEFAULT_PATCH_SIZE


def count_patches(sample: Mapping[str, Any], patch_size: int) -> int:
    """Counts the patches that a vision encoder computes for one sample; a class token is none.

    What the encoder is given but drops before its first block does not count: tiles that only fill up an image's row,
    and what surrounds an image smaller than its batch (Pixtral). Padding that it computes does: Mllama's unused
    tiles, and the margins of a tile.

    Args:
        sample: What the processor returns for it.
        patch_size: Side of a patch in pixels. Of no importance where the processor cuts the patches (Qwen-VL).
    """
    # Video-LLaVA's processor names images by themselves.
    images = sample.get('pixel_values', sample.get('pixel_values_images'))
    videos = sample.get('pixel_values_videos')
    num_patches = 0 if images is None else _patches_of(images, patch_size, sample.get('image_sizes'))
    if videos is not None and videos.dim() == 5:  # of clips all is computed, what is grey too
        videos = videos.flatten(0, 1)
    return num_patches + (0 if videos is None else _patches_of(videos, patch_size, None))


def _patches_of(pixels: torch.Tensor, patch_size: int, image_sizes: Any) -> int:
    """Counts patches of ``(..., channels, height, width)``, or of ``(..., values)`` where each entry is one already."""
    if pixels.dim() < 4:
        return pixels.shape[:-1].numel()
    if pixels.dim() == 4 and image_sizes is not None:
        return int((torch.as_tensor(image_sizes) // patch_size).prod(dim=1).sum())
    num_tiles = pixels.shape[:-3].numel()
    if pixels.dim() == 5 and not pixels.is_meta:
        # Idefics3 takes out tiles of nothing but zeros; LLaVA-NeXT and OneVision those that their processors add, which
        # are the same. Mllama (6 dimensions) computes all. Where only sizes are asked for (meta), no tile fills up.
        num_tiles = int(pixels.flatten(2).any(dim=2).sum())
    height, width = pixels.shape[-2:]
    return num_tiles * (height // patch_size) * (width // patch_size)


class RowSizes:
    """Measures samples of a dataset: a row of its length table each."""

    def __init__(self, dataset: Any, processor: Any, patch_size: int) -> None:
        self.dataset = dataset
        self.token_ids = torch.tensor(image_token_ids(processor))
        self.patch_size = patch_size

    def of(self, sample: Mapping[str, Any]) -> TableRow:
        """Returns the row of a sample."""
        check_sample(sample, 'input_ids', 'labels')
        check_ids(sample)
        num_image_tokens = int(torch.isin(sample['input_ids'], self.token_ids).sum())
        num_loss_tokens = int((sample['labels'][:, 1:] != IGNORE_INDEX).sum())
        num_patches, steps = count_patches(sample, self.patch_size), sample.get(SHRINK_STEPS, [0])[0]
        return sample['input_ids'].shape[1], num_image_tokens, num_loss_tokens, num_patches, steps

    def read(self, index: int) -> TableRow | str:
        """Reads a sample; returns its row, or why it is bad."""
        try:
            return self.of(self.dataset[index])
        except BadSampleError as error:
            return str(error)

    def from_headers(self, indices: Sequence[int], map_samples: MapSamples) -> list[TableRow | None]:
        """Returns the rows of samples that are not read, None for one that has to be."""
        chunks = [indices[start : start + TEXTS_TOGETHER] for start in range(0, len(indices), TEXTS_TOGETHER)]
        unexpanded = [one for chunk in map_samples(self._unexpanded, chunks, FEWEST_CHUNKS) for one in chunk]
        expand = _Expansion(self)
        if len({expand((size,)) for size in ODD_SIZES}) == 1:
            unexpanded = [(row, ODD_SIZES[:1] * len(sizes)) for row, sizes in unexpanded]
        distinct = sorted({one for _, sizes in unexpanded for one in _with_each(sizes)})
        added = dict(zip(distinct, map_samples(expand, distinct, FEWEST_SIZES), strict=True))
        rows: list[TableRow | None] = [None] * len(indices)
        for place, (row, sizes) in enumerate(unexpanded):
            images = [added[one] for one in _with_each(sizes)]
            # Another number of placeholders: one stands in the text.
            if row and all(images) and row[1] == expand.num_marks * len(sizes):
                total = tuple(map(sum, zip(row, images[0], strict=True)))
                rows[place] = total if self.dataset.encoder.has_room(*total[:2]) else None
        places = [place for place, row in enumerate(rows) if row is None]
        found = map_samples(self._with_videos, [indices[place] for place in places], FEWEST_VIDEOS)
        for place, row in zip(places, found, strict=True):
            rows[place] = row
        return rows

    def _unexpanded(self, chunk: Sequence[int]) -> list[tuple[TableRow | None, ImageSizes]]:
        found = self.dataset.unexpanded(chunk)
        return [(None, ()) if one is None else (self.of(one[0]), tuple(one[1])) for one in found]

    def _with_videos(self, index: int) -> TableRow | None:
        with suppress(Exception):  # who reads it is told by name
            sample = self.dataset.shapes_of_videos(index)
            return None if sample is None else self.of(sample)
        return None


def _with_each(sizes: ImageSizes) -> list[ImageSizes]:
    """Returns sizes of several images, and of each alone, which tells whether they can be separated from a text."""
    return [sizes, *((size,) for size in sizes)]


class _Expansion:
    """Returns what images of given sizes add to a sample: a row, or None where only reading can say.

    The images hold nothing, and the tensors made of them neither, where the processor computes with torch.
    """

    def __init__(self, sizes: RowSizes) -> None:
        self.row_of = sizes.of
        self.encoder = copy(sizes.dataset.encoder)
        self.encoder.max_length = None
        text = self.encoder.encode_unexpanded([_asked_about(1)])[0] if 'image' in self.encoder.parts else None
        self.num_marks = 0 if text is None else self.row_of(text)[1]

    def __call__(self, sizes: ImageSizes) -> TableRow | None:
        conversation = _asked_about(len(sizes))
        text = self.encoder.encode_unexpanded([conversation])[0]
        # Among images of several sizes there may be tiles that only fill up, and are known by what they hold.
        for blank in [*[_shape_alone] * (len(set(sizes)) < 2), partial(Image.new, 'RGB')]:
            with suppress(Exception):  # who reads a sample of such images is told by name
                sample = self.encoder(conversation, [blank(size) for size in sizes])
                break
        else:
            return None
        alone = len(sizes) < 2
        if text is None or (alone and not self._is_separate(text['input_ids'][0], sample['input_ids'][0])):
            return None
        row = tuple(after - before for before, after in zip(self.row_of(text), self.row_of(sample), strict=True))
        return None if row[2] else row

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


def _asked_about(num_images: int) -> list[dict[str, Any]]:
    content = [*({'type': 'image'} for _ in range(num_images)), {'type': 'text', 'text': 'q'}]
    return [{'role': 'user', 'content': content}, {'role': 'assistant', 'content': [{'type': 'text', 'text': 'a'}]}]


def _shape_alone(size: tuple[int, int]) -> torch.Tensor:
    return torch.empty(3, *size[::-1], dtype=torch.uint8, device='meta')


def _num_equal(first: torch.Tensor, second: torch.Tensor) -> int:
    """Counts the tokens that agree before the first that does not."""
    size = min(len(first), len(second))
    return int((first[:size] == second[:size]).cumprod(0).sum())
