# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``Trainer(compile_config=...)``: few graphs for widths that differ from step to step, and the same gradients."""

from __future__ import annotations

import random

import pytest
import torch

from tests.matrix.harness import plain_gradients
from tests.support.text import collate, text_model, text_row
from tests.support.training import fit, hugging_face, relative_error

NUM_STEPS, NUM_ROWS, LONGEST = 50, 8, 256
MOST_GRAPHS = {False: 5, True: 24}
"""Padded and packed. Padded: one row and several, whole rows and trimmed ones, and rows trimmed by one column, because
torch compiles anew for an offset of 1. The graph of packed rows breaks at the masks and at each attention."""
NUM_COMPARED = 5


@pytest.fixture
def fresh_dynamo():
    """Counters at zero; running eagerly for want of graphs is an error."""
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
        rows = [text_row(n, rng.randint(1, n - 1), seed=step * NUM_ROWS + row) for row, n in enumerate(lengths)]
        yield collate(rows, side=rng.choice(('left', 'right')) if step % 2 else 'right')


def compiled_run(batches, **options):
    model = hugging_face(text_model(max_position_embeddings=LONGEST))
    recorder = fit(model, *batches, width_multiple=64, **options, compile_config={'backend': 'eager'})
    return recorder.steps


@pytest.mark.slow
@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
def test_lognormal_lengths_compile_few_graphs(packing, fresh_dynamo):
    batches = list(lognormal_batches())
    steps = compiled_run(batches, packing=packing)
    assert 0 < fresh_dynamo['stats']['unique_graphs'] <= MOST_GRAPHS[packing], dict(fresh_dynamo['stats'])
    plain = hugging_face(text_model(max_position_embeddings=LONGEST))
    for step in range(0, NUM_STEPS, NUM_STEPS // NUM_COMPARED):
        assert relative_error(steps[step], plain_gradients(plain, batches[step])) < 1e-6, step
