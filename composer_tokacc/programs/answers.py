# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Lets the model generate answers to samples of the eval set after each evaluation."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from composer.utils import dist, model_eval_mode
from PIL import Image

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.compat import inner_model
from composer_tokacc.data import image_token_ids
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.evaluated_weights import evaluated_weights
from composer_tokacc.programs.host_types import Processor, Row, SampleDataset
from composer_tokacc.programs.metrics_file import begin_file, keep_lines
from composer_tokacc.programs.models import tokenizer_of
from composer_tokacc.programs.schema import TrainConfig, without

log = logging.getLogger(__name__)

THUMBNAIL_SIDE = 224
"""Longest side of a thumbnail in ``report.html``, in pixels."""


@dataclass(kw_only=True)
class Answer:
    """One sample of the eval set and the model's answer."""

    sample_id: str
    question: str
    expected: str
    generated: str
    images: list[Image.Image] = field(default_factory=list, repr=False)
    """Thumbnails of the images, and of the first frame of each video."""

    @property
    def is_right(self) -> bool:
        """Whether the generated text is the expected one."""
        return self.generated == self.expected

    def as_json(self) -> dict[str, Any]:
        """Returns the values for a line of ``answers.jsonl``. The images are only in ``report.html``."""
        return without(vars(self), 'images')


@dataclass(eq=False)
class Answers(Callback):
    """Lets the model answer samples after each evaluation, on the first rank. Writes them to ``answers.jsonl``."""

    dataset: SampleDataset
    """The eval set."""
    processor: Processor
    folder: str
    """Folder of the file. May contain ``{run_name}``."""
    num_samples: int
    """Samples to answer at each evaluation."""
    max_new_tokens: int
    """Most tokens of an answer."""
    last: list[Answer] = field(default_factory=list)
    """The answers of the last evaluation."""
    can_generate: bool = True
    """Whether the model can generate. False after it has failed once."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Removes the answers of another run from the file, and those after the step that this run resumes from."""
        if dist.get_global_rank() != 0:
            return
        path = self._path(state)
        if path.exists():  # begin_file() would create it, even if no evaluation follows
            begin_file(path, step=state.timestamp.batch.value)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Lets the model answer, and appends its answers to the file. If that raises, warns, and never tries again."""
        if dist.get_global_rank() != 0 or not self.can_generate:
            return
        try:
            with evaluated_weights(state, logger):
                self.last = answer_eval_samples(
                    cast(HuggingFaceModel, inner_model(state.model)),
                    self.dataset,
                    self.processor,
                    num_samples=self.num_samples,
                    max_new_tokens=self.max_new_tokens,
                )
        except Exception as error:  # a model that cannot generate can still be trained
            self.can_generate = False
            log.warning('Nothing is answered at evaluations: %s: %s', type(error).__name__, error)
            return
        path = self._path(state)
        path.parent.mkdir(parents=True, exist_ok=True)
        step = state.timestamp.batch.value
        if path.exists():
            # The answers of this step are there already if a finished run was started again.
            keep_lines(path, until=step - 1)
        with path.open('a', encoding='utf-8') as file:
            for answer in self.last:
                file.write(json.dumps({'step': step, **answer.as_json()}) + '\n')

    def _path(self, state: State) -> Path:
        return Path(self.folder.format(run_name=state.run_name)) / 'answers.jsonl'


def answer_callback_of(config: TrainConfig, parts: RunParts) -> Answers | None:
    """Returns the callback for ``report.answers``; None if that is 0, without an eval set, or for a sharded model."""
    num_samples = config.report.get('answers', 4)
    source = parts.source
    # A rank of a sharded model cannot generate without the others.
    if source.eval_dataset is None or not num_samples or config.is_sharded:
        return None
    return Answers(
        source.samples_of_all_ranks(source.eval_dataset),
        source.processor,
        folder=config.report['folder'],
        num_samples=num_samples,
        max_new_tokens=config.report.get('answer_tokens', 64),
    )


def answer_eval_samples(
    model: HuggingFaceModel,
    dataset: SampleDataset,
    processor: Processor,
    *,
    num_samples: int,
    max_new_tokens: int = 64,
) -> list[Answer]:
    """Lets the model answer the last turn of evenly spaced samples, greedily. The model must not be sharded.

    Leaves out samples without labels, because they have no expected answer, samples whose first token has a label,
    because they have no question, and samples with media after the question.
    """
    if num_samples < 1:
        return []
    spacing = max(len(dataset) // num_samples, 1)
    answers = []
    with torch.no_grad(), model_eval_mode(model):
        for index in range(0, len(dataset), spacing)[:num_samples]:
            answer = _answer(model, dataset, index, processor, max_new_tokens)
            if answer is not None:
                answers.append(answer)
    return answers


def _answer(
    model: HuggingFaceModel,
    dataset: SampleDataset,
    index: int,
    processor: Processor,
    max_new_tokens: int,
) -> Answer | None:
    """Generates from the tokens before the last answer of a sample.

    Returns None, with a warning, for a sample that :func:`answer_eval_samples` leaves out.
    """
    sample = dataset[index]
    sample_id = str(sample.get('sample_ids', [index])[0])
    token_ids = sample['input_ids'][0].tolist()
    start, end = _last_answer(sample['labels'][0].tolist())
    placeholders = set(image_token_ids(processor))  # includes the placeholders of videos and audio
    question = token_ids[:start]
    # generate() gets the question, but the media of the whole sample. It refuses an empty question.
    has_media_after = not placeholders.isdisjoint(token_ids[start:])
    if not question or has_media_after:
        log.warning(
            'The model does not answer sample %s: no label, nothing before its answer, or media after it.', sample_id
        )
        return None
    tokenizer = tokenizer_of(processor)
    generated = _generate(
        model,
        _inputs_before(model, sample, start),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        # An untrained model may generate the placeholder of an image, and then ask for its pixels.
        suppress_tokens=list(placeholders) or None,
    )
    question_text = [token_id for token_id in question if token_id not in placeholders]

    def decoded(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True).strip()

    return Answer(
        sample_id=sample_id,
        question=decoded(question_text),
        expected=decoded(token_ids[start:end]),
        generated=decoded(generated),
        images=_thumbnails(dataset, index),
    )


def _inputs_before(model: HuggingFaceModel, sample: Row, start: int) -> dict[str, torch.Tensor]:
    """Returns the model's inputs for the tokens before position ``start``, with all media of the sample."""
    inputs = {}
    for key, value in sample.items():
        if key in model.model_forward_args and key != 'labels':
            has_value_per_token = value.shape == sample['input_ids'].shape
            inputs[key] = value[:, :start] if has_value_per_token else value
    return inputs


def _generate(model: HuggingFaceModel, inputs: dict[str, torch.Tensor], **options: Any) -> list[int]:
    """Returns the tokens that a model generates greedily after its inputs. ``options`` are arguments of `generate`."""
    inner: Any = model.model  # of Transformers
    inputs_on_device = {key: value.to(inner.device) for key, value in inputs.items()}
    # The first sequence is the best one, if the config of the model asks for several.
    token_ids = inner.generate(**inputs_on_device, do_sample=False, **options)[0]
    num_input_tokens = inputs['input_ids'].shape[1]
    return token_ids[num_input_tokens:].tolist()


def _last_answer(labels: Sequence[int]) -> tuple[int, int]:
    """Returns the start and the end (exclusive) of the last unbroken run of labels. Both are 0 if there is no label."""
    end = len(labels)
    while end > 0 and labels[end - 1] == IGNORE_INDEX:
        end -= 1
    start = end
    while start > 0 and labels[start - 1] != IGNORE_INDEX:
        start -= 1
    return start, end


def _thumbnails(dataset: Any, index: int) -> list[Image.Image]:
    """Returns small copies of a sample's images, and of the first frame of its videos.

    The list is empty if the dataset has no method ``decoded``. :class:`.LlavaDataset` has one.
    """
    if not hasattr(dataset, 'decoded'):
        return []
    media = dataset.decoded(index)
    images = list(media.get('image', []))
    for video in media.get('video', []):
        first_frame = video.frames[0].permute(1, 2, 0)  # of shape (height, width, colors)
        images.append(Image.fromarray(first_frame.numpy()))
    thumbnails = []
    for image in images:
        thumbnail = image.convert('RGB')  # always a copy, because the dataset may keep its images
        thumbnail.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        thumbnails.append(thumbnail)
    return thumbnails
