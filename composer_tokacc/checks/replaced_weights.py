# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Lets the forwards of a probe compute with other weights than the model has, because some weights hide faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from composer_tokacc.model_structure import HALF_PRECISION

VARIATION = 0.8
"""The most that is added to an entry of a varied weight with one column. With more columns it is divided by the root of
their number, so that outputs of wide and narrow layers change by about as much."""

ValueT = TypeVar('ValueT')


class ReplacedWeights:
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

    Args:
        model: The model.
        modules: The modules of the model that take hooks. The others keep their weights.
    """

    def __init__(self, model: Module, modules: Sequence[Module]) -> None:
        self._modules = modules
        self.can_convert = _can_convert(model)
        """Whether the model has weights in half precision that may be replaced by weights in float32."""
        self.equal_names: dict[Module, list[str]] = {}
        """Names of the weights whose entries are all equal, by module; only modules that a forward has reached."""
        self._replaced_names: dict[Module, list[str]] = {}
        """Names of the weights that are replaced now, by module."""

    @contextmanager
    def replaced(self, *, in_float32: bool, varied: bool) -> Iterator[None]:
        """Makes forwards inside of the context use the replacements.

        Args:
            in_float32: Whether to replace weights in half precision, if they can be.
            varied: Whether to vary weights whose entries are all equal.
        """
        converts = in_float32 and self.can_convert

        def before_forward(
            module: Module,
            args: tuple[object, ...],
            kwargs: dict[str, object],
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            if varied and module not in self.equal_names:
                # This waits until a forward has reached the module, because FSDP has the whole weight only then.
                self.equal_names[module] = _names_of_equal_weights(module)
            self._replace(module, converts=converts, varied=varied)
            if converts:
                # Some models cast pixels or a mask to the type of their weights.
                args = tuple(_input_in_float32(value) for value in args)
                kwargs = {name: _input_in_float32(value) for name, value in kwargs.items()}
            return args, kwargs

        with ExitStack() as hooks:
            for module in self._modules:
                # A module that no forward has reached yet may have weights with equal entries.
                may_vary = varied and (module not in self.equal_names or bool(self.equal_names[module]))
                if may_vary or converts:
                    hooks.enter_context(module.register_forward_pre_hook(before_forward, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(self._restore, always_call=True))
            try:
                yield
            finally:
                # Torch calls no hook after a KeyboardInterrupt. Training must not see the replacements.
                for module in list(self._replaced_names):
                    self._restore(module)

    def _replace(self, module: Module, *, converts: bool, varied: bool) -> None:
        """Gives a module attributes that hide its weights."""
        replaced_names = self._replaced_names.setdefault(module, [])
        for name, weight in module.named_parameters(recurse=False):
            if name in vars(module):  # replaced already, because the module calls itself
                continue
            replacement: Tensor = weight
            if converts:
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


# Weights in float32.


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


# Varied weights.


def _names_of_equal_weights(module: Module) -> list[str]:
    """Returns the names of the trained weights of a module whose entries are all equal."""
    names = []
    for name, weight in module.named_parameters(recurse=False):
        # A frozen weight will not move, so its equal entries hide no fault that could show later.
        if weight.requires_grad and name not in vars(module) and _has_equal_entries(weight):
            names.append(name)
    return names


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
