# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The memory model of a run: what a rank holds at its peak, by term, for any microbatch and any number of ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scipy.optimize import nnls
from torch import nn

from composer_tokacc.cache import fingerprint, keep, load_kept, whole_file
from composer_tokacc.compat import attention_of
from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing.shapes import BatchShape, probe_batches
from composer_tokacc.sizing.static_bytes import StaticBytes
from composer_tokacc.sizing.trace import MakeOptimizer, TracedStep

log = logging.getLogger(__name__)

GIB = 1 << 30
LARGE_RESIDUAL = 0.05
"""Residual from which a calibration says so: its figures are then rough."""

CALIBRATION_VERSION = 4
"""Goes up with every change of what a calibration holds, so that files of older versions are not read."""

FEATURES = ('constant', 'tokens', 'area', 'image_tokens', 'pixel_bytes', 'image_area')
# What the bytes of each part can depend on. Tokens and tokens x vocabulary are one feature for one model, so text and
# logits are told apart where they are measured, not here.
_FEATURES_OF = {
    'text': ('constant', 'tokens', 'area', 'image_tokens'),
    'logits': ('tokens',),
    'vision': ('image_tokens', 'pixel_bytes', 'image_area'),
    'weights': ('constant',),
}


@dataclass(frozen=True, kw_only=True)
class ActivationFit:
    """Bytes of each part as a sum of coefficients times sizes.

    Args:
        coefficients: By part, then by feature.
        area: When attention holds ``rows x width^2`` entries: ``'always'`` (eager), ``'padded'`` (SDPA builds a mask
            where there is padding), ``'never'`` (flash attention).
        residual: Largest relative error of the sum over the microbatches it was fitted to.
    """

    coefficients: Mapping[str, Mapping[str, float]]
    area: str
    residual: float

    def predict(self, shape: BatchShape) -> dict[str, float]:
        """Returns the bytes of each part."""
        values: dict[str, float] = dict(zip(FEATURES, _features(shape, self.area), strict=True))
        return {
            part: sum(coefficient * values[name] for name, coefficient in terms.items())
            for part, terms in self.coefficients.items()
        }


def fit_activations(shapes: Sequence[BatchShape], measured: Sequence[Mapping[str, int]], *, area: str) -> ActivationFit:
    """Fits the measured bytes by part of several microbatches; for `area` see :class:`ActivationFit`."""
    table = np.array([_features(shape, area) for shape in shapes], dtype=np.float64)
    totals = np.array([sum(parts.values()) - parts.get('weights', 0) for parts in measured], dtype=np.float64)
    coefficients: dict[str, dict[str, float]] = {}
    for part in measured[0]:
        values = np.array([parts[part] for parts in measured], dtype=np.float64)
        names = _FEATURES_OF[part]
        if part == 'weights':
            # A text-only microbatch does not copy the encoder's weights: the largest counts.
            coefficients[part] = {'constant': float(values.max())}
            continue
        features = table[:, [FEATURES.index(name) for name in names]]
        # Errors count relative to the whole, so that small microbatches weigh as much as large ones.
        solution = non_negative_fit(features / totals[:, None], values / totals)
        coefficients[part] = {name: float(x) for name, x in zip(names, solution, strict=True) if x > 0}
    fitted = ActivationFit(coefficients=coefficients, area=area, residual=0.0)
    predicted = [fitted.predict(shape) for shape in shapes]
    sums = np.array([sum(parts.values()) - parts.get('weights', 0) for parts in predicted])
    residual = float(np.abs(sums / totals - 1).max())
    return ActivationFit(coefficients=coefficients, area=area, residual=residual)


def non_negative_fit(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the solution (n,) of ``min |features @ x - target|`` with ``x >= 0``, features (m, n), target (m,)."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0  # features differ by many orders of magnitude
    solution = nnls(features / scale, target)[0]
    solution[solution < 1e-9 * solution.max()] = 0.0  # noise of rounding is no term
    return solution / scale


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Peak memory of one rank.

    ``static + a*tokens + b*tokens*vocab + v*image_tokens + p*pixel_bytes + q*rows*width^2``

    Args:
        static: What does not depend on the microbatch.
        phases: Fits of what is held beyond it at the peak of each phase of a step; the highest counts.
        strategy: ``'ddp'`` or ``'fsdp'``: the activations differ too, because FSDP casts the residual stream as well.
        pixel_bytes_per_image_token: The most that a traced microbatch had.
    """

    static: StaticBytes
    phases: Mapping[str, ActivationFit]
    strategy: str = 'ddp'
    pixel_bytes_per_image_token: float = 0.0

    def terms(self, shape: BatchShape, *, num_ranks: int = 1) -> dict[str, float]:
        """Returns bytes by term at the peak of a microbatch of this shape, in the phase that holds most."""
        parts = max((phase.predict(shape) for phase in self.phases.values()), key=lambda parts: sum(parts.values()))
        terms = self.static.terms(self.strategy, num_ranks)
        copies = parts.pop('weights', 0.0)
        if self.strategy == 'ddp' and copies:
            # FSDP's gathered parameters are in the precision of the forward pass already.
            terms['autocast copies of weights'] = copies
        terms['text activations'] = parts['text']
        terms['logits'] = parts['logits']
        terms['vision activations'] = parts['vision']
        # Twice: for metrics of training Composer copies each microbatch on the device.
        terms['inputs'] = 2.0 * (shape.pixel_bytes + shape.input_bytes)
        return terms

    def peak(self, shape: BatchShape, *, num_ranks: int = 1) -> float:
        """Returns bytes at the peak of a step made of microbatches of this shape, the optimizer's step included."""
        held = sum(self.terms(shape, num_ranks=num_ranks).values())
        return max(held, self.static.optimizer_peak(self.strategy, num_ranks))

    @property
    def residual(self) -> float:
        """Largest relative error of the activations, over the traced microbatches and the phases of a step."""
        return max(phase.residual for phase in self.phases.values())

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON."""
        with whole_file(Path(path)) as written:
            written.write_text(json.dumps(asdict(self), indent=2) + '\n')

    @classmethod
    def load(cls, path: str | Path) -> MemoryModel:
        """Reads what :meth:`save` wrote."""
        stored = json.loads(Path(path).read_text())
        return cls(
            static=StaticBytes(**stored.pop('static')),
            phases={name: ActivationFit(**fit) for name, fit in stored.pop('phases').items()},
            **stored,
        )


def residual_warning(residual: float) -> str | None:
    """Returns one line where a fit is rough, else None."""
    if residual <= LARGE_RESIDUAL:
        return None
    return (
        f'The memory model misses its own microbatches by up to {residual:.1%} of the activations '
        f'(more than {LARGE_RESIDUAL:.0%}): take its figures as rough, and leave room.'
    )


def calibrate_fake(
    build: Callable[[], nn.Module],
    config: Any,
    samples: Sequence[Mapping[str, Any]],
    *,
    width: int,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: str = 'fp32',
    strategy: str = 'ddp',
    on_gpu: bool = True,
    has_mask: bool = True,
) -> MemoryModel:
    """Traces four to six microbatches of the model under fake tensors and fits the terms to them.

    Args:
        build: Makes the model on the CPU, in training mode: ``lambda: LlamaForCausalLM(config)``. A Composer
            ``HuggingFaceModel`` is unwrapped.
        config: Its Transformers config.
        samples: Samples as the processor returns them; see ``probe_batches``.
        width: Width of the widest microbatch: about the longest sample of the dataset.
        make_optimizer: Makes the optimizer of the parameters that train.
        precision: ``'fp32'``, ``'amp_bf16'`` or ``'amp_fp16'``, as in ``Trainer(precision=...)``.
        strategy: ``'ddp'`` or ``'fsdp'``, which runs a copy of the parameters in the type of `precision`.
        on_gpu: Whether the run is on GPUs, where autocast keeps more in float32 and optimizers work on all tensors
            at once.
        has_mask: Whether attention holds a mask where there is padding, as SDPA does; flash attention has none.

    Raises:
        ValueError: Precision or strategy is unknown, or the model's control flow depends on values of its weights.
    """
    batches = probe_batches(BatchLayout.for_model(config), samples, width)
    step = TracedStep(
        build, batches[0], make_optimizer=make_optimizer, precision=precision, strategy=strategy, on_gpu=on_gpu
    )
    if not has_mask:
        for batch in batches:
            batch['attention_mask'] = torch.ones_like(batch['attention_mask'])
    shapes, peaks = zip(*map(step.measure, batches), strict=True)
    area = 'always' if attention_of(step.model.config) == 'eager' else 'padded' if has_mask else 'never'
    memory = MemoryModel(
        static=step.static,
        phases={name: fit_activations(shapes, [phases[name] for phases in peaks], area=area) for name in peaks[0]},
        strategy=strategy,
        pixel_bytes_per_image_token=max(shape.pixel_bytes / max(shape.image_tokens, 1) for shape in shapes),
    )
    line = residual_warning(memory.residual)
    if line:
        log.warning(line)
    return memory


def load_or_calibrate(
    folder: str | Path, key: Mapping[str, Any], calibrate: Callable[[dict[str, Any]], MemoryModel]
) -> MemoryModel:
    """Returns the stored calibration of `key`, or a new one, which is stored.

    Args:
        folder: Where calibrations are kept; one that cannot be written keeps none.
        key: Model, dtype, precision, attention, checkpointing, frozen parts, optimizer, device; versions are added.
        calibrate: Makes a new one and is given the whole key.
    """
    full = {**key, 'torch': torch.__version__, 'transformers': transformers.__version__, 'version': CALIBRATION_VERSION}
    path = Path(folder) / f'memory-{fingerprint(full, length=16)}.json'
    memory = load_kept(path, MemoryModel.load)
    if memory is None:
        memory = calibrate(full)
        keep(path, memory.save)
    return memory


def _features(shape: BatchShape, area: str) -> list[float]:
    has_area = area == 'always' or (area == 'padded' and shape.is_padded)
    sizes = (shape.tokens, shape.area * has_area, shape.image_tokens, shape.pixel_bytes, shape.image_area)
    return [1.0, *map(float, sizes)]
