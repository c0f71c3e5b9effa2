# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a model in training answers to samples of the eval set, by real generation."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from composer.utils import dist
from PIL import Image

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.compat import inner_model
from composer_tokacc.data import image_token_ids
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.models import tokenizer_of
from composer_tokacc.programs.registry import without
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import source_of

log = logging.getLogger(__name__)

LARGEST = 224
"""Side of an image of a file on the page, in pixels."""


@dataclass(kw_only=True)
class Answer:
    """One sample of the eval set and what the model made of it."""

    sample_id: str
    question: str
    expected: str
    generated: str
    images: list[Any] = field(default_factory=list, repr=False)
    """Arrays of shape (height, width, 3) in [0, 1], as the model saw them, or as they lie in the file; perhaps none."""

    @property
    def is_right(self) -> bool:
        """Whether the generated text is the expected one."""
        return self.generated == self.expected

    def as_json(self) -> dict[str, Any]:
        """Returns it without images."""
        return without(vars(self), 'images')


class Answers(Callback):
    """Lets the model answer samples after each evaluation, on the first rank; ``answers.jsonl`` has all of them."""

    def __init__(self, dataset: Any, processor: Any, *, folder: str, num_samples: int, max_new_tokens: int) -> None:
        self.dataset, self.processor, self.folder = dataset, processor, folder
        self.options = {'num_samples': num_samples, 'max_new_tokens': max_new_tokens}
        self.last: list[Answer] = []
        self._is_able = True

    def eval_end(self, state: State, logger: Logger) -> None:
        """Answers."""
        if dist.get_global_rank() or not self._is_able:
            return
        try:
            model = cast(HuggingFaceModel, inner_model(state.model))
            self.last = answer_eval_samples(model, self.dataset, self.processor, **self.options)
        except Exception as error:  # whatever a model lacks for generation is no reason not to train
            self._is_able = False
            log.warning('Nothing is answered at evaluations: %s: %s', type(error).__name__, error)
            return
        path = Path(self.folder.format(run_name=state.run_name)) / 'answers.jsonl'
        path.parent.mkdir(parents=True, exist_ok=True)
        step = state.timestamp.batch.value
        with path.open('a', encoding='utf-8') as file:
            file.writelines(json.dumps({'step': step, **answer.as_json()}) + '\n' for answer in self.last)


def answers_of(config: TrainConfig, parts: RunParts) -> Answers | None:
    """Returns what ``report.answers`` asks for; nothing without an eval set, or of a sharded model."""
    count, most = config.report.get('answers', 4), config.report.get('answer_tokens', 64)
    if parts.eval_dataset is None or not count or config.is_sharded:  # no rank can generate alone
        return None
    dataset, folder = source_of(config).by_index(parts.eval_dataset), config.report['folder']
    return Answers(dataset, parts.processor, folder=folder, num_samples=count, max_new_tokens=most)


def answer_eval_samples(
    model: HuggingFaceModel, dataset: Any, processor: Any, *, num_samples: int, max_new_tokens: int = 64
) -> list[Answer]:
    """Lets a whole model answer the last turn of evenly spaced samples, greedily; see :class:`Answers`."""
    if num_samples < 1:
        return []
    was_training = model.training
    model.eval()
    step = max(len(dataset) // num_samples, 1)
    indices = range(0, min(step * num_samples, len(dataset)), step)
    with torch.no_grad():
        answers = [_answer(model, dataset, index, processor, max_new_tokens) for index in indices]
    model.train(was_training)
    return answers


def _answer(model: HuggingFaceModel, dataset: Any, index: int, processor: Any, max_new_tokens: int) -> Answer:
    sample, tokenizer, inner = dataset[index], tokenizer_of(processor), cast(Any, model.model)
    start, end = _last_answer(sample['labels'][0].tolist())
    length = sample['input_ids'].shape[1]
    inputs: dict[str, Any] = {}
    for key, value in sample.items():
        if key in model.model_forward_args and key != 'labels':
            is_sequence = value.dim() == 2 and value.shape[1] == length
            inputs[key] = (value[:, :start] if is_sequence else value).to(inner.device)
    media = image_token_ids(processor)
    generated = inner.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=[*media] or None,  # an untrained model may say one, which would ask for an image more
    )  # fmt: skip
    question = [token for token in sample['input_ids'][0, :start].tolist() if token not in media]
    return Answer(
        sample_id=str(sample.get('sample_ids', [index])[0]),
        question=tokenizer.decode(question, skip_special_tokens=True).strip(),
        expected=tokenizer.decode(sample['input_ids'][0, start:end], skip_special_tokens=True).strip(),
        generated=tokenizer.decode(generated[0, start:], skip_special_tokens=True).strip(),
        images=_images(sample, processor) or _images_of_file(dataset, index),
    )


def _last_answer(labels: Sequence[int]) -> tuple[int, int]:
    """Start and end of the last run of labels; all images of a conversation stand before it."""
    end = max(position for position, label in enumerate(labels) if label != IGNORE_INDEX) + 1
    others = [position for position, label in enumerate(labels[:end]) if label == IGNORE_INDEX]
    return max(others, default=-1) + 1, end


def _images(sample: dict[str, Any], processor: Any) -> list[Any]:
    """Returns images as the model sees them, where that is an image."""
    pixels = sample.get('pixel_values')
    image_processor = getattr(processor, 'image_processor', None)
    if pixels is None or pixels.dim() != 4 or image_processor is None:
        return []
    mean, std = (torch.tensor(getattr(image_processor, name)).view(3, 1, 1) for name in ('image_mean', 'image_std'))
    return [(image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy() for image in pixels.float()]


def _images_of_file(dataset: Any, index: int) -> list[Any]:
    """Returns images as they lie in the files of a :class:`.LlavaDataset`, of a video the first frame; made smaller."""
    if not hasattr(dataset, 'decoded'):
        return []
    media = dataset.decoded(index)
    first_frames = [Image.fromarray(video.frames[0].permute(1, 2, 0).numpy()) for video in media.get('video', [])]
    images = [*media.get('image', []), *first_frames]
    for image in images:
        image.thumbnail((LARGEST, LARGEST))
    return [np.asarray(image) / 255 for image in images]
