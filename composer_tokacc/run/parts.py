# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Everything a config names besides the Trainer: processor, datasets, model and loaders, built in this order."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from composer.core import DataSpec
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device, reproducibility
from torch.utils.data import ConcatDataset

from composer_tokacc.config import ConfigError, TrainConfig
from composer_tokacc.layout import BatchLayout
from composer_tokacc.models import build_model
from composer_tokacc.run.datasets import build_dataset, build_processor
from composer_tokacc.run.loaders import build_loader
from composer_tokacc.run.streaming_parts import by_index
from composer_tokacc.run.suggest import apply_suggestion

__all__ = ['RunParts', 'build_parts']


@dataclass(kw_only=True)
class RunParts:
    """What a program works with; the held-out parts are None where ``dataset.eval`` is absent."""

    processor: Any
    model: HuggingFaceModel
    train_dataset: Any
    eval_dataset: Any
    train_loader: DataSpec
    eval_loader: DataSpec | None
    microbatch_size: int | str | None
    """``device_train_microbatch_size`` of the run: what the config says, ``suggest`` answered."""

    def skip_reports(self) -> list[str]:
        """One line for each dataset that left out bad samples."""
        train: Any = self.train_dataset
        datasets: list[Any] = [*(train.datasets if isinstance(train, ConcatDataset) else [train]), self.eval_dataset]
        return [dataset.skip_report() for dataset in datasets if getattr(dataset, 'skipped', None)]


def build_parts(config: TrainConfig) -> RunParts:
    """Seeds this rank, joins the process group and builds what the config names.

    Raises:
        ConfigError: for a model or data that cannot be used; the chained error keeps its own traceback.
    """
    _share_cores()
    reproducibility.seed_all(config.seed)
    try:
        # Before the data: with `on_error: skip` the ranks share the scan for bad samples.
        dist.initialize_dist(get_device(config.trainer.get('device')), config.trainer.get('dist_timeout', 300.0))
        processor = build_processor(config)
        train_dataset, eval_dataset = (
            build_dataset(config, processor, held_out=held_out) for held_out in (False, True)
        )
        model = build_model(processor=processor, seed=config.seed, **asdict(config.model))
        layout = BatchLayout.for_model(model)
        if config.microbatching.device_train_microbatch_size == 'suggest':
            size, slot_tokens = apply_suggestion(config, by_index(train_dataset), processor)
            answered = replace(config.microbatching, device_train_microbatch_size=size, slot_tokens=slot_tokens)
            config = replace(config, microbatching=answered)
        train_loader = build_loader(config, train_dataset, processor, layout, held_out=False)
        eval_loader = None
        if eval_dataset is not None:
            eval_loader = build_loader(config, eval_dataset, processor, layout, held_out=True)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(' '.join(str(error).split())) from error
    return RunParts(
        processor=processor,
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        train_loader=train_loader,
        eval_loader=eval_loader,
        microbatch_size=config.microbatching.device_train_microbatch_size,
    )


def _share_cores() -> None:
    """Divides the cores among the ranks of this node: by default each rank would start a thread on every core."""
    if 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // dist.get_local_world_size(), 1))
