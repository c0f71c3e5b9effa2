# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches and algorithms that are not ours: Whisper's and T5's entries, Composer's SeqLengthWarmup."""

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
from tests.support.text import collate, text_model, text_row, whisper_model
from tests.support.training import fit, hugging_face, loader, relative_error, train

MEL_BINS, FRAMES, VOCABULARY = 8, 16, 64


@pytest.fixture(scope='module')
def whisper():
    return HuggingFaceModel(whisper_model().train(), use_logits=True)


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


def test_packed_batch_without_input_ids(whisper):
    outcome = measure(whisper, whisper_batch(0), 2, packing=True)
    assert outcome.kind in ('exact', 'refused'), outcome


@pytest.mark.parametrize('size', [1, 3])
def test_rows_without_input_ids(size):
    """An encoder makes as many states of a sound with a short text as with a long one, so rows are not trimmed."""
    batch = whisper_batch(0)
    spec = token_data_spec([batch])
    microbatches = spec.split_batch(spec.batch_transforms(batch), size)
    assert [len(microbatch['labels']) for microbatch in microbatches] == [size] * (6 // size)


def seq2seq_batch(lengths, widths, *, has_decoder_ids=True):
    """As llm-foundry's collator makes it for T5, where both widths are one, or a Hugging Face one."""
    generator, rows = torch.Generator().manual_seed(0), len(lengths)
    batch = {
        'input_ids': torch.zeros(rows, widths[0], dtype=torch.long),
        'attention_mask': torch.zeros(rows, widths[0], dtype=torch.long),
        'labels': torch.full((rows, widths[1]), -100),
    }
    for row, (source, target) in enumerate(lengths):
        batch['input_ids'][row, :source] = torch.randint(3, VOCABULARY, (source,), generator=generator)
        batch['attention_mask'][row, :source] = 1
        batch['labels'][row, :target] = torch.randint(3, VOCABULARY, (target,), generator=generator)
    if has_decoder_ids:
        labels = batch['labels']
        batch['decoder_input_ids'] = torch.nn.functional.pad(labels[:, :-1].clamp(min=0), (1, 0))
        batch['decoder_attention_mask'] = torch.nn.functional.pad((labels[:, :-1] != -100).long(), (1, 0), value=1)
    return batch


@pytest.fixture(scope='module')
def t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    return HuggingFaceModel(transformers.T5ForConditionalGeneration(config).train(), use_logits=True)


@pytest.mark.parametrize('widths', [(24, 24), (24, 30), (32, 12)])
@pytest.mark.parametrize('has_decoder_ids', [True, False])
def test_decoder_with_its_own_text(t5, widths, has_decoder_ids):
    batch = seq2seq_batch([(5, 12), (24, 1), (3, 3), (4, 2), (9, 7), (2, 1)], widths, has_decoder_ids=has_decoder_ids)
    outcome = measure(t5, batch, 2)
    assert outcome.kind == 'exact', outcome


@pytest.mark.parametrize('has_decoder_ids', [True, False])
@pytest.mark.parametrize('microbatch_size', [1, 2, 5])
def test_decoder_on_a_stock_loader(t5, microbatch_size, has_decoder_ids):
    """Composer's own split cuts the batch, without ``token_data_spec``."""
    batch = seq2seq_batch([(5, 12), (24, 1), (3, 3), (4, 2), (9, 7), (2, 1)], (24, 12), has_decoder_ids=has_decoder_ids)
    expected = plain_gradients(t5, batch)
    recorder = fit(t5, loader(batch), microbatch_size=microbatch_size)
    assert relative_error(recorder.gradients, expected) < 1e-6
    stock, _, _ = train(t5, loader(batch), microbatch_size=microbatch_size)
    assert relative_error(stock.gradients, expected) > 1e-2  # so the test can fail


@pytest.mark.parametrize('has_decoder_ids', [True, False])
@pytest.mark.parametrize('multiple', [1, 8])
def test_cap_of_encoder_and_decoder_texts(multiple, has_decoder_ids):
    rng = random.Random(0)
    for _ in range(100):
        widths, size = (rng.randint(8, 40), rng.randint(8, 40)), rng.randint(1, 4)
        lengths = [(rng.randint(1, widths[0]), rng.randint(1, widths[1])) for _ in range(16)]
        batch = seq2seq_batch(lengths, widths, has_decoder_ids=has_decoder_ids)
        spec = token_data_spec([batch], width_multiple=multiple)
        microbatches = spec.split_batch(spec.batch_transforms(batch), size)
        num_rows = 0
        for microbatch in microbatches:
            num_rows += len(microbatch['labels'])
            num_tokens = microbatch['input_ids'].numel() + microbatch['labels'].numel()
            assert num_tokens <= size * sum(widths)
        assert num_rows == 16


def test_sequence_length_warmup_is_exact():
    """The warmup clones every entry of the batch, so we may only add tensors to the batch."""
    rng = random.Random(0)
    rows = [text_row(length, rng.randint(1, length), seed=length) for length in [3, 16, 9, 12, 5, 16, 7, 14] * 4]
    data = DataLoader(rows, batch_size=8, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    warmup = SeqLengthWarmup(duration=0.75, min_seq_length=4, max_seq_length=16, step_size=4)
    recorder = fit(text_model(), token_data_spec(data), algorithms=[warmup, TokenAccumulation()], max_duration='4ba')
    model = hugging_face(text_model())
    widths = []
    for gradients, batch in zip(recorder.steps, data, strict=True):
        errors = {}
        for width in (4, 8, 12, 16):
            cut = {key: value[:, :width] for key, value in batch.items()}
            errors[width] = relative_error(gradients, plain_gradients(model, cut))
        widths.append(min(errors, key=errors.__getitem__))
        assert min(errors.values()) < 1e-6, errors
    # The warmup has cut the rows: to a few columns at first, not at all in the end.
    assert widths[0] < 16
    assert widths == sorted(widths)
