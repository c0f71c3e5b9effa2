# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The way of one global batch, by the planner's own plan: python docs/figures/way_of_a_batch.py writes the SVG."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from composer_tokacc import plan_microbatches

RANKS, ROWS, SLOTS = 2, 8, 4
"""Ranks, samples a rank, rows of a stock microbatch: the memory of SLOTS rows as wide as the longest."""
COLOURS = ('#3b6fb6', '#c8553d')
"""By the rank that a torch sampler gives the sample to."""


def stock_cut(lengths: np.ndarray) -> list[list[list[int]]]:
    """Ranks of microbatches of samples as Composer cuts them, in order."""
    ranks = [list(range(rank, len(lengths), RANKS)) for rank in range(RANKS)]
    return [[rank[i : i + SLOTS] for i in range(0, ROWS, SLOTS)] for rank in ranks]


def draw(axes: Axes, title: str, ranks: list[list[list[int]]], lengths: np.ndarray, *, planned: bool) -> None:
    """A row of microbatches for each rank; the factor of each in the step's loss below it."""
    bottom, padded, widest = 0.0, 0, 0.0
    for number, microbatches in enumerate(ranks):
        left, height = 0.0, max(map(len, microbatches))
        axes.text(-20, bottom - height / 2, f'rank {number}', ha='right', va='center', fontsize=9)
        device_width = max(int(lengths[i]) for each in microbatches for i in each)
        for each in microbatches:
            width = max(int(lengths[i]) for i in each) if planned else device_width
            for row, sample in enumerate(each):
                y = bottom - row - 1
                axes.add_patch(Rectangle((left, y + 0.1), width, 0.8, color='#dddddd', lw=0))
                colour = COLOURS[sample % RANKS]
                axes.add_patch(Rectangle((left, y + 0.1), int(lengths[sample]), 0.8, color=colour, lw=0))
            axes.add_patch(Rectangle((left, bottom - len(each)), width, len(each), fill=False, color='black', lw=0.8))
            tokens = int(lengths[each].sum())
            share = tokens / int(lengths.sum()) if planned else len(each) / len(lengths)
            label = f'weighs {share:.2f}\nholds {tokens / int(lengths.sum()):.2f}'
            axes.text(left, bottom - len(each) - 0.15, label, va='top', fontsize=7)
            padded += width * len(each)
            left += width + 40
        widest = max(widest, left)
        bottom -= height + 2.4
    padding = 1 - int(lengths.sum()) / padded
    axes.set_title(f'{title}: {padding:.0%} padding', loc='left', fontsize=10)
    axes.set_xlim(-110, max(widest, axes.get_xlim()[1]))
    axes.set_ylim(bottom + 0.6, 0.3)
    axes.axis('off')


def main(path: Path) -> None:
    """Draws lognormal lengths as stock Composer cuts them, and as they are planned."""
    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'
    lengths = np.random.default_rng(2).lognormal(4.2, 0.9, RANKS * ROWS).astype(int) + 8
    plan = plan_microbatches(lengths, num_ranks=RANKS, max_tokens=SLOTS * int(lengths.max()))
    planned = [[list(microbatch.indices) for microbatch in rank] for rank in plan.ranks]
    figure = Figure(figsize=(7.5, 6), layout='constrained')
    above, below = figure.subplots(2, 1, sharex=True)
    stock = stock_cut(lengths)
    draw(above, 'stock Composer, each mean loss times its share of the samples', stock, lengths, planned=False)
    draw(below, 'planned, each mean loss times its share of the tokens', planned, lengths, planned=True)
    figure.savefig(path, metadata={'Date': None})


if __name__ == '__main__':
    main(Path(__file__).with_suffix('.svg'))
