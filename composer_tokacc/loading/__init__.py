# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Loaders that hand planned batches to the Trainer, and resumption without reading what was seen."""

from composer_tokacc.loading.exchange_loader import ExchangingDataLoader
from composer_tokacc.loading.random_state import RestoreRandomState
from composer_tokacc.loading.regrouping_loader import RegroupingDataLoader, SkipReadBatches

__all__ = ['ExchangingDataLoader', 'RegroupingDataLoader', 'RestoreRandomState', 'SkipReadBatches']
