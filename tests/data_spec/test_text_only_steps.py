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
def test_steps_without_media_are_exact():
    runs = [{'family': family, 'steps': 'ttmt'} for family in FAMILIES]
    runs += [{'family': family, 'steps': 'tt'} for family in FAMILIES]
    for arguments, result in zip(runs, run(2, runs), strict=True):
        assert len(result['errors']) == len(arguments['steps'])
        assert max(result['errors']) < 1e-6, (arguments, result['errors'])


@pytest.mark.slow
def test_no_media_rows_once_reduced_once():
    once = [{'family': name} for name in ('llava', 'qwen2_5_vl', 'idefics3', 'qwen2_vl_video')]
    once.append({'family': 'llava', 'ddp_sync_strategy': 'forced_sync'})
    always = [{'family': 'llava', 'ddp_sync_strategy': 'multi_auto_sync'}]
    runs = [{'steps': 'mtmt', 'rows': 16, **one} for one in (*once, *always)]
    for arguments, result in zip(runs, run(2, runs), strict=True):
        assert max(result['errors']) < 1e-6, (arguments, result['errors'])
        assert len(result['added']) == 2  # one list a rank
        for first, *steps in result['added']:
            assert len(first) > 2
            assert sum(map(bool, first)) >= len(first) - 1  # one has media of its own
            is_each_reduced = 'multi' in arguments.get('ddp_sync_strategy', '')
            for kind, step in zip('tmt', steps, strict=True):
                if is_each_reduced and kind == 't':
                    continue  # a row of text may bring the ranks to equal counts
                assert any(step) == is_each_reduced, (arguments, kind, step)


@pytest.mark.slow
def test_text_models_get_no_rows():
    """Ranks may make unequally many microbatches, if they are not told otherwise."""
    runs = [{'family': family, 'steps': 'tttt', 'rows': 16} for family in ('llama', 'gpt2')]
    results = run(2, runs)
    assert max(error for result in results for error in result['errors']) < 1e-6
    assert not any(any(step) for result in results for _, *steps in result['added'] for step in steps)
    assert any([*map(len, one)] != [*map(len, other)] for one, other in (result['added'] for result in results))


@pytest.mark.slow
def test_other_reduction_after_resume_is_refused(tmp_path):
    whole = {'family': 'llava', 'steps': 'tttt', 'rows': 16, 'folder': str(tmp_path)}
    resumed = {**whole, 'folder': None, 'load_path': str(tmp_path / 'ba2.pt'), 'ddp_sync_strategy': 'multi_auto_sync'}
    trained, refused = run(2, [whole, resumed])
    assert len(trained['errors']) == 4
    assert 'reduced only in the last microbatch' in refused['refused']


@pytest.mark.slow
def test_unequal_counts_with_early_reduction():
    options = {'equal_counts': False, 'ddp_sync_strategy': 'multi_auto_sync'}
    [found] = run(2, [{'family': 'llama', 'steps': 'tt', 'rows': 16, **options}])
    assert 'reduced only in the last microbatch' in found['refused']


@pytest.mark.slow
def test_resume_at_step_without_media(tmp_path):
    runs = []
    for steps in ('mttt', 'tttt'):
        whole = {'family': 'llava', 'steps': steps, 'lr': 1e-3}
        runs.append({**whole, 'folder': str(tmp_path / steps)})
        runs.append({**whole, 'load_path': str(tmp_path / steps / 'ba2.pt')})
    results = run(2, runs)
    for whole, resumed in zip(results[::2], results[1::2], strict=True):
        assert len(whole['errors']) == 4
        assert len(resumed['errors']) == 2
        assert resumed['parameters'] == whole['parameters']


@pytest.mark.slow
def test_found_layouts_without_media():
    """The first step is text alone; parameters that no rank reaches have a gradient of zero, or none under FSDP."""
    cases = [('gemma4', 'image'), ('molmo2', 'image'), ('lfm2_vl', 'image'), ('glmasr', 'audio'), ('internvl', 'image')]
    runs = [{'model_type': name, 'modality': one, 'steps': 'tmtm'} for name, one in cases]
    runs += [{**one, 'fsdp': True} for one in runs[1:]]  # in float32, where Gemma 4 by itself rounds by 5e-5
    results = launch_json('tests/ranks/found_families.py', json.dumps(runs), ranks=2)
    for arguments, result in zip(runs, results, strict=True):
        assert len(result['errors']) == len(arguments['steps'])
        assert max(result['errors']) < 1e-6, (arguments, result['errors'])
