# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The source of a config with ``dataset.name: llava_streaming``; mosaicml-streaming is imported when used."""

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

from composer_tokacc.data import build_small_processor, image_token_ids
from composer_tokacc.planning import CostModel
from composer_tokacc.programs.errors import ConfigError, unknown_name
from composer_tokacc.programs.registry import check_arguments
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.sampling import ExchangingDataLoader, RestoreRandomState

__all__ = ['LLAVA_STREAMING', 'ShardSource']

log = logging.getLogger(__name__)

LLAVA_STREAMING = 'llava_streaming'
"""The ``dataset.name``."""
# Arguments of the dataset that come from the loader section.
_FROM_LOADER = {'batch_size': 'loader.global_batch_size', 'shuffle': 'loader.shuffle'}
_SOURCES = ('local', 'remote', 'streams')


class ShardSource:
    """MDS shards that each rank streams its own samples from; see :class:`.DatasetSource`."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.section = config.dataset

    def check(self) -> None:
        """Refuses what LlavaStreamingDataset cannot take, mosaicml-streaming missing included."""
        if 'parts' in self.section:
            raise ConfigError('`dataset.parts` must be left out for streamed data, got: some. Use `dataset.streams`')
        if importlib.util.find_spec('streaming') is None:
            raise ConfigError(
                f"`dataset.name` {LLAVA_STREAMING} needs mosaicml-streaming, got: none. pip install "
                "'composer_tokacc[streaming]'"
            )  # fmt: skip
        own = self.section.get('eval') or {}
        if own and not any(key in own for key in (*_SOURCES, 'split')):
            raise ConfigError(
                '`dataset.eval` must name shards of its own, got: none. Give `dataset.eval.local` or split'
            )
        _check_arguments('dataset', self._arguments(held_out=False))
        _check_arguments('dataset.eval', self._arguments(held_out=True))
        if self.config.loader.modality == 'per_step':
            raise ConfigError('`loader.modality` must be `mixed` for streamed data, got: per_step. Use a JSON file')
        if self.config.loader.exchange_ranks:
            self._check_exchange()

    def small_processor(self, arguments: dict[str, Any]) -> Any:
        """One around a tokenizer that is trained on the shards, which must lie in a folder of this machine."""
        check_arguments('dataset.processor', build_small_processor, arguments, num_given=1)
        return build_small_processor(self._texts(), **arguments)

    def build_dataset(self, processor: Any, *, held_out: bool) -> Any:
        """The dataset, shared among the ranks as StreamingDataset does it.

        The shared memory of a killed run says that its folder is in use. It cannot be told from that of a living one,
        but no two runs may download to the same folder anyway, so it is removed and the dataset is tried once more.
        """
        from streaming.base.util import clean_stale_shared_memory  # pyright: ignore[reportMissingImports]

        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        arguments = {
            'shuffle_seed': self.config.seed,
            **self._arguments(held_out=held_out),
            'shuffle': self.config.loader.shuffle and not held_out,
            'batch_size': self._rank_batch_size(held_out),
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

    def build_loader(
        self, dataset: Any, processor: Any, reading: dict[str, Any], *, held_out: bool
    ) -> tuple[DataLoader, int | None]:
        """StreamingDataLoader, or with ``loader.exchange_ranks`` the one that exchanges samples between ranks."""
        from streaming import StreamingDataLoader  # pyright: ignore[reportMissingImports]

        config, size = self.config, self._rank_batch_size(held_out)
        drop_last = config.loader.drop_last and not held_out
        if drop_last and len(dataset) < size:
            raise ConfigError(
                '`loader.global_batch_size` must be at most the dataset with `loader.drop_last`, got: '
                f'{config.loader.global_batch_size} > {len(dataset) * dist.get_world_size()} samples. Lower it or set '
                'drop_last=false'
            )
        slot_tokens = self._slot_tokens() if config.loader.exchange_ranks else config.microbatching.slot_tokens
        if held_out or not config.loader.exchange_ranks:
            # An own generator: seeding workers must not move the random numbers of the run.
            generator = torch.Generator().manual_seed(config.seed + dist.get_global_rank())
            loader = StreamingDataLoader(dataset, batch_size=size, drop_last=drop_last, generator=generator, **reading)
            return loader, slot_tokens
        rows, cost = config.microbatching.device_train_microbatch_size, config.microbatching.cost
        exchanging = ExchangingDataLoader(
            dataset,
            batch_size=size,
            drop_last=drop_last,
            max_tokens=(rows if isinstance(rows, int) else size) * self._slot_tokens(),
            image_token_ids=image_token_ids(processor),
            max_image_tokens=config.microbatching.max_image_tokens,
            objective='fsdp' if config.is_sharded else 'ddp',
            width_multiple=config.microbatching.width_multiple,
            cost=None if cost is None else CostModel(**cost),
            **reading,
        )
        return exchanging, slot_tokens

    def by_index(self, dataset: Any) -> Any:
        """All samples: the length of the dataset itself is that of this rank's share."""
        return _ByIndex(dataset)

    def callbacks(self) -> list[Any]:
        """StreamingDataset resumes without reading again, so Composer does not restore the random numbers."""
        return [RestoreRandomState()]

    def _arguments(self, *, held_out: bool) -> dict[str, Any]:
        """Arguments of the training set, or of the held-out set; that has sources of its own where it names any."""
        arguments = {key: value for key, value in self.section.items() if key not in ('name', 'processor', 'eval')}
        if not held_out:
            return arguments
        own = self.section.get('eval') or {}
        if any(key in own for key in _SOURCES):
            arguments = {key: value for key, value in arguments.items() if key not in (*_SOURCES, 'split')}
        return {**arguments, **own}

    def _check_exchange(self) -> None:
        if not self.config.microbatching.regroup:
            raise ConfigError(
                '`loader.exchange_ranks` needs `microbatching.regroup`, got: true with regroup=false. Set one of them'
            )
        if (self.section.get('replication') or 1) > 1:
            raise ConfigError(
                '`loader.exchange_ranks` must be false with `dataset.replication`, got: true. Set one of them'
            )
        if self.config.microbatching.device_train_microbatch_size != 'suggest':  # which sets the width as well
            self._slot_tokens()

    def _slot_tokens(self) -> int:
        """Width of a slot, which all ranks must know before a batch is read."""
        slot_tokens = self.config.microbatching.slot_tokens or self.section.get('max_length')
        if slot_tokens is None:
            raise ConfigError(
                '`loader.exchange_ranks` needs the width of a slot before a batch is read, got: neither '
                '`microbatching.slot_tokens` nor `dataset.max_length`. Set one to the tokens of a long sample'
            )
        return slot_tokens

    def _texts(self) -> Iterator[str]:
        """Text of every turn in the shards."""
        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        for stream in (self.section.get('streams') or {'': self.section}).values():
            folders = [Path(stream[key], stream.get('split') or '') for key in ('local', 'remote') if stream.get(key)]
            yield from LlavaStreamingDataset.texts(*folders)

    def _rank_batch_size(self, held_out: bool) -> int:
        return self.config.batch_size(held_out=held_out) // dist.get_world_size()


class _ByIndex(Dataset):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return self.dataset.size

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


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
