# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Terms of a loss, which may be a tensor, a tuple or a dict; each has a denominator of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer_tokacc.checks.probe import router_loss_of

__all__ = ['LOSS_UNITS', 'LossTerms', 'attached_zero', 'router_coefficient']

LOSS_UNITS = ('tokens', 'samples', 'coupled_samples', 'microbatches')
SPLIT_UNITS = {'tokens': 'tokens', 'router': 'microbatches'}
"""Terms of the loss of a mixture of experts, which Hugging Face's models return as one number."""
COEFFICIENTS = ('router_aux_loss_coef', 'aux_loss_coef')


class LossTerms:
    """Scales the terms of a loss, each by the factor of its unit.

    Args:
        loss_units: Denominator of each term of a dict loss, by name. None: every term is a mean over tokens.
    """

    def __init__(self, loss_units: Mapping[str, str] | None) -> None:
        if loss_units is not None and not isinstance(loss_units, Mapping):
            raise ValueError(
                f"`loss_units` must be a mapping from the terms of the loss to units, such as {{'lm': 'tokens'}}, got: "
                f'{loss_units!r}.'
            )
        for name, unit in (loss_units or {}).items():
            if unit not in LOSS_UNITS:
                raise ValueError(f'`loss_units[{name!r}]` must be one of {LOSS_UNITS}, got: {unit!r}.')
            if name == 'total':
                raise ValueError("`loss_units` must name terms, got: 'total', which Composer reserves for their sum.")
        self.given_units = self.loss_units = dict(loss_units) if loss_units else None
        self.router_coefficient: float | None = None
        """What the load-balancing loss of a router is multiplied by before it is added; None: there is none."""

    @property
    def needs_microbatches(self) -> bool:
        """Whether a term's denominator is the number of microbatches."""
        return 'microbatches' in (self.loss_units or {}).values()

    @property
    def is_split(self) -> bool:
        """Whether losses of one number are taken apart: see :meth:`split`."""
        return self.given_units is None and self.loss_units is not None

    def split(self, loss: Any, outputs: Any) -> Any:
        """The loss of a mixture of experts by its terms: the mean over tokens, and the balance of its router.

        The balance is a statistic of the microbatch, and no mean over tokens: every microbatch's own weighs the same.
        """
        for name, term in loss.items() if isinstance(loss, Mapping) else ():
            if not isinstance(term, torch.Tensor):
                raise RuntimeError(
                    f'`loss[{name!r}]` must be a tensor, got: {term!r}. Leave out what a microbatch does not have.'
                )
        router = router_loss_of(outputs)
        if self.router_coefficient is None or router is None or not isinstance(loss, torch.Tensor):
            return loss
        self.loss_units = SPLIT_UNITS
        router = self.router_coefficient * router.to(loss.device)
        return {'tokens': loss - router, 'router': router}

    def check_coefficient(self, loss: Any, outputs: Any) -> None:
        """Raises RuntimeError unless the model has added its load-balancing loss times the coefficient to its loss.

        However small: below every tolerance the rest would still be no mean over tokens.
        """
        router = router_loss_of(outputs)
        if self.router_coefficient is None or router is None or not isinstance(loss, torch.Tensor):
            return
        if not router.requires_grad or router.grad_fn is loss.grad_fn:  # nothing to train, or a compiled forward
            return
        (found,) = torch.autograd.grad(loss, router, retain_graph=True, allow_unused=True)
        added = 0.0 if found is None else float(found)
        if not math.isclose(added, self.router_coefficient, rel_tol=1e-5):
            raise RuntimeError(
                f'The model must add its load-balancing loss times {self.router_coefficient:g}, as its config says, '
                f'got: times {added:g}. Set `router_aux_loss_coef` of model and config to the same, or '
                '`output_router_logits=False`.'
            )

    def joined(self, loss: Any) -> Any:
        """The inverse of :meth:`split`."""
        return _sum(loss.values()) if self.is_split and isinstance(loss, Mapping) else loss

    @property
    def coupled(self) -> list[str]:
        """Terms that are declared to depend on which rows share a microbatch."""
        return [name for name, unit in (self.given_units or {}).items() if unit in ('coupled_samples', 'microbatches')]

    @property
    def is_one_mean(self) -> bool:
        """Whether the loss was declared to have no terms besides one mean over tokens."""
        return list((self.given_units or {'lm': 'tokens'}).values()) == ['tokens']

    def unit(self, name: str) -> str:
        """The unit of a dict term."""
        if self.loss_units is None:
            return 'tokens'
        if name not in self.loss_units:
            raise RuntimeError(
                f'`loss_units` must name every term of the loss, got: no unit for {name!r}. Add '
                f"`'{name}': 'tokens'`, 'samples', 'coupled_samples' or 'microbatches'."
            )
        return self.loss_units[name]

    def token_term(self, loss: Any) -> torch.Tensor:
        """The sum of all terms that are means over tokens: what the probe compares, as precise as they are."""
        if not isinstance(loss, Mapping):
            self._check_no_units(loss)
            return _sum_as_given(_terms(loss))
        named = {name: value for name, value in loss.items() if name != 'total'}
        if self.loss_units is None:
            if len(named) > 1:
                raise RuntimeError(
                    f'One term of the loss must be the mean over tokens, got: {sorted(loss)}. Name the unit of each in '
                    '`loss_units`, or set `check_loss=False` with an explicit `loss_tokens`.'
                )
            return loss['total'] if 'total' in loss else _sum_as_given(named.values())
        if named and 'total' in loss and not torch.isclose(loss['total'].float(), _sum(named.values()), rtol=1e-4):
            raise RuntimeError(
                f"`loss['total']` must be the sum of the other terms, got: {loss['total'].item():.6f} where they sum "
                f'to {_sum(named.values()).item():.6f}. Return each term with its weight, and all that the total holds.'
            )
        return _sum_as_given([value for name, value in named.items() if self.unit(name) == 'tokens'] or [loss['total']])

    def by_unit(self, loss: Any, outputs: Any) -> dict[str, torch.Tensor]:
        """Returns the sum of the terms of each unit that no cut may change: tokens, and samples if there are any."""
        loss = self.split(loss, outputs)
        found = {'tokens': self.token_term(loss)}
        if self.loss_units is not None and isinstance(loss, Mapping):
            terms = [value for name, value in loss.items() if name != 'total' and self.unit(name) == 'samples']
            found |= {'samples': _sum(terms)} if terms else {}
        return found

    def token_terms(self, loss: Any) -> list[torch.Tensor]:
        """Returns the terms that are means over tokens, of which a microbatch may lack some; asks nothing of them."""
        if not isinstance(loss, Mapping) or self.loss_units is None:
            return list(_terms(loss))
        return [value for name, value in loss.items() if name != 'total' and self.unit(name) == 'tokens']

    def add(self, loss: Any, change: torch.Tensor) -> Any:
        """Returns the loss with a number more in its terms over tokens, and in their total."""
        if isinstance(loss, torch.Tensor):
            return loss + change
        if not isinstance(loss, Mapping):
            first, *others = loss
            return type(loss)([first + change, *others])
        first = next(name for name in loss if name != 'total' and self.unit(name) == 'tokens')
        return {name: value + change if name in (first, 'total') else value for name, value in loss.items()}

    def terms(self, loss: Any) -> list[torch.Tensor]:
        """All terms of a loss."""
        return list(_terms(loss))

    def replace_empty(self, loss: Any, zero: torch.Tensor) -> Any:
        """The loss of a microbatch without loss-generating tokens: its token terms are zero, not a mean over none."""
        if not isinstance(loss, Mapping):
            return zero if isinstance(loss, torch.Tensor) else type(loss)(zero for _ in loss)
        terms = {
            name: zero if self.unit(name) == 'tokens' else value for name, value in loss.items() if name != 'total'
        }
        if 'total' in loss:
            terms['total'] = _sum(terms.values()) if terms else zero
        return terms

    def scale(self, loss: Any, scales: Mapping[str, float], observe: Callable[[torch.Tensor], None]) -> Any:
        """Fresh float32 products: Composer multiplies what it is given in place.

        Args:
            loss: The raw loss.
            scales: Factor of each unit.
            observe: Called in backward with the gradient that reaches the scaled loss, once a microbatch.
        """
        if not isinstance(loss, Mapping):
            self._check_no_units(loss)
            scaled = [_product(term, scales['tokens']) for term in _terms(loss)]
            _hook(scaled[0], observe)
            return scaled[0] if isinstance(loss, torch.Tensor) else tuple(scaled)
        named = {name: _product(value, scales[self.unit(name)]) for name, value in loss.items() if name != 'total'}
        if self.loss_units is not None and named:
            # Composer pairs terms by position across ranks: the same names in the same order everywhere, a term
            # that is absent here being zero.
            like = next(iter(named.values()))
            named = {name: named.get(name, like.new_zeros(())) for name in self.loss_units}
        if 'total' not in loss:
            hooked = next((value for value in named.values() if value.requires_grad), None)
            if hooked is not None:
                _hook(hooked, observe)
            return named
        if named and self.loss_units is not None:
            total = _sum(named.values())
        else:
            total = _product(loss['total'], scales['tokens'])
        _hook(total, observe)
        return {**named, 'total': total}

    def _check_no_units(self, loss: Any) -> None:
        if self.given_units is not None:
            raise RuntimeError(
                f'`loss_units` must go with a dict loss, got: a loss of type {type(loss).__name__}. Return a dict with '
                f'the terms {sorted(self.given_units)} from the model, or drop `loss_units`.'
            )


def router_coefficient(model: Any) -> float | None:
    """What a Hugging Face model, or the Composer model around it, multiplies its load-balancing loss by."""
    model = getattr(model, 'model', model)
    config: Any = getattr(model, 'config', None)
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    for holder in (model, config):  # modules keep what they need of their config
        for name in COEFFICIENTS:
            if isinstance(found := getattr(holder, name, None), (int, float)):
                return float(found)
    return None


def attached_zero(outputs: Any, loss: Any) -> torch.Tensor:
    """A zero in the graph of the outputs, whose backward reaches every parameter with zeros.

    It hangs on the outputs rather than on the loss, because a masked sum over no tokens has NaN gradients.
    """
    losses = {id(term) for term in _terms(loss)}
    tensors = [tensor for tensor in _terms(outputs) if tensor.requires_grad and id(tensor) not in losses]
    # A scalar in the outputs is the loss again (HuggingFaceModel returns outputs.loss).
    tensors = [tensor for tensor in tensors if tensor.dim() > 0] or [t for t in _terms(loss) if t.requires_grad]
    if not tensors:
        first = next(_terms(loss))
        return first.new_zeros((), dtype=torch.float32)
    return _AttachedZero.apply(*tensors)  # pyright: ignore[reportReturnType]


class _AttachedZero(torch.autograd.Function):
    """Zero forward and zeros backward, whatever the inputs hold: 0 * NaN would be NaN."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def _terms(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nest of mappings and sequences."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _terms(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _terms(item)


def _sum(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """As Composer adds the terms of a loss up."""
    return torch.stack([term.float().mean() for term in terms]).sum()


def _sum_as_given(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The same, in the coarsest of their dtypes."""
    terms = list(terms)
    return _sum(terms).to(max((term.dtype for term in terms), key=lambda dtype: torch.finfo(dtype).eps))


def _product(term: torch.Tensor, scale: float) -> torch.Tensor:
    return term.float() * scale


def _hook(term: torch.Tensor, observe: Callable[[torch.Tensor], None]) -> None:
    if term.requires_grad:
        term.register_hook(observe)
