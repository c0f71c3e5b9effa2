# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tries a model type: gradients of ragged rows in microbatches of 1 to 3 rows, compared with one forward over all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from composer.models import HuggingFaceModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from composer_tokacc import BatchLayout
from composer_tokacc.algorithm.setup import RunLogits
from tests.matrix.harness import Outcome, measure, measure_steps, plain_gradients, quiet
from tests.matrix.subjects import SUBJECTS
from tests.model_types.exceptions import NEWER, THINKERS, UNTRIED, UNTRIED_TEXT
from tests.model_types.rows import Maker
from tests.model_types.table import kind_of, results
from tests.model_types.tiny import tiny_config, tiny_model
from tests.support.training import relative_error

MOST_ROUND_OFF = 1e-4
"""The error of Gemma 4 in float32 is 5e-5, compared with float64. A wrong cut, which moves positions, makes 1e-2."""
CLASSES: dict[str, Any] = {
    'multimodal': MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    'text': MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    'other': {'bert': 'BertForMaskedLM', 't5': 'T5ForConditionalGeneration'},
}
"""Classes of models by kind and model type."""
PACKED = {subject.model_type for subject in SUBJECTS.values()}
"""Types whose rows are also packed: those with random batches in ``tests/matrix``."""


def maker_of(model_type: str, kind: str = 'multimodal', **settings: Any) -> Maker:
    """Returns what makes rows for a model type, with a tiny model in float64 that runs its experts one by one.

    Args:
        model_type: The model type.
        kind: A key of :data:`CLASSES`.
        settings: Settings of the config of the text model.
    """
    model_type = THINKERS.get(model_type, model_type)
    class_name = CLASSES[kind][model_type]
    model_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    config = tiny_config(model_type)
    if kind == 'text' and not isinstance(config, model_class.config_class):  # the text part of a multimodal type
        config = config.get_text_config()
    config.use_cache = False
    for key, value in settings.items():
        setattr(config.get_text_config(), key, value)
    model: Any = tiny_model(config, model_class).double()
    if hasattr(model, '_can_set_experts_implementation') and model._can_set_experts_implementation():
        model.set_experts_implementation('eager')
    return Maker(model_type, model.train())


def tried(model_type: str, kind: str) -> dict[str, str]:
    """Returns the outcome for each modality, padded right, padded left and packed.

    An outcome is ``exact``, ``refused: why``, or why it was not tried.
    """
    untried = UNTRIED_TEXT if kind == 'text' else UNTRIED
    if model_type in untried:
        return {'': f'not tried: {untried[model_type]}'}
    with quiet():
        try:
            maker = maker_of(model_type, kind)
        except Exception as error:
            return {'': f'not built: {_short(error)}'}
        modalities = (maker.modalities() if kind == 'multimodal' else []) or ['text']
        said: dict[str, str] = {}
        with watched_logits() as reasons:
            for modality in modalities:
                said |= _tried(maker, modality)
        if reasons:
            said['logits'] = next((f'all logits: {reason}' for reason in reasons if reason), 'at labels')
        return said


def assert_as_the_table_says(model_type: str, kind: str) -> None:
    """Tries the type again. Compares outcomes with ``results.json``, without figures and reasons."""
    outcomes = tried(model_type, kind)
    if NEWER in outcomes.get('', ''):
        pytest.skip(NEWER)
    expected = results()[kind][model_type]
    expected_kinds = {modality: kind_of(outcome) for modality, outcome in expected.items()}
    kinds = {modality: kind_of(outcome) for modality, outcome in outcomes.items()}
    assert kinds == expected_kinds, outcomes


@contextmanager
def watched_logits() -> Iterator[list[str]]:
    """Yields a list that gets, for each forward of training, why it computed all logits; '' if only at labels."""
    reasons: list[str] = []
    begin_forward = RunLogits.begin_forward

    def watched(logits: RunLogits, rule: str, num_labels: int, num_positions: int) -> None:
        reasons.append('')
        begin_forward(logits, rule, num_labels, num_positions)

    compute_all = RunLogits._compute_all

    def computed_all(logits: RunLogits, why: str) -> None:
        reasons.append(_stripped(why))
        compute_all(logits, why)

    with patch.object(RunLogits, 'begin_forward', watched), patch.object(RunLogits, '_compute_all', computed_all):
        yield reasons


def _tried(maker: Maker, modality: str) -> dict[str, str]:
    """In double precision, and in float32 what is not exact there: some take no doubles, or mask with infinities."""
    said: dict[str, str] = {}
    for dtype in (torch.float64, torch.float32):
        maker.model.to(dtype)
        for name, found in _measured(maker, modality).items():
            before = said.get(name, 'not tried')
            if before.startswith('not tried') or (found.startswith('exact') and not before.startswith('exact')):
                said[name] = found
        if all(found.startswith('exact') for found in said.values()):
            break
    return said


def _measured(maker: Maker, modality: str) -> dict[str, str]:
    batches, said = {}, {}
    for runs in (1, 2, 4):  # lines or frames with words between them, where the model asks for it
        batches, failed = _batches(maker, modality, runs)
        said = said or failed
        if batches:
            break
    maker.model.zero_grad(set_to_none=True)
    model = HuggingFaceModel(maker.model, shift_labels=not maker.config.is_encoder_decoder)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in batches}
    for size in (1, 2, 3):
        pending = sorted(batches, reverse=size == 2)
        while pending:  # a run ends with its first refusal
            for outcome in measure_steps(model, [batches[name] for name in pending], size):
                outcomes[pending.pop(0)].append(outcome)
        if maker.model_type in PACKED and modality in batches:
            outcome = measure(model, batches[modality], size, packing=True)
            outcomes.setdefault(f'{modality}, packed', []).append(outcome)
    for name, found in outcomes.items():
        batch = batches[name.removesuffix(', packed')]
        said[name] = _said(model, batch, found)
    return said


def _batches(maker: Maker, modality: str, runs: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Padded on the right and, where the type has rows to pad, on the left; and which the own forward does not take."""
    batches, failed = {}, {}
    for maker.side, name in (('right', modality), ('left', f'{modality}, padded left')):
        try:
            batch = maker.batch(modality, runs=runs)
            if maker.side == 'left' and bool(batch.get('attention_mask', torch.ones(1)).all()):
                continue
            loss = None if maker.settings.get('robot') else maker.model(**batch).loss
            if loss is not None:  # or the package is asked what it makes of it
                loss.backward()
            batches[name] = batch
        except Exception as error:
            failed[name] = f'not tried: its own forward says {_short(error)}'
    maker.side = 'right'
    return batches, failed


def _said(model: HuggingFaceModel, batch: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    worst = next((one for one in outcomes if one.kind != 'exact'), outcomes[0])
    error = max(one.error for one in outcomes)
    if worst.kind == 'exact' or (worst.kind == 'wrong' and error < min(2 * _round_off(model, batch), MOST_ROUND_OFF)):
        return f'exact {error:.0e}'
    return f'{worst.kind}: {_stripped(worst.message) or format(worst.error, ".0e")}'


def _round_off(model: HuggingFaceModel, batch: dict[str, Any]) -> float:
    """How far one forward over the same rows is off, in another order and further to the right."""
    layout = BatchLayout.for_model(model)
    moved = layout.select(batch, range(layout.num_rows(batch))[::-1])
    if not bool(batch['attention_mask'][:, 0].all()):  # padded on the left
        width, padded = moved['labels'].shape[1], int(moved['attention_mask'][:, 0].argmin())
        moved = {
            key: F.pad(value, (8, 0), value=-100 if key == 'labels' else int(value[padded, 0]))
            if isinstance(value, torch.Tensor) and value.shape[1:] == (width,)
            else value
            for key, value in moved.items()
        }
    return relative_error(plain_gradients(model, moved), plain_gradients(model, batch))


def _short(error: Exception) -> str:
    return _stripped(f'{type(error).__name__}: {error}')


def _stripped(message: str) -> str:
    """The first sentence, without the numbers that differ by platform."""
    message = re.sub(r'\s+', ' ', message).strip()
    return message[:160]
