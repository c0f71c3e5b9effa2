# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``Trainer(compile_config=...)``: few graphs for widths that differ from step to step, and the same gradients."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from tests.matrix.harness import plain_gradients
from tests.support.text import collate, one_layer_model, text_row
from tests.support.training import fit, hugging_face, relative_error

NUM_STEPS = 30
NUM_ROWS = 8
LONGEST = 256


@pytest.fixture
def fresh_dynamo():
    """Sets the counters of graphs to zero. If there are too many graphs, torch raises, and does not run without one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Transformers 5.24 calls many functions by one wrapper, whose graphs count together.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=32):
        yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def lognormal_batches():
    """Returns a batch of rows of random lengths for each step. Some are padded on the left."""
    rng = random.Random(0)
    batches = []
    for step in range(NUM_STEPS):
        lengths = []
        for _ in range(NUM_ROWS):
            length = 2 + int(rng.lognormvariate(4.2, 0.8))
            lengths.append(min(length, LONGEST))
        rows = []
        for row, length in enumerate(lengths):
            num_labels = rng.randint(1, length - 1)
            rows.append(text_row(length, num_labels, seed=step * NUM_ROWS + row))
        side = 'right'
        if step % 2:
            side = rng.choice(('left', 'right'))
        batches.append(collate(rows, side=side))
    return batches


@pytest.fixture
def model():
    return hugging_face(one_layer_model(max_position_embeddings=LONGEST))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('packing', 'most_graphs'),
    [
        # One row and several, whole rows and trimmed ones, and rows trimmed by one column, because torch compiles again
        # for an offset of 1.
        pytest.param(False, 5, id='padded'),
        # The graph breaks at the masks and at each attention.
        pytest.param(True, 24, id='packed'),
    ],
)
def test_lognormal_lengths_compile_few_graphs(model, packing, most_graphs, fresh_dynamo):
    plain_model = copy.deepcopy(model)
    batches = lognormal_batches()

    recorder = fit(model, *batches, width_multiple=64, packing=packing, compile_config={'backend': 'eager'})

    stats = fresh_dynamo['stats']
    assert 0 < stats['unique_graphs'] <= most_graphs, dict(stats)
    for step in range(0, NUM_STEPS, 10):
        expected = plain_gradients(plain_model, batches[step])
        assert relative_error(recorder.steps[step], expected) < 1e-6, step
