# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a run pays for padding, how evenly its ranks work, and how far sample weighting would be off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from composer_tokacc.batch import text_of
from composer_tokacc.counting import check_rule, count_tokens, loss_mask
from composer_tokacc.layout import microbatches_of
from composer_tokacc.metadata import is_annotated, metadata_of, num_samples

# What each rank contributes to a step's one reduction, in this order.
_FIELDS = (
    'real', 'device_positions', 'positions', 'dummies', 'tokens', 'samples', 'microbatches', 'empty', 'last_variation',
)  # fmt: skip


class TokenMonitor(Callback):
    """Logs padding, balance and throughput in real tokens; one small all-gather a step, no sync a microbatch.

    ============================================ ====================================================================
    Key                                          Logged each step, over all ranks
    ============================================ ====================================================================
    ``token_monitor/padding_ratio``              Share of the computed positions that is padding
    ``token_monitor/dummy_ratio``                Share of them that dummy rows are: a part of the padding
    ``token_monitor/device_batch_padding_ratio`` The same had no microbatch been trimmed, as stock Composer does not
    ``token_monitor/loss_generating_share``      Loss-generating tokens over real tokens
    ``token_monitor/real_tokens_per_second``     Real tokens over the step's wall-clock time
    ``token_monitor/rank_imbalance``             Most positions computed by a rank over the mean; 1 is even
    ``token_monitor/microbatches``               Microbatches
    ``token_monitor/empty_microbatches``         Those without loss-generating tokens
    ``token_monitor/sample_weighting_error``     Total variation distance between sample and token weights of the
                                                 *previous* step's microbatches (0: sample weighting is exact)
    ============================================ ====================================================================

    Args:
        loss_tokens (str): The counting rule where no :class:`.TokenAccumulation` has counted already.
            Default: ``'causal'``.

    Raises:
        ValueError: If there is no such rule.
    """

    def __init__(self, *, loss_tokens: str = 'causal') -> None:
        self.loss_tokens = check_rule(loss_tokens)
        self._step: dict[str, float] = {}
        self._microbatches: list[tuple[int, Any]] = []
        self._previous: tuple[list[tuple[int, int]], float, float] | None = None

    def batch_start(self, state: State, logger: Logger) -> None:
        """Counts the device batch where nobody has, while it is on the CPU."""
        facts = metadata_of(state.batch)
        counts = None if is_annotated(state.batch) else count_tokens(state.batch, self.loss_tokens)
        self._step = {
            'real': sum(facts['real_tokens']) if counts is None else counts.num_real,
            'device_positions': _positions(state.batch),
            'tokens': sum(facts['loss_tokens']) if counts is None else counts.num_loss_generating,
            'samples': num_samples(state.batch),
        }

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Forgets an attempt that ran out of memory."""
        self._microbatches = []
        self._step.update(positions=0, dummies=0, microbatches=0)

    def before_backward(self, state: State, logger: Logger) -> None:
        """Notes a microbatch by its shape and counts, which are counted on the device where it carries none."""
        batch: Mapping[str, Any] = state.batch
        facts = metadata_of(batch)
        num_tokens = sum(facts['loss_tokens']) if is_annotated(batch) else loss_mask(batch, self.loss_tokens).sum()
        self._microbatches.append((num_samples(batch), num_tokens))
        positions, samples = _positions(batch), facts.get('samples', [1])
        self._step['positions'] += positions
        self._step['dummies'] += positions * samples.count(0) / len(samples)
        self._step['microbatches'] += 1

    def batch_end(self, state: State, logger: Logger) -> None:
        """Reduces and logs."""
        # Counts of the device are read here, once a step.
        self._microbatches = [(samples, int(tokens)) for samples, tokens in self._microbatches]
        self._step['empty'] = sum(tokens == 0 for _, tokens in self._microbatches)
        self._step['last_variation'] = self._variation()
        mine = torch.tensor([self._step[field] for field in _FIELDS], dtype=torch.float64)
        mine = state.device.tensor_to_device(mine)
        ranks = torch.stack([*dist.all_gather(mine)]).cpu()
        totals: dict[str, float] = dict(zip(_FIELDS, ranks.sum(dim=0).tolist(), strict=True))
        positions = ranks[:, _FIELDS.index('positions')]
        metrics = {
            'padding_ratio': 1 - totals['real'] / max(totals['positions'], 1),
            'dummy_ratio': totals['dummies'] / max(totals['positions'], 1),
            'device_batch_padding_ratio': 1 - totals['real'] / max(totals['device_positions'], 1),
            'loss_generating_share': totals['tokens'] / max(totals['real'], 1),
            'rank_imbalance': float(positions.max() / positions.mean().clamp(min=1)),
            'microbatches': totals['microbatches'],
            'empty_microbatches': totals['empty'],
        }
        assert state.timestamp.batch_wct is not None, 'BATCH_END follows the step that sets it'
        seconds = state.timestamp.batch_wct.total_seconds()
        if seconds > 0:
            metrics['real_tokens_per_second'] = totals['real'] / seconds
        if self._previous is not None:
            metrics['sample_weighting_error'] = totals['last_variation']
        self._previous = (self._microbatches, totals['samples'], totals['tokens'])
        logger.log_metrics({f'token_monitor/{name}': value for name, value in metrics.items()})

    def _variation(self) -> float:
        """This rank's part of the previous step's distance: its totals over ranks are known only by now."""
        if self._previous is None:
            return 0.0
        microbatches, samples, tokens = self._previous
        if samples == 0 or tokens == 0:
            return 0.0
        return sum(abs(n / samples - t / tokens) for n, t in microbatches) / 2


def _positions(batch: Mapping[str, Any]) -> int:
    """Rows times padded width, of the labels where the main input has no tokens; microbatches as if padded together."""
    rows, widths = zip(*(text_of(microbatch).shape[:2] for microbatch in microbatches_of(batch)), strict=True)
    return sum(rows) * max(widths)
