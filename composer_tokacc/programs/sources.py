# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The sources of samples: files, tables and dataset classes that are read by index, and shards that are streamed."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import torch
from composer.utils import dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from composer_tokacc.data import LlavaDataset, build_small_processor, count_patches, image_token_ids
from composer_tokacc.planning import CostModel, token_budget
from composer_tokacc.programs.errors import ConfigError, taken_by, unknown_name
from composer_tokacc.programs.registry import import_by_name, without
from composer_tokacc.programs.schema import (
    Range,
    TrainConfig,
    Whole,
    check_arguments,
    check_names,
    check_value,
)
from composer_tokacc.programs.source import Source, check_video
from composer_tokacc.sampling import (
    ExchangingDataLoader,
    LossShares,
    Mixture,
    RegroupingBatchSampler,
    RegroupingDataLoader,
)

log = logging.getLogger(__name__)

_RANGES = {
    **dict.fromkeys(('vocab_size', 'image_size', 'patch_size', 'model_max_length'), Whole),
    **dict.fromkeys(('max_length', 'max_image_tokens'), Optional[Whole]),  # noqa: UP045 - for pyright
    'num_workers': Optional[Annotated[int, Range(least=0, most=256)]],  # noqa: UP045
    'on_error': Literal['raise', 'skip'],
}
"""Of the arguments of our own dataset and small processor."""
_SHARES = dict.fromkeys(('epochs', 'weight', 'loss_share'), Annotated[float, Range(above=0, below=1e9)])
_SHARES |= {'epochs': Annotated[float, Range(above=0, most=10_000)]}
_KEYS_OF_PART = {'name': Any, **_SHARES}
"""Keys of one of several parts that are not arguments of the dataset class."""
_KEYS_OF_ALL = ('processor', 'eval', 'parts', 'loss_shares_by')
"""Keys of the section that are of no part, but of all together."""
# Arguments of StreamingDataset that come from the loader section, and those that say where shards are.
_FROM_LOADER = {'batch_size': 'loader.global_batch_size', 'shuffle': 'loader.shuffle'}
_PLACES = ('local', 'remote', 'streams')


class NamedParts(ConcatDataset):
    """Several datasets one behind the other, whose samples carry the name of theirs as ``source``."""

    def __init__(self, datasets: Sequence[Dataset], names: Sequence[str]) -> None:
        super().__init__(datasets)
        self.names = list(names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), 'source': [self.names[bisect_right(self.cumulative_sizes, index)]]}


class FileSource(Source):
    """Datasets read by index; a class named in full takes ``processor`` and the section's other keys.

    For a fresh model it also has ``build_processor(**arguments)``, a static method, or ``texts(path)``, on which a
    tokenizer is trained.
    """

    def check(self) -> None:
        """Refuses unknown datasets and arguments, for training and, where there is one, for the eval set."""
        if 'parts' in self.section:
            self._check_parts()
        else:
            _check_dataset('dataset', self.section, dict.fromkeys(('name', 'processor', 'eval'), Any))
        if self.section.get('eval') is not None:
            _check_dataset('dataset.eval', self._eval_section(), {'name': Any})
        if self.config.model.pretrained is None:
            self._processor_maker(self.section.get('processor') or {})
        if self.config.loader.exchange_ranks:
            remedy = '`loader.regroup_ranks` does the same'
            raise ConfigError(f'`loader.exchange_ranks` must be false for samples read by index, got: true. {remedy}')
        per_step = self.config.loader.modality == 'per_step'
        # Only a RegroupingBatchSampler gives the parts the shares that are asked for.
        has_shares = 'parts' in self.section and any(part.keys() & {*_SHARES} for part in self._parts())
        if not self.config.regroups_ranks and (per_step or has_shares):
            what = '`loader.modality: per_step`' if per_step else 'shares of `dataset.parts`'
            raise ConfigError(f'`loader.regroup_ranks` and `microbatching.regroup` must be on for {what}, got: off')

    def _check_parts(self) -> None:
        parts = self.section['parts']
        if not isinstance(parts, dict) or not parts or not all(isinstance(part, dict) for part in parts.values()):
            raise ConfigError(f'`dataset.parts` must map names to dataset sections, got: {parts}')
        for name, part in zip(parts, self._parts(), strict=True):
            _check_dataset(f'dataset.parts.{name}', part, _KEYS_OF_PART)
        having = {key: [name for name, part in parts.items() if key in part] for key in _SHARES}
        # By weights each part has its share whatever is drawn of it.
        used = [key for key in _SHARES if having[key] and not (key == 'epochs' and self._shares_by_weights)]
        if len(used) > 1 or any(len(having[key]) < len(parts) for key in used if key != 'epochs'):
            found = ', '.join(f'`{key}` in {having[key]}' for key in used)
            raise ConfigError(
                '`dataset.parts` must all have a `weight`, or all a `loss_share`, or none and perhaps `epochs`, got: '
                f'{found}, of {list(parts)}'
            )
        shares = [part['loss_share'] for part in parts.values() if 'loss_share' in part]
        if shares and not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ConfigError(f'`loss_share` of `dataset.parts` must add up to 1, got: {sum(shares):g}')
        by = self.section.get('loss_shares_by', 'sampling')
        check_value('dataset.loss_shares_by', by, Literal['sampling', 'weights'])
        if self._shares_by_weights and not (shares and self._token_weights == 'column'):
            raise ConfigError(
                '`dataset.loss_shares_by: weights` must come with a `loss_share` of each part and '
                '`algorithms.token_accumulation.token_weights: column`, which takes the weights, got: '
                f'{"shares" if shares else "no shares"} and token_weights {self._token_weights}'
            )

    @property
    def _shares_by_weights(self) -> bool:
        return self.section.get('loss_shares_by') == 'weights'

    @property
    def _token_weights(self) -> Any:
        return (self.config.algorithms.get('token_accumulation') or {}).get('token_weights')

    def _parts(self) -> list[dict[str, Any]]:
        """Returns the sections of the training sets; what stands beside ``parts`` holds for each."""
        shared = without(self.section, *_KEYS_OF_ALL)
        return [{**shared, **part} for part in self.section.get('parts', {'only': {}}).values()]

    def _eval_section(self) -> dict[str, Any]:
        return {**without(self.section, *_KEYS_OF_ALL), **self.section['eval']}

    def small_processor(self, arguments: dict[str, Any]) -> Any:
        """Makes the dataset's own, or one around a tokenizer that is trained on the files."""
        return self._processor_maker(arguments)(**arguments)

    def _processor_maker(self, arguments: dict[str, Any]) -> Callable[..., Any]:
        """Returns the function that makes a small processor, once its arguments are checked."""
        parts = [(_dataset_class('dataset', part['name']), part) for part in self._parts()]
        own = next((cls.build_processor for cls, _ in parts if hasattr(cls, 'build_processor')), None)
        if own is not None:
            check_arguments('dataset.processor', own, arguments)
            return own
        for cls, part in parts:
            if not hasattr(cls, 'texts'):
                why = f'for `dataset.name` {part["name"]}, which has neither `build_processor` nor `texts`'
                raise ConfigError(f'`model.pretrained` must be given {why}, got: none. Name a checkpoint')
        check_arguments('dataset.processor', build_small_processor, arguments, num_given=1, hints=_RANGES)
        texts = (text for cls, part in parts for text in cls.texts(part['path']))
        return partial(build_small_processor, texts)

    def build_dataset(self, processor: Any, *, is_eval: bool = False) -> Dataset | None:
        """Returns one dataset, or the parts one behind the other; None where there is no eval set."""
        if is_eval:
            return self._open(self._eval_section(), processor) if self.section.get('eval') else None
        datasets = [self._open(part, processor) for part in self._parts()]
        if self._token_weights == 'column' and not self._shares_by_weights:
            for record in (record for one in datasets for record in getattr(one, 'records', ())):
                if record.loss_weights is None:
                    raise record.error('must have `loss_weights` with `token_weights: column`, got: none')
        return NamedParts(datasets, list(self.section['parts'])) if 'parts' in self.section else datasets[0]

    def _open(self, part: dict[str, Any], processor: Any) -> Dataset:
        cls, arguments = _dataset_class('dataset', part['name']), without(part, *_KEYS_OF_PART)
        fits = arguments.get('fit', False)
        if issubclass(cls, LlavaDataset) and (fits or arguments.get('on_error') == 'skip'):
            # It reads all samples to know what becomes of them, and so measures them for the sampler too.
            measuring = {'lengths_folder': self.config.loader.lengths_folder, 'patch_size': self.patch_size(processor)}
            arguments = {**measuring, **arguments, **(self._caps(arguments) if fits else {})}
        try:
            with taken_by(part['name'], of='`dataset`') if not issubclass(cls, LlavaDataset) else nullcontext():
                return cls(processor=processor, **arguments)
        except ImportError as error:
            if error.name and not isinstance(error, ModuleNotFoundError):
                raise  # a name that a module there lacks is a bug, ours or of the dataset's class
            raise ConfigError(f'`dataset.name` {part["name"]} needs a package more, got: {error}') from error

    def _caps(self, part: dict[str, Any]) -> dict[str, int | None]:
        """Returns the most that a row may hold: what the dataset's section says, or a microbatch has room for."""
        own = self.config.microbatching
        size, width = own.device_train_microbatch_size, own.slot_tokens
        room = token_budget(size, width) if isinstance(size, int) and width else None
        caps = {'max_length': room, 'max_image_tokens': own.max_image_tokens}
        return {name: min(filter(None, (part.get(name), cap)), default=None) for name, cap in caps.items()}

    def open_loader(
        self, dataset: Any, processor: Any, options: dict[str, Any], *, is_eval: bool
    ) -> tuple[DataLoader, int | None]:
        """Opens the regrouping loader, or torch's where rows must keep their order."""
        if not is_eval and self.config.regroups_ranks:
            return self._regrouping_loader(dataset, processor, options)
        drop_last = self.drops_last(len(dataset), is_eval=is_eval)
        shuffle = self.config.loader.shuffle and not is_eval
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=self.config.seed)
        size = self.rank_batch_size(is_eval=is_eval)
        dataloader = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=drop_last, **options)
        return dataloader, self.config.microbatching.slot_tokens

    def _regrouping_loader(self, dataset: Any, processor: Any, options: Any) -> tuple[RegroupingDataLoader, int]:
        """Opens a loader that shares each global batch by length."""
        loader, microbatching = self.config.loader, self.config.microbatching
        table = self.measure(dataset, processor)
        longest, size = int(table.lengths.max()), self.rows_of_microbatch
        # The width of a device batch says little, because a rank may get short samples only.
        slot_tokens = microbatching.slot_tokens or longest
        if token_budget(size, slot_tokens) < longest:
            raise ConfigError(
                '`microbatching.device_train_microbatch_size` times `slot_tokens` must be at least the longest sample, '
                f'got: {size} x {slot_tokens} < {longest} (sample {int(table.lengths.argmax())}). Raise one of them, '
                'set `dataset.max_length` or `dataset.fit`, or let it go alone over the budget with '
                '`loader.regroup_ranks=false` and `microbatching.on_oversize=warn`'
            )
        has_images = table.image_tokens.any() or loader.modality == 'per_step'
        sampler = RegroupingBatchSampler(
            dataset,
            lengths=table.lengths,
            image_tokens=table.image_tokens if has_images else None,
            vision_cost=(microbatching.cost or CostModel()).vision(table.image_tokens, table.vision_patches),
            global_batch_size=loader.global_batch_size,
            max_tokens=token_budget(size, slot_tokens),
            max_image_tokens=microbatching.max_image_tokens if has_images else None,
            seed=self.config.seed,
            shuffle=loader.shuffle,
            drop_last=loader.drop_last,
            modality=loader.modality,  # pyright: ignore[reportArgumentType]  # refused by the sampler
            **(self._shares(dataset.datasets, table.loss_tokens) if 'parts' in self.section else {}),
            **self.planning,
        )
        return RegroupingDataLoader(dataset, batch_sampler=sampler, **options), slot_tokens

    def _shares(self, datasets: Sequence[Any], loss_tokens: Any) -> dict[str, Any]:
        """Returns what the sampler is told of the parts' shares."""
        parts, sizes = self._parts(), [len(one) for one in datasets]
        weights, shares = ([part[key] for part in parts if key in part] for key in ('weight', 'loss_share'))
        if shares and not self._shares_by_weights:
            return {'mixture': Mixture.from_loss_shares(sizes, shares, loss_tokens)}
        epochs = None if weights else [part.get('epochs', 1) for part in parts]
        mixture = Mixture(sizes, epochs=epochs, weights=weights or None)
        return {'mixture': mixture, 'loss_shares': LossShares(sizes, shares, loss_tokens) if shares else None}


def _dataset_class(path: str, name: Any) -> Any:
    if name == 'llava':
        return LlavaDataset
    if '.' in str(name):
        return import_by_name(path, name)
    refusal = unknown_name(f'`{path}.name`', str(name), ['llava', 'llava_streaming'])
    raise ConfigError(f'{refusal}, or the dotted name of a dataset class')


def _check_dataset(path: str, part: dict[str, Any], own_keys: dict[str, Any]) -> None:
    cls = _dataset_class(path, part.get('name'))
    is_ours = inspect.isclass(cls) and issubclass(cls, LlavaDataset)
    check_arguments(path, cls, {**part, 'processor': None}, own_keys=own_keys, hints=_RANGES if is_ours else None)
    if is_ours:
        check_video(path, part)


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
        for path, is_eval in (('dataset', False), ('dataset.eval', True)):
            self._check_arguments(path, self._arguments(is_eval=is_eval))
        if self.config.loader.modality == 'per_step':
            raise ConfigError('`loader.modality` must be `mixed` for streamed data, got: per_step. Use a JSON file')
        if self.config.loader.exchange_ranks:
            if not self.config.microbatching.regroup:
                raise ConfigError('`loader.exchange_ranks` needs `microbatching.regroup`, got: false. Set it')
            if (self.section.get('replication') or 1) > 1:
                raise ConfigError('`loader.exchange_ranks` must be false with `dataset.replication`, got: true')
            if self.config.microbatching.device_train_microbatch_size != 'suggest':  # which sets the width as well
                self._slot_tokens()

    def small_processor(self, arguments: dict[str, Any]) -> Any:
        """Makes one around a tokenizer that is trained on the shards, which must lie in a folder of this machine."""
        check_arguments('dataset.processor', build_small_processor, arguments, num_given=1)
        return build_small_processor(self._texts(), **arguments)

    def build_dataset(self, processor: Any, *, is_eval: bool = False) -> Any:
        """Returns the dataset, shared among the ranks as StreamingDataset does it; None where there is no eval set."""
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
        # That of a killed run cannot be told from a living one's, but no two may download to one folder anyway.
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
            max_tokens=token_budget(self.rows_of_microbatch, slot_tokens),
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
            found = 'neither `microbatching.slot_tokens` nor `dataset.max_length`'
            raise ConfigError(f'`loader.exchange_ranks` needs the width of a slot before a batch is read, got: {found}')
        return slot_tokens

    def _texts(self) -> Iterator[str]:
        """Yields the text of every turn in the shards."""
        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        for stream in (self.section.get('streams') or {'': self.section}).values():
            folders = [Path(stream[key], stream.get('split') or '') for key in ('local', 'remote') if stream.get(key)]
            yield from LlavaStreamingDataset.texts(*folders)

    def _check_arguments(self, path: str, arguments: dict[str, Any]) -> None:
        from streaming import Stream, StreamingDataset  # pyright: ignore[reportMissingImports]

        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        for key, source in _FROM_LOADER.items():
            if key in arguments:
                raise ConfigError(f'`{path}.{key}` must be left out, got: {arguments[key]}. Set `{source}`')
        check_video(path, arguments)
        own_arguments = inspect.signature(LlavaStreamingDataset).parameters.keys() - {'processor', 'kwargs'}
        known = own_arguments | inspect.signature(StreamingDataset).parameters.keys()
        check_names(path, arguments, known - _FROM_LOADER.keys())
        if not any(arguments.get(source) for source in _PLACES):
            raise ConfigError(f'`{path}` must name its shards, got: none of {", ".join(_PLACES)}. Give `{path}.local`')
        check_value(f'{path}.streams', arguments.get('streams'), dict | None)
        for name, stream in (arguments.get('streams') or {}).items():
            check_value(f'{path}.streams.{name}', stream, dict)
            check_names(f'{path}.streams.{name}', stream, set(inspect.signature(Stream).parameters))


def source_of(config: TrainConfig) -> Source:
    """Returns the source that ``dataset.name`` stands for."""
    return (ShardSource if config.dataset.get('name') == 'llava_streaming' else FileSource)(config)
