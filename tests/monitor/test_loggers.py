# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Composer's loggers that write to disk without a network. All of them must have the same numbers."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import pytest
from composer import loggers

from composer_tokacc import TokenMonitor
from tests.support.text import ragged_batch, text_model
from tests.support.training import fit

STEPS = 3

# Each function returns a logger, and a function that reads its file and returns {metric: {step: value}}.


def tensorboard(folder):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]

    def read():
        written = defaultdict(dict)
        for file in folder.rglob('events.out.*'):
            events = EventAccumulator(str(file))
            events.Reload()
            for name in events.Tags()['scalars']:
                for event in events.Scalars(name):
                    written[name][event.step] = event.value
        return dict(written)

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

    logger = loggers.MLFlowLogger(experiment_name='all', tracking_uri=store, log_system_metrics=False)
    return logger, read


def wandb(folder):
    package = pytest.importorskip('wandb')
    if not hasattr(package.sdk.wandb_run.Run, 'get_url'):
        pytest.skip("Composer's logger calls a function that this W&B no longer has")
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]
    from wandb.sdk.internal.datastore import DataStore  # pyright: ignore[reportMissingImports]

    def read():
        package.teardown()  # its service goes on writing after `finish`
        (file,) = folder.rglob('*.wandb')
        written = defaultdict(dict)
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
                    written[name][step] = float(value)
        return dict(written)

    logger = loggers.WandBLogger(init_kwargs={'mode': 'offline', 'dir': str(folder)})
    return logger, read


@pytest.mark.parametrize('make', [tensorboard, mlflow, wandb])
def test_loggers_on_disk_have_the_numbers(make, tmp_path, monkeypatch):
    monkeypatch.setenv('WANDB_DIR', str(tmp_path))
    logger, read = make(tmp_path)
    batch = ragged_batch([(4, 2), (9, 7), (6, 1)])
    # MLflow refuses other characters, parts that are two dots, and names of more than 250 characters.
    batch['source'] = ['..', 'b c', 'a/ä' * 100]
    batches = [batch] * STEPS

    recorder = fit(text_model(), *batches, microbatch_size=3, callbacks=[TokenMonitor()], loggers=[logger])
    recorder.trainer.close()

    written = read()
    expected = {name: values for name, values in recorder.memory.data.items() if name.startswith('token_monitor/')}
    assert {'token_monitor/gradient_norm', 'token_monitor/source/b c/loss'} <= expected.keys()
    for name, values in expected.items():
        written_values = written[name]
        for time, value in values:
            # Composer's MLflow logger leaves out a value that equals the one before.
            last_step = max(step for step in written_values if step <= time.batch.value)
            assert written_values[last_step] == pytest.approx(float(value), rel=1e-6), (name, last_step)
        numbers = [float(value) for _, value in values]
        if make is mlflow:
            numbers = [number for number, _ in groupby(numbers)]
        assert len(written_values) == len(numbers)
