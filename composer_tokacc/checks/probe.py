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
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from composer_tokacc.batch import Batch, labels_of, with_copied_tensors
from composer_tokacc.checks.logits import TINY, MeasuredTokens, are_logits, logits_of, measure, sketch
from composer_tokacc.checks.replaced_weights import ReplacedWeights
from composer_tokacc.checks.written_state import State, StateSnapshot, perturb, undisturbed
from composer_tokacc.collectives import Gather, gather_this_rank_only
from composer_tokacc.compat import BatchNorm
from composer_tokacc.counting import LossRule
from composer_tokacc.graph import edge_of
from composer_tokacc.labelled import LabelledPositions, LabelSelector
from composer_tokacc.model_structure import forward_parameters
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


@dataclass(frozen=True, eq=False)
class AtLabels:
    """Makes a forward compute logits only at the positions that predict a label."""

    selector: LabelSelector
    rule: LossRule  # which labels count
    positions: LabelledPositions  # of these labels in the batch of the forward


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The result of one forward of a few rows."""

    # The sum of all terms that are means over tokens, as ``'tokens'``, and of all that are means over samples, as
    # ``'samples'``. Terms of other units, such as ``'microbatches'``, are left out, because they may depend on which
    # rows share a forward. If the loss has only such terms, ``'tokens'`` is their sum.
    losses: Mapping[str, float]
    # Gradients of these sums by the outputs of the last layers, each as a sketch with fewer entries,
    # ``(rows, width, entries)``. If the model has logits, the first gradient is by the hidden states, and the last one
    # by the logits. If the model changes the output of its head, one by this output is between them. The probe cuts
    # the graph between states and logits, so the first one comes only from loss terms that use the states directly.
    # None: the loss does not use the output.
    gradients: Mapping[str, Sequence[Tensor | None]]
    # The weights of tokens, if targets were passed and the loss is made of the logits.
    measured: MeasuredTokens | None
    # False only if are_logits() has shown that the tensor in the place of the logits holds hidden states, because the
    # loss contains the head.
    has_logits: bool
    output_size: int | None  # number of entries at a position of this tensor; None: the model returns no such tensor
    output_address: int | None  # address of this tensor in memory; None: there is none, or it is a DTensor
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

    def has_same_losses(self, other: ProbeResult, noise: float = 0.0) -> bool:
        """Returns whether another result has losses of the same units, and they differ only by round-off."""
        if other.losses.keys() != self.losses.keys():
            return False
        return all(self.is_same_loss(unit, loss, noise) for unit, loss in other.losses.items())

    def distance(self, other: ProbeResult) -> float:
        """Returns the largest relative difference from another result of the same rows.

        It is inf if a value is NaN, or if only one of the results has some loss or gradient.
        """
        if not self._has_same_parts(other):
            return math.inf
        return self.round_off_distance(other)

    def _has_same_parts(self, other: ProbeResult) -> bool:
        """Returns whether another result has losses of the same units, and the same gradients that are not 0."""
        if other.losses.keys() != self.losses.keys():
            return False
        for unit, gradients in self.gradients.items():
            is_trained = [gradient is not None and bool(gradient.any()) for gradient in gradients]
            is_trained_in_other = [gradient is not None and bool(gradient.any()) for gradient in other.gradients[unit]]
            if is_trained != is_trained_in_other:
                return False
        return True

    def round_off_distance(self, other: ProbeResult) -> float:
        """Returns the :meth:`distance` in the losses and gradients that both results have.

        A gradient that comes and goes is no round-off. If it counted as such, the tolerance would allow any change.
        """
        distances = [0.0]
        for unit, loss in self.losses.items():
            if unit not in other.losses:
                continue
            # Losses near 0 are compared absolutely.
            distances.append(abs(other.losses[unit] - loss) / (1 + abs(loss)))
            for gradient, other_gradient in zip(self.gradients[unit], other.gradients[unit], strict=False):
                if gradient is None or other_gradient is None:
                    continue
                # The difference of two sketches has the right size up to 18 %.
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


@dataclass(frozen=True, kw_only=True)
class _ForwardOptions:
    """How to run a forward: arguments of :meth:`Probe.run`."""

    targets: Tensor | None
    rounded: bool
    at_labels: AtLabels | None
    seed: int
    keeps_state: bool
    varies_weights: bool


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

    Args:
        forward: Computes the outputs of the model for a batch.
        loss: Computes the loss from the outputs and the batch.
        model: The model.
        precision: Makes the context in which the trainer runs forwards.
        terms: Returns the sum of the terms of each unit, see :attr:`ProbeResult.losses`. By default the loss is one
            number, a mean over tokens.
        gather: Returns the values of all ranks. All decisions use them, because FSDP hangs unless all ranks run the
            same forwards. The values of one rank are not enough: ranks round differently, and a state may exist on some
            only.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Outputs],
        loss: Callable[[Outputs, Batch], Loss],
        model: Module,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        terms: Callable[[Loss, Outputs], Mapping[str, Tensor]] | None = None,
        gather: Gather = gather_this_rank_only,
    ) -> None:
        self.model = model
        self.gather = gather
        self._forward_model = forward
        self._loss = loss
        self._precision = precision
        self._sums_by_unit = terms or _one_mean_over_tokens
        self.runs_as_in_training = True
        """If not, all modules are switched to evaluation for each forward."""
        self.is_random = False
        """Whether the loss changes from forward to forward. If it does in training, :meth:`examine` goes over to
        evaluation, and looks again. So after :meth:`examine` True means that the forward is random even in
        evaluation."""
        self._written: dict[str, State] = {}
        """States of the model that forwards have written, by name. :meth:`judge_written_state` will judge them."""
        self._judged: set[str] = set()
        """Names of states that are not judged again. A state is added before its judgement begins, because the forwards
        of the judgement write it, too."""
        self._last_layers: list[Module] | None = None
        """The module that makes the states before the logits, often a norm, and the module that makes the logits. A
        gradient is taken at the output of each. None: :meth:`examine` has not looked for them yet."""
        # Modules of TorchScript take no hooks.
        self._modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._weights = ReplacedWeights(model, self._modules)
        # The first parameter stands for all.
        parameter = next(model.parameters(), None)
        has_float32 = parameter is not None and parameter.dtype == torch.float32
        self.uses_float32 = has_float32 or self._weights.can_convert
        """Whether forwards run in float32, without `precision`. Weights in half precision are then replaced by weights
        in float32."""

    @classmethod
    def from_model(cls, model: Any, gather: Gather = gather_this_rank_only) -> Probe:
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
        if self._last_layers is None:
            self.examine(batch)
        options = _ForwardOptions(
            targets=targets,
            rounded=rounded,
            at_labels=at_labels,
            seed=seed,
            keeps_state=keeps_state,
            varies_weights=varies_weights,
        )
        if decides_precision and self.uses_float32:
            return self._run_in_float32_if_possible(batch, options)
        return self._run_with_allowed_leaves(batch, options)

    def _run_in_float32_if_possible(self, batch: Batch, options: _ForwardOptions) -> ProbeResult:
        """Runs a forward in float32. If that fails on any rank, all ranks go over to the trainer's precision."""
        try:
            result = self._run_with_allowed_leaves(batch, options)
        except Exception:
            # Some kernels accept only half precision, such as flash attention. Each raises another error, and float32
            # may take too much memory, so any error counts. If it has another cause, the next forward raises it, too.
            result = None
        # Only some ranks may have raised, for example because their GPUs have less free memory.
        if any(self.gather(result is None)):
            self.uses_float32 = False
            result = self._run_with_allowed_leaves(batch, options)
        assert result is not None
        return result

    def _run_with_allowed_leaves(self, batch: Batch, options: _ForwardOptions) -> ProbeResult:
        """Runs a forward. If the model writes into its logits (Chameleon), runs it again with fewer leaves.

        The outputs of the last layers are leaves of the autograd graph, and torch does not allow to write into a leaf.
        So only the states before the logits become a leaf, from then on in all forwards.
        """
        layers = self._last_layers or []
        try:
            return self._run_forward(batch, options)
        except Exception as error:
            if 'in-place' not in str(error) or len(layers) < 2:
                raise
        self._last_layers = layers[:1]
        return self._run_forward(batch, options)

    def _run_forward(self, batch: Batch, options: _ForwardOptions) -> ProbeResult:
        """Runs the forward and the loss once, and computes the gradients."""
        with torch.no_grad(), undisturbed(self.model, keeps_state=options.keeps_state) as snapshot:
            with self._as_probed(options.seed):
                forward = self._forward(batch, options)
                result = _result_of(forward, options.targets)
            # Outside of _as_probed(), because _WithoutDropout would slow down the comparison of each state.
            self._note_written(snapshot)
        return result

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
        result = self._examine_in_present_mode(batch)
        if self.is_random and self.runs_as_in_training:
            log.info('The loss is random in training even without dropout, so it was probed only in evaluation.')
            self.runs_as_in_training = False
            result = self._examine_in_present_mode(batch)
        return result

    def _examine_in_present_mode(self, batch: Batch) -> ProbeResult:
        """Finds the last layers, and whether the loss is random, for :meth:`examine`."""
        # With other random numbers than in all other forwards, so the loss changes if it depends on random numbers.
        with_other_numbers = self._find_last_layers(batch, seed=1)
        result = self.run(batch)
        is_same = result.has_same_losses(with_other_numbers)
        self.is_random = not all(self.gather(is_same))
        self.judge_written_state(batch)
        if self.is_random:
            self._check_random_numbers_decide(batch, with_other_numbers, seed=1)
        return result

    def invalid_loss_of_ranks(self, result: ProbeResult) -> float | None:
        """Returns the loss of a result that is NaN or infinite on any rank; None: there is no such loss; a collective.

        If only the rank with this loss raised an error, the others would wait for it in their next collective.
        """
        losses = self.gather(result.invalid_loss)
        return next((loss for loss in losses if loss is not None), None)

    def _check_random_numbers_decide(self, batch: Batch, first: ProbeResult, seed: int) -> None:
        """Raises RuntimeError, on all ranks, if a loss changes from forward to forward with the same random numbers.

        Then it depends on state that :class:`.StateSnapshot` does not see, such as a tensor in a dict, or on random
        numbers of a generator that is not seeded.

        ``first`` is the result of the first forward, made with this seed. The forward here comes after one of the same
        rows, and the first one did not. Two forwards that both come after one of the same rows would not show a state
        that is made of the rows of the last forward.
        """
        # NaN never equals NaN, and is refused later. The ranks agree, because the next forward is a collective.
        if any(self.gather(first.invalid_loss is not None)):
            return
        again = self.run(batch, seed=seed)
        # In half precision, kernels of a GPU that sum in any order (`index_add_`) move a loss by more than its own
        # round-off. So it may move by one digit of the coarsest type, 8e-3 in bfloat16.
        noise = again.gradient_eps / NOISE_FACTOR
        is_same = first.has_same_losses(again, noise)
        if not all(self.gather(is_same)):
            raise NotExactError(
                'A forward must not change the result of the next one, got: another loss of the same rows, although '
                'all random numbers were the same. A step would depend on its number of microbatches. Keep state that '
                'the model writes in buffers, not in a list, a dict or another object, and write it once a step; and '
                'draw random numbers from the generator of torch (docs/errors.md#row-coupling).'
            )

    def _find_last_layers(self, batch: Batch, seed: int) -> ProbeResult:
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

        self._last_layers = []  # not None, or run() would call examine()
        with _hooked(_without_children(self._modules), note):
            result = self.run(batch, seed=seed, decides_precision=True)
        self._last_layers = _last_layers_of(outputs, result)
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
        if not names or not self.runs_as_in_training:
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
        """Judges states that the forwards of this rank have written, for :meth:`judge_written_state`.

        The caller puts the state of the model back.
        """
        run_forward = partial(self.run, batch, keeps_state=True)
        run_forward()  # fills the caches
        with_full_caches = StateSnapshot.of_states(states)
        expected = run_forward()
        rewritten = {state.name: state for state in with_full_caches.written()}
        with_full_caches.restore()
        names = self._names_on_ranks(rewritten)
        if not names:
            return  # all of them were caches
        # On a GPU two forwards of the same rows may differ by round-off.
        again = run_forward()
        with_full_caches.restore()
        tolerance = _tolerance_of_same(expected, again)

        def changes_result(names_to_try: Sequence[str]) -> bool:
            """Changes some states, and returns whether a forward has another result then, on any rank."""
            perturb([rewritten[name] for name in names_to_try if name in rewritten])
            result = run_forward()
            with_full_caches.restore()
            is_changed = expected.distance(result) > tolerance
            return any(self.gather(is_changed))

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
        if not self._judged or not self.runs_as_in_training:
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
        # What the batch writes even after itself, every forward writes. That was judged before.
        names = self._names_on_ranks(written_after_others - written_after_itself)
        is_changed = after_itself.distance(after_others) > _tolerance_of_same(after_itself, again)
        if names and any(self.gather(is_changed)):
            raise _decisive_state(', '.join(names), 'which a forward of other rows writes')

    def _forward(self, batch: Batch, options: _ForwardOptions) -> _Forward:
        """Runs the forward and the loss once, and finds the logits."""
        precision = self._precision()
        if self.uses_float32:
            precision = torch.autocast(labels_of(batch).device.type, enabled=False)
        # Forward and loss get the same copy, as in training. If the model writes into it, no other forward sees that.
        copied = with_copied_tensors(batch)
        rounded_layers: list[Module] = []
        if options.rounded:
            rounded_layers = _without_children(self._modules)
        # Outputs that have a vector for each position of the text have one of these rows and widths.
        shapes = [tuple(labels_of(batch).shape)]
        at_labels = options.at_labels
        if at_labels is not None:
            shapes.append(at_labels.positions.logits_shape)
            # The caller of run() disarms the selector afterwards, because a forward that raises may leave it armed.
            at_labels.selector.arm(at_labels.rule, num_labels=len(at_labels.positions.label_indices))
        with (
            precision,
            self._weights.replaced(in_float32=self.uses_float32, varied=options.varies_weights),
            _hooked(rounded_layers, _rounded),
            _graph_from(self._last_layers or [], shapes) as leaves,
        ):
            outputs = self._forward_model(copied)
            loss = _loss_of(self._loss, outputs, copied)  # only once, because a loss may keep running counts
            terms = self._sums_by_unit(loss, outputs)
        logits = _logits_in_loss(outputs, shapes)
        return _Forward(terms, self._points(leaves, logits), logits)

    def _points(self, leaves: _Leaves, logits: Tensor | None) -> list[Tensor]:
        """Returns the tensors by which gradients are taken: outputs of the last layers, and the logits as the last."""
        points = []
        leaf_by_layer = leaves.of_forward_with(logits)
        for layer in self._last_layers or []:
            if layer in leaf_by_layer:  # some layers do not run in every batch, such as a layer of another modality
                points.append(leaf_by_layer[layer])
        # If no layer returns the logits, because the model changes the output of its head once more, they are not among
        # the leaves.
        if logits is not None and logits.requires_grad and not any(logits is leaf for leaf in points):
            points.append(logits)
        return points

    @contextmanager
    def _as_probed(self, seed: int) -> Iterator[None]:
        """Switches dropout, TF32 and compilation off, and seeds the random numbers.

        Switches BatchNorm to evaluation. If the forward is random in training, switches all modules to evaluation.
        """
        class_in_evaluation = BatchNorm if self.runs_as_in_training else Module
        attributes: list[_Attribute] = []
        for module in self._modules:
            if isinstance(module, class_in_evaluation):
                attributes.append(_Attribute(module, 'training', False))
            # In a derived class this attribute may be a layer.
            if isinstance(module, WITH_DROPOUT) and isinstance(module.dropout, int | float):
                attributes.append(_Attribute(module, 'dropout', 0.0))
        # The same random numbers for every forward, so that forwards can be compared. undisturbed(), around this, puts
        # those of the run back.
        seed_everything(seed)
        with (
            _replaced_attributes([*attributes, *_attributes_without_tf32()]),
            _WithoutDropout(),
            torch.compiler.set_stance('force_eager'),
        ):
            yield


def _one_mean_over_tokens(loss: Loss, outputs: Outputs) -> dict[str, Tensor]:
    """Returns a loss of one number as its only term, see :attr:`ProbeResult.losses`."""
    return {'tokens': loss}


def _last_layers_of(outputs: Sequence[_LayerOutput], result: ProbeResult) -> list[Module]:
    """Returns the layer that makes the logits, and before it the layer that ran before it.

    Args:
        outputs: The outputs of all layers, in the order in which a forward has made them.
        result: The result of this forward.
    """
    # The layer of the logits is the one whose output has their address. If there is none, the model changes the output
    # of its head once more. Then the last output of the same size is taken. It is only the second choice, because
    # another layer may have this size, such as the head of a teacher. Of several outputs with the address, the last one
    # counts: the memory of an earlier output may have been freed and used again for the logits.
    same_size = [place for place, output in enumerate(outputs) if output.size == result.output_size]
    same_address = [place for place in same_size if outputs[place].address == result.output_address]
    # If no layer makes the logits that the model returns, or it returns none, the last output holds them, or the states
    # before them.
    place_of_logits = len(outputs) - 1
    if same_address:
        place_of_logits = same_address[-1]
    elif same_size:
        place_of_logits = same_size[-1]
    first_place = max(place_of_logits - 1, 0)
    last_outputs = outputs[first_place : place_of_logits + 1]  # empty if there are no outputs
    return [output.module for output in last_outputs]


def _tolerance_of_same(result: ProbeResult, again: ProbeResult) -> float:
    """Returns the distance from which on results differ, from two results of the same rows and the same state."""
    return max(NOISE_FACTOR * result.round_off_distance(again), STATE_TOLERANCE)


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
    are_logits_a_point = bool(forward.points) and forward.points[-1] is logits
    losses = {}
    gradients: dict[str, list[Tensor | None]] = {}
    # Gradients are reduced to sketches at once, to save memory. Only the one by the logits is also measured.
    logit_gradient = None
    for unit, loss in forward.terms.items():
        losses[unit] = loss.float().mean().item()
        unit_gradients = _gradients(loss, forward.points)
        if unit == 'tokens' and are_logits_a_point:
            logit_gradient = unit_gradients[-1]
        gradients[unit] = [None if gradient is None else sketch(gradient) for gradient in unit_gradients]
    measured = None
    has_logits = True
    if targets is not None and logits is not None and logit_gradient is not None:
        # If the gradient does not tell, which are_logits() says by None, they are taken for logits.
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


# Helpers of a forward.


class _Attribute(NamedTuple):
    """An attribute of an object, and the value that it gets for a forward."""

    holder: object
    name: str
    value: object


@contextmanager
def _replaced_attributes(attributes: Iterable[_Attribute]) -> Iterator[None]:
    """Gives attributes other values inside of the context."""
    saved: list[_Attribute] = []
    try:
        for holder, name, value in attributes:
            saved.append(_Attribute(holder, name, getattr(holder, name)))
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in saved:
            setattr(holder, name, value)


def _attributes_without_tf32() -> list[_Attribute]:
    """Returns the attributes of torch that let GPUs multiply float32 in float32, with their values.

    In TF32, which Composer turns on, results have an error of 5e-4.
    """
    matmul = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    attributes = [_Attribute(matmul, 'allow_tf32', False), _Attribute(cudnn, 'allow_tf32', False)]
    try:
        for attribute in attributes:
            getattr(attribute.holder, attribute.name)
    except RuntimeError:
        # Someone has set `fp32_precision`, which is new in torch 2.9. If it contradicts `allow_tf32`, torch refuses to
        # read `allow_tf32`. So `fp32_precision` is set only in this case. Otherwise setting it would make `allow_tf32`
        # unreadable in the forward, where `torch.backends.cudnn.flags()` reads it.
        return [_Attribute(backend, 'fp32_precision', 'ieee') for backend in (matmul, cudnn.conv, cudnn.rnn)]
    return attributes


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
        # A model of torch.export calls operators by their full names, such as `dropout.default`.
        name = getattr(func, '__name__', '').removesuffix('.default')
        if name in DROPOUTS:
            return args[0] if args else kwargs['input']
        if name == 'scaled_dot_product_attention':
            # The arguments after query, key, value and mask.
            options = dict(zip(('dropout_p', 'is_causal'), args[4:], strict=False))
            options |= {**kwargs, 'dropout_p': 0.0}
            return func(*args[:4], **options)
        return func(*args, **kwargs)


class _Leaves:
    """Outputs of the last layers, at which the autograd graph begins, by layer.

    The loss may run the model again, so there may be leaves of several forwards. For example, a preference loss also
    runs a reference (the model with its adapter off) without gradients, before or after the forward that makes the
    logits.
    """

    def __init__(self) -> None:
        self._latest: dict[Module, Tensor] = {}
        """The last leaf of each layer. If the running forward does not reach a layer, the leaf is of an earlier one."""
        self._of_forwards: list[dict[Module, Tensor]] = []
        """For each forward without gradients whose last layer has run, the leaves that were the latest then."""

    def add(self, layer: Module, leaf: Tensor) -> None:
        """Adds an output of the running forward."""
        self._latest[layer] = leaf

    def end_forward(self) -> None:
        """Notes that the last layer of a forward without gradients has run."""
        self._of_forwards.append(dict(self._latest))

    def forget_earlier(self) -> None:
        """Forgets the leaves that later forwards have replaced."""
        self._of_forwards.clear()

    def of_forward_with(self, logits: Tensor | None) -> Mapping[Module, Tensor]:
        """Returns the leaves of the forward in which a layer returned the logits, or else the latest leaves."""
        for leaves in self._of_forwards:
            if any(leaf is logits for leaf in leaves.values()):
                return leaves
        return self._latest


@contextmanager
def _graph_from(
    layers: Sequence[Module],
    shapes: Sequence[tuple[int, ...]],
) -> Iterator[_Leaves]:
    """Starts the autograd graph at the outputs of some layers. Yields these outputs, which are leaves of the graph.

    An output counts only if its rows and width are one of the ``shapes``.

    The forward runs without gradients until the last of the layers has returned its output. Then a hook switches
    gradients on, and the rest of the forward and the loss make a graph. The end of the context restores the earlier
    mode. The output of an earlier layer becomes a leaf, too, but gradients stay off after it. So no graph connects the
    layers. Autograd could not follow such a graph under FSDP, which has the whole weights of a layer only during the
    forward of that layer.
    """
    leaves = _Leaves()

    def start_graph(
        module: Module,
        args: object,
        output: object,
    ) -> Tensor | None:
        if not _is_of_shape(output, shapes):
            return None
        leaf = output.detach().requires_grad_()
        leaves.add(module, leaf)
        if module is layers[-1]:
            if torch.is_grad_enabled():
                # An earlier forward has switched gradients on, and the loss has run the model again with gradients
                # (R-Drop). Only the leaves of the last such forward count.
                leaves.forget_earlier()
            else:
                leaves.end_forward()
            # From here on, gradients stay on, even if an earlier layer runs again.
            torch.set_grad_enabled(True)
        return leaf

    with _hooked(layers, start_graph), torch.no_grad():
        yield leaves


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
    shape = tuple(logits.shape[:2])
    if shape not in shapes:
        raise NotExactError(
            f"The model's logits must be as wide as the labels, got: {shape} for labels of {shapes[0]}. The model "
            'expands or truncates the sequence inside forward. Expand image placeholders in the processor instead '
            '(docs/errors.md#loss-rule).'
        )
    # accelerate and FSDP return a copy of the logits in another type, but the loss uses the logits themselves.
    # edge_of() follows the graph back through copies.
    node, _ = edge_of(logits)
    # If _graph_from() has made the logits a leaf, this node holds the leaf as `variable`. Any other node has no such
    # attribute, and the outputs hold the logits that the loss uses.
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
