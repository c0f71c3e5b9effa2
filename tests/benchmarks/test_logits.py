# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Tests the benchmark of logits at labels: its models, samples, contenders, and the page with its results."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import transformers

if transformers.__version__.startswith('4.'):
    pytest.skip('rivals run with Transformers 5', allow_module_level=True)

from benchmarks import logits
from benchmarks.models import QWEN_TEXT, SMOLVLM_TEXT
from benchmarks.record import filled
from benchmarks.rivals.contenders import CONTENDERS, Task
from benchmarks.rivals.data import SHAPES, Samples, Sizes, new_model
from tests.benchmarks.test_rivals import inspected

SIZES = Sizes(
    model='smolvlm',
    layers=1,
    samples=16,
    global_batch=8,
    microbatch=2,
    workers=0,
    least_answer=4,
    longest_answer=9,
)
LENGTHS = np.arange(20, 60)


def test_page_shows_the_results():
    results = json.loads(logits.RESULTS_FILE.read_text())
    text = logits.PAGE.read_text()
    assert text == filled(text, logits.parts_of(results)), 'python -m benchmarks.logits --report'


@pytest.mark.parametrize(('name', 'config'), [('smolvlm', SMOLVLM_TEXT), ('qwen', QWEN_TEXT)])
def test_shapes_keep_the_ratios(name, config):
    """The benchmark's model is narrower than the one that it is called after."""
    shape = SHAPES[name]
    factor = config['hidden_size'] / shape['hidden_size']
    assert shape['vocabulary'] * factor == pytest.approx(config['vocab_size'], rel=0.01)
    assert shape['intermediate_size'] * factor == config['intermediate_size']
    num_layers = config['num_hidden_layers']
    assert logits.LAYERS[name] == (num_layers // 6, num_layers)


def test_only_the_answer_has_labels():
    samples = Samples(SIZES, LENGTHS)
    for index in range(len(samples)):
        has_label = samples[index]['labels'] != -100
        num_labels = int(has_label.sum())
        assert SIZES.least_answer <= num_labels <= SIZES.longest_answer
        assert has_label[-num_labels:].all()


def test_long_answers_fill_the_sample():
    sizes = replace(SIZES, least_answer=99, longest_answer=99)
    samples = Samples(sizes, LENGTHS)
    assert (samples[0]['labels'] != -100).all()


def test_extremes_are_in_the_first_step():
    lengths = Samples(SIZES, LENGTHS).lengths
    first_step = lengths[: SIZES.global_batch]
    assert first_step.min() == lengths.min()
    assert first_step.max() == lengths.max()


@pytest.mark.parametrize('name', ['ours_all_logits', 'ours_sampler'])
def test_head_computes_the_asked_positions(name):
    """`ours_sampler` computes logits at labels only, `ours_all_logits` at all positions."""
    samples = Samples(SIZES, LENGTHS)
    model = new_model(SIZES)
    num_positions = []

    def record(head, args, logits):
        num_positions.append(logits.shape[:2].numel())

    model.lm_head.register_forward_hook(record)
    CONTENDERS[name](Task(model, samples, SIZES))
    # The second and last step, because in the first one the check also computes all logits.
    num_labels = 0
    for index in range(SIZES.global_batch, SIZES.samples):
        num_labels += int((samples[index]['labels'] != -100).sum())
    computes_at_labels = num_positions[-1] <= num_labels
    assert computes_at_labels == (name == 'ours_sampler')


def test_all_logits_are_exact():
    assert inspected('ours_all_logits')['gradient_error'] < 1e-6
