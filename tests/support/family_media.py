# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows with videos and audios, and with images of every size, as the families' own processors make them.

case = MEDIA['qwen3_vl']()
case.model                  # Qwen3VLForConditionalGeneration, float32, two layers, hidden size 16
case.rows                   # one-row batches, labels on the last tokens, no `num_images`, `num_videos`, `num_audios`
case.truth[3]               # {'image': 1, 'video': 2}: what row 3 was made of
"""

from __future__ import annotations

import importlib.util
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedModel

from tests.support import family_models
from tests.support.family_processors import IMAGE_SIZE, MEAN_STD, PATCH_SIZE, PINPOINTS, SQUARE
from tests.support.sample_encoder import WORDS, word_tokenizer

__all__ = ['MEDIA', 'SLOT_MEDIA', 'MediaCase', 'TokenIds']

# What stands in each row, in order; a number is so many words. The last words carry the loss.
VIDEO_ROWS = (
    (4, 3),
    (2, 'video', 3),
    ('image', 'video', 2, 'image', 5),
    (1, 'video', 'video', 2),
    (9, 6),
    ('image', 'image', 4),
    (2, 'image', 1, 'video', 1, 'video', 2),
)
ONE_KIND_ROWS = ((4, 3), (2, 'x', 3), ('x', 'x', 5), (9, 6), (1, 'x', 2, 'x', 'x', 2), ('x', 2))
IMAGE_ROWS, AUDIO_ROWS = (
    tuple(tuple(kind if piece == 'x' else piece for piece in row) for row in ONE_KIND_ROWS)
    for kind in ('image', 'audio')
)
OMNI_ROWS = (*VIDEO_ROWS, (2, 'audio', 3), ('audio', 'image', 1, 'audio', 'video', 2))


@dataclass(frozen=True, kw_only=True)
class MediaCase:
    """A tiny model and one-row batches for it; nothing in them counts their media."""

    model: PreTrainedModel
    rows: list[dict[str, Any]]
    truth: list[dict[str, int]]
    pad_token_id: int
    processor: Any = None
    """With a chat template of its family's tokens."""
    kinds: Sequence[str] = ()
    """What each row holds: ``'image'``, ``'image&video'``, ..., or ``'none'``."""

    def loss(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The model's own mean loss."""
        named = inspect.signature(self.model.forward).parameters
        return self.model(**{key: value for key, value in batch.items() if key in named}).loss

    def loss_sum(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the model's loss over the labels that carry it."""
        return self.loss(batch) * (batch['labels'][:, 1:] != -100).sum()


def _image(rng: random.Random) -> Image.Image:
    width, height = rng.choice([(16, 16), (40, 16), (16, 32), (24, 24), (32, 16), (16, 48)])
    return Image.frombytes('RGB', (width, height), rng.randbytes(3 * width * height))


def _rows(
    processor: Any,
    tokens: Mapping[str, str],
    plan: Sequence[Sequence[int | str]],
    videos: Callable[[random.Random], Any] | None = None,
    audios: Callable[[random.Random], Any] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, int]]]:
    """Rows of the plan; the model sees what ``processor(text=..., images=..., videos=..., audio=...)`` returns."""
    rng, rows = random.Random(0), []
    makers = {'image': _image, 'video': videos, 'audio': audios}
    names = {'image': 'images', 'video': 'videos', 'audio': 'audio'}
    for pieces in plan:
        items: dict[str, list[Any]] = {}
        text = []
        for piece in pieces:
            if isinstance(piece, int):
                text.append(' '.join(rng.choice(WORDS) for _ in range(piece)))
            else:
                text.append(tokens[piece])
                items.setdefault(names[piece], []).append(makers[piece](rng))
        assert isinstance(pieces[-1], int)
        row = dict(processor(text=[' '.join(text)], return_tensors='pt', **items))
        row['labels'] = torch.full_like(row['input_ids'], -100)
        row['labels'][:, -pieces[-1] :] = row['input_ids'][:, -pieces[-1] :]
        rows.append({key: value for key, value in row.items() if isinstance(value, torch.Tensor)})
    truth = [{kind: list(pieces).count(kind) for kind in tokens} for pieces in plan]
    return rows, truth


def _frames(*counts: int, size: int = IMAGE_SIZE) -> Callable[[random.Random], Any]:
    """A video with one of these numbers of frames."""

    def make(rng: random.Random) -> np.ndarray:
        count = rng.choice(counts)
        return np.random.default_rng(rng.randrange(1000)).integers(0, 255, (count, size, size, 3), dtype=np.uint8)

    return make


def _sound(rng: random.Random) -> np.ndarray:
    return np.random.default_rng(rng.randrange(1000)).standard_normal(rng.randrange(2000, 9000)).astype(np.float32)


class TokenIds:
    """What the text settings of :mod:`family_models` ask of an encoder."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_token_id = tokenizer.convert_tokens_to_ids('<pad>')

    def token_id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)


def _case(
    processor: Any,
    model: PreTrainedModel,
    tokens: Mapping[str, str],
    plan: Any,
    *,
    call: Callable[..., Any] | None = None,
    **media: Any,
) -> MediaCase:
    rows, truth = _rows(call or processor, tokens, plan, **media)
    pad = processor.tokenizer.convert_tokens_to_ids('<pad>')
    written = ''.join(f"{{% elif part['type'] == '{kind}' %}}{token} " for kind, token in tokens.items())
    processor.chat_template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        f"{{{{ part['text'] }}}} {written}{{% endif %}}{{% endfor %}}</s> {{% endfor %}}"
    )
    kinds = ['&'.join(kind for kind in ('image', 'video', 'audio') if kind in pieces) or 'none' for pieces in plan]
    return MediaCase(model=model, rows=rows, truth=truth, pad_token_id=pad, processor=processor, kinds=kinds)


QWEN_TOKENS = {
    'image': '<|vision_start|><|image_pad|><|vision_end|>',
    'video': '<|vision_start|><|video_pad|><|vision_end|>',
}
_GRID = {'patch_size': PATCH_SIZE, 'merge_size': 2, 'temporal_patch_size': 2, **MEAN_STD}


def _qwen(name: str) -> MediaCase:
    special = ('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>')
    seconds = tuple(f'{index}' for index in range(10))
    words = ('<', '>', '.', 'seconds', *seconds) if name == 'Qwen3VL' else ()
    tokenizer = word_tokenizer(*special, *words, class_name='Qwen2TokenizerFast')
    video_class = 'Qwen3VLVideoProcessor' if name == 'Qwen3VL' else 'Qwen2VLVideoProcessor'
    video_processor = getattr(transformers, video_class)(
        size={'shortest_edge': 64, 'longest_edge': 4096}, do_sample_frames=False, **_GRID
    )
    image_processor = transformers.Qwen2VLImageProcessor(min_pixels=64, max_pixels=512, **_GRID)
    processor = getattr(transformers, f'{name}Processor')(
        image_processor=image_processor, tokenizer=tokenizer, video_processor=video_processor
    )
    models = {'Qwen2VL': 'qwen2_vl', 'Qwen2_5_VL': 'qwen2_5_vl', 'Qwen3VL': 'qwen3_vl'}
    model = family_models.MODELS[models[name]](TokenIds(tokenizer))
    # Qwen3-VL's processor writes the tokens around each frame itself.
    tokens = {**QWEN_TOKENS, 'video': '<|video_pad|>'} if name == 'Qwen3VL' else QWEN_TOKENS
    return _case(processor, model, tokens, VIDEO_ROWS, videos=_frames(2, 4, 6))


def _omni() -> MediaCase:
    named = {
        'image_token': '<|IMAGE|>',
        'audio_token': '<|AUDIO|>',
        'video_token': '<|VIDEO|>',
        'vision_bos_token': '<|vision_bos|>',
        'vision_eos_token': '<|vision_eos|>',
        'audio_bos_token': '<|audio_bos|>',
        'audio_eos_token': '<|audio_eos|>',
    }
    tokenizer = word_tokenizer(class_name='Qwen2TokenizerFast', **named)
    video_processor = transformers.Qwen2VLVideoProcessor(
        size={'shortest_edge': 64, 'longest_edge': 4096}, do_sample_frames=False, **_GRID
    )
    processor = transformers.Qwen2_5OmniProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=64, max_pixels=512, **_GRID),
        video_processor=video_processor,
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1),
        tokenizer=tokenizer,
    )
    tokens = {
        'image': '<|vision_bos|><|IMAGE|><|vision_eos|>',
        'video': '<|vision_bos|><|VIDEO|><|vision_eos|>',
        'audio': '<|audio_bos|><|AUDIO|><|audio_eos|>',
    }
    # Its class has sizes of its own, which win over those of the video processor.
    processor.videos_kwargs = {'size': {'shortest_edge': 64, 'longest_edge': 4096}}
    model = family_models.MODELS['qwen2_5_omni'](TokenIds(tokenizer))
    return _case(processor, model, tokens, OMNI_ROWS, videos=_frames(2, 4, 6), audios=_sound)


def _qwen2_audio() -> MediaCase:
    tokenizer = word_tokenizer('<|AUDIO|>', '<|audio_bos|>', '<|audio_eos|>', class_name='Qwen2TokenizerFast')
    processor = transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer=tokenizer
    )
    model = family_models.MODELS['qwen2_audio'](TokenIds(tokenizer))
    return _case(processor, model, {'audio': '<|AUDIO|>'}, AUDIO_ROWS, audios=_sound)


def _llava_onevision() -> MediaCase:
    tokenizer = word_tokenizer('<image>', '<video>')
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=SQUARE, image_grid_pinpoints=PINPOINTS, **MEAN_STD
        ),
        tokenizer=tokenizer,
        num_image_tokens=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        vision_feature_select_strategy='full',
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=SQUARE, **MEAN_STD),
    )

    def call(text: list[str], images: Any = None, **media: Any) -> Any:
        return processor(text=text, **({'images': [images]} if images else {}), **media)

    model = family_models.MODELS['llava_onevision'](TokenIds(tokenizer))
    # All videos of a batch have as many frames, or their tensors would not join.
    tokens = {'image': '<image>', 'video': '<video>'}
    return _case(processor, model, tokens, VIDEO_ROWS, call=call, videos=_frames(3))


def _llava_next_video() -> MediaCase:
    tokenizer = word_tokenizer('<image>', '<video>', class_name='LlamaTokenizerFast')
    processor = transformers.LlavaNextVideoProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            size={'shortest_edge': IMAGE_SIZE}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS, **MEAN_STD
        ),
        video_processor=transformers.LlavaNextVideoVideoProcessor(
            size={'shortest_edge': IMAGE_SIZE}, crop_size=SQUARE, **MEAN_STD
        ),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy='default',
        num_additional_image_tokens=1,
    )
    model = family_models.MODELS['llava_next_video'](TokenIds(tokenizer))
    tokens = {'image': '<image>', 'video': '<video>'}
    return _case(processor, model, tokens, VIDEO_ROWS, videos=_frames(3))


def _video_llava() -> MediaCase:
    tokenizer = word_tokenizer('<image>', '<video>')
    # Up to transformers 4 its images have a class of their own.
    image_class = getattr(transformers, 'VideoLlavaImageProcessor', transformers.CLIPImageProcessor)
    processor = transformers.VideoLlavaProcessor(
        image_processor=image_class(size=SQUARE, crop_size=SQUARE, **MEAN_STD),
        video_processor=transformers.VideoLlavaVideoProcessor(size=SQUARE, crop_size=SQUARE, **MEAN_STD),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
    )
    model = family_models.MODELS['video_llava'](TokenIds(tokenizer))
    tokens = {'image': '<image>', 'video': '<video>'}
    return _case(processor, model, tokens, VIDEO_ROWS, videos=_frames(2))


def _internvl() -> MediaCase:
    """Tiles of images and frames of videos come in one tensor, in their order in the text."""
    named = {
        'start_image_token': '<img>',
        'end_image_token': '</img>',
        'context_image_token': '<IMG_CONTEXT>',
        'video_token': '<video>',
    }
    # The processor writes "Frame1: " before each frame.
    words = ('Frame1', 'Frame2', 'Frame3', ':')
    tokenizer = word_tokenizer(*words, class_name='Qwen2TokenizerFast', **named)
    name = 'GotOcr2ImageProcessor' + ('Fast' if transformers.__version__.startswith('4.') else '')
    processor = transformers.InternVLProcessor(
        image_processor=getattr(transformers, name)(
            size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=3, **MEAN_STD
        ),
        tokenizer=tokenizer,
        image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
        video_processor=transformers.InternVLVideoProcessor(size=SQUARE, **MEAN_STD),
    )
    model = family_models.MODELS['internvl'](TokenIds(tokenizer))
    tokens = {'image': '<IMG_CONTEXT>', 'video': '<video>'}
    case = _case(processor, model, tokens, VIDEO_ROWS, videos=_frames(3))
    tiles = [{'image': len(row.get('pixel_values', ()))} for row in case.rows]
    return replace(case, truth=tiles)


def _smolvlm() -> MediaCase:
    """Frames of a video are images; its processor joins the pixels of neither two videos nor a video and an image."""
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    # Of the sentences before a video and each of its frames.
    words = ('You', 'are', 'provided', 'the', 'following', 'Frame', 'from', 'frames', 'series', ':')
    special = ('<image>', '<video>', '<fake_token_around_image>', '<global-img>', '<end_of_utterance>')
    tokenizer = word_tokenizer(*special, *words)
    tokenizer.eos_token = '<end_of_utterance>'
    sizes = {'size': {'longest_edge': IMAGE_SIZE}, 'max_image_size': {'longest_edge': IMAGE_SIZE}}
    processor = transformers.SmolVLMProcessor(
        image_processor=transformers.SmolVLMImageProcessor(do_image_splitting=False, **sizes, **MEAN_STD),
        tokenizer=tokenizer,
        video_processor=transformers.SmolVLMVideoProcessor(**sizes, **MEAN_STD),
        image_seq_len=(IMAGE_SIZE // PATCH_SIZE) ** 2 // 4,
    )
    model = family_models.MODELS['smolvlm'](TokenIds(tokenizer))

    def call(text: list[str], **media: Any) -> Any:
        counts = [len(frames) for frames in media.get('videos', ())]
        shown = [{'total_num_frames': n, 'fps': 1.0, 'frames_indices': list(range(n))} for n in counts]
        options = {'video_metadata': shown, 'do_sample_frames': False}
        return processor(text=text, **media, **({'videos_kwargs': options} if shown else {}))

    plan = ((4, 3), (2, 'image', 3), (9, 6), ('image', 'image', 4), ('video', 2), (3, 'video', 1, 4))
    tokens = {'image': '<image>', 'video': '<video>'}
    case = _case(processor, model, tokens, plan, call=call, videos=_frames(2, 3))
    processor.chat_template = DEFAULT_CHAT_TEMPLATE  # it would take no other for videos
    return case


def _pixtral(model_name: str) -> MediaCase:
    """Mistral3, whose patches are merged, and LLaVA with Pixtral's tower, whose are not."""
    merge = 2 if model_name == 'mistral3' else 1
    tokenizer = word_tokenizer('[IMG]', '[IMG_BREAK]', '[IMG_END]')
    processor = transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            size={'longest_edge': 32}, patch_size={'height': PATCH_SIZE, 'width': PATCH_SIZE}, **MEAN_STD
        ),
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        spatial_merge_size=merge,
    )
    model = family_models.MODELS[model_name](TokenIds(tokenizer))
    return _case(processor, model, {'image': '[IMG]'}, IMAGE_ROWS)


MEDIA: dict[str, Callable[[], MediaCase]] = {
    'qwen2_vl': lambda: _qwen('Qwen2VL'),
    'qwen2_5_vl': lambda: _qwen('Qwen2_5_VL'),
    'qwen3_vl': lambda: _qwen('Qwen3VL'),
    'qwen2_5_omni': _omni,
    'qwen2_audio': _qwen2_audio,
    'llava_onevision': _llava_onevision,
    'llava_next_video': _llava_next_video,
    'video_llava': _video_llava,
    'internvl': _internvl,
    'mistral3': lambda: _pixtral('mistral3'),
    'llava_pixtral': lambda: _pixtral('llava_pixtral'),
}
# Of families with slots, where rows tell their media by themselves.
SLOT_MEDIA: dict[str, Callable[[], MediaCase]] = {}
if importlib.util.find_spec('num2words') is not None:  # which the processor writes numbers of frames with
    SLOT_MEDIA['smolvlm_video'] = _smolvlm
