# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The YAML file of a run: its sections, how file and command line become one config, and mistakes in its words.

What an argument may be is said by its owner; :func:`section` puts that into the words of the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import psutil
import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from composer_tokacc.planning import CostModel

__all__ = [
    'ConfigError',
    'TrainConfig',
    'load_config',
    'merge',
    'one_line',
    'precision_of',
    'raised_here',
    'refuse',
    'say',
    'section',
    'unknown_name',
]

log = logging.getLogger(__name__)

Options = TypeVar('Options')


class ConfigError(ValueError):
    """A mistake of the user's, said in one line; the programs print it without a traceback and end with status 2."""


@dataclass(kw_only=True)
class ModelConfig:
    """Arguments of ``programs.models.build_model``; exactly one of ``pretrained`` and ``config``."""

    pretrained: str | None = None
    """Folder or hub name of a Transformers checkpoint."""
    config: dict[str, Any] | None = None
    """Fresh model: ``model_type`` and the fields of its Transformers config."""
    freeze: list[str] = field(default_factory=list)
    """Parts that keep their weights, e.g. ``[vision_tower]``."""
    lora: dict[str, Any] | None = None
    """Train an adapter (peft): ``r``, ``alpha``, ``dropout``, ``target_modules``, ``modules_to_save``; ``bits: 4``:
    the base in 4 bits (bitsandbytes, GPU only)."""
    dtype: str = 'float32'
    """Type of the stored weights; ``trainer.precision`` says what is computed in."""
    attn_implementation: str | None = None
    """``sdpa``, ``flash_attention_2``, ``eager``; null leaves it to Transformers."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    train_metrics: bool = False
    """Also run the metrics on training batches; Composer then copies each device batch."""


@dataclass(kw_only=True)
class LoaderConfig:
    """How samples become batches, before anything is cut into microbatches."""

    global_batch_size: int = 32
    """Samples of one optimizer step over all ranks."""
    global_eval_batch_size: int | None = None
    """Samples of one evaluation batch over all ranks; null means ``global_batch_size``."""
    shuffle: bool = True
    """Another order every epoch, the same for a given ``seed``."""
    drop_last: bool = True
    """Leave out the last, smaller batch of an epoch."""
    num_workers: int = 0
    """Loader processes for each rank; 0 loads in the training process."""
    prefetch_factor: int | None = None
    """Batches that each worker holds ready; null means torch's default."""
    pin_memory: bool = False
    """Page-locked host memory, for faster copies to a GPU."""
    regroup_ranks: bool = True
    """Share each global batch among the ranks by length, so that all finish together; which samples it holds stays the
    same. Reads the dataset once before the first run. Needs ``microbatching.regroup``."""
    exchange_ranks: bool = False
    """The same for a streamed dataset, where each rank reads its own samples: they are exchanged after reading. Needs
    ``microbatching.slot_tokens`` or ``dataset.max_length``."""
    modality: str = 'mixed'
    """``mixed``, or ``per_step``: every global batch is of samples with images, or of samples without."""
    lengths_folder: str | None = None
    """Where lengths of samples are kept between runs; null means the user's cache folder."""
    on_other_data: str = 'raise'
    """A run resumed with other data, another processor or vocabulary than its checkpoint's: ``raise``, or ``warn`` and
    go on."""

    def check(self, num_ranks: int) -> None:
        """Refuses batches that the ranks cannot share evenly, and what torch would refuse once the data is read."""
        for name in ('global_batch_size', 'global_eval_batch_size'):
            size = getattr(self, name)
            if size is None:
                continue
            if size < 1:
                raise ConfigError(f'`loader.{name}` must be at least 1, got: {size}')
            if size % num_ranks:
                below, above = size // num_ranks * num_ranks, (size // num_ranks + 1) * num_ranks
                raise ConfigError(
                    f'`loader.{name}` must be divisible by the number of ranks, got: {size} on {num_ranks} ranks. '
                    f'Set it to {f"{below} or " if below else ""}{above}, or launch another number of ranks'
                )
        if self.modality not in ('mixed', 'per_step'):
            raise ConfigError(f'`loader.modality` must be `mixed` or `per_step`, got: {self.modality}')
        if self.on_other_data not in ('raise', 'warn'):
            raise ConfigError(f'`loader.on_other_data` must be `raise` or `warn`, got: {self.on_other_data}')
        if self.num_workers < 0:
            raise ConfigError(f'`loader.num_workers` must be at least 0, got: {self.num_workers}')
        if self.prefetch_factor is not None and not (self.num_workers and self.prefetch_factor > 0):
            raise ConfigError(
                f'`loader.prefetch_factor` must be positive and needs workers, got: {self.prefetch_factor} with '
                f'{self.num_workers} workers. Set `loader.num_workers`, or leave it out'
            )


@dataclass(kw_only=True)
class MicrobatchingConfig:
    """How a device batch is cut; the arguments of :func:`composer_tokacc.token_data_spec`."""

    device_train_microbatch_size: int | str | None = None
    """Rows of ``slot_tokens`` that fit into memory at once, or ``auto`` (GPU only: halves it after each out-of-memory),
    or ``suggest`` (the largest that a memory model of the run allows); null: the device batch. Short: ``size``."""
    device_memory_gib: float | None = None
    """Memory of one device for ``suggest``; null: what the device has, on CPU the host's shared among its ranks."""
    slot_tokens: int | None = None
    """Width of such a row in tokens; null means the width of the device batch."""
    max_image_tokens: int | None = None
    """Most placeholders of images, videos and audios in a microbatch, a second hard cap; null: none."""
    regroup: bool = True
    """Sort rows by length, fill each microbatch up to the token budget, trim it to its own longest row."""
    equal_counts: bool | str = 'auto'
    """Same number of microbatches on every rank, which FSDP needs; ``auto``: unless DDP was seen to reduce gradients in
    the last one alone."""
    width_multiple: int = 1
    """Round the width of a microbatch up to a multiple, e.g. 64 for tensor cores."""
    packing: bool | str = False
    """String the rows of a microbatch into one without any padding, where the model tells the documents apart; or
    ``auto``: where that costs less as well."""
    cost: CostModel | None = None
    """``launch``, ``quadratic``, ``vision_per_patch``, ..., see :class:`.CostModel`, as ``size time_steps=true``
    measures them; null: those of a 7B model on a GPU, its vision tower without cost."""
    loss_tokens: str = 'auto'
    """Positions that count: ``causal``, ``causal_attended``, ``unshifted``, or ``auto``: as the model's own loss."""
    on_oversize: str = 'raise'
    """A row over the token budget: ``raise``, naming it, or ``warn``, naming it, and compute it alone."""

    def check(self, *, on_cpu: bool) -> None:
        """Refuses a size that the Trainer cannot take; the rest is refused by :func:`.token_data_spec`."""
        size, name = self.device_train_microbatch_size, '`microbatching.device_train_microbatch_size`'
        if isinstance(size, str) and size not in ('auto', 'suggest'):
            raise ConfigError(f'{name} must be a number, `auto` or `suggest`, got: {size}')
        if isinstance(size, int) and size < 1:
            raise ConfigError(
                f'{name} must be at least 1, got: {size}. Use 1 for the least memory, or leave it out for one '
                'microbatch a step'
            )
        if size == 'auto' and (on_cpu or not torch.cuda.is_available()):
            raise ConfigError(f'{name} must be a number on CPU, got: auto. Composer can find it on GPUs only')
        if self.device_memory_gib is not None and not self.device_memory_gib > 0:
            raise ConfigError(f'`microbatching.device_memory_gib` must be positive, got: {self.device_memory_gib}')


# A frozen class inside of another one is read-only for OmegaConf 2.3, which Hydra keeps people at: it is given a twin.
_CostSection = dataclasses.make_dataclass(
    'CostModel',
    [(one.name, get_type_hints(CostModel)[one.name], one.default) for one in dataclasses.fields(CostModel)],
)
_CostSection.__module__ = CostModel.__module__
MicrobatchingConfig.__annotations__['cost'] = _CostSection | None


@dataclass(kw_only=True)
class TrainConfig:
    """One run. ``algorithms`` and ``callbacks`` map names to arguments, in order, as llm-foundry has them."""

    seed: int = 17
    """Seed of weights, order of samples and everything Composer seeds."""
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: dict[str, Any] = field(default_factory=dict)
    """``name``, arguments of the dataset, ``processor`` arguments, and in ``eval`` what differs held-out. Or
    ``parts``: what differs, by name, for each of several datasets, each perhaps with ``epochs`` or ``weight``."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    microbatching: MicrobatchingConfig = field(default_factory=MicrobatchingConfig)
    algorithms: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: {'name': 'decoupled_adamw'})
    """``name`` of a Composer or torch class, and its arguments."""
    scheduler: dict[str, Any] = field(default_factory=lambda: {'name': 'constant'})
    """``name`` of a Composer scheduler, and its arguments."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of :class:`composer.Trainer`, passed as they are; ``loggers`` maps names to arguments."""
    report: dict[str, Any] = field(default_factory=lambda: {'folder': 'runs/{run_name}'})
    """``folder`` of ``result.json``; ``export: true`` writes the model there, as :mod:`composer_tokacc.export` does;
    perhaps the dotted ``name`` of a function that adds to the result, and its arguments."""

    def batch_size(self, *, held_out: bool) -> int:
        """Samples of one batch over all ranks, of training or of evaluation."""
        return (self.loader.global_eval_batch_size if held_out else None) or self.loader.global_batch_size

    @property
    def regroups_ranks(self) -> bool:
        """Whether samples may move between ranks; not where rows must keep their order."""
        return self.loader.regroup_ranks and self.microbatching.regroup

    @property
    def is_sharded(self) -> bool:
        """Whether the model is divided among the ranks by FSDP."""
        return (self.trainer.get('parallelism_config') or {}).get('fsdp') is not None


_SECTIONS = {
    'model': ModelConfig,
    'loader': LoaderConfig,
    'microbatching': MicrobatchingConfig,
    'microbatching.cost': CostModel,
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a YAML file and lays ``key=value`` overrides over it; ``check_config`` checks more than types.

    Raises:
        ConfigError: For an unreadable file, an unknown key or a wrong type; names the key and the nearest valid one.
    """
    for override in overrides:
        if '=' not in override or override.startswith(('-', '=')):
            raise ConfigError(f'arguments after the file must be key=value, got: {override}')
    try:
        layers = [OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides))]
        for layer in layers:
            _check_shape(layer, path)
            _spell_out_size(layer)
    except OSError as error:
        raise ConfigError(f'config file must be readable, got: {path} ({error.strerror})') from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f'`{path}` must be valid YAML, got: {" ".join(str(error).split())}') from error
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    config = merge(TrainConfig, *layers)
    if config.microbatching.cost is not None:
        with section('microbatching.cost'):
            config.microbatching.cost = CostModel(**vars(config.microbatching.cost))
    return config


def merge(options: type[Options], *layers: Any, path: str = '') -> Options:
    """An instance of a dataclass with the values of the last layer that names them.

    Args:
        options: The dataclass.
        *layers: Mappings.
        path: Where they stand, for messages.

    Raises:
        ConfigError: For an unknown key or a value of the wrong type.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(options), *layers))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error, path)) from error
    except TypeError as error:  # omegaconf's own, of a list where a mapping stands
        raise ConfigError(f'mappings must be given as mappings, got: a list for one ({error})') from error


@contextmanager
def section(path: str, names: Iterable[str] | None = None) -> Iterator[None]:
    """Makes a :class:`ConfigError` of what the owner of an argument says against its value.

    Only of a plain ValueError that this package raises: those of torch, Transformers or Streaming, and faults of the
    program, keep their type and their traceback.

    Args:
        path: Section of the YAML file, put before the argument's name: ``dataset`` makes ``path`` ``dataset.path``.
        names: Arguments that are keys of the section under the same name. Default: the section's fields.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or not raised_here(error):
            raise
        message = ' '.join(str(error).split())
        named = re.match(r'`(\w+)[`.]', message)
        if named and named[1] in (_field_names(_SECTIONS[path]) if names is None else names):
            message = f'`{path}.{message[1:]}'
        elif not message.startswith((f'`{path}`', f'`{path}.')):
            message = f'`{path}`: {message}'
        raise ConfigError(message) from error


def refuse(error: Exception, *, on_all_ranks: bool = False) -> int:
    """Says a mistake in one line; the chain of its causes is logged as debug.

    Args:
        error: The mistake.
        on_all_ranks: Whether every rank meets it for certain, as in a config before anything is built. The first rank
            of a node then speaks for the others, which end as if all were well: for every rank that fails, Composer's
            launcher ends the others, perhaps before they have spoken, and prints all that it wrote.

    Returns:
        The exit status: 2, or 0 for a rank that another one speaks for.
    """
    log.debug('The mistake was found here:', exc_info=error)
    if on_all_ranks and int(os.environ.get('LOCAL_RANK', '0')) > 0:
        return 0
    print(one_line(error), file=sys.stderr, flush=True)
    return 2


def one_line(error: Exception) -> str:
    """What the user reads of a mistake."""
    # From a worker process the message comes behind the worker's traceback.
    message = str(error).rpartition('BadSampleError: ')[2]
    return f'error: {" ".join(message.split())}'


def say(text: str) -> None:
    """What is being done, behind the seconds since the start, on the first rank's screen: some of it takes long."""
    if int(os.environ.get('RANK', '0')) == 0:
        seconds = time.time() - psutil.Process().create_time()
        print(f'[{seconds:4.0f} s] {text}', file=sys.stderr, flush=True)


def precision_of(config: TrainConfig) -> str:
    """Precision of the run: where the config names none, Composer's own default."""
    return str(config.trainer.get('precision') or ('fp32' if config.trainer.get('device') == 'cpu' else 'amp_fp16'))


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """One line that refuses ``name`` and suggests the nearest of ``known``."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    listed = ', '.join(known[:40]) + (', ...' if len(known) > 40 else '')
    return f'{what} must be a known name, got: {name}. ' + (
        f'Did you mean {nearest[0]}?' if nearest else f'Known: {listed}'
    )


def _check_shape(layer: Any, path: str | Path) -> None:
    """Omegaconf merges scalars and lists into sections with messages that name no key."""
    if not OmegaConf.is_dict(layer):
        raise ConfigError(f'`{path}` must hold sections (`model:`, `loader:`, ...), got: no mapping')
    given: Any = OmegaConf.to_container(layer, resolve=False)
    for section in dataclasses.fields(TrainConfig):
        value = given.get(section.name, {})
        if section.name != 'seed' and not isinstance(value, dict):
            raise ConfigError(f'`{section.name}` must be a mapping, got: {value}. Leave it out for its defaults')
    for key in ('model.config', 'model.lora', 'microbatching.cost'):
        section, name = key.split('.')
        value = given.get(section, {}).get(name)
        if value is not None and not (isinstance(value, dict) or str(value).startswith('${')):
            raise ConfigError(f'`{key}` must be a mapping, got: {value}. Leave it out, or write null, for none')


def _spell_out_size(layer: Any) -> None:
    """``microbatching.size`` is short for the name that Composer's users know; the later layer wins under either."""
    section = layer.get('microbatching')
    if section is None or 'size' not in section:
        return
    if 'device_train_microbatch_size' in section:
        raise ConfigError('only one of `microbatching.size` and its long name must be given, got: both. Remove one')
    section.device_train_microbatch_size = section.pop('size')


def _one_line(error: OmegaConfBaseException, path: str = '') -> str:
    """Omegaconf's errors run over several lines and suggest nothing."""
    key = '.'.join(filter(None, (path, error.full_key or str(error.key or ''))))
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and dataclasses.is_dataclass(error.object_type):
        section = key.rpartition('.')[0]
        known = _field_names(error.object_type)
        return unknown_name(f'`{section}` key' if section else 'section', key.rpartition('.')[2], known)
    if isinstance(error, MissingMandatoryValue):
        return f'`{key}` must be given, got: nothing. Write {key}=... behind the file on the command line'
    reason = str(error).splitlines()[0]
    return f'`{key}` must be valid, got: {reason}' if key else f'values must be valid, got: {reason}'


def raised_here(error: BaseException) -> bool:
    """Whether a line of this package raised an error, rather than one of a host."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get('__name__')).startswith('composer_tokacc.')


def _field_names(options: Any) -> list[str]:
    return [known.name for known in dataclasses.fields(options)]
