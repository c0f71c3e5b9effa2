# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The positions of a batch that predict a label, and a model that computes logits only there.

The loss needs only the logits of these positions. :class:`LabelledPositions` selects hidden states, labels and weights
into one row, in the order of the rows of the batch.

:class:`LabelSelector` makes a model compute its logits in this form. One hook replaces the model's ``labels`` by those
that count. Another hook selects hidden states just before the output embedding. Everything between the output embedding
and the loss (soft cap, logit scale, router loss) is the model's own code, and runs as it is.

:func:`batch_at_logits` selects labels and weights if the shape of logits shows that they have this form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from composer_tokacc.batch import IGNORE_INDEX, Batch, labels_of
from composer_tokacc.compat import is_encoder_decoder, is_in_backward
from composer_tokacc.counting import LossRule
from composer_tokacc.model_structure import output_embedding
from composer_tokacc.refusals import InvalidInputError, NotExactError
from composer_tokacc.weights import LOSS_WEIGHTS

DENSE = 0.9
"""If at least this share of the positions has a label, all logits are computed. The selection would copy nearly all
hidden states, and save little."""


@dataclass(frozen=True, eq=False)
class LabelledPositions:
    """The positions of the labels of a batch, and the positions that predict them.

    A model that shifts labels compares ``logits[:, :-1]`` with ``labels[:, 1:]``. So one position is added behind the
    selected positions, and one ignored label in front of the selected labels. The model's shift removes both, and each
    position meets the label that it predicts. In shapes ``(+ 1)`` stands for this addition.

    For example, the labels 7, 8 and 9 count in two rows of four positions::

        index      0     1     2     3  |    4     5     6     7
        labels  -100  -100     7     8  | -100  -100  -100     9

    ``of_labels`` is 2, 3, 7. ``of_logits`` is 1, 2, 6, and 7, which is added. The selected labels are -100, which is
    added, 7, 8, 9.

    Args:
        of_labels: Indices of the labels in the flattened batch, int64 ``(labels,)``.
        of_logits: Indices of the positions at which logits are computed, int64 ``(labels (+ 1),)``.
        shifts_labels: Whether the model shifts labels itself.
    """

    of_labels: torch.Tensor
    of_logits: torch.Tensor
    shifts_labels: bool

    @classmethod
    def from_batch(cls, batch: Batch, rule: LossRule, num_labels: int) -> LabelledPositions:
        """Finds the positions on the device of the labels, without waiting for it.

        Args:
            batch: A batch with ``labels``, ``(rows, width)``.
            rule: Which labels count.
            num_labels: The number of labels that count. Tokens were counted on the CPU, so it is known.
        """
        running_count = rule.mask(batch).flatten().cumsum(dim=0)
        of_labels = places_of(running_count, range(1, num_labels + 1))
        if not rule.shifts_labels:
            return cls(of_labels, of_labels, shifts_labels=False)
        # The position before a label is in the same row, because these rules count no label in column 0. The last
        # position of the batch is added, because it predicts no label.
        of_logits = F.pad(of_labels - 1, (0, 1), value=len(running_count) - 1)
        return cls(of_labels, of_logits, shifts_labels=True)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of the logits: one row, with the added position."""
        return 1, len(self.of_logits)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Selects the values at the predicting positions, from ``(rows, width, ...)`` to ``(1, labels (+ 1), ...)``."""
        # Not with a mask, because the CPU would wait for the number of positions.
        return values.flatten(0, 1).index_select(0, self.of_logits)[None]

    def select_labels(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Selects the values at the labels, from ``(rows, width)`` to ``(1, labels (+ 1))``. Adds ``fill`` in front."""
        selected = values.flatten().index_select(0, self.of_labels)
        if self.shifts_labels:
            selected = F.pad(selected, (1, 0), value=fill)
        return selected[None]

    def put_back(self, selected: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """Reverses :meth:`select`. Returns values ``(rows, width, ...)``, 0 at positions that predict no label."""
        num_labels = len(self.of_labels)  # leaves out the added position
        placed = selected.new_zeros(rows * width, *selected.shape[2:])
        # The positions may be on the GPU, but gradients of a probe are on the CPU.
        of_predictions = self.of_logits[:num_labels].to(placed.device)
        placed[of_predictions] = selected[0, :num_labels]
        return placed.unflatten(0, (rows, width))


class BatchAtLogits(NamedTuple):
    """A microbatch whose labels and weights have the shape of its logits."""

    batch: Mapping[str, Any]
    """The microbatch itself, or only its selected labels and weights if logits were computed only at labels."""
    positions: LabelledPositions | None
    """The positions of the logits. None: logits were computed at all positions."""


def batch_at_logits(batch: Batch, logits: torch.Tensor, rule: LossRule, num_labels: int) -> BatchAtLogits | None:
    """Brings labels and weights into the shape of the logits. Returns None if the labels do not fit this shape.

    Args:
        batch: The microbatch with ``labels`` of shape ``(rows, width)``.
        logits: Its logits, ``(rows, width, vocabulary)``, or ``(1, labels (+ 1), vocabulary)`` if the model computed
            them only at labels.
        rule: Which labels count.
        num_labels: The number of labels that count.
    """
    labels = labels_of(batch)
    shape = logits.shape[:2]
    if shape == labels.shape:
        return BatchAtLogits(batch, None)
    positions = LabelledPositions.from_batch(batch, rule, num_labels)
    if shape != positions.shape:
        return None
    selected: dict[str, Any] = {'labels': positions.select_labels(labels, IGNORE_INDEX)}
    weights = batch.get(LOSS_WEIGHTS)
    # If tokens have no weights, the dataset may still have a column of this name, perhaps of one number for each row.
    if isinstance(weights, torch.Tensor) and weights.shape == labels.shape:
        selected[LOSS_WEIGHTS] = positions.select_labels(weights, 0.0)
    return BatchAtLogits(selected, positions)


def places_of(running_count: torch.Tensor, ordinals: range) -> torch.Tensor:
    """Returns the index of the k-th True of a mask, for each k in ``ordinals``.

    Uses the running count of the Trues, because ``nonzero()`` would wait for the GPU. If there are fewer than k, it
    returns the index of the last entry. Callers have counted the Trues on the CPU, so there are fewer only if the mask
    has changed since, which :func:`.check_step` refuses.

    Args:
        running_count: Number of Trues up to each entry of the mask, int64 ``(n,)``.
        ordinals: The values of k, such as every tenth. The first True has the number 1.
    """
    ks = torch.arange(ordinals.start, ordinals.stop, ordinals.step, device=running_count.device)
    places = torch.searchsorted(running_count, ks)  # the first index at which the running count reaches k
    return places.clamp_(max=len(running_count) - 1)


@dataclass(kw_only=True)
class RunningForward:
    """The forward of the model that runs now."""

    positions: LabelledPositions | None = None
    """The positions whose hidden states are selected. None: it computes all logits."""
    labels_shape: tuple[int, ...] = ()
    """The shape of its labels before some were selected. Empty: it computes all logits."""
    num_head_calls: int = 0
    """Calls of the output embedding so far."""
    has_graph: bool = False
    """Whether it will have a backward."""
    is_recomputed: bool = False
    """Whether a backward runs it, because a checkpoint is around the model."""


class LabelSelector:
    """Hooks on a Hugging Face model. They select labels and hidden states in the next forward after :meth:`arm`.

    Before training, the first-batch check (``RowComparison.selection_failure``) tries them. It reads ``num_head_calls``
    after a forward that computed all logits, calls :meth:`arm`, and compares the gradients of both forwards. If they
    are the same, the training loop calls :meth:`begin_forward` before each forward.

    Args:
        model: A Hugging Face model with an output embedding, not wrapped.

    Raises:
        ValueError: If the model has no output embedding.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        head = output_embedding(model)
        if head is None:
            raise InvalidInputError(
                f'{type(model).__name__} has no output embedding: `get_output_embeddings()` finds none.'
            )
        self._head = head
        # About the next forward, see arm().
        self._rule = LossRule.CAUSAL
        self._num_labels: int | None = None  # None: it computes all logits
        self._forward = RunningForward()  # an empty one if no forward runs
        # About earlier forwards. If a checkpoint is around the output embedding only, a backward computes the embedding
        # again, and must select the positions of the forward to which it belongs.
        self._positions_at = WeakTensorKeyDictionary()  # the positions of a forward, by its hidden states
        self._last_positions: LabelledPositions | None = None  # the positions of the last forward with gradients
        self._num_open_forwards = 0  # forwards with gradients since an embedding was last computed again
        self.num_head_calls = 0
        """Calls of the output embedding in the last forward that computed all logits.

        Unless it is 1, the hooks must not be armed. A model with a fused loss does not call its output embedding. So
        its hidden states would not be selected, and the kernel of the loss would read beyond the end of the labels.
        """
        # torch.compile must leave the hooks alone, because they do something else in each forward.
        uncompiled = torch.compiler.disable
        self._handles = [
            model.register_forward_pre_hook(uncompiled(self._select_labels), with_kwargs=True),
            head.register_forward_pre_hook(uncompiled(self._select_hidden_states)),
            model.register_forward_hook(uncompiled(self._end_forward)),
        ]

    def arm(self, rule: LossRule, num_labels: int) -> None:
        """Makes the next forward compute logits only at labels.

        Args:
            rule: Which labels the model's loss counts.
            num_labels: The number of these labels. To count them here would wait for the GPU.
        """
        self._rule = rule
        self._num_labels = num_labels

    def disarm(self) -> None:
        """Makes the next forward compute all logits."""
        self._num_labels = None

    def begin_forward(self, rule: LossRule, num_labels: int, num_positions: int) -> None:
        """Arms the hooks for the next forward, unless nearly all positions have a label. It would save little then."""
        self.disarm()  # a forward that failed may have left it armed
        if is_worth_selecting(num_labels, num_positions):
            self.arm(rule, num_labels)

    def remove(self) -> None:
        """Removes the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def _select_labels(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before the model: begins a forward, and disarms. If it was armed, keeps only the labels that count.

        Labels that are not a named argument stay as they are.
        """
        self._forward = RunningForward(has_graph=torch.is_grad_enabled(), is_recomputed=is_in_backward())
        num_labels = self._num_labels
        self._num_labels = None
        labels = kwargs.get('labels')
        # Since the hooks were registered, the model may have got another output embedding, which has no hook.
        has_hook = output_embedding(module) is self._head
        # The loss reads `shift_labels` instead of `labels` if the batch has them, and they would not be selected.
        has_shifted_labels = kwargs.get('shift_labels') is not None
        if labels is None or num_labels is None or not has_hook or has_shifted_labels:
            return args, kwargs
        positions = LabelledPositions.from_batch(kwargs, self._rule, num_labels)
        kwargs = dict(kwargs)
        if is_encoder_decoder(module.config) and kwargs.get('decoder_input_ids') is None:
            # The model would make these ids from its labels, but it gets only some of the labels.
            kwargs['decoder_input_ids'] = module.prepare_decoder_input_ids_from_labels(labels=labels)
        kwargs['labels'] = positions.select_labels(labels, IGNORE_INDEX)
        self._forward.positions = positions
        self._forward.labels_shape = labels.shape
        return args, kwargs

    def _select_hidden_states(self, head: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook before the output embedding: keeps only the hidden states that predict a label, if labels were selected.

        Raises RuntimeError if there are hidden states at other positions than labels.
        """
        forward = self._forward
        forward.num_head_calls += 1
        if not args:
            # They are given by name, so nothing is selected. If labels were selected, the model's loss raises an error,
            # because it gets more logits than labels.
            return None
        hidden_states = args[0]
        if is_in_backward() and not forward.is_recomputed:
            # Activation checkpointing of the output embedding computes this part of a forward again.
            num_forwards = self._num_open_forwards
            self._num_open_forwards = 0
            positions = self._recomputed_positions(hidden_states, num_forwards)
        else:
            positions = forward.positions
            if positions is not None and hidden_states.shape[:2] != forward.labels_shape:
                raise NotExactError(
                    'Logits at labels need hidden states of every position of the labels '
                    f'{tuple(forward.labels_shape)}, got: {tuple(hidden_states.shape[:2])} at the output embedding. '
                    'The model changes the sequence on the way.'
                )
            self._positions_at[hidden_states] = positions
        if positions is None:
            return None
        return (positions.select(hidden_states), *args[1:])

    def _recomputed_positions(self, hidden_states: torch.Tensor, num_forwards: int) -> LabelledPositions | None:
        """Returns the positions of the forward whose output embedding is computed again; None: all positions.

        It need not be the last forward, because a loss may be the sum of the losses of several forwards. A checkpoint
        keeps the tensor that it got, which tells the forward. If the checkpoint begins before the hidden states (a norm
        is in it), they are another tensor. Then only the last forward can be meant, so RuntimeError is raised if there
        were several.

        Args:
            hidden_states: The hidden states at the output embedding.
            num_forwards: The number of forwards with gradients since the embedding was last computed again.
        """
        if hidden_states in self._positions_at:
            return self._positions_at[hidden_states]
        if num_forwards > 1:
            raise NotExactError(
                'With logits at labels, and a checkpoint around the output embedding, each forward must have its '
                f'backward before the next forward, got: {num_forwards} forwards before a backward. Leave the output '
                'embedding out of the checkpoint (docs/errors.md#logits-at-labels).'
            )
        return self._last_positions

    def _end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Hook after the model: ends a forward, and notes its positions for a later backward.

        If it has computed all logits, also notes the calls of the output embedding, see :attr:`num_head_calls`.

        Raises RuntimeError if labels were selected, but the output embedding was not called exactly once.
        """
        forward = self._forward
        self._forward = RunningForward()  # the output embedding may be called between two forwards
        if forward.has_graph:
            self._last_positions = forward.positions
            if not forward.is_recomputed:
                self._num_open_forwards += 1
        if forward.positions is None:
            self.num_head_calls = forward.num_head_calls
        elif forward.num_head_calls != 1:
            raise NotExactError(
                'Logits at labels need one call of the output embedding in each forward, got: '
                f'{forward.num_head_calls} calls. The model computes its loss in another way (a fused kernel, or more '
                'than one head).'
            )


def is_worth_selecting(num_labels: int, num_positions: int) -> bool:
    """Returns whether so few positions have a label that selecting their hidden states saves time."""
    return num_labels < DENSE * num_positions
