# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Everything a config names besides the Trainer: processor, datasets, model and loaders, built in this order."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from composer.core import DataSpec
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device, reproducibility
from torch.utils.data import ConcatDataset

from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.errors import section
from composer_tokacc.programs.models import build_model
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import build_dataset, build_loader, build_processor
from composer_tokacc.programs.suggest import apply_suggestion

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
        ConfigError: For an argument that its owner refuses once it has seen model or data.
        BadSampleError: For a sample that cannot be read.
    """
    reproducibility.seed_all(config.seed)
    # Before the data: the ranks share its reading.
    dist.initialize_dist(get_device(config.trainer.get('device')), config.trainer.get('dist_timeout', 300.0))
    processor = build_processor(config)
    train_dataset, eval_dataset = (build_dataset(config, processor, held_out=held_out) for held_out in (False, True))
    with section('model', asdict(config.model)):
        model = build_model(processor=processor, seed=config.seed, **asdict(config.model))
    layout = BatchLayout.for_model(model)
    if config.microbatching.device_train_microbatch_size == 'suggest':
        with section('microbatching'):
            size, slot_tokens = apply_suggestion(config, train_dataset, processor)
        sized = replace(config.microbatching, device_train_microbatch_size=size, slot_tokens=slot_tokens)
        config = replace(config, microbatching=sized)
    train_loader = build_loader(config, train_dataset, processor, layout, held_out=False, model=model)
    eval_loader = None
    if eval_dataset is not None:
        eval_loader = build_loader(config, eval_dataset, processor, layout, held_out=True, model=model)
    return RunParts(
        processor=processor,
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        train_loader=train_loader,
        eval_loader=eval_loader,
        microbatch_size=config.microbatching.device_train_microbatch_size,
    )
