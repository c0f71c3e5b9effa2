# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks, before the optimizer moves, that the weights of a step were the ones that make it exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from composer_tokacc.algorithm.functional import RankSum, sample_weight, token_weight
from composer_tokacc.algorithm.loss_terms import LOSS_UNITS
from composer_tokacc.algorithm.weighted_labels import Weighing
from composer_tokacc.counting import loss_mask

__all__ = ['MicrobatchWeight', 'StepGuard']

# Composer computes its weight in double and applies it in float32.
RELATIVE_TOLERANCE = 1e-5
MEAN_TOLERANCE = 1e-3
"""The two means are of the very same logits."""
NUM_ROUNDINGS = 4
"""Of a loss that is computed in half precision (T5's), which has two or three digits."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchWeight:
    """Counts of one microbatch and of its step.

    Args:
        num_tokens: Loss-generating tokens.
        loss_weight: Sum of their weights: their number, where all weigh the same.
        num_samples: Rows that are samples.
        num_microbatches: Number of microbatches with samples that this rank makes of the step.
        labelled: Its labels (and attention mask) on the device, looked at in :meth:`StepGuard.check`.
        step: The step that it is part of.
    """

    num_tokens: int
    loss_weight: float
    num_samples: int
    num_microbatches: int
    labelled: Mapping[str, torch.Tensor]
    step: StepGuard

    @property
    def num_positions(self) -> int:
        """Rows times padded width: what Composer's default token counter would say."""
        return self.labelled['labels'].numel()

    @property
    def weight(self) -> float:
        """What Composer multiplies the loss by, whatever it is."""
        return sample_weight(self.num_samples, self.step.samples, world_size=self.step.world_size)

    def scales(self) -> dict[str, float]:
        """What the loss is multiplied by, for each unit of a term, so that Composer's weight makes it exact."""
        if self.num_samples == 0:
            return dict.fromkeys(LOSS_UNITS, 0.0)
        tokens = token_weight(self.loss_weight, self.step.loss_weight, world_size=self.step.world_size) / self.weight
        microbatches = 1.0 / (self.num_microbatches * self.weight)
        return {'tokens': tokens, 'samples': 1.0, 'coupled_samples': 1.0, 'microbatches': microbatches}


@dataclass(kw_only=True)
class StepGuard:
    """Collects what happened in one optimizer step and refuses it if it was not exact.

    Args:
        rule: Which labels carry loss.
        totals: Loss-generating tokens, samples and weight of the step, over all ranks.
        local_tokens: Those of this rank.
        local_samples: Those of this rank.
        local_weight: That of this rank.
        world_size: Number of ranks.
    """

    rule: str
    totals: RankSum
    local_tokens: int
    local_samples: int
    local_weight: float
    world_size: int
    weighings: list[Weighing] = field(default_factory=list)
    """What the weights of each microbatch were used for, where not all tokens weigh the same."""
    _microbatches: list[MicrobatchWeight] = field(default_factory=list)
    _observed: list[torch.Tensor] = field(default_factory=list)
    _losses: list[torch.Tensor] = field(default_factory=list)
    _means: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _allowed: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Loss-generating tokens of the step, over all ranks."""
        return int(self.totals.read()[0])

    @property
    def samples(self) -> int:
        """Samples of the step, over all ranks."""
        return int(self.totals.read()[1])

    @property
    def loss_weight(self) -> float:
        """Weight of the step's loss-generating tokens, over all ranks: their number, where all weigh the same."""
        return self.totals.read()[2]

    def token_mean(self, to_device: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Mean loss of all tokens of the step, each as if it weighed the same as the others; a collective.

        Args:
            to_device: Moves a tensor to where the process group reduces.
        """
        sums = [weighing.plain_sum for weighing in self.weighings]
        total = to_device(torch.stack(sums).sum(dtype=torch.float64).cpu() if sums else torch.zeros(()).double())
        return RankSum(total[None]).read()[0] / max(self.tokens, 1)

    def start_attempt(self) -> None:
        """Forgets an attempt that failed half-way."""
        self.weighings.clear()
        self._microbatches.clear()
        self._observed.clear()
        self._losses.clear()
        self._means.clear()
        self._allowed.clear()

    def add_microbatch(self, microbatch: MicrobatchWeight) -> None:
        """Notes a microbatch."""
        self._microbatches.append(microbatch)

    def observe(self, gradient: torch.Tensor) -> None:
        """A tensor hook: the gradient that reaches the scaled loss is the weight that Composer applied."""
        self._observed.append(gradient.detach().sum(dtype=torch.float32))

    @property
    def num_empty(self) -> int:
        """Microbatches of this rank without loss-generating tokens."""
        return sum(microbatch.num_tokens == 0 for microbatch in self._microbatches)

    @property
    def latest(self) -> MicrobatchWeight:
        """The microbatch that was added last."""
        return self._microbatches[-1]

    @property
    def num_added(self) -> int:
        """Microbatches that were added since the attempt began."""
        return len(self._microbatches)

    def add_losses(self, losses: Sequence[torch.Tensor]) -> None:
        """Notes the terms of a microbatch's loss, as the model gave them."""
        self._losses += [loss.detach() for loss in losses]

    def add_mean(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """Notes the model's own loss of a microbatch beside the mean of its tokens' losses, for :meth:`check`."""
        self._means.append((own.detach().float().mean(), mean))
        self._allowed.append(max(MEAN_TOLERANCE, NUM_ROUNDINGS * torch.finfo(own.dtype).eps))

    def check(self, *, gradients: Sequence[torch.Tensor], gradient_scale: float, by_microbatch: bool = False) -> None:
        """Raises RuntimeError unless all samples, tokens and weights of the step are accounted for.

        Args:
            gradients: This rank's gradients, to be finite where the losses are; none: not looked at.
            gradient_scale: Loss scale of mixed precision, 1 without.
            by_microbatch: Whether a term was divided by the number of microbatches.
        """
        # The only device sync: once a step, where Composer reads the loss anyway.
        counts = [loss_mask(microbatch.labelled, self.rule).sum() for microbatch in self._microbatches]
        finite = [torch.stack([loss.isfinite().all() for loss in self._losses]).all()] if self._losses else []
        finite += [torch.nn.utils.get_total_norm(gradients).isfinite()] if gradients else []
        read = torch.stack([*counts, *(flag.to(torch.int64) for flag in finite)]).tolist() if counts or finite else []
        labelled = read[: len(counts)]
        self._check_finite(read[len(counts) :])
        # The weights are on the device of the loss, which is that of the logits.
        factors = [weighing.factor_sum for weighing in self.weighings]
        rest = [*self._observed, *factors, *(value for pair in self._means for value in pair)]
        values = torch.stack(rest).tolist() if rest else []
        observed, values = values[: len(self._observed)], values[len(self._observed) :]
        self._check_factors(values[: len(factors)])
        self._check_means(values[len(factors) :])
        self._check_rows()
        self._check_labels(labelled)
        self._check_weights([weight / gradient_scale for weight in observed])
        found = sum(microbatch.num_samples > 0 for microbatch in self._microbatches)
        if by_microbatch and any(microbatch.num_microbatches != found for microbatch in self._microbatches):
            raise RuntimeError(
                f"A term in units of 'microbatches' needs their number beforehand, got: {found} microbatches where "
                f'{self._microbatches[0].num_microbatches} were expected. Split with token_data_spec().'
            )

    def _check_finite(self, flags: list[int]) -> None:
        if flags != [1, 0]:  # losses finite, gradients not; where a loss is not, the gradient only follows it
            return
        raise RuntimeError(
            f'Gradients must be finite where every loss is, got: NaN or infinity, with {self.num_empty} microbatches '
            'without loss-generating tokens. A loss that divides by its number of tokens gives 0 / 0 there; divide by '
            'at least 1, or keep samples without labels out of the data.'
        )

    def _check_factors(self, found: list[float]) -> None:
        for weighing, factor_sum in zip(self.weighings, found, strict=True):
            if not math.isclose(factor_sum, weighing.expected_sum, rel_tol=MEAN_TOLERANCE):
                raise RuntimeError(
                    f'Every loss-generating token must be weighed once, got: weights that sum to {factor_sum:.6f} for '
                    f'{weighing.expected_sum:g} in a microbatch where they are 1 on average. The model leaves out or '
                    'repeats labels, or `microbatch_transforms` change labels or weights.'
                )

    def _check_means(self, values: list[float]) -> None:
        for own, mean, allowed in zip(values[::2], values[1::2], self._allowed, strict=True):
            if math.isfinite(own) and not math.isclose(own, mean, rel_tol=allowed, abs_tol=allowed):
                raise RuntimeError(
                    "The model's own loss must stay the mean over its loss-generating tokens, as it was in the first "
                    f'batch, got: {own:.6f} for a microbatch whose tokens give {mean:.6f}. Its loss leaves out or '
                    'weights some labels, treats rows alike that have unequally many tokens, is another one in '
                    'training mode, or an algorithm changes labels around the forward.'
                )

    def _check_rows(self) -> None:
        samples = sum(microbatch.num_samples for microbatch in self._microbatches)
        tokens = sum(microbatch.num_tokens for microbatch in self._microbatches)
        weight = sum(microbatch.loss_weight for microbatch in self._microbatches)
        is_whole = math.isclose(weight, self.local_weight, rel_tol=RELATIVE_TOLERANCE)
        if (samples, tokens) != (self.local_samples, self.local_tokens) or not is_whole:
            raise RuntimeError(
                f'The microbatches of a step must hold its {self.local_samples} samples and {self.local_tokens} '
                f'loss-generating tokens of weight {self.local_weight:g}, got: {samples} and {tokens} of weight '
                f'{weight:g}. `split_batch` drops or repeats rows, or a later '
                'algorithm changes the batch; put TokenAccumulation last, or use token_data_spec().'
            )

    def _check_labels(self, labelled: list[int]) -> None:
        for index, (microbatch, found) in enumerate(zip(self._microbatches, labelled, strict=True)):
            if microbatch.num_tokens != found:
                raise RuntimeError(
                    f'Labels must not change after BATCH_START, got: {found} loss-generating tokens in microbatch '
                    f'{index} where {microbatch.num_tokens} were counted. `microbatch_transforms` or an algorithm '
                    'changes them; do it in `batch_transforms`, which runs before the count.'
                )

    def _check_weights(self, observed: list[float]) -> None:
        expected = [microbatch.weight for microbatch in self._microbatches]
        if not observed and self.local_tokens == 0:
            return  # nothing required a gradient
        if len(observed) != len(expected):
            raise RuntimeError(
                f'Composer must run backward on the scaled loss of {len(expected)} microbatches, got: {len(observed)}. '
                'A later algorithm replaces `state.loss` at BEFORE_BACKWARD; put TokenAccumulation last.'
            )
        pairs = zip(observed, expected, strict=True)
        if all(math.isclose(found, weight, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9) for found, weight in pairs):
            return
        raise RuntimeError(
            f'Composer must weight microbatches by their samples {_rounded(expected)}, got: {_rounded(observed)}. '
            f'{self._cause(observed)}'
        )

    def _cause(self, observed: list[float]) -> str:
        flag = 'Set `Trainer(accumulate_train_batch_on_tokens=False)`: TokenAccumulation does its work, exactly.'
        if _proportional(observed, [microbatch.num_samples for microbatch in self._microbatches]):
            if self.world_size == 1:
                return 'A later algorithm rescales the loss; put TokenAccumulation last.'
        else:
            for counts, name in (
                ([microbatch.num_tokens for microbatch in self._microbatches], 'loss-generating tokens'),
                ([microbatch.num_positions for microbatch in self._microbatches], 'padded positions'),
            ):
                if _proportional(observed, counts):
                    return f'These are weights by {name}: `accumulate_train_batch_on_tokens` is on as well. {flag}'
        return (
            'Either `accumulate_train_batch_on_tokens` is on as well, or `get_num_samples_in_batch` does not count '
            f'rows, or a later algorithm rescales the loss. {flag} Use the counters of token_data_spec(), and put '
            'TokenAccumulation last.'
        )


def _proportional(weights: list[float], counts: list[int]) -> bool:
    total_weight, total = sum(weights), sum(counts)
    if len(counts) < 2 or total == 0 or total_weight == 0:
        return False
    shares = zip(weights, counts, strict=True)
    return all(math.isclose(w / total_weight, c / total, rel_tol=1e-4, abs_tol=1e-9) for w, c in shares)


def _rounded(weights: list[float]) -> list[float]:
    return [round(weight, 6) for weight in weights[:8]]
