# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""TRL's SFTTrainer: ``python examples/prove/trl_sft.py``."""

from tempfile import mkdtemp

from datasets import Dataset
from subject import prove
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({'.': 0})), pad_token='.', eos_token='.')


def step(model, microbatches):
    """One optimizer step. Each sample is the index of a microbatch, because SFTTrainer wants a Dataset."""
    arguments = SFTConfig(
        mkdtemp(),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(microbatches),
        num_train_epochs=1,
        learning_rate=0.0,
        optim='sgd',
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        report_to='none',
        dataset_kwargs={'skip_prepare_dataset': True},
    )
    indices = Dataset.from_dict({'input_ids': [[index] for index in range(len(microbatches))]})
    SFTTrainer(
        model, arguments, lambda samples: microbatches[samples[0]['input_ids'][0]], indices, processing_class=words
    ).train()


prove('TRL SFTTrainer', 'trl', step)
