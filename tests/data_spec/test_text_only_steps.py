# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Steps without media on several ranks, before any rank has seen an image: no encoder may be left unused.

Steps are written as letters: ``m`` has rows with media on the first rank, ``t`` has text only.
"""

from __future__ import annotations

import json

import pytest

from tests.support.launch import launch_json
from tests.support.training import largest

FAMILIES = [
    'llava',
    'llava_next',
    'qwen2_5_vl',
    'idefics3',
    'mistral3',
    'qwen2_vl_video',
    'qwen2_audio',
    'blip2',
    'instructblip',
    'instructblip_video',
]
EARLY_REDUCTION = {'ddp_sync_strategy': 'multi_auto_sync'}
"""DDP reduces gradients in every microbatch, not only in the last."""

pytestmark = pytest.mark.slow


def run(runs):
    """Returns the result of each run on two ranks. ``runs`` has the arguments of each."""
    return launch_json('tests/ranks/text_only.py', json.dumps(runs), ranks=2)


def assert_exact(result, arguments):
    """Checks the gradients of all steps of a run against one forward over the global batch."""
    assert len(result['errors']) == len(arguments['steps'])
    assert largest(result['errors']) < 1e-6, (arguments, result['errors'])


def test_steps_without_media_are_exact():
    runs = [{'family': family, 'steps': 'ttmt'} for family in FAMILIES]

    results = run(runs)

    for arguments, result in zip(runs, results, strict=True):
        assert_exact(result, arguments)


@pytest.mark.parametrize(
    ('families', 'options', 'adds_rows'),
    [
        pytest.param(['llava', 'qwen2_5_vl', 'idefics3', 'qwen2_vl_video'], {}, False, id='reduced once'),
        pytest.param(['llava'], EARLY_REDUCTION, True, id='reduced in every microbatch'),
    ],
)
def test_dummy_rows_end_once_reduced_once(families, options, adds_rows):
    """They end after the first step. Only its backward shows how often DDP reduces."""
    runs = [{'family': family, 'steps': 'mtmt', 'rows': 16, **options} for family in families]

    results = run(runs)

    for arguments, result in zip(runs, results, strict=True):
        assert_exact(result, arguments)
        for added_on_rank in result['added']:
            first_step, text_step, media_step, last_step = added_on_rank
            assert len(first_step) > 2
            assert first_step.count(0) <= 1, 'only the microbatch with media needs no row'
            assert any(media_step) == adds_rows, arguments
            if not adds_rows:  # else a row of text may bring the ranks to equal counts
                assert not any(text_step), arguments
                assert not any(last_step), arguments


def test_text_models_get_no_rows():
    """Ranks may make different numbers of microbatches, unless they are told otherwise."""
    runs = [{'family': family, 'steps': 'tttt', 'rows': 16} for family in ('llama', 'gpt2')]

    results = run(runs)

    counts_differ = []
    for arguments, result in zip(runs, results, strict=True):
        assert_exact(result, arguments)
        steps_of_first_rank, steps_of_second_rank = result['added']
        for added_to_microbatches in steps_of_first_rank[1:] + steps_of_second_rank[1:]:
            assert not any(added_to_microbatches)
        for first_rank, second_rank in zip(steps_of_first_rank, steps_of_second_rank, strict=True):
            counts_differ.append(len(first_rank) != len(second_rank))
    assert any(counts_differ)


def test_other_reduction_after_resume_is_refused(tmp_path):
    arguments = {'family': 'llava', 'steps': 'tttt', 'rows': 16}
    first_run = {**arguments, 'folder': str(tmp_path)}
    resumed_run = {**arguments, 'load_path': str(tmp_path / 'ba2.pt'), **EARLY_REDUCTION}

    trained, resumed = run([first_run, resumed_run])

    assert len(trained['errors']) == 4
    assert 'reduced only in the last microbatch' in resumed['refused']


def test_unequal_counts_with_early_reduction():
    arguments = {'family': 'llama', 'steps': 'tt', 'rows': 16, 'equal_counts': False, **EARLY_REDUCTION}

    [result] = run([arguments])

    assert 'reduced only in the last microbatch' in result['refused']


@pytest.mark.parametrize('steps', ['mttt', 'tttt'])
def test_resume_at_step_without_media(steps, tmp_path):
    """A run that is resumed after its second step ends with the parameters of the uninterrupted run."""
    arguments = {'family': 'llava', 'steps': steps, 'lr': 1e-3}
    uninterrupted_run = {**arguments, 'folder': str(tmp_path)}
    resumed_run = {**arguments, 'load_path': str(tmp_path / 'ba2.pt')}

    uninterrupted, resumed = run([uninterrupted_run, resumed_run])

    assert len(uninterrupted['errors']) == 4
    assert len(resumed['errors']) == 2
    assert resumed['parameters'] == uninterrupted['parameters']


def test_found_layouts_without_media():
    """The first step has only text. Parameters that no rank reaches have a gradient of zero, or none under FSDP."""
    modalities = {'gemma4': 'image', 'molmo2': 'image', 'lfm2_vl': 'image', 'glmasr': 'audio', 'internvl': 'image'}
    runs = []
    for model_type, modality in modalities.items():
        arguments = {'model_type': model_type, 'modality': modality, 'steps': 'tmtm'}
        runs.append(arguments)
        if model_type != 'gemma4':  # in float32, the precision of FSDP, its round-off is 5e-5
            runs.append({**arguments, 'fsdp': True})

    results = launch_json('tests/ranks/found_families.py', json.dumps(runs), ranks=2)

    for arguments, result in zip(runs, results, strict=True):
        assert_exact(result, arguments)
