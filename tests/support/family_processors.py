# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The families' own processors around a word tokenizer and image processors of a few pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.support.sample_encoder import SampleEncoder, word_tokenizer

__all__ = ['ENCODERS', 'IMAGE_SIZE', 'MEAN_STD', 'PATCH_SIZE', 'PINPOINTS', 'SQUARE']

IMAGE_SIZE, PATCH_SIZE = 16, 4
# LLaVA-NeXT and OneVision tile an image into one of these, besides the whole image.
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
MEAN_STD = {'image_mean': [0.5] * 3, 'image_std': [0.5] * 3}
SQUARE = {'height': IMAGE_SIZE, 'width': IMAGE_SIZE}


def _square_processor(name: str) -> Any:
    return getattr(transformers, name)(size=SQUARE, crop_size=SQUARE, do_center_crop=False, **MEAN_STD)


def _video_processor(name: str) -> dict[str, Any]:
    """Processors want one since 4.53; no sample has a video."""
    cls = getattr(transformers, name, None)
    return {} if cls is None else {'video_processor': cls()}


def _llama() -> SampleEncoder:
    return SampleEncoder(word_tokenizer())


def _llava() -> SampleEncoder:
    processor = transformers.LlavaProcessor(
        image_processor=_square_processor('CLIPImageProcessor'),
        tokenizer=word_tokenizer('<image>'),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy='default',
        num_additional_image_tokens=1,
    )
    return SampleEncoder(processor, image_text='<image>')


def _llava_next() -> SampleEncoder:
    image_processor = transformers.LlavaNextImageProcessor(
        size={'shortest_edge': IMAGE_SIZE}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS, **MEAN_STD
    )
    processor = transformers.LlavaNextProcessor(
        image_processor=image_processor,
        tokenizer=word_tokenizer('<image>'),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy='default',
        num_additional_image_tokens=1,
    )
    return SampleEncoder(processor, image_text='<image>')


def _llava_onevision() -> SampleEncoder:
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=SQUARE, image_grid_pinpoints=PINPOINTS, **MEAN_STD
        ),
        tokenizer=word_tokenizer('<image>', '<video>'),
        num_image_tokens=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_select_strategy='full',
        **_video_processor('LlavaOnevisionVideoProcessor'),
    )
    return SampleEncoder(processor, image_text='<image>', nested_images=True)


def _qwen(name: str) -> SampleEncoder:
    image_processor = transformers.Qwen2VLImageProcessor(
        patch_size=PATCH_SIZE, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=512, **MEAN_STD
    )
    special = ('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>')
    tokenizer = word_tokenizer(*special, class_name='Qwen2TokenizerFast')
    processor = getattr(transformers, name)(
        image_processor=image_processor, tokenizer=tokenizer, **_video_processor('Qwen2VLVideoProcessor')
    )
    return SampleEncoder(processor, image_text='<|vision_start|><|image_pad|><|vision_end|>')


def _idefics3() -> SampleEncoder:
    # SmolVLM's own processor writes the same, but wants a package for videos that nothing else here needs. Images
    # larger than a tile are cut into tiles, besides the whole image: several tensors for one placeholder.
    image_processor = transformers.Idefics3ImageProcessor(
        size={'longest_edge': 2 * IMAGE_SIZE}, max_image_size={'longest_edge': IMAGE_SIZE}, **MEAN_STD
    )
    tiles = [f'<row_{row}_col_{col}>' for row in range(1, 7) for col in range(1, 7)]
    tokenizer = word_tokenizer('<image>', '<fake_token_around_image>', '<global-img>', '<end_of_utterance>', *tiles)
    processor = transformers.Idefics3Processor(
        image_processor=image_processor, tokenizer=tokenizer, image_seq_len=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4
    )
    return SampleEncoder(processor, image_text='<image>', nested_images=True)


def _paligemma() -> SampleEncoder:
    image_processor = transformers.SiglipImageProcessor(size=SQUARE, **MEAN_STD)
    image_processor.image_seq_length = (IMAGE_SIZE // PATCH_SIZE) ** 2
    tokenizer = word_tokenizer('<image>', class_name='GemmaTokenizerFast')
    processor = transformers.PaliGemmaProcessor(image_processor=image_processor, tokenizer=tokenizer)
    return SampleEncoder(processor, image_text='<image>', nested_images=True, suffix=True)


def _gemma3() -> SampleEncoder:
    tokenizer = word_tokenizer(
        class_name='GemmaTokenizerFast',
        image_token='<image_soft_token>',
        boi_token='<start_of_image>',
        eoi_token='<end_of_image>',
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size=SQUARE, **MEAN_STD),
        tokenizer=tokenizer,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
    )
    return SampleEncoder(processor, image_text='<start_of_image>', nested_images=True)


def _mllama() -> SampleEncoder:
    processor = transformers.MllamaProcessor(
        image_processor=transformers.MllamaImageProcessor(size=SQUARE, max_image_tiles=4, **MEAN_STD),
        tokenizer=word_tokenizer('<|image|>', '<|python_tag|>'),
    )
    return SampleEncoder(processor, image_text='<|image|>', nested_images=True)


def _internvl() -> SampleEncoder:
    # Cuts an image into tiles, besides the whole image: several tensors for one image.
    name = 'GotOcr2ImageProcessor' + ('Fast' if transformers.__version__.startswith('4.') else '')
    image_processor = getattr(transformers, name)(
        size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=3, **MEAN_STD
    )
    tokenizer = word_tokenizer(
        class_name='Qwen2TokenizerFast',
        start_image_token='<img>',
        end_image_token='</img>',
        context_image_token='<IMG_CONTEXT>',
        video_token='<video>',
    )
    processor = transformers.InternVLProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
        **_video_processor('InternVLVideoProcessor'),
    )
    return SampleEncoder(processor, image_text='<IMG_CONTEXT>')


ENCODERS: dict[str, Callable[[], SampleEncoder]] = {
    'llama': _llama,
    'llava': _llava,
    'llava_next': _llava_next,
    'llava_onevision': _llava_onevision,
    'qwen2_vl': lambda: _qwen('Qwen2VLProcessor'),
    'qwen2_5_vl': lambda: _qwen('Qwen2_5_VLProcessor'),
    'idefics3': _idefics3,
    'smolvlm': _idefics3,
    'paligemma': _paligemma,
    'gemma3': _gemma3,
    'mllama': _mllama,
}
if hasattr(transformers, 'InternVLProcessor'):  # since 4.52
    ENCODERS['internvl'] = _internvl
