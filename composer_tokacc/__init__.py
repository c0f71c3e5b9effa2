# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation and padding-aware microbatching for MosaicML Composer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer_tokacc.lazy import on_first_use

if TYPE_CHECKING:
    from composer_tokacc.algorithm import TokenAccumulation
    from composer_tokacc.algorithm.functional import step_loss_weights, weighted_microbatches
    from composer_tokacc.algorithm.logits_at_labels import LogitsAtLabels
    from composer_tokacc.checks.token_weights import measure_token_weights
    from composer_tokacc.counting import TokenCounts, count_tokens
    from composer_tokacc.data_spec import token_data_spec
    from composer_tokacc.invariance import verify_invariance, verify_isolation
    from composer_tokacc.layout import BatchLayout
    from composer_tokacc.monitor import TokenMonitor
    from composer_tokacc.planning import MicrobatchPlan, plan_microbatches
    from composer_tokacc.sampling import RegroupingBatchSampler, RegroupingDataLoader, SkipReadBatches
    from composer_tokacc.sizing import SizingReport, suggest_microbatching

__version__ = '0.2.0'

__all__ = [
    'BatchLayout',
    'LogitsAtLabels',
    'MicrobatchPlan',
    'RegroupingBatchSampler',
    'RegroupingDataLoader',
    'SizingReport',
    'SkipReadBatches',
    'TokenAccumulation',
    'TokenCounts',
    'TokenMonitor',
    'count_tokens',
    'measure_token_weights',
    'plan_microbatches',
    'step_loss_weights',
    'suggest_microbatching',
    'token_data_spec',
    'verify_invariance',
    'verify_isolation',
    'weighted_microbatches',
]

# The module that defines each public name. It is imported on first use, so that the planner can be imported without
# torch or Composer.
_MODULES = {
    'BatchLayout': 'layout',
    'LogitsAtLabels': 'algorithm.logits_at_labels',
    'MicrobatchPlan': 'planning',
    'RegroupingBatchSampler': 'sampling',
    'RegroupingDataLoader': 'sampling',
    'SizingReport': 'sizing',
    'SkipReadBatches': 'sampling',
    'TokenAccumulation': 'algorithm',
    'TokenCounts': 'counting',
    'TokenMonitor': 'monitor',
    'count_tokens': 'counting',
    'measure_token_weights': 'checks.token_weights',
    'plan_microbatches': 'planning',
    'step_loss_weights': 'algorithm.functional',
    'suggest_microbatching': 'sizing',
    'token_data_spec': 'data_spec',
    'verify_invariance': 'invariance',
    'verify_isolation': 'invariance',
    'weighted_microbatches': 'algorithm.functional',
}


__getattr__, __dir__ = on_first_use(__name__, _MODULES)
