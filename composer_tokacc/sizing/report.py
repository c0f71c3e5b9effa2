# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the sizing helper found: as text, as JSON, as YAML lines to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_tokacc.sizing.memory_model import LARGE_RESIDUAL
from composer_tokacc.sizing.profile import DatasetProfile
from composer_tokacc.sizing.simulate import StepFigures

__all__ = ['SizeRow', 'SizingReport']

METHOD_NAMES = {'stock': 'stock Composer', 'split': 'split and trimmed', 'planned': 'planned over ranks'}


@dataclass(frozen=True, kw_only=True)
class SizeRow:
    """One microbatch size."""

    size: int
    padding: dict[str, float]
    """By method: ``stock``, ``split``, ``planned``."""
    peak_gib: float
    parts_gib: dict[str, float]
    """``model`` (parameters, gradients, optimizer), ``text``, ``logits``, ``vision``, ``inputs``."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class SizingReport:
    """A recommended microbatch size with its reasons. Memory in GiB, padding as share of the computed positions."""

    profile: DatasetProfile
    num_ranks: int
    global_batch_size: int
    strategy: str
    device_memory_gib: float
    safety: float
    device_train_microbatch_size: int
    """Largest safe size, in rows of ``slot_tokens``."""
    slot_tokens: int
    max_image_tokens: int | None
    """Image tokens that fit into a microbatch of the suggested size; None without images."""
    stock_microbatch_size: int
    """Rows of stock Composer at the same memory."""
    regroup: bool
    width_multiple: int
    packing: bool
    binds: str
    """What keeps a microbatch from being larger: ``text``, ``logits``, ``vision`` or ``global batch``."""
    terms: dict[str, float]
    peak_gib: float
    memory_residual: float
    figures: dict[str, StepFigures]
    """Of a step by method: ``stock``, ``split``, ``planned``."""
    bound: float
    """Cost of a step that no plan beats."""
    seconds_per_unit: float | None
    seconds_per_step: float
    sizes: list[SizeRow]
    oversize: list[str]
    """Samples longer than a microbatch; each goes alone."""
    too_large: list[str]
    """Those of them that do not fit into memory even alone."""

    @property
    def max_tokens(self) -> int:
        """Token budget of a microbatch."""
        return self.device_train_microbatch_size * self.slot_tokens

    @property
    def samples_per_rank(self) -> int:
        """Rows of a device batch."""
        return self.global_batch_size // self.num_ranks

    @property
    def limit_gib(self) -> float:
        """Memory that is planned for."""
        return self.device_memory_gib * self.safety

    def step_seconds(self, method: str) -> float | None:
        """Seconds of a step, where the cost model was fitted to measured times."""
        if self.seconds_per_unit is None:
            return None
        return self.figures[method].cost * self.seconds_per_unit + self.seconds_per_step

    def speedup(self, method: str = 'split') -> float:
        """Step time of stock Composer over that of ``'split'`` or ``'planned'``."""
        stock, ours = self.step_seconds('stock'), self.step_seconds(method)
        if stock is not None and ours is not None:
            return stock / ours
        return self.figures['stock'].cost / self.figures[method].cost

    def share_of_bound(self, method: str = 'split') -> float:
        """How much of what any plan could reach is reached."""
        return self.bound / self.figures[method].cost

    def identity(self) -> str:
        """The global batch as ``rows x microbatches x ranks`` of stock Composer."""
        accumulation, rest = divmod(self.samples_per_rank, self.stock_microbatch_size)
        cut = f'{self.stock_microbatch_size} x {accumulation}' + (f' + {rest}' if rest else '')
        return f'({cut}) rows x {self.num_ranks} ranks = {self.global_batch_size} samples a step'

    def yaml(self) -> str:
        """Lines to paste into a run's YAML file."""
        lines = [
            'microbatching:',
            f'  device_train_microbatch_size: {self.device_train_microbatch_size}',
            f'  slot_tokens: {self.slot_tokens} # at most {self.max_tokens:,} tokens a microbatch',
            f'  regroup: {str(self.regroup).lower()}',
        ]
        if self.width_multiple > 1:
            lines.append(f'  width_multiple: {self.width_multiple}')
        if self.packing:
            lines.append('  packing: true')
        return '\n'.join(lines)

    def warnings(self) -> list[str]:
        """What a reader must know before trusting the figures."""
        found = []
        if self.memory_residual > LARGE_RESIDUAL:
            found.append(f'The memory model misses its own probes by up to {self.memory_residual:.1%}: leave room.')
        if self.too_large:
            found.append(
                f'{len(self.too_large)} samples do not fit even alone ({self.too_large[0]}): lower the context '
                '(`dataset.max_length`), or switch on checkpointing or sharding.'
            )
        elif self.oversize:
            found.append(f'{len(self.oversize)} samples are longer than a microbatch and go alone: {self.oversize[0]}.')
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, with what follows from it."""
        methods = ('split', 'planned')
        return {
            **asdict(self),
            'max_tokens': self.max_tokens,
            'identity': self.identity(),
            'step_seconds': {method: self.step_seconds(method) for method in self.figures},
            'speedup': {method: self.speedup(method) for method in methods},
            'share_of_bound': {method: self.share_of_bound(method) for method in methods},
            'yaml': self.yaml(),
            'warnings': self.warnings(),
        }

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + '\n')

    def text(self) -> str:
        """The recommendation, its reasons and the lines to paste, for a terminal."""
        tables = [_answer(self), _memory(self), _methods(self), _sizes(self)]
        notes = [f'note: {line}' for line in self.warnings()]
        return '\n\n'.join([*tables, *notes, 'Paste into the YAML file:', self.yaml()])


def _answer(report: SizingReport) -> str:
    profile = report.profile
    images = f'{profile.image_share:.0%} image tokens, {profile.text_only_share:.0%} of the samples text-only'
    length = f'mean {profile.mean:.0f}, median {profile.quantiles["50"]}, 99 % under {profile.quantiles["99"]}'
    rows = [
        ('dataset', f'{profile.num_samples:,} samples; {images}'),
        ('tokens a sample', f'{length}, longest {profile.longest} (variation {profile.variation:.2f})'),
        ('vision tower', _vision(profile)),
        ('carry loss', 'unknown' if profile.loss_share is None else f'{profile.loss_share:.0%} of the tokens'),
        ('global batch', report.identity()),
        ('largest safe size', f'{report.device_train_microbatch_size} rows of {report.slot_tokens} tokens'),
        ('token budget', f'{report.max_tokens:,} tokens a microbatch'),
        ('image tokens that fit', '-' if report.max_image_tokens is None else f'{report.max_image_tokens:,}'),
        ('peak memory', f'{report.peak_gib:.2f} of {report.limit_gib:.2f} GiB ({report.safety:.0%} of the device)'),
        ('kept from more by', report.binds),
    ]
    return _table('Microbatch size', None, rows)


def _vision(profile: DatasetProfile) -> str:
    if profile.patches_per_sample is None:
        return '-'
    per_token = profile.patches_per_image_token
    merged = '' if per_token is None else f', {per_token:.3g} for each image token'
    return f'{profile.patches_per_sample:.0f} patches a sample with images{merged}'


def _memory(report: SizingReport) -> str:
    total = sum(report.terms.values())
    rows = [(name, f'{gib:.3f}', f'{gib / total:.1%}') for name, gib in report.terms.items()]
    return _table('Memory at the peak of the largest microbatch', ('held by', 'GiB', 'share'), rows)


def _methods(report: SizingReport) -> str:
    time = 'time against stock' if report.seconds_per_unit is None else 'seconds a step'
    header = ('method', 'padding', 'microbatches', 'imbalance', time, 'speed-up', 'of the bound')
    rows = []
    for method, figures in report.figures.items():
        seconds = report.step_seconds(method)
        share = figures.cost / report.figures['stock'].cost
        rows.append(
            (
                METHOD_NAMES[method],
                f'{figures.padding_ratio:.1%}',
                f'{figures.microbatches:.1f}',
                f'{figures.imbalance:.2f}',
                f'{share:.2f}' if seconds is None else f'{seconds:.3f}',
                f'{report.speedup(method):.2f}x',
                f'{report.share_of_bound(method):.0%}',
            )
        )
    return _table('A step', header, rows)


def _sizes(report: SizingReport) -> str:
    rows = []
    for row in report.sizes:
        mark = 'suggested' if row.size == report.device_train_microbatch_size else '' if row.fits else 'too large'
        padding = [f'{row.padding[method]:.1%}' for method in METHOD_NAMES]
        rows.append((str(row.size), *padding, f'{row.peak_gib:.2f}', mark))
    return _table('Microbatch sizes', ('size', 'padding, stock', 'split', 'planned', 'peak GiB', ''), rows)


def _table(title: str, header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, and figures, which have a header, to the right."""
    lines = [header, *rows] if header else list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    align = '>' if header else '<'

    def text(line: Sequence[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        cells = [f'{first[0]:<{first[1]}}', *(f'{cell:{align}{width}}' for cell, width in others)]
        return '  '.join(cells).rstrip()

    return '\n'.join([title, '-' * len(title), *map(text, lines)])
