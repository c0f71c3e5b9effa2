# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Whether evaluation depends on its batch size or the number of ranks: cross-entropy and accuracy of held-out rows.

    composer -n 2 -m benchmarks.evaluation [result.json]

A small LLaVA evaluates 13 rows with 0 to 3 images (one of them without a label) and then 3 of them, in device batches
of 1 to 32 and microbatches of 1 row to all, through the real Trainer; torch's DistributedSampler pads what the ranks
cannot share evenly. The reference is one float64 forward a row. Beside it the mean of the batches' mean losses, which
trainers log that do not weight batches by their tokens. Rank 0 prints a table and writes the file.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Evaluator, Trainer
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_tokacc import BatchLayout, token_data_spec
from tests.support.families import FAMILIES, FamilyCase, ragged_samples

DEVICE_BATCHES = (1, 2, 3, 8, 32)
Row = dict[str, Any]


def held_out(case: FamilyCase, count: int) -> list[Row]:
    """Rows of unequal length, images and labels; the last but one has no label.

    Every other row asks for what the model answers, so that accuracy is neither 0 nor 1.
    """
    samples = [sample for seed in range(1, 4) for sample in ragged_samples(with_images=True, seed=seed)][:count]
    rows = [{**case.encode(sample), 'num_images': [len(sample.images)]} for sample in samples]
    for row in rows[::2]:
        labels = row['labels']
        answered = logits_of(case.model.eval(), row).argmax(-1)
        row['labels'] = torch.cat([labels[:, :1], torch.where(labels[:, 1:] == -100, -100, answered)], dim=1)
    rows[-2]['labels'] = torch.full_like(rows[-2]['labels'], -100)
    return rows


def logits_of(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """What the model says of every token but the first, (1, tokens - 1, vocabulary)."""
    inputs = {name: value for name, value in row.items() if isinstance(value, torch.Tensor) and name != 'labels'}
    inputs = {name: v.to(model.dtype) if v.is_floating_point() else v for name, v in inputs.items()}
    with torch.no_grad():
        return model(**inputs).logits[:, :-1]


def reference(case: FamilyCase, rows: Sequence[Row]) -> dict[str, float]:
    """Cross-entropy and accuracy over all labels of all rows, row by row in float64."""
    model = copy.deepcopy(case.model).double().eval()
    losses, hits, count = 0.0, 0, 0
    for row in rows:
        logits = logits_of(model, row)[0]
        labels = row['labels'][0, 1:]
        kept = labels != -100
        losses += float(torch.nn.functional.cross_entropy(logits[kept], labels[kept], reduction='sum'))
        hits += int((logits.argmax(-1) == labels)[kept].sum())
        count += int(kept.sum())
    return {'LanguageCrossEntropy': losses / count, 'MaskedAccuracy': hits / count}


def mean_of_batches(case: FamilyCase, layout: BatchLayout, rows: Sequence[Row], size: int) -> float:
    """Mean of the batches' own mean losses, in the order of the rows; a batch without a label is left out."""
    model = copy.deepcopy(case.model).eval()
    losses = []
    for start in range(0, len(rows), size):
        batch = layout.concat(list(rows[start : start + size]))
        named = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        with torch.no_grad():
            loss = float(model(**{k: v for k, v in named.items() if k != 'num_images'}).loss)
        losses.append(loss)
    kept = [loss for loss in losses if loss == loss]
    return sum(kept) / len(kept)


def evaluated(case: FamilyCase, layout: BatchLayout, rows: Sequence[Row], size: int, microbatch: int) -> dict[str, Any]:
    wrapped = HuggingFaceModel(
        copy.deepcopy(case.model),
        shift_labels=True,
        use_logits=True,
        eval_metrics=[LanguageCrossEntropy(), MaskedAccuracy()],
    )
    sampler = dist.get_sampler(list(rows), shuffle=False, drop_last=False)
    loader = DataLoader(list(rows), batch_size=size, sampler=sampler, collate_fn=layout.concat)
    held = Evaluator(
        label='eval', dataloader=token_data_spec(loader, layout=layout), device_eval_microbatch_size=microbatch
    )
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        trainer = Trainer(model=wrapped, eval_dataloader=held, device='cpu', progress_bar=False)
        trainer.eval()
    return {name: float(metric.compute()) for name, metric in trainer.state.eval_metrics['eval'].items()}


def main() -> None:
    torch.set_num_threads(1)
    dist.initialize_dist('cpu')
    case = FAMILIES['llava']()
    layout = BatchLayout.for_model(case.model)
    found: dict[str, Any] = {}
    for count in (13, 3):
        rows = held_out(case, count)
        expected = reference(case, rows)
        for size in DEVICE_BATCHES:
            sizes = (1, 2, size) if size > 2 else (size,)
            figures = [evaluated(case, layout, rows, size, microbatch) for microbatch in sizes]
            key = f'{count} rows, device batch {size}'
            found[key] = {
                name: max(abs(one[name] - value) / value for one in figures) for name, value in expected.items()
            }
            mean, right = (
                mean_of_batches(case, layout, rows, size * dist.get_world_size()),
                expected['LanguageCrossEntropy'],
            )
            found[key]['mean of batches'] = abs(mean - right) / right
    if dist.get_global_rank() == 0:
        print(f'relative difference from the reference, {dist.get_world_size()} ranks')
        for key, figures in found.items():
            print(f'{key:24}', '  '.join(f'{name} {value:.1e}' for name, value in figures.items()))
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == '__main__':
    main()
