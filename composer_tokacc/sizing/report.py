# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizing report: as text, as JSON, as YAML lines to paste, as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tabulate import tabulate

from composer_tokacc.planning import CAPPED_SIZES, CostModel, token_budget
from composer_tokacc.sizing.memory_model import warning_of_residual
from composer_tokacc.sizing.profile import DatasetProfile
from composer_tokacc.sizing.simulate import METHOD_NAMES, StepFigures


@dataclass(frozen=True, kw_only=True)
class SizeRow:
    """Padding, time and memory with one microbatch size."""

    size: int
    """Microbatch size, in rows of ``SizingReport.slot_tokens``. Stock Composer is simulated with the same number of its
    own padded rows, even if they do not fit into memory."""
    figures: dict[str, StepFigures]
    """Figures of a step by method: ``stock``, ``split``, ``planned``."""
    peak_gib: float
    """Highest memory of a rank in a step, whether batches are planned or only split."""
    fits: bool
    """Whether the peak is within the limit."""


@dataclass(frozen=True, kw_only=True)
class SizingReport:
    """A recommended microbatch size with its reasons. Memory is in GiB, padding a share of the computed positions.

    Fields without a description are arguments of :func:`.suggest_microbatching`.
    """

    profile: DatasetProfile
    """Figures of the dataset."""
    num_ranks: int
    global_batch_size: int
    strategy: str
    """``ddp`` or ``fsdp``."""
    device_memory_gib: float
    safety: float
    device_train_microbatch_size: int
    """Largest safe size, in rows of ``slot_tokens``."""
    slot_tokens: int
    max_image_tokens: int | None
    max_loss_tokens: int | None
    fitting_image_tokens: int | None
    """Image tokens that fit into a microbatch of the suggested size. None: the dataset has no images."""
    logits: str
    """Where the run computes logits: at ``all`` positions, or only at ``labels``."""
    most_logits: int
    """At how many positions a microbatch of the suggested size computes logits, at most."""
    stock_microbatch_size: int
    """Largest safe microbatch size of stock Composer at the same memory, in rows. 0: even one row may not fit. The
    figures of stock Composer are then for one row."""
    regroup: bool
    width_multiple: int
    packing: bool
    binds: str
    """What keeps a microbatch from being larger: ``text``, ``logits``, ``vision`` or ``global batch``."""
    terms: dict[str, float]
    """Memory by term, at the peak of the heaviest microbatch within the caps of the suggested size. A sample that goes
    alone may take more."""
    peak_gib: float
    """Highest memory in a step, which may be in the optimizer's step. Samples in ``too_large`` are left out."""
    memory_residual: float
    """Largest relative error of the memory model among the microbatches of its own fit."""
    figures: dict[str, StepFigures]
    """Figures of a step by method: ``stock``, ``split``, ``planned``."""
    bound: float
    """A lower bound of the cost of a step under any plan."""
    measured_cost: CostModel | None
    """The cost model that was fitted to times on the machine. None: no times were measured."""
    cost: CostModel | None = None
    """The cost model of the run's config. None: the config has none, so the run cuts with the planner's own."""
    equal_counts: bool | str = 'auto'
    seconds_per_unit: float | None
    """Seconds of one unit of cost. None: no times were measured."""
    seconds_per_step: float
    """Seconds of a step outside of its microbatches."""
    sizes: list[SizeRow]
    """The suggested size, which fits, and others to compare it with."""
    oversize: list[str]
    """Samples over a cap of a microbatch, such as the token budget. Each of them is computed alone."""
    too_large: list[str]
    """The samples in ``oversize`` that do not fit into memory even alone."""

    @property
    def max_tokens(self) -> int:
        """Token budget of a microbatch."""
        return token_budget(self.device_train_microbatch_size, self.slot_tokens)

    @property
    def limit_gib(self) -> float:
        """Memory of a device that may be planned for."""
        return self.device_memory_gib * self.safety

    def step_seconds(self, method: str) -> float | None:
        """Returns the seconds of a step. None: no times were measured."""
        if self.seconds_per_unit is None:
            return None
        return self.time_of(self.figures[method].cost)

    def time_of(self, cost: float) -> float:
        """Returns the time of a step with this cost.

        It is in seconds if times were measured, and in multiples of a step of stock Composer if not.
        """
        if self.seconds_per_unit is None:
            return cost / self.figures['stock'].cost
        return cost * self.seconds_per_unit + self.seconds_per_step

    def speedup(self, method: str = 'split') -> float | None:
        """Returns the time of a step of stock Composer, divided by the time of a step of a method.

        None: stock Composer has no safe microbatch size, so there is nothing to compare with.
        """
        if self.stock_microbatch_size == 0:
            return None
        stock_time = self.time_of(self.figures['stock'].cost)
        method_time = self.time_of(self.figures[method].cost)
        return stock_time / method_time

    def share_of_bound(self, method: str = 'split') -> float:
        """Returns the lower bound of the cost, divided by the cost of a method. With 1 no plan can be better."""
        return self.bound / self.figures[method].cost

    def identity(self) -> str:
        """Returns how stock Composer divides the global batch, as an equation.

        For example ``(4 x 2 + 1) rows x 8 ranks = 72 samples a step``: a rank has two microbatches of 4 rows, and one
        of 1 row.
        """
        rows_per_rank = self.global_batch_size // self.num_ranks
        size = max(self.stock_microbatch_size, 1)
        num_microbatches, remainder = divmod(rows_per_rank, size)
        microbatches = f'{size} x {num_microbatches}'
        if remainder:
            microbatches += f' + {remainder}'
        return f'({microbatches}) rows x {self.num_ranks} ranks = {self.global_batch_size} samples a step'

    def yaml(self) -> str:
        """Returns the lines to paste into a run's YAML file.

        If times were measured, the lines have the measured cost model. Otherwise they keep the one of the config.
        """
        names = (
            'device_train_microbatch_size',
            'slot_tokens',
            'regroup',
            'width_multiple',
            *CAPPED_SIZES.values(),
            'equal_counts',
            'packing',
        )
        section: dict[str, Any] = {}
        for name in names:
            value = getattr(self, name)
            if value is not None:
                section[name] = value
        cost = self.measured_cost or self.cost
        if cost is not None:
            section['cost'] = _changed_terms(cost)
        # YAML takes no numbers of numpy. JSON turns them into plain ones.
        plain_section = json.loads(json.dumps(section, default=np.generic.item))
        return yaml.safe_dump({'microbatching': plain_section}, sort_keys=False).rstrip()

    def warnings(self) -> list[str]:
        """Returns warnings about rough figures, samples that are too large, and a comparison that is not possible."""
        warnings = []
        warning = warning_of_residual(self.memory_residual)
        if warning is not None:
            warnings.append(warning)
        # If some samples are too large, the other samples over a cap are not named.
        if self.too_large:
            warnings.append(warning_of_too_large(self.too_large))
        elif self.oversize:
            warnings.append(
                f'{len(self.oversize)} samples are over a cap of a microbatch and go alone. The longest is '
                f'{self.oversize[0]}.'
            )
        if self.stock_microbatch_size == 0:
            warnings.append(
                'stock Composer has no safe microbatch size, because even one row of the longest sample '
                f'({self.profile.longest} tokens) may not fit. So there is no speed-up over it. Its figures are those '
                'of one row.'
            )
        return warnings

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields, and the values that are computed from them."""
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
        """Writes the report as JSON. Makes the folder if it is missing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.as_dict(), indent=2, default=np.generic.item)
        Path(path).write_text(f'{text}\n')

    def text(self) -> str:
        """Returns the recommendation, its reasons and the lines to paste, for a terminal."""
        sections = [_summary_table(self), _memory_table(self), _method_table(self), _size_table(self)]
        sections += [f'note: {warning}' for warning in self.warnings()]
        sections += ['Paste into the YAML file:', self.yaml()]
        return '\n\n'.join(sections)


def warning_of_too_large(names: Sequence[str]) -> str:
    """Returns the warning about samples that do not fit into memory."""
    return (
        f'{len(names)} samples do not fit even alone ({names[0]}): lower the context (`dataset.max_length`), or switch '
        'on checkpointing or sharding.'
    )


def _changed_terms(cost: CostModel) -> dict[str, float]:
    """Returns the terms of a cost model that differ from the default."""
    defaults = asdict(CostModel())
    changed = {}
    for name, value in asdict(cost).items():
        # The run only compares costs, so it needs no seconds.
        if name != 'seconds_per_token' and value != defaults[name]:
            changed[name] = value
    return changed


def _summary_table(report: SizingReport) -> str:
    """Returns the table of the dataset, the suggested size and its memory."""
    profile = report.profile
    dataset = f'{profile.num_samples:,} samples, {profile.text_only_share:.0%} of them text-only'
    length = f'mean {profile.mean:.0f}, median {profile.quantiles["50"]}, 99 % under {profile.quantiles["99"]}'
    logits = 'at all positions'
    if report.most_logits < report.max_tokens:
        logits = f'only at labels: at most {report.most_logits:,} of {report.max_tokens:,} positions'
    fitting_image_tokens = '-'
    if report.fitting_image_tokens is not None:
        fitting_image_tokens = f'{report.fitting_image_tokens:,}'
    peak = f'{report.peak_gib:.2f} of {report.limit_gib:.2f} GiB ({report.safety:.0%} of the device)'
    rows = [
        ('dataset', dataset),
        ('tokens a sample', length),
        ('longest sample', f'{profile.longest} tokens'),
        ('logits', logits),
        ('global batch', report.identity()),
        ('largest safe size', f'{report.device_train_microbatch_size} rows of {report.slot_tokens} tokens'),
        ('token budget', f'{report.max_tokens:,} tokens a microbatch'),
        ('image tokens that fit', fitting_image_tokens),
        ('peak memory', peak),
        ('limited by', report.binds),
    ]
    return _table('Microbatch size', rows)


def _memory_table(report: SizingReport) -> str:
    """Returns the table of the memory by term."""
    total = sum(report.terms.values())
    rows = [(name, f'{gib:.3f}', f'{gib / total:.1%}') for name, gib in report.terms.items()]
    return _table('Memory at the peak of the heaviest microbatch within the caps', rows, [('held by', 'GiB', 'share')])


def _method_table(report: SizingReport) -> str:
    """Returns the table that compares the methods. Its header has two lines, because the words are long."""
    header = [
        ('', '', 'micro-', 'imbal-', 'time,', 'speed-', 'of the'),
        ('method', 'padding', 'batches', 'ance', _unit_of_time(report), 'up', 'bound'),
    ]
    rows = []
    for method, figures in report.figures.items():
        row = (
            METHOD_NAMES[method],
            f'{figures.padding_ratio:.1%}',
            f'{figures.microbatches:.1f}',
            f'{figures.imbalance:.2f}',
            _time_text(report, figures.cost),
            _speedup_text(report, method),
            f'{report.share_of_bound(method):.0%}',
        )
        rows.append(row)
    return _table('A step', rows, header)


def _speedup_text(report: SizingReport, method: str) -> str:
    """Returns the speed-up of a method over stock Composer as text. It is "-" if stock Composer has no safe size."""
    speedup = report.speedup(method)
    return '-' if speedup is None else f'{speedup:.2f}x'


def _unit_of_time(report: SizingReport) -> str:
    """Returns the unit of ``SizingReport.time_of``."""
    return 'x stock' if report.seconds_per_unit is None else 'seconds'


def _time_text(report: SizingReport, cost: float) -> str:
    """Returns the time of a step with this cost as text, in the unit of ``_unit_of_time``."""
    num_decimals = 2 if report.seconds_per_unit is None else 3
    return f'{report.time_of(cost):.{num_decimals}f}'


def _size_table(report: SizingReport) -> str:
    """Returns the table of the sizes: padding of each method, time of each method, peak, and a remark."""
    methods = list(METHOD_NAMES)
    header = [('size', *methods, *methods, 'GiB', '')]
    rows = []
    for row in report.sizes:
        remark = ''
        if row.size == report.device_train_microbatch_size:
            remark = 'suggested'
        elif not row.fits:
            remark = 'too large'
        padding = [f'{figures.padding_ratio:.1%}' for figures in row.figures.values()]
        times = [_time_text(report, figures.cost) for figures in row.figures.values()]
        rows.append((str(row.size), *padding, *times, f'{row.peak_gib:.2f}', remark))
    return _table(f'Microbatch sizes: padding, time ({_unit_of_time(report)}) and peak memory', rows, header)


def _table(
    title: str,
    rows: Sequence[Sequence[str]],
    header: Sequence[Sequence[str]] = (),
) -> str:
    """Returns a table as text.

    Its first column has names. If it has a header, the other columns have figures, so they are aligned to the right.
    """
    alignment = 'right' if header else 'left'
    alignments = ['left'] + [alignment] * (len(rows[0]) - 1)
    lines = tabulate([*header, *rows], tablefmt='plain', disable_numparse=True, colalign=alignments)
    return '\n'.join([title, '-' * len(title), lines])


def draw_report(path: str | Path, report: SizingReport) -> None:
    """Saves a picture of padding and memory by microbatch size. Makes the folder if it is missing.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # A Figure of its own, because pyplot would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout='constrained')
    padding_axes, memory_axes = figure.subplots(1, 2)
    figure.suptitle(f'Suggested: {report.device_train_microbatch_size} rows of {report.slot_tokens} tokens')
    sizes = [str(row.size) for row in report.sizes]
    for method, name in METHOD_NAMES.items():
        percent = [100 * row.figures[method].padding_ratio for row in report.sizes]
        padding_axes.plot(sizes, percent, 'o-', label=name)
    padding_axes.set(title='Computed positions that are padding', ylabel='%', ylim=(0, None))
    memory_axes.bar(sizes, [row.peak_gib for row in report.sizes])
    memory_axes.axhline(report.limit_gib, color='black', ls='--', label=f'limit: {report.limit_gib:.3g} GiB')
    memory_axes.set(title='Peak memory of a rank', ylabel='GiB')
    for axes in (padding_axes, memory_axes):
        axes.set_xlabel(f'device_train_microbatch_size, in rows of {report.slot_tokens} tokens')
        axes.legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
