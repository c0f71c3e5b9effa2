# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Says how large a run's microbatches may be and what is gained, without a GPU if need be.

    python -m composer_tokacc.size yamls/digits.yaml [num_ranks=8] [device_memory_gib=80] [key=value ...]

Reads every sample once with the run's own processor (kept for the next time), traces the run's own model without its
memory, and prints a table, YAML lines to paste, and the paths of `size.json` and `size.png`. Besides the config's keys:

    num_ranks=8             ranks of the run; 1
    device_memory_gib=80    memory of a device; what this machine has
    safety=0.92             share of it that may be planned for
    time_steps=true         time a few real steps here, so that the report speaks of seconds; false
    folder=runs/size        where the files go
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from composer.core import DataSpec
from composer.loggers import InMemoryLogger
from composer.utils import reproducibility

from composer_tokacc.data import BadSampleError
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError, TrainConfig, load_config
from composer_tokacc.programs.checks import check_config
from composer_tokacc.programs.errors import refuse, section
from composer_tokacc.programs.parts import build_parts
from composer_tokacc.programs.sources import build_dataset, build_processor, measure_dataset
from composer_tokacc.programs.suggest import device_memory_gib, memory_of_run, suggest_for_run
from composer_tokacc.sizing import MicrobatchTimer, SizingReport, draw_report, fit_cost
from composer_tokacc.train import build_trainer

__all__ = ['main', 'size', 'time_shapes', 'time_steps']

_OWN: dict[str, Any] = {
    'num_ranks': 1,
    'safety': 0.92,
    'time_steps': False,
    'folder': 'runs/size',
}
_TYPES: dict[str, Any] = {
    'num_ranks': (int, 'a whole number'),
    'time_steps': (bool, 'true or false'),
    'folder': (str, 'a path'),
}
_USAGE = 'usage: python -m composer_tokacc.size FILE.yaml [num_ranks=8] [device_memory_gib=80] [key=value ...]'
TIMED_STEPS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; a mistake of the user's ends it with one line and status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ('-h', '--help'):
        print(__doc__ if arguments else _USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    started = time.monotonic()
    try:
        options, overrides = _take_options(arguments[1:])
        folder = Path(options.pop('folder'))
        config = load_config(arguments[0], overrides)
        check_config(config, world_size=options['num_ranks'])
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of torch and transformers, between the lines of the report
            report = size(config, **options)
    except (ConfigError, BadSampleError) as error:
        return refuse(error)
    print(report.text())
    written = _write(report, folder)
    print(f'\nsized in {time.monotonic() - started:.0f} s; written to {written}', flush=True)
    return 0


def size(
    config: TrainConfig,
    *,
    num_ranks: int = 1,
    safety: float = 0.92,
    time_steps: bool = False,
) -> SizingReport:
    """The sizing report of a run; see the module's docstring for the arguments.

    Raises:
        ConfigError: An argument is out of range, or nothing fits.
    """
    reproducibility.seed_all(config.seed)
    processor = build_processor(config)
    dataset = build_dataset(config, processor, held_out=False)
    table = measure_dataset(config, dataset, processor)
    memory = memory_of_run(config, dataset, processor, table)
    gib = config.microbatching.device_memory_gib or _this_device(config)
    suggest = partial(suggest_for_run, config, memory, table, num_ranks=num_ranks, gib=gib, safety=safety)
    with section('microbatching'):
        report = suggest()
    if not time_steps:
        return report
    cost, outside = time_shapes(config, size=report.device_train_microbatch_size, slot_tokens=report.slot_tokens)
    return suggest(measured_cost=cost, seconds_per_step=outside)


def time_steps(
    config: TrainConfig,
    *,
    size: int,
    slot_tokens: int,
    regroup: bool,
    num_steps: int,
    width_multiple: int | None = None,
    change_loader: Callable[[DataSpec], None] | None = None,
) -> MicrobatchTimer:
    """Trains a few steps of a run on this machine and times its microbatches; the weights are thrown away.

    Args:
        config: The run; it stays as it is. Evaluation, checkpoints and loggers are left out.
        size: ``device_train_microbatch_size``.
        slot_tokens: Width of a slot.
        regroup: Whether microbatches may sort rows.
        num_steps: Steps; the first two are not timed.
        width_multiple: Instead of the config's; a slot's width leaves microbatches as wide as their device batch.
        change_loader: Applied to the loader before the run.
    """
    config = copy.deepcopy(config)
    config.microbatching.device_train_microbatch_size = size
    config.microbatching.slot_tokens = slot_tokens
    config.microbatching.regroup = regroup
    config.microbatching.width_multiple = width_multiple or config.microbatching.width_multiple
    config.dataset.pop('eval', None)
    kept = ('precision', 'device', 'parallelism_config', 'dist_timeout')
    config.trainer = {key: value for key, value in config.trainer.items() if key in kept}
    config.trainer.update(max_duration=f'{num_steps}ba', progress_bar=False)
    parts = build_parts(config)
    if change_loader is not None:
        change_loader(parts.train_loader)
    hidden_size = parts.model.model.config.get_text_config().hidden_size
    timer = MicrobatchTimer(BatchLayout.for_model(parts.model).image_token_id, hidden_size)
    trainer = build_trainer(config, parts, InMemoryLogger())
    trainer.state.callbacks.append(timer)
    trainer.fit()
    trainer.close()
    return timer


def time_shapes(config: TrainConfig, *, size: int, slot_tokens: int) -> tuple[CostModel, float]:
    """Times steps with large and small microbatches, trimmed and not: a cost model needs many shapes.

    Returns:
        The fitted cost model, and the seconds of a step outside its microbatches.
    """
    sizes = sorted({max(size // divisor, 1) for divisor in (1, 4, 12)})
    shared: dict[str, Any] = {'slot_tokens': slot_tokens, 'regroup': True, 'num_steps': TIMED_STEPS}
    timers = [
        time_steps(config, size=other, width_multiple=wide, **shared) for other in sizes for wide in (None, slot_tokens)
    ]
    return fit_cost(timers, quadratic=6.0 * timers[0].hidden_size)


def _this_device(config: TrainConfig) -> float:
    if config.trainer.get('device') != 'cpu':
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                '`device_memory_gib` must be given where there is no GPU, got: nothing. For example '
                'device_memory_gib=80'
            )
    return device_memory_gib(config)


def _write(report: SizingReport, folder: Path) -> str:
    """Writes `size.json`, and `size.png` where matplotlib is installed; returns what was written, in words."""
    report.save(folder / 'size.json')
    try:
        draw_report(folder / 'size.png', report)
    except ImportError:
        return f'{folder / "size.json"} (no picture: matplotlib is not installed)'
    return f'{folder / "size.json"} and {folder / "size.png"}'


def _take_options(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The program's own keys, and the config's overrides."""
    options, overrides = dict(_OWN), []
    for argument in arguments:
        key, _, text = argument.partition('=')
        if key == 'device_memory_gib':
            overrides.append(f'microbatching.{argument}')
            continue
        if key not in _OWN:
            overrides.append(argument)
            continue
        value = yaml.safe_load(text)
        expected, words = _TYPES.get(key, ((int, float), 'a number'))
        if not isinstance(value, expected) or (expected is not bool and isinstance(value, bool)):
            raise ConfigError(f'`{key}` must be {words}, got: {text}')
        options[key] = value
    if options['num_ranks'] < 1:  # before the config's batch sizes are divided by it
        raise ConfigError(f'`num_ranks` must be at least 1, got: {options["num_ranks"]}')
    return options, overrides


if __name__ == '__main__':
    sys.exit(main())
