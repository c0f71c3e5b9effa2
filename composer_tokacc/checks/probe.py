# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the model on a few rows, as it will train, and leaves everything as it was.

The result is the loss and its gradients by the outputs of the last two layers. In most models these are the last norm,
whose output are the hidden states, and the head, whose output are the logits. The forward has no graph before these
layers, so a probe takes about half of the memory of training.

A loss may have several terms. Each is a mean over its unit, such as ``'tokens'`` or ``'samples'``. A loss that is one
number is one term of the unit ``'tokens'``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from composer_tokacc.batch import Batch, labels_of, with_copied_tensors
from composer_tokacc.checks.logits import TINY, MeasuredTokens, are_logits, logits_of, measure, sketch
from composer_tokacc.checks.written_state import State, StateSnapshot, perturb, undisturbed
from composer_tokacc.collectives import Gather, only_of_this_rank
from composer_tokacc.compat import BatchNorm
from composer_tokacc.counting import LossRule
from composer_tokacc.graph import edge_of
from composer_tokacc.labelled import LabelledPositions, LabelSelector
from composer_tokacc.model_structure import HALF_PRECISION, forward_parameters
from composer_tokacc.random_state import seed_everything
from composer_tokacc.refusals import InvalidInputError, NotExactError

log = logging.getLogger(__name__)

NOISE_FACTOR = 8
"""Tolerance in multiples of the measured round-off. Kernels for other shapes round every sum differently, but the
measurement rounds only the result of each layer."""
ROUNDING_FLOOR = 64
"""Tolerance of a loss in multiples of its machine epsilon: kernels for other shapes sum in another order."""
STATE_TOLERANCE = 1e-6
"""If a changed state changes a result by less than this, relatively, the result does not depend on the state."""
VARIATION = 0.8
"""The most that :class:`_ReplacedWeights` adds to an entry of a weight with one column. With more columns it is divided
by the root of their number, so that outputs of wide and narrow layers change by about as much."""
DROPOUTS = {
    'dropout',
    'dropout_',
    'dropout1d',
    'dropout2d',
    'dropout3d',
    'alpha_dropout',
    'alpha_dropout_',
    'feature_dropout',
    'feature_dropout_',
    'feature_alpha_dropout',
    'feature_alpha_dropout_',
}
"""Names of torch's functions that are only a dropout. A fused kernel, such as `bias_dropout_add`, does more."""
WITH_DROPOUT = (
    torch.nn.MultiheadAttention,
    torch.nn.RNNBase,
)
"""Modules of torch with a dropout inside of one function. Its probability is their attribute ``dropout``."""

Outputs: TypeAlias = Any
"""The outputs of a model. Hosts have no type for them."""
Loss: TypeAlias = Any
"""A loss as a model returns it: a tensor, a sequence or a dict."""
ForwardHook: TypeAlias = Callable[[Module, object, Any], Tensor | None]
"""Takes a module, its inputs and its output. Returns another output, or None to leave the output as it is."""
Leaves: TypeAlias = dict[Module, Tensor]
"""Outputs of layers, by layer. The graph of autograd begins at them."""


@dataclass(frozen=True, eq=False)
class AtLabels:
    """Makes a forward compute logits only at the positions that predict a label."""

    selector: LabelSelector
    rule: LossRule
    positions: LabelledPositions


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of one forward of a few rows."""

    # The sum of the loss terms of each unit. Terms of other units, such as ``'microbatches'``, are left out, because
    # they may depend on which rows share a forward. If the loss has only such terms, ``'tokens'`` is their sum.
    losses: Mapping[str, float]
    # Gradients of these sums by the outputs of the last layers, each as a sketch with fewer entries,
    # ``(rows, width, entries)``. If the model has logits, the first gradient is by the hidden states, and the last one
    # by the logits. If the model changes the output of its head, one by this output is between them. The probe cuts
    # the graph between states and logits, so the first one comes only from loss terms that use the states directly.
    # None: the loss does not use the output.
    gradients: Mapping[str, Sequence[Tensor | None]]
    # The weights of tokens, if targets were passed and the loss is made of the logits.
    measured: MeasuredTokens | None
    # Number of entries at a position, and memory address, of the tensor that logits_of() finds in the outputs. It holds
    # logits, or hidden states if the loss contains the head. None: there is no such tensor.
    output_size: int | None
    output_address: int | None  # also None for a DTensor, which has no address
    has_logits: bool  # False only if are_logits() has shown that this tensor holds hidden states
    eps: float  # machine epsilon of the loss, the one of float32 or a coarser one
    gradient_eps: float  # machine epsilon of the coarsest gradient

    @property
    def invalid_loss(self) -> float | None:
        """A loss that is NaN or infinite, so that nothing can be compared with it. None: there is no such loss."""
        return next((loss for loss in self.losses.values() if not math.isfinite(loss)), None)

    def is_same_loss(
        self,
        unit: str,
        other: float,
        noise: float = 0.0,
    ) -> bool:
        """Returns whether another loss differs only by round-off. ``noise`` is the round-off that was measured."""
        loss = self.losses[unit]
        round_off = ROUNDING_FLOOR * self.eps * (1 + abs(loss))
        return abs(other - loss) <= NOISE_FACTOR * noise + round_off

    def distance(self, other: ProbeResult) -> float:
        """Returns the largest relative difference from another result of the same rows; inf if a value is NaN."""
        distances = []
        for unit, loss in self.losses.items():
            # Losses near 0 are compared absolutely.
            distances.append(abs(other.losses[unit] - loss) / (1 + abs(loss)))
            pairs = zip(self.gradients[unit], other.gradients[unit], strict=True)
            for gradient, other_gradient in pairs:
                if gradient is None or other_gradient is None:
                    continue
                # The gradients are sketches. Their differences have the right size up to 18 %.
                difference = float((other_gradient - gradient).norm())
                distances.append(difference / max(float(gradient.norm()), TINY))
        if any(math.isnan(distance) for distance in distances):
            return math.inf
        return max(distances)


class _LayerOutput(NamedTuple):
    """The module, size and address of an output that has a vector for every position."""

    module: Module
    size: int
    address: int


class _Forward(NamedTuple):
    """The results of one forward, from which gradients are computed.

    It does not hold the outputs of the model, so that their memory (a cache, hidden states) is free for the gradients.
    """

    terms: Mapping[str, Tensor]  # the terms of the loss, by unit
    points: Sequence[Tensor]  # where gradients are taken, the logits last
    logits: Tensor | None


class Probe:
    """Runs the model's own forward and loss, with a graph only at the end.

    The layers run as in training, because a loss may be different in evaluation. Only dropout is off, and BatchNorm
    runs as in evaluation. If the forward is random nevertheless, cuts cannot be compared, because in each cut a row
    gets other random numbers. Then all layers run as in evaluation.

    A model is probed in float32, without the trainer's ``precision``, because a leak that changes a gradient by 2e-3 is
    easy to see in float32, and not in bfloat16. If it cannot compute rows of a batch in float32, all forwards run with
    ``precision``.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Outputs],
        loss: Callable[[Outputs, Batch], Loss],
        model: Module,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        terms: Callable[[Loss, Outputs], Mapping[str, Tensor]] | None = None,
        gather: Gather = only_of_this_rank,
    ) -> None:
        self.model = model
        self.gather = gather
        """Returns the values of all ranks. All decisions use them, because FSDP hangs unless all ranks run the same
        forwards. The values of one rank are not enough: ranks round differently, and a state may exist on some only."""
        self._forward_model = forward
        self._loss = loss
        self._precision = precision
        # Returns the sum of the loss terms of each unit, see ProbeResult.losses.
        self._terms = terms or (lambda loss, outputs: {'tokens': loss})
        self.is_training = True
        """Whether the layers run as in training."""
        self.is_random = False
        """Whether the loss changes from forward to forward. If it does in training, :meth:`examine` goes over to
        evaluation, and looks again. So after :meth:`examine` True means that the forward is random even in
        evaluation."""
        self._written: dict[str, State] = {}
        """States of the model that forwards have written, and that were not judged yet, by name."""
        self._judged: set[str] = set()
        """Names of states that are not judged again: each was judged before, or is being judged."""
        self._was_examined = False  # whether the last layers were looked for
        self._layers: list[Module] = []
        """The last layers: the module that makes the states before the logits, often a norm, and the module that makes
        the logits. A gradient is taken at the output of each."""
        # Modules of TorchScript take no hooks.
        self._modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._weights = _ReplacedWeights(self._modules, can_convert=_can_convert(model))
        # The first parameter stands for all.
        parameter = next(model.parameters(), None)
        has_float32 = parameter is not None and parameter.dtype == torch.float32
        self.uses_float32 = has_float32 or self._weights.can_convert
        """Whether forwards run in float32, without `precision`."""

    @classmethod
    def from_model(cls, model: Any, gather: Gather = only_of_this_rank) -> Probe:
        """Makes a probe of a ComposerModel, or of a Hugging Face model that computes its own loss."""
        if hasattr(model, 'eval_forward'):
            return cls(model, model.loss, model, gather=gather)
        names = forward_parameters(model)

        def forward(batch: Batch) -> Outputs:
            arguments = {key: value for key, value in batch.items() if key in names}
            return model(**arguments)

        return cls(forward, lambda outputs, batch: outputs['loss'], model, gather=gather)

    def run(
        self,
        batch: Batch,
        *,
        targets: Tensor | None = None,
        rounded: bool = False,
        at_labels: AtLabels | None = None,
        seed: int = 0,
        keeps_state: bool = False,
        varies_weights: bool = True,
        decides_precision: bool = False,
    ) -> ProbeResult:
        """Runs the forward and the loss of a batch, not compiled. Random numbers, modes and state stay as they were.

        If the model was not examined yet, runs :meth:`examine` first.

        Args:
            batch: On the device of the model.
            targets: As returned by :meth:`.LossRule.targets`. With them the weights of tokens are measured.
            rounded: Whether to move the output of every layer by its last digit, up or down. The difference shows how
                far round-off can move the result. To run the rows in another order would not show it, because kernels
                then compute the same sums.
            at_labels: Makes the model compute logits only at labels. Then the gradient by the logits has the shape of
                the selected positions.
            seed: Seed of the random numbers that the forward draws.
            keeps_state: Whether the model keeps the state that the forward has written.
            varies_weights: Whether to vary weights whose entries are all equal, see :attr:`has_varied_weights`.
            decides_precision: Whether this forward decides between float32 and the trainer's precision; a collective.
                If it raises an error in float32 on any rank, all ranks run it again with the trainer's precision, and
                all later forwards, too. Their results cannot be compared with earlier ones. Only for rows as the loader
                padded them, because an error on other rows may be about the cut.
        """
        if not self._was_examined:
            self.examine(batch)

        def run_once() -> ProbeResult:
            with torch.no_grad(), undisturbed(self.model, keeps_state=keeps_state) as snapshot:
                with self._as_probed(seed):
                    forward = self._forward(batch, rounded=rounded, at_labels=at_labels, varies_weights=varies_weights)
                    result = _result_of(forward, targets)
                # Outside of _as_probed(), because _WithoutDropout would slow down the comparison of each state.
                self._note_written(snapshot)
            return result

        if not decides_precision or not self.uses_float32:
            return self._with_allowed_leaves(run_once)
        try:
            result = self._with_allowed_leaves(run_once)
        except Exception:
            # Some kernels accept only half precision, such as flash attention. Each raises another error, and float32
            # may take too much memory, so any error counts. If it has another cause, the next forward raises it, too.
            result = None
        # Only some ranks may have raised, for example because their GPUs have less free memory.
        if any(self.gather(result is None)):
            self.uses_float32 = False
            result = self._with_allowed_leaves(run_once)
        assert result is not None
        return result

    def _with_allowed_leaves(self, run_once: Callable[[], ProbeResult]) -> ProbeResult:
        """Runs a forward. If the model writes into its logits (Chameleon), runs it again with fewer leaves.

        Torch does not allow to write into the logits if they are a leaf of the graph. So only the hidden states become
        a leaf, from then on in all forwards.
        """
        try:
            return run_once()
        except Exception as error:
            if 'in-place' not in str(error) or len(self._layers) < 2:
                raise
        self._layers = self._layers[:1]
        return run_once()

    @property
    def has_varied_weights(self) -> bool:
        """Whether forwards have varied some weights, because their entries are all equal.

        Varied weights show faults that equal entries hide. But they also hide faults, so rows are compared without
        them, too. For example, a varied bias of 0 becomes larger than the states of a fresh model, so a leak between
        rows is small compared with it.
        """
        return any(self._weights.equal_names.values())

    def _note_written(self, snapshot: StateSnapshot) -> None:
        """Notes state that a forward has written since the snapshot, and that was not judged before."""
        for state in snapshot.written():
            if state.name not in self._judged:
                self._written.setdefault(state.name, state)

    def examine(self, batch: Batch) -> ProbeResult:
        """Finds the last layers. If the loss is random in training, goes over to evaluation; a collective.

        Returns:
            The result of the batch, as :meth:`run` returns it.

        Raises:
            RuntimeError: If the loss depends on state that forwards write.
        """
        self._was_examined = True  # set first, or run() would call this method again
        self._layers = []
        first = self._find_last_layers(batch)
        # The first forward had seed 1, and this one has seed 0. So the loss changes if it depends on random numbers.
        second = self.run(batch)
        is_same = [second.is_same_loss(unit, loss) for unit, loss in first.losses.items()]
        self.is_random = not all(self.gather(all(is_same)))
        self.judge_written_state(batch)
        if self.is_random:
            self._check_random_numbers_decide(batch, first)
        if self.is_random and self.is_training:
            log.info('The loss is random in training even without dropout, so it was probed only in evaluation.')
            self.is_training = False
            return self.examine(batch)
        return second

    def invalid_loss_of_ranks(self, result: ProbeResult) -> float | None:
        """Returns the loss of a result that is NaN or infinite on any rank; None: there is no such loss; a collective.

        If only the rank with this loss raised an error, the others would wait for it in their next collective.
        """
        losses = self.gather(result.invalid_loss)
        return next((loss for loss in losses if loss is not None), None)

    def _check_random_numbers_decide(self, batch: Batch, first: ProbeResult) -> None:
        """Raises RuntimeError, on all ranks, if a loss changes from forward to forward with the same random numbers.

        Then it depends on state that :class:`.StateSnapshot` does not see, such as a tensor in a dict, or on random
        numbers of a generator that is not seeded. ``first`` is the result of the first forward. Comparing the second
        and the third one would not do: state that is made of the rows of the forward before would be the same for both.
        """
        # NaN never equals NaN, and is refused later. The ranks agree, because the next forward is a collective.
        if any(self.gather(first.invalid_loss is not None)):
            return
        third = self.run(batch, seed=1)  # the seed of the first forward
        # In half precision, kernels of a GPU that sum in any order (`index_add_`) move a loss by more than its own
        # round-off. So it may move by one digit of the coarsest type, 8e-3 in bfloat16.
        noise = third.gradient_eps / NOISE_FACTOR
        is_same = [first.is_same_loss(unit, loss, noise) for unit, loss in third.losses.items()]
        if not all(self.gather(all(is_same))):
            raise NotExactError(
                'A forward must not change the result of the next one, got: another loss of the same rows, although '
                'all random numbers were the same. A step would depend on its number of microbatches. Keep state that '
                'the model writes in buffers, not in a list, a dict or another object, and write it once a step; and '
                'draw random numbers from the generator of torch (docs/errors.md#row-coupling).'
            )

    def _find_last_layers(self, batch: Batch) -> ProbeResult:
        """Finds the last layers by a forward, and returns its result."""
        outputs: list[_LayerOutput] = []
        shapes = [tuple(labels_of(batch).shape)]

        def note(
            module: Module,
            args: object,
            output: object,
        ) -> None:
            # Only the size and the address are kept, so that the memory of the output is freed.
            if _is_of_shape(output, shapes):
                layer_output = _LayerOutput(module, output.shape[-1], output.data_ptr())
                outputs.append(layer_output)

        # Seed 1, because examine() compares the result with one of seed 0.
        with _hooked(_without_children(self._modules), note):
            result = self.run(batch, seed=1, decides_precision=True)
        # The last layer is the one with the logits as its output. If no output has their address, the model changes the
        # output of its head once more. Then the last output of the same size is taken. It is only the second choice,
        # because another layer may have this size, such as the head of a teacher. Of several outputs with the address,
        # the last one counts: the memory of an earlier output may have been freed and used again for the logits.
        same_size = [place for place, output in enumerate(outputs) if output.size == result.output_size]
        same_address = [place for place in same_size if outputs[place].address == result.output_address]
        candidates = same_address or same_size
        # If no layer makes the logits that the model returns, or it returns none, the last output holds them, or the
        # states before them.
        place = candidates[-1] if candidates else len(outputs) - 1
        # This output and the one before it. Without any output the place is -1, and the list is empty.
        last_outputs = outputs[max(place - 1, 0) : place + 1]
        self._layers = [output.module for output in last_outputs]
        return result

    def forget_judgements(self) -> None:
        """Forgets which states were judged. A state that was only written may have begun to change the result."""
        self._judged.clear()

    def judge_written_state(self, batch: Batch) -> None:
        """Raises RuntimeError, on all ranks, if the result depends on state that every forward writes.

        A cache is harmless: the next forward of the same rows does not write it again. A statistic for logs is also
        harmless: every forward writes it, but the result does not depend on it.

        Judges nothing if the model is probed in evaluation. There a forward may write other state than in training.
        """
        names = self._names_on_ranks(self._written)
        if not names or not self.is_training:
            return
        self._judged.update(names)
        written = list(self._written.values())
        self._written = {}
        with undisturbed(self.model, watches_parameters=False):
            self._judge(written, batch)

    def _names_on_ranks(self, names: Collection[str]) -> list[str]:
        """Returns the names that any rank has, each once and sorted; a collective."""
        return sorted(set().union(*self.gather(list(names))))

    def _judge(self, states: Sequence[State], batch: Batch) -> None:
        """Judges some states for :meth:`judge_written_state`. The caller puts the state of the model back."""
        run_forward = partial(self.run, batch, keeps_state=True)
        run_forward()  # fills the caches
        snapshot = StateSnapshot.of_states(states)
        expected = run_forward()
        rewritten = {state.name: state for state in snapshot.written()}
        snapshot.restore()
        names = self._names_on_ranks(rewritten)
        if not names:
            return
        # On a GPU two forwards of the same rows may differ by round-off.
        tolerance = max(NOISE_FACTOR * expected.distance(run_forward()), STATE_TOLERANCE)
        snapshot.restore()

        def changes_result(names_to_try: Sequence[str]) -> bool:
            perturb([rewritten[name] for name in names_to_try if name in rewritten])
            distance = expected.distance(run_forward())
            snapshot.restore()
            return any(self.gather(distance > tolerance))

        # First all states at once, because in most models the result depends on none of them.
        if not changes_result(names):
            return
        # Then one by one. If only several states together change the result, the first one is named.
        decisive_name = names[0]
        for name in names:
            if changes_result([name]):
                decisive_name = name
                break
        raise _decisive_state(decisive_name, 'which every forward in training writes')

    def check_next_forward(self, batch: Batch, other_rows: Batch) -> None:
        """Raises RuntimeError, on all ranks, if a forward of other rows changes the result of a batch.

        :meth:`judge_written_state` takes a state for a cache if a second forward of the same rows does not write it
        again. But it may be made of these rows, such as the mean of the last microbatch.
        """
        # The caller has judged written states before. If none was ever judged, no forward has written any.
        if not self._judged or not self.is_training:
            return

        def run_forward() -> tuple[ProbeResult, set[str]]:
            """Returns the result of the batch, and the names of the states that its forward has written."""
            snapshot = StateSnapshot.of_model(self.model, watches_parameters=False)
            result = self.run(batch, keeps_state=True)
            return result, {state.name for state in snapshot.written()}

        with undisturbed(self.model, watches_parameters=False):
            self.run(other_rows, keeps_state=True)
            after_others, written_after_others = run_forward()
            after_itself, written_after_itself = run_forward()
            again, _ = run_forward()
        # What every forward writes was judged before.
        names = self._names_on_ranks(written_after_others - written_after_itself)
        tolerance = max(NOISE_FACTOR * after_itself.distance(again), STATE_TOLERANCE)
        is_changed = after_itself.distance(after_others) > tolerance
        if names and any(self.gather(is_changed)):
            raise _decisive_state(', '.join(names), 'which a forward of other rows writes')

    def _forward(
        self,
        batch: Batch,
        *,
        rounded: bool,
        at_labels: AtLabels | None,
        varies_weights: bool,
    ) -> _Forward:
        """Runs the forward and the loss once. For the arguments see :meth:`run`."""
        labels = labels_of(batch)
        precision = self._precision()
        if self.uses_float32:
            precision = torch.autocast(labels.device.type, enabled=False)
        # Forward and loss get the same copy, as in training. If the model writes into it, no other forward sees that.
        copied = with_copied_tensors(batch)
        rounded_layers: list[Module] = []
        if rounded:
            rounded_layers = _without_children(self._modules)
        shapes = [tuple(labels.shape)]
        if at_labels is not None:
            shapes.append(at_labels.positions.shape)
            # Whoever has called run() disarms it afterwards, because a forward that raises may leave it armed.
            at_labels.selector.arm(at_labels.rule, len(at_labels.positions.of_labels))
        with (
            precision,
            self._weights.replaced(in_float32=self.uses_float32, varied=varies_weights),
            _hooked(rounded_layers, _rounded),
            _graph_from(self._layers, shapes) as leaves_of_forwards,
        ):
            outputs = self._forward_model(copied)
            loss = _loss_of(self._loss, outputs, copied)  # only once, because a loss may keep running counts
            terms = self._terms(loss, outputs)
        logits = _logits_in_loss(outputs, shapes)
        leaves = _leaves_with(logits, leaves_of_forwards)
        # Some layers do not run in every batch, such as a layer of another modality.
        points = [leaves[layer] for layer in self._layers if layer in leaves]
        # If no layer returns the logits, because the model changes the output of its head once more, they are not among
        # the leaves.
        if logits is not None and logits.requires_grad and not any(logits is leaf for leaf in points):
            points.append(logits)
        return _Forward(terms, points, logits)

    @contextmanager
    def _as_probed(self, seed: int) -> Iterator[None]:
        """Switches dropout, TF32 and compilation off, and seeds the random numbers.

        Switches BatchNorm to evaluation. If the forward is random in training, switches all modules to evaluation.
        """
        class_in_evaluation = BatchNorm if self.is_training else Module
        saved: list[tuple[Module, str, object]] = []  # modules, and the name and the value of an attribute
        for module in self._modules:
            if isinstance(module, class_in_evaluation):
                saved.append((module, 'training', module.training))
                module.training = False
            # In a derived class this attribute may be a layer.
            if isinstance(module, WITH_DROPOUT) and isinstance(module.dropout, int | float):
                saved.append((module, 'dropout', module.dropout))
                module.dropout = 0.0
        # The same random numbers for every forward, so that forwards can be compared. undisturbed(), around this, puts
        # those of the run back.
        seed_everything(seed)
        try:
            with _WithoutDropout(), torch.compiler.set_stance('force_eager'), _without_tf32():
                yield
        finally:
            for module, name, value in saved:
                setattr(module, name, value)


def _decisive_state(names: str, writer: str) -> NotExactError:
    """Returns the error for a state that a forward writes, and that changes the result of the next forward."""
    return NotExactError(
        f'A forward must not change the result of the next one, got: {names!r}, {writer} '
        'and the result depends on. A step would depend on its number of microbatches. Put its module in eval mode, or '
        'write it once a step, outside of the forward (docs/errors.md#row-coupling).'
    )


def _result_of(forward: _Forward, targets: Tensor | None) -> ProbeResult:
    """Computes the gradients of a forward, and reads its losses. For the arguments see :meth:`Probe.run`."""
    logits = forward.logits
    losses = {}
    gradients: dict[str, list[Tensor | None]] = {}
    # Gradients are reduced to sketches at once, to save memory. Only the one by the logits is also measured.
    logit_gradient = None
    for unit, loss in forward.terms.items():
        losses[unit] = loss.float().mean().item()
        unit_gradients = _gradients(loss, forward.points)
        if unit == 'tokens' and forward.points and forward.points[-1] is logits:
            logit_gradient = unit_gradients[-1]
        gradients[unit] = [None if gradient is None else sketch(gradient) for gradient in unit_gradients]
    measured = None
    has_logits = True
    if targets is not None and logits is not None and logit_gradient is not None:
        has_logits = are_logits(logit_gradient, targets) is not False
        if has_logits:
            measured = measure(logits, logit_gradient, targets)
    output_size = None
    output_address = None
    if logits is not None:
        output_size = logits.shape[-1]
        if not isinstance(logits, DTensor):
            output_address = logits.data_ptr()
    return ProbeResult(
        losses=losses,
        gradients=gradients,
        measured=measured,
        output_size=output_size,
        output_address=output_address,
        has_logits=has_logits,
        eps=_coarsest_eps(forward.terms.values()),
        gradient_eps=_coarsest_eps(forward.points),
    )


class _ReplacedWeights:
    """Makes modules compute with replacements of their weights: in float32, or varied. There are two reasons.

    Half precision hides faults. The logits of a fresh model hardly depend on its states, so a leak between rows changes
    the gradient by less than the round-off of bfloat16, but the gradient of the attention is wrong nevertheless (MPT).

    Weights with equal entries hide faults, too, such as the weights of a fresh norm, which are all 1. With a norm
    behind the rotary embedding (HunYuan) attention depends on absolute positions, but loss and logits do not show it as
    long as the weights of the norm are equal. A scale of positions that begins at 0 (Mistral Large 4) also hides it.
    Without this class such a fault would show only in a later step, after the weights have moved. A cut that is exact
    is exact with any weights. So the entries of these weights are varied.

    Nothing is written into the weights of the model, because FSDP may hold parts of them. Instead the module gets an
    attribute of the same name, which Python finds before the parameter.
    """

    def __init__(self, modules: Sequence[Module], *, can_convert: bool) -> None:
        self._modules = modules
        self.can_convert = can_convert
        """Whether weights in half precision may be replaced by weights in float32."""
        self.equal_names: dict[Module, list[str]] = {}
        """Names of the weights whose entries are all equal, by module; only modules that a forward has reached."""
        self._replaced_names: dict[Module, list[str]] = {}
        """Names of the weights that are replaced now, by module."""

    @contextmanager
    def replaced(self, *, in_float32: bool, varied: bool) -> Iterator[None]:
        """Makes forwards inside of the context use the replacements."""
        in_float32 &= self.can_convert

        def replace(
            module: Module,
            args: tuple[object, ...],
            kwargs: dict[str, object],
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            self._replace(module, in_float32=in_float32, varied=varied)
            if in_float32:
                # Some models cast pixels or a mask to the type of their weights.
                args = tuple(_input_in_float32(value) for value in args)
                kwargs = {name: _input_in_float32(value) for name, value in kwargs.items()}
            return args, kwargs

        with ExitStack() as hooks:
            for module in self._modules:
                # A module that no forward has reached yet may have weights with equal entries.
                may_vary = varied and (module not in self.equal_names or bool(self.equal_names[module]))
                if may_vary or in_float32:
                    hooks.enter_context(module.register_forward_pre_hook(replace, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(self._restore, always_call=True))
            try:
                yield
            finally:
                # Torch calls no hook after a KeyboardInterrupt. Training must not see the replacements.
                for module in list(self._replaced_names):
                    self._restore(module)

    def _replace(self, module: Module, *, in_float32: bool, varied: bool) -> None:
        """Gives a module attributes that hide its weights.

        Before it varies weights for the first time, it finds those with equal entries.
        """
        if varied and module not in self.equal_names:
            # This waits until a forward has reached the module, because FSDP has the whole weight only then.
            equal_names = []
            for name, weight in module.named_parameters(recurse=False):
                # A frozen weight will not move, so its equal entries hide no fault that could show later.
                if weight.requires_grad and name not in vars(module) and _has_equal_entries(weight):
                    equal_names.append(name)
            self.equal_names[module] = equal_names
        replaced_names = self._replaced_names.setdefault(module, [])
        for name, weight in module.named_parameters(recurse=False):
            if name in vars(module):  # replaced already, because the module calls itself
                continue
            replacement: Tensor = weight
            if in_float32:
                replacement = _in_float32(replacement)
            if varied and name in self.equal_names[module]:
                replacement = _varied(replacement)
            if replacement is not weight:
                vars(module)[name] = replacement
                replaced_names.append(name)

    def _restore(
        self,
        module: Module,
        args: object = None,
        output: object = None,
    ) -> None:
        """Takes the attributes away, so that the module uses its own weights again. A forward hook of torch."""
        for name in self._replaced_names.pop(module, ()):
            vars(module).pop(name, None)


ValueT = TypeVar('ValueT')


def _in_float32(value: ValueT) -> ValueT | Tensor:
    """Converts a tensor in half precision to float32. Returns any other value as it is."""
    if isinstance(value, Tensor) and value.dtype in HALF_PRECISION:
        return value.float()
    return value


def _input_in_float32(value: ValueT) -> ValueT | Tensor:
    """Returns an input of a module in float32, see :func:`_in_float32`.

    Raises TypeError for states of text, ``(rows, width, entries)``, in half precision. The model itself has rounded
    them, as T5 does in each layer. So the result would not be more exact than in half precision.
    """
    if isinstance(value, Tensor) and value.dim() == 3 and value.dtype in HALF_PRECISION:
        raise TypeError('The model casts states to half precision.')
    return _in_float32(value)


def _can_convert(model: Module) -> bool:
    """Returns whether a model has weights in half precision, and computes in float32 if they are replaced.

    FSDP itself sets the types of a forward, and modules with quantized weights (integers, float8) may compute in half
    precision. The result would be in float32, but with the round-off of half precision.
    """
    # By the name of the class, because a newer torch may have no FSDP1.
    is_sharded = any(type(module).__name__ == 'FullyShardedDataParallel' for module in model.modules())
    is_sharded |= any(isinstance(parameter, DTensor) for parameter in model.parameters())
    types = {parameter.dtype for parameter in model.parameters()}
    has_half_weights = not types.isdisjoint(HALF_PRECISION)
    return has_half_weights and types <= {torch.float32, *HALF_PRECISION} and not is_sharded


def _has_equal_entries(weight: Tensor) -> bool:
    """Returns whether entries are nearly equal: they differ by less than a fifth of the most that :func:`_varied` adds.

    Returns False for float8 (one byte), because torch cannot add it, and for tensors that wrap others, such as DTensor.
    """
    if hasattr(weight, '__tensor_flatten__') or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        return False
    if not weight.numel():
        return False
    low, high = weight.detach().aminmax()
    return float(high - low) < _variation_of(weight) / 5


def _varied(weight: Tensor) -> Tensor:
    """Returns a weight with a random positive number added to each entry, the same one in each call."""
    generator = torch.Generator(weight.device).manual_seed(0)
    numbers = torch.empty_like(weight).uniform_(generator=generator)
    return weight + _variation_of(weight) * (1 - numbers)  # 0 may be drawn, and 1 is not


def _variation_of(weight: Tensor) -> float:
    """Returns the most that :func:`_varied` adds to an entry of a weight, see :data:`VARIATION`."""
    num_columns = 1.0
    if weight.dim() > 1:
        num_columns = weight.numel() / len(weight)
    return VARIATION / num_columns**0.5


# Helpers of a forward.


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Lets GPUs multiply float32 in float32. In TF32, which Composer turns on, results have an error of 5e-4."""
    cudnn: Any = torch.backends.cudnn
    backends = [torch.backends.cuda.matmul, cudnn]
    name = 'allow_tf32'
    exact_value: object = False  # the value with which float32 is not rounded to TF32
    try:
        saved = [getattr(backend, name) for backend in backends]
    except RuntimeError:
        # Someone has set `fp32_precision`, which is new in torch 2.9. If it contradicts `allow_tf32`, torch refuses to
        # read `allow_tf32`. So `fp32_precision` is set only in this case. Otherwise setting it would make `allow_tf32`
        # unreadable in the forward, where `torch.backends.cudnn.flags()` reads it.
        backends = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
        name = 'fp32_precision'
        exact_value = 'ieee'
        saved = [getattr(backend, name) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, name, exact_value)
        yield
    finally:
        for backend, value in zip(backends, saved, strict=True):
            setattr(backend, name, value)


class _WithoutDropout(TorchFunctionMode):
    """Switches off the dropout that a model calls.

    These are the functions in :data:`DROPOUTS`, and the dropout of ``scaled_dot_product_attention``. Dropout inside of
    another function of torch stays on, because torch calls the mode only for the outer function. The probe switches off
    the dropout of the modules in :data:`WITH_DROPOUT`. If the loss is random nevertheless, the model is probed in
    evaluation, see :meth:`Probe.examine`.
    """

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Returns the input of a dropout. Calls attention with a dropout of 0, and any other function as it is."""
        kwargs = kwargs or {}
        name = getattr(func, '__name__', '')
        # A model of torch.export calls operators by their full names, such as `dropout.default`.
        if name.removesuffix('.default') in DROPOUTS:
            return args[0] if args else kwargs['input']
        if name == 'scaled_dot_product_attention':
            # The arguments after query, key, value and mask.
            options = dict(zip(('dropout_p', 'is_causal'), args[4:], strict=False))
            options |= {**kwargs, 'dropout_p': 0.0}
            return func(*args[:4], **options)
        return func(*args, **kwargs)


@contextmanager
def _graph_from(
    layers: Sequence[Module],
    shapes: Sequence[tuple[int, ...]],
) -> Iterator[list[Leaves]]:
    """Starts the autograd graph at the outputs of some layers. Yields these outputs, which are leaves of the graph.

    An output counts only if its rows and width are one of the ``shapes``.

    The forward runs without gradients until the last of the layers has returned its output. Then a hook switches
    gradients on, and the rest of the forward and the loss make a graph. The end of the context restores the earlier
    mode. The output of an earlier layer becomes a leaf, too, but gradients stay off after it. So no graph connects the
    layers. Autograd could not follow such a graph under FSDP, which has the whole weights of a layer only during the
    forward of that layer.

    The loss may run the model again, so the result has the leaves of several forwards, in order. For example, a
    preference loss also runs a reference (the model with its adapter off) without gradients. It may do so before or
    after the forward that makes the logits, and :func:`_leaves_with` finds the leaves of that forward. If the loss runs
    the model again with gradients (R-Drop), only the leaves of this last forward are kept.
    """
    # The running forward writes into the last dict. When its last layer has run, a copy is added, into which the next
    # forward writes. If there is none, the last two dicts are equal.
    leaves_of_forwards: list[Leaves] = [{}]

    def start_graph(
        module: Module,
        args: object,
        output: object,
    ) -> Tensor | None:
        if not _is_of_shape(output, shapes):
            return None
        leaf = output.detach().requires_grad_()
        leaves = leaves_of_forwards[-1]
        leaves[module] = leaf
        if module is layers[-1]:
            if torch.is_grad_enabled():
                # An earlier forward has switched gradients on, and the loss has now run the model again (R-Drop).
                del leaves_of_forwards[:-1]
            else:
                # If there is another forward, its layers replace leaves in the copy. Leaves of layers that it does not
                # reach stay.
                leaves_of_forwards.append(dict(leaves))
            # From here on, gradients stay on, even if an earlier layer runs again.
            torch.set_grad_enabled(True)
        return leaf

    with _hooked(layers, start_graph), torch.no_grad():
        yield leaves_of_forwards


def _leaves_with(logits: Tensor | None, leaves_of_forwards: Sequence[Leaves]) -> Leaves:
    """Returns the leaves of the forward in which a layer returned the logits, or else of the last forward."""
    for leaves in leaves_of_forwards:
        if any(leaf is logits for leaf in leaves.values()):
            return leaves
    return leaves_of_forwards[-1]


def _rounded(
    module: Module,
    args: object,
    output: object,
) -> Tensor | None:
    """Moves each entry of a layer's output by its last digit, up or down. A forward hook of torch."""
    if not isinstance(output, Tensor) or not output.dtype.is_floating_point:
        return None
    # The signs are random, because a change in one direction would be a scale, which norms remove.
    signs = 2 * (torch.rand_like(output) < 0.5) - 1
    factors = 1 + torch.finfo(output.dtype).eps * signs
    return output * factors.to(output.dtype)


def _loss_of(
    loss: Callable[[Outputs, Batch], Loss],
    outputs: Outputs,
    batch: Batch,
) -> Any:
    """Returns the loss. If the outputs have no loss (a model without a head), raises an error that says so."""
    try:
        return loss(outputs, batch)
    except KeyError as error:
        if error.args != ('loss',):
            raise
        raise InvalidInputError(
            f"The model's forward must give a loss for `labels`, got: {', '.join(outputs)}. Take a class with "
            'a head that computes one, such as `AutoModelForCausalLM`.'
        ) from error


def _logits_in_loss(outputs: Outputs, shapes: Sequence[tuple[int, ...]]) -> Tensor | None:
    """Returns the logits that the loss uses; None: the outputs have no logits.

    Raises RuntimeError if their rows and width are none of the ``shapes``. The first shape is the one of the labels.
    """
    logits = logits_of(outputs)
    if logits is None:
        return None
    if tuple(logits.shape[:2]) not in shapes:
        raise NotExactError(
            f"The model's logits must be as wide as the labels, got: {tuple(logits.shape[:2])} for labels of "
            f'{shapes[0]}. The model expands or truncates the sequence inside forward. Expand image placeholders in '
            'the processor instead (docs/errors.md#loss-rule).'
        )
    # accelerate and FSDP return a copy of the logits in another type, but the loss uses the logits themselves.
    # edge_of() follows the graph back through copies. If it ends at a leaf that _graph_from() has made, the node holds
    # this leaf as `variable`.
    node, _ = edge_of(logits)
    return getattr(node, 'variable', logits)


def _gradients(loss: Tensor, points: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradient of a loss by each of the points."""
    if not points or not loss.requires_grad:
        return [None] * len(points)
    with torch.enable_grad():
        return torch.autograd.grad(
            loss.float().mean(),
            points,
            allow_unused=True,
            retain_graph=True,
        )


def _coarsest_eps(tensors: Iterable[Tensor]) -> float:
    """Returns the largest machine epsilon of some tensors, at least the one of float32."""
    coarsest = torch.finfo(torch.float32).eps
    for tensor in tensors:
        coarsest = max(coarsest, torch.finfo(tensor.dtype).eps)
    return coarsest


def _is_of_shape(output: object, shapes: Sequence[tuple[int, ...]]) -> TypeGuard[Tensor]:
    """Returns whether a layer's output has a vector for each position of a batch of one of the shapes (rows, width)."""
    if not isinstance(output, Tensor) or not output.dtype.is_floating_point or output.dim() != 3:
        return False
    return tuple(output.shape[:2]) in shapes


def _without_children(modules: Iterable[Module]) -> list[Module]:
    """Returns the modules without children."""
    return [module for module in modules if next(module.children(), None) is None]


@contextmanager
def _hooked(modules: Iterable[Module], hook: ForwardHook) -> Iterator[None]:
    """Calls a hook after the forward of each of the modules."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(hook))
        yield
