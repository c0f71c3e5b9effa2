# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A small LLaVA folder: conversations of unequal length with no, one or several images, some of them noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WORDS = ('what', 'which', 'colour', 'is', 'the', 'left', 'right', 'square', 'and', 'of', 'red', 'green', 'blue', 'one')


def write_llava_folder(folder: Path, num_samples: int, *, seed: int = 0) -> Path:
    """Writes ``images/`` and ``data.json``, whose path it returns. Sample ``i`` has the id ``s<i>``."""
    rng = np.random.default_rng(seed)
    (folder / 'images').mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for index in range(num_samples):
        names = [f'{index}_{k}.{("png", "jpg")[k % 2]}' for k in range((1, 0, 2, 1)[index % 4])]
        for name in names:
            pixels = rng.integers(0, 255, (int(rng.integers(12, 40)), 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / 'images' / name)
        turns = []
        for turn in range(1 + index % 2):
            question = '<image>\n' * len(names) * (turn == 0) + _words(rng, 4)
            turns += [{'from': 'human', 'value': question}, {'from': 'gpt', 'value': _words(rng, 60)}]
        record: dict[str, Any] = {'id': f's{index}', 'conversations': turns}
        if names:
            record['image'] = names[0] if len(names) == 1 else names
        records.append(record)
    path = folder / 'data.json'
    path.write_text(json.dumps(records))
    return path


def _words(rng: np.random.Generator, most: int) -> str:
    number = 1 + min(int(rng.lognormal(1.5, 0.8)), most)
    return ' '.join(rng.choice(WORDS, number)) + '.'
