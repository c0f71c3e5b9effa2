# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Models and loss terms that couple the rows of a microbatch are refused, or accepted on request."""

from __future__ import annotations

import pytest
import torch

from tests.support.text import ragged_batch, text_model
from tests.support.training import fit, hugging_face


def with_batch_norm():
    model = text_model()
    model.extra = torch.nn.BatchNorm1d(4)
    return model


@pytest.mark.parametrize('regroup', [True, False])
def test_batch_norm_in_training(regroup):
    with pytest.raises(RuntimeError, match=r"1 BatchNorm in training mode, such as 'model\.extra'.*eval mode"):
        fit(with_batch_norm(), ragged_batch(), regroup=regroup)


def test_batch_norm_is_accepted_on_request():
    model = with_batch_norm()
    assert fit(model, ragged_batch(), loss_tokens='causal', check_loss=False).gradients


@pytest.mark.parametrize('unit', ['coupled_samples', 'microbatches'])
def test_terms_that_couple_rows_refuse_regrouping(unit):
    model = hugging_face(text_model())
    plain_loss = model.loss
    model.loss = lambda outputs, batch: {'lm': plain_loss(outputs, batch), 'pairs': outputs['logits'].mean()}
    with pytest.raises(RuntimeError, match=r"the terms \['pairs'\] of `loss_units`"):
        fit(model, ragged_batch(), loss_units={'lm': 'tokens', 'pairs': unit})
