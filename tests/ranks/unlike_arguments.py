# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: an argument that differs between the ranks. Returns the messages by argument."""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist

from tests.support.text import collate, one_layer_model, text_rows
from tests.support.training import fit, hugging_face, loader

UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    'token_weights': ({}, {'token_weights': 'sample'}),
    'loss_tokens': ({'loss_tokens': 'causal'}, {'loss_tokens': 'unshifted'}),
    'loss_units': ({}, {'loss_units': {'lm': 'tokens'}}),
    'router_balance': ({}, {'router_balance': 'step'}),
    'packing': ({'packing': True}, {}),
    'optimizers[0].param_groups[0].weight_decay': ({'weight_decay': 0.1}, {}),
}
"""The options of the two ranks."""


def message_of(*data: Any, weight_decay: float = 0.0, **options: Any) -> str:
    """Returns the message of this rank."""
    message = ''
    model = hugging_face(one_layer_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=weight_decay)
    try:
        fit(model, *data, optimizer=optimizer, **options)
    except RuntimeError as error:
        message = str(error)
    return message


def main() -> dict[str, list[str]]:
    batch = collate(text_rows([(4, 2), (6, 3)]))
    rank = dist.get_global_rank()
    messages = {}
    for name, options_of_ranks in UNLIKE.items():
        messages[name] = dist.all_gather_object(message_of(batch, **options_of_ranks[rank]))
    data = (loader(batch),) if rank else (batch,)
    messages['token_data_spec'] = dist.all_gather_object(message_of(*data))
    # The order of a mapping does not matter. The model gives no terms, so both ranks refuse them later.
    units = {'lm': 'tokens', 'boxes': 'samples'}
    alike: list[dict[str, Any]] = [{'loss_units': units}, {'loss_units': dict(reversed(units.items()))}]
    messages['alike'] = dist.all_gather_object(message_of(batch, **alike[rank]))
    caps: list[dict[str, Any]] = [{}, {'slot_tokens': 9}]
    messages['caps'] = dist.all_gather_object(message_of(batch, **caps[rank]))
    return messages
