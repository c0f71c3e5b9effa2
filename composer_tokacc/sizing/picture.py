# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A sizing report on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_tokacc.sizing.report import SizingReport

__all__ = ['draw_report']

STOCK, SPLIT, PLANNED, LIMIT = '#8a8f98', '#2a78b5', '#1f9d6b', '#c0392b'
PARTS = {'model': '#8a8f98', 'text': '#2a78b5', 'logits': '#e0a030', 'vision': '#7d5ba6', 'inputs': '#333333'}


def draw_report(path: str | Path, report: SizingReport) -> None:
    """Draws padding and memory by microbatch size.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not pyplot, which would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout='constrained')
    padding, memory = figure.subplots(1, 2)
    size, slot = report.device_train_microbatch_size, report.slot_tokens
    figure.suptitle(
        f'Suggested: microbatches of at most {report.max_tokens:,} tokens ({size} rows of {slot})\n'
        f'{report.num_ranks} ranks ({report.strategy}), {report.global_batch_size} samples a step, '
        f'{report.device_memory_gib:g} GiB a device: {report.speedup("split"):.2f}x as fast as stock Composer, '
        f'{report.speedup("planned"):.2f}x with planned batches',
        fontsize=12,
    )
    _padding(padding, report)
    _memory(memory, report)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _padding(axis: Any, report: SizingReport) -> None:
    for method, style, color, label in (
        ('stock', 'o-', STOCK, 'stock Composer: every microbatch as wide as its device batch'),
        ('split', 'o-', SPLIT, 'sorted, cut and trimmed on each rank'),
        ('planned', 's--', PLANNED, 'planned over all ranks'),
    ):
        axis.plot([100 * row.padding[method] for row in report.sizes], style, color=color, label=label)
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


def _name_sizes(axis: Any, report: SizingReport) -> None:
    chosen = report.device_train_microbatch_size
    names = [f'{row.size} *' if row.size == chosen else str(row.size) for row in report.sizes]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel(f'device_train_microbatch_size, in rows of {report.slot_tokens} tokens (* suggested)')
