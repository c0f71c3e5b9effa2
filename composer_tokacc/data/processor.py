# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Makes small Hugging Face processors. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (
    CLIPImageProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from composer_tokacc.arguments import check_count
from composer_tokacc.refusals import InvalidInputError

RESERVED_TOKENS = (
    '<pad>',
    '<unk>',
    '<image>',
    '<|system|>',
    '<|user|>',
    '<|assistant|>',
    '<|end|>',
)
"""Special tokens of every tokenizer of this file. The role ``tool`` has none. The chat template writes ``<|tool|>``,
which becomes several tokens."""

# For example, the template writes `<|user|><image>What is this?<|assistant|>A cat.<|end|>`. Each turn begins with the
# token of its role, which also shows that the turn before has ended. Only an answer has a token at its end, because the
# model must learn to stop.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
    '{%- endfor -%}{%- endif -%}'
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 2048,
    model_max_length: int = 2048,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer, which can encode any text. It pads on the right."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest_size = len(RESERVED_TOKENS) + len(alphabet)
    if vocab_size < smallest_size:
        raise InvalidInputError(
            f'`vocab_size` must be at least {smallest_size} (special tokens and bytes), got: {vocab_size}.'
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(RESERVED_TOKENS),
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap_tokenizer(tokenizer, model_max_length=model_max_length)


def wrap_tokenizer(tokenizer: Tokenizer, *, model_max_length: int) -> PreTrainedTokenizerFast:
    """Adds missing special tokens to a tokenizer. Returns it as one of Transformers, with a chat template."""
    special_tokens = [AddedToken(token, special=True, normalized=False) for token in RESERVED_TOKENS]
    tokenizer.add_special_tokens(special_tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token='<pad>',
        unk_token='<unk>',
        eos_token='<|end|>',
        padding_side='right',
        model_max_length=model_max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def small_llava_processor(
    tokenizer: PreTrainedTokenizerFast,
    *,
    image_size: int = 32,
    patch_size: int = 8,
) -> LlavaProcessor:
    """Returns a LLaVA processor with this tokenizer.

    It resizes an image to a square of ``image_size`` pixels a side. Such an image has ``(image_size / patch_size)**2``
    tokens.
    """
    if image_size % patch_size:
        raise InvalidInputError(f'`image_size` must be a multiple of `patch_size`={patch_size}, got: {image_size}.')
    square = {'height': image_size, 'width': image_size}
    half = [0.5, 0.5, 0.5]  # mean and standard deviation of each channel: pixels from 0 to 1 become -1 to 1
    image_processor = CLIPImageProcessor(
        size=square,
        do_center_crop=False,
        crop_size=square,  # nothing is cropped, but LlavaProcessor computes the number of tokens from it
        image_mean=half,
        image_std=half,
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=patch_size,
        # The model drops CLIP's class token. The processor counts it as 1 additional token, and subtracts it again for
        # 'default'.
        vision_feature_select_strategy='default',
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def build_small_processor(
    texts: Iterable[str],
    *,
    vocab_size: int = 2048,
    image_size: int = 32,
    patch_size: int = 8,
    model_max_length: int = 2048,
) -> LlavaProcessor:
    """Returns a LLaVA processor that needs no download; see ``train_tokenizer`` and ``small_llava_processor``.

    Args:
        texts: The texts to train the tokenizer on, e.g. ``LlavaDataset.texts(path)``.
        vocab_size: Largest number of tokens in the vocabulary.
        image_size: Side of the square that every image is resized to, in pixels.
        patch_size: Side of the patch that becomes one token, in pixels.
        model_max_length: Largest number of tokens in an input. The tokenizer warns of longer inputs.
    """
    check_count('image_size', image_size)
    check_count('patch_size', patch_size)
    check_count('model_max_length', model_max_length)
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size, model_max_length=model_max_length)
    return small_llava_processor(tokenizer, image_size=image_size, patch_size=patch_size)
