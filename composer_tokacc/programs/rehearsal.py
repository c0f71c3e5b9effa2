# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the heaviest microbatches of a whole run before its first step, so that memory fails then or not at all."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_tokacc.collectives import max_over_ranks
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.programs.build import RunParts
from composer_tokacc.programs.errors import ConfigError
from composer_tokacc.programs.process import say
from composer_tokacc.programs.rehearsal_choice import Candidate, heaviest
from composer_tokacc.programs.rehearsal_run import is_out_of_memory, room_for_optimizers, run_candidate, undisturbed
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import source_of
from composer_tokacc.programs.suggest import memory_of_run
from composer_tokacc.sampling import RegroupingDataLoader
from composer_tokacc.sizing import GIB, MemoryModel

log = logging.getLogger(__name__)


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
    with undisturbed(state), room_for_optimizers(state):
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
    chosen: list[Any] = [None]
    if dist.get_global_rank() == 0:
        options = sampler.planner.options
        options = replace(options, max_tokens=options.max_tokens * report.microbatch_size // first)
        chosen = [heaviest(state, sampler, options, memory, whole=split is not None and split.packing)]
    dist.broadcast_object_list(chosen)
    candidates, report.num_batches = chosen[0]
    return candidates


def _run_all(state: State, candidates: list[Candidate], report: RehearsalReport) -> Candidate | None:
    """Runs the candidates one after the other; returns the first that does not fit on some rank."""
    # A second one finds gradients and logits of the first, as in a step.
    for candidate in candidates if len(candidates) > 1 else candidates * 2:
        does_fit, peak = True, 0
        try:
            peak = run_candidate(state, candidate, report.microbatch_size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            does_fit = False
        if not does_fit:  # outside of the handler, whose traceback holds tensors
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        does_fit, peak = not max_over_ranks([not does_fit])[0], max_over_ranks([peak >> 10])[0] << 10
        report.lines.append(
            f'step {candidate.step}: {candidate.rows} rows of {candidate.width} tokens, {candidate.image_tokens} image '
            f'tokens: predicted {_gib(candidate.predicted)}, '
            + (f'measured {_gib(peak)}' if does_fit else 'does not fit')
        )
        if not does_fit:
            return candidate
    return None


def _refusal(state: State, failed: Candidate, size: int, fitting: int) -> str:
    dataset: Any = state.dataloader.dataset.dataset  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    names = [str(name) for index in failed.samples[0][:4] for name in dataset[index].get('sample_ids', [index])]
    remedy = (
        f'Set it to {fitting}, with which all that was rehearsed fits'
        if fitting
        else 'No smaller one fits either: leave these samples out, shard the model (FSDP), or set '
        '`model.activation_checkpointing`'
    )
    return (
        f'`microbatching.device_train_microbatch_size` must be one whose heaviest microbatch fits into memory, got: '
        f'{size}, with which that of step {failed.step} does not ({failed.rows} rows of {failed.width} tokens, '
        f'{failed.image_tokens} image tokens; samples {", ".join(names)}{", ..." * (failed.rows > 4)}). {remedy}'
    )


def _gib(num_bytes: float) -> str:
    return f'{num_bytes / GIB:.2f} GiB' if num_bytes else '-'
