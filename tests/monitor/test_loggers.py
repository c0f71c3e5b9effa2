# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Composer's loggers that write to disk without a network. All of them must have the same numbers."""

from __future__ import annotations

from itertools import groupby

import pytest
from composer import loggers

from composer_tokacc import TokenAccumulation, TokenMonitor, token_data_spec
from tests.support.text import collate, text_model, text_rows
from tests.support.training import loader, train

STEPS = 3

# Each function returns a logger, and a function that reads its file: {metric: {step: value}}.


def tensorboard(folder):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]

    def read():
        written = {}
        for file in folder.rglob('events.out.*'):
            events = EventAccumulator(str(file))
            events.Reload()
            for name in events.Tags()['scalars']:
                for event in events.Scalars(name):
                    written.setdefault(name, {})[event.step] = event.value
        return written

    return loggers.TensorboardLogger(log_dir=str(folder)), read


def mlflow(folder):
    store = f'sqlite:///{folder}/mlflow.db'
    client_class = pytest.importorskip('mlflow').MlflowClient

    def read():
        client = client_class(store)
        experiment = client.get_experiment_by_name('all')
        (run,) = client.search_runs([experiment.experiment_id])
        written = {}
        for name in run.data.metrics:
            points = client.get_metric_history(run.info.run_id, name)
            written[name] = {point.step: point.value for point in points}
        return written

    return loggers.MLFlowLogger(experiment_name='all', tracking_uri=store, log_system_metrics=False), read


def wandb(folder):
    package = pytest.importorskip('wandb')
    if not hasattr(package.sdk.wandb_run.Run, 'get_url'):
        pytest.skip("Composer's logger calls a function that this W&B no longer has")
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]
    from wandb.sdk.internal.datastore import DataStore  # pyright: ignore[reportMissingImports]

    def read():
        package.teardown()  # its service goes on writing after `finish`
        (file,) = folder.rglob('*.wandb')
        written = {}
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            items = {}
            for item in record.history.item:
                name = item.key or '/'.join(item.nested_key)
                items[name] = item.value_json
            step = int(items.get('_step', record.history.step.num))
            for name, value in items.items():
                if '/' in name:
                    written.setdefault(name, {})[step] = float(value)
        return written

    return loggers.WandBLogger(init_kwargs={'mode': 'offline', 'dir': str(folder)}), read


@pytest.mark.parametrize('make', [tensorboard, mlflow, wandb])
def test_loggers_on_disk_have_the_numbers(make, tmp_path, monkeypatch):
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))
    destination, read = make(tmp_path)
    batch = collate(text_rows([(4, 2), (9, 7), (6, 1)]))
    batch['source'] = ['a', 'b c', 'a/ä']
    _, memory, trainer = train(
        text_model(),
        token_data_spec(loader(*[batch] * STEPS)),
        microbatch_size=3,
        algorithms=[TokenAccumulation()],
        callbacks=[TokenMonitor()],
        loggers=[destination],
        max_duration=f'{STEPS}ba',
    )
    trainer.close()
    written = read()
    expected = {name: values for name, values in memory.data.items() if name.startswith('token_monitor/')}
    assert {'token_monitor/gradient_norm', 'token_monitor/source/b c/loss'} <= expected.keys()
    for name, values in expected.items():
        for time, value in values:
            # Composer's MLflow logger leaves out a value that equals the one before.
            last = max(step for step in written[name] if step <= time.batch.value)
            assert written[name][last] == pytest.approx(float(value), rel=1e-6), (name, last)
        numbers = [float(value) for _, value in values]
        if make is mlflow:
            numbers = [number for number, _ in groupby(numbers)]
        assert len(written[name]) == len(numbers)
