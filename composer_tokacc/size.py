# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Computes how large a run's microbatches may be, and how much faster than stock Composer it gets. Needs no GPU.

    python -m composer_tokacc.size yamls/digits.yaml [num_ranks=8] [device_memory_gib=80] [key=value ...]

Measures every sample once with the run's own processor (the lengths are kept for the next time), and traces the run's
own model without allocating its memory. Prints a table, YAML lines to paste, and the paths of `size.json` and
`size.png`. The program has these keys in addition to the keys of the config:

    lengths=table.csv       instead of the data: a line for each sample, with a column `tokens` and perhaps
                            `image_tokens`, `loss_tokens` and `vision_patches`
    lengths.mean=150        instead of a table: lognormal lengths of the text with this mean
    lengths.variation=0.7   their deviation over their mean (default: 0.7)
    lengths.image_tokens=64 tokens of the images of a sample that has images (default: 0)
    lengths.with_images=0.8 share of the samples that have images (default: 1)
    num_ranks=8             ranks of the run (default: 1)
    device_memory_gib=80    memory of a device (default: that of this machine). Must be given on a machine without a
                            GPU, unless the config has `trainer.device: cpu`
    safety=0.92             share of this memory that the plan may use (default: 0.92)
    time_steps=true         times a few real steps on this machine. Then the report has seconds, and its YAML lines have
                            the cost of a microbatch on this machine (`microbatching.cost`)
    folder=runs/size        folder of the files (default: runs/size)

With `lengths` the Hugging Face hub is not needed if `model.pretrained` is a folder with the config and the processor,
or if `model.pretrained=null model.config.model_type=llava` names a fresh model.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

from composer_tokacc.programs.process import command_line, prepare, without_warnings

if __name__ == '__main__':
    prepare(__doc__)  # before the imports that take seconds

import torch
from composer.loggers import InMemoryLogger
from composer.utils import reproducibility
from pydantic import Field

from composer_tokacc.data import LengthTable, count_patches, patch_size_of
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError, TrainConfig
from composer_tokacc.programs.build import build_parts, build_trainer
from composer_tokacc.programs.config_checks import check_folder
from composer_tokacc.programs.devices import device_memory_gib
from composer_tokacc.programs.errors import local_folder, refuse
from composer_tokacc.programs.host_types import Processor, SampleDataset
from composer_tokacc.programs.length_tables import MadeUpSamples, lengths_of
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.schema import Count, read_options, without
from composer_tokacc.programs.sources import source_of
from composer_tokacc.programs.suggest import suggest_for_run
from composer_tokacc.programs.traces import memory_of_run
from composer_tokacc.sizing import MicrobatchTimer, SizingReport, draw_report, fit_cost
from composer_tokacc.sizing.suggestion import DEFAULT_SAFETY

__all__ = ['KEPT_SETTINGS', 'TIMED_STEPS', 'SizeOptions', 'main', 'size', 'time_shapes', 'time_steps']

TIMED_STEPS = 6
"""Steps that are trained with each size and width. The first two are not timed."""
KEPT_SETTINGS = ('precision', 'device', 'parallelism_config', 'dist_timeout')
"""Arguments of the Trainer that change the time of a step. Timed steps keep only these."""
SIZE_DIVISORS = (1, 4, 12)
"""Microbatches of the planned size, divided by these, are timed. The small ones show the cost of starting a
microbatch."""


@dataclass(kw_only=True)
class SizeOptions:
    """The program's own keys; see the module's docstring. For ``device_memory_gib`` see ``main``."""

    num_ranks: Count = 1
    safety: Annotated[float, Field(gt=0, le=1)] = DEFAULT_SAFETY
    time_steps: bool = False
    folder: str = 'runs/size'
    lengths: Any = None
    """Path of a table, or the figures of a distribution, such as ``{'mean': 150}``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see ``run_program`` for the exit status.

    Args:
        arguments: The YAML file, then ``key=value`` overrides; None takes them from the command line.
    """
    parsed, overrides = command_line(__doc__).parse_known_args(arguments)
    # This program has the short name `device_memory_gib` for a key of the config.
    overrides = [re.sub(r'^device_memory_gib\b', 'microbatching.device_memory_gib', text) for text in overrides]
    try:
        options, config_overrides = read_options(SizeOptions, overrides)
        # The argument `lengths=`, without a value, reads as None. Then the program would measure the data.
        if options.lengths is None and 'lengths=' in overrides:
            raise ConfigError('lengths', 'must be a CSV file, or figures such as lengths.mean=150, got: nothing')
    except ConfigError as error:
        return refuse(error)
    return run_program(
        partial(_report, options),
        parsed.config,
        config_overrides,
        num_ranks=options.num_ranks,
        reads_data=options.lengths is None,
    )


def _report(options: SizeOptions, config: TrainConfig) -> None:
    """Prints the report, and writes `size.json` and, if matplotlib is installed, `size.png`."""
    started = time.monotonic()
    folder = local_folder('folder', options.folder)
    # Refuses a folder that cannot be written now, and not after minutes of work.
    check_folder('folder', folder, ('size.json', 'size.png'))
    folder.mkdir(parents=True, exist_ok=True)
    with without_warnings():  # they would be mixed with the report
        report = size(config, options)
    print(report.text())
    report.save(folder / 'size.json')
    written = str(folder / 'size.json')
    try:
        draw_report(folder / 'size.png', report)
        written += f' and {folder / "size.png"}'
    except ImportError:
        written += ' (no picture: matplotlib is not installed)'
    print(f'\nsized in {time.monotonic() - started:.0f} s; written to {written}', flush=True)


def size(config: TrainConfig, options: SizeOptions) -> SizingReport:
    """Returns the sizing report of a run. With ``time_steps`` its costs and seconds are measured on this machine."""
    reproducibility.seed_all(config.seed)
    needs_gpu = config.trainer.get('device') != 'cpu' and config.microbatching.device_memory_gib is None
    if needs_gpu and not torch.cuda.is_available():
        raise ConfigError('device_memory_gib', 'must be given on a machine without a GPU. For example 80')
    if options.lengths is not None and options.time_steps:
        raise ConfigError('time_steps', 'needs the data itself, got: `lengths`. Leave one of them out')
    data = _data_of(config, options)
    memory = memory_of_run(config, data.dataset, data.processor, data.table)
    # Called twice: with the default costs, and then with the measured ones.
    suggest = partial(
        suggest_for_run,
        config,
        memory,
        data.table,
        num_ranks=options.num_ranks,
        gib=device_memory_gib(config),
        safety=options.safety,
    )
    report = suggest()
    if not options.time_steps:
        return report
    measured_cost, seconds_outside = time_shapes(
        config, size=report.device_train_microbatch_size, slot_tokens=report.slot_tokens
    )
    return suggest(measured_cost=measured_cost, seconds_per_step=seconds_outside)


class _SizedData(NamedTuple):
    """The samples that a run is sized with."""

    dataset: SampleDataset
    processor: Processor | None
    table: LengthTable
    """Sizes of the samples."""


def _data_of(config: TrainConfig, options: SizeOptions) -> _SizedData:
    """Returns the training data, or with ``lengths`` made-up samples that have these lengths."""
    source = source_of(config)
    if options.lengths is None:
        return _SizedData(source.train_dataset, source.processor, source.train_table)
    table = lengths_of(options.lengths, max_length=config.dataset.get('max_length'), seed=config.seed)
    processor = None  # the made-up samples of a fresh model need none
    if config.model.pretrained is not None:
        processor = source.processor
    dataset = MadeUpSamples(table, processor, source.model_config(processor))
    return _SizedData(dataset, processor, table)


def time_steps(
    config: TrainConfig,
    *,
    size: int,
    slot_tokens: int,
    num_steps: int,
    width_multiple: int | None = None,
) -> MicrobatchTimer:
    """Trains a few steps of a run on this machine and times its microbatches. The weights are thrown away.

    Evaluation, checkpoints and loggers are left out, and the first two steps are not timed.

    Args:
        config: The run.
        size: Size of a microbatch, in rows of ``slot_tokens``.
        slot_tokens: Width of such a row in tokens.
        num_steps: Steps to train.
        width_multiple: Widths are rounded up to a multiple of this number. If it is equal to ``slot_tokens``, every row
            gets the full width. None: the number of the config.
    """
    microbatching = replace(
        config.microbatching,
        device_train_microbatch_size=size,
        slot_tokens=slot_tokens,
        regroup=True,
        packing=False,  # a packed microbatch would be fitted as a single row, although its documents are short
        width_multiple=width_multiple or config.microbatching.width_multiple,
    )
    trainer_arguments = {name: config.trainer[name] for name in KEPT_SETTINGS if name in config.trainer}
    trainer_arguments |= {'max_duration': f'{num_steps}ba', 'progress_bar': False}
    config = replace(
        config, microbatching=microbatching, dataset=without(config.dataset, 'eval'), trainer=trainer_arguments
    )
    parts = build_parts(config)
    model_config = parts.model.model.config
    timer = MicrobatchTimer(
        BatchLayout.for_model(parts.model),
        model_config.get_text_config().hidden_size,
        patches=partial(count_patches, patch_size=patch_size_of(model_config, parts.source.processor)),
    )
    trainer = build_trainer(config, parts, InMemoryLogger())
    trainer.state.callbacks.append(timer)
    trainer.fit()
    trainer.close()
    return timer


def time_shapes(
    config: TrainConfig,
    *,
    size: int,
    slot_tokens: int,
) -> tuple[CostModel, float]:
    """Returns the cost model of a microbatch, and the seconds of a step outside of its microbatches.

    Microbatches of several sizes are timed, with and without trimming. ``size`` is the largest one, see
    :func:`time_steps`.
    """
    timers = []
    for timed_size in sorted({max(size // divisor, 1) for divisor in SIZE_DIVISORS}):
        for width_multiple in (None, slot_tokens):  # trimmed, and at full width
            timer = time_steps(
                config,
                size=timed_size,
                slot_tokens=slot_tokens,
                num_steps=TIMED_STEPS,
                width_multiple=width_multiple,
            )
            timers.append(timer)
    # At a width of six times the hidden size, attention costs as much as the dense layers; see fit_cost().
    return fit_cost(timers, quadratic=6.0 * timers[0].hidden_size)


if __name__ == '__main__':
    sys.exit(main())
