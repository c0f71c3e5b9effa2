# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The names that guides use without defining them: a small model, its loader, microbatches of it, an optimizer."""

import torch
from composer.models import HuggingFaceModel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
llama = LlamaForCausalLM(config)
model = HuggingFaceModel(llama, shift_labels=True)
lengths = torch.randint(3, 40, (32,)).tolist()
dataset = [torch.randint(3, 64, (length,)) for length in lengths]


def collate(samples):
    """Pads rows on the right."""
    ids = pad_sequence(samples, batch_first=True)
    labels = pad_sequence(samples, batch_first=True, padding_value=-100)
    mask = (labels != -100).long()
    return {'input_ids': ids, 'attention_mask': mask, 'labels': labels}


train_dataloader = DataLoader(dataset, batch_size=8, collate_fn=collate)
eval_dataloader = DataLoader(dataset[:8], batch_size=4, collate_fn=collate)
microbatches = [collate(dataset[:2]), collate(dataset[2:3]), collate(dataset[3:8])]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
