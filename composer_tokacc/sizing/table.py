# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A sizing report on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from composer_tokacc.sizing.profile import DatasetProfile
from composer_tokacc.sizing.report import SizingReport

__all__ = ['print_report']

METHOD_NAMES = {'stock': 'stock Composer', 'split': 'split and trimmed', 'planned': 'planned over ranks'}


def print_report(report: SizingReport, console: Console | None = None) -> None:
    """Prints the recommendation, its reasons and the lines to paste."""
    console = console or Console(highlight=False, soft_wrap=False)
    for table in (_answer(report), _memory(report), _methods(report), _sizes(report), _worlds(report)):
        console.print(table)
    for line in report.warnings():
        console.print(f'[bold yellow]note:[/] {line}', soft_wrap=True)
    console.print('\nPaste into the YAML file:\n')
    console.print(report.yaml(), markup=False)


def _answer(report: SizingReport) -> Table:
    profile = report.profile
    table = Table('', '', title='Microbatch size', show_header=False)
    images = f'{profile.image_share:.0%} image tokens, {profile.text_only_share:.0%} of the samples text-only'
    loss = 'unknown' if profile.loss_share is None else f'{profile.loss_share:.0%} of the tokens'
    length = f'mean {profile.mean:.0f}, median {profile.quantiles["50"]}, 99 % under {profile.quantiles["99"]}'
    for name, value in (
        ('dataset', f'{profile.num_samples:,} samples; {images}'),
        ('tokens a sample', f'{length}, longest {profile.longest} (variation {profile.variation:.2f})'),
        ('vision tower', _vision(profile)),
        ('carry loss', loss),
        ('global batch', report.identity()),
        ('largest safe size', f'{report.device_train_microbatch_size} rows of {report.slot_tokens} tokens'),
        ('token budget', f'{report.max_tokens:,} tokens a microbatch'),
        ('image tokens that fit', '-' if report.max_image_tokens is None else f'{report.max_image_tokens:,}'),
        ('peak memory', f'{report.peak_gib:.2f} of {report.limit_gib:.2f} GiB ({report.safety:.0%} of the device)'),
        ('kept from more by', report.binds),
    ):
        table.add_row(name, value)
    return table


def _vision(profile: DatasetProfile) -> str:
    if profile.patches_per_sample is None:
        return '-'
    per_token = profile.patches_per_image_token
    merged = '' if per_token is None else f', {per_token:.3g} for each image token'
    return f'{profile.patches_per_sample:.0f} patches a sample with images{merged}'


def _memory(report: SizingReport) -> Table:
    table = Table('held by', 'GiB', 'share', title='Memory at the peak of the largest microbatch')
    for column in table.columns[1:]:
        column.justify = 'right'
    total = sum(report.terms.values())
    for name, gib in report.terms.items():
        table.add_row(name, f'{gib:.3f}', f'{gib / total:.1%}')
    return table


def _methods(report: SizingReport) -> Table:
    in_seconds = report.seconds_per_unit is not None
    header = 'seconds a step' if in_seconds else 'time against stock'
    table = Table('method', 'padding', 'microbatches', 'imbalance', header, 'speed-up', 'of the bound', title='A step')
    for method, figures in report.figures.items():
        seconds = report.step_seconds(method)
        share = figures.cost / report.figures['stock'].cost
        table.add_row(
            METHOD_NAMES[method],
            f'{figures.padding_ratio:.1%}',
            f'{figures.microbatches:.1f}',
            f'{figures.imbalance:.2f}',
            f'{share:.2f}' if seconds is None else f'{seconds:.3f}',
            f'{report.speedup(method):.2f}x',
            f'{report.share_of_bound(method):.0%}',
        )
    return table


def _sizes(report: SizingReport) -> Table:
    table = Table('size', 'padding, stock', 'split', 'planned', 'peak GiB', '', title='Microbatch sizes')
    for row in report.sizes:
        mark = 'suggested' if row.size == report.device_train_microbatch_size else '' if row.fits else 'too large'
        table.add_row(
            str(row.size),
            f'{row.stock_padding:.1%}',
            f'{row.split_padding:.1%}',
            f'{row.planned_padding:.1%}',
            f'{row.peak_gib:.2f}',
            mark,
        )
    return table


def _worlds(report: SizingReport) -> Table:
    table = Table(
        'ranks', 'rows a rank', 'size', 'microbatches, stock', 'split', 'imbalance', 'speed-up, split', 'planned',
        'peak GiB', title='World sizes, same global batch',
    )  # fmt: skip
    for row in report.worlds:
        table.add_row(
            f'{row.num_ranks}{" *" if row.num_ranks == report.num_ranks else ""}',
            str(row.samples_per_rank),
            str(row.device_train_microbatch_size),
            f'{row.stock_microbatches:.1f}',
            f'{row.split_microbatches:.1f}',
            f'{row.split_imbalance:.2f} / {row.planned_imbalance:.2f}',
            f'{row.split_speedup:.2f}x',
            f'{row.planned_speedup:.2f}x',
            f'{row.peak_gib:.2f}',
        )
    return table
