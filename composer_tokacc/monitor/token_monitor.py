# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The callback that logs padding, balance of the ranks, speed, and the loss of each source of data."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import Algorithm, Callback, Event, State, TimeUnit
from composer.loggers import Logger, ProgressBarLogger
from composer.utils import dist
from torch.distributed.tensor import DTensor

from composer_tokacc.arguments import check_choice
from composer_tokacc.batch import labels_of
from composer_tokacc.checks.logits import logits_of
from composer_tokacc.collectives import all_gather_object
from composer_tokacc.counting import LossRule
from composer_tokacc.layout import microbatches_of
from composer_tokacc.model_structure import fsdp_units
from composer_tokacc.monitor.source_ledger import SourceLedger, SourceSums
from composer_tokacc.monitor.step_counts import (
    MicrobatchCounts,
    StepCounts,
    count_device_batch,
    count_microbatch,
    num_positions,
    rows_by_width,
)
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.row_counts import CountSums

NUM_TIMED_STEPS = 200
"""Number of last steps whose seconds are kept: enough that two of them are above the 99th percentile."""
PROGRESS_BAR = {
    'tokens_per_second': ('tok/s', '{:,.0f}'),
    'padding_ratio': ('padding', '{:.0%}'),
    'gradient_norm': ('|grad|', '{:.3g}'),
}
"""Metrics in Composer's progress bar: short name and format of each."""


@runtime_checkable
class Flops(Protocol):
    """Predicts the floating point operations of a microbatch, forward and backward."""

    def text(self, rows: int, width: int) -> float:
        """Returns the operations of the language model for this many rows of this padded width."""
        ...

    def media(self, batch: Mapping[str, Any]) -> float:
        """Returns the operations of the encoders. The batch is still on the CPU, so its values can be read."""
        ...


class TokenMonitor(Callback):
    """Logs padding, balance and throughput in real tokens.

    The ranks exchange their counts once per step. The monitor waits for the device only at the end of a step.

    The number of computed positions is the sum over all microbatches of rows times padded width. A real token is a
    position that is not padding.

    ============================================ ====================================================================
    Key                                          Logged in each step, over all ranks
    ============================================ ====================================================================
    ``token_monitor/padding_ratio``              Share of padding in the computed positions
    ``token_monitor/dummy_ratio``                Share of dummy rows in the computed positions. They count as padding
    ``token_monitor/device_batch_padding_ratio`` Share of padding before the batch is split and trimmed. Stock Composer
                                                 computes all of it
    ``token_monitor/loss_generating_share``      Loss-generating tokens over real tokens
    ``token_monitor/real_tokens_per_second``     Real tokens over the step's wall-clock time
    ``token_monitor/tokens_per_second``          Computed positions over the step's wall-clock time
    ``token_monitor/seconds_p50``, ``..._p99``   Median and 99th percentile of the seconds of the last 200 steps
    ``token_monitor/gradient_norm``              Norm of the step's gradient before it is clipped
    ``token_monitor/loader_seconds``             Longest time that a rank waited for the data of the step
    ``token_monitor/peak_memory_gib``            Largest memory of a rank's device so far (GPU)
    ``token_monitor/hours_left``                 Time to the end of the run if each further step takes ``seconds_p50``
    ``token_monitor/tflops_per_second``          10^12 operations of the model's matrix products, forward and backward,
                                                 of all ranks, over the step's time. Only with ``flops``
    ``token_monitor/mfu``                        The same over the peak rate of all devices, if that is known
    ``token_monitor/rank_imbalance``             Largest number of positions that a rank computes, over the mean of the
                                                 ranks; 1 is even
    ``token_monitor/microbatches``               Number of microbatches
    ``token_monitor/empty_microbatches``         Number of microbatches without loss-generating tokens
    ``token_monitor/sample_weighting_error``     Total variation distance between the shares of samples and of loss
                                                 tokens of the *previous* step's microbatches (0: to weight them by
                                                 samples is exact)
    ``token_monitor/source/NAME/loss``           Mean cross-entropy of the tokens of a source of data (``sources``)
    ``token_monitor/source/NAME/tokens``         Loss-generating tokens of the source
    ``token_monitor/source/NAME/weight``         Share of the source in the sum of the token weights of the step
    ``token_monitor/source/NAME/positions``      Share of the source in the computed positions
    ============================================ ====================================================================

    Args:
        loss_tokens (str): The counting rule if no :class:`.TokenAccumulation` has counted the tokens: ``'causal'``,
            ``'causal_attended'`` or ``'unshifted'``. Default: ``'causal'``.
        sources (str | bool): ``'auto'``: logs each source by itself if batches have ``source``, a list with a name for
            each row, and if :class:`.TokenAccumulation` has counted their tokens. ``False``: never. Default:
            ``'auto'``.
        device_tflops (float, optional): Peak rate of a device, in 10^12 operations per second, for ``mfu``. Default:
            ``None``, the rate in Composer's table for the GPU and the precision.
        flops (Flops, optional): Predicts the operations of a microbatch, as :class:`.FlopModel` does. If it also has
            the method ``logits(positions)``, only the logits that are computed count. Default: ``None``, no operations
            are logged. The program ``composer_tokacc.train`` fills it in if the peak rate is set or in Composer's
            table.

    Raises:
        ValueError: If an argument has another value or type.
    """

    def __init__(
        self,
        *,
        loss_tokens: str = 'causal',
        sources: Literal['auto', False] = 'auto',
        device_tflops: float | None = None,
        flops: Flops | None = None,
    ) -> None:
        self.loss_tokens = LossRule(loss_tokens)
        check_choice('sources', sources, ('auto', False))
        self.sources = sources
        if device_tflops is not None:
            is_number = isinstance(device_tflops, int | float)
            if not is_number or not 0 < device_tflops < math.inf:
                raise InvalidInputError(f'`device_tflops` must be a positive number, got: {device_tflops!r}.')
        self.device_tflops = device_tflops
        if flops is not None and not isinstance(flops, Flops):
            raise InvalidInputError(f'`flops` must have the methods `text` and `media`, got: {flops!r}. See FlopModel.')
        self.flops = flops
        self._device_flops_per_second = 0.0  # operations that the device can do in a second; 0: not known
        self._gradient_norm = GradientNorm()
        self._seconds: deque[float] = deque(maxlen=NUM_TIMED_STEPS)
        self._weighting_distance: float | None = None  # of this rank in the previous step
        # Of the present step: the wait for its data, counts of the device batch, and operations of the encoders.
        self._wait_began = 0.0
        self._loader_seconds = 0.0
        self._device_batch: CountSums
        self._device_batch_positions = 0
        self._media_flops = 0.0
        # Of the present attempt to compute the step: its microbatches, and operations of the language model. If the
        # attempt runs out of memory, Composer makes another one.
        self._microbatches: list[MicrobatchCounts] = []
        self._text_flops = 0.0
        self._ledger = SourceLedger()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Looks up the peak rate of the device, and adds the algorithm that measures the gradient."""
        if self._gradient_norm not in state.algorithms:
            # The last one. At AFTER_TRAIN_BATCH algorithms run from the last to the first, so it runs before clipping.
            state.algorithms.append(self._gradient_norm)
        if self.device_tflops is not None:
            self._device_flops_per_second = 1e12 * self.device_tflops
        elif self.flops is not None:
            self._device_flops_per_second = float(get_gpu_flops_available(state) or 0)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Notes when the wait for data begins."""
        self._wait_began = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Notes how long this rank has waited for data."""
        self._loader_seconds = time.perf_counter() - self._wait_began

    def batch_start(self, state: State, logger: Logger) -> None:
        """Counts the device batch: all rows of this rank, still on the CPU and not split."""
        self._device_batch = count_device_batch(state.batch, self.loss_tokens)
        self._device_batch_positions = num_positions(state.batch)
        self._media_flops = 0.0
        if self.flops is not None:
            for microbatch in microbatches_of(state.batch):
                self._media_flops += self.flops.media(microbatch)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Begins an attempt to compute the step. Forgets an earlier one, which ran out of memory."""
        self._microbatches = []
        self._text_flops = 0.0
        self._ledger.begin_attempt()

    def before_backward(self, state: State, logger: Logger) -> None:
        """Counts a microbatch and its operations, and notes its rows by source. Does not wait for the device."""
        counts = count_microbatch(state.batch, self.loss_tokens)
        self._microbatches.append(counts)
        if self.flops is not None:
            self._text_flops += _flops_of_text(self.flops, state)
        if self.sources:
            # Some models return hidden states in place of logits. `TokenAccumulation` knows whether this one does.
            has_logits = all(getattr(algorithm, 'has_logits', True) for algorithm in state.algorithms)
            self._ledger.note(state.batch, state.outputs, has_logits=has_logits)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Forgets the norm if an algorithm has dropped all gradients since. :class:`.TokenAccumulation` may do so."""
        if not _have_gradients(state.optimizers):
            self._gradient_norm.forget()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Gathers the counts of all ranks, logs the metrics of the step, and shows a few in the progress bar."""
        reports = all_gather_object((self._step_counts(), self._ledger.sums_of_rank()))
        counts_by_rank = [counts for counts, _ in reports]
        sources = self._ledger.add_up(rank_sums for _, rank_sums in reports)
        total = StepCounts.total(counts_by_rank)
        metrics = _token_metrics(total)
        metrics |= _rank_metrics(counts_by_rank)
        # Also if it is not finite. Otherwise a diverged run would seem to keep its last finite norm.
        metrics['gradient_norm'] = math.sqrt(total.gradient_square)
        assert state.timestamp.batch_wct is not None, 'Composer sets the wall-clock time of the step before BATCH_END'
        seconds = state.timestamp.batch_wct.total_seconds()
        if seconds > 0:
            self._seconds.append(seconds)
            metrics |= _speed_metrics(total, seconds)
            metrics |= self._time_metrics(state)
        # The distance of a step needs the sums over the ranks, so it is known only after the exchange. It is sent with
        # the counts of the next step.
        if self._weighting_distance is not None:
            metrics['sample_weighting_error'] = total.weighting_distance
        self._weighting_distance = _distance_of_weights(self._microbatches, total)
        metrics |= _source_metrics(sources, total)
        named_metrics = {f'token_monitor/{name}': value for name, value in metrics.items()}
        logger.log_metrics(named_metrics)
        _show(metrics, logger)

    def _step_counts(self) -> StepCounts:
        """Returns the counts of this rank in the step. Waits for the device."""
        positions = 0
        dummy_positions = 0
        empty_microbatches = 0
        for counts in self._microbatches:
            positions += counts.positions
            dummy_positions += counts.dummy_positions
            if int(counts.loss_tokens) == 0:  # may be a tensor on the device
                empty_microbatches += 1
        return StepCounts(
            samples=self._device_batch.samples,
            real_tokens=self._device_batch.real_tokens,
            loss_tokens=self._device_batch.loss_tokens,
            loss_weight=self._device_batch.loss_weight,
            device_batch_positions=self._device_batch_positions,
            positions=positions,
            dummy_positions=dummy_positions,
            microbatches=len(self._microbatches),
            empty_microbatches=empty_microbatches,
            flops=self._media_flops + self._text_flops,
            device_flops_per_second=self._device_flops_per_second,
            loader_seconds=self._loader_seconds,
            peak_memory=torch.cuda.max_memory_allocated(),  # 0 without a GPU
            gradient_square=self._gradient_norm.square_on_rank(),
            weighting_distance=self._weighting_distance or 0.0,
        )

    def _time_metrics(self, state: State) -> dict[str, float]:
        """Returns percentiles of the seconds of the last steps, and the hours to the end of the run."""
        p50, p99 = np.percentile(self._seconds, [50, 99]).tolist()
        metrics = {'seconds_p50': p50, 'seconds_p99': p99}
        all_steps = _steps_of_run(state)
        if all_steps is not None:
            steps_left = max(all_steps - state.timestamp.batch.value, 0.0)
            metrics['hours_left'] = steps_left * p50 / 3600
        return metrics


def _flops_of_text(flops: Flops, state: State) -> float:
    """Returns the operations of the language model in a microbatch."""
    num_operations = 0.0
    for width, rows in rows_by_width(state.batch).items():
        num_operations += flops.text(rows, width)
    # `text` includes the logits of all positions, also of those at which none were computed. They are subtracted if the
    # class has the optional method `logits`, as `FlopModel` does.
    flops_of_logits: Callable[[int], float] | None = getattr(flops, 'logits', None)
    if flops_of_logits is not None:
        num_operations -= flops_of_logits(_positions_without_logits(state))
    return num_operations


def _positions_without_logits(state: State) -> int:
    """Returns at how many positions of a microbatch no logits were computed; 0 if the model returns no logits."""
    logits = logits_of(state.outputs)
    if logits is None:
        return 0
    rows, width = logits.shape[:2]
    return max(labels_of(state.batch).numel() - rows * width, 0)


def _steps_of_run(state: State) -> float | None:
    """Returns how many steps the run has in all, finished ones included; None if that is not known."""
    duration = state.max_duration
    if duration is not None and duration.unit == TimeUnit.EPOCH:
        # Composer's elapsed duration, which is used below, would change only at the end of an epoch.
        if state.dataloader_len is None:
            return None
        return duration.value * state.dataloader_len.value
    elapsed = state.get_elapsed_duration()
    if elapsed is None or elapsed.value == 0:
        return None
    share_of_run = elapsed.value  # from 0 to 1
    return state.timestamp.batch.value / share_of_run


def _token_metrics(total: StepCounts) -> dict[str, float]:
    """Returns the shares of padding and of loss tokens, and the numbers of microbatches, over all ranks."""
    positions = max(total.positions, 1)
    device_batch_positions = max(total.device_batch_positions, 1)
    return {
        'padding_ratio': 1 - total.real_tokens / positions,
        'dummy_ratio': total.dummy_positions / positions,
        'device_batch_padding_ratio': 1 - total.real_tokens / device_batch_positions,
        'loss_generating_share': total.loss_tokens / max(total.real_tokens, 1),
        'microbatches': total.microbatches,
        'empty_microbatches': total.empty_microbatches,
    }


def _rank_metrics(counts_by_rank: Sequence[StepCounts]) -> dict[str, float]:
    """Returns the imbalance of the ranks, the longest wait for data and the highest memory."""
    positions = [counts.positions for counts in counts_by_rank]
    mean_positions = sum(positions) / len(positions)
    metrics = {
        'rank_imbalance': max(positions) / max(mean_positions, 1),
        'loader_seconds': max(counts.loader_seconds for counts in counts_by_rank),
    }
    peak_memory = max(counts.peak_memory for counts in counts_by_rank)
    if peak_memory > 0:
        metrics['peak_memory_gib'] = peak_memory / 2**30
    return metrics


def _speed_metrics(total: StepCounts, seconds: float) -> dict[str, float]:
    """Returns the tokens and operations per second, over all ranks."""
    metrics = {
        'real_tokens_per_second': total.real_tokens / seconds,
        'tokens_per_second': total.positions / seconds,
    }
    if total.flops:
        metrics['tflops_per_second'] = total.flops / seconds / 1e12
        if total.device_flops_per_second:
            metrics['mfu'] = total.flops / seconds / total.device_flops_per_second
    return metrics


def _source_metrics(sources: Mapping[str, SourceSums], total: StepCounts) -> dict[str, float]:
    """Returns the metrics of each source. The shares do not add up to 1 if some rows have no source.

    A source has no loss if it has no tokens in the step, or if the model returns no logits. A loss that is not finite
    is logged, so that a source of a diverged run does not seem to keep its last finite loss.
    """
    metrics = {}
    for name, sums in sources.items():
        metrics[f'source/{name}/tokens'] = sums.tokens
        # If all weights of the step are 0, the share is 0.
        metrics[f'source/{name}/weight'] = sums.weight / (total.loss_weight or 1.0)
        metrics[f'source/{name}/positions'] = sums.positions / max(total.positions, 1)
        if sums.tokens and sums.tokens_without_logits == 0:
            metrics[f'source/{name}/loss'] = sums.loss / sums.tokens
    return metrics


def _distance_of_weights(microbatches: Sequence[MicrobatchCounts], total: StepCounts) -> float:
    """Returns how far the sample weights of a step's microbatches are from their token weights, on this rank.

    The sample weight of a microbatch is its share of the samples of all ranks, and its token weight is its share of the
    loss tokens. The distances of all ranks add up to the total variation distance.
    """
    if total.samples == 0 or total.loss_tokens == 0:
        return 0.0
    distance = 0.0
    for microbatch in microbatches:
        sample_weight = microbatch.samples / total.samples
        token_weight = int(microbatch.loss_tokens) / total.loss_tokens
        distance += abs(sample_weight - token_weight)
    return distance / 2


def _show(metrics: Mapping[str, float], logger: Logger) -> None:
    """Adds a few metrics to Composer's progress bar. The bar shows them when Composer next draws it."""
    bar_metrics = {}
    for name, (short_name, number_format) in PROGRESS_BAR.items():
        if name in metrics:
            bar_metrics[short_name] = number_format.format(metrics[name])
    for destination in logger.destinations:
        if isinstance(destination, ProgressBarLogger) and destination.train_pbar is not None:
            destination.train_pbar.metrics |= bar_metrics


class GradientNorm(Algorithm):
    """Measures the norm of the gradient after the last backward pass of a step, before it is clipped.

    It is an algorithm, because Composer clips the gradient in an algorithm, and callbacks run after all algorithms.
    At events whose name begins with ``AFTER_`` Composer runs the list of algorithms from the last to the first. This
    one is appended at the end, so it runs before the gradient is clipped.
    """

    def __init__(self) -> None:
        self._norms: dict[int, torch.Tensor] = {}
        """For each number of ranks, the norm of those parts of the gradient that so many ranks hold."""

    def match(self, event: Event, state: State) -> bool:
        """Returns True at the event before the optimizer's step. Composer has unscaled the gradients by then."""
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Computes the norms on the device, without waiting for it."""
        shards_of_fsdp1 = _shards_of_fsdp1(state.model)
        # The part of each gradient that this rank holds, grouped by the number of ranks that hold the same part.
        gradients: dict[int, list[torch.Tensor]] = {}
        for parameter in state.model.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            num_shards = shards_of_fsdp1.get(parameter, 1)  # after DDP, all ranks hold the whole gradient
            if isinstance(gradient, DTensor):
                num_shards = _num_shards(gradient)
                gradient = gradient.to_local()
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()  # all other entries are 0
            num_copies = dist.get_world_size() // num_shards
            gradients.setdefault(num_copies, []).append(gradient)
        self._norms = {}
        for num_copies, tensors in gradients.items():
            self._norms[num_copies] = torch.nn.utils.get_total_norm(tensors)

    def forget(self) -> None:
        """Sets the norm to 0."""
        self._norms = {}

    def square_on_rank(self) -> float:
        """Returns this rank's share of the squared norm. Waits for the device.

        The shares of all ranks add up to the squared norm. If several ranks hold the same part of the gradient, each
        takes an equal share of that part. With FSDP1 a rank may hold only frozen parameters. Its share is then 0.
        """
        square = 0.0
        for num_copies, norm in self._norms.items():
            square += float(norm) ** 2 / num_copies
        return square


def _have_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Returns whether any parameter of the optimizers has a gradient.

    Parameters that no optimizer trains do not count, because nothing drops their gradients.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(parameter.grad is not None for parameter in group['params']):
                return True
    return False


def _shards_of_fsdp1(model: torch.nn.Module) -> dict[torch.nn.Parameter, int]:
    """Returns the number of ranks over which FSDP1 divides each parameter. Parameters outside of FSDP1 are left out.

    With FSDP1 a gradient is a plain tensor, so it does not show this itself, unlike the DTensor of FSDP2.
    """
    num_shards = {}
    unit: Any
    for unit in fsdp_units(model):  # outer units first, so that the innermost unit of a parameter counts
        strategy = getattr(unit, 'sharding_strategy', None)  # FSDP2 has none
        if strategy is not None:
            is_sharded = strategy.name != 'NO_SHARD'
            num_parts = unit.process_group.size() if is_sharded else 1
            num_shards |= dict.fromkeys(unit.parameters(), num_parts)
    return num_shards


def _num_shards(gradient: DTensor) -> int:
    """Returns the number of parts into which a gradient is divided among the ranks."""
    num_shards = 1
    for dimension, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            num_shards *= gradient.device_mesh.size(dimension)
    return num_shards
