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
    for name, differences in results.items():
        assert differences['LanguageCrossEntropy'] < 1e-6, (name, differences)
        assert differences['MaskedAccuracy'] < 1e-6, (name, differences)
    # A mean over batches is off, so these rows can show a mistake.
    assert max(differences['mean of batches'] for differences in results.values()) > 1e-2


class OwnLoss(Metric):
    """Token mean of the model's own loss, for models whose logits Composer does not take out of the answer."""

    needs_batch = True

    def __init__(self):
        super().__init__()
        self.add_state('total', default=torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx='sum')
        self.add_state('num_labels', default=torch.tensor(0), dist_reduce_fx='sum')

    def update(self, batch, outputs, labels):
        next_tokens = batch['labels'][:, 1:]
        num_labels = int((next_tokens != -100).sum())
        if num_labels:  # the model's mean over no labels is NaN
            self.total += outputs.loss.double() * num_labels
        self.num_labels += num_labels

    def compute(self):
        return self.total / self.num_labels


class KeepsLabels(HuggingFaceModel):
    """Gives a metric no labels. Composer's method needs labels that it took out of the batch, and here it took none."""

    def update_metric(self, batch, outputs, metric):
        metric.update(batch, outputs, None)
        return {}


@pytest.mark.parametrize('microbatch', [1, 2, 5])
def test_labels_stay_in_evaluation(microbatch):
    case = FAMILIES['llava']()
    layout = BatchLayout.for_model(case.model)
    rows = held_out(case, 7)
    expected = reference(case, rows)
    model = KeepsLabels(copy.deepcopy(case.model), shift_labels=True, use_logits=False, eval_metrics=[OwnLoss()])
    loader = DataLoader(rows, batch_size=5, collate_fn=layout.concat)
    spec = token_data_spec(loader, layout=layout)
    evaluator = Evaluator(label='eval', dataloader=spec, device_eval_microbatch_size=microbatch)
    trainer = Trainer(model=model, eval_dataloader=evaluator, device='cpu', progress_bar=False)

    trainer.eval()

    metric = trainer.state.eval_metrics['eval']['OwnLoss']
    mean_loss = float(metric.compute())
    assert mean_loss == pytest.approx(expected['LanguageCrossEntropy'], rel=1e-6)
