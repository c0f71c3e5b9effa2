# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Batches that no model can compute are refused in one line, with the sample and a remedy, before any step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from composer.core import DataSpec
from composer.models import HuggingFaceModel

from composer_tokacc import token_data_spec
from tests.matrix.harness import measure_steps
from tests.matrix.native_models import Terms, by_token
from tests.matrix.subjects import SUBJECTS
from tests.support.small_batches import square_mask
from tests.support.text import VOCABULARY, gpt2, named_batch, one_layer_model, single_rows
from tests.support.training import assert_exact, fit, loader, reference_gradients, relative_error

SHAPE = [(4, 2), (9, 3), (5, 4), (14, 11)]
"""Length and number of labels of the rows. In the third one the last four tokens have labels."""


def batch_of(**entries: Any) -> dict[str, Any]:
    """Returns rows of text. The entries are added, or replace others."""
    return {**named_batch(SHAPE), **entries}


NO_BATCH: list[dict[str, Any]] = []
ONE_BATCH = [batch_of()]
first_or_later_batch = pytest.mark.parametrize(
    'batches_before',
    [
        pytest.param(NO_BATCH, id='first batch'),
        pytest.param(ONE_BATCH, id='later batch'),
    ],
)
each_split = pytest.mark.parametrize('make_spec', [token_data_spec, DataSpec])


def with_id(entry: str, number: int) -> dict[str, Any]:
    """Returns a batch with this label or this token in its third sample."""
    batch = batch_of()
    batch[entry][2, 3] = number
    return batch


def refusal(*batches: dict[str, Any], model: Any = None, make_spec: Any = token_data_spec) -> str:
    """Returns the error of a run on these batches. The last one is refused."""
    data = make_spec(loader(*batches))
    if model is None:
        model = one_layer_model()
    with pytest.raises((ValueError, RuntimeError), match='got:') as caught:
        fit(model, data, max_duration=f'{len(batches)}ba')
    message = str(caught.value)
    assert '..' not in message, 'the error of torch, which the message quotes, may end with a period'
    return message


@pytest.mark.parametrize(
    ('dtype', 'make_spec'),
    [
        (torch.int32, token_data_spec),
        (torch.int32, DataSpec),
        (torch.uint8, token_data_spec),
    ],
)
def test_labels_that_are_not_int64(dtype, make_spec):
    batch = batch_of()
    labels = batch['labels']
    if dtype == torch.uint8:
        labels = labels.clamp(min=0)  # uint8 has no negative numbers
    batch['labels'] = labels.to(dtype)

    message = refusal(batch, make_spec=make_spec)

    assert f'int64 for cross-entropy, got: {dtype}' in message
    assert '.long()' in message


def test_ids_in_lists():
    batch = batch_of()
    batch['input_ids'] = batch['input_ids'].tolist()
    message = refusal(batch)
    assert re.search('`input_ids`, which must be a tensor.*list', message)


@pytest.mark.parametrize(
    ('number', 'batches_before'),
    [
        pytest.param(VOCABULARY, NO_BATCH, id='too large, first batch'),
        pytest.param(-1, ONE_BATCH, id='negative, later batch'),
    ],
)
@pytest.mark.parametrize('entry', ['labels', 'input_ids'])
def test_id_outside_vocabulary_names_sample(entry, number, batches_before):
    message = refusal(*batches_before, with_id(entry, number))
    assert f'`{entry}` must be' in message
    assert f"from 0 to {VOCABULARY - 1}, got: {number} in sample 'sample-2'" in message


@pytest.mark.parametrize(
    ('batch', 'model', 'cause'),
    [
        pytest.param(
            with_id('labels', VOCABULARY),
            Terms(by_token),
            f'Target {VOCABULARY} is out of bounds',
            id='label',
        ),
        pytest.param(
            with_id('input_ids', VOCABULARY),
            Terms(by_token),
            f'ids up to {VOCABULARY}',
            id='token',
        ),
        pytest.param(
            named_batch([(65, 20), (9, 3)]),
            gpt2(),
            'rows of 65 tokens',
            id='too long',
        ),
    ],
)
def test_error_of_the_first_forward(batch, model, cause):
    """Torch says only that an index is out of range. `Terms` hides its vocabulary, and GPT-2 has 64 positions."""
    assert cause in refusal(batch, model=model)


def test_first_logits_show_the_vocabulary():
    message = refusal(batch_of(), with_id('labels', VOCABULARY), model=Terms(by_token))
    assert f"got: {VOCABULARY} in sample 'sample-2'" in message


def test_last_id_is_a_label():
    assert_exact(one_layer_model(), with_id('labels', VOCABULARY - 1))


def test_placeholders_outside_the_embedding():
    """PaliGemma replaces placeholders by pads before it looks them up, so they may be larger than the embedding."""
    subject = SUBJECTS['paligemma']
    model = subject.model('large')
    batch = subject.batch(0, side='right')
    config = model.model.config
    is_placeholder = batch['input_ids'] == config.image_token_id
    assert is_placeholder.any()
    first_id_outside = model.model.get_input_embeddings().num_embeddings
    config.image_token_id = first_id_outside
    batch['input_ids'] = batch['input_ids'].masked_fill(is_placeholder, first_id_outside)

    (outcome,) = measure_steps(model, [batch], 2)

    assert outcome.kind == 'exact'


@first_or_later_batch
def test_images_for_a_text_model(batches_before):
    """Composer would leave them out in silence."""
    images = torch.rand(2, 3, 8, 8)
    batch = batch_of(pixel_values=images, num_images=[0, 0, 2, 0])
    message = refusal(*batches_before, batch)
    assert "got: ['pixel_values'] of sample 'sample-2'" in message


class LossOfImages(HuggingFaceModel):
    """Its loss gets the whole batch. Only the forward gets the entries that it names."""

    def loss(self, outputs, batch):
        assert 'pixel_values' in batch
        return super().loss(outputs, batch)


def without_images(batch):
    return {key: value for key, value in batch.items() if key != 'pixel_values'}


@pytest.mark.parametrize(
    ('key', 'model_class', 'transform'),
    [
        pytest.param('image_scores', HuggingFaceModel, None, id='notes'),
        pytest.param('pixel_values', LossOfImages, None, id='loss of the batch'),
        pytest.param('pixel_values', HuggingFaceModel, without_images, id='transform'),
    ],
)
def test_images_that_need_not_reach_the_forward(key, model_class, transform):
    batch = batch_of(num_images=[0, 0, 2, 0])
    batch[key] = torch.rand(2, 3)
    model = model_class(one_layer_model())
    data = token_data_spec(loader(batch), microbatch_transforms=transform)
    fit(model, data)


@each_split
@pytest.mark.parametrize('queries', [1, 14])
def test_mask_of_three_dimensions(queries, make_spec):
    batch = batch_of()
    mask = batch['attention_mask'][:, None]
    batch['attention_mask'] = mask.expand(-1, queries, -1)
    message = refusal(batch, make_spec=make_spec)
    assert f'of shape (4, {queries}, 14)' in message
    assert "'sample-0'" in message


def test_mask_of_four_dimensions_is_exact():
    """It lets each token see itself and earlier ones, as the model does by itself with a mask of two dimensions."""
    batch = batch_of()
    batch_with_square_mask = batch_of(attention_mask=square_mask(batch))
    assert_exact(one_layer_model(), batch_with_square_mask, batch=batch)


@each_split
@first_or_later_batch
def test_batch_without_rows(batches_before, make_spec):
    empty_batch = {key: rows[:0] for key, rows in batch_of().items()}
    message = refusal(*batches_before, empty_batch, make_spec=make_spec)
    assert 'got: labels of shape (0, 14)' in message


def count_rows(batch):
    return len(batch['labels'])


def split_without_notes(batch, size):
    """Splits a batch into its rows. The notes are not one value per row."""
    entries = dict(batch)
    del entries['notes']
    return single_rows(entries)


def test_rows_that_cannot_be_told_apart(caplog):
    """The user's own split knows the rows, but the check does not. The step is exact nevertheless."""
    batch = batch_of()
    expected, _ = reference_gradients(one_layer_model(), batch)
    batch_with_notes = batch_of(notes=['one', 'two'])
    data = DataSpec(loader(batch_with_notes), split_batch=split_without_notes, get_num_samples_in_batch=count_rows)

    recorder = fit(one_layer_model(), data, microbatch_size=1)

    assert 'could not be told apart' in caplog.text
    assert relative_error(recorder.gradients, expected) < 1e-6
