# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A run from its YAML file: the config checked, then everything that it names built, the Trainer last."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from composer import Trainer
from composer.core import DataSpec
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device, reproducibility
from torch.utils.data import ConcatDataset

from composer_tokacc.data import BadSampleError
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.checkpoints import remember_unused_parameters, resume_on_shared_folder
from composer_tokacc.programs.faults import fault_of_machine
from composer_tokacc.programs.lora import identify_adapter
from composer_tokacc.programs.models import build_model, check_model
from composer_tokacc.programs.ranks import RankWatch
from composer_tokacc.programs.registry import build_all, build_section, check_host, check_mesh, check_sections, without
from composer_tokacc.programs.same_data import SameData
from composer_tokacc.programs.schema import (
    ConfigError,
    TrainConfig,
    load_config,
    one_line,
    precision_of,
    refuse,
    say,
    section,
)
from composer_tokacc.programs.source import token_data_spec_of
from composer_tokacc.programs.sources import source_of
from composer_tokacc.programs.suggest import apply_suggestion
from composer_tokacc.sampling import RestoreRandomState, SkipReadBatches

__all__ = ['RunParts', 'build_parts', 'build_trainer', 'check_config', 'command_line', 'run_program']

DIST_TIMEOUT = 300.0
"""Composer's own default, in seconds."""


def command_line(usage: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of a program's command line: the YAML file as ``config``; what it does not know are overrides."""
    parser = argparse.ArgumentParser(
        usage=usage, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', metavar='FILE.yaml')
    return parser


def run_program(
    program: Callable[[TrainConfig], int | None],
    path: str,
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    trains: bool = False,
) -> int:
    """Runs a program on a YAML file and returns its exit status, 2 with one line for a mistake of the user's.

    Args:
        program: Takes the config; what it returns is the exit status, None for 0.
        path: The YAML file.
        overrides: ``key=value`` each.
        num_ranks: Ranks that the run is planned for; None: those of this launch.
        trains: Whether it trains here and now, so that this machine must be able to.
    """
    if not gc.isenabled():  # by the program that this process is of: what it has loaded is never garbage
        gc.freeze()
        gc.enable()
    # Python's end looks through all that Composer and Transformers hold, again and again: 8 s of nothing on the screen.
    atexit.register(gc.freeze)
    try:
        config = load_config(path, overrides)
        check_config(config, num_ranks=num_ranks)
        if trains:
            check_host(config)
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    watch = RankWatch(config.trainer.get('dist_timeout', DIST_TIMEOUT))
    try:
        return program(config) or 0
    except (ConfigError, BadSampleError) as error:
        return 2 if watch.tell(one_line(error), 2) else refuse(error)
    except Exception as error:
        # Of a loader process that was killed torch's handler tells again and again, wherever this one is.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if fault := fault_of_machine(error):
            said = ConfigError(fault)
            return 2 if watch.tell(one_line(said), 2) else refuse(said)
        if watch.tell(traceback.format_exc(), 1):
            return 1
        raise
    finally:
        watch.stop()


def check_config(config: TrainConfig, *, num_ranks: int | None = None) -> None:
    """Checks the sense of a config whose types are right, before any process group, model or data.

    Raises:
        ConfigError: For the first mistake, in one line that says what it is and how to mend it.
    """
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f'`seed` must be from 0 to {2**32 - 1}, got: {config.seed}')
    with section('model'):
        check_model(config.model.pretrained, config.model.config, config.model.dtype, config.model.lora)
    num_ranks = num_ranks or int(os.environ.get('WORLD_SIZE', '1'))
    config.loader.check(num_ranks)
    for key in ('processor', 'eval'):
        if not isinstance(config.dataset.get(key), dict | None):
            raise ConfigError(f'`dataset.{key}` must be a mapping of arguments, got: {config.dataset[key]}')
    source_of(config).check()
    config.microbatching.check(on_cpu=config.trainer.get('device') == 'cpu')
    if config.model.lora is not None:
        _check_lora(config, config.model.lora)
    # The run's own, of no data.
    token_data_spec_of(config, [], slot_tokens=config.microbatching.slot_tokens)
    check_sections(config)
    if config.is_sharded:
        check_mesh(config.trainer['parallelism_config']['fsdp'], num_ranks)


def _check_lora(config: TrainConfig, lora: dict[str, Any]) -> None:
    """What is trained is in float32, whatever the type of the base: that must fit parallelism and precision."""
    if config.is_sharded and lora.get('bits') is not None:
        raise ConfigError('`model.lora.bits` must be left out with FSDP, got: 4. Use DDP, or a base in float32')
    if config.model.dtype == 'float32':
        return
    if config.is_sharded:
        raise ConfigError(
            '`model.dtype` must be float32 with `model.lora` and FSDP, which shards weights of one type together, got: '
            f'{config.model.dtype} beside an adapter in float32. Set it, or use DDP'
        )
    precision = precision_of(config)
    if not precision.startswith('amp'):
        raise ConfigError(
            '`trainer.precision` must be amp_bf16 or amp_fp16 with `model.lora` on a base in half precision, got: '
            f'{precision}. Set it, or `model.dtype` to float32'
        )


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
    """Seeds this rank, joins the process group and builds what the config names besides the Trainer.

    Raises:
        ConfigError: For an argument that its owner refuses once it has seen model or data.
        BadSampleError: For a sample that cannot be read.
    """
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
    with section('model'):
        model = build_model(processor=processor, seed=config.seed, **asdict(config.model))
    layout = BatchLayout.for_model(model)
    if config.microbatching.device_train_microbatch_size == 'suggest':
        with section('microbatching'):
            size, slot_tokens = apply_suggestion(config, train_dataset, processor)
        sized = replace(config.microbatching, device_train_microbatch_size=size, slot_tokens=slot_tokens)
        config = replace(config, microbatching=sized)
        source = source_of(config)
    build_loader = partial(source.build_loader, processor=processor, layout=layout, model=model)

    return RunParts(
        processor=processor,
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        train_loader=build_loader(train_dataset),
        eval_loader=None if eval_dataset is None else build_loader(eval_dataset, is_eval=True),
        microbatch_size=config.microbatching.device_train_microbatch_size,
    )


def build_trainer(config: TrainConfig, parts: RunParts, history: InMemoryLogger) -> Trainer:
    """The Composer Trainer of a config; ``history`` is logged to besides the loggers that the config names."""
    arguments = without(config.trainer, 'loggers')
    if parts.microbatch_size is not None:
        arguments['device_train_microbatch_size'] = parts.microbatch_size
    callbacks = build_all('callbacks', config.callbacks)
    callbacks.append(
        SameData(
            parts.train_dataset,
            parts.processor,
            adapter=identify_adapter(parts.model.model),
            model=parts.model,
            trainer=config.trainer,
            on_other_data=config.loader.on_other_data,
        )
    )
    if config.trainer.get('spin_dataloaders', True):
        callbacks.append(SkipReadBatches())
    if hasattr(parts.train_dataset, 'load_state_dict'):  # as StreamingDataset
        callbacks.append(RestoreRandomState())
    trainable = [parameter for parameter in parts.model.parameters() if parameter.requires_grad]
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
        loggers=[*build_all('loggers', config.trainer.get('loggers')), history],
        seed=config.seed,
        **arguments,
    )
