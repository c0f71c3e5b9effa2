# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes a tokenizer, configs of Llama and T5, and finetuning data for the example, so that nothing is downloaded.

    python examples/llm_foundry/make_inputs.py [folder]

The task: ``count from 7 to 12`` is answered by ``7 8 9 10 11 12``. Answers have 1 to 40 tokens, most of
them few. With unequal answers the mean of microbatch means differs from the mean over tokens.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, PreTrainedTokenizerFast, T5Config

LARGEST = 60
NUM_SAMPLES = 512


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each word."""
    words = ['<pad>', '<eos>', '<unk>', 'count', 'from', 'to', *map(str, range(LARGEST + 1))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token='<unk>'))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', eos_token='<eos>', unk_token='<unk>', model_max_length=64
    )


def make_samples(rng: random.Random) -> list[dict[str, str]]:
    """Returns samples with llm-foundry's keys ``prompt`` and ``response``. One response in four is long."""
    samples = []
    for _ in range(NUM_SAMPLES):
        first = rng.randrange(20)
        last = first + (rng.randrange(20, 40) if rng.random() < 0.25 else rng.randrange(6))
        answer = ' '.join(map(str, range(first, last + 1)))
        samples.append({'prompt': f'count from {first} to {last}', 'response': f' {answer}'})
    return samples


def main() -> None:
    """Writes ``tokenizer/``, ``llama/``, ``t5/`` and ``data/train.jsonl`` below the folder."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else 'runs/llm_foundry')
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / 'tokenizer')
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder / 'llama')
    T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder / 't5')
    data = folder / 'data' / 'train.jsonl'
    data.parent.mkdir(exist_ok=True)
    data.write_text(''.join(json.dumps(sample) + '\n' for sample in make_samples(random.Random(17))))
    print(f'{NUM_SAMPLES} samples, tokenizer and configs in {folder}')


if __name__ == '__main__':
    main()
