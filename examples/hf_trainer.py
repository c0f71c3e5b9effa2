# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Planned batches and exact weights in Hugging Face's Trainer. Composer is not imported.

torchrun --nproc-per-node 2 examples/hf_trainer.py out --steps 5
python examples/hf_trainer.py out                                      # resumes at step 6
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
from ragged import EPOCHS, GLOBAL_BATCH, LEARNING_RATE, Rows, collate, small_llama
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, weighted_microbatches


class RegroupingTrainer(Trainer):
    """A Trainer that gets all planned microbatches of a step as one batch, and trains them in one `training_step`.

    Evaluation, checkpoints, schedules, clipping and logs stay those of the Trainer.
    """

    def __init__(self, *args: Any, loader: RegroupingDataLoader, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.gradient_accumulation_steps != 1 or self.args.n_gpu > 1:
            raise ValueError(
                'A batch is a step: leave `gradient_accumulation_steps` at 1, and launch a rank for each GPU.'
            )
        self.loader = loader

    def get_train_dataloader(self) -> RegroupingDataLoader:
        """Returns our loader unchanged, because its sampler already gives each rank its own samples."""
        return self.loader

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Computes the gradient of a step. Returns a loss whose mean over the ranks is the mean over all tokens."""
        model.train()
        microbatches = list(weighted_microbatches(inputs, device=self.args.device))
        mean = torch.zeros((), device=self.args.device)
        for number, (microbatch, weight) in enumerate(microbatches, start=1):
            # Ranks reduce gradients only in the last microbatch, because they may have unequal numbers of them.
            with contextlib.nullcontext() if number == len(microbatches) else self.accelerator.no_sync(model):
                loss = self.compute_loss(model, self._prepare_inputs(microbatch)) * weight
                self.accelerator.backward(loss)
            mean += loss.detach()
        return mean


def main() -> None:
    """Trains for two epochs, or until step ``--steps``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder')
    parser.add_argument('--steps', type=int, default=-1)
    options = parser.parse_args()
    Path(options.folder).mkdir(parents=True, exist_ok=True)  # all ranks list it, the Trainer makes it on one
    arguments = TrainingArguments(
        options.folder,
        max_steps=options.steps,
        num_train_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        optim='sgd',
        lr_scheduler_type='constant',
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_steps=5,
        report_to='none',
        disable_tqdm=True,
        seed=0,
    )
    dataset = Rows()
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=dataset.lengths,
        global_batch_size=GLOBAL_BATCH,
        max_tokens=64,
        num_replicas=arguments.world_size,
        rank=arguments.process_index,
    )
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    trainer = RegroupingTrainer(small_llama(), arguments, train_dataset=dataset, loader=loader)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.folder))


if __name__ == '__main__':
    main()
