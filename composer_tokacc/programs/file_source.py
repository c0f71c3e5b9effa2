# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples that are read by index: of a file, a table, or a dataset class of the user's; one set, or several parts."""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Optional

from composer.utils import dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from composer_tokacc.data import LlavaDataset, build_small_processor
from composer_tokacc.planning import CostModel
from composer_tokacc.programs.errors import ConfigError, unknown_name
from composer_tokacc.programs.registry import import_by_name, without
from composer_tokacc.programs.source import Source, check_video
from composer_tokacc.programs.values import AT_LEAST_0, AT_LEAST_1, Range, check_arguments, check_value
from composer_tokacc.sampling import LossShares, Mixture, RegroupingBatchSampler, RegroupingDataLoader

# Keys of one of several parts that are not arguments of the dataset class.
_WHOLE = Annotated[int, AT_LEAST_1]
_RANGES = {
    **dict.fromkeys(('vocab_size', 'image_size', 'patch_size', 'model_max_length'), _WHOLE),
    **dict.fromkeys(('max_length', 'max_image_tokens'), Optional[_WHOLE]),  # noqa: UP045 - for pyright
    'num_workers': Optional[Annotated[int, AT_LEAST_0]],  # noqa: UP045
    'on_error': Literal['raise', 'skip'],
}
"""Of the arguments of our own dataset and small processor."""
_BY = Literal['sampling', 'weights']
_SHARES = ('epochs', 'weight', 'loss_share')
_KEYS_OF_PART = ('name', *_SHARES)
_KEYS_OF_ALL = ('processor', 'eval', 'parts', 'loss_shares_by')
"""Keys of the section that are of no part, but of all together."""


class NamedParts(ConcatDataset):
    """Several datasets one behind the other, whose samples carry the name of theirs as ``source``."""

    def __init__(self, datasets: Sequence[Dataset], names: Sequence[str]) -> None:
        super().__init__(datasets)
        self.names = list(names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), 'source': [self.names[bisect_right(self.cumulative_sizes, index)]]}


class FileSource(Source):
    """Datasets read by index.

    A class named in full takes ``processor`` and the section's other keys. For a fresh model it also has
    ``build_processor(**arguments)``, a static method, or ``texts(path)``, on which a tokenizer is trained.
    """

    def check(self) -> None:
        """Refuses unknown datasets and arguments, for training and, where there is one, for the eval set."""
        if 'parts' in self.section:
            self._check_parts()
        else:
            _check_dataset('dataset', self.section, own_keys=('name', 'processor', 'eval'))
        if self.section.get('eval') is not None:
            _check_dataset('dataset.eval', self._eval_section(), own_keys=('name',))
        if self.config.model.pretrained is None:
            self._processor_maker(self.section.get('processor') or {})
        if self.config.loader.exchange_ranks:
            found = f'true with `dataset.name` {self.section.get("name")}. `loader.regroup_ranks` does the same'
            raise ConfigError(f'`loader.exchange_ranks` must be false for samples read by index, got: {found}')
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
            _check_dataset(f'dataset.parts.{name}', part, own_keys=_KEYS_OF_PART)
            for key in _SHARES:
                share = Annotated[float, Range(above=0, below=1e9)]
                check_value(f'dataset.parts.{name}.{key}', part.get(key, 1), share)
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
        check_value('dataset.loss_shares_by', self.section.get('loss_shares_by', 'sampling'), _BY)
        weights = (self.config.algorithms.get('token_accumulation') or {}).get('token_weights')
        if self._shares_by_weights and not (shares and weights == 'column'):
            raise ConfigError(
                '`dataset.loss_shares_by: weights` must come with a `loss_share` of each part and '
                '`algorithms.token_accumulation.token_weights: column`, which takes the weights, got: '
                f'{"shares" if shares else "no shares"} and token_weights {weights}'
            )

    @property
    def _shares_by_weights(self) -> bool:
        return self.section.get('loss_shares_by') == 'weights'

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
        weights = (self.config.algorithms.get('token_accumulation') or {}).get('token_weights')
        if weights == 'column' and not self._shares_by_weights:
            for record in (record for one in datasets for record in getattr(one, 'records', ())):
                if record.loss_weights is None:
                    raise record.error('must have `loss_weights` with `token_weights: column`, got: none')
        return NamedParts(datasets, list(self.section['parts'])) if 'parts' in self.section else datasets[0]

    def _open(self, part: dict[str, Any], processor: Any) -> Dataset:
        cls = _dataset_class('dataset', part['name'])
        arguments = without(part, *_KEYS_OF_PART)
        fits = issubclass(cls, LlavaDataset) and arguments.get('fit', False)
        if fits:
            arguments |= self._caps(arguments)
        if fits or (issubclass(cls, LlavaDataset) and arguments.get('on_error') == 'skip'):
            # It reads all samples to know what becomes of them, and so measures them for the sampler too.
            measuring = {'lengths_folder': self.config.loader.lengths_folder, 'patch_size': self.patch_size(processor)}
            arguments = {**measuring, **arguments}
        try:
            return cls(processor=processor, **arguments)
        except ImportError as error:
            if error.name and not isinstance(error, ModuleNotFoundError):
                raise  # a name that a module there lacks is a bug, ours or of the dataset's class
            raise ConfigError(f'`dataset.name` {part["name"]} needs a package more, got: {error}') from error

    def _caps(self, part: dict[str, Any]) -> dict[str, int | None]:
        """Returns the most that a row may hold: what the dataset's section says, or a microbatch has room for."""
        own = self.config.microbatching
        size, width = own.device_train_microbatch_size, own.slot_tokens
        room = size * width if isinstance(size, int) and width else None
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
        """Opens a loader that shares each global batch by length.

        The width of a device batch says little here, because a rank may get short samples only: without
        ``slot_tokens`` a slot is as wide as the longest sample of the dataset.
        """
        loader, microbatching = self.config.loader, self.config.microbatching
        table = self.measure(dataset, processor)
        longest, size = int(table.lengths.max()), self.rows_of_microbatch
        slot_tokens = microbatching.slot_tokens or longest
        if size * slot_tokens < longest:
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
            max_tokens=size * slot_tokens,
            max_image_tokens=microbatching.max_image_tokens if has_images else None,
            seed=self.config.seed,
            shuffle=loader.shuffle,
            drop_last=loader.drop_last,
            mixture=self._mixture(dataset, table.loss_tokens) if 'parts' in self.section else None,
            loss_shares=self._loss_shares(dataset, table.loss_tokens) if self._shares_by_weights else None,
            modality=loader.modality,  # pyright: ignore[reportArgumentType]  # refused by the sampler
            **self.planning,
        )
        return RegroupingDataLoader(dataset, batch_sampler=sampler, **options), slot_tokens

    def _mixture(self, dataset: Any, loss_tokens: Any) -> Mixture:
        """Returns the shares of the parts."""
        parts, sizes = self._parts(), [len(one) for one in dataset.datasets]
        if 'loss_share' in parts[0] and not self._shares_by_weights:
            return Mixture.from_loss_shares(sizes, [part['loss_share'] for part in parts], loss_tokens)
        weights = [part['weight'] for part in parts if 'weight' in part]
        epochs = None if weights else [part.get('epochs', 1) for part in parts]
        return Mixture(sizes, epochs=epochs, weights=weights or None)

    def _loss_shares(self, dataset: Any, loss_tokens: Any) -> LossShares:
        shares = [part['loss_share'] for part in self._parts()]
        return LossShares([len(one) for one in dataset.datasets], shares, loss_tokens)


def _dataset_class(path: str, name: Any) -> Any:
    if name == 'llava':
        return LlavaDataset
    if '.' in str(name):
        return import_by_name(path, name)
    known = ['llava', 'llava_streaming']
    raise ConfigError(f'{unknown_name(f"`{path}.name`", str(name), known)}, or the dotted name of a dataset class')


def _check_dataset(path: str, part: dict[str, Any], *, own_keys: tuple[str, ...]) -> None:
    cls = _dataset_class(path, part.get('name'))
    is_ours = inspect.isclass(cls) and issubclass(cls, LlavaDataset)
    check_arguments(path, cls, {**part, 'processor': None}, own_keys=own_keys, hints=_RANGES if is_ours else None)
    if is_ours:
        check_video(path, part)
