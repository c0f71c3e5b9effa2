# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the sizing helper found: as a table, as JSON, as YAML lines to paste."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_tokacc.memory import LARGE_RESIDUAL
from composer_tokacc.sizing.profile import DatasetProfile
from composer_tokacc.sizing.simulate import StepFigures

__all__ = ['SizeRow', 'SizingReport', 'WorldRow']


@dataclass(frozen=True, kw_only=True)
class SizeRow:
    """One microbatch size."""

    size: int
    stock_padding: float
    split_padding: float
    planned_padding: float
    peak_gib: float
    parts_gib: dict[str, float]
    """``model`` (parameters, gradients, optimizer), ``text``, ``logits``, ``vision``, ``inputs``."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class WorldRow:
    """One world size, with the largest safe microbatch there."""

    num_ranks: int
    samples_per_rank: int
    device_train_microbatch_size: int
    stock_microbatches: float
    split_microbatches: float
    split_imbalance: float
    planned_imbalance: float
    split_speedup: float
    planned_speedup: float
    peak_gib: float


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
    worlds: list[WorldRow]
    oversize: list[str]
    """Samples longer than a microbatch; each goes alone."""
    too_large: list[str]
    """Those of them that do not fit into memory even alone."""
    lengths_histogram: tuple[list[int], list[int]]

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
        """The global batch as ``rows x microbatches x ranks``, and whether it is what was asked for."""
        rows, size = self.samples_per_rank, self.stock_microbatch_size
        accumulation, rest = divmod(rows, size)
        cut = f'{size} x {accumulation}' + (f' + {rest}' if rest else '')
        found = (size * accumulation + rest) * self.num_ranks
        verdict = 'as asked' if found == self.global_batch_size else f'NOT {self.global_batch_size}'
        return f'({cut}) rows x {self.num_ranks} ranks = {found} samples a step, {verdict}'

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
