# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tries a model type: the Trainer's gradient of ragged rows, microbatches of 1 and 2, against one forward over all."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from composer.models import HuggingFaceModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.matrix.harness import measure, quiet
from tests.model_types.exceptions import UNTRIED, UNTRIED_TEXT
from tests.model_types.rows import Maker
from tests.model_types.tiny import tiny_config, tiny_model

MULTIMODAL = sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
TEXT = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def maker_of(model_type: str, *, text: bool = False) -> Maker:
    """A tiny model in double precision, with experts one by one, and what makes its rows."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if text else MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    class_name = names[model_type]
    model_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    config = tiny_config(model_type)
    if text and not isinstance(config, model_class.config_class):  # the text part of a multimodal type
        config = config.get_text_config()
    config.use_cache = False
    model: Any = tiny_model(config, model_class).double()
    if hasattr(model, '_can_set_experts_implementation') and model._can_set_experts_implementation():
        model.set_experts_implementation('eager')
    return Maker(model_type, model.train())


def tried(model_type: str, *, text: bool = False) -> dict[str, str]:
    """What became of each modality: ``exact``, ``refused: why``, or why it could not be tried."""
    untried = UNTRIED_TEXT if text else UNTRIED
    if model_type in untried:
        return {'': f'not tried: {untried[model_type]}'}
    with quiet():
        try:
            maker = maker_of(model_type, text=text)
        except Exception as error:
            return {'': f'not built: {_short(error)}'}
        modalities = ['text'] if text else maker.modalities() or ['text']
        return {modality: _tried(maker, modality) for modality in modalities}


def _tried(maker: Maker, modality: str) -> str:
    batch = said = None
    attempts = [(torch.float64, runs) for runs in (1, 2, 4)] + [(torch.float32, runs) for runs in (1, 2, 4)]
    for dtype, runs in attempts:  # lines or frames with words between them, where the model asks for it
        maker.model.to(dtype)
        try:
            batch = maker.batch(modality, runs=runs)
            maker.model(**batch).loss.backward()
            break
        except Exception as error:
            said = said or _short(error)
            batch = None
    maker.model.zero_grad(set_to_none=True)
    if batch is None:
        return f'not tried: its own forward says {said}'
    model = HuggingFaceModel(maker.model, shift_labels=not maker.config.is_encoder_decoder)
    outcomes = [measure(model, batch, size) for size in (1, 2)]
    worst = next((one for one in outcomes if one.kind != 'exact'), outcomes[0])
    if worst.kind == 'exact':
        return f'exact {max(one.error for one in outcomes):.0e}'
    return f'{worst.kind}: {_stripped(worst.message) or format(worst.error, ".0e")}'


def _short(error: Exception) -> str:
    return _stripped(f'{type(error).__name__}: {error}')


def _stripped(message: str) -> str:
    """The first sentence, without the numbers that differ by platform."""
    message = re.sub(r'\s+', ' ', message).strip()
    return message[:160]
