# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Speed and memory of TokenAccumulation with all logits, and with logits only where a label is.

    python -m benchmarks.logits [--rounds 5] [--quick]

The models have the layers and the ratio of vocabulary to hidden size of SmolVLM-256M (85) and Qwen2.5-VL-3B (74), but
smaller sizes, for two cores. They are text models: image tokens are tokens without a label. The lengths are those of
the real tables (folder COMPOSER_TOKACC_LENGTHS), a quarter as wide, and answers have 4 to 48 tokens. Stock Composer,
``logits='all'`` and ``logits='auto'`` take turns in each round, and TRL with ``chunked_nll`` if it is installed.
Prints a table; writes results/logits.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.length_sets import read_tables
from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write
from benchmarks.timed_steps import Row, data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.data.processor import train_tokenizer

DEVICE_BATCH = 16
MICROBATCH = 4
METHODS = ('stock', 'all', 'auto')


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    vocabulary: int
    hidden_size: int
    inner_size: int
    num_layers: int

    def build(self) -> LlamaForCausalLM:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            intermediate_size=self.inner_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.hidden_size // 32,
            max_position_embeddings=4096,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()


SHAPES = {
    'SmolVLM-256M': Shape(vocabulary=8192, hidden_size=96, inner_size=256, num_layers=30),
    'Qwen2.5-VL-3B': Shape(vocabulary=9472, hidden_size=128, inner_size=688, num_layers=36),
}


def make_batches(shape: Shape, lengths: np.ndarray, num_steps: int) -> list[Row]:
    """Returns device batches whose labels are the last 4 to 48 tokens of each row."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(num_steps):
        drawn = rng.choice(lengths, DEVICE_BATCH)
        ids = torch.from_numpy(rng.integers(3, shape.vocabulary, (DEVICE_BATCH, drawn.max())))
        positions = torch.arange(drawn.max())
        ends = torch.from_numpy(drawn)[:, None]
        answers = torch.from_numpy(rng.integers(4, 49, (DEVICE_BATCH, 1)))
        is_real = positions < ends
        has_label = is_real & (positions >= ends - answers)
        labels = ids.masked_fill(~has_label, -100)
        batches.append(
            {
                'input_ids': ids * is_real,
                'attention_mask': is_real.long(),
                'labels': labels,
            }
        )
    return batches


def watch_saved(model: torch.nn.Module, report: Callable[[int], None]) -> list[Any]:
    """Registers hooks that report how many bytes each forward keeps for its backward, without the weights.

    Returns:
        The handles of the hooks.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}
    contexts: list[Any] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            # Held until the forward ends, so that its address is not used again.
            storages[storage.data_ptr()] = storage
        return tensor

    def before_forward(module: Any, args: Any) -> None:
        context = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        context.__enter__()
        contexts.append(context)

    def after_forward(module: Any, args: Any, output: Any) -> None:
        contexts.pop().__exit__(None, None, None)
        report(sum(storage.nbytes() for storage in storages.values()))
        storages.clear()

    return [
        model.register_forward_pre_hook(before_forward),
        model.register_forward_hook(after_forward),
    ]


def train_composer(method: str, model: LlamaForCausalLM, batches: list[Row]) -> None:
    """Trains with stock Composer, or with TokenAccumulation and these logits."""
    layout = BatchLayout.for_model(model)
    algorithms = []
    split = 'stock'
    if method != 'stock':
        algorithms = [TokenAccumulation(logits=method)]  # pyright: ignore[reportCallIssue]
        split = 'ours'
    data = data_of(split, batches, layout)
    fit(model, data, MICROBATCH, num_steps=len(batches), algorithms=algorithms)


def train_trl(model: LlamaForCausalLM, batches: list[Row]) -> None:
    """Trains with TRL and its loss `chunked_nll`."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    samples = []
    for batch in batches:
        lengths = batch['attention_mask'].sum(1).tolist()
        for row, length in enumerate(lengths):
            samples.append({key: batch[key][row, :length].tolist() for key in ('input_ids', 'labels')})
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            loss_type='chunked_nll',
            per_device_train_batch_size=MICROBATCH,
            gradient_accumulation_steps=DEVICE_BATCH // MICROBATCH,
            train_sampling_strategy='sequential',
            num_train_epochs=1,
            learning_rate=0.0,
            optim='sgd',
            use_cpu=True,
            bf16=False,
            max_length=None,
            gradient_checkpointing=False,
            save_strategy='no',
            report_to='none',
            disable_tqdm=True,
        )
        tokenizer = train_tokenizer(['text'], model_max_length=8192)
        dataset = Dataset.from_list(samples)
        SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer).train()


def measure(method: str, shape: Shape, batches: list[Row]) -> tuple[float, float]:
    """Returns real tokens a second without the first step, and the most MiB that a forward keeps."""
    model = shape.build()
    ends: list[float] = []
    saved: list[int] = []
    handles = [
        register_optimizer_step_post_hook(lambda *arguments: ends.append(time.perf_counter())),
        *watch_saved(model, saved.append),
    ]
    if method == 'chunked_nll':
        train_trl(model, batches)
    else:
        train_composer(method, model, batches)
    for handle in handles:
        handle.remove()
    speeds = []
    for batch, (start, end) in zip(batches[1:], pairwise(ends), strict=True):
        speeds.append(int(batch['attention_mask'].sum()) / (end - start))
    return statistics.median(speeds), max(saved) / 2**20


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__, lengths=True)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument(
        '--quick',
        action='store_true',
        help='one round of two steps of short rows',
    )
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    tables, source = read_tables(arguments.lengths)
    methods = [*METHODS, 'chunked_nll'] if find_spec('trl') else list(METHODS)
    rounds, num_steps, divisor = (1, 2, 32) if arguments.quick else (arguments.rounds, 4, 4)
    rows = []
    for name, shape in SHAPES.items():
        batches = make_batches(shape, np.maximum(tables.lengths // divisor, 8), num_steps)
        results: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
        for _ in range(rounds):
            for method in methods:
                results[method].append(measure(method, shape, batches))
        for method in methods:
            speeds = [speed for speed, _ in results[method]]
            saved_mib = max(saved for _, saved in results[method])
            row = {
                'model': name,
                'method': method,
                'tokens_per_second': statistics.median(speeds),
            }
            rows.append({**row, 'saved_mib': saved_mib, 'rounds': speeds})
    show(
        source,
        [{key: value for key, value in row.items() if key != 'rounds'} for row in rows],
    )
    write(
        arguments.results / 'logits.json',
        {'source': source, 'machine': machine(), 'results': rows},
    )


if __name__ == '__main__':
    main()
