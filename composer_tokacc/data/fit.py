# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Media that fit: a sample over its caps gets fewer pixels and frames, by its processor's own arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from io import IOBase
from typing import Any

import numpy as np
import torch
from PIL import Image

from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.records import MediaFile, Record
from composer_tokacc.data.sizes import SHRINK_STEPS, image_token_ids
from composer_tokacc.data.videos import VideoSampling, make_video

STEPS_TO_HALF = 16
"""One step takes 4 % off, so that little of a cap is left unused."""
MOST_STEPS = 16 * STEPS_TO_HALF
"""After so many every budget is at its least."""
BUDGETS = ('max_pixels', 'max_patches', 'max_tiles', 'max_num_patches', 'max_image_tokens')
"""Arguments of image and video processors that bound what becomes of an image, beside ``longest_edge`` of ``size``."""
KWARGS = {'image': 'images_kwargs', 'video': 'videos_kwargs'}
PROBE_SIDE, PROBE_FRAMES = 1024, 8
"""Of the image and the video that tell whether a budget moves the number of tokens."""


def share_of(steps: int) -> float:
    """Returns the share of a budget that is left after so many steps."""
    return 2 ** (-steps / STEPS_TO_HALF)


@dataclass(frozen=True, kw_only=True)
class ThinnedSampling(VideoSampling):
    """Takes a share of the frames."""

    share: float = 1.0

    def __post_init__(self) -> None:
        """The others were checked where they were given."""

    def count(self, num_frames: int, duration: float) -> int:
        """Returns how many are taken."""
        return max(int(super().count(num_frames, duration) * self.share), self.min_frames)


class FittingEncoder(ConversationEncoder):
    """Makes the media of a sample that is over a cap smaller until it has room, and no smaller.

    All budgets of the sample, the processor's of pixels or tiles and the frames of its videos, are multiplied by one
    share: the largest of the shares ``2**(-steps / 16)`` with which the sample fits. That depends on the sample, the
    caps and the processor alone. Text is never cut, audio neither.

    Args:
        processor: As for :class:`.ConversationEncoder`, and ``options``.
        max_length: Most tokens of a sample, those of its media included.
        max_image_tokens: Most tokens of its media.

    Raises:
        ValueError: If there is no cap, or no budget of the processor changes the number of tokens.
    """

    def __init__(
        self, processor: Any, *, max_length: int | None = None, max_image_tokens: int | None = None, **options: Any
    ) -> None:
        super().__init__(processor, max_length=max_length, **options)
        if max_length is None and max_image_tokens is None:
            raise ValueError('`fit` must have a cap, got: true without. Set `max_length` or `max_image_tokens`.')
        self.max_image_tokens = max_image_tokens
        self._media_ids = torch.tensor(image_token_ids(processor))
        self._budgets = {
            modality: [name for name in _budgets_of(self.parts[modality]) if self._matters(modality, name)]
            for modality in KWARGS
            if modality in self._written
        }
        self._thins = 'video' in self._written and self._frames_matter()
        if not self._thins and not any(self._budgets.values()):
            found = f'{type(processor).__name__}, which makes as many tokens of every image'
            raise ValueError(f'`fit` must have a processor whose images can be smaller, got: {found}. Leave it out.')

    def encode_record(
        self, record: Record, files: Sequence[MediaFile], *, shapes_only: bool = False, steps: int = 0
    ) -> dict[str, Any]:
        """Encodes a record at the largest share that fits; ``shrink_steps`` of the sample says how many steps it took.

        Args:
            record: As for :meth:`.ConversationEncoder.encode_record`.
            files: The same.
            shapes_only: The same.
            steps: Where they are known they are not looked for.
        """
        encode = partial(self._encoded, record, files)
        sample = encode(steps, shapes_only=shapes_only)
        if not self._has_room(sample):
            steps = self._fewest_steps(encode) if record.count('image') + record.count('video') else 0
            sample = encode(steps, shapes_only=shapes_only)
        if not self._has_room(sample):
            raise record.error(self._refusal(record, sample))
        return {**sample, SHRINK_STEPS: [steps]}

    def _encoded(self, record: Record, files: Sequence[MediaFile], steps: int, *, shapes_only: bool) -> dict[str, Any]:
        for file in files:
            if isinstance(file, IOBase):
                file.seek(0)
        return ConversationEncoder.encode_record(self._after(steps), record, files, shapes_only=shapes_only)

    def _fewest_steps(self, encode: Any) -> int:
        """Returns the fewest steps with which a sample has room, by halving; its media are not decoded for it."""
        fewest, most = 1, MOST_STEPS
        while fewest < most:
            middle = (fewest + most) // 2
            try:
                is_enough = self._has_room(encode(middle, shapes_only=True))
            except (ValueError, RuntimeError, ZeroDivisionError):  # too small for the processor: take fewer
                is_enough = True
            fewest, most = (fewest, middle) if is_enough else (middle + 1, most)
        return fewest

    def _after(self, steps: int) -> ConversationEncoder:
        """Returns the encoder with what is left of all budgets after so many steps."""
        share, encoder = share_of(steps), copy(self)
        encoder.max_length = None  # what is over a cap is said here
        if steps:
            encoder.media_options = {
                KWARGS[modality]: _lowered(self.parts[modality], names, share)
                for modality, names in self._budgets.items()
            }
            if self._thins:
                encoder.video = ThinnedSampling(**vars(self.video), share=share)
        return encoder

    def _has_room(self, sample: Mapping[str, Any]) -> bool:
        return self.has_room(sample['input_ids'].shape[1], self._count_media(sample))

    def _count_media(self, sample: Mapping[str, Any]) -> int:
        return int(torch.isin(sample['input_ids'], self._media_ids).sum())

    def _matters(self, modality: str, name: str) -> bool:
        """Tells whether a budget at its least makes fewer tokens of a large image, or of a video."""
        with suppress(ValueError, TypeError, RuntimeError, ZeroDivisionError):  # an argument that it does not take
            fewer = self._probed(modality, [name])
            return self._count_media(fewer) < self._count_media(self._probed(modality, []))
        return False

    def _frames_matter(self) -> bool:
        """Tells whether fewer frames make fewer tokens, unless all videos of a batch must have as many."""
        # At the least pixels: some processors share one budget among all frames.
        counts = (PROBE_FRAMES, self.video.min_frames)
        many, few = (self._probed('video', self._budgets['video'], num_frames=count) for count in counts)
        videos = many.get('pixel_values_videos')
        return videos is not None and videos.dim() != 5 and few['input_ids'].shape[1] < many['input_ids'].shape[1]

    def _probed(self, modality: str, lowered: Sequence[str], *, num_frames: int = PROBE_FRAMES) -> dict[str, Any]:
        """Returns a sample with one large black image, or video, and some budgets at their least."""
        encoder = copy(self)
        encoder.max_length = None
        encoder.media_options = {KWARGS[modality]: _lowered(self.parts[modality], lowered, share_of(MOST_STEPS))}
        content = [{'type': modality}, {'type': 'text', 'text': 'q'}]
        messages = [{'role': 'user', 'content': content}, {'role': 'assistant', 'content': 'a'}]
        if modality == 'image':
            return encoder(messages, [Image.new('RGB', (PROBE_SIDE, PROBE_SIDE))])
        frame = np.zeros((PROBE_SIDE // 2, PROBE_SIDE // 2, 3), np.uint8)
        return encoder(messages, videos=[make_video([frame] * num_frames, [*range(num_frames)], num_frames, 0.5)])

    def _refusal(self, record: Record, sample: Mapping[str, Any]) -> str:
        length, num_media = sample['input_ids'].shape[1], self._count_media(sample)
        is_long = self.max_length is not None and length > self.max_length
        name, found = ('max_length', length) if is_long else ('max_image_tokens', num_media)
        made = f'{num_media} of them for {len(record.media)} media, as few as {type(self.processor).__name__} makes'
        remedy = 'Raise it, shorten the sample, or set on_error=skip'
        return f'`{name}` must be at least the sample, got: {getattr(self, name)} < {found} tokens, {made}. {remedy}.'


def _budgets_of(part: Any) -> list[str]:
    """Returns the arguments of an image or video processor that may bound its tokens."""
    if dict(getattr(part, 'size', None) or {}).get('longest_edge') is not None:
        return ['size']
    return [name for name in BUDGETS if isinstance(getattr(part, name, None), int)]


def _lowered(part: Any, names: Sequence[str], share: float) -> dict[str, Any]:
    """Returns arguments with a share of their budgets, none below what the processor calls its least."""
    found: dict[str, Any] = {}
    for name in names:
        if name == 'size':
            size = dict(part.size)
            least = min(size.get('shortest_edge') or 1, size['longest_edge'])
            found[name] = {**size, 'longest_edge': max(int(size['longest_edge'] * share), least)}
        else:
            least = getattr(part, name.replace('max', 'min', 1), None) or 1
            found[name] = max(int(getattr(part, name) * share), least)
    return found
