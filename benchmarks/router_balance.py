# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What ``router_balance='step'`` costs, and how far the usual balance of each microbatch is from it.

    python -m benchmarks.router_balance [--steps 12]

A mixture of eight experts (Mixtral's form, hidden size 256, vocabulary 32,000), 16 ragged rows a step in microbatches
of four rows' memory. Prints medians of a step of each kind, and the distance of the gradient from one forward over the
whole batch with its router's loss, at the coefficients 0.001 and 0.5. Writes results/router_balance.json.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.machine import machine
from benchmarks.record import RESULTS, parser_of, write
from composer_tokacc import TokenAccumulation, token_data_spec

LENGTHS = (37, 512, 61, 240, 128, 90, 310, 45, 400, 75, 150, 33, 210, 55, 280, 100)
VOCABULARY, SLOT, ROWS = 32_000, 512, 4
COEFFICIENTS = (0.001, 0.5)


class Steps(Callback):
    """Seconds of each step and its gradient, at a learning rate of 0."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.gradient = torch.zeros(0)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.started = time.perf_counter()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.gradient = gradient_of(state.model)
        self.seconds.append(time.perf_counter() - self.started)


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def whole_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return {'input_ids': ids * mask, 'attention_mask': mask, 'labels': ids.masked_fill(mask == 0, -100)}


def model_of(coefficient: float) -> MixtralForCausalLM:
    """The same weights whatever the coefficient."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, output_router_logits=True, router_aux_loss_coef=coefficient,
        initializer_range=0.1,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def trained(coefficient: float, balance: str, steps: int) -> Steps:
    model, found = HuggingFaceModel(model_of(coefficient), shift_labels=True, use_logits=True), Steps()
    Trainer(
        model=model,
        train_dataloader=token_data_spec(DataLoader([whole_batch()] * steps, batch_size=None), slot_tokens=SLOT),
        algorithms=[TokenAccumulation(router_balance=balance)], callbacks=[found],
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0), device_train_microbatch_size=ROWS,
        max_duration=f'{steps}ba', progress_bar=False, device='cpu', precision='fp32',
    ).fit()  # fmt: skip
    return found


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__, results=None)
    parser.add_argument('--steps', type=int, default=12)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for coefficient in COEFFICIENTS:
        reference = model_of(coefficient)
        reference(**whole_batch()).loss.backward()
        expected, of_balance = gradient_of(reference), results.setdefault(str(coefficient), {})
        for balance in ('microbatch', 'step'):
            found = trained(coefficient, balance, given.steps)
            error = float((found.gradient - expected).norm() / expected.norm())
            of_balance[balance] = {'seconds': statistics.median(found.seconds[2:]), 'error': error}
            print(
                f'coefficient {coefficient} {balance}: {of_balance[balance]["seconds"]:.3f} s, gradient {error:.1e} off'
            )
        of_balance['price'] = of_balance['step']['seconds'] / of_balance['microbatch']['seconds'] - 1
        print(f'price: {of_balance["price"]:.1%} of a step')
    write(RESULTS / 'router_balance.json', {'machine': machine(), **results})


if __name__ == '__main__':
    main()
