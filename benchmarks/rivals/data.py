# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The samples, models and sizes that all contenders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from transformers import CLIPImageProcessor, LlamaConfig, LlamaForCausalLM

from benchmarks.length_sets import lognormal, read_tables
from benchmarks.small_llava import (
    IMAGE_LENGTH,
    IMAGE_SIDE,
    IMAGE_TOKEN,
    VOCABULARY,
    build_model,
    freeze_unused,
)
from examples.digits import DigitsDataset, build_digits_processor

MODELS = ('llava', 'llama')
SETS = (
    'lognormal 0.3',
    'lognormal 0.5',
    'lognormal 0.9',
    'lognormal 1.3',
    'digits',
    'tables',
    'no padding',
)
FIRST_WORD = 4
MAX_IMAGES = 3
SUCCESSORS = 6


def lengths_of(name: str, mean: int) -> np.ndarray:
    """Returns many lengths of a set. Samples are drawn from them."""
    if name.startswith('lognormal'):
        variation = float(name.split()[1])
        return lognormal(variation, mean=mean, longest=8 * mean).lengths
    if name == 'digits':
        digits = DigitsDataset(build_digits_processor(), num_samples=512)
        return np.array([digits[index]['input_ids'].shape[1] for index in range(512)])
    if name == 'no padding':
        return np.full(1000, mean)
    tables, _ = read_tables()
    # Scaled down, because the real lengths are those of a large model.
    scaled = tables.lengths * mean / tables.lengths.mean()
    return np.maximum(scaled.astype(int), 8)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a run, the same for all contenders."""

    model: str = 'llava'
    hidden: int = 128
    layers: int = 2
    # Mean number of tokens of a sample.
    mean: int = 64
    # Samples of an epoch.
    samples: int = 1024
    global_batch: int = 64
    # The memory is that of so many rows of the longest sample.
    microbatch: int = 4
    # Processes of each loader.
    workers: int = 1
    learning_rate: float = 1e-3


class Samples(Dataset):
    """Tokenized samples as a processor returns them: a prompt with images, and an answer.

    Tokens follow a chain, so that there is something to learn. Long and short samples have different chains, so that a
    trainer that gives short samples another weight learns something else.

    Args:
        sizes: The sizes of the run.
        lengths: Lengths to draw from.
        seed: For everything that is drawn.
        count: How many samples to draw. None: an epoch of the run.
    """

    def __init__(
        self,
        sizes: Sizes,
        lengths: np.ndarray,
        seed: int = 0,
        count: int | None = None,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.choice(lengths, count or sizes.samples)
        self.rows: list[dict[str, Any]] = []
        median_length = np.median(lengths)
        # The same chains for samples of every seed.
        chains = np.random.default_rng(17).integers(FIRST_WORD, VOCABULARY, (2, VOCABULARY, SUCCESSORS))
        for length in self.lengths.tolist():
            chain = chains[int(length > median_length)]
            self.rows.append(_draw_row(rng, length, chain, has_images=sizes.model == 'llava'))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        ids = torch.tensor(row['ids'])
        labels = ids.clone()
        labels[: row['prompt']] = -100
        sample = {
            'input_ids': ids,
            'attention_mask': torch.ones_like(ids),
            'labels': labels,
        }
        if 'pixel_values' in row:
            sample['pixel_values'] = row['pixel_values']
        return sample

    @cached_property
    def index(self) -> dict[bytes, int]:
        """Returns the place of each sample by its tokens."""
        return {np.array(row['ids'], dtype=np.int64).tobytes(): place for place, row in enumerate(self.rows)}


def _draw_row(
    rng: np.random.Generator,
    length: int,
    chain: np.ndarray,
    *,
    has_images: bool,
) -> dict[str, Any]:
    room = (length - 4) // (2 * IMAGE_LENGTH)
    num_images = 0
    if has_images and room > 0:
        num_images = int(rng.integers(0, min(MAX_IMAGES, room) + 1))
    start = num_images * IMAGE_LENGTH
    ids = [IMAGE_TOKEN] * start
    word = int(rng.integers(FIRST_WORD, VOCABULARY))
    for step in rng.integers(0, SUCCESSORS, length - start).tolist():
        ids.append(word)
        word = int(chain[word, step])
    num_text_tokens = length - start
    prompt = start + max(1, int(num_text_tokens * rng.uniform(0.1, 0.5)))
    pixels = rng.integers(0, 256, (num_images, IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
    row: dict[str, Any] = {'ids': ids, 'prompt': prompt}
    if num_images:
        processor = CLIPImageProcessor(do_resize=False, do_center_crop=False)
        images = [Image.fromarray(image) for image in pixels]
        row['pixel_values'] = processor(images, return_tensors='pt')['pixel_values']
    return row


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest on the right and joins the images, as collators of vision-language models do."""
    batch: dict[str, Any] = {}
    for key, fill in (('input_ids', 0), ('attention_mask', 0), ('labels', -100)):
        values = [sample[key] for sample in samples]
        batch[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
    images = [sample['pixel_values'] for sample in samples if 'pixel_values' in sample]
    if images:
        batch['pixel_values'] = torch.cat(images)
    return batch


def new_model(sizes: Sizes) -> Any:
    """Returns a model with the same weights at every call."""
    if sizes.model == 'llava':
        model = build_model(hidden_size=sizes.hidden, num_layers=sizes.layers)
        freeze_unused(model)
        return model
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 43 // 16,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        max_position_embeddings=4096,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
