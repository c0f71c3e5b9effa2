# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The output of the program `look`, compared with the tokens of the samples."""

from __future__ import annotations

import gc
import os
import re
import sys

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset

from composer_tokacc import look
from composer_tokacc.look import choose_samples, describe, main
from composer_tokacc.programs.process import command_line, prepare
from examples.digits import DigitsDataset, build_digits_processor
from tests.support.programs import DIGITS

SMALL = ['dataset.num_samples=20', 'dataset.eval.num_samples=6']


def count_placeholders(text):
    """Returns how many image tokens a text shows. Several in a row are shown as ``[<image> x 4]``."""
    repetitions = [int(number) for number in re.findall(r'\[<image> x (\d+)\]', text)]
    num_single = text.count('<image>') - len(repetitions)
    return num_single + sum(repetitions)


def test_text_with_labels_is_marked():
    processor = build_digits_processor()
    image_token_id = processor.tokenizer.convert_tokens_to_ids('<image>')
    dataset = DigitsDataset(processor, num_samples=12)
    for index in range(12):
        sample = dataset[index]
        ids = sample['input_ids']
        labels = sample['labels'][0]
        learned_ids = labels[labels != -100].tolist()

        text = describe(sample, processor.tokenizer, index)

        assert f'{ids.shape[1]} tokens, {len(learned_ids)} of them learned' in text
        learned_text = ''.join(re.findall(' >> (.*?) << ', text, flags=re.DOTALL))
        expected_text = processor.tokenizer.decode(learned_ids)
        assert learned_text.split() == expected_text.split()
        num_placeholders = int((ids == image_token_id).sum())
        assert count_placeholders(text) == num_placeholders
        has_images = sum(sample['num_images']) > 0
        shows_pixels = 'pixel_values: ' in text
        assert shows_pixels == has_images


@pytest.mark.parametrize(('options', 'expected'), [([], 12), (['samples=3', 'eval=true'], 3)])
def test_number_of_samples(options, expected, capsys):
    assert main([DIGITS, *SMALL, *options]) == 0
    printed = capsys.readouterr().out
    headings = re.findall('^== sample', printed, flags=re.MULTILINE)
    assert len(headings) == expected


@pytest.mark.parametrize('wrong', ['samples=few', 'eval=perhaps'])
def test_mistakes_are_one_line(wrong, capsys):
    assert main([DIGITS, wrong]) == 2
    printed = capsys.readouterr().err
    key, _, value = wrong.partition('=')
    assert re.fullmatch(f'error: .*`{key}` .*{value}.*\n', printed)


def test_closed_pipe_ends_quietly(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, 'w') as closed:
        monkeypatch.setattr(sys, 'stdout', closed)
        assert main([DIGITS, *SMALL]) == 0


def test_unprintable_letters_are_escaped(monkeypatch, tmp_path):
    """Latin-1 has the letter ä, but no arrow and no half of a surrogate pair."""
    path = tmp_path / 'out'
    with path.open('w', encoding='latin-1') as screen:
        monkeypatch.setattr(sys, 'stdout', screen)
        monkeypatch.setattr(sys, 'argv', ['look', DIGITS])
        prepare(look.__doc__)
        gc.enable()  # prepare() turned it off
        print('ä → \udce9')
    assert path.read_bytes() == b'\xe4 \\u2192 \\udce9\n'


def test_command_line_without_docstring():
    """``python -OO`` drops the docstring of the program."""
    parsed, overrides = command_line(None).parse_known_args(['run.yaml', 'seed=1'])
    assert parsed.config == 'run.yaml'
    assert overrides == ['seed=1']


class SamplesWithMedia(Dataset):
    """Samples that have only their numbers of media.

    Args:
        modalities_of_samples: The modalities of each sample, one medium of each.
        has_method: Whether the dataset has a method ``modalities``. If not, as in a user's dataset, samples are read.
    """

    def __init__(self, modalities_of_samples, *, has_method):
        self.modalities_of_samples = modalities_of_samples
        if has_method:
            self.modalities = lambda index: frozenset(modalities_of_samples[index])

    def __len__(self):
        return len(self.modalities_of_samples)

    def __getitem__(self, index):
        assert not hasattr(self, 'modalities'), 'samples must not be read'
        return {f'num_{modality}s': [1] for modality in self.modalities_of_samples[index]}


@pytest.mark.parametrize('has_method', [True, False])
def test_rare_modalities_are_shown(has_method):
    modalities = [('image',)] * 60
    modalities[17] = ()
    modalities[41] = ('video',)
    modalities[59] = ('image', 'audio')
    dataset = SamplesWithMedia(modalities, has_method=has_method)
    lengths = np.arange(60)

    assert choose_samples(dataset, lengths, 4) == [0, 17, 41, 59]
    # If there is room for more: the shortest, the longest, and others between them.
    assert len(choose_samples(dataset, lengths, 12)) == 12

    four_images = SamplesWithMedia([('image',)] * 4, has_method=has_method)
    longer_dataset = ConcatDataset([four_images, dataset])
    longer_lengths = np.arange(4 + 60)
    assert choose_samples(longer_dataset, longer_lengths, 4) == [0, 4 + 17, 4 + 41, 4 + 59]


def test_one_sample_shows_most_modalities():
    dataset = SamplesWithMedia([(), ('image',), ('video',), ('image', 'video')], has_method=True)
    assert choose_samples(dataset, np.arange(4), 1) == [3]
