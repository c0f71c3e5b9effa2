# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Scenarios of Composer's own suite (its algorithms, checkpoints, equivalence of trainers), with our algorithm in."""

from __future__ import annotations

import pytest
import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.core import Evaluator
from torch.utils.data import DataLoader

from composer_tokacc import TokenAccumulation, TokenMonitor, token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import hugging_face

ROWS = text_rows([(4, 2), (9, 8), (5, 3), (14, 11), (6, 1), (12, 3), (3, 2), (8, 7)])


def ragged():
    return DataLoader(ROWS, batch_size=4, collate_fn=collate)  # pyright: ignore[reportArgumentType]


def trainer_of(*, ours=True, microbatch_size=2, max_duration='2ep', **options):
    """As Composer's suite makes its own: a fresh model, an optimizer with a state, two epochs of two batches."""
    model = hugging_face(text_model())
    options.setdefault('algorithms', [TokenAccumulation()] if ours else [])
    return Trainer(
        model=model,
        train_dataloader=token_data_spec(ragged()) if ours else ragged(),
        max_duration=max_duration,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        device='cpu',
        seed=1,
        progress_bar=False,
        device_train_microbatch_size=microbatch_size,
        **options,
    )


def weights_of(trainer):
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def assert_same(found, expected, **tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **(tolerance or {'rtol': 0, 'atol': 0}), msg=name)


def test_trains():
    """``test_algorithms_train``: a fit, a second one of the same trainer, an evaluation."""
    trainer = trainer_of()
    before = weights_of(trainer)
    trainer.fit()
    assert any(not torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    trainer.fit(duration='1ep')
    trainer.eval(eval_dataloader=Evaluator(label='eval', dataloader=token_data_spec(ragged())))
    assert trainer.state.timestamp.batch == 6


@pytest.mark.parametrize('interval', ['1ep', '1ba', '3ba'])
def test_resumes_bitwise(interval, tmp_path):
    """``test_algorithm_resumption``: weights and optimizer end as those of the run without a break."""
    whole = trainer_of(save_folder=str(tmp_path), save_interval=interval, save_filename='ba{batch}.pt')
    whole.fit()
    start = {'1ep': 2, '1ba': 1, '3ba': 3}[interval]
    again = trainer_of(load_path=str(tmp_path / f'ba{start}.pt'))
    assert again.state.timestamp.batch == start
    again.fit()
    assert_same(weights_of(again), weights_of(whole))
    [found], [expected] = (trainer.state.optimizers for trainer in (again, whole))
    for one, other in zip(found.state.values(), expected.state.values(), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(('saves', 'loads'), [(True, False), (False, True), (True, True)])
def test_is_not_required_on_load(saves, loads, tmp_path):
    """``test_required_on_load``: a checkpoint goes into a trainer with and without the algorithm, or another of it."""
    trainer_of(ours=saves, max_duration='1ba', save_folder=str(tmp_path), save_filename='a.pt').fit()
    kept = torch.load(tmp_path / 'a.pt', weights_only=False)['state']['algorithms']
    assert [state['repr'] for _, state in kept] == ([repr(TokenAccumulation())] if saves else [])
    other = [TokenAccumulation(token_weights='sqrt')] if loads else []
    trainer = trainer_of(ours=loads, algorithms=other, load_path=str(tmp_path / 'a.pt'), max_duration='2ba')
    trainer.fit()
    assert trainer.state.timestamp.batch == 2


@pytest.mark.parametrize('microbatch_size', [1, 3])
def test_microbatch_size_makes_no_difference(microbatch_size):
    """``TestTrainerEquivalence.test_microbatch_size``, with its tolerances, which stock Composer is over."""
    finals = {}
    for ours in (True, False):
        runs = [trainer_of(ours=ours, microbatch_size=size) for size in (4, microbatch_size)]
        for run in runs:
            run.fit()
        finals[ours] = [weights_of(run) for run in runs]
    assert_same(finals[True][1], finals[True][0], rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):
        assert_same(finals[False][1], finals[False][0], rtol=1e-4, atol=1e-5)


def test_one_microbatch_is_the_stock_run():
    """Ours in every trainer of the suite: where stock Composer is exact the run ends as without it."""
    stock, ours = (trainer_of(ours=is_ours, microbatch_size=4) for is_ours in (False, True))
    stock.fit()
    ours.fit()
    assert_same(weights_of(ours), weights_of(stock), rtol=1e-4, atol=1e-5)


def test_evaluation_in_between_changes_nothing():
    plain = trainer_of()
    with_eval = trainer_of(
        eval_dataloader=Evaluator(label='eval', dataloader=token_data_spec(ragged())), eval_interval='1ba'
    )
    plain.fit()
    with_eval.fit()
    assert_same(weights_of(with_eval), weights_of(plain))


def test_beside_composers_algorithms_and_callbacks():
    algorithms = [GradientClipping('norm', clipping_threshold=0.5), TokenAccumulation()]
    trainer = trainer_of(algorithms=algorithms, callbacks=[TokenMonitor()])
    trainer.fit()
    assert trainer.state.timestamp.batch == 4
