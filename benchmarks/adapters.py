# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Adapters of trainers for `verify_invariance` and `measure_token_weights`: examples to copy.

An adapter takes a model and returns a function. The function gets the microbatches of one optimizer step on this rank,
lets the trainer make that step at learning rate 0, and returns the gradients. Programs for more trainers are in
`examples/prove`.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch.utils.data import DataLoader

from benchmarks.timed_steps import Batches, data_with_split, fit
from composer_tokacc import BatchLayout, TokenAccumulation
from composer_tokacc.batch import BatchDict
from composer_tokacc.verify import UnusedParameters

Gradients = dict[str, torch.Tensor]
Step = Callable[[list[BatchDict]], Gradients]


def hugging_face(model: Any) -> Step:
    """Returns a function that makes a step with Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class GradientRecorder(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            self.gradients = gradients_of(model)

    def step(microbatches: list[BatchDict]) -> Gradients:
        recorder = GradientRecorder()
        # The Trainer gives samples to the ranks in turn. So each microbatch is repeated once for each rank: then this
        # rank gets all of its own microbatches, in order.
        samples = []
        for microbatch in microbatches:
            samples += [microbatch] * dist.get_world_size()
        # Restores the environment afterwards, because accelerate sets variables and leaves them.
        with mock.patch.dict('os.environ'), tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=len(microbatches),
                train_sampling_strategy='sequential',
                num_train_epochs=1,
                learning_rate=0.0,
                optim='sgd',
                max_grad_norm=0.0,
                use_cpu=True,
                bf16=False,
                save_strategy='no',
                report_to='none',
                disable_tqdm=True,
                logging_strategy='no',
            )
            trainer = Trainer(
                model=model,
                args=arguments,
                data_collator=lambda samples: samples[0],
                train_dataset=samples,  # pyright: ignore[reportArgumentType]
                callbacks=[recorder],
            )
            trainer.train()
        return recorder.gradients

    return step


class FirstGradient(Callback):
    """Copies the gradients of the first step of Composer's Trainer before the optimizer changes the weights."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if not self.gradients:
            # DDP wraps the model if there are several ranks.
            model = getattr(state.model, 'module', state.model)
            self.gradients = gradients_of(model.model)


def composer(model: Any, *, flag: bool = False, exact: bool = False) -> Step:
    """Returns a function that makes a step with Composer.

    ``flag`` sets Composer's ``accumulate_train_batch_on_tokens``. ``exact`` adds TokenAccumulation. Without it,
    UnusedParameters is added, because DDP must know that a microbatch of text leaves the vision encoder unused.
    """
    layout = BatchLayout.for_model(model)

    def step(microbatches: list[BatchDict]) -> Gradients:
        # Composer wants a whole batch. So the microbatches are joined, and then split at the same rows again.
        batch = layout.concat(microbatches)
        batch_with_image = dict(layout.with_media(batch))  # a dummy image if the model needs one
        sizes = [len(microbatch['input_ids']) for microbatch in microbatches]
        rows_of_microbatches = torch.arange(sum(sizes)).split(sizes)

        def split(batch: BatchDict, size: int | float) -> list[BatchDict]:
            return [layout.select(batch, rows.tolist()) for rows in rows_of_microbatches]

        loader = DataLoader(Batches([batch_with_image]), batch_size=None)
        first_gradient = FirstGradient()
        fit(
            model,
            data_with_split(loader, split),
            max(sizes),
            algorithms=[TokenAccumulation() if exact else UnusedParameters()],
            accumulate_train_batch_on_tokens=flag,
            callbacks=[first_gradient],
        )
        return first_gradient.gradients

    return step


def gradients_of(model: Any) -> Gradients:
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients


def inputs_of(model: Any, batch: BatchDict) -> BatchDict:
    """Returns the entries of the batch that the model's forward takes."""
    arguments = inspect.signature(model.forward).parameters
    return {key: value for key, value in batch.items() if key in arguments}


ADAPTERS: dict[str, Callable[[Any], Step]] = {
    'composer': composer,
    'composer_flag': partial(composer, flag=True),
    'hf': hugging_face,
    'ours': partial(composer, exact=True),
}
TITLES = {
    'composer': 'Composer',
    'composer_flag': 'Composer, accumulate_train_batch_on_tokens',
    'hf': 'Hugging Face Trainer',
    'ours': '**Composer with TokenAccumulation**',
}
