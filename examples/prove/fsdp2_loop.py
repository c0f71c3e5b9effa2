# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A loop with torch's FSDP2 that divides by the number of microbatches: ``python examples/prove/fsdp2_loop.py``."""

import torch
from subject import prove, small_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

store = torch.distributed.HashStore()
torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
# Once, because a model cannot be sharded again in each step.
model = fully_shard(small_llama(), mesh=init_device_mesh('cpu', (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)


def step(model, microbatches):
    """One optimizer step."""
    for batch in microbatches:
        (model(**batch).loss / len(microbatches)).backward()
    optimizer.step()


prove('a loop with FSDP2, mean of means', 'torch', step, model)
torch.distributed.destroy_process_group()
