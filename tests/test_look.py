# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What `look` shows of samples, held to their tokens."""

from __future__ import annotations

import gc
import os
import re
import sys

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset

from composer_tokacc.look import choose_samples, described, main
from composer_tokacc.programs.process import prepare
from examples.digits import DigitsDataset, build_digits_processor
from tests.support.programs import DIGITS

SMALL = ['dataset.num_samples=20', 'dataset.eval.num_samples=6']


def test_learned_text_stands_between_marks():
    processor = build_digits_processor()
    dataset = DigitsDataset(processor, num_samples=12)
    for index in range(12):
        sample = dataset[index]
        text = described(sample, processor.tokenizer, index)
        learned = [token for token in sample['labels'][0].tolist() if token != -100]
        assert f'{sample["input_ids"].shape[1]} tokens, {len(learned)} of them learned' in text
        shown = ''.join(re.findall(' >> (.*?) << ', text, flags=re.DOTALL))
        assert shown.split() == processor.tokenizer.decode(learned).split()
        images = sum(sample['num_images'])
        placeholders = int((sample['input_ids'] == processor.tokenizer.convert_tokens_to_ids('<image>')).sum())
        counted = [int(number) for number in re.findall(r'\[<image> x (\d+)\]', text)]
        assert text.count('<image>') + sum(counted) - len(counted) == placeholders
        assert ('pixel_values: ' in text) == bool(images)


def test_a_dozen_samples_are_shown(capsys):
    assert main([DIGITS, *SMALL]) == 0
    assert len(re.findall('^== sample', capsys.readouterr().out, flags=re.MULTILINE)) == 12
    assert main([DIGITS, *SMALL, 'samples=3', 'eval=true']) == 0
    assert len(re.findall('^== sample', capsys.readouterr().out, flags=re.MULTILINE)) == 3


@pytest.mark.parametrize('wrong', ['samples=few', 'eval=perhaps'])
def test_mistakes_are_one_line(wrong, capsys):
    assert main([DIGITS, wrong]) == 2
    assert f'`{wrong.partition("=")[0]}` must be a valid' in capsys.readouterr().err


def test_closed_pipe_ends_quietly(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, 'w') as closed:
        monkeypatch.setattr(sys, 'stdout', closed)
        assert main([DIGITS, *SMALL]) == 0


def test_unprintable_letters_are_escaped(monkeypatch, tmp_path):
    with (tmp_path / 'out').open('w', encoding='latin-1') as screen:
        monkeypatch.setattr(sys, 'stdout', screen)
        prepare(None)
        gc.enable()
        print('ä → \udce9')
    assert (tmp_path / 'out').read_bytes() == b'\xe4 \\u2192 \\udce9\n'


class Kinds(Dataset):
    """Samples of which only the modalities are known, or only the numbers of media, as in a dataset of one's own."""

    def __init__(self, kinds, *, says_so):
        self.kinds = kinds
        if says_so:
            self.modalities = lambda index: frozenset(kinds[index])

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, index):
        assert not hasattr(self, 'modalities'), 'nothing has to be read'
        return {f'num_{modality}s': [1] for modality in self.kinds[index]}


def rare_kinds():
    kinds = [('image',)] * 60
    kinds[17], kinds[41], kinds[59] = (), ('video',), ('image', 'audio')
    return kinds


@pytest.mark.parametrize('says_so', [True, False])
def test_four_samples_show_every_kind(says_so):
    dataset = Kinds(rare_kinds(), says_so=says_so)
    assert choose_samples(dataset, np.arange(60), 4) == [0, 17, 41, 59]
    # With room for more: the shortest, the longest, and others between.
    assert len(choose_samples(dataset, np.arange(60), 12)) == 12
    parts = ConcatDataset([Kinds([('image',)] * 4, says_so=says_so), dataset])
    assert choose_samples(parts, np.arange(64), 4) == [0, 21, 45, 63]


def test_few_samples_show_every_modality():
    kinds = [(), ('image',), ('video',), ('image', 'video')]
    assert choose_samples(Kinds(kinds, says_so=True), np.arange(4), 1) == [3]
