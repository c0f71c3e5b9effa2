# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A Composer DataSpec that counts tokens exactly, and splits and trims multimodal batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.utils.data import DataLoader

from composer_tokacc.counting import check_rule
from composer_tokacc.data_spec.split import MicrobatchSplit, register_split
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel, CutOptions, check_kind
from composer_tokacc.refusals import InvalidInputError

if TYPE_CHECKING:
    from composer.core import DataSpec

# Functions of a DataSpec that token_data_spec() provides.
OWN_KWARGS = ('split_batch', 'get_num_samples_in_batch', 'get_num_tokens_in_batch')


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

    Layout and loss rule are the model's own: :class:`.TokenAccumulation` finds them on the first batch. If you use
    Composer's own ``accumulate_train_batch_on_tokens`` instead, give the ``model``: a wrong rule would not be noticed.

    Args:
        dataloader: Yields mappings with ``input_ids``, ``attention_mask`` and ``labels`` of shape ``(rows, width)``, as
            a Hugging Face processor makes them.
        model: The model that is trained (a ``HuggingFaceModel``, any ``ComposerModel``, or the Hugging Face model
            itself). Only needed without :class:`.TokenAccumulation`, which knows it.
        loss_tokens: Which labels carry loss: ``'causal'``, ``'causal_attended'``, ``'unshifted'``, or ``'auto'``: as
            the model's own loss. A rule that you give is compared with the model's.
        layout: How tensors belong to rows. Default: the model's, else as inferred from each batch.
        slot_tokens: Width of a slot, in tokens. Default: the width of the device batch.
        max_image_tokens: Most placeholders of images, videos and audios in a microbatch: a second hard cap, if the
            vision encoder needs the memory. Default: no cap.
        max_loss_tokens: Most loss tokens in a microbatch, a third hard cap. If logits are only computed at labels, they
            are computed for at most so many positions. Default: no cap.
        regroup: Whether to sort rows by real length before cutting. ``False`` keeps their order. Default: ``True``.
        equal_counts: Whether all ranks make the same number of microbatches. ``'auto'``: unless the algorithm has seen
            that gradients are only reduced in the last one, which is DDP's default.
        width_multiple: Round microbatch widths up to a multiple of this, never beyond the batch's own.
        packing: Whether to make one packed row of the rows of a microbatch, without any padding, with attention
            document by document. The model's attention must go through transformers' ``AttentionInterface``. The
            first-batch check shows whether packing is exact. ``'auto'``: if it is, and costs less on the first batch.
            Default: ``False``.
        cost: Cost of a microbatch on your machine, for the cut of least cost. Default: a model of hidden size 4096 on a
            GPU.
        on_oversize: What to do with a single row over a cap: ``'raise'`` an error that names it, or ``'warn'`` and
            compute it alone.
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
    from composer.core import DataSpec

    from composer_tokacc.data_spec.counting_spec import CountingDataSpec

    check_rule(loss_tokens, allow_auto=True)
    if isinstance(dataloader, DataSpec) or not isinstance(dataloader, Iterable):
        got = type(dataloader).__name__
        raise TypeError(f'`dataloader` must be a dataloader, got: {got}. Of a DataSpec, give its `dataloader`')
    for name in OWN_KWARGS:
        if name in data_spec_kwargs:
            raise InvalidInputError(
                f'`{name}` must be left to token_data_spec(), which is exact only with its own. Drop it.'
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
        inner_model = getattr(model, 'module', model)  # of DDP
        config = getattr(inner_model, 'config', None)  # a model of another library may have one of its own type
        if layout is None and hasattr(config, 'model_type'):
            layout = BatchLayout.for_model(inner_model)
    microbatch_transforms = data_spec_kwargs.pop('microbatch_transforms', None)
    split = MicrobatchSplit(dataloader, layout, options, microbatch_transforms)
    register_split(dataloader, split)
    return CountingDataSpec(dataloader, split, model, loss_tokens, **data_spec_kwargs)
