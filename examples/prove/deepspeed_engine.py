# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""DeepSpeed's engine, which divides by the number of microbatches: ``python examples/prove/deepspeed_engine.py``."""

import os

import deepspeed
import torch
from subject import prove

os.environ['LOCAL_RANK'] = '0'  # set by its launcher
store = torch.distributed.HashStore()
torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)


def step(model, microbatches):
    """One optimizer step."""
    # DeepSpeed needs a size, but the microbatches may have another one.
    config = {'train_micro_batch_size_per_gpu': 3, 'gradient_accumulation_steps': len(microbatches)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for batch in microbatches:
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.destroy()


prove("DeepSpeed's engine", 'deepspeed', step)
torch.distributed.destroy_process_group()
