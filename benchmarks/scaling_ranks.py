# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Timed part of the scaling benchmark: the real Trainer on the ranks of one machine, the same samples in every step.

    composer -n 2 -m benchmarks.scaling_ranks RESULT.json ROUNDS STEPS

A small Llama (hidden size 256, 3 layers, fp32) trains on lognormal lengths (12 to 1,024, mean 165, variation 1.31: rows
padded to the longest of their device batch are a fifth real) with a global batch of 64. Every method has the memory of
four rows of the longest sample, and the same prices, fitted to some steps before. Rounds take the methods in turn. Of
each step two figures are kept, both of the slowest rank: wall time, loader included; and processor time, which other
programs on the machine do not disturb, and which tells the balance even where ranks outnumber cores. Rank 0 writes the
median of the rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import DataSpec, Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.length_sets import lognormal
from benchmarks.timed_steps import fit_cost_model
from composer_tokacc import TokenAccumulation, token_data_spec
from composer_tokacc.planning import CostModel
from composer_tokacc.sampling import RegroupingBatchSampler, RegroupingDataLoader
from composer_tokacc.sizing import MicrobatchTimer, fit_cost

GLOBAL_BATCH, MICROBATCH, HIDDEN, VOCABULARY, SEED = 64, 4, 256, 1000, 17
SHORTEST, LONGEST, MEAN, VARIATION = 12, 1024, 165, 1.31
METHODS = ('stock DistributedSampler', 'token_data_spec alone', 'regrouped over ranks')


class Rows(Dataset):
    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (int(self.lengths[index]),), generator=torch.Generator().manual_seed(index))


def collate(rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    masks = pad([torch.ones_like(row) for row in rows], batch_first=True)
    labels = pad(list(rows), batch_first=True, padding_value=-100)
    return {'input_ids': pad(list(rows), batch_first=True), 'attention_mask': masks, 'labels': labels}


class StepTimer(Callback):
    """Wall and processor seconds of every step of this rank, the first one left out."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.last: tuple[float, float] | None = None

    def batch_end(self, state: State, logger: Logger) -> None:
        now = time.perf_counter(), time.process_time()
        if self.last is not None:
            self.steps.append((now[0] - self.last[0], now[1] - self.last[1]))
        self.last = now


def fitted_cost() -> CostModel:
    """What the planner is told of this machine: prices fitted to some steps, the same on all ranks."""
    timers = [MicrobatchTimer(hidden_size=HIDDEN) for _ in METHODS[1:]]
    for method, timer in zip(METHODS[1:], timers, strict=True):
        run(method, 6, CostModel(quadratic=6 * HIDDEN), timer)
    shapes = [[value for timer in timers for value in getattr(timer, name)] for name in ('rows', 'widths', 'seconds')]
    costs = [fit_cost(timers, quadratic=fit_cost_model(*shapes).quadratic)[0]]
    dist.broadcast_object_list(costs)
    return costs[0]


def run(method: str, steps: int, cost: CostModel, *callbacks: Callback) -> dict[str, float]:
    """Seconds of `steps` steps on the slowest rank, and over the mean of the ranks."""
    drawn = lognormal(VARIATION, mean=MEAN, longest=LONGEST, num_samples=GLOBAL_BATCH * (steps + 1)).lengths
    dataset = Rows(np.maximum(drawn, SHORTEST))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=3,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    model = HuggingFaceModel(LlamaForCausalLM(config), shift_labels=True, use_logits=True)
    timer = StepTimer()
    trainer = Trainer(
        model=model, train_dataloader=data(method, dataset, cost),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4), max_duration=f'{steps + 1}ba', device='cpu',
        device_train_microbatch_size=MICROBATCH, algorithms=[] if method == METHODS[0] else [TokenAccumulation()],
        callbacks=[timer, *callbacks], progress_bar=False,
    )  # fmt: skip
    trainer.fit()
    ranks = np.array(dist.all_gather_object(timer.steps))  # (W, steps, 2)
    wall, busy = ranks.max(axis=0).sum(axis=0).tolist()
    return {'wall': wall, 'busy': busy, 'imbalance': busy / float(ranks[..., 1].mean(axis=0).sum())}


def data(method: str, dataset: Rows, cost: CostModel) -> Any:
    if method == METHODS[2]:
        sampler = RegroupingBatchSampler(
            dataset, lengths=dataset.lengths, global_batch_size=GLOBAL_BATCH, max_tokens=MICROBATCH * LONGEST,
            seed=SEED, cost=cost,
        )  # fmt: skip
        loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        return token_data_spec(loader, slot_tokens=LONGEST, equal_counts=False, cost=cost)
    size = GLOBAL_BATCH // dist.get_world_size()
    sampler = dist.get_sampler(dataset, shuffle=True, seed=SEED)
    loader = DataLoader(dataset, batch_size=size, sampler=sampler, collate_fn=collate)
    if method == METHODS[0]:
        return DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch['input_ids']))
    return token_data_spec(loader, slot_tokens=LONGEST, equal_counts=False, cost=cost)


def main() -> None:
    warnings.simplefilter('ignore')
    path, rounds, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.initialize_dist(get_device('cpu'), timeout=300.0)
    cost = fitted_cost()
    found: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method in METHODS:
            found[method].append(run(method, steps, cost))
    if dist.get_global_rank() == 0:
        medians = {
            method: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            for method, runs in found.items()
        }
        Path(path).write_text(json.dumps({'cost': asdict(cost), 'methods': medians}))


if __name__ == '__main__':
    main()
