# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds processor, datasets, length tables and loaders from the sections ``dataset`` and ``loader``.

:class:`FileSource` reads samples by index, from files or from a dataset class of the user. :class:`ShardSource` streams
them from shards of mosaicml-streaming.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from composer.core import DataSpec
from composer.utils import dist
from pydantic import Field
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from transformers import AutoProcessor, PretrainedConfig

from composer_tokacc.data import (
    LengthTable,
    LlavaDataset,
    VisionLanguageCollator,
    ask_hub,
    build_small_processor,
    count_patches,
    image_token_ids,
    length_table,
    patch_size_of,
)
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel, token_budget
from composer_tokacc.programs.errors import ConfigError, building, unknown_name
from composer_tokacc.programs.host_types import Processor, Section
from composer_tokacc.programs.models import is_encoder, read_config
from composer_tokacc.programs.registry import import_by_name, token_accumulation_options, uses_composers_flag
from composer_tokacc.programs.schema import (
    Hint,
    Sections,
    TrainConfig,
    Values,
    check_arguments,
    check_names,
    check_value,
    without,
)
from composer_tokacc.sampling import (
    ExchangingDataLoader,
    LossShares,
    Mixture,
    RegroupingBatchSampler,
    RegroupingDataLoader,
)

DATASET_HINTS: dict[str, Hint] = {
    'max_length': Annotated[int | None, Field(ge=1)],
    'num_workers': Annotated[int | None, Field(ge=0, le=256)],
}
"""Ranges of arguments of LlavaDataset. Without them a wrong value would be found late, and a ``max_length`` of 0 would
count as not given."""
SHARE_KEYS = {
    'epochs': Annotated[float, Field(gt=0, le=10_000)],
    'weight': Annotated[float, Field(gt=0, lt=1e9)],
    'loss_share': Annotated[float, Field(gt=0, le=1)],
}
"""Keys of a dataset in ``dataset.parts`` that say how much of it is trained, with the ranges of :class:`.Mixture`.

- ``epochs``: how often each sample is drawn in an epoch of the run.
- ``weight``: how many of the drawn samples are from this part, in proportion to the weights of the other parts.
- ``loss_share``: the part's share of all loss tokens, or of their weights with ``loss_shares_by: weights``.

Either no part has such a key, or all have the same one. Only ``epochs`` may be left out in a part, which is then read
once. With ``loss_shares_by: weights`` a part may have ``epochs`` in addition to its ``loss_share``. A key that stands
next to ``parts`` counts for every part.
"""
SECTION_KEYS = ('processor', 'eval', 'parts', 'loss_shares_by')
"""Keys of the section ``dataset`` that are not settings of a single dataset, and so are not passed on to the parts."""
SHARD_HINTS: dict[str, Hint] = {'replication': Literal[1] | None}
"""With another ``replication``, ranks would read the same samples. Only tensor parallelism needs this, which a run from
a file does not have. A step would have fewer samples than ``loader.global_batch_size``. Composer counts each replica of
a sample, so a checkpoint within an epoch would name a place that is too far on, and a resumed run would leave some out.
"""
SHARD_PLACES = ('local', 'remote', 'streams')
"""Arguments of StreamingDataset that name the shards."""


class OpenedLoader(NamedTuple):
    """A loader, and the width of the rows that ``device_train_microbatch_size`` counts."""

    dataloader: DataLoader
    slot_tokens: int | None
    """The width in tokens. A microbatch may hold ``device_train_microbatch_size * slot_tokens`` tokens. With None these
    rows are as wide as the device batch."""


class NamedParts(ConcatDataset):
    """Joins several datasets, one after the other. Each sample gets the name of its dataset as entry ``source``.

    The entry is a list with this one name, because a sample is a batch of one row.
    """

    def __init__(self, datasets: Sequence[Dataset], names: Sequence[str]) -> None:
        super().__init__(datasets)
        self.names = list(names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = super().__getitem__(index)  # raises if the index is out of range
        part = bisect_right(self.cumulative_sizes, index % len(self))  # -1 is the last sample
        return {**sample, 'source': [self.names[part]]}


class Source(ABC):
    """Opens the samples of a run. :func:`source_of` chooses the subclass.

    A program first calls :meth:`check`, which needs only the config. The processor, the two datasets and the length
    table of the training set are made when they are first used, and then kept. The loaders come after the model,
    because a loader needs the model's layout.

    The ``source`` of a sample is something else: the name of the dataset that the sample is from.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        """The config of the run. If its microbatch size is ``suggest``, ``build_parts`` sets a config with the
        suggested size here, before a loader is built."""
        self.dataset_section = config.dataset
        self.has_parts = self.dataset_section.get('parts') is not None

    @abstractmethod
    def check(self, *, reads_data: bool = True) -> None:
        """Refuses unknown datasets and arguments, before anything is read.

        Args:
            reads_data: Whether the program reads the data. If not, required arguments, such as paths, may be missing.
        """

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """Yields all texts of the training data. The tokenizer of a fresh model is trained on them."""

    @abstractmethod
    def _build_dataset(self, *, is_eval: bool) -> Any:
        """Returns the training set, or the eval set, which is None if ``dataset.eval`` is missing or empty."""

    @abstractmethod
    def open_loader(self, options: Section, *, is_eval: bool) -> OpenedLoader:
        """Returns the loader of this rank, and its slot width. ``options`` are arguments of torch's DataLoader."""

    @cached_property
    def processor(self) -> Any:
        """The processor of both sets. It is None if the ``build_processor`` of a user's class returns None."""
        return self._build_processor()

    @cached_property
    def train_dataset(self) -> Any:
        """The training set."""
        return self._build_dataset(is_eval=False)

    @cached_property
    def eval_dataset(self) -> Any:
        """The eval set; None if ``dataset.eval`` is missing or empty."""
        return self._build_dataset(is_eval=True)

    @cached_property
    def train_table(self) -> LengthTable:
        """The length table of the training set. The first use is a collective, and may take minutes."""
        return self.measure(self.train_dataset)

    def open(self) -> None:
        """Builds the processor and both datasets now, so that mistakes in them are found before the model is built."""
        _ = self.processor, self.train_dataset, self.eval_dataset

    def settings_of_batches(self) -> dict[str, Any] | None:
        """Returns the settings that decide which samples a batch holds, by their keys in the config.

        A run that resumes within an epoch must have the settings of its checkpoint, see :class:`.SameData`. The result
        is None if the dataset itself decides which samples a batch holds, and has the order in its own state.
        """
        return None

    def samples_of_all_ranks(self, dataset: Any) -> Any:
        """Returns a dataset whose length and indices cover the samples of all ranks.

        A dataset that is read by index does so already. A streamed one does not, so ShardSource wraps it.
        """
        return dataset

    def _build_processor(self) -> Any:
        """Returns the processor of the checkpoint. For a fresh model, makes one with :meth:`processor_maker`.

        A fresh one gets ``image_size`` and ``patch_size`` from the config of the model, unless ``dataset.processor``
        has them.
        """
        arguments = dict(self.dataset_section.get('processor') or {})
        if self.config.model.pretrained is not None:
            return self._pretrained_processor(self.config.model.pretrained, arguments)
        model_config = self.config.model.config or {}
        vision_config = model_config.get('vision_config') or {}
        for key in ('image_size', 'patch_size'):
            if key in vision_config:
                arguments.setdefault(key, vision_config[key])
        with building('dataset.processor'):
            make_processor = self.processor_maker()
            return make_processor(**check_arguments('dataset.processor', make_processor, arguments))

    def processor_maker(self) -> Callable[..., Any]:
        """Returns a function that makes a processor for a fresh model from the keys of ``dataset.processor``."""
        return partial(build_small_processor, self.texts())

    def _pretrained_processor(self, pretrained: str, arguments: Section) -> Any:
        """Returns the processor of a checkpoint, changed by the ``arguments`` of ``dataset.processor``."""
        # With the default of trust_remote_code, Transformers would ask on the terminal, once for each class.
        load = partial(AutoProcessor.from_pretrained, pretrained, trust_remote_code=False)
        with building('model.pretrained'):
            ask_hub(pretrained, 'model')  # otherwise `load` would try for minutes if the hub does not answer
            processor = load()
        if not arguments:
            return processor
        check_names('dataset.processor', arguments, _names_of_arguments(processor))
        with building('dataset.processor'):
            return load(**arguments)

    def measure(self, dataset: Any) -> LengthTable:
        """Returns the length table of the training set or of the eval set; a collective.

        Counts patches by the patch size of the run's own vision encoder, because some processors do not name it.
        """
        return length_table(
            self.samples_of_all_ranks(dataset),
            self.processor,
            folder=self.config.loader.lengths_folder,
            patch_size=self.patch_size,
        )

    def build_loader(
        self,
        layout: BatchLayout,
        *,
        is_eval: bool = False,
        model: Any = None,
    ) -> DataSpec:
        """Returns a loader of this rank's samples, wrapped so that Composer counts, splits and trims by the config.

        Args:
            layout: How tensors of a batch belong to rows.
            is_eval: Whether to load the eval set, whose rows keep their order, instead of the training set.
            model: The model that is trained. Its loss rule is only used if Composer itself weights the microbatches by
                their loss tokens (``trainer.accumulate_train_batch_on_tokens``).
        """
        loader = self.config.loader
        options = {
            'num_workers': loader.num_workers,
            'prefetch_factor': loader.prefetch_factor,
            'pin_memory': loader.pin_memory,
            'persistent_workers': loader.num_workers > 0,
            'collate_fn': VisionLanguageCollator(self.processor, layout=layout),
            'batch_size': self.rank_batch_size(is_eval=is_eval),
            'drop_last': loader.drop_last and not is_eval,
        }
        with building('loader'):
            opened = self.open_loader(options, is_eval=is_eval)
        model_of_loss_rule = None
        if uses_composers_flag(self.config):
            model_of_loss_rule = model
        return token_data_spec_of(
            self.config,
            opened.dataloader,
            slot_tokens=opened.slot_tokens,
            layout=layout,
            model=model_of_loss_rule,
        )

    @property
    def patch_size(self) -> int:
        """The side of a patch of the run's own vision encoder, in pixels."""
        return patch_size_of(self.model_config(self.processor), self.processor)

    def model_config(self, processor: Processor | None) -> PretrainedConfig:
        """Returns the config of the model that is trained."""
        return read_config(self.config.model.pretrained, self.config.model.config, processor)

    def rank_batch_size(self, *, is_eval: bool) -> int:
        """Returns the number of samples in a batch of one rank.

        There is no remainder, because ``check_config`` refuses a global batch that the ranks cannot divide equally.
        """
        return self.config.batch_size(is_eval=is_eval) // dist.get_world_size()

    @property
    def planner_options(self) -> dict[str, Any]:
        """Options that RegroupingBatchSampler and ExchangingDataLoader plan microbatches with."""
        return {
            'objective': 'fsdp' if self.config.is_sharded else 'ddp',
            'width_multiple': self.config.microbatching.width_multiple,
            'cost': self.config.microbatching.cost,
            'max_loss_tokens': self.config.microbatching.max_loss_tokens,
        }


def _names_of_arguments(processor: Any) -> set[str]:
    """Returns the names of all arguments that a processor may be loaded with. Transformers ignores any other name.

    These are the attributes of the processor and of its parts, such as the tokenizer, and the arguments of their calls.
    """
    names = {'use_fast'}  # an argument of `from_pretrained` that is no attribute
    parts = [processor, *vars(processor).values()]
    for part in parts:
        names.update(dir(part))
        names.update(getattr(part, 'SPECIAL_TOKENS_ATTRIBUTES', ()))  # not in `dir` with Transformers 5
        valid_kwargs = getattr(part, 'valid_kwargs', None)  # a TypedDict of the arguments of a call
        names.update(getattr(valid_kwargs, '__annotations__', ()))
    return names


def token_data_spec_of(
    config: TrainConfig,
    dataloader: Iterable[Any],
    *,
    slot_tokens: int | None,
    layout: BatchLayout | None = None,
    model: Any = None,
) -> DataSpec:
    """Calls :func:`.token_data_spec` with the settings of the section ``microbatching`` as its arguments.

    ``slot_tokens`` comes from the loader, which may have derived it from the data.
    """
    # The Trainer takes the microbatch size. `device_memory_gib` and `rehearse` are for `suggest` and the rehearsal. The
    # caller gives `slot_tokens`.
    keys_not_passed_on = ('device_train_microbatch_size', 'device_memory_gib', 'slot_tokens', 'rehearse')
    options = without(vars(config.microbatching), *keys_not_passed_on)
    return token_data_spec(dataloader, slot_tokens=slot_tokens, layout=layout, model=model, **options)


class FileSource(Source):
    """Datasets that are read by index: ``llava``, or classes of the user.

    A class of the user gets ``processor`` and the other keys of the section as arguments. If the model is fresh,
    one class must also have a static method ``build_processor``, or all of them ``texts(path)``, whose texts train a
    tokenizer. The arguments of ``build_processor`` are the keys of ``dataset.processor``, and ``image_size`` and
    ``patch_size`` if ``model.config.vision_config`` has them.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.shares_by_weights = self.dataset_section.get('loss_shares_by') == 'weights'
        """Whether ``loss_share`` sets the weights of tokens, rather than how often samples are drawn."""
        self.token_weights = token_accumulation_options(config).get('token_weights')
        """The argument of :class:`.TokenAccumulation`. None means its default."""

    def settings_of_batches(self) -> dict[str, Any]:
        """Returns the settings that decide which samples a batch holds, by their keys in the config."""
        loader = self.config.loader
        size_key = 'global_batch_size' if loader.global_batch_tokens is None else 'global_batch_tokens'
        settings: dict[str, Any] = {'seed': self.config.seed}
        for name in ('shuffle', 'drop_last', 'modality', size_key):
            settings[f'loader.{name}'] = getattr(loader, name)
        if not self.has_parts:
            return settings
        # With parts `regroup_ranks` matters: RegroupingBatchSampler mixes the parts evenly, DistributedSampler shuffles
        # them as one dataset. Without parts both samplers make the same global batches.
        settings['loader.regroup_ranks'] = self.config.regroups_ranks
        # With `loss_shares_by: weights` a share only sets the weights of tokens. It does not change which samples are
        # drawn.
        keys = ('epochs',) if self.shares_by_weights else tuple(SHARE_KEYS)
        for path, part in self._settings_by_path().items():
            for key in keys:
                if key in part:
                    settings[f'{path}.{key}'] = float(part[key])
        return settings

    def check(self, *, reads_data: bool = True) -> None:
        """Refuses unknown datasets and arguments, and parts or settings of the loader that do not go together."""
        if self.has_parts:
            check_value('dataset.parts', self.dataset_section['parts'], Annotated[Sections, Field(min_length=1)])
            shares_by = self.dataset_section.get('loss_shares_by')
            check_value('dataset.loss_shares_by', shares_by, Literal['sampling', 'weights', None])
        settings_by_path = self._settings_by_path() | self._settings_by_path(is_eval=True)
        for path, settings in settings_by_path.items():
            _arguments_of_dataset(path, settings, requires_all=reads_data)  # only for its refusals
        if self.has_parts:
            self._check_shares()
        if self.config.loader.exchange_ranks:
            raise ConfigError(
                'loader.exchange_ranks',
                'must be false for samples read by index, got: true. `loader.regroup_ranks` does the same',
            )
        if not self.config.regroups_ranks:
            self._check_without_plan()

    def _check_without_plan(self) -> None:
        """Refuses settings that only a RegroupingBatchSampler can follow, because it plans batches ahead."""
        key_needing_plan = self.config.loader.key_needing_plan
        if key_needing_plan is None and self.has_parts:
            for path, part in self._settings_by_path().items():
                if part.keys() & SHARE_KEYS.keys():
                    key_needing_plan = path
                    break
        if key_needing_plan is not None:
            # The error begins with the key `loader.regroup_ranks`, so the message goes on with "and".
            message = f'and `microbatching.regroup` must be on for `{key_needing_plan}` as it is set, got: off'
            raise ConfigError('loader.regroup_ranks', message)

    def _check_shares(self) -> None:
        """Refuses parts whose ``SHARE_KEYS`` do not go together."""
        share_keys_by_part = {}
        total_share = 0.0
        for path, part in self._settings_by_path().items():
            share_keys_by_part[path] = sorted(part.keys() & SHARE_KEYS.keys())
            total_share += part.get('loss_share', 0)
        used_keys = set().union(*share_keys_by_part.values())
        has_shares = 'loss_share' in used_keys
        if self.shares_by_weights and (not has_shares or self.token_weights != 'column'):
            raise ConfigError(
                'dataset.loss_shares_by',
                'set to weights needs a `loss_share` of each part and '
                '`algorithms.token_accumulation.token_weights: column`, which applies the weights, got: '
                f'{share_keys_by_part} and token_weights {self.token_weights}',
            )
        # With `loss_shares_by: weights` a share only sets the weights of tokens, so `epochs` may set how often samples
        # are drawn.
        are_two_allowed = self.shares_by_weights and used_keys == {'loss_share', 'epochs'}
        is_mixed = len(used_keys) > 1 and not are_two_allowed
        required_keys = used_keys - {'epochs'}  # a part without `epochs` is read once
        is_complete = all(required_keys.issubset(keys) for keys in share_keys_by_part.values())
        if is_mixed or not is_complete:
            raise ConfigError(
                'dataset.parts',
                'must all have a `weight`, or all a `loss_share`, or neither of them, and then perhaps `epochs`, got: '
                f'{share_keys_by_part}',
            )
        if has_shares and not math.isclose(total_share, 1, abs_tol=1e-6):
            raise ConfigError('dataset.parts', f'must have `loss_share` values that add up to 1, got: {total_share:g}')

    def _settings_by_path(self, *, is_eval: bool = False) -> dict[str, Values]:
        """Returns the settings of each training set, or of the eval set if there is one, by its key in the config.

        The key is ``dataset``, ``dataset.parts.NAME`` or ``dataset.eval``. Parts and eval set share the settings that
        stand next to them in the section, unless they have their own. The settings may include keys that are not for
        the class of the dataset: see :func:`_arguments_of_dataset`.
        """
        shared = without(self.dataset_section, *SECTION_KEYS)
        if is_eval:
            changes = self.dataset_section.get('eval')
            if not changes:
                return {}
            if self.has_parts:
                # A key such as `epochs` next to the parts is for all of them. It says nothing about the eval set.
                shared = without(shared, *SHARE_KEYS)
            return {'dataset.eval': {**shared, **changes}}
        if not self.has_parts:
            # The whole section, so that check() also refuses `loss_shares_by`, which is only for `parts`.
            return {'dataset': dict(self.dataset_section)}
        settings_by_path = {}
        for name, changes in self.dataset_section['parts'].items():
            settings_by_path[f'dataset.parts.{name}'] = {**shared, **changes}
        return settings_by_path

    def processor_maker(self) -> Callable[..., Any]:
        """Returns the first ``build_processor`` of the dataset classes, or our own function if none has one.

        Our own function needs the ``texts`` of all classes.
        """
        for path, settings in self._settings_by_path().items():
            cls = _dataset_class(path, settings['name'])
            if hasattr(cls, 'build_processor'):
                return cls.build_processor
        return super().processor_maker()

    def texts(self) -> Iterator[str]:
        """Yields the texts of all parts."""
        for path, settings in self._settings_by_path().items():
            with building(path):
                yield from _dataset_class(path, settings['name']).texts(settings['path'])

    def _build_dataset(self, *, is_eval: bool) -> Dataset | None:
        """Returns one dataset, or the parts one after the other; None without an eval set."""
        # Token weights are only for training. With `loss_shares_by: weights` the sampler gives them.
        records_need_weights = self.token_weights == 'column' and not is_eval and not self.shares_by_weights
        datasets = []
        for path, settings in self._settings_by_path(is_eval=is_eval).items():
            dataset = self._build_from_settings(path, settings)
            datasets.append(dataset)
            # Only a LlavaDataset knows the weights of its records. With other datasets a run fails at a batch without
            # weights.
            if records_need_weights and isinstance(dataset, LlavaDataset):
                _check_loss_weights(dataset)
        if self.has_parts and not is_eval:
            return NamedParts(datasets, list(self.dataset_section['parts']))
        if not datasets:
            return None
        return datasets[0]

    def _build_from_settings(self, path: str, settings: Section) -> Dataset:
        """Builds one dataset from its complete settings. ``path`` is its key in the config."""
        cls = _dataset_class(path, settings['name'])
        arguments = _arguments_of_dataset(path, settings)
        if cls is LlavaDataset and is_encoder(self.model_config(self.processor)):
            raise ConfigError(
                f'{path}.name',
                'must be a dataset class of your own that masks its samples, because the model is an encoder, got: '
                'llava, whose labels are tokens that an encoder sees (docs/encoders.md)',
            )
        if _is_ours(cls):
            self._add_settings_of_run(arguments)
        with building(path):
            return cls(processor=self.processor, **arguments)

    def _add_settings_of_run(self, arguments: dict[str, Any]) -> None:
        """Adds settings of other sections to the arguments of a LlavaDataset that measures its samples.

        The dataset measures them when it is built, but only with ``fit`` (makes large samples smaller) or
        ``on_error: skip`` (leaves out bad ones).
        """
        makes_smaller = bool(arguments.get('fit'))
        if makes_smaller or arguments.get('on_error') == 'skip':
            # The dataset keeps the table that it makes now. `measure` later returns this table as it is. So it must be
            # made with the settings of `measure`.
            arguments.setdefault('lengths_folder', self.config.loader.lengths_folder)
            arguments.setdefault('patch_size', self.patch_size)
        if makes_smaller:
            # A sample must fit into a microbatch, so the dataset gets no higher limits than a microbatch has.
            for name, limit in self._limits_of_microbatch().items():
                arguments[name] = min(arguments.get(name) or limit, limit)

    def _limits_of_microbatch(self) -> dict[str, int]:
        """Returns the largest sample that fits into a microbatch, as arguments of a LlavaDataset.

        A limit that does not exist, or that depends on the samples, is left out.
        """
        microbatching = self.config.microbatching
        limits = {}
        if microbatching.max_image_tokens is not None:
            limits['max_image_tokens'] = microbatching.max_image_tokens
        size = microbatching.device_train_microbatch_size
        if isinstance(size, int) and microbatching.slot_tokens is not None:
            limits['max_length'] = token_budget(size, microbatching.slot_tokens)
        return limits

    def open_loader(self, options: Section, *, is_eval: bool) -> OpenedLoader:
        """Opens torch's loader, or for training with ``regroup_ranks`` one that assigns samples to ranks by length."""
        config = self.config
        if config.regroups_ranks and not is_eval:
            return self._open_planned_loader(options)
        dataset = self.eval_dataset if is_eval else self.train_dataset
        shuffle = config.loader.shuffle and not is_eval
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=options['drop_last'], seed=config.seed)
        dataloader = DataLoader(dataset, sampler=sampler, **options)
        return OpenedLoader(dataloader, config.microbatching.slot_tokens)

    def _open_planned_loader(self, options: Section) -> OpenedLoader:
        """Measures all samples, and opens a loader that plans which rank computes which of them."""
        loader = self.config.loader
        microbatching = self.config.microbatching
        dataset = self.train_dataset
        table = self.train_table
        longest = int(table.lengths.max())
        size = microbatching.device_train_microbatch_size
        if not isinstance(size, int):
            # 'auto' or None: a microbatch may hold the whole device batch. So the size is its number of samples.
            samples_of_all_ranks = loader.samples_per_batch(table.lengths)
            size = math.ceil(samples_of_all_ranks / dist.get_world_size())
        # The sampler plans before any batch exists, so the width of a device batch cannot be the default here.
        slot_tokens = microbatching.slot_tokens or longest
        max_tokens = token_budget(size, slot_tokens)
        if max_tokens < longest:
            raise ConfigError(
                'microbatching.device_train_microbatch_size',
                f'times `slot_tokens` must be at least the longest sample, got: {size} x {slot_tokens} < {longest} '
                f'(sample {table.lengths.argmax()}). Raise one of them, set `dataset.max_length` or `dataset.fit`, '
                'or compute it alone over the budget with `loader.regroup_ranks=false` and '
                '`microbatching.on_oversize=warn`',
            )
        mixing = {}
        if self.has_parts:
            mixing = self._mixing_options(dataset.datasets, table.loss_tokens)
        cost = microbatching.cost or CostModel()
        # The sampler takes one of the two sizes of a global batch.
        global_batch_size = None
        if loader.global_batch_tokens is None:
            global_batch_size = loader.global_batch_size
        sampler = RegroupingBatchSampler(
            dataset,
            lengths=table.lengths,
            image_tokens=table.image_tokens,
            vision_cost=cost.vision(table.image_tokens, table.vision_patches),
            loss_tokens=table.loss_tokens,
            global_batch_size=global_batch_size,
            global_batch_tokens=loader.global_batch_tokens,
            max_tokens=max_tokens,
            max_image_tokens=microbatching.max_image_tokens,
            seed=self.config.seed,
            shuffle=loader.shuffle,
            drop_last=loader.drop_last,
            modality=loader.modality,
            **mixing,
            **self.planner_options,
        )
        # The sampler makes the batches, so two of the options are not for the loader.
        options = without(options, 'batch_size', 'drop_last')
        return OpenedLoader(RegroupingDataLoader(dataset, batch_sampler=sampler, **options), slot_tokens)

    def _mixing_options(self, datasets: Sequence[Any], loss_tokens: np.ndarray) -> dict[str, Any]:
        """Returns arguments of the sampler, made from the ``SHARE_KEYS`` of the parts.

        ``mixture`` says how often samples of each part are drawn, ``loss_shares`` how much their tokens weigh.

        Args:
            datasets: The parts.
            loss_tokens: Loss tokens of each sample, for all parts one after the other, (n,).
        """
        sizes = [len(dataset) for dataset in datasets]
        settings_of_parts = list(self._settings_by_path().values())
        # If one part has a `weight` or a `loss_share`, all have it: see _check_shares().
        first_part = settings_of_parts[0]
        if 'weight' in first_part:
            weights = [part['weight'] for part in settings_of_parts]
            return {'mixture': Mixture(sizes, weights=weights)}
        if 'loss_share' in first_part and not self.shares_by_weights:
            shares = [part['loss_share'] for part in settings_of_parts]
            return {'mixture': Mixture.from_loss_shares(sizes, shares, loss_tokens)}
        # Each sample is drawn once an epoch, unless `epochs` says otherwise.
        epochs = [part.get('epochs', 1) for part in settings_of_parts]
        options: dict[str, Any] = {'mixture': Mixture(sizes, epochs=epochs)}
        if self.shares_by_weights:
            shares = [part['loss_share'] for part in settings_of_parts]
            options['loss_shares'] = LossShares(sizes, shares, loss_tokens)
        return options


def _check_loss_weights(dataset: LlavaDataset) -> None:
    """Refuses a dataset if one of its records has no weights."""
    for record in dataset.records:
        if record.loss_weights is None:
            raise record.error('must have `loss_weights` with `token_weights: column`, got: none')


def _dataset_class(path: str, name: object) -> Any:
    """Returns the class that a dataset's ``name`` stands for. ``path`` is the key of the dataset in the config."""
    name = str(name)
    if name == 'llava':
        return LlavaDataset
    if '.' in name:
        return import_by_name(f'{path}.name', name)
    message = unknown_name('dataset', name, ['llava'])
    raise ConfigError(f'{path}.name', f'{message}, or llava_streaming for all data, or the dotted name of a class')


def _is_ours(cls: Any) -> bool:
    """Tells whether a dataset class is LlavaDataset or a subclass, which is assumed to take the same arguments."""
    return inspect.isclass(cls) and issubclass(cls, LlavaDataset)


def _arguments_of_dataset(path: str, settings: Section, *, requires_all: bool = True) -> Values:
    """Returns the arguments for the class of a dataset. Refuses unknown keys, and wrong values.

    Args:
        path: The key of the dataset in the config.
        settings: Its complete settings.
        requires_all: See :func:`.check_arguments`.
    """
    own_keys: dict[str, Hint] = {'name': Any}  # keys that are not arguments of the class
    if path == 'dataset':
        own_keys |= {'eval': Any, 'processor': Any, 'parts': None}  # `parts` can only be null here
    elif path != 'dataset.eval':  # one of the parts
        own_keys |= SHARE_KEYS
    cls = _dataset_class(path, settings.get('name'))
    hints = DATASET_HINTS if _is_ours(cls) else None
    checked = check_arguments(
        path,
        partial(cls, processor=None),
        settings,
        extra_keys=own_keys,
        hints=hints,
        requires_all=requires_all,
    )
    return without(checked, *own_keys)


class ShardSource(Source):
    """MDS shards, the files of mosaicml-streaming. Each rank streams its own samples from them.

    mosaicml-streaming is only imported in functions, because it may be missing.
    """

    def check(self, *, reads_data: bool = True) -> None:
        """Refuses a missing mosaicml-streaming, unknown arguments, and settings that streamed data cannot follow."""
        if importlib.util.find_spec('streaming') is None:
            raise ConfigError(
                'dataset.name',
                "llava_streaming needs mosaicml-streaming, got: none. pip install 'composer_tokacc[streaming]'",
            )
        if self.has_parts:
            raise ConfigError('dataset.parts', 'must be left out for streamed data. Use `dataset.streams`')
        self._check_arguments('dataset', self._arguments(is_eval=False), requires_shards=reads_data)
        eval_section = self.dataset_section.get('eval')
        if eval_section:
            self._check_arguments('dataset.eval', self._arguments(is_eval=True), requires_shards=reads_data)
            if eval_section.keys().isdisjoint(SHARD_PLACES):
                self._check_other_split()
        key_needing_plan = self.config.loader.key_needing_plan
        if key_needing_plan is not None:
            message = 'as it is set needs a plan, which streamed data cannot have. Use a JSON file'
            raise ConfigError(key_needing_plan, message)
        if self.config.loader.exchange_ranks:
            self._check_exchange()

    def _check_other_split(self) -> None:
        """Refuses an eval set that has shards of the training set.

        Called only if ``dataset.eval`` does not say where its shards are. Then both sets read the same streams, and
        only ``dataset.eval.split`` can make them differ. But that key has no effect on a stream with its own ``split``,
        so both sets would read the same shards of such a stream.
        """
        training_shards = self._shards(is_eval=False)
        for places, split in self._shards(is_eval=True):
            if (places, split) in training_shards:
                raise ConfigError(
                    'dataset.eval',
                    f'must name shards of its own, got: split {split!r} of {places}, which is trained. Give '
                    '`dataset.eval.local` or `dataset.eval.streams`',
                )

    def _check_exchange(self) -> None:
        """Refuses settings with which ranks cannot exchange samples."""
        if not self.config.microbatching.regroup:
            raise ConfigError('loader.exchange_ranks', 'needs `microbatching.regroup`, got: false. Set it')
        # With `suggest` the width of a slot is suggested later, together with the size.
        if self.config.microbatching.device_train_microbatch_size != 'suggest':
            self._slot_tokens()  # raises if the width is not given

    def _check_arguments(self, path: str, arguments: Section, *, requires_shards: bool) -> None:
        """Refuses unknown arguments of a dataset and its streams, and perhaps a dataset without shards."""
        from streaming import Stream, StreamingDataset  # pyright: ignore[reportMissingImports]

        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        own_arguments = dict.fromkeys(inspect.signature(LlavaStreamingDataset).parameters, Any)
        # The program supplies the processor. `kwargs` is no key: it collects the arguments of StreamingDataset.
        extra_keys = {**without(own_arguments, 'processor', 'kwargs'), 'streams': Sections | None}
        # The section `loader` sets these two arguments. check_arguments() refuses arguments that a `partial` has.
        base_class = partial(StreamingDataset, batch_size=None, shuffle=None)
        check_arguments(path, base_class, arguments, extra_keys=extra_keys, hints=SHARD_HINTS)
        if requires_shards and not any(arguments.get(place) for place in SHARD_PLACES):
            raise ConfigError(path, f'must name its shards by one of {", ".join(SHARD_PLACES)}. Give `{path}.local`')
        for name, stream in (arguments.get('streams') or {}).items():
            check_arguments(f'{path}.streams.{name}', Stream, stream)

    def _build_dataset(self, *, is_eval: bool) -> Any:
        """Returns the dataset, which divides its samples among the ranks itself; None without an eval set."""
        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        if is_eval and not self.dataset_section.get('eval'):
            return None
        arguments = {
            'shuffle_seed': self.config.seed,  # the section may have its own
            **self._arguments(is_eval=is_eval),
            'shuffle': self.config.loader.shuffle and not is_eval,
            'batch_size': self.rank_batch_size(is_eval=is_eval),
        }
        with building('dataset.eval' if is_eval else 'dataset'):
            return LlavaStreamingDataset(processor=self.processor, **arguments)

    def open_loader(self, options: Section, *, is_eval: bool) -> OpenedLoader:
        """Opens StreamingDataLoader, or for training with ``loader.exchange_ranks`` an ExchangingDataLoader."""
        from streaming import StreamingDataLoader  # pyright: ignore[reportMissingImports]

        config = self.config
        microbatching = config.microbatching
        dataset = self.eval_dataset if is_eval else self.train_dataset
        if is_eval or not config.loader.exchange_ranks:
            # A DataLoader draws a seed for its workers when it begins to iterate, by default from torch's global
            # generator. If a run resumes within an epoch, RestoreRandomState has restored the state of this generator
            # before that, and the draw would change it. So the loader gets a generator of its own. (Other datasets do
            # not need this: Composer first iterates to skip batches, and then restores the state.)
            generator = torch.Generator().manual_seed(config.seed + dist.get_global_rank())
            dataloader = StreamingDataLoader(dataset, generator=generator, **options)
            return OpenedLoader(dataloader, microbatching.slot_tokens)
        # This loader reads as a plain one does, and then exchanges samples between the ranks by length.
        slot_tokens = self._slot_tokens()
        size = microbatching.device_train_microbatch_size
        if not isinstance(size, int):
            size = options['batch_size']  # 'auto' or None: a microbatch may hold the whole device batch
        token_ids = image_token_ids(self.processor)
        # A tokenizer of text has no image tokens, and the loader would refuse a cap on them.
        max_image_tokens = None
        if token_ids:
            max_image_tokens = microbatching.max_image_tokens
        dataloader = ExchangingDataLoader(
            dataset,
            max_tokens=token_budget(size, slot_tokens),
            image_token_ids=token_ids,
            max_image_tokens=max_image_tokens,
            patches=partial(count_patches, patch_size=self.patch_size),
            **self.planner_options,
            **options,
        )
        return OpenedLoader(dataloader, slot_tokens)

    def samples_of_all_ranks(self, dataset: Any) -> Any:
        """Returns all samples. The dataset's own length counts only the samples of this rank."""
        return Subset(dataset, range(dataset.size))

    def _arguments(self, *, is_eval: bool) -> dict[str, Any]:
        """Returns the section's arguments of the training set, or of the eval set.

        The eval set has the arguments of the training set, changed by ``dataset.eval``. If ``dataset.eval`` says where
        its shards are, all ``SHARD_PLACES`` and the ``split`` of the training set are left out. If one stayed,
        ``local`` of one set could meet ``streams`` of the other, and these exclude each other.
        """
        arguments = without(self.dataset_section, 'name', 'processor', 'eval', 'parts')
        if not is_eval:
            return arguments
        eval_section = self.dataset_section['eval']
        if not eval_section.keys().isdisjoint(SHARD_PLACES):
            arguments = without(arguments, *SHARD_PLACES, 'split')
        return {**arguments, **eval_section}

    def _slot_tokens(self) -> int:
        """Returns the width of a slot in tokens. Raises ConfigError if the config does not give it."""
        slot_tokens = self.config.microbatching.slot_tokens or self.dataset_section.get('max_length')
        if slot_tokens is None:
            raise ConfigError(
                'loader.exchange_ranks',
                'needs the width of a slot before a batch is read. Give `microbatching.slot_tokens` or '
                '`dataset.max_length`',
            )
        return slot_tokens

    def texts(self) -> Iterator[str]:
        """Yields the text of every turn. Reads ``local`` if it has all shards, otherwise ``remote``.

        In the second case ``remote`` must be a folder, because nothing is downloaded.
        """
        from composer_tokacc.data.llava_streaming import LlavaStreamingDataset

        for places, split in self._shards(is_eval=False):
            folders = [Path(place, split) for place in places]
            with building('dataset'):
                yield from LlavaStreamingDataset.texts(*folders)

    def _shards(self, *, is_eval: bool) -> list[tuple[list[str], str]]:
        """Returns for each stream a list of its places (``local`` and ``remote``, if given), and its split.

        A stream without a split has the split of the dataset, as in StreamingDataset.
        """
        arguments = self._arguments(is_eval=is_eval)
        streams = list((arguments.get('streams') or {}).values())
        if not streams:
            streams = [arguments]  # the section itself describes the only stream
        shards = []
        for stream in streams:
            places = [stream[key] for key in ('local', 'remote') if stream.get(key)]
            split = stream.get('split') or arguments.get('split') or ''
            shards.append((places, split))
        return shards


def source_of(config: TrainConfig) -> Source:
    """Returns the source that ``dataset.name`` stands for."""
    if config.dataset.get('name') == 'llava_streaming':
        return ShardSource(config)
    return FileSource(config)
