# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A Composer DataSpec that counts tokens exactly, and splits and trims multimodal batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.utils.data import DataLoader

from composer_tokacc.arguments import check_kind
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec.split import MicrobatchSplit, register_split
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.layout import layout_of_model
from composer_tokacc.planning import CostModel, CutOptions

if TYPE_CHECKING:
    from composer.core import DataSpec


def token_data_spec(
    dataloader: DataLoader | Iterable,
    *,
    model: Any = None,
    loss_tokens: str = 'auto',
    layout: BatchLayout | None = None,
    slot_tokens: int | None = None,
    max_image_tokens: int | None = None,
    max_loss_tokens: int | None = None,
    regroup: bool = True,
    equal_counts: bool | str = 'auto',
    width_multiple: int = 1,
    packing: bool | str = False,
    cost: CostModel | None = None,
    on_oversize: str = 'raise',
    **data_spec_kwargs: Any,
) -> DataSpec:
    """Wraps a dataloader so that Composer counts its tokens exactly and cuts its batches with almost no padding.

    ``device_train_microbatch_size = k`` keeps its meaning as memory: ``k`` rows of ``slot_tokens`` tokens. A microbatch
    may hold any number of rows as long as ``rows x width <= k x slot_tokens``, a hard cap. In evaluation rows keep
    their order and ``k`` counts rows.

    :class:`.TokenAccumulation` finds the layout and the loss rule of the model on the first batch. If you use
    Composer's own ``accumulate_train_batch_on_tokens`` instead, give the ``model``, so that both are found as well.
    Without it, a step with that flag is refused, because a wrong rule would weight tokens wrongly.

    Args:
        dataloader: Yields mappings with ``input_ids``, ``attention_mask`` and ``labels`` of shape ``(rows, width)``, as
            a Hugging Face processor makes them.
        model: The model that is trained (a ``HuggingFaceModel``, any ``ComposerModel``, or the Hugging Face model
            itself). Only needed without :class:`.TokenAccumulation`, which knows it.
        loss_tokens: Which labels carry loss: ``'causal'``, ``'causal_attended'`` or ``'unshifted'``, a rule that is
            compared with the loss of the model, if the model is known. ``'auto'``: the rule of that loss is found.
        layout: How tensors belong to rows. Default: the layout of the model, or if no model is known, the layout that
            the keys of each batch imply.
        slot_tokens: The tokens of one of these ``k`` rows. Default: the width of the device batch, or if the loader has
            planned the microbatches (:class:`.RegroupingDataLoader`), its ``max_tokens`` divided by the
            ``device_train_microbatch_size`` of the first batch. With either default a single row always fits.
        max_image_tokens: Most placeholders of images, videos and audios in a microbatch. A hard cap as well, for vision
            encoders that need much memory. Default: no cap.
        max_loss_tokens: Most loss tokens in a microbatch. A hard cap as well. If logits are only computed at labels, it
            limits the number of positions that have logits. Default: no cap.
        regroup: Whether to sort rows by real length before cutting. ``False`` keeps their order. Default: ``True``.
        equal_counts: Whether all ranks make the same number of microbatches. ``'auto'``: yes, unless the algorithm has
            seen that gradients are reduced only in the last microbatch, Composer's default under DDP. ``False`` is
            refused on several ranks with FSDP or automatic microbatching.
        width_multiple: Microbatch widths are rounded up to a multiple of this, but never beyond the width of the batch
            or the cap.
        packing: Whether the rows of a microbatch become one packed row, without any padding, with attention document by
            document. The model's attention must go through transformers' ``AttentionInterface``. The first-batch check
            shows whether packing is exact. ``'auto'``: pack if it is exact and costs less on the first batch. Default:
            ``False``.
        cost: Cost of a microbatch on your machine. Batches are cut so that the total cost is least. Default: the cost
            in a model of hidden size 4096 on a GPU.
        on_oversize: What to do with a single row over a cap: ``'raise'`` an error that names it, or ``'warn'`` and
            compute it alone.
        **data_spec_kwargs: Passed to :class:`composer.core.DataSpec`.

    Returns:
        DataSpec: For ``Trainer(train_dataloader=...)`` or ``Trainer(eval_dataloader=...)``.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If ``dataloader`` is a DataSpec, or cannot be iterated, or if a function that counts or splits
            batches is passed as well.

    Example:
        .. code-block:: python

            trainer = Trainer(
                model=model,
                train_dataloader=token_data_spec(dataloader),
                algorithms=[TokenAccumulation()],
                device_train_microbatch_size=4,
            )
    """
    from composer_tokacc.data_spec.counting_spec import CountingDataSpec

    named_rule = LossRule.named(loss_tokens)  # None for 'auto'
    if not isinstance(dataloader, Iterable):
        raise TypeError(
            f'`dataloader` must be a dataloader, got: {type(dataloader).__name__}. If it is a DataSpec, pass its '
            '`dataloader`.'
        )
    options = CutOptions(
        slot_tokens=slot_tokens,
        regroup=regroup,
        equal_counts=equal_counts,
        width_multiple=width_multiple,
        packing=packing,
        cost=cost or CostModel(),
        max_image_tokens=max_image_tokens,
        max_loss_tokens=max_loss_tokens,
        on_oversize=on_oversize,
    )
    if layout is not None:
        check_kind('layout', layout, BatchLayout)
    if model is not None:
        check_kind('model', model, Module)
        if layout is None:
            layout = layout_of_model(model)  # None without a config of Transformers
    # The split applies them, because the first-batch check must transform its rows in the same way.
    microbatch_transforms = data_spec_kwargs.pop('microbatch_transforms', None)
    split = MicrobatchSplit(dataloader, layout, options, microbatch_transforms)
    register_split(dataloader, split)  # for TokenAccumulation, which knows only the loader
    return CountingDataSpec(dataloader, split, model, named_rule, **data_spec_kwargs)
