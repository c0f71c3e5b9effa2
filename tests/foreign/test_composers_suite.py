# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Scenarios of Composer's own tests of algorithms, checkpoints and trainers, with TokenAccumulation added."""

from __future__ import annotations

import pytest
import torch
from composer import Trainer
from composer.core import Evaluator
from torch.utils.data import DataLoader

from composer_tokacc import TokenAccumulation, token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import hugging_face

ROWS = text_rows([(4, 2), (9, 8), (5, 3), (14, 11), (6, 1), (12, 3), (3, 2), (8, 7)])


def ragged():
    return DataLoader(ROWS, batch_size=4, collate_fn=collate)  # pyright: ignore[reportArgumentType]


def trainer_with(algorithms=None, *, max_duration='2ep', **options):
    """Makes a trainer as Composer's tests do: a fresh model, an optimizer with a state, two epochs of two batches."""
    if algorithms is None:
        algorithms = [TokenAccumulation()]
    model = hugging_face(text_model())
    data = ragged()
    if algorithms:
        data = token_data_spec(data)
    return Trainer(
        model=model,
        train_dataloader=data,
        algorithms=algorithms,
        max_duration=max_duration,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        device='cpu',
        seed=1,
        progress_bar=False,
        device_train_microbatch_size=2,
        **options,
    )


def weights_of(trainer):
    return {name: weight.clone() for name, weight in trainer.state.model.state_dict().items()}


def weights_after_fit(trainer):
    trainer.fit()
    return weights_of(trainer)


def evaluator():
    return Evaluator(label='eval', dataloader=token_data_spec(ragged()))


def assert_same(tensors, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, msg=name)


def test_trains():
    """``test_algorithms_train``: a fit, a second one of the same trainer, an evaluation."""
    trainer = trainer_with()
    before = weights_of(trainer)
    after = weights_after_fit(trainer)
    with pytest.raises(AssertionError):
        assert_same(after, before)
    trainer.fit(duration='1ep')
    trainer.eval(eval_dataloader=evaluator())
    assert trainer.state.timestamp.batch == 6


@pytest.mark.parametrize(('interval', 'first_save'), [('1ep', 2), ('1ba', 1), ('3ba', 3)])
def test_resumes_bitwise(interval, first_save, tmp_path):
    """``test_algorithm_resumption``: a resumed run ends with the weights and optimizer state of an unbroken one."""
    unbroken = trainer_with(save_folder=str(tmp_path), save_interval=interval, save_filename='ba{batch}.pt')
    unbroken.fit()
    resumed = trainer_with(load_path=str(tmp_path / f'ba{first_save}.pt'))
    assert resumed.state.timestamp.batch == first_save
    resumed.fit()
    assert_same(weights_of(resumed), weights_of(unbroken))
    [optimizer] = resumed.state.optimizers
    [expected_optimizer] = unbroken.state.optimizers
    for moments, expected in zip(optimizer.state.values(), expected_optimizer.state.values(), strict=True):
        assert_same(moments, expected)


@pytest.mark.parametrize(
    ('saved', 'loaded'),
    [
        pytest.param([TokenAccumulation()], [], id='removed'),
        pytest.param([], [TokenAccumulation(token_weights='sqrt')], id='added'),
        pytest.param([TokenAccumulation()], [TokenAccumulation(token_weights='sqrt')], id='other weights'),
    ],
)
def test_is_not_required_on_load(saved, loaded, tmp_path):
    """``test_required_on_load``: a checkpoint with or without the algorithm is loaded by a trainer with other ones."""
    path = tmp_path / 'a.pt'
    trainer = trainer_with(saved, max_duration='1ba', save_folder=str(tmp_path), save_filename=path.name)
    trainer.fit()
    checkpoint = torch.load(path, weights_only=False)
    saved_states = checkpoint['state']['algorithms']
    assert [state['repr'] for _, state in saved_states] == [repr(algorithm) for algorithm in saved]
    trainer = trainer_with(loaded, load_path=str(path), max_duration='2ba')
    trainer.fit()
    assert trainer.state.timestamp.batch == 2


def test_evaluation_in_between_changes_nothing():
    with_evaluation = trainer_with(eval_dataloader=evaluator(), eval_interval='1ba')
    assert_same(weights_after_fit(with_evaluation), weights_after_fit(trainer_with()))
