# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The digits example: answers that follow from the scans, separate splits, and mostly padding in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from composer_tokacc.data import VisionLanguageCollator
from examples.digits import DigitsDataset
from examples.digits.dataset import split_scans
from examples.digits.questions import DIGIT_WORDS

NUM_SAMPLES = 928


@pytest.fixture(scope='module')
def dataset():
    return DigitsDataset(num_samples=NUM_SAMPLES)


@pytest.fixture(scope='module')
def samples(dataset):
    return [dataset[index] for index in range(NUM_SAMPLES)]


def prompt_and_answer(dataset, sample):
    """Returns the words of the prompt, without special tokens, and the words that carry loss."""
    tokenizer = dataset.processor.tokenizer
    ids = sample['input_ids'][0]
    carries_loss = sample['labels'][0] != -100
    prompt = tokenizer.decode(ids[~carries_loss]).split(' ')
    answer = tokenizer.decode(ids[carries_loss]).split(' ')
    return [word for word in prompt if not word.startswith('<')], answer


def expected_answer(question, digits):
    if question == 'read':
        return [str(digit) for digit in digits]
    if question == 'spell':
        return [DIGIT_WORDS[digit] for digit in digits]
    if question == 'count':
        return list(str(len(digits)))
    return list(str(sum(digits)))


def test_answers_follow_from_the_scans(dataset, samples):
    scans = load_digits()
    about_images = set()
    about_text = set()
    for index, sample in enumerate(samples[:400]):
        _, _, shown_scans = dataset.conversation(index)
        prompt, answer = prompt_and_answer(dataset, sample)
        question = prompt[0]
        digits = [int(word) for word in prompt if word.isdigit()]
        if len(shown_scans) > 0:
            about_images.add(question)
            assert not digits
            digits = scans.target[shown_scans].tolist()
            # The model sees the scan itself: 17 levels of grey, normalised to -1..1.
            grey = torch.tensor(scans.images[shown_scans] / 8 - 1, dtype=torch.float32)
            expected_pixels = grey[:, None].expand(-1, 3, -1, -1)
            torch.testing.assert_close(sample['pixel_values'], expected_pixels, atol=0.005, rtol=0)
        else:
            about_text.add(question)
            assert 'pixel_values' not in sample
        assert answer == [*expected_answer(question, digits), '<|end|>'], index
    assert about_images == {'read', 'spell', 'count', 'add'}
    assert about_text == {'read', 'spell', 'add'}


def test_from_no_image_to_twelve(samples):
    assert {sample['num_images'][0] for sample in samples} == set(range(13))


def test_splits_share_no_scan():
    scans_of_train = set(split_scans('train').tolist())
    scans_of_eval = set(split_scans('eval').tolist())
    assert not scans_of_train & scans_of_eval
    assert scans_of_train | scans_of_eval == set(range(1797))
    assert len(scans_of_eval) == 359


@pytest.mark.parametrize('split', ['train', 'eval'])
def test_samples_show_only_their_split(split):
    dataset = DigitsDataset(split=split, num_samples=300, seed=5)
    scans_of_split = set(split_scans(split).tolist())
    num_scans = 0
    for index in range(300):
        _, _, shown_scans = dataset.conversation(index)
        assert scans_of_split.issuperset(shown_scans)
        num_scans += len(shown_scans)
    assert num_scans > 0


def test_most_of_a_batch_is_padding(dataset, samples):
    collate = VisionLanguageCollator(dataset.processor)
    num_positions = 0
    num_tokens = 0
    for start in range(0, NUM_SAMPLES, 32):
        batch = collate(samples[start : start + 32])
        mask = batch['attention_mask']
        num_positions += mask.numel()
        num_tokens += int(mask.sum())
    assert 1 - num_tokens / num_positions >= 0.6


def test_few_answers_are_very_long(samples):
    num_labels = [int((sample['labels'] != -100).sum()) for sample in samples]
    assert np.median(num_labels) == 2
    assert max(num_labels) == 13


def test_sample_depends_on_seed_and_index(dataset):
    again = DigitsDataset(num_samples=10, cache=False)
    other_seed = DigitsDataset(num_samples=10, seed=1)
    held_out = DigitsDataset(split='eval', num_samples=10)

    def ids_of(dataset):
        return [dataset[index]['input_ids'][0].tolist() for index in (3, 7, 3, 0)]

    assert ids_of(again) == ids_of(dataset)
    assert torch.equal(again[3]['pixel_values'], dataset[3]['pixel_values'])
    assert ids_of(other_seed) != ids_of(again)
    assert ids_of(held_out) != ids_of(again)
    assert held_out[2]['sample_ids'] == ['digits-eval-2']


def test_callers_cannot_change_cached_samples():
    dataset = DigitsDataset(num_samples=1)
    dataset[0].pop('input_ids')
    assert 'input_ids' in dataset[0]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`split` must be one of \('train', 'eval'\), got: 'test'"):
        DigitsDataset(split='test')
    with pytest.raises(ValueError, match='`max_images` must be at least 1, got: 0'):
        DigitsDataset(max_images=0)
    with pytest.raises(IndexError, match=r'got: 5'):
        DigitsDataset(num_samples=5)[5]
