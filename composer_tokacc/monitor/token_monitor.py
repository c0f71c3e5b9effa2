# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run pays for padding, how evenly its ranks work, and how far sample weighting would be off."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import Callback, State
from composer.loggers import Logger, ProgressBarLogger

from composer_tokacc.batch import text_of
from composer_tokacc.counting import check_rule, loss_mask
from composer_tokacc.layout import microbatches_of
from composer_tokacc.monitor.gradient_norm import GradientNorm
from composer_tokacc.monitor.source_ledger import SourceLedger
from composer_tokacc.row_counts import count_rows, is_counted, rows_of

WINDOW = 200
"""Steps of which the percentiles speak."""
SHORT = {
    'tokens_per_second': ('tok/s', '{:,.0f}'),
    'padding_ratio': ('padding', '{:.0%}'),
    'gradient_norm': ('|grad|', '{:.3g}'),
}
"""What stands in the progress bar: its name there, and its form."""


class Flops(Protocol):
    """Counts the floating point operations of a microbatch, forward and backward."""

    def text(self, rows: int, width: int) -> float:
        """Returns those of the language model."""
        ...

    def media(self, batch: Mapping[str, Any]) -> float:
        """Returns those of encoders; the batch is on the CPU."""
        ...


class TokenMonitor(Callback):
    """Logs padding, balance and throughput in real tokens; one small all-gather a step, no sync a microbatch.

    ============================================ ====================================================================
    Key                                          Logged each step, over all ranks
    ============================================ ====================================================================
    ``token_monitor/padding_ratio``              Share of the computed positions that is padding
    ``token_monitor/dummy_ratio``                Share of them that dummy rows are: a part of the padding
    ``token_monitor/device_batch_padding_ratio`` The same had no microbatch been trimmed, as stock Composer does not
    ``token_monitor/loss_generating_share``      Loss-generating tokens over real tokens
    ``token_monitor/real_tokens_per_second``     Real tokens over the step's wall-clock time
    ``token_monitor/tokens_per_second``          Computed positions over it, padding included
    ``token_monitor/seconds_p50``, ``..._p99``   Median and 99th percentile of the seconds of the last 200 steps
    ``token_monitor/gradient_norm``              Of the step's gradient, before it is clipped
    ``token_monitor/loader_seconds``             Of the step, the longest that a rank waited for its data
    ``token_monitor/peak_memory_gib``            The most that a rank's device has held so far (GPU)
    ``token_monitor/hours_left``                 To the end of the run, at the median of these steps
    ``token_monitor/tflops_per_second``          Operations of the model's matrix products, forward and backward, of
                                                 all ranks, over the step's time (``flops``)
    ``token_monitor/mfu``                        The same over what the devices can do (``device_tflops``)
    ``token_monitor/rank_imbalance``             Most positions computed by a rank over the mean; 1 is even
    ``token_monitor/microbatches``               Microbatches
    ``token_monitor/empty_microbatches``         Those without loss-generating tokens
    ``token_monitor/sample_weighting_error``     Total variation distance between sample and token weights of the
                                                 *previous* step's microbatches (0: sample weighting is exact)
    ``token_monitor/source/NAME/loss``           Of each source of data (``sources``): the mean of its tokens'
                                                 cross-entropies
    ``token_monitor/source/NAME/tokens``         Its loss-generating tokens
    ``token_monitor/source/NAME/weight``         The share of the step's weight that they have
    ``token_monitor/source/NAME/positions``      The share of the computed positions that its rows take
    ============================================ ====================================================================

    Args:
        loss_tokens (str): The counting rule where no :class:`.TokenAccumulation` has counted already.
            Default: ``'causal'``.
        sources (str | bool): ``'auto'``: where rows carry ``source``, a list of names, one a row, each source is
            logged by itself. ``False``: never. Default: ``'auto'``.
        device_tflops (float, optional): What a device can do in a second, for ``mfu``. Default: ``None``, what Composer
            knows of the GPU and the precision.
        flops (Flops, optional): Operations of a microbatch. Default: ``None``; ``train`` counts them in a trace of the
            model, where ``device_tflops`` is given or known.

    Raises:
        ValueError: If there is no such rule.
    """

    def __init__(
        self,
        *,
        loss_tokens: str = 'causal',
        sources: Literal['auto', False] = 'auto',
        device_tflops: float | None = None,
        flops: Flops | None = None,
    ) -> None:
        self.loss_tokens = check_rule(loss_tokens)
        if sources not in ('auto', False):
            raise ValueError(f"`sources` must be 'auto' or False, got: {sources!r}.")
        self.sources = sources
        if device_tflops is not None and not (isinstance(device_tflops, int | float) and 0 < device_tflops < math.inf):
            raise ValueError(f'`device_tflops` must be a positive number, got: {device_tflops!r}.')
        if flops is not None and not hasattr(flops, 'media'):
            raise ValueError(f'`flops` must have the methods `text` and `media`, got: {flops!r}. See FlopModel.')
        self.device_tflops, self.flops = device_tflops, flops
        self._ledger, self._norm = SourceLedger(), GradientNorm()
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._loader_began = self._loader_seconds = self._device_flops = 0.0
        self._step: dict[str, float] = {}  # what this rank contributes to the step's one reduction, in one order on all
        self._microbatches: list[tuple[int, Any]] = []
        self._previous: tuple[list[tuple[int, int]], float, float] | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Looks up what the device can do, 0 where Composer does not know it, and begins to measure gradients."""
        self._norm = GradientNorm.first_of(state)
        known = get_gpu_flops_available(state) if self.flops is not None and self.device_tflops is None else 0
        self._device_flops = 1e12 * self.device_tflops if self.device_tflops else float(known or 0)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Starts the wait for data."""
        self._loader_began = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Ends it."""
        self._loader_seconds = time.perf_counter() - self._loader_began

    def batch_start(self, state: State, logger: Logger) -> None:
        """Counts the device batch where nobody has, while it is on the CPU."""
        rows = rows_of(state.batch) if is_counted(state.batch) else count_rows(state.batch, self.loss_tokens)
        self._step = {
            'real': sum(row.real_tokens for row in rows),
            'device_positions': _positions(state.batch),
            'tokens': sum(row.loss_tokens for row in rows),
            'samples': sum(row.samples for row in rows),
            'media_flops': 0.0 if self.flops is None else sum(map(self.flops.media, microbatches_of(state.batch))),
            'loader_seconds': self._loader_seconds,
        }

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Forgets an attempt that ran out of memory."""
        self._microbatches = []
        self._ledger.begin_attempt()
        self._step.update(positions=0, dummies=0, microbatches=0, text_flops=0.0)

    def before_backward(self, state: State, logger: Logger) -> None:
        """Notes a microbatch by its shape and counts, which are counted on the device where it carries none."""
        batch: Mapping[str, Any] = state.batch
        rows = rows_of(batch)
        num_tokens: int | torch.Tensor = sum(row.loss_tokens for row in rows)
        if not is_counted(batch):
            num_tokens = loss_mask(batch, self.loss_tokens).sum()
        self._microbatches.append((sum(row.samples for row in rows), num_tokens))
        positions = _positions(batch)
        num_dummies = sum(row.samples == 0 for row in rows)
        self._step['positions'] += positions
        self._step['dummies'] += positions * num_dummies / len(rows)
        self._step['microbatches'] += 1
        if self.flops is not None:
            self._step['text_flops'] += self.flops.text(*text_of(batch).shape[:2])
        if self.sources:
            self._ledger.note(batch, state.outputs, self.loss_tokens)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Reduces and logs."""
        # Counts of the device are read here, once a step.
        self._microbatches = [(samples, int(tokens)) for samples, tokens in self._microbatches]
        self._step |= {
            'empty': sum(tokens == 0 for _, tokens in self._microbatches),
            'last_variation': self._variation(),
            'device_flops': self._device_flops,
            'peak_memory': torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0,
            'gradient_squares': self._norm.squares(),
        }
        ranks, sources = self._ledger.gather([*self._step.values()], state.device)
        columns = dict(zip(self._step, ranks.T, strict=True))
        totals = {field: float(column.sum()) for field, column in columns.items()}
        metrics = {
            'padding_ratio': 1 - totals['real'] / max(totals['positions'], 1),
            'dummy_ratio': totals['dummies'] / max(totals['positions'], 1),
            'device_batch_padding_ratio': 1 - totals['real'] / max(totals['device_positions'], 1),
            'loss_generating_share': totals['tokens'] / max(totals['real'], 1),
            'rank_imbalance': float(columns['positions'].max() / columns['positions'].mean().clamp(min=1)),
            'microbatches': totals['microbatches'],
            'empty_microbatches': totals['empty'],
        }
        if not math.isnan(totals['gradient_squares']):
            metrics['gradient_norm'] = math.sqrt(totals['gradient_squares'])
        metrics |= self._speed(state, totals)
        metrics['loader_seconds'] = float(columns['loader_seconds'].max())
        if peak := float(columns['peak_memory'].max()):
            metrics['peak_memory_gib'] = peak / 2**30
        if self._previous is not None:
            metrics['sample_weighting_error'] = totals['last_variation']
        self._previous = (self._microbatches, totals['samples'], totals['tokens'])
        weight = sum(row['weight'] for row in sources.values())
        for name, row in sources.items():
            metrics[f'source/{name}/tokens'] = row['tokens']
            metrics[f'source/{name}/weight'] = row['weight'] / weight if weight else 0.0
            metrics[f'source/{name}/positions'] = row['positions'] / max(totals['positions'], 1)
            if row['tokens'] and math.isfinite(row['loss']):
                metrics[f'source/{name}/loss'] = row['loss'] / row['tokens']
        logger.log_metrics({f'token_monitor/{name}': value for name, value in metrics.items()})
        _show(metrics, logger)

    def _speed(self, state: State, totals: Mapping[str, float]) -> dict[str, float]:
        """Returns what is logged of the step's time."""
        assert state.timestamp.batch_wct is not None, 'BATCH_END follows the step that sets it'
        seconds = state.timestamp.batch_wct.total_seconds()
        if seconds <= 0:
            return {}
        self._seconds.append(seconds)
        p50, p99 = np.percentile(self._seconds, [50, 99]).tolist()
        found = {
            'real_tokens_per_second': totals['real'] / seconds,
            'tokens_per_second': totals['positions'] / seconds,
            'seconds_p50': p50,
            'seconds_p99': p99,
        }
        elapsed = state.get_elapsed_duration()
        if elapsed is not None and elapsed.value > 0:
            steps = state.timestamp.batch.value
            found['hours_left'] = max(steps / elapsed.value - steps, 0.0) * p50 / 3600
        if flops := totals['media_flops'] + totals['text_flops']:
            found['tflops_per_second'] = flops / seconds / 1e12
            if totals['device_flops']:
                found['mfu'] = flops / seconds / totals['device_flops']
        return found

    def _variation(self) -> float:
        """This rank's part of the previous step's distance: its totals over ranks are known only by now."""
        if self._previous is None:
            return 0.0
        microbatches, samples, tokens = self._previous
        if samples == 0 or tokens == 0:
            return 0.0
        return sum(abs(n / samples - t / tokens) for n, t in microbatches) / 2


def _show(metrics: Mapping[str, float], logger: Logger) -> None:
    """Writes the shortest of it into Composer's progress bar, which has the loss and the time that is left."""
    found = {short: form.format(metrics[name]) for name, (short, form) in SHORT.items() if name in metrics}
    for destination in logger.destinations:
        if isinstance(destination, ProgressBarLogger) and destination.train_pbar is not None:
            destination.train_pbar.metrics |= found  # shown with the next loss


def _positions(batch: Mapping[str, Any]) -> int:
    """Rows times padded width, of the labels where the main input has no tokens; microbatches as if padded together."""
    rows, widths = zip(*(text_of(microbatch).shape[:2] for microbatch in microbatches_of(batch)), strict=True)
    return sum(rows) * max(widths)
