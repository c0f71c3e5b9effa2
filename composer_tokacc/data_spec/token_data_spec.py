# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A Composer DataSpec that counts tokens exactly, and splits and trims multimodal batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from composer.core import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_tokacc.counting import (
    COUNTED_BY,
    LOSS_TOKENS,
    PACKED,
    REAL_TOKENS,
    REGROUPED,
    annotate,
    check_rule,
    num_samples,
)
from composer_tokacc.data_spec.split import MicrobatchSplit
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel

__all__ = ['token_data_spec']

OWN_KWARGS = ('split_batch', 'get_num_samples_in_batch', 'get_num_tokens_in_batch')


def token_data_spec(
    dataloader: DataLoader | Iterable,
    *,
    loss_tokens: str = 'causal',
    layout: BatchLayout | None = None,
    slot_tokens: int | None = None,
    regroup: bool = True,
    equal_counts: bool | str = 'auto',
    width_multiple: int = 1,
    packing: bool = False,
    cost: CostModel | None = None,
    **data_spec_kwargs: Any,
) -> DataSpec:
    """Wraps a dataloader so that Composer counts its tokens exactly and cuts its batches with almost no padding.

    ``device_train_microbatch_size = k`` keeps its meaning as memory: ``k`` rows of ``slot_tokens`` tokens. A microbatch
    may hold any number of rows as long as ``rows x width <= k x slot_tokens``, a hard cap; a row wider than that goes
    alone, with one warning. In evaluation rows keep their order and ``k`` counts rows.

    Args:
        dataloader: Yields mappings with ``input_ids``, ``attention_mask`` and ``labels`` of shape ``(rows, width)``.
        loss_tokens: Which labels carry loss: ``'causal'``, ``'causal_attended'`` or ``'unshifted'``.
        layout: How tensors belong to rows; ``BatchLayout.for_model(model)``. Default: inferred from each batch.
        slot_tokens: Width of a slot, in tokens. Default: the width of the device batch.
        regroup: Whether to sort rows by real length before cutting. ``False`` keeps their order. Default: ``True``.
        equal_counts: Whether all ranks make the same number of microbatches, as FSDP and DDP's MULTI_AUTO_SYNC need.
            ``'auto'``: with more than one rank; plain DDP may set ``False`` and save an integer all-reduce a step.
        width_multiple: Round microbatch widths up to a multiple of this, never beyond the batch's own.
        packing: Whether to string a microbatch's rows into one packed row without any padding. The model must tell
            packed documents apart, which :class:`.TokenAccumulation` checks on the first batch. Default: ``False``.
        cost: What a microbatch costs on your machine, for the cut of least cost (:class:`.CostModel`). Default: that of
            a model of hidden size 4096 on a GPU.
        **data_spec_kwargs: Passed to :class:`composer.core.DataSpec`.

    Returns:
        DataSpec: For ``Trainer(train_dataloader=...)`` and, by the same functions, ``eval_dataloader``.

    Raises:
        ValueError: If an argument is out of range, or a function that this one provides is passed as well.

    Example:
        .. code-block:: python

            trainer = Trainer(
                model=model,
                train_dataloader=token_data_spec(dataloader),
                algorithms=[TokenAccumulation()],
                device_train_microbatch_size=4,
            )
    """
    check_rule(loss_tokens)
    for name, value in (('slot_tokens', slot_tokens), ('width_multiple', width_multiple)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f'`{name}` must be a positive integer, got: {value!r}.')
    if equal_counts not in (True, False, 'auto'):
        raise ValueError(f"`equal_counts` must be True, False or 'auto', got: {equal_counts!r}.")
    for name in OWN_KWARGS:
        if name in data_spec_kwargs:
            raise ValueError(f'`{name}` must be left to token_data_spec(), which is exact only with its own. Drop it.')
    split = MicrobatchSplit(
        layout=layout,
        slot_tokens=slot_tokens,
        regroup=regroup,
        equal_counts=dist.get_world_size() > 1 if equal_counts == 'auto' else bool(equal_counts),
        width_multiple=width_multiple,
        packing=packing,
        cost=cost,
    )
    marks = {name: True for name, on in ((REGROUPED, regroup), (PACKED, packing)) if on}

    def count(batch: Any) -> dict[str, int]:
        if LOSS_TOKENS not in batch:
            batch = annotate(batch, loss_tokens)
        return {'total': sum(batch[REAL_TOKENS]), 'loss_generating': sum(batch[LOSS_TOKENS])}

    return DataSpec(
        dataloader,
        batch_transforms=_annotating(loss_tokens, marks, data_spec_kwargs.pop('batch_transforms', None)),
        split_batch=split,
        get_num_samples_in_batch=num_samples,
        get_num_tokens_in_batch=count,
        **data_spec_kwargs,
    )


def _annotating(
    loss_tokens: str, marks: dict[str, bool], transforms: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    """The user's transforms, then the count: on the CPU, once a batch, so that microbatches sync nothing."""

    def transform(batch: Any) -> Any:
        batch = transforms(batch) if transforms is not None else batch
        if not isinstance(batch, Mapping):
            raise ValueError(
                f'The dataloader must yield mappings with `input_ids` and `labels`, got: {type(batch).__name__}.'
            )
        return {**annotate(batch, loss_tokens), COUNTED_BY: loss_tokens, **marks}

    return transform
