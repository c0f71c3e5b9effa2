# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds length tables from image headers, and by reading every sample. Compares their times and their lengths.

    python -m benchmarks.lengths [--images 5000] [--distinct 1000]

Each conversation has one JPEG with sides of 200 to 1,600 pixels. In the first set the images have 144 sizes. In the
second set (`every size another`) no two images have the same size, so that the processor is asked about every image.
The processors have the settings of two families' checkpoints, and a small tokenizer. One process, one thread of torch.
Measures clock time and processor time. The times with headers are medians of three rounds. Writes results/lengths.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.machine import machine
from benchmarks.record import parser_of, write
from composer_tokacc.data import LlavaDataset, lengths
from composer_tokacc.data.processor import train_tokenizer

ROUNDS = 3
SIDES = (200, 256, 336, 375, 480, 512, 640, 768, 800, 1024, 1280, 1600)
QUESTIONS = (
    'What is shown here?',
    'Describe the picture in detail.',
    'How many objects are there, and which?',
)
WORDS = 'a the red small house stands lies beside above table street dog car'
TEMPLATE = (
    "{%% for message in messages %%}{{ '<|' + message['role'] + '|>' }}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}"
    "{%% if message['role'] == 'assistant' %%}{{ '<|end|>' }}{%% endif %%}{%% endfor %%}"
)
Seconds = dict[str, float]


def tokenizer(*special: str) -> Any:
    """Returns a byte-level tokenizer with the special tokens of a family."""
    trained = train_tokenizer([*QUESTIONS, WORDS] * 8, model_max_length=8192)
    trained.add_special_tokens({'additional_special_tokens': list(special)})
    return trained


def llava() -> Any:
    """llava-hf/llava-1.5-7b-hf."""
    images = transformers.CLIPImageProcessor(size={'shortest_edge': 336}, crop_size={'height': 336, 'width': 336})
    return transformers.LlavaProcessor(
        images,
        tokenizer(),
        chat_template=TEMPLATE % '<image>',
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy='default',
    )


def qwen2_5_vl() -> Any:
    """Qwen/Qwen2.5-VL-7B-Instruct, with a usual limit of 1,280 tokens an image."""
    return transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
        tokenizer=tokenizer(
            '<|image_pad|>',
            '<|video_pad|>',
            '<|vision_start|>',
            '<|vision_end|>',
        ),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE % '<|vision_start|><|image_pad|><|vision_end|>',
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    'LLaVA-1.5': llava,
    'Qwen2.5-VL': qwen2_5_vl,
}


def write_data(folder: Path, num_images: int, *, sides: tuple[int, ...] | None) -> Path:
    """Writes a LLaVA JSON with images of smooth noise. Without `sides`, no two images have the same size."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    records = []
    used_sizes: set[tuple[int, int]] = set()
    for number in range(num_images):
        width, height = draw_size(rng, sides)
        while sides is None and (width, height) in used_sizes:
            width, height = draw_size(rng, sides)
        used_sizes.add((width, height))
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


def draw_size(rng: np.random.Generator, sides: tuple[int, ...] | None) -> tuple[int, int]:
    drawn = rng.choice(sides, 2) if sides else rng.integers(200, 1601, 2)
    width, height = drawn.tolist()
    return width, height


def timed(dataset: LlavaDataset, processor: Any) -> tuple[lengths.LengthTable, Seconds]:
    start = time.perf_counter()
    processor_start = time.process_time()
    table = lengths.build_length_table(dataset, processor, num_workers=0)
    clock_seconds = time.perf_counter() - start
    processor_seconds = time.process_time() - processor_start
    return table, {'clock': round(clock_seconds, 2), 'processor': round(processor_seconds, 2)}


def compare(path: Path, processor: Any) -> dict[str, Any]:
    dataset = LlavaDataset(path, processor)
    # The first sample pays for work that is done once.
    _ = dataset[0]
    # Headers take a short time, which other work on the machine disturbs more. So it is measured several times.
    rounds = [timed(dataset, processor) for _ in range(ROUNDS)]
    from_headers, _ = rounds[0]
    header_seconds = {}
    for clock in ('clock', 'processor'):
        header_seconds[clock] = statistics.median(seconds[clock] for _, seconds in rounds)
    # All samples are read if the dataset has no more than this.
    with mock.patch.object(lengths, 'FEWEST_FOR_HEADERS', len(dataset)):
        from_samples, reading_seconds = timed(dataset, processor)
    times_faster = {}
    for clock, seconds in header_seconds.items():
        times_faster[clock] = round(reading_seconds[clock] / seconds, 1)
    equal = {}
    for column in lengths.TABLE_COLUMNS:
        is_equal = getattr(from_headers, column) == getattr(from_samples, column)
        equal[column] = bool(is_equal.all())
    return {
        'headers_seconds': header_seconds,
        'reading_seconds': reading_seconds,
        'times_faster': times_faster,
        'equal': equal,
        'mean_length': round(float(from_samples.lengths.mean()), 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--images', type=int, default=5000)
    parser.add_argument('--distinct', type=int, default=1000)
    parser.add_argument('--families', nargs='+', choices=FAMILIES, default=list(FAMILIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {'machine': machine()}
    sets = {
        f'{len(SIDES) ** 2} sizes': (arguments.images, SIDES),
        'every size another': (arguments.distinct, None),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (num_images, sides) in sets.items():
            path = write_data(Path(folder) / name.replace(' ', '_'), num_images, sides=sides)
            results[name] = {'images': num_images}
            for family in arguments.families:
                results[name][family] = compare(path, FAMILIES[family]())
                print(f'{num_images} images, {name}, {family}: {results[name][family]}', flush=True)
    write(arguments.results / 'lengths.json', results)


if __name__ == '__main__':
    main()
