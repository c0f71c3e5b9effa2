# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Logits only at labels, as a context manager for any trainer.

The positions of images, prompts and padding add nothing to the loss, but a model computes logits for all of them. With
a large vocabulary these logits take more memory than everything else that a microbatch keeps for its backward. If only
the positions that predict a label go through the output embedding, loss and gradient stay the same. The first forward
proves this for the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from composer_tokacc.arguments import check_choice, check_kind
from composer_tokacc.batch import Batch, BatchDict
from composer_tokacc.checks.comparison import RowComparison
from composer_tokacc.checks.first_batch import find_loss_rule, rule_batch, with_unequal_row
from composer_tokacc.checks.logits import entry_of
from composer_tokacc.checks.probe import Probe
from composer_tokacc.compat import inner_model
from composer_tokacc.counting import LossRule, with_one_label
from composer_tokacc.labelled import LabelSelector
from composer_tokacc.layout import BatchLayout
from composer_tokacc.model_structure import fsdp_units, output_embedding, transformers_model
from composer_tokacc.refusals import InvalidInputError, NotExactError
from composer_tokacc.row_counts import without_row_counts


class LogitsAtLabels:
    """Makes a model compute logits only at positions that predict a label, in any training loop.

    It acts on forwards in training mode that get ``labels`` by name, as in ``model(**batch)``. Loss and gradient stay
    the same. Evaluation and generation compute all logits.

    ``outputs.logits`` has a single row: the logits that predict the labels of the first row, then those of the second
    row, and so on. If the model shifts labels, it drops the logits of the last position, so one more position follows
    at the end.

    The first such forward computes its batch with all logits and with logits at labels, and compares loss and gradient.
    This takes about five more forwards, whose gradients are not kept. With FSDP all ranks must make this forward at the
    same time.

    A mean over the means of rows equals a mean over tokens if all rows have equally many labels. So unless a row has
    twice as many labels as another, the check adds a copy of a row, with another number of labels. If the model cannot
    compute the additional row (memory, kernels for one row), the check leaves it out, except with FSDP.

    Args:
        model: A Hugging Face model that computes its own loss; it may be wrapped by Composer, DDP or accelerate.
        shifts_labels: Whether the model shifts labels itself, as causal language models do. None: the first forward
            finds out.

    Raises:
        ValueError: If the model has no output embedding; in a forward, if arguments come by position, or if the mask is
            not a tensor.
        RuntimeError: At the first forward, if loss or gradient would change.

    Example:
        .. code-block:: python

            with LogitsAtLabels(model):
                for microbatch, weight in weighted_microbatches(batch):
                    (model(**microbatch).loss * weight).backward()
    """

    def __init__(self, model: torch.nn.Module, *, shifts_labels: bool | None = None) -> None:
        check_kind('model', model, torch.nn.Module)
        check_choice('shifts_labels', shifts_labels, (True, False, None))
        self._model = transformers_model(inner_model(model))
        if output_embedding(self._model) is None:
            raise InvalidInputError(
                f'The model must have an output embedding, got: {type(self._model).__name__}, whose '
                '`get_output_embeddings()` returns none. Use a class with a head, such as `AutoModelForCausalLM`.'
            )
        self._shifts_labels = shifts_labels
        self._rule: LossRule | None = None  # the loss rule of the model; None: no forward was checked yet
        # Whether the check had rows with unequal numbers of labels. If not, the loss may depend on which labels share a
        # row, so batches with labels in several rows compute all logits.
        self._is_proven_for_rows = False
        self._is_probing = False  # whether the check of the first forward is calling the model
        # Set by __enter__().
        self._handle: Any = None  # of the hook _begin_forward(); None again after __exit__()
        self._selector: LabelSelector | None = None  # has further hooks

    def __enter__(self) -> LogitsAtLabels:
        """Adds the hooks to the model."""
        if self._handle is not None:
            raise InvalidInputError(
                'This LogitsAtLabels is entered already. Use it in one `with` block at a time, around the whole loop.'
            )
        # `_begin_forward` must run before the hooks of the selector, because it arms them. It must also run before the
        # hook of FSDP2, which gathers weights, because the forwards of the check would shard them again.
        begin_forward = torch.compiler.disable(self._begin_forward)
        self._handle = self._model.register_forward_pre_hook(begin_forward, prepend=True, with_kwargs=True)
        self._selector = LabelSelector(self._model)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the model as it was."""
        assert self._selector is not None
        self._handle.remove()
        self._selector.remove()
        self._handle = None

    def _begin_forward(self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """Checks the first batch, and tells the selector how many labels a batch has. A forward pre-hook."""
        if self._is_probing or not module.training or kwargs.get('labels') is None:
            return
        if kwargs.get('shift_labels') is not None:
            return  # the loss reads these instead of the labels, and the selector leaves such a batch alone
        _check_arguments(args, kwargs)
        assert self._selector is not None
        if self._rule is None:
            if torch.is_inference_mode_enabled():
                return  # the check needs gradients
            # Rows of one column show nothing, and their loss is NaN if the model shifts labels. So the next forward is
            # checked. But with FSDP all ranks must check the same forward.
            if kwargs['labels'].shape[-1] == 1 and not fsdp_units(self._model):
                return
            # A checkpoint around this forward keeps the tensors that its backward needs, and must not keep those of the
            # forwards of the check, too. With other hooks, even if they do nothing, torch does not call those of the
            # checkpoint.
            with torch.autograd.graph.saved_tensors_hooks(_same_tensor, _same_tensor):
                self._rule = self._checked_rule(kwargs)
        labels_of_rows = self._rule.mask(kwargs).sum(dim=1)
        if not self._is_proven_for_rows and int((labels_of_rows > 0).sum()) > 1:
            self._selector.disarm()
            return
        num_labels = int(labels_of_rows.sum())  # waits for the GPU
        self._selector.begin_forward(self._rule, num_labels, kwargs['labels'].numel())

    def _checked_rule(self, batch: Mapping[str, Any]) -> LossRule:
        """Returns the loss rule of the model. Raises if logits at labels change the loss or its gradient.

        Notes whether the check holds for batches with labels in several rows.
        """
        assert self._selector is not None
        self._is_probing = True
        try:
            entries: dict[str, Any] = {}
            for key, value in batch.items():
                if isinstance(value, torch.Tensor):
                    entries[key] = value.detach()  # the graph of `inputs_embeds` is not needed
                elif value is not None:
                    entries[key] = value
            probe = self._new_probe()
            rule = self._rule_of(probe, entries)
            if not bool(rule.mask(entries).any()):
                entries = with_one_label(entries)  # without labels nothing would show
            rows, comparison = self._compare(probe, rule, entries)
            failure = comparison.selection_failure(self._selector)
        finally:
            self._is_probing = False
        if failure is not None:
            raise NotExactError(
                f'Logits at labels must leave loss and gradient the same, got: {failure}. Train this model without '
                'LogitsAtLabels (docs/errors.md#logits-at-labels).'
            )
        label_counts = set(rule.mask(rows).sum(dim=1).tolist())
        # Rows without labels show nothing. The others must have at least two numbers of labels.
        self._is_proven_for_rows = len(label_counts - {0}) > 1
        return rule

    def _new_probe(self) -> Probe:
        """Returns a probe that gives the model all entries of a batch, because it may take some by ``**kwargs``."""
        return Probe(lambda entries: self._model(**without_row_counts(entries)), _loss_in, self._model)

    def _compare(self, probe: Probe, rule: LossRule, batch: BatchDict) -> tuple[BatchDict, RowComparison]:
        """Computes the rows of a batch with all logits, and returns the rows and the comparison with these results.

        If possible, the rows have unequal numbers of labels, see :func:`_with_unequal_row`.
        """
        layout = BatchLayout.for_model(self._model)
        rows = _with_unequal_row(layout, batch, rule)
        has_added_row = len(rows['labels']) > len(batch['labels'])
        try:
            return rows, RowComparison(probe, layout, _unchanged, rule, rows, check_loss=True)
        except Exception:
            # With FSDP all ranks must run the same forwards, and perhaps only this rank has an error.
            if not has_added_row or fsdp_units(self._model):
                raise
        # The model has no memory for one more row, or computes only one (some kernels for packed rows). Tried again
        # here and not in the handler, because the error would keep the memory of the forward that failed.
        rows = batch  # frees the rows with the added one
        return rows, RowComparison(self._new_probe(), layout, _unchanged, rule, rows, check_loss=True)

    def _rule_of(self, probe: Probe, rows: Batch) -> LossRule:
        """Returns the loss rule that the user has named, or finds it by the probe."""
        if self._shifts_labels is not None:
            return LossRule.CAUSAL if self._shifts_labels else LossRule.UNSHIFTED
        # The batch has labels at a few positions that tell the rules apart. Without a layout rule_batch() writes them
        # into the first row, and keeps the other rows without labels.
        batch = rule_batch(layout=None, rows=rows)
        return find_loss_rule(probe, batch)


def _check_arguments(args: tuple[object, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError if the check and the selector cannot read the arguments of a forward."""
    if args:
        # They look tensors up by name.
        raise InvalidInputError(
            f'With LogitsAtLabels a model must get its batch by name, `model(**batch)`, got: {len(args)} arguments '
            'by position.'
        )
    mask = kwargs.get('attention_mask')
    if not isinstance(mask, torch.Tensor | None):
        # Such as a dict of masks. It would have to be read, because a label without attention may not count.
        raise InvalidInputError(
            f'With LogitsAtLabels `attention_mask` must be a tensor, got: {type(mask).__name__}. Give the mask of '
            'padding, (rows, width), or train without LogitsAtLabels.'
        )


def _with_unequal_row(layout: BatchLayout, batch: BatchDict, rule: LossRule) -> BatchDict:
    """Returns the batch, if possible with rows that have unequal numbers of labels.

    One row, or rows with equally many labels, would not show a loss that depends on which labels share a row, such as a
    mean of the rows' means.
    """
    try:
        return with_unequal_row(layout, batch, rule)
    except (KeyError, ValueError):
        return batch  # the layout cannot tell the rows apart


def _loss_in(outputs: Any, batch: Batch) -> Any:
    """Returns the loss that the model has computed. With ``return_dict=False`` it is the first of a tuple."""
    if isinstance(outputs, tuple):
        return outputs[0]
    loss = entry_of(outputs, 'loss')
    if loss is None:
        # A model may have set it later (`outputs.loss = ...`). Then Transformers 4 has it only as an attribute.
        loss = getattr(outputs, 'loss', None)
    return loss


def _same_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself."""
    return tensor


def _unchanged(batch: Batch) -> Batch:
    """Moves a batch to the device of the model: nothing to do, because the batch of a forward is there already."""
    return batch
