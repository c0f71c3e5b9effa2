# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The ``loader`` section: what the Trainer gets."""

from __future__ import annotations

from typing import Any

from composer.core import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_tokacc.config import ConfigError, TrainConfig
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel
from composer_tokacc.run.datasets import measure_dataset, mixture_of
from composer_tokacc.run.streaming_parts import LLAVA_STREAMING, build_streaming_loader, exchange_slot_tokens
from composer_tokacc.sampling import RegroupingBatchSampler, RegroupingDataLoader
from composer_tokacc.sampling.mixture import Mixture

__all__ = ['build_loader', 'regroups_ranks']


def build_loader(config: TrainConfig, dataset: Any, processor: Any, layout: BatchLayout, *, held_out: bool) -> DataSpec:
    """A loader of this rank's share, wrapped so that Composer counts, splits and trims as the config says.

    Raises:
        ConfigError: when the training set is smaller than one global batch and ``drop_last`` would leave nothing.
    """
    loader = config.loader
    global_size = (loader.global_eval_batch_size if held_out else None) or loader.global_batch_size
    drop_last = loader.drop_last and not held_out
    is_streaming = config.dataset.get('name') == LLAVA_STREAMING
    mixture = None if held_out or is_streaming else mixture_of(config.dataset, dataset)
    num_samples = len(dataset) if mixture is None else mixture.num_samples
    if not is_streaming and drop_last and num_samples < loader.global_batch_size:
        raise ConfigError(
            f'`loader.global_batch_size` must be at most the dataset with `loader.drop_last`, got: '
            f'{loader.global_batch_size} > {num_samples} samples. Lower it or set drop_last=false'
        )
    reading = {
        'collate_fn': VisionLanguageCollator(processor, layout=layout),
        'num_workers': loader.num_workers,
        'prefetch_factor': loader.prefetch_factor,
        'persistent_workers': loader.num_workers > 0,
        'pin_memory': loader.pin_memory,
    }
    slot_tokens = config.microbatching.slot_tokens
    if is_streaming:
        dataloader = build_streaming_loader(config, dataset, processor, reading, cost=_cost(config), held_out=held_out)
        slot_tokens = exchange_slot_tokens(config) if loader.exchange_ranks else slot_tokens
    elif not held_out and regroups_ranks(config):
        dataloader, slot_tokens = _regrouping_loader(config, dataset, processor, mixture, reading)
    else:
        shuffle = loader.shuffle and not held_out
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=config.seed)
        size = global_size // dist.get_world_size()
        dataloader = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=drop_last, **reading)
    microbatching = config.microbatching
    return token_data_spec(
        dataloader,
        layout=layout,
        loss_tokens=microbatching.loss_tokens,
        slot_tokens=slot_tokens,
        regroup=microbatching.regroup,
        equal_counts=microbatching.equal_counts,
        width_multiple=microbatching.width_multiple,
        packing=microbatching.packing,
        cost=_cost(config),
    )


def regroups_ranks(config: TrainConfig) -> bool:
    """Whether samples may move between ranks; not where rows must keep their order."""
    return config.loader.regroup_ranks and config.microbatching.regroup


def _cost(config: TrainConfig) -> CostModel | None:
    given = config.microbatching.cost
    return None if given is None else CostModel(**given)


def _regrouping_loader(
    config: TrainConfig, dataset: Any, processor: Any, mixture: Mixture | None, reading: dict[str, Any]
) -> tuple[RegroupingDataLoader, int]:
    """A loader that shares each global batch by length, and the slot width that it planned with.

    The width of a device batch says little here, because a rank may get short samples only: without `slot_tokens`
    a slot is as wide as the longest sample of the dataset.
    """
    table = measure_dataset(config, dataset, processor)
    longest = int(table.lengths.max())
    slot_tokens = config.microbatching.slot_tokens or longest
    size = config.microbatching.device_train_microbatch_size
    if not isinstance(size, int):
        size = config.loader.global_batch_size // dist.get_world_size()
    if size * slot_tokens < longest:
        raise ConfigError(
            '`microbatching.device_train_microbatch_size` times `slot_tokens` must be at least the longest sample, '
            f'got: {size} x {slot_tokens} < {longest} (sample {int(table.lengths.argmax())}). Raise one of them, set '
            '`dataset.max_length`, or let it go alone over the budget with `loader.regroup_ranks=false`'
        )
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=table.lengths,
        image_tokens=table.image_tokens if table.image_tokens.any() or config.loader.modality == 'per_step' else None,
        global_batch_size=config.loader.global_batch_size,
        max_tokens=size * slot_tokens,
        seed=config.seed,
        shuffle=config.loader.shuffle,
        drop_last=config.loader.drop_last,
        objective='fsdp' if config.is_sharded else 'ddp',
        width_multiple=config.microbatching.width_multiple,
        cost=_cost(config),
        mixture=mixture,
        modality=config.loader.modality,  # pyright: ignore[reportArgumentType]  # checked
    )
    return RegroupingDataLoader(dataset, batch_sampler=sampler, **reading), slot_tokens
