# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A loop with ``weighted_microbatches``: ``python examples/prove/composer_tokacc_loop.py``."""

import torch
from subject import prove

from composer_tokacc import weighted_microbatches


def step(model, microbatches):
    """One optimizer step."""
    for batch, weight in weighted_microbatches(microbatches):
        (model(**batch).loss * weight).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()


prove('**a loop with `weighted_microbatches`**', 'composer_tokacc', step)
