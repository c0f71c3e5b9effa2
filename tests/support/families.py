# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny real models and real batches of the vision-language families: nothing is downloaded, nothing is mocked.

case = FAMILIES['qwen2_vl']()
case.model                  # Qwen2VLForConditionalGeneration, float32, two layers, hidden size 16
case.rows                   # what its own processor returns for six samples: 0, 1, 1, 2, 0 and 3 images
case.loss_sum(batch)        # the same for a batch as for its rows one by one
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from tests.support import family_models, family_processors
from tests.support.family_media import Case
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
class FamilyCase(Case):
    """Rows with ``labels``, ``sample_ids`` and ``num_images``, as the processor returns them.

    Args:
        name: Key in :data:`FAMILIES`.
        encode: Made the rows.
        samples: What the rows were made of.
    """

    name: str
    encode: SampleEncoder
    samples: list[Sample]


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


def _case(name: str) -> FamilyCase:
    """A case of a test's own: it may train the model and change the rows."""
    case = _build(name)
    return replace(case, model=copy.deepcopy(case.model), rows=copy.deepcopy(case.rows))


@functools.cache
def _build(name: str) -> FamilyCase:
    encode = family_processors.ENCODERS[name]()
    samples = ragged_samples(with_images=encode.takes_images)
    case = FamilyCase(
        name=name,
        model=family_models.MODELS[name](encode),
        rows=_rows(encode, samples),
        pad_token_id=encode.pad_token_id,
        encode=encode,
        samples=samples,
    )
    freeze_unreached(case)
    return case


def freeze_unreached(case: Case) -> None:
    """DDP waits for every parameter that wants a gradient; towers have some that no loss reaches (a last norm)."""
    for row in case.rows:
        case.loss(row).backward()
    for parameter in case.model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


FAMILIES: dict[str, Callable[[], FamilyCase]] = {
    name: functools.partial(_case, name) for name in family_models.MODELS if name in family_processors.ENCODERS
}
IMAGE_FAMILIES = [name for name in FAMILIES if name != 'llama']
