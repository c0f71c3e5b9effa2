# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of unequal lengths and two small models, for the example programs in this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

VOCABULARY = 64
GLOBAL_BATCH = 8
EPOCHS = 2
LEARNING_RATE = 0.5
IGNORED = -100  # label of a position without loss


class Rows(torch.utils.data.Dataset):
    """25 rows of 3 to 60 random tokens, most of them short. A row begins with a prompt of 0 to 2 tokens.

    Row 7 is all prompt, so it has no label.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = 3 + 8 * torch.randn(25, generator=generator).exp()
        self.lengths = sizes.clamp(max=60).long().tolist()
        self.rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Returns the tokens of a row, and how many of them are the prompt."""
        ids = self.rows[index]
        prompt_length = len(ids) if index == 7 else index % 3
        return ids, prompt_length


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Returns a batch of rows, padded on the right. Labels of the prompt and of padding are -100."""
    width = max(len(ids) for ids, _ in samples)
    input_ids = torch.zeros(len(samples), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (ids, prompt_length) in enumerate(samples):
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        labels[row, prompt_length : len(ids)] = ids[prompt_length:]
    return {'input_ids': input_ids, 'attention_mask': attention_mask, 'labels': labels}


class SmallModel(torch.nn.Module):
    """A recurrent language model. Its forward returns the mean loss over the labels of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.layer = torch.nn.GRU(32, 32, batch_first=True)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy. Padding is on the right, so no label depends on it, and no mask is needed."""
        states, _ = self.layer(self.embedding(input_ids))
        logits = self.head(states)
        predictions = logits[:, :-1].flatten(0, 1)  # each position predicts the next token
        targets = labels[:, 1:].flatten()
        return functional.cross_entropy(predictions, targets, ignore_index=IGNORED)


def small_llama() -> Any:
    """Returns a Llama of Transformers, with the same weights every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
