# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Words and images -> what a processor returns for one sample, with labels; and a tokenizer of words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
    """Turns words and images into what a processor returns for one sample, plus ``labels``.

    Args:
        processor: The family's processor, or a tokenizer.
        image_text: What stands for an image in the text; None: a text model.
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
        """Whether the family has images at all."""
        return self.image_text is not None

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token."""
        return self.token_id('<pad>')

    def token_id(self, token: str) -> int:
        """Id of a token."""
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def __call__(self, sample: Sample) -> dict[str, Any]:
        """What the processor returns for one sample, plus ``labels``."""
        encoded = self.together([sample])
        labels = torch.full_like(encoded['input_ids'], -100)
        labels[:, -len(sample.answer) :] = encoded['input_ids'][:, -len(sample.answer) :]
        return {**encoded, 'labels': labels}

    def together(self, samples: Sequence[Sample], *, padding_side: str = 'right') -> dict[str, Any]:
        """What the processor returns for several samples at once, all with images or all without."""
        # InternVL's processor has a side of its own; Mllama's drops the option up to transformers 4.
        self.tokenizer.padding_side = padding_side
        options = {'return_tensors': 'pt', 'padding': len(samples) > 1, 'padding_side': padding_side}
        texts, answers = [self._text(sample) for sample in samples], [' '.join(sample.answer) for sample in samples]
        nested = [sample.images for sample in samples]
        images = nested if self.nested_images else [image for images in nested for image in images]
        media = {'images': images} if samples[0].images else {}
        if not self.suffix:
            joined = [f'{text} {answer}' for text, answer in zip(texts, answers, strict=True)]
            return dict(self.processor(text=joined, **media, **options))
        if media:
            return dict(self.processor(text=texts, suffix=answers, **media, **options))
        ended = [f'{answer}</s>' for answer in answers]
        return dict(self.tokenizer(text=texts, text_pair=ended, return_token_type_ids=True, **options))

    def _text(self, sample: Sample) -> str:
        first, *others = (' '.join(gap) for gap in sample.gaps)
        return first + ''.join(f'{self.image_text}{gap}' for gap in others)


def word_tokenizer(*special: str, class_name: str = '', **named: str) -> PreTrainedTokenizerFast:
    """One token a word.

    Args:
        special: Further special tokens.
        class_name: The class that the family's processor insists on up to transformers 4.
        named: Special tokens that become attributes of the tokenizer (``image_token``).
    """
    special = ('<pad>', '<unk>', '<s>', '</s>', *special, *named.values())
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*special, *WORDS]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    extra = {'extra_special_tokens': named} if named else {}
    is_named = class_name and transformers.__version__.startswith('4.')
    tokenizer_class = getattr(transformers, class_name) if is_named else PreTrainedTokenizerFast
    wrapped = tokenizer_class(
        tokenizer_object=tokenizer, pad_token='<pad>', unk_token='<unk>', bos_token='<s>', eos_token='</s>', **extra
    )
    for name, token in named.items():
        assert getattr(wrapped, name) == token
        assert getattr(wrapped, f'{name}_id') == vocab[token]
    return wrapped
