# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Logits only where a label is: as a context manager for any trainer, and as TokenAccumulation uses it.

No loss comes from the positions of images, prompts and padding, but a model computes logits for all of them. With a
large vocabulary these logits take more memory than everything else that a microbatch keeps for its backward. Selecting
the labelled positions before the output embedding leaves loss and gradient the same. Both users prove that on the first
batch, with the model's own loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from composer.models import HuggingFaceModel

from composer_tokacc.batch import Batch
from composer_tokacc.checks.comparison import RowComparison
from composer_tokacc.checks.first_batch import find_loss_rule, rule_batch
from composer_tokacc.checks.label_selector import LabelSelector, output_embedding
from composer_tokacc.checks.probe import Probe
from composer_tokacc.compat import inner_model, is_compiled
from composer_tokacc.counting import loss_mask
from composer_tokacc.layout import BatchLayout

LOGITS = ('auto', 'all', 'labels')
"""Where a run computes logits: only at labels if that is proven, at all positions, or only at labels or not at all."""
DENSE = 0.9
"""Above this share of labelled positions all logits are computed: selecting copies hidden states, and gains little."""


class RunLogits:
    """Decides where the logits of a run are computed, and has the model compute them there.

    Args:
        choice: One of :data:`LOGITS`.
        model: The model, not wrapped by DDP.
        obstacle: Why the rest of the run needs all logits, if it does.
    """

    def __init__(self, choice: str, model: torch.nn.Module, obstacle: str | None) -> None:
        self._choice = choice
        self.why_all = obstacle or _obstacle(model)
        """Why logits of all positions are computed; None: they are computed only at labels."""
        if choice == 'all':
            self.why_all = '`logits` is set to all'
        self.selector = None if self.why_all else LabelSelector(_language_model(model))
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
        if self.selector is not None and num_labels < DENSE * num_positions:
            self.selector.arm(rule, num_labels)

    def end_forward(self) -> None:
        """Leaves forwards of others (evaluation) as they are."""
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


class LogitsAtLabels:
    """Has a model compute logits only at positions that predict a label, in any training loop.

    Acts on forwards in training mode that are given ``labels`` by keyword. Loss and gradient stay the same, and
    ``outputs.logits`` has one row with the logits of labelled positions, in the order of the batch read row by row (and
    one more position at its end, if the model shifts labels). Evaluation and generation compute all logits.

    At the first such forward loss and gradient are compared with those of all logits, on its own batch. That takes
    three forwards more, without gradients; with FSDP all ranks must make that forward at the same time.

    Args:
        model: A Hugging Face model that computes its own loss; it may be wrapped by Composer, DDP or accelerate.
        shifts_labels: Whether the model shifts labels itself, as causal language models do. None: found at the first
            forward.

    Raises:
        ValueError: If the model has no output embedding.
        RuntimeError: At the first forward, if loss or gradient would change.

    Example:
        .. code-block:: python

            with LogitsAtLabels(model):
                for microbatch, weight in weighted_microbatches(batch):
                    (model(**microbatch).loss * weight).backward()
    """

    def __init__(self, model: torch.nn.Module, *, shifts_labels: bool | None = None) -> None:
        self._model = _language_model(inner_model(model))
        if output_embedding(self._model) is None:
            raise ValueError(
                f'The model must have an output embedding, got: {type(self._model).__name__}, whose '
                '`get_output_embeddings()` gives none. Take a class with a head, such as `AutoModelForCausalLM`.'
            )
        self._shifts_labels = shifts_labels
        self._rule: str | None = None  # once it is proven
        self._is_probing = False
        self._handle: Any = None
        self._selector: LabelSelector | None = None

    def __enter__(self) -> LogitsAtLabels:
        """Hooks into the model."""
        # This hook comes first: it says how many labels the selector's hook selects.
        self._handle = self._model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        self._selector = LabelSelector(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the model as it was."""
        assert self._selector is not None
        self._handle.remove()
        self._selector.remove()

    def _begin_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._is_probing or not module.training or kwargs.get('labels') is None:
            return
        assert self._selector is not None
        if self._rule is None:
            self._rule = self._proven_rule(kwargs)
        num_labels = int(loss_mask(kwargs, self._rule).sum())  # waits for the GPU
        if num_labels < DENSE * kwargs['labels'].numel():
            self._selector.arm(self._rule, num_labels)

    def _proven_rule(self, batch: Mapping[str, Any]) -> str:
        """Returns the rule of the model's loss, once logits at labels leave its loss and gradient the same."""
        assert self._selector is not None
        self._is_probing = True
        try:
            probe = Probe.from_model(self._model)
            tensors: Batch = {key: value for key, value in batch.items() if value is not None}
            rule = self._rule_of(probe, tensors)
            layout = BatchLayout.for_model(self._model)
            comparison = RowComparison(probe, layout, lambda rows: rows, rule, tensors, check_loss=True)
            failure = comparison.selection_failure(self._selector)
        finally:
            self._is_probing = False
        if failure is not None:
            raise RuntimeError(
                f'Logits at labels must leave loss and gradient the same, got: {failure}. Train this model without '
                'LogitsAtLabels (docs/errors.md#logits-at-labels).'
            )
        return rule

    def _rule_of(self, probe: Probe, batch: Batch) -> str:
        if self._shifts_labels is not None:
            return 'causal' if self._shifts_labels else 'unshifted'
        return find_loss_rule(probe, rule_batch(None, batch))


def _language_model(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the Hugging Face model inside of Composer's."""
    return model.model if isinstance(model, HuggingFaceModel) else model


def _obstacle(model: torch.nn.Module) -> str | None:
    """Returns why a model can only compute all logits; None: it may do otherwise."""
    if not isinstance(model, HuggingFaceModel):
        return 'the model is no HuggingFaceModel, which computes its own loss'
    if output_embedding(model.model) is None:
        return 'the model names no output embedding'
    if is_compiled(model):
        return 'the model is compiled, and would be compiled again for each number of labels'
    return None
