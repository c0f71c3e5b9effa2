# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: a head that only some ranks use, where the trainer reduces by itself.

Arguments: result file. Each of the result's entries is what a rank was told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from composer.utils import dist
from transformers import LlamaForCausalLM

from composer_tokacc import TokenAccumulation, token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import loader, train


def with_heads() -> LlamaForCausalLM:
    """A model whose ranks scale their logits by parameters of their own, of unlike sizes."""
    model = text_model()
    model.heads = torch.nn.ParameterList([torch.ones(1), torch.ones(3)])
    head = model.heads[dist.get_global_rank()]
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * head.mean())
    return model


def main() -> None:
    """Trains one step and writes what the ranks were told."""
    data = loader(collate(text_rows([(3, 2), (9, 8), (5, 1), (4, 4)])))
    told = 'nothing'
    try:
        train(with_heads(), token_data_spec(data), algorithms=[TokenAccumulation()], microbatch_size=1,
              ddp_sync_strategy='forced_sync')  # fmt: skip
    except RuntimeError as error:
        told = str(error)
    gathered = dist.all_gather_object(told)
    if dist.get_global_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(gathered))


if __name__ == '__main__':
    main()
