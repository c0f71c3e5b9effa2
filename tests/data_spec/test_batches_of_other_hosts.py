# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches of Whisper and T5, and batches that Composer's SeqLengthWarmup has changed."""

from __future__ import annotations

import random

import pytest
import torch
from composer.algorithms import SeqLengthWarmup
from composer.core import Event
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import InstructBlipConfig, InstructBlipForConditionalGeneration

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, TokenAccumulation, token_data_spec
from composer_tokacc.refusals import NotExactError
from tests.matrix.harness import kinds_of_steps, plain_gradients
from tests.matrix.subjects import text_subject
from tests.support.exactness import split
from tests.support.small_batches import additive, text_batch
from tests.support.text import collate, one_layer_model, text_rows, whisper_model, with_vectors
from tests.support.training import (
    On,
    assert_exact,
    fit,
    gradients_of,
    hugging_face,
    in_double,
    loader,
    relative_error,
    train,
)

for_each_decoder_input = pytest.mark.parametrize('has_decoder_ids', [True, False])


def padded_labels(lengths, width):
    """Returns rows of labels, padded with -100."""
    rows = text_rows([(length, length) for length in lengths])
    labels = torch.full((len(rows), width), -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = rows[row]['labels']
    return labels


@pytest.fixture(scope='module')
def whisper():
    return HuggingFaceModel(whisper_model().train(), use_logits=True)


def whisper_batch(seed: int):
    """Returns six rows of ``input_features`` and ``labels``, without ``input_ids``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (6,), generator=generator).tolist()
    features = torch.randn(6, 8, 16, generator=generator)  # (rows, mel bins, frames)
    labels = padded_labels(lengths, max(lengths))
    return {'input_features': features, 'labels': labels}


@pytest.mark.parametrize(
    ('options', 'expected_kinds'),
    [
        pytest.param({}, ['exact', 'exact'], id='regrouped'),
        pytest.param({'regroup': False}, ['exact', 'exact'], id='in order'),
        pytest.param({'packing': True}, ['refused'], id='packed'),
    ],
)
def test_batch_without_input_ids(whisper, options, expected_kinds):
    batches = [whisper_batch(0), whisper_batch(1)]

    kinds = kinds_of_steps(whisper, batches, **options)

    assert kinds == expected_kinds


@pytest.mark.parametrize('size', [1, 3])
def test_rows_without_input_ids(size):
    """Rows are not trimmed: an encoder makes as many states of audio with a short text as with a long one.

    So each microbatch has exactly `size` rows, although some texts are short.
    """
    batch = whisper_batch(0)

    microbatches = split(batch, size)

    rows_of_microbatches = [len(microbatch['labels']) for microbatch in microbatches]
    assert rows_of_microbatches == [size] * (6 // size)


SEQ2SEQ_LENGTHS = [(5, 12), (24, 1), (3, 3), (4, 2), (9, 7), (2, 1)]
"""Tokens of the encoder and of the decoder in each row."""


def seq2seq_batch(encoder_width, decoder_width, *, lengths=SEQ2SEQ_LENGTHS, has_decoder_ids=False):
    """Returns rows for T5, as llm-foundry's collator makes them (equal widths), or Hugging Face's (unequal widths)."""
    encoder_lengths = [encoder_length for encoder_length, _ in lengths]
    decoder_lengths = [decoder_length for _, decoder_length in lengths]
    batch = text_batch(encoder_lengths, width=encoder_width)
    labels = padded_labels(decoder_lengths, decoder_width)
    batch['labels'] = labels
    if has_decoder_ids:
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = 0
        batch['decoder_input_ids'] = shifted.clamp(min=0)
        batch['decoder_attention_mask'] = (shifted != -100).long()
    return batch


@pytest.fixture(scope='module')
def t5():
    """A T5 of one layer, which is enough to have two texts."""
    subject = text_subject('t5', decoder_start_token_id=0, num_layers=1, num_decoder_layers=1)
    return subject.model('fresh')


def seq2seq_loader(*, side, decoder_width=None, lengths=SEQ2SEQ_LENGTHS, masks_first=False, pads_all_left=False):
    """Returns a loader of one step of two microbatches. It pads labels to ``decoder_width``, or to the longest ones.

    With ``masks_first`` the first label of each row is masked. With ``pads_all_left`` the text is padded on the left,
    too, and the last label of the first row is masked.
    """

    longest = max(decoder_length for _, decoder_length in lengths)
    all_rows = seq2seq_batch(24, longest, lengths=lengths)
    if masks_first:
        all_rows['labels'][:, 0] = -100

    def collated(rows):
        decoder_lengths = [lengths[row][1] for row in rows]
        width = decoder_width or max(decoder_lengths)
        batch = {key: value[list(rows)] for key, value in all_rows.items()}
        batch['labels'] = batch['labels'][:, :width]
        if side == 'left':
            for labels, decoder_length in zip(batch['labels'], decoder_lengths, strict=True):
                labels.copy_(labels.roll(width - decoder_length))
        if pads_all_left:
            for key in ('input_ids', 'attention_mask'):
                batch[key] = batch[key].flip(1)
            batch['labels'][0, -1] = -100
        return batch

    num_rows = len(lengths)
    sampler = RegroupingBatchSampler(
        range(num_rows), lengths=[24] * num_rows, global_batch_size=num_rows, max_tokens=3 * 24, shuffle=False
    )
    data = RegroupingDataLoader(range(num_rows), batch_sampler=sampler, collate_fn=collated)
    return token_data_spec(data, slot_tokens=24), collated(range(num_rows))


@pytest.mark.parametrize(('side', 'decoder_width'), [('right', None), ('left', 12)])
def test_labels_that_a_loader_pads(t5, side, decoder_width):
    data, batch = seq2seq_loader(side=side, decoder_width=decoder_width)
    expected_gradients = plain_gradients(t5, batch)

    recorder = fit(t5, data, microbatch_size=3)

    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


@pytest.mark.parametrize('pads_all_left', [False, True])
def test_labels_that_a_loader_pads_on_the_left(t5, pads_all_left):
    """The decoder sees this padding, and in one batch with the other rows there would be more of it."""
    data, _ = seq2seq_loader(side='left', pads_all_left=pads_all_left)
    with pytest.raises(ValueError, match='Labels of an encoder-decoder must be padded on the right'):
        fit(t5, data, microbatch_size=3)


@pytest.mark.parametrize('has_vectors', [False, True])
def test_labels_as_wide_as_the_text_by_chance(t5, has_vectors):
    """The encoder's padding on the left is trimmed, but not that of the labels, which the decoder sees."""
    batches = []
    for decoder_width in (12, 24):
        batch = seq2seq_batch(24, decoder_width)
        for key, value in batch.items():
            lengths = [length for length, _ in SEQ2SEQ_LENGTHS]
            if key == 'labels':
                lengths = [length for _, length in SEQ2SEQ_LENGTHS]
            rows = [row.roll(len(row) - length) for row, length in zip(value, lengths, strict=True)]
            batch[key] = torch.stack(rows)
        if has_vectors:
            batch = with_vectors(t5.model, batch)
        batches.append(batch)

    assert_exact(t5.model, *batches, microbatch_size=1)


@pytest.mark.parametrize('decoder_width', [12, 24])
@pytest.mark.parametrize('has_decoder_ids', [False, True])
def test_rows_with_a_decoder_are_not_packed(t5, decoder_width, has_decoder_ids):
    """Also if the labels are as wide as the text. Older releases of Transformers refuse the attention of T5."""
    batch = seq2seq_batch(24, decoder_width, has_decoder_ids=has_decoder_ids)
    shapes = rf'labels of shape \(\d, {decoder_width}\) and ids of shape \(\d, 24\)'
    reason = rf'{shapes}\. Labels of an encoder-decoder .* cannot be packed|AttentionInterface.* T5'
    with pytest.raises(NotExactError, match=reason):
        fit(t5, batch, packing=True)


def instructblip_of_t5():
    """Returns a small InstructBLIP of T5. Only the config of its text says that it has an encoder and a decoder."""
    layers = {'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    no_dropout = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
    text = {'vocab_size': 64, 'd_model': 32, 'd_ff': 48, 'num_layers': 1, 'num_decoder_layers': 1, 'num_heads': 4}
    config = InstructBlipConfig(
        vision_config={**layers, 'image_size': 8, 'patch_size': 4},
        qformer_config={**layers, **no_dropout, 'vocab_size': 64, 'encoder_hidden_size': 16},
        text_config={**text, 'model_type': 't5', 'd_kv': 8, 'dropout_rate': 0.0, 'decoder_start_token_id': 0},
        num_query_tokens=2,
        image_token_index=63,
    )
    torch.manual_seed(0)
    return InstructBlipForConditionalGeneration(config)


def test_encoder_decoder_with_images():
    """Its labels may have another width than its text, or the same one by chance."""
    model = in_double(instructblip_of_t5())  # sums of float32 alone are off by up to 1.1e-6
    batches = []
    for decoder_width in (12, 24):
        batch = seq2seq_batch(24, decoder_width)
        ids = batch['input_ids'].clamp(max=62)
        ids[:, :2] = 63  # placeholders of the query tokens
        questions = torch.randint(3, 63, (len(ids), 5))
        images = {'pixel_values': torch.randn(len(ids), 3, 8, 8).double(), 'qformer_input_ids': questions}
        batches.append({**batch, **images, 'input_ids': ids, 'qformer_attention_mask': torch.ones_like(questions)})

    assert_exact(model, *batches, microbatch_size=1)


def test_first_labels_that_are_masked(t5):
    """The rows of the first microbatch look padded on the left. The second one shows that padding is on the right."""
    lengths = [(5, 4), (24, 4), (3, 4), (4, 9), (9, 3), (2, 5)]
    data, batch = seq2seq_loader(side='right', lengths=lengths, masks_first=True)
    expected_gradients = plain_gradients(t5, batch)

    recorder = fit(t5, data, microbatch_size=3)

    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


class WithMaskedMean(HuggingFaceModel):
    """A T5 with a z-loss, whose gradient is NaN in rows without labels, because it divides by the number of labels."""

    def loss(self, outputs, batch):
        has_label = (batch['labels'] != -100).float()
        z_losses = outputs['logits'].logsumexp(dim=-1).square() * has_label
        return outputs['loss'] + 0.01 * z_losses.sum() / has_label.sum()


def test_row_without_labels_in_a_masked_mean(t5):
    lengths = [(5, 12), (24, 1), (3, 0), (4, 2)]
    batch = seq2seq_batch(24, 12, lengths=lengths)
    model = WithMaskedMean(t5.model, use_logits=True)

    loss = model.loss(model(batch), batch)
    expected_gradients = gradients_of(t5.model, loss)

    recorder = fit(model, batch, microbatch_size=1)

    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


@pytest.mark.parametrize('decoder_width', [24, 30])
@for_each_decoder_input
def test_decoder_with_its_own_text(t5, decoder_width, has_decoder_ids):
    batch = seq2seq_batch(24, decoder_width, has_decoder_ids=has_decoder_ids)

    assert kinds_of_steps(t5, [batch]) == ['exact']


@for_each_decoder_input
def test_padding_of_encoder_is_trimmed(t5, has_decoder_ids):
    """The decoder's text keeps its width, so only the ids show that rows were trimmed."""
    longest_row = 24
    batch = seq2seq_batch(32, 12, has_decoder_ids=has_decoder_ids)
    expected_gradients = plain_gradients(t5, batch)
    encoder_widths = On(Event.BEFORE_FORWARD, lambda state: state.batch['input_ids'].shape[1])

    recorder = fit(t5, batch, callbacks=[encoder_widths])

    assert max(encoder_widths.values) == longest_row
    assert min(encoder_widths.values) < longest_row
    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


@for_each_decoder_input
@pytest.mark.parametrize('microbatch_size', [1, 5])
def test_decoder_on_a_stock_loader(t5, microbatch_size, has_decoder_ids):
    """Composer's own split cuts the batch, without ``token_data_spec``."""
    batch = seq2seq_batch(24, 12, has_decoder_ids=has_decoder_ids)
    expected_gradients = plain_gradients(t5, batch)

    recorder = fit(t5, loader(batch), microbatch_size=microbatch_size)

    assert relative_error(recorder.gradients, expected_gradients) < 1e-6
    # Stock Composer is off, so the test can fail.
    stock, _, _ = train(t5, loader(batch), microbatch_size=microbatch_size)
    assert relative_error(stock.gradients, expected_gradients) > 1e-2


@for_each_decoder_input
@pytest.mark.parametrize('multiple', [1, 8])
def test_cap_of_encoder_and_decoder_texts(multiple, has_decoder_ids):
    """A microbatch size of k means the memory of k rows with both texts."""
    rng = random.Random(0)
    num_rows = 16
    for _ in range(100):
        size = rng.randint(1, 4)
        encoder_width = rng.randint(8, 40)
        decoder_width = rng.randint(8, 40)
        lengths = []
        for _ in range(num_rows):
            encoder_length = rng.randint(1, encoder_width)
            decoder_length = rng.randint(1, decoder_width)
            lengths.append((encoder_length, decoder_length))
        batch = seq2seq_batch(encoder_width, decoder_width, lengths=lengths, has_decoder_ids=has_decoder_ids)

        microbatches = split(batch, size, width_multiple=multiple)

        assert sum(len(microbatch['labels']) for microbatch in microbatches) == num_rows
        for microbatch in microbatches:
            num_tokens = microbatch['input_ids'].numel() + microbatch['labels'].numel()
            assert num_tokens <= size * (encoder_width + decoder_width)


def test_row_with_both_texts_over_cap():
    """The encoder's text of the longest row has 24 tokens. The decoder's text is 12 wide in every row."""
    batch = seq2seq_batch(24, 12)

    assert split(batch, 1, slot_tokens=24)
    with pytest.raises(ValueError, match=rf'{24 + 12} tokens.* cap of {23 + 12} '):
        split(batch, 1, slot_tokens=23)


def test_sequence_length_warmup_is_exact():
    """The warmup clones every entry of the batch, so we may only add tensors to the batch."""
    rng = random.Random(0)
    lengths = [3, 16, 9, 12, 5, 16, 7, 14] * 4
    rows = text_rows([(length, rng.randint(1, length)) for length in lengths])
    data = DataLoader(rows, batch_size=8, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    warmup = SeqLengthWarmup(duration=0.75, min_seq_length=4, max_seq_length=16, step_size=4)
    algorithms = [warmup, TokenAccumulation()]

    recorder = fit(one_layer_model(), token_data_spec(data), algorithms=algorithms, max_duration='4ba')

    model = hugging_face(one_layer_model())
    width_of_steps = []  # a batch that is cut to this width has the gradient of the step
    for gradients, batch in zip(recorder.steps, data, strict=True):
        for width in (4, 8, 12, 16):
            cut_batch = {key: value[:, :width] for key, value in batch.items()}
            expected_gradients = plain_gradients(model, cut_batch)
            if relative_error(gradients, expected_gradients) < 1e-6:
                width_of_steps.append(width)
    # The warmup cuts the rows to a few columns at first, and less and less later.
    assert len(width_of_steps) == 4
    assert width_of_steps[0] < 16
    assert width_of_steps == sorted(width_of_steps)


@pytest.mark.parametrize('side', ['left', 'right'])
def test_embeddings_with_ids_of_none(side):
    """A collator may compute the embeddings itself, and leave the key of the ids in the batch."""
    model = one_layer_model()
    batch = text_batch([9, 3, 5, 2], side=side)
    embed = model.get_input_embeddings()
    embeddings = embed(batch['input_ids']).detach()
    batch_without_ids = {**batch, 'input_ids': None, 'inputs_embeds': embeddings}

    assert_exact(model, batch_without_ids, microbatch_size=1)


@pytest.mark.parametrize('is_additive', [True, False])
def test_mask_shared_by_all_rows(is_additive):
    """Transformers takes one causal mask for all rows, ``(1, 1, width, width)``."""
    batch = text_batch([9, 3, 5, 2])
    mask = torch.ones(1, 1, 9, 9).tril().bool()
    if is_additive:
        mask = additive(mask)
    batch['attention_mask'] = mask

    assert_exact(one_layer_model(), batch, microbatch_size=1)
