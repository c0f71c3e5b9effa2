# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a length table costs from image headers, and from samples that are all read; and whether both are the same.

    python -m benchmarks.lengths [--images 5000] [--distinct 1000]

One JPEG a conversation, sides of 200 to 1,600 pixels, first of 144 sizes, then (`every size another`) each of a size of
its own, which the processor has to be asked about one by one. Processors of four families as their checkpoints have
them, around a small tokenizer. One process, one thread of torch; prints the clock and processor time, which other work
on the machine disturbs less, and of the headers the median of three rounds; writes results/lengths.json.
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
QUESTIONS = ('What is shown here?', 'Describe the picture in detail.', 'How many objects are there, and which?')
WORDS = ('a', 'the', 'red', 'small', 'house', 'stands', 'lies', 'beside', 'above', 'table', 'street', 'dog', 'car')
TEMPLATE = (
    "{%% for message in messages %%}{{ '<|' + message['role'] + '|>' }}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}"
    "{%% if message['role'] == 'assistant' %%}{{ '<|end|>' }}{%% endif %%}{%% endfor %%}"
)
CLIP = {'patch_size': 14, 'num_additional_image_tokens': 1, 'vision_feature_select_strategy': 'default'}


def tokenizer(*special: str) -> Any:
    """A byte-level one with the special tokens of a family."""
    trained = train_tokenizer([*QUESTIONS, ' '.join(WORDS)] * 8, model_max_length=8192)
    trained.add_special_tokens({'additional_special_tokens': list(special)})
    return trained


def llava() -> Any:
    """llava-hf/llava-1.5-7b-hf."""
    images = transformers.CLIPImageProcessor(size={'shortest_edge': 336}, crop_size={'height': 336, 'width': 336})
    return transformers.LlavaProcessor(images, tokenizer(), chat_template=TEMPLATE % '<image>', **CLIP)


def llava_next() -> Any:
    """llava-hf/llava-v1.6-mistral-7b-hf."""
    images = transformers.LlavaNextImageProcessor(
        size={'shortest_edge': 336}, crop_size={'height': 336, 'width': 336},
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    )  # fmt: skip
    return transformers.LlavaNextProcessor(images, tokenizer(), chat_template=TEMPLATE % '<image>', **CLIP)


def qwen2_5_vl() -> Any:
    """Qwen/Qwen2.5-VL-7B-Instruct, with a usual limit of 1,280 tokens an image."""
    return transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
        tokenizer=tokenizer('<|image_pad|>', '<|video_pad|>', '<|vision_start|>', '<|vision_end|>'),
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE % '<|vision_start|><|image_pad|><|vision_end|>',
    )


def idefics3() -> Any:
    """HuggingFaceM4/Idefics3-8B-Llama3."""
    tiles = [f'<row_{row}_col_{column}>' for row in range(1, 7) for column in range(1, 7)]
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessor(
            size={'longest_edge': 4 * 364}, max_image_size={'longest_edge': 364}
        ),
        tokenizer=tokenizer('<fake_token_around_image>', '<global-img>', '<end_of_utterance>', *tiles),
        image_seq_len=169,
        chat_template=TEMPLATE % '<image>',
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    'LLaVA-1.5': llava,
    'LLaVA-NeXT': llava_next,
    'Qwen2.5-VL': qwen2_5_vl,
    'Idefics3': idefics3,
}


def write_data(folder: Path, num_images: int, *, sides: tuple[int, ...] | None) -> Path:
    """A LLaVA JSON with images of smooth noise, of the given sides, or each of a size of its own."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    records, taken = [], set()
    for number in range(num_images):
        size = tuple(rng.choice(sides, 2).tolist() if sides else rng.integers(200, 1601, 2).tolist())
        while sides is None and size in taken:
            size = tuple(rng.integers(200, 1601, 2).tolist())
        taken.add(size)
        noise = rng.integers(0, 256, (size[1] // 20, size[0] // 20, 3), dtype=np.uint8)
        Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(folder / f'{number}.jpg', quality=85)
        answer = ' '.join(rng.choice(WORDS, int(np.clip(rng.lognormal(3.5, 0.8), 2, 400))))
        turns = [f'<image>\n{rng.choice(QUESTIONS)}', answer]
        names = ('human', 'gpt')
        conversation = [{'from': name, 'value': turn} for name, turn in zip(names, turns, strict=True)]
        records.append({'id': str(number), 'image': f'{number}.jpg', 'conversations': conversation})
    (folder / 'data.json').write_text(json.dumps(records))
    return folder / 'data.json'


def timed(dataset: LlavaDataset, processor: Any) -> tuple[lengths.LengthTable, dict[str, float]]:
    started, processor_started = time.perf_counter(), time.process_time()
    table = lengths.build_length_table(dataset, processor, num_workers=0)
    seconds = {'clock': time.perf_counter() - started, 'processor': time.process_time() - processor_started}
    return table, {name: round(value, 2) for name, value in seconds.items()}


def compare(path: Path, processor: Any) -> dict[str, Any]:
    dataset = LlavaDataset(path, processor)
    _ = dataset[0]  # warms up
    # The short one suffers more from what else the machine does.
    rounds = [timed(dataset, processor) for _ in range(ROUNDS)]
    quick = rounds[0][0]
    quick_seconds = {name: statistics.median(seconds[name] for _, seconds in rounds) for name in rounds[0][1]}
    with mock.patch.object(lengths, 'FEWEST_FOR_HEADERS', len(dataset)):
        full, full_seconds = timed(dataset, processor)
    return {
        'headers_seconds': quick_seconds,
        'reading_seconds': full_seconds,
        'times_faster': {name: round(full_seconds[name] / quick_seconds[name], 1) for name in quick_seconds},
        'equal': {name: bool((getattr(quick, name) == getattr(full, name)).all()) for name in lengths.TABLE_COLUMNS},
        'mean_length': round(float(full.lengths.mean()), 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--images', type=int, default=5000)
    parser.add_argument('--distinct', type=int, default=1000)
    parser.add_argument('--families', nargs='+', choices=FAMILIES, default=list(FAMILIES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {'machine': machine()}
    sets = {f'{len(SIDES) ** 2} sizes': (given.images, SIDES), 'every size another': (given.distinct, None)}
    with tempfile.TemporaryDirectory() as folder:
        for name, (num_images, sides) in sets.items():
            path = write_data(Path(folder) / name.replace(' ', '_'), num_images, sides=sides)
            results[name] = {'images': num_images}
            for family in given.families:
                found = results[name][family] = compare(path, FAMILIES[family]())
                quick, full = found['headers_seconds'], found['reading_seconds']
                print(
                    f'{num_images} images, {name}, {family}: {quick["clock"]:.1f} s for {full["clock"]:.1f} s, '
                    f'processor {quick["processor"]:.1f} s for {full["processor"]:.1f} s, '
                    f'{found["times_faster"]["processor"]:.1f} times faster, '
                    f'{"equal" if all(found["equal"].values()) else "NOT EQUAL"}',
                    flush=True,
                )
    write(given.results / 'lengths.json', results)


if __name__ == '__main__':
    main()
