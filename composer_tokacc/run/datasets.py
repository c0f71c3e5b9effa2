# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The ``dataset`` section: processor, training set (one dataset, or several parts), its lengths, held-out set."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch.utils.data import ConcatDataset, Dataset
from transformers import AutoProcessor

from composer_tokacc.config import ConfigError, TrainConfig
from composer_tokacc.config.registry import check_arguments, unknown_name
from composer_tokacc.data import DigitsDataset, LlavaDataset, build_digits_processor
from composer_tokacc.data.processor import build_small_processor
from composer_tokacc.lengths import LengthTable, length_table
from composer_tokacc.models.config import read_config, vision_patch_size
from composer_tokacc.run.streaming_parts import (
    LLAVA_STREAMING,
    build_streaming_dataset,
    check_streaming_dataset,
    streaming_texts,
)
from composer_tokacc.sampling.mixture import Mixture

__all__ = ['build_dataset', 'build_processor', 'check_dataset', 'measure_dataset', 'mixture_of', 'needs_regrouping']

_DATASETS: dict[str, Any] = {'digits': DigitsDataset, 'llava': LlavaDataset}
# Keys of the section, and of one of its parts, that are not arguments of the dataset class.
_OWN_KEYS = ('name', 'processor', 'eval')
_PART_KEYS = ('name', 'epochs', 'weight')


def check_dataset(section: dict[str, Any]) -> None:
    """Refuses unknown datasets and arguments, for training and, where there is one, for the held-out set.

    Raises:
        ConfigError: names what is wrong.
        ValueError: for an unknown or missing argument.
    """
    for key in ('processor', 'eval'):
        if not isinstance(section.get(key), dict | None):
            raise ConfigError(f'`dataset.{key}` must be a mapping of arguments, got: {section[key]}')
    if section.get('name') == LLAVA_STREAMING:
        if 'parts' in section:
            raise ConfigError('`dataset.parts` must be left out for streamed data, got: some. Use `dataset.streams`')
        check_streaming_dataset(section)
        return
    if 'parts' in section:
        _check_parts(section)
    else:
        _check_arguments('dataset', section, own_keys=_OWN_KEYS)
    if section.get('eval') is not None:
        _check_arguments('dataset.eval', _held_out(section), own_keys=('name',))


def build_processor(config: TrainConfig) -> Any:
    """The checkpoint's own processor, or a small one made for the dataset where the model is fresh.

    A small processor's image and patch size are those of ``model.config.vision_config``.
    """
    arguments = dict(config.dataset.get('processor') or {})
    if config.model.pretrained is not None:
        return AutoProcessor.from_pretrained(config.model.pretrained, **arguments)
    vision = (config.model.config or {}).get('vision_config', {})
    arguments = {**{key: vision[key] for key in ('image_size', 'patch_size') if key in vision}, **arguments}
    parts = _parts(config.dataset)
    if any(part['name'] == 'digits' for part in parts):
        check_arguments('dataset.processor', build_digits_processor, arguments)
        return build_digits_processor(**arguments)
    check_arguments('dataset.processor', build_small_processor, arguments, num_given=1)
    if config.dataset.get('name') == LLAVA_STREAMING:
        texts = streaming_texts(config.dataset)
    else:
        texts = chain.from_iterable(LlavaDataset.texts(part['path']) for part in parts)
    return build_small_processor(texts, **arguments)


def build_dataset(config: TrainConfig, processor: Any, *, held_out: bool) -> Dataset | None:
    """The training set, or the held-out set (None where ``dataset.eval`` is absent)."""
    section = config.dataset
    if held_out and not section.get('eval'):
        return None
    if section.get('name') == LLAVA_STREAMING:
        return build_streaming_dataset(config, processor, held_out=held_out)
    if held_out:
        return _build(_held_out(section), processor)
    datasets = [_build(part, processor) for part in _parts(section)]
    return ConcatDataset(datasets) if 'parts' in section else datasets[0]


def measure_dataset(config: TrainConfig, dataset: Any, processor: Any) -> LengthTable:
    """The length table of a run's dataset, with patches of the run's own vision tower; see :func:`.length_table`."""
    patch_size = vision_patch_size(read_config(config.model.pretrained, config.model.config, processor))
    return length_table(dataset, processor, folder=config.loader.lengths_folder, patch_size=patch_size)


def mixture_of(section: dict[str, Any], dataset: Any) -> Mixture | None:
    """Shares of the parts in a training set from :func:`build_dataset`; None without parts."""
    if 'parts' not in section:
        return None
    parts = _parts(section)
    weights = [part['weight'] for part in parts if 'weight' in part]
    return Mixture(
        [len(one) for one in dataset.datasets],
        epochs=None if weights else [part.get('epochs', 1) for part in parts],
        weights=weights or None,
    )


def needs_regrouping(section: dict[str, Any]) -> bool:
    """Whether only a RegroupingBatchSampler gives the parts the shares that are asked for."""
    return 'parts' in section and any(key in part for part in _parts(section) for key in ('epochs', 'weight'))


def _check_parts(section: dict[str, Any]) -> None:
    parts = section['parts']
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, dict) for part in parts.values()):
        raise ConfigError(f'`dataset.parts` must map names to dataset sections, got: {parts}')
    for name, part in zip(parts, _parts(section), strict=True):
        _check_arguments(f'dataset.parts.{name}', part, own_keys=_PART_KEYS)
        for key in ('epochs', 'weight'):
            value = part.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise ConfigError(f'`dataset.parts.{name}.{key}` must be a positive number, got: {value}')
    weighted = [name for name, part in parts.items() if 'weight' in part]
    timed = [name for name, part in parts.items() if 'epochs' in part]
    if weighted and (len(weighted) < len(parts) or timed):
        raise ConfigError(
            f'`dataset.parts` must all have a `weight`, or none and perhaps `epochs`, got: `weight` in {weighted}, '
            f'`epochs` in {timed}, of {list(parts)}'
        )


def _check_arguments(path: str, section: dict[str, Any], *, own_keys: tuple[str, ...]) -> None:
    name = section.get('name')
    if name not in _DATASETS:
        raise ConfigError(unknown_name(f'`{path}.name`', str(name), [*_DATASETS, LLAVA_STREAMING]))
    check_arguments(path, _DATASETS[name], {**section, 'processor': None}, own_keys=own_keys)


def _parts(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Sections of the training sets; what stands beside `parts` holds for each."""
    return [{**_shared(section), **part} for part in section.get('parts', {'only': {}}).values()]


def _held_out(section: dict[str, Any]) -> dict[str, Any]:
    return {**_shared(section), **section['eval']}


def _shared(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in ('processor', 'eval', 'parts')}


def _build(section: dict[str, Any], processor: Any) -> Dataset:
    arguments = {key: value for key, value in section.items() if key not in _PART_KEYS}
    return _DATASETS[section['name']](processor=processor, **arguments)
