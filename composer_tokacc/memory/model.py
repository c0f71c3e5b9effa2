# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The memory model of a run: what a rank holds at its peak, by term, for any microbatch and any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer_tokacc.memory.fit import ActivationFit
from composer_tokacc.memory.shapes import BatchShape
from composer_tokacc.memory.static import StaticBytes

__all__ = ['GIB', 'LARGE_RESIDUAL', 'MemoryModel']

GIB = 1 << 30
LARGE_RESIDUAL = 0.05
"""Residual from which a calibration says so: its figures are then rough."""


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
        saved: Fit of what the forward pass saves, where it was watched.
    """

    static: StaticBytes
    phases: Mapping[str, ActivationFit]
    vocab_size: int
    strategy: str = 'ddp'
    pixel_bytes_per_image_token: float = 0.0
    key: dict[str, Any] = field(default_factory=dict)
    saved: ActivationFit | None = None

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

    def coefficients(self, phase: str) -> dict[str, float]:
        """Fitted figures of a phase by the letters of the formula, in bytes per unit.

        ``a`` a token, ``b`` a logit, ``v`` an image token, ``p`` a byte of pixels, ``q`` a unit of ``rows x width^2``.
        """
        fitted = self.phases[phase].coefficients
        return {
            'a': fitted['text'].get('tokens', 0.0),
            'b': fitted['logits'].get('tokens', 0.0) / self.vocab_size,
            'v': fitted['vision'].get('image_tokens', 0.0) + fitted['text'].get('image_tokens', 0.0),
            'p': 2.0 + fitted['vision'].get('pixel_bytes', 0.0),
            'q': fitted['text'].get('area', 0.0),
        }

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
        saved = stored.pop('saved')
        return cls(
            static=StaticBytes(**stored.pop('static')),
            phases={name: ActivationFit(**fit) for name, fit in stored.pop('phases').items()},
            saved=ActivationFit(**saved) if saved else None,
            **stored,
        )


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
