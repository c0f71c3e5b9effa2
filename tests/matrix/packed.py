# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tries packed rows by family, attention and release of transformers. Writes the table of docs/packing.md.

    python -m tests.matrix.packed [--site DIR ...]

Each ``--site`` is a folder with another release of transformers (``pip install --target DIR --no-deps
'transformers==4.57.*'``, and its huggingface_hub and tokenizers). It is tried in its own process (``--lines``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.record import fill_page, table
from tests.matrix.harness import plain_gradients, quiet
from tests.matrix.subjects import SUBJECTS, Subject, text_subject
from tests.support.training import Gradients, fit, in_double, relative_error, tensors_in

__all__ = ['FAMILIES', 'cell']

KERNELS = ('sdpa', 'eager')
NUM_BATCHES = 4
TOLERANCE = 1e-6
MOST_TIMES_ROUND_OFF = 1.2
"""Packed rows are also exact if their error is below this number times the error of padded rows."""
PAGE = Path(__file__).parents[2] / 'docs' / 'packing.md'

# Families that the general matrix does not have: sinks, a convolution, a gated delta rule.
_OTHERS = [
    text_subject('gpt_oss', sliding_window=4),
    text_subject('lfm2', layer_types=['conv', 'full_attention']),
    text_subject('qwen3_next', layer_types=['linear_attention', 'full_attention']),
]
_NAMES = ['llama', 'mistral', 'gemma2', 'gpt2', 'qwen3_moe', 'gpt_oss']
_NAMES += ['llava', 'llava_next', 'idefics3', 'internvl', 'gemma3', 'paligemma']
_NAMES += ['qwen2_vl', 'qwen2_vl_video', 'qwen2_5_vl', 'qwen3_vl', 'lfm2', 'qwen3_next', 'mamba', 'bloom', 'gpt_neo']
_SUBJECTS = SUBJECTS | {subject.name: subject for subject in _OTHERS}
FAMILIES: dict[str, Subject] = {name: _SUBJECTS[name] for name in _NAMES}


def cell(
    name: str,
    kernel: str,
    seeds: Iterable[int] = range(NUM_BATCHES),
    layouts: Sequence[str] = ('packed', 'padded'),
) -> dict[str, Any]:
    """Tries some batches of a family. Returns ``'exact'`` or ``'wrong'`` with the largest errors, or ``'refused'``.

    The errors are those of the gradients of packed rows and of padded rows in float32. The reference is in float64:
    each row by itself, without padding, weighted by its tokens. Padded rows show how large round-off is. Without them
    packed rows must be exact to :data:`TOLERANCE`.
    """
    subject = FAMILIES[name]
    model = subject.model('large')
    model.model.set_attn_implementation(kernel)
    errors: dict[str, list[float]] = {'packed': [], 'padded': []}
    for seed in seeds:
        batch = subject.batch(seed, side='right')
        microbatch_size = 1 + random.Random(f'{name} {seed}').randrange(3)
        expected = _reference(model, subject, seed)
        for layout in layouts:
            is_packed = layout == 'packed'
            try:
                with quiet():
                    recorder = fit(model, batch, packing=is_packed, microbatch_size=microbatch_size)
            except RuntimeError as error:
                return {'kind': 'refused', 'reason': str(error)}
            error = relative_error(recorder.gradients, expected)
            errors[layout].append(error)

    packed_error = _largest(errors['packed'])
    padded_error = _largest(errors['padded'])
    limit = max(TOLERANCE, MOST_TIMES_ROUND_OFF * padded_error)
    kind = 'exact' if packed_error < limit else 'wrong'
    return {'kind': kind, 'packed': packed_error, 'padded': padded_error}


def _largest(errors: Sequence[float]) -> float:
    """Returns the largest error, or 0 without errors. NaN counts as the largest one, which `max` may overlook."""
    if any(map(math.isnan, errors)):
        return math.nan
    return max(errors, default=0.0)


def _reference(model: Any, subject: Subject, seed: int) -> Gradients:
    """Returns the gradients of the mean over all tokens. Each row is computed by itself, without padding."""
    model = in_double(model)
    rows = subject.rows(seed)
    tokens_of_rows = [int((row['labels'][:, 1:] != -100).sum()) for row in rows]
    num_tokens = sum(tokens_of_rows)
    total: Gradients = {}
    for row, tokens_of_row in zip(rows, tokens_of_rows, strict=True):
        if tokens_of_row == 0:
            continue
        share_of_row = tokens_of_row / num_tokens
        one_row_batch = subject.collate([row], 0, side='right')
        gradients = plain_gradients(model, tensors_in(one_row_batch, torch.float64))
        for name, gradient in gradients.items():
            total[name] = total.get(name, 0.0) + gradient * share_of_row
    return total


def tried() -> Iterator[dict[str, Any]]:
    """Yields the cells of all families with the transformers of this process."""
    major, minor, *_ = transformers.__version__.split('.')
    release = f'{major}.{minor}'
    for name in FAMILIES:
        for kernel in KERNELS:
            try:
                outcome = cell(name, kernel)
            except (ValueError, AttributeError, TypeError) as error:
                first_sentence, *_ = str(error).split('. ')  # the others of Transformers tell how to report it
                outcome = {'kind': 'not there', 'reason': f'{type(error).__name__}: {first_sentence}'}
            yield {'family': name, 'column': f'{release} {kernel}', **outcome}


def tried_with(site: str) -> list[dict[str, Any]]:
    """Returns the same cells with the transformers of a folder."""
    paths = [site, str(PAGE.parents[1])]
    if os.environ.get('PYTHONPATH'):
        paths.append(os.environ['PYTHONPATH'])
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths)}
    command = [sys.executable, '-m', 'tests.matrix.packed', '--lines']
    process = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)

    results = []
    for line in process.stdout.splitlines():
        if line.startswith('{'):
            results.append(json.loads(line))
    return results


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Returns the table, families by release and attention. A letter refers to the reason of a refusal below."""
    columns = list(dict.fromkeys(result['column'] for result in results))
    cells: dict[str, dict[str, str]] = {}  # by family and column
    reasons: dict[str, str] = {}  # by the reason without its numbers
    for result in results:
        if 'reason' in result:
            key = _without_numbers(result['reason'])
            text = result['reason'].replace('\n', ' ').replace('|', '/')
            reasons.setdefault(key, text)
            index = list(reasons).index(key)
            figures = f'({_letter(index)})'
        else:
            figures = f'{result["packed"]:.0e} ({result["padded"]:.0e})'
        cells_of_family = cells.setdefault(result['family'], {})
        cells_of_family[result['column']] = f'{result["kind"]} {figures}'

    rows = []
    for family, cells_of_family in cells.items():
        row = [cells_of_family.get(column, '') for column in columns]
        rows.append([family, *row])
    legend = [f'- ({_letter(index)}) {reason}' for index, reason in enumerate(reasons.values())]
    return '\n'.join([table(['family', *columns], rows), 'Reasons, with the numbers of one batch:', '', *legend])


def _without_numbers(reason: str) -> str:
    """Returns the beginning of a reason without its numbers. Reasons that differ only in numbers are the same."""
    requirement, _, value_and_remedy = reason.partition(', got:')
    beginning = requirement + value_and_remedy[:40]
    return re.sub(r'[\d.e+-]*\d', '#', beginning)


def _letter(index: int) -> str:
    return chr(ord('a') + index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--site', action='append', default=[], help='a folder with another transformers')
    parser.add_argument('--lines', action='store_true', help='print cells as JSON, and leave the page as it is')
    arguments = parser.parse_args()
    results = []
    for result in tried():
        print(json.dumps(result), flush=True)
        results.append(result)
    if not arguments.lines:
        for site in arguments.site:
            results += tried_with(site)
        fill_page(PAGE, {'packing': markdown(results)})


if __name__ == '__main__':
    main()
