# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: FSDP2 with text-only microbatches and ranks; rank 0 writes the relative errors."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ['FSDP_VERSION'] = '2'

import torch
from composer.utils import dist, get_device

from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from tests.ranks.gradient_matrix import ORDERS, SHARES, TEXT_RANK_SHARES
from tests.support.families import FAMILIES
from tests.support.fsdp import repair_average
from tests.support.training import fit, hugging_face, loader, logged, rank_share, relative_error, train
from tests.support.weights import weighted_reference


def sharded(model: torch.nn.Module) -> Any:
    """Every vision and text block is a unit of its own: a rank that skips one hangs the others."""
    wrapped = hugging_face(copy.deepcopy(model))
    blocks = ('DecoderLayer', 'EncoderLayer', 'VisionBlock')
    wrapped.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith(blocks)
    return wrapped


def unsharded_root(case: Any) -> str:
    """A model whose root is left out of FSDP: its own parameters would never be reduced over ranks."""
    wrapped = sharded(case.model)
    wrapped.model._fsdp_wrap = False
    share = BatchLayout.for_model(case.config).concat(case.rows, pad_token_id=case.pad_token_id)
    try:
        fit(wrapped, share, parallelism_config={'fsdp': {'state_dict_type': 'full'}})
    except RuntimeError as error:
        return str(error)
    return ''


def main() -> None:
    *names, path = sys.argv[1:]
    dist.initialize_dist(get_device('cpu'))
    repair_average()
    results: dict[str, Any] = {}
    for name in names:
        case = FAMILIES[name]()
        layout = BatchLayout.for_model(case.config)
        for order in ORDERS:
            rows = [case.rows[index] for index in ORDERS[order]]
            shares = (SHARES if order == 'mixed' else TEXT_RANK_SHARES)[dist.get_world_size()]
            batch = layout.concat(rows, pad_token_id=case.pad_token_id)
            for size, weights in ((1, 'token'), (3, 'token'), (1, 'sqrt')):
                expected, loss, _ = weighted_reference(case.model, batch, weights)
                share = layout.concat(rank_share(rows, shares), pad_token_id=case.pad_token_id)
                recorder, memory, trainer = train(
                    sharded(case.model), token_data_spec(loader(share), layout=layout), microbatch_size=size,
                    algorithms=[TokenAccumulation(token_weights=weights)],
                    parallelism_config={'fsdp': {'state_dict_type': 'full'}},
                )  # fmt: skip
                assert trainer.state.fsdp_enabled
                found = logged(memory, 'loss/train/total')[-1]
                results[f'{name} {order} microbatch {size} {weights}'] = {
                    'error': relative_error(recorder.gradients, expected),
                    'loss_error': abs(found - loss) / loss,
                    'sharded': sum(hasattr(p, 'full_tensor') for p in trainer.state.model.parameters()),
                }
    results['refused'] = unsharded_root(FAMILIES[names[0]]())
    if dist.get_global_rank() == 0:
        Path(path).write_text(json.dumps(results))


if __name__ == '__main__':
    main()
