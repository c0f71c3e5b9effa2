# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny mixtures of experts that add the load-balancing loss of their router to their loss."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model_types.tiny import tiny_config, tiny_model

COEFFICIENT = 0.5
"""So large that the router's loss is a large part of the loss."""


def mixture_of_experts(model_type: str = 'mixtral', **settings: Any) -> Any:
    """Returns a text model in training mode. Takes settings of its config."""
    config = tiny_config(model_type)
    config.update({'output_router_logits': True, 'router_aux_loss_coef': COEFFICIENT, **settings})
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return tiny_model(config, model_class).train()
