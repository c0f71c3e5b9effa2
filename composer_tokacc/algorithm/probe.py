# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Finds which labels a model's own loss averages over, by asking the model.

The rule depends on the model class and the transformers version, and a wrong one is silent. So one row is given labels
that make the rules differ (at position 0 and on an unattended position), and the rule whose mean equals the model's
own loss is the model's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from composer_tokacc.counting import IGNORE_INDEX, LOSS_RULES, labels_of, loss_mask

__all__ = ['check_packing', 'find_loss_rule', 'logits_of', 'probe_batch']

# The model computes its mean from the very logits that it returns, so rounding alone separates the two.
RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
HALF_TOLERANCE = 1e-2
# Few labels, so that one of them moves the mean.
MAX_LABELS = 4


def logits_of(outputs: Any) -> torch.Tensor | None:
    """The logits in a model's outputs, ``(rows, width, vocabulary)``, or None where it gives none."""
    logits = outputs.get('logits') if isinstance(outputs, Mapping) else getattr(outputs, 'logits', None)
    if logits is None and isinstance(outputs, torch.Tensor):
        logits = outputs
    return logits if isinstance(logits, torch.Tensor) and logits.dim() == 3 else None


def probe_batch(batch: Mapping[str, Any], logits: torch.Tensor | None = None) -> dict[str, Any]:
    """A copy of a batch with labels on its first row alone, which make the rules differ.

    Position 0 gets a label, and the row's last labelled position loses its attention but keeps its label. With
    ``logits`` these two labels are the least likely tokens, so that the rules' means lie far apart.
    """
    ids, mask = batch.get('input_ids'), batch.get('attention_mask')
    old = labels_of(batch)
    labels = torch.full_like(old, IGNORE_INDEX)
    probed = {**batch, 'labels': labels}
    labelled = [p for p in (old[0] != IGNORE_INDEX).nonzero().flatten().tolist() if p > 0][-MAX_LABELS:]
    labelled = labelled or [old.shape[1] - 1]
    labels[0, labelled] = old[0, labelled]
    for position in (0, labelled[0]):
        if labels[0, position] == IGNORE_INDEX:
            labels[0, position] = ids[0, position] if ids is not None and ids.shape == labels.shape else 0
    if mask is not None and mask.shape == labels.shape and len(labelled) > 1:
        probed['attention_mask'] = mask.clone()
        probed['attention_mask'][0, labelled[-1]] = 0
    if logits is not None:
        labels[0, 0] = logits[0, 0].argmin()
        labels[0, labelled[-1]] = logits[0, max(labelled[-1] - 1, 0)].argmin()
    return probed


def rule_means(logits: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, float]:
    """Mean cross-entropy under every rule."""
    labels = labels_of(batch).to(logits.device)
    means = {}
    for rule in LOSS_RULES:
        counted = loss_mask({**batch, 'labels': labels}, rule).to(logits.device)
        predicted = logits if rule == 'unshifted' else logits[:, :-1]
        if rule != 'unshifted':
            labels_of_rule, counted = labels[:, 1:], counted[:, 1:]
        else:
            labels_of_rule = labels
        means[rule] = F.cross_entropy(predicted[counted].float(), labels_of_rule[counted]).item()
    return means


def find_loss_rule(
    forward: Callable[[dict[str, Any]], Any],
    loss: Callable[[Any, dict[str, Any]], torch.Tensor],
    batch: Mapping[str, Any],
    *,
    loss_tokens: str = 'auto',
    modules: Sequence[torch.nn.Module] = (),
) -> str | None:
    """Finds, or confirms, the rule by which the model averages its loss.

    Args:
        forward: The model's forward, as the trainer calls it.
        loss: The model's own loss of outputs and batch, the token-averaged term.
        batch: One row, on the model's device.
        loss_tokens: ``'auto'``, or the rule that must be confirmed.
        modules: Modules put into eval mode meanwhile, so that no statistics or dropout are touched.

    Returns:
        str | None: The rule; None where the model gives no logits, so that nothing could be checked.

    Raises:
        RuntimeError: If no rule's mean, or not that of the given rule, equals the model's loss.
    """
    with torch.no_grad(), _undisturbed(modules):
        # Labels do not change the logits, so the first forward may choose the labels of the second. The mask does.
        first = probe_batch(batch)
        logits = logits_of(forward(dict(first)))
        if logits is None:
            return None
        _check_width(logits, first)
        probed = probe_batch(batch, logits)
        outputs = forward(dict(probed))
        own = loss(outputs, probed)
        model_loss, tolerance = own.float().mean().item(), RELATIVE_TOLERANCE.get(own.dtype, HALF_TOLERANCE)
        logits = logits_of(outputs)
        assert logits is not None, 'the same model gave logits a moment ago'
        means = rule_means(logits, probed)
    matching = [rule for rule in LOSS_RULES if math.isclose(means[rule], model_loss, rel_tol=tolerance)]
    matching.sort(key=lambda rule: abs(means[rule] - model_loss))
    numbers = ', '.join(f'{rule} {mean:.6f}' for rule, mean in means.items())
    if not matching:
        raise RuntimeError(
            f"The model's own loss must be the mean over its loss-generating tokens, got: {model_loss:.6f} where the "
            f'rules give {numbers}. The model changes labels inside forward, adds a term (name it in `loss_units`), or '
            'does not average over tokens. `check_loss=False` with an explicit `loss_tokens` skips this check.'
        )
    if loss_tokens == 'auto':
        # Rules that agree even here (no attention mask) count the same, and the sort is stable.
        return matching[0]
    if loss_tokens not in matching:
        raise RuntimeError(
            f'`loss_tokens` must be the rule by which the model averages its loss, got: {loss_tokens!r}, whose mean is '
            f"{means[loss_tokens]:.6f}; the model's own is {model_loss:.6f} ({numbers}). "
            f'Set `loss_tokens={matching[0]!r}`.'
        )
    return loss_tokens


def check_packing(
    forward: Callable[[dict[str, Any]], Any],
    loss: Callable[[Any, dict[str, Any]], torch.Tensor],
    padded: dict[str, Any],
    packed: dict[str, Any],
    *,
    modules: Sequence[torch.nn.Module] = (),
) -> None:
    """Holds the loss of packed rows to that of the same rows padded: attention that leaks shows nowhere else.

    Raises:
        RuntimeError: If they differ, or the model takes no packed rows.
    """
    with torch.no_grad(), _undisturbed(modules):
        own = loss(forward(padded), padded)
        try:
            found = loss(forward(packed), packed)
        except (RuntimeError, ValueError, IndexError) as error:
            raise RuntimeError(f'The model must take packed rows, got: {error}. Set `packing=False`.') from error
    tolerance = RELATIVE_TOLERANCE.get(own.dtype, HALF_TOLERANCE)
    if not math.isclose(own.item(), found.item(), rel_tol=tolerance):
        raise RuntimeError(
            f'The model must tell packed documents apart, got: a loss of {found.item():.6f} packed and '
            f'{own.item():.6f} padded, so attention leaks from one document to the next. Set `packing=False`, or use '
            'attn_implementation flash_attention_2 or sdpa with a transformers release that supports packing.'
        )


def _check_width(logits: torch.Tensor, batch: Mapping[str, Any]) -> None:
    labels = labels_of(batch)
    if logits.shape[:2] != labels.shape:
        raise RuntimeError(
            f"The model's logits must be as wide as the labels, got: {tuple(logits.shape[:2])} for labels of "
            f'{tuple(labels.shape)}. The model expands or truncates the sequence inside forward, so a count of the '
            "batch's labels is not its own. Expand image placeholders in the processor instead (transformers >= 4.51)."
        )


@contextlib.contextmanager
def _undisturbed(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Eval mode and a forked random state: the run is the same with and without the probe."""
    training = [(module, module.training) for top in modules for module in top.modules()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            for module, _ in training:
                module.training = False
            yield
    finally:
        for module, was_training in training:
            module.training = was_training
