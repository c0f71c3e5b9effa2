# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Terms of a loss, which may be a tensor, a sequence or a dict; each has a denominator of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from composer_tokacc.checks.logits import router_loss_of

LOSS_UNITS = ('tokens', 'samples', 'coupled_samples', 'microbatches')
COEFFICIENTS = ('router_aux_loss_coef', 'aux_loss_coef')


class SplitLoss(dict):
    """The one number that Hugging Face's mixtures of experts return, by its terms."""

    units: ClassVar = {'tokens': 'tokens', 'router': 'microbatches'}


class LossTerms:
    """Knows the unit of each term of a loss, and changes the terms by it; without units all are means over tokens."""

    def __init__(self, loss_units: Mapping[str, str] | None, router_coefficient: float | None = None) -> None:
        # What a router's load-balancing loss is multiplied by before it is added; None: it has none, or it is declared.
        self.units, self.router_coefficient = dict(loss_units or {}), router_coefficient

    @property
    def coupled(self) -> list[str]:
        """Terms that are declared to depend on which rows share a microbatch."""
        return [name for name, unit in self.units.items() if unit in ('coupled_samples', 'microbatches')]

    def named(self, loss: Any) -> dict[Any, tuple[str, torch.Tensor]]:
        """Returns the unit and the value of each term but Composer's ``'total'``, by its name or place."""
        if not isinstance(loss, Mapping):
            if self.units:
                raise RuntimeError(
                    f'`loss_units` must go with a dict loss, got: a loss of type {type(loss).__name__}. Return a dict '
                    f'with the terms {sorted(self.units)}, or drop `loss_units` (docs/errors.md#model-loss).'
                )
            return {place: ('tokens', term) for place, term in enumerate(tensors_in(loss))}
        units = loss.units if isinstance(loss, SplitLoss) else self.units or dict.fromkeys(loss, 'tokens')
        for name, term in loss.items():
            if not isinstance(term, torch.Tensor):
                raise RuntimeError(
                    f'`loss[{name!r}]` must be a tensor, got: {term!r}. Leave out what a microbatch does not have.'
                )
            if name != 'total' and name not in units:
                raise RuntimeError(
                    f'`loss_units` must name every term of the loss, got: no unit for {name!r}. Add '
                    f"`'{name}': 'tokens'`, 'samples', 'coupled_samples' or 'microbatches' (docs/errors.md#model-loss)."
                )
        return {name: (units[name], term) for name, term in loss.items() if name != 'total'}

    def of_unit(self, loss: Any, unit: str) -> list[torch.Tensor]:
        """Returns the terms of a unit, of which a microbatch may lack some; of a dict without units its total."""
        if unit == 'tokens' and not self.units and isinstance(loss, Mapping) and 'total' in loss:
            return [loss['total']]
        return [term for of_term, term in self.named(loss).values() if of_term == unit]

    def changed(self, loss: Any, change: Callable[[Any, str, torch.Tensor], torch.Tensor]) -> Any:
        """Returns the loss with other terms, of name, unit and value, and their total where it has one."""
        terms = {name: change(name, unit, term) for name, (unit, term) in self.named(loss).items()}
        if not isinstance(loss, Mapping):
            return terms[0] if isinstance(loss, torch.Tensor) else tuple(terms.values())
        if 'total' in loss:
            floats = [term.float() for term in terms.values()]
            terms['total'] = _sum(floats) if floats and self.units else change('total', 'tokens', loss['total'])
        return SplitLoss(terms) if isinstance(loss, SplitLoss) else terms

    def scaled(self, loss: Any, scales: Mapping[str, float], observe: Callable[[torch.Tensor], None]) -> Any:
        """Returns products with the factor of each unit, fresh ones: Composer multiplies what it is given in place.

        ``observe`` is called in backward with the gradient that reaches the scaled loss, once a microbatch.
        """
        scaled = self.changed(loss, lambda name, unit, term: term.float() * scales[unit])
        if isinstance(scaled, Mapping) and self.units and scaled.keys() - {'total'}:
            # Composer pairs terms by position across ranks: the same names in the same order everywhere, a term that
            # is absent here being zero.
            zero = next(iter(scaled.values())).new_zeros(())
            scaled = {name: scaled.get(name, zero) for name in [*self.units, *({'total'} & scaled.keys())]}
        whole = [scaled['total']] if isinstance(scaled, Mapping) and 'total' in scaled else tensors_in(scaled)
        hooked = next((term for term in whole if term.requires_grad), None)
        if hooked is not None:
            hooked.register_hook(observe)
        return scaled

    def split(self, loss: Any, outputs: Any) -> Any:
        """Returns the loss of a mixture of experts by its terms: the mean over tokens, and the balance of its router.

        The balance is a statistic of the microbatch, and no mean over tokens: every microbatch's own weighs the same.
        """
        router = router_loss_of(outputs)
        if router is None or self.router_coefficient is None or not isinstance(loss, torch.Tensor):
            return loss
        router = self.router_coefficient * router.to(loss.device)
        return SplitLoss(tokens=loss - router, router=router)

    def check_coefficient(self, loss: Any, outputs: Any) -> None:
        """Raises RuntimeError unless the model has added its load-balancing loss times the coefficient to its loss.

        However small: below every tolerance the rest would still be no mean over tokens.
        """
        router, coefficient = router_loss_of(outputs), self.router_coefficient
        if router is None or not isinstance(loss, torch.Tensor) or not router.requires_grad:
            return
        if router.grad_fn is not loss.grad_fn:
            (found,) = torch.autograd.grad(loss, router, retain_graph=True, allow_unused=True)
            added = 0.0 if found is None else float(found)
        else:  # a compiled forward, which tells nothing
            added = math.nan if coefficient is None else coefficient
        if not math.isclose(added, coefficient or 0.0, rel_tol=1e-5):
            raise RuntimeError(
                f'The model must add its load-balancing loss times {coefficient or 0:g}, as its config says, got: '
                f'times {added:g}. Set `router_aux_loss_coef` of model and config to the same, set '
                '`output_router_logits=False`, or name the term in `loss_units` (docs/errors.md#model-loss).'
            )

    def probed(self, loss: Any, outputs: Any) -> dict[str, torch.Tensor]:
        """Returns the sum of the terms of each unit that no cut may change: tokens, and samples if there are any."""
        loss = self.split(loss, outputs)
        terms = [term for _, term in self.named(loss).values()]
        if isinstance(loss, Mapping) and not (self.units or isinstance(loss, SplitLoss)) and len(terms) > 1:
            raise RuntimeError(
                f'One term of the loss must be the mean over tokens, got: {sorted(loss)}. Name the unit of each in '
                '`loss_units`, or set `check_loss=False` with an explicit `loss_tokens` (docs/errors.md#model-loss).'
            )
        if terms and self.units and 'total' in loss:
            total, summed = loss['total'].float(), _sum([term.float() for term in terms])
            if not torch.isclose(total, summed, rtol=1e-4):
                raise RuntimeError(
                    f"`loss['total']` must be the sum of the other terms, got: {total.item():.6f} where they sum to "
                    f'{summed.item():.6f}. Return each term with its weight (docs/errors.md#model-loss).'
                )
        found = {unit: self.of_unit(loss, unit) for unit in ('tokens', 'samples')}
        # Terms of rows that see each other are refused, or the check is off.
        return {unit: _sum(of_unit) for unit, of_unit in found.items() if of_unit} or {'tokens': _sum(terms)}


def router_coefficient(model: Any) -> float | None:
    """Returns what a Hugging Face model, or Composer's around it, multiplies its load-balancing loss by."""
    model = getattr(model, 'model', model)
    config: Any = getattr(model, 'config', None)
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    # Modules keep what they need of their config.
    found = (getattr(holder, name, None) for holder in (model, config) for name in COEFFICIENTS)
    return next((float(value) for value in found if isinstance(value, (int, float))), None)


def attached_zero(outputs: Any, loss: Any) -> torch.Tensor:
    """Returns a zero in the graph of the outputs, whose backward reaches every parameter with zeros.

    It hangs on the outputs rather than on the loss, because a masked sum over no tokens has NaN gradients; and on none
    of their entries, as 0 * NaN would be NaN.
    """
    losses = [term for term in tensors_in(loss) if term.requires_grad]
    # A scalar in the outputs is the loss again (HuggingFaceModel returns outputs.loss).
    inputs = [
        one for one in tensors_in(outputs) if one.requires_grad and one.dim() and all(one is not t for t in losses)
    ]
    zero = next(tensors_in(loss)).new_zeros((), dtype=torch.float32)
    return sum((torch.atleast_1d(one)[:0].sum().to(zero) for one in inputs or losses), zero)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Gives all tensors in a nest of mappings and sequences."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, Sequence)) and not isinstance(value, str):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def _sum(terms: Collection[torch.Tensor]) -> torch.Tensor:
    """As Composer adds the terms of a loss up, in the coarsest of their dtypes."""
    coarsest = max((term.dtype for term in terms), key=lambda dtype: torch.finfo(dtype).eps)
    return torch.stack([term.float().mean() for term in terms]).sum().to(coarsest)
