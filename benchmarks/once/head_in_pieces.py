# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares output embedding and loss in pieces with microbatches of fewer rows: memory and time.

    python -m benchmarks.once.head_in_pieces [--rounds 3]

The text model has a vocabulary of 152,000. All positions have a label, and activations are checkpointed. A piece has
1,024 positions and is computed again in the backward. Each run has its own process, because the system reports the peak
memory of a process.
Writes results/head_in_pieces.json (docs/decisions/head_in_pieces.md).
"""

from __future__ import annotations

import resource
import statistics
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write

VOCABULARY = 152_000
ROWS = 4
WIDTH = 512
PIECE = 1024
# Rows of a microbatch, and whether its head runs in pieces.
CASES = {'one microbatch': (4, False), 'in pieces': (4, True), 'two microbatches': (2, False)}


def mean_loss(model: LlamaForCausalLM, ids: torch.Tensor, num_labels: int, *, in_pieces: bool) -> torch.Tensor:
    """Returns the summed loss of these rows over the number of all labels."""
    outputs = model.model(input_ids=ids)
    hidden_states = outputs.last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()

    def loss_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden), targets, reduction='sum') / num_labels

    if not in_pieces:
        return loss_of(hidden_states, labels)
    total = torch.zeros(())
    for hidden, targets in zip(hidden_states.split(PIECE), labels.split(PIECE), strict=True):
        loss: Any = checkpoint(loss_of, hidden, targets, use_reentrant=False)
        total = total + loss
    return total


def measure(case: str) -> dict[str, float]:
    """Returns the processor time of a step, and the peak memory of this process without the model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({'use_reentrant': False})
    ids = torch.randint(3, VOCABULARY, (ROWS, WIDTH))
    rows, in_pieces = CASES[case]
    resident_pages = int(Path('/proc/self/statm').read_text().split()[1])
    model_mib = resident_pages * resource.getpagesize() / 2**20
    seconds = []
    for _ in range(3):
        start = time.process_time()
        model.zero_grad()
        for microbatch in ids.split(rows):
            mean_loss(model, microbatch, ROWS * (WIDTH - 1), in_pieces=in_pieces).backward()
        seconds.append(time.process_time() - start)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {'seconds': min(seconds), 'mib': peak_mib - model_mib}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--rounds', type=int, default=3)
    arguments = parser.parse_args()
    results: dict[str, list[Any]] = {case: [] for case in CASES}
    for _ in range(arguments.rounds):
        for case, runs in results.items():
            with get_context('spawn').Pool(1) as pool:
                runs.append(pool.apply(measure, [case]))
    rows = []
    for case, runs in results.items():
        row: dict[str, Any] = {'case': case}
        for figure in ('seconds', 'mib'):
            row[figure] = statistics.median(run[figure] for run in runs)
        rows.append(row)
    show('One step', rows)
    write(arguments.results / 'head_in_pieces.json', {'machine': machine(), 'results': rows, 'runs': results})


if __name__ == '__main__':
    main()
