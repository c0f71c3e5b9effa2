# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizing report: as text, as JSON, as YAML lines to paste, as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from composer_tokacc.planning import CostModel, token_budget
from composer_tokacc.sizing.memory_model import rough_fit
from composer_tokacc.sizing.profile import DatasetProfile
from composer_tokacc.sizing.simulate import METHOD_NAMES, StepFigures

WORTH_SAYING = 0.02
"""Less than this of a step is within the error of the cost model."""


@dataclass(frozen=True, kw_only=True)
class SizeRow:
    """One microbatch size."""

    size: int
    padding: dict[str, float]
    """By method: ``stock``, ``split``, ``planned``."""
    cost: dict[str, float]
    """Of a step, by method, in units of the cost model."""
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
    """Image budget of a microbatch, where the run has one."""
    fitting_image_tokens: int | None
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
    measured_cost: CostModel | None
    seconds_per_unit: float | None
    seconds_per_step: float
    sizes: list[SizeRow]
    oversize: list[str]
    """Samples over a cap of a microbatch; each goes alone."""
    too_large: list[str]
    """Those of them that do not fit into memory even alone."""

    @property
    def max_tokens(self) -> int:
        """Token budget of a microbatch."""
        return token_budget(self.device_train_microbatch_size, self.slot_tokens)

    @property
    def limit_gib(self) -> float:
        """Memory that is planned for."""
        return self.device_memory_gib * self.safety

    def step_seconds(self, method: str) -> float | None:
        """Returns the seconds of a step, where the cost model was fitted to measured times."""
        return None if self.seconds_per_unit is None else self.time_of(self.figures[method].cost)

    def time_of(self, cost: float) -> float:
        """Returns a step of this cost in seconds where those are known, or over the time of stock Composer's."""
        if self.seconds_per_unit is None:
            return cost / self.figures['stock'].cost
        return cost * self.seconds_per_unit + self.seconds_per_step

    def speedup(self, method: str = 'split') -> float:
        """Returns the step time of stock Composer over that of ``'split'`` or ``'planned'``."""
        return self.time_of(self.figures['stock'].cost) / self.time_of(self.figures[method].cost)

    def share_of_bound(self, method: str = 'split') -> float:
        """Returns how much of what any plan could reach is reached."""
        return self.bound / self.figures[method].cost

    def identity(self) -> str:
        """Returns the global batch as ``rows x microbatches x ranks`` of stock Composer."""
        accumulation, rest = divmod(self.global_batch_size // self.num_ranks, self.stock_microbatch_size)
        cut = f'{self.stock_microbatch_size} x {accumulation}' + (f' + {rest}' if rest else '')
        return f'({cut}) rows x {self.num_ranks} ranks = {self.global_batch_size} samples a step'

    def yaml(self) -> str:
        """Returns the lines to paste into a run's YAML file."""
        unless_default = {'width_multiple': 1, 'max_image_tokens': None, 'packing': False}
        names = ['device_train_microbatch_size', 'slot_tokens', 'regroup']
        names += [name for name, default in unless_default.items() if getattr(self, name) != default]
        section = {name: getattr(self, name) for name in names}
        if self.measured_cost is not None:
            default = asdict(CostModel(seconds_per_token=self.measured_cost.seconds_per_token))
            terms = asdict(self.measured_cost).items()
            section['cost'] = {name: float(f'{value:.4g}') for name, value in terms if value != default[name]}
        return yaml.safe_dump({'microbatching': section}, sort_keys=False).rstrip()

    def warnings(self) -> list[str]:
        """Returns what a reader must know before trusting the figures."""
        found = rough_fit(self.memory_residual)
        if self.too_large:
            found.append(
                f'{len(self.too_large)} samples do not fit even alone ({self.too_large[0]}): lower the context '
                '(`dataset.max_length`), or switch on checkpointing or sharding.'
            )
        elif self.oversize:
            one = self.oversize[0]
            found.append(f'{len(self.oversize)} samples are over a cap of a microbatch and go alone: {one}.')
        fastest = min((row for row in self.sizes if row.fits), key=lambda row: row.cost['planned'], default=None)
        if fastest is not None and fastest.cost['planned'] < (1 - WORTH_SAYING) * self.figures['planned'].cost:
            gain = 1 - fastest.cost['planned'] / self.figures['planned'].cost
            found.append(
                f'size {fastest.size} would make a planned step {gain:.0%} shorter than the suggested one, the largest '
                'that fits: smaller microbatches have less padding.'
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """Returns everything, with what follows from it."""
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
        """Returns the recommendation, its reasons and the lines to paste, for a terminal."""
        tables = [_answer(self), _memory(self), _methods(self), _sizes(self)]
        notes = [f'note: {line}' for line in self.warnings()]
        return '\n\n'.join([*tables, *notes, 'Paste into the YAML file:', self.yaml()])


def _answer(report: SizingReport) -> str:
    profile = report.profile
    length = f'mean {profile.mean:.0f}, median {profile.quantiles["50"]}, 99 % under {profile.quantiles["99"]}'
    rows = [
        ('dataset', f'{profile.num_samples:,} samples, {profile.text_only_share:.0%} of them text-only'),
        ('tokens a sample', length),
        ('longest sample', f'{profile.longest} tokens (variation of all {profile.variation:.2f})'),
        ('image tokens', f'{profile.image_share:.0%} of the tokens'),
        ('vision encoder', _vision(profile)),
        ('carry loss', 'unknown' if profile.loss_share is None else f'{profile.loss_share:.0%} of the tokens'),
        ('global batch', report.identity()),
        ('largest safe size', f'{report.device_train_microbatch_size} rows of {report.slot_tokens} tokens'),
        ('token budget', f'{report.max_tokens:,} tokens a microbatch'),
        ('image tokens that fit', '-' if report.fitting_image_tokens is None else f'{report.fitting_image_tokens:,}'),
        ('peak memory', f'{report.peak_gib:.2f} of {report.limit_gib:.2f} GiB ({report.safety:.0%} of the device)'),
        ('limited by', report.binds),
    ]
    return _table('Microbatch size', (), rows)


def _vision(profile: DatasetProfile) -> str:
    if profile.patches_per_sample is None:
        return '-'
    per_token = profile.patches_per_image_token
    merged = '' if per_token is None else f', {per_token:.3g} for each image token'
    return f'{profile.patches_per_sample:.0f} patches a sample with images{merged}'


def _memory(report: SizingReport) -> str:
    total = sum(report.terms.values())
    rows = [(name, f'{gib:.3f}', f'{gib / total:.1%}') for name, gib in report.terms.items()]
    return _table('Memory at the peak of the largest microbatch', (('held by', 'GiB', 'share'),), rows)


def _methods(report: SizingReport) -> str:
    unit, time = _times(report)
    above = ('', '', 'micro-', 'imbal-', 'time,', 'speed-', 'of the')
    below = ('method', 'padding', 'batches', 'ance', unit, 'up', 'bound')
    rows = []
    for method, figures in report.figures.items():
        counted = f'{figures.padding_ratio:.1%}', f'{figures.microbatches:.1f}', f'{figures.imbalance:.2f}'
        gained = f'{report.speedup(method):.2f}x', f'{report.share_of_bound(method):.0%}'
        rows.append((METHOD_NAMES[method], *counted, time(figures.cost), *gained))
    return _table('A step', (above, below), rows)


def _times(report: SizingReport) -> tuple[str, Callable[[float], str]]:
    """Returns the unit of times, and what writes the time of a cost."""
    unit, digits = ('x stock', 2) if report.seconds_per_unit is None else ('seconds', 3)
    return unit, lambda cost: f'{report.time_of(cost):.{digits}f}'


def _sizes(report: SizingReport) -> str:
    unit, time = _times(report)
    above = ('', 'padding', '', '', f'time, {unit}', '', '', 'peak', '')
    below = ('size', *METHOD_NAMES, *METHOD_NAMES, 'GiB', '')
    rows = []
    for row in report.sizes:
        mark = 'suggested' if row.size == report.device_train_microbatch_size else '' if row.fits else 'too large'
        padding = [f'{row.padding[method]:.1%}' for method in METHOD_NAMES]
        times = [time(row.cost[method]) for method in METHOD_NAMES]
        rows.append((str(row.size), *padding, *times, f'{row.peak_gib:.2f}', mark))
    return _table('Microbatch sizes', (above, below), rows)


def _table(title: str, header: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> str:
    """Lays cells out under each other: the first to the left, and figures, which have a header, to the right."""
    lines = [*header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    align = '>' if header else '<'

    def text(line: Sequence[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        cells = [f'{first[0]:<{first[1]}}', *(f'{cell:{align}{width}}' for cell, width in others)]
        return '  '.join(cells).rstrip()

    return '\n'.join([title, '-' * len(title), *map(text, lines)])


def draw_report(path: str | Path, report: SizingReport) -> None:
    """Draws padding and memory by microbatch size.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not pyplot, which would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout='constrained')
    padding, memory = figure.subplots(1, 2)
    figure.suptitle(
        f'Suggested: microbatches of at most {report.max_tokens:,} tokens, {report.speedup("split"):.2f}x as fast as '
        f'stock Composer, {report.speedup("planned"):.2f}x with planned batches\n{report.identity()}'
    )
    for (method, name), style in zip(METHOD_NAMES.items(), ('o-', 'o-', 's--'), strict=True):
        padding.plot([100 * row.padding[method] for row in report.sizes], style, label=name)
    padding.set(title='Computed positions that are padding', ylabel='%', ylim=(0, None))
    below = np.zeros(len(report.sizes))
    for part in report.sizes[0].parts_gib:
        heights = [row.parts_gib[part] for row in report.sizes]
        bars = memory.bar(range(len(heights)), heights, bottom=below, label=part)
        below += heights
    memory.bar_label(bars, [f'{row.peak_gib:.3g}' + '\ntoo large' * (not row.fits) for row in report.sizes])
    memory.axhline(report.limit_gib, color='black', ls='--', label=f'limit: {report.limit_gib:.3g} GiB')
    memory.set(title=f'Peak memory of a rank (bound by the {report.binds})', ylabel='GiB')
    memory.set_ylim(0, 1.45 * below.max())  # the limit may be far above
    chosen = report.device_train_microbatch_size
    names = [f'{row.size}' + ' *' * (row.size == chosen) for row in report.sizes]
    for axis in (padding, memory):
        axis.set_xticks(range(len(names)), names)
        axis.set_xlabel(f'device_train_microbatch_size, in rows of {report.slot_tokens} tokens (* suggested)')
        axis.legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
