# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Every contender trains one epoch by its own public interface, as its documentation shows.

All read the samples in their order where they can be told to, with AdamW at a constant rate, no weight decay, no
clipping (it would hide a gradient that is too long), no checkpoints and no progress bars. What a package's own guide
decides is kept. Each returns the settings it was given.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.rivals.data import Samples, Sizes, build_processor, collate
from benchmarks.rivals.report import BOUND
from composer_tokacc import BatchLayout

Settings = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is trained: the same for all."""

    model: Any
    samples: Samples
    sizes: Sizes
    longest: int
    """Tokens of the longest sample; the memory is that of ``microbatch`` such rows."""

    @property
    def accumulation(self) -> int:
        """Microbatches of a step on each rank, where their rows are fixed."""
        return self.sizes.global_batch // (self.sizes.microbatch * dist.get_world_size())

    @property
    def find_unused(self) -> bool:
        """Whether a microbatch may leave parameters unused: one of text alone leaves the vision tower."""
        return self.sizes.model == 'llava'

    def optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            (model or self.model).parameters(), lr=self.sizes.learning_rate, weight_decay=0.0, foreach=True
        )

    def loader(self, batch_size: int) -> DataLoader:
        """In order, padded to the longest of each batch."""
        return DataLoader(self.samples, batch_size=batch_size, collate_fn=collate, num_workers=self.sizes.workers)


def hugging_face(task: Task, *, strategy: str = 'sequential', flat: bool = False) -> Settings:
    """https://huggingface.co/docs/transformers/main_classes/trainer."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    settings = {**_training_arguments(task), 'train_sampling_strategy': strategy, 'remove_unused_columns': False}
    if flat or strategy == 'batch_rebalance':
        settings |= _rows_that_fit(task, flat=flat)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=task.model,
            args=TrainingArguments(output_dir=folder, **settings),
            train_dataset=_Lists(task.samples) if flat else task.samples,
            data_collator=DataCollatorWithFlattening() if flat else collate,
        ).train()
    return {**settings, 'data_collator': 'DataCollatorWithFlattening' if flat else 'pads, joins images'}


def trl_vision(task: Task) -> Settings:
    """https://huggingface.co/docs/trl/sft_trainer: prompt, completion and images; it runs the processor itself."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = {
        **_training_arguments(task), 'train_sampling_strategy': 'sequential', 'max_length': None,
        'gradient_checkpointing': False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=task.model,
            args=SFTConfig(output_dir=folder, **settings),
            train_dataset=Dataset.from_list(task.samples.messages()),
            processing_class=build_processor(),
        ).train()
    return {**settings, 'dataset': 'prompt, completion, images'}


def online_dynamic_batching(task: Task) -> Settings:
    """Its guide for a loop of one's own: a step a batch, whose loss is scaled exactly; DDP Join on several ranks."""
    import odb

    settings = {
        'token_budget': task.sizes.microbatch * task.longest, 'batch_size': 1, 'shuffle': True,
        'num_workers': task.sizes.workers, 'prefetch_factor': 256 // task.sizes.workers, 'loss_scaling': 'exact',
        'join': True, 'no_warmup': True,
    }  # fmt: skip
    sampler = None
    if dist.get_world_size() > 1:
        sampler, settings['shuffle'] = DistributedSampler(task.samples, seed=17), False
    loader = odb.ODBDataLoader(task.samples, collate_fn=collate, sampler=sampler, **settings)
    model, optimizer = _distributed(task), task.optimizer()
    join = torch.distributed.algorithms.Join([model]) if sampler else contextlib.nullcontext()  # pyright: ignore
    model.train()
    with join:
        for batch in loader:
            info = odb.pop_step_info(batch, loss_scaling='exact')
            loss = model(**batch).loss
            loss = loss * info.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {**settings, 'step': 'each batch', 'sampler': type(sampler).__name__}


def lightning(task: Task) -> Settings:
    """https://lightning.ai/docs/pytorch/stable/common/lightning_module.html, `accumulate_grad_batches`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return task.optimizer()

    settings = {
        'accelerator': 'cpu', 'devices': dist.get_world_size(), 'max_epochs': 1,
        'accumulate_grad_batches': task.accumulation,
        'strategy': 'auto' if dist.get_world_size() == 1 else f'ddp{"_find_unused_parameters_true" * task.find_unused}',
        'use_distributed_sampler': False,  # a DistributedSampler that keeps the order is in the loader
    }  # fmt: skip
    quiet = dict.fromkeys(('logger', 'enable_checkpointing', 'enable_progress_bar', 'enable_model_summary'), False)
    task.model.train()
    lightning.Trainer(**settings, **quiet).fit(Module(), _device_batches(task, task.sizes.microbatch))
    return settings


def accelerate(task: Task) -> Settings:
    """https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation: "the finished code"."""
    accelerator, model, optimizer, loader = _prepared(task, task.accumulation)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return {'gradient_accumulation_steps': task.accumulation, 'cpu': True, 'find_unused_parameters': task.find_unused}


def accelerate_by_tokens(task: Task) -> Settings:
    """The same guide, "training samples of variable size": a sum of losses over the counted targets of the step."""
    accelerator, model, optimizer, loader = _prepared(task, task.accumulation)
    steps, iterator = task.accumulation, iter(loader)
    for _ in range(math.ceil(len(loader) / steps)):
        batches = [batch for _, batch in zip(range(steps), iterator, strict=False)]
        local = sum((batch['labels'][..., 1:] != -100).sum() for batch in batches)
        num_items = accelerator.gather(local).sum().item()
        for i, batch in enumerate(batches):
            ctx = model.no_sync if i < len(batches) - 1 and accelerator.num_processes > 1 else contextlib.nullcontext
            with ctx():
                logits, labels = model(**batch).logits[:, :-1], batch['labels'][:, 1:]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')
                loss = (loss * steps * accelerator.num_processes) / num_items
                accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {'gradient_accumulation_steps': steps, 'cpu': True, 'loss': 'sum / items'}


def composer(task: Task, *, flag: bool = False) -> Settings:
    """Stock Composer. Its own split loses image rows of LLaVA's batches; there it gets one that keeps them."""
    from composer import DataSpec

    from benchmarks.timed_steps import split_of

    loader, extra = _device_batches(task), {}
    if task.sizes.model == 'llava':
        extra = {'split_batch': split_of('stock', BatchLayout.for_model(task.model))}
    data = DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch['input_ids']), **extra)
    settings = {'accumulate_train_batch_on_tokens': flag}
    return _fit(task, data, settings) | {'split_batch': 'one that keeps images' if extra else 'its own'}


def ours(task: Task, *, sampler: bool = False, packing: bool = False) -> Settings:
    """docs/trainer.md: three lines; the sampler's loader; packing."""
    from composer_tokacc import TokenAccumulation, token_data_spec

    settings: Settings = {'packing': packing}
    if sampler:
        loader, planned = _planned(task)
        settings |= {**planned, 'slot_tokens': task.longest}
    else:
        loader = _device_batches(task)
    data = token_data_spec(loader, packing=packing, slot_tokens=settings.get('slot_tokens'))
    return settings | _fit(task, data, {}, TokenAccumulation()) | {'sampler': sampler}


def hugging_face_planned(task: Task) -> Settings:
    """examples/hf_trainer.py: Hugging Face's Trainer with our sampler and weights."""
    from transformers import Trainer, TrainingArguments

    loader, planned = _planned(task)

    class Planned(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            model.train()
            return _planned_step(model, inputs, self.accelerator)

    settings = {**_training_arguments(task), 'per_device_train_batch_size': 1, 'gradient_accumulation_steps': 1}
    with tempfile.TemporaryDirectory() as folder:
        Planned(task.model, TrainingArguments(output_dir=folder, **settings), train_dataset=task.samples).train()
    return settings | planned


def accelerate_planned(task: Task) -> Settings:
    """examples/accelerate_loop.py: accelerate with our sampler and weights."""
    accelerator, model, optimizer, _ = _prepared(task, steps=1)  # accumulation is the sampler's
    loader, planned = _planned(task)
    for batch in loader:
        _planned_step(model, batch, accelerator)
        optimizer.step()
        optimizer.zero_grad()
    return {'cpu': True, 'find_unused_parameters': task.find_unused, **planned}


def _planned(task: Task) -> tuple[Any, Settings]:
    from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader

    settings = {'max_tokens': task.sizes.microbatch * task.longest}
    batches = RegroupingBatchSampler(
        task.samples, lengths=task.samples.lengths, global_batch_size=task.sizes.global_batch, shuffle=False, **settings
    )
    workers = task.sizes.workers
    return RegroupingDataLoader(task.samples, batch_sampler=batches, collate_fn=collate, num_workers=workers), settings


def _planned_step(model: Any, batch: Any, accelerator: Any) -> torch.Tensor:
    from composer_tokacc import weighted_microbatches

    microbatches, mean = list(weighted_microbatches(batch)), torch.zeros(())
    for number, (microbatch, weight) in enumerate(microbatches, start=1):
        with contextlib.nullcontext() if number == len(microbatches) else accelerator.no_sync(model):
            loss = model(**microbatch).loss * weight
            accelerator.backward(loss)
        mean += loss.detach()
    return mean


def bound(task: Task) -> Settings:
    """No rival, but what none can pass: full microbatches of rows as long as each other, the same on every rank.

    The rows of the whole epoch, by length; batches made before, nothing counted. Its positions count as tokens.
    """
    rows, cap = np.argsort(task.samples.lengths), task.sizes.microbatch * task.longest
    groups: list[list[int]] = [[]]
    for row in rows.tolist():
        if (len(groups[-1]) + 1) * task.samples.lengths[row] > cap:
            groups.append([])
        groups[-1].append(row)
    groups = [groups[index] for index in np.random.default_rng(0).permutation(len(groups))]
    batches = [collate([task.samples[row] for row in group]) for group in groups[:: dist.get_world_size()]]
    model, optimizer = _distributed(task), task.optimizer()
    model.train()
    steps = min(len(batches), len(task.samples) // task.sizes.global_batch)
    for step in np.array_split(np.arange(len(batches)), steps):
        for index in step:
            last = index == step[-1] or dist.get_world_size() == 1
            with contextlib.nullcontext() if last else model.no_sync():
                (model(**batches[index]).loss / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {'steps': steps, 'microbatches': len(batches)}


def _rows_that_fit(task: Task, *, flat: bool) -> Settings:
    """Without padding, or with groups of like lengths, the memory holds more rows; a user would find out how many."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    world, lengths, best = dist.get_world_size(), task.samples.lengths, task.sizes.microbatch
    for rows in (2**power for power in range(12)):
        if rows * world > task.sizes.global_batch:
            break
        if flat:
            sizes = [lengths[start : start + rows].sum() for start in range(0, len(lengths), rows)]
        else:
            sizes = [
                len(group) * lengths[group].max()
                for rank in range(world)
                for group in BatchRebalanceSampler(
                    lengths=lengths.tolist(), effective_batch_size=task.sizes.global_batch, dp_size=world,
                    grad_accum=task.sizes.global_batch // (rows * world), rank=rank,
                )
            ]  # fmt: skip
        if max(sizes) <= task.sizes.microbatch * task.longest:
            best = max(best, rows)
    steps = task.sizes.global_batch // (best * world)
    return {'per_device_train_batch_size': best, 'gradient_accumulation_steps': steps}


def _training_arguments(task: Task) -> Settings:
    return {
        'per_device_train_batch_size': task.sizes.microbatch, 'gradient_accumulation_steps': task.accumulation,
        'num_train_epochs': 1, 'learning_rate': task.sizes.learning_rate, 'lr_scheduler_type': 'constant',
        'weight_decay': 0.0, 'max_grad_norm': 0.0, 'optim': 'adamw_torch', 'use_cpu': True, 'bf16': False,
        'dataloader_num_workers': task.sizes.workers, 'save_strategy': 'no', 'report_to': 'none', 'disable_tqdm': True,
        'logging_steps': 10, 'seed': 17,
    }  # fmt: skip


def _prepared(task: Task, steps: int) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    accelerator = Accelerator(
        gradient_accumulation_steps=steps, cpu=True,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=task.find_unused)],
    )  # fmt: skip
    task.model.train()
    return accelerator, *accelerator.prepare(task.model, task.optimizer(), task.loader(task.sizes.microbatch))


def _distributed(task: Task) -> Any:
    if dist.get_world_size() == 1:
        return task.model
    return torch.nn.parallel.DistributedDataParallel(task.model, find_unused_parameters=task.find_unused)


def _device_batches(task: Task, batch_size: int | None = None) -> DataLoader:
    """A rank's share of the global batch, as Composer's users give them, or less, with torch's own sampler."""
    world = dist.get_world_size()
    batch_size = batch_size or task.sizes.global_batch // world
    sampler = DistributedSampler(task.samples, world, dist.get_global_rank(), shuffle=False)
    return DataLoader(
        task.samples, batch_size=batch_size, sampler=sampler, collate_fn=collate, num_workers=task.sizes.workers
    )  # fmt: skip


def _fit(task: Task, data: Any, settings: Settings, *algorithms: Any) -> Settings:
    from composer import Trainer
    from composer.models import HuggingFaceModel

    from composer_tokacc.verify import UnusedParameters

    if not algorithms and task.find_unused:
        algorithms = (UnusedParameters(),)
    settings = {**settings, 'device_train_microbatch_size': task.sizes.microbatch, 'max_duration': '1ep'}
    wrapped = HuggingFaceModel(task.model, shift_labels=True, use_logits=True)
    trainer = Trainer(
        model=wrapped, train_dataloader=data, optimizers=task.optimizer(wrapped), algorithms=list(algorithms),
        device='cpu', progress_bar=False, **settings,
    )  # fmt: skip
    trainer.fit()
    trainer.close()
    # Composer keeps every trainer until the process ends, and each its last batch, outputs and gradients.
    for name in ('batch', 'outputs', 'loss'):
        setattr(trainer.state, name, None)
    return {**settings, 'algorithms': [type(algorithm).__name__ for algorithm in algorithms]}


class _Lists:
    """Samples as lists, as tokenizers return them and the flattening collator wants them."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {key: self.samples[index][key].tolist() for key in ('input_ids', 'labels')}


CONTENDERS: dict[str, Callable[[Task], Settings]] = {
    'composer': composer,
    'composer_flag': partial(composer, flag=True),
    'hf': hugging_face,
    'hf_group': partial(hugging_face, strategy='group_by_length'),
    'hf_rebalance': partial(hugging_face, strategy='batch_rebalance'),
    'hf_flat': partial(hugging_face, flat=True),
    'trl': trl_vision,
    'odb': online_dynamic_batching,
    'lightning': lightning,
    'accelerate': accelerate,
    'accelerate_tokens': accelerate_by_tokens,
    'hf_planned': hugging_face_planned,
    'accelerate_planned': accelerate_planned,
    'ours': ours,
    'ours_sampler': partial(ours, sampler=True),
    'ours_packed': partial(ours, sampler=True, packing=True),
    BOUND: bound,
}


def takes(name: str, model: str) -> bool:
    return {'hf_flat': 'llama', 'trl': 'llava'}.get(name, model) == model
