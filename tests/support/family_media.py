# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows with videos and audios, and with images of every size, as the families' own processors make them.

case = MEDIA['qwen3_vl']()
case.model                  # Qwen3VLForConditionalGeneration, float32, two layers, hidden size 16
case.rows                   # one-row batches, labels on the last tokens, no `num_images`, `num_videos`, `num_audios`
case.truth[3]               # {'image': 1, 'video': 2}: what row 3 was made of
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from tests.support import family_models
from tests.support.family_processors import IMAGE_SIZE, PROCESSORS
from tests.support.sample_encoder import WORDS

__all__ = ['MEDIA', 'SLOT_MEDIA', 'Case', 'MediaCase', 'TokenIds']

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
class Case:
    """A tiny model and one-row batches for it."""

    model: PreTrainedModel
    rows: list[dict[str, Any]]
    pad_token_id: int

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    def loss(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The model's own mean loss; what its forward does not name is dropped as ``HuggingFaceModel`` drops it."""
        named = inspect.signature(self.model.forward).parameters
        return self.model(**{key: value for key, value in batch.items() if key in named}).loss

    def loss_sum(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Sum of the model's loss over the labels that carry it, which does not depend on how rows are grouped."""
        return self.loss(batch) * (batch['labels'][:, 1:] != -100).sum()


@dataclass(frozen=True, kw_only=True)
class MediaCase(Case):
    """Nothing in the rows counts their media.

    Args:
        truth: What each row was made of.
        processor: With a chat template of its family's tokens.
        kinds: What each row holds: ``'image'``, ``'image&video'``, ..., or ``'none'``.
    """

    truth: list[dict[str, int]]
    processor: Any = None
    kinds: Sequence[str] = ()


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
    """What :mod:`family_models` asks of an encoder."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_token_id = tokenizer.convert_tokens_to_ids('<pad>')

    def token_id(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)


VIDEO = {'image': '<image>', 'video': '<video>'}
QWEN = {'image': '<|vision_start|><|image_pad|><|vision_end|>', 'video': '<|vision_start|><|video_pad|><|vision_end|>'}
OMNI = {
    'image': '<|vision_bos|><|IMAGE|><|vision_eos|>',
    'video': '<|vision_bos|><|VIDEO|><|vision_eos|>',
    'audio': '<|audio_bos|><|AUDIO|><|audio_eos|>',
}
SMOLVLM_ROWS = ((4, 3), (2, 'image', 3), (9, 6), ('image', 'image', 4), ('video', 2), (3, 'video', 1, 4))

# Placeholder of each medium, rows, frames of a video. Of LLaVA's families all videos of a batch have as many frames, or
# their tensors would not join; Qwen3-VL's processor writes the tokens around each frame itself.
_CASES: dict[str, tuple[dict[str, str], Any, tuple[int, ...]]] = {
    'qwen2_vl': (QWEN, VIDEO_ROWS, (2, 4, 6)),
    'qwen2_5_vl': (QWEN, VIDEO_ROWS, (2, 4, 6)),
    'qwen3_vl': ({**QWEN, 'video': '<|video_pad|>'}, VIDEO_ROWS, (2, 4, 6)),
    'qwen2_5_omni': (OMNI, OMNI_ROWS, (2, 4, 6)),
    'qwen2_audio': ({'audio': '<|AUDIO|>'}, AUDIO_ROWS, ()),
    'llava_onevision': (VIDEO, VIDEO_ROWS, (3,)),
    'llava_next_video': (VIDEO, VIDEO_ROWS, (3,)),
    'video_llava': (VIDEO, VIDEO_ROWS, (2,)),
    'internvl': ({'image': '<IMG_CONTEXT>', 'video': '<video>'}, VIDEO_ROWS, (3,)),
    'mistral3': ({'image': '[IMG]'}, IMAGE_ROWS, ()),
    'llava_pixtral': ({'image': '[IMG]'}, IMAGE_ROWS, ()),
    'smolvlm_video': (VIDEO, SMOLVLM_ROWS, (2, 3)),
}


def _case(name: str) -> MediaCase:
    """A case of a test's own: it may train the model, and change the rows and the processor."""
    return copy.deepcopy(_build(name))


@functools.cache
def _build(name: str) -> MediaCase:
    tokens, plan, frames = _CASES[name]
    processor = PROCESSORS[name]()
    call = functools.partial(_CALLS[name], processor) if name in _CALLS else processor
    rows, truth = _rows(call, tokens, plan, _frames(*frames), _sound)
    source = 'smolvlm' if name == 'smolvlm_video' else name
    model = family_models.MODELS[source](TokenIds(processor.tokenizer))
    if name == 'internvl':  # which counts tiles
        truth = [{'image': len(row.get('pixel_values', ()))} for row in rows]
    if name == 'smolvlm_video':  # it would take no other for videos
        from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE as template
    else:
        written = ''.join(f"{{% elif part['type'] == '{kind}' %}}{token} " for kind, token in tokens.items())
        template = (
            "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
            f"{{{{ part['text'] }}}} {written}{{% endif %}}{{% endfor %}}</s> {{% endfor %}}"
        )
    processor.chat_template = template
    kinds = ['&'.join(kind for kind in ('image', 'video', 'audio') if kind in pieces) or 'none' for pieces in plan]
    pad = processor.tokenizer.convert_tokens_to_ids('<pad>')
    return MediaCase(model=model, rows=rows, truth=truth, pad_token_id=pad, processor=processor, kinds=kinds)


def _call_onevision(processor: Any, text: list[str], images: Any = None, **media: Any) -> Any:
    return processor(text=text, **({'images': [images]} if images else {}), **media)


def _call_smolvlm(processor: Any, text: list[str], **media: Any) -> Any:
    """Frames of a video are images; the pixels of neither two videos nor a video and an image are joined."""
    counts = [len(frames) for frames in media.get('videos', ())]
    shown = [{'total_num_frames': n, 'fps': 1.0, 'frames_indices': list(range(n))} for n in counts]
    options = {'video_metadata': shown, 'do_sample_frames': False}
    return processor(text=text, **media, **({'videos_kwargs': options} if shown else {}))


_CALLS = {'llava_onevision': _call_onevision, 'smolvlm_video': _call_smolvlm}
# Families with slots, where rows tell their media by themselves, if there is what the processor writes numbers with.
SLOT_MEDIA: dict[str, Callable[[], MediaCase]] = {
    name: functools.partial(_case, name)
    for name in ['smolvlm_video']
    if importlib.util.find_spec('num2words') is not None
}
MEDIA: dict[str, Callable[[], MediaCase]] = {
    name: functools.partial(_case, name) for name in _CASES if name != 'smolvlm_video'
}
