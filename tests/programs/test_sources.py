# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Loaders of a config: the regrouping one by default, the stock one where rows must keep their order."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel, plan_microbatches
from composer_tokacc.programs import ConfigError, load_config
from composer_tokacc.programs.config_checks import check_config
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sampling import RegroupingDataLoader
from examples.digits.dataset import load_scans, split_scans
from tests.support.launch import ROOT


def build(tmp_path, *overrides, is_eval=False):
    config = load_config(
        ROOT / 'yamls' / 'digits.yaml',
        [
            'dataset.num_samples=60',
            'dataset.eval.num_samples=20',
            'loader.global_batch_size=16',
            f'loader.lengths_folder={tmp_path}',
            *overrides,
        ],
    )
    source = source_of(config)
    processor = source.build_processor()
    dataset = source.build_dataset(processor, is_eval=is_eval)
    sample = next(sample for sample in dataset if sample['num_images'][0])
    return source.build_loader(dataset, processor, BatchLayout.infer(sample), is_eval=is_eval), dataset


def test_dataset_read_by_index(tmp_path):
    _, dataset = build(tmp_path)
    assert source_of(load_config(ROOT / 'yamls' / 'digits.yaml')).by_index(dataset) is dataset


def names(spec):
    return [sorted(batch['sample_ids']) for batch in spec.dataloader]


def test_regrouping_changes_no_global_batch(tmp_path):
    ours, _ = build(tmp_path)
    stock, _ = build(tmp_path, 'loader.regroup_ranks=false')
    assert isinstance(ours.dataloader, RegroupingDataLoader)
    assert not isinstance(stock.dataloader, RegroupingDataLoader)
    assert names(ours) == names(stock)
    assert len(ours.dataloader) == len(stock.dataloader) == 3
    assert ours.dataloader.batch_size == 16


def test_budget_of_rows_of_longest_sample(tmp_path):
    spec, dataset = build(tmp_path, 'microbatching.device_train_microbatch_size=2')
    longest = max(sample['input_ids'].shape[1] for sample in dataset)
    widths = []
    for step, batch in enumerate(spec.dataloader):
        plan = spec.dataloader.batch_sampler.plan(step)
        microbatches = spec.split_batch(spec.batch_transforms(batch), 2)
        assert [len(microbatch['input_ids']) for microbatch in microbatches] == [len(m.indices) for m in plan.ranks[0]]
        widths += [microbatch['input_ids'].numel() for microbatch in microbatches]
    assert longest < max(widths) <= 2 * longest


def test_plans_use_the_cost_of_patches(tmp_path):
    priced = 'microbatching.cost={vision_per_image: 3, vision_per_patch: 2, vision_per_square: 5, launch: 1}'
    spec, dataset = build(tmp_path, priced, 'microbatching.device_train_microbatch_size=2')
    sampler = spec.dataloader.batch_sampler
    for step in range(len(sampler)):
        window = sampler.window(step)
        images = [dataset[index]['num_images'][0] for index in window]  # one patch each
        lengths = [dataset[index]['input_ids'].shape[1] for index in window]
        expected = plan_microbatches(
            lengths,
            num_ranks=1,
            max_tokens=sampler.rows.options.max_tokens,
            image_tokens=images,
            vision_cost=[3.0 * (n > 0) + 2.0 * n + 5.0 * n * n for n in images],
            cost=CostModel(launch=1.0),
        )
        planned = sampler.plan(step)
        assert [one.indices for one in planned.ranks[0]] == [one.indices for one in expected.ranks[0]]
        assert [one.cost for one in planned.ranks[0]] == pytest.approx([one.cost for one in expected.ranks[0]])


def test_image_cap_of_plans_and_split(tmp_path):
    free, dataset = build(tmp_path)
    token_id = source_of(load_config(ROOT / 'yamls' / 'digits.yaml')).build_processor().image_token_id
    cap = max(int((sample['input_ids'] == token_id).sum()) for sample in dataset)
    capped, _ = build(tmp_path, f'microbatching.max_image_tokens={cap}')
    most = [
        max(int((one['input_ids'] == token_id).sum()) for batch in spec.dataloader for one in batch.microbatches)
        for spec in (free, capped)
    ]
    assert most[0] > cap >= most[1] > 0
    assert capped.split_batch.__self__._split.options.max_image_tokens == cap


def test_package_that_a_dataset_lacks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)  # as where scikit-learn is not installed
    load_scans.cache_clear()
    split_scans.cache_clear()
    with pytest.raises(ConfigError, match=r"`dataset`: .* install 'composer_tokacc\[demo\]'"):
        build(tmp_path)


def test_held_out_set_uses_stock_sampler(tmp_path):
    for spec in (build(tmp_path, is_eval=True)[0], build(tmp_path, 'microbatching.regroup=false')[0]):
        assert not isinstance(spec.dataloader, RegroupingDataLoader)
    assert not list(tmp_path.iterdir()), 'lengths were measured for nothing'


def test_workers_give_the_same_batches(tmp_path):
    alone, workers = (build(tmp_path, f'loader.num_workers={number}')[0].dataloader for number in (0, 2))
    for first, second in itertools.zip_longest(alone, workers):
        assert first['sample_ids'] == second['sample_ids']
        assert first.indices == second.indices
        torch.testing.assert_close(first['input_ids'], second['input_ids'])


def test_budget_under_the_longest_sample(tmp_path):
    with pytest.raises(ConfigError, match=r'must be at least the longest sample, got: 1 x 12 < \d+ \(sample \d+\)'):
        build(tmp_path, 'microbatching.device_train_microbatch_size=1', 'microbatching.slot_tokens=12')


PARTS = 'dataset.parts={scans: {num_samples: 40}, more: {num_samples: 6, seed: 5, epochs: 3}}'


def test_parts_are_mixed_by_their_epochs(tmp_path):
    spec, dataset = build(tmp_path, PARTS)
    assert [len(part) for part in dataset.datasets] == [40, 6]
    assert len(list(tmp_path.glob('*.npz'))) == 2
    assert len(spec.dataloader) == (40 + 3 * 6) // 16
    sampler, counts = spec.dataloader.batch_sampler, []
    for step in range(3):
        counts.append(sum(index >= 40 for index in sampler.window(step)))
    assert all(4 <= count <= 6 for count in counts), 'each step has its share of 18 in 58'


def test_parts_get_their_share_of_tokens(tmp_path):
    shares = (
        'dataset.parts={scans: {num_samples: 40, loss_share: 0.8}, more: {num_samples: 6, seed: 5, loss_share: 0.2}}'
    )
    spec, dataset = build(tmp_path, shares)
    assert [dataset[index]['source'] for index in (0, 39, 40, 45)] == [['scans'], ['scans'], ['more'], ['more']]
    tokens = {'scans': 0, 'more': 0}
    for epoch in range(9):
        spec.dataloader.batch_sampler.set_epoch(epoch)
        for batch in spec.dataloader:
            for microbatch in batch.microbatches:
                for name, labels in zip(microbatch['source'], microbatch['labels'], strict=True):
                    tokens[name] += int((labels != -100).sum())
    assert tokens['scans'] / sum(tokens.values()) == pytest.approx(0.8, abs=0.02)


def test_parts_get_their_share_of_weight(tmp_path):
    parts = (
        'dataset.parts={scans: {num_samples: 40, loss_share: 0.3}, more: {num_samples: 6, epochs: 3, loss_share: 0.7}}'
    )
    column = 'algorithms.token_accumulation.token_weights=column'
    spec, _ = build(tmp_path, parts, 'dataset.loss_shares_by=weights', column)
    for batch in spec.dataloader:
        weights = {'scans': 0.0, 'more': 0.0}
        for microbatch in batch.microbatches:
            rows = zip(microbatch['source'], microbatch['labels'], microbatch['loss_weights'], strict=True)
            for name, labels, weight in rows:
                weights[name] += weight * int((labels != -100).sum())
        assert weights['scans'] / sum(weights.values()) == pytest.approx(0.3, abs=1e-9)


def test_one_modality_a_step(tmp_path):
    spec, _ = build(tmp_path, 'loader.modality=per_step', 'loader.drop_last=false', 'loader.global_batch_size=8')
    kinds = [{count > 0 for count in batch['num_images']} for batch in spec.dataloader]
    assert {frozenset(kind) for kind in kinds} == {frozenset([True]), frozenset([False])}


def test_steps_of_so_many_tokens(tmp_path):
    spec, dataset = build(tmp_path, 'loader.global_batch_tokens=600', 'loader.drop_last=false')
    lengths = [sample['input_ids'].shape[1] for sample in dataset]
    sampler = spec.dataloader.batch_sampler
    assert len(spec.dataloader) == -(-sum(lengths) // 600)
    tokens = [int(batch['attention_mask'].sum()) for batch in spec.dataloader]
    assert tokens == sampler.window_tokens().tolist()
    assert sum(tokens) == sum(lengths)
    assert all(abs(number - 600) < max(lengths) for number in tokens[:-1])
    # Without a microbatch size one microbatch may hold a whole step of mean length.
    assert spec.dataloader.batch_size == -(-600 * len(lengths) // sum(lengths))
    stock, _ = build(tmp_path, 'loader.drop_last=false')
    trained = [name for batch in spec.dataloader for name in batch['sample_ids']]
    assert sorted(trained) == sorted(name for batch in stock.dataloader for name in batch['sample_ids'])


def test_a_schedule_of_the_global_batch(tmp_path):
    spec, _ = build(tmp_path, 'loader.global_batch_size=[[0,4],[3ba,16]]', 'loader.drop_last=false')
    assert [len(batch['sample_ids']) for batch in spec.dataloader] == [4, 4, 4, 16, 16, 16]
    spec.dataloader.batch_sampler.set_epoch(1)
    assert [len(batch['sample_ids']) for batch in spec.dataloader] == [16, 16, 16, 12]
    assert spec.dataloader.batch_size == 16


def test_loss_cap_reaches_sampler_and_split(tmp_path):
    free, dataset = build(tmp_path)
    labels = [int((sample['labels'] != -100).sum()) for sample in dataset]
    capped, _ = build(tmp_path, f'microbatching.max_loss_tokens={max(labels)}')
    assert names(free) == names(capped)
    most = {}
    for name, spec in {'free': free, 'capped': capped}.items():
        for batch in spec.dataloader:
            microbatches = spec.split_batch(batch, 16)
            assert len(microbatches) == len(batch.microbatches), 'cut as planned'
            counts = [int((microbatch['labels'] != -100).sum()) for microbatch in microbatches]
            most[name] = max(most.get(name, 0), *counts)
    assert most['capped'] <= max(labels) < most['free']


MISTAKES = [
    (['loader.global_batch_tokens=99', 'loader.regroup_ranks=false'], 'must be on for `loader.global_batch_tokens`'),
    (['loader.global_batch_size=[[0,4]]', 'microbatching.regroup=false'], 'must be on for a schedule of'),
    (['loader.global_batch_size=[[1,4]]'], r'`loader.global_batch_size`.* or a list of \(start, size\)'),
    (
        ['loader.global_batch_size=[[0,4],[8ba,8]]', 'trainer.max_duration=2ep'],
        r'must be in one of the units batch \(ba\), sample \(sp\), token \(tok\), got: 2ep',
    ),
    (['loader.global_batch_tokens=0'], '`loader.global_batch_tokens` must be greater than or equal to 1'),
    (['dataset.parts={a: {weight: 1}, b: {}}'], r"must all have a `weight`.*got: {'a': {'weight'}, 'b': set\(\)}"),
    (
        ['dataset.parts={a: {weight: 1}, b: {weight: 2, epochs: 1}}'],
        "'b': {'epochs', 'weight'}|'b': {'weight', 'epochs'}",
    ),
    (['dataset.parts={a: {loss_share: 0.3}, b: {weight: 1}}'], "'a': {'loss_share'}, 'b': {'weight'}"),
    (['dataset.parts={a: {loss_share: 0.3}, b: {loss_share: 0.6}}'], '`loss_share` .* add up to 1, got: 0.9'),
    (['dataset.parts={a: {loss_share: 1}}', 'dataset.loss_shares_by=weights'], 'needs a `loss_share`.*column'),
    (['dataset.parts={a: {loss_share: 1}}', 'dataset.loss_shares_by=luck'], '`dataset.loss_shares_by` must be .*luck'),
    (['dataset.loss_shares_by=weights'], '`dataset` has no key loss_shares_by'),
    (['dataset.parts={a: {epochs: 0}}'], '`dataset.parts.a.epochs` must be greater than 0, got: 0'),
    (['dataset.parts={a: {epochs: often}}'], "`dataset.parts.a.epochs` must be a valid number, got: 'often'"),
    (['dataset.parts={a: {epoch: 1}}'], '`dataset.parts.a` has no key epoch. Did you mean epochs'),
    (['dataset.parts={a: {name: lava}}'], '`dataset.parts.a.name` has no dataset lava. Did you mean llava'),
    (['dataset.parts=[1]'], '`dataset.parts` must be a mapping'),
    ([PARTS, 'loader.regroup_ranks=false'], 'must be on for shares of `dataset.parts`, got: off'),
    (['loader.modality=per_step', 'microbatching.regroup=false'], 'must be on for `loader.modality: per_step`'),
    (
        ['microbatching.cost={lunch: 3}'],
        '`microbatching.cost` has no key lunch. Did you mean launch',
    ),
    (['microbatching.cost={launch: -3}'], '`microbatching.cost`: `launch` must be finite and not negative, got: -3'),
    (['loader.modality=video'], "`loader.modality` must be 'mixed' or 'per_step', got: 'video'"),
]
VIDEO_MISTAKES = [
    (['dataset.video.num_frame=8'], '`dataset.video` has no key num_frame. Did you mean num_f'),
    (['dataset.video=8'], '`dataset.video` must be a mapping, got: 8'),
    (['dataset.video.fps=often'], "`dataset.video.fps` must be a valid number, got: 'often'"),
    (['dataset.video={fps: 1, num_frames: 8}'], '`dataset.video`: `fps` must be left out beside `num_frames`'),
    (['dataset.eval={path: b.json, video: {fps: 0}}'], '`dataset.eval.video`: `fps` must be a positive number'),
    (
        ['dataset.parts={films: {path: b.json, video: {max_frames: 2.5}}}', 'dataset.path=null'],
        '`dataset.parts.films.video.max_frames` must be a valid integer',
    ),
]


@pytest.mark.parametrize(
    ('file', 'overrides', 'message'),
    [*(('digits', *one) for one in MISTAKES), *(('llava_json', *one) for one in VIDEO_MISTAKES)],
)
def test_mistakes_are_named_by_their_key(file, overrides, message):
    path = ['dataset.path=a.json'] if file == 'llava_json' else []
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(ROOT / 'yamls' / f'{file}.yaml', [*path, *overrides]), num_ranks=1)


class _NeedsAPackage(torch.utils.data.Dataset):
    def __init__(self, processor, **arguments):
        import no_such_package  # noqa: F401 # pyright: ignore


class _HasABug(torch.utils.data.Dataset):
    def __init__(self, processor, **arguments):
        from torch import no_such_name  # noqa: F401 # pyright: ignore


def test_package_that_a_dataset_needs():
    config = load_config(ROOT / 'yamls' / 'digits.yaml', [f'dataset.name={__name__}.{_NeedsAPackage.__name__}'])
    with pytest.raises(ConfigError, match="`dataset`: ModuleNotFoundError: No module named 'no_such_package'"):
        source_of(config).build_dataset(None)


def test_bug_of_a_dataset_is_kept():
    config = load_config(ROOT / 'yamls' / 'digits.yaml', [f'dataset.name={__name__}.{_HasABug.__name__}'])
    with pytest.raises(ConfigError, match=r'`dataset`: ImportError: .*no_such_name') as caught:
        source_of(config).build_dataset(None)
    assert isinstance(caught.value.__cause__, ImportError)
