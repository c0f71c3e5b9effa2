# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The LLaVA accumulation experiment: the loss of a fixed global batch must not depend on the split.

    python -m benchmarks.invariance [--steps 100] [--ranks 1 2 4]

A small LLaVA trains on the built-in digits with 128 samples a step, from the same initial weights, in microbatches of
16, 8 and 1 on 1, 2 and 4 ranks (gloo, CPU). It is trained by stock Composer, by stock Composer with
`accumulate_train_batch_on_tokens` and its default counter, and by TokenAccumulation with token_data_spec. Composer's
own split loses images of a LLaVA batch, so the stock runs get a split that keeps them: only their weights are wrong.

Writes results/invariance.json and results/invariance.png.
"""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.loggers import InMemoryLogger
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForImageTextToText

from benchmarks.adapters import FirstGradient, Gradients, gradients_of, inputs_of
from benchmarks.machine import machine, on_ranks
from benchmarks.models import freeze_unused
from benchmarks.record import Row, new_figure, parser_of, write
from benchmarks.timed_steps import data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.invariance import relative_error
from composer_tokacc.verify import UnusedParameters
from examples.digits import DigitsDataset, build_digits_processor, digits_model_config

GLOBAL_BATCH = 128
NUM_DIGITS = 4096
MICROBATCHES = (16, 8, 1)
METHODS = {
    'stock': 'stock Composer',
    'flag': 'stock, accumulate_train_batch_on_tokens',
    'ours': 'TokenAccumulation + token_data_spec',
}


def build_model(processor: Any) -> Any:
    """Returns a model with the same weights at every call."""
    torch.manual_seed(17)
    config = digits_model_config(processor, hidden_size=64, num_layers=1, num_vision_layers=1)
    config.use_cache = False
    config.text_config.use_cache = False
    model = AutoModelForImageTextToText.from_config(config)
    freeze_unused(model)
    return model


def reference(processor: Any, dataset: Subset) -> tuple[Gradients, float]:
    """Returns gradient and loss of one plain forward over the first global batch."""
    model = build_model(processor)
    collate = VisionLanguageCollator(processor)
    batch = collate([dataset[index] for index in range(GLOBAL_BATCH)])
    loss = model(**inputs_of(model, batch)).loss
    loss.backward()
    return gradients_of(model), loss.item()


def train(
    method: str,
    microbatch: int,
    steps: int,
    processor: Any,
    dataset: Subset,
) -> tuple[list[float], Gradients]:
    """Returns the logged losses and the gradient of the first step."""
    ranks = dist.get_world_size()
    loader = DataLoader(
        dataset,
        batch_size=GLOBAL_BATCH // ranks,
        sampler=DistributedSampler(dataset, ranks, dist.get_global_rank(), shuffle=False),
        collate_fn=VisionLanguageCollator(processor),
        drop_last=True,
    )
    model = build_model(processor)
    is_ours = method == 'ours'
    split = 'ours' if is_ours else 'stock'
    first_gradient = FirstGradient()
    memory = InMemoryLogger()
    fit(
        model,
        data_of(split, loader, BatchLayout.for_model(model)),
        microbatch,
        f'{steps}ba',
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        algorithms=[TokenAccumulation() if is_ours else UnusedParameters()],
        accumulate_train_batch_on_tokens=method == 'flag',
        callbacks=[first_gradient],
        loggers=[memory],
    )
    losses = [float(loss) for _, loss in memory.data['loss/train/total']]
    return losses, first_gradient.gradients


def measure_on_ranks(steps: int) -> list[Row]:
    """Runs all methods and microbatches on the ranks of this launch."""
    processor = build_digits_processor()
    digits = DigitsDataset(processor, num_samples=NUM_DIGITS)
    # The run is one epoch, in which the digits are repeated.
    dataset = Subset(digits, [index % NUM_DIGITS for index in range(steps * GLOBAL_BATCH)])
    expected_gradient, expected_loss = reference(processor, dataset)
    rows = []
    for method, microbatch in product(METHODS, MICROBATCHES):
        start = time.monotonic()
        losses, gradient = train(method, microbatch, steps, processor, dataset)
        seconds = time.monotonic() - start
        error, _ = relative_error(gradient, expected_gradient)
        row = {
            'method': method,
            'ranks': dist.get_world_size(),
            'microbatch': microbatch,
            'first_loss': losses[0],
            'last_loss': losses[-1],
            'gradient_error': error,
            'whole_batch_loss': expected_loss,
            'seconds': round(seconds, 1),
        }
        # Composer's launcher shows only the output of rank 0.
        print(row, flush=True)
        rows.append({**row, 'losses': losses})
    return rows


def draw(rows: list[Row], path: Path) -> None:
    """Draws the losses of all runs, with a panel for each method."""
    from matplotlib import colormaps

    figure = new_figure(13, 4, font_size=10)
    axes = figure.subplots(1, len(METHODS), sharey=True)
    for axis, (method, title) in zip(axes, METHODS.items(), strict=True):
        runs = [row for row in rows if row['method'] == method]
        colors = colormaps['viridis'](np.linspace(0.25, 0.85, len(runs)))
        for row, color in zip(runs, colors, strict=True):
            steps = range(1, len(row['losses']) + 1)
            label = f'{row["microbatch"]} x {row["ranks"]} ranks'
            axis.plot(steps, row['losses'], color=color, lw=1.2, label=label)
        error = max(row['gradient_error'] for row in runs)
        axis.set_title(f'{title}\ngradient error up to {error:.0e}')
        axis.set_xlabel('step')
    axes[0].set_ylabel('logged training loss')
    axes[0].set_yscale('log')
    axes[-1].legend(title='microbatch', fontsize=7, title_fontsize=8)
    figure.suptitle(f'Same weights, same {GLOBAL_BATCH} samples a step, split in nine ways (small LLaVA, CPU)')
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2, 4])
    arguments = parser.parse_args()
    rows = on_ranks(arguments.ranks, 'benchmarks.invariance', steps=arguments.steps)
    rows.sort(key=lambda row: list(METHODS).index(row['method']))
    results = {
        'machine': machine(),
        'global_batch': GLOBAL_BATCH,
        'steps': arguments.steps,
        'runs': rows,
    }
    write(arguments.results / 'invariance.json', results)
    draw(rows, arguments.results / 'invariance.png')


if __name__ == '__main__':
    main()
