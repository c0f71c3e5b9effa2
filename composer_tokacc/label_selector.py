# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Has a model compute logits only at the positions that predict a label.

One hook takes ``labels`` out of the model's arguments and gives it only those that count. Another hook selects the
hidden states of the positions that predict them, just before the output embedding. Everything between head and loss
(soft cap, logit scale, router loss) is the model's own code, which runs as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.labelled import LabelledPositions
from composer_tokacc.refusals import InvalidInputError, NotExactError

DENSE = 0.9
"""Above this share of labelled positions all logits are computed: selecting copies hidden states, and gains little."""


class LabelSelector:
    """Hooks on a Hugging Face model that select labels and hidden states, in forwards for which :meth:`arm` was called.

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
        self._rule = 'causal'
        self._num_labels: int | None = None  # of the next forward; None: it computes all logits
        # Of the forward that runs now.
        self._positions: LabelledPositions | None = None  # None: it computes all logits
        self._labels_shape = torch.Size()
        self._num_calls = 0  # of the output embedding
        self.num_head_calls = 0
        """Calls of the output embedding in the last forward that computed all logits. Ask for it before :meth:`arm`.

        A model with a fused loss does not call it. Its labels must not be selected, because the kernel would read
        beyond the end of them.
        """
        self._handles = [
            model.register_forward_pre_hook(self._select_labels, with_kwargs=True),
            head.register_forward_pre_hook(self._select_hidden_states),
            model.register_forward_hook(self._check_selected),
        ]

    def arm(self, rule: str, num_labels: int) -> None:
        """Has the next forward compute logits only at labels.

        Args:
            rule: Which labels the model's loss counts, see :func:`.loss_mask`.
            num_labels: The number of these labels. To count them here would wait for the GPU.
        """
        self._rule = rule
        self._num_labels = num_labels

    def disarm(self) -> None:
        """Has the next forward compute all logits."""
        self._num_labels = None

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _select_labels(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before the model: keeps the labels that count. A forward without ``labels=`` computes all logits."""
        # An earlier forward may have ended with an error before its last hook.
        self._positions = None
        self._num_calls = 0
        num_labels = self._num_labels
        self._num_labels = None
        labels = kwargs.get('labels')
        if labels is None or num_labels is None:
            return args, kwargs
        if kwargs.get('shift_labels') is not None:
            raise NotExactError(
                'Logits at labels need `labels` only, got: `shift_labels` as well, which are not selected.'
            )
        positions = LabelledPositions.from_batch(kwargs, self._rule, num_labels)
        kwargs = dict(kwargs)
        if getattr(module.config, 'is_encoder_decoder', False) and kwargs.get('decoder_input_ids') is None:
            # The model would make them from its labels, but it only gets some of the labels.
            kwargs['decoder_input_ids'] = module.prepare_decoder_input_ids_from_labels(labels=labels)
        kwargs['labels'] = positions.select_labels(labels, IGNORE_INDEX)
        self._positions = positions
        self._labels_shape = labels.shape
        return args, kwargs

    def _select_hidden_states(self, head: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook before the output embedding: keeps the hidden states that predict a label."""
        self._num_calls += 1
        if self._positions is None:
            return None
        hidden_states = args[0]
        if hidden_states.shape[:2] != self._labels_shape:
            raise NotExactError(
                f'Logits at labels need hidden states of every position of the labels {tuple(self._labels_shape)}, '
                f'got: {tuple(hidden_states.shape[:2])} at the output embedding. The model changes the sequence on the '
                'way.'
            )
        return (self._positions.select(hidden_states), *args[1:])

    def _check_selected(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Hook after the model: raises RuntimeError unless the output embedding was called once."""
        has_selected = self._positions is not None
        self._positions = None
        if not has_selected:
            self.num_head_calls = self._num_calls
        elif self._num_calls != 1:
            raise NotExactError(
                'Logits at labels need one call of the output embedding in each forward, got: '
                f'{self._num_calls} calls. The model computes its loss in another way (a fused kernel, or more '
                'than one head).'
            )


def output_embedding(model: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the module that computes logits from hidden states, or None if the model does not name one."""
    get_output_embeddings = getattr(model, 'get_output_embeddings', None)
    if get_output_embeddings is None:
        return None
    # Transformers raises one of these errors for a model without a head.
    try:
        return get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def is_worth_selecting(num_labels: int, num_positions: int) -> bool:
    """Returns whether so few positions have a label that selecting their hidden states gains more than it costs."""
    return num_labels < DENSE * num_positions
