# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the heaviest microbatches of a whole run before its first step, so that memory fails then or not at all."""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.core import Callback, State, TimeUnit
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import dist, reproducibility

from composer_tokacc.algorithm import TokenAccumulation
from composer_tokacc.collectives import from_any_rank, max_over_ranks
from composer_tokacc.compat import inner_model
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.metadata import annotate, without_metadata
from composer_tokacc.planning import CutOptions, Microbatch, cut_rows
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.errors import ConfigError
from composer_tokacc.programs.process import say
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import source_of
from composer_tokacc.programs.suggest import memory_of_run
from composer_tokacc.sampling import RegroupingBatchSampler, RegroupingDataLoader
from composer_tokacc.sampling.rank_assignment import RankAssignment
from composer_tokacc.sizing import GIB, BatchShape, MemoryModel
from composer_tokacc.weights import LOSS_WEIGHTS

log = logging.getLogger(__name__)

MOST_BATCHES = 10_000
"""Global batches that are planned ahead: some ten seconds."""
ADAM_STATES = 2
"""Bytes of optimizer states a byte of parameters, where an optimizer cannot be tried on a small one."""


class Candidate(NamedTuple):
    """A planned microbatch that may be the heaviest of the run."""

    step: int  # global batch, counted from where the run is
    samples: list[list[int]]  # indices: of this microbatch, or where rows are packed of all of its rank
    rows: int
    width: int
    image_tokens: int
    predicted: float = 0.0  # bytes at the peak of a rank, 0 where there is no memory model

    def sizes(self) -> tuple[int, int, int]:
        """Returns what memory grows with: positions, attention where it is whole, image tokens."""
        return self.rows * self.width, self.rows * self.width**2, self.image_tokens

    def __str__(self) -> str:
        return f'{self.rows} rows of {self.width} tokens, {self.image_tokens} image tokens'

    def covers(self, other: Candidate) -> bool:
        """Tells whether it is as large as another in every way."""
        return all(own >= its for own, its in zip(self.sizes(), other.sizes(), strict=True))


@dataclass(kw_only=True)
class RehearsalReport:
    """What was rehearsed."""

    num_batches: int
    """Global batches that were looked through."""
    microbatch_size: int
    """The size with which all of it fits."""
    lines: list[str] = field(default_factory=list)
    """One for each microbatch: what it is, predicted beside measured peak."""
    seconds: float = 0.0

    def text(self) -> str:
        """Returns the table."""
        head = f'rehearsed the heaviest microbatches of {self.num_batches:,} steps in {self.seconds:.1f} s:'
        return '\n  '.join([head, *self.lines])


class Rehearsal(Callback):
    """Calls :func:`rehearse` before the first step of a fit, once the model was looked at.

    Args:
        memory (MemoryModel, optional): Says by itself which microbatch is the heaviest. Default: ``None``.
        tell: Takes the table. Default: the log.
    """

    def __init__(self, memory: MemoryModel | None = None, *, tell: Callable[[str], None] = log.info) -> None:
        self.memory, self.tell = memory, tell
        self.report: RehearsalReport | None = None
        self._is_due = True

    def fit_start(self, state: State, logger: Logger) -> None:
        """A second fit may have another loader."""
        self._is_due = True

    def batch_start(self, state: State, logger: Logger) -> None:
        """Rehearses at the first batch, which TokenAccumulation has looked at by now."""
        if self._is_due:
            self._is_due = False
            self.report = rehearse(state, self.memory)
            self.tell('nothing is rehearsed: no batch is planned ahead' if self.report is None else self.report.text())


def rehearsal_of(config: TrainConfig, parts: RunParts) -> Rehearsal | None:
    """Returns what ``microbatching.rehearse`` asks for; where it says nothing, on a device with memory to fail."""
    has_gpu = config.trainer.get('device') != 'cpu' and torch.cuda.is_available()
    if (config.microbatching.rehearse or ('heaviest' if has_gpu else 'none')) == 'none':
        return None
    memory = None
    if config.microbatching.device_train_microbatch_size == 'suggest':  # traced already, and kept
        table = source_of(config).measure(parts.train_dataset, parts.processor)  # a collective
        if dist.get_global_rank() == 0:
            memory = memory_of_run(config, parts.train_dataset, parts.processor, table)
    return Rehearsal(memory, tell=say)


def rehearse(state: State, memory: MemoryModel | None = None) -> RehearsalReport | None:
    """Runs forward and backward of the heaviest microbatches that are left of a run; a collective.

    The most positions, the most image tokens, the largest ``rows x width^2``, and the highest peak by the memory model:
    at most four. Weights, gradients, buffers and random numbers are as they were.

    Args:
        state: Of a Trainer whose train loader is a :class:`.RegroupingDataLoader`, at ``Event.BATCH_START``.
        memory: The run's memory model, where there is one.

    Returns:
        What was run; None where batches are not planned ahead.

    Raises:
        ConfigError: If a microbatch does not fit, naming its samples and the size that would.
    """
    loader = state.dataloader
    if not isinstance(loader, RegroupingDataLoader):
        return None
    started, first = time.monotonic(), int(state.device_train_microbatch_size or 1)
    report, refused = RehearsalReport(num_batches=0, microbatch_size=first), None
    sampler: Any = loader.batch_sampler
    with _undisturbed(state), _room_for_optimizers(state):
        while (failed := _run_all(state, _chosen(state, memory, report, first), report)) is not None:
            refused = refused or failed
            report.microbatch_size //= 2
            if report.microbatch_size * sampler.planner.options.max_tokens < first * int(sampler.lengths.max()):
                raise ConfigError(_refusal(state, refused, first, 0))
            report.lines.append(f'with a microbatch size of {report.microbatch_size}:')
    if refused is not None:
        if not state.auto_microbatching:
            raise ConfigError(_refusal(state, refused, first, report.microbatch_size))
        state.device_train_microbatch_size = report.microbatch_size
    report.seconds = time.monotonic() - started
    return report


def _chosen(state: State, memory: MemoryModel | None, report: RehearsalReport, first: int) -> list[Candidate]:
    """Returns what the first rank chooses for all."""
    split, sampler = split_of(state.dataloader), state.dataloader.batch_sampler  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    chosen = None
    if dist.get_global_rank() == 0:
        options = sampler.planner.options
        options = replace(options, max_tokens=options.max_tokens * report.microbatch_size // first)
        chosen = _heaviest(state, sampler, options, memory, whole=split is not None and split.packing)
    candidates, report.num_batches = from_any_rank(chosen) or ([], 0)
    return candidates


def _heaviest(
    state: State, sampler: RegroupingBatchSampler, options: CutOptions, memory: MemoryModel | None, *, whole: bool
) -> tuple[list[Candidate], int]:
    """Returns the microbatches that may be the heaviest of what is left, lightest first, and the batches looked at.

    ``options`` say the token budget under which planned microbatches are cut again; ``whole``: rows will be packed.
    """
    front: list[Candidate] = []  # none of them covers another
    num_batches = 0
    for step, ranks, window in _plans_left(state, sampler):
        num_batches += 1
        for rank in ranks:
            same_rank = [[window[place] for place in one.indices] for one in rank]
            for indices, width in _cut_again(same_rank, rank, sampler, options):
                images = 0 if sampler.image_tokens is None else int(sampler.image_tokens[indices].sum())
                new = Candidate(step, same_rank if whole else [indices], len(indices), width, images)
                if not any(one.covers(new) for one in front):
                    front = [*(one for one in front if not new.covers(one)), new]
    sizes = np.array([one.sizes() for one in front], dtype=float)
    if memory is None:  # all together in the place of the peak
        peaks = (sizes / sizes.max(axis=0).clip(min=1)).sum(axis=1)
    else:
        front = [one._replace(predicted=_predicted(one, memory)) for one in front]
        peaks = np.array([one.predicted for one in front])
    places = {int(place) for place in np.column_stack([sizes, peaks]).argmax(axis=0)}
    return [front[place] for place in sorted(places, key=lambda place: (peaks[place], place))], num_batches


def _cut_again(
    groups: list[list[int]], planned: Sequence[Microbatch], sampler: RegroupingBatchSampler, options: CutOptions
) -> Iterator[tuple[list[int], int]]:
    """Gives samples and width of each microbatch, of those over the budget as the split will cut them."""
    for indices, microbatch in zip(groups, planned, strict=True):
        if microbatch.num_tokens <= options.max_tokens:
            yield indices, microbatch.width
            continue
        lengths = sampler.lengths[indices]
        images = None if sampler.image_tokens is None else sampler.image_tokens[indices]
        for rows in cut_rows(lengths, options, image_tokens=images, max_width=microbatch.width):
            width = -(-int(lengths[list(rows)].max()) // options.width_multiple) * options.width_multiple
            yield [indices[row] for row in rows], width


def _predicted(one: Candidate, memory: MemoryModel) -> float:
    pixels = int(one.image_tokens * memory.pixel_bytes_per_image_token)
    shape = BatchShape(rows=one.rows, width=one.width, image_tokens=one.image_tokens, pixel_bytes=pixels)
    return memory.peak(shape, num_ranks=dist.get_world_size())


def _plans_left(state: State, sampler: RegroupingBatchSampler) -> Iterator[tuple[int, Any, list[int]]]:
    """Gives step, microbatches of each rank, and samples of each global batch that is left of a run."""
    ahead = copy.copy(sampler)  # whose epoch may be set
    epoch, batch = int(state.timestamp.epoch), int(state.timestamp.batch_in_epoch)
    for step in range(min(_batches_left(state, sampler), MOST_BATCHES)):
        if batch == len(sampler):
            epoch, batch = epoch + 1, 0
        ahead.set_epoch(epoch)
        yield step, ahead.plan(batch).ranks, ahead.window(batch)
        batch += 1


def _batches_left(state: State, sampler: RegroupingBatchSampler) -> int:
    end, now = state.max_duration, state.timestamp
    assert end is not None, 'a fit has an end'
    if end.unit == TimeUnit.BATCH:
        return end.value - now.batch.value
    if end.unit == TimeUnit.SAMPLE:
        return -(-(end.value - now.sample.value) // sampler.global_batch_size)
    if end.unit == TimeUnit.EPOCH:
        return (end.value - now.epoch.value) * len(sampler) - now.batch_in_epoch.value
    return len(sampler)  # in tokens or seconds: what an epoch holds


def _run_all(state: State, candidates: list[Candidate], report: RehearsalReport) -> Candidate | None:
    """Runs the candidates one after the other; returns the first that does not fit on some rank."""
    # A second one finds gradients and logits of the first, as in a step.
    for candidate in candidates if len(candidates) > 1 else candidates * 2:
        peak = _peak(state, candidate, report.microbatch_size)
        over, kibibytes = max_over_ranks([peak is None, (peak or 0) >> 10])
        found = 'does not fit' if over else f'measured {_gib(kibibytes << 10)}'
        report.lines.append(f'step {candidate.step}: {candidate}: predicted {_gib(candidate.predicted)}, {found}')
        if over:
            return candidate
    return None


def _peak(state: State, candidate: Candidate, size: int) -> int | None:
    """Returns the bytes that a candidate takes at most, on a GPU; None if it does not fit."""
    try:
        _run(state, candidate, size)
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and 'out of memory' not in str(error):
            raise
    gc.collect()  # outside of the handler, whose traceback holds tensors
    torch.cuda.empty_cache()
    return None


def _run(state: State, candidate: Candidate, size: int) -> None:
    """Runs forward and backward of a candidate, or of the heaviest microbatch that the split makes of it."""
    algorithm = next((one for one in state.algorithms if isinstance(one, TokenAccumulation)), None)
    dataset: Any = state.dataloader.dataset  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    batch: PreSplitBatch = dataset.__getitems__(RankAssignment(candidate.samples))
    weights = algorithm.token_weights if algorithm is not None else 'token'
    rule = (algorithm.rule if algorithm is not None else None) or 'causal'
    split, model = split_of(state.dataloader), state.model
    if weights == 'column' and not any(LOSS_WEIGHTS in one for one in batch.microbatches):
        weights = 'token'  # a step's own, which no plan of a microbatch has
    counted = annotate(batch, rule, weights)
    microbatches = batch.microbatches if split is None else split(counted, size)
    heavy = max(microbatches, key=lambda one: (one['labels'].numel(), len(one)))
    given = {key: value for key, value in without_metadata(heavy).items() if key != LOSS_WEIGHTS}
    given = state.device.batch_to_device(given)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())  # the reducer learns the order of gradients in its first reduction
        with get_precision_context(state.precision, state.precision_config):
            outputs = model(given)
            loss = inner_model(model).loss(outputs, given)  # pyright: ignore[reportCallIssue]
        terms = list(loss.values()) if isinstance(loss, Mapping) else [loss]
        torch.stack([term.mean() for term in terms]).sum().backward()


@contextmanager
def _undisturbed(state: State) -> Iterator[None]:
    """Puts gradients, buffers and random numbers back: the run is the same with and without the rehearsal."""
    buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in state.model.parameters()]
    random_numbers = reproducibility.get_rng_state()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        reproducibility.load_rng_state(random_numbers)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, kept in buffers:
            buffer.copy_(kept)


@contextmanager
def _room_for_optimizers(state: State) -> Iterator[None]:
    """Holds the memory that optimizers will take in their first step."""
    fresh = [one for one in state.optimizers if torch.cuda.is_available() and not one.state]
    room = [torch.empty(_state_bytes(one), dtype=torch.uint8, device='cuda') for one in fresh]
    yield
    del room


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns bytes of the states that an optimizer will have, as of a small parameter."""
    parameters = [one for group in optimizer.param_groups for one in group['params']]
    held = sum((one.to_local() if hasattr(one, 'to_local') else one).nbytes for one in parameters)
    small = torch.nn.Parameter(torch.zeros(64, 64))
    small.grad = torch.zeros_like(small)
    try:
        trial = type(optimizer)([small], **optimizer.defaults)
        trial.step()
    except (TypeError, ValueError, RuntimeError):
        return held * ADAM_STATES
    states = [value for of_one in trial.state.values() for value in of_one.values()]
    return held * sum(value.nbytes for value in states if isinstance(value, torch.Tensor)) // small.nbytes


def _refusal(state: State, failed: Candidate, size: int, fitting: int) -> str:
    dataset: Any = state.dataloader.dataset.dataset  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    names = [str(name) for index in failed.samples[0][:4] for name in dataset[index].get('sample_ids', [index])]
    remedy = f'Set it to {fitting}, with which all that was rehearsed fits'
    if not fitting:
        remedy = 'No smaller one fits either: leave these out, shard the model, or checkpoint activations'
    return (
        f'`microbatching.device_train_microbatch_size` must be one whose heaviest microbatch fits into memory, got: '
        f'{size}, with which that of step {failed.step} does not ({failed}; samples {", ".join(names)}'
        f'{", ..." * (failed.rows > 4)}). {remedy}'
    )


def _gib(num_bytes: float) -> str:
    return f'{num_bytes / GIB:.2f} GiB' if num_bytes else '-'
