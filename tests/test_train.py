# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The training program as a user starts it, with models small enough for seconds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from PIL import Image

from composer_tokacc.train import main
from tests.support.clips import write_media_folder
from tests.support.family_media import MEDIA
from tests.support.launch import ROOT, launch, launch_program
from tests.support.llava_folder import write_llava_folder
from tests.support.programs import DIGITS, QUIET, TINY_DIGITS, TINY_MODEL

MIXTURE = str(ROOT / 'yamls' / 'llava_mixture.yaml')
LLAVA = str(ROOT / 'yamls' / 'llava_json.yaml')


def train(*arguments: str, folder: Path) -> dict:
    assert main([*arguments, f'report.folder={folder}']) == 0
    return json.loads((folder / 'result.json').read_text())


def launch_training(*arguments: str, folder: Path, ranks: int) -> dict:
    launch_program('composer_tokacc.train', *arguments, f'report.folder={folder}', ranks=ranks)
    return json.loads((folder / 'result.json').read_text())


def checkpoint(path: Path) -> dict:
    return torch.load(path, weights_only=False)['state']


def assert_equal_bitwise(actual, expected, path='state'):
    assert type(actual) is type(expected), path
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f'{path}: {text}')
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal_bitwise(actual[key], value, f'{path}/{key}')
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            assert_equal_bitwise(actual[index], value, f'{path}/{index}')
    else:
        assert actual == expected, path


def tiny_llava(folder: Path, path: Path) -> list[str]:
    return [
        LLAVA,
        f'dataset.path={path}',
        f'dataset.image_dir={path.parent / "images"}',
        'dataset.processor.vocab_size=300',
        *TINY_MODEL,
        *QUIET,
        'loader.global_batch_size=4',
        'scheduler.t_warmup=2ba',
        'trainer.max_duration=2ep',
        f'trainer.save_folder={folder}/checkpoints',
    ]


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory):
    """Twelve steps in one go, with checkpoints after every fourth."""
    folder = tmp_path_factory.mktemp('unbroken')
    result = train(
        DIGITS, *TINY_DIGITS, f'trainer.save_folder={folder}/checkpoints', 'trainer.save_interval=4ba', folder=folder
    )
    return folder, result


def test_run_writes_its_result(unbroken):
    _, result = unbroken
    assert (result['steps'], result['epochs'], result['samples']) == (12, 2, 96)
    assert result['loss']['last'] < result['loss']['first']
    assert 0 <= result['eval']['MaskedAccuracy'] <= 1
    assert result['eval']['LanguageCrossEntropy'] > 0
    assert len(result['answers']) == 2
    assert all(answer['question'] and answer['expected'] for answer in result['answers'])
    monitor = result['token_monitor']
    assert 0 < monitor['padding_ratio'] < monitor['device_batch_padding_ratio'] < 1
    assert monitor['sample_weighting_error'] > 0


def test_resume_in_mid_epoch_is_bitwise(unbroken, tmp_path):
    folder, _ = unbroken
    saved = folder / 'checkpoints' / 'ep1-ba8-rank0.pt'
    assert checkpoint(saved)['timestamp']['Timestamp']['batch_in_epoch'] == 3
    train(
        DIGITS,
        *TINY_DIGITS,
        f'trainer.load_path={saved}',
        f'trainer.save_folder={tmp_path}/checkpoints',
        folder=tmp_path,
    )
    resumed = checkpoint(tmp_path / 'checkpoints' / 'ep2-ba12-rank0.pt')
    straight = checkpoint(folder / 'checkpoints' / 'ep2-ba12-rank0.pt')
    start = checkpoint(saved)
    assert_equal_bitwise(resumed['model'], straight['model'])
    assert_equal_bitwise(resumed['optimizers'], straight['optimizers'])
    assert any(not torch.equal(start['model'][key], value) for key, value in straight['model'].items())


def test_finished_run_writes_the_result_again(tmp_path):
    command = [
        DIGITS,
        *TINY_DIGITS,
        'trainer.max_duration=2ba',
        'trainer.eval_interval=1ba',
        'trainer.autoresume=true',
        f'trainer.save_folder={tmp_path}/checkpoints',
    ]
    first = train(*command, folder=tmp_path)
    page = (tmp_path / 'report.html').read_text()
    again = train(*command, folder=tmp_path)
    assert first['loss']
    assert first['token_monitor']
    for key in ('steps', 'samples', 'loss', 'eval', 'token_monitor', 'sources'):
        assert again[key] == first[key]
    assert (tmp_path / 'report.html').read_text().count('<polyline') == page.count('<polyline') > 0
    assert (tmp_path / 'report.html').read_text().count('class="answer"') == page.count('class="answer"') > 0


def test_a_dry_run_writes_nothing(tmp_path):
    folders = [f'report.folder={tmp_path}/report', f'trainer.save_folder={tmp_path}/checkpoints']
    assert main([DIGITS, *TINY_DIGITS, 'dry_run=true', *folders]) == 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / 'report').write_text('')
    assert main([DIGITS, *TINY_DIGITS, 'dry_run=true', f'report.folder={tmp_path}/report/x']) == 2


def test_a_usage_error_comes_before_torch():
    code = (
        'import runpy, sys\n'
        'sys.modules["torch"] = None\n'  # its import fails
        'sys.argv = ["train"]\n'
        'runpy.run_module("composer_tokacc.train", run_name="__main__")'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert 'FILE.yaml' in done.stderr


def test_resume_after_killed_write(unbroken, tmp_path, capsys):
    folder = tmp_path / 'checkpoints'
    command = [
        DIGITS,
        *TINY_DIGITS,
        'trainer.autoresume=true',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={folder}',
    ]
    train(*command, 'trainer.max_duration=3ba', folder=tmp_path)
    whole = (folder / 'ep0-ba3-rank0.pt').read_bytes()
    (folder / 'ep0-ba4-rank0.pt').write_bytes(whole[: len(whole) // 2])  # being written; `latest` is the one before
    (folder / 'ep0-ba3-rank0.pt').write_bytes(whole[: len(whole) // 2])  # a disk that lost what it had promised
    capsys.readouterr()
    result = train(*command, folder=tmp_path)
    assert f'going on from {folder}/ep0-ba2-rank0.pt: {folder}/ep0-ba3-rank0.pt is damaged' in capsys.readouterr().err
    assert (result['steps'], result['first_step']) == (12, 2)
    straight = checkpoint(unbroken[0] / 'checkpoints' / 'ep2-ba12-rank0.pt')
    assert_equal_bitwise(checkpoint(folder / 'ep2-ba12-rank0.pt')['model'], straight['model'])


@pytest.mark.slow
def test_run_killed_while_it_saves(unbroken, tmp_path, capsys):
    """The next run takes the checkpoint before the half written one, and writes that one again."""
    config = yaml.safe_load(Path(DIGITS).read_text())
    config['callbacks']['tests.support.killer.KillWhileSaving'] = {'batch': 3}
    deadly = tmp_path / 'deadly.yaml'
    deadly.write_text(yaml.safe_dump(config))
    folder = tmp_path / 'checkpoints'
    options = [
        *TINY_DIGITS,
        'trainer.autoresume=true',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={folder}',
    ]
    command = [sys.executable, '-m', 'composer_tokacc.train', str(deadly), *options, f'report.folder={tmp_path}']
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    half_written = folder / 'ep0-ba3-rank0.pt'
    assert 0 < half_written.stat().st_size < (folder / 'ep0-ba2-rank0.pt').stat().st_size
    result = train(DIGITS, *options, folder=tmp_path)
    assert f'going on from {folder}/ep0-ba2-rank0.pt' in capsys.readouterr().err
    assert (result['steps'], result['first_step']) == (12, 2)
    assert checkpoint(half_written)['timestamp']['Timestamp']['batch'] == 3
    straight = checkpoint(unbroken[0] / 'checkpoints' / 'ep2-ba12-rank0.pt')
    assert_equal_bitwise(checkpoint(folder / 'ep2-ba12-rank0.pt')['model'], straight['model'])


def test_text_only_run_resumes_bitwise(tmp_path):
    path = write_llava_folder(tmp_path / 'data', 32)
    path.write_text(json.dumps([record for record in json.loads(path.read_text()) if 'image' not in record]))
    straight, broken = ([*tiny_llava(tmp_path / name, path), 'trainer.save_interval=1ba'] for name in ('a', 'b'))
    train(*straight, folder=tmp_path / 'a')
    train(*broken, 'trainer.max_duration=1ba', folder=tmp_path / 'b')
    assert train(*broken, folder=tmp_path / 'b')['first_step'] == 1
    one, other = (checkpoint(tmp_path / name / 'checkpoints' / 'ep1-ba4-rank0.pt') for name in ('a', 'b'))
    assert_equal_bitwise(other['model'], one['model'])
    assert_equal_bitwise(other['optimizers'], one['optimizers'])


def test_picture_is_drawn(tmp_path):
    arguments = [argument for argument in TINY_DIGITS if not argument.startswith('report.picture')]
    train(DIGITS, *arguments, 'trainer.max_duration=1ba', 'report.picture=true', folder=tmp_path)
    with Image.open(tmp_path / 'result.png') as picture:
        assert len(set(picture.convert('L').resize((64, 64)).getdata())) > 10


def test_llava_json_trains_with_shipped_yaml(tmp_path):
    path = write_llava_folder(tmp_path / 'data', num_samples=18)
    result = train(*tiny_llava(tmp_path, path), f'dataset.eval.path={path}', folder=tmp_path)
    # 18 samples, 4 a step, the last step of an epoch smaller; nothing dropped.
    assert (result['steps'], result['samples']) == (10, 36)
    assert result['loss']['last'] < result['loss']['first']
    assert result['eval']['LanguageCrossEntropy'] < result['loss']['first']
    assert result['skipped'] == []


def tiny_mixture(folder: Path) -> list[str]:
    parts = {'captions': 14, 'documents': 3}
    paths = {name: write_llava_folder(folder / name, num_samples=size) for name, size in parts.items()}
    given = [f'dataset.parts.{name}.path={path}' for name, path in paths.items()]
    given += [f'dataset.parts.{name}.image_dir={path.parent / "images"}' for name, path in paths.items()]
    tiny = [argument for argument in tiny_llava(folder, folder)[3:] if not argument.startswith('scheduler')]
    return [MIXTURE, *given, *tiny]


def test_mixture_of_two_files(tmp_path):
    result = train(*tiny_mixture(tmp_path), 'loader.modality=per_step', folder=tmp_path)
    # 14 + 2 x 3 samples an epoch, 4 a step.
    assert (result['steps'], result['samples']) == (10, 40)
    assert result['loss']['last'] < result['loss']['first']


@pytest.mark.slow
def test_two_ranks_with_unmixed_steps(tmp_path):
    # Plain SGD: a step without any image leaves the vision tower without a gradient on one rank and with a zero one on
    # several, which weight decay and momentum tell apart.
    arguments = [*tiny_mixture(tmp_path), 'loader.modality=per_step', 'optimizer={name: sgd, lr: 0.1}']
    one = train(*arguments, f'trainer.save_folder={tmp_path}/one', folder=tmp_path / 'one')
    two = launch_training(*arguments, f'trainer.save_folder={tmp_path}/two', folder=tmp_path / 'two', ranks=2)
    assert two['loss']['first'] == pytest.approx(one['loss']['first'], rel=1e-6)
    assert two['loss']['last'] == pytest.approx(one['loss']['last'], rel=1e-4)
    assert two['samples'] == one['samples']


def test_bad_samples_stop_or_are_counted(tmp_path, capsys):
    path = write_llava_folder(tmp_path / 'data', num_samples=12)
    (path.parent / 'images' / '0_0.png').write_bytes(b'not an image')
    command = tiny_llava(tmp_path, path)
    assert main([*command, 'dataset.on_error=raise']) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error:')]
    assert len(said) == 1
    assert 'sample "s0"' in said[0]
    assert '0_0.png' in said[0]
    result = train(*command, 'dataset.on_error=skip', 'dataset.num_workers=0', folder=tmp_path)
    assert 'skipped 1 of 12 samples' in result['skipped'][0]
    assert result['samples'] == 2 * 11
    assert 'skipped 1 of 12 samples' in capsys.readouterr().out


def test_missing_data_is_one_line(tmp_path, capsys):
    assert main([LLAVA, f'dataset.path={tmp_path}/nothing.json', *QUIET]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith('error:')
    assert 'nothing.json' in said


def test_training_set_smaller_than_a_batch(capsys):
    assert main([DIGITS, *TINY_DIGITS, 'dataset.num_samples=7']) == 2
    assert 'got: 8 > 7 samples. Lower it or set drop_last=False' in capsys.readouterr().err


def test_stock_accumulation_of_the_same_data(tmp_path):
    config = yaml.safe_load(Path(DIGITS).read_text())
    del config['algorithms']['token_accumulation']
    file = tmp_path / 'stock.yaml'
    file.write_text(yaml.safe_dump(config))
    plain = ['microbatching.regroup=false', 'trainer.max_duration=3ba']
    stock = train(str(file), *TINY_DIGITS, *plain, folder=tmp_path / 'stock')
    exact = train(DIGITS, *TINY_DIGITS, *plain, folder=tmp_path / 'exact')
    whole = train(
        DIGITS, *TINY_DIGITS, *plain, 'microbatching.device_train_microbatch_size=8', folder=tmp_path / 'whole'
    )
    # The logged loss of the first step is a mean over microbatches: only the exact one is that of the whole batch.
    assert exact['loss']['first'] == pytest.approx(whole['loss']['first'], rel=1e-6)
    assert stock['loss']['first'] != pytest.approx(whole['loss']['first'], rel=1e-4)


@pytest.mark.slow
def test_two_ranks_train_as_one(unbroken, tmp_path):
    _, one = unbroken
    two = launch_training(DIGITS, *TINY_DIGITS, f'trainer.save_folder={tmp_path}/checkpoints', folder=tmp_path, ranks=2)
    assert two['loss']['first'] == pytest.approx(one['loss']['first'], rel=1e-6)
    assert two['loss']['last'] == pytest.approx(one['loss']['last'], rel=1e-4)
    assert two['samples'] == one['samples']
    # Evaluation leaves out what the sampler repeats to give both ranks as many.
    assert two['eval']['LanguageCrossEntropy'] == pytest.approx(one['eval']['LanguageCrossEntropy'], rel=1e-4)


@pytest.mark.slow
def test_mixture_of_media_survives_a_kill(tmp_path):
    """Three files of three formats, two epochs on two ranks; resumed, it ends with the weights of the unbroken run."""
    pytest.importorskip('av')
    case = MEDIA['qwen2_vl']()
    for part in (case.processor, case.model):
        part.save_pretrained(tmp_path / 'base')
    path = write_llava_folder(tmp_path / 'captions', 24)
    path.write_text(json.dumps([record for record in json.loads(path.read_text()) if 'image' in record]))
    (tmp_path / 'films').mkdir()
    films = write_media_folder(tmp_path / 'films', [('video',), ('video', 'image'), (), ('video',)] * 3)
    turns = [
        [{'role': 'user', 'content': f'Say {n}.'}, {'role': 'assistant', 'content': 'b' * n}] for n in range(1, 11)
    ]
    Dataset.from_dict({'messages': turns}).to_parquet(tmp_path / 'text.parquet')
    config = yaml.safe_load(Path(MIXTURE).read_text())
    config['model'] = {'pretrained': str(tmp_path / 'base')}
    config['dataset'] = {
        'name': 'llava',
        'video': {'fps': 3, 'max_frames': 8},
        'parts': {
            'captions': {'path': str(path), 'image_dir': str(path.parent / 'images')},
            'films': {'path': str(films), 'epochs': 1},
            'text': {'path': str(tmp_path / 'text.parquet'), 'epochs': 2},
        },
    }
    config['loader'] = {'global_batch_size': 8, 'drop_last': True}
    config['trainer'] |= {'max_duration': '2ep', 'autoresume': True, 'save_interval': '2ba', 'device': 'cpu'}
    calm = tmp_path / 'calm.yaml'
    calm.write_text(yaml.safe_dump(config))
    config['callbacks']['tests.support.killer.KillRank'] = {'rank': 1, 'batch': 7}
    deadly = tmp_path / 'deadly.yaml'
    deadly.write_text(yaml.safe_dump(config))
    launch_training(str(calm), *QUIET, f'trainer.save_folder={tmp_path}/straight', folder=tmp_path, ranks=2)
    broken = [*QUIET, f'trainer.save_folder={tmp_path}/broken']
    done = launch(['-m', 'composer_tokacc.train', str(deadly), *broken, f'report.folder={tmp_path}'], ranks=2)
    assert 'Rank 1 crashed with exit code -9' in done.stderr
    assert launch_training(str(calm), *broken, folder=tmp_path, ranks=2)['first_step'] == 6
    last = [(tmp_path / name / 'latest-rank0.pt').resolve() for name in ('broken', 'straight')]
    assert last[0].name == last[1].name
    resumed, expected = (checkpoint(file)['model'] for file in last)
    assert_equal_bitwise(resumed, expected)


@pytest.mark.slow
def test_watched_run_and_dry_run(tmp_path, capsys):
    parts = (
        'dataset.parts={scans: {num_samples: 30, loss_share: 0.7}, more: {num_samples: 10, seed: 5, loss_share: 0.3}}'
    )
    watched = [
        DIGITS,
        *TINY_DIGITS,
        parts,
        'callbacks.token_monitor.device_tflops=0.05',
        'microbatching.rehearse=heaviest',
    ]
    assert main([*watched, 'dry_run=true', f'report.folder={tmp_path / "dry"}']) == 0
    said = capsys.readouterr().err
    assert 'rehearsed the heaviest microbatches of 12 steps' in said
    assert 'dry run: all but training went well; an epoch has 5 steps' in said
    assert not (tmp_path / 'dry').exists()
    result = train(*watched, folder=tmp_path / 'run')
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert result['token_monitor']['mfu'] == pytest.approx(
        np.mean([line['token_monitor/mfu'] for line in lines if 'token_monitor/mfu' in line])
    )
    assert result['sources'].keys() == {'scans', 'more'}
    assert sum(row['weight'] for row in result['sources'].values()) == pytest.approx(1)
    assert result['sources']['scans']['weight'] == pytest.approx(0.7, abs=0.1)
    assert 'Model FLOPs utilization' in (tmp_path / 'run' / 'report.html').read_text()
