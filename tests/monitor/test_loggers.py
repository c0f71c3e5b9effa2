# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What Composer's loggers have written to disk, offline: the same numbers in each."""

from __future__ import annotations

import itertools

import pytest
from composer import loggers

from composer_tokacc import TokenMonitor
from tests.support.text import collate, text_model, text_rows
from tests.support.training import loader, train

STEPS = 3


def tensorboard(folder):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]

    def read():
        found = {}
        for file in folder.rglob('events.out.*'):
            events = EventAccumulator(str(file))
            events.Reload()
            for name in events.Tags()['scalars']:
                found.setdefault(name, {}).update({one.step: one.value for one in events.Scalars(name)})
        return found

    return loggers.TensorboardLogger(log_dir=str(folder)), read


def mlflow(folder):
    client = pytest.importorskip('mlflow').MlflowClient
    store = f'sqlite:///{folder}/mlflow.db'

    def read():
        experiment = client(store).get_experiment_by_name('all')
        (run,) = client(store).search_runs([experiment.experiment_id])
        history = {name: client(store).get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return {name: {one.step: one.value for one in points} for name, points in history.items()}

    return loggers.MLFlowLogger(experiment_name='all', tracking_uri=store, log_system_metrics=False), read


def wandb(folder):
    package = pytest.importorskip('wandb')
    if not hasattr(package.sdk.wandb_run.Run, 'get_url'):
        pytest.skip("Composer's logger asks for what W&B has no more")
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    def read():
        package.teardown()  # its service writes on behind `finish`
        (file,) = folder.rglob('*.wandb')
        found = {}
        for data in records_of(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or '/'.join(item.nested_key): item.value_json for item in record.history.item}
            for name, value in items.items():
                if '/' in name:
                    found.setdefault(name, {})[int(items.get('_step', record.history.step.num))] = float(value)
        return found

    return loggers.WandBLogger(init_kwargs={'mode': 'offline', 'dir': str(folder)}), read


def records_of(data):
    """Records of a W&B file: a header, then LevelDB's log format, blocks of 32 KiB with pieces of records."""
    place, kept = 7, b''
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], 'little'), data[place + 6]
        kept += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield kept
            kept = b''


@pytest.mark.parametrize('make', [tensorboard, mlflow, wandb])
def test_loggers_on_disk_have_the_numbers(make, tmp_path, monkeypatch):
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))
    destination, read = make(tmp_path)
    batch = {**collate(text_rows([(4, 2), (9, 7), (6, 1)])), 'source': ['a', 'b c', 'a/ä']}
    options = {'callbacks': [TokenMonitor()], 'loggers': [destination], 'max_duration': f'{STEPS}ba'}
    _, memory, trainer = train(text_model(), loader(*[batch] * STEPS), microbatch_size=3, **options)
    trainer.close()
    written = read()
    ours = {name: values for name, values in memory.data.items() if name.startswith('token_monitor/')}
    assert {'token_monitor/gradient_norm', 'token_monitor/source/b c/loss'} <= ours.keys() <= written.keys()
    for name, values in ours.items():
        for time, value in values:
            # Composer's MLflow logger leaves out a value that is the one before.
            last = max(step for step in written[name] if step <= time.batch.value)
            assert written[name][last] == pytest.approx(float(value), rel=1e-6), (name, last)
        numbers = [float(value) for _, value in values]
        assert len(written[name]) == (len(numbers) if make is not mlflow else len(list(itertools.groupby(numbers))))
