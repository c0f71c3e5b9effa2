# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real tokens a second of a masked language model: stock Composer padded, ours padded, ours packed.

    taskset -c 0 python -m benchmarks.encoders [--rounds 5] [--quick]

A ModernBERT with four layers and the ratio of vocabulary to hidden size of ModernBERT-base (66) trains on rows of
lognormal length, 30 % of the tokens with a label, in float32 and on one thread. The methods take turns in each round,
in the same memory: 4 rows as wide as the device batch. A step is timed from the end of the one before to its own end.
Figures are medians over rounds. Writes results/encoders.json and the table of docs/encoders.md.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import ModernBertConfig, ModernBertForMaskedLM

from benchmarks.length_sets import lognormal
from benchmarks.machine import machine
from benchmarks.record import RESULTS, ROOT, fill_page, parser_of, table, write
from benchmarks.timed_steps import Row, StepClock, data_of, fit
from composer_tokacc import BatchLayout, TokenAccumulation

PAGE = ROOT / 'docs' / 'encoders.md'
RESULTS_FILE = RESULTS / 'encoders.json'
METHODS = {
    'stock': 'stock Composer, padded',
    'ours': 'three lines, padded',
    'packing': 'three lines, packed',
}
VOCABULARY = 8448
MASK_TOKEN = 4
MICROBATCH = 4
# With this seed, the 64 lengths have a coefficient of variation of 0.90.
SEED = 10


def build_model() -> ModernBertForMaskedLM:
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return ModernBertForMaskedLM(config).train()


def make_batch(lengths: list[int], seed: int) -> Row:
    """Returns rows of these lengths. 30 % of the tokens are masked and have a label."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    labels = []
    for length in lengths:
        ids = torch.randint(5, VOCABULARY, (length,), generator=generator)
        has_label = torch.rand(length, generator=generator) < 0.3
        inputs.append(ids.masked_fill(has_label, MASK_TOKEN))
        labels.append(ids.masked_fill(~has_label, -100))
    masks = [torch.ones_like(ids) for ids in inputs]
    return {
        'input_ids': pad_sequence(inputs, batch_first=True),
        'attention_mask': pad_sequence(masks, batch_first=True),
        'labels': pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def measure(method: str, model: ModernBertForMaskedLM, batches: list[Row]) -> StepClock:
    """Times a step of each batch.

    TokenAccumulation checks rows that are wider than any before. These checks are made in warm-up steps, which do not
    count.
    """
    clock = StepClock()
    if method == 'stock':
        warmup = batches[:1]
        algorithms = []
    else:
        warmup = batches
        algorithms = [TokenAccumulation()]
    data = data_of(method, [*warmup, *batches], BatchLayout.for_model(model))
    num_steps = len(warmup) + len(batches)
    fit(model, data, MICROBATCH, num_steps=num_steps, algorithms=algorithms, callbacks=[clock])
    clock.forget_first(len(warmup))
    return clock


def draw_lengths(divisor: int) -> np.ndarray:
    """Returns the lengths of the rows of each step, (2, 32), divided by a number."""
    length_set = lognormal(0.92, mean=128, longest=1024)
    lengths = np.maximum(length_set.lengths // divisor, 12)
    return np.random.default_rng(SEED).choice(lengths, (2, 32))


def rows_of(clocks: dict[str, list[StepClock]], real_tokens: int) -> list[Row]:
    """Returns the figures of each method: medians over the rounds."""
    seconds_of_rounds = {}
    for method, clocks_of_method in clocks.items():
        seconds_of_rounds[method] = [sum(clock.seconds) for clock in clocks_of_method]
    rows = []
    for method, seconds in seconds_of_rounds.items():
        ratios = []
        for stock_seconds, our_seconds in zip(seconds_of_rounds['stock'], seconds, strict=True):
            ratios.append(stock_seconds / our_seconds)
        rows.append(
            {
                'method': METHODS[method],
                'tokens_per_second': real_tokens / statistics.median(seconds),
                'against_stock': statistics.median(ratios),
                'padding': 1 - real_tokens / sum(clocks[method][0].positions),
                'seconds': seconds,
            }
        )
    return rows


def table_of(results: dict[str, Any]) -> str:
    """Returns the table of the page."""
    rows = []
    for row in results['methods']:
        speed = f'{row["tokens_per_second"]:,.0f}'
        ratio = f'{row["against_stock"]:.1f}'
        padding = f'{row["padding"]:.0%}'.replace('%', ' %')
        rows.append((row['method'], speed, ratio, padding))
    return table(('', 'real tokens a second', 'times stock', 'padding'), rows)


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__, results=RESULTS_FILE)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--quick', action='store_true', help='one round of one step of short rows; the page stays')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = arguments.rounds
    divisor = 1
    if arguments.quick:
        rounds = 1
        divisor = 16
    lengths = draw_lengths(divisor)
    batches = [make_batch(row.tolist(), seed) for seed, row in enumerate(lengths)]
    model = build_model()
    clocks: dict[str, list[StepClock]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method in METHODS:
            clocks[method].append(measure(method, model, batches))
    results = {
        'machine': machine(),
        'variation': lengths.std() / lengths.mean(),
        'mean_length': lengths.mean(),
        'methods': rows_of(clocks, lengths.sum()),
    }
    print(table_of(results))
    write(arguments.results, results)
    if not arguments.quick:
        fill_page(PAGE, {'encoders': table_of(results)})


if __name__ == '__main__':
    main()
