# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures samples: from the tensors of a processor, or from their text and the headers of their images.

Headers are much faster. They suffice under one assumption, which is checked: the tokens and patches that images add to
a sample depend only on the sizes of the images, not on the text. So the processor runs once for each distinct list of
sizes, with black images, and a fast tokenizer counts the tokens of all texts. A sample that cannot be measured in this
way has to be read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, check_ids
from composer_tokacc.data.chat_template import example_conversation
from composer_tokacc.data.identity import check_sample
from composer_tokacc.data.records import BadSampleError, EncodedSample, Message

ImageSizes = tuple[tuple[int, int], ...]
"""Width and height of each image of a sample, in pixels."""
MapItem = TypeVar('MapItem')
MapResult = TypeVar('MapResult')

SHRINK_STEPS = 'shrink_steps'
"""Key of samples that `fit.py` encodes to measure them: a list of one number, the steps that make the sample fit."""
DEFAULT_PATCH_SIZE = 14
"""The most common side of a patch, in pixels, if neither model nor processor names one."""
TEXTS_TOGETHER = 128
"""Texts that go through the tokenizer together."""
FEWEST_TEXTS, FEWEST_SIZES, FEWEST_VIDEOS = 2048, 128, 32
"""Up to these numbers of items, no processes are started, because starting them takes longer than the work."""
PROBE_SIZES = ((57, 33), (640, 427), (1280, 96), (97, 1280), (1500, 1500))
"""Small, usual, wide, tall and large. If images of all these sizes add the same row, every image does."""


class TableRow(NamedTuple):
    """The sizes of one sample: a row of the length table."""

    length: int
    """Tokens, image tokens included."""
    image_tokens: int
    loss_tokens: int
    """Positions with loss under the causal shift."""
    vision_patches: int
    shrink_steps: int
    """Steps by which `fit.py` makes its media smaller."""

    def plus(self, other: TableRow) -> TableRow:
        """Returns the sum of two rows."""
        return TableRow(*map(operator.add, self, other))

    def minus(self, other: TableRow) -> TableRow:
        """Returns the difference of two rows."""
        return TableRow(*map(operator.sub, self, other))


@dataclass(frozen=True)
class SampleMapper:
    """Runs a function on items, in worker processes if there are many."""

    num_workers: int
    shows_bar: bool

    def __call__(
        self,
        function: Callable[[Any], MapResult],
        items: Sequence[MapItem],
        fewest: int,
        *,
        batch_size: int | None = None,
    ) -> Iterator[MapResult]:
        """Yields the results in order. Starts no processes for ``fewest`` items or less.

        The function gets one item. If ``batch_size`` is set, it gets a list of this number of items.
        """
        loader: Any = DataLoader(
            items,  # pyright: ignore[reportArgumentType]  # a sequence will do
            batch_size=batch_size,
            num_workers=self.num_workers if len(items) > fewest else 0,
            generator=torch.Generator(),  # its own, so that the random numbers of the run do not change
            collate_fn=function,  # pyright: ignore[reportArgumentType]  # runs in the workers
        )
        # None: the bar is hidden if the output is not a terminal.
        yield from tqdm(
            loader,
            desc='measuring samples',
            disable=None if self.shows_bar else True,
            leave=False,
        )

    def map_missing(
        self,
        rows: Sequence[object],
        function: Callable[[MapItem], MapResult],
        items: Sequence[MapItem],
        fewest: int,
    ) -> Iterator[tuple[int, MapResult]]:
        """Runs the function on the items that have no row yet. Yields the place of each item and its result.

        Args:
            rows: The row of each item. None if it is missing.
            function: Gets one item.
            items: All items.
            fewest: Up to this number of missing rows, no processes are started.
        """
        places = []
        items_without_row = []
        for place, row in enumerate(rows):
            if row is None:
                places.append(place)
                items_without_row.append(items[place])
        results = self(function, items_without_row, fewest)
        yield from zip(places, results, strict=True)


def image_token_ids(processor: Any) -> tuple[int, ...]:
    """Returns ids of the tokens that stand for images, videos and audio, as the processor declares them."""
    tokenizer = getattr(processor, 'tokenizer', None)
    token_ids = set()
    for modality in MODALITIES:
        token_ids.add(getattr(processor, f'{modality}_token_id', None))
        token_ids.add(getattr(tokenizer, f'{modality}_token_id', None))
        # Some processors have only the text of the token.
        token = getattr(processor, f'{modality}_token', None)
        if token is not None and tokenizer is not None:
            token_ids.add(tokenizer.convert_tokens_to_ids(str(token)))
    # SmolVLM treats frames as images. Its video token is not in its vocabulary.
    token_ids.discard(getattr(tokenizer, 'unk_token_id', None))
    return tuple(sorted(token_id for token_id in token_ids if isinstance(token_id, int)))


def patch_size_of(*owners: Any) -> int:
    """Returns the side of a patch in pixels, from the first owner that has one. If none has one, the most common side.

    Args:
        *owners: Each is a number, a model's config, its ``vision_config``, a processor, its ``image_processor``, or
            None.
    """
    for owner in owners:
        candidates = [owner]  # the owner itself may be the number
        for part in (
            getattr(owner, 'vision_config', None),
            owner,
            getattr(owner, 'image_processor', None),
        ):
            candidates.append(getattr(part, 'patch_size', None))
        for candidate in candidates:
            side = _side_of(candidate)
            if isinstance(side, int) and side > 0:
                return side
    return DEFAULT_PATCH_SIZE


def _side_of(size: Any) -> Any:
    """Returns the height of a patch from its size, which may be a number, a pair, or a mapping."""
    if isinstance(size, Mapping):
        return size.get('height')
    if isinstance(size, list | tuple):
        return size[0] if size else None
    return getattr(size, 'height', size)  # SizeDict of transformers 5 has attributes


def count_patches(sample: Mapping[str, Any], patch_size: int) -> int:
    """Counts the patches that a vision encoder computes for one sample, without class tokens.

    Padding counts if the encoder computes it: Mllama's unused tiles, and the margins of a tile. Padding that it drops
    before its first block does not count: the unused tiles of other models, and the margin of an image that is smaller
    than the largest of its batch (Pixtral).

    Args:
        sample: The entries of the processor.
        patch_size: Side of a patch in pixels. Not used if the processor itself cuts the patches (Qwen-VL).
    """
    # Video-LLaVA's processor has its own name for images.
    images = sample.get('pixel_values', sample.get('pixel_values_images'))
    num_patches = 0
    if images is not None:
        num_patches = _patches_of(images, patch_size, sample.get('image_sizes'))
    videos = sample.get('pixel_values_videos')
    if videos is not None:
        if videos.dim() == 5:  # every frame of a clip is computed, grey ones too
            videos = videos.flatten(0, 1)
        num_patches += _patches_of(videos, patch_size, None)
    return num_patches


def _patches_of(pixels: torch.Tensor, patch_size: int, image_sizes: Any) -> int:
    """Counts the patches of pixels, whose shape depends on the model.

    Args:
        pixels: Images or tiles ``(..., channels, height, width)``, or patches ``(..., values)``.
        patch_size: Side of a patch in pixels.
        image_sizes: Height and width of each image ``(images, 2)``, if the pixels have margins (Pixtral).
    """
    if pixels.dim() < 4:
        return pixels.shape[:-1].numel()
    if pixels.dim() == 4 and image_sizes is not None:
        patches_per_side = torch.as_tensor(image_sizes) // patch_size
        return int(patches_per_side.prod(dim=1).sum())
    num_tiles = pixels.shape[:-3].numel()
    if pixels.dim() == 5 and not pixels.is_meta:
        # Tiles of zeros do not count. Idefics3 drops all of them; LLaVA-NeXT and OneVision drop the tiles of padding,
        # which are zeros. Mllama computes all tiles, and its pixels have 6 dimensions. Meta tensors have no padding,
        # because all their images are of one size (see `ImageExpansion`).
        has_pixels = pixels.flatten(2).any(dim=2)
        num_tiles = int(has_pixels.sum())
    height, width = pixels.shape[-2:]
    return num_tiles * (height // patch_size) * (width // patch_size)


class RowSizes:
    """Measures the samples of a dataset.

    Args:
        dataset: Any dataset. For ``from_headers`` it has the methods of :class:`.LlavaDataset`.
        processor: Its processor.
        patch_size: Side of a patch in pixels.
    """

    def __init__(self, dataset: Any, processor: Any, patch_size: int) -> None:
        self.dataset = dataset
        self.token_ids = torch.tensor(image_token_ids(processor))
        self.patch_size = patch_size

    def measure(self, sample: EncodedSample) -> TableRow:
        """Returns the row of a sample."""
        check_sample(sample, 'input_ids', 'labels')
        check_ids(sample)
        is_image_token = torch.isin(sample['input_ids'], self.token_ids)
        has_loss = sample['labels'][:, 1:] != IGNORE_INDEX
        vision_patches = count_patches(sample, self.patch_size)
        (shrink_steps,) = sample.get(SHRINK_STEPS, [0])
        return TableRow(
            length=sample['input_ids'].shape[1],
            image_tokens=int(is_image_token.sum()),
            loss_tokens=int(has_loss.sum()),
            vision_patches=vision_patches,
            shrink_steps=shrink_steps,
        )

    def read(self, index: int) -> TableRow | str:
        """Reads a sample. Returns its row, or the reason why it is bad."""
        try:
            return self.measure(self.dataset[index])
        except BadSampleError as error:
            return str(error)

    def from_headers(self, indices: Sequence[int], map_samples: SampleMapper) -> list[TableRow | None]:
        """Returns the rows of samples without reading them. None for a sample that must be read."""
        texts: list[tuple[TableRow | None, ImageSizes]] = []
        for measured in map_samples(self._measure_texts, indices, FEWEST_TEXTS, batch_size=TEXTS_TOGETHER):
            texts.extend(measured)
        expansion = ImageExpansion(self)
        probe_rows = {expansion((size,)) for size in PROBE_SIZES}
        if len(probe_rows) == 1:
            # Every image adds the same row with this processor, so one size stands for all.
            one_size = PROBE_SIZES[:1]
            texts = [(row, one_size * len(sizes)) for row, sizes in texts]
        distinct = set()
        for _, sizes in texts:
            distinct.add(sizes)
            distinct.update((size,) for size in sizes)  # `_add_images` also looks up each image by itself
        # The expensive part: one call of the processor for each distinct list of sizes.
        distinct_sizes = sorted(distinct)
        added_rows = map_samples(expansion, distinct_sizes, FEWEST_SIZES)
        additions = dict(zip(distinct_sizes, added_rows, strict=True))
        rows: list[TableRow | None] = []
        for row, sizes in texts:
            rows.append(self._add_images(row, sizes, additions))
        # Samples with videos: decoding one frame of each gives their shapes.
        for place, row in map_samples.map_missing(rows, self._measure_videos, indices, FEWEST_VIDEOS):
            rows[place] = row
        return rows

    def _measure_texts(self, indices: Sequence[int]) -> list[tuple[TableRow | None, ImageSizes]]:
        """Returns the rows of samples whose placeholders are not expanded, with the sizes of their images."""
        texts: list[tuple[TableRow | None, ImageSizes]] = []
        for result in self.dataset.unexpanded(indices):
            if result is None:
                texts.append((None, ()))
            else:
                sample, sizes = result
                row = self.measure(sample)
                texts.append((row, sizes))
        return texts

    def _add_images(
        self,
        row: TableRow | None,
        sizes: ImageSizes,
        additions: Mapping[ImageSizes, AddedRow | None],
    ) -> TableRow | None:
        """Returns the row of a text with its images. None if the sample must be read, because this cannot tell.

        Args:
            row: Row of the text. None if the sample must be read.
            sizes: Sizes of its images.
            additions: Rows that images add, by their sizes: for the whole list, and for each image by itself.
        """
        if row is None:
            return None
        for size in sizes:
            if additions[(size,)] is None:
                return None
        added = additions[sizes]
        # If the text has more placeholder tokens than its images, the user has written one.
        if added is None or row.image_tokens != added.num_placeholders:
            return None
        total = row.plus(added.row)
        if not self.dataset.encoder.has_room(total.length, total.image_tokens):
            return None  # a bad sample: reading it raises the error
        return total

    def _measure_videos(self, index: int) -> TableRow | None:
        """Returns the row of a sample with videos. None for another sample, and for a bad one."""
        with suppress(Exception):  # the error is raised again when the sample is read
            sample = self.dataset.shapes_of_videos(index)
            if sample is not None:
                return self.measure(sample)
        return None


class AddedRow(NamedTuple):
    """The sizes that images add to the row of a text."""

    row: TableRow
    num_placeholders: int
    """Placeholder tokens that the template writes for them, before the processor expands these."""


class ImageExpansion:
    """Computes the row that images of given sizes add to a sample, by running the processor on black images.

    If the processor computes with torch, the images are meta tensors, which have a shape and no content.
    """

    def __init__(self, row_sizes: RowSizes) -> None:
        self._measure = row_sizes.measure
        self._encoder = copy(row_sizes.dataset.encoder)
        self._encoder.max_length = None

    def __call__(self, sizes: ImageSizes) -> AddedRow | None:
        """Returns the row that the images add. None if only reading the sample can tell."""
        conversation = example_conversation(['image'] * len(sizes))
        text = self._encoder.encode_unexpanded([conversation])[0]
        sample = self._encode(conversation, sizes)
        if text is None or sample is None:
            return None
        # Not for several images, because `_add_images` also looks up each of them by itself.
        if len(sizes) == 1:
            is_separate = self._is_separate(text['input_ids'][0], sample['input_ids'][0])
            if not is_separate:
                return None
        text_row = self._measure(text)
        added = self._measure(sample).minus(text_row)
        if added.loss_tokens:  # an image carries no loss, so this processor does something else
            return None
        return AddedRow(added, text_row.image_tokens)

    def _encode(self, conversation: Sequence[Message], sizes: ImageSizes) -> EncodedSample | None:
        """Encodes a conversation with images of these sizes. None if the processor raises an error."""
        # For images of several sizes, a processor may add tiles of padding. `count_patches` recognizes these by their
        # content, which meta tensors do not have.
        if len(set(sizes)) < 2:
            with suppress(Exception):  # this processor needs real images
                meta_images = []
                for width, height in sizes:
                    meta_image = torch.empty(3, height, width, dtype=torch.uint8, device='meta')
                    meta_images.append(meta_image)
                return self._encoder(conversation, meta_images)
        with suppress(Exception):  # the reason is given when a sample with such images is read
            images = [Image.new('RGB', size) for size in sizes]
            return self._encoder(conversation, images)
        return None

    def _is_separate(self, text: torch.Tensor, expanded: torch.Tensor) -> bool:
        """Tells whether the tokens of an image begin and end with tokens that never merge with the text around them.

        Only then does an image add the same number of tokens to every text. Gemma 3, for example, puts line breaks
        around an image. The tokenizer merges them with line breaks of the text.
        """
        num_before = _num_equal(text, expanded)
        text_backwards = text[num_before:].flip(0)
        expanded_backwards = expanded[num_before:].flip(0)
        num_after = _num_equal(text_backwards, expanded_backwards)
        placeholder = text[num_before : len(text) - num_after].tolist()
        image = expanded[num_before : len(expanded) - num_after].tolist()
        # Added tokens are found before all others, so they never merge, unless they strip the spaces around them.
        added_tokens = self._encoder.tokenizer.added_tokens_decoder
        for token_id in {*placeholder, *image[:1], *image[-1:]}:
            token = added_tokens.get(token_id)
            if token is None or token.lstrip or token.rstrip:
                return False
        return True


def _num_equal(first: torch.Tensor, second: torch.Tensor) -> int:
    """Counts the tokens that agree before the first that does not."""
    size = min(len(first), len(second))
    is_equal = first[:size] == second[:size]
    return int(is_equal.cumprod(0).sum())
