# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Draws the microbatches that are rehearsed before training, and the lengths of samples before and after `fit`.

    python -m docs.figures.memory

writes rehearsal.svg and fit.svg. Needs Pillow and PyAV, but no GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib as mpl
import numpy as np
from composer.core import Time, Timestamp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from composer_tokacc import RegroupingBatchSampler
from composer_tokacc.data import LlavaDataset
from composer_tokacc.programs.rehearsal import PlannedRun, heaviest_of_run
from tests.support.families import MEDIA

FOLDER = Path(__file__).parent
GREY = '#b8c4d6'
BLUE = '#3b6fb6'
RED = '#c8553d'
NUM_SAMPLES = 2_000
NUM_EPOCHS = 3
BUDGET = 2_048
"""Most positions of a microbatch, padding included."""
MAX_LENGTH = 60
"""Most tokens of a sample that is made to fit."""


def draw_rehearsal(path: Path) -> None:
    """Draws all planned microbatches of three epochs, and marks those that are rehearsed before the first step.

    The samples have up to four images of 64 tokens.
    """
    rng = np.random.default_rng(5)
    num_images = rng.choice(5, size=NUM_SAMPLES, p=[0.5, 0.3, 0.1, 0.06, 0.04])
    image_tokens = 64 * num_images
    text_tokens = rng.lognormal(4.3, 0.9, NUM_SAMPLES).astype(int) + 4
    lengths = np.minimum(image_tokens + text_tokens, BUDGET)
    sampler = RegroupingBatchSampler(
        range(NUM_SAMPLES),
        lengths=lengths,
        image_tokens=image_tokens,
        global_batch_size=64,
        max_tokens=BUDGET,
        num_replicas=2,
        rank=0,
    )
    # Stands for Composer's state at the start of a run.
    state: Any = SimpleNamespace(
        dataloader=None, dataloader_len=None, max_duration=Time.from_epoch(NUM_EPOCHS), timestamp=Timestamp()
    )
    run = PlannedRun(state=state, accumulation=None, sampler=sampler, memory=None, labels_per_sample=None)
    rehearsed, num_steps = heaviest_of_run(run)
    planned = sizes_of_microbatches(sampler, image_tokens)

    figure = Figure(figsize=(7, 3.4), layout='constrained')
    axes = figure.subplots()
    tokens, tokens_of_images = zip(*planned, strict=True)
    axes.scatter(tokens, tokens_of_images, s=6, color=GREY, label=f'{len(planned):,} microbatches')
    axes.scatter(
        [microbatch.shape.tokens for microbatch in rehearsed],
        [microbatch.shape.image_tokens for microbatch in rehearsed],
        s=60,
        color=RED,
        marker='x',
        label='rehearsed before the first step',
    )
    axes.axvline(BUDGET, color='black', lw=0.8, ls='--', label='token budget')
    axes.set_xlabel('positions of a microbatch', fontsize=8)
    axes.set_ylabel('image tokens in it', fontsize=8)
    save(figure, axes, path, f'{num_steps} steps on two ranks')


def sizes_of_microbatches(sampler: RegroupingBatchSampler, image_tokens: np.ndarray) -> list[tuple[int, int]]:
    """Returns the positions and the image tokens of every microbatch of all ranks and epochs."""
    sizes = []
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for batch in range(len(sampler)):
            window = np.asarray(sampler.window(batch))  # the samples of the global batch
            for microbatches_of_rank in sampler.plan(batch).ranks:
                for microbatch in microbatches_of_rank:
                    samples = window[list(microbatch.indices)]
                    sizes.append((microbatch.num_tokens, int(image_tokens[samples].sum())))
    return sizes


def draw_fit(path: Path) -> None:
    """Draws the tokens of samples with images of many sizes, as they are and as they are made to fit."""
    rng = np.random.default_rng(3)
    processor = MEDIA['qwen2_vl']().processor
    # In Qwen2-VL these are the fewest and the most pixels of an image, and not of an edge.
    processor.image_processor.size = {'shortest_edge': 64, 'longest_edge': 160 * 160}
    with tempfile.TemporaryDirectory() as folder:
        os.environ['XDG_CACHE_HOME'] = folder  # else the lengths of these samples stay in the user's cache
        path_of_records = write_records(Path(folder), rng)
        lengths = lengths_of(LlavaDataset(path_of_records, processor, num_workers=0))
        fitted = LlavaDataset(path_of_records, processor, num_workers=0, fit=True, max_length=MAX_LENGTH)
        fitted_lengths = lengths_of(fitted)

    order = np.argsort(lengths)
    figure = Figure(figsize=(7, 3.2), layout='constrained')
    axes = figure.subplots()
    axes.bar(range(len(order)), lengths[order], color=GREY, label='as it is')
    axes.bar(range(len(order)), fitted_lengths[order], color=BLUE, label='fit: true')
    axes.axhline(MAX_LENGTH, color='black', lw=0.8, ls='--', label='max_length')
    axes.set_xlabel('samples, by length', fontsize=8)
    axes.set_ylabel('tokens', fontsize=8)
    save(figure, axes, path, '40 images, 16 to 160 pixels a side')


def write_records(folder: Path, rng: np.random.Generator) -> Path:
    """Writes 40 images of random sizes, and a file of records with one image each. Returns the path of the file."""
    records = []
    for number in range(40):
        width, height = rng.integers(16, 160, size=2).tolist()
        Image.effect_noise((width, height), 90).convert('RGB').save(folder / f'{number}.png')
        turns = [{'role': 'user', 'content': '<image> bi da'}, {'role': 'assistant', 'content': 'fo gu'}]
        records.append({'images': [f'{number}.png'], 'messages': turns})
    path = folder / 'data.json'
    path.write_text(json.dumps(records))
    return path


def lengths_of(dataset: LlavaDataset) -> np.ndarray:
    """Returns the number of tokens of each sample."""
    return np.array([dataset[index]['input_ids'].shape[1] for index in range(len(dataset))])


def save(figure: Figure, axes: Axes, path: Path, title: str) -> None:
    """Adds the title and the legend, and writes the picture."""
    axes.set_title(title, loc='left', fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={'Date': None})


if __name__ == '__main__':
    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'  # otherwise the files differ each time
    draw_rehearsal(FOLDER / 'rehearsal.svg')
    draw_fit(FOLDER / 'fit.svg')
