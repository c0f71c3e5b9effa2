# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A loop like torchtitan's, which counts the tokens of a step first: ``python examples/prove/torchtitan_style.py``."""

import torch
from subject import prove
from torch.nn.functional import cross_entropy


def step(model, microbatches):
    """One optimizer step. On several ranks torchtitan sums the count over them, and does not average the gradients."""
    global_valid_tokens = sum((batch['labels'][:, 1:] != -100).sum() for batch in microbatches)
    for batch in microbatches:
        logits, labels = model(**batch).logits[:, :-1].float(), batch['labels'][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum', ignore_index=-100)
        (loss / global_valid_tokens).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()


prove("a loop as torchtitan's", 'torch', step)
