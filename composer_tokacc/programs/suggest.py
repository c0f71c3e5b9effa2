# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sizing helper for a run's config: its own model, optimizer, precision, processor and data."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import State
from composer.utils import dist
from transformers import PretrainedConfig

from composer_tokacc.cache import cache_folder
from composer_tokacc.collectives import from_any_rank
from composer_tokacc.data import TABLE_COLUMNS, LengthTable
from composer_tokacc.layout import BatchLayout
from composer_tokacc.monitor import TokenMonitor
from composer_tokacc.programs.errors import raised_here
from composer_tokacc.programs.models import build_transformers_model
from composer_tokacc.programs.process import say
from composer_tokacc.programs.registry import build_section, without
from composer_tokacc.programs.schema import TrainConfig, precision_of
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sizing import (
    GIB,
    FlopModel,
    MemoryModel,
    SizingReport,
    calibrate_fake,
    count_flops,
    load_or_calibrate,
    suggest_microbatching,
)

log = logging.getLogger(__name__)


def apply_suggestion(config: TrainConfig, dataset: Any, processor: Any) -> tuple[int, int]:
    """Returns what ``suggest`` stands for: ``device_train_microbatch_size`` and ``slot_tokens``; a collective."""
    # Rank 0 decides for the smallest device of all ranks, and what it refuses is refused on all.
    table = source_of(config).measure(dataset, processor)
    smallest = min(dist.all_gather_object(config.microbatching.device_memory_gib or device_memory_gib(config)))
    decided: Any = None
    if dist.get_global_rank() == 0:
        try:
            memory = memory_of_run(config, dataset, processor, table)
            report = suggest_for_run(config, memory, table, num_ranks=dist.get_world_size(), gib=smallest)
            if report.too_large:
                raise ValueError(report.warnings()[-1])
            decided = report.device_train_microbatch_size, report.slot_tokens
            log.info('Suggested microbatch size: %s', report.yaml())
        except ValueError as error:
            if not raised_here(error):  # a model's, which ends the other ranks as well
                raise
            decided = str(error)
    decided = from_any_rank(decided)
    if isinstance(decided, str):
        raise ValueError(decided)
    return decided


def suggest_for_run(
    config: TrainConfig, memory: MemoryModel, table: LengthTable, *, num_ranks: int, gib: float, **measured: Any
) -> SizingReport:
    """:func:`.suggest_microbatching` with what the config says; see there for the arguments."""
    own = config.microbatching
    names = ('cost', 'slot_tokens', 'max_image_tokens', 'regroup', 'equal_counts', 'width_multiple')
    suggest = partial(
        suggest_microbatching, table, num_ranks=num_ranks, global_batch_size=config.loader.global_batch_size,
        memory=memory, device_memory_gib=gib, seed=config.seed, **{name: getattr(own, name) for name in names},
        **measured,
    )  # fmt: skip
    choices = (True, False) if own.packing == 'auto' else (bool(own.packing),)
    return min((suggest(packing=packing) for packing in choices), key=lambda report: report.figures['split'].cost)


def memory_of_run(config: TrainConfig, dataset: Any, processor: Any, table: LengthTable) -> MemoryModel:
    """Returns the memory model of a config's run, traced without a GPU; kept in the user's cache folder."""
    # Flash attention is not for CPUs; SDPA keeps the same, but for a mask where there is padding.
    is_flash = str(config.model.attn_implementation).startswith('flash')
    precision, width = precision_of(config), int(table.lengths.max())
    key = {
        'model': asdict(config.model),
        'optimizer': config.optimizer,
        'precision': precision if precision != 'amp_fp8' else 'amp_bf16',
        'strategy': 'fsdp' if config.is_sharded else 'ddp',
        'device': 'cpu' if config.trainer.get('device') == 'cpu' else 'gpu',
        'width': width,
        # A video has other pixels a token than an image has.
        'samples': [[int(getattr(table, name)[index]) for name in TABLE_COLUMNS] for index in _probe_samples(table)],
    }

    def calibrate(key: Mapping[str, Any]) -> MemoryModel:
        traced = _to_trace(config, dataset, processor, table, **({'attn_implementation': 'sdpa'} if is_flash else {}))
        optimizer = partial(build_section, 'optimizer', config.optimizer)
        how = {'precision': key['precision'], 'strategy': key['strategy'], 'on_gpu': key['device'] == 'gpu'}
        return calibrate_fake(*traced, width=width, make_optimizer=optimizer, has_mask=not is_flash, **how)

    return load_or_calibrate(cache_folder('memory'), key, calibrate)


def watch_flops(config: TrainConfig, parts: Any, state: State) -> None:
    """Has the run's :class:`.TokenMonitor` count operations, where it knows what a device can do; a collective."""
    monitor = next((one for one in state.callbacks if isinstance(one, TokenMonitor)), None)
    if monitor is None or not (monitor.device_tflops or get_gpu_flops_available(state)):
        return
    layout, counted = BatchLayout.for_model(parts.model), None
    table = source_of(config).measure(parts.train_dataset, parts.processor)
    if dist.get_global_rank() == 0:
        say('counting the operations of the model ...')
        try:
            # With eager attention, whose products are seen.
            own = {'attn_implementation': 'eager', 'activation_checkpointing': False}
            traced = _to_trace(config, parts.train_dataset, parts.processor, table, **own)
            counted = count_flops(*traced, width=int(table.lengths.max())).coefficients
        except Exception as error:  # whatever a trace trips over is no reason not to train
            log.warning('MFU is not logged, as the model could not be traced: %s: %s', type(error).__name__, error)
    counted = from_any_rank(counted)
    monitor.flops = None if counted is None else FlopModel(coefficients=counted, layout=layout, residual=0.0)


def _to_trace(
    config: TrainConfig, dataset: Any, processor: Any, table: LengthTable, **own: Any
) -> tuple[Callable[[], Any], PretrainedConfig, list[dict[str, Any]]]:
    """Returns what builds the run's model without its weights, with settings of one's own, its config, and samples."""
    settings = {**without(asdict(config.model), 'train_metrics'), **own}
    build = partial(build_transformers_model, processor=processor, load_weights=False, **settings)
    with torch.device('meta'):
        model_config = build().config
    return build, model_config, [dataset[index] for index in _probe_samples(table)]


def device_memory_gib(config: TrainConfig) -> float:
    """Returns the memory of this rank's device; on CPU its share of the host's."""
    if config.trainer.get('device') != 'cpu' and torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB / dist.get_local_world_size()


def _probe_samples(table: LengthTable) -> list[int]:
    """Returns the shortest sample without an image, and those with the fewest and the most image tokens."""
    text, with_images = np.flatnonzero(table.image_tokens == 0), np.flatnonzero(table.image_tokens)
    chosen = [int(text[np.argmin(table.lengths[text])])] if len(text) else []
    if len(with_images):
        order = with_images[np.argsort(table.image_tokens[with_images], kind='stable')]
        chosen += [int(order[0]), int(order[-1])]
    return chosen
