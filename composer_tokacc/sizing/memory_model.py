# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The memory model of a run: what a rank holds at its peak, by term, for any microbatch and any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from scipy.optimize import nnls
from torch import nn

from composer_tokacc.cache import fingerprint, keep, load_kept, whole_file
from composer_tokacc.compat import storage_key
from composer_tokacc.model_structure import transformer_blocks
from composer_tokacc.planning import check_count
from composer_tokacc.sizing.shapes import BatchShape

GIB = 1 << 30
LARGE_RESIDUAL = 0.05
"""Residual from which a calibration says so: its figures are then rough."""
CALIBRATION_VERSION = 5
"""Goes up with every change of what a calibration holds, so that files of older versions are not read."""

# What the bytes of each part can depend on. `logits` are positions of which logits are computed: all tokens, or only
# those with a label.
_FEATURES_OF = {
    'text': ('constant', 'tokens', 'area', 'image_tokens', 'labels'),
    'logits': ('logits',),
    'vision': ('image_tokens', 'pixel_bytes', 'image_area'),
    'weights': ('constant',),
}


@dataclass(frozen=True, kw_only=True)
class StaticBytes:
    """Bytes of the whole model on one rank, before anything is sharded.

    Args:
        parameters: All parameters, frozen ones too.
        buffers: Buffers.
        gradients: Gradients of the parameters that train.
        optimizer: States of the optimizer.
        optimizer_step: Temporary tensors of the optimizer's step, when no activation is held.
        block: Numbers of the largest transformer block, which FSDP gathers whole.
        outside: Numbers outside all blocks (embeddings, head), which FSDP gathers whole and keeps for the step.
        trained_block: Numbers that train of the block that has most of them.
        trained_outside: Those outside all blocks that train.
        compute_bytes: Bytes of a number in the precision of the forward pass.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_step: int
    block: int
    outside: int
    trained_block: int
    trained_outside: int
    compute_bytes: int

    @classmethod
    def from_model(cls, model: nn.Module, *, optimizer: int, optimizer_step: int, compute_bytes: int) -> StaticBytes:
        """Counts a model after a backward pass; parameters that no loss reaches have no gradient."""
        blocks = [list(block.parameters()) for block in transformer_blocks(model)] or [[]]
        inside = {id(parameter) for block in blocks for parameter in block}
        parameters = list(model.parameters())
        outside = [parameter for parameter in parameters if id(parameter) not in inside]
        return cls(
            parameters=_num_bytes(parameters),
            buffers=_num_bytes(model.buffers()),
            gradients=_num_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
            optimizer=optimizer,
            optimizer_step=optimizer_step,
            block=max(sum(one.numel() for one in block) for block in blocks),
            outside=sum(one.numel() for one in outside),
            trained_block=max(_num_trained(block) for block in blocks),
            trained_outside=_num_trained(outside),
            compute_bytes=compute_bytes,
        )

    def terms(self, strategy: str, num_ranks: int) -> dict[str, float]:
        """Returns bytes by name on one of `num_ranks` ranks."""
        check_count('num_ranks', num_ranks)
        # FSDP holds one part in `num_ranks` of everything.
        parts = num_ranks if strategy == 'fsdp' else 1
        terms = {
            'parameters': self.parameters / parts,
            'gradients': self.gradients / parts,
            'optimizer states': self.optimizer / parts,
        }
        if self.buffers:
            terms['buffers'] = float(self.buffers)
        if strategy == 'fsdp':
            # In the precision of the forward pass: the parameters outside the blocks, two blocks (the one that runs and
            # the one fetched ahead), and the gradients of what is held. A block's are copied to float32 to be reduced.
            gathered = self.outside + 2 * self.block + self.trained_outside + self.trained_block
            terms['gathered by FSDP'] = float(gathered * self.compute_bytes + self.trained_block * 4)
        elif num_ranks > 1:
            # DDP copies every gradient, because Composer leaves `gradient_as_bucket_view` off.
            terms['DDP buckets'] = float(self.gradients)
        return terms

    def optimizer_peak(self, strategy: str, num_ranks: int) -> float:
        """Returns bytes in the optimizer's step, when activations are gone and its temporary tensors are there."""
        terms = self.terms(strategy, num_ranks)
        terms.pop('gathered by FSDP', None)
        return sum(terms.values()) + self.optimizer_step / (num_ranks if strategy == 'fsdp' else 1)


def _num_trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.grad is not None)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Counts memory that several tensors share once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


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
        sizes = _features(shape, self.area)
        return {
            part: sum(coefficient * sizes[name] for name, coefficient in terms.items())
            for part, terms in self.coefficients.items()
        }


def _features(shape: BatchShape, area: str) -> dict[str, float]:
    names = ('tokens', 'area', 'image_tokens', 'pixel_bytes', 'image_area', 'logits')
    sizes = {'constant': 1.0, 'labels': float(shape.labels or 0)}
    for name in names:
        sizes[name] = float(getattr(shape, name))
    if area == 'never' or (area == 'padded' and not shape.is_padded):
        sizes['area'] = 0.0
    return sizes


def fit_activations(shapes: Sequence[BatchShape], measured: Sequence[Mapping[str, int]], *, area: str) -> ActivationFit:
    """Fits the measured bytes by part of several microbatches; for `area` see :class:`ActivationFit`."""
    sizes = [_features(shape, area) for shape in shapes]
    totals = _totals(measured)
    coefficients: dict[str, dict[str, float]] = {}
    for part in measured[0]:
        values = np.array([parts[part] for parts in measured], dtype=np.float64)
        if part == 'weights':
            # A text-only microbatch does not copy the encoder's weights: the largest counts.
            coefficients[part] = {'constant': float(values.max())}
            continue
        names = _FEATURES_OF[part]
        features = np.array([[one[name] for name in names] for one in sizes])
        # Errors count relative to the whole, so that small microbatches weigh as much as large ones.
        solution = non_negative_fit(features / totals[:, None], values / totals)
        coefficients[part] = {name: float(x) for name, x in zip(names, solution, strict=True) if x > 0}
    fitted = ActivationFit(coefficients=coefficients, area=area, residual=0.0)
    predicted = _totals([fitted.predict(shape) for shape in shapes])
    return replace(fitted, residual=float(np.abs(predicted / totals - 1).max()))


def _totals(microbatches: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Returns what each holds besides copies of weights, float64 (microbatches,)."""
    return np.array([sum(parts.values()) - parts.get('weights', 0) for parts in microbatches], dtype=np.float64)


def non_negative_fit(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the solution (n,) of ``min |features @ x - target|`` with ``x >= 0``, features (m, n), target (m,)."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0  # features differ by many orders of magnitude
    solution = nnls(features / scale, target)[0]
    solution[solution < 1e-9 * solution.max()] = 0.0  # noise of rounding is no term
    return solution / scale


def relative_fit(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the same solution for relative errors: of ``features @ x / target - 1``."""
    return non_negative_fit(features / target[:, None], np.ones(len(target)))


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Peak memory of one rank.

    ``static + a*tokens + b*logits*vocab + v*image_tokens + p*pixel_bytes + q*rows*width^2``

    Args:
        static: What does not depend on the microbatch.
        phases: Fits of what is held beyond it at the peak of each phase of a step; the highest counts.
        strategy: ``'ddp'`` or ``'fsdp'``: the activations differ too, because FSDP casts the residual stream as well.
        logits: ``'all'``, or ``'labels'`` for a run that computes logits only at labels.
        pixel_bytes_per_image_token: The most that a traced microbatch had.
    """

    static: StaticBytes
    phases: Mapping[str, ActivationFit]
    strategy: str = 'ddp'
    logits: str = 'all'
    pixel_bytes_per_image_token: float = 0.0

    def terms(self, shape: BatchShape, *, num_ranks: int = 1) -> dict[str, float]:
        """Returns bytes by term at the peak of a microbatch of this shape, in the phase that holds most."""
        parts = max((phase.predict(shape) for phase in self.phases.values()), key=lambda parts: sum(parts.values()))
        terms = self.static.terms(self.strategy, num_ranks)
        copies = parts.get('weights', 0.0)
        if self.strategy == 'ddp' and copies:
            # FSDP's gathered parameters are in the precision of the forward pass already.
            terms['autocast copies of weights'] = copies
        return {
            **terms,
            'text activations': parts['text'],
            'logits': parts['logits'],
            'vision activations': parts['vision'],
            # Twice: for metrics of training Composer copies each microbatch on the device.
            'inputs': 2.0 * (shape.pixel_bytes + shape.input_bytes),
        }

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


def rough_fit(residual: float) -> list[str]:
    """Returns one line where a fit is rough, else none."""
    line = (
        f'The memory model misses its own microbatches by up to {residual:.1%} of the activations '
        f'(more than {LARGE_RESIDUAL:.0%}): take its figures as rough, and leave room.'
    )
    return [line] * (residual > LARGE_RESIDUAL)


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
