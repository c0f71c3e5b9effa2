# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A small LLaVA folder: conversations of unequal length about no image, one image or two images of noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORDS = ('what', 'which', 'colour', 'is', 'the', 'left', 'right', 'square', 'and', 'of', 'red', 'green', 'blue', 'one')
NUM_IMAGES = (1, 0, 2, 1)
"""The number of images of samples 0, 1, 2 and 3, then again from the start."""


def write_llava_folder(folder: Path, num_samples: int, *, seed: int = 0) -> Path:
    """Writes ``images/`` and ``data.json``. Returns the path of the latter. Sample ``i`` has the id ``s<i>``."""
    rng = np.random.default_rng(seed)
    image_folder = folder / 'images'
    image_folder.mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for index in range(num_samples):
        num_images = NUM_IMAGES[index % len(NUM_IMAGES)]
        names = [f'{index}_0.png', f'{index}_1.jpg'][:num_images]
        for name in names:
            height = int(rng.integers(12, 40))
            pixels = rng.integers(0, 255, (height, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(image_folder / name)
        turns = []
        prefix = '<image>\n' * num_images
        num_questions = 1 + index % 2
        for _ in range(num_questions):
            question = prefix + _words(rng, 4)
            answer = _words(rng, 60)
            turns.append({'from': 'human', 'value': question})
            turns.append({'from': 'gpt', 'value': answer})
            prefix = ''  # only the first question shows the images
        record: dict[str, Any] = {'id': f's{index}', 'conversations': turns}
        if num_images == 1:
            record['image'] = names[0]
        elif names:
            record['image'] = names
        records.append(record)
    path = folder / 'data.json'
    path.write_text(json.dumps(records))
    return path


def _words(rng: np.random.Generator, most: int) -> str:
    """Returns a sentence of 1 to ``most + 1`` words."""
    drawn = int(rng.lognormal(1.5, 0.8))
    num_words = 1 + min(drawn, most)
    return ' '.join(rng.choice(WORDS, num_words)) + '.'
