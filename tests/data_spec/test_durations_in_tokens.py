# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Durations and warm-up in ``'tok'`` count real tokens, with or without a label: no padding, no dummy rows."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from composer.core import Event
from composer.optim import LinearWithWarmupScheduler

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, token_data_spec
from tests.support.text import ONE_UNLABELLED, RAGGED, collate, one_layer_model, text_rows
from tests.support.training import On, fit, hugging_face, loader

SHAPE = RAGGED + ONE_UNLABELLED
"""Length and number of labels of each of twelve rows."""
ROWS_PER_STEP = 3
WARMUP = 40
"""Tokens until the learning rate has risen to its full value."""
DURATION = 80
"""Tokens of a run."""


def batches() -> list[dict[str, torch.Tensor]]:
    """Returns the batch of each step."""
    rows = text_rows(SHAPE)
    batches_of_steps = []
    for start in range(0, len(rows), ROWS_PER_STEP):
        rows_of_step = rows[start : start + ROWS_PER_STEP]
        batches_of_steps.append(collate(rows_of_step))
    return batches_of_steps


def padded():
    """Returns a spec that cuts batches into padded microbatches."""
    return token_data_spec(loader(*batches()))


def packed():
    """Returns a spec that cuts batches into packed microbatches."""
    return token_data_spec(loader(*batches()), packing=True)


def planned():
    """Returns a spec of a loader that makes the microbatches itself, by the plan of a sampler."""
    rows = text_rows(SHAPE)
    lengths = [length for length, _ in SHAPE]
    sampler = RegroupingBatchSampler(
        rows, lengths=lengths, global_batch_size=ROWS_PER_STEP, max_tokens=32, shuffle=False
    )
    planned_loader = RegroupingDataLoader(rows, batch_sampler=sampler, collate_fn=collate)
    return token_data_spec(planned_loader, slot_tokens=16)


def train(data: Any) -> tuple[list[int], list[float]]:
    """Returns the tokens and the learning rate at the start of each step."""
    tokens = On(Event.BATCH_START, lambda state: state.timestamp.token.value)
    rates = On(Event.BATCH_START, lambda state: state.optimizers[0].param_groups[0]['lr'])
    model = hugging_face(one_layer_model())
    fit(
        model,
        data,
        callbacks=[tokens, rates],
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        schedulers=LinearWithWarmupScheduler(t_warmup=f'{WARMUP}tok'),
        max_duration=f'{DURATION}tok',
    )
    return tokens.values, rates.values


@pytest.mark.parametrize('make_data', [padded, packed, planned])
def test_real_tokens_count(make_data):
    """The last step is the one that reaches the duration."""
    tokens_of_steps = [int(batch['attention_mask'].sum()) for batch in batches()]
    starts = accumulate(tokens_of_steps, initial=0)
    expected_starts = [start for start in starts if start < DURATION]

    tokens_at_start, rates = train(make_data())

    assert tokens_at_start == expected_starts
    # Composer's schedulers step before its clock does: a step has the rate of the time at which the last one began.
    times_of_rates = [0, *tokens_at_start[:-1]]
    expected_rates = []
    for tokens in times_of_rates:
        rising = tokens / WARMUP
        falling = (DURATION - tokens) / (DURATION - WARMUP)
        expected_rates.append(min(rising, falling))
    assert rates == pytest.approx(expected_rates)


def test_composers_own_counter_counts_padding():
    first_batch = batches()[0]
    num_positions = first_batch['attention_mask'].numel()

    tokens_at_start, _ = train(loader(*batches()))

    assert tokens_at_start[1] == num_positions
