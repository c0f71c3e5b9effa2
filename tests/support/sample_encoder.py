# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Words and images -> what a processor returns for one sample, with labels; and a tokenizer of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ['WORDS', 'SampleEncoder', 'word_tokenizer']

WORDS = tuple(f'{first}{second}' for first in 'bdfgklmnprst' for second in 'aeiou')


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
        return self.tokenizer.convert_tokens_to_ids('<pad>')

    def token_id(self, token: str) -> int:
        """Id of a token."""
        return self.tokenizer.convert_tokens_to_ids(token)

    def __call__(
        self, gaps: Sequence[Sequence[str]], answer: Sequence[str], images: Sequence[Image.Image]
    ) -> dict[str, Any]:
        """Encodes ``gap image gap image ... answer``; the answer's tokens carry the loss."""
        text = ' '.join(gaps[0])
        for gap in gaps[1:]:
            text += f'{self.image_text}{" ".join(gap)}'
        media = {'images': [list(images)] if self.nested_images else list(images)} if images else {}
        if self.suffix and images:
            row = dict(self.processor(text=[text], suffix=[' '.join(answer)], return_tensors='pt', **media))
        elif self.suffix:
            pair = {'text': [text], 'text_pair': [f'{" ".join(answer)}</s>'], 'return_token_type_ids': True}
            row = dict(self.tokenizer(**pair, return_tensors='pt'))
        else:
            row = dict(self.processor(text=[f'{text} {" ".join(answer)}'], return_tensors='pt', **media))
        return {**row, 'labels': _answer_labels(row['input_ids'], len(answer))}


def _answer_labels(input_ids: torch.Tensor, num_answer_tokens: int) -> torch.Tensor:
    labels = torch.full_like(input_ids, -100)
    labels[:, -num_answer_tokens:] = input_ids[:, -num_answer_tokens:]
    return labels


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
