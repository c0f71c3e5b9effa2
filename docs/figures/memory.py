# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What memory meets before training: which microbatches are rehearsed, and samples that were made to fit.

python -m docs.figures.memory writes rehearsal.svg and fit.svg; needs Pillow and PyAV, no GPU.
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
from matplotlib.figure import Figure
from PIL import Image

from composer_tokacc import RegroupingBatchSampler
from composer_tokacc.data import LlavaDataset
from composer_tokacc.programs.rehearsal import PlannedRun, heaviest_of_run
from tests.support.families import MEDIA

HERE, GREY, BLUE, RED = Path(__file__).parent, '#b8c4d6', '#3b6fb6', '#c8553d'
BUDGET, MAX_LENGTH = 2_048, 60
"""Tokens of a microbatch and of a sample."""


def rehearsal(path: Path) -> None:
    """All planned microbatches of three epochs of samples with up to four images, and those that come first."""
    rng = np.random.default_rng(5)
    images = 64 * rng.choice(5, size=2_000, p=[0.5, 0.3, 0.1, 0.06, 0.04])
    lengths = np.minimum(images + rng.lognormal(4.3, 0.9, 2_000).astype(int) + 4, BUDGET)
    sampler = RegroupingBatchSampler(
        range(2_000),
        lengths=lengths,
        image_tokens=images,
        global_batch_size=64,
        max_tokens=BUDGET,
        num_replicas=2,
        rank=0,
    )
    state: Any = SimpleNamespace(
        dataloader=None, dataloader_len=None, max_duration=Time.from_epoch(3), timestamp=Timestamp()
    )
    run = PlannedRun(state=state, accumulation=None, sampler=sampler, memory=None, labels_per_sample=None)
    chosen, num_steps = heaviest_of_run(run)
    planned = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in range(len(sampler)):
            window = sampler.window(batch)
            planned += [
                (one.num_tokens, int(images[[window[i] for i in one.indices]].sum()))
                for rank in sampler.plan(batch).ranks
                for one in rank
            ]
    figure = Figure(figsize=(7, 3.4), layout='constrained')
    axes = figure.subplots()
    axes.scatter(*zip(*planned, strict=True), s=6, color=GREY, label=f'{len(planned):,} microbatches')
    heavy = [(one.shape.tokens, one.shape.image_tokens) for one in chosen]
    axes.scatter(*zip(*heavy, strict=True), s=60, color=RED, marker='x', label='rehearsed before the first step')
    axes.axvline(BUDGET, color='black', lw=0.8, ls='--', label='token budget')
    finish(figure, axes, path, f'{num_steps} steps on two ranks', 'positions of a microbatch', 'image tokens in it')


def fit(path: Path) -> None:
    """Tokens of samples with images of many sizes, as they are and as they are made to fit."""
    rng, processor = np.random.default_rng(3), MEDIA['qwen2_vl']().processor
    processor.image_processor.size = {'shortest_edge': 64, 'longest_edge': 160 * 160}
    with tempfile.TemporaryDirectory() as folder:
        os.environ['XDG_CACHE_HOME'] = folder
        records = []
        for number in range(40):
            size = tuple(int(side) for side in rng.integers(16, 160, size=2))
            Image.effect_noise(size, 90).convert('RGB').save(f'{folder}/{number}.png')
            turns = [{'role': 'user', 'content': '<image> bi da'}, {'role': 'assistant', 'content': 'fo gu'}]
            records.append({'images': [f'{number}.png'], 'messages': turns})
        data = Path(folder, 'data.json')
        data.write_text(json.dumps(records))
        found = []
        for options in ({}, {'fit': True, 'max_length': MAX_LENGTH}):
            dataset = LlavaDataset(data, processor, num_workers=0, **options)
            found.append([dataset[index]['input_ids'].shape[1] for index in range(len(dataset))])
    order = np.argsort(found[0])
    figure = Figure(figsize=(7, 3.2), layout='constrained')
    axes = figure.subplots()
    for lengths, colour, label in zip(found, (GREY, BLUE), ('as it is', 'fit: true'), strict=True):
        axes.bar(range(len(order)), np.asarray(lengths)[order], color=colour, label=label)
    axes.axhline(MAX_LENGTH, color='black', lw=0.8, ls='--', label='max_length')
    finish(figure, axes, path, '40 images, 16 to 160 pixels a side', 'samples, by length', 'tokens')


def finish(figure: Figure, axes: mpl.axes.Axes, path: Path, title: str, xlabel: str, ylabel: str) -> None:
    """Writes a picture with one pair of axes."""
    axes.set_title(title, loc='left', fontsize=9)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={'Date': None})


if __name__ == '__main__':
    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'
    rehearsal(HERE / 'rehearsal.svg')
    fit(HERE / 'fit.svg')
