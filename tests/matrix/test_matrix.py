# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Families x padding side x packed or padded x regrouped or in order: exact to 1e-6, or refused before the first step.

The quick slice takes one random batch a cell, the slow one two.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch
import transformers

from tests.matrix.harness import measure, plain_gradients
from tests.matrix.subjects import SUBJECTS
from tests.support.training import relative_error

INITS = ('large', 'fresh')
TEXT = [name for name, subject in SUBJECTS.items() if not subject.modalities]
WITH_MEDIA = [name for name, subject in SUBJECTS.items() if subject.modalities]
QUICK = [name for name in TEXT if name != 'qwen3_moe'] + ['llava', 'qwen2_vl', 'idefics3', 'mllama_mixed']

every_cut = [
    pytest.mark.parametrize('regroup', [True, False], ids=['regrouped', 'in order']),
    pytest.mark.parametrize('side', ['right', 'left']),
    pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed']),
]


def in_every_cut(test):
    return functools.reduce(lambda decorated, mark: mark(decorated), every_cut, test)


@functools.lru_cache(maxsize=2)
def model_of(name, init):
    return SUBJECTS[name].model(init)


def check(name, seed, *, side, packing, regroup):
    """One batch, the first of its run: it is exact, or refused if the family cannot be packed."""
    subject = SUBJECTS[name]
    init = INITS[seed % 2]
    size = random.Random(f'{name} {side} {packing} {regroup} {seed}').randint(1, 4)
    batch = subject.batch(seed, side=side)
    outcome = measure(model_of(name, init), batch, size, packing=packing, regroup=regroup)
    is_exact_always = not packing or (
        subject.packs and side == 'right' and not transformers.__version__.startswith('4.')
    )
    allowed = ('exact',) if is_exact_always else ('exact', 'refused')
    assert outcome.kind in allowed, f'batch {seed}, size {size}, {init} weights: {outcome}'


@in_every_cut
@pytest.mark.parametrize('name', QUICK)
def test_one_random_batch(name, packing, side, regroup):
    check(name, 0 if regroup else 4, side=side, packing=packing, regroup=regroup)


@pytest.mark.slow
@in_every_cut
@pytest.mark.parametrize('name', SUBJECTS)
def test_several_random_batches(name, packing, side, regroup):
    """Every kind of labels and of first weights is either regrouped or in order."""
    for seed in (0, 1) if regroup else (2, 3):
        check(name, seed, side=side, packing=packing, regroup=regroup)


@pytest.mark.slow
@pytest.mark.parametrize('name', WITH_MEDIA)
def test_media_change_the_gradient(name):
    """Otherwise media in the wrong row would be exact."""
    subject = SUBJECTS[name]
    rows = [row for seed in range(0, 16, 2) for row in subject.rows(seed)]
    batch = subject.collate(rows, 0, side='right')
    model = subject.model('large')
    expected = plain_gradients(model, batch)
    for key in ('pixel_values', 'pixel_values_videos', 'input_features'):
        if key in batch:
            reversed_media = {**batch, key: torch.flip(batch[key], [0])}
            assert relative_error(plain_gradients(model, reversed_media), expected) > 1e-3, key
