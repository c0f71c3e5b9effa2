# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Families x padding side x packed or padded x regrouped or in order: exact to 1e-6, or refused before the first step.

The slow tests train on all of them. The quick tests try each family once, padded on the left or packed.
"""

from __future__ import annotations

import functools
import random
from itertools import product

import pytest
import transformers

from tests.matrix.harness import measure, plain_gradients
from tests.matrix.subjects import MEDIA, SUBJECTS
from tests.support.training import COMPOSERS_FLAG, relative_error

INITS = ('large', 'fresh')
SIDES = ('right', 'left')
WITH_MEDIA = [name for name, subject in SUBJECTS.items() if subject.modalities]
LEFT = [
    'llama',
    'gpt2',
    'opt',
    'bloom',
    'falcon_alibi',
    'mpt',
    'mixtral',
    't5',
    'llava',
    'mllama_mixed',
]
PACKED = [
    'llama',
    'gpt_neo',
    'falcon',
    'mamba',
    'mistral',
    'gemma2',
    'bert',
    'qwen2_vl',
    'idefics3',
]
IN_ORDER = ['llama', 'gpt2', 'mamba', 't5', 'llava']
QUICK = [(name, 'left', 'regrouped', 0) for name in LEFT]
QUICK += [(name, 'right', 'packed', 0) for name in PACKED]
QUICK += [(name, 'right', 'in order', 4) for name in IN_ORDER]
"""Family, padding side, cut and seed."""

CUTS = {
    'regrouped': {},
    'in order': {'regroup': False},
    'packed': {'packing': True},
    'packed in order': {'packing': True, 'regroup': False},
}

SLOW_SEEDS = {
    'regrouped': [0, 1],
    'in order': [2, 3],
    'packed': [0, 3],
    'packed in order': [1],
}
SLOW = [
    *product(SUBJECTS, SIDES, ['regrouped', 'in order', 'packed']),
    # What is in a packed row does not depend on the order of rows, so some families are enough.
    *product(IN_ORDER, SIDES, ['packed in order']),
]


@functools.lru_cache(maxsize=2)
def model_of(name, init):
    return SUBJECTS[name].model(init)


def check(name, seed, *, side, cut):
    """Trains on one batch. It is exact, or refused if the family cannot be packed."""
    subject = SUBJECTS[name]
    init = INITS[seed % 2]
    batch = subject.batch(seed, side=side)
    rng = random.Random(f'{name} {side} {cut} {seed}')
    microbatch_size = rng.randint(1, 4)

    outcome = measure(model_of(name, init), batch, microbatch_size, **CUTS[cut])

    allowed_kinds = ['exact']
    is_packed = 'packing' in CUTS[cut]
    is_transformers_4 = transformers.__version__.startswith('4.')
    may_not_pack = not subject.packs or side == 'left' or is_transformers_4
    if is_packed and may_not_pack:
        allowed_kinds.append('refused')
    assert outcome.kind in allowed_kinds, f'batch {seed}, size {microbatch_size}, {init} weights: {outcome}'


@pytest.mark.parametrize(('name', 'side', 'cut', 'seed'), QUICK)
def test_one_random_batch(name, side, cut, seed):
    check(name, seed, side=side, cut=cut)


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'side', 'cut'), SLOW)
def test_several_random_batches(name, side, cut):
    """The seeds of `regrouped` and `in order` together cover each kind of labels, with fresh and with large weights."""
    for seed in SLOW_SEEDS[cut]:
        # Packing takes the padding away, whichever side it is on. So on the left large weights are enough.
        is_fresh_packed_left = cut == 'packed' and side == 'left' and INITS[seed % 2] == 'fresh'
        if (name, side, cut, seed) not in QUICK and not is_fresh_packed_left:
            check(name, seed, side=side, cut=cut)


@pytest.mark.parametrize('name', ['t5', 'bert'])
def test_composers_flag_counts_by_model(name):
    """Composer's own ``accumulate_train_batch_on_tokens``, without the algorithm."""
    model = model_of(name, 'large')
    batch = SUBJECTS[name].batch(0, side='right')
    if name == 'bert':  # only an unshifted loss counts the first label
        batch['labels'][:, 0] = batch['input_ids'][:, 0]

    outcome = measure(
        model,
        batch,
        2,
        model=model,
        algorithms=[],
        trainer_options=COMPOSERS_FLAG,
    )

    assert outcome.kind == 'exact', outcome


@pytest.mark.slow
@pytest.mark.parametrize('name', WITH_MEDIA)
def test_media_change_the_gradient(name):
    """Otherwise media in the wrong row would be exact."""
    subject = SUBJECTS[name]
    rows = []
    for seed in range(0, 16, 2):
        rows += subject.rows(seed)
    batch = subject.collate(rows, 0, side='right')
    model = subject.model('large')
    gradients = plain_gradients(model, batch)

    for key in MEDIA:
        if key in batch:
            reversed_media = batch[key].flip(0)
            changed_batch = {**batch, key: reversed_media}
            other_gradients = plain_gradients(model, changed_batch)
            assert relative_error(other_gradients, gradients) > 1e-3, key
