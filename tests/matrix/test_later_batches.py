# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches that differ from the first one: they are padded, or have media, and the first had neither."""

from __future__ import annotations

import copy
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
from tests.matrix.harness import kinds_of_steps, measure, measure_steps, plain_gradients
from tests.matrix.native_models import LLAMA, LOSSES, NativeModel, has_loss
from tests.matrix.subjects import SUBJECTS, has_labels, has_media
from tests.model_types.tiny import float32_model, tiny_config
from tests.support.masked_text import masked_batch, masked_model
from tests.support.text import VOCABULARY, positions_of, ragged_batch
from tests.support.training import (
    COMPOSERS_FLAG,
    TOLERANCE,
    GivenBatches,
    fit,
    reference_gradients,
    relative_error,
)

# Length and number of labels of each row.
UNEQUAL = [(4, 2), (12, 9), (7, 1), (3, 2), (9, 7)]
EQUAL = [(4, 2), (12, 2), (7, 2), (3, 2), (9, 2)]
LONG = [(4, 2), (40, 9), (21, 3), (38, 12)]

TEXT = [
    'llama',
    'gpt2',
    'gpt_neo',
    'opt',
    'bloom',
    'falcon_alibi',
    'mamba',
    'gemma2',
    'bert',
]
WITH_MEDIA = [
    'llava',
    'qwen2_vl',
    'qwen3_vl',
    'paligemma',
    'gemma3',
    'idefics3',
    'mllama_mixed',
    'qwen2_audio',
]
WITH_LABELS_BEHIND_PADDING = [
    'llama',
    'mistral',
    'gemma2',
    'mpt',
    'bloom',
    'opt',
    'falcon_alibi',
    'mamba',
]


padded_and_packed = pytest.mark.parametrize('packing', [False, True], ids=['padded', 'packed'])
new_rope_parameters = pytest.mark.skipif(
    transformers.__version__.startswith('4.'), reason='names its parameters otherwise'
)


def check(outcomes, num_batches, *, packing=False):
    """All steps are exact. Only a packed batch may be refused, which ends the run."""
    allowed_kinds = ['exact']
    if packing:
        allowed_kinds.append('refused')
    for step, outcome in enumerate(outcomes):
        assert outcome.kind in allowed_kinds, f'step {step}: {outcome}'
    was_refused = outcomes[-1].kind == 'refused'
    if not was_refused:
        assert len(outcomes) == num_batches


def joined(subject, rows, *, side='right'):
    """Returns rows of a family as a batch. It is as wide as the longest row."""
    return subject.collate(rows, 0, side=side)


def num_tokens(row):
    return row['input_ids'].shape[1]


@pytest.mark.slow
@padded_and_packed
@pytest.mark.parametrize('sides', [('left', 'right'), ('right', 'left')], ids='-'.join)
@pytest.mark.parametrize('name', TEXT)
def test_rows_of_one_length_come_first(name, sides, packing):
    """In the first batch nothing is trimmed. And if packed documents see each other, equal lengths show it least."""
    subject = SUBJECTS[name]
    longest_row = max(subject.rows(0), key=num_tokens)
    longest_row['labels'][:, -1] = longest_row['input_ids'][:, -1]
    first_side, second_side = sides
    batches = [
        joined(subject, [longest_row] * 4, side=first_side),
        subject.batch(1, side=first_side),
        subject.batch(2, side=second_side),
        subject.batch(3, side=first_side),
        subject.batch(4, side=second_side),
    ]

    outcomes = measure_steps(subject.model('large'), batches, 2, packing=packing)

    check(outcomes, len(batches), packing=packing)


@pytest.mark.slow
@padded_and_packed
@pytest.mark.parametrize('name', WITH_MEDIA)
def test_rows_without_media_come_first(name, packing):
    subject = SUBJECTS[name]
    rows_of_text = []
    for seed in range(0, 12, 2):
        for row in subject.rows(seed):
            if not has_media(row) and has_labels(row):
                rows_of_text.append(row)
    assert len(rows_of_text) > 2
    batches = [
        joined(subject, rows_of_text[:5]),
        subject.batch(1, side='right'),
        subject.batch(2, side='left'),
        subject.batch(3, side='right'),
    ]

    outcomes = measure_steps(subject.model('large'), batches, 2, packing=packing)

    check(outcomes, len(batches), packing=packing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('regroup', 'seed', 'microbatch_size'),
    [
        pytest.param(True, 2, 3, id='regrouped, three rows'),
        pytest.param(True, 3, 1, id='regrouped, one row'),
        pytest.param(False, 1, 2, id='in order'),
    ],
)
@pytest.mark.parametrize('name', WITH_LABELS_BEHIND_PADDING)
def test_labels_behind_padding_come_later(name, regroup, seed, microbatch_size):
    """Such a label is predicted from padding, which trimming takes away. The first batch has no such label."""
    subject = SUBJECTS[name]
    first = subject.batch(0, side='left')
    rows = subject.rows(4 * seed)
    # Only shorter rows. Longer rows of their microbatch keep the column of the label.
    lengths = sorted(map(num_tokens, rows))
    middle_length = lengths[len(lengths) // 2]
    for row in rows:
        if num_tokens(row) < middle_length:
            row['labels'][:, 0] = row['input_ids'][:, 0]
    later = subject.collate(rows, seed, side='left')

    outcomes = measure_steps(subject.model('large'), [first, later], microbatch_size, regroup=regroup)

    check(outcomes, num_batches=2)


def test_labels_without_attention_come_later():
    """DeBERTa lets a padding position attend to all others, padding too. Only the second batch has a label there."""
    first = masked_batch([3, 16, 4, 9])
    later = masked_batch([7, 3, 12, 5])
    # Row 1 has three tokens, so column 3 is its first padding.
    later['labels'][1, 3] = 5
    deberta = masked_model('deberta')
    expected, _ = reference_gradients(deberta, later)
    model = HuggingFaceModel(deberta, use_logits=True)

    recorder = fit(model, first, later, microbatch_size=1)

    assert relative_error(recorder.gradients, expected) < TOLERANCE


# What the first batch hides.


ONE_ROW = [(6, 4)]
ONE_LABEL = [(4, 1), (12, 1), (7, 1)]
EQUAL_OR_NONE = [(1, 0), (12, 11), (12, 11)]


def per_labelled_row(logits, labels):
    """Averages the means of the rows that have labels."""
    num_rows = len(labels)
    is_labelled_row = has_loss(labels).any(dim=1)
    num_labelled_rows = is_labelled_row.sum().clamp(min=1)
    mean_of_rows = LOSSES['per row'](logits, labels)  # the mean of a row without labels is 0
    return mean_of_rows * num_rows / num_labelled_rows


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
    batches = [ragged_batch(first), ragged_batch(UNEQUAL)]

    kinds = kinds_of_steps(NativeModel(loss, logits=logits), batches)
    kinds_of_causal_loss = kinds_of_steps(NativeModel('causal', logits=logits), batches)

    assert kinds == ['refused']
    assert kinds_of_causal_loss == ['exact', 'exact']


def large(model_type, **settings):
    """Returns a model with large weights, so that positions matter."""
    all_settings = {'vocab_size': VOCABULARY, 'pad_token_id': 0, **settings}
    config = tiny_config(model_type, all_settings)
    model = float32_model(config)
    return HuggingFaceModel(model, shift_labels=True, use_logits=True)


def dynamic_rope():
    """Returns a Llama whose rotary embedding changes with the width, beyond 10 positions."""
    parameters = {'rope_type': 'dynamic', 'factor': 4.0, 'rope_theta': 100.0}
    return large('llama', max_position_embeddings=10, rope_parameters=parameters)


def long_rope():
    """Returns a Phi-3 that has another rotary embedding if a batch has a position beyond the first 10."""
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


ONE_LONG_ROW = [(4, 2), (30, 9), (7, 3), (3, 2)]


@new_rope_parameters
@pytest.mark.parametrize(
    ('packing', 'expected'),
    [
        pytest.param(False, ['exact', 'exact', 'exact'], id='padded'),
        pytest.param(True, ['exact', 'refused'], id='packed'),
    ],
)
@pytest.mark.parametrize('build', [dynamic_rope, long_rope])
def test_rotary_embedding_by_width(build, packing, expected):
    short = ragged_batch([(4, 2), (8, 5), (7, 3)])
    long = ragged_batch(ONE_LONG_ROW)

    kinds = kinds_of_steps(build(), [short, long, short], packing=packing)

    assert kinds == expected


@new_rope_parameters
@pytest.mark.parametrize(
    'row_sizes',
    [
        pytest.param([(4, 2), (8, 5)], id='short rows first'),
        pytest.param([(30, 9), (12, 3)], id='long rows first'),
    ],
)
def test_rotary_embedding_by_largest_position(row_sizes):
    """A short row has another embedding if its batch has a long row. The padded width does not tell."""
    first = ragged_batch(row_sizes)
    first['position_ids'] = positions_of(first)
    later = ragged_batch(ONE_LONG_ROW)
    later['position_ids'] = positions_of(later)

    kinds = kinds_of_steps(long_rope(), [first, later])

    assert kinds == ['exact', 'refused']


def packed_rows(lengths_of_rows):
    """Returns rows of documents without padding, packed by the user. The first row has the fewest labels."""
    positions_of_rows = []
    for lengths in lengths_of_rows:
        positions_of_documents = [torch.arange(length) for length in lengths]
        positions_of_rows.append(torch.cat(positions_of_documents))
    positions = torch.stack(positions_of_rows)

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, positions.shape, generator=generator)
    is_first_of_document = positions == 0
    labels = ids.masked_fill(is_first_of_document, -100)
    labels[0, :9] = -100
    return {'input_ids': ids, 'labels': labels, 'position_ids': positions}


@new_rope_parameters
def test_rotary_embedding_of_packed_rows():
    """All rows are equally wide. One document beyond the rotary limit changes the rows that share its microbatch."""
    within_the_limit = [[10, 10], [5, 5, 10], [8, 7, 5], [10, 10]]
    row_beyond_the_limit = [8, 12]
    short = packed_rows(within_the_limit * 3)
    long = packed_rows(within_the_limit * 2 + [row_beyond_the_limit, [10, 10]])

    kinds = kinds_of_steps(long_rope(), [short, long])

    assert kinds == ['exact', 'refused']


def scaled_by_column(scale: Callable[[torch.Tensor], torch.Tensor]) -> HuggingFaceModel:
    """Returns a Llama that scales the embedding in each column by a function of the column's number."""
    model = LLAMA.model('large')

    def scale_columns(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        width = output.shape[1]
        scales = scale(torch.arange(width))
        return output * scales[:, None]

    model.model.get_input_embeddings().register_forward_hook(scale_columns)
    return model


def as_llama_4(columns):
    """Scales from column 16 on."""
    return 1 + 0.5 * (columns // 16)


def as_beam(columns):
    """Scales hardly, in few columns."""
    return (1 + columns / 2048) ** 0.03


@pytest.mark.parametrize('scale', [as_llama_4, as_beam])
@pytest.mark.parametrize('regroup', [True, False], ids=['regrouped', 'in order'])
def test_columns_matter_in_long_rows(scale, regroup):
    short = ragged_batch(UNEQUAL, side='left')
    long = ragged_batch(LONG, side='left')
    model = scaled_by_column(scale)

    kinds = kinds_of_steps(model, [short, long, short, long], regroup=regroup)

    assert kinds == ['exact'] * 4


@pytest.mark.parametrize('scale', [as_llama_4, as_beam])
def test_columns_matter_in_packed_rows(scale):
    short = ragged_batch(UNEQUAL, side='left')
    long = ragged_batch(LONG, side='left')
    model = scaled_by_column(scale)

    kinds = kinds_of_steps(model, [short, long], packing=True)

    assert kinds[-1] == 'refused'


@pytest.mark.parametrize('are_given_first', [True, False], ids=['given first', 'absent first'])
def test_positions_that_only_some_batches_bring(are_given_first):
    """Trimming on the left moves positions that are counted from column 0, and no given ones."""
    without_positions = ragged_batch(UNEQUAL, side='left')
    with_positions = {**without_positions, 'position_ids': positions_of(without_positions)}
    if are_given_first:
        batches = [with_positions, without_positions, with_positions]
    else:
        batches = [without_positions, with_positions, without_positions]

    kinds = kinds_of_steps(SUBJECTS['gpt2'].model('large'), batches)

    assert kinds == ['exact'] * 3


@pytest.mark.parametrize('positions', [12, 14, 64])
def test_padding_fits_encoder_positions(positions):
    """If a row is padded beyond the last position of the model, a GPU stops the process."""
    model = large('bart', max_position_embeddings=positions)
    batch = ragged_batch(UNEQUAL, side='left')
    answers = ragged_batch([(5, 5), (3, 2), (6, 4), (2, 2), (4, 1)])
    batch['labels'] = answers['labels']

    kinds = kinds_of_steps(model, [batch])

    assert kinds == ['exact']


@pytest.mark.parametrize(
    ('row_sizes_of_batches', 'longest_row'),
    [
        pytest.param([UNEQUAL], 12, id='one batch'),
        pytest.param([UNEQUAL, LONG], 40, id='a longer batch later'),
    ],
)
def test_left_padding_is_trimmed_by_width(row_sizes_of_batches, longest_row):
    batches = [ragged_batch(row_sizes, side='left') for row_sizes in row_sizes_of_batches]

    recorder = fit(LLAMA.model('large'), *batches)

    split = split_of(recorder.trainer.state.dataloader)
    assert split.rules.left == longest_row


@pytest.mark.skipif(transformers.__version__.startswith('4.'), reason='not there yet')
def test_norm_behind_rotary_embedding():
    batches = [ragged_batch(UNEQUAL, side='left'), ragged_batch(UNEQUAL)]

    kinds = kinds_of_steps(large('hunyuan_v1_dense'), batches)

    assert kinds == ['exact', 'exact']


def test_flag_heeds_later_padding():
    """FNet mixes all positions of a row, padding too."""
    fnet = float32_model(tiny_config('fnet', {'vocab_size': VOCABULARY}), std=None)
    model = HuggingFaceModel(fnet, shift_labels=False, use_logits=True)
    without_padding = ragged_batch([(9, 3), (9, 5), (9, 2)])
    padded_right = ragged_batch(UNEQUAL)
    padded_left = ragged_batch(UNEQUAL, side='left')
    batches = [without_padding, padded_right, padded_left]

    kinds = kinds_of_steps(
        model,
        batches,
        model=model,
        algorithms=[],
        trainer_options=COMPOSERS_FLAG,
    )

    assert kinds == ['exact'] * 3


# Media.


def rows_with_images(subject, counts):
    """Returns rows of a family with these numbers of images, and two labels each."""
    rows = []
    seed = 0
    while len(rows) < len(counts):
        row = subject.row(random.Random(seed))
        seed += 1
        next_count = counts[len(rows)]
        if sum(row['num_images']) == next_count:
            rows.append(with_two_labels(row))
    return rows


def batch_with_images(subject, counts):
    """Returns the rows of :func:`rows_with_images` as a batch."""
    return joined(subject, rows_with_images(subject, counts))


def with_two_labels(row):
    """Labels the last two tokens of a row, and returns it."""
    row['labels'][:, -2:] = row['input_ids'][:, -2:]
    return row


def changing_pixels(name, change):
    """Returns a model that changes its pixels at the beginning of the forward."""
    model = SUBJECTS[name].model('large')

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get('pixel_values') is not None:
            kwargs['pixel_values'] = change(kwargs['pixel_values'])
        return args, kwargs

    model.model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def test_coupled_images_come_later():
    """HunYuan-VL numbers the images of a batch. If only one row has images, nothing of that shows."""

    def add_mean_of_images(pixels):
        return pixels + 0.1 * pixels.mean(dim=0)

    subject = SUBJECTS['llava']
    text = batch_with_images(subject, [0, 0, 0])
    one_image = batch_with_images(subject, [1, 0, 0])
    several = batch_with_images(subject, [1, 0, 2, 1])
    coupled_model = changing_pixels('llava', add_mean_of_images)

    kinds = kinds_of_steps(subject.model('large'), [one_image, several])
    kinds_if_coupled = kinds_of_steps(coupled_model, [text, one_image, several])

    assert kinds == ['exact', 'exact']
    assert kinds_if_coupled == ['exact', 'exact', 'refused']


def test_media_padded_by_microbatch():
    """GLM-ASR depends on how far a sound is padded. A loader of microbatches pads each of them by itself."""

    def add_number_of_tiles(pixels):
        num_tiles = pixels.shape[1]
        return pixels + 0.3 * num_tiles

    subject = SUBJECTS['llava_next']
    rows_with_one_image = rows_with_images(subject, [1, 1, 1, 1, 1, 1])
    rows_with_one_image.sort(key=lambda row: row['pixel_values'].shape[1])
    [row_of_text] = rows_with_images(subject, [0])
    few_tiles = joined(subject, rows_with_one_image[:3])
    many_tiles = joined(subject, [*rows_with_one_image[3:], row_of_text])
    assert few_tiles['pixel_values'].shape[1] < many_tiles['pixel_values'].shape[1]
    batch = PreSplitBatch([few_tiles, many_tiles], max_tokens=1000)
    data = token_data_spec(GivenBatches([batch]))

    model = subject.model('large')
    recorder = fit(model, data, max_duration='1ba')
    expected = plain_gradients(model, batch)
    assert relative_error(recorder.gradients, expected) < 1e-6

    changed_by_padding = changing_pixels('llava_next', add_number_of_tiles)
    with pytest.raises(RuntimeError, match='however far they are padded'):
        fit(changed_by_padding, data, max_duration='1ba')


@pytest.mark.parametrize('hole_first', [True, False], ids=['at first', 'later'])
def test_masked_hole_beside_images(hole_first):
    """Qwen-VL counts attended positions if a batch has images, and all columns if it has none."""
    subject = SUBJECTS['qwen2_vl']
    batch = batch_with_images(subject, [1, 0, 2, 0, 0, 1])
    rows_of_text = [1, 3, 4]
    lengths = batch['attention_mask'].sum(dim=1).tolist()
    rows_of_text.sort(key=lambda row: lengths[row])
    row_of_middle_length = rows_of_text[1]
    with_hole = copy.deepcopy(batch)
    with_hole['attention_mask'][row_of_middle_length, 2] = 0
    batches = [batch, with_hole]
    if hole_first:
        batches.reverse()

    kinds = kinds_of_steps(subject.model('large'), batches)

    assert kinds == ['exact', 'exact']


def test_text_with_frozen_language_model():
    """Only the projector is trained, as at the start of LLaVA. A microbatch of text has no gradient."""
    subject = SUBJECTS['llava']
    model = subject.model('large')
    for name, parameter in model.named_parameters():
        is_trained = 'projector' in name
        parameter.requires_grad_(is_trained)
    batch = batch_with_images(subject, [1, 0, 0, 2])

    outcome = measure(model, batch, 1)

    assert outcome.kind == 'exact'


def rows_of_mllama():
    """Returns rows without images, and rows with images. All have two labels."""
    rows_of_text = []
    rows_of_images = []
    for seed in range(12):
        row = SUBJECTS['mllama_mixed'].row(random.Random(seed))
        rows = rows_of_images if has_media(row) else rows_of_text
        rows.append(with_two_labels(row))
    return rows_of_text, rows_of_images


def test_text_before_the_first_image():
    """Mllama: a text row must not see the image of another row, also if no batch before had an image."""
    subject = SUBJECTS['mllama_mixed']
    rows_of_text, rows_of_images = rows_of_mllama()
    text = joined(subject, rows_of_text[:3])
    mixed = joined(subject, rows_of_text[:2] + rows_of_images[:2])

    kinds = kinds_of_steps(subject.model('large'), [text, mixed])

    assert kinds == ['exact', 'exact']


def test_image_rows_without_labels():
    """Mllama: an image changes the loss of a text row. This must not look like a loss term of the unlabelled rows."""
    subject = SUBJECTS['mllama_mixed']
    rows_of_text, rows_of_images = rows_of_mllama()
    batch = joined(subject, rows_of_text[:3] + rows_of_images[:2])
    batch['labels'][3:] = -100  # the rows with images

    kinds = kinds_of_steps(subject.model('large'), [batch, batch])

    assert kinds == ['exact', 'exact']
