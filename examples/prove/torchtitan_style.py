# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A loop like torchtitan's, which counts the tokens of a step first: ``python examples/prove/torchtitan_style.py``."""

import torch
from subject import prove
from torch.nn.functional import cross_entropy


def step(model, microbatches):
    """One optimizer step. On several ranks torchtitan sums the count over them, and does not average the gradients."""
    targets = [batch['labels'][:, 1:] for batch in microbatches]
    global_valid_tokens = sum((target != -100).sum() for target in targets)
    for batch, target in zip(microbatches, targets, strict=True):
        logits = model(**batch).logits[:, :-1].float()
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction='sum', ignore_index=-100)
        (loss / global_valid_tokens).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()


prove("a loop as torchtitan's", 'torch', step)
