# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny real models and real rows of the families: nothing is downloaded, nothing is mocked.

case = FAMILIES['qwen2_vl']()   # six rows with 0, 1, 1, 2, 0 and 3 images, and with these numbers
case = MEDIA['qwen3_vl']()      # rows with images and videos; nothing in a row counts them
case.model                      # Qwen3VLForConditionalGeneration, float32, two layers, hidden size 32
case.rows                       # one-row batches, as the family's own processor makes them; the last words have labels
case.truth[3]                   # {'image': 1, 'video': 2}: the media of row 3
case.loss_sum(batch)            # the same for a batch as for its rows one by one
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedModel

from tests.model_types.tiny import IMAGE, float32_model, tiny_config
from tests.support import family_processors
from tests.support.family_processors import WORDS

__all__ = ['FAMILIES', 'IMAGE_FAMILIES', 'MEDIA', 'SLOT_MEDIA', 'Case', 'freeze_unreached', 'ragged_samples']

Plan = Sequence[Sequence['int | str']]
"""The pieces of each row: a number of words, or a modality. The last words are the answer, which has labels."""

# Unequal in everything. Some images have no word between them.
IMAGE_ROWS: Plan = (
    (4, 3),
    (3, 'image', 1, 1),
    (5, 'image', 1, 9),
    (2, 'image', 1, 'image', 1, 2),
    (12, 15),
    (3, 'image', 'image', 1, 'image', 1, 4),
)
TEXT_ROWS: Plan = (
    (4, 3),
    (3, 1),
    (5, 9),
    (2, 2),
    (12, 15),
    (3, 4),
)
AUDIO_ROWS: Plan = (
    (4, 3),
    (2, 'audio', 3),
    ('audio', 'audio', 5),
    (9, 6),
    (1, 'audio', 2, 'audio', 'audio', 2),
)
VIDEO_ROWS: Plan = (
    (4, 3),
    (2, 'video', 3),
    ('image', 'video', 2, 'image', 5),
    (1, 'video', 'video', 2),
    (9, 6),
    ('image', 'image', 4),
    (2, 'image', 1, 'video', 1, 'video', 2),
)
OMNI_ROWS: Plan = (
    *VIDEO_ROWS,
    (2, 'audio', 3),
    ('audio', 'image', 1, 'audio', 'video', 2),
)
SMOLVLM_ROWS: Plan = (
    (4, 3),
    (2, 'image', 3),
    (9, 6),
    ('image', 'image', 4),
    ('video', 2),
    (3, 'video', 1, 4),
)
ARGUMENTS = {'image': 'images', 'video': 'videos', 'audio': 'audio'}
"""The argument of a processor for each modality."""
SIZES = ((16, 16), (40, 16), (16, 32), (24, 24), (32, 16), (16, 48))
"""Widths and heights of images, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Words and media, and words of an answer.

    Args:
        pieces: Words, or a modality and its image, frames or sound.
        answer: The words that have labels.
    """

    pieces: Sequence[str | tuple[str, Any]]
    answer: str

    def media(self, modality: str) -> list[Any]:
        """Returns the media of a modality."""
        media = []
        for piece in self.pieces:
            if isinstance(piece, tuple) and piece[0] == modality:
                media.append(piece[1])
        return media


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How the cases of a family are made.

    Args:
        texts: The text that stands for a medium, by modality.
        nested_images: Whether the processor wants a list of images for each text.
        suffix: Whether the processor takes the answer as an argument, and refuses texts without images (PaliGemma).
        video_metadata: Whether the processor wants to know the times of frames (SmolVLM).
        model_type: The model type, if it is not the name of the family.
        settings: Entries of its config, by path.
        plan: The pieces of the rows in :data:`MEDIA`. Empty: the family is not there.
        frames: Numbers of frames of a video. For families like LLaVA all videos of a batch have the same number,
            because their tensors would not join otherwise.
    """

    texts: Mapping[str, str]
    nested_images: bool = False
    suffix: bool = False
    video_metadata: bool = False
    model_type: str = ''
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan = ()
    frames: Sequence[int] = ()


class SampleEncoder:
    """Makes rows of samples with the processor of a family. The processor may be a tokenizer."""

    def __init__(self, processor: Any, family: _Family) -> None:
        self.processor = processor
        self.tokenizer: Any = getattr(processor, 'tokenizer', processor)
        self.family = family

    def __call__(self, sample: Sample) -> dict[str, torch.Tensor]:
        """Returns the tensors of the processor for one sample, and labels."""
        encoded = self.together([sample])
        row = {key: value for key, value in encoded.items() if isinstance(value, torch.Tensor)}
        num_answer_tokens = len(sample.answer.split())  # a word is a token
        labels = row['input_ids'].clone()
        first_answer = labels.shape[1] - num_answer_tokens
        labels[:, :first_answer] = -100
        row['labels'] = labels
        return row

    def together(self, samples: Sequence[Sample], *, padding_side: str = 'right') -> dict[str, Any]:
        """Returns the batch of the processor for several samples, all with images or all without."""
        # The processor of InternVL ignores the option. The one of Mllama drops it up to transformers 4.
        self.tokenizer.padding_side = padding_side
        options: dict[str, Any] = {'return_tensors': 'pt'}
        if len(samples) > 1:
            options['padding'] = True
            options['padding_side'] = padding_side
        media = self._media(samples)
        if self.family.suffix:
            return self._with_suffixes(samples, media, options)
        texts = [f'{self._text(sample)} {sample.answer}' for sample in samples]
        encoded = self.processor(text=texts, **media, **options)
        return dict(encoded)

    def _with_suffixes(
        self,
        samples: Sequence[Sample],
        media: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns the batch of a processor that takes the answers as an argument."""
        questions = [self._text(sample) for sample in samples]
        answers = [sample.answer for sample in samples]
        if media:
            encoded = self.processor(text=questions, suffix=answers, **media, **options)
        else:
            ended_answers = [f'{answer}</s>' for answer in answers]
            encoded = self.tokenizer(text=questions, text_pair=ended_answers, return_token_type_ids=True, **options)
        return dict(encoded)

    def _text(self, sample: Sample) -> str:
        texts = []
        for piece in sample.pieces:
            if isinstance(piece, str):
                texts.append(piece)
            else:
                modality, _ = piece
                texts.append(self.family.texts[modality])
        return ' '.join(texts)

    def _media(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Returns the media of samples as arguments of the processor."""
        arguments: dict[str, Any] = {}
        for modality, argument in ARGUMENTS.items():
            media_of_samples = [sample.media(modality) for sample in samples]
            all_media = list(chain.from_iterable(media_of_samples))
            if not all_media:
                continue
            if modality == 'image' and self.family.nested_images:
                arguments[argument] = media_of_samples
            else:
                arguments[argument] = all_media
        if self.family.video_metadata and 'videos' in arguments:
            metadata = [_one_frame_a_second(frames) for frames in arguments['videos']]
            arguments['videos_kwargs'] = {'video_metadata': metadata, 'do_sample_frames': False}
        return arguments


def _one_frame_a_second(frames: Sequence[Any]) -> dict[str, Any]:
    """Returns what a processor of videos wants to know about these frames."""
    num_frames = len(frames)
    return {
        'total_num_frames': num_frames,
        'fps': 1.0,
        'frames_indices': list(range(num_frames)),
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model and one-row batches for it.

    Args:
        name: Key in :data:`FAMILIES` or :data:`MEDIA`.
        model: The model.
        encode: Makes a row of a sample.
        samples: The samples of the rows.
        rows: The rows.
        truth: How many media of each modality each row has.
        kinds: The modalities of each row: ``'image'``, ``'image&video'``, ..., or ``'none'``.
    """

    name: str
    model: PreTrainedModel
    encode: SampleEncoder
    samples: list[Sample]
    rows: list[dict[str, Any]]
    truth: list[dict[str, int]]
    kinds: list[str]

    @property
    def processor(self) -> Any:
        """The processor that made the rows."""
        return self.encode.processor

    @property
    def pad_token_id(self) -> int:
        """The id of the padding token."""
        return self.encode.tokenizer.pad_token_id

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    def loss(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the model's own mean loss. Drops entries that its forward does not take, as HuggingFaceModel does."""
        arguments = inspect.signature(self.model.forward).parameters
        inputs = {key: value for key, value in batch.items() if key in arguments}
        return self.model(**inputs).loss

    def loss_sum(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Returns the sum of the model's loss over its labels. It does not depend on how rows are grouped."""
        next_tokens = batch['labels'][:, 1:]
        num_labels = (next_tokens != -100).sum()
        return self.loss(batch) * num_labels


class _Drawing:
    """Draws words and media from a seed.

    Args:
        seed: The seed.
        frames: Numbers of frames that a video may have.
    """

    def __init__(self, seed: int, frames: Sequence[int] = ()) -> None:
        self.rng = random.Random(seed)
        self.frames = frames
        self.num_images = 0

    def samples(self, plan: Plan) -> list[Sample]:
        """Returns a sample for each row of a plan."""
        samples = []
        for *question, num_answer_words in plan:
            pieces: list[Any] = []
            for piece in question:
                if isinstance(piece, int):
                    pieces.append(self._words(piece))
                else:
                    pieces.append((piece, self._media(piece)))
            answer = self._words(num_answer_words)
            samples.append(Sample(pieces=pieces, answer=answer))
        return samples

    def _words(self, count: int) -> str:
        words = [self.rng.choice(WORDS) for _ in range(count)]
        return ' '.join(words)

    def _media(self, modality: str) -> Any:
        """Returns an image, the samples of a sound, or the frames of a video."""
        if modality == 'image':
            return self._image()
        noise = np.random.default_rng(self.rng.randrange(1000))
        if modality == 'audio':
            return self._sound(noise)
        num_frames = self.rng.choice(self.frames)
        return noise.integers(0, 255, (num_frames, IMAGE, IMAGE, 3), dtype=np.uint8)

    def _image(self) -> Image.Image:
        size_index = self.num_images % len(SIZES)
        width, height = SIZES[size_index]
        self.num_images += 1
        pixels = self.rng.randbytes(3 * width * height)
        return Image.frombytes('RGB', (width, height), pixels)

    def _sound(self, noise: np.random.Generator) -> np.ndarray:
        """Returns another tone each time, because all noise sounds the same to a small encoder."""
        num_samples = self.rng.randrange(2000, 9000)
        pitch = self.rng.randrange(200, 7000)
        seconds = np.arange(num_samples) / 16000
        tone = np.sin(2 * np.pi * pitch * seconds)
        sound = tone + 0.1 * noise.standard_normal(num_samples)
        return sound.astype(np.float32)


def ragged_samples(*, seed: int) -> list[Sample]:
    """Returns six samples with words and images."""
    return _Drawing(seed).samples(IMAGE_ROWS)


LLAVA = {'image': '<image>', 'video': '<video>'}
QWEN = {
    'image': '<|vision_start|><|image_pad|><|vision_end|>',
    'video': '<|vision_start|><|video_pad|><|vision_end|>',
}
OMNI = {
    'image': '<|vision_bos|><|IMAGE|><|vision_eos|>',
    'video': '<|vision_bos|><|VIDEO|><|vision_eos|>',
    'audio': '<|audio_bos|><|AUDIO|><|audio_eos|>',
}


_FAMILIES: dict[str, _Family] = {
    'llama': _Family(texts={}),
    'llava': _Family(texts=LLAVA),
    'llava_next': _Family(texts=LLAVA),
    'llava_onevision': _Family(texts=LLAVA, nested_images=True, plan=VIDEO_ROWS, frames=(3,)),
    'qwen2_vl': _Family(texts=QWEN, plan=VIDEO_ROWS, frames=(2, 4, 6)),
    'qwen2_5_vl': _Family(texts=QWEN, plan=VIDEO_ROWS, frames=(2, 4, 6)),
    'idefics3': _Family(texts=LLAVA, nested_images=True),
    'smolvlm': _Family(texts=LLAVA, nested_images=True),
    'paligemma': _Family(texts=LLAVA, nested_images=True, suffix=True),
    'gemma3': _Family(texts={'image': '<start_of_image>'}, nested_images=True),
    'mllama': _Family(texts={'image': '<|image|>'}, nested_images=True),
    'internvl': _Family(texts={'image': '<IMG_CONTEXT>', 'video': '<video>'}, plan=VIDEO_ROWS, frames=(3,)),
    # The processor writes the tokens around each frame of a video.
    'qwen3_vl': _Family(texts={**QWEN, 'video': '<|video_pad|>'}, plan=VIDEO_ROWS, frames=(2, 4, 6)),
    'qwen2_5_omni': _Family(texts=OMNI, model_type='qwen2_5_omni_thinker', plan=OMNI_ROWS, frames=(2, 4, 6)),
    'qwen2_audio': _Family(texts={'audio': '<|audio_bos|><|AUDIO|><|audio_eos|>'}, plan=AUDIO_ROWS),
    'llava_next_video': _Family(texts=LLAVA, plan=VIDEO_ROWS, frames=(3,)),
    'video_llava': _Family(texts=LLAVA, plan=VIDEO_ROWS, frames=(2,)),
    'mistral3': _Family(texts={'image': '[IMG]'}, plan=IMAGE_ROWS),
    'llava_pixtral': _Family(
        texts={'image': '[IMG]'},
        model_type='llava',
        settings={
            'vision_config': 'PixtralVisionConfig',
            'vision_config.image_size': 2 * IMAGE,
            'vision_feature_select_strategy': 'full',
        },
        plan=IMAGE_ROWS,
    ),
    'smolvlm_video': _Family(
        texts=LLAVA,
        video_metadata=True,
        model_type='smolvlm',
        plan=SMOLVLM_ROWS,
        frames=(2, 3),
    ),
}


def _case(name: str, build: Callable[[str], Case]) -> Case:
    """Returns a copy of a case, because a test may train the model and change the rows."""
    return copy.deepcopy(build(name))


@functools.cache
def _image_case(name: str) -> Case:
    has_images = 'image' in _FAMILIES[name].texts
    plan = IMAGE_ROWS if has_images else TEXT_ROWS
    case = _new_case(name, plan)
    for index, row in enumerate(case.rows):
        num_images = case.truth[index].get('image', 0)
        row['sample_ids'] = [f'sample-{index}']
        row['num_images'] = [num_images]
    freeze_unreached(case)
    return case


@functools.cache
def _media_case(name: str) -> Case:
    case = _new_case(name, _FAMILIES[name].plan)
    if name == 'internvl':  # each tile of an image and each frame of a video counts as an image
        for index, row in enumerate(case.rows):
            case.truth[index] = {'image': len(row.get('pixel_values', ()))}
    if name == 'smolvlm_video':  # its processor takes no other template for videos
        from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

        case.processor.chat_template = DEFAULT_CHAT_TEMPLATE
    else:
        case.processor.chat_template = _template(_FAMILIES[name].texts)
    return case


def _new_case(name: str, plan: Plan) -> Case:
    family = _FAMILIES[name]
    encode = SampleEncoder(family_processors.PROCESSORS[name](), family)
    config = tiny_config(family.model_type or name, family.settings, tokenizer=encode.tokenizer)
    samples = _Drawing(0, family.frames).samples(plan)
    pieces_of_plan = set(chain.from_iterable(plan))
    modalities = [modality for modality in family.texts if modality in pieces_of_plan]
    rows = []
    truth = []
    for sample in samples:
        rows.append(encode(sample))
        truth.append({modality: len(sample.media(modality)) for modality in modalities})
    return Case(
        name=name,
        model=float32_model(config),
        encode=encode,
        samples=samples,
        rows=rows,
        truth=truth,
        kinds=[_kinds_of(counts) for counts in truth],
    )


def _kinds_of(counts: Mapping[str, int]) -> str:
    modalities = [modality for modality in ('image', 'video', 'audio') if counts.get(modality)]
    return '&'.join(modalities) or 'none'


def _template(texts: Mapping[str, str]) -> str:
    """Returns a chat template that writes the text of each medium."""
    branches = ''
    for modality, text in texts.items():
        branches += f"{{% elif part['type'] == '{modality}' %}}{text} "
    return (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        f"{{{{ part['text'] }}}} {branches}{{% endif %}}{{% endfor %}}</s> {{% endfor %}}"
    )


def freeze_unreached(case: Case) -> None:
    """Freezes parameters without a gradient, such as a last norm of a vision encoder. DDP would wait for them."""
    for row in case.rows:
        case.loss(row).backward()
    for parameter in case.model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


IMAGE_FAMILIES = [
    'llava',
    'llava_next',
    'llava_onevision',
    'qwen2_vl',
    'qwen2_5_vl',
    'idefics3',
    'smolvlm',
    'paligemma',
    'gemma3',
    'mllama',
    'internvl',
]
FAMILIES: dict[str, Callable[[], Case]] = {
    name: functools.partial(_case, name, _image_case) for name in ['llama', *IMAGE_FAMILIES]
}
MEDIA: dict[str, Callable[[], Case]] = {
    name: functools.partial(_case, name, _media_case)
    for name, family in _FAMILIES.items()
    if family.plan and name != 'smolvlm_video'
}
SLOT_MEDIA: dict[str, Callable[[], Case]] = {}
"""Families whose media have a slot dimension. Empty without num2words, which the processor of SmolVLM needs."""
if importlib.util.find_spec('num2words') is not None:
    SLOT_MEDIA['smolvlm_video'] = functools.partial(_case, 'smolvlm_video', _media_case)
