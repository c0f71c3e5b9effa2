# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the ``dataset`` and ``loader`` sections name: processor, datasets, lengths, and the loaders of the Trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from typing import Any

from composer.core import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader
from transformers import AutoProcessor

from composer_tokacc.data import (
    LengthTable,
    VideoSampling,
    VisionLanguageCollator,
    ask_hub,
    length_table,
    patch_size_of,
)
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.errors import ConfigError
from composer_tokacc.programs.models import read_config, read_from
from composer_tokacc.programs.registry import without
from composer_tokacc.programs.schema import TrainConfig, check_arguments, check_names


class Source(ABC):
    """Where the samples of a run come from; see :func:`.source_of`."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.section = config.dataset

    @abstractmethod
    def check(self) -> None:
        """Refuses unknown datasets and arguments, before anything is read."""

    @abstractmethod
    def small_processor(self, arguments: dict[str, Any]) -> Any:
        """Makes a processor for a fresh model."""

    @abstractmethod
    def build_dataset(self, processor: Any, *, is_eval: bool = False) -> Any:
        """Returns the training set, or the eval set (None where ``dataset.eval`` is absent)."""

    @abstractmethod
    def open_loader(
        self, dataset: Any, processor: Any, options: dict[str, Any], *, is_eval: bool
    ) -> tuple[DataLoader, int | None]:
        """Opens a loader with the options of torch's; returns it with the slot width that it plans with."""

    def by_index(self, dataset: Any) -> Any:
        """Returns all samples by their index."""
        return dataset

    def build_processor(self) -> Any:
        """Returns the checkpoint's own processor, or where the model is fresh a small one with images of its size."""
        model, arguments = self.config.model, dict(self.section.get('processor') or {})
        if model.pretrained is not None:
            with read_from(model.pretrained):
                ask_hub(model.pretrained, 'model')
                processor = AutoProcessor.from_pretrained(model.pretrained)
            parts = (processor, *vars(processor).values())
            taken = [getattr(getattr(one, 'valid_kwargs', None), '__annotations__', ()) for one in parts]
            known = {name for name in chain(['use_fast'], *map(dir, parts), *taken) if name[0].islower()}
            check_names('dataset.processor', arguments, known)  # it takes any
            with read_from(model.pretrained):
                return AutoProcessor.from_pretrained(model.pretrained, **arguments) if arguments else processor
        vision = (model.config or {}).get('vision_config') or {}
        arguments = {**{key: vision[key] for key in ('image_size', 'patch_size') if key in vision}, **arguments}
        return self.small_processor(arguments)

    def measure(self, dataset: Any, processor: Any) -> LengthTable:
        """Returns the length table of a dataset, with patches of the run's own vision encoder."""
        folder, side = self.config.loader.lengths_folder, self.patch_size(processor)
        return length_table(self.by_index(dataset), processor, folder=folder, patch_size=side)

    def build_loader(
        self, dataset: Any, processor: Any, layout: BatchLayout, *, is_eval: bool = False, model: Any = None
    ) -> DataSpec:
        """Returns a loader of this rank's share, wrapped so that Composer counts, splits and trims as the config says.

        Evaluation keeps its rows in order. The model is for Composer's own token weights, which nothing else holds to
        the model's loss.
        """
        loader = self.config.loader
        options = {name: getattr(loader, name) for name in ('num_workers', 'prefetch_factor', 'pin_memory')}
        options |= {'persistent_workers': loader.num_workers > 0}
        options |= {'collate_fn': VisionLanguageCollator(processor, layout=layout)}
        dataloader, slot_tokens = self.open_loader(dataset, processor, options, is_eval=is_eval)
        if not self.config.trainer.get('accumulate_train_batch_on_tokens'):
            model = None
        return token_data_spec_of(self.config, dataloader, slot_tokens=slot_tokens, layout=layout, model=model)

    def patch_size(self, processor: Any) -> int:
        """Returns the side of a patch of the run's own vision encoder."""
        return patch_size_of(read_config(self.config.model.pretrained, self.config.model.config, processor), processor)

    def rank_batch_size(self, *, is_eval: bool = False) -> int:
        """Returns the samples of a batch of one rank."""
        return self.config.batch_size(is_eval=is_eval) // dist.get_world_size()

    @property
    def rows_of_microbatch(self) -> int:
        """Rows of ``slot_tokens``: a whole device batch where the Trainer finds the number, or has none."""
        size = self.config.microbatching.device_train_microbatch_size
        return size if isinstance(size, int) else self.rank_batch_size()

    @property
    def planning(self) -> dict[str, Any]:
        """Options of the config that samplers and loaders plan with."""
        own, objective = self.config.microbatching, 'fsdp' if self.config.is_sharded else 'ddp'
        return {'objective': objective, 'width_multiple': own.width_multiple, 'cost': own.cost}

    def drops_last(self, num_samples: int, *, is_eval: bool) -> bool:
        """Tells whether the last, smaller batch is left out, and refuses a dataset of which nothing would be left."""
        drops_last = self.config.loader.drop_last and not is_eval
        if drops_last and num_samples < self.config.loader.global_batch_size:
            found = f'{self.config.loader.global_batch_size} > {num_samples} samples. Lower it or set drop_last=false'
            raise ConfigError(f'`loader.global_batch_size` must be at most the dataset with `drop_last`, got: {found}')
        return drops_last


def token_data_spec_of(config: TrainConfig, dataloader: Any, *, slot_tokens: int | None, **others: Any) -> DataSpec:
    """Returns :func:`.token_data_spec` with the ``microbatching`` section."""
    others_keys = ('device_train_microbatch_size', 'device_memory_gib', 'slot_tokens', 'rehearse')
    given = without(vars(config.microbatching), *others_keys)
    return token_data_spec(dataloader, slot_tokens=slot_tokens, **given, **others)


def check_video(path: str, part: dict[str, Any]) -> None:
    """Holds the section ``video`` of a dataset to the arguments of :class:`.VideoSampling`."""
    check_arguments(f'{path}.video', VideoSampling, part.get('video'))
    VideoSampling(**(part.get('video') or {}))
