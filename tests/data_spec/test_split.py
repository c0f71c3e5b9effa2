# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The split by itself, without a Trainer: what its microbatches hold, and the gradient that they add up to."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.exactness import family_batch, gradients_of, loss_tokens, split
from tests.support.families import FAMILIES
from tests.support.text import collate, text_rows
from tests.support.training import relative_error

SHAPE = [(4, 2), (5, 3), (9, 7), (14, 11), (6, 1), (3, 2)]
# Patches in one run, images in slots, tiles: the ways in which tensors belong to rows.
MEDIA = ['llava', 'llava_next', 'qwen2_vl', 'idefics3', 'gemma3']


@pytest.mark.parametrize('name', ['llama', *MEDIA])
def test_microbatches_add_up(name):
    case = FAMILIES[name]()
    batch = family_batch(case)
    expected = gradients_of(case.model, [batch])
    for size, regroup in ((1, True), (2, True), (2, False), (3, False), (6, True)):
        found = gradients_of(case.model, split(batch, size, regroup=regroup))
        assert relative_error(found, expected) < 1e-6, (size, regroup)


def test_microbatch_is_as_wide_as_needed():
    for part in split(collate(text_rows(SHAPE)), 2):
        assert part['input_ids'].shape[1] == int(part['attention_mask'].sum(dim=1).max())


@pytest.mark.parametrize('size', [0.5, 1, 1.5, 3])
def test_cap_is_rows_times_tokens(size):
    for part in split(collate(text_rows(SHAPE)), size, slot_tokens=28):
        assert part['input_ids'].numel() <= size * 28


def test_half_size_makes_no_fewer_microbatches():
    batch = collate(text_rows(SHAPE))
    counts = [len(split(batch, size)) for size in (8, 4, 2, 1)]
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_loss_tokens_add_up():
    batch = collate(text_rows([*SHAPE, (7, 0)]))
    for size in (1, 2, 3, 7):
        assert sum(map(loss_tokens, split(batch, size))) == loss_tokens(batch)


def test_same_batch_is_cut_alike():
    batch = collate(text_rows(SHAPE))
    before = copy.deepcopy(batch)
    first, second = (split(batch, 2) for _ in range(2))
    for part, again in zip(first, second, strict=True):
        assert all(torch.equal(part[key], again[key]) for key in ('input_ids', 'attention_mask', 'labels'))
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[key], value) for key, value in before.items())


def test_rows_of_one_length_stay():
    batch = collate(text_rows([(6, 3)] * 4))
    parts = split(batch, 2, regroup=False)
    for key in ('input_ids', 'labels', 'attention_mask'):
        assert torch.equal(torch.cat([part[key] for part in parts]), batch[key])
