# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures samples: from the tensors of a processor, or from their text and the headers of their images.

Headers are much faster, because no image is decoded. They are enough if the tokens and patches that images add to a
sample depend only on the sizes of the images, and not on the text: `lengths.py` reads some samples to check that. The
processor runs once for each distinct list of sizes, with black images, and a fast tokenizer counts the tokens of all
texts. A sample that cannot be measured in this way must be read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from composer_tokacc.batch import MODALITIES
from composer_tokacc.counting import LossRule
from composer_tokacc.data.chat_template import example_conversation
from composer_tokacc.data.collator import check_samples
from composer_tokacc.data.identity import check_keys_of_sample
from composer_tokacc.data.records import BadSampleError, EncodedSample, Message

ImageSizes = tuple[tuple[int, int], ...]
"""Width and height of each image of a sample, in pixels."""
MapResult = TypeVar('MapResult')

SHRINK_STEPS = 'shrink_steps'
"""Key that `fit.py` adds to a sample that is measured: a list of one number, see :class:`TableRow`."""
DEFAULT_PATCH_SIZE = 14
"""The most common side of a patch, in pixels, if neither model nor processor names one."""
TEXTS_TOGETHER = 32
"""Samples whose texts go through the tokenizer together."""
FEWEST_FOR_WORKERS = 256
"""From this number of items on, processes are started. With fewer, starting them may take longer than the work."""
PROBE_SIZES = ((57, 33), (640, 427), (1280, 96), (97, 1280), (1500, 1500))
"""Small, usual, wide, tall and large. If images of these sizes add equal rows, it is assumed that all images do."""


class TableRow(NamedTuple):
    """The sizes of one sample: a row of the length table."""

    length: int
    """All tokens, including those of media."""
    image_tokens: int
    """Tokens that stand for images, videos and audio."""
    loss_tokens: int
    """Positions with loss under the causal shift."""
    vision_patches: int
    """Patches that the vision encoder computes, see :func:`count_patches`."""
    shrink_steps: int
    """Steps by which `fit.py` makes its media smaller. 0: it leaves them as they are."""


def map_samples(
    function: Callable[[Any], MapResult],
    items: Sequence[object],
    *,
    num_workers: int,
    shows_bar: bool,
    batch_size: int | None = None,
) -> Iterator[MapResult]:
    """Runs a function on items, in worker processes if there are many. Yields the results in the order of the items.

    Args:
        function: Gets one item, or with ``batch_size`` a list of consecutive items. Each call gives one result.
        items: The items.
        num_workers: Most processes.
        shows_bar: Whether to show a progress bar if the output is a terminal.
        batch_size: Most items of a list.
    """
    # The workers of a DataLoader run `collate_fn` on the items that they read. Without workers, this process does.
    loader: Any = DataLoader(
        items,  # pyright: ignore[reportArgumentType]  # a sequence has all that is used of a dataset
        batch_size=batch_size,
        num_workers=num_workers if len(items) >= FEWEST_FOR_WORKERS else 0,
        generator=torch.Generator(),  # without one it would draw a seed from the run's global generator
        collate_fn=function,  # pyright: ignore[reportArgumentType]
    )
    # None shows the bar only if the output is a terminal.
    yield from tqdm(
        loader,
        desc='measuring samples',
        disable=None if shows_bar else True,
        leave=False,
    )


def image_token_ids(processor: Any) -> tuple[int, ...]:
    """Returns the ids of the tokens that stand for images, videos and audio.

    Processors and tokenizers name these tokens in attributes such as ``image_token_id``. A few processors replace this
    token by another one for each patch: Llama 4 names it ``img_patch_token``, and Molmo2 lists it in
    ``image_token_ids``.
    """
    tokenizer = getattr(processor, 'tokenizer', None)
    candidates = set()
    for modality in MODALITIES:
        token_id = getattr(processor, f'{modality}_token_id', None)
        candidates.add(token_id)
        candidates.add(getattr(tokenizer, f'{modality}_token_id', None))
        # A list that has the token itself is not used: its other tokens are line breaks (Pixtral), which do not
        # count. If there is no token, the list is [None], which has it, too.
        listed_ids = getattr(processor, f'{modality}_token_ids', None) or []
        if token_id not in listed_ids:
            candidates.update(listed_ids)
    # Some processors have only the text of a token.
    names_of_tokens = [f'{modality}_token' for modality in MODALITIES]
    for name in ['img_patch_token', *names_of_tokens]:
        token = getattr(processor, name, None)
        if token is not None and tokenizer is not None:
            candidates.add(tokenizer.convert_tokens_to_ids(str(token)))
    # A token that is not in the vocabulary has the id of unknown tokens. SmolVLM's video token is an example.
    candidates.discard(getattr(tokenizer, 'unk_token_id', None))
    token_ids = [candidate for candidate in candidates if isinstance(candidate, int)]
    return tuple(sorted(token_ids))


def patch_size_of(*owners: Any) -> int:
    """Returns the side of a patch in pixels, from the first owner that names one. If none does, the most common side.

    Args:
        *owners: Each is a number, a model's config, its ``vision_config``, a processor, its ``image_processor``, or
            None.
    """
    for owner in owners:
        vision_config = getattr(owner, 'vision_config', None)
        image_processor = getattr(owner, 'image_processor', None)
        candidates = [owner]  # the owner itself may be the number
        for part in (vision_config, owner, image_processor):
            candidates.append(getattr(part, 'patch_size', None))
        for candidate in candidates:
            side = _side_of(candidate)
            if isinstance(side, int) and side > 0:
                return side
    return DEFAULT_PATCH_SIZE


def _side_of(size: Any) -> Any:
    """Returns the height from a pair, mapping or object that has one. Returns any other value as it is."""
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
        patch_size: Side of a patch in pixels. Not used if the processor has cut the images into patches (Qwen-VL).
    """
    # Video-LLaVA's processor has its own name for images.
    images = sample.get('pixel_values', sample.get('pixel_values_images'))
    num_patches = 0
    if images is not None:
        num_patches = _patches_of(images, patch_size, sample.get('image_sizes'))
    videos = sample.get('pixel_values_videos')
    if videos is not None:
        if videos.dim() == 5:
            # Flattened, because `_patches_of` leaves out tiles of zeros, and the model computes every frame of a clip.
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
        # Tiles of zeros are not counted, because the models drop them: Idefics3 drops every tile of zeros, LLaVA-NeXT
        # and OneVision drop the tiles of padding, which are zeros. (Mllama computes all its tiles. Its pixels have six
        # dimensions.) Meta tensors have no padding, because their images have one size (see `_encode_images`).
        has_pixels = pixels.flatten(2).any(dim=2)
        num_tiles = int(has_pixels.sum())
    height, width = pixels.shape[-2:]
    return num_tiles * (height // patch_size) * (width // patch_size)


class TextRow(NamedTuple):
    """The row of a sample's text, before the processor expands the placeholders, with the sizes of its images."""

    row: TableRow
    sizes: ImageSizes


class AddedRow(NamedTuple):
    """The row that images add to the row of a text. An image of 576 tokens adds 575, because its placeholder is one."""

    difference: TableRow
    """The row of a sample with these images, minus the row of its text."""
    num_placeholders: int
    """Placeholder tokens of these images in the row of the text."""


class SampleMeasurer:
    """Measures the samples of a dataset.

    Args:
        dataset: Any dataset. For ``from_headers`` it has the methods of :class:`.LlavaDataset`.
        processor: Its processor.
        patch_size: Side of a patch in pixels.
        map_items: :func:`map_samples` with ``num_workers`` and ``shows_bar``.
    """

    def __init__(self, dataset: Any, processor: Any, patch_size: int, map_items: Callable[..., Iterator[Any]]) -> None:
        self.dataset = dataset
        self.map_items = map_items
        self.token_ids = torch.tensor(image_token_ids(processor))
        self.patch_size = patch_size

    def measure(self, sample: EncodedSample) -> TableRow:
        """Returns the row of a sample. Raises ValueError unless it has labels, and ids of one row."""
        check_keys_of_sample(sample, 'input_ids', 'labels')
        check_samples([sample])
        is_image_token = torch.isin(sample['input_ids'], self.token_ids)
        has_loss = LossRule.CAUSAL.counted(sample)
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
        except StopIteration as error:  # would end the loader of `map_samples` in silence
            message = f'The dataset has raised StopIteration for sample {index}. Look for a `next()` without a default.'
            raise RuntimeError(message) from error

    def from_headers(self, indices: Sequence[int]) -> dict[int, TableRow]:
        """Returns the rows of samples by index, without decoding their images. A sample that must be read has none."""
        # If each size adds the same row, one size can stand for all. That is also so if each gives None, for example
        # because the processor cannot encode any image. Then samples with images get no row below, and are read.
        probe_rows = {self._added_by((size,)) for size in PROBE_SIZES}
        measure_without_images = partial(self._measure_without_images, sizes_matter=len(probe_rows) > 1)
        measured_rows: list[TextRow | TableRow | None] = []
        for batch in self.map_items(measure_without_images, indices, batch_size=TEXTS_TOGETHER):
            measured_rows.extend(batch)
        # The expensive part: one call of the processor for each distinct list of sizes.
        distinct_sizes = sorted({measured.sizes for measured in measured_rows if isinstance(measured, TextRow)})
        added_rows = self.map_items(self._added_by, distinct_sizes)
        added_row_of = dict(zip(distinct_sizes, added_rows, strict=True))
        rows: dict[int, TableRow] = {}
        for index, measured in zip(indices, measured_rows, strict=True):
            row = measured
            if isinstance(measured, TextRow):
                row = self._add_images(measured.row, added_row_of[measured.sizes])
            if isinstance(row, TableRow):
                rows[index] = row
        return rows

    def _measure_without_images(self, indices: Sequence[int], *, sizes_matter: bool) -> list[TextRow | TableRow | None]:
        """Returns for each sample the row of its text, or its complete row if it has videos. None if it must be read.

        Args:
            indices: The samples.
            sizes_matter: False if an image of any size adds the same row. Then all images get the same size.
        """
        measured_rows: list[TextRow | TableRow | None] = []
        for index, result in zip(indices, self.dataset.unexpanded(indices), strict=True):
            if result is None:  # the sample has videos or audio, or is bad
                measured_rows.append(self._measure_videos(index))
                continue
            sample, sizes = result
            if not sizes_matter:
                sizes = PROBE_SIZES[:1] * len(sizes)
            measured_rows.append(TextRow(self.measure(sample), sizes))
        return measured_rows

    def _add_images(self, row: TableRow, added: AddedRow | None) -> TableRow | None:
        """Returns the row of a text with its images. None if the sample must be read."""
        if added is None:
            return None
        if row.image_tokens != added.num_placeholders:
            return None  # the user has written a placeholder token into the text
        total = TableRow(*map(operator.add, row, added.difference))
        if not self.dataset.encoder.has_room(total.length, total.image_tokens):
            return None  # over a cap: reading it raises the error, or makes its media smaller (`fit.py`)
        return total

    def _added_by(self, sizes: ImageSizes) -> AddedRow | None:
        """Returns the row that images of these sizes add. None if only reading the sample can tell.

        To find it, the processor runs on meta tensors or on black images, see `_encode_images`. Meta tensors have a
        shape and no content, so that nothing is computed.
        """
        encoder = copy(self.dataset.encoder)
        encoder.max_length = None  # a probe may be longer than the cap
        conversation = example_conversation(['image'] * len(sizes))
        text = encoder.encode_unexpanded([conversation])[0]
        sample = _encode_images(encoder, conversation, sizes)
        if text is None or sample is None:
            return None
        text_row = self.measure(text)
        row = self.measure(sample)
        difference = TableRow(*map(operator.sub, row, text_row))
        if difference.loss_tokens:  # images carry no loss, so the processor has changed the answer
            return None
        return AddedRow(difference, text_row.image_tokens)

    def _measure_videos(self, index: int) -> TableRow | None:
        """Returns the row of a sample with videos. None if it has no video, or is bad.

        Of each video file one frame is decoded, because only shapes are measured.
        """
        with suppress(Exception):  # the error is raised again when the sample is read
            sample = self.dataset.shapes_of_videos(index)
            if sample is not None:
                return self.measure(sample)
        return None


def _encode_images(encoder: Any, conversation: Sequence[Message], sizes: ImageSizes) -> EncodedSample | None:
    """Encodes a conversation with images of these sizes. None if the processor raises an error."""
    # Meta tensors are only used if all images have one size. For several sizes a processor may add tiles of padding,
    # which `count_patches` recognizes by their content, and meta tensors have none.
    if len(set(sizes)) < 2:
        with suppress(Exception):  # some processors need real images, which follow
            meta_images = []
            for width, height in sizes:
                meta_image = torch.empty(3, height, width, dtype=torch.uint8, device='meta')
                meta_images.append(meta_image)
            return encoder(conversation, meta_images)
    with suppress(Exception):  # the reason is given when a sample with such images is read
        images = [Image.new('RGB', size) for size in sizes]
        return encoder(conversation, images)
    return None
