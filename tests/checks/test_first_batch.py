# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The first-batch check refuses rows that depend on each other, and chooses a cut that keeps their gradients."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from composer.core import Callback, DataSpec
from composer.models import HuggingFaceModel
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

from composer_tokacc import token_data_spec
from composer_tokacc.checks.cut_rules import FAILED, CutRules
from composer_tokacc.checks.first_batch import media_as_collated, rule_batch
from composer_tokacc.checks.row_ranges import MediaItems, chosen_rows
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.layout import BatchLayout, PreSplitBatch
from composer_tokacc.layout.tensors import Entry
from tests.matrix.collator import join
from tests.support.exactness import loss_tokens
from tests.support.families import MEDIA
from tests.support.small_batches import (
    IMAGE,
    drawn_batch,
    layout_of_model,
    numbered,
    square_mask,
    text_batch,
)
from tests.support.text import (
    ONE_UNLABELLED,
    RAGGED,
    VOCABULARY,
    ColumnCounter,
    column_counter,
    gpt2,
    named_batch,
    next_token_loss,
    one_layer_model,
    ragged_batch,
    with_vectors,
)
from tests.support.training import (
    TOLERANCE,
    assert_exact,
    fit,
    hugging_face,
    loader,
    reference_gradients,
    relative_error,
    weights_unchanged,
)

WITHOUT_PADDING = [(9, 4), (9, 7), (9, 2), (9, 8)]


def rules_after_exact_steps(model, *batches, **options):
    """Returns the rules by which rows are cut at the end.

    A rule that was proven has the width of the widest rows that were checked. The widest row of :data:`RAGGED` has 14.
    """
    recorder = assert_exact(model, *batches, **options)
    return split_of(recorder.trainer.state.train_dataloader).rules


@pytest.mark.parametrize(
    ('make', 'side', 'rules'),
    [
        pytest.param(one_layer_model, 'right', CutRules(right=14), id='right'),
        pytest.param(one_layer_model, 'left', CutRules(left=14), id='cut off'),
        pytest.param(gpt2, 'left', CutRules(left=FAILED), id='positions would move'),
        pytest.param(column_counter, 'left', CutRules(left=FAILED), id='no argument for positions'),
    ],
)
def test_padding_is_cut_if_exact(make, side, rules):
    model = make()
    batch = ragged_batch(side=side)
    assert rules_after_exact_steps(model, batch) == rules


def test_cuts_that_failed_are_logged(caplog):
    """GPT-2 counts positions from column 0, so rows padded on the left cannot just be trimmed."""
    with caplog.at_level(logging.INFO, logger='composer_tokacc'):
        assert_exact(gpt2(), ragged_batch(side='left'))

    [failed_cut] = [message for message in caplog.messages if message.startswith('CutRules(')]
    assert 'left=14' in failed_cut
    assert 'position' in failed_cut
    assert 'After the first-batch check: CutRules(' in caplog.text


@pytest.mark.parametrize('microbatch_size', [2, 6])
def test_rows_without_labels_are_checked_once(microbatch_size, caplog):
    batch = ragged_batch(ONE_UNLABELLED)

    with caplog.at_level(logging.INFO, logger='composer_tokacc'):
        assert_exact(one_layer_model(), batch, batch, microbatch_size=microbatch_size)

    assert caplog.text.count('After the first-batch check') == 1


@pytest.mark.parametrize(
    ('side', 'rules'),
    [
        ('left', CutRules(left=FAILED)),
        ('right', CutRules(right=14)),
    ],
)
def test_later_padding_is_proven_first(side, rules):
    """The first batch has no padding, so it cannot show how padding may be cut."""
    without_padding = ragged_batch(WITHOUT_PADDING, side=side)
    padded = ragged_batch(RAGGED, side=side)
    fewer_padded = ragged_batch(RAGGED[1:], side=side)

    rules_at_end = rules_after_exact_steps(gpt2(), without_padding, padded, fewer_padded)

    assert rules_at_end == rules


def test_rows_without_labels_prove_no_padding():
    """Only rows without labels are padded at first. They get none for the check, because it does not know their ids."""
    model = gpt2()
    unlabelled = ragged_batch([(14, 11), (9, 0), (5, 0), (3, 0)], side='left')
    labelled = ragged_batch([(14, 11), (9, 7), (5, 3), (4, 2)], side='left')
    first = with_vectors(model, unlabelled)
    second = with_vectors(model, labelled)

    assert_exact(model, first, second)


class NeedsChunks(ColumnCounter):
    """Asserts that the width is a multiple of 8, as models that scan chunks do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        width = input_ids.shape[1]
        if width % 8 != 0:
            raise AssertionError  # an assert of a test gets a message from pytest
        return super().forward(input_ids, attention_mask, labels)


class PadsRows(ColumnCounter):
    """Pads its rows to a multiple of 8 columns, and returns logits for all of them."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        width = input_ids.shape[1]
        padding = (0, -width % 8)
        padded_ids = F.pad(input_ids, padding)
        padded_mask = F.pad(attention_mask, padding)
        outputs = super().forward(padded_ids, padded_mask)
        loss = next_token_loss(outputs.logits[:, :width], labels)
        return CausalLMOutput(loss=loss, logits=outputs.logits)


@pytest.mark.parametrize('model_class', [NeedsChunks, PadsRows])
def test_model_that_needs_rounded_widths(model_class):
    """Also with `width_multiple`, because the check does not round widths."""
    model = gpt2(model_class)
    batch = ragged_batch([(9, 7), (16, 11), (3, 2)], width=24)

    rules = rules_after_exact_steps(model, batch, batch, width_multiple=8)

    assert rules.right == FAILED


class SeesNextColumns(ColumnCounter):
    """Adds to each token 0.1 times the embedding two columns later. For the last two tokens that is padding or 0."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        embeddings = self.transformer.wte(input_ids)
        later_columns = F.pad(embeddings[:, 2:], (0, 0, 0, 2))
        embeddings = embeddings + 0.1 * later_columns
        # ColumnCounter takes no embeddings, so this calls the forward of GPT-2.
        return super(ColumnCounter, self).forward(
            inputs_embeds=embeddings, attention_mask=attention_mask, labels=labels
        )


def test_row_that_fills_a_rounded_width():
    """Trimmed rows are rounded to 8 columns. Only the row of 8 tokens in the second batch keeps no padding."""
    first = ragged_batch([(9, 7), (20, 11), (5, 2)])
    second = ragged_batch([(8, 7), (20, 11), (6, 2)])
    model = gpt2(SeesNextColumns)

    rules = rules_after_exact_steps(model, first, second, width_multiple=8, microbatch_size=1)

    assert rules.right == FAILED


class NeedsWideRows(ColumnCounter):
    """Raises for rows under 6 tokens, as models that pool or convolve along the text do (Funnel)."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        width = input_ids.shape[1]
        if width < 6:
            raise RuntimeError('output with shape [1] does not match the broadcast shape [2]')
        return super().forward(input_ids, attention_mask, labels)


def test_rows_stay_as_wide_as_needed():
    """The first batch can be trimmed, the second one has rows of 3 tokens."""
    first = ragged_batch([(9, 7), (14, 11), (6, 1)])
    second = ragged_batch()

    rules_after_first = rules_after_exact_steps(gpt2(NeedsWideRows), first)
    rules_after_both = rules_after_exact_steps(gpt2(NeedsWideRows), first, second)

    assert rules_after_first.right == 14
    assert rules_after_both.right == FAILED


def batches_with_holes(second_column):
    """Returns two batches. In each of them the row of 11 tokens has a hole, in the first one in column 4.

    The second batch has a row of 3 tokens, which changes the rules of NeedsWideRows.
    """
    first = ragged_batch([(9, 7), (14, 8), (11, 7), (6, 1)])
    second = ragged_batch([(14, 3), (3, 2), (13, 3), (8, 3), (11, 3), (10, 3)])
    first['attention_mask'][2, 4] = 0
    second['attention_mask'][4, second_column] = 0
    return first, second


def begins_after_hole(attention_mask):
    """Returns whether the text continues in a column, after a hole; bool of shape ``(rows, width - 1)``."""
    # Padding is on the right, so the mask rises from 0 to 1 only behind a hole.
    return attention_mask.diff(dim=1) == 1


class RecordsHoles(NeedsWideRows):
    """Records the widths in which the check computes a single row that has a hole in its attention mask."""

    def __init__(self, config):
        super().__init__(config)
        self.checked_widths = []

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        num_rows, width = input_ids.shape
        has_hole = begins_after_hole(attention_mask).any()
        is_check = not torch.is_grad_enabled()  # training computes with gradients
        if num_rows == 1 and has_hole and is_check:
            self.checked_widths.append(width)
        return super().forward(input_ids, attention_mask, labels)


def test_new_rules_recheck_special_rows():
    """The second batch changes the rules. So its row with a hole is checked again."""
    first, second = batches_with_holes(second_column=4)
    model = gpt2(RecordsHoles)

    rules = rules_after_exact_steps(model, first, second)

    assert rules.right == FAILED
    # Trimmed under the first rules, and as wide as the batch under the second ones.
    assert set(model.checked_widths) == {11, 14}


class LossAtHole(NeedsWideRows):
    """Doubles the gradient of its loss if a row has a hole in column 5, and logits are computed only at labels."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        outputs = super().forward(input_ids, attention_mask, labels)
        # A slice, not a column, because trimmed rows may end before it.
        has_hole = begins_after_hole(attention_mask)[:, 5:6].any()
        are_only_at_labels = outputs.logits.shape[:2] != input_ids.shape
        if has_hole and are_only_at_labels:
            outputs.loss = 2 * outputs.loss - outputs.loss.detach()
        return outputs


def test_logits_at_labels_fail_in_one_pass():
    """The rules change, so the check makes three passes. Only the second has a row with a hole in column 5."""
    first, second = batches_with_holes(second_column=5)
    assert_exact(gpt2(LossAtHole), first, second)

    with pytest.raises(RuntimeError, match='logits-at-labels'):
        fit(gpt2(LossAtHole), first, second, logits='labels')


class WritesIntoBatch(ColumnCounter):
    """Writes into its inputs, as models that normalise images in place do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        add_one_in_place(input_ids)
        return super().forward(input_ids, attention_mask, labels)


def add_one_in_place(ids):
    ids.add_(1).remainder_(VOCABULARY)


def write_into(microbatch):
    add_one_in_place(microbatch['input_ids'])
    return microbatch


@pytest.mark.parametrize(
    'row_sizes',
    [
        pytest.param([(9, 3)], id='one row'),
        # The check takes the longest row first. In this order, its rows may be a view of the batch.
        pytest.param([(14, 11), (5, 3)], id='longest first'),
    ],
)
@pytest.mark.parametrize(
    ('model_class', 'options'),
    [
        pytest.param(WritesIntoBatch, {}, id='model'),
        pytest.param(GPT2LMHeadModel, {'microbatch_transforms': write_into}, id='transform'),
    ],
)
def test_check_leaves_the_batch_alone(model_class, options, row_sizes):
    """If the check wrote into the batch, training would add 1 to its ids for a second time."""
    batch = ragged_batch(row_sizes)
    trained_ids = (batch['input_ids'] + 1) % VOCABULARY
    trained_batch = {**batch, 'input_ids': trained_ids}
    expected, _ = reference_gradients(gpt2(), trained_batch)

    recorder = fit(gpt2(model_class), batch, **options)

    assert relative_error(recorder.gradients, expected) < TOLERANCE


def test_transform_that_masks_labels_is_refused():
    def mask_last_column(microbatch):
        labels = microbatch['labels'].clone()
        labels[:, -1] = -100
        return {**microbatch, 'labels': labels}

    with pytest.raises(RuntimeError, match='`microbatch_transforms` must leave labels alone'):
        fit(one_layer_model(), ragged_batch(), microbatch_transforms=mask_last_column)


FILLS = {'input_ids': 0, 'attention_mask': 0, 'position_ids': 0, 'labels': -100}


def widen(microbatch):
    """Adds three columns of padding."""
    widened = dict(microbatch)
    for key, fill in FILLS.items():
        if key in microbatch:
            widened[key] = F.pad(microbatch[key], (0, 3), value=fill)
    return widened


@pytest.mark.parametrize('packing', [False, True])
def test_transform_may_widen_rows(packing):
    assert_exact(one_layer_model(), ragged_batch(), packing=packing, microbatch_transforms=widen)


class MixesRows(torch.nn.Module):
    """Adds the mean of all rows to every row."""

    def forward(self, hidden):
        return hidden + hidden.mean(dim=0, keepdim=True)


def with_mixed_rows():
    model = one_layer_model()
    embed = model.model.embed_tokens
    model.model.embed_tokens = torch.nn.Sequential(embed, MixesRows())
    return model


@pytest.mark.parametrize('spec_class', [DataSpec, token_data_spec])
def test_coupled_rows_are_refused_by_name(spec_class):
    model = with_mixed_rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = spec_class(loader(named_batch()))

    message = r"must not depend on the rows beside.* sample 'sample-\d': the gradient at its logits changes by"
    with weights_unchanged(model), pytest.raises(RuntimeError, match=message):
        fit(model, data, optimizer=optimizer)


def test_coupled_rows_without_logits():
    model = hugging_face(with_mixed_rows())
    forward = model.forward

    def forward_without_logits(batch):
        outputs = forward(batch)
        return {'loss': outputs['loss']}

    model.forward = forward_without_logits

    with pytest.raises(RuntimeError, match='must not depend on the rows beside it'):
        fit(model, loader(ragged_batch()))


def test_label_on_first_token_behind_padding():
    first_row = (4, 4)  # all of its tokens have labels
    batch = ragged_batch([first_row, (5, 3), (9, 7), (14, 11)], side='left')
    assert rules_after_exact_steps(one_layer_model(), batch) == CutRules(left=14)


@pytest.fixture
def layout_with_images():
    """The layout of a model that is in no table. Its config tells the id of placeholders."""
    return layout_of_model('new_vl', vision_config=SimpleNamespace(), image_token_id=IMAGE)


def test_rule_is_found_on_media(layout_with_images):
    """Some models need media. Both rows have enough labels."""
    batch = drawn_batch('12345678', '12ii3456', pixel_values=numbered(1, 3, 4, 4))

    row = rule_batch(layout_with_images, batch)

    assert row['input_ids'].tolist() == [[1, 2, IMAGE, IMAGE, 3, 4, 5, 6]]
    assert 'pixel_values' in row


def test_rows_with_new_images_are_kept(layout_with_images):
    """There are shorter rows of text, and microbatches have two rows. The rows with images are chosen nevertheless."""
    drawings = ['12345678', '12', '123', '124', '1iiii2', '123i4']
    batch = drawn_batch(*drawings, pixel_values=numbered(2, 3, 4, 4))
    longest = 0
    shortest = 1
    largest_image = 4
    smallest_image = 5

    chosen = chosen_rows(layout_with_images, batch, missing=[MediaItems('image')], max_rows=2)

    assert chosen == [longest, shortest, smallest_image, largest_image]


def test_rows_of_all_lengths_are_chosen():
    batch = text_batch([3, 4, 5, 12, 19, 20])
    longest = 5
    shortest = 0
    longest_with_padding = 4
    of_medium_length = 3

    chosen = chosen_rows(BatchLayout.infer(batch), batch, missing=[], max_rows=4)

    assert chosen == [longest, shortest, longest_with_padding, of_medium_length]


def test_media_are_compared_if_padded_otherwise():
    """Returns only media that are padded further in the whole batch. Media of the same size need no second check."""
    one_tile = text_batch([4, 3], num_images=[1, 1], pixel_values=torch.ones(2, 1, 5))
    two_tiles = text_batch([5, 2], num_images=[1, 0], pixel_values=torch.ones(1, 2, 5))
    batch = PreSplitBatch([one_tile, two_tiles], max_tokens=20)
    layout = BatchLayout.infer(batch)

    collated = media_as_collated(layout, batch, rows=[3, 2, 1])

    # Only the place of row 1, which gets a second tile in the batch.
    assert collated.keys() == {2}
    assert collated[2]['pixel_values'].shape == (1, 1, 5)


class WithImageSizes(HuggingFaceModel):
    """Its loss has a term of images, which only changes the gradient of an early layer."""

    def loss(self, outputs, batch):
        pixels = batch.get('pixel_values')
        if pixels is None:
            return outputs['loss']
        num_labels = max(loss_tokens(batch), 1)
        weight = next(self.model.parameters())
        term_of_images = pixels.norm() * weight.norm() / num_labels
        return outputs['loss'] + 0.01 * term_of_images


def test_term_of_images_without_labels():
    """Rows with labels have no image. Only the value of the loss shows a term in the others."""
    case = MEDIA['llava_onevision']()
    rows = []
    for row, kind in zip(case.rows, case.kinds, strict=True):
        if kind == 'none':
            rows.append(row)
        elif kind == 'image':
            no_labels = torch.full_like(row['labels'], -100)
            rows.append({**row, 'labels': no_labels})
    batch = join(rows, side='right', slots=False)
    model = WithImageSizes(case.model, shift_labels=True, use_logits=True)

    with pytest.raises(RuntimeError, match='a term in rows without labels'):
        fit(model, batch)


def test_mask_is_as_large_as_its_media():
    """A mask along the text may also have a value for each tile. It must fit the tiles of its own microbatch."""
    one_tile = text_batch(
        [4, 3],
        num_images=[1, 1],
        pixel_values=torch.ones(2, 1, 5),
        mask=torch.ones(2, 4, 1),
    )
    two_tiles = text_batch(
        [5],
        num_images=[1],
        pixel_values=torch.ones(1, 2, 5),
        mask=torch.ones(1, 5, 2),
    )
    batch = PreSplitBatch([one_tile, two_tiles], max_tokens=20)
    inferred = BatchLayout.infer(batch)
    layout = inferred.with_entries(mask=Entry(unit='image', seq_dims=(1,)))

    collated = media_as_collated(layout, batch, rows=[0])

    assert collated[0]['pixel_values'].shape == (1, 1, 5)
    assert collated[0]['mask'].shape == (1, 4, 1)


IS_FIRST_DOCUMENT = torch.tensor([True] * 5 + [False] * 7)


def packed_batch(mask):
    """Returns two rows without padding. Each holds a document of 5 tokens and one of 7.

    ``mask`` is ``'none'``, ``'padding'`` (one value per token) or ``'documents'`` (documents do not see each other).
    """
    batch = ragged_batch([(12, 12), (12, 12)])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    batch['position_ids'] = positions.repeat(2, 1)
    if mask == 'documents':
        is_same_document = IS_FIRST_DOCUMENT[:, None] == IS_FIRST_DOCUMENT
        batch['attention_mask'] = square_mask(batch) & is_same_document
    elif mask == 'none':
        del batch['attention_mask']
    return batch


def logits_of_last_document(model, batch):
    outputs = model(**batch)
    return outputs.logits[:, ~IS_FIRST_DOCUMENT]


@pytest.mark.parametrize(
    ('mask', 'use_cache', 'checkpoints', 'is_warned'),
    [
        pytest.param('none', True, False, True, id='cache'),
        pytest.param('none', True, True, False, id='cache, switched off by checkpointing'),
        pytest.param('none', False, False, False, id='no cache'),
        pytest.param('padding', False, False, True, id='mask of padding'),
        pytest.param('documents', True, False, False, id='mask of documents'),
    ],
)
def test_warning_of_attention_between_documents(mask, use_cache, checkpoints, is_warned, caplog):
    """The reference: whether the logits of the last document change with the ids of the first one."""
    batch = packed_batch(mask)
    model = one_layer_model()
    model.config.use_cache = use_cache
    if checkpoints:
        model.gradient_checkpointing_enable()

    fit(model, batch)

    has_warning = 'attend to each other' in caplog.text
    assert has_warning == is_warned
    if is_warned:
        changed_ids = batch['input_ids'].masked_fill(IS_FIRST_DOCUMENT, 1)
        changed_batch = {**batch, 'input_ids': changed_ids}
        logits = logits_of_last_document(model, batch)
        changed_logits = logits_of_last_document(model, changed_batch)
        assert not torch.allclose(changed_logits, logits)


def num_forwards_of_check(model, batch):
    """Returns how often the first-batch check calls the model."""
    forwards_before_step = []
    num_forwards = 0

    def count_forward(*_):
        nonlocal num_forwards
        num_forwards += 1

    class NoteForwards(Callback):
        def before_train_batch(self, state, logger):
            forwards_before_step.append(num_forwards)

    with model.register_forward_pre_hook(count_forward):
        fit(model, token_data_spec(loader(batch)), callbacks=[NoteForwards()])
    return forwards_before_step[0]


def test_number_of_forwards():
    """`docs/limits.md` has these numbers. They depend a little on the rows."""
    num_forwards_of_text = num_forwards_of_check(one_layer_model(), ragged_batch())
    assert num_forwards_of_text == pytest.approx(13, abs=3)

    case = MEDIA['qwen2_5_vl']()
    batch = join(case.rows, side='right', slots=False)
    num_forwards_of_images = num_forwards_of_check(case.model, batch)
    assert num_forwards_of_images == pytest.approx(21, abs=3)
