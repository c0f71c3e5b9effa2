# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A tiny model that reads codes of images, ``(images, codes of an image)``: a tensor that no layout registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from composer_tokacc.batch import BatchDict
from tests.support.text import VOCABULARY, collate, text_rows

HIDDEN_SIZE = 32
CODES_OF_AN_IMAGE = 6


class ImageCodesModel(LlamaForCausalLM):
    """Adds a vector to each token of a row: the sum of the codes of its images, each with a weight for its place.

    So the loss changes if a code is lost, or replaced by padding.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.codes = torch.nn.Embedding(VOCABULARY, HIDDEN_SIZE)
        self.places = torch.nn.Parameter(torch.randn(CODES_OF_AN_IMAGE, HIDDEN_SIZE))

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        image_codes: Any = None,
        num_images: Any = None,
    ) -> Any:
        vectors = self.get_input_embeddings()(input_ids)
        if image_codes is not None:
            weights = self.places[: image_codes.shape[1]]
            of_images = (self.codes(image_codes) * weights).sum(dim=1)
            rows_of_images = torch.arange(len(num_images)).repeat_interleave(torch.tensor(num_images))
            of_rows = vectors.new_zeros(len(num_images), HIDDEN_SIZE).index_add(0, rows_of_images, of_images)
            vectors = vectors + of_rows[:, None]
        return super().forward(inputs_embeds=vectors, attention_mask=attention_mask, labels=labels, use_cache=False)


def image_codes_model() -> ImageCodesModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return ImageCodesModel(config)


def rows_with_codes(row_sizes: Sequence[tuple[int, int]], images: Sequence[int]) -> list[BatchDict]:
    """Returns rows of the given (length, labelled tokens), and with these numbers of images."""
    generator = torch.Generator().manual_seed(0)
    rows = text_rows(row_sizes)
    for row, num_images in zip(rows, images, strict=True):
        row['num_images'] = [num_images]
        if num_images:
            # Codes above 0, so that none looks like padding.
            row['image_codes'] = torch.randint(1, VOCABULARY, (num_images, CODES_OF_AN_IMAGE), generator=generator)
    return rows


def collate_with_codes(rows: Sequence[BatchDict]) -> BatchDict:
    """Pads the text of the rows, and joins their codes, without BatchLayout."""
    batch = collate(rows)
    batch['num_images'] = [row['num_images'][0] for row in rows]
    batch['image_codes'] = torch.cat([row['image_codes'] for row in rows if 'image_codes' in row])
    return batch


def gradients_of_single_rows(model: ImageCodesModel, rows: Sequence[BatchDict]) -> dict[str, torch.Tensor]:
    """Returns the gradient of the mean over all labels. Each row is computed by itself, so nothing pads or cuts it."""
    model.zero_grad()
    sums = []
    num_labels = 0
    for row in rows:
        labels_of_row = int((row['labels'][:, 1:] != -100).sum())
        sums.append(model(**row).loss * labels_of_row)
        num_labels += labels_of_row
    mean = torch.stack(sums).sum() / num_labels
    mean.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
    return gradients
