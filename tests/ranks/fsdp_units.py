# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a sharded ``HuggingFaceModel`` as the user makes it, then with the line of the warning.

Returns the warnings and the error of the gradient of each of the two runs, and the number of FSDP2 units. FSDP1 shards
such models as well: its warnings are returned.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from composer_tokacc import token_data_spec
from composer_tokacc.algorithm import reduction
from composer_tokacc.model_structure import fsdp_units
from tests.support.fsdp import FSDP
from tests.support.text import collate, text_model, text_rows
from tests.support.training import fit, loader, rank_share, reference_gradients, relative_error

ROWS = [(4, 2), (14, 11), (9, 9), (5, 1), (6, 1), (7, 2)]


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(line: str) -> dict[str, Any]:
    """Trains a step after a line of Python that speaks of the ``model``."""
    rows = text_rows(ROWS)
    model = HuggingFaceModel(text_model(), shift_labels=True)
    expected, _ = reference_gradients(model.model, collate(rows))
    exec(line, {'model': model})
    messages = Messages()
    reduction.log.addHandler(messages)
    recorder = fit(model, token_data_spec(loader(collate(rank_share(rows, (2, 4))))), **FSDP)
    reduction.log.removeHandler(messages)
    return {
        'warnings': messages.texts,
        'error': relative_error(recorder.gradients, expected),
        'num_units': len(fsdp_units(recorder.trainer.state.model)),
    }


def warnings_of_fsdp1(line: str) -> list[str]:
    """Returns the warnings for a model that FSDP1 shards, as Composer does it on GPUs. It is not trained."""
    model = HuggingFaceModel(text_model(), shift_labels=True)
    exec(line, {'model': model})
    policy = CustomPolicy(getattr(model.model, 'fsdp_wrap_fn', lambda module: False))
    model.model = FullyShardedDataParallel(
        model.model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device('cpu')
    )
    messages = Messages()
    reduction.log.addHandler(messages)
    reduction.warn_of_large_units(model)
    reduction.log.removeHandler(messages)
    return messages.texts


def main() -> dict[str, Any]:
    as_it_is = train('')
    # Only the first rank warns, and all ranks must shard alike.
    warnings_of_ranks = dist.all_gather_object(as_it_is['warnings'])
    match = re.search(r'model\.\S+ = .*\]', ''.join(warnings_of_ranks[0]))
    assert match is not None, warnings_of_ranks
    return {
        'as_it_is': as_it_is,
        'with_line': train(match[0]),
        'fsdp1_as_it_is': warnings_of_fsdp1(''),
        'fsdp1_with_line': warnings_of_fsdp1(match[0]),
    }
