# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of unequal lengths and two small models, for the example programs in this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

VOCABULARY, GLOBAL_BATCH, EPOCHS, LEARNING_RATE = 64, 8, 2, 0.5


class Rows(torch.utils.data.Dataset):
    """25 rows of 3 to 60 random tokens. The first 0 to 2 are the prompt. Row 7 is all prompt, so it has no label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = (3 + 8 * torch.randn(25, generator=generator).exp()).clamp(max=60).long().tolist()
        self.rows = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """The tokens, and how many of them are the prompt."""
        return self.rows[index], len(self.rows[index]) if index == 7 else index % 3


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Pads on the right. Labels of the prompt and of padding are -100."""
    width = max(len(ids) for ids, _ in samples)
    ids = torch.stack([functional.pad(ids, (0, width - len(ids))) for ids, _ in samples])
    columns = torch.arange(width)
    real = torch.stack([columns < len(ids) for ids, _ in samples])
    prompt = torch.stack([columns < num_prompt for _, num_prompt in samples])
    return {'input_ids': ids, 'attention_mask': real.long(), 'labels': ids.masked_fill(~real | prompt, -100)}


class SmallModel(torch.nn.Module):
    """A recurrent language model. Its forward returns the mean loss over the labels of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 32)
        self.layer = torch.nn.GRU(32, 32, batch_first=True)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        logits = self.head(self.layer(self.embedding(input_ids))[0])
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def small_llama() -> Any:
    """A Llama of Transformers, with the same weights every time."""
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
