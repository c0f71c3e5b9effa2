# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Equality tests that others wrote for their own trainers, with their tolerances, held to stock Composer and to ours.

    .venv-rivals/bin/python -m benchmarks.foreign_equality

Each asks whether a run is the same run when its batches are accumulated: Hugging Face's
`test_gradient_accumulation_loss_alignment_with_model_loss` and `..._with_loss_func` (transformers, tests/trainer: five
steps of 8 rows of at most 16 tokens, once whole and once as 2 microbatches of 4), and TRL's invariant suite
(tests/invariant, `sft_pdb1_gas8`: 50 steps of 8 rows, once whole and once row by row). Their models and texts are on
the hub; here they are a tiny Llama, whose weights are wide enough that tokens differ in loss as a trained model's do,
and rows of made-up words with wikitext's shape (headings, and lines cut at 16 tokens) and with lognormal lengths.
Numbers of steps and rows and tolerances are theirs; data stay in order, the rate is constant, nothing is clipped. On
two ranks the accumulated run is held to the whole one on one rank, and all is accumulated that the ranks leave.

Writes results/foreign_equality.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Trainer
from composer.core import Callback, DataSpec, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.models import HuggingFaceModel
from composer.utils import dist, get_device
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import machine, on_ranks
from benchmarks.record import RESULTS, ROOT, filled, table, write
from composer_tokacc import TokenAccumulation, token_data_spec
from tests.support.text import collate

WORK, BATCH, RATE, VOCABULARY = 'on-ranks', 8, 3e-4, 512
PAGE = ROOT / 'docs' / 'benchmarks.md'
Series = dict[str, list[float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True, kw_only=True)
class EqualityTest:
    """What is compared, and by whose tolerance."""

    title: str
    steps: int
    rows: int
    """Of a microbatch of the accumulated run."""
    lengths: Callable[[np.random.Generator, int], np.ndarray]
    largest: float
    """That a difference of two steps may be."""
    drift: float | None = None
    """That the mean difference may be; None: not asked."""
    keys: tuple[str, ...] = ('loss',)
    own: str = 'Hugging Face Trainer'
    """The trainer that it was written for."""
    has_loss_function: bool = False
    """Whether the loss is a function of the logits, beside the model."""


def wikitext(rng: np.random.Generator, count: int) -> np.ndarray:
    """Lines of at most 16 tokens: a third are empty but for a token or two, a sixth headings, the rest full."""
    return np.choose(rng.choice(3, count, p=[0.35, 0.15, 0.5]), [2, rng.integers(3, 8, count), 16])


def conversations(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(3.6, 0.7, count).clip(4, 128).astype(int)


TESTS = {
    'model_loss': EqualityTest(
        title='Hugging Face, loss of the model', steps=5, rows=4, lengths=wikitext, largest=0.01
    ),
    'loss_func': EqualityTest(
        title='Hugging Face, loss as a function', steps=5, rows=4, lengths=wikitext, largest=0.01,
        has_loss_function=True,
    ),
    'invariant': EqualityTest(
        title='TRL, invariant suite', steps=50, rows=1, lengths=conversations, largest=5e-3, drift=1e-3,
        keys=('loss', 'norm'), own='TRL SFTTrainer',
    ),
}  # fmt: skip
RUNNERS = {
    'own': 'the trainer it was written for',
    'stock': 'stock Composer',
    'flag': 'stock, `accumulate_train_batch_on_tokens`',
    'ours': '`TokenAccumulation` + `token_data_spec`',
}


def samples_of(test: EqualityTest) -> list[dict[str, Any]]:
    """Rows of words, some far more frequent than others."""
    rng = np.random.default_rng(42)
    chances = 1 / np.arange(1, VOCABULARY - 3)
    samples = []
    for length in test.lengths(rng, test.steps * BATCH).tolist():
        ids = torch.from_numpy(rng.choice(VOCABULARY - 4, (1, length), p=chances / chances.sum()) + 4)
        samples.append({'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids.clone()})
    return samples


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(42)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            initializer_range=0.2, use_cache=False, attn_implementation='eager',
        )
    )  # fmt: skip


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, count: Any = None) -> torch.Tensor:
    """The mean over the labels of what it is given, or their sum over the number that it is told."""
    reduction = 'mean' if count is None else 'sum'
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)
    return loss if count is None else loss / count


def run_own(test: EqualityTest, rows: int) -> Series:
    from datasets import Dataset
    from transformers import Trainer as HuggingFaceTrainer
    from transformers import TrainingArguments
    from trl import SFTConfig, SFTTrainer

    from benchmarks.rivals.data import build_processor

    is_trl = test.own.startswith('TRL')
    settings: dict[str, Any] = {
        'per_device_train_batch_size': rows, 'gradient_accumulation_steps': BATCH // rows // dist.get_world_size(),
        'max_steps': test.steps, 'learning_rate': RATE, 'lr_scheduler_type': 'constant', 'weight_decay': 0.0,
        'max_grad_norm': 1e9, 'train_sampling_strategy': 'sequential', 'use_cpu': True, 'bf16': False,
        'logging_steps': 1, 'save_strategy': 'no', 'report_to': 'none', 'disable_tqdm': True, 'seed': 42,
        'remove_unused_columns': False,
    }  # fmt: skip
    lists = [{key: value[0].tolist() for key, value in sample.items()} for sample in samples_of(test)]
    more: dict[str, Any] = {}
    if test.has_loss_function:
        more['compute_loss_func'] = lambda outputs, labels, num_items_in_batch=None: mean_loss(
            outputs['logits'], labels, num_items_in_batch
        )
    if is_trl:
        settings |= {'max_length': None, 'gradient_checkpointing': False}
        more['processing_class'] = build_processor().tokenizer
    with tempfile.TemporaryDirectory() as folder:
        trainer = (SFTTrainer if is_trl else HuggingFaceTrainer)(
            model=new_model(), args=(SFTConfig if is_trl else TrainingArguments)(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(lists), data_collator=padded, **more,
        )  # fmt: skip
        trainer.train()
    logged = [one for one in trainer.state.log_history if 'loss' in one]
    return {'loss': [one['loss'] for one in logged], 'norm': [float(one['grad_norm']) for one in logged]}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return collate([{key: torch.as_tensor(value).view(1, -1) for key, value in one.items()} for one in samples])


class LossFunction(HuggingFaceModel):
    """Its loss is a function of the logits, as users write it."""

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return mean_loss(outputs['logits'], batch['labels'])


class Norms(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_TRAIN_BATCH:
            squares = [p.grad.double().square().sum() for p in state.model.parameters() if p.grad is not None]
            self.norms.append(float(torch.stack(squares).sum().sqrt()))


def run_composer(method: str, test: EqualityTest, rows: int) -> Series:
    world, dataset = dist.get_world_size(), samples_of(test)
    sampler = DistributedSampler(dataset, world, dist.get_global_rank(), shuffle=False)  # pyright: ignore
    loader = DataLoader(dataset, batch_size=BATCH // world, sampler=sampler, collate_fn=padded)  # pyright: ignore
    model = (LossFunction if test.has_loss_function else HuggingFaceModel)(
        new_model(), shift_labels=True, use_logits=True
    )
    memory, norms = InMemoryLogger(), Norms()
    data: Any = token_data_spec(loader) if method == 'ours' else DataSpec(loader)
    trainer = Trainer(
        model=model, train_dataloader=data, device='cpu', max_duration=f'{test.steps}ba', progress_bar=False,
        optimizers=torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0), device_train_microbatch_size=rows,
        algorithms=[TokenAccumulation()] if method == 'ours' else [], callbacks=[norms], loggers=[memory],
        accumulate_train_batch_on_tokens=method == 'flag',
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    return {'loss': [float(loss) for _, loss in memory.data['loss/train/total']], 'norm': norms.norms}


def work(path: Path) -> None:
    """One world size: runs under the composer launcher."""
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    dist.initialize_dist(get_device('cpu'))
    found: dict[str, dict[str, dict[str, Series]]] = {}
    for name, test in TESTS.items():
        for runner in RUNNERS:
            run = run_own if runner == 'own' else partial(run_composer, runner)
            whole = BATCH // dist.get_world_size()
            cuts = {'whole': whole, 'accumulated': min(test.rows, whole)}
            found.setdefault(name, {})[runner] = {cut: run(test, rows) for cut, rows in cuts.items()}
    if dist.get_global_rank() == 0:
        path.write_text(json.dumps(found))


def compared(test: EqualityTest, whole: Series, other: Series) -> dict[str, Any]:
    differences = {key: np.subtract(other[key], whole[key]) for key in test.keys}
    largest = {key: float(np.abs(values).max()) for key, values in differences.items()}
    drift = {key: float(abs(values.mean())) for key, values in differences.items()}
    is_held = max(largest.values()) <= test.largest and (test.drift is None or max(drift.values()) <= test.drift)
    return {'largest': largest, 'drift': drift, 'passes': bool(is_held)}


def table_of(found: dict[str, Any]) -> str:
    """One row a test and number of ranks."""
    rows = []
    for case in found['cases']:
        test = TESTS[case['test']]
        cells = []
        for runner in RUNNERS:
            value = case[runner]
            figures = ', '.join(f'{value["largest"][key]:.1e}' for key in test.keys)
            cells.append(figures if value['passes'] else f'**{figures}**')
        rows.append([test.title, case['ranks'], f'{test.largest:g}', *cells])
    return table(['test', 'ranks', 'tolerance', *RUNNERS.values()], rows)


def main() -> None:
    if WORK in sys.argv:
        work(Path(sys.argv[1]))
        return
    found = {ranks: on_ranks(ranks, 'benchmarks.foreign_equality', WORK) for ranks in (1, 2)}
    cases = []
    for name, test in TESTS.items():
        for ranks, runs in found.items():
            # The run that the others must equal is the whole one on one rank.
            held = {
                runner: compared(test, found[1][name][runner]['whole'], runs[name][runner]['accumulated'])
                for runner in RUNNERS
            }
            cases.append({'test': name, 'ranks': ranks, **held})
    result = {'machine': machine(), 'cases': cases}
    write(RESULTS / 'foreign_equality.json', result)
    PAGE.write_text(filled(PAGE.read_text(), {'foreign_equality': partial(table_of, result)}))
    print(table_of(result))


if __name__ == '__main__':
    main()
