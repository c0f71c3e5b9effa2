# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The YAML file of a run: its sections, how file and command line become one config, and the values that it may have.

Each of our sections is a dataclass, whose annotations are types, choices and ranges. Arguments of classes of hosts
(Composer, torch, streaming) are checked against the annotations of these classes. Pydantic checks both.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from composer_tokacc.planning import CostModel, mean_samples
from composer_tokacc.programs.errors import ConfigError, building, shorten, unknown_name

Options = TypeVar('Options')
Hint = Any
"""An annotation: a class, a union, ``Annotated`` or ``Literal``."""

Values = dict[str, Any]
"""Values of a config, of one of its sections, or of the command line, by key. Values may be nested."""
Sections = dict[str, Values]
"""Settings of several things of a kind, such as datasets or streams, by name."""
Count = Annotated[int, Field(ge=1)]
"""A number of things, at least one."""
NotNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _check_name(value: str) -> str:
    """Refuses an empty text, and the text None."""
    # `key=None` on the command line is the text None. In YAML the value would be null.
    if value.strip() in ('', 'None'):
        raise ValueError('must be a name, or null for none')
    return value


Name = Annotated[str, AfterValidator(_check_name)]
"""A name of a run, a folder, a file or a module."""

INFINITE_HINTS = {'quadratic': Annotated[float, Field(allow_inf_nan=True)]}
"""Keys that may be ``.inf``, in every section. Only :class:`.CostModel` has a key ``quadratic``, and an infinite one
switches the quadratic term off."""
INVALID_YAML = (yaml.YAMLError, ValueError, OmegaConfBaseException, RecursionError)
"""Errors that OmegaConf raises for a text that is not YAML."""
REPORT_KEYS: dict[str, Hint] = {
    'folder': Name,
    'name': str | None,
    'export': bool | None,
    'answers': NotNegative,
    'answer_tokens': Count,
}
"""Keys of the section ``report`` that are not arguments of the function under ``report.name``."""


@dataclass(kw_only=True)
class ModelConfig:
    """Arguments of ``programs.models.build_model``; exactly one of ``pretrained`` and ``config``."""

    pretrained: str | None = None
    """Folder or hub name of a Transformers checkpoint."""
    config: dict[str, Any] | None = None
    """For a fresh model: ``model_type`` and the fields of its Transformers config."""
    freeze: list[str] = field(default_factory=list)
    """Parts that keep their weights, e.g. ``[vision_tower]``. The layers after the vision feature layer of LLaVA
    models always do: no loss reaches them. With ``lora``, which freezes the whole model, this key only
    stops ``lora.bias`` from training biases of these parts. An adapter in them is trained."""
    lora: dict[str, Any] | None = None
    """Train an adapter (peft): ``r``, ``alpha``, ``dropout``, ``target_modules``, ``modules_to_save``; ``bits: 4``:
    the base in 4 bits (bitsandbytes, GPU only)."""
    dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'
    """Type of the stored weights. ``trainer.precision`` sets the type of the computation."""
    attn_implementation: str | None = None
    """``sdpa``, ``flash_attention_2``, ``eager``; null leaves it to Transformers."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    train_metrics: bool = False
    """Also run the metrics on training batches; Composer then copies each device batch."""


@dataclass(kw_only=True)
class LoaderConfig:
    """How samples become batches, before anything is cut into microbatches."""

    global_batch_size: Count | list[Any] = 32
    """Samples of one optimizer step over all ranks. Or a schedule, a list of ``[start, size]``: a start is an optimizer
    step (``1000ba``) or a number of trained tokens (``5000000tok``), and the first one is 0. Then ``max_duration`` must
    be in tokens, samples or batches."""
    global_batch_tokens: Count | None = None
    """Tokens of one optimizer step over all ranks, up to one sample more or less, instead of ``global_batch_size``,
    which then only holds for evaluation. Needs ``regroup_ranks``."""
    global_eval_batch_size: Count | None = None
    """Samples of one evaluation batch over all ranks; null means ``global_batch_size``, the largest of a schedule."""
    shuffle: bool = True
    """Another order every epoch, the same for a given ``seed``."""
    drop_last: bool = True
    """Leave out the last, smaller batch of an epoch."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Loader processes for each rank; 0 loads in the training process. More than 256 are refused as a slip."""
    prefetch_factor: Count | None = None
    """Batches that each worker holds ready; null means torch's default."""
    pin_memory: bool = False
    """Page-locked host memory, for faster copies to a GPU."""
    regroup_ranks: bool = True
    """Share each global batch among the ranks by length, so that all finish together. The samples of a global batch
    stay the same. Reads the dataset once before the first run. Needs ``microbatching.regroup``."""
    exchange_ranks: bool = False
    """The same for a streamed dataset, of which each rank reads its own samples: ranks exchange samples after reading.
    Needs ``microbatching.slot_tokens`` or ``dataset.max_length``."""
    modality: Literal['mixed', 'per_step'] = 'mixed'
    """``mixed``, or ``per_step``: a global batch has either only samples with images, or only samples without."""
    lengths_folder: Name | None = None
    """Where lengths of samples are kept between runs; null means the user's cache folder."""
    on_other_data: Literal['raise', 'warn'] = 'raise'
    """What to do if a resumed run has other data, processor, vocabulary, adapter or optimizer settings than its
    checkpoint, or within an epoch other batches: ``raise`` an error, or ``warn`` and go on. The same if a run loads
    only weights, and its vocabulary or adapter gives them another meaning."""

    @property
    def largest_batch(self) -> int:
        """Samples of a global batch. With a schedule, of the largest one."""
        if isinstance(self.global_batch_size, int):
            return self.global_batch_size
        return max(size for _, size in self.global_batch_size)

    def samples_per_batch(self, lengths: np.ndarray) -> int:
        """Returns ``largest_batch``, or with ``global_batch_tokens`` the samples of a global batch on average."""
        if self.global_batch_tokens is None:
            return self.largest_batch
        return mean_samples(lengths, self.global_batch_tokens)

    @property
    def key_needing_plan(self) -> str | None:
        """The key of a setting that only a RegroupingBatchSampler can follow, because it plans ahead; or None."""
        if self.modality == 'per_step':
            return 'loader.modality'
        if self.global_batch_tokens is not None:
            return 'loader.global_batch_tokens'
        if not isinstance(self.global_batch_size, int):  # a schedule
            return 'loader.global_batch_size'
        return None


@dataclass(kw_only=True)
class MicrobatchingConfig:
    """How a device batch is cut: microbatch size and memory, and the arguments of :func:`.token_data_spec`."""

    device_train_microbatch_size: Count | Literal['auto', 'suggest'] | None = None
    """Rows of ``slot_tokens`` that fit into memory at once, or ``auto`` (GPU only: halves it after each out-of-memory),
    or ``suggest`` (the largest that a memory model of the run allows); null: the device batch. Short: ``size``."""
    device_memory_gib: Positive | None = None
    """Memory of one device for ``suggest``; null: all of the device, on CPU the host's memory divided by its ranks."""
    slot_tokens: Count | None = None
    """Width in tokens of the rows that the microbatch size counts; null: the longest sample of the dataset, or without
    ``regroup_ranks`` the longest sample of each device batch."""
    max_image_tokens: Count | None = None
    """Most placeholders of images, videos and audios in a microbatch, a second hard cap; null: none."""
    max_loss_tokens: Count | None = None
    """Most loss tokens in a microbatch, a third hard cap; null: none. It also limits the logits, if they are only
    computed at labels."""
    regroup: bool = True
    """Sort rows by length before they are cut. ``false`` keeps their order. Microbatches are trimmed in both cases."""
    equal_counts: bool | Literal['auto'] = 'auto'
    """Same number of microbatches on every rank, which FSDP needs. ``auto``: yes, unless DDP reduces gradients only in
    the last microbatch."""
    width_multiple: Annotated[int, Field(ge=1, le=65536)] = 1
    """Round the width of a microbatch up to a multiple, e.g. 64 for tensor cores."""
    packing: bool | Literal['auto'] = False
    """Join the rows of a microbatch into one row without padding, if the model tells the documents apart. ``auto``:
    only if that also costs less."""
    cost: CostModel | None = None
    """``launch``, ``quadratic``, ``vision_per_patch``, ..., see :class:`.CostModel`, as ``size time_steps=true``
    measures them; null: a 7B model on a GPU, whose vision encoder costs nothing."""
    loss_tokens: Literal['auto', 'causal', 'causal_attended', 'unshifted'] = 'auto'
    """Positions that count: ``causal``, ``causal_attended``, ``unshifted``, or ``auto``: as the model's own loss."""
    on_oversize: Literal['raise', 'warn'] = 'raise'
    """What to do if a single row is over the token budget or another cap: ``raise`` an error that names it, or ``warn``
    and compute it alone."""
    rehearse: Literal['heaviest', 'none'] | None = None
    """``heaviest``: before the first step of ``train`` the heaviest microbatches of the whole run go forward and
    backward once, so that the run fails for memory then or not at all; null: on GPUs."""


@dataclass(kw_only=True)
class TrainConfig:
    """One run. ``algorithms`` and ``callbacks`` map names to arguments, in order, as llm-foundry has them."""

    dry_run: bool = False
    """Do everything except training: config, data, model, first-batch check and rehearsal. Only caches are written."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 17
    """Seed of weights, order of samples and everything Composer seeds."""
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: dict[str, Any] = field(default_factory=dict)
    """``name``, arguments of the dataset, ``processor`` arguments, and in ``eval`` the changes for held-out data. For
    several datasets, ``parts`` has the changes for each of them, by a name: its arguments, and perhaps ``epochs``,
    ``weight`` or ``loss_share``."""
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    microbatching: MicrobatchingConfig = field(default_factory=MicrobatchingConfig)
    algorithms: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: {'name': 'decoupled_adamw'})
    """``name`` of a Composer or torch class, its arguments, and ``parts``: arguments of parts of the model, by name."""
    scheduler: dict[str, Any] = field(default_factory=lambda: {'name': 'constant'})
    """``name`` of a Composer scheduler, and its arguments."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of :class:`composer.Trainer`, passed as they are; ``loggers`` maps names to arguments."""
    report: dict[str, Any] = field(default_factory=lambda: {'folder': 'runs/{run_name}'})
    """``folder`` of ``result.json``; ``export: true`` writes the model there, as :mod:`composer_tokacc.export` does;
    perhaps the dotted ``name`` of a function that adds to the result, and its arguments. ``answers``: samples of the
    eval set that the model answers at each evaluation (4), with ``answer_tokens`` tokens at most (64)."""

    def batch_size(self, *, is_eval: bool) -> int:
        """Returns the samples of one batch over all ranks, of training or of evaluation."""
        if is_eval and self.loader.global_eval_batch_size is not None:
            return self.loader.global_eval_batch_size
        return self.loader.largest_batch

    @property
    def regroups_ranks(self) -> bool:
        """Whether samples may move between ranks. They may not if rows must keep their order."""
        return self.loader.regroup_ranks and self.microbatching.regroup

    @property
    def is_sharded(self) -> bool:
        """Whether the model is divided among the ranks by FSDP."""
        parallelism = self.trainer.get('parallelism_config') or {}
        return parallelism.get('fsdp') is not None


def load_config(path: str | Path, overrides: Sequence[str] = (), *, reads_data: bool = True) -> TrainConfig:
    """Reads a YAML file, changes it by ``key=value`` overrides, and checks each value.

    ``check_config`` later checks whether the sections go together.

    Args:
        path: The YAML file.
        overrides: ``key=value`` each.
        reads_data: Whether the program reads the data. If not, the section ``dataset`` may have texts that are still to
            be given (``???``), such as paths.

    Raises:
        ConfigError: For an unreadable file, an unknown key (it names the nearest), a wrong type or range.
    """
    values_of_file = _read_file(path)
    values_of_overrides = read_overrides(overrides)
    _check_overrides(values_of_file, overrides)
    if not reads_data and 'dataset' in values_of_file:
        # After the check, because an override may put a mapping in the place of a `???`, but not of a text.
        values_of_file['dataset'] = _without_missing(values_of_file['dataset'])
    # Before the merge, so that an override replaces the value of the file, even if one has the short name.
    _spell_out_size(values_of_file)
    _spell_out_size(values_of_overrides)
    return merge(TrainConfig, values_of_file, values_of_overrides)


def _without_missing(values: object) -> object:
    """Returns nested values with a text in the place of each ``???``."""
    if isinstance(values, dict):
        return {key: _without_missing(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_without_missing(value) for value in values]
    return 'not given' if values == '???' else values


def read_overrides(overrides: Sequence[str]) -> Values:
    """Returns the values of ``key=value`` texts as nested dicts. Refuses the first text that cannot be read."""
    values = OmegaConf.create()
    for override in overrides:
        key, separator, value = override.partition('=')
        if not separator or not key or key.startswith('-'):
            raise ConfigError('', f'arguments after the file must be key=value, got: {shorten(override)}')
        try:
            values.merge_with_dotlist([override])
        except INVALID_YAML as error:
            raise ConfigError(
                shorten(key, 60),
                f'must be valid YAML, got: {shorten(value, 200)} ({shorten(error, 200)}). Quote a text that has '
                'special characters',
            ) from error
    return _as_dict(values)


def _check_overrides(values_of_file: Values, overrides: Sequence[str]) -> None:
    """Refuses an override that does not fit the file as the overrides before it have changed it."""
    values_so_far: Any = values_of_file
    for override in overrides:
        _check_parents(override, values_so_far)
        values_so_far = _overlay(values_so_far, read_overrides([override]))


def _check_parents(override: str, values: Values) -> None:
    """Refuses ``dataset.eval.path=x`` if ``dataset.eval`` has a value that is no mapping. This value would be lost.

    ``dataset.eval={path: x}`` replaces any value.

    Args:
        override: A ``key=value`` text.
        values: The values of the file, changed by the overrides before this one.
    """
    key, _, _ = override.partition('=')
    parent_names = key.split('.')[:-1]  # `dataset` and `eval` of `dataset.eval.path`
    value: Any = values
    path = ''
    for name in parent_names:
        path = _join(path, name)
        value = value.get(name)
        # A mapping may take the place of a missing value, of one that is still to be given (`???`), and of a reference.
        if value in (None, '???') or (isinstance(value, str) and '${' in value):
            return
        if not isinstance(value, dict):
            message = (
                f'must be a mapping, got: {shorten(value, 200)}. Change the file, or replace all of it: {path}={{...}}'
            )
            raise ConfigError(path, message)


def read_options(options: type[Options], overrides: Sequence[str]) -> tuple[Options, list[str]]:
    """Separates overrides of a program's own options from overrides of the config.

    Args:
        options: The dataclass of the program's options.
        overrides: All ``key=value`` texts of the command line.

    Returns:
        The options, and the overrides of the config.
    """
    names = {option.name for option in fields(options)}  # type: ignore[arg-type]
    program_overrides = []
    config_overrides = []
    for override in overrides:
        first_key = re.split('[.=]', override)[0]
        if first_key in names:
            program_overrides.append(override)
        else:
            config_overrides.append(override)
    return merge(options, read_overrides(program_overrides)), config_overrides


def _read_file(path: str | Path) -> Values:
    """Returns the sections of a YAML file. Refuses a file that is missing or holds something else."""
    path = str(path)
    try:
        # Reading a pipe would wait for somebody to write to it.
        if not os.path.isfile(path):
            raise FileNotFoundError('no such file')
        content = OmegaConf.load(path)
    except (OSError, *INVALID_YAML) as error:
        message = f'must be a YAML file that can be read, got: {type(error).__name__}: {shorten(error)}'
        raise ConfigError(path, message) from error
    if not isinstance(content, DictConfig):
        raise ConfigError(path, 'must hold sections (`model:`, `loader:`, ...), got: no mapping')
    return _as_dict(content)


def _as_dict(values: DictConfig) -> Values:
    """Returns plain dicts and lists. References such as ``${seed}`` stay texts, which :func:`merge` resolves."""
    plain: Any = OmegaConf.to_container(values)
    return plain


def _spell_out_size(values: Values) -> None:
    """Replaces ``microbatching.size``, our short name, by ``microbatching.device_train_microbatch_size``."""
    section = values.get('microbatching')
    if not isinstance(section, dict) or 'size' not in section:
        return
    if 'device_train_microbatch_size' in section:
        raise ConfigError('microbatching.size', 'and its long name must not both be given, got: both. Remove one')
    section['device_train_microbatch_size'] = section.pop('size')


def merge(cls: type[Options], *layers: Values) -> Options:
    """Returns a checked dataclass. Each value comes from the last layer that has it, or is the default.

    Args:
        cls: The dataclass. All its fields have defaults.
        *layers: Nested values, for example of the file and of the command line.
    """
    merged: Any = asdict(cls())  # type: ignore[arg-type]
    for layer in layers:
        merged = _overlay(merged, layer)
    try:
        values = OmegaConf.to_container(OmegaConf.create(merged), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:  # a missing value (`???`), or a reference to nothing
        key = str(error.full_key or 'values')
        reason = shorten(str(error).splitlines()[0])
        message = f'must be given, got: {reason}. Write {key}=... after the file on the command line'
        raise ConfigError(key, message) from error
    return build_dataclass('', cls, values)


def _overlay(lower: object, upper: object) -> object:
    """Returns the upper value. Two mappings are merged key by key, and the upper one wins.

    OmegaConf's own merge is not used, because it fails if a mapping replaces another kind of value or is replaced.
    """
    if not isinstance(lower, dict) or not isinstance(upper, dict):
        return upper
    merged = dict(lower)
    for key, value in upper.items():
        merged[key] = _overlay(lower.get(key), value)
    return merged


def _join(path: str, key: object) -> str:
    return f'{path}.{key}' if path else str(key)


def build_dataclass(path: str, cls: type[Options], values: object) -> Options:
    """Returns a dataclass with checked values. Fields that are dataclasses themselves are built in the same way."""
    checked = check_arguments(path, cls, values, hints=INFINITE_HINTS)
    with building(path):  # a class may check itself, as CostModel does
        return cls(**checked)


def check_arguments(
    path: str,
    target: Callable[..., Any],
    arguments: object,
    *,
    hints: Mapping[str, Hint] | None = None,
    extra_keys: Mapping[str, Hint] | None = None,
    requires_all: bool = True,
) -> Values:
    """Checks arguments for a class or function against its signature and annotations, and returns them.

    Args:
        path: The section that they come from.
        target: The class or function. If the program itself supplies some arguments, a ``partial`` with these. The
            section must not have them, unless ``extra_keys`` has a key of the same name.
        arguments: The values of the section. Anything but a mapping is refused.
        hints: Annotations by name, which replace those of ``target``. It need not take all of these names.
        extra_keys: Keys of the section that are not for ``target``, with their annotations.
        requires_all: Whether to refuse a section that lacks an argument without a default.
    """
    if not isinstance(arguments, Mapping):
        raise ConfigError(path, f'must be a mapping, got: {shorten(arguments, 200)}. Leave it out for its defaults')
    extra_keys = extra_keys or {}
    arguments_of_program = without(getattr(target, 'keywords', {}), *extra_keys)  # of a `partial`
    for name in arguments_of_program:
        if name in arguments:
            message = f'must be left out here, because the program sets it, got: {shorten(arguments[name], 200)}'
            raise ConfigError(_join(path, name), message)
    annotations: dict[str, Hint] = {}
    takes_any_name = False
    with building(path):  # the signature of a partial raises an error if the function does not take its arguments
        parameters = _parameters_of(target)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any_name = True
            continue
        # The signature of a partial still has the arguments that the program supplies.
        if parameter.kind is parameter.VAR_POSITIONAL or parameter.name in arguments_of_program:
            continue
        has_annotation = parameter.annotation is not parameter.empty
        annotations[parameter.name] = parameter.annotation if has_annotation else Any
        is_required = requires_all and parameter.default is parameter.empty
        if is_required and parameter.name not in arguments:
            raise ConfigError(_join(path, parameter.name), 'must be given, because it has no default')
    annotations |= extra_keys
    if not takes_any_name:
        check_names(path, arguments, annotations)
    annotations |= hints or {}  # only now, because hints may have names that `target` does not take
    checked = {}
    for name, value in arguments.items():
        checked[name] = check_value(_join(path, name), value, annotations.get(name, Any))
    return checked


def check_names(path: str, arguments: Iterable[object], known_names: Iterable[str]) -> None:
    """Refuses the first name in ``arguments`` that is not known. ``path`` is the section with these names."""
    known_list = list(known_names)
    for key in arguments:
        if key not in known_list:
            raise ConfigError(path or 'config', unknown_name('key', str(key), known_list))


def _parameters_of(target: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    """Returns the parameters of a class or function."""
    try:
        return inspect.signature(target, eval_str=True).parameters.values()
    except Exception:  # an annotation is a text without meaning here, such as a class only imported for type checkers
        return inspect.signature(target).parameters.values()


def check_value(path: str, value: Any, hint: Hint) -> Any:
    """Returns the value if it fits the annotation. Raises ConfigError if it does not.

    The value stays as it is, except that a mapping for one of our dataclasses becomes this dataclass, and that a list
    or a text is converted if only a tuple, a set, a path, or a similar type fits. A number or a bool in quotes does not
    fit, because hosts treat the text ``'no'`` as true. A value is not checked if pydantic does not know the annotation.
    """
    # The annotation itself and the members of a union: of `CostModel | None` also `CostModel` and `None`.
    branches = [hint, *get_args(hint)]
    if value is None and NoneType in branches:
        return None
    for branch in branches:
        # Not a dataclass of a host: Composer's Time is one, but a text in the file.
        if hasattr(branch, '__dataclass_fields__') and branch.__module__.startswith('composer_tokacc.'):
            return build_dataclass(path, branch, value)
    checker = _checker_of(hint)
    if checker is None:
        return value
    try:
        return _fit(value, checker)
    except TypeError as error:  # an enum of Composer raises it for a value that is no text
        raise ConfigError(path, f'cannot be used: {error}') from error
    except ValidationError as error:
        first = error.errors()[0]
        message = f'{_requirement_of(error)}, got: {shorten(repr(first["input"]), 300)}'
        raise ConfigError(_path_of(first['loc'], path, value), message) from error


def _requirement_of(error: ValidationError) -> str:
    """Returns what a value must be, in our words: "must be less than 1" for "Input should be less than 1"."""
    details = error.errors()  # one for each branch of a union
    messages = []
    for detail in details:
        # A YAML file cannot hold an object of a class, so a branch that asks for one is not named.
        asks_for_object = detail['type'] in ('is_instance_of', 'needs_python_object')
        if asks_for_object:
            continue
        # The first word is "Input" or the type that pydantic would make of it: "Tuple should have at most 2 items".
        message = re.sub('^[A-Z][a-z]+ should ', 'must ', detail['msg'])
        if message not in messages:
            messages.append(message)
    requirement = ', or '.join(messages) or 'must be left out'
    requirement = requirement.replace(' after validation', '')  # "... have at least 1 item after validation, not 0"
    requirement = requirement.replace('Value error, ', '')  # pydantic puts it before our own messages
    requirement = requirement.replace('an object', 'a mapping').replace('array', 'list')  # the words for JSON
    requirement = requirement.replace('Field required', 'must have more entries')  # of a tuple
    if '[key]' in details[0]['loc']:  # pydantic writes it after a key that is wrong itself: ('lr', '[key]')
        requirement = f'as a key {requirement}'
    return requirement


def _fit(value: Any, checker: TypeAdapter) -> Any:
    """Returns the value if it fits the annotation, or else as pydantic reads it from JSON. Raises ValidationError.

    Neither YAML nor JSON has tuples, sets and paths. When pydantic reads JSON, it makes them from lists and texts, but
    stays strict about numbers and bools.
    """
    try:
        checker.validate_python(value)
        return value
    except ValidationError:
        text = json.dumps(value, default=repr)
        # JSON turns keys that are not texts into texts, and objects into their `repr`. NaN is never equal.
        is_same_in_json = json.loads(text) == value
        if not is_same_in_json:
            raise
        return checker.validate_json(text)


def _path_of(keys: Sequence[int | str], path: str, value: object) -> str:
    """Returns the path of the first mistake that pydantic found in ``value``, which may be inside a mapping.

    Pydantic gives the keys that lead to it, and between them names of branches of unions: ``('a', 'int', 'b')``.
    """
    for key in keys:
        if isinstance(value, Mapping) and key in value:  # otherwise it is the name of a branch
            path = _join(path, key)
            value = value[key]
    return path


def _checker_of(hint: Hint) -> TypeAdapter | None:
    """Returns pydantic's checker of an annotation; None if pydantic cannot check it."""
    if isinstance(hint, str):  # names in this text belong to the module of the class, and are unknown here
        return None
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    try:
        checker = TypeAdapter(hint, config=config)
    except Exception:  # of any kind, because an annotation may be any object
        return None
    # If a part of the annotation names an unknown type, pydantic would only complain when it checks a value.
    return checker if checker.pydantic_complete else None


def without(section: Mapping[str, Any], *keys: str) -> Values:
    """Returns a copy of a mapping without some of its keys."""
    return {key: value for key, value in section.items() if key not in keys}
