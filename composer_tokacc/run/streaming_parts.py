# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Dataset and loaders of a config with ``dataset.name: llava_streaming``; mosaicml-streaming is imported when used."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.config import ConfigError, TrainConfig
from composer_tokacc.config.registry import unknown_name
from composer_tokacc.lengths import image_token_ids
from composer_tokacc.planning import CostModel
from composer_tokacc.sampling import ExchangingDataLoader

__all__ = [
    'LLAVA_STREAMING',
    'build_streaming_dataset',
    'build_streaming_loader',
    'by_index',
    'check_exchange',
    'check_streaming_dataset',
    'exchange_slot_tokens',
    'streaming_arguments',
    'streaming_texts',
]

log = logging.getLogger(__name__)

LLAVA_STREAMING = 'llava_streaming'
"""The ``dataset.name``."""
# Arguments of the dataset that come from the loader section.
_FROM_LOADER = {'batch_size': 'loader.global_batch_size', 'shuffle': 'loader.shuffle'}
_SOURCES = ('local', 'remote', 'streams')


def streaming_arguments(section: dict[str, Any], *, held_out: bool) -> dict[str, Any]:
    """Arguments of the training set, or of the held-out set; that has sources of its own where it names any."""
    arguments = {key: value for key, value in section.items() if key not in ('name', 'processor', 'eval')}
    if not held_out:
        return arguments
    own = section.get('eval') or {}
    if any(key in own for key in _SOURCES):
        arguments = {key: value for key, value in arguments.items() if key not in (*_SOURCES, 'split')}
    return {**arguments, **own}


def check_streaming_dataset(section: dict[str, Any]) -> None:
    """Refuses a section of the config that LlavaStreamingDataset cannot take.

    Raises:
        ConfigError: Says what is wrong, mosaicml-streaming missing included.
    """
    if importlib.util.find_spec('streaming') is None:
        raise ConfigError(
            f"`dataset.name` {LLAVA_STREAMING} needs mosaicml-streaming, got: none. pip install "
            "'composer_tokacc[streaming]'"
        )  # fmt: skip
    own = section.get('eval') or {}
    if own and not any(key in own for key in (*_SOURCES, 'split')):
        raise ConfigError('`dataset.eval` must name shards of its own, got: none. Give `dataset.eval.local` or split')
    _check_arguments('dataset', streaming_arguments(section, held_out=False))
    _check_arguments('dataset.eval', streaming_arguments(section, held_out=True))


def check_exchange(config: TrainConfig) -> None:
    """Refuses ``loader.exchange_ranks`` where it cannot work.

    Raises:
        ConfigError: Says why, and what to do instead.
    """
    if not config.loader.exchange_ranks:
        return
    if config.dataset.get('name') != LLAVA_STREAMING:
        raise ConfigError(
            f'`loader.exchange_ranks` must be false for samples read by index, got: true with `dataset.name` '
            f'{config.dataset.get("name")}. `loader.regroup_ranks` does the same without an exchange'
        )
    if not config.microbatching.regroup:
        raise ConfigError(
            '`loader.exchange_ranks` needs `microbatching.regroup`, got: true with regroup=false. Set one of them'
        )
    if (config.dataset.get('replication') or 1) > 1:
        raise ConfigError(
            '`loader.exchange_ranks` must be false with `dataset.replication`, got: true. Set one of them'
        )  # fmt: skip
    if config.microbatching.device_train_microbatch_size != 'suggest':  # which sets the width as well
        exchange_slot_tokens(config)


def exchange_slot_tokens(config: TrainConfig) -> int:
    """Width of a slot, which all ranks must know before a batch is read.

    Raises:
        ConfigError: If the config does not say.
    """
    slot_tokens = config.microbatching.slot_tokens or config.dataset.get('max_length')
    if slot_tokens is None:
        raise ConfigError(
            '`loader.exchange_ranks` needs the width of a slot before a batch is read, got: neither '
            '`microbatching.slot_tokens` nor `dataset.max_length`. Set one to the tokens of a long sample'
        )
    return slot_tokens


def streaming_texts(section: dict[str, Any]) -> Iterator[str]:
    """Text of every turn in the shards, which must lie in a folder of this machine.

    Raises:
        ValueError: If they do not.
    """
    from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

    for stream in (section.get('streams') or {'': section}).values():
        folders = [Path(stream[key], stream.get('split') or '') for key in ('local', 'remote') if stream.get(key)]
        yield from LlavaStreamingDataset.texts(*folders)


def build_streaming_dataset(config: TrainConfig, processor: Any, *, held_out: bool) -> Any:
    """The dataset of a checked section, shared among the ranks as StreamingDataset does it.

    The shared memory of a killed run says that its folder is in use. It cannot be told from that of a living one, but
    no two runs may download to the same folder anyway, so it is removed and the dataset is tried once more.
    """
    from streaming.base.util import clean_stale_shared_memory  # pyright: ignore[reportMissingImports]

    from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

    arguments = {
        'shuffle_seed': config.seed,
        **streaming_arguments(config.dataset, held_out=held_out),
        'shuffle': config.loader.shuffle and not held_out,
        'batch_size': _rank_batch_size(config, held_out),
    }
    try:
        return LlavaStreamingDataset(processor=processor, **arguments)
    except ValueError as error:
        # Beside a held-out set there is the training set, which is alive.
        if held_out or 'Reused local directory' not in str(error):
            raise
    log.warning('Removing the shared memory that an earlier run of mosaicml-streaming has left behind.')
    clean_stale_shared_memory()
    return LlavaStreamingDataset(processor=processor, **arguments)


def build_streaming_loader(
    config: TrainConfig,
    dataset: Any,
    processor: Any,
    reading: dict[str, Any],
    *,
    cost: CostModel | None,
    held_out: bool,
) -> DataLoader:
    """StreamingDataLoader, or with ``loader.exchange_ranks`` the one that exchanges samples between ranks.

    Args:
        config: A checked config.
        dataset: From :func:`build_streaming_dataset`.
        processor: Its processor.
        reading: ``collate_fn`` and the arguments for workers.
        cost: Cost model of a microbatch, for the exchange.
        held_out: Whether it is for evaluation, where rows keep their order.

    Raises:
        ConfigError: When ``drop_last`` would leave no batch.
    """
    from streaming import StreamingDataLoader  # pyright: ignore[reportMissingImports]

    size = _rank_batch_size(config, held_out)
    drop_last = config.loader.drop_last and not held_out
    if drop_last and len(dataset) < size:
        raise ConfigError(
            '`loader.global_batch_size` must be at most the dataset with `loader.drop_last`, got: '
            f'{config.loader.global_batch_size} > {len(dataset) * dist.get_world_size()} samples. Lower it or set '
            'drop_last=false'
        )
    if held_out or not config.loader.exchange_ranks:
        # An own generator: seeding workers must not move the random numbers of the run.
        generator = torch.Generator().manual_seed(config.seed + dist.get_global_rank())
        return StreamingDataLoader(dataset, batch_size=size, drop_last=drop_last, generator=generator, **reading)
    rows = config.microbatching.device_train_microbatch_size
    return ExchangingDataLoader(
        dataset,
        batch_size=size,
        drop_last=drop_last,
        max_tokens=(rows if isinstance(rows, int) else size) * exchange_slot_tokens(config),
        image_token_ids=image_token_ids(processor),
        objective='fsdp' if config.is_sharded else 'ddp',
        width_multiple=config.microbatching.width_multiple,
        cost=cost,
        **reading,
    )


def by_index(dataset: Any) -> Any:
    """The dataset as one of all its samples, for what measures each of them: a streamed one has this rank's length."""
    return _ByIndex(dataset) if hasattr(dataset, 'size') else dataset


class _ByIndex(Dataset):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return self.dataset.size

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def _rank_batch_size(config: TrainConfig, held_out: bool) -> int:
    size = (config.loader.global_eval_batch_size if held_out else None) or config.loader.global_batch_size
    return size // dist.get_world_size()


def _check_arguments(path: str, arguments: dict[str, Any]) -> None:
    from streaming import Stream, StreamingDataset  # pyright: ignore[reportMissingImports]

    for key, source in _FROM_LOADER.items():
        if key in arguments:
            raise ConfigError(f'`{path}.{key}` must be left out, got: {arguments[key]}. Set `{source}`')
    known = {'max_length', *inspect.signature(StreamingDataset).parameters} - _FROM_LOADER.keys()
    _check_names(path, arguments, known)
    streams = arguments.get('streams')
    if not any(arguments.get(source) for source in _SOURCES):
        raise ConfigError(f'`{path}` must name its shards, got: neither of {", ".join(_SOURCES)}. Give `{path}.local`')
    if streams is not None:
        if not isinstance(streams, dict) or not all(isinstance(stream, dict) for stream in streams.values()):
            raise ConfigError(f'`{path}.streams` must be a mapping of names to arguments, got: {streams}')
        for name, stream in streams.items():
            _check_names(f'{path}.streams.{name}', stream, set(inspect.signature(Stream).parameters))


def _check_names(path: str, arguments: dict[str, Any], known: set[str]) -> None:
    for key in arguments:
        if key not in known:
            raise ConfigError(unknown_name(f'`{path}` key', key, known))
