# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""TokenAccumulation: exact weights for every loss-generating token, and the checks that prove them."""

from typing import TYPE_CHECKING

from composer_tokacc.algorithm.functional import (
    apply_token_weights,
    sample_weight,
    step_loss_weights,
    token_weight,
    weighted_microbatches,
)
from composer_tokacc.lazy import on_first_use

if TYPE_CHECKING:
    from composer_tokacc.algorithm.token_accumulation import TokenAccumulation

__all__ = [
    'TokenAccumulation',
    'apply_token_weights',
    'sample_weight',
    'step_loss_weights',
    'token_weight',
    'weighted_microbatches',
]

# The functions need no Composer.
__getattr__, __dir__ = on_first_use(__name__, {'TokenAccumulation': 'token_accumulation'})
