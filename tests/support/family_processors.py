# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The processors of the families, with a word tokenizer, for images and videos of a few pixels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from tests.model_types.processors import small_processor
from tests.model_types.tiny import IMAGE, PATCH

__all__ = ['PROCESSORS', 'QWEN3_WORDS', 'QWEN_TOKENS', 'QWEN_VIDEO', 'WORDS', 'build_processor', 'word_tokenizer']

WORDS = tuple(f'{first}{second}' for first in 'bdfgklmnprst' for second in 'aeiou')
QWEN_TOKENS = ('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>')
# Words that the processors write before the frames of a video.
QWEN3_WORDS = ('<', '>', '.', 'seconds', *map(str, range(10)))
INTERNVL_WORDS = ('Frame1', 'Frame2', 'Frame3', ':')
SMOLVLM_WORDS = ('You', 'are', 'provided', 'the', 'following', 'Frame', 'from', 'frames', 'series', ':')


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


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """How the processor of a family is made.

    Args:
        tokens: Special tokens and further words of its tokenizer.
        attributes: Special tokens of the tokenizer by the attribute that the processor reads.
        tokenizer: The class of tokenizer that it needs up to transformers 4.
        model_type: The model type, if it is not the name of the family.
        options: Arguments of the processor.
        image: Settings of its image processor.
        video: Settings of its video processor.
    """

    tokens: Sequence[str] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ''
    model_type: str = ''
    options: Mapping[str, Any] = field(default_factory=dict)
    image: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)


PATCHES_OF_IMAGE = (IMAGE // PATCH) ** 2
CLIP: dict[str, Any] = {
    'vision_feature_select_strategy': 'default',
    'num_additional_image_tokens': 1,
    'patch_size': PATCH,
}
VIDEO_SIZES = {'shortest_edge': 64, 'longest_edge': 4096}
QWEN_VIDEO: dict[str, Any] = {'do_sample_frames': False, 'size': VIDEO_SIZES}
QWEN: dict[str, Any] = {'tokens': QWEN_TOKENS, 'tokenizer': 'Qwen2TokenizerFast', 'video': QWEN_VIDEO}
TILES = [f'<row_{row}_col_{column}>' for row in range(1, 7) for column in range(1, 7)]
QUERIES: dict[str, Any] = {'num_query_tokens': 4}
IDEFICS_TOKENS = ('<image>', '<fake_token_around_image>', '<global-img>', '<end_of_utterance>')
LONGEST_EDGE = {'longest_edge': IMAGE}
TILE = {'max_image_size': LONGEST_EDGE}
# An image larger than a tile is cut into tiles, and the whole image is added: several tensors for one placeholder.
IDEFICS3 = _Recipe(
    model_type='idefics3',
    tokens=(*IDEFICS_TOKENS, *TILES),
    options={'image_seq_len': PATCHES_OF_IMAGE // 4},
    image=TILE,
)

_RECIPES = {
    'llava': _Recipe(tokens=['<image>'], options=CLIP),
    'llava_next': _Recipe(tokens=['<image>'], options=CLIP),
    'llava_onevision': _Recipe(
        tokens=['<image>', '<video>'],
        options={'num_image_tokens': PATCHES_OF_IMAGE, 'vision_feature_select_strategy': 'full'},
    ),
    'qwen2_vl': _Recipe(**QWEN),
    'qwen2_5_vl': _Recipe(**QWEN),
    'idefics3': IDEFICS3,
    'smolvlm': IDEFICS3,  # SmolVLM's processor writes the same, but needs a package for videos
    'paligemma': _Recipe(tokens=['<image>'], tokenizer='GemmaTokenizerFast'),
    'gemma3': _Recipe(
        attributes={'image': '<image_soft_token>', 'boi': '<start_of_image>', 'eoi': '<end_of_image>'},
        tokenizer='GemmaTokenizerFast',
        options={'image_seq_length': PATCHES_OF_IMAGE // 4},
    ),
    'mllama': _Recipe(tokens=['<|image|>', '<|python_tag|>']),
    # Its tiles of images and frames of videos are in one tensor, in the order of the text.
    'internvl': _Recipe(
        tokens=INTERNVL_WORDS,
        attributes={
            'start_image': '<img>',
            'end_image': '</img>',
            'context_image': '<IMG_CONTEXT>',
            'video': '<video>',
        },
        tokenizer='Qwen2TokenizerFast',
        options={'image_seq_length': PATCHES_OF_IMAGE // 4},
        image={'crop_to_patches': True, 'min_patches': 1},
    ),
    'qwen3_vl': _Recipe(**{**QWEN, 'tokens': QWEN_TOKENS + QWEN3_WORDS}),
    'qwen2_5_omni': _Recipe(
        attributes={
            'image': '<|IMAGE|>',
            'audio': '<|AUDIO|>',
            'video': '<|VIDEO|>',
            'vision_bos': '<|vision_bos|>',
            'vision_eos': '<|vision_eos|>',
            'audio_bos': '<|audio_bos|>',
            'audio_eos': '<|audio_eos|>',
        },
        tokenizer='Qwen2TokenizerFast',
        video=QWEN_VIDEO,
    ),
    'qwen2_audio': _Recipe(tokens=['<|AUDIO|>', '<|audio_bos|>', '<|audio_eos|>'], tokenizer='Qwen2TokenizerFast'),
    'llava_next_video': _Recipe(tokens=['<image>', '<video>'], tokenizer='LlamaTokenizerFast', options=CLIP),
    'video_llava': _Recipe(tokens=['<image>', '<video>'], options={'patch_size': PATCH}),
    'mistral3': _Recipe(
        tokens=['[IMG]', '[IMG_BREAK]', '[IMG_END]'],
        options={'patch_size': PATCH, 'spatial_merge_size': 2},
    ),
    # LLaVA with the vision encoder of Pixtral, which does not merge patches.
    'llava_pixtral': _Recipe(
        model_type='pixtral',
        tokens=['[IMG]', '[IMG_BREAK]', '[IMG_END]'],
        options={'patch_size': PATCH, 'spatial_merge_size': 1},
    ),
    'blip2': _Recipe(model_type='blip-2', tokens=['<image>'], options=QUERIES),
    'instructblip': _Recipe(tokens=['<image>'], options=QUERIES),
    'instructblipvideo': _Recipe(tokens=['<image>'], options=QUERIES),
    'smolvlm_video': _Recipe(
        model_type='smolvlm',
        tokens=(*IDEFICS_TOKENS, '<video>', *SMOLVLM_WORDS),
        options={'image_seq_len': PATCHES_OF_IMAGE // 4},
        image={'do_image_splitting': False, 'size': LONGEST_EDGE, **TILE},
        video={'size': LONGEST_EDGE, **TILE},
    ),
}


def build_processor(name: str, make_tokenizer: Callable[..., Any] = word_tokenizer, **options: Any) -> Any:
    """Returns the processor of a family, with further arguments. ``make_tokenizer`` takes those of `word_tokenizer`."""
    recipe = _RECIPES[name]
    model_type = recipe.model_type or name
    attributes = {f'{attribute}_token': token for attribute, token in recipe.attributes.items()}
    tokenizer = make_tokenizer(*recipe.tokens, class_name=recipe.tokenizer, **attributes)
    processor_class = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    arguments = inspect.signature(processor_class).parameters
    parts: dict[str, Any] = {}
    if 'image_processor' in arguments:
        parts['image_processor'] = small_processor(model_type, 'image', **recipe.image)
        parts['image_processor'].image_seq_length = PATCHES_OF_IMAGE  # PaliGemma reads it there
    if 'video_processor' in arguments:
        parts['video_processor'] = small_processor(model_type, 'video', **recipe.video)
    if 'feature_extractor' in arguments:
        parts['feature_extractor'] = small_processor(model_type, 'audio')
    processor = processor_class(tokenizer=tokenizer, **parts, **{**recipe.options, **options})
    if name == 'qwen2_5_omni':  # its own sizes replace those of its video processor
        processor.videos_kwargs = {'size': VIDEO_SIZES}
    if name == 'smolvlm_video':
        tokenizer.eos_token = '<end_of_utterance>'
    return processor


PROCESSORS: dict[str, Callable[[], Any]] = {'llama': word_tokenizer}
PROCESSORS |= {name: functools.partial(build_processor, name) for name in _RECIPES}
