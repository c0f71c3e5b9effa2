# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The YAML file: what it builds, what is refused, and whole runs of the programs."""

from __future__ import annotations

import json

import pytest

streaming = pytest.importorskip('streaming')

from composer_tokacc.data import LlavaDataset
from composer_tokacc.data.lengths import length_table
from composer_tokacc.data.to_mds import write_shards
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs import ConfigError, load_config
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
    check_config(config, num_ranks=1)
    source = source_of(config)
    processor = source.build_processor()
    dataset = source.build_dataset(processor, is_eval=is_eval)
    sample = next(dataset[k] for k in range(dataset.size) if dataset[k]['num_images'][0])
    return source.build_loader(dataset, processor, BatchLayout.infer(sample), is_eval=is_eval)


def names(spec):
    return sorted(name for batch in spec.dataloader for name in batch['sample_ids'])


EVERY = sorted(f's{k}' for k in range(20))


def test_exchange_changes_no_global_batch(shards):
    exchanging = build(config_of(shards)).dataloader
    plain = build(config_of(shards, 'loader.exchange_ranks=false', 'microbatching.slot_tokens=null')).dataloader
    assert isinstance(exchanging, ExchangingDataLoader)
    assert type(plain) is streaming.StreamingDataLoader
    batches = [[sorted(batch['sample_ids']) for batch in loader] for loader in (exchanging, plain)]
    assert batches[0] == batches[1]
    assert [len(batch) for batch in batches[0]] == [8, 8, 4]
    assert exchanging.batch_size == plain.batch_size == 8


def test_held_out_set_has_its_shards(shards):
    spec = build(config_of(shards, f'dataset.eval.local={shards}/held_out'), is_eval=True)
    assert type(spec.dataloader) is streaming.StreamingDataLoader
    assert [name for batch in spec.dataloader for name in batch['sample_ids']] == [f's{k}' for k in range(20)]
    spec = build(
        config_of(shards, f'dataset.local={shards}', 'dataset.split=train', 'dataset.eval.split=held_out'), is_eval=True
    )
    assert names(spec) == EVERY


def test_streams_of_a_mapping(shards):
    streams = f'{{a: {{local: {shards}/train, proportion: 3}}, b: {{local: {shards}/held_out, proportion: 1}}}}'
    config = config_of(shards, 'dataset.local=null', f'dataset.streams={streams}', 'dataset.epoch_size=40')
    assert len(names(build(config))) == 40


def test_measuring_sees_every_sample(shards, tmp_path):
    config = config_of(shards, 'dataset.epoch_size=10')
    source = source_of(config)
    processor = source.build_processor()
    dataset = source.build_dataset(processor)
    assert len(dataset) == 10
    expected = LlavaDataset(tmp_path / 'train' / 'data.json', processor, image_dir=tmp_path / 'train' / 'images')
    everything = source.by_index(dataset)
    tables = [length_table(each, processor, folder=tmp_path / 'lengths') for each in (everything, expected)]
    assert tables[0].lengths.tolist() == tables[1].lengths.tolist()
    assert len(tables[0]) == 20


def test_run_takes_over_killed_runs_folder(shards, tmp_path):
    config = config_of(shards, f'dataset.remote={shards}/train', f'dataset.local={tmp_path}/cache')
    killed = open_plain(config)  # its shared memory looks as that of a run that was killed before it read anything
    with pytest.raises(ValueError, match='Reused local directory'):
        open_plain(config)
    assert names(build(config)) == EVERY
    del killed


def open_plain(config):
    return streaming.StreamingDataset(local=config.dataset['local'], remote=config.dataset['remote'], batch_size=8)


MISTAKES = {
    'dataset.sufle_seed=1': '`dataset` has no key sufle_seed. Did you mean shuffle_seed?',
    'dataset.shuffle=true': '`dataset` has no key shuffle',
    'dataset.local=null': '`dataset` must name its shards by one of local, remote, streams',
    'dataset.streams=[1]': '`dataset.streams` must be a mapping, got: [1]',
    'dataset.streams={a: {locl: x}}': '`dataset.streams.a` has no key locl. Did you mean local?',
    'dataset.eval.num_canonical_nodes=2': '`dataset.eval` must name shards of its own',
    'microbatching.regroup=false': '`loader.exchange_ranks` needs `microbatching.regroup`',
    'dataset.replication=2': '`loader.exchange_ranks` must be false with `dataset.replication`',
    'dataset.name=llava_streeming': 'llava_streeming. Did you mean llava_streaming?',
}


@pytest.mark.parametrize('override', MISTAKES)
def test_mistakes_are_said_in_one_line(shards, override):
    with pytest.raises(ConfigError) as caught:
        check_config(config_of(shards, override), num_ranks=2)
    assert MISTAKES[override] in str(caught.value)
    assert '\n' not in str(caught.value)


def test_exchange_needs_a_slot_width(shards):
    config = config_of(shards, 'microbatching.slot_tokens=null', 'dataset.max_length=null')
    with pytest.raises(ConfigError, match='needs the width of a slot before a batch is read'):
        check_config(config, num_ranks=2)
    config.microbatching.device_train_microbatch_size = 'suggest'
    check_config(config, num_ranks=2)


def test_dataset_smaller_than_a_batch(shards):
    config = config_of(shards, 'loader.drop_last=true', 'loader.global_batch_size=32')
    with pytest.raises(ConfigError, match='got: 32 > 20 samples'):
        build(config)


@pytest.mark.slow
def test_program_trains_evaluates_and_resumes(shards, tmp_path):
    arguments = [
        '-m',
        'composer_tokacc.train',
        str(FILE),
        f'dataset.local={shards}/train',
        *SMALL,
        f'dataset.eval.local={shards}/held_out',
        f'trainer.save_folder={tmp_path}/checkpoints',
        f'report.folder={tmp_path}/report',
        'trainer.save_interval=1ba',
        'trainer.progress_bar=false',
    ]
    results = []
    for duration in ('4ba', '3ep'):
        done = launch([*arguments, f'trainer.max_duration={duration}'], ranks=2)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((tmp_path / 'report' / 'result.json').read_text()))
    first, second = results
    assert (first['steps'], second['steps']) == (4, 9)
    assert first['samples'] == 8 + 8 + 4 + 8
    assert second['samples'] == 60


@pytest.mark.slow
def test_verify_with_unequal_ranks(shards):
    done = launch(['-m', 'composer_tokacc.verify', str(FILE), f'dataset.local={shards}/train', *SMALL], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'exact: largest relative gradient error' in done.stdout


@pytest.mark.slow
def test_bad_sample_ends_the_run(shards):
    arguments = [f'dataset.local={shards}/train', *SMALL, 'dataset.max_length=30', 'trainer.save_folder=null']
    done = launch(['-m', 'composer_tokacc.train', str(FILE), *arguments, 'trainer.autoresume=false'], ranks=2)
    assert done.returncode != 0
    assert 'error: sample "s' in done.stderr
    assert '`max_length` must be at least the sample, got: 30 < ' in done.stderr
    assert 'Traceback' not in done.stderr
