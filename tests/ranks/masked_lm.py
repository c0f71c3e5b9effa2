# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: ``examples/masked_lm.py`` in several cuts.

The gradient of the first step and the loss of every step are compared with a plain loop over whole batches.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from composer.utils import dist

from examples import masked_lm
from tests.support.training import GradientRecorder, reference_gradients, relative_error

WARMUP = 800
DURATION = 4000
LEARNING_RATE = 1e-3


def plain_losses(batches: list[dict[str, torch.Tensor]]) -> list[float]:
    """Returns the losses of plain training on whole batches, with the schedule written out in real tokens."""
    model = masked_lm.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    # Composer's schedulers step before its clock, so the learning rate of a step is one step late: it belongs to the
    # number of tokens at the start of the step before.
    scheduled_tokens = 0
    tokens = 0
    for batch in batches:
        factor = scheduled_tokens / WARMUP
        if scheduled_tokens >= WARMUP:
            factor = 1 - (scheduled_tokens - WARMUP) / (DURATION - WARMUP)
        optimizer.param_groups[0]['lr'] = LEARNING_RATE * factor
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        scheduled_tokens = tokens
        tokens += int(batch['attention_mask'].sum())
    return losses


def whole_batches() -> list[dict[str, torch.Tensor]]:
    """Returns the samples of each step, in the order of torch's DistributedSampler, as one batch."""
    texts = masked_lm.read_texts()
    rows = masked_lm.Texts(masked_lm.build_tokenizer(texts), texts[masked_lm.NUM_EVAL_TEXTS :])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    collate = masked_lm.MaskingCollator()
    batches = []
    tokens = 0
    while tokens < DURATION:
        start = len(batches) * masked_lm.GLOBAL_BATCH
        indices = order[start : start + masked_lm.GLOBAL_BATCH]
        batches.append(collate([rows[index] for index in indices]))
        tokens += int(batches[-1]['attention_mask'].sum())
    return batches


def main() -> dict[str, Any]:
    masked_lm.read_texts = functools.cache(masked_lm.read_texts)  # parsing Python's library takes a second
    batches = whole_batches()
    expected, _ = reference_gradients(masked_lm.build_model(), batches[0])
    errors = {}
    curves = {'one forward a step': plain_losses(batches)}
    for packing in (False, True):
        for microbatch in (1, 3, 8):
            recorder = GradientRecorder()
            trainer, memory = masked_lm.build_trainer(
                microbatch=microbatch,
                packing=packing,
                duration=f'{DURATION}tok',
                warmup=f'{WARMUP}tok',
                callbacks=[recorder],
            )
            trainer.fit()
            trainer.close()
            name = f'{dist.get_world_size()} ranks, microbatch {microbatch}, packing {packing}'
            errors[name] = relative_error(recorder.steps[0], expected)
            curves[name] = [float(loss) for _, loss in memory.data['loss/train/total']]
    return {'errors': errors, 'curves': curves}
