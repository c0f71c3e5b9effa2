# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The run's own model on a few rows, as it will train: its loss, and the gradient of that at the end of its layers."""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from composer_tokacc.batch import Batch, labels_of, with_own_tensors
from composer_tokacc.checks.logits import MeasuredTokens, logits_of, measure, sketch
from composer_tokacc.compat import BatchNorm
from composer_tokacc.label_selector import LabelSelector
from composer_tokacc.labelled import LabelledPositions

log = logging.getLogger(__name__)

NOISE_FACTOR = 8
"""Tolerance over the measured round-off: kernels for other shapes round every sum, the measurement only its result."""
ROUNDING_FLOOR = 64
"""Of the rounding of a loss: kernels for other shapes sum in another order."""

VARIATION = 0.8
"""What is added to weights that are all alike goes from 0 to about half, of one input."""


@dataclass(frozen=True, eq=False)
class AtLabels:
    """How a forward computes logits only where a label is."""

    selector: LabelSelector
    rule: str
    positions: LabelledPositions


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What one forward of a few rows gave."""

    losses: Mapping[str, float]
    """Sum of the terms of each unit that a cut must leave alone: ``'tokens'``, ``'samples'``."""
    gradients: Mapping[str, Sequence[torch.Tensor | None]]
    """Of these by what the last layers give, ``(rows, width, entries)`` each: by the states that logits are made of, as
    far as the loss uses them besides, and by the logits; None where it does not use them."""
    measured: MeasuredTokens | None  # where that was asked, of a model with logits that its loss is made of
    vocabulary: int | None  # number of logits of a position, if any are given
    eps: float  # machine epsilon of the loss, float32's or coarser
    gradient_eps: float  # of the coarsest gradient

    @property
    def is_nan(self) -> bool:
        """Whether a loss is no number, of which no gradient tells anything."""
        return any(map(math.isnan, self.losses.values()))

    def is_same_loss(self, unit: str, other: float, noise: float = 0.0) -> bool:
        """Returns whether another loss differs by round-off alone."""
        loss = self.losses[unit]
        return abs(other - loss) <= NOISE_FACTOR * noise + ROUNDING_FLOOR * self.eps * (1 + abs(loss))


class Probe:
    """Runs the model's own forward and loss without a graph but at its end, and leaves no trace in the run.

    The layers run as in training but for dropout: a loss may be another one there. Where the forward is random all the
    same, and no two of them could be compared, they run as in evaluation. Weights in float32 are probed without the
    trainer's ``precision``, because in float32 a leak of 2e-3 is plain to see and in bfloat16 it is not.
    """

    def __init__(
        self,
        forward: Callable[[Any], Any],
        loss: Callable[[Any, Any], Any],
        model: torch.nn.Module,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        terms: Callable[[Any, Any], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self.model = model
        self._forward, self._loss, self._precision = forward, loss, precision
        self._terms = terms or (lambda loss, outputs: {'tokens': loss})
        self.is_training, self.is_random = True, False
        self._has_looked, self._logits_at = False, None
        # Those of TorchScript take no hooks.
        self._modules = [one for one in model.modules() if not isinstance(one, torch.jit.ScriptModule)]
        self._alike: dict[torch.nn.Module, list[str]] = {}
        """Names of the weights of each module whose entries are all alike."""
        self._layers: list[torch.nn.Module] = []
        """What gives the states that logits are made of, most often a norm, and what makes the logits."""
        parameter = next(model.parameters(), None)
        self._in_full = parameter is not None and parameter.dtype == torch.float32
        self._device_type = parameter.device.type if parameter is not None else 'cpu'

    @classmethod
    def from_model(cls, model: Any) -> Probe:
        """Makes one of a ComposerModel, or of a Hugging Face model that computes its own loss."""
        if hasattr(model, 'eval_forward'):
            return cls(model, lambda outputs, batch: model.loss(outputs, batch), model)
        named = inspect.signature(model.forward).parameters

        def forward(batch: Batch) -> Any:
            return model(**{key: value for key, value in batch.items() if key in named})

        return cls(forward, lambda outputs, batch: outputs['loss'], model)

    def run(
        self, batch: Batch, *, measured: bool = False, rounded: bool = False, at_labels: AtLabels | None = None
    ) -> ProbeResult:
        """Runs a batch on its device, eagerly; leaves random numbers, modes and buffers as they were.

        ``at_labels``: with logits only where a label is; gradients by them have the shape of the selected positions.

        ``rounded``: with every layer's output moved by its last digit, up or down, by which round-off moves the rest.
        The same rows in another order or number would not do: kernels then make the very same sums.
        """
        run = self._run_as_in_training if self._has_looked else self._look
        return run(batch, measured=measured, rounded=rounded, at_labels=at_labels)

    def _look(self, batch: Batch, **options: Any) -> ProbeResult:
        """Runs twice, which shows the last layers, and whether the loss is random."""
        found: list[tuple[torch.nn.Module, int, int]] = []

        def note(module: torch.nn.Module, args: Any, output: Any) -> None:
            if _is_of_positions(output, batch):
                found.append((module, output.shape[-1], output.data_ptr()))

        with _hooked(_leaves(self._modules), note):
            first = self._run_as_in_training(batch, seed=1)
        makers = [place for place, (_, size, _) in enumerate(found) if size == first.vocabulary]
        # A teacher's head may come after the model's own, whose output is the logits, unless they are changed again.
        own = [place for place in makers if found[place][2] == self._logits_at]
        last = (own or makers or [len(found)])[-1]
        self._layers = [module for module, *_ in found[max(last - 1, 0) : last + 1]]
        again = self._run_as_in_training(batch, **options)
        self.is_random = not all(again.is_same_loss(unit, loss) for unit, loss in first.losses.items())
        if self.is_training and self.is_random:
            log.info('The loss is random in training even without dropout, so it was looked at in evaluation only.')
            self.is_training, self._layers = False, []
            return self._look(batch, **options)
        self._has_looked = True
        return again

    def _run_as_in_training(self, batch: Batch, seed: int = 0, **options: Any) -> ProbeResult:
        while True:
            precision = torch.autocast(self._device_type, enabled=False) if self._in_full else self._precision()
            try:
                with torch.no_grad(), undisturbed(self.model), self._as_probed(seed):
                    return self._run(batch, precision, **options)
            except RuntimeError as error:
                if self._in_full:  # a kernel that knows half precision only, as flash attention does
                    self._in_full = False
                elif 'in-place' in str(error) and len(self._layers) > 1:
                    self._layers = self._layers[:1]  # Chameleon writes into its logits, which no leaf allows
                else:
                    raise

    def _run(
        self,
        batch: Batch,
        precision: AbstractContextManager[Any],
        *,
        measured: bool = False,
        rounded: bool = False,
        at_labels: AtLabels | None = None,
    ) -> ProbeResult:
        leaves: dict[torch.nn.Module, torch.Tensor] = {}
        if at_labels is not None:
            at_labels.selector.arm(at_labels.rule, len(at_labels.positions.of_labels))

        def begin_graph(module: torch.nn.Module, args: Any, output: Any) -> Any:
            is_selected = at_labels is not None and _is_of_shape(output, at_labels.positions.shape)
            if not (is_selected or _is_of_positions(output, batch)):
                return None
            # Two leaves, and no graph of the layer between them, whose weights FSDP has for a forward of its own only.
            torch.set_grad_enabled(module is self._layers[-1])
            leaves[module] = output.detach().requires_grad_()
            return leaves[module]

        # A copy, the same for forward and loss as in training: models that write into it change no other run.
        given = with_own_tensors(batch)
        rounding = _hooked(_leaves(self._modules) if rounded else [], _rounded)
        with precision, self._with_varied_weights(), rounding, _hooked(self._layers, begin_graph), torch.no_grad():
            outputs = self._forward(given)
            loss = _loss_of(self._loss, outputs, given)  # once, as what it counts may be added up
            terms = self._terms(loss, outputs)
        logits = logits_of(outputs) if at_labels is not None else _checked_logits(outputs, batch)
        self._logits_at = None if logits is None or isinstance(logits, DTensor) else logits.data_ptr()
        points = [leaves[layer] for layer in self._layers if layer in leaves]
        if logits is not None and logits.requires_grad and all(logits is not leaf for leaf in points):
            points.append(logits)
        gradients = {unit: _gradients(value, points) for unit, value in terms.items()}
        at_logits = next((g for p, g in zip(points, gradients.get('tokens', []), strict=False) if p is logits), None)
        tokens = measure(logits, at_logits) if measured and logits is not None and at_logits is not None else None
        return ProbeResult(
            losses={unit: value.float().mean().item() for unit, value in terms.items()},
            gradients={unit: [g if g is None else sketch(g) for g in of_unit] for unit, of_unit in gradients.items()},
            measured=tokens,
            vocabulary=None if logits is None else logits.shape[-1],
            eps=max(torch.finfo(value.dtype).eps for value in (*terms.values(), torch.zeros(()))),
            gradient_eps=max(torch.finfo(point.dtype).eps for point in (*points, torch.zeros(()))),
        )

    @contextmanager
    def _as_probed(self, seed: int) -> Iterator[None]:
        """Leaves modules in training in the mode that they are in, but for BatchNorm, and has no dropout drop."""
        changed = BatchNorm if self.is_training else torch.nn.Module
        training = [module for module in self._modules if module.training and isinstance(module, changed)]
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        for module in training:
            module.training = False
        try:
            with _NoDropout(), torch.compiler.set_stance('force_eager'):
                yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def _with_varied_weights(self) -> Iterator[None]:
        """Runs as if no two entries of a weight were the same, of those in which all are.

        The weights of a fresh norm are all 1, and hide from loss and logits, not from the gradient by themselves, that
        a norm behind the rotary embedding (HunYuan) makes attention depend on absolute positions; so does a scale of
        positions that begins at 0 (Mistral Large 4). What a cut leaves alone it leaves alone with any weights.
        Nothing is written into the model's own, of which FSDP may hold parts: attributes come before parameters.
        """

        def show(module: torch.nn.Module, args: Any) -> None:
            if module not in self._alike:  # until a forward has reached it, FSDP does not have a weight whole
                weights = module.named_parameters(recurse=False)
                self._alike[module] = [name for name, one in weights if name not in vars(module) and _is_alike(one)]
            for name in self._alike[module]:
                if name not in vars(module):  # a module may call itself
                    vars(module)[name] = _varied(getattr(module, name))

        def hide(module: torch.nn.Module, args: Any, output: Any) -> None:
            for name in self._alike.get(module, ()):
                vars(module).pop(name, None)

        with ExitStack() as hooks:
            for module in self._modules:
                if self._alike.get(module, True):
                    hooks.enter_context(module.register_forward_pre_hook(show))
                    hooks.enter_context(module.register_forward_hook(hide, always_call=True))
            yield


def _loss_of(loss: Callable[[Any, Batch], Any], outputs: Any, batch: Batch) -> Any:
    try:
        return loss(outputs, batch)
    except KeyError as error:
        if error.args != ('loss',):
            raise
        raise ValueError(
            f"The model's forward must give a loss for `labels`, got: {', '.join(outputs)}. Take a class with "
            'a head that computes one, such as `AutoModelForCausalLM`.'
        ) from error


class _NoDropout(TorchFunctionMode):
    """Leaves out every dropout of torch, that of attention included, whatever asks for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch's own, with a probability of 0."""
        kwargs, name = kwargs or {}, getattr(func, '__name__', '')
        if 'dropout' in name:
            return args[0] if args else kwargs['input']
        if name == 'scaled_dot_product_attention':
            given = {**dict(zip(('dropout_p', 'is_causal'), args[4:], strict=False)), **kwargs}
            return func(*args[:4], **{**given, 'dropout_p': 0.0})
        return func(*args, **kwargs)


def _rounded(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Returns a layer's output with each entry moved by its last digit, up or down; a forward hook."""
    if not isinstance(output, torch.Tensor) or not output.dtype.is_floating_point:
        return None
    step = torch.finfo(output.dtype).eps * (2 * (torch.rand_like(output) < 0.5) - 1)
    return output * (1 + step).to(output.dtype)


def _is_alike(weight: torch.Tensor) -> bool:
    """Returns whether entries differ by less than a fifth of what :func:`_varied` adds."""
    if isinstance(weight, DTensor) or not (weight.is_floating_point() and weight.dtype.itemsize > 1 and weight.numel()):
        return False
    entries = weight.detach().flatten()
    most = VARIATION / 5 * (len(weight) / len(entries) if weight.dim() else 1) ** 0.5
    # Few weights are, and most of the others show it by their first entries.
    return all(float(torch.sub(*part.aminmax())) > -most for part in (entries[:256], entries))


def _varied(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight with a positive number of its own added to each entry, the smaller the more inputs it has."""
    if weight.dim() < 2:
        return weight + VARIATION * _shares(weight.numel(), weight.dtype, weight.device).view(weight.shape)
    entries = weight.flatten(1)
    rows, columns = (_shares(size, weight.dtype, weight.device) for size in entries.shape)
    varied = torch.addcmul(entries, rows[:, None], columns, value=VARIATION / entries.shape[1] ** 0.5)
    return varied.view(weight.shape)


@cache
def _shares(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns numbers between 0 and 1 that are the same on all ranks and devices: multiples of the golden ratio."""
    return (torch.arange(1, size + 1) * 0.618034 % 1).to(device, dtype)


def _checked_logits(outputs: Any, batch: Batch) -> torch.Tensor | None:
    logits, labels = logits_of(outputs), labels_of(batch)
    if logits is not None and logits.shape[:2] != labels.shape:
        raise RuntimeError(
            f"The model's logits must be as wide as the labels, got: {tuple(logits.shape[:2])} for labels of "
            f'{tuple(labels.shape)}. The model expands or truncates the sequence inside forward. Expand image '
            'placeholders in the processor instead (docs/errors.md#loss-rule).'
        )
    return logits


def _gradients(value: torch.Tensor, points: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the gradient of a loss by each of the points."""
    if not (points and value.requires_grad):
        return [None] * len(points)
    with torch.enable_grad():
        return list(torch.autograd.grad(value.float().mean(), points, allow_unused=True, retain_graph=True))


def _is_of_positions(output: Any, batch: Batch) -> bool:
    """Returns whether a layer's output has a vector for every position of the labels."""
    return _is_of_shape(output, labels_of(batch).shape)


def _is_of_shape(output: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether a layer's output has a vector for every position of so many rows and columns."""
    if not isinstance(output, torch.Tensor) or not output.dtype.is_floating_point or output.dim() != 3:
        return False
    return tuple(output.shape[:2]) == tuple(shape)


def _leaves(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    return [module for module in modules if next(module.children(), None) is None]


@contextmanager
def _hooked(modules: Iterable[torch.nn.Module], change: Callable[..., Any]) -> Iterator[None]:
    """Has ``change`` make what the modules return, of ``(module, inputs, output)``."""
    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(change))
        yield


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Leaves a run the same with and without a forward in between: puts random state and buffers back."""
    modules = list(model.modules())  # to walk them is slow
    buffers = [(one, one.clone()) for module in modules for one in module.buffers(recurse=False) if model.training]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
        for module in modules:
            if isinstance(module, FSDPModule):  # a forward leaves the root whole, without gradients, until a backward
                module.reshard()
