# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tables and picture of the throughput benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def show(result: Row) -> None:
    """One table for a set of lengths."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f'{result["set"]} (variation {result["variation"]:.2f}), device batch {result["device_batch"]}, memory '
        f'of {result["microbatch"]} rows; bound {result["bound_tokens_per_second"]:,.0f} real tokens/s'
    )
    for column in ('method', 'real tokens/s', 'x stock', 'x HF style', 'of bound', 'padding', 'largest', 'saved MiB'):
        table.add_column(column, justify='left' if column == 'method' else 'right')
    for row in result['methods']:
        table.add_row(
            row['method'], f'{row["tokens_per_second"]:,.0f}', _times(row['against_stock']),
            _times(row['against_hugging_face']), f'{row["share_of_bound"]:.3f}', f'{row["padding"]:.0%}',
            f'{row["largest_microbatch"]:,}', f'{row["saved_mib"]:.0f}',
        )  # fmt: skip
    Console(width=130).print(table)


def _times(ratio: float | None) -> str:
    return '' if ratio is None else f'{ratio:.2f}'


def picture(results: Sequence[Row], path: Path) -> None:
    """Real tokens per second of each way to cut, one panel for a set."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    columns = min(len(results), 2)
    rows = -(-len(results) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(6.5 * columns, 2.9 * rows), layout='constrained')
    axes = np.atleast_1d(grid).flatten()
    for axis in axes[len(results) :]:
        axis.axis('off')
    for axis, result in zip(axes, results, strict=False):
        speeds = [row['tokens_per_second'] for row in result['methods']]
        names = [row['method'] for row in result['methods']]
        colors = [
            {'token_data_spec': 'tab:green'}.get(name, 'tab:olive' if 'packing' in name else 'tab:gray')
            for name in names
        ]
        bars = axis.barh(range(len(speeds)), speeds, color=colors)
        labels = [
            f'{speed / speeds[0]:.1f}x, {row["padding"]:.0%} padding'
            for speed, row in zip(speeds, result['methods'], strict=True)
        ]
        axis.bar_label(bars, labels, padding=3, fontsize=8)
        axis.axvline(result['bound_tokens_per_second'], color='tab:red', lw=1, ls='--', label='no padding at all')
        axis.set_xlim(0, max(*speeds, result['bound_tokens_per_second']) * 1.4)
        axis.set_yticks(range(len(speeds)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f'{result["set"]}, {result["device_batch"]} rows a step', fontsize=10)
        axis.set_xlabel('real tokens per second')
    axes[0].legend(fontsize=8, loc='lower right')
    figure.suptitle('Same rows, same memory in each panel: small LLaVA, fp32, CPU')
    figure.savefig(path, dpi=130)
