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

    For example, the labels 70, 80 and 90 count in two rows of four positions::

        index      0     1     2     3  |    4     5     6     7
        labels  -100  -100    70    80  | -100    90  -100  -100

    ``label_indices`` are 2, 3 and 5. The positions before them, 1, 2 and 4, predict these labels. The last index of the
    batch is added, so ``logit_indices`` are 1, 2, 4 and 7. The selected labels are -100 (added), 70, 80 and 90.

    Args:
        label_indices: Indices of the labels in the flattened batch, int64 ``(labels,)``.
        logit_indices: Indices of the positions at which logits are computed, int64 ``(labels (+ 1),)``.
        shifts_labels: Whether the model shifts labels itself.
    """

    label_indices: torch.Tensor
    logit_indices: torch.Tensor
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
        label_indices = places_of(running_count, range(1, num_labels + 1))
        if not rule.shifts_labels:
            return cls(label_indices, label_indices, shifts_labels=False)
        # These are in the same rows as the labels, because rules that shift labels count no label in column 0.
        indices_before_labels = label_indices - 1
        # No label is compared with the logits at the added position, so it may be any. The last one is taken.
        added_index = label_indices.new_full((1,), len(running_count) - 1)
        logit_indices = torch.cat([indices_before_labels, added_index])
        return cls(label_indices, logit_indices, shifts_labels=True)

    @property
    def logits_shape(self) -> tuple[int, int]:
        """Rows and width of the logits: one row, with the added position."""
        return 1, len(self.logit_indices)

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Selects the values at the predicting positions, from ``(rows, width, ...)`` to ``(1, labels (+ 1), ...)``."""
        # Not with a mask, because the CPU would wait for the number of positions.
        return values.flatten(0, 1).index_select(0, self.logit_indices)[None]

    def select_labels(self, values: torch.Tensor, fill: float) -> torch.Tensor:
        """Selects the values at the labels, from ``(rows, width)`` to ``(1, labels (+ 1))``. Adds ``fill`` in front."""
        selected = values.flatten().index_select(0, self.label_indices)
        if self.shifts_labels:
            selected = F.pad(selected, (1, 0), value=fill)
        return selected[None]

    def put_back(self, selected: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """Reverses :meth:`select`. Returns values ``(rows, width, ...)``, 0 at positions that predict no label."""
        num_labels = len(self.label_indices)
        placed = selected.new_zeros(rows * width, *selected.shape[2:])
        predicting_indices = self.logit_indices[:num_labels]  # without the added position
        # The indices may be on the GPU, but gradients of a probe are on the CPU.
        placed[predicting_indices.to(placed.device)] = selected[0, :num_labels]
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
    logits_shape = logits.shape[:2]
    if logits_shape == labels.shape:
        return BatchAtLogits(batch, None)
    positions = LabelledPositions.from_batch(batch, rule, num_labels)
    if logits_shape != positions.logits_shape:
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
    """The positions whose hidden states are selected. None: this forward computes all logits."""
    labels_shape: tuple[int, ...] = ()
    """The shape of its labels before some were selected. Empty: this forward computes all logits."""
    num_head_calls: int = 0
    """Calls of the output embedding so far."""
    has_graph: bool = False
    """Whether it will have a backward."""
    is_recomputed: bool = False
    """Whether a backward runs it again, because a checkpoint is around the model."""


class LabelSelector:
    """Hooks on a Hugging Face model. They select labels and hidden states in the next forward after :meth:`arm`.

    Before training, the first-batch check (``RowComparison.selection_failure``) tries them. It reads ``num_head_calls``
    after a forward that computed all logits, calls :meth:`arm`, and compares the gradients of both forwards. If they
    are the same, the training loop calls :meth:`begin_forward` before each forward.

    With activation checkpointing, a backward may compute the output embedding again. The hook must then select the same
    positions as in the forward. It depends on the checkpoint how it finds them:

    - Around the output embedding only, with ``use_reentrant=False``: the checkpoint keeps the tensor of hidden states.
      The positions were noted for this tensor in the forward.
    - Around a norm and the output embedding, or with ``use_reentrant=True``: the hidden states are a new tensor. The
      positions are those of the last forward. If several forwards came since the embedding was last computed again, an
      error is raised. Limit: a second backward of an earlier forward (``retain_graph=True``) is not noticed if only one
      forward came since. It gets the positions of this last forward.
    - Around the whole model: the forward runs again, and only :class:`.LogitsAtLabels` arms the hooks again. In the
      training loop the second forward computes all logits. With ``use_reentrant=True`` the gradient is the same, but no
      memory is saved. Otherwise torch raises an error, because the two forwards differ.

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
        self._num_labels: int | None = None  # None: the hooks are not armed, and it computes all logits
        self._forward: RunningForward | None = None  # None: no forward runs
        # About earlier forwards, for a backward that computes the output embedding again. Positions are None if the
        # forward computed all logits.
        self._positions_by_hidden_states = WeakTensorKeyDictionary()
        self._last_positions: LabelledPositions | None = None  # of the last forward with gradients
        self._forwards_since_recompute = 0  # forwards with gradients since a backward last computed the embedding again
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
        forward = RunningForward(has_graph=torch.is_grad_enabled(), is_recomputed=is_in_backward())
        self._forward = forward
        num_labels = self._num_labels
        self._num_labels = None
        if num_labels is None:  # not armed
            return args, kwargs
        labels = kwargs.get('labels')
        if labels is None:
            return args, kwargs
        # The loss reads `shift_labels` instead of `labels` if the batch has them, and they would not be selected.
        if kwargs.get('shift_labels') is not None:
            return args, kwargs
        # Since the hooks were registered, the model may have got another output embedding, which has no hook.
        if output_embedding(module) is not self._head:
            return args, kwargs
        positions = LabelledPositions.from_batch(kwargs, self._rule, num_labels)
        kwargs = dict(kwargs)
        if is_encoder_decoder(module.config) and kwargs.get('decoder_input_ids') is None:
            # The model would make these ids from its labels, but it gets only some of the labels.
            kwargs['decoder_input_ids'] = module.prepare_decoder_input_ids_from_labels(labels=labels)
        kwargs['labels'] = positions.select_labels(labels, IGNORE_INDEX)
        forward.positions = positions
        forward.labels_shape = labels.shape
        return args, kwargs

    def _select_hidden_states(self, head: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook before the output embedding: keeps only the hidden states that predict a label, if labels were selected.

        Raises RuntimeError if there are hidden states at other positions than labels.
        """
        forward = self._forward
        if forward is not None:
            forward.num_head_calls += 1
        if not args:
            # They are given by name, so nothing is selected. If labels were selected, the model's loss raises an error,
            # because it gets more logits than labels.
            return None
        hidden_states = args[0]
        if is_in_backward() and (forward is None or not forward.is_recomputed):
            # The checkpoint is around the output embedding, and perhaps a norm before it, but not around the model.
            positions = self._recomputed_positions(hidden_states)
        elif forward is None:  # other code calls the output embedding between two forwards
            positions = None
        else:
            positions = forward.positions
            if positions is not None and hidden_states.shape[:2] != forward.labels_shape:
                raise NotExactError(
                    'Logits at labels need hidden states of every position of the labels '
                    f'{tuple(forward.labels_shape)}, got: {tuple(hidden_states.shape[:2])} at the output embedding. '
                    'The model changes the sequence on the way.'
                )
        self._positions_by_hidden_states[hidden_states] = positions
        if positions is None:
            return None
        return (positions.select(hidden_states), *args[1:])

    def _recomputed_positions(self, hidden_states: torch.Tensor) -> LabelledPositions | None:
        """Returns the positions of the forward whose output embedding is computed again; None: all positions.

        It need not be the last forward, because a loss may be the sum of the losses of several forwards. The tensor of
        hidden states tells the forward. If it is a new tensor (a norm is in the checkpoint, or it is reentrant), the
        last forward must be meant, so RuntimeError is raised if there were several since the embedding was last
        computed again.

        Args:
            hidden_states: The hidden states at the output embedding.
        """
        num_forwards = self._forwards_since_recompute
        self._forwards_since_recompute = 0
        if hidden_states in self._positions_by_hidden_states:
            return self._positions_by_hidden_states[hidden_states]
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
        self._forward = None
        if forward is None:  # the model has called itself, and the inner call has ended the forward
            self.num_head_calls = 0  # not known, so that nothing is selected
            return
        if forward.has_graph:
            self._last_positions = forward.positions
            if not forward.is_recomputed:
                self._forwards_since_recompute += 1
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
