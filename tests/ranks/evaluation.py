# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the metrics of an evaluation with a reference, for many batch sizes, on the ranks of this launch.

    composer -n 2 -m tests.ranks.evaluation

A small LLaVA evaluates 13 rows with 0 to 3 images (one of them without a label) and then 3 of them, in device batches
of 1 to 32 and microbatches of 1 row to all, through the real Trainer. Torch's DistributedSampler repeats samples if the
ranks cannot share them evenly. The reference is one float64 forward of each row. The mean of the mean losses of the
batches is also compared, because some trainers log it. Rank 0 prints a table.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from composer import Evaluator, Trainer
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_tokacc import BatchLayout, token_data_spec
from tests.support.families import FAMILIES, Case, ragged_samples
from tests.support.training import largest, tensors_in

DEVICE_BATCHES = (1, 3, 32)
Row = dict[str, Any]


def held_out(case: Case, count: int) -> list[Row]:
    """Returns rows of unequal length, with images and labels. The last but one has no label.

    Every other row asks for the answer of the model, so that accuracy is neither 0 nor 1.
    """
    samples = []
    for seed in range(4, 7):  # their batches have unlike mean losses
        samples += ragged_samples(seed=seed)
    rows = []
    for sample in samples[:count]:
        num_images = len(sample.media('image'))
        rows.append({**case.encode(sample), 'num_images': [num_images]})
    model = case.model.eval()
    for row in rows[::2]:
        labels = row['labels']
        answers = logits_of(model, row).argmax(-1)
        next_labels = torch.where(labels[:, 1:] == -100, -100, answers)
        row['labels'] = torch.cat([labels[:, :1], next_labels], dim=1)
    rows[-2]['labels'] = torch.full_like(rows[-2]['labels'], -100)
    return rows


def logits_of(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """Returns the logits of every token but the first, (1, tokens - 1, vocabulary)."""
    inputs = tensors_in(row, model.dtype)
    del inputs['labels']
    with torch.no_grad():
        logits = model(**inputs).logits
    return logits[:, :-1]


def reference(case: Case, rows: Sequence[Row]) -> dict[str, float]:
    """Returns cross-entropy and accuracy over all labels, row by row in float64."""
    model = copy.deepcopy(case.model).double().eval()
    total_loss = 0.0
    num_hits = 0
    num_labels = 0
    for row in rows:
        next_tokens = row['labels'][0, 1:]
        has_label = next_tokens != -100
        labels = next_tokens[has_label]
        logits = logits_of(model, row)[0][has_label]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction='sum')
        hits = logits.argmax(-1) == labels
        total_loss += float(loss)
        num_hits += int(hits.sum())
        num_labels += len(labels)
    return {'LanguageCrossEntropy': total_loss / num_labels, 'MaskedAccuracy': num_hits / num_labels}


def mean_of_batches(case: Case, layout: BatchLayout, rows: Sequence[Row], size: int) -> float:
    """Returns the mean of the mean losses of the batches, without batches that have no label."""
    model = copy.deepcopy(case.model).eval()
    losses = []
    for start in range(0, len(rows), size):
        rows_of_batch = rows[start : start + size]
        batch = layout.concat(list(rows_of_batch))
        inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        inputs.pop('num_images', None)
        has_labels = (batch['labels'][:, 1:] != -100).any()
        if has_labels:
            with torch.no_grad():
                loss = model(**inputs).loss
            losses.append(float(loss))
    return sum(losses) / len(losses)


def evaluated(case: Case, layout: BatchLayout, rows: Sequence[Row], size: int, microbatch: int) -> dict[str, Any]:
    """Returns the metrics of the Trainer."""
    dataset = list(rows)
    model = HuggingFaceModel(
        copy.deepcopy(case.model),
        shift_labels=True,
        use_logits=True,
        eval_metrics=[LanguageCrossEntropy(), MaskedAccuracy()],
    )
    sampler = dist.get_sampler(dataset, shuffle=False, drop_last=False)
    loader = DataLoader(dataset, batch_size=size, sampler=sampler, collate_fn=layout.concat)
    evaluator = Evaluator(
        label='eval',
        dataloader=token_data_spec(loader, layout=layout),
        device_eval_microbatch_size=microbatch,
    )
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer = Trainer(model=model, eval_dataloader=evaluator, device='cpu', progress_bar=False)
        trainer.eval()
    metrics = trainer.state.eval_metrics['eval']
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def compare(case: Case, layout: BatchLayout, rows: Sequence[Row], size: int) -> dict[str, float]:
    """Returns the largest relative difference of each metric, over the microbatches of a device batch."""
    expected = reference(case, rows)
    differences = dict.fromkeys(expected, 0.0)
    microbatch_sizes = {1, min(size, 2), size}
    for microbatch_size in sorted(microbatch_sizes):
        metrics = evaluated(case, layout, rows, size, microbatch_size)
        for name, value in metrics.items():
            difference = abs(value / expected[name] - 1)
            differences[name] = largest([differences[name], difference])
    global_size = size * dist.get_world_size()
    mean = mean_of_batches(case, layout, rows, global_size)
    differences['mean of batches'] = abs(mean / expected['LanguageCrossEntropy'] - 1)
    return differences


def print_table(results: dict[str, dict[str, float]]) -> None:
    print(f'relative difference from the reference, {dist.get_world_size()} ranks')
    for name, differences in results.items():
        columns = [f'{metric} {difference:.1e}' for metric, difference in differences.items()]
        print(f'{name:24}', '  '.join(columns))


def main() -> dict[str, dict[str, float]]:
    case = FAMILIES['llava']()
    layout = BatchLayout.for_model(case.model)
    results = {}
    for count in (13, 3):
        rows = held_out(case, count)
        for size in DEVICE_BATCHES:
            results[f'{count} rows, device batch {size}'] = compare(case, layout, rows, size)
    return results


if __name__ == '__main__':
    torch.set_num_threads(1)
    dist.initialize_dist('cpu')
    results = main()
    if dist.get_global_rank() == 0:
        print_table(results)
