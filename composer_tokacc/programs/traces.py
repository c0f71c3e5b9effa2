# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Traces the model of a run without a GPU: predicts its memory, and counts its operations.

The operations are for MFU (model FLOPs utilization).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import Precision, State
from composer.distributed.mosaic_parallelism import get_mixed_precision
from composer.models import HuggingFaceModel
from composer.utils import dist

from composer_tokacc.cache import cache_folder
from composer_tokacc.collectives import from_first_rank_with_value
from composer_tokacc.data import TABLE_COLUMNS, LengthTable
from composer_tokacc.data.identity import class_name
from composer_tokacc.layout import BatchLayout
from composer_tokacc.model_structure import HALF_PRECISION
from composer_tokacc.monitor import TokenMonitor
from composer_tokacc.programs.devices import runs_on_gpu
from composer_tokacc.programs.errors import ConfigError, building
from composer_tokacc.programs.host_types import Processor, SampleDataset
from composer_tokacc.programs.models import build_transformers_model, read_config
from composer_tokacc.programs.process import say
from composer_tokacc.programs.registry import build_section, build_token_accumulation
from composer_tokacc.programs.schema import TrainConfig, without
from composer_tokacc.programs.sources import Source
from composer_tokacc.sizing import FlopModel, MemoryModel, calibrate_fake, count_flops, load_or_calibrate

log = logging.getLogger(__name__)


def memory_of_run(
    config: TrainConfig,
    dataset: SampleDataset,
    processor: Processor | None,
    table: LengthTable,
) -> MemoryModel:
    """Returns the memory model of a run. It is traced without a GPU, and kept in the user's cache folder."""
    build = _model_builder(config, processor)
    is_flash = str(config.model.attn_implementation).startswith('flash')
    if is_flash:
        # Flash attention cannot be traced, because it does not run on CPUs. SDPA without a mask is traced instead,
        # because it keeps the same tensors for the backward. With a mask it would keep the mask, too.
        build = _model_builder(config, processor, attn_implementation='sdpa')
    precision = _traced_precision(config)
    sharding = _sharding(config, precision)
    options = _TraceOptions(
        width=int(table.lengths.max()),
        precision=precision,
        strategy=_traced_strategy(sharding),
        on_gpu=_is_for_gpu(config),
        has_mask=not is_flash,
        logits=_logits_of_run(config),
    )
    traced_samples = _probe_samples(table)

    def calibrate(_: object) -> MemoryModel:  # the argument is the key, which is not needed here
        # Before the model is built, because made-up samples refuse sizes that the model cannot have.
        samples = [dataset[index] for index in traced_samples]
        return calibrate_fake(
            build,
            _on_meta_device(build).config,
            samples,
            make_optimizer=partial(build_section, 'optimizer', config.optimizer),
            **vars(options),
        )

    key = _key_of_trace(config, processor, options)
    # Other samples need another trace of the same model. For example, a token of a video has other pixels than a token
    # of an image. The samples of `size lengths=...` have the sizes of a table, but are made up, so their class counts,
    # too.
    traced_sizes = table.select(traced_samples)
    key['dataset'] = class_name(dataset)
    key['samples'] = {name: getattr(traced_sizes, name).tolist() for name in TABLE_COLUMNS}
    memory = load_or_calibrate(cache_folder('memory'), key, calibrate)
    if sharding is None:
        return memory
    num_weights = sum(parameter.numel() for parameter in _on_meta_device(build).parameters())
    return _as_sharded(memory, sharding, num_weights)


@dataclass(frozen=True)
class _TraceOptions:
    """How the traced run computes: arguments of :func:`.calibrate_fake`."""

    width: int
    """Tokens of the longest sample."""
    precision: str
    strategy: str
    on_gpu: bool
    has_mask: bool
    logits: str


def _key_of_trace(config: TrainConfig, processor: Processor | None, options: _TraceOptions) -> dict[str, Any]:
    """Returns the part of the cache key that does not depend on the samples."""
    # The section `model` does not tell the whole config of the model, because a checkpoint of the same name may change,
    # and because the processor sets the vocabulary of a fresh model.
    model_config = read_config(config.model.pretrained, config.model.config, processor)
    return {
        'model': asdict(config.model),
        'model_config': model_config.to_json_string(use_diff=False),
        'optimizer': config.optimizer,
        'precision': options.precision,
        'strategy': options.strategy,
        'device': 'gpu' if options.on_gpu else 'cpu',
        'logits': options.logits,
        'width': options.width,
    }


@dataclass(frozen=True)
class Sharding:
    """Settings of FSDP that the memory of a rank depends on."""

    keeps_gathered: bool
    """Whether gathered weights stay from the forward to the backward."""
    replicas: int
    """Number of groups of ranks that each hold the model once."""
    gathered_dtype: torch.dtype | None
    """Type in which weights are gathered. With None they are gathered in the type in which they are stored."""


def _sharding(config: TrainConfig, precision: str) -> Sharding | None:
    """Returns how FSDP shards the run; None if each rank holds the whole model."""
    if not config.is_sharded:
        return None
    settings = config.trainer['parallelism_config']['fsdp']
    if os.environ.get('FSDP_VERSION') == '2':
        # If this setting is an integer, only a part of each weight stays gathered. It is counted as all of it.
        keeps_gathered = settings.get('reshard_after_forward', True) is not True
    else:
        strategy = str(settings.get('sharding_strategy', 'FULL_SHARD')).upper()
        if strategy == 'NO_SHARD':
            return None
        keeps_gathered = strategy in ('SHARD_GRAD_OP', '_HYBRID_SHARD_ZERO2')
    replicas = settings.get('data_parallel_replicate_degree') or 1
    if replicas < 1:
        raise ConfigError(
            'trainer.parallelism_config.fsdp.data_parallel_replicate_degree',
            f'must be a number of replicas, because the memory of the run is predicted, got: {replicas}',
        )
    mixed_precision = settings.get('mixed_precision', 'DEFAULT')
    _, gathered_dtype, _, _ = get_mixed_precision(Precision(precision), mixed_precision)
    return Sharding(keeps_gathered, replicas, gathered_dtype)


def _traced_strategy(sharding: Sharding | None) -> str:
    """Returns the argument ``strategy`` of :func:`.calibrate_fake`: with which weights a rank computes.

    If FSDP gathers the weights in half precision, the model computes with these copies (``fsdp``). Otherwise it
    computes with the stored weights, which autocast casts, as under DDP (``ddp``). A trace has no ranks, so it shows no
    other effect of FSDP. :func:`_as_sharded` adds the others.
    """
    if sharding is not None and sharding.gathered_dtype in HALF_PRECISION:
        return 'fsdp'
    return 'ddp'


def _as_sharded(
    memory: MemoryModel,
    sharding: Sharding,
    num_weights: int,
) -> MemoryModel:
    """Turns the memory model of an unsharded run into the one of the same run with FSDP.

    Args:
        memory: The memory model of the unsharded run.
        sharding: How FSDP shards the run.
        num_weights: Number of all weights of the model.
    """
    static = memory.static
    # Without a type for gathering, weights are gathered as they are stored. `static.parameters` are bytes, so this is
    # the mean size of a weight, rounded up.
    bytes_of_gathered_weight = math.ceil(static.parameters / num_weights)
    if sharding.gathered_dtype is not None:
        bytes_of_gathered_weight = sharding.gathered_dtype.itemsize
    changes = {'compute_bytes': bytes_of_gathered_weight}
    if sharding.keeps_gathered:
        # Gathered blocks then stay until the backward. Weights outside of blocks always do, so all weights are counted
        # as if they were outside of blocks.
        changes['outside'] = num_weights
        changes['block'] = 0
    for name in ('parameters', 'gradients', 'optimizer', 'optimizer_step'):
        # The memory model divides these bytes by the number of all ranks, but a replica is only divided among
        # `ranks / replicas` of them.
        changes[name] = sharding.replicas * getattr(static, name)
    return replace(memory, strategy='fsdp', static=replace(static, **changes))


def _traced_precision(config: TrainConfig) -> str:
    """Returns the precision of the run, or Composer's default. A run in fp8 is traced in bfloat16."""
    default = 'amp_fp16' if _is_for_gpu(config) else 'fp32'
    with building('trainer.precision'):
        precision = Precision(config.trainer.get('precision') or default)  # Composer takes capitals, too
    return 'amp_bf16' if precision is Precision.AMP_FP8 else precision.value


def _is_for_gpu(config: TrainConfig) -> bool:
    """Returns whether memory is predicted for a GPU.

    ``trainer.device`` decides. Without it, a config with ``device_memory_gib`` means a GPU. Without both, the device of
    this machine decides.
    """
    device = config.trainer.get('device')
    if device is None and config.microbatching.device_memory_gib is None:
        return runs_on_gpu(config)
    return device != 'cpu'


def _logits_of_run(config: TrainConfig) -> str:
    """Returns the argument ``logits`` of :func:`.calibrate_fake`: at which positions the run computes logits.

    A run computes all logits if it has no TokenAccumulation, if arguments of TokenAccumulation need them all, if it
    logs metrics of training, or if the model is compiled.
    """
    algorithm = build_token_accumulation(config)
    if algorithm is None or algorithm.why_all_logits is not None:
        return 'all'
    is_compiled = config.trainer.get('compile_config') is not None
    if config.model.train_metrics or is_compiled:
        return 'all'
    return algorithm.options.logits


def watch_flops(
    source: Source,
    model: HuggingFaceModel,
    state: State,
) -> None:
    """Gives the run's :class:`.TokenMonitor` the operations of the model, so that it logs MFU; a collective.

    Does nothing without a monitor, or if the speed of the device is not known. Rank 0 counts the operations in a trace.
    If the trace fails, MFU is not logged.
    """
    monitors = [callback for callback in state.callbacks if isinstance(callback, TokenMonitor)]
    if not monitors:
        return
    monitor = monitors[0]
    device_speed = monitor.device_tflops or get_gpu_flops_available(state)
    if not device_speed:
        return
    table = source.train_table
    coefficients = None
    if dist.get_global_rank() == 0:
        say('counting the operations of the model ...')
        coefficients = _flop_coefficients(source.config, source.train_dataset, source.processor, table)
    coefficients = from_first_rank_with_value(coefficients)  # None on all ranks if the trace failed
    monitor.flops = None
    if coefficients is not None:
        layout = BatchLayout.for_model(model)  # not sent: each rank makes it from its own model
        monitor.flops = FlopModel(coefficients=coefficients, layout=layout, residual=0.0)


def _flop_coefficients(
    config: TrainConfig, dataset: SampleDataset, processor: Processor, table: LengthTable
) -> Mapping[str, float] | None:
    """Returns the coefficients of the run's :class:`.FlopModel` by a trace; None if the trace fails."""
    # Eager attention, because the trace does not see the matrix products inside of other kinds. No checkpointing,
    # because MFU leaves out recomputed operations.
    build = _model_builder(config, processor, attn_implementation='eager', activation_checkpointing=False)
    try:
        samples = [dataset[index] for index in _probe_samples(table)]
        flops = count_flops(build, _on_meta_device(build).config, samples, width=int(table.lengths.max()))
        return flops.coefficients
    except Exception as error:  # a trace may fail in many ways, and the run works without MFU
        log.warning('MFU is not logged, as the model could not be traced: %s: %s', type(error).__name__, error)
        return None


def _model_builder(config: TrainConfig, processor: Processor | None, **changes: Any) -> Callable[[], Any]:
    """Returns a function that builds the run's model, but does not load its weights.

    Args:
        config: The run.
        processor: The processor of the run; None without one.
        **changes: Settings that replace those of the section ``model``.
    """
    settings = {**without(asdict(config.model), 'train_metrics'), **changes}
    return partial(build_transformers_model, processor=processor, load_weights=False, **settings)


def _on_meta_device(build: Callable[[], Any]) -> Any:
    """Builds a model with shapes, but without values.

    A trace lays out its microbatches by the config of this model. The run's own config may differ. For example, BART
    has an encoder in its config, but only the decoder is built.
    """
    with torch.device('meta'):
        return build()


def _probe_samples(table: LengthTable) -> list[int]:
    """Returns the indices of at most three samples to trace.

    These are the shortest sample without images, and of the samples with images those with the fewest and the most
    image tokens.
    """
    indices = []
    without_images = np.flatnonzero(table.image_tokens == 0)
    if len(without_images):
        shortest = np.argmin(table.lengths[without_images])
        indices.append(int(without_images[shortest]))
    with_images = np.flatnonzero(table.image_tokens)
    if len(with_images):
        by_image_tokens = with_images[np.argsort(table.image_tokens[with_images], kind='stable')]
        indices.append(int(by_image_tokens[0]))
        indices.append(int(by_image_tokens[-1]))
    return indices
