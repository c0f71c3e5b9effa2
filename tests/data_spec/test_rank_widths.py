# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows padded on the left, where each rank pads to its own longest row."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from composer_tokacc import TokenAccumulation
from composer_tokacc.checks.cut_rules import FAILED, CutRules
from composer_tokacc.counting import LossRule
from composer_tokacc.data_spec import rank_widths
from composer_tokacc.data_spec.rank_widths import RankWidth, WidthSums, check_widths
from composer_tokacc.layout import BatchLayout, describe, describe_all
from tests.support.launch import launch_json
from tests.support.small_batches import text_batch
from tests.support.text import column_counter, gpt2, one_layer_model, positions_of, ragged_batch
from tests.support.training import fit

EXACT_CASES = [
    'masked',
    'masked, padded later',
    'masked, vectors',
    'masked, one rank without padding',
    'masked, labelled on the other rank',
    'labelled, equally wide',
    'labelled, on the right',
    'positions, equally wide',
    'positions, on the right',
    'positions, equally wide, by the flag',
    'masked, by the flag',
    'no position_ids, equally wide',
    'rotary, equally wide',
    'rotary, both beyond',
]


@pytest.mark.slow
def test_widths_of_ranks_matter_only_on_the_left():
    outcomes = launch_json('tests/ranks/left_padding.py', ranks=2)
    for case in EXACT_CASES:
        assert outcomes[case] < 1e-6, case
    assert 'got: 9 on rank 0' in outcomes['labelled']
    assert 'the pad before it would predict' in outcomes['labelled']
    for case in (
        'positions',
        'positions, by the flag',
        'positions, padded later',
        'positions, vectors',
        'positions, untried',
        'positions, labelled on the other rank',
        'positions, one token trimmed',
        'no position_ids',
        'ignored position_ids, untried',
    ):
        assert 'count positions' in outcomes[case]
    # Transformers 4 has other names for the parameters.
    if not transformers.__version__.startswith('4.'):
        assert '1 ranks beyond it and 1 within' in outcomes['rotary']


def may_matter(batch, rules):
    """Returns whether more padding on the left may change these rows. Unshifted labels alone give no reason."""
    layout = BatchLayout.infer(batch)
    facts = describe(layout, batch)
    width = RankWidth.of([facts], rules, LossRule.UNSHIFTED)
    return width.reason != ''


LONG_ROPE = {'rope_type': 'longrope', 'original_max_position_embeddings': 10}
# The check has looked at rows of 14 tokens, the widest of `ragged_batch`, and can trim padding on the left or not.
TRIMMED = CutRules(left=14)
KEPT = CutRules(left=FAILED)
NOTHING_KNOWN = CutRules()


@pytest.mark.parametrize(('rules', 'matters'), [(TRIMMED, False), (KEPT, True), (NOTHING_KNOWN, True)])
def test_width_matters_unless_trimming_is_exact(rules, matters):
    assert may_matter(ragged_batch(side='left'), rules) is matters


@pytest.mark.parametrize(
    ('rules', 'has_positions', 'matters'),
    [(TRIMMED, False, False), (NOTHING_KNOWN, False, True), (NOTHING_KNOWN, True, True)],
)
def test_labels_behind_padding_prove_nothing(rules, has_positions, matters):
    """Rows with a label behind their padding are never trimmed, so the check may not know how positions count."""
    batch = ragged_batch([(4, 4), (9, 9), (14, 14)], side='left')
    if has_positions:
        batch['position_ids'] = positions_of(batch)
    assert may_matter(batch, rules) is matters


def test_label_behind_padding_is_named():
    """The user can mask this label. That nothing is known about positions is only its consequence."""
    batch = ragged_batch([(4, 4), (9, 9), (14, 14)], side='left')
    facts = describe(BatchLayout.infer(batch), batch)
    assert 'has a label' in RankWidth.of([facts], NOTHING_KNOWN, LossRule.CAUSAL).reason


@pytest.mark.parametrize('labelled_part', [0, 1])
def test_label_of_any_part_is_named(labelled_part):
    """Nothing is known about the positions of the other part, but the label may be the cause of that."""
    parts = [ragged_batch([(4, 2), (9, 5)], side='left')]
    parts.insert(labelled_part, ragged_batch([(4, 4), (9, 9)], side='left'))
    facts = [describe(BatchLayout.infer(part), part) for part in parts]
    assert 'has a label' in RankWidth.of(facts, NOTHING_KNOWN, LossRule.CAUSAL).reason


@pytest.mark.parametrize(('rules', 'matters'), [(TRIMMED, False), (KEPT, True), (NOTHING_KNOWN, True)])
def test_rows_without_padding_may_get_some(rules, matters):
    """On another rank, padded rows may have a label on the first token, so that no padding could be trimmed."""
    batch = ragged_batch([(9, 5), (9, 3)], side='left')
    assert may_matter(batch, rules) is matters


@pytest.mark.parametrize(
    ('make_model', 'has_positions', 'matters'),
    [
        (one_layer_model, False, False),
        (gpt2, False, True),
        (gpt2, True, False),
        (column_counter, False, True),
        (column_counter, True, True),
    ],
)
def test_padding_matters_if_it_cannot_be_trimmed(make_model, has_positions, matters):
    """GPT-2 counts positions from the first column, unless it gets them. Without the argument it cannot get them."""
    batch = ragged_batch(side='left')
    if has_positions:
        batch['position_ids'] = positions_of(batch)
    algorithm = TokenAccumulation()
    fit(make_model(), batch, algorithms=[algorithm])
    run = algorithm._run

    facts = describe_all(run.row_check.layout, batch)
    width = RankWidth.of(facts, run.split.rules, run.loss_facts.rule)

    assert width.pads_left
    has_reason = width.reason != ''
    assert has_reason == matters


@pytest.mark.parametrize(
    ('lengths', 'has_positions', 'expected'),
    [([4, 8], False, False), ([4, 12], False, True), ([12, 12], True, False)],
    ids=['within', 'wide', 'packed'],
)
def test_rotary_limit_of_a_rank(lengths, has_positions, expected):
    """Positions that begin again with each document are within the limit, although the row is wide."""
    config = SimpleNamespace(model_type='phi3', rope_parameters=LONG_ROPE)
    layout = BatchLayout.for_model(config)
    batch = text_batch(lengths)
    if has_positions:
        batch['position_ids'] = torch.arange(6).repeat(2, 2)

    facts = describe(layout, batch)
    width = RankWidth.of([facts], None, LossRule.CAUSAL)
    assert width.is_beyond_rotary_limit is expected

    batch['labels'] = torch.full_like(batch['labels'], -100)  # a copy of a sample, which weighs nothing
    facts_without_labels = describe(layout, batch)
    width_without_labels = RankWidth.of([facts_without_labels], None, LossRule.CAUSAL)
    assert width_without_labels.is_beyond_rotary_limit is None


@pytest.mark.parametrize(('is_beyond', 'beyond_and_within'), [(True, (1, 0)), (False, (0, 1)), (None, (0, 0))])
def test_rank_counts_on_one_side_of_the_limit(is_beyond, beyond_and_within):
    sums = WidthSums.of(RankWidth(8, pads_left=True, reason='moved', is_beyond_rotary_limit=is_beyond))
    assert (sums.num_beyond, sums.num_within) == beyond_and_within
    assert sums[2:] == (1, 1, 8, 64)


def test_ranks_on_both_sides_of_a_rotary_limit():
    within = RankWidth(8, pads_left=False, reason='', is_beyond_rotary_limit=False)
    beyond = RankWidth(12, pads_left=False, reason='', is_beyond_rotary_limit=True)
    sums = np.sum([WidthSums.of(within), WidthSums.of(beyond)], axis=0)
    with pytest.raises(RuntimeError, match=r'rotary.* 1 ranks beyond it and 1 within'):
        check_widths(WidthSums._make(sums), lambda: within, are_sums_outdated=False, is_trimmed=True)


def check_two_ranks(monkeypatch, reason_after_check='', **options):
    """Checks widths of 9 and 14. The sums are made before the check of this step, so they show no reason."""
    sums_of_ranks = []
    widths_after_check = []
    for width in (9, 14):
        before_check = RankWidth(width, pads_left=True, reason='')
        after_check = RankWidth(width, pads_left=True, reason=reason_after_check)
        sums_of_ranks.append(WidthSums.of(before_check))
        widths_after_check.append(after_check)
    sums = np.sum(sums_of_ranks, axis=0)
    monkeypatch.setattr(rank_widths, 'get_world_size', lambda: 2)
    monkeypatch.setattr(rank_widths, 'all_gather_object', lambda _: widths_after_check)
    check_widths(WidthSums._make(sums), lambda: widths_after_check[0], **options)


def test_check_of_this_step_counts(monkeypatch):
    options = {'reason_after_check': 'positions', 'is_trimmed': True}
    check_two_ranks(monkeypatch, are_sums_outdated=False, **options)
    with pytest.raises(RuntimeError, match='9 on rank 0'):
        check_two_ranks(monkeypatch, are_sums_outdated=True, **options)


@pytest.mark.parametrize(
    ('reason', 'remedy'),
    [
        (rank_widths.FIRST_LABEL, r'or mask that label \(-100\) and give `position_ids` \('),
        ('positions', r'or give `position_ids` and mask labels \(-100\) of first tokens \('),
    ],
)
def test_remedy_for_padding(monkeypatch, reason, remedy):
    """Rows with a label on the first token are never trimmed, so `position_ids` alone prove nothing."""
    with pytest.raises(RuntimeError, match=remedy):
        check_two_ranks(monkeypatch, reason, are_sums_outdated=True, is_trimmed=True)


@pytest.mark.parametrize('is_trimmed', [True, False])
def test_unknown_padding_is_warned_of(is_trimmed, monkeypatch, caplog):
    """Without `token_data_spec` rows are not trimmed, so no check shows how the model counts positions."""
    rank_widths._warn_of_unknown_positions.cache_clear()
    check_two_ranks(monkeypatch, are_sums_outdated=False, is_trimmed=is_trimmed)
    is_warned = 'padded on the left' in caplog.text
    assert is_warned != is_trimmed
