# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The training program, started as a user does, with models that train in seconds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from PIL import Image

from composer_tokacc.train import main
from tests.support.clips import write_media_folder
from tests.support.families import MEDIA
from tests.support.launch import ROOT, launch, launch_json, launch_program
from tests.support.llava_folder import write_llava_folder
from tests.support.programs import DIGITS, LLAVA, QUIET, TINY_DIGITS, TINY_LLAVA, UNCHECKED, result_of
from tests.support.training import unchecked_rows

MIXTURE = str(ROOT / 'yamls' / 'llava_mixture.yaml')


def train(*arguments: str, folder: Path) -> dict:
    """Runs the program in this process. Returns the result of the run."""
    assert main([*arguments, f'report.folder={folder}']) == 0
    return result_of(folder)


def launch_training(*arguments: str, folder: Path, ranks: int) -> dict:
    """Runs the program on several ranks. Returns the result of the run."""
    launch_program('composer_tokacc.train', *arguments, f'report.folder={folder}', ranks=ranks)
    return result_of(folder)


def checkpoint(path: Path) -> dict:
    """Returns the state that a checkpoint file holds."""
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


def assert_same_training(result, expected):
    """Another number of ranks adds in another order, and training amplifies the round-off."""
    assert result['loss']['first'] == pytest.approx(expected['loss']['first'], rel=1e-6)
    assert result['loss']['last'] == pytest.approx(expected['loss']['last'], rel=1e-4)
    assert result['samples'] == expected['samples']


def write_yaml(path: Path, config: dict) -> str:
    path.write_text(yaml.safe_dump(config))
    return str(path)


def tiny_llava(folder: Path, path: Path) -> list[str]:
    return [
        LLAVA,
        f'dataset.path={path}',
        f'dataset.image_dir={path.parent / "images"}',
        *TINY_LLAVA,
        'trainer.max_duration=2ep',
        f'trainer.save_folder={folder}/checkpoints',
    ]


class UninterruptedRun(NamedTuple):
    checkpoints: Path
    result: dict
    picture: Path


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    """Twelve steps without a stop, with checkpoints after every fourth."""
    folder = tmp_path_factory.mktemp('uninterrupted')
    checkpoints = folder / 'checkpoints'
    arguments = [f'trainer.save_folder={checkpoints}', 'trainer.save_interval=4ba', 'report.picture=true']
    result = train(DIGITS, *TINY_DIGITS, *arguments, folder=folder)
    return UninterruptedRun(checkpoints, result, picture=folder / 'result.png')


def test_run_writes_its_result(uninterrupted):
    result = uninterrupted.result
    assert result['steps'] == 12
    assert result['epochs'] == 2
    assert result['samples'] == 96
    assert result['loss']['last'] < result['loss']['first']
    assert 0 <= result['eval']['MaskedAccuracy'] <= 1
    assert result['eval']['LanguageCrossEntropy'] > 0
    assert len(result['answers']) == 2
    for answer in result['answers']:
        assert answer['question']
        assert answer['expected']
    monitor = result['token_monitor']
    assert 0 < monitor['padding_ratio'] < monitor['device_batch_padding_ratio'] < 1
    assert monitor['sample_weighting_error'] > 0


def test_picture_is_drawn(uninterrupted):
    with Image.open(uninterrupted.picture) as picture:
        small_picture = picture.convert('L').resize((64, 64))
    levels_of_gray = set(small_picture.getdata())
    assert len(levels_of_gray) > 10, 'an empty picture has one level of gray'


def test_resume_within_epoch_is_bitwise(uninterrupted, tmp_path, capfd):
    start_path = uninterrupted.checkpoints / 'ep1-ba8-rank0.pt'
    start = checkpoint(start_path)
    assert start['timestamp']['Timestamp']['batch_in_epoch'] == 3
    command = [
        DIGITS,
        *TINY_DIGITS,
        f'trainer.load_path={start_path}',
        f'trainer.save_folder={tmp_path}/checkpoints',
    ]

    assert main([*command, f'report.folder={tmp_path}', 'seed=1']) == 2
    assert 'resumed within an epoch' in capfd.readouterr().err
    train(*command, folder=tmp_path)

    resumed = checkpoint(tmp_path / 'checkpoints' / 'ep2-ba12-rank0.pt')
    expected = checkpoint(uninterrupted.checkpoints / 'ep2-ba12-rank0.pt')
    assert_equal_bitwise(resumed['model'], expected['model'])
    assert_equal_bitwise(resumed['optimizers'], expected['optimizers'])
    moved_weights = []
    for name, weight in expected['model'].items():
        if not torch.equal(weight, start['model'][name]):
            moved_weights.append(name)
    assert moved_weights, 'the last steps move the weights'


@pytest.fixture
def without_check():
    """For runs with :data:`UNCHECKED`."""
    with unchecked_rows():
        yield


@pytest.mark.usefixtures('without_check')
def test_finished_run_writes_result_again(tmp_path):
    command = [
        DIGITS,
        *TINY_DIGITS,
        UNCHECKED,
        'trainer.max_duration=2ba',
        'trainer.eval_interval=1ba',
        'trainer.autoresume=true',
        f'trainer.save_folder={tmp_path}/checkpoints',
    ]
    page_path = tmp_path / 'report.html'
    answers_path = tmp_path / 'answers.jsonl'

    first = train(*command, folder=tmp_path)
    first_page = page_path.read_text()
    first_answers = answers_path.read_text()
    second = train(*command, folder=tmp_path)
    second_page = page_path.read_text()
    second_answers = answers_path.read_text()

    assert first['loss']
    assert first['token_monitor']
    for key in ('steps', 'samples', 'loss', 'eval', 'token_monitor', 'sources'):
        assert second[key] == first[key]
    assert first_answers
    assert second_answers == first_answers
    for mark in ('<polyline', 'class="answer"'):
        assert second_page.count(mark) == first_page.count(mark) > 0


def test_dry_run_writes_nothing(tmp_path):
    command = [DIGITS, *TINY_DIGITS, 'dry_run=true']
    folders = [f'report.folder={tmp_path}/report', f'trainer.save_folder={tmp_path}/checkpoints']
    assert main([*command, *folders]) == 0
    assert list(tmp_path.iterdir()) == []

    # Not even a dry run takes a folder that cannot be made.
    file = tmp_path / 'file'
    file.touch()
    assert main([*command, f'report.folder={file}/folder']) == 2


def test_usage_error_needs_no_torch():
    code = (
        'import runpy, sys\n'
        'sys.modules["torch"] = None\n'  # an import of torch fails
        'sys.argv = ["train"]\n'
        'runpy.run_module("composer_tokacc.train", run_name="__main__")'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert 'FILE.yaml' in done.stderr


def saves_every_step(folder: Path) -> list[str]:
    return [
        *TINY_DIGITS,
        'trainer.autoresume=true',
        'trainer.save_interval=1ba',
        f'trainer.save_folder={folder}',
    ]


def test_resume_after_damaged_checkpoint(uninterrupted, tmp_path, capsys):
    folder = tmp_path / 'checkpoints'
    # Four steps, with the learning rates of the run of twelve.
    command = [DIGITS, *saves_every_step(folder), 'trainer.max_duration=4ba', 'scheduler.t_max=12ba']
    train(*command, 'trainer.max_duration=3ba', folder=tmp_path)
    third_checkpoint = folder / 'ep0-ba3-rank0.pt'
    fourth_checkpoint = folder / 'ep0-ba4-rank0.pt'
    content = third_checkpoint.read_bytes()
    first_half = content[: len(content) // 2]
    # The run was killed while it wrote this file, so `latest` is the file before.
    fourth_checkpoint.write_bytes(first_half)
    # And the disk has lost half of that one.
    third_checkpoint.write_bytes(first_half)
    capsys.readouterr()

    result = train(*command, folder=tmp_path)

    screen = capsys.readouterr().err
    assert f'{third_checkpoint} is damaged' in screen
    assert f'going on from {folder}/ep0-ba2-rank0.pt' in screen
    assert result['steps'] == 4
    assert result['first_step'] == 2
    last = checkpoint(fourth_checkpoint)
    assert last['timestamp']['Timestamp']['batch'] == 4, 'it is written again'
    expected = checkpoint(uninterrupted.checkpoints / 'ep0-ba4-rank0.pt')
    assert_equal_bitwise(last['model'], expected['model'])


def keep_records(path: Path, *, with_image: bool):
    """Leaves only the records of a file that have an image, or only those that have none."""
    records = json.loads(path.read_text())
    kept_records = [record for record in records if ('image' in record) == with_image]
    path.write_text(json.dumps(kept_records))


@pytest.mark.usefixtures('without_check')
def test_text_only_run_resumes_bitwise(tmp_path):
    path = write_llava_folder(tmp_path / 'data', 32)
    keep_records(path, with_image=False)
    complete = tmp_path / 'complete'
    resumed = tmp_path / 'resumed'
    options = [UNCHECKED, 'trainer.save_interval=1ba']
    train(*tiny_llava(complete, path), *options, folder=complete)

    command = [*tiny_llava(resumed, path), *options]
    train(*command, 'trainer.max_duration=1ba', folder=resumed)
    result = train(*command, folder=resumed)

    assert result['first_step'] == 1
    expected_state = checkpoint(complete / 'checkpoints' / 'ep1-ba4-rank0.pt')
    resumed_state = checkpoint(resumed / 'checkpoints' / 'ep1-ba4-rank0.pt')
    for part in ('model', 'optimizers'):
        assert_equal_bitwise(resumed_state[part], expected_state[part])


def test_llava_json_trains_with_shipped_yaml(tmp_path):
    path = write_llava_folder(tmp_path / 'data', num_samples=10)
    result = train(*tiny_llava(tmp_path, path), f'dataset.eval.path={path}', folder=tmp_path)
    # 10 samples, 4 in a step. The last step of an epoch has 2, so that no sample is dropped.
    assert result['steps'] == 6
    assert result['samples'] == 20
    assert result['loss']['last'] < result['loss']['first']
    assert result['eval']['LanguageCrossEntropy'] < result['loss']['first']
    assert result['skipped'] == []


def tiny_mixture(folder: Path) -> list[str]:
    """Writes two files of 14 and 3 samples. Returns the arguments of a run that mixes them."""
    arguments = [MIXTURE]
    for name, num_samples in {'captions': 14, 'documents': 3}.items():
        path = write_llava_folder(folder / name, num_samples=num_samples)
        image_folder = path.parent / 'images'
        arguments.append(f'dataset.parts.{name}.path={path}')
        arguments.append(f'dataset.parts.{name}.image_dir={image_folder}')
    # Without the file, its path and its folder of images, and without the scheduler of that file.
    arguments_of_llava = tiny_llava(folder, folder)[3:]
    arguments += [argument for argument in arguments_of_llava if not argument.startswith('scheduler')]
    return arguments


def test_mixture_of_two_files(tmp_path):
    result = train(*tiny_mixture(tmp_path), 'loader.modality=per_step', folder=tmp_path)
    # 14 + 2 * 3 samples in an epoch, 4 in a step.
    assert result['steps'] == 10
    assert result['samples'] == 40
    assert result['loss']['last'] < result['loss']['first']


@pytest.mark.slow
def test_ranks_end_if_the_report_fails(tmp_path):
    """The first rank cannot write it. The other one must not wait for it."""
    report = [f'report.folder={tmp_path}', 'report.name=tests.ranks.refused_program.run_out_of_disk']
    overrides = [*TINY_DIGITS, UNCHECKED, *report, 'trainer.max_duration=2ba']
    results = launch_json('tests/ranks/refused_program.py', 'composer_tokacc.train', DIGITS, *overrides, ranks=2)
    (first_status, first_line), (second_status, second_line) = results
    assert (first_status, second_status) == (2, 2), results
    assert 'error: the disk must have room' in first_line
    assert 'error: Rank 0 has failed, read its output: OSError: [Errno 28] No space left on device' in second_line


@pytest.mark.slow
def test_two_ranks_with_unmixed_steps(tmp_path):
    """In a step without images the vision encoder has no gradient on one rank, but a gradient of 0 on several ranks.

    Plain SGD treats both alike. Weight decay and momentum would not.
    """
    arguments = [*tiny_mixture(tmp_path), 'loader.modality=per_step', 'optimizer={name: sgd, lr: 0.1}']
    folder_of_one = tmp_path / 'one'
    folder_of_two = tmp_path / 'two'
    save_one = f'trainer.save_folder={folder_of_one}'
    save_two = f'trainer.save_folder={folder_of_two}'
    one_rank = train(*arguments, save_one, folder=folder_of_one)
    two_ranks = launch_training(*arguments, save_two, folder=folder_of_two, ranks=2)
    assert_same_training(two_ranks, one_rank)


@pytest.mark.usefixtures('without_check')
def test_bad_samples_stop_or_are_counted(tmp_path, capsys):
    path = write_llava_folder(tmp_path / 'data', num_samples=12)
    image_of_first_sample = path.parent / 'images' / '0_0.png'
    image_of_first_sample.write_bytes(b'not an image')
    command = [*tiny_llava(tmp_path, path), UNCHECKED]

    assert main([*command, 'dataset.on_error=raise']) == 2
    (error,) = re.findall('^error: .*', capsys.readouterr().err, re.MULTILINE)
    assert 'sample "s0"' in error
    assert '0_0.png' in error

    result = train(*command, 'dataset.on_error=skip', 'dataset.num_workers=0', folder=tmp_path)
    assert 'skipped 1 of 12 samples' in result['skipped'][0]
    assert result['samples'] == 2 * 11
    assert 'skipped 1 of 12 samples' in capsys.readouterr().out


def test_stock_accumulation_of_the_same_data(tmp_path):
    """The logged loss of the first step is a mean over microbatches. Only with exact weights it equals one forward."""
    config = yaml.safe_load(Path(DIGITS).read_text())
    del config['algorithms']['token_accumulation']
    stock_config = write_yaml(tmp_path / 'stock.yaml', config)
    options = [*TINY_DIGITS, 'dataset.eval=null', 'microbatching.regroup=false', 'trainer.max_duration=1ba']
    all_rows_at_once = 'microbatching.device_train_microbatch_size=8'

    stock = train(stock_config, *options, folder=tmp_path / 'stock')
    exact = train(DIGITS, *options, folder=tmp_path / 'exact')
    one_forward = train(DIGITS, *options, all_rows_at_once, folder=tmp_path / 'one_forward')

    expected_loss = one_forward['loss']['first']
    assert exact['loss']['first'] == pytest.approx(expected_loss, rel=1e-6)
    assert stock['loss']['first'] != pytest.approx(expected_loss, rel=1e-4)


def write_parts_of_mixture(folder: Path) -> dict[str, dict]:
    """Writes three files of three formats: images, videos, and text only. Returns the settings of each."""
    captions = write_llava_folder(folder / 'captions', 24)
    keep_records(captions, with_image=True)
    video_folder = folder / 'videos'
    video_folder.mkdir()
    videos = write_media_folder(video_folder, [('video',), ('video', 'image'), (), ('video',)] * 3)
    conversations = []
    for length in range(1, 11):
        question = {'role': 'user', 'content': f'Say {length}.'}
        answer = {'role': 'assistant', 'content': 'b' * length}
        conversations.append([question, answer])
    text = folder / 'text.parquet'
    Dataset.from_dict({'messages': conversations}).to_parquet(text)
    return {
        'captions': {'path': str(captions), 'image_dir': str(captions.parent / 'images')},
        'videos': {'path': str(videos), 'epochs': 1},
        'text': {'path': str(text), 'epochs': 2},
    }


@pytest.mark.slow
def test_mixture_of_media_survives_a_kill(tmp_path):
    """Three files of three formats, two epochs on two ranks.

    A rank is killed in the middle of the second epoch. The resumed run ends with the weights of an uninterrupted run.
    """
    pytest.importorskip('av')
    case = MEDIA['qwen2_vl']()
    case.processor.save_pretrained(tmp_path / 'base')
    case.model.save_pretrained(tmp_path / 'base')
    config = yaml.safe_load(Path(MIXTURE).read_text())
    config['model'] = {'pretrained': str(tmp_path / 'base')}
    config['dataset'] = {
        'name': 'llava',
        'video': {'fps': 3, 'max_frames': 8},
        'parts': write_parts_of_mixture(tmp_path),
    }
    config['algorithms']['token_accumulation'] = {'loss_tokens': 'causal', 'check_loss': False}
    config['loader'] = {'global_batch_size': 8, 'drop_last': True}
    config['trainer'] |= {'max_duration': '2ep', 'autoresume': True, 'save_interval': '2ba', 'device': 'cpu'}
    config_without_kill = write_yaml(tmp_path / 'complete.yaml', config)
    config['callbacks']['tests.support.killer.KillRank'] = {'rank': 1, 'batch': 9}
    config_with_kill = write_yaml(tmp_path / 'killed.yaml', config)
    save_complete = f'trainer.save_folder={tmp_path}/complete'
    save_resumed = f'trainer.save_folder={tmp_path}/resumed'

    launch_training(config_without_kill, *QUIET, save_complete, folder=tmp_path, ranks=2)
    program = ['-m', 'composer_tokacc.train', config_with_kill, *QUIET, save_resumed, f'report.folder={tmp_path}']
    killed = launch(program, ranks=2)
    assert 'Rank 1 crashed with exit code -9' in killed.stderr
    result = launch_training(config_without_kill, *QUIET, save_resumed, folder=tmp_path, ranks=2)

    assert result['first_step'] == 8, 'two steps after the end of the first epoch'
    resumed = (tmp_path / 'resumed' / 'latest-rank0.pt').resolve()
    complete = (tmp_path / 'complete' / 'latest-rank0.pt').resolve()
    assert resumed.name == complete.name, 'both have made the same number of steps'
    assert_equal_bitwise(checkpoint(resumed)['model'], checkpoint(complete)['model'])


@pytest.mark.slow
def test_dry_run_and_monitored_run(tmp_path, capsys):
    scans = '{num_samples: 30, loss_share: 0.7}'
    others = '{num_samples: 10, seed: 5, loss_share: 0.3}'
    command = [
        DIGITS,
        *TINY_DIGITS,
        f'dataset.parts={{scans: {scans}, others: {others}}}',
        'callbacks.token_monitor.device_tflops=0.05',
        'microbatching.rehearse=heaviest',
        'trainer.max_duration=6ba',
        'trainer.eval_interval=6ba',
    ]
    dry_folder = tmp_path / 'dry'
    folder = tmp_path / 'run'

    assert main([*command, 'dry_run=true', f'report.folder={dry_folder}']) == 0
    messages = capsys.readouterr().err
    assert 'rehearsed the heaviest microbatches of 6 steps' in messages
    assert 'dry run: all but training went well; an epoch has 5 steps' in messages
    assert not dry_folder.exists()

    result = train(*command, folder=folder)
    utilizations = []
    for line in (folder / 'metrics.jsonl').read_text().splitlines():
        metrics = json.loads(line)
        if 'token_monitor/mfu' in metrics:
            utilizations.append(metrics['token_monitor/mfu'])
    assert result['token_monitor']['mfu'] == pytest.approx(np.mean(utilizations))
    sources = result['sources']
    assert sources.keys() == {'scans', 'others'}
    assert sources['scans']['weight'] + sources['others']['weight'] == pytest.approx(1)
    assert sources['scans']['weight'] == pytest.approx(0.7, abs=0.1)
    assert 'Model FLOPs utilization' in (folder / 'report.html').read_text()
