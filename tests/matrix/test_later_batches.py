# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches that differ from the first one: they are padded, or have media, and the first had neither."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from composer.models import HuggingFaceModel

from composer_tokacc import token_data_spec
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import PreSplitBatch
from tests.matrix.harness import kinds_of_steps, measure_steps, plain_gradients
from tests.matrix.native_models import LLAMA, LOSSES, NativeModel
from tests.matrix.subjects import SUBJECTS, has_labels, has_media
from tests.model_types.tiny import float32_model, tiny_config
from tests.support.masked_text import masked_batch, masked_model
from tests.support.text import VOCABULARY, collate, text_rows
from tests.support.training import (
    COMPOSERS_FLAG,
    TOLERANCE,
    GivenBatches,
    fit,
    loader,
    reference_gradients,
    relative_error,
)

UNEQUAL = [(4, 2), (12, 9), (7, 1), (3, 2), (9, 7)]
EQUAL = [(4, 2), (12, 2), (7, 2), (3, 2), (9, 2)]
LONG = [(4, 2), (40, 9), (21, 3), (38, 12)]


def batch_of(shape, **options):
    return collate(text_rows(shape), **options)


TEXT = ['llama', 'gpt2', 'gpt_neo', 'opt', 'bloom', 'falcon_alibi', 'mamba', 'gemma2', 'bert']
WITH_MEDIA = ['llava', 'qwen2_vl', 'qwen3_vl', 'paligemma', 'gemma3', 'idefics3', 'mllama_mixed', 'qwen2_audio']


def check(outcomes, num_batches, *, packing=False):
    """All steps are exact. Only a packed batch may be refused, which ends the run."""
    allowed = ('exact', 'refused') if packing else ('exact',)
    assert all(outcome.kind in allowed for outcome in outcomes), [str(outcome) for outcome in outcomes]
    assert len(outcomes) == num_batches or outcomes[-1].kind == 'refused'


@pytest.mark.slow
@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('sides', [('left', 'right'), ('right', 'left')], ids='-'.join)
@pytest.mark.parametrize('name', TEXT)
def test_rows_of_one_length_come_first(name, sides, packing):
    """In the first batch nothing is trimmed, and documents of the same length leak least."""
    subject = SUBJECTS[name]
    longest_row = max(subject.rows(0), key=lambda row: row['input_ids'].shape[1])
    longest_row['labels'][:, -1] = longest_row['input_ids'][:, -1]
    batches = [subject.collate([longest_row] * 4, 0, side=sides[0])]
    for seed, side in enumerate(sides * 2, start=1):
        batches.append(subject.batch(seed, side=side))
    outcomes = measure_steps(subject.model('large'), batches, 2, packing=packing)
    check(outcomes, len(batches), packing=packing)


@pytest.mark.slow
@pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
@pytest.mark.parametrize('name', WITH_MEDIA)
def test_rows_without_media_come_first(name, packing):
    subject = SUBJECTS[name]
    text_rows = []
    for seed in range(0, 12, 2):
        for row in subject.rows(seed):
            if not has_media(row) and has_labels(row):
                text_rows.append(row)
    assert len(text_rows) > 2
    batches = [
        subject.collate(text_rows[:5], 0, side='right'),
        subject.batch(1, side='right'),
        subject.batch(2, side='left'),
        subject.batch(3, side='right'),
    ]
    outcomes = measure_steps(subject.model('large'), batches, 2, packing=packing)
    check(outcomes, len(batches), packing=packing)


@pytest.mark.slow
@pytest.mark.parametrize(('regroup', 'seeds'), [(True, [2, 3]), (False, [1])], ids=['regrouped', 'in order'])
@pytest.mark.parametrize('name', ['llama', 'mistral', 'gemma2', 'mpt', 'bloom', 'opt', 'falcon_alibi', 'mamba'])
def test_labels_behind_padding_come_later(name, regroup, seeds):
    """Such a label is predicted from padding, which trimming takes away. The first batch has no such label."""
    subject = SUBJECTS[name]
    first = subject.batch(0, side='left')
    for seed in seeds:  # and sizes of microbatches
        rows = subject.rows(4 * seed)
        # Only shorter rows. Longer rows of their microbatch keep the column of the label.
        lengths = sorted(row['input_ids'].shape[1] for row in rows)
        middle_length = lengths[len(lengths) // 2]
        for row in rows:
            if row['input_ids'].shape[1] < middle_length:
                row['labels'][:, 0] = row['input_ids'][:, 0]
        batches = [first, subject.collate(rows, seed, side='left')]
        outcomes = measure_steps(subject.model('large'), batches, 1 + seed % 3, regroup=regroup)
        check(outcomes, len(batches))


def test_labels_without_attention_come_later():
    """DeBERTa lets a padding position attend to all others, padding too. Only the second batch has a label there."""
    first = masked_batch([3, 16, 4, 9])
    later = masked_batch([7, 3, 12, 5])
    later['labels'][1, 3] = 5
    model = masked_model('deberta')
    expected, _ = reference_gradients(model, later)
    recorder = fit(HuggingFaceModel(model, use_logits=True), first, later, microbatch_size=1)
    assert relative_error(recorder.gradients, expected) < TOLERANCE


# What the first batch hides.


ONE_ROW = [(6, 4)]
ONE_LABEL = [(4, 1), (12, 1), (7, 1)]
EQUAL_OR_NONE = [(1, 0), (12, 11), (12, 11)]


def per_labelled_row(logits, labels):
    """Averages the means of the rows that have labels."""
    num_labelled = (labels[:, 1:] != -100).any(dim=1).sum()
    mean_of_rows = LOSSES['per row'](logits, labels)  # the mean of a row without labels is 0
    return mean_of_rows * len(labels) / num_labelled.clamp(min=1)


@pytest.mark.parametrize(
    ('loss', 'first', 'logits'),
    [
        pytest.param('per row', EQUAL, 'never', id='equal, no logits'),
        pytest.param('per row', ONE_ROW, 'always', id='one row'),
        pytest.param('per row', ONE_LABEL, 'never', id='one label, no logits'),
        pytest.param(per_labelled_row, EQUAL_OR_NONE, 'never', id='equal or none, no logits'),
    ],
)
def test_mean_of_row_means_is_refused(loss, first, logits):
    """On the first batch the loss is also the mean over all tokens."""
    batches = [batch_of(first), batch_of(UNEQUAL)]
    assert kinds_of_steps(NativeModel(loss, logits=logits), batches) == ['refused']
    assert kinds_of_steps(NativeModel('causal', logits=logits), batches) == ['exact', 'exact']


def large(model_type, **settings):
    """Returns a model with large weights, so that positions matter."""
    config = tiny_config(model_type, {'vocab_size': VOCABULARY, 'pad_token_id': 0, **settings})
    model = float32_model(config)
    return HuggingFaceModel(model, shift_labels=True, use_logits=True)


def dynamic_rope():
    parameters = {'rope_type': 'dynamic', 'factor': 4.0, 'rope_theta': 100.0}
    return large('llama', max_position_embeddings=10, rope_parameters=parameters)


def long_rope():
    num_short_positions = 10
    parameters = {
        'rope_type': 'longrope',
        'rope_theta': 100.0,
        'short_factor': [1.0] * 8,
        'long_factor': [4.0] * 8,
        'original_max_position_embeddings': num_short_positions,
    }
    return large(
        'phi3',
        max_position_embeddings=64,
        original_max_position_embeddings=num_short_positions,
        rope_parameters=parameters,
    )


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='names its parameters otherwise')
@pytest.mark.parametrize('options', [{}, {'packing': True}], ids=['padded', 'packed'])
@pytest.mark.parametrize('build', [dynamic_rope, long_rope])
def test_rotary_embedding_by_width(build, options):
    short = batch_of([(4, 2), (8, 5), (7, 3)])
    long = batch_of([(4, 2), (30, 9), (7, 3), (3, 2)])
    kinds = kinds_of_steps(build(), [short, long, short], **options)
    assert kinds == (['exact', 'refused'] if options else ['exact'] * 3)


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='names its parameters otherwise')
@pytest.mark.parametrize('first', [[(4, 2), (8, 5)], [(30, 9), (12, 3)]], ids=['short rows first', 'long rows first'])
def test_rotary_embedding_by_largest_position(first):
    """A short row has another embedding if its batch has a long row. The padded width does not tell."""
    batches = [batch_of(first), batch_of([(4, 2), (30, 9), (7, 3), (3, 2)])]
    for batch in batches:
        batch['position_ids'] = (batch['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)
    assert kinds_of_steps(long_rope(), batches) == ['exact', 'refused']


def packed_rows(lengths_of_rows):
    """Returns rows of documents without padding, packed by the user. The first row has the fewest labels."""
    rows = []
    for lengths in lengths_of_rows:
        documents = [torch.arange(length) for length in lengths]
        rows.append(torch.cat(documents))
    positions = torch.stack(rows)
    ids = torch.randint(3, VOCABULARY, positions.shape, generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(positions == 0, -100)
    labels[0, :9] = -100
    return {'input_ids': ids, 'labels': labels, 'position_ids': positions}


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='names its parameters otherwise')
def test_rotary_embedding_of_packed_rows():
    """All rows are equally wide. One document beyond the rotary limit changes the rows that share its microbatch."""
    short = packed_rows([[10, 10], [5, 5, 10], [8, 7, 5], [10, 10]] * 3)
    long = packed_rows([[10, 10], [5, 5, 10], [8, 7, 5], [10, 10]] * 2 + [[8, 12], [10, 10]])
    assert kinds_of_steps(long_rope(), [short, long]) == ['exact', 'refused']


def scaled_by_column(scale: Callable[[torch.Tensor], torch.Tensor]) -> HuggingFaceModel:
    """Returns a Llama that scales the embedding in each column by a function of the column's number."""
    model = LLAMA.model('large')

    def scaled(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * scale(torch.arange(output.shape[1]))[:, None]

    model.model.get_input_embeddings().register_forward_hook(scaled)
    return model


def as_llama_4(columns):
    """Scales from column 16 on."""
    return 1 + 0.5 * (columns // 16)


def as_beam(columns):
    """Scales hardly, in few columns."""
    return (1 + columns / 2048) ** 0.03


@pytest.mark.parametrize('scale', [as_llama_4, as_beam])
@pytest.mark.parametrize('options', [{}, {'packing': True}, {'regroup': False}], ids=['padded', 'packed', 'in order'])
def test_columns_matter_in_long_rows(scale, options):
    short = batch_of(UNEQUAL, side='left')
    long = batch_of(LONG, side='left')
    kinds = kinds_of_steps(scaled_by_column(scale), [short, long, short, long], **options)
    if 'packing' in options:
        assert kinds[-1] == 'refused'
    else:
        assert kinds == ['exact'] * 4


@pytest.mark.parametrize('first', [0, 1], ids=['given first', 'absent first'])
def test_positions_that_only_some_batches_bring(first):
    """Trimming on the left moves positions that are counted from column 0, and no given ones."""
    absent = batch_of(UNEQUAL, side='left')
    given = {**absent, 'position_ids': (absent['attention_mask'].cumsum(dim=1) - 1).clamp(min=0)}
    batches = [given, absent, given, absent][first : first + 3]
    assert kinds_of_steps(SUBJECTS['gpt2'].model('large'), batches) == ['exact'] * 3


@pytest.mark.parametrize('positions', [12, 14, 64])
def test_padding_fits_encoder_positions(positions):
    """If a row is padded beyond the last position of the model, a GPU stops the process."""
    model = large('bart', max_position_embeddings=positions)
    batch = batch_of(UNEQUAL, side='left')
    batch['labels'] = batch_of([(5, 5), (3, 2), (6, 4), (2, 2), (4, 1)])['labels']
    assert kinds_of_steps(model, [batch]) == ['exact']


def test_left_padding_is_trimmed_by_width():
    short = batch_of(UNEQUAL, side='left')
    long = batch_of(LONG, side='left')
    for batches, width in (([short], 12), ([short, long], 40)):
        spec = token_data_spec(loader(*batches))
        fit(LLAMA.model('large'), spec, max_duration=f'{len(batches)}ba')
        rules = split_of(spec.dataloader).rules
        assert rules.left == width


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='not there yet')
def test_norm_behind_rotary_embedding():
    batches = [batch_of(UNEQUAL, side='left'), batch_of(UNEQUAL)]
    assert kinds_of_steps(large('hunyuan_v1_dense'), batches) == ['exact', 'exact']


def test_flag_heeds_later_padding():
    """FNet mixes all positions of a row, padding too."""
    fnet = float32_model(tiny_config('fnet', {'vocab_size': VOCABULARY}), std=None)
    model = HuggingFaceModel(fnet, shift_labels=False, use_logits=True)
    batches = [batch_of([(9, 3), (9, 5), (9, 2)]), batch_of(UNEQUAL), batch_of(UNEQUAL, side='left')]
    kinds = kinds_of_steps(model, batches, model=model, algorithms=[], trainer_options=COMPOSERS_FLAG)
    assert kinds == ['exact'] * 3


# Media.


def with_images(name, *counts):
    """Returns rows of a family with these numbers of images, and two labels each."""
    subject = SUBJECTS[name]
    rows = []
    seed = 0
    for count in counts:
        row = subject.row(random.Random(seed))
        while sum(row['num_images']) != count:
            seed += 1
            row = subject.row(random.Random(seed))
        seed += 1
        rows.append(with_two_labels(row))
    return rows


def with_two_labels(row):
    row['labels'][:, -2:] = row['input_ids'][:, -2:]
    return row


def changing_pixels(name, change):
    """Returns a model that changes its pixels at the begin of the forward."""
    model = SUBJECTS[name].model('large')

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get('pixel_values') is not None:
            kwargs['pixel_values'] = change(kwargs['pixel_values'])
        return args, kwargs

    model.model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def test_coupled_images_come_later():
    """HunYuan-VL numbers the images of a batch. If only one row has images, nothing of that shows."""
    subject = SUBJECTS['llava']
    text = subject.collate(with_images('llava', 0, 0, 0), 0, side='right')
    one_image = subject.collate(with_images('llava', 1, 0, 0), 0, side='right')
    several = subject.collate(with_images('llava', 1, 0, 2, 1), 0, side='right')
    assert kinds_of_steps(subject.model('large'), [one_image, several]) == ['exact', 'exact']
    coupled = changing_pixels('llava', lambda pixels: pixels + 0.1 * pixels.mean(dim=0))
    assert kinds_of_steps(coupled, [text, one_image, several]) == ['exact', 'exact', 'refused']


def test_media_padded_by_microbatch():
    """GLM-ASR depends on how far a sound is padded. A loader of microbatches pads each of them by itself."""
    subject = SUBJECTS['llava_next']
    rows = with_images('llava_next', 1, 1, 1, 1, 0, 1, 1)
    rows.sort(key=lambda row: row.get('pixel_values', row['labels']).shape[1])
    few_tiles = subject.collate(rows[:3], 0, side='right')
    many_tiles = subject.collate(rows[3:], 0, side='right')
    assert few_tiles['pixel_values'].shape[1] < many_tiles['pixel_values'].shape[1]
    batch = PreSplitBatch([few_tiles, many_tiles], max_tokens=1000)
    model = subject.model('large')
    recorder = fit(model, token_data_spec(GivenBatches([batch])), max_duration='1ba')
    assert relative_error(recorder.gradients, plain_gradients(model, batch)) < 1e-6
    changed_by_padding = changing_pixels('llava_next', lambda pixels: pixels + 0.3 * pixels.shape[1])
    with pytest.raises(RuntimeError, match='however far they are padded'):
        fit(changed_by_padding, token_data_spec(GivenBatches([batch])), max_duration='1ba')


@pytest.mark.parametrize('hole_first', [True, False], ids=['at first', 'later'])
def test_masked_hole_beside_images(hole_first):
    """Qwen-VL counts attended positions if a batch has images, and all columns if it has none."""
    subject = SUBJECTS['qwen2_vl']
    batch = subject.collate(with_images('qwen2_vl', 1, 0, 2, 0, 0, 1), 0, side='right')
    lengths = batch['attention_mask'].sum(dim=1).tolist()
    _, row_of_middle_length, _ = sorted((1, 3, 4), key=lambda row: lengths[row])
    with_hole = {**batch, 'attention_mask': batch['attention_mask'].clone()}
    with_hole['attention_mask'][row_of_middle_length, 2] = 0
    batches = [with_hole, batch] if hole_first else [batch, with_hole]
    assert kinds_of_steps(subject.model('large'), batches) == ['exact', 'exact']


def test_text_with_frozen_language_model():
    """Only the projector is trained, as at the start of LLaVA. A microbatch of text has no gradient."""
    subject = SUBJECTS['llava']
    model = subject.model('large')
    for name, parameter in model.named_parameters():
        parameter.requires_grad_('projector' in name)
    rows = with_images('llava', 1, 0, 0, 2)
    assert measure_steps(model, [subject.collate(rows, 0, side='right')], 1)[0].kind == 'exact'


def rows_with_two_labels(subject):
    """Returns rows without media, and rows with media."""
    rows = [with_two_labels(subject.row(random.Random(seed))) for seed in range(12)]
    return [row for row in rows if not has_media(row)], [row for row in rows if has_media(row)]


def test_text_before_the_first_image():
    """Mllama: a text row must not see an image of another row, although its step had none before."""
    subject = SUBJECTS['mllama_mixed']
    text_rows, image_rows = rows_with_two_labels(subject)
    text = subject.collate(text_rows[:3], 0, side='right')
    mixed = subject.collate(text_rows[:2] + image_rows[:2], 0, side='right')
    assert kinds_of_steps(subject.model('large'), [text, mixed]) == ['exact', 'exact']


def test_image_rows_without_labels():
    """Mllama: an image changes the loss of a text row. That is no term in a row without labels."""
    subject = SUBJECTS['mllama_mixed']
    text_rows, image_rows = rows_with_two_labels(subject)
    batch = subject.collate(text_rows[:3] + image_rows[:2], 0, side='right')
    batch['labels'][3:] = -100
    assert kinds_of_steps(subject.model('large'), [batch, batch]) == ['exact', 'exact']
