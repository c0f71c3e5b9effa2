# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Loaders of a config: the regrouping one by default, the stock one if rows must keep their order."""

from __future__ import annotations

import math
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, LlamaConfig

from composer_tokacc.data.processor import train_tokenizer
from composer_tokacc.layout import BatchLayout
from composer_tokacc.planning import CostModel, plan_microbatches
from composer_tokacc.programs import ConfigError, load_config
from composer_tokacc.programs.config_checks import check_config
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sampling import RegroupingDataLoader
from examples.digits import dataset as digits
from tests.data.length_tables import lengths_of
from tests.support.launch import ROOT

DIGITS = ROOT / 'yamls' / 'digits.yaml'
LLAVA = ROOT / 'yamls' / 'llava_json.yaml'


def build(tmp_path, *overrides, is_eval=False):
    """Returns the data spec and the dataset of the digits, 60 samples in global batches of 16."""
    config = load_config(
        DIGITS,
        [
            'dataset.num_samples=60',
            'dataset.eval.num_samples=20',
            'loader.global_batch_size=16',
            f'loader.lengths_folder={tmp_path}',
            *overrides,
        ],
    )
    source = source_of(config)
    dataset = source.eval_dataset if is_eval else source.train_dataset
    sample_with_image = next(sample for sample in dataset if sample['num_images'][0])
    layout = BatchLayout.infer(sample_with_image)
    spec = source.build_loader(layout, is_eval=is_eval)
    return spec, dataset


def num_labels(tensor):
    return int((tensor != -100).sum())


def ids_per_batch(spec):
    return [sorted(batch['sample_ids']) for batch in spec.dataloader]


def rows_per_batch(spec):
    return [len(batch['sample_ids']) for batch in spec.dataloader]


def test_regrouping_changes_no_global_batch(tmp_path):
    regrouped, _ = build(tmp_path)
    stock, _ = build(tmp_path, 'loader.regroup_ranks=false')
    assert isinstance(regrouped.dataloader, RegroupingDataLoader)
    assert not isinstance(stock.dataloader, RegroupingDataLoader)
    assert ids_per_batch(regrouped) == ids_per_batch(stock)
    assert len(regrouped.dataloader) == len(stock.dataloader) == 3
    assert regrouped.dataloader.batch_size == 16


def test_budget_of_rows_of_longest_sample(tmp_path):
    spec, dataset = build(tmp_path, 'microbatching.device_train_microbatch_size=2')
    sizes = []
    for step, batch in enumerate(spec.dataloader):
        plan = spec.dataloader.batch_sampler.plan(step)
        planned_rows = [len(microbatch.indices) for microbatch in plan.ranks[0]]
        microbatches = spec.split_batch(spec.batch_transforms(batch), 2)
        assert [len(microbatch['input_ids']) for microbatch in microbatches] == planned_rows
        sizes += [microbatch['input_ids'].numel() for microbatch in microbatches]
    longest = max(lengths_of(dataset))
    assert longest < max(sizes) <= 2 * longest


def test_plans_use_the_cost_of_patches(tmp_path):
    cost = 'microbatching.cost={vision_per_image: 3, vision_per_patch: 2, vision_per_square: 5, launch: 1}'
    spec, dataset = build(tmp_path, cost, 'microbatching.device_train_microbatch_size=2')
    sampler = spec.dataloader.batch_sampler
    num_images = np.array([sample['num_images'][0] for sample in dataset])
    # Each image is one patch.
    vision_cost = 3.0 * (num_images > 0) + 2.0 * num_images + 5.0 * num_images**2
    lengths = np.array(lengths_of(dataset))
    for step in range(len(sampler)):
        window = sampler.window(step)
        expected = plan_microbatches(
            lengths[window],
            num_ranks=1,
            max_tokens=sampler.rows.options.max_tokens,
            image_tokens=num_images[window],
            vision_cost=vision_cost[window],
            cost=CostModel(launch=1.0),
        )
        plan = sampler.plan(step)
        for microbatch, expected_microbatch in zip(plan.ranks[0], expected.ranks[0], strict=True):
            assert microbatch.indices == expected_microbatch.indices
            assert microbatch.cost == pytest.approx(expected_microbatch.cost)


def most_image_tokens(spec, token_id):
    """Returns the most image tokens of a planned microbatch."""
    most = 0
    for batch in spec.dataloader:
        for microbatch in batch.microbatches:
            most = max(most, int((microbatch['input_ids'] == token_id).sum()))
    return most


def test_image_cap_of_plans_and_split(tmp_path):
    token_id = source_of(load_config(DIGITS)).processor.image_token_id
    free, dataset = build(tmp_path)
    cap = max(int((sample['input_ids'] == token_id).sum()) for sample in dataset)
    capped, _ = build(tmp_path, f'microbatching.max_image_tokens={cap}')
    assert most_image_tokens(free, token_id) > cap
    assert 0 < most_image_tokens(capped, token_id) <= cap
    assert capped.split_batch.__self__._split.options.max_image_tokens == cap


class Pairs:
    """A dataset of a user, with arguments that YAML has no values for, and one with the name of a key of parts."""

    def __init__(self, path: Path, pairs: list[tuple[int, int]], processor: set[str], weight: float = 0.0):
        self.arguments = path, pairs, processor, weight

    @staticmethod
    def build_processor(words: set[str]) -> set[str]:
        return words


def test_values_that_yaml_does_not_have(tmp_path):
    file = tmp_path / 'pairs.yaml'
    file.write_text(
        f'dataset: {{name: {__name__}.Pairs, path: data.json, pairs: [[1, 2]], weight: -1, processor: {{words: [a]}}}}'
    )
    source = source_of(load_config(file))
    source.check()
    assert source.train_dataset.arguments == (Path('data.json'), [(1, 2)], {'a'}, -1)


class Rows:
    """A dataset of a user, whose ``records`` are not those of LlavaDataset."""

    def __init__(self, processor=None, first: int = 0):
        self.records = [{'number': first}, {'number': first + 1}]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return dict(self.records[index])

    @staticmethod
    def build_processor():
        return None


def test_parts_of_a_user(tmp_path):
    file = tmp_path / 'rows.yaml'
    file.write_text(
        f'dataset: {{name: {__name__}.Rows, parts: {{a: {{}}, b: {{first: 10}}}}}}\n'
        'algorithms: {token_accumulation: {token_weights: column}}\n'
    )
    dataset = source_of(load_config(file)).train_dataset
    first_sample = {'number': 0, 'source': ['a']}
    last_sample = {'number': 11, 'source': ['b']}
    assert dataset[0] == dataset[-4] == first_sample
    assert dataset[3] == dataset[-1] == last_sample
    for index in (4, -5):
        with pytest.raises((IndexError, ValueError)):
            dataset[index]


class WithoutProcessor:
    def __init__(self, path):
        self.path = path


def test_class_without_a_processor_argument():
    name = f'{__name__}.{WithoutProcessor.__name__}'
    source = source_of(load_config(LLAVA, [f'dataset.name={name}', 'dataset.path=data.json']))
    with pytest.raises(ConfigError, match=r'`dataset` .*WithoutProcessor.*processor=None'):
        source.check()


@pytest.mark.parametrize(
    ('override', 'key'),
    [
        ('dataset.path=none.json', 'dataset'),
        ('dataset={path: null, parts: {birds: {path: none.json}}}', 'dataset.parts.birds'),
    ],
)
def test_missing_file_of_a_fresh_model(override, key):
    """Its tokenizer is trained on the texts of the file."""
    source = source_of(load_config(LLAVA, [override]))
    with pytest.raises(ConfigError, match=r'none\.json, which does not exist') as raised:
        _ = source.processor
    assert raised.value.path == key


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('dataset.processor={vocab_sise: 300}', '`dataset.processor` has no key vocab_sise. Did you mean vocab_size'),
        ('dataset.processor.image_size=0', '`image_size` must be a positive integer, got: 0'),
        ('dataset.processor.model_max_length=0', '`model_max_length` must be a positive integer, got: 0'),
        ('model.config.vision_config.image_size=null', '`dataset.processor.image_size` must be a valid integer'),
    ],
)
def test_mistakes_of_processors_are_named(override, message):
    source = source_of(load_config(LLAVA, ['dataset.path=a.json', override]))
    with pytest.raises(ConfigError, match=message):
        _ = source.processor


def test_package_that_a_dataset_lacks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)  # as if scikit-learn were not installed
    # Without the scans that were loaded before.
    monkeypatch.setattr(digits, 'load_scans', digits.load_scans.__wrapped__)
    monkeypatch.setattr(digits, 'split_scans', digits.split_scans.__wrapped__)
    with pytest.raises(ConfigError, match=r"`dataset` cannot be used: .* install 'composer_tokacc\[demo\]'"):
        build(tmp_path)
    with pytest.raises(ConfigError, match=r'`dataset.parts.a` cannot be used: .* install'):
        build(tmp_path, 'dataset.parts={a: {}}')


@pytest.mark.parametrize(('overrides', 'is_eval'), [([], True), (['microbatching.regroup=false'], False)])
def test_stock_sampler_measures_no_lengths(overrides, is_eval, tmp_path):
    spec, _ = build(tmp_path, *overrides, is_eval=is_eval)
    assert not isinstance(spec.dataloader, RegroupingDataLoader)
    assert not list(tmp_path.iterdir())


def test_workers_give_the_same_batches(tmp_path):
    without_workers, _ = build(tmp_path, 'loader.num_workers=0')
    with_workers, _ = build(tmp_path, 'loader.num_workers=2')
    for expected, batch in zip(without_workers.dataloader, with_workers.dataloader, strict=True):
        assert batch['sample_ids'] == expected['sample_ids']
        assert batch.indices == expected.indices
        torch.testing.assert_close(batch['input_ids'], expected['input_ids'])


def test_budget_under_the_longest_sample(tmp_path):
    with pytest.raises(ConfigError, match=r'must be at least the longest sample, got: 1 x 12 < \d+ \(sample \d+\)'):
        build(tmp_path, 'microbatching.device_train_microbatch_size=1', 'microbatching.slot_tokens=12')


PARTS = 'dataset.parts={scans: {num_samples: 40}, more: {num_samples: 6, seed: 5, epochs: 3}}'


def test_parts_are_mixed_by_their_epochs(tmp_path):
    spec, dataset = build(tmp_path, PARTS)
    assert [len(part) for part in dataset.datasets] == [40, 6]
    assert len(list(tmp_path.glob('*.npz'))) == 2
    assert len(spec.dataloader) == (40 + 3 * 6) // 16
    for step in range(3):
        num_more = sum(index >= 40 for index in spec.dataloader.batch_sampler.window(step))
        assert 4 <= num_more <= 6, 'each step has its share of 18 in 58'


def test_order_of_parts_that_are_not_mixed(tmp_path):
    """The guard of resumed runs compares `order`, so it must differ if the batches do."""
    parts = 'dataset.parts={scans: {num_samples: 20}, more: {num_samples: 12, seed: 5}}'
    batches = []
    orders = []
    for override in ('seed=17', 'microbatching.regroup=false'):
        batches.append(ids_per_batch(build(tmp_path, parts, override)[0]))
        orders.append(source_of(load_config(DIGITS, [parts, override])).settings_of_batches())
    assert batches[0] != batches[1]
    assert orders[0] != orders[1]


def test_epochs_of_all_parts(tmp_path):
    """A key next to `parts` counts for each part. The eval set, which is read once, has no such key."""
    parts = 'dataset.parts={scans: {num_samples: 40}, more: {num_samples: 6, seed: 5}}'
    config = load_config(DIGITS, [parts, 'dataset.epochs=2'])
    check_config(config, num_ranks=1)
    spec, _ = build(tmp_path, parts, 'dataset.epochs=2')
    assert len(spec.dataloader) == 2 * (40 + 6) // 16


def test_parts_get_their_share_of_tokens(tmp_path):
    parts = (
        'dataset.parts={scans: {num_samples: 40, loss_share: 0.8}, more: {num_samples: 6, seed: 5, loss_share: 0.2}}'
    )
    spec, dataset = build(tmp_path, parts)
    for index, source in ((0, 'scans'), (39, 'scans'), (40, 'more'), (45, 'more')):
        assert dataset[index]['source'] == [source]
    tokens = {'scans': 0, 'more': 0}
    for epoch in range(9):
        spec.dataloader.batch_sampler.set_epoch(epoch)
        for batch in spec.dataloader:
            for microbatch in batch.microbatches:
                for source, labels in zip(microbatch['source'], microbatch['labels'], strict=True):
                    tokens[source] += num_labels(labels)
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
            for source, labels, weight in rows:
                weights[source] += weight * num_labels(labels)
        assert weights['scans'] / sum(weights.values()) == pytest.approx(0.3, abs=1e-9)


def test_one_modality_a_step(tmp_path):
    spec, _ = build(tmp_path, 'loader.modality=per_step', 'loader.drop_last=false', 'loader.global_batch_size=8')
    steps_with_images = set()
    for batch in spec.dataloader:
        have_images = [count > 0 for count in batch['num_images']]
        assert all(have_images) or not any(have_images)
        steps_with_images.add(have_images[0])
    assert steps_with_images == {True, False}


def test_global_batch_of_so_many_tokens(tmp_path):
    spec, dataset = build(tmp_path, 'loader.global_batch_tokens=600', 'loader.drop_last=false')
    lengths = lengths_of(dataset)
    tokens_per_step = [int(batch['attention_mask'].sum()) for batch in spec.dataloader]
    assert tokens_per_step == spec.dataloader.batch_sampler.window_tokens().tolist()
    assert sum(tokens_per_step) == sum(lengths)
    for tokens in tokens_per_step[:-1]:
        assert abs(tokens - 600) < max(lengths)
    assert len(spec.dataloader) == math.ceil(sum(lengths) / 600)
    # Without a microbatch size one microbatch may hold a whole step of mean length.
    mean_length = sum(lengths) / len(lengths)
    assert spec.dataloader.batch_size == math.ceil(600 / mean_length)
    trained = list(chain(*ids_per_batch(spec)))
    expected = [sample['sample_ids'][0] for sample in dataset]
    assert sorted(trained) == sorted(expected)


def test_a_schedule_of_the_global_batch(tmp_path):
    spec, _ = build(tmp_path, 'loader.global_batch_size=[[0,4],[3ba,16]]', 'loader.drop_last=false')
    assert rows_per_batch(spec) == [4, 4, 4, 16, 16, 16]
    spec.dataloader.batch_sampler.set_epoch(1)
    assert rows_per_batch(spec) == [16, 16, 16, 12]
    assert spec.dataloader.batch_size == 16


def most_loss_tokens(spec):
    """Returns the most labels of a microbatch. Asserts that the split follows the plan."""
    most = 0
    for batch in spec.dataloader:
        microbatches = spec.split_batch(batch, 16)
        assert len(microbatches) == len(batch.microbatches)
        for microbatch in microbatches:
            most = max(most, num_labels(microbatch['labels']))
    return most


def test_loss_cap_reaches_sampler_and_split(tmp_path):
    free, dataset = build(tmp_path)
    cap = max(num_labels(sample['labels']) for sample in dataset)
    capped, _ = build(tmp_path, f'microbatching.max_loss_tokens={cap}')
    assert ids_per_batch(free) == ids_per_batch(capped)
    assert most_loss_tokens(capped) <= cap < most_loss_tokens(free)


MISTAKES = [
    (['loader.global_batch_tokens=99', 'loader.regroup_ranks=false'], 'must be on for `loader.global_batch_tokens`'),
    (['loader.global_batch_size=[[0,4]]', 'microbatching.regroup=false'], 'must be on for `loader.global_batch_size`'),
    (['loader.global_batch_size=[[1,4]]'], r'`loader.global_batch_size`.* or a list of \(start, size\)'),
    (
        ['loader.global_batch_size=[[0,4],[8ba,8]]', 'trainer.max_duration=2ep'],
        r"one of the units \['ba', 'sp', 'tok'\], got: 2ep",
    ),
    (
        ['dataset.parts={a: {weight: 1}, b: {}}'],
        r"must all have a `weight`.*\.a': \['weight'\], .*\.b': \[\]}",
    ),
    (
        ['dataset.parts={a: {weight: 1}, b: {weight: 2, epochs: 1}}'],
        r"\.b': \['epochs', 'weight'\]",
    ),
    (['dataset.parts={a: {loss_share: 0.3}, b: {weight: 1}}'], r"\.a': \['loss_share'\], .*\.b': \['weight'\]"),
    (['dataset.parts={a: {loss_share: 0.3}, b: {loss_share: 0.6}}'], '`loss_share` .* add up to 1, got: 0.9'),
    (['dataset.parts={a: {loss_share: 1}}', 'dataset.loss_shares_by=weights'], 'needs a `loss_share`.*column'),
    (['dataset.parts={a: {loss_share: 1}}', 'dataset.loss_shares_by=luck'], '`dataset.loss_shares_by` must be .*luck'),
    (['dataset.loss_shares_by=weights'], '`dataset` has no key loss_shares_by'),
    (['dataset.parts={a: {epochs: 0}}'], '`dataset.parts.a.epochs` must be greater than 0, got: 0'),
    (['dataset.parts={a: {epoch: 1}}'], '`dataset.parts.a` has no key epoch. Did you mean epochs'),
    (['dataset.parts={a: {name: llava_streaming}}'], '`dataset.parts.a.name` has no dataset llava_streaming'),
    (['dataset.parts={a: {name: lava}}'], '`dataset.parts.a.name` has no dataset lava. Did you mean llava'),
    (['dataset.parts=[1]'], '`dataset.parts` must be a mapping'),
    (['dataset.parts={}'], '`dataset.parts` must have at least 1 item, not 0'),
    ([PARTS, 'loader.regroup_ranks=false'], 'must be on for `dataset.parts.more` as it is set, got: off'),
    (['loader.modality=per_step', 'microbatching.regroup=false'], 'must be on for `loader.modality`'),
    (
        ['microbatching.cost={lunch: 3}'],
        '`microbatching.cost` has no key lunch. Did you mean launch',
    ),
    (
        ['microbatching.cost={launch: -3}'],
        '`microbatching.cost` cannot be used: `launch` must be finite and not negative, got: -3',
    ),
]


@pytest.mark.parametrize(('overrides', 'message'), MISTAKES)
def test_mistakes_are_named_by_their_key(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(DIGITS, overrides), num_ranks=1)


def test_special_tokens_of_a_checkpoint(tmp_path):
    tokenizer = train_tokenizer(['a'], vocab_size=300)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    model = f'model={{pretrained: "{tmp_path}", config: null}}'
    overrides = ['dataset.path=a.json', model, 'dataset.processor={pad_token: "<unk>"}']
    assert source_of(load_config(LLAVA, overrides)).processor.pad_token == '<unk>'


def test_encoder_needs_masked_samples(tmp_path):
    """It sees the tokens that the conversations of `llava` have as labels, so it would only copy them."""
    BertConfig().save_pretrained(tmp_path)
    model = f'model={{pretrained: "{tmp_path}", config: null}}'
    source = source_of(load_config(LLAVA, ['dataset.path=a.json', model]))
    source.processor = None
    with pytest.raises(ConfigError, match=r'masks its samples.*encoder.*llava'):
        _ = source.train_dataset


@pytest.mark.parametrize(
    ('overrides', 'is_eval', 'message'),
    [
        (['dataset.video.num_frame=8'], False, '`dataset` cannot be used: .*num_frame'),
        (['dataset.eval={path: b.json, video: {fps: 0}}'], True, '`dataset.eval` cannot be used: `fps` must be'),
        (
            ['dataset.parts={films: {path: b.json, video: {max_frames: 2.5}}}', 'dataset.path=null'],
            False,
            '`dataset.parts.films` cannot be used: `max_frames` must be',
        ),
    ],
)
def test_mistakes_of_videos_are_named(overrides, is_eval, message):
    source = source_of(load_config(LLAVA, ['dataset.path=a.json', *overrides]))
    source.processor = None
    with pytest.raises(ConfigError, match=message):
        _ = source.eval_dataset if is_eval else source.train_dataset
