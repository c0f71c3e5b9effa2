# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shows samples as the model gets them: what is learned, and how images, videos and audio are cut.

    python -m composer_tokacc.look yamls/llava_json.yaml dataset.path=data.json [key=value ...]

What carries loss stands between >> and <<; a run of one placeholder is written once, with its number. Besides the
config's keys:

    samples=12              how many, spread over the dataset; those with the most and the fewest tokens among them
    eval=true               of the eval set; false
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from composer_tokacc.programs.process import command_line, prepare, while_somebody_reads

if __name__ == '__main__':
    prepare(__doc__)

import torch

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.programs import ConfigError, TrainConfig
from composer_tokacc.programs.errors import refuse
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.sources import source_of

SHOWN_REPEATS = 4
"""Repetitions of one token that are written out: longer runs are placeholders of media."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see ``run_program`` for the exit status."""
    given, overrides = command_line(__doc__).parse_known_args(arguments)
    own = dict(each.split('=', 1) for each in overrides if each.startswith(('samples=', 'eval=')))
    if not own.get('samples', '12').isdecimal() or own.get('eval', 'false') not in ('true', 'false'):
        return refuse(ConfigError('samples', f'must be a number and `eval` true or false, got: {own}'))
    rest = [each for each in overrides if not each.startswith(('samples=', 'eval='))]
    is_eval, count = own.get('eval') == 'true', int(own.get('samples', '12'))
    return run_program(partial(look, count=count, is_eval=is_eval), given.config, rest)


def look(config: TrainConfig, *, count: int = 12, is_eval: bool = False) -> None:
    """Prints the samples."""
    source = source_of(config)
    processor = source.build_processor()
    built = source.build_dataset(processor, is_eval=is_eval)
    if built is None:
        raise ConfigError('dataset.eval', 'must be given for eval=true, got: none')
    dataset, tokenizer = source.by_index(built), getattr(processor, 'tokenizer', processor)
    lengths = source.measure(built, processor).lengths
    # The shortest, the longest, and others evenly between.
    between = [place * (len(lengths) - 1) // max(count - 1, 1) for place in range(count)]
    places = dict.fromkeys([int(lengths.argmin()), int(lengths.argmax()), *between, *range(len(lengths))])
    with while_somebody_reads():
        for index in sorted(list(places)[:count]):
            print(f'\n{described(dataset[index], tokenizer, index)}', flush=True)


def described(sample: Mapping[str, Any], tokenizer: Any, index: int) -> str:
    """Returns what the model gets of a sample, in words."""
    ids, labels = sample['input_ids'][0].tolist(), sample['labels'][0]
    learned = (labels != IGNORE_INDEX).tolist()
    name = (sample.get('sample_ids') or [index])[0]
    of_source = f' of {sample["source"][0]}' if 'source' in sample else ''
    head = f'== sample {name!r}{of_source}: {len(ids)} tokens, {sum(learned)} of them learned'
    media = [
        f'   {key}: {tuple(value.shape)} {str(value.dtype).removeprefix("torch.")}, {_range(value)}'
        for key, value in sample.items()
        if isinstance(value, torch.Tensor) and value.shape[:2] != sample['input_ids'].shape
    ]
    return '\n'.join([head, *media, ''.join(_pieces(ids, learned, tokenizer))])


def _range(value: torch.Tensor) -> str:
    if value.numel() <= 6 or not value.is_floating_point():
        return str(value.flatten()[:12].tolist())
    return f'from {float(value.min()):.2f} to {float(value.max()):.2f}'


def _pieces(ids: Sequence[int], learned: Sequence[bool], tokenizer: Any) -> Iterator[str]:
    for is_learned, some in groupby(zip(ids, learned, strict=True), key=lambda one: one[1]):
        text, kept = '', []
        for token, run in groupby(token for token, _ in some):
            number = len(list(run))
            if number <= SHOWN_REPEATS:
                kept += [token] * number
                continue
            text += tokenizer.decode(kept) + f'[{tokenizer.decode([token])} x {number}]'
            kept = []
        text += tokenizer.decode(kept) if kept else ''
        yield f' >> {text.strip()} << ' if is_learned else text


if __name__ == '__main__':
    sys.exit(main())
