# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tries a model type: gradients of ragged rows in microbatches of 1 to 3 rows, compared with one forward over all."""

from __future__ import annotations

import copy
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
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from composer_tokacc import BatchLayout
from composer_tokacc.algorithm.setup import RunContext
from composer_tokacc.counting import LossRule
from composer_tokacc.labelled import LabelSelector
from tests.matrix.harness import Outcome, measure, measure_steps, plain_gradients, quiet
from tests.matrix.subjects import SUBJECTS
from tests.model_types.exceptions import NEWER, THINKERS, UNTRIED, UNTRIED_TEXT
from tests.model_types.rows import Maker
from tests.model_types.table import kind_of, results
from tests.model_types.tiny import tiny_config, tiny_model
from tests.support.training import largest, relative_error

MOST_ROUND_OFF = 1e-4
"""The error of Gemma 4 in float32 is 5e-5, compared with float64. A wrong cut, which moves positions, makes 1e-2."""
CLASSES: dict[str, Any] = {
    'multimodal': MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    'text': MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    'masked': {},
    'seq2seq': {},
}
"""Classes of models by kind and model type."""
for _model_type, _class_name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items():
    if _model_type not in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        CLASSES['seq2seq'][_model_type] = _class_name
for _model_type, _class_name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.items():
    if _model_type not in CLASSES['seq2seq']:  # BART has one class for both
        CLASSES['masked'][_model_type] = _class_name
PACKED = {subject.model_type for subject in SUBJECTS.values()}
"""Types whose rows are also packed: those with random batches in ``tests/matrix``."""


def maker_of(model_type: str, kind: str = 'multimodal', **settings: Any) -> Maker:
    """Returns the maker of rows for a model type. Its tiny model is in float64 and runs its experts one by one.

    Args:
        model_type: The model type.
        kind: A key of :data:`CLASSES`.
        settings: Settings of the config of the text model.
    """
    model_type = THINKERS.get(model_type, model_type)
    class_names = CLASSES[kind][model_type]
    class_name = class_names if isinstance(class_names, str) else class_names[0]
    model_class = getattr(transformers, class_name)
    config = tiny_config(model_type)
    is_text_of_multimodal_type = kind == 'text' and not isinstance(config, model_class.config_class)
    if is_text_of_multimodal_type:
        config = config.get_text_config()
    config.use_cache = False
    if kind == 'masked':
        config.is_decoder = False  # the config of Reformer is made for text
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
        modalities = ['text']
        if kind == 'multimodal' and maker.modalities():
            modalities = maker.modalities()
        outcomes: dict[str, str] = {}
        with watched_logits() as reasons:
            for modality in modalities:
                outcomes |= _tried(maker, modality)
        if reasons:
            first_reason = next(filter(None, reasons), '')
            outcomes['logits'] = f'all logits: {first_reason}' if first_reason else 'at labels'
        return outcomes


def assert_as_the_table_says(model_type: str, kind: str) -> None:
    """Tries the type again. Compares outcomes with ``results.json``, without figures and reasons."""
    outcomes = tried(model_type, kind)
    if NEWER in outcomes.get('', ''):
        pytest.skip(NEWER)
    outcomes_in_table = results()[kind][model_type]
    assert _kinds_of(outcomes) == _kinds_of(outcomes_in_table), outcomes


def _kinds_of(outcomes: dict[str, str]) -> dict[str, str]:
    """Returns the kind of each outcome, by modality."""
    return {modality: kind_of(outcome) for modality, outcome in outcomes.items()}


@contextmanager
def watched_logits() -> Iterator[list[str]]:
    """Yields a list that gets, for each forward of training, why it computed all logits; '' if only at labels."""
    reasons: list[str] = []
    original_begin_forward = LabelSelector.begin_forward
    original_accept_all_logits = RunContext._accept_all_logits

    def begin_forward(selector: LabelSelector, rule: LossRule, num_labels: int, num_positions: int) -> None:
        reasons.append('')
        original_begin_forward(selector, rule, num_labels, num_positions)

    def accept_all_logits(run: RunContext, why: str) -> None:
        reasons.append(_stripped(why))
        original_accept_all_logits(run, why)

    with (
        patch.object(LabelSelector, 'begin_forward', begin_forward),
        patch.object(RunContext, '_accept_all_logits', accept_all_logits),
    ):
        yield reasons


def _tried(maker: Maker, modality: str) -> dict[str, str]:
    """Returns the outcomes of a modality in double precision, or in float32 if they are not exact there.

    Some models take no doubles, or cast inside.
    """
    outcomes: dict[str, str] = {}
    weights = copy.deepcopy(maker.model.state_dict())
    for dtype in (torch.float64, torch.float32):
        maker.model.to(dtype)
        # Gradients of NaN make weights of NaN, even if the learning rate is 0.
        maker.model.load_state_dict(weights)
        for name, outcome in _measured(maker, modality).items():
            previous = outcomes.get(name, 'not tried')
            is_better = outcome.startswith('exact') and not previous.startswith('exact')
            if is_better or previous.startswith('not tried'):
                outcomes[name] = outcome
        if all(outcome.startswith('exact') for outcome in outcomes.values()):
            break
    return outcomes


def _measured(maker: Maker, modality: str) -> dict[str, str]:
    """Returns the outcomes of a modality in the precision of the model."""
    batches: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    for runs in (1, 2, 4):  # some models ask for lines or frames with words between them
        batches, failures = _batches(maker, modality, runs)
        texts = texts or failures
        if batches:
            break

    maker.model.zero_grad(set_to_none=True)
    model = HuggingFaceModel(maker.model, shift_labels=not maker.config.is_encoder_decoder)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in batches}
    for microbatch_size in (1, 2, 3):
        pending = sorted(batches, reverse=microbatch_size == 2)
        while pending:  # a run ends with the first batch that is refused
            pending_batches = [batches[name] for name in pending]
            for outcome in measure_steps(model, pending_batches, microbatch_size):
                name = pending.pop(0)
                outcomes[name].append(outcome)
        if maker.model_type in PACKED and modality in batches:
            outcome = measure(model, batches[modality], microbatch_size, packing=True)
            outcomes.setdefault(f'{modality}, packed', []).append(outcome)

    for name, outcomes_of_sizes in outcomes.items():
        batch = batches[name.removesuffix(', packed')]
        texts[name] = _text_of(model, batch, outcomes_of_sizes)
    return texts


def _batches(maker: Maker, modality: str, runs: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns a batch padded on the right, and one padded on the left if the type has rows to pad.

    Returns also why a batch is left out, if the model's own forward does not take it.
    """
    batches = {}
    failures = {}
    for maker.side, name in (('right', modality), ('left', f'{modality}, padded left')):
        try:
            batch = maker.batch(modality, runs=runs)
            has_padding = not bool(batch.get('attention_mask', torch.ones(1)).all())
            if maker.side == 'left' and not has_padding:
                continue
            if not maker.settings.robot:
                loss = maker.model(**batch).loss
                if loss is not None:  # without a loss it is up to the package to refuse the batch
                    loss.backward()
            batches[name] = batch
        except Exception as error:
            failures[name] = f'not tried: its own forward says {_short(error)}'
    maker.side = 'right'
    return batches, failures


def _text_of(model: HuggingFaceModel, batch: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Returns the worst outcome. A wrong one is exact if rounding alone makes such an error."""
    worst = next((outcome for outcome in outcomes if outcome.kind != 'exact'), outcomes[0])
    error = largest(outcome.error for outcome in outcomes)
    if worst.kind == 'exact':
        return f'exact {error:.0e}'
    if worst.kind == 'wrong':
        limit = min(2 * _round_off(model, batch), MOST_ROUND_OFF)
        if error < limit:
            return f'exact {error:.0e}'
    reason = _stripped(worst.message) or f'{worst.error:.0e}'
    return f'{worst.kind}: {reason}'


def _round_off(model: HuggingFaceModel, batch: dict[str, Any]) -> float:
    """Returns how much the gradient changes if the rows are in another order and further to the right."""
    layout = BatchLayout.for_model(model)
    reversed_rows = range(layout.num_rows(batch))[::-1]
    moved_batch = layout.select(batch, reversed_rows)
    is_padded_left = not bool(batch['attention_mask'][:, 0].all())
    if is_padded_left:
        width = moved_batch['labels'].shape[1]
        padded_row = int(moved_batch['attention_mask'][:, 0].argmin())
        for key, value in moved_batch.items():
            if isinstance(value, torch.Tensor) and value.shape[1:] == (width,):
                pad = -100 if key == 'labels' else int(value[padded_row, 0])
                moved_batch[key] = F.pad(value, (8, 0), value=pad)
    gradients_of_moved = plain_gradients(model, moved_batch)
    gradients = plain_gradients(model, batch)
    return relative_error(gradients_of_moved, gradients)


def _short(error: Exception) -> str:
    """Returns the class of an error and the beginning of its message."""
    return _stripped(f'{type(error).__name__}: {error}')


def _stripped(message: str) -> str:
    """Returns the beginning of a message, in one line."""
    one_line = re.sub(r'\s+', ' ', message).strip()
    return one_line[:160]
