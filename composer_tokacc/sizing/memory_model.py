# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The memory model of a run: what a rank holds at its peak, by term, for any microbatch and any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from composer_tokacc.sizing.fake import storage_key
from composer_tokacc.sizing.shapes import BatchShape

__all__ = [
    'GIB',
    'LARGE_RESIDUAL',
    'STRATEGIES',
    'ActivationFit',
    'MemoryModel',
    'StaticBytes',
    'fit_activations',
    'non_negative_fit',
    'transformer_blocks',
]

GIB = 1 << 30
LARGE_RESIDUAL = 0.05
"""Residual from which a calibration says so: its figures are then rough."""

STRATEGIES = ('ddp', 'fsdp')

FEATURES = ('constant', 'tokens', 'area', 'image_tokens', 'pixel_bytes', 'image_area')
# What the bytes of each part can depend on. Tokens and tokens x vocabulary are one column for one model, so text and
# logits are told apart where they are measured, not here.
_FEATURES_OF = {
    'text': ('constant', 'tokens', 'area', 'image_tokens'),
    'logits': ('tokens',),
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
        trained_outside: Those of them that train.
        compute_bytes: Bytes of a number in the precision of the forward pass.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_step: int
    block: int
    outside: int
    trained_outside: int
    compute_bytes: int

    @classmethod
    def of(cls, model: nn.Module, *, optimizer: int, optimizer_step: int, compute_bytes: int) -> StaticBytes:
        """Counts a model after a backward pass; parameters that no loss reaches have no gradient."""
        blocks = transformer_blocks(model)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        parameters = list(model.parameters())
        outside = [parameter for parameter in parameters if id(parameter) not in inside]
        return cls(
            parameters=_nbytes(parameters),
            buffers=_nbytes(model.buffers()),
            gradients=_nbytes(p.grad for p in parameters if p.grad is not None),
            optimizer=optimizer,
            optimizer_step=optimizer_step,
            block=max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
            outside=sum(p.numel() for p in outside),
            trained_outside=sum(p.numel() for p in outside if p.grad is not None),
            compute_bytes=compute_bytes,
        )

    def terms(self, strategy: str, num_ranks: int) -> dict[str, float]:
        """Bytes by name on one of `num_ranks` ranks.

        DDP copies every gradient into its buckets, because Composer leaves ``gradient_as_bucket_view`` off. FSDP holds
        a share of everything, and in the precision of the forward pass the parameters outside the blocks, two blocks
        (the one that runs and the one fetched ahead), and the gradients of what it holds; a block's gradients are
        copied to float32 to be reduced.

        Raises:
            ValueError: `num_ranks` is out of range.
        """
        if num_ranks < 1:
            raise ValueError(f'`num_ranks` must be at least 1, got: {num_ranks}.')
        share = num_ranks if strategy == 'fsdp' else 1
        terms = {
            'parameters': self.parameters / share,
            'gradients': self.gradients / share,
            'optimizer states': self.optimizer / share,
        }
        if self.buffers:
            terms['buffers'] = float(self.buffers)
        if strategy == 'fsdp':
            gathered = self.outside + 2 * self.block + self.trained_outside + self.block
            terms['gathered by FSDP'] = float(gathered * self.compute_bytes + self.block * 4)
        elif num_ranks > 1:
            terms['DDP buckets'] = float(self.gradients)
        return terms

    def optimizer_peak(self, strategy: str, num_ranks: int) -> float:
        """Bytes in the optimizer's step, when activations are gone and its temporary tensors are there."""
        terms = self.terms(strategy, num_ranks)
        terms.pop('gathered by FSDP', None)
        return sum(terms.values()) + self.optimizer_step / (num_ranks if strategy == 'fsdp' else 1)


@dataclass(frozen=True, kw_only=True)
class ActivationFit:
    """Bytes of each part as a sum of coefficients times sizes.

    Args:
        coefficients: By part, then by feature.
        area: When attention holds ``rows x width^2`` entries: ``'always'`` (eager), ``'padded'`` (SDPA builds a mask
            where there is padding), ``'never'`` (flash attention).
        residual: Largest relative error of the sum over the probes it was fitted to.
    """

    coefficients: Mapping[str, Mapping[str, float]]
    area: str
    residual: float

    def predict(self, shape: BatchShape) -> dict[str, float]:
        """Bytes of each part."""
        values: dict[str, float] = dict(zip(FEATURES, _features(shape, self.area), strict=True))
        return {
            part: sum(coefficient * values[name] for name, coefficient in terms.items())
            for part, terms in self.coefficients.items()
        }


def fit_activations(shapes: Sequence[BatchShape], measured: Sequence[Mapping[str, int]], *, area: str) -> ActivationFit:
    """Fits the parts of several probes.

    Args:
        shapes: Shapes of the probes.
        measured: Bytes by part of each.
        area: See :class:`ActivationFit`.
    """
    table = np.array([_features(shape, area) for shape in shapes], dtype=np.float64)
    totals = np.array([sum(parts.values()) - parts.get('weights', 0) for parts in measured], dtype=np.float64)
    coefficients: dict[str, dict[str, float]] = {}
    for part in measured[0]:
        values = np.array([parts[part] for parts in measured], dtype=np.float64)
        names = _FEATURES_OF[part]
        if part == 'weights':
            # A text-only microbatch does not copy the tower's weights: the largest counts.
            coefficients[part] = {'constant': float(values.max())}
            continue
        columns = table[:, [FEATURES.index(name) for name in names]]
        # Errors count relative to the whole, so that small microbatches weigh as much as large ones.
        solution = non_negative_fit(columns / totals[:, None], values / totals)
        coefficients[part] = {name: float(x) for name, x in zip(names, solution, strict=True) if x > 0}
    fitted = ActivationFit(coefficients=coefficients, area=area, residual=0.0)
    predicted = [fitted.predict(shape) for shape in shapes]
    sums = np.array([sum(parts.values()) - parts.get('weights', 0) for parts in predicted])
    residual = float(np.abs(sums / totals - 1).max())
    return ActivationFit(coefficients=coefficients, area=area, residual=residual)


def non_negative_fit(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solution of ``min |columns @ x - target|`` with ``x >= 0``.

    Args:
        columns: (m, n).
        target: (m,).

    Returns:
        (n,).
    """
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0  # columns differ by many orders of magnitude
    solution = nnls(columns / scale, target)[0]
    solution[solution < 1e-9 * solution.max()] = 0.0  # noise of rounding is no term
    return solution / scale


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Peak memory of one rank.

    ``static + a*tokens + b*tokens*vocab + v*image_tokens + p*pixel_bytes + q*rows*width^2``

    Args:
        static: What does not depend on the microbatch.
        phases: Fits of what is held beyond it at the peak of each phase of a step; the highest counts.
        vocab_size: Entries of a row of logits.
        strategy: ``'ddp'`` or ``'fsdp'``: the activations differ too, because FSDP casts the residual stream as well.
        pixel_bytes_per_image_token: As the probes had it, at most.
        key: What was calibrated: model, dtype, precision, attention, checkpointing, device.
    """

    static: StaticBytes
    phases: Mapping[str, ActivationFit]
    vocab_size: int
    strategy: str = 'ddp'
    pixel_bytes_per_image_token: float = 0.0
    key: dict[str, Any] = field(default_factory=dict)

    def activation_parts(self, shape: BatchShape) -> dict[str, float]:
        """Bytes of ``text``, ``logits``, ``vision`` and ``weights`` in the phase that holds most."""
        return max((phase.predict(shape) for phase in self.phases.values()), key=_total)

    def terms(self, shape: BatchShape, *, num_ranks: int = 1) -> dict[str, float]:
        """Bytes by term at the peak of a microbatch of this shape.

        Pixels and ids count twice: Composer copies each microbatch on the device.
        """
        parts = self.activation_parts(shape)
        terms = self.static.terms(self.strategy, num_ranks)
        copies = parts.pop('weights', 0.0)
        if self.strategy == 'ddp' and copies:
            # FSDP's gathered parameters are in the precision of the forward pass already.
            terms['autocast copies of weights'] = copies
        terms['text activations'] = parts['text']
        terms['logits'] = parts['logits']
        terms['vision activations'] = parts['vision']
        terms['inputs'] = 2.0 * (shape.pixel_bytes + shape.input_bytes)
        return terms

    def peak(self, shape: BatchShape, *, num_ranks: int = 1) -> float:
        """Bytes at the peak of a step made of microbatches of this shape, the optimizer's step included."""
        held = sum(self.terms(shape, num_ranks=num_ranks).values())
        return max(held, self.static.optimizer_peak(self.strategy, num_ranks))

    @property
    def residual(self) -> float:
        """Largest relative error of the activations, over the probes and the phases of a step."""
        return max(phase.residual for phase in self.phases.values())

    @property
    def holds_mask(self) -> bool:
        """Whether attention holds ``rows x width^2`` entries, as all but flash attention does."""
        return any(phase.area != 'never' for phase in self.phases.values())

    def warning(self) -> str | None:
        """One line where the fit is rough, else None."""
        if self.residual <= LARGE_RESIDUAL:
            return None
        return (
            f'The memory model misses its own probes by up to {self.residual:.1%} of the activations '
            f'(more than {LARGE_RESIDUAL:.0%}): take its figures as rough, and leave room.'
        )

    def save(self, path: str | Path) -> None:
        """Writes the calibration as JSON."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(asdict(self), indent=2) + '\n')

    @classmethod
    def load(cls, path: str | Path) -> MemoryModel:
        """Reads what :meth:`save` wrote."""
        stored = json.loads(Path(path).read_text())
        return cls(
            static=StaticBytes(**stored.pop('static')),
            phases={name: ActivationFit(**fit) for name, fit in stored.pop('phases').items()},
            **stored,
        )


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of every tower: members of the outermost module lists, experts inside a block excluded."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += [block for block in child if any(True for _ in block.parameters())]
        else:
            blocks += transformer_blocks(child)
    return blocks


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _features(shape: BatchShape, area: str) -> list[float]:
    has_area = area == 'always' or (area == 'padded' and shape.is_padded)
    return [
        1.0,
        float(shape.tokens),
        float(shape.area if has_area else 0),
        float(shape.image_tokens),
        float(shape.pixel_bytes),
        shape.image_area,
    ]


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
