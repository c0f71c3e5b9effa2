# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The memory model of a run: the peak memory of a rank by term, for any microbatch and any number of ranks.

:class:`StaticBytes` counts parameters, gradients and optimizer states. :class:`ActivationFit` is fitted to a few traced
microbatches and predicts the activations of others. :class:`MemoryModel` adds the two up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from pydantic import TypeAdapter
from scipy.optimize import nnls
from torch import nn

from composer_tokacc.arguments import check_count
from composer_tokacc.cache import fingerprint, keep, load_kept, whole_file
from composer_tokacc.compat import storage_key
from composer_tokacc.model_structure import transformer_blocks
from composer_tokacc.sizing.shapes import BatchShape

GIB = 1 << 30
LARGE_RESIDUAL = 0.05
"""If the residual is larger, a report warns that its figures are rough. The share of the device that the default
``safety`` of a report leaves free covers a smaller error."""
CALIBRATION_VERSION = 9
"""Increased when the content of a calibration changes, so that files of older versions are not read."""

# The sizes that the bytes of each part of a microbatch can depend on: attributes of `BatchShape`, and `constant`, which
# is 1. The part `weights` is missing, because copies of weights do not depend on the microbatch. Text depends on
# `labels`, because the hidden states at labels are copied.
_FEATURES_OF = {
    'text': ('constant', 'tokens', 'area', 'image_tokens', 'labels'),
    'logits': ('logits',),
    'vision': ('image_tokens', 'pixel_bytes', 'image_area'),
}


@dataclass(frozen=True, kw_only=True)
class StaticBytes:
    """Bytes of the whole model, before anything is sharded.

    The four fields from `block` to `trained_outside` are numbers of weights, and not bytes. They tell how much of the
    model a rank holds while FSDP has gathered it.

    Args:
        parameters: All parameters, frozen ones too.
        buffers: Buffers.
        gradients: Gradients of the parameters that are trained.
        optimizer: States of the optimizer.
        optimizer_step: Temporary tensors of the optimizer's step.
        block: Number of weights in the largest transformer block. FSDP gathers blocks one after the other.
        outside: Number of weights outside of all blocks (embeddings, head). FSDP gathers them and keeps them until
            the end of the backward pass.
        trained_block: Number of trained weights in the block that has most of them.
        trained_outside: Number of trained weights outside of all blocks.
        compute_bytes: Bytes of one weight as FSDP gathers it: usually in the precision of the forward pass.
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
    def from_model(
        cls,
        model: nn.Module,
        *,
        optimizer: int,
        optimizer_step: int,
        compute_bytes: int,
    ) -> StaticBytes:
        """Counts the bytes of a model after a backward pass. Only parameters with a gradient count as trained.

        See the class for the other arguments, which are bytes.
        """
        blocks = [list(block.parameters()) for block in transformer_blocks(model)]
        in_blocks = {id(parameter) for block in blocks for parameter in block}
        parameters = list(model.parameters())
        outside = [parameter for parameter in parameters if id(parameter) not in in_blocks]
        trained_blocks = [_trained(block) for block in blocks]
        return cls(
            parameters=_num_bytes(parameters),
            buffers=_num_bytes(model.buffers()),
            gradients=_num_bytes(parameter.grad for parameter in parameters),
            optimizer=optimizer,
            optimizer_step=optimizer_step,
            block=max(map(_num_elements, blocks), default=0),
            outside=_num_elements(outside),
            trained_block=max(map(_num_elements, trained_blocks), default=0),
            trained_outside=_num_elements(_trained(outside)),
            compute_bytes=compute_bytes,
        )

    def terms(self, strategy: str, num_ranks: int) -> dict[str, float]:
        """Returns bytes by name on one of `num_ranks` ranks, in the forward and backward passes."""
        check_count('num_ranks', num_ranks)
        num_shards = num_ranks if strategy == 'fsdp' else 1
        terms = {
            'parameters': self.parameters / num_shards,
            'gradients': self.gradients / num_shards,
            'optimizer states': self.optimizer / num_shards,
        }
        if self.buffers:
            terms['buffers'] = float(self.buffers)
        if strategy == 'fsdp':
            # Two blocks are gathered: one runs, the next is fetched.
            gathered_weights = self.outside + 2 * self.block
            # Gradients are whole until FSDP reduces them. It reduces a float32 copy of the gradients of one block.
            whole_gradients = self.trained_outside + self.trained_block
            float32_bytes = 4 * self.trained_block
            gathered_bytes = (gathered_weights + whole_gradients) * self.compute_bytes + float32_bytes
            terms['gathered by FSDP'] = float(gathered_bytes)
        elif num_ranks > 1:
            # DDP copies every gradient, because Composer leaves `gradient_as_bucket_view` off.
            terms['DDP buckets'] = float(self.gradients)
        return terms

    def optimizer_peak(self, strategy: str, num_ranks: int) -> float:
        """Returns bytes in the optimizer's step, without held logits. Weights gathered by FSDP are free by then."""
        terms = self.terms(strategy, num_ranks)
        terms.pop('gathered by FSDP', None)
        num_shards = num_ranks if strategy == 'fsdp' else 1
        return sum(terms.values()) + self.optimizer_step / num_shards


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the parameters that have a gradient."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def _num_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Returns the number of weights in the parameters."""
    return sum(parameter.numel() for parameter in parameters)


def _num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Returns the bytes of tensors. Memory that several of them share counts once."""
    tensors_by_memory = {storage_key(tensor): tensor for tensor in tensors if tensor is not None}
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_by_memory.values())


def bytes_of_states(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of the states that an optimizer has by now."""
    num_bytes = 0
    for state_of_parameter in optimizer.state.values():
        for value in state_of_parameter.values():
            if isinstance(value, torch.Tensor):
                num_bytes += value.nbytes
    return num_bytes


@dataclass(frozen=True, kw_only=True)
class ActivationFit:
    """Predicts activations in one phase of a step: the bytes of a part are a sum of coefficients times sizes.

    Args:
        coefficients: Bytes for one unit of a size, by part and then by the name of the size, as in ``_FEATURES_OF``.
        area: Tells when attention holds ``rows x width^2`` entries: ``'always'`` (eager), ``'padded'`` (SDPA builds a
            mask if there is padding), ``'never'`` (flash attention). Only then the size ``area`` counts.
        residual: Largest absolute error among the microbatches of the fit, as a share of the microbatch's
            activations in its highest phase.
    """

    coefficients: Mapping[str, Mapping[str, float]]
    area: str
    residual: float

    def predict(self, shape: BatchShape) -> dict[str, float]:
        """Returns the bytes of each part of a microbatch of this shape."""
        num_bytes: dict[str, float] = {}
        for part, coefficients in self.coefficients.items():
            num_bytes[part] = 0.0
            for name, coefficient in coefficients.items():
                num_bytes[part] += coefficient * _size(shape, name, self.area)
        return num_bytes


def _size(shape: BatchShape, name: str, area: str) -> float:
    """Returns a size of a microbatch by one of the names in ``_FEATURES_OF``. For `area` see ``ActivationFit``."""
    if name == 'constant':
        return 1.0
    if name == 'area':
        holds_area = area == 'always' or (area == 'padded' and shape.is_padded)
        return float(shape.area) if holds_area else 0.0
    if name == 'labels' and shape.labels is None:
        return 0.0  # all logits are computed, so no hidden states are copied
    return float(getattr(shape, name))


def fit_activations(
    shapes: Sequence[BatchShape],
    measured: Sequence[Mapping[str, int]],
    *,
    area: str,
    peaks: np.ndarray,
) -> ActivationFit:
    """Fits the measured bytes of several microbatches in one phase of a step, part by part.

    Args:
        shapes: Shape of each microbatch.
        measured: Bytes by part of each microbatch, in this phase.
        area: See :class:`ActivationFit`.
        peaks: :func:`activation_bytes` of each microbatch in its highest phase, float64 (microbatches,). The residual
            is relative to them, because only the highest phase counts.
    """
    totals = activation_bytes(measured)
    predicted_totals = np.zeros(len(shapes))  # without copies of weights, as `totals`
    coefficients: dict[str, dict[str, float]] = {}
    for part in measured[0]:
        num_bytes = np.array([bytes_of_parts[part] for bytes_of_parts in measured], dtype=np.float64)
        if part == 'weights':
            # These are copies of weights, so they do not depend on the size of a microbatch. A microbatch of text has
            # no copies of the encoder's weights, so the largest value counts.
            coefficients[part] = {'constant': float(num_bytes.max())}
            continue
        names = _FEATURES_OF[part]
        sizes = []
        for shape in shapes:
            sizes.append([_size(shape, name, area) for name in names])
        features = np.array(sizes)
        # Both sides are divided by all activations of the microbatch. So its error is relative, and small microbatches
        # count as much as large ones.
        solution = non_negative_fit(features / totals[:, None], num_bytes / totals)
        predicted_totals += features @ solution
        coefficients[part] = dict(zip(names, solution.tolist(), strict=True))
    relative_errors = (predicted_totals - totals) / peaks
    residual = np.abs(relative_errors).max()
    return ActivationFit(coefficients=coefficients, area=area, residual=float(residual))


def activation_bytes(microbatches: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Returns the sum of the parts of each microbatch, float64 (microbatches,).

    Copies of weights are left out, because they are no activations.
    """
    totals = [sum(parts.values()) - parts.get('weights', 0) for parts in microbatches]
    return np.array(totals, dtype=np.float64)


def non_negative_fit(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the solution (n,) of ``min |features @ x - target|`` with ``x >= 0``, features (m, n), target (m,)."""
    # The features are scaled, because they differ by many orders of magnitude.
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    solution = nnls(features / scale, target)[0]
    solution[solution < 1e-9 * solution.max()] = 0.0  # rounding noise
    return solution / scale


def relative_fit(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Minimizes relative errors: returns the solution (n,) of ``min |features @ x / target - 1|`` with ``x >= 0``."""
    relative_features = features / target[:, None]
    return non_negative_fit(relative_features, np.ones(len(target)))


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Predicts the peak memory of one rank: static bytes, activations and inputs of a microbatch.

    Args:
        static: The part that does not depend on the microbatch.
        phases: Fits of the activations at the peak of each phase of a step, by the names in ``PHASES`` (`trace.py`).
            The highest phase counts.
        strategy: ``'ddp'`` or ``'fsdp'``.
        logits: Where the run computes logits: at ``'all'`` positions, or only at ``'labels'``. A model for
            ``'labels'`` also predicts microbatches with all logits (``BatchShape(labels=None)``).
        pixel_bytes_per_image_token: Bytes of pixels for one image token: the largest value among the traced
            microbatches. Callers multiply it by image tokens, to get the ``pixel_bytes`` of a planned shape.
    """

    static: StaticBytes
    phases: Mapping[str, ActivationFit]
    strategy: str = 'ddp'
    logits: str = 'all'
    pixel_bytes_per_image_token: float = 0.0

    def terms(self, shape: BatchShape, *, num_ranks: int = 1) -> dict[str, float]:
        """Returns bytes by term at the peak of a microbatch of this shape, in the phase with the highest peak."""
        parts_of_phases = [phase.predict(shape) for phase in self.phases.values()]
        parts = max(parts_of_phases, key=lambda parts_of_phase: sum(parts_of_phase.values()))
        terms = self.static.terms(self.strategy, num_ranks)
        weight_copies = parts.get('weights', 0.0)
        if weight_copies:  # none if FSDP gathers parameters in the precision of the forward pass
            terms['autocast copies of weights'] = weight_copies
        return {
            **terms,
            'text activations': parts['text'],
            'logits': parts['logits'],
            'vision activations': parts['vision'],
            # Inputs count twice, because Composer copies each microbatch on the device for metrics of training.
            'inputs': 2.0 * (shape.pixel_bytes + shape.input_bytes),
        }

    def peak(self, shape: BatchShape, *, num_ranks: int = 1) -> float:
        """Returns bytes at the peak of a step with microbatches of this shape, the optimizer's step included."""
        at_microbatch = sum(self.terms(shape, num_ranks=num_ranks).values())
        at_optimizer = self.static.optimizer_peak(self.strategy, num_ranks)
        if 'forward' in self.phases:  # as in every traced model
            # The Trainer holds the logits of a microbatch until the next one has its own. So the last logits are still
            # in memory in the optimizer's step. The phase `forward` ends before a microbatch has its own logits. The
            # logits in this phase are therefore held ones, and its fit predicts their bytes.
            at_optimizer += self.phases['forward'].predict(shape)['logits']
        return max(at_microbatch, at_optimizer)

    @property
    def residual(self) -> float:
        """Largest relative error of the activations among the traced microbatches and the phases of a step."""
        return max(phase.residual for phase in self.phases.values())

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON."""
        with whole_file(Path(path)) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=2) + '\n')

    @classmethod
    def load(cls, path: str | Path) -> MemoryModel:
        """Reads the file that :meth:`save` wrote."""
        return TypeAdapter(cls).validate_json(Path(path).read_bytes())


def warning_of_residual(residual: float) -> str | None:
    """Returns a warning if a memory model fits its own traced microbatches badly; otherwise None."""
    if residual <= LARGE_RESIDUAL:
        return None
    return (
        f'The memory model is wrong by up to {residual:.1%} of the activations of the microbatches that it was fitted '
        f'to, which is more than {LARGE_RESIDUAL:.0%}. Its figures are rough, so leave room.'
    )


def load_or_calibrate(
    folder: str | Path,
    key: Mapping[str, Any],
    calibrate: Callable[[dict[str, Any]], MemoryModel],
) -> MemoryModel:
    """Returns the stored calibration of `key`, or makes and stores a new one.

    Args:
        folder: Folder of the calibrations. If it cannot be written, nothing is stored.
        key: All that the calibration depends on: model, dtype, precision, attention, checkpointing, frozen parts,
            optimizer, device. The versions of torch, transformers and calibrations are added.
        calibrate: Makes a new one. It may ignore its argument, the key with these versions.
    """
    versions = {'torch': torch.__version__, 'transformers': transformers.__version__, 'version': CALIBRATION_VERSION}
    complete_key = {**key, **versions}
    path = Path(folder) / f'memory-{fingerprint(complete_key, length=16)}.json'
    memory = load_kept(path, MemoryModel.load)
    if memory is None:
        memory = calibrate(complete_key)
        keep(path, memory.save)
    return memory
