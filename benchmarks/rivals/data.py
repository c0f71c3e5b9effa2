# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The samples, models and sizes that all contenders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import CLIPImageProcessor, LlamaForCausalLM

from benchmarks.length_sets import lognormal, read_tables
from benchmarks.models import (
    IMAGE_LENGTH,
    IMAGE_SIDE,
    IMAGE_TOKEN,
    VOCABULARY,
    new_llava,
    small_llava_config,
    text_config,
    with_labels,
)
from composer_tokacc.batch import BatchDict
from examples.digits import DigitsDataset, build_digits_processor

MODELS = ('llava', 'llama')
# Small text models with the proportions of known ones: the same ratios of vocabulary and inner size to hidden size.
SHAPES = {
    'smolvlm': {
        'vocabulary': 8192,
        'hidden_size': 96,
        'intermediate_size': 256,
        'num_attention_heads': 3,
        'num_key_value_heads': 1,
    },
    'qwen': {
        'vocabulary': 9472,
        'hidden_size': 128,
        'intermediate_size': 688,
        'num_attention_heads': 4,
        'num_key_value_heads': 1,
    },
}
# The number of a lognormal set is the coefficient of variation.
SETS = (
    'lognormal 0.3',
    'lognormal 0.5',
    'lognormal 0.9',
    'lognormal 1.3',
    'digits',
    'tables',
    'no padding',
)
# Stands for the index of a row that is not a sample.
UNKNOWN = -1
# The first token id that texts use.
FIRST_WORD = 4
# Images of a sample, at most.
MAX_IMAGES = 3
# Number of words that can follow a word.
SUCCESSORS = 6


def lengths_of(name: str, mean: int) -> tuple[np.ndarray, str]:
    """Returns many lengths of a set, and their source. Samples are drawn from them."""
    if name.startswith('lognormal'):
        variation = float(name.split()[1])
        return lognormal(variation, mean=mean, longest=8 * mean).lengths, name
    if name == 'digits':
        digits = DigitsDataset(build_digits_processor(), num_samples=512)
        lengths = []
        for index in range(len(digits)):
            lengths.append(digits[index]['input_ids'].shape[1])
        return np.array(lengths), name
    if name == 'no padding':
        return np.full(1000, mean), name
    tables, source = read_tables()
    # The real lengths are too long for these small models, so they are scaled to the mean.
    scaled = tables.lengths * mean / tables.lengths.mean()
    return np.maximum(scaled.astype(int), 8), source


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
    # Rows of a microbatch. The memory of all contenders is limited to this many rows of the longest sample.
    microbatch: int = 4
    # Smallest and largest number of labels at the end of a sample. Zeros: half to nine tenths of its text has labels.
    least_answer: int = 0
    longest_answer: int = 0
    # Processes of each loader.
    workers: int = 1
    learning_rate: float = 1e-3

    @property
    def vocabulary(self) -> int:
        return SHAPES[self.model]['vocabulary'] if self.model in SHAPES else VOCABULARY


class Samples(Dataset):
    """Tokenized samples as a processor returns them: a prompt with images, and an answer.

    Tokens follow a random chain, so that there is something to learn. Long and short samples have different chains, so
    that a trainer that gives short samples a wrong weight learns something else. The lengths are drawn from `lengths`.
    """

    def __init__(
        self,
        sizes: Sizes,
        lengths: np.ndarray,
        seed: int = 0,
        ranks: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        drawn_lengths = rng.choice(lengths, sizes.samples)
        self.lengths = _extremes_first(rng, drawn_lengths, num_extremes=2 * ranks)
        # The same chains for samples of every seed.
        vocabulary = sizes.vocabulary
        chains_rng = np.random.default_rng(17)
        short_chain, long_chain = chains_rng.integers(FIRST_WORD, vocabulary, (2, vocabulary, SUCCESSORS))
        median_length = np.median(lengths)
        self._samples: list[BatchDict] = []
        self._indices: dict[tuple[int, ...], int] = {}
        for index, length in enumerate(self.lengths.tolist()):
            chain = long_chain if length > median_length else short_chain
            sample = _draw_sample(rng, length, chain, sizes)
            self._samples.append(sample)
            self._indices[tuple(sample['input_ids'].tolist())] = index

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> BatchDict:
        return {key: value.clone() for key, value in self._samples[index].items()}

    def index_of(self, ids: torch.Tensor) -> int:
        """Returns the index of the sample with these tokens, or UNKNOWN."""
        return self._indices.get(tuple(ids.tolist()), UNKNOWN)


def _extremes_first(rng: np.random.Generator, lengths: np.ndarray, num_extremes: int) -> np.ndarray:
    """Returns the shortest lengths, then the longest ones, then the others in random order.

    Contenders that keep the order have the extremes in the first step, which is not timed. So our check of rows need
    not be repeated for longer or shorter ones. A long run seldom repeats it, but in an epoch of few steps it would cost
    much (`benchmarks.overhead` measures it).
    """
    by_length = np.sort(lengths)
    other_lengths = rng.permutation(by_length[num_extremes:-num_extremes])
    return np.concatenate([by_length[:num_extremes], by_length[-num_extremes:], other_lengths])


def _draw_sample(rng: np.random.Generator, length: int, chain: np.ndarray, sizes: Sizes) -> BatchDict:
    """Draws a sample of this length. Less than half of it are image tokens."""
    most_images = min((length - 4) // (2 * IMAGE_LENGTH), MAX_IMAGES)
    num_images = 0
    if sizes.model == 'llava' and most_images > 0:
        num_images = int(rng.integers(0, most_images + 1))
    num_image_tokens = num_images * IMAGE_LENGTH
    num_text_tokens = length - num_image_tokens
    ids = [IMAGE_TOKEN] * num_image_tokens
    word = int(rng.integers(FIRST_WORD, len(chain)))
    for successor in rng.integers(0, SUCCESSORS, num_text_tokens).tolist():
        ids.append(word)
        word = int(chain[word, successor])
    num_question_tokens = int(num_text_tokens * rng.uniform(0.1, 0.5))
    num_prompt_tokens = num_image_tokens + max(1, num_question_tokens)
    pixels = rng.integers(0, 256, (num_images, IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
    if sizes.longest_answer:
        num_answer_tokens = int(rng.integers(sizes.least_answer, sizes.longest_answer + 1))
        num_prompt_tokens = max(length - num_answer_tokens, 0)
    sample = with_labels(torch.tensor(ids), num_prompt_tokens)
    if num_images:
        processor = CLIPImageProcessor(do_resize=False, do_center_crop=False)
        sample['pixel_values'] = processor(list(pixels), return_tensors='pt')['pixel_values']
    return sample


def collate(samples: Sequence[BatchDict]) -> BatchDict:
    """Pads to the longest on the right and joins the images, as collators of vision-language models do."""
    batch: BatchDict = {}
    for key, fill in {'input_ids': 0, 'attention_mask': 0, 'labels': -100}.items():
        values = [sample[key] for sample in samples]
        batch[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
    images = [sample['pixel_values'] for sample in samples if 'pixel_values' in sample]
    if images:
        batch['pixel_values'] = torch.cat(images)
    return batch


def new_model(sizes: Sizes) -> Any:
    """Returns a model with the same weights at every call."""
    if sizes.model == 'llava':
        return new_llava(small_llava_config(hidden_size=sizes.hidden, num_layers=sizes.layers))
    shape = SHAPES.get(sizes.model, {'vocabulary': VOCABULARY, 'hidden_size': sizes.hidden})
    config = text_config(**shape, num_layers=sizes.layers, tie_word_embeddings=sizes.model in SHAPES)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)
