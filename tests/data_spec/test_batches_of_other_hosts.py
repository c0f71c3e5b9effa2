# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches and algorithms that are not ours: Whisper's entries, Composer's SeqLengthWarmup."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from composer.algorithms import SeqLengthWarmup
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader

from composer_tokacc import TokenAccumulation, token_data_spec
from tests.matrix.harness import measure, plain_gradients
from tests.support.text import collate, text_model, text_row
from tests.support.training import hugging_face, relative_error, train

MEL_BINS, FRAMES, VOCABULARY = 8, 16, 64


@pytest.fixture(scope='module')
def whisper():
    sizes = {f'{part}_{name}': value for part in ('encoder', 'decoder') for name, value in _LAYERS.items()}
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, num_mel_bins=MEL_BINS, max_source_positions=FRAMES // 2,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, dropout=0.0, use_cache=False, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    return HuggingFaceModel(transformers.WhisperForConditionalGeneration(config).train(), use_logits=True)


_LAYERS = {'layers': 2, 'attention_heads': 2, 'ffn_dim': 48}


def whisper_batch(seed: int):
    """``input_features`` and ``labels``, no ``input_ids``; labels padded with -100."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randint(1, 12) for _ in range(6)]
    labels = torch.full((6, max(lengths)), -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = torch.randint(3, VOCABULARY, (length,), generator=generator)
    return {'input_features': torch.randn(6, MEL_BINS, FRAMES, generator=generator), 'labels': labels}


@pytest.mark.parametrize('regroup', [True, False])
@pytest.mark.parametrize('seed', range(3))
def test_batch_without_input_ids_is_exact(whisper, seed, regroup):
    outcome = measure(whisper, whisper_batch(seed), 2, regroup=regroup)
    assert outcome.kind == 'exact', outcome


def test_packed_batch_without_input_ids_is_exact_or_refused(whisper):
    outcome = measure(whisper, whisper_batch(0), 2, packing=True)
    assert outcome.kind in ('exact', 'refused'), outcome


def test_sequence_length_warmup_beside_token_data_spec_is_exact():
    """It clones every entry of the batch, so nothing of ours may lie in it that is no tensor."""
    rng = random.Random(0)
    rows = [text_row(length, rng.randint(1, length), seed=length) for length in [3, 16, 9, 12, 5, 16, 7, 14] * 4]
    data = DataLoader(rows, batch_size=8, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    warmup = SeqLengthWarmup(duration=0.75, min_seq_length=4, max_seq_length=16, step_size=4)
    recorder, _, _ = train(
        text_model(), token_data_spec(data), algorithms=[warmup, TokenAccumulation()], microbatch_size=2,
        max_duration='4ba',
    )  # fmt: skip
    model = hugging_face(text_model())
    widths = []
    for found, batch in zip(recorder.steps, data, strict=True):
        errors = {}
        for width in (4, 8, 12, 16):
            cut = {key: value[:, :width] for key, value in batch.items()}
            errors[width] = relative_error(found, plain_gradients(model, cut))
        widths.append(min(errors, key=errors.__getitem__))
        assert min(errors.values()) < 1e-6, errors
    # It did cut: short rows first, whole ones last.
    assert widths[0] < 16
    assert widths == sorted(widths)
