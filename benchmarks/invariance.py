# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The LLaVA accumulation experiment: the global batch is fixed, so the loss must not depend on how it is computed.

    python -m benchmarks.invariance [--steps 100] [--ranks 1 2 4] [--microbatches 16 8 1]

A small LLaVA (from its config, the same initial weights everywhere) trains on the built-in digits with 128 samples a
step, microbatches of 16, 8 and 1 on 1, 2 and 4 ranks (gloo, CPU), by stock Composer, by stock with
`accumulate_train_batch_on_tokens` and its default counter, and by TokenAccumulation with token_data_spec. Composer's
own split loses image rows of a LLaVA batch, so the stock rows are given one that does not: only weights differ.

Prints a table; writes results/invariance.json and results/invariance.png next to this file.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForImageTextToText

from benchmarks.machine import machine, on_ranks
from benchmarks.record import parser_of, show, write
from benchmarks.timed_steps import data_of
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.data import VisionLanguageCollator
from composer_tokacc.invariance import relative_error
from composer_tokacc.verify import UnusedParameters
from examples.digits import DigitsDataset, build_digits_processor, digits_model_config

WORK = 'on-ranks'
GLOBAL_BATCH = 128
METHODS = {
    'stock': 'stock Composer',
    'flag': 'stock, accumulate_train_batch_on_tokens',
    'ours': 'TokenAccumulation + token_data_spec',
}


class FirstGradient(Callback):
    def __init__(self) -> None:
        self.gradient: dict[str, torch.Tensor] = {}

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_TRAIN_BATCH and not self.gradient:
            named = (state.model.module if dist.get_world_size() > 1 else state.model).named_parameters()
            self.gradient = {name: p.grad.clone() for name, p in named if p.grad is not None}


def build_model(processor: Any) -> HuggingFaceModel:
    """The same weights at every call."""
    torch.manual_seed(17)
    config = digits_model_config(processor, hidden_size=64, num_layers=1, num_vision_layers=1)
    config.text_config.use_cache = False
    model = AutoModelForImageTextToText.from_config(config)
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        # LLaVA reads the tower before its last norm, and DDP waits for the gradient of every parameter.
        parameter.requires_grad_('post_layernorm' not in name)
    return HuggingFaceModel(model, shift_labels=True, use_logits=True)


def reference(processor: Any, dataset: Subset, collator: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient and loss of one plain forward over the first global batch."""
    model = build_model(processor)
    batch = collator([dataset[index] for index in range(GLOBAL_BATCH)])
    loss = model.loss(model(batch), batch)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, loss.item()


def train(method: str, microbatch: int, steps: int, processor: Any, dataset: Subset) -> tuple[Trainer, Any, Any]:
    collator = VisionLanguageCollator(processor)
    sampler = DistributedSampler(dataset, dist.get_world_size(), dist.get_global_rank(), shuffle=False)
    loader = DataLoader(
        dataset, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler, collate_fn=collator, drop_last=True
    )
    model, first, memory = build_model(processor), FirstGradient(), InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=data_of('ours' if method == 'ours' else 'stock', loader, BatchLayout.for_model(model)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3), max_duration=f'{steps}ba', device='cpu',
        device_train_microbatch_size=microbatch,
        algorithms=[TokenAccumulation() if method == 'ours' else UnusedParameters()],
        accumulate_train_batch_on_tokens=method == 'flag', callbacks=[first], loggers=[memory], progress_bar=False,
    )  # fmt: skip
    trainer.fit()
    return trainer, first, memory


def work(steps: int, microbatches: Sequence[int], path: Path) -> None:
    """One world size: runs under the composer launcher."""
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)  # so small a model only loses time to more
    dist.initialize_dist(get_device('cpu'))
    processor = build_digits_processor()
    dataset = Subset(DigitsDataset(processor, num_samples=4096), [i % 4096 for i in range(steps * GLOBAL_BATCH)])
    expected, whole = reference(processor, dataset, VisionLanguageCollator(processor))
    rows = []
    for method in METHODS:
        for microbatch in microbatches:
            if microbatch * dist.get_world_size() > GLOBAL_BATCH:
                continue
            started = time.monotonic()
            _, first, memory = train(method, microbatch, steps, processor, dataset)
            losses = [float(loss) for _, loss in memory.data['loss/train/total']]
            rows.append({
                'method': method,
                'ranks': dist.get_world_size(),
                'microbatch': microbatch,
                'first_loss': losses[0],
                'last_loss': losses[-1],
                'gradient_error': relative_error(first.gradient, expected)[0],
                'whole_batch_loss': whole,
                'losses': losses,
                'seconds': round(time.monotonic() - started, 1),
            })  # fmt: skip
            if dist.get_global_rank() == 0:
                case = f'{METHODS[method]}, {rows[-1]["ranks"]} ranks, microbatch {microbatch}'
                print(f'{case}: {rows[-1]["seconds"]} s', flush=True)
    if dist.get_global_rank() == 0:
        path.write_text(json.dumps(rows))


def spread(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Largest relative difference between the runs of a method."""
    found = {}
    for method in METHODS:
        mine = [row for row in rows if row['method'] == method]
        found[method] = {
            name: (max(row[name] for row in mine) - min(row[name] for row in mine)) / min(row[name] for row in mine)
            for name in ('first_loss', 'last_loss')
        }
    return found


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout='constrained')
    axes = figure.subplots(1, len(METHODS), sharey=True)
    for axis, (method, title) in zip(axes, METHODS.items(), strict=True):
        mine = [row for row in rows if row['method'] == method]
        for row in mine:
            shade = 0.25 + 0.6 * mine.index(row) / max(len(mine) - 1, 1)
            label = f'{row["microbatch"]} x {row["ranks"]} ranks'
            steps = range(1, len(row['losses']) + 1)
            axis.plot(steps, row['losses'], color=matplotlib.colormaps['viridis'](shade), lw=1.2, label=label)
        error = max(row['gradient_error'] for row in mine)
        axis.set_title(f'{title}\ngradient error up to {error:.0e}', fontsize=10)
        axis.set_xlabel('step')
    axes[0].set_ylabel('logged training loss')
    axes[0].set_yscale('log')
    axes[-1].legend(title='microbatch', fontsize=7, title_fontsize=8)
    figure.suptitle(f'Same weights, same {GLOBAL_BATCH} samples a step: nine ways to cut them (small LLaVA, CPU)')
    figure.savefig(path, dpi=130)


def main() -> None:
    if WORK in sys.argv:
        path, _, steps, *sizes = sys.argv[1:]
        work(int(steps), list(map(int, sizes)), Path(path))
        return
    parser = parser_of(__doc__)
    parser.add_argument('--steps', type=int, default=100)
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2, 4])
    parser.add_argument('--microbatches', type=int, nargs='+', default=[16, 8, 1])
    given = parser.parse_args()
    sizes = [str(size) for size in given.microbatches]
    rows = [
        row for ranks in given.ranks for row in on_ranks(ranks, 'benchmarks.invariance', WORK, str(given.steps), *sizes)
    ]
    rows.sort(key=lambda row: list(METHODS).index(row['method']))
    columns = ('method', 'ranks', 'microbatch', 'first_loss', 'last_loss', 'gradient_error', 'whole_batch_loss')
    show(f'Global batch {GLOBAL_BATCH}', [{name: row[name] for name in columns} for row in rows])
    spreads = spread(rows)
    for method, values in spreads.items():
        print(f'{METHODS[method]}: runs differ by {values["first_loss"]:.1e} in the first loss, '
              f'{values["last_loss"]:.1e} after {given.steps} steps')  # fmt: skip
    about = {'machine': machine(), 'global_batch': GLOBAL_BATCH, 'steps': given.steps}
    write(given.results / 'invariance.json', {**about, 'spread': spreads, 'runs': rows})
    picture(rows, given.results / 'invariance.png')


if __name__ == '__main__':
    main()
