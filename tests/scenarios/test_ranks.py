# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Gradients on several real ranks, compared with one forward over the whole global batch."""

from __future__ import annotations

import pytest

from tests.ranks.unlike_arguments import UNLIKE
from tests.support.launch import launch_json
from tests.support.training import largest

TOLERANCE = 1e-6


def assert_exact_on_ranks(*groups, ranks, num_cases):
    """Runs groups of cases. Returns the messages of those that must be refused."""
    results = launch_json('tests/ranks/gradients.py', *groups, ranks=ranks)
    messages = []
    num_exact = 0
    for name, result in results.items():
        if name.startswith('refused'):
            messages.append(result)
        else:
            num_exact += 1
            assert result['error'] < TOLERANCE, name
            assert result['loss_error'] < TOLERANCE, name
    assert num_exact == num_cases
    return messages


@pytest.mark.slow
@pytest.mark.parametrize(('ranks', 'num_cases'), [(2, 20), (4, 15)])
def test_text_on_ranks(ranks, num_cases):
    messages = assert_exact_on_ranks('text', ranks=ranks, num_cases=num_cases)
    assert len(messages) == 2
    for message in messages:
        assert 'accumulate_train_batch_on_tokens' in message


@pytest.mark.slow
@pytest.mark.parametrize(('ranks', 'families', 'num_cases'), [(2, ('llava', 'qwen2_5_vl'), 17), (4, ('llava',), 9)])
def test_ranks_with_and_without_images(ranks, families, num_cases):
    assert_exact_on_ranks(*families, ranks=ranks, num_cases=num_cases)


@pytest.mark.slow
def test_other_families_on_two_ranks():
    families = ('llava_next', 'llava_onevision', 'qwen2_vl', 'idefics3', 'smolvlm')
    assert_exact_on_ranks(*families, ranks=2, num_cases=20)


@pytest.mark.slow
def test_masked_models_on_two_ranks():
    assert_exact_on_ranks('masked', ranks=2, num_cases=6)


@pytest.mark.slow
def test_fsdp2_on_two_ranks():
    messages = assert_exact_on_ranks('fsdp llava', 'fsdp qwen2_5_vl', ranks=2, num_cases=6)
    assert len(messages) == 4
    for message in messages:
        assert 'FSDP must shard every trained parameter' in message


@pytest.mark.slow
def test_fsdp1_on_two_ranks():
    """Composer runs FSDP1 only on GPUs, so it gets the CPU as its GPU."""
    errors = launch_json('tests/ranks/fsdp1.py', ranks=2)
    assert len(errors) == 3
    for name, errors_of_ranks in errors.items():
        assert largest(errors_of_ranks) < TOLERANCE, name


@pytest.mark.slow
def test_fit_after_evaluation_with_fsdp2():
    (message,) = assert_exact_on_ranks('evaluated', ranks=2, num_cases=2)
    assert "`equal_counts` must be True or 'auto' with FSDP" in message


@pytest.mark.slow
def test_fsdp2_reduces_in_half_precision():
    """With a wrong factor the error would be 0.5 or 1."""
    errors = launch_json('tests/ranks/fsdp_options.py', ranks=2)
    assert len(errors) == 5
    assert largest(errors.values()) < 1e-2, errors


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [4])  # tests/conftest.py sorts by this parameter
def test_fsdp2_with_replicas(ranks):
    errors = launch_json('tests/ranks/fsdp_options.py', ranks=ranks)
    assert errors['replicas'] < TOLERANCE


@pytest.mark.slow
def test_all_ranks_decide_alike():
    """Also if only the first rank has a state that forwards write."""
    results = launch_json('tests/ranks/coupled_rows.py', ranks=2)
    for name in ('ddp', 'fsdp'):
        for message in results[f'{name} leak']:
            assert 'rows beside it' in message
        for message in results[f'{name} decisive state']:
            assert 'num_calls' in message
        assert max(results[f'{name} harmless state']) < TOLERANCE
    # FSDP2 itself adds up the gradients of both branches, without an error.
    assert max(results['ddp branches']) < TOLERANCE
    for message in results['fsdp branches']:
        assert 'must reach the same parameters on all ranks' in message


@pytest.mark.slow
def test_all_ranks_name_a_bad_batch():
    """In the first step and in a later one."""
    results = launch_json('tests/ranks/bad_batch.py', ranks=2)
    assert len(results) == 8  # four bad entries, each in two steps
    beginnings = ('`labels` must be', '`loss_weights` must be', "`batch['flags']` must be", '`layout` must tell')
    for first_message, second_message in results:
        assert second_message.startswith(beginnings)
        assert first_message == f'Another rank has refused its batch: {second_message}'


@pytest.mark.slow
def test_argument_that_differs_is_named():
    """In one line, on all ranks, and before they make different collectives."""
    results = launch_json('tests/ranks/unlike_arguments.py', ranks=2)
    assert results.pop('caps') == ['', '']
    first_message, second_message = results.pop('alike')
    assert first_message == second_message
    assert 'must be the same on all ranks' not in first_message
    assert set(results) == {*UNLIKE, 'token_data_spec'}
    for name, messages in results.items():
        first_message, second_message = messages
        assert first_message == second_message
        assert first_message.startswith(f'`{name}` must be the same on all ranks, got: ')
        assert '\n' not in first_message
    assert 'got: token on rank 0, sample on rank 1' in results['token_weights'][0]
    assert 'got: 0.1 on rank 0, 0 on rank 1' in results['optimizers[0].param_groups[0].weight_decay'][0]


@pytest.mark.slow
def test_all_ranks_end_with_the_first_rank():
    """Only rank 0 calls the function. Its own error is raised there, and the other rank names it."""
    results = launch_json('tests/ranks/first_rank.py', ranks=2)
    assert results['answer'] == [['int', '7']] * 2
    assert results['refuse'] == [['InvalidInputError', 'no sample']] * 2
    first, second = results['fail']
    assert first == ['OwnError', 'a bug of ours']
    assert second == ['NotExactError', 'Rank 0 has failed, read its output: OwnError: a bug of ours']
    first, second = results['leave']
    assert first == ['SystemExit', '0']
    assert second == ['NotExactError', 'Rank 0 has failed, read its output: SystemExit: 0']
    # A local function cannot be pickled. The other rank would wait for it.
    first, second = results['return_a_function']
    assert "Can't pickle local object" in first[1]
    assert second[0] == 'NotExactError'
    assert second[1] == f'Rank 0 has failed, read its output: {first[0]}: {first[1]}'


@pytest.mark.slow
def test_memory_runs_out_on_one_rank():
    """In each microbatch of the first two steps. Without a reset of DDP the ranks wait forever."""
    errors = launch_json('tests/ranks/memory.py', ranks=2)
    assert len(errors) == 4
    assert largest(errors.values()) < TOLERANCE, errors


@pytest.mark.slow
def test_one_all_reduce_in_a_step():
    """More than stock Composer, for every microbatch size. The monitor gathers objects in two collectives."""
    results = launch_json('tests/ranks/collectives.py', ranks=2)
    assert results.keys() == {'1', '6'}  # microbatch sizes
    all_reduce = 'c10d.allreduce_.default'
    for counts_of_runs in results.values():
        totals = {run: sum(counts.values()) for run, counts in counts_of_runs.items()}
        assert totals['stock'] > 0
        assert totals['ours'] == totals['stock'] + 1
        assert totals['monitor'] == totals['stock'] + 2
        assert counts_of_runs['ours'][all_reduce] == counts_of_runs['stock'][all_reduce] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ('ranks', 'groups', 'num_cases'),
    [(2, ('weights text', 'weights llava', 'weights qwen2_5_vl'), 22), (4, ('weights text',), 8)],
)
def test_token_weights_on_ranks(ranks, groups, num_cases):
    assert_exact_on_ranks(*groups, ranks=ranks, num_cases=num_cases)


@pytest.mark.slow
def test_router_balance_on_ranks():
    assert_exact_on_ranks('router', ranks=2, num_cases=9)


@pytest.mark.slow
def test_terms_with_fsdp():
    assert assert_exact_on_ranks('terms', ranks=2, num_cases=2) == []
