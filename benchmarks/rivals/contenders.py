# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains one epoch with each contender, by its own public interface and as its documentation shows.

All use AdamW at a constant rate, without weight decay and checkpoints. None clips gradients, because that would hide a
gradient that is too long. All read the samples in order if they can. Other settings are those of the package's guide.
Each function returns the settings of the run.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from composer import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.rivals.data import Samples, Sizes, collate
from benchmarks.rivals.report import BOUND
from benchmarks.timed_steps import data_with_split, fit, stock_split
from composer_tokacc import (
    BatchLayout,
    RegroupingBatchSampler,
    RegroupingDataLoader,
    TokenAccumulation,
    token_data_spec,
    weighted_microbatches,
)
from composer_tokacc.batch import BatchDict
from composer_tokacc.data.processor import train_tokenizer
from composer_tokacc.verify import UnusedParameters

Settings = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """The model and the samples, the same for all contenders."""

    model: Any
    samples: Samples
    sizes: Sizes

    @property
    def longest(self) -> int:
        return int(self.samples.lengths.max())

    @property
    def cap(self) -> int:
        """Returns the most positions that a microbatch may have: as many as the memory holds."""
        return self.sizes.microbatch * self.longest

    @property
    def find_unused(self) -> bool:
        """Whether a microbatch may leave parameters unused. A text-only one does not use the vision encoder."""
        return self.sizes.model == 'llava'

    def steps_of_accumulation(self, rows: int) -> int:
        return self.sizes.global_batch // (rows * dist.get_world_size())

    def optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        return torch.optim.AdamW(parameters, lr=self.sizes.learning_rate, weight_decay=0.0, foreach=True)

    def distributed_model(self) -> Any:
        if dist.get_world_size() == 1:
            return self.model
        return torch.nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=self.find_unused)

    def device_batches(self) -> DataLoader:
        """Returns a loader with torch's own sampler. A batch is this rank's part of a global batch."""
        world_size = dist.get_world_size()
        sampler = DistributedSampler(self.samples, world_size, dist.get_global_rank(), shuffle=False)
        return DataLoader(
            self.samples,
            batch_size=self.sizes.global_batch // world_size,
            sampler=sampler,
            collate_fn=collate,
            num_workers=self.sizes.workers,
        )

    def planned_batches(self) -> RegroupingDataLoader:
        """Returns a loader with our sampler."""
        sampler = RegroupingBatchSampler(
            self.samples,
            lengths=self.samples.lengths,
            global_batch_size=self.sizes.global_batch,
            shuffle=False,
            max_tokens=self.cap,
        )
        return RegroupingDataLoader(
            self.samples,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=self.sizes.workers,
        )


def hugging_face(task: Task, *, strategy: str = 'sequential') -> Settings:
    """Trains with Hugging Face's Trainer: https://huggingface.co/docs/transformers/main_classes/trainer."""
    from transformers import Trainer, TrainingArguments

    rows = task.sizes.microbatch
    if strategy == 'batch_rebalance':
        rows = rows_of_rebalanced_microbatch(task)
    settings = {
        **hugging_face_settings(task, rows),
        'train_sampling_strategy': strategy,
        'remove_unused_columns': False,
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, **settings)
        Trainer(task.model, arguments, data_collator=collate, train_dataset=task.samples).train()
    return settings


def rows_of_rebalanced_microbatch(task: Task) -> int:
    """Returns how many rows a microbatch of `batch_rebalance` may have. A user would find this number by trying.

    The sampler groups samples of similar lengths. So more rows fit than if each were as long as the longest sample.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    world_size = dist.get_world_size()
    lengths = task.samples.lengths
    best = rows = task.sizes.microbatch
    while rows * world_size <= task.sizes.global_batch:
        largest = 0
        for rank in range(world_size):
            sampler = BatchRebalanceSampler(
                lengths=lengths.tolist(),
                effective_batch_size=task.sizes.global_batch,
                dp_size=world_size,
                grad_accum=task.steps_of_accumulation(rows),
                rank=rank,
            )
            for group in sampler:
                largest = max(largest, len(group) * lengths[group].max())
        if largest <= task.cap:
            best = rows
        rows *= 2
    return best


def hugging_face_settings(task: Task, rows: int) -> Settings:
    return {
        'per_device_train_batch_size': rows,
        'gradient_accumulation_steps': task.steps_of_accumulation(rows),
        'num_train_epochs': 1,
        'learning_rate': task.sizes.learning_rate,
        'lr_scheduler_type': 'constant',
        'weight_decay': 0.0,
        'max_grad_norm': 0.0,
        'optim': 'adamw_torch',
        'use_cpu': True,
        'bf16': False,
        'dataloader_num_workers': task.sizes.workers,
        'save_strategy': 'no',
        'report_to': 'none',
        'disable_tqdm': True,
        'logging_steps': 10,
        'seed': 17,
    }


def trl(task: Task) -> Settings:
    """Trains with TRL, and its loss that computes logits in chunks: https://huggingface.co/docs/trl/sft_trainer.

    TRL drops positions without a label only if it finds a GPU with Triton.
    On a CPU it would compute all logits. So the patch tells it that Triton is there. Its kernels notice by themselves
    that it is missing.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl.trainer import utils

    samples = []
    for index in range(len(task.samples)):
        sample = task.samples[index]
        ids = sample['input_ids'].tolist()
        labels = sample['labels'].tolist()
        samples.append({'input_ids': ids, 'labels': labels})
    settings = {
        **hugging_face_settings(task, task.sizes.microbatch),
        'loss_type': 'nll',
        'train_sampling_strategy': 'sequential',
        'max_length': None,
        'gradient_checkpointing': False,
    }
    tokenizer = train_tokenizer(['text'], model_max_length=8192)
    drops_positions = mock.patch.object(utils, '_use_triton', return_value=True)
    with tempfile.TemporaryDirectory() as folder, drops_positions:
        arguments = SFTConfig(output_dir=folder, **settings)
        dataset = Dataset.from_list(samples)
        SFTTrainer(task.model, arguments, train_dataset=dataset, processing_class=tokenizer).train()
    return settings


def online_dynamic_batching(task: Task) -> Settings:
    """Trains with ODB as in its guide for custom loops: each batch is a step, and its loss is scaled exactly."""
    import odb

    settings = {
        'token_budget': task.cap,
        'batch_size': 1,
        'shuffle': dist.get_world_size() == 1,  # on several ranks the sampler shuffles
        'num_workers': task.sizes.workers,
        'prefetch_factor': 256 // task.sizes.workers,  # a window as large as in its guide, 4 workers x 64
        'loss_scaling': 'exact',
        'join': True,
        'no_warmup': True,  # this short epoch would end while the window still grows
    }
    model = task.distributed_model()
    optimizer = task.optimizer()
    sampler = None
    join: Any = contextlib.nullcontext()
    if dist.get_world_size() > 1:
        sampler = DistributedSampler(task.samples, seed=17)
        join = torch.distributed.algorithms.Join([model])  # pyright: ignore[reportAttributeAccessIssue]
    loader = odb.ODBDataLoader(task.samples, collate_fn=collate, sampler=sampler, **settings)
    model.train()
    with join:
        for batch in loader:
            info = odb.pop_step_info(batch, loss_scaling='exact')
            loss = model(**batch).loss * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**settings, 'step': 'each batch'}


def hugging_face_planned(task: Task) -> Settings:
    """Trains with Hugging Face's Trainer, our sampler and our weights, as examples/hf_trainer.py does."""
    from transformers import Trainer, TrainingArguments

    loader = task.planned_batches()

    class PlannedTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            model.train()
            return backward_of_step(model, inputs, self.accelerator)

    settings = hugging_face_settings(task, rows=1)
    settings['gradient_accumulation_steps'] = 1  # a batch of the loader is a whole step, of several microbatches
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, **settings)
        PlannedTrainer(task.model, arguments, train_dataset=task.samples).train()
    return {**settings, 'max_tokens': task.cap}


def accelerate_planned(task: Task) -> Settings:
    """Trains in a loop with accelerate, our sampler and our weights, as examples/accelerate_loop.py does."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    unused = DistributedDataParallelKwargs(find_unused_parameters=task.find_unused)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
    model, optimizer = accelerator.prepare(task.model, task.optimizer())
    model.train()
    for batch in task.planned_batches():
        backward_of_step(model, batch, accelerator)
        optimizer.step()
        optimizer.zero_grad()
    return {'cpu': True, 'find_unused_parameters': task.find_unused, 'max_tokens': task.cap}


def backward_of_step(model: Any, batch: Any, accelerator: Any) -> torch.Tensor:
    """Computes the gradients of all microbatches and returns their loss."""
    microbatches = list(weighted_microbatches(batch))
    mean = torch.zeros(())
    for number, (microbatch, weight) in enumerate(microbatches, start=1):
        # The ranks sum their gradients in their last microbatch.
        is_last = number == len(microbatches)
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            loss = model(**microbatch).loss * weight
            accelerator.backward(loss)
        mean += loss.detach()
    return mean


def stock_composer(task: Task) -> Settings:
    """Trains with stock Composer. Its own split loses images of LLaVA's batches, so it gets one that keeps them."""
    split = None
    algorithms = []
    if task.sizes.model == 'llava':
        split = partial(stock_split, BatchLayout.for_model(task.model))
        algorithms.append(UnusedParameters())
    return fit_composer(task, data_with_split(task.device_batches(), split), algorithms)


def token_accumulation(
    task: Task,
    *,
    sampler: bool = False,
    packing: bool = False,
    logits: str = 'auto',
) -> Settings:
    """Trains with TokenAccumulation as in docs/trainer.md: the three lines, and perhaps our sampler and packing."""
    loader = task.planned_batches() if sampler else task.device_batches()
    slot_tokens = task.longest if sampler else None
    data = token_data_spec(loader, packing=packing, slot_tokens=slot_tokens)
    settings = fit_composer(task, data, [TokenAccumulation(logits=logits)])
    return {**settings, 'sampler': sampler, 'packing': packing, 'logits': logits}


def fit_composer(task: Task, data: DataSpec, algorithms: list[Any]) -> Settings:
    rows = task.sizes.microbatch
    fit(task.model, data, rows, '1ep', optimizer=task.optimizer(), algorithms=algorithms)
    return {
        'device_train_microbatch_size': rows,
        'max_duration': '1ep',
        'algorithms': [type(algorithm).__name__ for algorithm in algorithms],
    }


def bound(task: Task) -> Settings:
    """Trains at the speed that no contender can exceed: in full microbatches of rows of nearly equal length.

    The microbatches are made before the first step. All positions count as tokens. All ranks train on the same
    microbatches, so that their work is equal. So on W ranks an epoch has only each W-th of them.
    """
    batches = full_microbatches(task)[:: dist.get_world_size()]
    model = task.distributed_model()
    optimizer = task.optimizer()
    model.train()
    num_steps = min(len(batches), len(task.samples) // task.sizes.global_batch)
    for indices in np.array_split(np.arange(len(batches)), num_steps):
        for index in indices:
            # DDP sums the gradients over the ranks once a step. Without DDP there is no `no_sync`.
            synchronizes = index == indices[-1] or dist.get_world_size() == 1
            with contextlib.nullcontext() if synchronizes else model.no_sync():
                loss = model(**batches[index]).loss / len(indices)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {'steps': num_steps, 'microbatches': len(batches)}


def full_microbatches(task: Task) -> list[BatchDict]:
    """Sorts the samples by length, and cuts them into microbatches as large as the memory. Shuffles these."""
    lengths = task.samples.lengths
    groups: list[list[int]] = [[]]
    for row in np.argsort(lengths).tolist():
        if (len(groups[-1]) + 1) * lengths[row] > task.cap:
            groups.append([])
        groups[-1].append(row)
    batches = []
    for index in np.random.default_rng(0).permutation(len(groups)):
        samples = [task.samples[row] for row in groups[index]]
        batches.append(collate(samples))
    return batches


CONTENDERS: dict[str, Callable[[Task], Settings]] = {
    'composer': stock_composer,
    'hf': hugging_face,
    'hf_group': partial(hugging_face, strategy='group_by_length'),
    'hf_rebalance': partial(hugging_face, strategy='batch_rebalance'),
    'trl': trl,
    'odb': online_dynamic_batching,
    'hf_planned': hugging_face_planned,
    'accelerate_planned': accelerate_planned,
    'ours': token_accumulation,
    'ours_all_logits': partial(token_accumulation, sampler=True, logits='all'),
    'ours_sampler': partial(token_accumulation, sampler=True),
    'ours_packed': partial(token_accumulation, sampler=True, packing=True),
    BOUND: bound,
}
