# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Where the logits of a run are computed: at all positions, or only at labels."""

from __future__ import annotations

import torch
from composer.models import HuggingFaceModel

from composer_tokacc.compat import is_compiled
from composer_tokacc.label_selector import LabelSelector, is_worth_selecting, output_embedding

LOGITS = ('auto', 'all', 'labels')
"""``'auto'``: only at labels if that is proven exact, otherwise at all positions. ``'all'``: at all positions.
``'labels'``: only at labels, or an error."""


class RunLogits:
    """Decides where the logits of a run are computed, and has the model compute them there.

    Args:
        choice: One of :data:`LOGITS`.
        model: The model, not wrapped by DDP.
        obstacle: Why the arguments or other parts of the run need all logits; None: they do not.
    """

    def __init__(self, choice: str, model: torch.nn.Module, obstacle: str | None) -> None:
        self._choice = choice
        self.why_all = obstacle or _obstacle(model)
        """Why logits of all positions are computed; None: they are computed only at labels."""
        self.selector: LabelSelector | None = None
        if self.why_all is None and isinstance(model, HuggingFaceModel):
            self.selector = LabelSelector(model.model)
        self._check_choice()

    def adopt(self, failure: str | None) -> None:
        """Computes all logits from now on if the first-batch check has found a failure.

        Raises:
            RuntimeError: If the user has asked for logits at labels.
        """
        if failure is None or self.selector is None:
            return
        self.remove()
        self.why_all = failure
        self._check_choice()

    def begin_forward(self, rule: str, num_labels: int, num_positions: int) -> None:
        """Has the next forward compute logits only at its labels, unless nearly all of its positions have one."""
        if self.selector is not None and is_worth_selecting(num_labels, num_positions):
            self.selector.arm(rule, num_labels)

    def end_forward(self) -> None:
        """Lets the forwards of others, such as evaluation, compute all logits."""
        if self.selector is not None:
            self.selector.disarm()

    def remove(self) -> None:
        """Leaves the model as it was."""
        if self.selector is not None:
            self.selector.remove()
            self.selector = None

    def _check_choice(self) -> None:
        if self._choice == 'labels' and self.why_all is not None:
            raise RuntimeError(
                f"`logits='labels'` must leave loss and gradient the same, got: {self.why_all}. Set `logits='auto'`, "
                'which computes all logits in this case (docs/errors.md#logits-at-labels).'
            )


def _obstacle(model: torch.nn.Module) -> str | None:
    """Returns why a model has to compute all logits; None: nothing is known that demands it."""
    if not isinstance(model, HuggingFaceModel):
        return 'the model is no HuggingFaceModel, which computes its own loss'
    if output_embedding(model.model) is None:
        return 'the model names no output embedding'
    if is_compiled(model):
        return 'the model is compiled, and would be compiled again for each number of labels'
    return None
