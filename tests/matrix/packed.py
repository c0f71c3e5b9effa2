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
PAGE = Path(__file__).parents[2] / 'docs' / 'packing.md'

# Families that the general matrix does not have: sinks, a convolution, a gated delta rule.
_OTHERS = [
    text_subject('gpt_oss', sliding_window=4),
    text_subject('lfm2', layer_types=['conv', 'full_attention']),
    text_subject('qwen3_next', layer_types=['linear_attention', 'full_attention']),
]
_NAMES = (
    *('llama', 'mistral', 'gemma2', 'gpt2', 'qwen3_moe', 'gpt_oss'),
    *('llava', 'llava_next', 'idefics3', 'internvl', 'gemma3', 'paligemma'),
    *('qwen2_vl', 'qwen2_vl_video', 'qwen2_5_vl', 'qwen3_vl', 'lfm2', 'qwen3_next', 'mamba', 'bloom', 'gpt_neo'),
)
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
    errors = {'packed': 0.0, 'padded': 0.0}
    for seed in seeds:
        batch = subject.batch(seed, side='right')
        size = 1 + random.Random(f'{name} {seed}').randrange(3)
        expected = _reference(model, subject, seed)
        for layout in layouts:
            try:
                with quiet():
                    recorder = fit(model, batch, packing=layout == 'packed', microbatch_size=size)
            except RuntimeError as error:
                return {'kind': 'refused', 'reason': str(error)}
            errors[layout] = max(relative_error(recorder.gradients, expected), errors[layout])  # NaN stays NaN
    is_exact = errors['packed'] < max(TOLERANCE, 1.2 * errors['padded'])
    return {'kind': 'exact' if is_exact else 'wrong', **errors}


def _reference(model: Any, subject: Subject, seed: int) -> Gradients:
    model = in_double(model)
    rows = subject.rows(seed)
    counts = [int((row['labels'][:, 1:] != -100).sum()) for row in rows]
    total: Gradients = {}
    for row, count in zip(rows, counts, strict=True):
        if count == 0:
            continue
        batch = tensors_in(subject.collate([row], 0, side='right'), torch.float64)
        for name, gradient in plain_gradients(model, batch).items():
            total[name] = total.get(name, 0.0) + gradient * (count / sum(counts))
    return total


def tried() -> Iterator[dict[str, Any]]:
    """Yields the cells of all families with the transformers of this process."""
    release = '.'.join(transformers.__version__.split('.')[:2])
    for name in FAMILIES:
        for kernel in KERNELS:
            try:
                outcome = cell(name, kernel)
            except (ValueError, AttributeError, TypeError) as error:
                outcome = {'kind': 'not there', 'reason': f'{type(error).__name__}: {error}'}
            yield {'family': name, 'column': f'{release} {kernel}', **outcome}


def tried_with(site: str) -> list[dict[str, Any]]:
    """Returns the same cells with the transformers of a folder."""
    paths = [site, str(PAGE.parents[1]), os.environ.get('PYTHONPATH', '')]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}
    command = [sys.executable, '-m', 'tests.matrix.packed', '--lines']
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith('{')]


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Returns the table, families by release and attention. A letter refers to the reason of a refusal below."""
    columns = list(dict.fromkeys(result['column'] for result in results))
    cells: dict[str, dict[str, str]] = {}
    reasons: dict[str, str] = {}
    for result in results:
        if 'reason' in result:
            # Reasons that differ only in numbers are the same.
            requirement, _, rest = result['reason'].partition(', got:')
            key = re.sub(r'[\d.e+-]*\d', '#', requirement + rest[:40])
            reasons.setdefault(key, result['reason'].replace('\n', ' ').replace('|', '/'))
            figures = f'({_letter(list(reasons).index(key))})'
        else:
            figures = f'{result["packed"]:.0e} ({result["padded"]:.0e})'
        cells.setdefault(result['family'], {})[result['column']] = f'{result["kind"]} {figures}'
    rows = []
    for family, texts in cells.items():
        rows.append([family, *(texts.get(column, '') for column in columns)])
    legend = [f'- ({_letter(index)}) {reason}' for index, reason in enumerate(reasons.values())]
    return '\n'.join([table(['family', *columns], rows), 'Reasons, with the numbers of one batch:', '', *legend])


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
