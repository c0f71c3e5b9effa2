# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Hugging Face Trainer: ``python examples/prove/hf_trainer.py``."""

import tempfile

from subject import prove
from transformers import Trainer, TrainingArguments


def step(model, microbatches):
    """One optimizer step. Each sample of the dataset is a microbatch. They are read in order."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=len(microbatches),
            num_train_epochs=1,
            train_sampling_strategy='sequential',
            learning_rate=0.0,
            optim='sgd',
            max_grad_norm=0.0,
            use_cpu=True,
            bf16=False,
            save_strategy='no',
            logging_strategy='no',
            report_to='none',
            disable_tqdm=True,
        )
        Trainer(model, arguments, lambda batches: batches[0], train_dataset=microbatches).train()


prove('Hugging Face Trainer', 'transformers', step)
