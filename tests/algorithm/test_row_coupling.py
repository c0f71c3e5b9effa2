# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch

from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from tests.support.families import FAMILIES
from tests.support.text import collate, text_model, text_rows
from tests.support.training import hugging_face, loader, train

SHAPE = [(4, 2), (5, 3), (9, 7), (14, 11)]


def with_batch_norm():
    model = text_model()
    model.extra = torch.nn.BatchNorm1d(4)
    return model


def test_batch_norm_in_training_mode_refuses_regrouping():
    with pytest.raises(RuntimeError, match=r"1 BatchNorm in training mode, such as 'model\.extra'.*regroup=False"):
        train(with_batch_norm(), token_data_spec(loader(collate(text_rows(SHAPE)))), algorithms=[TokenAccumulation()])


def test_batch_norm_keeps_its_order_with_regrouping_off():
    data = token_data_spec(loader(collate(text_rows(SHAPE))), regroup=False)
    recorder, _, _ = train(with_batch_norm(), data, algorithms=[TokenAccumulation()])
    assert recorder.gradients


@pytest.mark.parametrize('unit', ['coupled_samples', 'microbatches'])
def test_terms_that_couple_rows_refuse_regrouping(unit):
    model = hugging_face(text_model())
    own = type(model).loss
    model.loss = lambda outputs, batch: {'lm': own(model, outputs, batch), 'pairs': outputs['logits'].mean()}
    algorithm = TokenAccumulation(loss_units={'lm': 'tokens', 'pairs': unit})
    with pytest.raises(RuntimeError, match=r"the terms \['pairs'\] of `loss_units`"):
        train(model, token_data_spec(loader(collate(text_rows(SHAPE)))), algorithms=[algorithm])


def test_family_whose_rows_see_each_others_images_refuses_regrouping():
    case = FAMILIES['mllama']()
    layout = BatchLayout.for_model(case.config)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    with pytest.raises(RuntimeError, match='Mllama skips cross-attention'):
        token_data_spec(loader(batch), layout=layout).split_batch(batch, 2)
    rows = token_data_spec(loader(batch), layout=layout, regroup=False).split_batch(batch, 2)
    assert sum(len(part['input_ids']) for part in rows) == len(case.rows)
