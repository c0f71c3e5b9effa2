# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Real tokens a second of a masked language model: stock Composer padded, ours padded, ours packed.

    taskset -c 0 python -m benchmarks.encoders [--rounds 5]

The model is a ModernBERT with four layers. It has the ratio of vocabulary to hidden size of ModernBERT-base (66). It
trains in float32 and on one thread, on rows of lognormal length in which 30 % of the tokens have a label. The methods
take turns in each round, in the same memory: 4 rows as wide as the device batch. A step is timed from the end of the
step before to its own end. Figures are medians over rounds. Writes results/encoders.json and the table of
docs/encoders.md.
"""

from __future__ import annotations

import statistics
import warnings
from collections import defaultdict

import numpy as np
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from benchmarks.length_sets import lognormal
from benchmarks.machine import machine
from benchmarks.record import DOCS, RESULTS, Row, fill_page, parser_of, table, write
from benchmarks.rivals.data import collate
from benchmarks.timed_steps import StepClock, time_steps
from composer_tokacc import TokenAccumulation
from composer_tokacc.batch import BatchDict

PAGE = DOCS / 'encoders.md'
RESULTS_FILE = RESULTS / 'encoders.json'
METHODS = {'stock': 'stock Composer, padded', 'ours': 'three lines, padded', 'packing': 'three lines, packed'}
VOCABULARY = 8448
MASK_TOKEN = 4
MICROBATCH = 4
# A row of 12 tokens has a label in 99 of 100 cases.
SHORTEST = 12
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


def make_batch(lengths: list[int], seed: int) -> BatchDict:
    """Returns rows of these lengths. 30 % of the tokens are masked and have a label."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(5, VOCABULARY, (length,), generator=generator)
        has_label = torch.rand(length, generator=generator) < 0.3
        rows.append(
            {
                'input_ids': ids.masked_fill(has_label, MASK_TOKEN),
                'attention_mask': torch.ones_like(ids),
                'labels': ids.masked_fill(~has_label, -100),
            }
        )
    return collate(rows)


def measure(method: str, model: ModernBertForMaskedLM, batches: list[BatchDict]) -> StepClock:
    """Times a step of each batch, after steps that do not count."""
    if method == 'stock':
        warmup = batches[:1]
        algorithms = []
    else:
        # TokenAccumulation checks rows that are wider than any before. So all batches are trained on before.
        warmup = batches
        algorithms = [TokenAccumulation()]
    return time_steps(method, model, warmup + batches, MICROBATCH, algorithms=algorithms, num_warmup=len(warmup))


def figures_of(clocks: dict[str, list[StepClock]], real_tokens: int) -> list[Row]:
    """Returns the figures of each method: medians over the rounds."""
    seconds_of_rounds = {}
    for method, clocks_of_method in clocks.items():
        seconds_of_rounds[method] = [sum(clock.seconds) for clock in clocks_of_method]
    rows = []
    for method, seconds in seconds_of_rounds.items():
        times_stock = np.divide(seconds_of_rounds['stock'], seconds)
        num_positions = sum(clocks[method][0].positions)
        rows.append(
            {
                'method': METHODS[method],
                'tokens_per_second': real_tokens / statistics.median(seconds),
                'against_stock': float(np.median(times_stock)),
                'padding': 1 - real_tokens / num_positions,
                'seconds': seconds,
            }
        )
    return rows


def table_of(results: Row) -> str:
    """Returns the table of the page."""
    rows = []
    for row in results['methods']:
        speed = f'{row["tokens_per_second"]:,.0f}'
        ratio = f'{row["against_stock"]:.1f}'
        rows.append((row['method'], speed, ratio, f'{100 * row["padding"]:.0f} %'))
    return table(('', 'real tokens a second', 'times stock', 'padding'), rows)


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__)
    parser.add_argument('--rounds', type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    length_set = lognormal(0.92, mean=128, longest=1024)
    all_lengths = np.maximum(length_set.lengths, SHORTEST)
    # Two steps of 32 rows.
    lengths = np.random.default_rng(SEED).choice(all_lengths, (2, 32))
    batches = []
    for step, lengths_of_step in enumerate(lengths):
        batches.append(make_batch(lengths_of_step.tolist(), seed=step))
    model = build_model()
    clocks = defaultdict(list)
    for _ in range(arguments.rounds):
        for method in METHODS:
            clocks[method].append(measure(method, model, batches))
    results = {
        'machine': machine(),
        'variation': lengths.std() / lengths.mean(),
        'mean_length': lengths.mean(),
        'methods': figures_of(clocks, lengths.sum()),
    }
    print(table_of(results))
    write(arguments.results / RESULTS_FILE.name, results)
    if arguments.results == RESULTS:
        fill_page(PAGE, {'encoders': table_of(results)})


if __name__ == '__main__':
    main()
