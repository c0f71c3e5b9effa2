# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shrinks the images and videos of samples that are over a cap.

A budget is an argument of the processor, for example ``max_pixels``, or the number of frames of a video. Budgets are
lowered in steps until the sample fits. Each step multiplies all of them by the same factor, and 16 steps halve them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from composer_tokacc.arguments import check_count
from composer_tokacc.data.chat_template import example_conversation
from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.records import (
    EncodedSample,
    MediaFile,
    Record,
)
from composer_tokacc.data.sizes import SHRINK_STEPS, image_token_ids
from composer_tokacc.data.videos import VideoSampling, make_video
from composer_tokacc.refusals import InvalidInputError

STEPS_TO_HALF = 16
"""Number of steps that halve a budget. Budgets are lowered in steps: each takes off only 4 %, so that little of a cap
stays unused."""
MOST_STEPS = 16 * STEPS_TO_HALF
"""With this number of steps, 1 / 65,536 of a budget is left: less than the minimum of every processor."""
BUDGETS = (
    'max_pixels',
    'max_patches',
    'max_tiles',
    'max_num_patches',
    'max_image_tokens',
)
"""Arguments of image and video processors that limit the tokens of an image.

If a processor has a ``size`` with a ``longest_edge``, this ``size`` is its only budget. (In Qwen-VL the same number is
also called ``max_pixels``.)
"""
OPTIONS_OF_MODALITY = {'image': 'images_kwargs', 'video': 'videos_kwargs'}
PROBE_SIDE = 1024
"""Side, in pixels, of the image that shows whether a budget changes the number of tokens. The video has half of it."""
PROBE_FRAMES = 8
"""Frames of the video that shows the same."""
PROCESSOR_ERRORS = (ValueError, TypeError, RuntimeError, ZeroDivisionError)
"""Errors of processors for sizes that they cannot compute with, or arguments that they do not take."""

_NUMBER = r'\s*(\d+(?:\.\d+)?)\s*'
# A box as [x1, y1, x2, y2] or (x1, y1), (x2, y2).
_BOX = re.compile(rf'[\[(]{_NUMBER},{_NUMBER}[\])]*\s*,\s*[\[(]*{_NUMBER},{_NUMBER}[\])]')
# A point of Qwen2.5-VL.
_POINT = re.compile(rf'point_2d\W+{_NUMBER},{_NUMBER}\]')


def share_of(steps: int) -> float:
    """Returns the share of a budget that is left after some steps: 1 after none, 1/2 after `STEPS_TO_HALF`."""
    return 2 ** (-steps / STEPS_TO_HALF)


def find_pixel_coordinates(text: str) -> str | None:
    """Returns the first box or point in a text that may be in pixels. None if there is none.

    Coordinates in pixels are wrong once the image is smaller. This module does not change them, so `LlavaDataset` warns
    of them. Numbers from 0 to 1 are shares of a side, which hold for an image of any size.
    """
    for pattern in (_BOX, _POINT):
        for match in pattern.finditer(text):
            if any(float(number) > 1 for number in match.groups()):
                return match[0]
    return None


@dataclass(frozen=True, kw_only=True)
class ThinnedSampling(VideoSampling):
    """Takes a share of the frames that :class:`.VideoSampling` takes."""

    share: float = 1.0
    """Share of the frames. At least ``min_frames`` are taken, as in the base class."""

    def __post_init__(self) -> None:
        """Checks nothing, because the values come from a :class:`.VideoSampling` that was checked."""

    def count(self, num_frames: int, duration: float) -> int:
        """Returns the number of frames to take. Its arguments are those of :meth:`.VideoSampling.count`."""
        full_count = super().count(num_frames, duration)
        count = int(full_count * self.share)
        return max(count, self.min_frames)


class FittingEncoder(ConversationEncoder):
    """Makes the media of a sample smaller if it is over a cap, but no smaller than necessary.

    All budgets of the sample (pixels or tiles of the processor, and frames of its videos) are multiplied by one share:
    the largest of ``2**(-steps / 16)`` with which the sample fits. It depends only on the sample, the caps and the
    processor. Text and audio are never cut.

    Args:
        processor: As for :class:`.ConversationEncoder`.
        max_length: Most tokens of a sample, including its media.
        max_image_tokens: Most tokens of its media.
        **options: Other arguments of :class:`.ConversationEncoder`.

    Raises:
        ValueError: If there is no cap, or no budget of the processor changes the number of tokens.
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_length: int | None = None,
        max_image_tokens: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(processor, max_length=max_length, **options)
        if max_length is None and max_image_tokens is None:
            raise InvalidInputError('`fit` must have a cap. Set `max_length` or `max_image_tokens`.')
        if max_image_tokens is not None:
            check_count('max_image_tokens', max_image_tokens)
        self.max_image_tokens = max_image_tokens
        """Most tokens for the media of a sample. None: no limit."""
        self._media_ids = torch.tensor(image_token_ids(processor))
        self._budgets: dict[str, list[str]] = {}
        for modality in OPTIONS_OF_MODALITY:
            # The probe has its media in a turn of the user.
            if modality in self.parts and self.template.has_placeholders('user', modality):
                names = _budgets_of(self.parts[modality])
                self._budgets[modality] = [name for name in names if self._reduces_tokens(modality, name)]
        self._thins_videos = 'video' in self._budgets and self._frames_reduce_tokens()
        if not self._thins_videos and not any(self._budgets.values()):
            name = type(processor).__name__
            raise InvalidInputError(
                f'`fit` must be left out, because {name} makes the same number of tokens of every image.'
            )

    def encode_record(
        self,
        record: Record,
        files: Sequence[MediaFile],
        *,
        shapes_only: bool = False,
        steps: int | None = None,
    ) -> EncodedSample:
        """Encodes a record at the largest share that fits. Raises BadSampleError if none fits.

        Args:
            record: As for :meth:`.ConversationEncoder.encode_record`.
            files: The same.
            shapes_only: The same.
            steps: Number of steps in the length table, as in training. The table may be older than the files. If the
                sample does not fit, a new number is found. None: it is found, and ``shrink_steps`` of the sample holds
                it. In training this key is left out, so that samples of datasets without ``fit`` can be in the batch.
        """
        encode = partial(self._encode_with_steps, record, files)
        num_steps = 0 if steps is None else steps
        sample = encode(num_steps, shapes_only=shapes_only)
        has_visual_media = record.count('image') + record.count('video') > 0
        if has_visual_media and not self._fits(sample):
            num_steps = self._fewest_steps(encode)
            smaller_sample = _encode_unless_empty(encode, num_steps, shapes_only=shapes_only)
            if smaller_sample is not None:
                sample = smaller_sample
        if not self._fits(sample):
            raise record.error(self._refusal(record, sample))
        if steps is None:
            sample[SHRINK_STEPS] = [num_steps]
        return sample

    def has_room(self, num_tokens: int, num_image_tokens: int) -> bool:
        """Tells whether a sample is within ``max_length`` and ``max_image_tokens``.

        Args:
            num_tokens: All tokens of the sample.
            num_image_tokens: The tokens that stand for images, videos and audio.
        """
        if not super().has_room(num_tokens, num_image_tokens):
            return False
        return self.max_image_tokens is None or num_image_tokens <= self.max_image_tokens

    def _encode_with_steps(
        self,
        record: Record,
        files: Sequence[MediaFile],
        steps: int,
        *,
        shapes_only: bool,
    ) -> EncodedSample:
        """Encodes a record with the budgets that are left after some steps."""
        encoder = self._encoder_with_steps(steps)
        # The base class's method, because the method of this class would search for steps again.
        return ConversationEncoder.encode_record(encoder, record, files, shapes_only=shapes_only)

    def _fewest_steps(self, encode: Callable[..., EncodedSample]) -> int:
        """Returns the fewest steps, at least 1, with which a sample fits or the processor raises an error.

        After an error the media are too small for the processor, and with one step less the sample does not fit. So the
        caller must try the result. If there are no such steps below MOST_STEPS, returns MOST_STEPS without trying it.
        Decodes only what the shapes need.
        """

        def fits_or_fails(steps: int) -> bool:
            try:
                sample = encode(steps, shapes_only=True)
            except PROCESSOR_ERRORS:
                return True
            return self._fits(sample)

        # Finds the first True of fits_or_fails(1), fits_or_fails(2), ... by bisection (False < True). Supposes that
        # more steps never make a sample longer.
        return bisect_left(range(MOST_STEPS), True, lo=1, key=fits_or_fails)

    def _encoder_with_steps(self, steps: int) -> ConversationEncoder:
        """Returns the encoder with the budgets that are left after some steps."""
        encoder = copy(self)
        encoder.max_length = None  # `encode_record` of this class checks the caps
        if steps:
            share = share_of(steps)
            options = {}
            for modality, names in self._budgets.items():
                options[OPTIONS_OF_MODALITY[modality]] = _lowered_budgets(self.parts[modality], names, share)
            encoder.media_options = options
            if self._thins_videos:
                encoder.video = ThinnedSampling(**vars(self.video), share=share)
        return encoder

    def _fits(self, sample: EncodedSample) -> bool:
        """Tells whether a sample is within both caps."""
        return self.has_room(sample['input_ids'].shape[1], self._count_media_tokens(sample))

    def _count_media_tokens(self, sample: EncodedSample) -> int:
        """Returns the number of tokens that stand for images, videos and audio."""
        return int(torch.isin(sample['input_ids'], self._media_ids).sum())

    def _reduces_tokens(self, modality: str, budget: str) -> bool:
        """Tells whether the minimum of a budget makes fewer tokens of a large image or of a video."""
        try:
            at_minimum = self._probe(modality, [budget])
            unchanged = self._probe(modality, [])
        except PROCESSOR_ERRORS:
            # The processor does not take this argument. None in Transformers takes it and refuses its minimum.
            return False
        return self._count_media_tokens(at_minimum) < self._count_media_tokens(unchanged)

    def _frames_reduce_tokens(self) -> bool:
        """Tells whether fewer frames make fewer tokens. False if all videos must have the same number of frames."""
        # Budgets are at their minimum, because some processors divide one budget among all frames. With a larger
        # budget, fewer frames would only be larger, and have as many tokens.
        budgets = self._budgets['video']
        fewest_frames = self.video.min_frames
        num_frames = min(max(PROBE_FRAMES, 2 * fewest_frames), self.video.max_frames)
        many_frames = self._probe('video', budgets, num_frames=num_frames)
        few_frames = self._probe('video', budgets, num_frames=fewest_frames)
        pixels = many_frames.get('pixel_values_videos')
        # Pixels of five dimensions are clips in one tensor, so that samples can be collated only if all clips have the
        # same number of frames. Without `pixel_values_videos` the clips are in another entry, perhaps in the same form.
        if pixels is None or pixels.dim() == 5:
            return False
        return few_frames['input_ids'].shape[1] < many_frames['input_ids'].shape[1]

    def _probe(
        self,
        modality: str,
        budgets: Sequence[str],
        *,
        num_frames: int = PROBE_FRAMES,
    ) -> EncodedSample:
        """Encodes one large black image or video, with these budgets at their minimum, and all others as they are."""
        encoder = copy(self)
        encoder.max_length = None
        minimums = _lowered_budgets(self.parts[modality], budgets, share_of(MOST_STEPS))
        encoder.media_options = {OPTIONS_OF_MODALITY[modality]: minimums}
        messages = example_conversation([modality])
        if modality == 'image':
            image = Image.new('RGB', (PROBE_SIDE, PROBE_SIDE))
            return encoder(messages, [image])
        side = PROBE_SIDE // 2
        frame = np.zeros((side, side, 3), np.uint8)
        frame_numbers = list(range(num_frames))
        video = make_video([frame] * num_frames, frame_numbers, num_frames, step=0.5)  # a frame every half second
        return encoder(messages, videos=[video])

    def _refusal(self, record: Record, sample: EncodedSample) -> str:
        """Returns the reason to refuse a record that is over a cap at every share, with the sizes of `sample`."""
        length = sample['input_ids'].shape[1]
        caps = f'`max_length`={self.max_length} and `max_image_tokens`={self.max_image_tokens}'
        name = type(self.processor).__name__
        return (
            f'{caps} must have room for the sample, got: {length} tokens, {self._count_media_tokens(sample)} of them '
            f'for {len(record.media)} media. {name} cannot make them smaller. Raise the caps, shorten the sample, or '
            'set on_error=skip.'
        )


def _budgets_of(part: Any) -> list[str]:
    """Returns the arguments of an image or video processor that may limit its tokens."""
    size: Mapping[str, int | None] = dict(getattr(part, 'size', None) or {})
    if size.get('longest_edge') is not None:
        return ['size']
    return [name for name in BUDGETS if isinstance(getattr(part, name, None), int)]


def _encode_unless_empty(
    encode: Callable[..., EncodedSample],
    steps: int,
    *,
    shapes_only: bool,
) -> EncodedSample | None:
    """Encodes a sample with these steps. Returns None if an image has no pixels left.

    Then torch raises a RuntimeError (SmolVLM), and the base class wraps it in another one. Other causes may be bugs.
    """
    try:
        return encode(steps, shapes_only=shapes_only)
    except RuntimeError as error:
        if type(error.__cause__) is not RuntimeError:
            raise
        return None


def _lowered_budgets(part: Any, names: Sequence[str], share: float) -> dict[str, Any]:
    """Returns arguments for a processor: its budgets multiplied by a share, but not below the processor's minimum."""
    lowered: dict[str, Any] = {}
    for name in names:
        if name == 'size':
            lowered[name] = _lowered_size(dict(part.size), share)
        else:
            name_of_minimum = name.replace('max', 'min', 1)
            minimum = getattr(part, name_of_minimum, None) or 1
            lowered[name] = max(int(getattr(part, name) * share), minimum)
    return lowered


def _lowered_size(size: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Returns a ``size`` whose longest edge is multiplied by a share, but not below the shortest edge.

    Both edges are lengths of a side, or numbers of pixels of the image (Qwen-VL).
    """
    longest = size['longest_edge']
    minimum = min(size.get('shortest_edge') or 1, longest)
    return {**size, 'longest_edge': max(int(longest * share), minimum)}
