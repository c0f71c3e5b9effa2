# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the trained model answers to held-out samples, by real generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from composer.models import HuggingFaceModel

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.models import tokenizer_of

__all__ = ['Answer', 'answer_held_out']


@dataclass(kw_only=True)
class Answer:
    """One held-out sample and what the model made of it."""

    sample_id: str
    question: str
    expected: str
    generated: str
    images: list[Any] = field(default_factory=list, repr=False)
    """Arrays of shape (height, width, 3) in [0, 1], as the model saw them; empty where they are no plain images."""

    @property
    def is_right(self) -> bool:
        """Whether the generated text is the expected one."""
        return self.generated == self.expected


def answer_held_out(
    model: HuggingFaceModel,
    dataset: Any,
    processor: Any,
    *,
    num_samples: int,
    max_new_tokens: int = 64,
) -> list[Answer]:
    """Lets the model answer the last turn of evenly spaced samples, greedily, one by one.

    Args:
        model: trained model, not sharded.
        dataset: held-out dataset of processor outputs with ``labels``.
        processor: processor or tokenizer of the run.
        num_samples: how many samples, at most the dataset.
        max_new_tokens: longest answer.
    """
    if num_samples < 1:
        return []
    was_training = model.training
    model.eval()
    step = max(len(dataset) // num_samples, 1)
    indices = range(0, min(step * num_samples, len(dataset)), step)
    with torch.no_grad():
        answers = [_answer(model, dataset[index], processor, max_new_tokens) for index in indices]
    model.train(was_training)
    return answers


def _answer(model: HuggingFaceModel, sample: dict[str, Any], processor: Any, max_new_tokens: int) -> Answer:
    tokenizer, inner = tokenizer_of(processor), cast(Any, model.model)
    start, end = _last_answer(sample['labels'][0].tolist())
    length = sample['input_ids'].shape[1]
    inputs: dict[str, Any] = {}
    for key, value in sample.items():
        if key in model.model_forward_args and key != 'labels':
            is_sequence = value.dim() == 2 and value.shape[1] == length
            inputs[key] = (value[:, :start] if is_sequence else value).to(inner.device)
    generated = inner.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    question = [token for token in sample['input_ids'][0, :start].tolist() if token != _image_token(model)]
    return Answer(
        sample_id=sample['sample_ids'][0],
        question=tokenizer.decode(question, skip_special_tokens=True).strip(),
        expected=tokenizer.decode(sample['input_ids'][0, start:end], skip_special_tokens=True).strip(),
        generated=tokenizer.decode(generated[0, start:], skip_special_tokens=True).strip(),
        images=_images(sample, processor),
    )


def _last_answer(labels: Sequence[int]) -> tuple[int, int]:
    """Start and end of the last run of labels; all images of a conversation stand before it."""
    end = max(position for position, label in enumerate(labels) if label != IGNORE_INDEX) + 1
    start = end
    while start > 0 and labels[start - 1] != IGNORE_INDEX:
        start -= 1
    return start, end


def _image_token(model: HuggingFaceModel) -> int | None:
    return BatchLayout.for_model(model).image_token_id


def _images(sample: dict[str, Any], processor: Any) -> list[Any]:
    pixels = sample.get('pixel_values')
    image_processor = getattr(processor, 'image_processor', None)
    if pixels is None or pixels.dim() != 4 or image_processor is None:
        return []
    mean, std = (torch.tensor(getattr(image_processor, name)).view(3, 1, 1) for name in ('image_mean', 'image_std'))
    return [(image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy() for image in pixels.float()]
