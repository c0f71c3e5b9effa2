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
from composer_tokacc.registry import check_arguments, unknown_name

__all__ = ['build_dataset', 'build_loader', 'build_processor', 'check_dataset']

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
    if name not in _DATASETS:
        raise ConfigError(unknown_name('`dataset.name`', str(name), _DATASETS))
    for key in ('processor', 'eval'):
        if not isinstance(section.get(key), dict | None):
            raise ConfigError(f'`dataset.{key}` must be a mapping of arguments, got: {section[key]}')
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
    return build_small_processor(LlavaDataset.texts(config.dataset['path']), **arguments)


def build_dataset(config: TrainConfig, processor: Any, *, held_out: bool) -> Dataset | None:
    """The training set, or the held-out set (None where ``dataset.eval`` is absent)."""
    if held_out and not config.dataset.get('eval'):
        return None
    return _DATASETS[config.dataset['name']](processor=processor, **_arguments(config.dataset, held_out=held_out))


def build_loader(config: TrainConfig, dataset: Any, processor: Any, layout: BatchLayout, *, held_out: bool) -> DataSpec:
    """A loader of this rank's share, wrapped so that Composer counts, splits and trims as the config says.

    Raises:
        ConfigError: when the training set is smaller than one global batch and ``drop_last`` would leave nothing.
    """
    loader = config.loader
    global_size = (loader.global_eval_batch_size if held_out else None) or loader.global_batch_size
    drop_last = loader.drop_last and not held_out
    if drop_last and len(dataset) < loader.global_batch_size:
        raise ConfigError(
            f'`loader.global_batch_size` must be at most the dataset with `loader.drop_last`, got: '
            f'{loader.global_batch_size} > {len(dataset)} samples. Lower it or set drop_last=false'
        )
    shuffle = loader.shuffle and not held_out
    sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=config.seed)
    dataloader = DataLoader(
        dataset,
        batch_size=global_size // dist.get_world_size(),
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=VisionLanguageCollator(processor, layout=layout),
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.num_workers > 0,
        pin_memory=loader.pin_memory,
    )
    microbatching = config.microbatching
    return token_data_spec(
        dataloader,
        layout=layout,
        loss_tokens=microbatching.loss_tokens,
        slot_tokens=microbatching.slot_tokens,
        regroup=microbatching.regroup,
        equal_counts=microbatching.equal_counts,
        width_multiple=microbatching.width_multiple,
        packing=microbatching.packing,
    )


def _arguments(section: dict[str, Any], *, held_out: bool) -> dict[str, Any]:
    shared = {key: value for key, value in section.items() if key not in _OWN_KEYS}
    return {**shared, **(section.get('eval') or {})} if held_out else shared
