# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of token weights: samples that are named as what they are, results that are not mixed."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import token_weights as program


def rows():
    return json.loads(program.RESULTS.read_text())['rows']


def test_lengths_without_tables_are_named_synthetic(monkeypatch):
    monkeypatch.delenv('COMPOSER_TOKACC_LENGTHS', raising=False)
    lengths, silent, source = program.lengths_of('mixture')
    assert source.startswith('SYNTHETIC')
    assert len(lengths) == program.SAMPLES
    batches = program.rows_of(lengths, silent)
    assert all(
        torch.equal((one['labels'] == -100).sum(), torch.tensor(n)) for one, n in zip(batches, silent, strict=True)
    )


def test_results_of_other_samples_are_not_merged():
    old = rows()
    same = [row for row in old if row['host'] == 'ours']
    assert program.merged(old, same) == old
    other = [{**row, 'lengths': row['lengths'][::-1]} for row in same]
    with pytest.raises(SystemExit, match='the results hold trainers on other samples'):
        program.merged(old, other)


def test_every_trainer_is_measured_on_all_samples():
    found = {(row['host'], row['subject'], row['ranks']) for row in rows()}
    assert found == {
        (host, subject, ranks) for host in program.HOSTS for subject, of in program.RANKS.items() for ranks in of
    }
    tokens = {row['subject']: {one['tokens'] for one in rows() if one['subject'] == row['subject']} for row in rows()}
    assert tokens == {'eight rows': {93}, 'mixture': {4712}}


def test_the_picture_is_what_the_results_file_says(tmp_path):
    pytest.importorskip('matplotlib')
    program.draw(rows(), tmp_path / 'drawn.svg')
    drawn = (tmp_path / 'drawn.svg').read_text()
    assert drawn.count('<path') == program.PICTURE.read_text().count('<path'), (
        'python -m benchmarks.token_weights --hosts'
    )
