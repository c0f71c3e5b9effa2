# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the first batch does not show: later batches are padded, or have media, where the first has neither."""

from __future__ import annotations

import pytest

from tests.matrix.harness import measure_steps
from tests.matrix.subjects import SUBJECTS

pytestmark = pytest.mark.slow

MEDIA = ('pixel_values', 'pixel_values_videos', 'input_features')
TEXT = ['llama', 'gpt2', 'gpt_neo', 'opt', 'bloom', 'falcon_alibi', 'mamba', 'gemma2', 'bert']
WITH_MEDIA = ['llava', 'qwen2_vl', 'qwen3_vl', 'paligemma', 'gemma3', 'idefics3', 'mllama_mixed', 'qwen2_audio']


def check(outcomes, num_batches, *, packing=False):
    # Padded batches are refused by nothing here; a packed one may be, and ends the run.
    expected = ('exact', 'refused') if packing else ('exact',)
    assert all(outcome.kind in expected for outcome in outcomes), [str(outcome) for outcome in outcomes]
    assert len(outcomes) == num_batches or outcomes[-1].kind == 'refused'


@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('sides', [('left', 'right'), ('right', 'left')], ids='-'.join)
@pytest.mark.parametrize('name', TEXT)
def test_rows_of_one_length_come_first(name, sides, packing):
    """Nothing is trimmed, and documents as long as each other leak least."""
    subject = SUBJECTS[name]
    rows = subject.rows(0)
    length = max(row['input_ids'].shape[1] for row in rows)
    same = [row for row in rows if row['input_ids'].shape[1] == length][:1] * 4
    same[0]['labels'][:, -1] = same[0]['input_ids'][:, -1]
    batches = [subject.collate(same, 0, side=sides[0])]
    batches += [subject.batch(seed, side=side) for seed, side in enumerate(sides * 2, start=1)]
    check(measure_steps(subject.model('large'), batches, 2, packing=packing), len(batches), packing=packing)


@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('name', WITH_MEDIA)
def test_rows_without_media_come_first(name, packing):
    subject = SUBJECTS[name]
    rows = [row for seed in range(0, 12, 2) for row in subject.rows(seed)]
    text = [row for row in rows if not any(key in row for key in MEDIA) and (row['labels'][:, 1:] != -100).any()][:5]
    assert len(text) > 2
    batches = [subject.collate(text, 0, side='right')]
    batches += [subject.batch(seed, side=side) for seed, side in enumerate(('right', 'left', 'right'), start=1)]
    check(measure_steps(subject.model('large'), batches, 2, packing=packing), len(batches), packing=packing)


@pytest.mark.parametrize('regroup', [True, False], ids=['regrouped', 'in order'])
@pytest.mark.parametrize('name', ['llama', 'mistral', 'gemma2', 'mpt', 'bloom', 'opt', 'falcon_alibi', 'mamba'])
def test_labels_on_the_first_token_behind_padding_come_later(name, regroup):
    """Such a label is predicted from padding, which trimming takes away; rows without one do not tell."""
    subject = SUBJECTS[name]
    first = subject.batch(0, side='left')
    for seed in range(1, 4):  # and sizes of microbatches
        rows = subject.rows(4 * seed)
        # The shorter rows: where they lie beside longer ones, no trimmed column takes the label itself away.
        lengths = sorted(row['input_ids'].shape[1] for row in rows)
        for row in rows:
            if row['input_ids'].shape[1] < lengths[len(lengths) // 2]:
                row['labels'][:, 0] = row['input_ids'][:, 0]
        batches = [first, subject.collate(rows, seed, side='left')]
        check(measure_steps(subject.model('large'), batches, 1 + seed % 3, regroup=regroup), len(batches))
