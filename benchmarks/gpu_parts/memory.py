# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""(e) Predicted against measured peak memory, and the largest size on this device: the studies of `memory_gpu`."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_parts.scale import Scale
from benchmarks.gpu_parts.store import Store
from benchmarks.memory_gpu import LIMIT, study, text_config, vision_config

__all__ = ['run']

CONFIGS = {'text': text_config, 'vision': vision_config}


def measure(name: str, checkpointing: bool, scale: Scale) -> dict[str, Any]:
    """One model; without a GPU its predictions alone."""
    result = study(name, CONFIGS[name](not scale.device.is_gpu), checkpointing, dry=not scale.device.is_gpu)
    errors = [row['error'] for row in result['traced'] if 'error' in row]
    if errors:
        largest = result['largest']
        # Never under: a prediction below the truth ends a run.
        fitting = largest['fits'] and largest.get('fits_at_1.15') is False
        result['holds'] = min(errors) >= 0 and max(errors) <= LIMIT and fitting
        result['worst_under'], result['worst_over'] = min(*errors, 0.0), max(*errors, 0.0)
    return result


def run(scale: Scale, store: Store) -> None:
    studies = [(name, checkpointing) for name in CONFIGS for checkpointing in (False, True)]
    # A rehearsal traces one: the others are the same lines, and tracing takes its time on a CPU.
    for name, checkpointing in studies if scale.device.is_gpu else studies[:1]:
        suffix = '_checkpointing' if checkpointing else ''
        store.measure(f'e_memory_{name}{suffix}', lambda n=name, c=checkpointing: measure(n, c, scale))
