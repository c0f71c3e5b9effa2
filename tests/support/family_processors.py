# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The processors of the families, with a word tokenizer, for images and videos of a few pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import transformers

from tests.support.sample_encoder import SampleEncoder, word_tokenizer

__all__ = ['ENCODERS', 'IMAGE_SIZE', 'PATCH_SIZE', 'PINPOINTS', 'PROCESSORS', 'pixels']

IMAGE_SIZE, PATCH_SIZE = 16, 4
# LLaVA-NeXT and OneVision cut an image into tiles of one of these layouts, and add the whole image.
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
MEAN_STD = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
SQUARE = {'height': IMAGE_SIZE, 'width': IMAGE_SIZE}
CROPPED = dict(size={'shortest_edge': IMAGE_SIZE}, crop_size=SQUARE)
GRID = dict(patch_size=PATCH_SIZE, merge_size=2, temporal_patch_size=2, **MEAN_STD)
CLIP_TOKENS = dict(vision_feature_select_strategy='default', num_additional_image_tokens=1, patch_size=PATCH_SIZE)
VIDEO_SIZES = {'shortest_edge': 64, 'longest_edge': 4096}
IS_OLD = transformers.__version__.startswith('4.')
QWEN_TOKENS = ('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>')
# Words that the processors write before the frames of a video.
QWEN3_WORDS = ('<', '>', '.', 'seconds', *map(str, range(10)))
INTERNVL_WORDS = ('Frame1', 'Frame2', 'Frame3', ':')
SMOLVLM_WORDS = ('You', 'are', 'provided', 'the', 'following', 'Frame', 'from', 'frames', 'series', ':')


def _processor(
    name: str,
    *tokens: str,
    words: str = '',
    special_tokens: Mapping[str, str] | None = None,
    video: Any = None,
    **parts: Any,
) -> Any:
    """Makes a processor.

    Args:
        name: The beginning of its class.
        tokens: Words of the tokenizer.
        words: The class of tokenizer that it needs up to transformers 4.
        special_tokens: Special tokens of the tokenizer, by attribute.
        video: The beginning of the class of the video processor, and its settings.
        parts: Other arguments of the processor.
    """
    if video is not None and (video_class := getattr(transformers, f'{video[0]}VideoProcessor', None)):  # since 4.53
        parts['video_processor'] = video_class(**MEAN_STD | video[1])
    tokenizer = word_tokenizer(*tokens, class_name=words, **(special_tokens or {}))
    return getattr(transformers, f'{name}Processor')(tokenizer=tokenizer, **parts)


def pixels(name: str, **settings: Any) -> Any:
    """Returns the image processor of a family."""
    return getattr(transformers, f'{name}ImageProcessor')(**MEAN_STD | settings)


def _llava() -> Any:
    images = pixels('CLIP', size=SQUARE, crop_size=SQUARE, do_center_crop=False)
    return _processor('Llava', '<image>', image_processor=images, **CLIP_TOKENS)


def _llava_next() -> Any:
    images = pixels('LlavaNext', **CROPPED, image_grid_pinpoints=PINPOINTS)
    return _processor('LlavaNext', '<image>', image_processor=images, **CLIP_TOKENS)


def _llava_next_video() -> Any:
    images = pixels('LlavaNext', **CROPPED, image_grid_pinpoints=PINPOINTS)
    return _processor(
        'LlavaNextVideo',
        '<image>',
        '<video>',
        words='LlamaTokenizerFast',
        image_processor=images,
        video=('LlavaNextVideo', CROPPED),
        **CLIP_TOKENS,
    )


def _llava_onevision() -> Any:
    images = pixels('LlavaOnevision', size=SQUARE, image_grid_pinpoints=PINPOINTS)
    return _processor(
        'LlavaOnevision',
        '<image>',
        '<video>',
        image_processor=images,
        video=('LlavaOnevision', dict(size=SQUARE)),
        num_image_tokens=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_select_strategy='full',
    )


def _video_llava() -> Any:
    # Up to transformers 4 its images have a class of their own.
    name = 'VideoLlava' if hasattr(transformers, 'VideoLlavaImageProcessor') else 'CLIP'
    square = dict(size=SQUARE, crop_size=SQUARE)
    return _processor(
        'VideoLlava',
        '<image>',
        '<video>',
        image_processor=pixels(name, **square),
        video=('VideoLlava', square),
        patch_size=PATCH_SIZE,
    )


def _qwen(name: str) -> Any:
    images = pixels('Qwen2VL', min_pixels=64, max_pixels=512, **GRID)
    tokens = (*QWEN_TOKENS, *(QWEN3_WORDS if name == 'Qwen3VL' else ()))
    video = ('Qwen3VL' if name == 'Qwen3VL' else 'Qwen2VL', dict(size=VIDEO_SIZES, do_sample_frames=False, **GRID))
    return _processor(name, *tokens, words='Qwen2TokenizerFast', image_processor=images, video=video)


def _sounds() -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)


def _omni() -> Any:
    special_tokens = {f'{kind}_token': f'<|{kind.upper()}|>' for kind in ('image', 'audio', 'video')}
    special_tokens |= {
        f'{mark}_token': f'<|{mark}|>' for mark in ('vision_bos', 'vision_eos', 'audio_bos', 'audio_eos')
    }
    processor = _processor(
        'Qwen2_5Omni',
        words='Qwen2TokenizerFast',
        special_tokens=special_tokens,
        feature_extractor=_sounds(),
        image_processor=pixels('Qwen2VL', min_pixels=64, max_pixels=512, **GRID),
        video=('Qwen2VL', dict(size=VIDEO_SIZES, do_sample_frames=False, **GRID)),
    )
    # The sizes of the processor replace those of its video processor.
    processor.videos_kwargs = {'size': VIDEO_SIZES}
    return processor


def _qwen2_audio() -> Any:
    tokens = ('<|AUDIO|>', '<|audio_bos|>', '<|audio_eos|>')
    return _processor('Qwen2Audio', *tokens, words='Qwen2TokenizerFast', feature_extractor=_sounds())


def _idefics3() -> Any:
    # An image larger than a tile is cut into tiles, and the whole image is added: several tensors for one placeholder.
    images = pixels('Idefics3', size={'longest_edge': 2 * IMAGE_SIZE}, max_image_size={'longest_edge': IMAGE_SIZE})
    tiles = [f'<row_{row}_col_{col}>' for row in range(1, 7) for col in range(1, 7)]
    tokens = ('<image>', '<fake_token_around_image>', '<global-img>', '<end_of_utterance>', *tiles)
    image_tokens = (IMAGE_SIZE // PATCH_SIZE) ** 2 // 4
    return _processor('Idefics3', *tokens, image_processor=images, image_seq_len=image_tokens)


def _smolvlm_video() -> Any:
    special = ('<image>', '<video>', '<fake_token_around_image>', '<global-img>', '<end_of_utterance>')
    sizes = dict(size={'longest_edge': IMAGE_SIZE}, max_image_size={'longest_edge': IMAGE_SIZE})
    processor = _processor(
        'SmolVLM',
        *special,
        *SMOLVLM_WORDS,
        video=('SmolVLM', sizes),
        image_processor=pixels('SmolVLM', do_image_splitting=False, **sizes),
        image_seq_len=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
    )
    processor.tokenizer.eos_token = '<end_of_utterance>'
    return processor


def _paligemma() -> Any:
    images = pixels('Siglip', size=SQUARE)
    images.image_seq_length = (IMAGE_SIZE // PATCH_SIZE) ** 2
    return _processor('PaliGemma', '<image>', words='GemmaTokenizerFast', image_processor=images)


def _gemma3() -> Any:
    special_tokens = dict(image_token='<image_soft_token>', boi_token='<start_of_image>', eoi_token='<end_of_image>')
    return _processor(
        'Gemma3',
        words='GemmaTokenizerFast',
        special_tokens=special_tokens,
        image_processor=pixels('Gemma3', size=SQUARE),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
    )


def _mllama() -> Any:
    images = pixels('Mllama', size=SQUARE, max_image_tiles=4)
    return _processor('Mllama', '<|image|>', '<|python_tag|>', image_processor=images)


def _internvl() -> Any:
    """Its tiles of images and frames of videos are in one tensor, in the order of the text."""
    special_tokens = dict(
        start_image_token='<img>', end_image_token='</img>', context_image_token='<IMG_CONTEXT>', video_token='<video>'
    )
    images = getattr(transformers, 'GotOcr2ImageProcessor' + ('Fast' if IS_OLD else ''))(
        size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=3, **MEAN_STD
    )
    return _processor(
        'InternVL',
        *INTERNVL_WORDS,
        words='Qwen2TokenizerFast',
        special_tokens=special_tokens,
        image_processor=images,
        video=('InternVL', dict(size=SQUARE)),
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
    )


def _pixtral(merge: int) -> Any:
    """For Mistral3, which merges patches, and for LLaVA with Pixtral's vision encoder, which does not."""
    patches = {'height': PATCH_SIZE, 'width': PATCH_SIZE}
    images = pixels('Pixtral', size={'longest_edge': 32}, patch_size=patches)
    return _processor(
        'Pixtral',
        '[IMG]',
        '[IMG_BREAK]',
        '[IMG_END]',
        image_processor=images,
        patch_size=PATCH_SIZE,
        spatial_merge_size=merge,
    )


PROCESSORS: dict[str, Callable[[], Any]] = {
    'llama': word_tokenizer,
    'llava': _llava,
    'llava_next': _llava_next,
    'llava_onevision': _llava_onevision,
    'qwen2_vl': partial(_qwen, 'Qwen2VL'),
    'qwen2_5_vl': partial(_qwen, 'Qwen2_5_VL'),
    'idefics3': _idefics3,
    'smolvlm': _idefics3,  # SmolVLM's processor writes the same, but needs a package for videos
    'paligemma': _paligemma,
    'gemma3': _gemma3,
    'mllama': _mllama,
    'internvl': _internvl,
    'qwen3_vl': partial(_qwen, 'Qwen3VL'),
    'qwen2_5_omni': _omni,
    'qwen2_audio': _qwen2_audio,
    'llava_next_video': _llava_next_video,
    'video_llava': _video_llava,
    'mistral3': partial(_pixtral, 2),
    'llava_pixtral': partial(_pixtral, 1),
    'smolvlm_video': _smolvlm_video,
}
_ENCODERS: dict[str, dict[str, Any]] = {
    'llama': {},
    'llava': dict(image_text='<image>'),
    'llava_next': dict(image_text='<image>'),
    'llava_onevision': dict(image_text='<image>', nested_images=True),
    **{name: dict(image_text='<|vision_start|><|image_pad|><|vision_end|>') for name in ('qwen2_vl', 'qwen2_5_vl')},
    **{name: dict(image_text='<image>', nested_images=True) for name in ('idefics3', 'smolvlm')},
    'paligemma': dict(image_text='<image>', nested_images=True, suffix=True),
    'gemma3': dict(image_text='<start_of_image>', nested_images=True),
    'mllama': dict(image_text='<|image|>', nested_images=True),
    **({'internvl': dict(image_text='<IMG_CONTEXT>')} if hasattr(transformers, 'InternVLProcessor') else {}),  # 4.52
}


def _encoder(name: str) -> SampleEncoder:
    return SampleEncoder(PROCESSORS[name](), **_ENCODERS[name])


ENCODERS: dict[str, Callable[[], SampleEncoder]] = {name: partial(_encoder, name) for name in _ENCODERS}
