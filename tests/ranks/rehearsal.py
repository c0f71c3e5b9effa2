# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Under the composer launcher: rehearsals under DDP and FSDP2, with simulated memory."""

from __future__ import annotations

from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.utils import dist

from composer_tokacc import TokenAccumulation, TokenMonitor, token_data_spec
from composer_tokacc.programs.rehearsal import Rehearsal
from tests.support.fsdp import FSDP
from tests.support.length_dataset import LONGEST, LengthDataset, regrouping_loader
from tests.support.text import text_model
from tests.support.training import On, each_run, hugging_face, logged, train

SIZE = 4
BATCHES = 3


def let_size_be_lowered(state: State) -> None:
    """Lets Composer lower the size, as with the size ``auto`` on a GPU."""
    state.auto_microbatching = True


def run(*, fsdp: bool, limit: int | None = None, rehearses: bool = True) -> dict[str, Any]:
    """Trains some steps. Every forward of more positions than the limit fails. Without a limit a second fit goes on.

    Returns losses and gradient norms of the steps, the number of rehearsed batches of each fit, the microbatch size of
    each rank at the end, and the most positions of a forward on any rank: in the rehearsal, and in the run.
    """
    dataset = LengthDataset(48, seed=3)
    loader = regrouping_loader(dataset, global_batch_size=16, max_tokens=SIZE * LONGEST)
    spec = token_data_spec(loader, slot_tokens=LONGEST)
    torch.manual_seed(3)
    model = hugging_face(text_model(attention_dropout=0.2))
    rehearsal = Rehearsal()
    positions_of_rehearsal = [0]
    positions_of_run = []

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():  # rows of a check, which take about half of the memory of training
            return
        positions = kwargs['input_ids'].numel()
        if rehearses and rehearsal.report is None:
            positions_of_rehearsal.append(positions)
        else:
            positions_of_run.append(positions)
        if limit is not None and positions > limit:
            raise RuntimeError('CUDA out of memory. Tried to allocate')

    model.model.register_forward_pre_hook(forward, with_kwargs=True)
    callbacks: list[Callback] = [TokenMonitor()]
    if limit is not None:
        callbacks.append(On(Event.FIT_START, let_size_be_lowered))
    if rehearses:
        callbacks.append(rehearsal)
    algorithm = TokenAccumulation(loss_tokens='causal', check_loss=limit is None)
    _, memory, trainer = train(
        model,
        spec,
        algorithms=[algorithm],
        callbacks=callbacks,
        microbatch_size=SIZE,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration=f'{BATCHES}ba',
        seed=5,
        **(FSDP if fsdp else {}),
    )
    reports = [rehearsal.report]
    if limit is None:
        trainer.fit(duration=f'{BATCHES}ba')
        reports.append(rehearsal.report)
    rehearsed_batches = [None if report is None else report.num_batches for report in reports]
    return {
        'losses': logged(memory, 'loss/train/total'),
        'norms': logged(memory, 'token_monitor/gradient_norm'),
        'rehearsed': rehearsed_batches,
        'size': dist.all_gather_object(trainer.state.device_train_microbatch_size),
        'largest': max(dist.all_gather_object(max(positions_of_run))),
        'early': max(dist.all_gather_object(max(positions_of_rehearsal))),
    }


main = each_run(run)
