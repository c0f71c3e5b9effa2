# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Names in the tables, in their order; apart, so that the page is made where no rival is installed."""

from __future__ import annotations

BOUND = 'bound'
CONTENDER_TITLES = {
    'composer': 'Composer',
    'composer_flag': 'Composer, accumulate_train_batch_on_tokens',
    'hf': 'Hugging Face Trainer',
    'hf_group': 'Hugging Face Trainer, group_by_length',
    'hf_rebalance': 'Hugging Face Trainer, batch_rebalance',
    'hf_flat': 'Hugging Face Trainer, padding-free',
    'trl': 'TRL SFTTrainer, vision',
    'odb': 'ODB, exact loss scaling',
    'lightning': 'Lightning',
    'accelerate': 'accelerate',
    'accelerate_tokens': 'accelerate, loss by tokens',
    'hf_planned': 'Hugging Face Trainer, our sampler and weights',
    'accelerate_planned': 'accelerate, our sampler and weights',
    'ours': 'ours, three lines',
    'ours_sampler': 'ours, with the sampler',
    'ours_packed': 'ours, packed',
    BOUND: '*no padding, perfectly balanced*',
}
OUR_SAMPLER = ('hf_planned', 'accelerate_planned')
"""Its batches and weights in the trainers of others."""
OURS = ('ours', 'ours_sampler', 'ours_packed')
TRAINER_TITLES = {
    'plain': 'a plain loop, mean of means',
    'composer': 'Composer',
    'composer_flag': 'Composer, accumulate_train_batch_on_tokens',
    'hf': 'Hugging Face Trainer',
    'lightning': 'Lightning',
    'accelerate': 'accelerate',
    'accelerate_tokens': 'accelerate, loss by tokens',
    'ours': '**Composer with TokenAccumulation**',
}
