# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The YAML file of a run: its sections, how file and command line become one config, and what a value may be.

Types, choices and ranges are in the annotations, of our own sections and of the hosts' classes alike.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from composer_tokacc.planning import CostModel
from composer_tokacc.programs.errors import ConfigError, must, unknown_name

Options = TypeVar('Options')


@dataclass(frozen=True, kw_only=True)
class Range:
    """Where a number must lie."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        words = (('at least', self.least), ('above', self.above), ('at most', self.most), ('below', self.below))
        return ' and '.join(f'{word} {bound}' for word, bound in words if math.isfinite(bound))


AT_LEAST_0, AT_LEAST_1, POSITIVE = Range(least=0), Range(least=1), Range(above=0)
FRACTION = Range(least=0, below=1)
Whole = Annotated[int, AT_LEAST_1]
"""A number of things."""
OF_THE_REPORT: dict[str, Any] = {
    'folder': str, 'name': str, 'export': bool | None, 'answers': Annotated[int, AT_LEAST_0], 'answer_tokens': Whole,
}  # fmt: skip
"""Keys of the section ``report`` that are not for the function under ``name``, and what they may be."""
_CONTAINERS = {list: list, Sequence: list, tuple: list, dict: Mapping, Mapping: Mapping}


@dataclass(kw_only=True)
class ModelConfig:
    """Arguments of ``programs.models.build_model``; exactly one of ``pretrained`` and ``config``."""

    pretrained: str | None = None
    """Folder or hub name of a Transformers checkpoint."""
    config: dict[str, Any] | None = None
    """Fresh model: ``model_type`` and the fields of its Transformers config."""
    freeze: list[str] = field(default_factory=list)
    """Parts that keep their weights, e.g. ``[vision_tower]``. What lies behind the vision feature layer of LLaVA and
    its kin always does: no loss reaches it."""
    lora: dict[str, Any] | None = None
    """Train an adapter (peft): ``r``, ``alpha``, ``dropout``, ``target_modules``, ``modules_to_save``; ``bits: 4``:
    the base in 4 bits (bitsandbytes, GPU only)."""
    dtype: Literal['float32', 'bfloat16', 'float16'] = 'float32'
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

    global_batch_size: Whole = 32
    """Samples of one optimizer step over all ranks."""
    global_eval_batch_size: Whole | None = None
    """Samples of one evaluation batch over all ranks; null means ``global_batch_size``."""
    shuffle: bool = True
    """Another order every epoch, the same for a given ``seed``."""
    drop_last: bool = True
    """Leave out the last, smaller batch of an epoch."""
    num_workers: Annotated[int, AT_LEAST_0] = 0
    """Loader processes for each rank; 0 loads in the training process."""
    prefetch_factor: Whole | None = None
    """Batches that each worker holds ready; null means torch's default."""
    pin_memory: bool = False
    """Page-locked host memory, for faster copies to a GPU."""
    regroup_ranks: bool = True
    """Share each global batch among the ranks by length, so that all finish together; which samples it holds stays the
    same. Reads the dataset once before the first run. Needs ``microbatching.regroup``."""
    exchange_ranks: bool = False
    """The same for a streamed dataset, where each rank reads its own samples: they are exchanged after reading. Needs
    ``microbatching.slot_tokens`` or ``dataset.max_length``."""
    modality: Literal['mixed', 'per_step'] = 'mixed'
    """``mixed``, or ``per_step``: every global batch is of samples with images, or of samples without."""
    lengths_folder: str | None = None
    """Where lengths of samples are kept between runs; null means the user's cache folder."""
    on_other_data: Literal['raise', 'warn'] = 'raise'
    """A run resumed with other data, another processor or vocabulary than its checkpoint's: ``raise``, or ``warn`` and
    go on."""


@dataclass(kw_only=True)
class MicrobatchingConfig:
    """How a device batch is cut; the arguments of :func:`composer_tokacc.token_data_spec`."""

    device_train_microbatch_size: Whole | Literal['auto', 'suggest'] | None = None
    """Rows of ``slot_tokens`` that fit into memory at once, or ``auto`` (GPU only: halves it after each out-of-memory),
    or ``suggest`` (the largest that a memory model of the run allows); null: the device batch. Short: ``size``."""
    device_memory_gib: Annotated[float, POSITIVE] | None = None
    """Memory of one device for ``suggest``; null: what the device has, on CPU the host's shared among its ranks."""
    slot_tokens: Whole | None = None
    """Width of such a row in tokens; null: the longest sample, without ``regroup_ranks`` that of each device batch."""
    max_image_tokens: Whole | None = None
    """Most placeholders of images, videos and audios in a microbatch, a second hard cap; null: none."""
    regroup: bool = True
    """Sort rows by length, fill each microbatch up to the token budget, trim it to its own longest row."""
    equal_counts: bool | Literal['auto'] = 'auto'
    """Same number of microbatches on every rank, which FSDP needs; ``auto``: unless DDP was seen to reduce gradients in
    the last one alone."""
    width_multiple: Annotated[int, Range(least=1, most=65536)] = 1
    """Round the width of a microbatch up to a multiple, e.g. 64 for tensor cores."""
    packing: bool | Literal['auto'] = False
    """String the rows of a microbatch into one without any padding, where the model tells the documents apart; or
    ``auto``: where that costs less as well."""
    cost: CostModel | None = None
    """``launch``, ``quadratic``, ``vision_per_patch``, ..., see :class:`.CostModel`, as ``size time_steps=true``
    measures them; null: those of a 7B model on a GPU, its vision tower without cost."""
    loss_tokens: Literal['auto', 'causal', 'causal_attended', 'unshifted'] = 'auto'
    """Positions that count: ``causal``, ``causal_attended``, ``unshifted``, or ``auto``: as the model's own loss."""
    on_oversize: Literal['raise', 'warn'] = 'raise'
    """A row over the token budget: ``raise``, naming it, or ``warn``, naming it, and compute it alone."""
    rehearse: Literal['heaviest', 'none'] | None = None
    """``heaviest``: before the first step of ``train`` the heaviest microbatches of the whole run go forward and
    backward once, so that memory fails then or not at all; null: on GPUs."""


@dataclass(kw_only=True)
class TrainConfig:
    """One run. ``algorithms`` and ``callbacks`` map names to arguments, in order, as llm-foundry has them."""

    dry_run: bool = False
    """Everything but training: config, data, model, the first batch's check and the rehearsal; nothing is written."""
    seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 17
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
        return (self.loader.global_eval_batch_size if is_eval else None) or self.loader.global_batch_size

    @property
    def regroups_ranks(self) -> bool:
        """Returns whether samples may move between ranks; not where rows must keep their order."""
        return self.loader.regroup_ranks and self.microbatching.regroup

    @property
    def is_sharded(self) -> bool:
        """Returns whether the model is divided among the ranks by FSDP."""
        return (self.trainer.get('parallelism_config') or {}).get('fsdp') is not None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a YAML file and lays ``key=value`` overrides over it; ``check_config`` checks what belongs together.

    Raises:
        ConfigError: For an unreadable file, an unknown key (it names the nearest), a wrong type or range.
    """
    for override in overrides:
        if '=' not in override or override.startswith(('-', '=')):
            raise ConfigError(f'arguments after the file must be key=value, got: {override}')
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise ConfigError(f'config file must be a file, got: {path}')
    unreadable = (yaml.YAMLError, ValueError, OmegaConfBaseException, RecursionError)
    with must('config file must be readable', path, OSError), must(f'`{path}` must be valid YAML', None, *unreadable):
        layers = [OmegaConf.load(path)]
    for override in overrides:  # one by one, to name it
        with must(f'`{override.partition("=")[0]}` must be valid YAML', None, *unreadable):
            OmegaConf.from_dotlist([override])
    layers.append(OmegaConf.from_dotlist(list(overrides)))
    for layer in layers:
        if not OmegaConf.is_dict(layer):
            raise ConfigError(f'`{path}` must hold sections (`model:`, `loader:`, ...), got: no mapping')
        _spell_out_size(layer)
    return merge(TrainConfig, *layers)


def merge(options: type[Options], *layers: Any, path: str = '') -> Options:
    """Returns a checked dataclass with the values of the last layer that names them; ``path`` is their section."""
    merged: Any = asdict(options())  # type: ignore[arg-type]
    for layer in layers:
        merged = _overlay(merged, OmegaConf.to_container(layer) if OmegaConf.is_config(layer) else layer)
    try:
        given: Any = OmegaConf.to_container(OmegaConf.create(merged), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = '.'.join(filter(None, (path, error.full_key)))
        message = f'{f"`{key}`" if key else "values"} must be valid, got: {str(error).splitlines()[0]}'
        if isinstance(error, MissingMandatoryValue):
            message = f'`{key}` must be given, got: nothing. Write {key}=... behind the file on the command line'
        raise ConfigError(message) from error
    return _built(path, options, given)


def _overlay(below: Any, above: Any) -> Any:
    """Returns the later of two values, mappings key by key."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: _overlay(below.get(key), value) for key, value in above.items()}}


def _built(path: str, section: type[Options], given: Mapping[str, Any]) -> Options:
    """Returns a section of checked values, and of sections inside it."""
    values = check_arguments(path, section, given)
    try:
        return section(**values)
    except ValueError as error:  # of a class that checks itself
        raise ConfigError(f'`{path}.{str(error)[1:]}' if path else str(error)) from error


def _spell_out_size(layer: Any) -> None:
    """Replaces ``microbatching.size`` by the name that Composer's users know; the later layer wins under either."""
    section = layer.get('microbatching')
    if OmegaConf.is_dict(section) and 'size' in section:
        if 'device_train_microbatch_size' in section:
            raise ConfigError('only one of `microbatching.size` and its long name must be given, got: both. Remove one')
        section.device_train_microbatch_size = section.pop('size')


def precision_of(config: TrainConfig) -> str:
    """Returns the precision of the run: where the config names none, Composer's own default."""
    return str(config.trainer.get('precision') or ('fp32' if config.trainer.get('device') == 'cpu' else 'amp_fp16'))


def check_arguments(
    path: str,
    target: Any,
    arguments: Any,
    *,
    num_given: int = 0,
    own_keys: Mapping[str, Any] | None = None,
    hints: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Refuses what is unknown, missing or of another type or range among the arguments for a class or function.

    The program itself supplies ``num_given`` leading parameters. ``own_keys`` of the section are not meant for
    ``target``, and are held to what they may be; ``hints`` count instead of the annotations of ``target``. Returns the
    arguments, with sections of our own as their classes.
    """
    if not isinstance(arguments, Mapping | None):
        raise ConfigError(f'`{path}` must be a mapping, got: {arguments}. Write {{}} for its defaults')
    arguments, own_keys = arguments or {}, own_keys or {}
    parameters = list(inspect.signature(target).parameters.values())[num_given:]
    names = [*own_keys, *(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        check_names(path, arguments, names)
    for p in parameters:
        if p.default is p.empty and p.name in names and p.name not in arguments:
            raise ConfigError(f'`{path}.{p.name}` must be given: {target.__name__} has no default for it')
    hints = {**hints_of(target), **(hints or {}), **own_keys}
    paths = {name: f'{path}.{name}' if path else str(name) for name in arguments}
    return {name: check_value(paths[name], value, hints.get(name, Any)) for name, value in arguments.items()}


def check_names(path: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Refuses the first of ``arguments`` that is not ``known``; ``path`` is the section that they stand in."""
    for key in arguments:
        if key not in known:
            raise ConfigError(unknown_name(f'`{path}` key' if path else 'section', str(key), known))


def hints_of(target: Any) -> dict[str, Any]:
    """Returns annotations by name; none where one names what cannot be imported."""
    owner = target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target
    try:
        return get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def check_value(path: str, value: Any, hint: Any) -> Any:
    """Holds a value to an annotation and returns it; what no YAML file can hold, such as a callable, passes."""
    from composer.core import Time

    options = list(_alternatives(hint))
    is_time = any(base is Time for base, _ in options)
    if any(_is_plain(base) and base is not NoneType for base, _ in options):  # objects of a host's are in no file
        options = [option for option in options if _is_plain(option[0])]
    bases = [base for base, _ in options]
    if is_time and isinstance(value, str):
        # A scheduler divides by its times, but for a warm-up.
        check_time(path, value, least=int(path.startswith('scheduler.') and not path.endswith('t_warmup')))
        return value
    base, ranges = next(((base, ranges) for base, ranges in options if _fits(value, base)), (None, ()))
    if base is None:
        time = f'`{path}` must be a time such as 2ep or 500ba, got: {value}'
        raise ConfigError(time if is_time else _wrong_type(path, value, bases))
    for allowed in ranges:
        if value not in allowed:
            raise ConfigError(f'`{path}` must be {allowed}{_or_choices(bases)}, got: {value}')
    if _is_section(base):
        return _built(path, base, value)
    of_each: tuple[Any, ...] = get_args(base) if get_origin(base) in _CONTAINERS else ()
    if get_origin(base) is tuple and ... not in of_each and len(value) != len(of_each):
        raise ConfigError(f'`{path}` must be {len(of_each)} values, got: {value}')
    for each in value if isinstance(value, list) and of_each else ():
        check_value(path, each, of_each[0])
    return value


def check_time(path: str, value: Any, *, least: int = 1) -> None:
    """Refuses what is no time, and one that is too short."""
    from composer.core import TimeUnit, ensure_time

    with must(f'`{path}` must be a time such as 2ep or 500ba', value, ValueError, TypeError, RuntimeError):
        found = ensure_time(value, TimeUnit.EPOCH).value
    if found < least and not 0 < found < 1:
        raise ConfigError(f'`{path}` must be {"longer than nothing" if least else "no negative time"}, got: {value}')


def check_numbers(path: str, value: Any) -> None:
    """Refuses numbers that no program can reckon with, at any depth; ``.inf`` and ``.nan`` are YAML."""
    if isinstance(value, Mapping | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            check_numbers('.'.join(filter(None, (path, str(key)))), each)
    elif isinstance(value, int | float) and not -(2**63) <= value < 2**64:
        shown = value if isinstance(value, float) else f'one of {value.bit_length()} bits'
        raise ConfigError(f'`{path}` must be a finite number of at most 64 bits, got: {shown}')


def _is_section(hint: Any) -> bool:
    """Returns whether an annotation is a section of our own; a host's dataclass may take more than it says."""
    return is_dataclass(hint) and getattr(hint, '__module__', '').startswith('composer_tokacc')


def _alternatives(hint: Any, ranges: Sequence[Range] = ()) -> Iterator[tuple[Any, Sequence[Range]]]:
    """Gives the members of a union, or the annotation itself, each with where its numbers must lie."""
    if get_origin(hint) is Annotated:
        base, *found = get_args(hint)
        yield from _alternatives(base, [each for each in found if isinstance(each, Range)])
    elif get_origin(hint) in (Union, UnionType):
        for option in get_args(hint):
            yield from _alternatives(option, ranges)
    else:
        yield hint, ranges


def _fits(value: Any, base: Any) -> bool:
    if get_origin(base) is Literal:
        # Hosts put choices in capitals into capitals themselves.
        return value in get_args(base) or (isinstance(value, str) and value.upper() in get_args(base))
    if base in (bool, int, float, str, NoneType):  # exactly, as hosts take the text `no` for true
        return type(value) is base or (base is float and type(value) is int)
    container = Mapping if _is_section(base) else _CONTAINERS.get(get_origin(base) or base)
    return container is None or isinstance(value, container)


def _is_plain(base: Any) -> bool:
    """Returns whether a YAML file can hold what an annotation asks for."""
    kinds = (Any, bool, int, float, str, NoneType, Literal, *_CONTAINERS)
    return (get_origin(base) or base) in kinds or _is_section(base)


def _wrong_type(path: str, value: Any, bases: Sequence[Any]) -> str:
    choices = [str(choice) for base in bases if get_origin(base) is Literal for choice in get_args(base)]
    plain = [dict if _is_section(base) else base for base in bases if get_origin(base) is not Literal]
    types = {getattr(get_origin(base) or base, '__name__', str(base)) for base in plain}
    words = {'NoneType': 'null', 'Sequence': 'list', 'dict': 'mapping', 'Mapping': 'mapping'}
    expected = 'of type ' * bool(types) + ' or '.join(sorted(words.get(name, name) for name in types))
    if isinstance(value, str) and choices and types <= {'NoneType'}:
        return unknown_name(f'`{path}`', value, choices)
    if types & {'dict', 'Mapping'} and types <= {'dict', 'Mapping', 'NoneType'} and not choices:
        return f'`{path}` must be a mapping, got: {value}. Leave it out for its defaults'
    is_quoted = isinstance(value, str) and (value[:1].isdigit() or value in ('true', 'false', 'null'))  # '3' is text
    shown = repr(value) if is_quoted else value
    return f'`{path}` must be {(expected + _or_choices(bases)).removeprefix(", or ")}, got: {shown}'


def _or_choices(bases: Sequence[Any]) -> str:
    choices = (choice for base in bases if get_origin(base) is Literal for choice in get_args(base))
    return ''.join(f', or {choice}' for choice in choices)
