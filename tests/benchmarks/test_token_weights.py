# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark of token weights: its samples, its results and its picture."""

from __future__ import annotations

import json

import pytest

from benchmarks import token_weights


def saved_rows():
    return json.loads(token_weights.RESULTS_FILE.read_text())['rows']


def test_synthetic_lengths_are_named(monkeypatch):
    monkeypatch.delenv('COMPOSER_TOKACC_LENGTHS', raising=False)
    lengths, image_tokens, source = token_weights.lengths_of('mixture')
    assert source.startswith('SYNTHETIC')
    assert len(lengths) == token_weights.SAMPLES
    rows = token_weights.rows_of(lengths, image_tokens)
    for row, length, num_image_tokens in zip(rows, lengths, image_tokens, strict=True):
        assert row['input_ids'].shape == (1, length)
        assert int((row['labels'] == -100).sum()) == num_image_tokens


def test_other_samples_are_not_merged():
    earlier = saved_rows()
    measured = [row for row in earlier if row['host'] == 'ours']
    assert token_weights.merged(earlier, measured) == earlier
    on_other_samples = []
    for row in measured:
        on_other_samples.append({**row, 'lengths': row['lengths'][::-1]})
    with pytest.raises(SystemExit, match='other samples'):
        token_weights.merged(earlier, on_other_samples)


def test_trainers_have_all_samples():
    rows = saved_rows()
    measured = {(row['host'], row['subject'], row['ranks']) for row in rows}
    expected = {(host, *case) for host in token_weights.HOSTS for case in token_weights.CASES}
    assert measured == expected
    num_tokens = {'eight rows': 93, 'mixture': 4712}
    for row in rows:
        assert row['tokens'] == num_tokens[row['subject']]


def test_picture_shows_the_results(tmp_path):
    pytest.importorskip('matplotlib')
    token_weights.draw(saved_rows(), tmp_path / 'drawn.svg')
    drawn = (tmp_path / 'drawn.svg').read_text()
    picture = token_weights.PICTURE.read_text()
    assert drawn.count('<path') == picture.count('<path')
