# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Packed rows by family, attention and release of transformers, as a page.

    python -m tests.matrix.packed [FAMILY ...] [--site DIR ...] > docs/packing.md

Each ``--site`` is a folder with another transformers (``pip install --target DIR --no-deps 'transformers==4.57.*'`` and
its huggingface_hub and tokenizers), tried in a process of its own. A line a cell goes to stderr meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.matrix.harness import plain_gradients, quiet
from tests.matrix.subjects import SUBJECTS, Subject
from tests.matrix.text_families import EXPERTS, LLAMA, WINDOW, text_row
from tests.support.training import Gradients, fit, in_double, relative_error

__all__ = ['FAMILIES', 'cell', 'lines']

KERNELS = ('sdpa', 'eager')
NUM_BATCHES = 4
TOLERANCE = 1e-6

# Families that the general matrix has not: sinks, a convolution, a gated delta rule.
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    'gpt_oss': ('GptOss', {**LLAMA, **EXPERTS, **WINDOW, 'head_dim': 16}),
    'lfm2': ('Lfm2', {**LLAMA, 'layer_types': ['conv', 'full_attention']}),
    'qwen3_next': (
        'Qwen3Next',
        dict(LLAMA, head_dim=16, layer_types=['linear_attention', 'full_attention'], mlp_only_layers=[0, 1],
             linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
    ),
}  # fmt: skip


def _other(name: str) -> Subject:
    prefix, settings = _OTHERS[name]

    def blank() -> tuple[type, Any]:
        config = getattr(transformers, f'{prefix}Config')(**settings)
        return getattr(transformers, f'{prefix}ForCausalLM'), config

    return Subject(name=name, group='text', blank=blank, row=text_row)


FAMILIES: dict[str, Subject] = {
    **{name: SUBJECTS[name] for name in ('llama', 'mistral', 'gemma2', 'gpt2', 'qwen3_moe')},
    'gpt_oss': _other('gpt_oss'),
    **{
        name: SUBJECTS[name]
        for name in ('llava', 'llava_next', 'idefics3', 'internvl', 'gemma3', 'paligemma')
        + ('qwen2_vl', 'qwen2_vl_video', 'qwen2_5_vl', 'qwen3_vl')
    },
    **{name: _other(name) for name in ('lfm2', 'qwen3_next')},
    **{name: SUBJECTS[name] for name in ('mamba', 'bloom', 'gpt_neo')},
}  # fmt: skip


def cell(name: str, kernel: str, seeds: Iterable[int] = range(NUM_BATCHES)) -> dict[str, Any]:
    """The worst of some batches: ``'exact'`` with its errors, ``'refused'`` with the reason, or ``'wrong'``.

    Errors are those of float32 gradients of a run at learning rate 0, of packed rows and of padded ones, against
    float64: each row by itself, without padding, weighted by its tokens.
    """
    subject = FAMILIES[name]
    model = subject.model('large')
    model.model.set_attn_implementation(kernel)
    found = {'packed': 0.0, 'padded': 0.0}
    for seed in seeds:
        batch = subject.batch(seed, side='right')
        size = 1 + random.Random(f'{name} {seed}').randrange(3)
        expected = _reference(model, subject, seed)
        for way in found:
            try:
                with quiet():
                    recorder = fit(model, batch, packing=way == 'packed', microbatch_size=size)
            except RuntimeError as error:
                return {'kind': 'refused', 'reason': str(error), 'batch': seed}
            found[way] = max(relative_error(recorder.gradients, expected), found[way])  # in this order NaN stays
    return {'kind': 'exact' if found['packed'] < max(TOLERANCE, 1.2 * found['padded']) else 'wrong', **found}


def _reference(model: Any, subject: Subject, seed: int) -> Gradients:
    double = in_double(model)
    rows = [subject.collate([row], 0, side='right') for row in subject.rows(seed)]
    counts = [int((row['labels'][:, 1:] != -100).sum()) for row in rows]
    gradients: Gradients = {}
    for row, count in zip(rows, counts, strict=True):
        if count:
            row = {key: value.double() if value.is_floating_point() else value
                   for key, value in row.items() if torch.is_tensor(value)}  # fmt: skip
            for name, gradient in plain_gradients(double, row).items():
                gradients[name] = gradients.get(name, 0.0) + gradient * (count / sum(counts))
    return gradients


def lines(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """All cells of the families under the transformers of this process."""
    release = '.'.join(transformers.__version__.split('.')[:2])
    for name in names:
        for kernel in KERNELS:
            try:
                found = cell(name, kernel)
            except (ValueError, AttributeError, TypeError) as error:
                found = {'kind': 'not there', 'reason': f'{type(error).__name__}: {error}'}
            yield {'family': name, 'kernel': kernel, 'release': release, **found}


HEAD = f"""# Sequence packing

`token_data_spec(..., packing=True)` strings a microbatch's rows into one, without any padding, and has the model
attend document by document. The mask of a packed row has a row for each document; transformers hands it to an
attention of this package's (`AttentionInterface`, `AttentionMaskInterface`), which calls the model's own once for
each document, or for each run of documents of one length. Nothing as wide as the packed row squared is made. Sliding
windows, soft caps, sinks, grouped heads, dropout and images that see themselves in both directions stay what the
model's own attention makes of them. Multimodal rotary positions are the model's own (`get_rope_index`), row by row,
before rows are joined. Vision towers keep their attention, batches that are not packed (evaluation) are computed as
before, and the model gets its own attention and cache back at the end of `fit` (a checkpoint saved before has
`use_cache: false` in its config; `export` sets it).

The first batch, and the first with media of a new kind, must show that it holds: the gradient by the logits of every
token is the same packed as padded, in either order of the documents, with a label on every position of all rows but
one. Layers with a state or a convolution (gated delta rules, Mamba, LFM2) are called once for each document, where they
get the model's mask. What keeps an attention of its own, or runs on over documents in another way, is refused by that.

`packing='auto'` packs where the first batch costs less so (`CostModel`) and the model passes; else rows are padded.

- Eager attention, and SDPA where a document is longer than its window or holds such images, make a mask a document.
- With flash and flex attention rows are packed without a mask: they find documents by their positions themselves. On
  a GPU, SDPA computes all documents by one kernel (torch's nested tensors). None of this was tried on a GPU yet; the
  first batch holds it to the same.
- Models that reshape the mask, index by it in their loss, or attend by themselves but by transformers' masks (GPT-2,
  Qwen2-Audio, Gemma 3 before transformers 5, GPT-Neo) keep a mask as wide as the packed row, with a warning; sizes do
  not count it.
- Refused: attention in chunks from column 0 (Llama 4), rotary embeddings that depend on the width, PaliGemma before
  transformers 5.24 (its mask was made outside of its language model), rows that are not one run of tokens.
- `torch.compile` breaks its graph at the masks and at each attention.

Tiny models from configs on a CPU, {NUM_BATCHES} ragged batches each: the largest relative error of the gradient of
packed rows (in brackets of padded ones) in float32, against float64: each row by itself, weighted by its tokens. "not
there": the release has no such attention for the family. Made by
`python -m tests.matrix.packed --site DIR > docs/packing.md`, DIR with the other transformers.
"""


def page(results: list[dict[str, Any]]) -> str:
    """Markdown: families by release and attention."""
    columns = list(dict.fromkeys((one['release'], one['kernel']) for one in results))
    reasons: dict[str, str] = {}

    def text(one: dict[str, Any]) -> str:
        if one['kind'] in ('exact', 'wrong'):
            return f'{one["kind"]} {one["packed"]:.0e} ({one["padded"]:.0e})'
        short = re.sub(r'[\d.e+-]*\d', '#', one['reason'].split(', got:')[0] + one['reason'].split(', got:')[-1][:40])
        reasons.setdefault(short, one['reason'].replace('\n', ' ').replace('|', '/'))
        return f'{one["kind"]} ({chr(ord("a") + list(reasons).index(short))})'

    rows = [f'| family | {" | ".join(" ".join(column) for column in columns)} |', '|---' * (len(columns) + 1) + '|']
    for family in dict.fromkeys(one['family'] for one in results):
        found = {(one['release'], one['kernel']): text(one) for one in results if one['family'] == family}
        rows.append(f'| {family} | {" | ".join(found.get(column, "") for column in columns)} |')
    legend = [f'- ({chr(ord("a") + index)}) {reason}' for index, reason in enumerate(reasons.values())]
    return '\n'.join([HEAD, *rows, '', 'Reasons, with the numbers of one batch:', '', *legend])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('families', nargs='*')
    parser.add_argument('--site', action='append', default=[], help='a folder with another transformers')
    parser.add_argument('--lines', action='store_true', help='print cells as JSON')
    given = parser.parse_args()
    names = given.families or list(FAMILIES)
    results = []
    for one in lines(names):
        print(json.dumps(one), file=sys.stdout if given.lines else sys.stderr, flush=True)
        results.append(one)
    for site in given.site:
        paths = [site, str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH', '')]
        command = [sys.executable, '-m', 'tests.matrix.packed', '--lines', *names]
        environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        results += [json.loads(line) for line in output.splitlines() if line.startswith('{')]
    if not given.lines:
        print(page(results))


if __name__ == '__main__':
    main()
