# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The YAML file of streaming: its datasets and loaders, its mistakes, and whole runs of the programs."""

from __future__ import annotations

import json

import pytest

streaming = pytest.importorskip('streaming')

from composer_tokacc.data import LlavaDataset
from composer_tokacc.data.lengths import length_table
from composer_tokacc.data.to_mds import write_shards
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs import ConfigError, load_config
from composer_tokacc.programs.build import build_parts
from composer_tokacc.programs.checkpoints import SameData
from composer_tokacc.programs.config_checks import check_config
from composer_tokacc.programs.sources import source_of
from composer_tokacc.sampling import ExchangingDataLoader
from tests.support.launch import ROOT, launch
from tests.support.llava_folder import write_llava_folder

FILE = ROOT / 'yamls' / 'llava_streaming.yaml'
SMALL = [
    'model.config.vision_config={model_type: clip_vision_model, image_size: 32, patch_size: 16, hidden_size: 16, '
    'intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}',
    'model.config.text_config={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, '
    'num_attention_heads: 2, num_key_value_heads: 2}',
    'dataset.processor.vocab_size=300',
    'loader.global_batch_size=8',
    'microbatching.slot_tokens=160',
    'trainer.device=cpu',
]


@pytest.fixture
def shards(tmp_path):
    for name, seed in (('train', 0), ('held_out', 1)):
        path = write_llava_folder(tmp_path / name, 20, seed=seed)
        write_shards(path, path.parent / 'images', tmp_path / 'shards' / name, size_limit='16kb')
    return tmp_path / 'shards'


def config_of(shards, *overrides):
    return load_config(FILE, [f'dataset.local={shards}/train', *SMALL, *overrides])


def build(config, *, is_eval=False):
    """Returns the loader that the programs would train or evaluate with."""
    check_config(config, num_ranks=1)
    source = source_of(config)
    dataset = source.eval_dataset if is_eval else source.train_dataset
    sample_with_image = dataset[0]  # by index, which begins no epoch
    layout = BatchLayout.infer(sample_with_image)
    spec = source.build_loader(layout, is_eval=is_eval)
    return spec.dataloader


def sample_ids_of_batches(loader):
    return [batch['sample_ids'] for batch in loader]


def sample_ids(loader):
    return [name for names in sample_ids_of_batches(loader) for name in names]


SAMPLE_IDS = [f's{index}' for index in range(20)]


def test_exchange_changes_no_global_batch(shards):
    exchanging = build(config_of(shards))
    plain = build(config_of(shards, 'loader.exchange_ranks=false', 'microbatching.slot_tokens=null'))
    assert isinstance(exchanging, ExchangingDataLoader)
    assert type(plain) is streaming.StreamingDataLoader
    assert exchanging.batch_size == plain.batch_size == 8
    batches = [sorted(names) for names in sample_ids_of_batches(exchanging)]
    assert batches == [sorted(names) for names in sample_ids_of_batches(plain)]
    assert [len(names) for names in batches] == [8, 8, 4]


def test_held_out_set_has_its_shards(shards):
    loader = build(config_of(shards, f'dataset.eval.local={shards}/held_out'), is_eval=True)
    assert type(loader) is streaming.StreamingDataLoader
    assert sample_ids(loader) == SAMPLE_IDS
    splits = config_of(shards, f'dataset.local={shards}', 'dataset.split=train', 'dataset.eval.split=held_out')
    assert sorted(sample_ids(build(splits, is_eval=True))) == sorted(SAMPLE_IDS)


def config_of_streams(shards, *overrides, proportion=3):
    first = f'a: {{local: {shards}/train, proportion: {proportion}}}'
    second = f'b: {{local: {shards}/held_out, proportion: 1}}'
    return config_of(shards, 'dataset.local=null', f'dataset.streams={{{first}, {second}}}', *overrides)


def test_streams_of_a_mapping(shards):
    config = config_of_streams(shards, 'dataset.epoch_size=40')
    assert len(sample_ids(build(config))) == 40


def test_streams_take_the_split_of_the_dataset(shards):
    single = config_of(shards)
    split = config_of(
        shards, 'dataset.local=null', 'dataset.split=train', f'dataset.streams={{a: {{local: {shards}}}}}'
    )
    assert list(source_of(split).texts()) == list(source_of(single).texts())
    assert source_of(split).train_dataset.size == 20


@pytest.mark.parametrize('other_stream', ['', ', b: {local: others}'])
def test_other_split_changes_no_stream_with_a_split(shards, other_stream):
    streams = f'dataset.streams={{a: {{local: {shards}, split: train}}{other_stream}}}'
    config = config_of(shards, 'dataset.local=null', streams, 'dataset.eval={split: held_out}')
    with pytest.raises(ConfigError, match='must name shards of its own'):
        check_config(config, num_ranks=1)


def test_other_order_is_not_resumed(shards):
    """With other proportions of the streams, the rest of the epoch would repeat samples and lose others."""

    def same_data(proportion):
        source = source_of(config_of_streams(shards, proportion=proportion))
        return SameData(
            source.train_dataset,
            source.processor,
            adapter={},
            optimizer={},
            batches=None,
            trainer={},
            on_other_data='raise',
        )

    saved = same_data(3).state_dict()
    same_data(3).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r'other order .*\[30, 10\].*\[20, 20\]'):
        same_data(1).load_state_dict(saved)
    older = json.loads(saved['fingerprints'])
    del older['order']  # which earlier releases did not save
    same_data(1).load_state_dict({'fingerprints': json.dumps(older)})


def test_measuring_sees_every_sample(shards, tmp_path):
    """An epoch may have fewer samples than the shards. The length table has all of them."""
    source = source_of(config_of(shards, 'dataset.epoch_size=10'))
    processor = source.processor
    dataset = source.train_dataset
    assert len(dataset) == 10
    train = tmp_path / 'train'
    map_style = LlavaDataset(train / 'data.json', processor, image_dir=train / 'images')
    folder = tmp_path / 'lengths'
    table = length_table(source.samples_of_all_ranks(dataset), processor, folder=folder)
    expected = length_table(map_style, processor, folder=folder)
    assert len(table) == 20
    assert table.lengths.tolist() == expected.lengths.tolist()


MISTAKES = {
    'dataset.sufle_seed=1': '`dataset` has no key sufle_seed. Did you mean shuffle_seed?',
    'dataset.shuffle=true': '`dataset.shuffle` must be left out',
    'dataset.kwargs=1': '`dataset` has no key kwargs',
    'dataset.eval={local: x, processor: {}}': '`dataset.eval` has no key processor',
    'dataset.local=null': 'one of local, remote, streams',
    'dataset.streams=[1]': '`dataset.streams` must be a mapping, got: [1]',
    'dataset.streams={a: {locl: x}}': '`dataset.streams.a` has no key locl. Did you mean local?',
    'dataset.eval.num_canonical_nodes=2': '`dataset.eval` must name shards of its own',
    'microbatching.regroup=false': '`loader.exchange_ranks` needs `microbatching.regroup`',
    'dataset.replication=2': '`dataset.replication` must be 1, got: 2',
    'dataset.replication=two': '`dataset.replication` must be 1',
    'loader.modality=per_step': '`loader.modality` as it is set needs a plan',
    'dataset.name=llava_streeming': 'has no dataset llava_streeming',
}


@pytest.mark.parametrize(('override', 'message'), MISTAKES.items())
def test_mistakes_are_told_in_one_line(shards, override, message):
    with pytest.raises(ConfigError) as raised:
        check_config(config_of(shards, override), num_ranks=2)
    assert message in str(raised.value)
    assert '\n' not in str(raised.value)


def test_exchange_needs_a_slot_width(shards):
    config = config_of(shards, 'microbatching.slot_tokens=null', 'dataset.max_length=null')
    with pytest.raises(ConfigError, match='needs the width of a slot'):
        check_config(config, num_ranks=2)
    config.microbatching.device_train_microbatch_size = 'suggest'
    check_config(config, num_ranks=2)


@pytest.mark.parametrize('overrides', [['loader.global_batch_size=32'], ['dataset.epoch_size=4']])
def test_dataset_smaller_than_a_batch(shards, overrides):
    config = config_of(shards, 'loader.drop_last=true', *overrides)
    with pytest.raises(ConfigError, match='`dataset` must give every rank a batch'):
        build_parts(config)


def run_program(name, shards, *overrides):
    arguments = ['-m', f'composer_tokacc.{name}', str(FILE), f'dataset.local={shards}/train', *SMALL, *overrides]
    return launch(arguments, ranks=2)


@pytest.mark.slow
def test_program_trains_evaluates_and_resumes(shards, tmp_path):
    results = []
    for duration in ('4ba', '3ep'):
        done = run_program(
            'train',
            shards,
            f'dataset.eval.local={shards}/held_out',
            f'report.folder={tmp_path}/report',
            f'trainer.save_folder={tmp_path}/checkpoints',
            'trainer.save_interval=1ba',
            'trainer.progress_bar=false',
            f'trainer.max_duration={duration}',
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((tmp_path / 'report' / 'result.json').read_text()))
    first, resumed = results
    assert first['steps'] == 4
    assert first['samples'] == 8 + 8 + 4 + 8
    assert resumed['steps'] == 9
    assert resumed['samples'] == 60


@pytest.mark.slow
def test_verify_with_unequal_ranks(shards):
    done = run_program('verify', shards)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'exact: largest relative gradient error' in done.stdout


@pytest.mark.slow
def test_bad_sample_ends_the_run(shards):
    done = run_program('train', shards, 'dataset.max_length=30', 'trainer.save_folder=null', 'trainer.autoresume=false')
    assert done.returncode != 0
    assert 'error: sample "s' in done.stderr
    assert '`max_length`' in done.stderr
    assert 'got: 30 < ' in done.stderr
    assert 'Traceback' not in done.stderr
