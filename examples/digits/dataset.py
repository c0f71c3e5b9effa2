# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The dataset of the demo: 0 to 12 scanned digits a sample, and a question to read, count, spell or add them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import LlavaProcessor

from composer_tokacc.data.conversation import ConversationEncoder
from composer_tokacc.data.processor import RESERVED_TOKENS, small_llava_processor, wrap_tokenizer
from examples.digits.questions import WORDS, draw_question

__all__ = ['DigitsDataset', 'build_digits_processor', 'load_scans', 'split_scans']

SPLITS = ('train', 'eval')
HELD_OUT_SHARE = 0.2


@cache
def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Returns the 1,797 scans that come with scikit-learn (UCI optical recognition of handwritten digits).

    Returns:
        Pixels, uint8 of shape ``(1797, 8, 8)``, and the digit that each scan shows, of shape ``(1797,)``.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the scans need scikit-learn: pip install 'composer_tokacc[demo]'") from error

    values, digits = load_digits(return_X_y=True)  # values from 0 to 16, shape (1797, 64)
    pixels = (values * (255 / 16)).round().astype(np.uint8)
    return pixels.reshape(-1, 8, 8), digits


@cache
def split_scans(split: str) -> np.ndarray:
    """Returns the indices of the scans of a split. ``train`` and ``eval`` share none.

    Raises:
        ValueError: If ``split`` is neither ``train`` nor ``eval``.
    """
    if split not in SPLITS:
        raise ValueError(f'`split` must be one of {SPLITS}, got: {split!r}.')
    _, digits = load_scans()
    order = np.random.default_rng(0).permutation(len(digits))
    num_held_out = round(len(order) * HELD_OUT_SHARE)
    if split == 'eval':
        return order[:num_held_out]
    return order[num_held_out:]


def build_digits_processor(*, image_size: int = 8, patch_size: int = 8) -> LlavaProcessor:
    """Returns a processor with one token for a word, and ``(image_size / patch_size)**2`` tokens for an image."""
    tokens = dict.fromkeys([*RESERVED_TOKENS, *WORDS])  # each once
    vocabulary = {token: index for index, token in enumerate(tokens)}
    word_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
    # A token is a word, a digit, or any other character. What lies between tokens is removed.
    token_pattern = Regex(r'[a-z]+|\d|[^\sa-z\d]')
    word_tokenizer.pre_tokenizer = pre_tokenizers.Split(token_pattern, behavior='removed', invert=True)
    tokenizer = wrap_tokenizer(word_tokenizer, model_max_length=2048)
    return small_llava_processor(tokenizer, image_size=image_size, patch_size=patch_size)


class DigitsDataset(Dataset):
    """Map-style dataset. A sample depends only on the seed, the split and its index.

    Args:
        processor: From :func:`build_digits_processor`, or any Hugging Face vision-language processor.
        split: ``'train'`` or ``'eval'``.
        num_samples: Length of the dataset.
        seed: Seed of the samples. It does not change which scans are in a split.
        max_images: Most digits in a sample, shown as images or, in a text-only question, written out.
        max_length: Longest sample allowed, in tokens.
        cache: Whether to keep samples in memory (about 8 KB each), so that later epochs need not encode them again.

    Raises:
        ValueError: If ``split`` is unknown, or ``max_images`` or ``num_samples`` is below 1.
    """

    # The training program calls this if the model is fresh, because no checkpoint has a processor for it then.
    build_processor = staticmethod(build_digits_processor)

    def __init__(
        self,
        processor: Any = None,
        *,
        split: str = 'train',
        num_samples: int = 16384,
        seed: int = 0,
        max_images: int = 12,
        max_length: int | None = None,
        cache: bool = True,
    ) -> None:
        if max_images < 1:
            raise ValueError(f'`max_images` must be at least 1, got: {max_images}.')
        if num_samples < 1:
            raise ValueError(f'`num_samples` must be at least 1, got: {num_samples}.')
        if processor is None:
            processor = self.build_processor()
        self.processor = processor
        self.encoder = ConversationEncoder(processor, max_length=max_length)
        self.split = split
        self.scans = split_scans(split)
        self.num_samples = num_samples
        self.seed = seed
        self.max_images = max_images
        self.cached: dict[int, dict[str, Any]] | None = {} if cache else None

    def __len__(self) -> int:
        return self.num_samples

    def conversation(self, index: int) -> tuple[list[dict[str, Any]], list[Image.Image], np.ndarray]:
        """Returns the messages and images of a sample, and the indices of the scans that the images show."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f'`index` must be in [0, {self.num_samples}), got: {index}.')
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), index])
        question = draw_question(rng, max_images=self.max_images)
        scans = rng.choice(self.scans, question.num_digits)
        pixels, labels = load_scans()
        digits = labels[scans].tolist()
        shown_scans = scans if question.has_images else scans[:0]
        images = []
        content: list[dict[str, str]] = []
        for scan in shown_scans:
            images.append(Image.fromarray(pixels[scan]).convert('RGB'))
            content.append({'type': 'image'})
        content.append({'type': 'text', 'text': question.prompt(digits)})
        answer = {'type': 'text', 'text': question.answer(digits)}
        messages = [
            {'role': 'user', 'content': content},
            {'role': 'assistant', 'content': [answer]},
        ]
        return messages, images, shown_scans

    def decoded(self, index: int) -> dict[str, list[Image.Image]]:
        """Returns the images of a sample by modality, for `report.html`."""
        _, images, _ = self.conversation(index)
        return {'image': images}

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.cached is not None and index in self.cached:
            return dict(self.cached[index])
        messages, images, _ = self.conversation(index)
        sample = self.encoder(messages, images, sample_id=f'digits-{self.split}-{index}')
        if self.cached is not None:
            self.cached[index] = sample
        return dict(sample)
