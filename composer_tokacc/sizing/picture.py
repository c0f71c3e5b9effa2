# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A sizing report on one page."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from composer_tokacc.sizing.report import SizingReport

__all__ = ['draw_report']

STOCK, SPLIT, PLANNED, LIMIT = '#8a8f98', '#2a78b5', '#1f9d6b', '#c0392b'
PARTS = {'model': '#8a8f98', 'text': '#2a78b5', 'logits': '#e0a030', 'vision': '#7d5ba6', 'inputs': '#333333'}


def draw_report(path: str | Path, report: SizingReport) -> None:
    """Draws lengths, padding, memory and speed-up.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), layout='constrained')
    size, slot = report.device_train_microbatch_size, report.slot_tokens
    figure.suptitle(
        f'Suggested: microbatches of at most {report.max_tokens:,} tokens ({size} rows of {slot})\n'
        f'{report.num_ranks} ranks ({report.strategy}), {report.global_batch_size} samples a step, '
        f'{report.device_memory_gib:g} GiB a device: {report.speedup("split"):.2f}x as fast as stock Composer, '
        f'{report.speedup("planned"):.2f}x with planned batches',
        fontsize=12,
    )
    _lengths(axes[0, 0], report)
    _padding(axes[0, 1], report)
    _memory(axes[1, 0], report)
    _worlds(axes[1, 1], report)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _lengths(axis: Any, report: SizingReport) -> None:
    counts, edges = report.lengths_histogram
    widths = [right - left for left, right in pairwise(edges)]
    axis.bar(edges[:-1], counts, widths, align='edge', color=SPLIT, alpha=0.8)
    axis.axvline(report.profile.mean, color='black', linestyle=':', label=f'mean {report.profile.mean:.0f}')
    if report.max_tokens <= 3 * report.profile.longest:
        axis.axvline(report.max_tokens, color=LIMIT, label=f'token budget of a microbatch: {report.max_tokens:,}')
    else:
        axis.plot([], [], ' ', label=f'token budget of a microbatch: {report.max_tokens:,}, far to the right')
    axis.margins(y=0.3)
    axis.set(title='Lengths of the samples', xlabel='tokens, image tokens included', ylabel='samples')
    axis.legend(fontsize=8, loc='upper left')


def _padding(axis: Any, report: SizingReport) -> None:
    for name, style, color, label in (
        ('stock_padding', 'o-', STOCK, 'stock Composer: every microbatch as wide as its device batch'),
        ('split_padding', 'o-', SPLIT, 'sorted, cut and trimmed on each rank'),
        ('planned_padding', 's--', PLANNED, 'planned over all ranks'),
    ):
        axis.plot([100 * getattr(row, name) for row in report.sizes], style, color=color, label=label)
    _name_sizes(axis, report)
    axis.margins(y=0.35)
    axis.set_ylim(bottom=0)
    axis.set(title='Computed positions that are padding', ylabel='%')
    axis.legend(fontsize=8, loc='upper left')


def _memory(axis: Any, report: SizingReport) -> None:
    places = range(len(report.sizes))
    below = [0.0] * len(report.sizes)
    for part, color in PARTS.items():
        heights = [row.parts_gib.get(part, 0.0) for row in report.sizes]
        if any(heights):
            axis.bar(places, heights, bottom=below, color=color, label=part)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, row in zip(places, report.sizes, strict=True):
        note = f'{row.peak_gib:.3g}' + ('' if row.fits else '\ntoo large')
        axis.annotate(note, (place, row.peak_gib), ha='center', va='bottom', fontsize=8)
    limit = f'limit: {report.safety:.0%} of {report.device_memory_gib:g} GiB'
    top = 1.45 * max(row.peak_gib for row in report.sizes)
    if report.limit_gib < top:
        axis.axhline(report.limit_gib, color=LIMIT, label=limit)
    else:
        axis.plot([], [], ' ', label=f'{limit}, above this picture')
    axis.set_ylim(0, top)
    _name_sizes(axis, report)
    axis.set(title=f'Peak memory of a rank (no larger because of: {report.binds})', ylabel='GiB')
    axis.legend(fontsize=8, loc='upper left', ncols=2)


def _worlds(axis: Any, report: SizingReport) -> None:
    places = range(len(report.worlds))
    for shift, name, color, label in (
        (-0.2, 'split_speedup', SPLIT, 'sorted, cut and trimmed on each rank'),
        (0.2, 'planned_speedup', PLANNED, 'planned over all ranks'),
    ):
        values = [getattr(row, name) for row in report.worlds]
        axis.bar([place + shift for place in places], values, 0.38, color=color, label=label)
        for place, value in zip(places, values, strict=True):
            axis.annotate(f'{value:.2f}', (place + shift, value), ha='center', va='bottom', fontsize=8)
    axis.axhline(1, color=STOCK, linestyle='--', label='stock Composer')
    names = [f'{row.num_ranks} *' if row.num_ranks == report.num_ranks else str(row.num_ranks) for row in report.worlds]
    axis.set_xticks(list(places), names)
    axis.margins(y=0.4)
    axis.set(
        title='Predicted speed-up of a step, same global batch',
        xlabel='ranks (* this run; those whose memory is too small are left out)',
        ylabel='times stock Composer',
    )
    axis.legend(fontsize=8, loc='upper left')


def _name_sizes(axis: Any, report: SizingReport) -> None:
    chosen = report.device_train_microbatch_size
    names = [f'{row.size} *' if row.size == chosen else str(row.size) for row in report.sizes]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel(f'device_train_microbatch_size, in rows of {report.slot_tokens} tokens (* suggested)')
