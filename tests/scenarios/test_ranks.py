# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Gradients on several real ranks, against one forward over the whole global batch."""

from __future__ import annotations

import pytest

from tests.support.launch import launch_json

TOLERANCE = 1e-6


def check(*groups, ranks, num_cases):
    """Asserts that the cases of these groups are exact. Returns the messages of the refused ones by name."""
    refused = {}
    num_exact = 0
    for name, case in launch_json('tests/ranks/gradients.py', *groups, ranks=ranks).items():
        if name.startswith('refused'):
            refused[name] = case
            continue
        assert case['error'] < TOLERANCE, (name, case)
        assert case['loss_error'] < TOLERANCE, (name, case)
        num_exact += 1
    assert num_exact == num_cases
    return refused


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_text_gradients_do_not_depend_on_ranks_or_cut(ranks):
    refused = check('text', ranks=ranks, num_cases=18)
    assert all('accumulate_train_batch_on_tokens' in message for message in refused.values())
    assert len(refused) == 2


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_images_are_exact_on_ranks_with_and_without_them(ranks):
    check('llava', 'qwen2_5_vl', ranks=ranks, num_cases=33)


@pytest.mark.slow
def test_other_families_on_two_ranks():
    check('llava_next', 'llava_onevision', 'qwen2_vl', 'idefics3', 'smolvlm', ranks=2, num_cases=40)


@pytest.mark.slow
def test_fsdp2_neither_hangs_nor_changes_the_gradient():
    refused = check('fsdp llava', 'fsdp qwen2_5_vl', ranks=2, num_cases=12)
    assert all('FSDP must shard every trained parameter' in message for message in refused.values())


@pytest.mark.slow
def test_one_fsdp_unit_is_warned_of():
    """With the line that the warning tells to add, the blocks of the model are units as well."""
    results = launch_json('tests/ranks/fsdp_units.py', ranks=2)
    as_it_is, with_line = results['as_it_is'], results['with_line']
    assert as_it_is['num_units'] == len(as_it_is['warnings']) == 1
    assert 'fsdp_wrap_fn' in as_it_is['warnings'][0]
    assert with_line['num_units'] == 3
    assert with_line['warnings'] == []
    assert max(as_it_is['error'], with_line['error']) < TOLERANCE
    assert results['fsdp1_as_it_is'] == as_it_is['warnings']
    assert results['fsdp1_with_line'] == []


@pytest.mark.slow
def test_one_all_reduce_a_step_whatever_the_number_of_microbatches():
    results = launch_json('tests/ranks/collectives.py', ranks=2)
    assert results.keys() == {'1', '6'}  # microbatch sizes
    for counts in results.values():
        num_stock_calls = sum(counts['stock'].values())
        assert num_stock_calls > 0
        assert counts['ours']['c10d::allreduce'] == counts['stock']['c10d::allreduce'] + 1
        assert sum(counts['ours'].values()) == num_stock_calls + 1
        assert sum(counts['monitor'].values()) == num_stock_calls + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ('ranks', 'groups', 'num_cases'),
    [(2, ('weights text', 'weights llava', 'weights qwen2_5_vl'), 34), (4, ('weights text',), 14)],
)
def test_weighted_gradients_do_not_depend_on_ranks_or_cut(ranks, groups, num_cases):
    check(*groups, ranks=ranks, num_cases=num_cases)


@pytest.mark.slow
def test_a_router_over_the_step_does_not_depend_on_ranks_or_cut():
    check('router', ranks=2, num_cases=9)
