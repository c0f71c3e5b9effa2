# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs a microbatch forward and backward, and leaves a run as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from composer.core import State
from composer.core.precision import get_precision_context

from composer_tokacc.algorithm import TokenAccumulation
from composer_tokacc.compat import inner_model
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.metadata import annotate, without_metadata
from composer_tokacc.programs.rehearsal_choice import Candidate
from composer_tokacc.sampling.rank_assignment import RankAssignment
from composer_tokacc.weights import LOSS_WEIGHTS

ADAM_STATES = 2
"""Bytes of optimizer states a byte of parameters, where an optimizer cannot be tried on a small one."""


def run_candidate(state: State, candidate: Candidate, size: int) -> int:
    """Runs forward and backward of a candidate, or of the heaviest that the split makes of it; returns the peak."""
    algorithm = next((one for one in state.algorithms if isinstance(one, TokenAccumulation)), None)
    dataset: Any = state.dataloader.dataset  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    batch: PreSplitBatch = dataset.__getitems__(RankAssignment(candidate.samples))
    weights = algorithm.token_weights if algorithm is not None else 'token'
    rule = (algorithm.rule if algorithm is not None else None) or 'causal'
    split, model = split_of(state.dataloader), state.model
    if weights == 'column' and not any(LOSS_WEIGHTS in one for one in batch.microbatches):
        weights = 'token'  # a step's own, which no plan of a microbatch has
    counted = annotate(batch, rule, weights)
    microbatches = batch.microbatches if split is None else split(counted, size)
    heavy = max(microbatches, key=lambda one: (one['labels'].numel(), len(one)))
    given = {key: value for key, value in without_metadata(heavy).items() if key != LOSS_WEIGHTS}
    given = state.device.batch_to_device(given)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())  # the reducer learns the order of gradients in its first reduction
        with get_precision_context(state.precision, state.precision_config):
            outputs = model(given)
            loss = inner_model(model).loss(outputs, given)  # pyright: ignore[reportCallIssue]
        terms = list(loss.values()) if isinstance(loss, Mapping) else [loss]
        torch.stack([term.mean() for term in terms]).sum().backward()
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def is_out_of_memory(error: Exception) -> bool:
    """Tells whether an error is that of a device without room."""
    return isinstance(error, torch.OutOfMemoryError) or 'out of memory' in str(error)


@contextmanager
def undisturbed(state: State) -> Iterator[None]:
    """Gradients, buffers and random numbers are put back: the run is the same with and without the rehearsal."""
    model = state.model
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, kept in buffers:
            buffer.copy_(kept)


@contextmanager
def room_for_optimizers(state: State) -> Iterator[None]:
    """Holds the memory that optimizers will take in their first step."""
    room = [
        torch.empty(_state_bytes(optimizer), dtype=torch.uint8, device='cuda')
        for optimizer in state.optimizers
        if torch.cuda.is_available() and not optimizer.state
    ]
    yield
    del room


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns bytes of the states that an optimizer will have, as of a small parameter."""
    parameters = [one for group in optimizer.param_groups for one in group['params']]
    held = sum((one.to_local() if hasattr(one, 'to_local') else one).nbytes for one in parameters)
    small = torch.nn.Parameter(torch.zeros(64, 64))
    small.grad = torch.zeros_like(small)
    try:
        trial = type(optimizer)([small], **optimizer.defaults)
        trial.step()
    except (TypeError, ValueError, RuntimeError):
        return held * ADAM_STATES
    states = [value for of_one in trial.state.values() for value in of_one.values()]
    return held * sum(value.nbytes for value in states if isinstance(value, torch.Tensor)) // small.nbytes
