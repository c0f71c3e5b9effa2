# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tiny real masked language models, and padded batches of rows with masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from tests.model_types.tiny import float32_model, tiny_config
from tests.support.text import VOCABULARY, text_rows

PAD = 1
MASK = 4
ENDS = {'bos_token_id': 2, 'eos_token_id': 3, 'cls_token_id': 2, 'sep_token_id': 3}
ESM = {'mask_token_id': MASK, 'token_dropout': True}
# Name -> class and settings of the config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    'bert': ('Bert', {}),
    # The position of its first token is the id of padding plus 1.
    'roberta': ('Roberta', {}),
    # One layer attends to everything, the next one to two tokens on each side.
    'modernbert': ('ModernBert', {'local_attention': 4, 'global_attn_every_n_layers': 2, **ENDS}),
    # Its embeddings look at the mask: they are scaled by the share of masked tokens in a row.
    'esm': ('Esm', {**ESM, 'position_embedding_type': 'rotary'}),
    'esm_absolute': ('Esm', {**ESM, 'position_embedding_type': 'absolute'}),
    # Its attention does not go through the interface of transformers.
    'deberta': ('DebertaV2', {'relative_attention': True, 'pos_att_type': ['p2c', 'c2p']}),
}


def masked_model(name: str, kernel: str = 'sdpa') -> Any:
    """Returns a model of :data:`MODELS` with fresh weights."""
    prefix, settings = MODELS[name]
    config_class = getattr(transformers, f'{prefix}Config')
    model_class = getattr(transformers, f'{prefix}ForMaskedLM')
    sizes = {'vocab_size': VOCABULARY, 'max_position_embeddings': 64, 'pad_token_id': PAD}
    config = tiny_config(config_class.model_type, {**sizes, **settings})
    model = float32_model(config, std=None, model_class=model_class)
    if name != 'deberta':
        model.set_attn_implementation(kernel)
    return model


def masked_batch(lengths: Sequence[int], *, side: str = 'right') -> dict[str, torch.Tensor]:
    """Returns rows of these lengths, some tokens masked. First and last tokens of rows have labels too."""
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    shape = (len(lengths), width)
    batch = {
        'input_ids': torch.full(shape, PAD),
        'attention_mask': torch.zeros(shape, dtype=torch.int64),
        'labels': torch.full(shape, -100),
    }
    texts = text_rows([(length, length) for length in lengths])
    for row, (length, text) in enumerate(zip(lengths, texts, strict=True)):
        columns = slice(width - length, width) if side == 'left' else slice(0, length)
        has_label = torch.rand(length, generator=generator) < 0.4
        has_label[-1] = True
        if row % 2 == 0:
            has_label[0] = True
        may_be_masked = torch.rand(length, generator=generator) < 0.7
        is_masked = has_label & may_be_masked
        is_masked[-1] = False  # ESM divides by the share of tokens that are not masked
        ids = text['input_ids'][0]
        batch['input_ids'][row, columns] = ids.masked_fill(is_masked, MASK)
        batch['attention_mask'][row, columns] = 1
        batch['labels'][row, columns] = ids.masked_fill(~has_label, -100)
    return batch
