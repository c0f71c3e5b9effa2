# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""From a model and a few samples to a memory model, without a GPU."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing.memory_model import MemoryModel, fit_activations
from composer_tokacc.sizing.shapes import probe_batches
from composer_tokacc.sizing.trace import FakeRun, Probe

__all__ = ['calibrate_fake', 'calibration_path', 'fit_memory', 'load_or_calibrate']

log = logging.getLogger(__name__)

VERSION = 2
"""Goes up with every change of what a calibration holds, so that files of older versions are not read."""


def calibrate_fake(
    build: Callable[[], nn.Module],
    config: Any,
    samples: Sequence[Mapping[str, Any]],
    *,
    width: int,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    precision: str = 'fp32',
    strategy: str = 'ddp',
    on_gpu: bool = True,
    has_mask: bool = True,
    key: Mapping[str, Any] | None = None,
) -> MemoryModel:
    """Runs four to six probes of the model under fake tensors and fits the terms to them.

    Args:
        build: Makes the model on the CPU, as for training.
        config: Its Transformers config.
        samples: Samples as the processor returns them; see :func:`.probe_batches`.
        width: Width of the widest probe: about the longest sample of the dataset.
        make_optimizer: See :class:`.FakeRun`.
        precision: As in ``Trainer(precision=...)``.
        strategy: ``'ddp'`` or ``'fsdp'``.
        on_gpu: Whether the run will be on GPUs.
        has_mask: Whether attention holds a mask where there is padding, as SDPA does; flash attention has none.
        key: What the calibration is of; kept with it.

    Raises:
        ValueError: See :class:`.FakeRun` and :func:`.probe_batches`.
    """
    batches = probe_batches(BatchLayout.for_model(config), samples, width)
    run = FakeRun(
        build, batches[0], make_optimizer=make_optimizer, precision=precision, strategy=strategy, on_gpu=on_gpu
    )
    if not has_mask:
        for batch in batches:
            batch['attention_mask'] = torch.ones_like(batch['attention_mask'])
    memory = fit_memory(run, [run.measure(batch) for batch in batches], has_mask=has_mask, key=key)
    line = memory.warning()
    if line:
        log.warning(line)
    return memory


def fit_memory(
    run: FakeRun, probes: Sequence[Probe], *, has_mask: bool = True, key: Mapping[str, Any] | None = None
) -> MemoryModel:
    """Fits a memory model to measured probes of a run."""
    area = 'always' if run.model.config._attn_implementation == 'eager' else 'padded' if has_mask else 'never'
    shapes = [probe.shape for probe in probes]
    phases = probes[0].peaks
    return MemoryModel(
        static=run.static,
        phases={name: fit_activations(shapes, [probe.peaks[name] for probe in probes], area=area) for name in phases},
        vocab_size=run.vocab_size,
        strategy=run.strategy,
        pixel_bytes_per_image_token=max(shape.pixel_bytes / max(shape.image_tokens, 1) for shape in shapes),
        key=dict(key or {}),
    )


def calibration_path(folder: str | Path, key: Mapping[str, Any]) -> Path:
    """Where the calibration of `key` lies."""
    text = json.dumps(dict(key), sort_keys=True, default=str)
    return Path(folder) / f'memory-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json'


def load_or_calibrate(
    folder: str | Path, key: Mapping[str, Any], calibrate: Callable[[dict[str, Any]], MemoryModel]
) -> MemoryModel:
    """The stored calibration of `key`, or a new one, which is stored.

    Args:
        folder: Where calibrations are kept; one that cannot be written keeps none.
        key: Model, dtype, precision, attention, checkpointing, frozen parts, optimizer, device; versions are added.
        calibrate: Makes a new one and is given the whole key.
    """
    full = {**key, 'torch': torch.__version__, 'transformers': transformers.__version__, 'version': VERSION}
    path = calibration_path(folder, full)
    try:
        return MemoryModel.load(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning('Calibrating anew, because %s cannot be read: %s', path, error)
    memory = calibrate(full)
    try:
        memory.save(path)
    except OSError as error:
        log.warning('The calibration is not kept for the next time: %s', error)
    return memory
