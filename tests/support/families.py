# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny real models and real batches of the vision-language families: nothing is downloaded, nothing is mocked.

case = FAMILIES['qwen2_vl']()
case.model                  # Qwen2VLForConditionalGeneration, float32, two layers, hidden size 16
case.rows                   # what its own processor returns for six samples: 0, 1, 1, 2, 0 and 3 images
case.loss_sum(batch)        # the same for a batch as for its rows one by one
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedModel

from tests.support import family_models, family_processors
from tests.support.family_media import MediaCase
from tests.support.sample_encoder import WORDS, Sample, SampleEncoder

__all__ = ['FAMILIES', 'IMAGE_FAMILIES', 'FamilyCase', 'freeze_unreached', 'ragged_samples']

# (sizes of the images, words before and between the images, words of the answer). Unequal in everything; row 5 has two
# images without a word between them.
SAMPLES: tuple[tuple[tuple[tuple[int, int], ...], int, int], ...] = (
    ((), 4, 3),
    (((16, 16),), 3, 1),
    (((40, 16),), 5, 9),
    (((16, 32), (24, 24)), 2, 2),
    ((), 12, 15),
    (((16, 16), (32, 16), (16, 48)), 3, 4),
)


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A tiny model and one-row batches for it.

    Args:
        name: Key in :data:`FAMILIES`.
        model: Hugging Face model, training mode, no dropout, no cache. Parameters that no row reaches are frozen.
        rows: One-row batches with ``labels``, ``sample_ids`` and ``num_images``, as the processor returns them.
        pad_token_id: Id to pad ``input_ids`` with.
        encode: Made the rows.
        samples: What the rows were made of.
    """

    name: str
    model: PreTrainedModel
    rows: list[dict[str, Any]]
    pad_token_id: int
    encode: SampleEncoder
    samples: list[Sample]

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
        counted = batch['labels'][:, 1:] != -100
        return self.loss(batch) * counted.sum()


def ragged_samples(*, with_images: bool, seed: int = 0) -> list[Sample]:
    """Words and images of :data:`SAMPLES`, drawn from ``seed``."""
    rng = random.Random(seed)
    samples = []
    for index, (sizes, num_words, num_answer_words) in enumerate(SAMPLES):
        images = [_image(rng, width, height) for width, height in (sizes if with_images else ())]
        gaps = [[_word(rng) for _ in range(num_words)]]
        gaps += [[] if index == 5 and gap == 0 else [_word(rng)] for gap in range(len(images))]
        samples.append(Sample(gaps=gaps, answer=[_word(rng) for _ in range(num_answer_words)], images=images))
    return samples


def _rows(encode: SampleEncoder, samples: list[Sample]) -> list[dict[str, Any]]:
    return [
        {**encode(sample), 'sample_ids': [f'sample-{index}'], 'num_images': [len(sample.images)]}
        for index, sample in enumerate(samples)
    ]


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def _image(rng: random.Random, width: int, height: int) -> Image.Image:
    return Image.frombytes('RGB', (width, height), rng.randbytes(3 * width * height))


def _build(name: str) -> FamilyCase:
    encode = family_processors.ENCODERS[name]()
    model = family_models.MODELS[name](encode)
    samples = ragged_samples(with_images=encode.takes_images)
    case = FamilyCase(
        name=name,
        model=model,
        rows=_rows(encode, samples),
        pad_token_id=encode.pad_token_id,
        encode=encode,
        samples=samples,
    )
    freeze_unreached(case)
    return case


def freeze_unreached(case: FamilyCase | MediaCase) -> None:
    """DDP waits for every parameter that wants a gradient; towers have some that no loss reaches (a last norm)."""
    for row in case.rows:
        case.loss(row).backward()
    for parameter in case.model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


def _builder(name: str) -> Callable[[], FamilyCase]:
    return lambda: _build(name)


FAMILIES: dict[str, Callable[[], FamilyCase]] = {
    name: _builder(name) for name in family_models.MODELS if name in family_processors.ENCODERS
}
IMAGE_FAMILIES = [name for name in FAMILIES if name != 'llama']
