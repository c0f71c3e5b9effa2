# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark of token weights: its samples, its results and its picture."""

from __future__ import annotations

import json

import pytest
import torch

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


def test_folder_without_tables(tmp_path, monkeypatch):
    monkeypatch.setenv('COMPOSER_TOKACC_LENGTHS', str(tmp_path))
    with pytest.raises(FileNotFoundError, match='has no tables'):
        token_weights.lengths_of('mixture')


def test_dummy_microbatch_is_left_out():
    weights = torch.tensor([1.0, 3.0])
    dummy = torch.tensor([])
    (summary,) = token_weights.summaries_of([weights, dummy], mean=torch.tensor(2.0))
    assert summary == [2, 0.5, 1.5]  # number of tokens, smallest and largest weight over the mean


def test_trainers_have_all_samples():
    rows = saved_rows()
    measured = {(row['host'], row['subject'], row['ranks']) for row in rows}
    expected = {(host, *case) for host in token_weights.HOSTS for case in token_weights.CASES}
    assert measured == expected
    # The first label of a row is not trained. Of `mixture` the lengths may be private, so the number is written down.
    lengths = token_weights.EIGHT_LENGTHS
    num_tokens = {'eight rows': sum(lengths) - len(lengths), 'mixture': 4712}
    for row in rows:
        assert row['tokens'] == num_tokens[row['subject']]


def test_picture_shows_the_results(tmp_path):
    pytest.importorskip('matplotlib')
    token_weights.draw(saved_rows(), tmp_path / 'drawn.svg')
    drawn = (tmp_path / 'drawn.svg').read_text()
    picture = token_weights.PICTURE.read_text()
    assert drawn.count('<path') == picture.count('<path')
