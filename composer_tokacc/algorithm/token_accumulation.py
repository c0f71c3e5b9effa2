# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Exact token accumulation: every loss-generating token of an optimizer step weighs the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist

from composer_tokacc.algorithm.first_batch import check_packed, check_sharding, find_rule
from composer_tokacc.algorithm.loss_terms import LossTerms, attached_zero
from composer_tokacc.algorithm.rank_sum import RankSum
from composer_tokacc.algorithm.row_coupling import check_rows_are_independent
from composer_tokacc.algorithm.step_guard import StepGuard
from composer_tokacc.counting import (
    LOSS_TOKENS,
    NUM_MICROBATCHES,
    PACKED,
    PACKED_CHECKED,
    REGROUPED,
    annotate,
    check_rule,
    labels_of,
    num_samples,
)

__all__ = ['TokenAccumulation']


class TokenAccumulation(Algorithm):
    r"""Gives every loss-generating token of an optimizer step the same weight.

    With microbatches :math:`m` on ranks :math:`r`, Composer weights a microbatch's mean loss by its samples, so a token
    in a microbatch of few tokens weighs more. This algorithm multiplies the loss by

    .. math::
        s_{rm} = \frac{t_{rm}}{T} \cdot \frac{N}{n_{rm}}

    where :math:`t` and :math:`n` are the microbatch's loss-generating tokens and samples, :math:`T` and :math:`N` those
    of the step over all ranks. Together with Composer's weight the gradient is that of one forward over the whole
    global batch, whatever the microbatch size, the number of ranks or the padding.

    Runs on :attr:`.Event.BATCH_START` (counts; starts the one all-reduce of a step), :attr:`.Event.BEFORE_FORWARD` (has
    its result), :attr:`.Event.AFTER_LOSS`, :attr:`.Event.BEFORE_BACKWARD` (scales), :attr:`.Event.AFTER_BACKWARD`
    (restores the raw loss) and :attr:`.Event.AFTER_TRAIN_BATCH` (checks the weights that Composer really applied,
    before the optimizer steps).

    Args:
        loss_tokens (str): Which labels the model's loss averages over: ``'causal'``, ``'causal_attended'``,
            ``'unshifted'`` (see :func:`.counting.loss_mask`), or ``'auto'``: found by a probe forward before the
            first step. Default: ``'auto'``.
        loss_units (dict[str, str], optional): For dict losses, the denominator of each term: ``'tokens'``,
            ``'samples'``, ``'coupled_samples'`` (rows of a microbatch see each other, as in a contrastive loss) or
            ``'microbatches'`` (router statistics). The last two depend on which rows share a microbatch, so they are
            refused with a split that regroups rows. Default: ``None``, all terms are means over tokens.
        check_loss (bool): Whether to hold the rule to the model's own loss by the probe. Default: ``True``.

    Raises:
        ValueError: If an argument is not one of the above.
        RuntimeError: Before any optimizer step, if the step would not be exact, naming cause and remedy.

    Example:
        .. code-block:: python

            from composer_tokacc import TokenAccumulation

            trainer = Trainer(..., algorithms=[TokenAccumulation()])
    """

    def __init__(
        self,
        *,
        loss_tokens: str = 'auto',
        loss_units: dict[str, str] | None = None,
        check_loss: bool = True,
    ) -> None:
        self.loss_tokens = check_rule(loss_tokens, allow_auto=True)
        if loss_tokens == 'auto' and not check_loss:
            raise ValueError(
                "`loss_tokens` must be an explicit rule with `check_loss=False`, got: 'auto'. The rule is found by the "
                "check; give 'causal' (most decoders), 'causal_attended' or 'unshifted'."
            )
        self.check_loss = check_loss
        self.loss_terms = LossTerms(loss_units)
        self.rule: str | None = None if check_loss else loss_tokens
        self.num_empty_steps = 0
        self._coupling_checked = False
        self._packing_checked = False
        self._guard: StepGuard | None = None
        self._raw_loss: Any = None
        self._actions = {
            Event.FIT_START: self._check_model,
            Event.BATCH_START: self._count,
            Event.BEFORE_TRAIN_BATCH: self._start_attempt,
            Event.BEFORE_FORWARD: self._read_totals,
            Event.AFTER_LOSS: self._replace_empty,
            Event.BEFORE_BACKWARD: self._scale,
            Event.AFTER_BACKWARD: self._restore,
            Event.AFTER_TRAIN_BATCH: self._finish,
        }

    def match(self, event: Event, state: State) -> bool:
        """Runs on the events named above."""
        return event in self._actions

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Dispatches on the event."""
        self._actions[event](state, logger)

    def state_dict(self) -> dict[str, Any]:
        """Plain values only: Composer's next release loads checkpoints with ``weights_only=True``."""
        return {'rule': self.rule, 'num_empty_steps': self.num_empty_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the count of empty steps; the rule is probed afresh, since versions may have changed."""
        self.num_empty_steps = state['num_empty_steps']

    def _check_model(self, state: State, logger: Logger) -> None:
        """FIT_START: the model is wrapped now."""
        check_sharding(state.model)

    def _count(self, state: State, logger: Logger) -> None:
        """BATCH_START: ``state.batch`` is the whole device batch, still on the CPU, so counting syncs nothing."""
        labels_of(state.batch)
        if REGROUPED in state.batch and not self._coupling_checked:
            check_rows_are_independent(state.model, self.loss_terms.coupled)
            self._coupling_checked = True
        if self.rule is None:
            self.rule = find_rule(state, self.loss_terms, self.loss_tokens)
        batch = annotate(state.batch, self.rule)
        if PACKED in batch:
            if not self._packing_checked:
                check_packed(state, self.loss_terms)
                self._packing_checked = True
            batch[PACKED] = PACKED_CHECKED
        local_tokens, local_samples = sum(batch[LOSS_TOKENS]), num_samples(batch)
        # Carried by the batch, so that split_batch hands each microbatch its own counts.
        state.batch = batch
        self._guard = StepGuard(
            rule=self.rule,
            totals=RankSum((local_tokens, local_samples), state.device),
            local_tokens=local_tokens,
            local_samples=local_samples,
            world_size=dist.get_world_size(),
        )

    def _start_attempt(self, state: State, logger: Logger) -> None:
        """BEFORE_TRAIN_BATCH: fires once per attempt (an OOM retry or a closure called again starts afresh)."""
        assert self._guard is not None, 'BATCH_START comes before BEFORE_TRAIN_BATCH'
        self._guard.start_attempt()

    def _read_totals(self, state: State, logger: Logger) -> None:
        """BEFORE_FORWARD: Composer has just waited for its own all-reduce, and the device has nothing queued yet."""
        assert self._guard is not None
        self._guard.totals.read()

    def _replace_empty(self, state: State, logger: Logger) -> None:
        """AFTER_LOSS: a mean over no tokens is NaN, and NaNMonitor and the loss log read it from here on."""
        if self._is_empty(state.batch):
            state.loss = self.loss_terms.replace_empty(state.loss, attached_zero(state.outputs, state.loss))

    def _is_empty(self, batch: Mapping[str, Any]) -> bool:
        return sum(batch[LOSS_TOKENS]) == 0 or num_samples(batch) == 0

    def _scale(self, state: State, logger: Logger) -> None:
        """BEFORE_BACKWARD: the last point where ``state.loss`` matters, so nothing may rescale it afterwards."""
        guard, batch = self._guard, state.batch
        assert guard is not None
        assert self.rule is not None
        if LOSS_TOKENS not in batch:
            raise RuntimeError(
                f'Microbatches must carry {LOSS_TOKENS!r}, which is written at BATCH_START, got: {sorted(batch)}. A '
                'custom `split_batch` drops it; keep python lists with one entry per row, or use token_data_spec().'
            )
        microbatch = guard.add_microbatch(
            num_tokens=sum(batch[LOSS_TOKENS]),
            num_samples=num_samples(batch),
            labelled={key: batch[key] for key in ('labels', 'attention_mask') if key in batch},
            # Composer's own split makes microbatches of a fixed number of rows; ours says how many it made.
            of=batch.get(NUM_MICROBATCHES) or -(-guard.local_samples // int(state.device_train_microbatch_size or 1)),
        )
        self._raw_loss = state.loss
        state.loss = self.loss_terms.scale(state.loss, microbatch.scales(), observe=guard.observe)

    def _restore(self, state: State, logger: Logger) -> None:
        """AFTER_BACKWARD: callbacks read ``state.loss`` at the end of the batch and expect the model's own."""
        state.loss = self._raw_loss
        self._raw_loss = None

    def _finish(self, state: State, logger: Logger) -> None:
        """AFTER_TRAIN_BATCH: gradients are whole, the optimizer has not moved yet."""
        guard = self._guard
        assert guard is not None
        scaler = state.scaler
        gradient_scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
        guard.check(gradient_scale=gradient_scale, by_microbatch=self.loss_terms.needs_microbatches)
        if guard.tokens == 0:
            # Zero gradients would still decay weights and move momentum; no gradients move nothing.
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self.num_empty_steps += 1
        logger.log_metrics(
            {
                'token_accumulation/loss_generating_tokens': guard.tokens,
                'token_accumulation/empty_microbatches': guard.num_empty,
                'token_accumulation/empty_steps': self.num_empty_steps,
            }
        )
