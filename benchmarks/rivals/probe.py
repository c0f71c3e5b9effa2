# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hooks that record which samples reach a model and when its weights change. They work with every trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.adapters import Gradients, gradients_of
from benchmarks.rivals.data import Samples

UNKNOWN = -1


@dataclass
class Trace:
    """The record of a run on this rank. The lists have an entry for each optimizer step."""

    # Clock time and processor time at the end of the step.
    ends: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    # Rows times width of all microbatches.
    positions: list[int] = field(default_factory=list)
    # Tokens of the samples, without padding.
    tokens: list[int] = field(default_factory=list)
    # Indices of the samples. UNKNOWN stands for a row that is not a sample.
    ids: list[list[int]] = field(default_factory=list)
    num_dummy_rows: int = 0
    # Positions of the largest microbatch.
    largest: int = 0
    # Gradient of the first step before the optimizer used it, if :func:`watched` is told to inspect.
    gradient: Gradients = field(default_factory=dict)


@contextmanager
def watched(model: Any, samples: Samples, *, inspect: bool = False) -> Iterator[Trace]:
    """Watches a training run.

    Args:
        model: The model before the trainer wraps it.
        samples: The samples of the run.
        inspect: Whether to record the first gradient.
    """
    watcher = Watcher(model, inspect)
    handles = [
        model.register_forward_pre_hook(watcher.before_forward, with_kwargs=True),
        register_optimizer_step_post_hook(watcher.after_step),
    ]
    try:
        yield watcher.trace
    finally:
        for handle in handles:
            handle.remove()
    watcher.recognize(samples)


class Watcher:
    """Records the inputs of the model for each step of the optimizer."""

    def __init__(self, model: Any, inspect: bool) -> None:
        self.model = model
        self.inspect = inspect
        self.trace = Trace()
        self.steps: list[list[dict[str, Any]]] = []
        self.inputs: list[dict[str, Any]] = []

    def before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # A forward without gradients is a check or an evaluation, and not part of a step.
        if torch.is_grad_enabled():
            inputs = {}
            for key in ('input_ids', 'attention_mask', 'labels', 'position_ids'):
                inputs[key] = kwargs.get(key)
            self.inputs.append(inputs)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        trace = self.trace
        trace.ends.append(time.perf_counter())
        trace.processor.append(time.process_time())
        if self.inspect and not trace.gradient:
            trace.gradient = gradients_of(self.model)
        self.steps.append(self.inputs)
        self.inputs = []

    def recognize(self, samples: Samples) -> None:
        """Finds out which samples reached the model. Called after the training, because it takes time."""
        trace = self.trace
        for inputs in self.steps:
            ids: list[int] = []
            num_tokens = 0
            num_positions = 0
            for microbatch in inputs:
                size = microbatch['input_ids'].numel()
                num_positions += size
                trace.largest = max(trace.largest, size)
                for row_ids, row_labels in split_rows(microbatch):
                    if is_dummy_row(samples, row_ids, row_labels):
                        trace.num_dummy_rows += 1
                    else:
                        ids.append(index_of(samples, row_ids))
                        num_tokens += len(row_ids)
            trace.ids.append(ids)
            trace.tokens.append(num_tokens)
            trace.positions.append(num_positions)


def split_rows(inputs: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns tokens and labels of each row, or of each document of a packed row, without padding."""
    ids = inputs['input_ids']
    mask = inputs['attention_mask']
    labels = inputs['labels']
    if mask is not None and mask.shape == ids.shape:
        rows = []
        for row_ids, row_labels, is_real in zip(ids, labels, mask.bool(), strict=True):
            rows.append((row_ids[is_real].numpy(), row_labels[is_real].numpy()))
        return rows
    # Packed: the positions of each document begin at 0.
    positions = inputs['position_ids'].reshape(-1, ids.shape[-1])[0]
    starts = torch.nonzero(positions == 0).flatten().tolist()
    ends = [*starts[1:], ids.shape[-1]]
    documents = []
    for start, end in zip(starts, ends, strict=True):
        document_ids = ids[0, start:end].numpy()
        document_labels = labels[0, start:end].numpy()
        documents.append((document_ids, document_labels))
    return documents


def index_of(samples: Samples, ids: np.ndarray) -> int:
    """Returns the index of the sample with these tokens, or UNKNOWN."""
    tokens = np.ascontiguousarray(ids, dtype=np.int64).tobytes()
    return samples.index_by_tokens.get(tokens, UNKNOWN)


def is_dummy_row(samples: Samples, ids: np.ndarray, labels: np.ndarray) -> bool:
    """Whether a row is a dummy row: a sample with other labels, or other tokens with at most one label, which is 0."""
    # The first label of a row is not trained, because no token comes before it.
    labels = labels[1:]
    index = index_of(samples, ids)
    if index != UNKNOWN:
        return not np.array_equal(labels, samples[index]['labels'][1:].numpy())
    return labels[labels != -100].tolist() in ([], [0])
