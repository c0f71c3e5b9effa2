# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the heaviest microbatches of a run before its first step. If memory is too small, it shows then, and not later.

A :class:`.RegroupingBatchSampler` plans all batches of a run from the lengths of the samples. So the sizes of every
microbatch are known before it is read. The candidates are the microbatches that are the largest by one of five sizes.
The samples of a candidate are read, cut by the split of the run (the function that cuts a device batch into
microbatches), and go forward and backward. If one candidate does not fit, all of them are cut and run again with half
the microbatch size. After this smaller cut, a microbatch that was no candidate may be the heaviest. So a run that goes
on with the smaller size may still fail late.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from composer.core import Callback, State, TimeUnit
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import dist, ensure_tuple
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm import TokenAccumulation
from composer_tokacc.batch import Batch
from composer_tokacc.checks.written_state import undisturbed
from composer_tokacc.collectives import max_over_ranks, run_on_rank_0
from composer_tokacc.compat import inner_model
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import PreSplitBatch, microbatches_of
from composer_tokacc.planning import Microbatch
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.devices import runs_on_gpu
from composer_tokacc.programs.errors import ConfigError, shorten
from composer_tokacc.programs.process import say
from composer_tokacc.programs.schema import TrainConfig, without
from composer_tokacc.programs.traces import memory_of_run
from composer_tokacc.row_counts import CountSums, row_counts_of, with_counts, without_row_counts
from composer_tokacc.sampling import RegroupingBatchSampler, RegroupingDataLoader
from composer_tokacc.sampling.rank_assignment import RankAssignment
from composer_tokacc.sizing import GIB, BatchShape, MemoryModel
from composer_tokacc.sizing.memory_model import bytes_of_states
from composer_tokacc.sizing.profile import counted_sizes
from composer_tokacc.sizing.shapes import logit_positions
from composer_tokacc.weights import LOSS_WEIGHTS

log = logging.getLogger(__name__)

MOST_BATCHES = 10_000
"""At most this many global batches are searched for the heaviest microbatches. It takes about ten seconds."""


class Candidate(NamedTuple):
    """A planned microbatch that may be the heaviest of the run."""

    step: int
    """Number of the step in the run. The first one of the run is 1."""
    samples: list[int]
    """Its samples, as indices of the dataset."""
    samples_to_read: list[list[int]]
    """The samples to read in order to run it, a list for each microbatch that the loader collates. Without packing
    these are its own samples. With packing they are all samples of the rank in this step, because the split packs them
    together."""
    shape: BatchShape
    predicted: float | None = None
    """Predicted peak of a rank's memory in bytes; None without a memory model."""

    def sizes(self) -> tuple[float, ...]:
        """Returns five sizes that memory grows with: positions, attention matrix, image tokens, logits, and the total.

        The first four are counts. The total is the predicted peak in bytes. Without a memory model it is the sum of
        three of the counts, which only serves to compare microbatches of the same run.
        """
        shape = self.shape
        total = self.predicted
        if total is None:
            total = shape.tokens + shape.image_tokens + shape.logits
        return shape.tokens, shape.area, shape.image_tokens, shape.logits, total

    def __str__(self) -> str:
        """Returns the planned shape. The split may cut it into smaller microbatches."""
        shape = self.shape
        return (
            f'{shape.rows} rows of {shape.width} tokens, {shape.image_tokens} image tokens, logits at {shape.logits} '
            'positions'
        )


class PlannedStep(NamedTuple):
    """A step of the run, as the sampler plans it."""

    number: int
    """Number of the step in the run. The first one of the run is 1."""
    window: list[int]
    """The samples of its global batch, as indices of the dataset."""
    microbatches_by_rank: Sequence[Sequence[Microbatch]]
    """The microbatches of each rank. Their indices are places in ``window``."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run whose batches are planned ahead, and the numbers that predict its memory."""

    state: State
    accumulation: TokenAccumulation | None
    """The run's algorithm, if it has one."""
    sampler: RegroupingBatchSampler
    memory: MemoryModel | None
    """None on all ranks but the first, and if the run has no memory model."""
    labels_per_sample: np.ndarray | None
    """Number of labels of each sample, (n,). None if the run computes all logits, or if the labels are not counted."""


@dataclass(kw_only=True)
class RehearsalReport:
    """The outcome of a rehearsal."""

    num_batches: int
    """Number of global batches that were searched for the heaviest microbatches."""
    microbatch_size: float
    """The largest tried size that fits; 1 for a run without a size. Not always an integer, as in Composer."""
    lines: list[str]
    """A line for each microbatch: its shape, its predicted and its measured peak. A line with the size comes before the
    microbatches of each smaller size."""

    def text(self) -> str:
        """Returns all lines as one text, for the log."""
        head = f'rehearsed the heaviest microbatches of {self.num_batches:,} steps:'
        return '\n  '.join([head, *self.lines])


@dataclass(eq=False)
class Rehearsal(Callback):
    """Calls :func:`rehearse` before the first step of a fit, after the first-batch check.

    Give the run's :class:`.RegroupingBatchSampler` its ``loss_tokens``. Without them the rehearsal computes all logits,
    even if the run computes them only at labels.
    """

    memory: MemoryModel | None = None
    """Predicts the peak of a microbatch. Without it microbatches are compared only by their sizes."""
    tell: Callable[[str], None] = log.info
    """Function that gets the text of the report."""
    report: RehearsalReport | None = field(default=None, init=False)
    """The outcome of the last rehearsal."""
    _is_due: bool = field(default=True, init=False)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Makes the next batch rehearse. A second fit rehearses again, because it may have another loader."""
        self._is_due = True

    def batch_start(self, state: State, logger: Logger) -> None:
        """Rehearses at the first batch. TokenAccumulation has checked this batch, because algorithms run first."""
        if not self._is_due:
            return
        self._is_due = False
        self.report = rehearse(state, self.memory)
        if self.report is None:
            self.tell('nothing is rehearsed: no batch is planned ahead')
        else:
            self.tell(self.report.text())


def rehearsal_of(config: TrainConfig, parts: RunParts) -> Rehearsal | None:
    """Returns the callback for ``microbatching.rehearse``. Without a value there, only GPUs get one."""
    setting = config.microbatching.rehearse
    if setting == 'none' or (setting is None and not runs_on_gpu(config)):
        return None
    rehearsal = Rehearsal(tell=say)
    # With `suggest` the memory model of the run is in the cache by now. Otherwise the model would have to be traced,
    # which takes long.
    is_suggested = config.microbatching.device_train_microbatch_size == 'suggest'
    if is_suggested and isinstance(parts.train_loader.dataloader, RegroupingDataLoader):
        source = parts.source
        table = source.train_table  # a collective if it is the first use, so on all ranks
        if dist.get_global_rank() == 0:
            rehearsal.memory = memory_of_run(config, source.train_dataset, source.processor, table)
    return rehearsal


def rehearse(state: State, memory: MemoryModel | None = None) -> RehearsalReport | None:
    """Runs forward and backward of the heaviest microbatches in the rest of a run; a collective.

    These are at most five, the largest one by each size of :meth:`Candidate.sizes`. If one does not fit, they are cut
    again by half the microbatch size, until all of them fit. Then a run with the size ``auto`` goes on with the smaller
    size, and any other run is refused. Weights do not change; gradients, buffers and random numbers are restored.

    Args:
        state: Of a Trainer whose train loader is a :class:`.RegroupingDataLoader`, at ``Event.BATCH_START``.
        memory: The run's memory model, if there is one.

    Returns:
        The report; None if batches are not planned ahead.

    Raises:
        ConfigError: If a microbatch does not fit, and the size is not ``auto`` or no smaller one fits. It names the
            samples and a size that fits.
    """
    if not isinstance(state.dataloader, RegroupingDataLoader):
        return None
    run = _planned_run(state, memory)
    candidates, num_batches = run_on_rank_0(partial(heaviest_of_run, run))
    # Without a size, 1 stands for it. It cannot be halved, so no smaller size is tried.
    size = state.device_train_microbatch_size or 1
    lines: list[str] = []
    first_failure: Candidate | None = None
    fitting_size: float | None = None
    with _leaving_no_trace(state), _room_for_optimizers(state):
        for tried_size in _sizes_to_try(run, size):
            if first_failure is not None:
                lines.append(f'cut by a microbatch size of {tried_size}:')
            failed = _run_all(run, candidates, tried_size, lines)
            if failed is None:
                fitting_size = tried_size
                break
            first_failure = first_failure or failed
    if first_failure is None:  # all fit with the run's own size
        return RehearsalReport(num_batches=num_batches, microbatch_size=size, lines=lines)
    if fitting_size is None or not state.auto_microbatching:
        raise _does_not_fit(run, first_failure, size, fitting_size)
    state.device_train_microbatch_size = fitting_size
    return RehearsalReport(num_batches=num_batches, microbatch_size=fitting_size, lines=lines)


def _planned_run(state: State, memory: MemoryModel | None) -> PlannedRun:
    """Returns the run of a Trainer whose train loader is a :class:`.RegroupingDataLoader`."""
    sampler = cast(RegroupingBatchSampler, cast(RegroupingDataLoader, state.dataloader).batch_sampler)
    accumulations = (algorithm for algorithm in state.algorithms if isinstance(algorithm, TokenAccumulation))
    accumulation = next(accumulations, None)
    labels_per_sample = None
    if accumulation is not None and accumulation.selects_logits(state):
        labels_per_sample = sampler.rows.sizes.get('loss_tokens')
        if labels_per_sample is not None:
            labels_per_sample = counted_sizes(labels_per_sample)
    return PlannedRun(
        state=state,
        accumulation=accumulation,
        sampler=sampler,
        memory=memory,
        labels_per_sample=labels_per_sample,
    )


def _sizes_to_try(run: PlannedRun, size: float) -> list[float]:
    """Returns the microbatch size of the run, its half, a quarter, and so on.

    Ends with the last size whose token budget holds the longest sample. The budget of ``size`` is the sampler's
    ``max_tokens``, and smaller sizes have it in proportion. For example size 4, a budget of 4,000 tokens and a longest
    sample of 1,500 tokens give the sizes 4 and 2, because the budget of size 1 is 1,000 tokens.
    """
    max_tokens = run.sampler.rows.options.max_tokens
    longest_sample = int(run.sampler.lengths.max())
    sizes = [size]
    smaller_size = size // 2
    while longest_sample <= max_tokens * smaller_size / size:  # false for 0
        sizes.append(smaller_size)
        smaller_size //= 2
    return sizes


def heaviest_of_run(run: PlannedRun) -> tuple[list[Candidate], int]:
    """Returns the largest microbatches by each size in the rest of a run, and how many global batches were searched."""
    heaviest: list[Candidate] = []
    num_batches = 0
    for step in _steps_left(run):
        num_batches += 1
        candidates = list(heaviest)
        for microbatches_of_rank in step.microbatches_by_rank:
            candidates += _candidates_of_rank(run, step, microbatches_of_rank)
        heaviest = _largest_by_each_size(candidates)
    return heaviest, num_batches


def _largest_by_each_size(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the largest candidate by each size, without repetitions, sorted by the total size.

    The lightest comes first, so that the report shows how much fits before one fails.
    """
    by_total = sorted(candidates, key=lambda candidate: candidate.sizes()[-1])
    sizes = np.array([candidate.sizes() for candidate in by_total])  # (candidates, sizes)
    # If several have the same size, the last of them is chosen, because it has the largest total. argmax() returns the
    # first, so the rows are reversed.
    chosen = len(by_total) - 1 - sizes[::-1].argmax(axis=0)
    return [by_total[index] for index in np.unique(chosen)]


def _candidates_of_rank(
    run: PlannedRun,
    step: PlannedStep,
    microbatches_of_rank: Sequence[Microbatch],
) -> Iterator[Candidate]:
    """Yields the microbatches that a rank computes in one step."""
    split = split_of(run.state.dataloader)
    packs_rows = split is not None and split.packs_rows
    samples_of_rank = []
    for microbatch in microbatches_of_rank:
        samples_of_rank.append([step.window[place] for place in microbatch.indices])
    for microbatch, samples in zip(microbatches_of_rank, samples_of_rank, strict=True):
        samples_to_read = samples_of_rank if packs_rows else [samples]
        shape = _shape_of(run, samples, microbatch.width)
        predicted = None
        if run.memory is not None:
            predicted = run.memory.peak(shape, num_ranks=dist.get_world_size())
        yield Candidate(step.number, samples, samples_to_read, shape, predicted)


def _shape_of(run: PlannedRun, samples: list[int], width: int) -> BatchShape:
    """Returns the sizes of a microbatch, from the numbers that the sampler plans with."""
    image_tokens = int(run.sampler.rows.of(np.array(samples)).image_tokens.sum())
    pixel_bytes = 0
    if run.memory is not None:
        pixel_bytes = int(image_tokens * run.memory.pixel_bytes_per_image_token)
    num_logits = None  # logits at all positions
    if run.labels_per_sample is not None:
        num_labels = int(run.labels_per_sample[samples].sum())
        num_logits = logit_positions(num_labels, len(samples) * width)
    return BatchShape(
        rows=len(samples),
        width=width,
        image_tokens=image_tokens,
        pixel_bytes=pixel_bytes,
        labels=num_logits,  # BatchShape counts the positions with logits as labels, though they may be more
    )


def _steps_left(run: PlannedRun) -> Iterator[PlannedStep]:
    """Plans the remaining steps of a run, at most ``MOST_BATCHES``.

    If the run ends after a number of tokens or seconds, its number of steps is not known ahead. Then as many steps are
    planned as one epoch has. They may reach into the next epoch.
    """
    state = run.state
    sampler = copy.copy(run.sampler)  # a copy, because the run's own must stay in its epoch
    end = state.max_duration
    assert end is not None, 'a fit has an end'
    timestamp = state.timestamp
    sampler.set_epoch(int(timestamp.epoch))
    most_steps = MOST_BATCHES
    if end.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.SAMPLE):
        most_steps = min(sampler.num_batches, MOST_BATCHES)
    for _ in range(most_steps):
        # At the end of an epoch it is equal. If a run resumes with a smaller `train_subset_num_batches`, it may be
        # higher.
        if int(timestamp.batch_in_epoch) >= _length_of_epoch(state, sampler):
            timestamp = timestamp.to_next_epoch()
            sampler.set_epoch(int(timestamp.epoch))
        if timestamp.get(end.unit) >= end:
            return
        batch = int(timestamp.batch_in_epoch)
        window = sampler.window(batch)
        timestamp = timestamp.to_next_batch(samples=len(window))
        yield PlannedStep(int(timestamp.batch), window, sampler.plan(batch).ranks)


def _length_of_epoch(state: State, sampler: RegroupingBatchSampler) -> int:
    """Returns the number of batches after which Composer ends the sampler's epoch.

    Composer ends it after ``dataloader_len`` batches, which ``train_subset_num_batches`` sets. The sampler may have
    another number of batches in each epoch.
    """
    if state.dataloader_len is None:
        return sampler.num_batches
    return min(sampler.num_batches, int(state.dataloader_len))


def _run_all(
    run: PlannedRun,
    candidates: list[Candidate],
    size: float,
    lines: list[str],
) -> Candidate | None:
    """Runs the candidates one after the other, until one does not fit on some rank. Returns it; None if all fit.

    All ranks run the same microbatches, so that ranks with equal memory fail together. Under FSDP a rank that failed
    without the others would leave them waiting in a collective.

    Args:
        run: The run.
        candidates: The candidates, the lightest first.
        size: The microbatch size.
        lines: The lines of the report. A line for each candidate is added.
    """
    for candidate in _in_running_order(candidates):
        peak = _measured_peak(run, candidate, size)
        fails_here = peak is None
        fails, highest_peak = max_over_ranks([int(fails_here), peak or 0])
        outcome = 'does not fit' if fails else f'measured {_gib(highest_peak)}'
        lines.append(f'step {candidate.step}: {candidate}: predicted {_gib(candidate.predicted)}, {outcome}')
        if fails:
            return candidate
    return None


def _in_running_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates, the lightest first, but the one with the most logits just before the heaviest one.

    The gradients and outputs of a microbatch are still in memory when the next one begins, and most of the outputs are
    logits. So the heaviest microbatch is measured with the most logits in memory. If it has the most logits itself, it
    runs twice.
    """
    heaviest = candidates[-1]
    most_logits = max(candidates, key=lambda candidate: candidate.shape.logits)
    lighter = [candidate for candidate in candidates[:-1] if candidate is not most_logits]
    return [*lighter, most_logits, heaviest]


def _measured_peak(run: PlannedRun, candidate: Candidate, size: float) -> int | None:
    """Runs a candidate. Returns the bytes at its peak, 0 without a GPU; None if it does not fit."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        for microbatch in _microbatches_of(run, candidate, size):
            _run_microbatch(run, microbatch)
        return torch.cuda.max_memory_allocated()  # 0 without a GPU
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and 'out of memory' not in str(error):
            raise
    # Memory has run out. It is freed here and not in the handler, because the traceback of the error holds tensors.
    run.state.outputs = ()  # Composer drops them, too
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _run_microbatch(run: PlannedRun, microbatch: Batch) -> None:
    """Runs forward and backward of a microbatch. Logits are computed at the same positions as in the run."""
    state = run.state
    model = state.model
    # The counts of the rows are for TokenAccumulation. The model does not take them.
    batch = state.device.batch_to_device(without_row_counts(microbatch))
    with ExitStack() as stack:
        if isinstance(model, DistributedDataParallel):
            # DDP learns the order of gradients in its first reduction. That one must be in a real step.
            stack.enter_context(model.no_sync())
        with get_precision_context(state.precision, state.precision_config):
            # Logits are selected only if the labels of all samples are known. Otherwise a microbatch with more labels
            # than the candidates may come later, so all logits are computed.
            if run.accumulation is not None and run.labels_per_sample is not None:
                run.accumulation.select_logits(state, batch, CountSums.of(row_counts_of(microbatch)).loss_tokens)
            # As in Composer, the outputs of the last microbatch stay in memory until this forward has ended.
            state.outputs = model(batch)
            loss = inner_model(model).loss(state.outputs, batch)  # pyright: ignore[reportCallIssue]
        # The loss may have several terms, of any shape. How they are added makes no difference to the memory.
        means = [term.mean() for term in ensure_tuple(loss)]
        torch.stack(means).sum().backward()


def _microbatches_of(run: PlannedRun, candidate: Candidate, size: float) -> list[Batch]:
    """Reads the samples of a candidate and cuts them into microbatches as in the run."""
    state = run.state
    dataset: Any = cast(RegroupingDataLoader, state.dataloader).dataset
    # Reads and collates one microbatch for each list, as a worker of the loader does.
    batch: PreSplitBatch = dataset.__getitems__(RankAssignment(candidate.samples_to_read))
    # Weights of tokens change the loss, but not the memory, and the model has no argument for them.
    batch = batch.map(lambda microbatch: without(microbatch, LOSS_WEIGHTS))
    # Without the algorithm any rule will do, because it changes the loss, but not the memory.
    rule = LossRule.CAUSAL
    if run.accumulation is not None and run.accumulation.rule is not None:
        rule = LossRule(run.accumulation.rule)
    counted = with_counts(batch, rule)
    split = split_of(state.dataloader)
    if split is None:
        return list(microbatches_of(counted))
    return list(split(counted, size))


@contextmanager
def _leaving_no_trace(state: State) -> Iterator[None]:
    """Clears gradients, and restores them after the block, as well as outputs, the model's state and random numbers.

    A step of the Trainer also begins without gradients, except those of parameters that are in no optimizer.
    """
    gradients = [(parameter, parameter.grad) for parameter in state.model.parameters()]
    outputs = getattr(state, 'outputs', ())  # Composer deletes them if memory runs out
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with undisturbed(inner_model(state.model), watches_parameters=False):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        state.outputs = outputs


@contextmanager
def _room_for_optimizers(state: State) -> Iterator[None]:
    """Occupies the memory that optimizers will take in their first step, while the block runs."""
    reserved = []
    if torch.cuda.is_available():
        for optimizer in state.optimizers:
            if not optimizer.state:
                num_bytes = _state_bytes(optimizer)
                reserved.append(torch.empty(num_bytes, dtype=torch.uint8, device='cuda'))
    yield
    del reserved  # until here the list keeps the memory


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the states that an optimizer will have.

    It tries a step with a small parameter, which shows how many bytes of state there are for each byte of a parameter.
    Returns 0 if this step fails.
    """
    device = optimizer.param_groups[0]['params'][0].device
    # The parameter is so large that other states make no difference: a step count, or the tables that all parameters of
    # an 8-bit optimizer share.
    zeros = torch.zeros(1024, 1024, device=device)
    small = torch.nn.Parameter(zeros)
    small.grad = torch.zeros_like(small)
    trial = copy.copy(optimizer)  # without the hooks of the run's optimizer
    for name, value in vars(optimizer).items():
        vars(trial).setdefault(name, value)  # torch does not copy the attributes of subclasses
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], 'params': [small]}]
    try:
        # Not `trial.step`, because a scheduler replaces it by a function that steps the run's own optimizer.
        type(trial).step(trial)
    except Exception as error:  # of an optimizer of any class, such as LBFGS, which needs a closure
        log.warning('Memory is rehearsed without the states of %s: %s', type(optimizer).__name__, error)
        return 0
    return _parameter_bytes(optimizer) * bytes_of_states(trial) // small.nbytes


def _parameter_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of an optimizer's parameters on this rank."""
    num_bytes = 0
    for group in optimizer.param_groups:
        for parameter in group['params']:
            if hasattr(parameter, 'to_local'):  # a DTensor of FSDP2: this rank has only a part of it
                parameter = parameter.to_local()
            num_bytes += parameter.nbytes
    return num_bytes


def _does_not_fit(
    run: PlannedRun,
    failed: Candidate,
    size: float,
    fitting_size: float | None,
) -> ConfigError:
    """Returns the error for a microbatch that does not fit with ``size``.

    ``fitting_size`` is a smaller size with which all microbatches fit; None: no size was found.
    """
    dataset = cast(RegroupingDataLoader, run.state.dataloader).dataset
    names = []
    for index in failed.samples:
        sample_ids = dataset[index].get('sample_ids', [index])
        names.append(str(sample_ids[0]))
    split = split_of(run.state.dataloader)
    if split is None or split.options.slot_tokens is None:
        # Then the token budget of the run is the sampler's `max_tokens`. The size in the config does not change it.
        remedy = "Lower the sampler's `max_tokens`"
    elif fitting_size is not None:
        remedy = f'Set it to {fitting_size}, with which all that was rehearsed fits'
    else:
        remedy = 'No smaller size fits either'
    return ConfigError(
        'microbatching.device_train_microbatch_size',
        f'must be a size whose microbatches fit into memory, got: {size}. One of step {failed.step} does not fit '
        f'({failed}; samples {shorten(", ".join(names), 100)}). {remedy}, leave these samples out, shard the model, or '
        'checkpoint activations',
    )


def _gib(num_bytes: float | None) -> str:
    """Returns a figure in GiB. A dash if nothing was predicted (None) or measured (0, without a GPU)."""
    return f'{num_bytes / GIB:.2f} GiB' if num_bytes else '-'
