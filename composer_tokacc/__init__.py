# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation and padding-aware microbatching for MosaicML Composer.

Every name is loaded on first use (PEP 562), so that the planner alone needs neither torch nor Composer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_ROOMS = {
    'algorithm': ('TokenAccumulation',),
    'counting': ('TokenCounts', 'count_tokens'),
    'data_spec': ('token_data_spec',),
    'layout': ('BatchLayout',),
    'monitor': ('TokenMonitor',),
    'planning': ('MicrobatchPlan', 'plan_microbatches'),
    'sampling': ('RegroupingBatchSampler', 'RegroupingDataLoader', 'SkipReadBatches'),
    'sizing': ('SizingReport', 'suggest_microbatching'),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(f'{__name__}.{_ROOM_OF[name]}'), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
