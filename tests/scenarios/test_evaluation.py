# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Figures of held-out rows do not depend on how they are batched or how many ranks share them."""

from __future__ import annotations

import copy

import pytest
import torch
from composer import Evaluator, Trainer
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from torchmetrics import Metric

from composer_tokacc import BatchLayout, token_data_spec
from tests.ranks.evaluation import DEVICE_BATCHES, held_out, reference
from tests.support.families import FAMILIES
from tests.support.launch import launch_json


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_metrics_depend_on_no_cut(ranks):
    results = launch_json('tests/ranks/evaluation.py', ranks=ranks)
    assert len(results) == 2 * len(DEVICE_BATCHES)
    for name, case in results.items():
        assert case['LanguageCrossEntropy'] < 1e-6, (name, case)
        assert case['MaskedAccuracy'] < 1e-6, (name, case)
    # The rows show a difference where there is one.
    assert max(case['mean of batches'] for case in results.values()) > 1e-2


class OwnLoss(Metric):
    """Token mean of the model's own loss, for models whose logits Composer does not take out of the answer."""

    needs_batch = True

    def __init__(self):
        super().__init__()
        self.add_state('total', default=torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx='sum')
        self.add_state('count', default=torch.tensor(0), dist_reduce_fx='sum')

    def update(self, batch, outputs, labels):
        count = int((batch['labels'][:, 1:] != -100).sum())
        if count:
            self.total += outputs.loss.double() * count
        self.count += count

    def compute(self):
        return self.total / self.count


@pytest.mark.parametrize('microbatch', [1, 2, 5])
def test_labels_stay_in_evaluation(microbatch):
    case = FAMILIES['llava']()
    layout = BatchLayout.for_model(case.model)
    rows = held_out(case, 7)

    class KeepsLabels(HuggingFaceModel):
        """As Composer's, which moves the labels it took out itself, and has taken none here."""

        def update_metric(self, batch, outputs, metric):
            metric.update(batch, outputs, None)
            return {}

    wrapped = KeepsLabels(copy.deepcopy(case.model), shift_labels=True, use_logits=False, eval_metrics=[OwnLoss()])
    loader = DataLoader(rows, batch_size=5, collate_fn=layout.concat)
    spec = token_data_spec(loader, layout=layout)
    evaluator = Evaluator(label='eval', dataloader=spec, device_eval_microbatch_size=microbatch)
    trainer = Trainer(model=wrapped, eval_dataloader=evaluator, device='cpu', progress_bar=False)
    trainer.eval()
    mean_loss = float(trainer.state.eval_metrics['eval']['OwnLoss'].compute())
    assert mean_loss == pytest.approx(reference(case, rows)['LanguageCrossEntropy'], rel=1e-6)
