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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import CLIPImageProcessor, LlamaConfig, LlamaForCausalLM, LlavaProcessor, PreTrainedTokenizerFast

from benchmarks.length_sets import lognormal, read_tables
from benchmarks.small_llava import IMAGE_LENGTH, IMAGE_TOKEN, VOCABULARY, build_model
from examples.digits import DigitsDataset, build_digits_processor

MODELS = ('llava', 'llama')
VARIATIONS = (0.3, 0.5, 0.9, 1.3)
SETS = (*(f'lognormal {variation}' for variation in VARIATIONS), 'digits', 'tables', 'no padding')
FIRST_WORD, IMAGE_SIDE, MAX_IMAGES, SUCCESSORS = 4, 16, 3, 6


def lengths_of(name: str, mean: int) -> np.ndarray:
    """Many lengths of a set; samples are drawn from them."""
    kind, _, variation = name.partition(' ')
    if kind == 'lognormal':
        return lognormal(float(variation), mean=mean, longest=8 * mean).lengths
    if name == 'digits':
        digits = DigitsDataset(build_digits_processor(), num_samples=512)
        return np.array([digits[index]['input_ids'].shape[1] for index in range(512)])
    if name == 'no padding':
        return np.full(1000, mean)
    tables, _ = read_tables()
    # In proportion: the real ones are as long as a large model's.
    return np.maximum((tables.lengths * mean / tables.lengths.mean()).astype(int), 8)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a run is told; the same for all contenders."""

    model: str = 'llava'
    hidden: int = 128
    layers: int = 2
    mean: int = 64
    """Tokens of a sample."""
    samples: int = 1024
    """Of an epoch."""
    global_batch: int = 64
    microbatch: int = 4
    """Rows of the longest sample that the memory takes."""
    workers: int = 1
    """Processes of each loader."""
    learning_rate: float = 1e-3


class Samples(Dataset):
    """Tokenized samples as a processor returns them, in a fixed random order: a prompt with images, then an answer.

    Tokens follow a chain that long and short samples have different ones of, so that there is something to learn, and
    that a trainer who weighs short samples otherwise learns something else.

    Args:
        sizes: Of the run.
        lengths: To draw from.
        seed: Of all that is drawn.
        count: Samples to draw.
    """

    def __init__(self, sizes: Sizes, lengths: np.ndarray, seed: int = 0, count: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.choice(lengths, count or sizes.samples)
        middle, self.rows = float(np.median(lengths)), []
        chains = np.random.default_rng(17).integers(FIRST_WORD, VOCABULARY, (2, VOCABULARY, SUCCESSORS))
        processor = image_processor()
        for length in self.lengths.tolist():
            room = (length - 4) // (2 * IMAGE_LENGTH)
            num_images = int(rng.integers(0, min(MAX_IMAGES, room) + 1)) if sizes.model == 'llava' and room > 0 else 0
            start = num_images * IMAGE_LENGTH
            chain, ids = chains[int(length > middle)], [IMAGE_TOKEN] * start
            word = int(rng.integers(FIRST_WORD, VOCABULARY))
            for step in rng.integers(0, SUCCESSORS, length - start).tolist():
                ids.append(word)
                word = int(chain[word, step])
            prompt = start + max(1, int((length - start) * rng.uniform(0.1, 0.5)))
            pictures = rng.integers(0, 256, (num_images, IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
            row: dict[str, Any] = {'ids': ids, 'prompt': prompt, 'images': [Image.fromarray(one) for one in pictures]}
            if num_images:
                row['pixel_values'] = processor(row['images'], return_tensors='pt')['pixel_values']
            self.rows.append(row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        ids = torch.tensor(row['ids'])
        labels = ids.clone()
        labels[: row['prompt']] = -100
        sample = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': labels}
        return {**sample, 'pixel_values': row['pixel_values']} if 'pixel_values' in row else sample

    @cached_property
    def index(self) -> dict[bytes, int]:
        return {np.array(row['ids'], dtype=np.int64).tobytes(): place for place, row in enumerate(self.rows)}

    def messages(self) -> list[dict[str, Any]]:
        """The same as prompt, completion and images, for trainers that run the processor themselves."""
        found = []
        for row in self.rows:
            words = [word_of(one) for one in row['ids'] if one != IMAGE_TOKEN]
            cut = row['prompt'] - len(row['images']) * IMAGE_LENGTH
            prompt = ' '.join(['<image>'] * len(row['images']) + words[:cut])
            found.append({'images': row['images'], 'prompt': prompt, 'completion': ' ' + ' '.join(words[cut:])})
        return found


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pads to the longest on the right and joins the images, as collators of vision-language models do."""
    fills = {'input_ids': 0, 'attention_mask': 0, 'labels': -100}
    batch: dict[str, Any] = {
        key: torch.nn.utils.rnn.pad_sequence([one[key] for one in samples], batch_first=True, padding_value=fill)
        for key, fill in fills.items()
    }
    images = [one['pixel_values'] for one in samples if 'pixel_values' in one]
    return {**batch, 'pixel_values': torch.cat(images)} if images else batch


def word_of(token: int) -> str:
    return f'w{token}'


def image_processor() -> CLIPImageProcessor:
    """Of images that have their size already."""
    return CLIPImageProcessor(do_resize=False, do_center_crop=False)


def build_processor() -> LlavaProcessor:
    """One that makes the very tokens of :class:`Samples`: a word a token."""
    vocabulary = {'<pad>': 0, '<unk>': 1, '</s>': 2, '<image>': IMAGE_TOKEN}
    vocabulary |= {word_of(token): token for token in range(FIRST_WORD, VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token='<pad>', unk_token='<unk>', eos_token='</s>',
        extra_special_tokens={'image_token': '<image>'},
    )  # fmt: skip
    return LlavaProcessor(
        image_processor=image_processor(), tokenizer=tokenizer, patch_size=8, num_additional_image_tokens=1,
        vision_feature_select_strategy='default',
    )  # fmt: skip


def new_model(sizes: Sizes) -> Any:
    """The same weights every time."""
    if sizes.model == 'llava':
        model = build_model(hidden_size=sizes.hidden, num_layers=sizes.layers)
        for name, parameter in model.named_parameters():
            # LLaVA reads the tower before its last norm, and DDP waits for the gradient of every parameter.
            parameter.requires_grad_('post_layernorm' not in name)
        return model
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=sizes.hidden, intermediate_size=sizes.hidden * 43 // 16,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.hidden // 64, max_position_embeddings=4096,
            use_cache=False,
        )
    )  # fmt: skip
