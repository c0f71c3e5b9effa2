# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds length tables from image headers, and by reading every sample. Compares their times and their lengths.

    python -m benchmarks.lengths [--images 5000]

Each conversation has one JPEG with sides of 200 to 1,600 pixels. In the first set the images have 144 sizes. The second
set (`every size another`) has a fifth as many images. No two of them have the same size, so the processor must be
called for every image. The processors have the settings of the checkpoints of two families, but a small tokenizer. All
runs in one process, with one thread of torch. Times are processor times (key `processor`). The time with headers is the
median of three rounds. Writes results/lengths.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.machine import machine
from benchmarks.record import Row, parser_of, write
from composer_tokacc.data import LlavaDataset
from composer_tokacc.data.lengths import TABLE_COLUMNS, LengthTable, build_length_table
from composer_tokacc.data.processor import CHAT_TEMPLATE, train_tokenizer

ROUNDS = 3
SIDES = (200, 256, 336, 375, 480, 512, 640, 768, 800, 1024, 1280, 1600)
QUESTIONS = (
    'What is shown here?',
    'Describe the picture in detail.',
    'How many objects are there, and which?',
)
WORDS = 'a the red small house stands lies beside above table street dog car'


def tokenizer(*special: str) -> Any:
    """Returns a byte-level tokenizer with the special tokens of a family."""
    trained = train_tokenizer([*QUESTIONS, WORDS] * 8, model_max_length=8192)
    trained.add_special_tokens({'additional_special_tokens': list(special)})
    return trained


def llava() -> Any:
    """Returns a processor with the settings of llava-hf/llava-1.5-7b-hf."""
    crop_size = {'height': 336, 'width': 336}
    images = transformers.CLIPImageProcessor(size={'shortest_edge': 336}, crop_size=crop_size)
    return transformers.LlavaProcessor(
        images,
        tokenizer(),
        chat_template=CHAT_TEMPLATE,
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy='default',
    )


def qwen2_5_vl() -> Any:
    """Returns a processor as of Qwen/Qwen2.5-VL-7B-Instruct, with a usual limit of 1,280 tokens an image."""
    return transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
        tokenizer=tokenizer('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>'),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE.replace('<image>', '<|vision_start|><|image_pad|><|vision_end|>'),
    )


FAMILIES = {'LLaVA-1.5': llava, 'Qwen2.5-VL': qwen2_5_vl}


def unequal_sizes(num_images: int) -> np.ndarray:
    """Returns widths and heights, (N, 2). No two images have the same size."""
    shortest, longest = SIDES[0], SIDES[-1]
    num_sides = longest - shortest + 1
    numbers = np.random.default_rng(0).choice(num_sides**2, num_images, replace=False)
    return shortest + np.stack(np.divmod(numbers, num_sides), axis=1)


def write_data(folder: Path, sizes: np.ndarray) -> Path:
    """Writes a LLaVA JSON with images of smooth noise."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    records = []
    for number, (width, height) in enumerate(sizes.tolist()):
        noise = rng.integers(0, 256, (height // 20, width // 20, 3), dtype=np.uint8)
        small_image = Image.fromarray(noise)
        image = small_image.resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / f'{number}.jpg', quality=85)
        num_words = int(np.clip(rng.lognormal(3.5, 0.8), 2, 400))
        answer = ' '.join(rng.choice(WORDS.split(), num_words))
        conversation = [
            {'from': 'human', 'value': f'<image>\n{rng.choice(QUESTIONS)}'},
            {'from': 'gpt', 'value': answer},
        ]
        records.append({'id': str(number), 'image': f'{number}.jpg', 'conversations': conversation})
    (folder / 'data.json').write_text(json.dumps(records))
    return folder / 'data.json'


def timed(dataset: LlavaDataset, processor: Any) -> tuple[LengthTable, float]:
    """Returns the length table of a dataset, and the seconds of processor time to build it."""
    start = time.process_time()
    table = build_length_table(dataset, processor, num_workers=0)
    return table, time.process_time() - start


def compare(path: Path, processor: Any) -> Row:
    """Returns the times of both ways to measure the lengths, and which columns of their tables are equal."""
    dataset = LlavaDataset(path, processor)
    # The first sample pays for work that is done once.
    _ = dataset[0]
    # Reading headers takes little time, so other work on the machine disturbs it more. It is measured several times.
    seconds_of_rounds = []
    for _ in range(ROUNDS):
        from_headers, seconds = timed(dataset, processor)
        seconds_of_rounds.append(seconds)
    headers_seconds = statistics.median(seconds_of_rounds)
    # The package reads all samples of a dataset that has at most this many.
    with mock.patch('composer_tokacc.data.lengths.MAX_SAMPLES_TO_READ', len(dataset)):
        from_samples, reading_seconds = timed(dataset, processor)
    equal = {}
    for column in TABLE_COLUMNS:
        is_equal = getattr(from_headers, column) == getattr(from_samples, column)
        equal[column] = bool(is_equal.all())
    return {
        'headers_seconds': {'processor': round(headers_seconds, 2)},
        'reading_seconds': {'processor': round(reading_seconds, 2)},
        'times_faster': {'processor': round(reading_seconds / headers_seconds, 1)},
        'equal': equal,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--images', type=int, default=5000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: Row = {'machine': machine()}
    # Width and height of each image.
    sets = {
        f'{len(SIDES) ** 2} sizes': np.random.default_rng(0).choice(SIDES, (arguments.images, 2)),
        'every size another': unequal_sizes(arguments.images // 5),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in sets.items():
            path = write_data(Path(folder) / name.replace(' ', '_'), sizes)
            results[name] = {'images': len(sizes)}
            for family, build_processor in FAMILIES.items():
                results[name][family] = compare(path, build_processor())
                print(f'{len(sizes)} images, {name}, {family}: {results[name][family]}', flush=True)
    write(arguments.results / 'lengths.json', results)


if __name__ == '__main__':
    main()
