# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from composer_tokacc.data import VisionLanguageCollator
from examples.digits import DigitsDataset
from examples.digits.dataset import split_scans
from examples.digits.questions import DIGIT_WORDS, DigitsQuestion

NUM_SAMPLES = 1600


@pytest.fixture(scope='module')
def dataset():
    return DigitsDataset(num_samples=NUM_SAMPLES)


@pytest.fixture(scope='module')
def samples(dataset):
    return [dataset[index] for index in range(NUM_SAMPLES)]


def prompt_and_answer(dataset, sample):
    tokenizer, ids, labels = dataset.processor.tokenizer, sample['input_ids'][0], sample['labels'][0]
    prompt = tokenizer.decode(ids[labels == -100]).split(' ')
    return [word for word in prompt if not word.startswith('<')], tokenizer.decode(labels[labels != -100]).split(' ')


def expected_answer(prompt, digits):
    if prompt[0] == 'read':
        return [str(digit) for digit in digits]
    if prompt[0] == 'spell':
        return [DIGIT_WORDS[digit] for digit in digits]
    return list(str(len(digits) if prompt[0] == 'count' else sum(digits)))


@pytest.mark.slow
def test_answers_follow_from_the_scans(dataset, samples):
    scans, targets = load_digits().images, load_digits().target
    kinds = set()
    for index, sample in enumerate(samples[:400]):
        _, _, shown = dataset.conversation(index)
        prompt, answer = prompt_and_answer(dataset, sample)
        kinds.add((prompt[0], len(shown) > 0))
        digits = targets[shown].tolist() or [int(word) for word in prompt if word.isdigit()]
        assert answer == [*expected_answer(prompt, digits), '<|end|>'], index
        # What the tower sees is the scan, pixel by pixel: 0..16 levels of grey, normalised to -1..1.
        pixels = sample.get('pixel_values', torch.zeros(0, 3, 8, 8))
        wanted = torch.tensor(scans[shown] / 8 - 1, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
        torch.testing.assert_close(pixels, wanted, atol=0.005, rtol=0)
    assert kinds == {(kind, True) for kind in ('read', 'spell', 'count', 'add')} | {
        (kind, False) for kind in ('read', 'spell', 'add')
    }


def test_from_no_image_to_twelve(samples):
    assert {sample['num_images'][0] for sample in samples} == set(range(13))


def test_training_shows_no_held_out_scan():
    train, held_out = set(split_scans('train').tolist()), set(split_scans('eval').tolist())
    assert not train & held_out
    assert train | held_out == set(range(1797))
    assert len(held_out) == 359
    for split, allowed in (('train', train), ('eval', held_out)):
        dataset = DigitsDataset(split=split, num_samples=300, seed=5)
        shown = np.concatenate([dataset.conversation(index)[2] for index in range(300)])
        assert set(shown.tolist()) <= allowed


def test_most_of_a_batch_is_padding(dataset, samples):
    collate = VisionLanguageCollator(dataset.processor)
    batches = [collate(samples[start : start + 32]) for start in range(0, NUM_SAMPLES, 32)]
    padded = sum(batch['input_ids'].numel() for batch in batches)
    assert 1 - sum(int(batch['attention_mask'].sum()) for batch in batches) / padded >= 0.6


def test_few_answers_are_very_long(samples):
    lengths = sorted(int((sample['labels'] != -100).sum()) for sample in samples)
    assert lengths[len(lengths) // 2] == 2
    assert lengths[-1] == 13


def test_sample_depends_on_seed_and_index(dataset, samples):
    again = DigitsDataset(num_samples=10, cache=False)
    other_seed = DigitsDataset(num_samples=10, seed=1)
    held_out = DigitsDataset(split='eval', num_samples=10)

    def ids(dataset):
        return [dataset[index]['input_ids'][0].tolist() for index in (3, 7, 3, 0)]

    assert ids(again) == [samples[index]['input_ids'][0].tolist() for index in (3, 7, 3, 0)]
    assert torch.equal(again[3]['pixel_values'], samples[3]['pixel_values'])
    assert ids(other_seed) != ids(again) != ids(held_out)
    assert held_out[2]['sample_ids'] == ['digits-eval-2']


def test_callers_cannot_change_cached_samples():
    dataset = DigitsDataset(num_samples=1)
    dataset[0].pop('input_ids')
    assert 'input_ids' in dataset[0]


@pytest.mark.parametrize(
    ('kind', 'answer'), [('read', '4 0 7'), ('spell', 'four zero seven'), ('count', '3'), ('sum', '1 1')]
)
def test_answers(kind, answer):
    assert DigitsQuestion(kind, 3, has_images=True).answer([4, 0, 7]) == answer


def test_text_only_question_names_its_digits():
    assert DigitsQuestion('spell', 3, has_images=False).prompt([4, 0, 7]) == 'spell in words 4 0 7'
    assert DigitsQuestion('spell', 3, has_images=True).prompt([4, 0, 7]) == 'spell in words'


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`split` must be one of \('train', 'eval'\), got: 'test'"):
        DigitsDataset(split='test')
    with pytest.raises(ValueError, match='`max_images` must be at least 1, got: 0'):
        DigitsDataset(max_images=0)
    with pytest.raises(IndexError, match=r'got: 5'):
        DigitsDataset(num_samples=5)[5]
