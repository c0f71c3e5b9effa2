# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hooks that see from outside which samples reach a model and when its weights change, the same for every trainer."""

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
    """A run on this rank. Lists have an entry for each optimizer step."""

    ends: list[float] = field(default_factory=list)
    # Processor time of this process at each end.
    processor: list[float] = field(default_factory=list)
    # Rows times width of all microbatches.
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # The samples of the step. UNKNOWN stands for a row that is not a sample.
    ids: list[list[int]] = field(default_factory=list)
    # Dummy rows: they have the tokens of a sample, but other labels.
    num_dummy_rows: int = 0
    # Positions of the largest microbatch.
    largest: int = 0
    # Gradient of the first step as the optimizer had it, if asked for.
    gradient: Gradients = field(default_factory=dict)


@contextmanager
def watched(model: Any, samples: Samples, *, inspect: bool = False) -> Iterator[Trace]:
    """Watches a training run.

    Args:
        model: The model before the trainer wraps it.
        samples: The samples of the run.
        inspect: Whether to keep the first gradient.
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
    """Collects the inputs of the model until the optimizer steps."""

    def __init__(self, model: Any, inspect: bool) -> None:
        self.model = model
        self.inspect = inspect
        self.trace = Trace()
        self.steps: list[list[dict[str, Any]]] = []
        self.inputs: list[dict[str, Any]] = []

    def before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # Forwards without gradients are checks and evaluation.
        if torch.is_grad_enabled():
            keys = ('input_ids', 'attention_mask', 'labels', 'position_ids')
            self.inputs.append({key: kwargs.get(key) for key in keys})

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        trace = self.trace
        trace.ends.append(time.perf_counter())
        trace.processor.append(time.process_time())
        if self.inspect and not trace.gradient:
            trace.gradient = gradients_of(self.model)
        self.steps.append(self.inputs)
        self.inputs = []

    def recognize(self, samples: Samples) -> None:
        """Finds the samples that reached the model. Runs after the training, because it takes time."""
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
                    place = place_of(samples, row_ids, row_labels)
                    if place is None:
                        trace.num_dummy_rows += 1
                    else:
                        ids.append(place)
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
        is_real = mask.bool()
        return [(ids[row][is_real[row]].numpy(), labels[row][is_real[row]].numpy()) for row in range(len(ids))]
    positions = inputs['position_ids'].reshape(-1, ids.shape[-1])[0]
    starts = torch.nonzero(positions == 0).flatten().tolist()
    ends = [*starts[1:], ids.shape[-1]]
    documents = []
    for start, end in zip(starts, ends, strict=True):
        documents.append((ids[0, start:end].numpy(), labels[0, start:end].numpy()))
    return documents


def place_of(samples: Samples, ids: np.ndarray, labels: np.ndarray) -> int | None:
    """Returns which sample a row is, None for a dummy row, and UNKNOWN for anything else."""
    place = samples.index.get(np.ascontiguousarray(ids, dtype=np.int64).tobytes(), UNKNOWN)
    if place != UNKNOWN:
        is_sample = np.array_equal(labels[1:], samples[place]['labels'][1:].numpy())
        return place if is_sample else None
    # A dummy row has at most one label, which is 0.
    trained_labels = labels[1:][labels[1:] != -100].tolist()
    return None if trained_labels in ([], [0]) else UNKNOWN
