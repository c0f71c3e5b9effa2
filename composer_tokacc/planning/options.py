# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Options of a cut into microbatches, and the cost model of a microbatch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from composer_tokacc.arguments import check_choice, check_count, check_kind
from composer_tokacc.refusals import InvalidInputError

Table = Sequence[float] | np.ndarray
"""One number for each sample, (n,)."""

CAPPED_SIZES = {'image_tokens': 'max_image_tokens', 'loss_tokens': 'max_loss_tokens'}
"""Sizes of a sample whose sum over a microbatch has a hard cap, and the option of :class:`CutOptions` that sets it.
docs/architecture.md#a-further-cap lists the other places that a further cap needs."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a microbatch of ``n`` rows of width ``w``: ``n * (w + w^2 / quadratic) + vision + launch``.

    :meth:`packed` has the cost of a packed row.

    The unit is the time of one token position in the dense layers. So a short row costs about its width. The defaults
    are rough values for a model of hidden size 4096. ``sizing.timing.fit_cost`` fits all but two (``quadratic`` and
    ``document``) to measured times.

    Args:
        quadratic: Width at which attention costs as much as the dense layers: six times the hidden size for a standard
            transformer block. ``math.inf`` for no quadratic term.
        vision_per_token: Cost of the vision encoder for one image token. Leave it at 0 if you set the costs of images
            and patches below, because all of them are added.
        vision_per_image: Cost of the vision encoder for one image of any size.
        vision_per_patch: Cost of the vision encoder for one patch.
        vision_per_square: Factor of the squared number of patches of an image: attention over the whole image.
        launch: Fixed cost of a microbatch of any size. With zero, microbatches of one row would be the cheapest.
        document: Fixed cost of attention for one document of a packed row.
        seconds_per_token: Seconds of one unit, if the model was fitted to measured times. Plans do not use it.

    Example:
        >>> CostModel(quadratic=1000.0).rows(np.array([100, 200]))
        array([110., 240.])
    """

    quadratic: float = 6 * 4096.0
    vision_per_token: float = 0.0
    vision_per_image: float = 0.0
    vision_per_patch: float = 0.0
    vision_per_square: float = 0.0
    launch: float = 128.0
    document: float = 8.0
    seconds_per_token: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == 'seconds_per_token' and value is None:
                continue
            is_number = isinstance(value, int | float | np.number)
            if name == 'quadratic':
                is_positive = is_number and value > 0  # False for NaN
                if not is_positive:
                    raise InvalidInputError(f'`{name}` must be positive, got: {value}. Use math.inf for no such term.')
                continue
            is_valid = is_number and 0 <= value < float('inf')
            if not is_valid:
                raise InvalidInputError(f'`{name}` must be finite and not negative, got: {value!r}.')

    def rows(self, widths: np.ndarray) -> np.ndarray:
        """Returns the cost of one row at each width, without vision and launch, float64 of the same shape."""
        widths = np.asarray(widths, dtype=np.float64)
        return widths + widths * widths / self.quadratic

    def vision(
        self,
        image_tokens: np.ndarray,
        patches: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the cost of each sample in the vision encoder, float64 (n,), for :func:`.plan_microbatches`.

        Args:
            image_tokens: Image tokens of each sample, (n,).
            patches: Patches that the encoder computes for each sample, (n,). If a sample has several images, all its
                patches count as one image. None: only image tokens cost anything.

        Example:
            >>> CostModel(vision_per_image=5.0, vision_per_patch=0.1).vision(np.array([64, 0]), np.array([256, 0]))
            array([30.6,  0. ])
        """
        token_cost = np.asarray(image_tokens) * self.vision_per_token
        if patches is None:
            return token_cost
        patches = np.asarray(patches, dtype=np.float64)
        has_patches = patches > 0
        image_cost = has_patches * self.vision_per_image
        patch_cost = patches * self.vision_per_patch
        square_cost = patches * patches * self.vision_per_square
        return token_cost + (image_cost + patch_cost + square_cost)

    def packed(self, lengths: Sequence[int]) -> float:
        """Returns the cost of a microbatch that is one packed row of documents, without vision."""
        # Each document attends only to itself, so it costs as much as a row of its length.
        cost_of_documents = float(self.rows(np.array(lengths)).sum())
        return cost_of_documents + self.document * len(lengths) + self.launch


def token_budget(microbatch_size: float, slot_tokens: int) -> int:
    """Returns ``max_tokens``, the most positions of a microbatch. Splitting, planning and sizing use the same number.

    For example size 4 and slots of 2,048 tokens give 8,192 positions. A fraction of a position is left out, because the
    budget is a hard cap.

    The budget must stay in proportion to both arguments. Callers rely on it: they halve the size to halve the budget if
    memory runs out, and they add the budgets of the two texts of a model with a decoder. ``docs/architecture.md`` lists
    them.

    Args:
        microbatch_size: Composer's ``device_train_microbatch_size``, a number of rows. It may be a fraction.
        slot_tokens: Tokens that count as one of these rows.
    """
    return int(microbatch_size * slot_tokens)


def mean_samples(lengths: np.ndarray, tokens: int) -> int:
    """Returns the number of samples of mean length that have ``tokens`` tokens together, rounded up."""
    return -(-len(lengths) * tokens // int(lengths.sum()))  # tokens / mean length, in exact integers


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """How rows are cut into microbatches. The split, the samplers, the planner and sizing share this class.

    Args:
        max_tokens: Token budget of a microbatch, padding included. Samplers, planner and sizing pass it. The split
            computes it for each batch: the microbatch size times ``slot_tokens``. (With an encoder-decoder model a slot
            also has room for the decoder's text.)
        slot_tokens: Tokens that the split counts for one row of the microbatch size, see :func:`token_budget`. (It has
            nothing to do with step slots.) None: the width of each device batch, so that a single row always fits. With
            pre-split batches None stands for the token budget of their loader, divided by the microbatch size that the
            Trainer has at the first batch.
        max_image_tokens: Most image tokens of a microbatch: placeholders of images, videos and audios. None: no cap.
        max_loss_tokens: Most loss tokens of a microbatch. It limits the memory of logits that are computed only at
            labels. None: no cap.
        width_multiple: Widths are rounded up to a multiple of this.
        cost: Cost model of a microbatch.
        regroup: Whether rows are sorted by length, or keep their order.
        equal_counts: Whether all ranks make equally many microbatches; ``'auto'``: if the ranks wait for each other in
            every microbatch, as FSDP does.
        packing: Whether the rows of a microbatch become one packed row; ``'auto'``: if that is possible and costs less.
        objective: ``'ddp'``: ranks wait for each other once a step; ``'fsdp'``: at every microbatch.
        on_oversize: How the split handles a row that is over a cap by itself: ``'raise'`` an error, or ``'warn'`` and
            place it alone.

    Raises:
        ValueError: If an argument is out of range.
    """

    max_tokens: int = sys.maxsize
    slot_tokens: int | None = None
    max_image_tokens: int | None = None
    max_loss_tokens: int | None = None
    width_multiple: int = 1
    cost: CostModel = CostModel()
    regroup: bool = True
    equal_counts: bool | str = 'auto'
    packing: bool | str = False
    objective: Literal['ddp', 'fsdp'] = 'ddp'
    on_oversize: str = 'raise'

    def __post_init__(self) -> None:
        check_count('max_tokens', self.max_tokens)
        check_count('width_multiple', self.width_multiple)
        if self.slot_tokens is not None:
            check_count('slot_tokens', self.slot_tokens)
        for size, cap in self.caps.items():
            check_count(CAPPED_SIZES[size], cap)
        check_kind('cost', self.cost, CostModel)
        check_choice('regroup', self.regroup, (True, False))
        check_choice('equal_counts', self.equal_counts, (True, False, 'auto'))
        check_choice('packing', self.packing, (True, False, 'auto'))
        check_choice('objective', self.objective, ('ddp', 'fsdp'))
        check_choice('on_oversize', self.on_oversize, ('raise', 'warn'))

    @property
    def caps(self) -> dict[str, int]:
        """The caps that are not None, by the name of the size that they limit (:data:`CAPPED_SIZES`)."""
        caps = {}
        for size, option in CAPPED_SIZES.items():
            cap = getattr(self, option)
            if cap is not None:
                caps[size] = cap
        return caps

    def without_caps(self) -> CutOptions:
        """Returns the options without the caps of :data:`CAPPED_SIZES`; ``max_tokens`` stays."""
        no_caps = dict.fromkeys(CAPPED_SIZES.values())
        return replace(self, **no_caps)
