# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""accelerate, the code of its guide to gradient accumulation: ``python examples/prove/accelerate_loop.py``."""

import torch
from accelerate import Accelerator
from subject import prove


def step(model, microbatches):
    """One optimizer step."""
    accelerator = Accelerator(gradient_accumulation_steps=len(microbatches), cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for batch in microbatches:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()


prove('accelerate, `accumulate`', 'accelerate', step)
