# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps without media on several ranks, before any rank has seen an image: no tower may be left unused."""

from __future__ import annotations

import json

import pytest

from tests.support.launch import launch_json

SCRIPT = 'tests/ranks/text_only.py'
FAMILIES = ['llava', 'llava_next', 'qwen2_5_vl', 'idefics3', 'mistral3', 'qwen2_vl_video', 'qwen2_audio']
FAMILIES += ['blip2', 'instructblip', 'instructblip_video']


def run(ranks, runs):
    return launch_json(SCRIPT, json.dumps(runs), ranks=ranks)


@pytest.mark.slow
def test_steps_without_media_are_exact_on_two_ranks():
    runs = [{'family': family, 'steps': 'ttmt'} for family in FAMILIES]
    runs += [{'family': family, 'steps': 'tt'} for family in FAMILIES]
    for arguments, result in zip(runs, run(2, runs), strict=True):
        assert len(result['errors']) == len(arguments['steps'])
        assert max(result['errors']) < 1e-6, (arguments, result['errors'])


@pytest.mark.slow
@pytest.mark.parametrize(
    ('ranks', 'kinds'),
    [
        # Without media one rank has no optimizer state of the tower to save, and torch cannot load what is not there.
        (1, ['mttt']),
        (2, ['mttt', 'tttt']),
    ],
)
def test_run_resumed_at_a_step_without_media_ends_with_the_parameters_of_the_unbroken_one(ranks, kinds, tmp_path):
    runs = []
    for steps in kinds:
        whole = {'family': 'llava', 'steps': steps, 'lr': 1e-3}
        runs.append({**whole, 'folder': str(tmp_path / steps)})
        runs.append({**whole, 'load_path': str(tmp_path / steps / 'ba2.pt')})
    results = run(ranks, runs)
    for whole, resumed in zip(results[::2], results[1::2], strict=True):
        assert len(whole['errors']) == 4
        assert len(resumed['errors']) == 2
        assert resumed['parameters'] == whole['parameters']
