# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How one global batch is cut, by stock Composer and by the planner: python docs/figures/way_of_a_batch.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from composer_tokacc import plan_microbatches

NUM_RANKS = 2
SAMPLES_PER_RANK = 8
SLOTS = 4
"""Rows of a stock microbatch. A planned one may have as many positions as this many rows of the longest sample."""
COLOURS = ('#3b6fb6', '#c8553d')
"""The colour of a sample shows the rank that a torch sampler gives it to."""
GAP = 40
"""Tokens between two microbatches of a rank in the picture."""

Cut = Sequence[Sequence[Sequence[int]]]
"""For each rank its microbatches, each a list of samples."""


def stock_cut(lengths: np.ndarray) -> Cut:
    """Returns the microbatches of each rank as Composer cuts them: samples in order, ``SLOTS`` at a time."""
    ranks = []
    for rank in range(NUM_RANKS):
        samples = list(range(rank, len(lengths), NUM_RANKS))
        ranks.append([samples[start : start + SLOTS] for start in range(0, SAMPLES_PER_RANK, SLOTS)])
    return ranks


def planned_cut(lengths: np.ndarray) -> Cut:
    """Returns the microbatches of each rank as the planner cuts them."""
    plan = plan_microbatches(lengths, num_ranks=NUM_RANKS, max_tokens=SLOTS * int(lengths.max()))
    ranks = []
    for microbatches in plan.ranks:
        ranks.append([list(microbatch.indices) for microbatch in microbatches])
    return ranks


def width_of(samples: Sequence[int], lengths: np.ndarray) -> int:
    """Returns the width of a batch of samples: the length of the longest one."""
    return int(lengths[list(samples)].max())


def draw_microbatch(
    axes: Axes,
    samples: Sequence[int],
    lengths: np.ndarray,
    *,
    left: float,
    top: float,
    width: int,
) -> None:
    """Draws the rows of a microbatch from top to bottom: the tokens in colour, the padding in grey."""
    for row, sample in enumerate(samples):
        bottom_of_row = top - row - 1 + 0.1
        axes.add_patch(Rectangle((left, bottom_of_row), width, 0.8, color='#dddddd', lw=0))
        colour = COLOURS[sample % NUM_RANKS]
        axes.add_patch(Rectangle((left, bottom_of_row), int(lengths[sample]), 0.8, color=colour, lw=0))
    height = len(samples)
    axes.add_patch(Rectangle((left, top - height), width, height, fill=False, color='black', lw=0.8))


def draw_cut(axes: Axes, title: str, cut: Cut, lengths: np.ndarray, *, is_planned: bool) -> None:
    """Draws a row of microbatches for each rank. Below each is its factor in the loss, and its share of the tokens."""
    num_tokens = int(lengths.sum())
    num_positions = 0
    right_end = 0.0
    top = 0.0
    for rank, microbatches in enumerate(cut):
        height = max(len(samples) for samples in microbatches)
        axes.text(-20, top - height / 2, f'rank {rank}', ha='right', va='center', fontsize=9)
        # In stock Composer the collator pads all samples of the rank to one width.
        device_width = max(width_of(samples, lengths) for samples in microbatches)
        left = 0.0
        for samples in microbatches:
            share_of_tokens = int(lengths[list(samples)].sum()) / num_tokens
            if is_planned:
                width = width_of(samples, lengths)
                factor = share_of_tokens
            else:
                width = device_width
                factor = len(samples) / len(lengths)
            draw_microbatch(axes, samples, lengths, left=left, top=top, width=width)
            label = f'weighs {factor:.2f}\nholds {share_of_tokens:.2f}'
            axes.text(left, top - len(samples) - 0.15, label, va='top', fontsize=7)
            num_positions += width * len(samples)
            left += width + GAP
        right_end = max(right_end, left)
        top -= height + 2.4
    padding = 1 - num_tokens / num_positions
    axes.set_title(f'{title}: {padding:.0%} padding', loc='left', fontsize=10)
    axes.set_xlim(-110, max(right_end, axes.get_xlim()[1]))
    axes.set_ylim(top + 0.6, 0.3)
    axes.axis('off')


def main(path: Path) -> None:
    """Draws lognormal lengths as stock Composer cuts them, and as they are planned."""
    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'
    random_numbers = np.random.default_rng(2)
    lengths = random_numbers.lognormal(4.2, 0.9, NUM_RANKS * SAMPLES_PER_RANK).astype(int) + 8
    figure = Figure(figsize=(7.5, 6), layout='constrained')
    upper, lower = figure.subplots(2, 1, sharex=True)
    stock_title = 'stock Composer, each mean loss times its share of the samples'
    draw_cut(upper, stock_title, stock_cut(lengths), lengths, is_planned=False)
    planned_title = 'planned, each mean loss times its share of the tokens'
    draw_cut(lower, planned_title, planned_cut(lengths), lengths, is_planned=True)
    figure.savefig(path, metadata={'Date': None})


if __name__ == '__main__':
    main(Path(__file__).with_suffix('.svg'))
