# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Says how large a run's microbatches may be and what is gained, without a GPU if need be.

    python -m composer_tokacc.size yamls/digits.yaml [num_ranks=8] [device_memory_gib=80] [key=value ...]

Reads every sample once with the run's own processor (kept for the next time), traces the run's own model without its
memory, and prints a table, YAML lines to paste, and the paths of `size.json` and `size.png`. Besides the config's keys:

    lengths=table.csv       instead of the data: a line a sample, `tokens` and perhaps `image_tokens`, `loss_tokens`,
                            `vision_patches`
    lengths.mean=150        instead of a table: lognormal lengths of the text, with `lengths.variation=0.7` (deviation
                            over mean), and `lengths.image_tokens=576` for a share `lengths.with_images=0.8` of samples
    num_ranks=8             ranks of the run; 1
    device_memory_gib=80    memory of a device; what this machine has
    safety=0.92             share of it that may be planned for
    time_steps=true         time a few real steps here, so that the report speaks of seconds, and says what a microbatch
                            and its vision encoder cost (`microbatching.cost`); false
    folder=runs/size        where the files go

With `lengths` nothing is asked of the hub if `model.pretrained` is a folder with the config and the processor, or
`model.pretrained=null model.config.model_type=llava` says what the model is.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from composer_tokacc.programs.process import prepare

if __name__ == '__main__':
    prepare(__doc__)

import numpy as np
import torch
from composer.loggers import InMemoryLogger
from composer.utils import reproducibility
from omegaconf import MISSING, OmegaConf
from PIL import Image
from transformers import PretrainedConfig

from composer_tokacc.data import LengthTable, count_patches, patch_size_of
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel
from composer_tokacc.programs import ConfigError, TrainConfig
from composer_tokacc.programs.build import build_parts, build_trainer
from composer_tokacc.programs.errors import local_folder, must, refuse
from composer_tokacc.programs.models import read_config, tokenizer_of
from composer_tokacc.programs.process import command_line, without_warnings
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.schema import Range, merge
from composer_tokacc.programs.sources import source_of
from composer_tokacc.programs.suggest import device_memory_gib, memory_of_run, suggest_for_run
from composer_tokacc.sizing import MicrobatchTimer, SizingReport, draw_report, fit_cost

__all__ = ['KEPT_SETTINGS', 'TIMED_STEPS', 'SizeOptions', 'main', 'size', 'time_shapes', 'time_steps']

TIMED_STEPS = 6
"""Steps that are timed of each size and width."""
KEPT_SETTINGS = ('precision', 'device', 'parallelism_config', 'dist_timeout')
"""Of the Trainer, in timed steps."""
CSV_COLUMNS = {'tokens': 'lengths', **{name: name for name in ('image_tokens', 'loss_tokens', 'vision_patches')}}
LONGEST = 2**24
"""Tokens of a sample, far above what any model takes; at a hundred times as many the simulation fills the memory."""
CLASS_TOKENS = {'clip_vision_model': 1, 'siglip_vision_model': 0}
"""Features of encoders with one size of image beside those of its patches."""
STAND_IN_SIDES = (336, 1344)
"""Pixels of a small and a large image, which differ in tokens wherever the size decides."""


@dataclass(kw_only=True)
class SizeOptions:
    """The program's own keys; see the module's docstring."""

    num_ranks: int = 1
    safety: float = 0.92
    time_steps: bool = False
    folder: str = 'runs/size'
    lengths: Any = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see ``run_program`` for the exit status."""
    given, overrides = command_line(__doc__).parse_known_args(arguments)
    keys = {each: re.split('[.=]', each)[0] for each in overrides}
    mine = [each for each, key in keys.items() if key in {option.name for option in fields(SizeOptions)}]
    try:
        options = merge(SizeOptions, OmegaConf.from_dotlist(mine))
        if options.num_ranks < 1:  # before the config's batch sizes are divided by it
            raise ConfigError(f'`num_ranks` must be at least 1, got: {options.num_ranks}')
        if options.lengths is None and 'lengths' in keys.values():
            raise ConfigError('`lengths` must be a CSV file, or figures such as lengths.mean=150, got: nothing')
    except ConfigError as error:
        return refuse(error)
    rest = [each for each in overrides if each not in mine]
    rest = [f'microbatching.{each}' if keys[each] == 'device_memory_gib' else each for each in rest]
    if options.lengths is not None and not any(each.startswith('dataset.path=') for each in rest):
        rest.append('dataset.path=lengths')  # a name for what is not read
    return run_program(partial(_report, options), given.config, rest, num_ranks=options.num_ranks)


def _report(options: SizeOptions, config: TrainConfig) -> None:
    """Prints the report, and writes `size.json` and, where matplotlib is installed, `size.png`."""
    started, folder = time.monotonic(), local_folder('`folder`', options.folder)
    with must('`folder` must be a folder that can be written', folder, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        is_again = (folder / 'size.json').exists()
        tempfile.TemporaryFile(dir=folder).close()
    with without_warnings():  # between the lines of the report
        report = size(config, options)
    print(report.text())
    report.save(folder / 'size.json')
    picture = f' and {folder / "size.png"}'
    try:
        draw_report(folder / 'size.png', report)
    except ImportError:
        picture = ' (no picture: matplotlib is not installed)'
    before = ', over those of the `size` before (folder=... keeps both)' * is_again
    written = f'{folder / "size.json"}{picture}{before}'
    print(f'\nsized in {time.monotonic() - started:.0f} s; written to {written}', flush=True)


def size(config: TrainConfig, options: SizeOptions) -> SizingReport:
    """Returns the sizing report of a run."""
    reproducibility.seed_all(config.seed)
    source = source_of(config)
    if options.lengths is not None:
        if options.time_steps:
            raise ConfigError('`time_steps` needs the data itself, got: `lengths`. Leave one of them out')
        table = lengths_of(options.lengths, longest=config.dataset.get('max_length'), seed=config.seed)
        processor = None if config.model.pretrained is None else source.build_processor()
        dataset = StandIns(table, processor, read_config(config.model.pretrained, config.model.config, processor))
    else:
        processor = source.build_processor()
        dataset = source.build_dataset(processor)
        table = source.measure(dataset, processor)
    memory = memory_of_run(config, dataset, processor, table)
    gib = config.microbatching.device_memory_gib
    if gib is None and config.trainer.get('device') != 'cpu' and not torch.cuda.is_available():
        raise ConfigError('`device_memory_gib` must be given where there is no GPU, got: nothing. For example 80')
    stated = {'num_ranks': options.num_ranks, 'gib': gib or device_memory_gib(config), 'safety': options.safety}
    suggest = partial(suggest_for_run, config, memory, table, **stated)
    report = suggest()
    if not options.time_steps:
        return report
    cost, outside = time_shapes(config, size=report.device_train_microbatch_size, slot_tokens=report.slot_tokens)
    return suggest(measured_cost=cost, seconds_per_step=outside)


def time_steps(
    config: TrainConfig, *, size: int, slot_tokens: int, num_steps: int, width_multiple: int | None = None
) -> MicrobatchTimer:
    """Trains a few steps of a run on this machine and times its microbatches; the weights are thrown away.

    Evaluation, checkpoints and loggers are left out; the first two steps are not timed. A `width_multiple` of a slot's
    width leaves microbatches as wide as their device batch.
    """
    own = config.microbatching
    kept = {name: config.trainer[name] for name in KEPT_SETTINGS if name in config.trainer}
    config = replace(
        config,
        microbatching=replace(
            own, device_train_microbatch_size=size, slot_tokens=slot_tokens, regroup=True,
            width_multiple=width_multiple or own.width_multiple,
        ),
        dataset={name: value for name, value in config.dataset.items() if name != 'eval'},
        trainer={**kept, 'max_duration': f'{num_steps}ba', 'progress_bar': False},
    )  # fmt: skip
    parts = build_parts(config)
    model = parts.model.model.config
    patches = partial(count_patches, patch_size=patch_size_of(model, parts.processor))
    timer = MicrobatchTimer(BatchLayout.for_model(parts.model), model.get_text_config().hidden_size, patches=patches)
    trainer = build_trainer(config, parts, InMemoryLogger())
    trainer.state.callbacks.append(timer)
    trainer.fit()
    trainer.close()
    return timer


def time_shapes(config: TrainConfig, *, size: int, slot_tokens: int) -> tuple[CostModel, float]:
    """Returns the cost model of large and small microbatches, trimmed and not, and the seconds of a step besides."""
    sizes = sorted({max(size // divisor, 1) for divisor in (1, 4, 12)})
    shared: dict[str, Any] = {'slot_tokens': slot_tokens, 'num_steps': TIMED_STEPS}
    shapes = product(sizes, (None, slot_tokens))
    timers = [time_steps(config, size=other, width_multiple=wide, **shared) for other, wide in shapes]
    return fit_cost(timers, quadratic=6.0 * timers[0].hidden_size)


@dataclass(kw_only=True)
class LengthDistribution:
    """What is known of data that is not at hand: lognormal lengths of the text, and a share of samples with images."""

    mean: Annotated[float, Range(least=1, most=LONGEST)] = MISSING
    """Tokens of a sample beside those of its images, on average."""
    variation: Annotated[float, Range(least=0, below=100)] = 0.7
    """Standard deviation of them over their mean."""
    image_tokens: Annotated[int, Range(least=0, most=LONGEST)] = 0
    """Tokens of the images of a sample that has any."""
    with_images: Annotated[float, Range(least=0, most=1)] = 1.0
    """Share of the samples that have."""
    longest: Annotated[int, Range(least=1, most=LONGEST)] | None = None
    """Longer samples are as long as this; null: ``dataset.max_length``."""
    samples: Annotated[int, Range(least=1, most=10**7)] = 20_000
    """Samples to draw."""

    def draw(self, *, longest: int | None, seed: int) -> LengthTable:
        """Returns a table of so many samples."""
        longest = (longest or LONGEST) if self.longest is None else self.longest
        if self.image_tokens >= longest:
            found = f'{self.image_tokens} of {longest}'
            raise ConfigError(f'`lengths.image_tokens` must be below the longest, got: {found}')
        generator = np.random.default_rng(seed)
        spread = math.sqrt(math.log1p(self.variation**2))
        text = generator.lognormal(math.log(self.mean) - spread**2 / 2, spread, self.samples)
        images = np.where(generator.random(self.samples) < self.with_images, self.image_tokens, 0)
        lengths = np.clip(np.rint(text), 1, longest - images) + images
        lengths, images, unknown = (table.astype(np.int32) for table in (lengths, images, np.zeros(self.samples)))
        return LengthTable(lengths=lengths, image_tokens=images, loss_tokens=unknown, vision_patches=unknown)


def lengths_of(given: Any, *, longest: int | None, seed: int) -> LengthTable:
    """Returns the table of a CSV file, or one drawn from the figures of a :class:`LengthDistribution`."""
    if not isinstance(given, Mapping):
        return read_lengths(str(given))
    return merge(LengthDistribution, dict(given), path='lengths').draw(longest=longest, seed=seed)


def read_lengths(path: str) -> LengthTable:
    """Reads one line a sample: ``tokens``, and perhaps ``image_tokens``, ``loss_tokens``, ``vision_patches``."""
    if not Path(path).is_file():  # a pipe would be waited for
        raise ConfigError(f'`lengths` must be a CSV file, plain or .gz, got: {path}')
    try:
        opener = gzip.open if path.endswith('.gz') else open
        with opener(path, 'rt', encoding='utf-8-sig') as file:
            lines = csv.reader(file)
            names = [name.strip() for name in next(lines, [])]
            if 'tokens' not in names or not set(names) <= CSV_COLUMNS.keys() or len(names) > len(set(names)):
                raise ConfigError(
                    f'`lengths` must have the column tokens once, and perhaps {", ".join(list(CSV_COLUMNS)[1:])}, got: '
                    f'{", ".join(names)} in {path}. Rename or remove the others'
                )
            rows = [_row(path, lines.line_num, line, len(names)) for line in lines if line]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f'`lengths` must be a CSV file, plain or .gz, got: {path} ({error})') from error
    if not rows:
        raise ConfigError(f'`lengths` must hold at least one sample, got: none in {path}')
    columns = dict(zip((CSV_COLUMNS[name] for name in names), np.array(rows, dtype=np.int32).T.copy(), strict=True))
    for name in ('image_tokens', 'loss_tokens'):
        if name in columns and (over := columns[name] > columns['lengths']).any():
            row = int(over.argmax())
            raise ConfigError(
                f'`lengths` must have at most as many {name} as tokens, got: {columns[name][row]} of '
                f'{columns["lengths"][row]} in row {row + 1} of {path}'
            )
    return LengthTable(**{**dict.fromkeys(CSV_COLUMNS.values(), np.zeros(len(rows), dtype=np.int32)), **columns})


def _row(path: str, number: int, line: list[str], num_columns: int) -> list[int]:
    try:
        values = [int(value) for value in line]
        if len(values) == num_columns and min(values) >= 0 and max(values) <= LONGEST:
            return values
    except ValueError:
        pass
    found = f'{",".join(line)} (line {number} of {path})'
    raise ConfigError(f'`lengths` must have {num_columns} whole numbers up to {LONGEST} a line, got: {found}')


class StandIns:
    """Shape-only samples for the memory model, which must see no more than an image or none, small or large.

    Without a processor the model's config must tell what an image is.
    """

    def __init__(self, table: LengthTable, processor: Any, config: PretrainedConfig) -> None:
        self.image_tokens, self.processor = table.image_tokens, processor
        self._image: dict[str, Any] | None = None
        if processor is None and table.image_tokens.any():
            self._image = _image_of(config)
            if self._image is None:
                found = f'a `model.config` of {config.model_type}. Name a checkpoint; its folder needs no weights'
                raise ConfigError(f'`lengths` with images of any size needs `model.pretrained`, got: {found}')

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a sample with an image where the table has one; the large image is that of the row with most."""
        has_image = bool(self.image_tokens[index])
        if self.processor is None:
            ids = torch.ones(1, 1, dtype=torch.long)
            sample = self._image if has_image and self._image else {'input_ids': ids, 'attention_mask': ids}
        else:
            sample = self._processed(index)
        return {**sample, 'labels': sample['input_ids'].clone(), 'num_images': [int(has_image)]}

    def _processed(self, index: int) -> dict[str, Any]:
        images, content = [], [{'type': 'text', 'text': 'a'}]
        if self.image_tokens[index]:
            side = STAND_IN_SIDES[int(self.image_tokens[index] == self.image_tokens.max())]
            images, content = [Image.new('RGB', (side, side))], [{'type': 'image'}, *content]
        text = self.processor.apply_chat_template([{'role': 'user', 'content': content}], tokenize=False)
        encode = self.processor if images else tokenizer_of(self.processor)
        return dict(encode(text=text, return_tensors='pt', **({'images': images} if images else {})))


def _image_of(config: Any) -> dict[str, Any] | None:
    """Returns a sample of one image, of LLaVA with an encoder of one size; None: the config does not tell.

    What an encoder of any size, or of tiles, takes for its smallest image says nothing of real ones.
    """
    vision: Any = getattr(config, 'vision_config', None)
    token = BatchLayout.for_model(config).image_token_id
    if config.model_type != 'llava' or vision.model_type not in CLASS_TOKENS or token is None:
        return None
    drops_first = config.vision_feature_select_strategy == 'default'
    count = (vision.image_size // vision.patch_size) ** 2 + CLASS_TOKENS[vision.model_type] - drops_first
    ids = torch.full((1, count), token)
    pixels = torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'pixel_values': pixels}


if __name__ == '__main__':
    sys.exit(main())
