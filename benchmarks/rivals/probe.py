# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hooks that record which samples reach a model and when its weights change. They work with every trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.adapters import Gradients, gradients_of
from benchmarks.record import Row
from benchmarks.rivals.data import UNKNOWN, Samples

INPUTS = ('input_ids', 'attention_mask', 'labels', 'position_ids')


@dataclass
class Trace:
    """The record of a run on this rank. The lists have an entry for each optimizer step."""

    # Clock time and processor time at the end of the step.
    ends: list[float] = field(default_factory=list)
    processor_ends: list[float] = field(default_factory=list)
    # Rows times width of all microbatches.
    positions: list[int] = field(default_factory=list)
    # Tokens of the samples, without padding.
    tokens: list[int] = field(default_factory=list)
    # Indices of the samples. UNKNOWN stands for a row that is not a sample.
    indices: list[list[int]] = field(default_factory=list)
    num_dummy_rows: int = 0
    # Positions of the largest microbatch.
    largest_microbatch: int = 0
    # Gradient of the first step before the optimizer used it, if :func:`watched` is told to inspect.
    gradient: Gradients = field(default_factory=dict)


@contextmanager
def watched(model: Any, samples: Samples, *, inspect: bool = False) -> Iterator[Trace]:
    """Watches a training run of a model, which the trainer may wrap. `inspect` also records the first gradient."""
    trace = Trace()
    # The inputs of the microbatches of each step. The last step has not ended.
    steps: list[list[Row]] = [[]]

    def before_forward(module: Any, args: Any, kwargs: Row) -> None:
        # A forward without gradients is a check or an evaluation, and not part of a step.
        if torch.is_grad_enabled():
            steps[-1].append({key: kwargs.get(key) for key in INPUTS})

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        trace.ends.append(time.perf_counter())
        trace.processor_ends.append(time.process_time())
        if inspect and not trace.gradient:
            trace.gradient = gradients_of(model)
        steps.append([])

    handles = [
        model.register_forward_pre_hook(before_forward, with_kwargs=True),
        register_optimizer_step_post_hook(after_step),
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
    # Not in the hooks, because it takes time.
    for microbatches in steps[:-1]:
        recognize(trace, microbatches, samples)


def recognize(trace: Trace, microbatches: list[Row], samples: Samples) -> None:
    """Finds out which samples were in the microbatches of a step, and adds them to the trace."""
    indices: list[int] = []
    num_tokens = 0
    num_positions = 0
    for microbatch in microbatches:
        size = microbatch['input_ids'].numel()
        num_positions += size
        trace.largest_microbatch = max(trace.largest_microbatch, size)
        for row_ids, row_labels in split_rows(microbatch):
            if is_dummy_row(samples, row_ids, row_labels):
                trace.num_dummy_rows += 1
            else:
                indices.append(samples.index_of(row_ids))
                num_tokens += len(row_ids)
    trace.indices.append(indices)
    trace.tokens.append(num_tokens)
    trace.positions.append(num_positions)


def split_rows(inputs: Row) -> list[tuple[list[int], list[int]]]:
    """Returns tokens and labels of each row, or of each document of a packed row, without padding."""
    ids = inputs['input_ids']
    mask = inputs['attention_mask']
    labels = inputs['labels']
    rows = []
    is_padded = mask is not None and mask.shape == ids.shape
    if is_padded:
        for row, is_real in enumerate(mask.bool()):
            rows.append((ids[row, is_real].tolist(), labels[row, is_real].tolist()))
    else:
        # One packed row. The positions of each document begin at 0.
        starts = torch.nonzero(inputs['position_ids'][0] == 0).flatten()
        for start, end in pairwise([*starts.tolist(), ids.shape[1]]):
            rows.append((ids[0, start:end].tolist(), labels[0, start:end].tolist()))
    return rows


def is_dummy_row(samples: Samples, ids: list[int], labels: list[int]) -> bool:
    """Returns whether a row is a dummy row. It has the tokens of a sample without its labels, or made-up tokens.

    A dummy row may have one label: the 0 that `with_one_label` writes into a batch without labels, because a mean over
    no labels is NaN.
    """
    # The first label of a row is not trained, because no token comes before it.
    trained_labels = labels[1:]
    index = samples.index_of(ids)
    if index != UNKNOWN:
        labels_of_sample = samples[index]['labels'].tolist()
        return trained_labels != labels_of_sample[1:]
    real_labels = [label for label in trained_labels if label != -100]
    return real_labels in ([], [0])
