# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""accelerate, "training samples of variable size" in its guide: ``python examples/prove/accelerate_tokens.py``."""

import torch
from accelerate import Accelerator
from subject import prove
from torch.nn.functional import cross_entropy


def step(model, microbatches):
    """One optimizer step."""
    accelerator = Accelerator(gradient_accumulation_steps=len(microbatches), cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    targets = [batch['labels'][:, 1:] for batch in microbatches]
    num_targets = sum((target != -100).sum() for target in targets)
    num_items = accelerator.gather(num_targets).sum().item()
    for batch, target in zip(microbatches, targets, strict=True):
        logits = prepared(**batch).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction='sum') / num_items
        # accelerate divides by the number of microbatches, and DDP by the number of ranks.
        accelerator.backward(loss * len(microbatches) * accelerator.num_processes)
    optimizer.step()


prove('accelerate, loss by tokens', 'accelerate', step)
