# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples of MDS shards, streamed by each rank."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Subset

from composer_tokacc.data import build_small_processor, count_patches, image_token_ids
from composer_tokacc.programs.errors import ConfigError
from composer_tokacc.programs.registry import without
from composer_tokacc.programs.source import Source, check_video
from composer_tokacc.programs.values import check_arguments, check_names
from composer_tokacc.sampling import ExchangingDataLoader

log = logging.getLogger(__name__)

# Arguments of StreamingDataset that come from the loader section, and those that say where shards are.
_FROM_LOADER = {'batch_size': 'loader.global_batch_size', 'shuffle': 'loader.shuffle'}
_PLACES = ('local', 'remote', 'streams')


class ShardSource(Source):
    """MDS shards that each rank streams its own samples from; mosaicml-streaming is imported when it is used."""

    def check(self) -> None:
        """Refuses what LlavaStreamingDataset cannot take, mosaicml-streaming missing included."""
        if 'parts' in self.section:
            raise ConfigError('`dataset.parts` must be left out for streamed data, got: some. Use `dataset.streams`')
        if importlib.util.find_spec('streaming') is None:
            remedy = "pip install 'composer_tokacc[streaming]'"
            raise ConfigError(f'`dataset.name` llava_streaming needs mosaicml-streaming, got: none. {remedy}')
        own = self.section.get('eval') or {}
        if own and not any(key in own for key in (*_PLACES, 'split')):
            raise ConfigError('`dataset.eval` must name shards of its own, got: none. Give `dataset.eval.local`')
        self._check_arguments('dataset', is_eval=False)
        self._check_arguments('dataset.eval', is_eval=True)
        if self.config.loader.modality == 'per_step':
            raise ConfigError('`loader.modality` must be `mixed` for streamed data, got: per_step. Use a JSON file')
        if self.config.loader.exchange_ranks:
            if not self.config.microbatching.regroup:
                raise ConfigError('`loader.exchange_ranks` needs `microbatching.regroup`, got: false. Set it')
            if (self.section.get('replication') or 1) > 1:
                raise ConfigError(
                    '`loader.exchange_ranks` must be false with `dataset.replication`, got: true. Remove one'
                )
            if self.config.microbatching.device_train_microbatch_size != 'suggest':  # which sets the width as well
                self._slot_tokens()

    def small_processor(self, arguments: dict[str, Any]) -> Any:
        """Makes one around a tokenizer that is trained on the shards, which must lie in a folder of this machine."""
        check_arguments('dataset.processor', build_small_processor, arguments, num_given=1)
        return build_small_processor(self._texts(), **arguments)

    def build_dataset(self, processor: Any, *, is_eval: bool = False) -> Any:
        """Returns the dataset, shared among the ranks as StreamingDataset does it; None where there is no eval set.

        The shared memory of a killed run says that its folder is in use. It cannot be told from that of a living one,
        but no two runs may download to the same folder anyway, so it is removed and the dataset is tried once more.
        """
        from streaming.base.util import clean_stale_shared_memory  # pyright: ignore[reportMissingImports]

        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        if is_eval and not self.section.get('eval'):
            return None
        arguments = {
            'shuffle_seed': self.config.seed,
            **self._arguments(is_eval=is_eval),
            'shuffle': self.config.loader.shuffle and not is_eval,
            'batch_size': self.rank_batch_size(is_eval=is_eval),
        }
        try:
            return LlavaStreamingDataset(processor=processor, **arguments)
        except ValueError as error:
            # Beside an eval set there is the training set, which is alive.
            if is_eval or 'Reused local directory' not in str(error):
                raise
        log.warning('Removing the shared memory that an earlier run of mosaicml-streaming has left behind.')
        clean_stale_shared_memory()
        return LlavaStreamingDataset(processor=processor, **arguments)

    def open_loader(
        self, dataset: Any, processor: Any, options: dict[str, Any], *, is_eval: bool
    ) -> tuple[DataLoader, int | None]:
        """Opens StreamingDataLoader, or with ``loader.exchange_ranks`` the one that exchanges samples between ranks."""
        from streaming import StreamingDataLoader  # pyright: ignore[reportMissingImports]

        config, size = self.config, self.rank_batch_size(is_eval=is_eval)
        drop_last = self.drops_last(len(dataset) * dist.get_world_size(), is_eval=is_eval)
        if is_eval or not config.loader.exchange_ranks:
            # An own generator: seeding workers must not move the random numbers of the run.
            generator = torch.Generator().manual_seed(config.seed + dist.get_global_rank())
            loader = StreamingDataLoader(dataset, batch_size=size, drop_last=drop_last, generator=generator, **options)
            return loader, config.microbatching.slot_tokens
        slot_tokens = self._slot_tokens()
        exchanging = ExchangingDataLoader(
            dataset,
            batch_size=size,
            drop_last=drop_last,
            max_tokens=self.rows_of_microbatch * slot_tokens,
            image_token_ids=image_token_ids(processor),
            max_image_tokens=config.microbatching.max_image_tokens,
            patches=partial(count_patches, patch_size=self.patch_size(processor)),
            **self.planning,
            **options,
        )
        return exchanging, slot_tokens

    def by_index(self, dataset: Any) -> Any:
        """Returns all samples: the length of the dataset itself is that of this rank's share."""
        return Subset(dataset, range(dataset.size))

    def _arguments(self, *, is_eval: bool) -> dict[str, Any]:
        """Returns arguments of the training set, or of the eval set, with shards of its own where it names any."""
        arguments = without(self.section, 'name', 'processor', 'eval')
        if not is_eval:
            return arguments
        own = self.section.get('eval') or {}
        if any(key in own for key in _PLACES):
            arguments = without(arguments, *_PLACES, 'split')
        return {**arguments, **own}

    def _slot_tokens(self) -> int:
        """Returns the width of a slot, which all ranks must know before a batch is read."""
        slot_tokens = self.config.microbatching.slot_tokens or self.section.get('max_length')
        if slot_tokens is None:
            raise ConfigError(
                '`loader.exchange_ranks` needs the width of a slot before a batch is read, got: neither '
                '`microbatching.slot_tokens` nor `dataset.max_length`. Set one'
            )
        return slot_tokens

    def _texts(self) -> Iterator[str]:
        """Yields the text of every turn in the shards."""
        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        for stream in (self.section.get('streams') or {'': self.section}).values():
            folders = [Path(stream[key], stream.get('split') or '') for key in ('local', 'remote') if stream.get(key)]
            yield from LlavaStreamingDataset.texts(*folders)

    def _check_arguments(self, path: str, *, is_eval: bool) -> None:
        from streaming import Stream, StreamingDataset  # pyright: ignore[reportMissingImports]

        arguments = self._arguments(is_eval=is_eval)
        for key, source in _FROM_LOADER.items():
            if key in arguments:
                raise ConfigError(f'`{path}.{key}` must be left out, got: {arguments[key]}. Set `{source}`')
        check_video(path, arguments)
        known = {'max_length', 'video', 'control_tokens', *inspect.signature(StreamingDataset).parameters}
        check_names(path, arguments, known - _FROM_LOADER.keys())
        streams = arguments.get('streams')
        if not any(arguments.get(source) for source in _PLACES):
            raise ConfigError(f'`{path}` must name its shards, got: none of {", ".join(_PLACES)}. Give `{path}.local`')
        if streams is not None:
            if not isinstance(streams, dict) or not all(isinstance(stream, dict) for stream in streams.values()):
                raise ConfigError(f'`{path}.streams` must be a mapping of names to arguments, got: {streams}')
            for name, stream in streams.items():
                check_names(f'{path}.streams.{name}', stream, set(inspect.signature(Stream).parameters))
