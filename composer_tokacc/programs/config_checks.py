# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks a config by the rules of this package, before ranks meet and before data or models are read.

Composer, torch and Transformers refuse many wrong values themselves. Such a value is checked here only if they would
refuse it late, after the data was read and the model was loaded.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.callbacks import EarlyStopper, ThresholdStopper
from composer.core import TimeUnit, ensure_time
from composer.utils import is_compressed_pt
from composer.utils.parallelism import FSDP2Config, FSDPConfig

from composer_tokacc.programs.checkpoints import check_checkpoint, checkpoint_folder, run_name_of
from composer_tokacc.programs.errors import ConfigError, building, local_folder
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.models import EVAL_METRICS, TRAIN_METRICS, check_model
from composer_tokacc.programs.registry import (
    HOST_HINTS,
    build_part,
    class_by_name,
    report_function,
    weights_tokens,
)
from composer_tokacc.programs.schema import (
    Sections,
    TrainConfig,
    Values,
    check_arguments,
    check_names,
    check_value,
    without,
)
from composer_tokacc.programs.sources import SHARE_KEYS, source_of, token_data_spec_of
from composer_tokacc.sampling.global_batches import BatchSchedule

FROM_OTHER_SECTIONS = (
    'model',
    'train_dataloader',
    'eval_dataloader',
    'algorithms',
    'callbacks',
    'optimizers',
    'schedulers',
    'device_train_microbatch_size',
    'seed',
)
"""Arguments of the Trainer that other sections of the file fill."""
RESULT_FILES = ('metrics.jsonl', 'answers.jsonl', 'result.json', 'report.html')
"""Files that ``train`` writes into the folder of the report."""
KEYS_WITHOUT_EFFECT = {
    'trainer.save_folder': (
        'trainer.save_interval',
        'trainer.save_filename',
        'trainer.save_latest_filename',
        'trainer.save_num_checkpoints_to_keep',
        'trainer.save_weights_only',
    ),
    'trainer.load_path': ('trainer.load_weights_only', 'trainer.load_ignore_keys', 'trainer.load_exclude_algorithms'),
    'dataset.eval': ('loader.global_eval_batch_size', 'report.answers', 'report.answer_tokens'),
}
"""For each key, the keys that have no effect without it. :func:`notes_on` names them. `trainer.eval_interval` is not
among them, because Composer itself warns if there is no eval set."""
KEYS_OF_FILES = {'llava': ('path',), 'llava_streaming': ('local', 'remote', 'split', 'streams')}
"""For each class of dataset, the keys that say which files it reads."""
FSDP_KEY = 'trainer.parallelism_config.fsdp'


def check_config(config: TrainConfig, *, num_ranks: int | None = None, reads_data: bool = True) -> None:
    """Raises a ConfigError for the first mistake that can be seen without data, model and the folders to write.

    Args:
        config: The run.
        num_ranks: Ranks that the run is planned for. Default: all ranks of this launch.
        reads_data: See :meth:`.Source.check`.
    """
    world_size = _check_launcher()
    num_ranks = num_ranks or world_size
    check_value('dataset.processor', config.dataset.get('processor'), dict | None)
    check_value('dataset.eval', config.dataset.get('eval'), dict | None)
    check_model(config.model.pretrained, config.model.config, config.model.lora)
    _check_batch_sizes(config, num_ranks)
    with building('dataset'):
        source_of(config).check(reads_data=reads_data)
    with building('microbatching'):
        # The same call as in the run, but with an empty loader. It refuses options that do not go together. In the run,
        # `slot_tokens` may come from the data. Here it is the value of the file.
        token_data_spec_of(config, [], slot_tokens=config.microbatching.slot_tokens)
    _check_trainer(config.trainer)
    _check_duration(config)
    _check_optimizer(config.optimizer)
    _check_stoppers(config)
    if config.is_sharded:
        _check_sharding(config)
    _check_report(config)


def _check_launcher() -> int:
    """Returns WORLD_SIZE. Refuses variables of the launcher that are not integers, and RANK >= WORLD_SIZE.

    If RANK is no integer, Composer has already raised an error when it was imported.
    """
    with building('RANK, LOCAL_RANK or WORLD_SIZE'):
        rank = int(os.environ.get('RANK', 0))
        world_size = int(os.environ.get('WORLD_SIZE', 1))
        int(os.environ.get('LOCAL_RANK', 0))
    # With only RANK=1 set, for example, this process would be alone in its run, and no rank 0 would write results.
    if rank >= world_size:
        raise ConfigError('RANK', f'of the environment must be below WORLD_SIZE, got: {rank} of {world_size}. Unset it')
    return world_size


def _check_batch_sizes(config: TrainConfig, num_ranks: int) -> None:
    """Refuses global batches that the ranks cannot divide equally."""
    loader = config.loader
    with building('loader.global_batch_size'):
        schedule = BatchSchedule.from_stages(loader.global_batch_size)
    sizes = [('global_batch_size', size) for size in schedule.sizes]
    if loader.global_eval_batch_size is not None:
        sizes.append(('global_eval_batch_size', loader.global_eval_batch_size))
    for name, size in sizes:
        if size % num_ranks:
            message = f'must be divisible by the number of ranks, got: {size} on {num_ranks} ranks'
            raise ConfigError(f'loader.{name}', message)


def _check_trainer(trainer: Section) -> None:
    """Refuses arguments that the Trainer does not have, or that a run from a file cannot use."""
    # Other sections set these arguments. check_arguments() refuses every argument that the `partial` already has.
    other_arguments: Any = dict.fromkeys(FROM_OTHER_SECTIONS)
    check_arguments('trainer', partial(Trainer, **other_arguments), trainer, hints=HOST_HINTS)
    parallelism = trainer.get('parallelism_config') or {}
    used_kinds = [kind for kind, settings in parallelism.items() if settings is not None]
    # Only `fsdp`: `tp` (tensor parallelism) takes Python objects, and the Trainer ignores `fsdp2`.
    check_names('trainer.parallelism_config', used_kinds, ['fsdp'])
    file_name = trainer.get('save_filename') or ''
    if is_compressed_pt(file_name):
        raise ConfigError('trainer.save_filename', f'must end in .pt, got: {file_name}. No run resumes compressed ones')
    load_path = trainer.get('load_path')
    # A URL is not opened before the run. A path with {rank} or {run_name} cannot be checked, because their values are
    # not known yet.
    if load_path is not None and '://' not in load_path and '{' not in load_path:
        check_checkpoint('trainer.load_path', Path(load_path))
    # The program locks the folder and looks for a checkpoint in it before the Trainer would generate a name.
    if '{run_name}' in (trainer.get('save_folder') or '') and run_name_of(trainer) is None:
        raise ConfigError('trainer.run_name', 'must be given, because `trainer.save_folder` has {run_name} in it')


def _check_duration(config: TrainConfig) -> None:
    """Refuses a missing duration, and one in a unit that cannot be used.

    Composer itself refuses seconds, but only after the model is loaded. It accepts iterations, and the run would never
    end.
    """
    duration = config.trainer.get('max_duration')
    if duration is None:
        raise ConfigError('trainer.max_duration', 'must be given. For example 2ep or 500ba')
    unit = ensure_time(duration, TimeUnit.EPOCH).unit  # a number without a unit counts epochs
    units = [TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN]
    # If `loader.global_batch_size` is a schedule, epochs have unequal numbers of batches.
    if isinstance(config.loader.global_batch_size, int):
        units.append(TimeUnit.EPOCH)
    if unit not in units:
        message = f'must be in one of the units {[unit.value for unit in units]}, got: {duration}'
        raise ConfigError('trainer.max_duration', message)


def _check_optimizer(optimizer: Section) -> None:
    """Builds the optimizer for a single weight: with its own arguments, then with the arguments of each model part.

    This is only to let the constructor refuse wrong arguments now. The run builds its optimizer after the model.
    """
    parts = check_value('optimizer.parts', optimizer.get('parts'), Sections | None) or {}
    shared = without(optimizer, 'name', 'parts')
    arguments_by_path = {'optimizer': shared}
    for part, arguments in parts.items():
        arguments_by_path[f'optimizer.parts.{part}'] = {**shared, **arguments}
    for path, arguments in arguments_by_path.items():
        weight = torch.nn.Parameter(torch.zeros(1, 1))  # a matrix, because Muon takes nothing else
        build_part('optimizer', path, optimizer.get('name', ''), arguments, [weight])


def _check_stoppers(config: TrainConfig) -> None:
    """Refuses a callback that would stop the run by a metric that the run does not compute.

    If no dataloader of the run has the callback's label, the callback would never stop the run. If only the metric is
    missing, the callback would raise an error, but only when it first looks the metric up: after a batch, an epoch or
    an evaluation.
    """
    metrics = set()
    if config.dataset.get('eval'):
        metrics |= {('eval', metric.__name__) for metric in EVAL_METRICS}
    if config.model.train_metrics:
        metrics |= {('train', metric.__name__) for metric in TRAIN_METRICS}
    for name, arguments in config.callbacks.items():
        if class_by_name('callbacks', name) not in (EarlyStopper, ThresholdStopper):
            continue
        arguments = arguments or {}  # a callback without arguments is null in the file
        watched_metric = (str(arguments.get('dataloader_label')), str(arguments.get('monitor')))
        if watched_metric not in metrics:
            raise ConfigError(
                f'callbacks.{name}',
                f'must have `dataloader_label` and `monitor` of a metric of this run, got: {watched_metric}. The '
                f'metrics are {sorted(metrics)}. `dataset.eval` and `model.train_metrics` add some',
            )


def _check_sharding(config: TrainConfig) -> None:
    """Refuses settings of FSDP that Composer ignores, or refuses only in the first step."""
    settings = config.trainer['parallelism_config']['fsdp']
    # Composer ignores unknown names. The names of FSDP2 are allowed as well, because this section holds its settings if
    # FSDP_VERSION=2 is in the environment.
    names = (*FSDPConfig.__dataclass_fields__, *FSDP2Config.__dataclass_fields__)
    # `object` takes no arguments, so only these names are allowed.
    check_arguments(FSDP_KEY, object, settings, hints=HOST_HINTS, extra_keys=dict.fromkeys(names, Any))
    # Without the number of replicas Composer would only warn, and shard over all ranks. FSDP2 has neither setting.
    is_hybrid = 'HYBRID' in str(settings.get('sharding_strategy')).upper()
    if is_hybrid and settings.get('data_parallel_replicate_degree') is None and os.environ.get('FSDP_VERSION') != '2':
        raise ConfigError(
            f'{FSDP_KEY}.data_parallel_replicate_degree', 'must be given with HYBRID. Set it to the number of nodes'
        )


def _check_report(config: TrainConfig) -> None:
    """Refuses a function, a folder or an export that cannot be used at the end of the run."""
    report = config.report
    report_function(report)  # only for its refusals
    with building('report.folder'):
        report['folder'].format(run_name='x')  # raises for other braces than {run_name}
    # Transformers loads an exported adapter onto the base that it names. A base with random weights has no name.
    is_random_base = config.model.lora is not None and config.model.pretrained is None
    if report.get('export') and (config.is_sharded or is_random_base):
        raise ConfigError(
            'report.export',
            'must be false with FSDP, and for `model.lora` on a base with random weights, got: true. Export the '
            'checkpoint afterwards: python -m composer_tokacc.export CHECKPOINT FOLDER merge=true',
        )


def notes_on(config: TrainConfig) -> list[str]:
    """Returns a line for each setting that is allowed, but perhaps not what the user wants."""
    notes = []
    if not weights_tokens(config):
        notes.append(
            '`algorithms` has no `token_accumulation`, so Composer weights microbatches by their samples, and the '
            'gradient depends on how a batch is cut'
        )
    notes.extend(_notes_on_keys_without_effect(config))
    if config.is_sharded and config.report.get('answers'):
        notes.append('`report.answers` has no effect with FSDP, because no rank holds the whole model')
    lora = config.model.lora
    if lora is not None and config.model.freeze and lora.get('bias') in (None, 'none'):
        notes.append(
            '`model.freeze` has no effect with `model.lora`, which freezes the whole model. What is trained in these '
            'parts is set by `model.lora.target_modules` and `modules_to_save`'
        )
    notes.extend(_notes_on_datasets(config.dataset))
    size = config.microbatching.device_train_microbatch_size
    if config.microbatching.device_memory_gib is not None and size != 'suggest':
        notes.append(
            '`microbatching.device_memory_gib` only limits the microbatches of a run with `microbatching.size: suggest`'
        )
    return notes


def _notes_on_keys_without_effect(config: TrainConfig) -> list[str]:
    """Returns a line for each key of ``KEYS_WITHOUT_EFFECT`` that is given without the key that it needs."""
    notes = []
    # Not by `asdict`, because a config that was made in Python may hold objects that cannot be copied.
    sections = {**vars(config), 'loader': vars(config.loader)}
    for needed_key, keys in KEYS_WITHOUT_EFFECT.items():
        needed_section, _, needed_name = needed_key.partition('.')
        # If the key is there with a null, the user has switched it off, as `trainer.save_folder=null` does for a short
        # trial. This needs no note.
        if needed_name in sections[needed_section]:
            continue
        for key in keys:
            section_name, _, name = key.partition('.')
            if sections[section_name].get(name):
                notes.append(f'`{key}` has no effect without `{needed_key}`')
    return notes


def _notes_on_datasets(section: Values) -> list[str]:
    """Returns a line for each setting of the section ``dataset`` that is never used, and for trained eval samples.

    A key next to ``parts`` is the default for all parts and, except for ``SHARE_KEYS``, for the eval set. If each of
    them has the key, the default is never used.
    """
    notes = []
    parts = list((section.get('parts') or {}).values())
    eval_section = section.get('eval')
    if parts:
        for key, value in section.items():
            datasets = list(parts)
            if eval_section and key not in SHARE_KEYS:
                datasets.append(eval_section)
            if value is not None and all(key in dataset for dataset in datasets):
                notes.append(f'`dataset.{key}` has no effect, because each dataset has its own')
    if eval_section:
        training_sets = parts or [{}]  # without parts, the section itself is the training set
        for changes in training_sets:
            training = section | changes
            keys = _keys_of_same_files(training, section | eval_section)
            if keys:
                names = ' and '.join(f'`{key}`' for key in keys)
                notes.append(f'`dataset.eval` has the {names} of training data, so it evaluates trained samples')
    return notes


def _keys_of_same_files(training: Section, evaluation: Section) -> list[str]:
    """Returns the keys that name the files of a dataset if two datasets read the same files; empty: they do not.

    Also empty for a class that is not in ``KEYS_OF_FILES``, because it may read only a part of its files.
    """
    name = training.get('name')
    keys = KEYS_OF_FILES.get(str(name), ())
    if name != evaluation.get('name') or any(training.get(key) != evaluation.get(key) for key in keys):
        return []
    return [key for key in keys if training.get(key) is not None]


def check_folders(config: TrainConfig) -> None:
    """Refuses folders of the config that the run cannot write."""
    # Without a name Composer generates one later. Here any text does ('None'), because only the nearest existing parent
    # is checked.
    run_name = str(run_name_of(config.trainer))
    folders_by_key = {
        'report.folder': config.report['folder'],
        'loader.lengths_folder': config.loader.lengths_folder,
        'trainer.save_folder': checkpoint_folder(config.trainer),
    }
    files_by_key = {'report.folder': RESULT_FILES}
    for key, name in folders_by_key.items():
        if name is not None:
            folder = local_folder(key, str(name).replace('{run_name}', run_name))
            check_folder(key, folder, files_by_key.get(key, ()))


def check_folder(path: str, folder: Path, files: tuple[str, ...] = ()) -> None:
    """Refuses a folder in which no file can be written. Does not make the folder, because a dry run writes nothing.

    Args:
        path: The key of the config that names the folder.
        folder: The folder. If it does not exist, its nearest parent that exists must be writable.
        files: Names of files to write. Refuses a folder, a pipe or a device of such a name. Opening a pipe could
            wait for ever.
    """
    try:
        folders = (folder, *folder.parents)
        existing = next(parent for parent in folders if parent.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ConfigError(path, f'must be a folder that can be written, got: {folder} ({error.strerror})') from error
    for name in files:
        file = folder / name
        if file.exists() and not file.is_file():
            raise ConfigError(path, f'must have no folder, pipe or device in the way of its files, got: {file}')
