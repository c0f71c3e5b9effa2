# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What is asked of a run's own model, on its own first batch, before any step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.core import State
from composer.core.precision import get_precision_context
from composer.utils import dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from composer_tokacc.algorithm.loss_terms import LossTerms
from composer_tokacc.algorithm.probe import check_packing, find_loss_rule
from composer_tokacc.counting import count_tokens
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.layout import BatchLayout

__all__ = ['check_packed', 'check_sharding', 'find_rule']

log = logging.getLogger(__name__)

Forward = Callable[[Any], Any]
Loss = Callable[[Any, Any], torch.Tensor]


def check_sharding(model: torch.nn.Module) -> None:
    """Raises RuntimeError if FSDP2 leaves out parameters: nobody reduces them, and every rank trains its own copy."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]
    if 0 < len(whole) < len(trained):
        raise RuntimeError(
            f'FSDP must shard every trained parameter, got: {len(whole)} whole ones, such as {whole[:3]}, which no '
            'rank shares. Let Composer wrap the model itself (no `_fsdp_wrap = False` on it), or freeze them.'
        )


def find_rule(state: State, terms: LossTerms, loss_tokens: str) -> str:
    """The rule by which the model averages its loss; with an explicit ``loss_tokens``, that one or an error."""
    rule = find_loss_rule(
        *_forward_and_loss(state, terms),
        state.device.batch_to_device(_probe_rows(state.batch, 1)),
        loss_tokens=loss_tokens,
        modules=(state.model,),
    )
    if rule is None:
        rule = 'causal' if loss_tokens == 'auto' else loss_tokens
        log.warning(
            'The model gives no logits, so `loss_tokens` could not be checked against its loss; using %r. '
            'Compare loss/train/total with an evaluation of the same data, or return logits.',
            rule,
        )
    return rule


def check_packed(state: State, terms: LossTerms) -> None:
    """Raises RuntimeError if the model's loss of packed rows is not that of the same rows padded."""
    rows = _probe_rows(state.batch, 3)
    check_packing(
        *_forward_and_loss(state, terms),
        state.device.batch_to_device(rows),
        state.device.batch_to_device(pack_rows(BatchLayout.infer(rows), rows)),
        modules=(state.model,),
    )


def _forward_and_loss(
    state: State, terms: LossTerms
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], torch.Tensor]]:
    """The model's forward as the trainer calls it, and the term of its loss that is a mean over tokens."""
    model: Any = state.model.module if isinstance(state.model, DistributedDataParallel) else state.model

    def forward(batch: Any) -> Any:
        with get_precision_context(state.precision, state.precision_config):
            return model(batch)

    return forward, lambda outputs, batch: terms.token_term(model.loss(outputs, batch))


def _probe_rows(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The rows that all ranks probe with: rank 0's, because FSDP hangs if only some ranks' rows have images."""
    try:
        layout = BatchLayout.infer(batch)
        lengths, labelled = layout.lengths(batch), count_tokens(batch).loss_generating
        # The shortest rows with enough labels to tell the rules apart.
        order = sorted(range(len(lengths)), key=lambda index: (labelled[index] < 2, lengths[index]))
        chosen = layout.trim(layout.select(batch, order[:count]))
    except (KeyError, ValueError):  # a layout that only the user's split knows: the probe masks all rows but one
        chosen = dict(batch)
    shared = [chosen]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
