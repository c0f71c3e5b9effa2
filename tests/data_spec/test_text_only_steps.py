# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps without media on several ranks, before any rank has seen an image: no tower may be left unused."""

from __future__ import annotations

import json

import pytest

from tests.support.launch import launch_json

SCRIPT = 'tests/ranks/text_only.py'
FAMILIES = ['llava', 'llava_next', 'qwen2_5_vl', 'idefics3', 'mistral3', 'qwen2_vl_video', 'qwen2_audio']


def run(ranks, **arguments):
    return launch_json(SCRIPT, json.dumps(arguments), ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_first_steps_without_media_are_exact(family):
    errors = run(2, family=family, steps='ttmt')['errors']
    assert len(errors) == 4
    assert max(errors) < 1e-6, errors


@pytest.mark.slow
@pytest.mark.parametrize('family', ['llava', 'qwen2_audio'])
def test_data_without_any_media_is_exact(family):
    errors = run(2, family=family, steps='ttt')['errors']
    assert len(errors) == 3
    assert max(errors) < 1e-6, errors


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 2])
@pytest.mark.parametrize('steps', ['mttt', 'tttt'], ids=['image first', 'no image at all'])
def test_run_resumed_at_a_step_without_media_ends_with_the_parameters_of_the_unbroken_one(steps, ranks, tmp_path):
    whole = run(ranks, family='llava', steps=steps, lr=1e-3, folder=str(tmp_path))
    resumed = run(ranks, family='llava', steps=steps, lr=1e-3, load_path=str(tmp_path / 'ba2.pt'))
    assert len(resumed['errors']) == 2
    assert resumed['parameters'] == whole['parameters']
