# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation and padding-aware microbatching for MosaicML Composer."""

from composer_tokacc.algorithm import TokenAccumulation
from composer_tokacc.counting import TokenCounts, count_tokens
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.layout import BatchLayout
from composer_tokacc.monitor import TokenMonitor
from composer_tokacc.planning import MicrobatchPlan, plan_microbatches
from composer_tokacc.sampling import RegroupingBatchSampler, RegroupingDataLoader, SkipReadBatches
from composer_tokacc.sizing import SizingReport, suggest_microbatching

__version__ = '0.1.0'

__all__ = [
    'BatchLayout',
    'MicrobatchPlan',
    'RegroupingBatchSampler',
    'RegroupingDataLoader',
    'SizingReport',
    'SkipReadBatches',
    'TokenAccumulation',
    'TokenCounts',
    'TokenMonitor',
    'count_tokens',
    'plan_microbatches',
    'suggest_microbatching',
    'token_data_spec',
]
