# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of token weights names its samples, and its results hold the same samples for all trainers."""

from __future__ import annotations

import json

import pytest

from benchmarks import token_weights


def results():
    return json.loads(token_weights.RESULTS_FILE.read_text())['rows']


def test_lengths_without_tables_are_named_synthetic(monkeypatch):
    monkeypatch.delenv('COMPOSER_TOKACC_LENGTHS', raising=False)
    lengths, image_tokens, source = token_weights.lengths_of('mixture')
    assert source.startswith('SYNTHETIC')
    assert len(lengths) == token_weights.SAMPLES
    for row, length, num_image_tokens in zip(
        token_weights.rows_of(lengths, image_tokens),
        lengths,
        image_tokens,
        strict=True,
    ):
        assert row['input_ids'].shape == (1, length)
        assert int((row['labels'] == -100).sum()) == num_image_tokens


def test_other_samples_are_not_merged():
    earlier = results()
    ours = [row for row in earlier if row['host'] == 'ours']
    assert token_weights.merged(earlier, ours) == earlier
    on_other_samples = [{**row, 'lengths': row['lengths'][::-1]} for row in ours]
    with pytest.raises(SystemExit, match='other samples'):
        token_weights.merged(earlier, on_other_samples)


def test_trainers_are_measured_on_all_samples():
    rows = results()
    expected = {(host, *case) for host in token_weights.HOSTS for case in token_weights.CASES}
    assert {(row['host'], row['subject'], row['ranks']) for row in rows} == expected
    assert {row['tokens'] for row in rows if row['subject'] == 'eight rows'} == {93}
    assert {row['tokens'] for row in rows if row['subject'] == 'mixture'} == {4712}


def test_picture_shows_the_results(tmp_path):
    pytest.importorskip('matplotlib')
    token_weights.draw(results(), tmp_path / 'drawn.svg')
    drawn = (tmp_path / 'drawn.svg').read_text()
    assert drawn.count('<path') == token_weights.PICTURE.read_text().count('<path')
