# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``Trainer(compile_config=...)``: few graphs for widths that differ from step to step, and the same gradients."""

from __future__ import annotations

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
    rng = random.Random(0)
    for step in range(NUM_STEPS):
        lengths = [min(2 + int(rng.lognormvariate(4.2, 0.8)), LONGEST) for _ in range(NUM_ROWS)]
        rows = []
        for row, length in enumerate(lengths):
            rows.append(text_row(length, rng.randint(1, length - 1), seed=step * NUM_ROWS + row))
        side = 'right'
        if step % 2:
            side = rng.choice(('left', 'right'))
        yield collate(rows, side=side)


def compiled_run(batches, **options):
    model = hugging_face(one_layer_model(max_position_embeddings=LONGEST))
    recorder = fit(model, *batches, width_multiple=64, **options, compile_config={'backend': 'eager'})
    return recorder.steps


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
def test_lognormal_lengths_compile_few_graphs(packing, most_graphs, fresh_dynamo):
    batches = list(lognormal_batches())
    steps = compiled_run(batches, packing=packing)
    assert 0 < fresh_dynamo['stats']['unique_graphs'] <= most_graphs, dict(fresh_dynamo['stats'])
    plain = hugging_face(one_layer_model(max_position_embeddings=LONGEST))
    for step in range(0, NUM_STEPS, 10):
        assert relative_error(steps[step], plain_gradients(plain, batches[step])) < 1e-6, step
