# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The terms of a loss, each with its unit.

A model's loss is a tensor, a sequence of tensors, or a dict of tensors, which are its terms. For a dict of several
terms, ``loss_units`` names the unit of each. A term is a mean over its unit, for example over tokens or over samples.
So the unit tells how the value in a microbatch counts in the step. In all other losses each tensor is a mean over
tokens.

A dict may also have a ``'total'``, which must be the sum of the terms, as in ``{'lm': a, 'image': b, 'total': a + b}``.
It is left out of the loss that Composer differentiates, because Composer sums up the terms itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.checks.logits import TINY, logits_of, router_loss_of, token_losses_at
from composer_tokacc.checks.step import check_total_of_loss
from composer_tokacc.graph import edge_of, empty_sum, gradient_of, nodes_of_graph, tensors_in
from composer_tokacc.model_structure import transformers_model
from composer_tokacc.refusals import NotExactError

LOSS_UNITS = ('tokens', 'samples', 'coupled_samples', 'microbatches')
"""The units of terms. In this order they stand for a mean over loss tokens; a mean over samples; a mean over samples
that see each other, as in a contrastive loss; and a statistic of a whole microbatch, such as a router's load-balancing
loss."""
COEFFICIENTS = ('router_aux_loss_coef', 'aux_loss_coef')
"""Names that configs use for the factor of a router's load-balancing loss."""


class Term(NamedTuple):
    """A term of a loss."""

    name: str
    """Its key in a dict."""
    unit: str
    """One of :data:`LOSS_UNITS`."""
    value: Tensor


class SplitLoss(dict):
    """The two terms of the loss of a mixture of experts. A Hugging Face model returns only their sum."""

    units: ClassVar = {'tokens': 'tokens', 'router': 'microbatches'}
    """The unit of each term, by its name."""


class LossTerms:
    """Takes a loss apart, changes its terms by their units, and puts it together again.

    Args:
        loss_units: The unit of each term of a dict loss. None: the loss is one mean over tokens, or a sequence of them;
            a dict of several terms is refused.
        router_coefficient: The model multiplies its router's load-balancing loss by this number and adds the product
            to its loss. None: the model names no such number, or ``loss_units`` is given.
    """

    def __init__(self, loss_units: Mapping[str, str] | None, router_coefficient: float | None = None) -> None:
        self.units = dict(loss_units or {})
        """The unit of each term in ``loss_units``. Empty without it."""
        self.are_over_tokens = set(self.units.values()) <= {'tokens'}
        """Whether all terms in ``loss_units`` are means over tokens."""
        self.router_coefficient = router_coefficient

    @property
    def coupled_terms(self) -> list[str]:
        """Names of the terms in ``loss_units`` that depend on which rows share a microbatch."""
        coupling_units = ('coupled_samples', 'microbatches')
        return [name for name, unit in self.units.items() if unit in coupling_units]

    def terms_of(self, loss: Any) -> list[Term]:
        """Returns the terms of a loss, without its total.

        Raises:
            RuntimeError: If the loss is neither a tensor nor a sequence or a dict of tensors, or if ``loss_units`` does
                not name every term.
        """
        if self.units and not isinstance(loss, Mapping):
            raise NotExactError(
                f'`loss_units` must go with a dict loss, got: a loss of type {type(loss).__name__}. Return a dict '
                f'with the terms {sorted(self.units)}, or drop `loss_units` (docs/errors.md#model-loss).'
            )
        if isinstance(loss, Tensor):
            return [Term('loss', 'tokens', loss)]
        if not isinstance(loss, (Mapping, list, tuple)) or not loss:
            raise NotExactError(
                f"The model's loss must be a tensor, or a dict of tensors, got: {loss!r}. Let the model compute a loss "
                'in every microbatch, even without labels, and return it without `.item()` (docs/errors.md#model-loss).'
            )
        values: Mapping[str, Any]
        if isinstance(loss, Mapping):
            values = loss
        else:
            values = {f'loss{place}': value for place, value in enumerate(loss)}
        units = self._units_of(loss, values.keys())
        terms = []
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise NotExactError(
                    f'`loss[{name!r}]` must be a tensor, got: {value!r}. Leave out what a microbatch does not have.'
                )
            if name == 'total' and len(values) > 1:  # an only term may have this name, too
                continue
            if name not in units:
                raise NotExactError(
                    f'`loss_units` must name every term of the loss, got: no unit for {name!r}. Add '
                    f"`'{name}': 'tokens'`, 'samples', 'coupled_samples' or 'microbatches' (docs/errors.md#model-loss)."
                )
            terms.append(Term(name, units[name], value))
        return terms

    def _units_of(self, loss: Any, names: Collection[str]) -> Mapping[str, str]:
        """Returns the unit of each term of a loss with these names. A dict may have terms whose unit is not known."""
        if isinstance(loss, SplitLoss):
            return loss.units
        needs_units = isinstance(loss, Mapping) and len(names) > 1
        if self.units or needs_units:
            return self.units
        # A sequence, or a single term, without `loss_units`.
        return dict.fromkeys(names, 'tokens')

    def of_unit(self, loss: Any, unit: str) -> list[Tensor]:
        """Returns the values of all terms with this unit."""
        return [term.value for term in self.terms_of(loss) if term.unit == unit]

    def map_terms(self, loss: Any, new_value: Callable[[Term], Tensor]) -> Any:
        """Returns the loss with the value that ``new_value`` returns for each term, and without its total.

        A sequence becomes a tuple.
        """
        values = {term.name: new_value(term) for term in self.terms_of(loss)}
        if isinstance(loss, Tensor):
            return values['loss']
        if isinstance(loss, SplitLoss):
            return SplitLoss(values)
        if isinstance(loss, Mapping):
            return values
        return tuple(values.values())

    def scaled(
        self,
        loss: Any,
        scales: Mapping[str, float],
        observe: Callable[[Tensor], None],
        excess: float = 1.0,
    ) -> Any:
        """Returns the loss with each term multiplied by the factor of its unit.

        Composer adds up the products, multiplies the sum by its own weight, and calls the backward. So the gradient
        with respect to each product is Composer's weight.

        Args:
            loss: The loss of a microbatch.
            scales: The factor of the terms of each unit.
            observe: The backward calls it with the gradient with respect to one of the products, so that the step check
                can compare Composer's weight with the one that we assumed.
            excess: The gradient with respect to each product is divided by this number, because the reduction over the
                ranks will make it too large, see :func:`.excess_of_reduction`. The values of the products do not
                change, because Composer logs them.
        """

        def times_scale(term: Term) -> Tensor:
            # A new tensor, because Composer multiplies `loss['total']` in place, and a dict may have this term alone.
            return term.value.float() * scales[term.unit]

        scaled = self.map_terms(loss, times_scale)
        if self.units:
            scaled = self._with_all_terms(scaled)
        with_gradient = [value for value in tensors_in(scaled) if value.requires_grad]
        # Hooks of a tensor run in the order in which they are registered. So `observe` sees Composer's weight before it
        # is divided.
        if with_gradient:
            with_gradient[0].register_hook(observe)
        if excess != 1.0:
            for value in with_gradient:
                value.register_hook(lambda gradient: gradient / excess)
        return scaled

    def with_weighted_values(
        self,
        loss: Any,
        logits: Tensor,
        targets: Tensor,
        weights: Tensor,
        *,
        factor: float | None,
    ) -> Any:
        """Returns the loss with the value that each mean over tokens has if its tokens are weighted.

        Gradients stay the same, because only a number is added to each mean: what the weights add to the mean of the
        cross-entropies, times a factor. For example, two tokens have the losses 1 and 3 and the relative weights 0.5
        and 1.5. Their mean is 2, their weighted mean 2.5. If the loss is 4, twice the mean of the cross-entropies, its
        factor is 2, and it becomes 5.

        A single mean over tokens has the given factor. If there are several, the factor of each is its value divided by
        the mean of the cross-entropies. It is not taken from gradients by the logits, because such a backward would run
        hooks of FSDP, which communicate, and not on all ranks.

        Args:
            loss: The loss of a microbatch, in which all tokens weigh the same.
            logits: Its logits, ``(rows, width, vocabulary)``.
            targets: The token that each position predicts, ``(rows, width)``, see :meth:`.LossRule.targets`.
            weights: The weight of each token, relative to their mean, at the position that predicts it,
                ``(rows, width)``.
            factor: The sum of all means over tokens, divided by the mean of the cross-entropies, as the first-batch
                check has found it. None: it is not known, and taken as 1.
        """
        plain_mean, change_of_mean = _weighted_change(logits, targets, weights)
        means = [term for term in self.terms_of(loss) if term.unit == 'tokens']
        added: dict[str, Tensor] = {}  # by the name of the term
        if len(means) > 1 and logits.grad_fn is not None:
            relative_change = change_of_mean / plain_mean.clamp(min=TINY)
            for mean in means:
                if mean.value.requires_grad:  # not a constant, such as an accuracy
                    added[mean.name] = mean.value.detach().float() * relative_change
        elif means:
            # There is only one, or no graph tells which of them are constants. Then the first one gets the change of
            # their sum.
            added[means[0].name] = change_of_mean * (1.0 if factor is None else factor)
        return self.map_terms(loss, lambda term: term.value + added.get(term.name, 0.0))

    def _with_all_terms(self, loss: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the loss with all terms of ``loss_units``, in their order. A term that the microbatch lacks is 0.

        Composer sums each term over the ranks by its place in the dict, so all ranks need the same terms.
        """
        zero = next(iter(loss.values())).new_zeros(())
        return {name: loss.get(name, zero) for name in self.units}

    def split(self, loss: Any, outputs: Any) -> Any:
        """Splits the loss of a mixture of experts into the mean over tokens and the load-balancing loss.

        They need different factors: the load-balancing loss has the same weight in every microbatch, however many
        tokens the microbatch has. Other losses are returned as they are.
        """
        router = router_loss_of(outputs)
        if router is None or self.router_coefficient is None or not isinstance(loss, Tensor):
            return loss
        router = self.router_coefficient * router.to(loss.device)
        return SplitLoss(tokens=loss - router, router=router)

    def check_coefficient(self, loss: Any, outputs: Any) -> None:
        """Raises RuntimeError unless the model adds its load-balancing loss times the coefficient to its loss.

        Without a coefficient, the loss must not depend on the load-balancing loss.

        With a wrong coefficient, :meth:`split` would leave a part of the load-balancing loss in the mean over tokens.
        The coefficient is measured as the gradient of the loss by the load-balancing loss. Their values would not show
        it, because a small coefficient changes the loss by less than round-off.
        """
        router = router_loss_of(outputs)
        # If the load-balancing loss is not made of parameters, it changes no weight, and has no gradient to measure.
        if router is None or not isinstance(loss, Tensor) or router.grad_fn is None:
            return
        node_of_router, _ = edge_of(router)
        node_of_loss, _ = edge_of(loss)
        if node_of_router is node_of_loss:
            # In a compiled forward one node of the graph computes both losses, and there is no gradient between them.
            # So the coefficient of the config is trusted.
            if self.router_coefficient is None:
                raise self._wrong_coefficient(math.nan)
            return
        # DDP may return a copy of the load-balancing loss, and `loss` was made before the copy. gradient_of() follows
        # the graph back through copies.
        gradient = gradient_of(loss.mean(), router)
        if gradient is None:  # the loss does not depend on the load-balancing loss
            gradient = router.new_zeros(())
        measured = float(gradient)
        expected = self.router_coefficient or 0.0
        # Autograd rounds the coefficient to the dtype of the load-balancing loss. If the outputs hold a copy of that
        # loss, it may round to the dtype before the copy, too. The less precise dtype sets the tolerance.
        precision = max(torch.finfo(router.dtype).eps, torch.finfo(gradient.dtype).eps)
        if not math.isclose(measured, expected, rel_tol=1e-5 + precision):
            raise self._wrong_coefficient(measured)

    def _wrong_coefficient(self, measured: float) -> NotExactError:
        """Returns the error of a model that adds its load-balancing loss with another coefficient; NaN: unknown."""
        expected = self.router_coefficient or 0.0
        return NotExactError(
            f'The model must add its load-balancing loss times {expected:g}, as its config says, got: '
            f'times {measured:g}. Set `router_aux_loss_coef` of model and config to the same, set '
            '`output_router_logits=False`, or name the term in `loss_units` (docs/errors.md#model-loss).'
        )

    def losses_to_compare(self, loss: Any, outputs: Any) -> dict[str, Tensor]:
        """Returns the losses that the first-batch check compares between cuts of a batch.

        ``'tokens'`` is the sum of all terms that are means over tokens, and ``'samples'`` of all that are means over
        samples. A unit without terms is left out. So are terms that couple rows, because a cut may change them. If
        nothing remains, ``'tokens'`` is the sum of all terms, because the check needs a loss. Raises RuntimeError if
        the loss has a total that is not the sum of its terms.
        """
        loss = self.split(loss, outputs)
        total_error = self.total_error(loss)
        if total_error is not None:
            check_total_of_loss(total_error.item())
        sums = {}
        for unit in ('tokens', 'samples'):
            terms_of_unit = self.of_unit(loss, unit)
            if terms_of_unit:
                sums[unit] = _sum_in_least_precise_dtype(terms_of_unit)
        if not sums:
            all_terms = [term.value for term in self.terms_of(loss)]
            sums['tokens'] = _sum_in_least_precise_dtype(all_terms)
        return sums

    def total_error(self, loss: Any) -> Tensor | None:
        """Returns how far the total of a dict loss is from the sum of its terms, in units of the round-off, ``()``.

        Up to 1, round-off explains the difference. NaN, which the checks do not refuse, if a term or the total is NaN,
        if a term is infinite, or if all are 0. None: the loss has no total. Does not wait for the device.
        """
        if not isinstance(loss, Mapping) or 'total' not in loss:
            return None
        values = [term.value.detach() for term in self.terms_of(loss)]
        total = loss['total'].detach()  # terms_of() has refused a total that is no tensor
        terms = torch.stack([value.float().mean() for value in values])
        # Terms or total may be rounded. A total in bfloat16 is rounded after each addition. The round-off is relative
        # to the sizes of the terms, because terms may nearly cancel each other.
        precision = max(torch.finfo(value.dtype).eps for value in [total, *values])
        round_off = (1e-4 + len(terms) * precision) * terms.abs().sum()
        return (total.float().mean() - terms.sum()).abs() / round_off


def router_coefficient(model: torch.nn.Module) -> float | None:
    """Returns the factor of a model's load-balancing loss; None if the model names none.

    ``model`` is a ComposerModel. If it wraps a Hugging Face model, an attribute of that model counts before its config,
    because the model copies values of the config when it is built.
    """
    model = transformers_model(model)
    config: Any = getattr(model, 'config', None)
    if hasattr(config, 'get_text_config'):
        config = config.get_text_config()
    for holder in (model, config):
        for name in COEFFICIENTS:
            coefficient = getattr(holder, name, None)
            # A schedule may set a number of numpy, or a tensor.
            if isinstance(coefficient, Tensor) and coefficient.numel() == 1:
                return coefficient.item()
            if isinstance(coefficient, Real):
                return float(coefficient)
    return None


def attached_zero(outputs: Any, loss: Any) -> Tensor:
    """Returns a zero that replaces a mean over no tokens, which is NaN.

    The backward of the zero gives a gradient of 0 to the parameters that the backward of the loss would reach. For this
    the zero is made of the first of these that exists:

    1. The outputs of the model that the loss is made of. Other outputs, such as a pooled image, might reach parameters
       that no other microbatch reaches. Under FSDP this rank would then reduce more gradients than the others, and all
       would wait forever.
    2. All outputs with a gradient.
    3. The loss itself. This comes last, because the gradient in its graph may be NaN: the mean divides by 0.
    """
    losses_with_graph = [value for value in tensors_in(loss) if value.requires_grad]
    outputs_with_graph = []
    for output in tensors_in(outputs):
        # The outputs of a Hugging Face model contain its loss, and other losses, which are scalars.
        is_loss = output.dim() == 0 or any(output is value for value in losses_with_graph)
        if output.requires_grad and not is_loss:
            outputs_with_graph.append(output)
    outputs_of_loss = _outputs_of_loss(outputs_with_graph, losses_with_graph, logits_of(outputs))
    sources = outputs_of_loss or outputs_with_graph or losses_with_graph
    first_loss = tensors_in(loss)[0]
    zero = first_loss.new_zeros((), dtype=torch.float32)
    for source in sources:
        zero = zero + empty_sum(source).to(zero)
    return zero


def _outputs_of_loss(
    outputs: Sequence[Tensor],
    losses: Sequence[Tensor],
    logits: Tensor | None,
) -> Sequence[Tensor]:
    """Returns the outputs that the losses are made of, and the logits. Without losses, it is not known: returns all.

    The logits always count, because a loss may leave them out if there is no label.
    """
    if not losses:
        return outputs
    nodes = set(nodes_of_graph(losses))
    outputs_of_loss = []
    for output in outputs:
        node, _ = edge_of(output)
        if output is logits or node in nodes:
            outputs_of_loss.append(output)
    return outputs_of_loss


def _weighted_change(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean of the cross-entropies, and what relative weights of the tokens add to it. Makes no graph."""
    positions = torch.arange(targets.numel(), device=logits.device)
    losses = token_losses_at(logits, positions, targets.flatten())  # 0 at positions without a target
    num_tokens = (targets != IGNORE_INDEX).sum()
    changes = losses.view_as(weights) * (weights - 1)
    return losses.sum() / num_tokens, changes.sum() / num_tokens


def sum_of_means(terms: Iterable[Tensor]) -> Tensor:
    """Returns the sum of the means of some terms, float32 ``()``. A term may be a tensor of several elements."""
    means = [term.float().mean() for term in terms]
    return torch.stack(means).sum()


def _sum_in_least_precise_dtype(terms: Collection[Tensor]) -> Tensor:
    """Returns the sum of the means of some terms, in their least precise dtype.

    The dtype tells the first-batch check how much round-off to allow.
    """
    dtypes = [term.dtype for term in terms]
    least_precise = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    return sum_of_means(terms).to(least_precise)
