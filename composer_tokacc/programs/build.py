# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Builds the objects of a run from a checked config: data, model, optimizer, callbacks and, last, the Trainer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from operator import length_hint
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, DataSpec
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.models import HuggingFaceModel
from composer.optim import ComposerScheduler
from composer.utils import dist, get_device, reproducibility

from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.checkpoints import SameData, arguments_to_resume, save_empty_states
from composer_tokacc.programs.errors import ConfigError, building
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.lora import identify_adapter
from composer_tokacc.programs.models import build_model, parameter_groups
from composer_tokacc.programs.process import DIST_TIMEOUT, say
from composer_tokacc.programs.registry import build_all, build_section
from composer_tokacc.programs.schema import TrainConfig, without
from composer_tokacc.programs.sources import Source, source_of
from composer_tokacc.programs.suggest import suggested_microbatch
from composer_tokacc.sampling import RestoreRandomState, SkipReadBatches


@dataclass(kw_only=True)
class TrainerParts:
    """Objects for the Trainer that need neither data nor model."""

    algorithms: list[Algorithm]
    callbacks: list[Callback]
    scheduler: ComposerScheduler
    loggers: list[LoggerDestination]


@dataclass(kw_only=True)
class RunParts:
    """Data and model of a run."""

    source: Source
    """All data of the run: the processor, the datasets and the length table."""
    model: HuggingFaceModel
    train_loader: DataSpec
    eval_loader: DataSpec | None
    """None without ``dataset.eval``."""


def build_trainer_parts(config: TrainConfig) -> TrainerParts:
    """Builds algorithms, callbacks, scheduler and loggers.

    A program calls it before :func:`build_parts`. These constructors find mistakes of the config in a moment, whereas
    reading the data and loading the model may take minutes.
    """
    return TrainerParts(
        loggers=build_all('trainer.loggers', config.trainer.get('loggers')),
        algorithms=build_all('algorithms', config.algorithms),
        callbacks=build_all('callbacks', config.callbacks),
        scheduler=build_section('scheduler', config.scheduler),
    )


def build_parts(config: TrainConfig) -> RunParts:
    """Seeds this rank, joins the process group, and builds data and model. Finds the microbatch size for ``suggest``.

    Raises ConfigError if a rank would get no batch.
    """
    reproducibility.seed_all(config.seed)
    _join_process_group(config)  # before the data are read, because each rank reads a part of them
    say('reading the data ...')
    source = source_of(config)
    source.open()
    say('building the model ...')
    with building('model'):
        options = asdict(config.model)
        model = build_model(processor=source.processor, seed=config.seed, **options)
    if config.microbatching.device_train_microbatch_size == 'suggest':
        size, slot_tokens = suggested_microbatch(source)
        microbatching = replace(config.microbatching, device_train_microbatch_size=size, slot_tokens=slot_tokens)
        # `config` still says `suggest`. The loader, and build_trainer(), take the size from the config of the source.
        source.config = replace(config, microbatching=microbatching)
    layout = BatchLayout.for_model(model)
    train_loader = source.build_loader(layout, model=model)
    # A loader whose epochs have unequal numbers of batches has no length. Its sampler refuses an empty epoch.
    is_empty = length_hint(train_loader.dataloader, 1) == 0
    if is_empty:  # Composer would look for a batch for ever
        raise ConfigError(
            'dataset',
            f'must give every rank a batch, got: none in global batches of {config.loader.largest_batch} samples. Set '
            '`loader.drop_last=false`, or lower `loader.global_batch_size`',
        )
    eval_loader = None
    if source.eval_dataset is not None:
        eval_loader = source.build_loader(layout, is_eval=True, model=model)
    return RunParts(source=source, model=model, train_loader=train_loader, eval_loader=eval_loader)


def _join_process_group(config: TrainConfig) -> None:
    """Waits for the other ranks, and joins the process group with them."""
    num_ranks = dist.get_world_size()
    if num_ranks > 1:
        say(f'waiting for {num_ranks} ranks ...')
    with building('trainer.device'):
        device = get_device(config.trainer.get('device'))
    dist.initialize_dist(device, config.trainer.get('dist_timeout', DIST_TIMEOUT))


def build_optimizer(model: torch.nn.Module, section: Section) -> torch.optim.Optimizer:
    """Builds the optimizer of the trained parameters. With ``optimizer.parts`` each part has its own settings."""
    parts = section.get('parts')
    if parts:
        parameters: Any = parameter_groups(model, parts)
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_section('optimizer', section, parameters)
    # When torch loads a checkpoint, it looks up a state for every parameter. So an empty state is saved for those that
    # have none yet.
    save_empty_states(optimizer)
    return optimizer


def build_trainer(
    config: TrainConfig,
    parts: RunParts,
    history: InMemoryLogger,
    trainer_parts: TrainerParts | None = None,
) -> Trainer:
    """Builds the Composer Trainer of a config.

    Args:
        config: The run.
        parts: Its data and model.
        history: A logger of the caller, in addition to the loggers of ``trainer_parts``.
        trainer_parts: Default: built from the config.
    """
    trainer_parts = trainer_parts or build_trainer_parts(config)
    arguments = _trainer_arguments(config, parts, trainer_parts)
    optimizer = build_optimizer(parts.model.model, config.optimizer)
    callbacks = [*trainer_parts.callbacks, *_resume_callbacks(config, parts, optimizer, arguments)]
    with building('trainer'):
        return Trainer(
            model=parts.model,
            train_dataloader=parts.train_loader,
            eval_dataloader=parts.eval_loader,
            optimizers=optimizer,
            schedulers=trainer_parts.scheduler,
            algorithms=trainer_parts.algorithms,
            callbacks=callbacks,
            loggers=[*trainer_parts.loggers, history],
            seed=config.seed,
            **arguments,
        )


def _trainer_arguments(config: TrainConfig, parts: RunParts, trainer_parts: TrainerParts) -> dict[str, Any]:
    """Returns the section ``trainer`` without the loggers, with the microbatch size and the checkpoint to resume."""
    arguments = without(config.trainer, 'loggers')  # they are in `trainer_parts`
    # If `config` says `suggest`, build_parts() has put the size that it found into the config of the source.
    size = parts.source.config.microbatching.device_train_microbatch_size
    if size is not None:
        arguments['device_train_microbatch_size'] = size
    if arguments.get('autoresume'):
        # A killed run may have left checkpoints of steps that this run trains again. They may be damaged.
        arguments.setdefault('save_overwrite', True)
        arguments |= arguments_to_resume(config.trainer, trainer_parts.loggers)
    return arguments


def _resume_callbacks(
    config: TrainConfig,
    parts: RunParts,
    optimizer: torch.optim.Optimizer,
    arguments: Section,
) -> list[Callback]:
    """Returns the callbacks that make a resumed run equal to a run that was not interrupted.

    Args:
        config: The run.
        parts: Its data and model.
        optimizer: Its optimizer.
        arguments: The arguments of its Trainer.
    """
    # Refuses to resume with other data, model or settings.
    same_data = SameData(
        parts.source.train_dataset,
        parts.source.processor,
        adapter=identify_adapter(parts.model.model),
        optimizer={**optimizer.defaults, 'parts': config.optimizer.get('parts')},
        batches=parts.source.settings_of_batches(),
        model=parts.model,
        trainer=arguments,
        on_other_data=config.loader.on_other_data,
    )
    callbacks: list[Callback] = [same_data]
    if config.trainer.get('spin_dataloaders', True):
        # To resume within an epoch, Composer fetches the batches that were already trained, and discards them. With
        # this callback the loader does not read their samples.
        callbacks.append(SkipReadBatches())
    if hasattr(parts.source.train_dataset, 'load_state_dict'):
        # Such a dataset, for example StreamingDataset, resumes by itself. Then Composer does not restore the random
        # number generators.
        callbacks.append(RestoreRandomState())
    return callbacks
