# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Who reads what: sampler, mixture, loaders of pre-split batches, exchange between ranks, resumption."""

from composer_tokacc.sampling.exchange import ExchangingDataLoader
from composer_tokacc.sampling.loader import RegroupingDataLoader
from composer_tokacc.sampling.mixture import Mixture
from composer_tokacc.sampling.resume import RestoreRandomState, SkipReadBatches
from composer_tokacc.sampling.sampler import RegroupingBatchSampler

__all__ = [
    'ExchangingDataLoader',
    'Mixture',
    'RegroupingBatchSampler',
    'RegroupingDataLoader',
    'RestoreRandomState',
    'SkipReadBatches',
]
