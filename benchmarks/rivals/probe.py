# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What reached the model and when its weights moved, seen from outside: the same eyes for every trainer."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from benchmarks.rivals.data import Samples

Gradients = dict[str, torch.Tensor]
UNKNOWN = -1


@dataclass
class Seen:
    """A run on this rank, a list entry an optimizer step."""

    ends: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """Processor time of this process at each end."""
    waits: list[float] = field(default_factory=list)
    """Seconds in which the loop waited for its loader."""
    positions: list[int] = field(default_factory=list)
    """Rows times width of all microbatches, the packed ones' tokens."""
    tokens: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    """Which samples, :data:`UNKNOWN` for rows that are none."""
    fillers: int = 0
    """Rows with the tokens of a sample and other labels: they fill up a microbatch, weighing nothing."""
    losses: list[tuple[float, int]] = field(default_factory=list)
    """Sum of the losses of the tokens, and their number, where asked for."""
    largest: int = 0
    """Positions of the largest microbatch."""
    saved: int = 0
    """Bytes that the forward of a microbatch kept for its backward, the most, where asked for."""
    rss: int = 0
    """Growth of the process's memory at its peak, in bytes."""
    gradient: Gradients = field(default_factory=dict)
    """Of the first step, as the optimizer had it."""


@contextmanager
def watched(model: Any, samples: Samples, *, inspect: bool = False, curve: bool = False) -> Iterator[Seen]:
    """Watches a training run of the model.

    Args:
        model: As it will be trained, not yet wrapped.
        samples: Of the run.
        inspect: Whether to keep the first gradient and measure what is kept for the backward, which takes time.
        curve: Whether to sum up the losses of the tokens, which takes time.
    """
    watcher = _Watcher(model, inspect, curve)
    handles = [
        model.register_forward_pre_hook(watcher.entered, with_kwargs=True),
        register_optimizer_step_post_hook(watcher.stepped),
    ]
    if curve:
        handles.append(model.register_forward_hook(watcher.left, with_kwargs=True))
    if inspect:
        handles += _watch_saved(model, watcher.seen)
    plain_next = dataloader._BaseDataLoaderIter.__next__

    def waiting(iterator: Any) -> Any:
        began = time.perf_counter()
        try:
            return plain_next(iterator)
        finally:
            watcher.waited += time.perf_counter() - began

    dataloader._BaseDataLoaderIter.__next__ = waiting
    before = _reset_peak()
    try:
        yield watcher.seen
    finally:
        watcher.seen.rss = _peak() - before
        dataloader._BaseDataLoaderIter.__next__ = plain_next
        for handle in handles:
            handle.remove()
    watcher.recognise(samples)


class _Watcher:
    """Gathers until the weights move."""

    def __init__(self, model: Any, inspect: bool, curve: bool) -> None:
        self.model, self.inspect, self.curve = model, inspect, curve
        self.seen = Seen()
        self.steps: list[list[dict[str, Any]]] = []
        self._begin()

    def _begin(self) -> None:
        self.inputs: list[dict[str, Any]] = []
        self.losses: list[tuple[float, int]] = []
        self.waited = 0.0

    def entered(self, module: Any, args: Any, kwargs: Any) -> None:
        # Forwards without gradients only look: checks of the first batch, evaluation.
        if torch.is_grad_enabled():
            keys = ('input_ids', 'attention_mask', 'labels', 'position_ids')
            self.inputs.append({key: kwargs.get(key) for key in keys})

    def left(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            logits, labels = output.logits[:, :-1].detach(), kwargs['labels'][:, 1:]
            total = torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction='sum'
            )
            self.losses.append((total.item(), int((labels != -100).sum())))

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen = self.seen
        seen.ends.append(time.perf_counter())
        seen.processor.append(time.process_time())
        seen.waits.append(self.waited)
        if self.inspect and not seen.gradient:
            seen.gradient = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        if self.curve:
            seen.losses.append((sum(loss for loss, _ in self.losses), sum(count for _, count in self.losses)))
        self.steps.append(self.inputs)
        self._begin()

    def recognise(self, samples: Samples) -> None:
        """Which samples reached the model; after the run, as it takes time."""
        seen = self.seen
        for inputs in self.steps:
            rows = [row for one in inputs for row in _rows(one)]
            sizes = [one['input_ids'].numel() for one in inputs]
            seen.positions.append(sum(sizes))
            seen.largest = max(seen.largest, *sizes, 0)
            places = [_place(samples, *row) for row in rows]
            seen.ids.append([place for place in places if place is not None])
            seen.fillers += places.count(None)
            seen.tokens.append(sum(len(row[0]) for row, place in zip(rows, places, strict=True) if place is not None))


def _rows(inputs: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of each row, or document of a packed row, without padding."""
    ids, mask, labels = inputs['input_ids'], inputs['attention_mask'], inputs['labels']
    labels = ids if labels is None else labels
    if mask is None or mask.dim() != 2 or mask.shape != ids.shape:
        positions = inputs['position_ids']
        flat = positions.reshape(-1, ids.shape[-1])[0] if positions is not None else torch.arange(ids.shape[-1])
        starts = [*torch.nonzero(flat == 0).flatten().tolist(), ids.shape[-1]]
        pairs = pairwise(starts)
        return [(ids[0, start:end].numpy(), labels[0, start:end].numpy()) for start, end in pairs]
    return [(ids[row][real].numpy(), labels[row][real].numpy()) for row, real in enumerate(mask.bool())]


def _place(samples: Samples, ids: np.ndarray, labels: np.ndarray) -> int | None:
    """Which sample it is; None for one with other labels, or without any but the one that is made up for such a row."""
    place = samples.index.get(np.ascontiguousarray(ids, dtype=np.int64).tobytes(), UNKNOWN)
    if place == UNKNOWN:
        return UNKNOWN if [label for label in labels[1:] if label != -100] not in ([], [0]) else None
    return place if np.array_equal(labels[1:], samples[place]['labels'][1:].numpy()) else None


def _watch_saved(model: Any, seen: Seen) -> list[Any]:
    """Hooks that measure what a forward keeps for its backward, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    entered: list[Any] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    def enter(module: Any, args: Any) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        hooks.__enter__()
        entered.append(hooks)

    def leave(module: Any, args: Any, output: Any) -> None:
        entered.pop().__exit__(None, None, None)
        seen.saved = max(seen.saved, sum(storage.nbytes() for storage in kept.values()))
        kept.clear()

    return [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]


def _reset_peak() -> int:
    """Gives freed memory back and has the system forget the peak; memory in use now, in bytes."""
    gc.collect()
    ctypes.CDLL('libc.so.6').malloc_trim(0)
    Path('/proc/self/clear_refs').write_text('5')
    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith('VmHWM'))
