# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds everything that a checked config names, the Trainer last."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from composer import Trainer
from composer.core import DataSpec
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device, reproducibility

from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.checkpoints import SameData, remember_unused_parameters, resume_on_shared_folder
from composer_tokacc.programs.errors import ConfigError
from composer_tokacc.programs.lora import identify_adapter
from composer_tokacc.programs.models import build_model, parameter_groups
from composer_tokacc.programs.process import DIST_TIMEOUT, say
from composer_tokacc.programs.registry import build_all, build_section, without
from composer_tokacc.programs.schema import TrainConfig
from composer_tokacc.programs.sources import source_of
from composer_tokacc.programs.suggest import apply_suggestion
from composer_tokacc.sampling import RestoreRandomState, SkipReadBatches


@dataclass(kw_only=True)
class RunParts:
    """What a program works with; the eval parts are None where ``dataset.eval`` is absent."""

    processor: Any
    model: HuggingFaceModel
    train_dataset: Any
    eval_dataset: Any
    train_loader: DataSpec
    eval_loader: DataSpec | None
    microbatch_size: int | str | None
    """``device_train_microbatch_size`` of the run: what the config says, ``suggest`` answered."""


def build_parts(config: TrainConfig) -> RunParts:
    """Seeds this rank, joins the process group and builds what the config names besides the Trainer."""
    reproducibility.seed_all(config.seed)
    # Before the data: the ranks share its reading.
    if dist.get_world_size() > 1:
        say(f'waiting for {dist.get_world_size()} ranks ...')
    dist.initialize_dist(get_device(config.trainer.get('device')), config.trainer.get('dist_timeout', DIST_TIMEOUT))
    say('reading the data ...')
    source = source_of(config)
    processor = source.build_processor()
    train_dataset, eval_dataset = (source.build_dataset(processor, is_eval=is_eval) for is_eval in (False, True))
    say('building the model ...')
    model = build_model(processor=processor, seed=config.seed, **asdict(config.model))
    if config.microbatching.device_train_microbatch_size == 'suggest':
        size, slot_tokens = apply_suggestion(config, train_dataset, processor)
        sized = replace(config.microbatching, device_train_microbatch_size=size, slot_tokens=slot_tokens)
        config = replace(config, microbatching=sized)
        source = source_of(config)
    build_loader = partial(source.build_loader, processor=processor, layout=BatchLayout.for_model(model), model=model)
    train_loader = build_loader(train_dataset)
    if isinstance(train_loader.dataloader, Sized) and not len(train_loader.dataloader):  # Composer would look for ever
        raise ConfigError('`dataset` must give every rank a batch, got: none')
    eval_loader = None if eval_dataset is None else build_loader(eval_dataset, is_eval=True)
    return RunParts(
        processor=processor, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset,
        train_loader=train_loader, eval_loader=eval_loader,
        microbatch_size=config.microbatching.device_train_microbatch_size,
    )  # fmt: skip


def build_loggers(config: TrainConfig) -> list[LoggerDestination]:
    """Builds the loggers of a run, first of all: some lack a package, or reach a server, when they are made."""
    return build_all('loggers', config.trainer.get('loggers'))


def build_trainer(
    config: TrainConfig, parts: RunParts, history: InMemoryLogger, loggers: Sequence[LoggerDestination] = ()
) -> Trainer:
    """Builds the Composer Trainer of a config; ``history`` is logged to besides ``loggers``."""
    arguments = without(config.trainer, 'loggers')
    if parts.microbatch_size is not None:
        arguments['device_train_microbatch_size'] = parts.microbatch_size
    same_data = SameData(
        parts.train_dataset, parts.processor, adapter=identify_adapter(parts.model.model), model=parts.model,
        trainer=config.trainer, on_other_data=config.loader.on_other_data,
    )  # fmt: skip
    callbacks = [*build_all('callbacks', config.callbacks), same_data]
    if config.trainer.get('spin_dataloaders', True):
        callbacks.append(SkipReadBatches())
    if hasattr(parts.train_dataset, 'load_state_dict'):  # as StreamingDataset
        callbacks.append(RestoreRandomState())
    groups = parameter_groups(parts.model.model, config.optimizer.get('parts') or {})
    trainable: Any = groups if len(groups) > 1 else groups[0]['params']
    optimizer = build_section('optimizer', config.optimizer, trainable)
    remember_unused_parameters(optimizer)
    if arguments.get('autoresume'):
        # What lies behind the checkpoint that the run goes on from is what a killed one has left.
        arguments.setdefault('save_overwrite', True)
        arguments |= resume_on_shared_folder(config.trainer)
    return Trainer(
        model=parts.model,
        train_dataloader=parts.train_loader,
        eval_dataloader=parts.eval_loader,
        optimizers=optimizer,
        schedulers=build_section('scheduler', config.scheduler),
        algorithms=build_all('algorithms', config.algorithms),
        callbacks=callbacks,
        loggers=[*loggers, history],
        seed=config.seed,
        **arguments,
    )
