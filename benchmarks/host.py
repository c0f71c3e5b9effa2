# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the main process spends between two steps: transforms, counts, dummy rows and the split.

    python -m benchmarks.host [--batches 20]

LLaVA rows of lognormal text and one 336 x 336 image each, 32 and 128 on a rank, alone and as one of two ranks (the
other is simulated: what it would wait for is left out). `ours` reads them with a RegroupingDataLoader, `foreign` with a
plain DataLoader and token_data_spec, `stock` is Composer's own counting and split, which copies nothing because it cuts
nothing off. `copy` is one plain copy of the batch. Bytes are those of new tensors made on the main process. Prints p50
and p99 of the clock, and p50 of processor time, which other work on the machine disturbs less; writes
results/host.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from composer.core import DataSpec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from transformers import LlavaConfig

from benchmarks.machine import machine
from benchmarks.record import parser_of, show, write
from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, token_data_spec
from composer_tokacc.batch import check_batch
from composer_tokacc.data_spec.cut_rules import CutRules
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import BatchLayout, describe_all, microbatches_of
from composer_tokacc.layout.ranges import RowRanges, ranges_of
from composer_tokacc.metadata import annotate, num_loss_tokens, num_samples
from composer_tokacc.planning import CostModel

IMAGE_TOKEN, IMAGE_LENGTH, SIDE = 32000, 576, 336
VOCABULARY = IMAGE_TOKEN + 64
SLOT_TOKENS, MICROBATCH_SIZE = 2048, 4
NUM_SAMPLES = 4096


class Rows(Dataset):
    """Encoded samples; all share one image, because decoding is not what is measured."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        texts = np.clip(rng.lognormal(5.0, 0.8, NUM_SAMPLES).astype(int), 8, SLOT_TOKENS - IMAGE_LENGTH)
        self.lengths = texts + IMAGE_LENGTH
        self.image = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(self.lengths[index]) % 1000 + 3
        ids[1 : 1 + IMAGE_LENGTH] = IMAGE_TOKEN
        return {'input_ids': ids, 'pixel_values': self.image, 'sample_ids': str(index)}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Right-padded, as a Hugging Face processor makes it."""
    ids = torch.nn.utils.rnn.pad_sequence([sample['input_ids'] for sample in samples], batch_first=True)
    mask = (ids != 0).long()
    return {
        'input_ids': ids,
        'attention_mask': mask,
        'labels': ids.masked_fill((mask == 0) | (ids == IMAGE_TOKEN), -100),
        'pixel_values': torch.cat([sample['pixel_values'] for sample in samples]),
        'sample_ids': [sample['sample_ids'] for sample in samples],
    }


class NewBytes(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations make; views are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        known = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and _place(leaf) not in known:
                self.total += leaf.nbytes
        return outputs


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def ranks(count: int) -> Iterator[None]:
    """Makes the split take itself for one rank of several, which all answer as this one."""
    room = 'composer_tokacc.data_spec'
    world = mock.patch(f'{room}.split.get_world_size', return_value=count)
    with world, mock.patch(f'{room}.in_step.max_over_ranks', list):
        yield


def preparing(spec: DataSpec, layout: BatchLayout | None) -> Callable[[Any], Any]:
    """What happens to a batch before its first microbatch is moved.

    Args:
        spec: Of the loader.
        layout: For what TokenAccumulation does beside; None: what Composer does by itself.
    """

    def prepare(batch: Any) -> Any:
        batch = spec.batch_transforms(batch)
        spec.get_num_samples_in_batch(batch)
        spec.get_num_tokens_in_batch(batch)
        if layout is not None:
            for microbatch in microbatches_of(batch):
                check_batch(microbatch, VOCABULARY)
            batch = annotate(batch, 'causal')
            RowRanges().missing(ranges_of(describe_all(layout, batch)))
            num_loss_tokens(batch), num_samples(batch)
        return spec.split_batch(batch, MICROBATCH_SIZE)

    return prepare


def plain_copy(batch: Any) -> Any:
    return {key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)}


def loaders(dataset: Rows, num_rows: int) -> dict[str, DataLoader]:
    sampler = RegroupingBatchSampler(
        dataset, lengths=dataset.lengths, image_tokens=np.full(NUM_SAMPLES, IMAGE_LENGTH), global_batch_size=num_rows,
        max_tokens=MICROBATCH_SIZE * SLOT_TOKENS, num_replicas=1, rank=0, cost=CostModel(), drop_last=True,
    )  # fmt: skip
    return {
        'ours': RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate),
        'foreign': DataLoader(dataset, batch_size=num_rows, shuffle=True, collate_fn=collate, drop_last=True),
    }


def specs(given: dict[str, DataLoader], layout: BatchLayout) -> dict[str, Callable[[Any], Any]]:
    prepared: dict[str, Callable[[Any], Any]] = {}
    for name, loader in given.items():
        spec = token_data_spec(loader, layout=layout, slot_tokens=SLOT_TOKENS, loss_tokens='causal')
        split: Any = split_of(loader)
        # As the algorithm leaves it after the first step under DDP.
        split.adopt(CutRules(left='trim', right='trim'), reduces_once=True)
        prepared[name] = preparing(spec, layout)
    return {**prepared, 'stock': preparing(DataSpec(given['foreign']), None), 'copy': plain_copy}


def percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {'p50_ms': round(float(p50), 2), 'p99_ms': round(float(p99), 2)}


def between_steps(
    dataset: Rows, layout: BatchLayout, num_rows: int, *, num_ranks: int, num_batches: int
) -> dict[str, Any]:
    """Time and new bytes of a batch, in turns, so that all meet the same noise of the machine."""
    given = loaders(dataset, num_rows)
    prepared = specs(given, layout)
    iterators = {name: iter(loader) for name, loader in given.items()}
    seconds: dict[str, list[float]] = {name: [] for name in prepared}
    processor: dict[str, list[float]] = {name: [] for name in prepared}
    new_bytes: dict[str, int] = {}
    for number in range(num_batches + 1):
        for name, prepare in prepared.items():
            batch = next(iterators.get(name, iterators['foreign']), None)
            if batch is None:
                source = name if name in given else 'foreign'
                iterators[source] = iter(given[source])
                batch = next(iterators[source])
            with ranks(num_ranks):
                if number == 0:  # warms up as well
                    with NewBytes() as counter:
                        prepare(batch)
                    new_bytes[name] = counter.total
                    continue
                started, cpu_started = time.perf_counter(), time.process_time()
                prepare(batch)
                seconds[name].append(time.perf_counter() - started)
                processor[name].append(time.process_time() - cpu_started)
    return {
        name: {
            **percentiles(seconds[name]),
            'processor_p50_ms': percentiles(processor[name])['p50_ms'],
            'new_mib': round(new_bytes[name] / 2**20, 2),
        }
        for name in prepared
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument('--batches', type=int, default=20)
    given = parser.parse_args()
    dataset = Rows()
    layout = BatchLayout.for_model(LlavaConfig(image_token_index=IMAGE_TOKEN, image_seq_length=IMAGE_LENGTH))
    results: dict[str, Any] = {'machine': machine(), 'between_steps': {}}
    for num_rows in (32, 128):
        for count in (1, 2):
            found = between_steps(dataset, layout, num_rows, num_ranks=count, num_batches=given.batches)
            results['between_steps'][f'{num_rows} rows, {count} rank{"s"[: count - 1]}'] = found
            show(f'{num_rows} rows, {count} ranks', [{'': name, **row} for name, row in found.items()])
    write(given.results / 'host.json', results)


if __name__ == '__main__':
    main()
