# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Trains a small ModernBERT on masked words. The loss curve is the same for any microbatch size and number of ranks.

    python examples/masked_lm.py
    composer -n 2 examples/masked_lm.py --microbatch 3 --packing

Texts are the docstrings of Python's own library, so that nothing is downloaded. Warm-up and duration are in tokens.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from composer import Callback, Logger, State, Trainer
from composer.loggers import InMemoryLogger
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel
from composer.optim import LinearWithWarmupScheduler
from composer.utils import dist
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from composer_tokacc import TokenAccumulation, token_data_spec

NUM_TEXTS = 640
NUM_EVAL_TEXTS = 64
LONGEST = 128
VOCABULARY = 1500
SPECIAL_TOKENS = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]')
GLOBAL_BATCH = 16
MASKED_SHARE = 0.3


def read_texts() -> list[str]:
    """Returns docstrings of Python's own library: English texts, most of them short, a few long."""
    texts = []
    for path in sorted(Path(os.__file__).parent.glob('*.py')):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text is not None:
                    texts.append(text)
        if len(texts) >= NUM_TEXTS:
            break
    return texts[:NUM_TEXTS]


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose vocabulary is the most frequent words of these texts."""
    splitter = pre_tokenizers.Whitespace()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in splitter.pre_tokenize_str(text.lower()))
    words = [word for word, _ in counts.most_common(VOCABULARY - len(SPECIAL_TOKENS))]
    vocabulary = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = splitter
    tokenizer.post_processor = processors.TemplateProcessing(
        single='[CLS] $A [SEP]',
        special_tokens=[(token, vocabulary[token]) for token in ('[CLS]', '[SEP]')],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token='[PAD]',
        unk_token='[UNK]',
        cls_token='[CLS]',
        sep_token='[SEP]',
        mask_token='[MASK]',
        model_max_length=LONGEST,
    )


class Texts(Dataset):
    """A sample is the index of a text, from which the collator seeds its masks, and the token ids of the text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        encoded = tokenizer(list(texts), truncation=True)
        self.rows = [torch.tensor(ids) for ids in encoded['input_ids']]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.rows[index]


class MaskingCollator:
    """Masks 30 % of the words of each text and pads the texts.

    The masks of a text depend on its index and the epoch, not on the random numbers that a rank or a loader process has
    drawn before. So each text has the same masks on any number of ranks.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def __call__(self, samples: Sequence[tuple[int, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns a batch, as a Hugging Face collator makes it."""
        inputs = []
        masks = []
        labels = []
        for index, ids in samples:
            generator = torch.Generator().manual_seed(self.epoch * NUM_TEXTS + index)
            is_word = ids >= len(SPECIAL_TOKENS)
            has_label = is_word & (torch.rand(len(ids), generator=generator) < MASKED_SHARE)
            # As in BERT, a few words with a label stay unmasked, so that the model cannot tell which words have one.
            is_masked = has_label & (torch.rand(len(ids), generator=generator) < 0.9)
            inputs.append(ids.masked_fill(is_masked, SPECIAL_TOKENS.index('[MASK]')))
            masks.append(torch.ones_like(ids))
            labels.append(ids.masked_fill(~has_label, -100))
        return {
            'input_ids': pad_sequence(inputs, batch_first=True, padding_value=SPECIAL_TOKENS.index('[PAD]')),
            'attention_mask': pad_sequence(masks, batch_first=True),
            'labels': pad_sequence(labels, batch_first=True, padding_value=-100),
        }


class NewMasksEachEpoch(Callback):
    """Tells the collator which epoch it is, also when a run resumes from a checkpoint."""

    def __init__(self, collate: MaskingCollator) -> None:
        self.collate = collate

    def fit_start(self, state: State, logger: Logger) -> None:
        """Runs at the start of a fit. A run that resumes within an epoch has no `epoch_start` for it."""
        self.collate.epoch = state.timestamp.epoch.value

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Runs before an epoch's first batch is read."""
        self.collate.epoch = state.timestamp.epoch.value


def build_model() -> ModernBertForMaskedLM:
    """Returns a small ModernBERT with random weights: every third layer attends to the whole text."""
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        global_attn_every_n_layers=3,
        local_attention=16,
        max_position_embeddings=LONGEST,
        pad_token_id=SPECIAL_TOKENS.index('[PAD]'),
        bos_token_id=SPECIAL_TOKENS.index('[CLS]'),
        eos_token_id=SPECIAL_TOKENS.index('[SEP]'),
        cls_token_id=SPECIAL_TOKENS.index('[CLS]'),
        sep_token_id=SPECIAL_TOKENS.index('[SEP]'),
    )
    torch.manual_seed(0)
    return ModernBertForMaskedLM(config)


def build_trainer(
    *,
    microbatch: int,
    packing: bool,
    duration: str,
    warmup: str,
    callbacks: Sequence[Callback] = (),
) -> tuple[Trainer, InMemoryLogger]:
    """Returns a Trainer that reads this rank's texts, and the logger that keeps its losses."""
    num_ranks = dist.get_world_size()
    if GLOBAL_BATCH % num_ranks != 0:
        raise SystemExit(
            f'The global batch must be divisible by the number of ranks, got: {GLOBAL_BATCH} on {num_ranks}.'
        )
    texts = read_texts()
    tokenizer = build_tokenizer(texts)
    train_texts = Texts(tokenizer, texts[NUM_EVAL_TEXTS:])
    eval_texts = Texts(tokenizer, texts[:NUM_EVAL_TEXTS])
    collate = MaskingCollator()
    train_loader = DataLoader(
        train_texts,
        batch_size=GLOBAL_BATCH // num_ranks,
        sampler=dist.get_sampler(train_texts, shuffle=True, drop_last=True),
        collate_fn=collate,
        drop_last=True,
    )
    eval_loader = DataLoader(
        eval_texts,
        batch_size=GLOBAL_BATCH,
        sampler=dist.get_sampler(eval_texts),
        collate_fn=MaskingCollator(),  # always the masks of epoch 0
    )
    model = HuggingFaceModel(
        build_model(),
        tokenizer,
        eval_metrics=[LanguageCrossEntropy(), MaskedAccuracy()],
        use_logits=True,
    )
    memory = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=token_data_spec(train_loader, packing=packing),
        eval_dataloader=token_data_spec(eval_loader),
        algorithms=[TokenAccumulation()],
        callbacks=[NewMasksEachEpoch(collate), *callbacks],
        device_train_microbatch_size=microbatch,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        schedulers=LinearWithWarmupScheduler(t_warmup=warmup),
        max_duration=duration,
        loggers=[memory],
        progress_bar=False,
    )
    return trainer, memory


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and prints the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--microbatch', type=int, default=8, help='rows of a microbatch, if all were as wide as the widest of the batch'
    )
    parser.add_argument('--packing', action='store_true', help='no padding: attention text by text')
    parser.add_argument('--duration', default='8000tok')
    parser.add_argument('--warmup', default='2000tok')
    options = parser.parse_args(arguments)
    trainer, memory = build_trainer(
        microbatch=options.microbatch,
        packing=options.packing,
        duration=options.duration,
        warmup=options.warmup,
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        for step, (_, loss) in enumerate(memory.data['loss/train/total'], start=1):
            print(f'step {step}: loss {float(loss):.4f}')
        print(f'trained on {trainer.state.timestamp.token.value} tokens')
        for name in ('LanguageCrossEntropy', 'MaskedAccuracy'):
            _, value = memory.data[f'metrics/eval/{name}'][-1]
            print(f'evaluation, {name}: {float(value):.4f}')
    trainer.close()


if __name__ == '__main__':
    main()
