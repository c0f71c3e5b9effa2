# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Shows samples as the model gets them: text, the part of it that is learned, and shapes of images, videos and audio.

    python -m composer_tokacc.look yamls/llava_json.yaml dataset.path=data.json [key=value ...]

Tokens that carry loss stand between >> and <<. A long run of one token, such as a placeholder, is written once, with
the number of repetitions. The program has these keys in addition to the keys of the config:

    samples=12              number of samples, 12 by default: one of each combination of modalities, the ones with the
                            most and the fewest tokens, and others spread over the dataset
    eval=true               shows the eval set instead of the training set
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from composer_tokacc.programs.process import command_line, prepare, while_somebody_reads

if __name__ == '__main__':
    prepare(__doc__)  # before the imports that take seconds

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES
from composer_tokacc.programs import ConfigError, TrainConfig
from composer_tokacc.programs.errors import refuse
from composer_tokacc.programs.models import tokenizer_of
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.schema import NotNegative, read_options
from composer_tokacc.programs.sources import source_of

MAX_WRITTEN_OUT = 4
"""Most repetitions of one token that are written out. Longer runs are placeholders of media."""
MAX_INTEGERS = 12
"""Most integers of a tensor that are written out, such as the sizes of images."""
MAX_FLOATS = 6
"""A tensor of more floats is not written out. It holds pixels or audio, and only their range is shown."""
MAX_READ_FOR_MODALITIES = 64
"""Most samples of a dataset that are read to find one of each combination of modalities, if it does not tell them."""


@dataclass(kw_only=True)
class LookOptions:
    """The program's own keys; see the module's docstring."""

    samples: NotNegative = 12
    eval: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. See ``run_program`` for the exit status."""
    parsed, overrides = command_line(__doc__).parse_known_args(arguments)
    try:
        options, config_overrides = read_options(LookOptions, overrides)
    except ConfigError as error:
        return refuse(error)
    return run_program(partial(look, options), parsed.config, config_overrides)


def look(options: LookOptions, config: TrainConfig) -> None:
    """Prints samples of the training set or of the eval set."""
    source = source_of(config)
    dataset = source.eval_dataset if options.eval else source.train_dataset
    if dataset is None:
        raise ConfigError('dataset.eval', 'must be given for eval=true, got: none')
    lengths = source.measure(dataset).lengths
    samples = source.samples_of_all_ranks(dataset)  # a streamed dataset itself has only the samples of this rank
    with while_somebody_reads():  # `| head` may close the pipe
        for index in choose_samples(samples, lengths, options.samples):
            print(f'\n{describe(samples[index], tokenizer_of(source.processor), index)}', flush=True)


def choose_samples(dataset: Any, lengths: np.ndarray, count: int) -> list[int]:
    """Returns the indices of the samples to show, in ascending order.

    Args:
        dataset: All samples; ``dataset[index]`` is a batch of one row.
        lengths: Tokens of each sample, ``(n,)``.
        count: Number of samples to show.
    """
    num_samples = len(lengths)
    evenly_spread = np.linspace(0, num_samples - 1, count).astype(int)
    by_priority = _one_of_each_combination(dataset)
    by_priority.append(int(lengths.argmin()))
    by_priority.append(int(lengths.argmax()))
    by_priority.extend(evenly_spread.tolist())
    # An index may be in the list twice. Then samples from the start of the dataset fill up the number.
    by_priority.extend(range(num_samples))
    distinct = list(dict.fromkeys(by_priority))
    return sorted(distinct[:count])


def _one_of_each_combination(dataset: Any) -> list[int]:
    """Returns the index of one sample of each combination of modalities. Those with the most modalities come first."""
    first_indices: dict[frozenset[str], int] = {}
    parts: list[Any] = [dataset]
    if isinstance(dataset, ConcatDataset):
        parts = list(dataset.datasets)
    start = 0  # of the part
    for part in parts:
        num_samples = len(part)
        if hasattr(part, 'modalities'):
            for index in range(num_samples):
                first_indices.setdefault(part.modalities(index), start + index)
        else:
            evenly_spread = np.linspace(0, num_samples - 1, min(num_samples, MAX_READ_FOR_MODALITIES)).astype(int)
            for index in evenly_spread.tolist():
                first_indices.setdefault(_modalities_of(part[index]), start + index)
        start += num_samples
    combinations = sorted(first_indices, key=len, reverse=True)
    return [first_indices[combination] for combination in combinations]


def _modalities_of(sample: Mapping[str, Any]) -> frozenset[str]:
    """Returns the modalities of a sample's media."""
    modalities = set()
    for modality in MODALITIES:
        items_per_row = sample.get(f'num_{modality}s', [0])
        if items_per_row[0]:
            modalities.add(modality)
    return frozenset(modalities)


def describe(sample: Mapping[str, Any], tokenizer: Any, index: int) -> str:
    """Returns a sample as text: its number of tokens, the shapes and values of its tensors, and its decoded tokens.

    Args:
        sample: A batch of one row.
        tokenizer: The tokenizer that made its ids.
        index: Names the sample if it has no ``sample_ids``.
    """
    ids = sample['input_ids'][0].tolist()
    has_loss = (sample['labels'][0] != IGNORE_INDEX).tolist()
    sample_ids = sample.get('sample_ids') or [index]
    name = repr(sample_ids[0])
    if 'source' in sample:
        name += f' of {sample["source"][0]}'
    lines = [f'== sample {name}: {len(ids)} tokens, {sum(has_loss)} of them learned']
    text_shape = sample['input_ids'].shape
    for key, value in sample.items():
        # Tensors with an entry for each token, such as the attention mask, are left out. The text shows the tokens.
        if isinstance(value, torch.Tensor) and value.shape[:2] != text_shape:
            data_type = str(value.dtype).removeprefix('torch.')
            lines.append(f'   {key}: {tuple(value.shape)} {data_type}, {_describe_values(value)}')
    lines.append(''.join(_marked_pieces(ids, has_loss, tokenizer)))
    return '\n'.join(lines)


def _describe_values(tensor: torch.Tensor) -> str:
    """Returns the values of a tensor as text: the range of many floats, otherwise the values themselves.

    Of many integers, only the first ones are written.
    """
    if tensor.is_floating_point() and tensor.numel() > MAX_FLOATS:
        return f'from {float(tensor.min()):.2f} to {float(tensor.max()):.2f}'
    return str(tensor.flatten()[:MAX_INTEGERS].tolist())


def _marked_pieces(ids: Sequence[int], has_loss: Sequence[bool], tokenizer: Any) -> Iterator[str]:
    """Splits the tokens where loss starts or ends, and yields the text of each part, marked if it carries loss."""
    start = 0
    for is_learned, run in groupby(has_loss):
        end = start + len(list(run))
        text = _decode(ids[start:end], tokenizer)
        yield f' >> {text.strip()} << ' if is_learned else text
        start = end


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    """Decodes tokens, and writes a long run of one token as ``[<image> x 576]``."""
    text = ''
    pending: list[int] = []  # not decoded yet; all at once, because a character may have several tokens
    for token, repetitions in groupby(ids):
        count = len(list(repetitions))
        if count <= MAX_WRITTEN_OUT:
            pending.extend([token] * count)
        else:
            text += tokenizer.decode(pending)
            text += f'[{tokenizer.decode([token])} x {count}]'
            pending = []
    return text + tokenizer.decode(pending)


if __name__ == '__main__':
    sys.exit(main())
