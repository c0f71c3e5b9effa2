# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Encodes samples of words and images with a family's processor, and makes tokenizers of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ['WORDS', 'Sample', 'SampleEncoder', 'word_tokenizer']

WORDS = tuple(f'{first}{second}' for first in 'bdfgklmnprst' for second in 'aeiou')


@dataclass(frozen=True, kw_only=True)
class Sample:
    """``gap image gap image ... gap answer``; the answer's tokens carry the loss."""

    gaps: list[list[str]]
    answer: list[str]
    images: list[Image.Image]


class SampleEncoder:
    """Encodes a sample with a processor, and adds ``labels``.

    Args:
        processor: The family's processor, or a tokenizer.
        image_text: The placeholder of an image in the text. None: a text model.
        nested_images: Whether the processor wants a list of images for each text.
        suffix: Whether the processor takes the answer by itself, and refuses samples without images (PaliGemma).
    """

    def __init__(
        self,
        processor: Any,
        *,
        image_text: str | None = None,
        nested_images: bool = False,
        suffix: bool = False,
    ) -> None:
        self.processor = processor
        self.tokenizer: PreTrainedTokenizerFast = getattr(processor, 'tokenizer', processor)
        self.image_text = image_text
        self.nested_images = nested_images
        self.suffix = suffix

    @property
    def takes_images(self) -> bool:
        """Returns whether the family has images."""
        return self.image_text is not None

    @property
    def pad_token_id(self) -> int:
        """Returns the id of the padding token."""
        return self.token_id('<pad>')

    def token_id(self, token: str) -> int:
        """Returns the id of a token."""
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def __call__(self, sample: Sample) -> dict[str, Any]:
        """Returns the output of the processor for one sample, plus ``labels``."""
        encoded = self.together([sample])
        labels = encoded['input_ids'].clone()
        labels[:, : -len(sample.answer)] = -100
        return {**encoded, 'labels': labels}

    def together(self, samples: Sequence[Sample], *, padding_side: str = 'right') -> dict[str, Any]:
        """Returns the output of the processor for several samples. All of them must have images, or none."""
        # InternVL's processor sets its own side of padding. Mllama's drops the option up to transformers 4.
        self.tokenizer.padding_side = padding_side
        options = {'return_tensors': 'pt', 'padding': len(samples) > 1, 'padding_side': padding_side}
        texts = [self._text(sample) for sample in samples]
        answers = [' '.join(sample.answer) for sample in samples]
        media = {}
        if samples[0].images:
            images = [sample.images for sample in samples]
            media['images'] = images if self.nested_images else list(chain.from_iterable(images))
        if not self.suffix:
            texts_with_answers = [f'{text} {answer}' for text, answer in zip(texts, answers, strict=True)]
            return dict(self.processor(text=texts_with_answers, **media, **options))
        if media:
            return dict(self.processor(text=texts, suffix=answers, **media, **options))
        ended_answers = [f'{answer}</s>' for answer in answers]
        return dict(self.tokenizer(text=texts, text_pair=ended_answers, return_token_type_ids=True, **options))

    def _text(self, sample: Sample) -> str:
        image_text = self.image_text or ''  # a text model has a single gap
        return image_text.join(' '.join(gap) for gap in sample.gaps)


def word_tokenizer(*special: str, class_name: str = '', **attributes: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each word.

    Args:
        special: Further special tokens.
        class_name: The class that the family's processor insists on up to transformers 4.
        attributes: Special tokens that become attributes of the tokenizer (``image_token``).
    """
    special = ('<pad>', '<unk>', '<s>', '</s>', *special, *attributes.values())
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*special, *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    options: dict[str, Any] = {'pad_token': '<pad>', 'unk_token': '<unk>', 'bos_token': '<s>', 'eos_token': '</s>'}
    if attributes:
        options['extra_special_tokens'] = attributes
    tokenizer_class = PreTrainedTokenizerFast
    if class_name and transformers.__version__.startswith('4.'):
        tokenizer_class = getattr(transformers, class_name)
    wrapped = tokenizer_class(tokenizer_object=tokenizer, **options)
    for name, token in attributes.items():
        assert getattr(wrapped, name) == token
        assert getattr(wrapped, f'{name}_id') == vocab[token]
    return wrapped
