# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the digest of samples depends on: ids and texts, but not pixels or paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from composer_tokacc.sampling.witness import witness_of

SAMPLE = {'input_ids': torch.tensor([5, 6, 7]), 'text': 'a caption'}


def witness_of_sample(**entries):
    """Returns the digest of `SAMPLE` with these entries added or replaced."""
    sample = {**SAMPLE, **entries}
    return witness_of(lambda indices: [sample for _ in indices], [0])


@pytest.mark.parametrize(
    'entry',
    [
        pytest.param(np.array([10, 20], dtype=np.uint8), id='pixels of one byte'),
        pytest.param(np.array([0.1, 0.2], dtype=np.float32), id='pixels in an array of floats'),
        pytest.param(torch.tensor([0.1, 0.2]), id='pixels in a tensor of floats'),
        pytest.param('/data/node3/cat.png', id='a path'),
    ],
)
def test_pixels_and_paths_do_not_count(entry):
    """Pixels may be augmented on one rank in another way, and paths differ between nodes."""
    assert witness_of_sample(image=entry) == witness_of_sample()


@pytest.mark.parametrize(
    'ids',
    [
        pytest.param(torch.tensor([5, 6, 8]), id='tensor'),
        pytest.param(np.array([5, 6, 8]), id='array'),
        pytest.param([5, 6, 8], id='list'),
    ],
)
def test_ids_count(ids):
    assert witness_of_sample(input_ids=ids) != witness_of_sample()


def test_texts_count_without_integers():
    def witness_of_text(text):
        return witness_of(lambda indices: [{'text': text}], [0])

    assert witness_of_text('one caption') != witness_of_text('another caption')
