# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How global batches are made and read: sampler, mixtures, DataLoaders of pre-split batches, and resumption."""

from typing import TYPE_CHECKING

from composer_tokacc.lazy import on_first_use
from composer_tokacc.sampling.exchange import ExchangingDataLoader
from composer_tokacc.sampling.loader import RegroupingDataLoader
from composer_tokacc.sampling.mixture import LossShares, Mixture
from composer_tokacc.sampling.sampler import RegroupingBatchSampler

if TYPE_CHECKING:
    from composer_tokacc.sampling.resume import RestoreRandomState, SkipReadBatches

__all__ = [
    'ExchangingDataLoader',
    'LossShares',
    'Mixture',
    'RegroupingBatchSampler',
    'RegroupingDataLoader',
    'RestoreRandomState',
    'SkipReadBatches',
]

# Only the callbacks need Composer.
__getattr__, __dir__ = on_first_use(__name__, {'RestoreRandomState': 'resume', 'SkipReadBatches': 'resume'})
