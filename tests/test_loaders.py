# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Loaders of a config: the regrouping one by default, the stock one where rows must keep their order."""

from __future__ import annotations

import itertools

import pytest
import torch

from composer_tokacc.config import ConfigError, load_config
from composer_tokacc.layout import BatchLayout
from composer_tokacc.loaders import build_dataset, build_loader, build_processor
from composer_tokacc.regrouping_loader import RegroupingDataLoader
from tests.support.launch import ROOT


def build(tmp_path, *overrides, held_out=False):
    config = load_config(
        ROOT / 'yamls' / 'digits.yaml',
        ['dataset.num_samples=60', 'dataset.eval.num_samples=20', 'loader.global_batch_size=16',
         f'loader.lengths_folder={tmp_path}', *overrides],
    )  # fmt: skip
    processor = build_processor(config)
    dataset = build_dataset(config, processor, held_out=held_out)
    sample = next(sample for sample in dataset if sample['num_images'][0])
    return build_loader(config, dataset, processor, BatchLayout.infer(sample), held_out=held_out), dataset


def names(spec):
    return [sorted(batch['sample_ids']) for batch in spec.dataloader]


def test_regrouping_is_the_default_and_changes_no_global_batch(tmp_path):
    ours, _ = build(tmp_path)
    stock, _ = build(tmp_path, 'loader.regroup_ranks=false')
    assert isinstance(ours.dataloader, RegroupingDataLoader)
    assert not isinstance(stock.dataloader, RegroupingDataLoader)
    assert names(ours) == names(stock)
    assert len(ours.dataloader) == len(stock.dataloader) == 3
    assert ours.dataloader.batch_size == 16


def test_budget_is_that_of_rows_as_wide_as_the_longest_sample(tmp_path):
    spec, dataset = build(tmp_path, 'microbatching.device_train_microbatch_size=2')
    longest = max(sample['input_ids'].shape[1] for sample in dataset)
    widths = []
    for step, batch in enumerate(spec.dataloader):
        plan = spec.dataloader.batch_sampler.plan(step)
        microbatches = spec.split_batch(spec.batch_transforms(batch), 2)
        assert [len(microbatch['input_ids']) for microbatch in microbatches] == [len(m.indices) for m in plan.ranks[0]]
        widths += [microbatch['input_ids'].numel() for microbatch in microbatches]
    assert longest < max(widths) <= 2 * longest


def test_held_out_set_and_ordered_rows_use_the_stock_sampler(tmp_path):
    for spec in (build(tmp_path, held_out=True)[0], build(tmp_path, 'microbatching.regroup=false')[0]):
        assert not isinstance(spec.dataloader, RegroupingDataLoader)
    assert not list(tmp_path.iterdir()), 'lengths were measured for nothing'


def test_workers_give_the_same_batches(tmp_path):
    alone, workers = (build(tmp_path, f'loader.num_workers={number}')[0].dataloader for number in (0, 2))
    for first, second in itertools.zip_longest(alone, workers):
        assert first['sample_ids'] == second['sample_ids']
        assert first['microbatch_ids'] == second['microbatch_ids']
        torch.testing.assert_close(first['input_ids'], second['input_ids'])


def test_budget_under_the_longest_sample_is_refused_in_the_words_of_the_config(tmp_path):
    with pytest.raises(ConfigError, match=r'must be at least the longest sample, got: 1 x 12 < \d+ \(sample \d+\)'):
        build(tmp_path, 'microbatching.device_train_microbatch_size=1', 'microbatching.slot_tokens=12')
