# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The names that guides use without defining them: a small model, its loader, microbatches of it, an optimizer."""

import torch
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
llama = LlamaForCausalLM(config)
model = HuggingFaceModel(llama, shift_labels=True)
dataset = [torch.randint(3, 64, (int(length),)) for length in torch.randint(3, 40, (32,))]


def collate(samples):
    """Pads rows on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
    return {'input_ids': ids, 'attention_mask': (labels != -100).long(), 'labels': labels}


train_dataloader = DataLoader(dataset, batch_size=8, collate_fn=collate)
eval_dataloader = DataLoader(dataset[:8], batch_size=4, collate_fn=collate)
microbatches = [collate(dataset[:2]), collate(dataset[2:3]), collate(dataset[3:8])]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
