# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The ``dataset`` and ``loader`` sections: processor, datasets, lengths, and the loaders that the Trainer gets.

Samples come from files that are read by index (:class:`FileSource`), or from shards that are streamed
(:class:`ShardSource`, where mosaicml-streaming is imported when used).
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from composer.core import DataSpec
from composer.utils import dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from transformers import AutoProcessor

from composer_tokacc.data import (
    LengthTable,
    LlavaDataset,
    VideoSampling,
    VisionLanguageCollator,
    ask_hub,
    build_small_processor,
    image_token_ids,
    length_table,
)
from composer_tokacc.data.lengths import chosen_patch_size
from composer_tokacc.data.media import count_patches
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel
from composer_tokacc.programs.models import read_config, read_from, vision_patch_size
from composer_tokacc.programs.registry import check_arguments, check_names, import_by_name, without
from composer_tokacc.programs.schema import ConfigError, TrainConfig, section, unknown_name
from composer_tokacc.sampling import ExchangingDataLoader, Mixture, RegroupingBatchSampler, RegroupingDataLoader

__all__ = [
    'FileSource',
    'ShardSource',
    'build_dataset',
    'build_loader',
    'build_processor',
    'measure_dataset',
    'source_of',
    'token_data_spec_of',
]

log = logging.getLogger(__name__)

LLAVA_STREAMING = 'llava_streaming'
"""The ``dataset.name`` of shards."""
# Keys of the dataset section, and of one of its parts, that are not arguments of the dataset class.
_OWN_KEYS = ('name', 'processor', 'eval')
_PART_KEYS = ('name', 'epochs', 'weight')
# Arguments of StreamingDataset that come from the loader section, and those that say where shards are.
_FROM_LOADER = {'batch_size': 'loader.global_batch_size', 'shuffle': 'loader.shuffle'}
_PLACES = ('local', 'remote', 'streams')


def source_of(config: TrainConfig) -> FileSource | ShardSource:
    """The source that ``dataset.name`` stands for."""
    return ShardSource(config) if config.dataset.get('name') == LLAVA_STREAMING else FileSource(config)


def build_processor(config: TrainConfig) -> Any:
    """The checkpoint's own processor, or a small one made for the dataset where the model is fresh.

    A small processor's image and patch size are those of ``model.config.vision_config``.
    """
    arguments = dict(config.dataset.get('processor') or {})
    if config.model.pretrained is not None:
        with section('model'), read_from(config.model.pretrained):
            ask_hub(config.model.pretrained, 'model')
            return AutoProcessor.from_pretrained(config.model.pretrained, **arguments)
    vision = (config.model.config or {}).get('vision_config', {})
    arguments = {**{key: vision[key] for key in ('image_size', 'patch_size') if key in vision}, **arguments}
    with section('dataset', config.dataset):
        return source_of(config).small_processor(arguments)


def build_dataset(config: TrainConfig, processor: Any, *, held_out: bool) -> Any:
    """The training set, or the held-out set (None where ``dataset.eval`` is absent)."""
    if held_out and not config.dataset.get('eval'):
        return None
    with section('dataset.eval' if held_out else 'dataset', config.dataset):
        return source_of(config).build_dataset(processor, held_out=held_out)


def measure_dataset(config: TrainConfig, dataset: Any, processor: Any) -> LengthTable:
    """The length table of a run's dataset, with patches of the run's own vision tower; see :func:`.length_table`."""
    return length_table(
        source_of(config).by_index(dataset),
        processor,
        folder=config.loader.lengths_folder,
        patch_size=_patch_size(config, processor),
    )


def build_loader(
    config: TrainConfig, dataset: Any, processor: Any, layout: BatchLayout, *, held_out: bool, model: Any = None
) -> DataSpec:
    """A loader of this rank's share, wrapped so that Composer counts, splits and trims as the config says.

    Evaluation keeps its rows in order. The model is for Composer's own token weights, which nothing else holds to the
    model's loss.

    Raises:
        ConfigError: When the training set is smaller than one global batch and ``drop_last`` would leave nothing, or
            the token budget has no room for the longest sample.
    """
    reading = {
        'collate_fn': VisionLanguageCollator(processor, layout=layout),
        'num_workers': config.loader.num_workers,
        'prefetch_factor': config.loader.prefetch_factor,
        'persistent_workers': config.loader.num_workers > 0,
        'pin_memory': config.loader.pin_memory,
    }
    with section('loader'):
        dataloader, slot_tokens = source_of(config).build_loader(dataset, processor, reading, held_out=held_out)
    if not config.trainer.get('accumulate_train_batch_on_tokens'):
        model = None
    return token_data_spec_of(config, dataloader, slot_tokens=slot_tokens, layout=layout, model=model)


def token_data_spec_of(config: TrainConfig, dataloader: Any, *, slot_tokens: int | None, **others: Any) -> DataSpec:
    """:func:`.token_data_spec` with the ``microbatching`` section."""
    given = without(vars(config.microbatching), 'device_train_microbatch_size', 'device_memory_gib', 'slot_tokens')
    with section('microbatching'):
        return token_data_spec(dataloader, slot_tokens=slot_tokens, **given, **others)


class FileSource:
    """Datasets read by index: a LLaVA JSON, or a class of the user's; one, or several parts.

    A class named in full takes ``processor`` and the section's other keys. For a fresh model it also has
    ``build_processor(**arguments)``, a static method, or ``texts(path)``, on which a tokenizer is trained.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.section = config.dataset

    def check(self) -> None:
        """Refuses unknown datasets and arguments, for training and, where there is one, for the held-out set."""
        if 'parts' in self.section:
            self._check_parts()
        else:
            _check_arguments('dataset', self.section, own_keys=_OWN_KEYS)
        if self.section.get('eval') is not None:
            _check_arguments('dataset.eval', self._held_out(), own_keys=('name',))
        if self.config.loader.exchange_ranks:
            raise ConfigError(
                f'`loader.exchange_ranks` must be false for samples read by index, got: true with `dataset.name` '
                f'{self.section.get("name")}. `loader.regroup_ranks` does the same without an exchange'
            )
        per_step = self.config.loader.modality == 'per_step'
        # Only a RegroupingBatchSampler gives the parts the shares that are asked for.
        has_shares = 'parts' in self.section and any(part.keys() & {'epochs', 'weight'} for part in self._parts())
        if not self.config.regroups_ranks and (per_step or has_shares):
            what = '`loader.modality: per_step`' if per_step else 'shares of `dataset.parts`'
            raise ConfigError(
                f'`loader.regroup_ranks` and `microbatching.regroup` must be on for {what}, got: off. Switch them on'
            )

    def small_processor(self, arguments: dict[str, Any]) -> Any:
        """The dataset's own, or one around a tokenizer that is trained on the files."""
        parts = [(_dataset_class('dataset', part['name']), part) for part in self._parts()]
        own = next((cls.build_processor for cls, _ in parts if hasattr(cls, 'build_processor')), None)
        if own is not None:
            check_arguments('dataset.processor', own, arguments)
            return own(**arguments)
        for cls, part in parts:
            if not hasattr(cls, 'texts'):
                raise ConfigError(
                    f'`model.pretrained` must be given for `dataset.name` {part["name"]}, which has neither '
                    '`build_processor` nor `texts`, got: none. Name a checkpoint, or give the class one of them'
                )
        check_arguments('dataset.processor', build_small_processor, arguments, num_given=1)
        return build_small_processor(chain.from_iterable(cls.texts(part['path']) for cls, part in parts), **arguments)

    def build_dataset(self, processor: Any, *, held_out: bool) -> Dataset:
        """One dataset, or the parts one behind the other."""
        if held_out:
            return self._build(self._held_out(), processor)
        datasets = [self._build(part, processor) for part in self._parts()]
        return ConcatDataset(datasets) if 'parts' in self.section else datasets[0]

    def build_loader(
        self, dataset: Any, processor: Any, reading: dict[str, Any], *, held_out: bool
    ) -> tuple[DataLoader, int | None]:
        """The regrouping loader, or torch's where rows must keep their order."""
        loader = self.config.loader
        if not held_out and self.config.regroups_ranks:
            return self._regrouping_loader(dataset, processor, reading)
        drop_last = loader.drop_last and not held_out
        _refuse_too_few(self.config, len(dataset), drop_last)
        shuffle = loader.shuffle and not held_out
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=self.config.seed)
        size = _rank_batch_size(self.config, held_out)
        dataloader = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=drop_last, **reading)
        return dataloader, self.config.microbatching.slot_tokens

    def by_index(self, dataset: Any) -> Any:
        """The dataset itself."""
        return dataset

    def _regrouping_loader(self, dataset: Any, processor: Any, reading: Any) -> tuple[RegroupingDataLoader, int]:
        """A loader that shares each global batch by length, and the slot width that it planned with.

        The width of a device batch says little here, because a rank may get short samples only: without
        ``slot_tokens`` a slot is as wide as the longest sample of the dataset.
        """
        config = self.config
        table = measure_dataset(config, dataset, processor)
        longest = int(table.lengths.max())
        slot_tokens = config.microbatching.slot_tokens or longest
        size = _rows_of_microbatch(config)
        if size * slot_tokens < longest:
            raise ConfigError(
                '`microbatching.device_train_microbatch_size` times `slot_tokens` must be at least the longest sample, '
                f'got: {size} x {slot_tokens} < {longest} (sample {int(table.lengths.argmax())}). Raise one of them, '
                'set `dataset.max_length`, or let it go alone over the budget with `loader.regroup_ranks=false` and '
                '`microbatching.on_oversize=warn`'
            )
        cost = config.microbatching.cost
        has_images = table.image_tokens.any() or config.loader.modality == 'per_step'
        sampler = RegroupingBatchSampler(
            dataset,
            lengths=table.lengths,
            image_tokens=table.image_tokens if has_images else None,
            vision_cost=(cost or CostModel()).vision(table.image_tokens, table.vision_patches),
            global_batch_size=config.loader.global_batch_size,
            max_tokens=size * slot_tokens,
            max_image_tokens=config.microbatching.max_image_tokens if has_images else None,
            seed=config.seed,
            shuffle=config.loader.shuffle,
            drop_last=config.loader.drop_last,
            objective='fsdp' if config.is_sharded else 'ddp',
            width_multiple=config.microbatching.width_multiple,
            cost=cost,
            mixture=self._mixture(dataset) if 'parts' in self.section else None,
            modality=config.loader.modality,  # pyright: ignore[reportArgumentType]  # refused by the sampler
        )
        return RegroupingDataLoader(dataset, batch_sampler=sampler, **reading), slot_tokens

    def _mixture(self, dataset: Any) -> Mixture:
        """Shares of the parts."""
        parts = self._parts()
        weights = [part['weight'] for part in parts if 'weight' in part]
        return Mixture(
            [len(one) for one in dataset.datasets],
            epochs=None if weights else [part.get('epochs', 1) for part in parts],
            weights=weights or None,
        )

    def _check_parts(self) -> None:
        parts = self.section['parts']
        if not isinstance(parts, dict) or not parts or not all(isinstance(part, dict) for part in parts.values()):
            raise ConfigError(f'`dataset.parts` must map names to dataset sections, got: {parts}')
        for name, part in zip(parts, self._parts(), strict=True):
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

    def _parts(self) -> list[dict[str, Any]]:
        """Sections of the training sets; what stands beside ``parts`` holds for each."""
        shared = without(self.section, 'processor', 'eval', 'parts')
        return [{**shared, **part} for part in self.section.get('parts', {'only': {}}).values()]

    def _held_out(self) -> dict[str, Any]:
        return {**without(self.section, 'processor', 'eval', 'parts'), **self.section['eval']}

    def _build(self, part: dict[str, Any], processor: Any) -> Dataset:
        cls = _dataset_class('dataset', part['name'])
        arguments = without(part, *_PART_KEYS)
        if issubclass(cls, LlavaDataset) and arguments.get('on_error') == 'skip':
            # It reads all samples to know the bad ones, and so measures them for the sampler too.
            patch_size = _patch_size(self.config, processor)
            arguments = {'lengths_folder': self.config.loader.lengths_folder, 'patch_size': patch_size, **arguments}
        try:
            return cls(processor=processor, **arguments)
        except ImportError as error:
            if error.name and not isinstance(error, ModuleNotFoundError):
                raise  # a name that a module there lacks is a bug, ours or of the dataset's class
            raise ConfigError(f'`dataset.name` {part["name"]} needs a package more, got: {error}') from error


class ShardSource:
    """MDS shards that each rank streams its own samples from."""

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
        if own and not any(key in own for key in (*_PLACES, 'split')):
            raise ConfigError(
                '`dataset.eval` must name shards of its own, got: none. Give `dataset.eval.local` or split'
            )
        self._check_arguments('dataset', held_out=False)
        self._check_arguments('dataset.eval', held_out=True)
        if self.config.loader.modality == 'per_step':
            raise ConfigError('`loader.modality` must be `mixed` for streamed data, got: per_step. Use a JSON file')
        if not self.config.loader.exchange_ranks:
            return
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
            'batch_size': _rank_batch_size(self.config, held_out),
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

        config, size = self.config, _rank_batch_size(self.config, held_out)
        drop_last = config.loader.drop_last and not held_out
        _refuse_too_few(config, len(dataset) * dist.get_world_size(), drop_last)
        if held_out or not config.loader.exchange_ranks:
            # An own generator: seeding workers must not move the random numbers of the run.
            generator = torch.Generator().manual_seed(config.seed + dist.get_global_rank())
            loader = StreamingDataLoader(dataset, batch_size=size, drop_last=drop_last, generator=generator, **reading)
            return loader, config.microbatching.slot_tokens
        slot_tokens = self._slot_tokens()
        exchanging = ExchangingDataLoader(
            dataset,
            batch_size=size,
            drop_last=drop_last,
            max_tokens=_rows_of_microbatch(config) * slot_tokens,
            image_token_ids=image_token_ids(processor),
            max_image_tokens=config.microbatching.max_image_tokens,
            objective='fsdp' if config.is_sharded else 'ddp',
            width_multiple=config.microbatching.width_multiple,
            cost=config.microbatching.cost,
            patches=partial(count_patches, patch_size=chosen_patch_size(processor, _patch_size(config, processor))),
            **reading,
        )
        return exchanging, slot_tokens

    def by_index(self, dataset: Any) -> Any:
        """All samples: the length of the dataset itself is that of this rank's share."""
        return Subset(dataset, range(dataset.size))

    def _arguments(self, *, held_out: bool) -> dict[str, Any]:
        """Arguments of the training set, or of the held-out set; that has sources of its own where it names any."""
        arguments = without(self.section, *_OWN_KEYS)
        if not held_out:
            return arguments
        own = self.section.get('eval') or {}
        if any(key in own for key in _PLACES):
            arguments = without(arguments, *_PLACES, 'split')
        return {**arguments, **own}

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

    def _check_arguments(self, path: str, *, held_out: bool) -> None:
        from streaming import Stream, StreamingDataset  # pyright: ignore[reportMissingImports]

        arguments = self._arguments(held_out=held_out)
        for key, source in _FROM_LOADER.items():
            if key in arguments:
                raise ConfigError(f'`{path}.{key}` must be left out, got: {arguments[key]}. Set `{source}`')
        _check_video(path, arguments)
        known = {'max_length', 'video', *inspect.signature(StreamingDataset).parameters} - _FROM_LOADER.keys()
        check_names(path, arguments, known)
        streams = arguments.get('streams')
        if not any(arguments.get(source) for source in _PLACES):
            raise ConfigError(
                f'`{path}` must name its shards, got: neither of {", ".join(_PLACES)}. Give `{path}.local`'
            )
        if streams is not None:
            if not isinstance(streams, dict) or not all(isinstance(stream, dict) for stream in streams.values()):
                raise ConfigError(f'`{path}.streams` must be a mapping of names to arguments, got: {streams}')
            for name, stream in streams.items():
                check_names(f'{path}.streams.{name}', stream, set(inspect.signature(Stream).parameters))


def _dataset_class(path: str, name: Any) -> Any:
    if name == 'llava':
        return LlavaDataset
    if '.' in str(name):
        return import_by_name(path, name)
    known = ['llava', LLAVA_STREAMING]
    raise ConfigError(f'{unknown_name(f"`{path}.name`", str(name), known)}, or the dotted name of a dataset class')


def _check_arguments(path: str, part: dict[str, Any], *, own_keys: tuple[str, ...]) -> None:
    cls = _dataset_class(path, part.get('name'))
    check_arguments(path, cls, {**part, 'processor': None}, own_keys=own_keys)
    if inspect.isclass(cls) and issubclass(cls, LlavaDataset):
        _check_video(path, part)


def _check_video(path: str, part: dict[str, Any]) -> None:
    """Holds the section ``video`` of a dataset to the arguments of :class:`.VideoSampling`."""
    check_arguments(f'{path}.video', VideoSampling, part.get('video'))
    with section(f'{path}.video', inspect.signature(VideoSampling).parameters):
        VideoSampling(**(part.get('video') or {}))


def _patch_size(config: TrainConfig, processor: Any) -> int | None:
    return vision_patch_size(read_config(config.model.pretrained, config.model.config, processor))


def _rank_batch_size(config: TrainConfig, held_out: bool) -> int:
    return config.batch_size(held_out=held_out) // dist.get_world_size()


def _rows_of_microbatch(config: TrainConfig) -> int:
    """Of ``slot_tokens`` each: a whole device batch where the Trainer finds the number, or has none."""
    size = config.microbatching.device_train_microbatch_size
    return size if isinstance(size, int) else _rank_batch_size(config, held_out=False)


def _refuse_too_few(config: TrainConfig, num_samples: int, drop_last: bool) -> None:
    if drop_last and num_samples < config.loader.global_batch_size:
        raise ConfigError(
            '`loader.global_batch_size` must be at most the dataset with `loader.drop_last`, got: '
            f'{config.loader.global_batch_size} > {num_samples} samples. Lower it or set drop_last=false'
        )
