# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The ``dataset`` and ``loader`` sections: processor, datasets, and the loaders that the Trainer gets."""

from __future__ import annotations

from typing import Any

from composer.core import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset
from transformers import AutoProcessor

from composer_tokacc.config import ConfigError, TrainConfig
from composer_tokacc.data import DigitsDataset, LlavaDataset, VisionLanguageCollator, build_digits_processor
from composer_tokacc.data.processor import build_small_processor
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.layout import BatchLayout
from composer_tokacc.lengths import length_table
from composer_tokacc.registry import check_arguments, unknown_name
from composer_tokacc.regrouping_loader import RegroupingDataLoader
from composer_tokacc.sampler import RegroupingBatchSampler
from composer_tokacc.streaming_parts import (
    LLAVA_STREAMING,
    build_streaming_dataset,
    build_streaming_loader,
    check_streaming_dataset,
    exchange_slot_tokens,
    streaming_texts,
)

__all__ = ['build_dataset', 'build_loader', 'build_processor', 'check_dataset', 'regroups_ranks']

_DATASETS: dict[str, Any] = {'digits': DigitsDataset, 'llava': LlavaDataset}
# Keys of the section that are not arguments of the dataset class.
_OWN_KEYS = ('name', 'processor', 'eval')


def check_dataset(section: dict[str, Any]) -> None:
    """Refuses unknown datasets and arguments, for training and, where there is one, for the held-out set.

    Raises:
        ConfigError: names what is wrong.
        ValueError: for an unknown or missing argument.
    """
    name = section.get('name')
    if name not in (*_DATASETS, LLAVA_STREAMING):
        raise ConfigError(unknown_name('`dataset.name`', str(name), [*_DATASETS, LLAVA_STREAMING]))
    for key in ('processor', 'eval'):
        if not isinstance(section.get(key), dict | None):
            raise ConfigError(f'`dataset.{key}` must be a mapping of arguments, got: {section[key]}')
    if name == LLAVA_STREAMING:
        check_streaming_dataset(section)
        return
    check_arguments('dataset', _DATASETS[name], {**section, 'processor': None}, own_keys=('name', 'eval'))
    check_arguments('dataset.eval', _DATASETS[name], {**_arguments(section, held_out=True), 'processor': None})


def build_processor(config: TrainConfig) -> Any:
    """The checkpoint's own processor, or a small one made for the dataset where the model is fresh.

    A small processor's image and patch size are those of ``model.config.vision_config``.
    """
    arguments = dict(config.dataset.get('processor') or {})
    if config.model.pretrained is not None:
        return AutoProcessor.from_pretrained(config.model.pretrained, **arguments)
    vision = (config.model.config or {}).get('vision_config', {})
    arguments = {**{key: vision[key] for key in ('image_size', 'patch_size') if key in vision}, **arguments}
    if config.dataset['name'] == 'digits':
        check_arguments('dataset.processor', build_digits_processor, arguments)
        return build_digits_processor(**arguments)
    check_arguments('dataset.processor', build_small_processor, arguments, num_given=1)
    is_streaming = config.dataset['name'] == LLAVA_STREAMING
    texts = streaming_texts(config.dataset) if is_streaming else LlavaDataset.texts(config.dataset['path'])
    return build_small_processor(texts, **arguments)


def build_dataset(config: TrainConfig, processor: Any, *, held_out: bool) -> Dataset | None:
    """The training set, or the held-out set (None where ``dataset.eval`` is absent)."""
    if held_out and not config.dataset.get('eval'):
        return None
    if config.dataset['name'] == LLAVA_STREAMING:
        return build_streaming_dataset(config, processor, held_out=held_out)
    return _DATASETS[config.dataset['name']](processor=processor, **_arguments(config.dataset, held_out=held_out))


def build_loader(config: TrainConfig, dataset: Any, processor: Any, layout: BatchLayout, *, held_out: bool) -> DataSpec:
    """A loader of this rank's share, wrapped so that Composer counts, splits and trims as the config says.

    Raises:
        ConfigError: when the training set is smaller than one global batch and ``drop_last`` would leave nothing.
    """
    loader = config.loader
    global_size = (loader.global_eval_batch_size if held_out else None) or loader.global_batch_size
    drop_last = loader.drop_last and not held_out
    is_streaming = config.dataset['name'] == LLAVA_STREAMING
    if not is_streaming and drop_last and len(dataset) < loader.global_batch_size:
        raise ConfigError(
            f'`loader.global_batch_size` must be at most the dataset with `loader.drop_last`, got: '
            f'{loader.global_batch_size} > {len(dataset)} samples. Lower it or set drop_last=false'
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
        dataloader = build_streaming_loader(config, dataset, processor, reading, held_out=held_out)
        slot_tokens = exchange_slot_tokens(config) if loader.exchange_ranks else slot_tokens
    elif not held_out and regroups_ranks(config):
        dataloader, slot_tokens = _regrouping_loader(config, dataset, processor, reading)
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
    )


def regroups_ranks(config: TrainConfig) -> bool:
    """Whether samples may move between ranks; not where rows must keep their order."""
    return config.loader.regroup_ranks and config.microbatching.regroup


def _regrouping_loader(
    config: TrainConfig, dataset: Any, processor: Any, reading: dict[str, Any]
) -> tuple[RegroupingDataLoader, int]:
    """A loader that shares each global batch by length, and the slot width that it planned with.

    The width of a device batch says little here, because a rank may get short samples only: without `slot_tokens`
    a slot is as wide as the longest sample of the dataset.
    """
    table = length_table(dataset, processor, folder=config.loader.lengths_folder)
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
        image_tokens=table.image_tokens if table.image_tokens.any() else None,
        global_batch_size=config.loader.global_batch_size,
        max_tokens=size * slot_tokens,
        seed=config.seed,
        shuffle=config.loader.shuffle,
        drop_last=config.loader.drop_last,
        objective='fsdp' if (config.trainer.get('parallelism_config') or {}).get('fsdp') else 'ddp',
        width_multiple=config.microbatching.width_multiple,
    )
    return RegroupingDataLoader(dataset, batch_sampler=sampler, **reading), slot_tokens


def _arguments(section: dict[str, Any], *, held_out: bool) -> dict[str, Any]:
    shared = {key: value for key, value in section.items() if key not in _OWN_KEYS}
    return {**shared, **(section.get('eval') or {})} if held_out else shared
