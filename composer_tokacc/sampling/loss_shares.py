# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What tokens weigh so that each of several datasets has its share of every step's loss, whatever it draws."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from composer_tokacc.planning import Table, checked_table

log = logging.getLogger(__name__)


class LossShares:
    """Weights of samples by which the tokens of each dataset together have its share of the weight of a global batch.

    The token of a dataset with share ``s`` and ``t`` of the ``T`` loss tokens of the step weighs ``s T / t``, so a
    token weighs 1 on average. Exact in each step; a dataset without loss tokens in a step leaves its share to the
    others, which is said once.

    Args:
        sizes: Samples of each dataset, which follow one another.
        shares: Of the weight, of each; they add up to 1.
        loss_tokens: Of each sample of all datasets, (sum(sizes),).

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], loss_tokens: Table) -> None:
        if len(shares) != len(sizes) or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
            raise ValueError(f'`shares` must be positive, one for each dataset, and add up to 1, got: {list(shares)}.')
        self.shares = np.array(shares)
        self.loss_tokens = checked_table('loss_tokens', loss_tokens, sum(sizes), least=0)
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self._has_said = False

    def weights(self, window: np.ndarray) -> np.ndarray:
        """Returns what a token of each sample of a global batch weighs, float64 (samples,)."""
        owners = self._owners[window]
        tokens = np.bincount(owners, self.loss_tokens[window], len(self.shares))
        absent = tokens == 0
        if absent.any() and not self._has_said:
            self._has_said = True
            log.warning(
                'A global batch has no loss tokens of dataset %d: the others have its share of that step. A larger '
                '`global_batch_size`, or more `epochs` of it, keeps it in every step.', int(absent.argmax())
            )  # fmt: skip
        shares = np.where(absent, 0, self.shares)
        return (shares * tokens.sum() / np.maximum(tokens, 1) / max(shares.sum(), 1e-9))[owners]
