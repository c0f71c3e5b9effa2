# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Images, videos and text mixed in a global batch: no rank hangs, and the gradient is exact."""

from __future__ import annotations

import json

import pytest

from tests.matrix.harness import LARGEST_ROUND_OFF, TOLERANCE
from tests.support.families import MEDIA, SLOT_MEDIA
from tests.support.launch import launch_json

SCRIPT = 'tests/ranks/mixed_media.py'
# The rows of each of two ranks, step by step: `+` separates rows, `&` the media of one row. In the fourth step nobody
# has media.
PAIRS = [
    ['image+none', 'video+video'],
    ['none+none', 'image&video+image'],
    ['video+none', 'none+none'],
    ['none+none+none', 'none'],
    ['image', 'none+none'],
    ['image&video', 'image+video+none'],
]
SOUNDS = [['audio+none', 'none+none'], ['none+none', 'audio+audio'], ['none', 'none+none'], ['audio', 'audio+none']]
ALL_KINDS = [['audio+none', 'video'], ['image&video&audio', 'none'], ['none', 'audio'], ['image+audio', 'video']]
# For a processor that takes no row with both an image and a video.
APART = [step for step in PAIRS if '&' not in ' '.join(step)]


def largest_allowed_error(round_off):
    """Some processors round so that one plain forward is further off: Qwen2.5-Omni's is 1.1e-6 on an AMD EPYC."""
    allowed = min(2 * round_off, LARGEST_ROUND_OFF)
    return max(TOLERANCE, allowed)


def check_runs(runs, *, ranks):
    """Launches runs, and checks the gradient and the loss of each of their steps."""
    results = launch_json(SCRIPT, json.dumps(runs), ranks=ranks)
    for run, steps in zip(runs, results, strict=True):
        for media_by_rank, step in zip(run['steps'], steps, strict=True):
            assert step['error'] < largest_allowed_error(step['round_off']), (run, media_by_rank, step)
            assert step['loss_error'] < TOLERANCE, (run, media_by_rank, step)


@pytest.mark.slow
def test_two_ranks_of_ddp():
    steps_of_families = {
        'qwen2_5_vl': PAIRS,
        'llava_onevision': PAIRS,
        'video_llava': PAIRS,
        'internvl': PAIRS,
        'llava_next_video': [['video', 'none'], ['none', 'image']],  # images have weights that videos do not use
        'smolvlm_video': APART,
        'qwen2_audio': SOUNDS,
        'qwen2_5_omni': PAIRS + ALL_KINDS,
    }
    runs = []
    for family, steps in steps_of_families.items():
        if family in MEDIA or family in SLOT_MEDIA:  # SLOT_MEDIA is empty without num2words
            runs.append({'family': family, 'steps': steps, 'size': 1})
    check_runs(runs, ranks=2)


@pytest.mark.slow
def test_one_microbatch_on_one_rank():
    """Only the second rank, which makes two microbatches, sees that DDP reduces gradients in the last one."""
    steps = [['image', 'none+none']] * 2
    run = {'family': 'qwen2_vl', 'steps': steps, 'size': 1, 'equal_counts': False}
    check_runs([run], ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [4])  # tests/conftest.py sorts by this parameter
def test_four_ranks_each_with_something_else(ranks):
    kinds = ['image+none', 'video', 'none+none', 'image&video+video']
    # The second step brings the first padding, which is looked at between the gradients and the optimizer.
    steps = [['image', 'video', 'none', 'none'], kinds, ['none'] * 4]
    run = {'family': 'qwen2_vl', 'steps': steps, 'size': 2}
    check_runs([{**run, 'fsdp': False}, {**run, 'fsdp': True}], ranks=ranks)


@pytest.mark.slow
def test_term_that_sees_dummy_rows_is_refused():
    """The rank with text gets a dummy image in the first step. A term at all of its positions would count there."""
    runs = [{'media_of_ranks': ['image+none', 'none+image']}, {'media_of_ranks': ['image+image', 'none+none']}]

    (error,), message = launch_json('tests/ranks/dummy_terms.py', json.dumps(runs), ranks=2)

    assert error < TOLERANCE
    assert 'term in rows without labels' in message
