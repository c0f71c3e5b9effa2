# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hooks that record which samples reach a model and when its weights change. They work with every trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.adapters import Gradients, gradients_of
from benchmarks.rivals.data import UNKNOWN, Samples
from composer_tokacc.batch import BatchDict

INPUTS = ('input_ids', 'attention_mask', 'labels', 'position_ids')


class Trace:
    """The record of a run on this rank. The lists have an entry for each optimizer step."""

    def __init__(self) -> None:
        # Clock time and processor time at the end of the step.
        self.ends: list[float] = []
        self.processor_ends: list[float] = []
        # Rows times width of all microbatches.
        self.positions: list[int] = []
        # Tokens of the samples, without padding.
        self.tokens: list[int] = []
        # Indices of the samples. UNKNOWN stands for a row that is not a sample.
        self.indices: list[list[int]] = []
        self.num_dummy_rows = 0
        # Positions of the largest microbatch.
        self.largest_microbatch = 0
        # Gradient of the first step.
        self.gradient: Gradients = {}


@contextmanager
def watched(model: Any, samples: Samples) -> Iterator[Trace]:
    """Watches a training run of a model, which the trainer may wrap."""
    trace = Trace()
    # The inputs of the microbatches of each step. The last step has not ended.
    steps: list[list[BatchDict]] = [[]]

    def before_forward(module: Any, args: Any, kwargs: BatchDict) -> None:
        # A forward without gradients is a check or an evaluation, and not part of a step.
        if torch.is_grad_enabled():
            steps[-1].append({key: kwargs.get(key) for key in INPUTS})

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not trace.gradient:
            trace.gradient = gradients_of(model)
        trace.ends.append(time.perf_counter())
        trace.processor_ends.append(time.process_time())
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


def recognize(trace: Trace, microbatches: list[BatchDict], samples: Samples) -> None:
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


def split_rows(inputs: BatchDict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns tokens and labels of each row, or of each document of a packed row, without padding."""
    ids = inputs['input_ids']
    mask = inputs['attention_mask']
    labels = inputs['labels']
    if mask is None or mask.shape != ids.shape:
        # One packed row. The positions of each document begin at 0.
        starts = torch.nonzero(inputs['position_ids'][0] == 0).flatten()
        documents = ids[0].tensor_split(starts[1:])
        return list(zip(documents, labels[0].tensor_split(starts[1:]), strict=True))
    rows = []
    for row, is_real in enumerate(mask.bool()):
        rows.append((ids[row, is_real], labels[row, is_real]))
    return rows


def is_dummy_row(samples: Samples, ids: torch.Tensor, labels: torch.Tensor) -> bool:
    """Returns whether a row is a dummy row. It has the tokens of a sample without its labels, or made-up tokens.

    A dummy row may have one label: the 0 that `with_one_label` writes into a batch without labels, because a mean over
    no labels is NaN.
    """
    # The first label of a row is not trained, because no token comes before it.
    trained_labels = labels[1:]
    index = samples.index_of(ids)
    if index != UNKNOWN:
        return not torch.equal(trained_labels, samples[index]['labels'][1:])
    real_labels = trained_labels[trained_labels != -100]
    return real_labels.tolist() in ([], [0])
