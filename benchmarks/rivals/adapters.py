# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""How ``verify_invariance`` attaches to a trainer: examples to copy, each a function from microbatches to gradients.

Each gets this rank's microbatches of one optimizer step and has the trainer make that step at learning rate 0.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import accumulate as accumulate_sum
from typing import Any

import torch
from composer.utils import dist
from torch.utils.data import DataLoader

from benchmarks.timed_steps import Batches
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.verify import UnusedParameters

Batch = dict[str, Any]
Gradients = dict[str, torch.Tensor]
Adapter = Callable[[Any], Callable[[list[Batch]], Gradients]]


def hugging_face(model: Any) -> Callable[[list[Batch]], Gradients]:
    """transformers.Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.gradients = gradients_of(model)

    def gradients(microbatches: list[Batch]) -> Gradients:
        keep = Keep()
        # Samples are dealt to the ranks in turn, so each finds its own where its turn is.
        dealt = [batch for batch in microbatches for _ in range(dist.get_world_size())]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, per_device_train_batch_size=1, gradient_accumulation_steps=len(microbatches),
                train_sampling_strategy='sequential', num_train_epochs=1, learning_rate=0.0, optim='sgd',
                max_grad_norm=0.0, use_cpu=True, bf16=False, save_strategy='no', report_to='none', disable_tqdm=True,
                logging_strategy='no',
            )  # fmt: skip
            Trainer(
                model,
                arguments,
                lambda batches: batches[0],
                train_dataset=dealt,
                callbacks=[keep],  # pyright: ignore
            ).train()
        return keep.gradients

    return gradients


def lightning(model: Any) -> Callable[[list[Batch]], Gradients]:
    """lightning.Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return self.model(**named(model, batch)).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.0)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.gradients = gradients_of(model)

    def gradients(microbatches: list[Batch]) -> Gradients:
        module, ranks = Module(), dist.get_world_size()
        quiet = {f'enable_{name}': False for name in ('checkpointing', 'progress_bar', 'model_summary')}
        trainer = lightning.Trainer(
            accelerator='cpu', devices=ranks, strategy='auto' if ranks == 1 else 'ddp_find_unused_parameters_true',
            accumulate_grad_batches=len(microbatches), max_epochs=1, use_distributed_sampler=False, logger=False,
            **quiet,
        )  # fmt: skip
        trainer.fit(module, DataLoader(microbatches, batch_size=None))  # pyright: ignore[reportArgumentType]
        return module.gradients

    return gradients


def accelerate(model: Any) -> Callable[[list[Batch]], Gradients]:
    """accelerate, "the finished code" of its guide to gradient accumulation."""

    def gradients(microbatches: list[Batch]) -> Gradients:
        accelerator, prepared, optimizer = _prepared(model, len(microbatches))
        for batch in microbatches:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(**named(model, batch)).loss)
                optimizer.step()
        return gradients_of(model)

    return gradients


def accelerate_by_tokens(model: Any) -> Callable[[list[Batch]], Gradients]:
    """accelerate, "training samples of variable size" in the same guide; a router's loss it knows nothing of."""

    def gradients(microbatches: list[Batch]) -> Gradients:
        steps = len(microbatches)
        accelerator, prepared, optimizer = _prepared(model, steps)
        targets = sum((batch['labels'][..., 1:] != -100).sum() for batch in microbatches)
        num_items = accelerator.gather(targets).sum().item()
        for i, batch in enumerate(microbatches):
            with prepared.no_sync() if i < steps - 1 and accelerator.num_processes > 1 else contextlib.nullcontext():
                logits, labels = prepared(**named(model, batch)).logits[:, :-1], batch['labels'][:, 1:]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum')
                accelerator.backward(loss * steps * accelerator.num_processes / num_items)
        optimizer.step()
        return gradients_of(model)

    return gradients


def plain_loop(model: Any) -> Callable[[list[Batch]], Gradients]:
    """A loop with DistributedDataParallel, as tutorials have it: the mean of the microbatches' means."""

    def gradients(microbatches: list[Batch]) -> Gradients:
        parallel = model
        if dist.get_world_size() > 1:
            parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        for i, batch in enumerate(microbatches):
            last = i == len(microbatches) - 1 or parallel is model
            with contextlib.nullcontext() if last else parallel.no_sync():
                (parallel(**named(model, batch)).loss / len(microbatches)).backward()
        return gradients_of(model)

    return gradients


def composer(model: Any, *, flag: bool = False, exact: bool = False) -> Callable[[list[Batch]], Gradients]:
    """Composer by itself, with its ``accumulate_train_batch_on_tokens``, or with TokenAccumulation."""
    from composer import Callback, DataSpec, Trainer
    from composer.models import HuggingFaceModel

    layout = BatchLayout.for_model(model)

    class Keep(Callback):
        def after_train_batch(self, *args: Any) -> None:
            self.gradients = gradients_of(model)

    def gradients(microbatches: list[Batch]) -> Gradients:
        keep, ends = Keep(), list(accumulate_sum(len(batch['input_ids']) for batch in microbatches))
        parts = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        given = DataSpec(
            DataLoader(Batches([dict(layout.with_media(layout.concat(microbatches)))]), batch_size=None),
            split_batch=lambda batch, size: [layout.select(batch, part) for part in parts],
            get_num_samples_in_batch=lambda batch: len(batch['input_ids']),
        )
        Trainer(
            model=HuggingFaceModel(model, shift_labels=True, use_logits=True),
            train_dataloader=given,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
            algorithms=[UnusedParameters(), *([TokenAccumulation()] if exact else [])],
            device_train_microbatch_size=max(map(len, parts)),
            accumulate_train_batch_on_tokens=flag, max_duration='1ba', device='cpu', progress_bar=False,
            callbacks=[keep],
        ).fit()  # fmt: skip
        return keep.gradients

    return gradients


def gradients_of(model: Any) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def named(model: Any, batch: Batch) -> Batch:
    """What the model's forward names of the batch."""
    parameters = inspect.signature(model.forward).parameters
    return {key: value for key, value in batch.items() if key in parameters}


def _prepared(model: Any, steps: int) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True, kwargs_handlers=[unused])
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))


ADAPTERS: dict[str, Adapter] = {
    'plain': plain_loop,
    'composer': composer,
    'composer_flag': partial(composer, flag=True),
    'hf': hugging_face,
    'lightning': lightning,
    'accelerate': accelerate,
    'accelerate_tokens': accelerate_by_tokens,
    'ours': partial(composer, exact=True),
}
