# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Suggests the microbatch size of a run from its memory model and the sizes of its samples."""

from __future__ import annotations

import logging
import math
from typing import Any

from composer.utils import dist

from composer_tokacc.collectives import run_on_rank_0
from composer_tokacc.data import LengthTable
from composer_tokacc.programs.devices import device_memory_gib
from composer_tokacc.programs.errors import building
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import Source
from composer_tokacc.programs.traces import memory_of_run
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sizing import MemoryModel, SizingReport, suggest_microbatching
from composer_tokacc.sizing.report import warning_of_too_large

log = logging.getLogger(__name__)


def suggested_microbatch(source: Source) -> tuple[int, int]:
    """Returns the microbatch size and the slot width for a config that says ``suggest``; a collective.

    Rank 0 decides, by the memory of the smallest device. All ranks raise its error, for example if a sample does not
    fit into memory even alone.
    """
    config = source.config
    table = source.train_table
    smallest_memory_gib = min(dist.all_gather_object(device_memory_gib(config)))

    def suggest() -> tuple[int, int]:
        with building('microbatching.device_train_microbatch_size'):
            memory = memory_of_run(config, source.train_dataset, source.processor, table)
            num_ranks = dist.get_world_size()
            report = suggest_for_run(config, memory, table, num_ranks=num_ranks, gib=smallest_memory_gib)
            if report.too_large:
                raise InvalidInputError(warning_of_too_large(report.too_large))
        log.info('Suggested microbatch size: %s', report.yaml())
        return report.device_train_microbatch_size, report.slot_tokens

    return run_on_rank_0(suggest)


def suggest_for_run(
    config: TrainConfig,
    memory: MemoryModel,
    table: LengthTable,
    *,
    num_ranks: int,
    gib: float,
    **options: Any,
) -> SizingReport:
    """Returns the report of :func:`.suggest_microbatching` for a config.

    With ``packing: auto`` it makes a report with packing and one without, and returns the one with cheaper steps.

    Args:
        config: The run.
        memory: Its memory model.
        table: Sizes of all samples.
        num_ranks: Ranks of the run.
        gib: Memory of one device, in GiB.
        **options: Further arguments of :func:`.suggest_microbatching`: ``safety``, and, if steps were timed,
            ``measured_cost`` and ``seconds_per_step``.
    """
    microbatching = config.microbatching
    # suggest_microbatching() simulates steps with equally many samples on each rank. With `global_batch_tokens` the
    # mean number of samples may not be a multiple of the ranks, so it is rounded up.
    samples_of_rank = math.ceil(config.loader.samples_per_batch(table.lengths) / num_ranks)
    reports = []
    packings = [True, False] if microbatching.packing == 'auto' else [bool(microbatching.packing)]
    for packing in packings:
        report = suggest_microbatching(
            table,
            num_ranks=num_ranks,
            global_batch_size=samples_of_rank * num_ranks,
            memory=memory,
            device_memory_gib=gib,
            seed=config.seed,
            packing=packing,
            cost=microbatching.cost,
            slot_tokens=microbatching.slot_tokens,
            max_image_tokens=microbatching.max_image_tokens,
            max_loss_tokens=microbatching.max_loss_tokens,
            regroup=microbatching.regroup,
            equal_counts=microbatching.equal_counts,
            width_multiple=microbatching.width_multiple,
            **options,
        )
        reports.append(report)
    # A report has figures for each method. Two of them are of this package: samples are planned over all ranks
    # (`planned`), or each rank splits its own samples (`split`). The third is stock Composer, and does not matter here.
    method = 'planned' if config.regroups_ranks else 'split'
    return min(reports, key=lambda report: report.figures[method].cost)
