# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The engine outside of Composer's Trainer: each example ends with the weights of plain training on whole batches.

Each example starts on two ranks under its launcher, stops in the middle of an epoch, and is resumed on one rank. One
row of the data has no loss token, and some steps have fewer samples than ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launch import ROOT, environment
from tests.support.loaded import run_loaded


@dataclass(frozen=True)
class Example:
    """A program of ``examples/``, how it is launched, and the model of ``ragged.py`` that it trains."""

    name: str
    launcher: str
    model: str

    def command(self, *arguments, ranks, port):
        """Returns the command that starts it."""
        program, *options = self.launcher.format(ranks=ranks, port=port).split()
        path = Path(sys.executable).with_name(program)
        return [str(path), *options, f'examples/{self.name}.py', *arguments]


TORCHRUN = 'torchrun --nproc-per-node {ranks} --master-port {port}'
ACCELERATE = 'accelerate launch --cpu --num_processes {ranks} --main_process_port {port}'
PLAIN_LOOP = Example('plain_loop', TORCHRUN, 'SmallModel')
ACCELERATE_LOOP = Example('accelerate_loop', ACCELERATE, 'small_llama')
HF_TRAINER = Example('hf_trainer', TORCHRUN, 'small_llama')


@pytest.fixture
def ragged(monkeypatch):
    """Imports the module of the examples' data and models, as they do."""
    monkeypatch.syspath_prepend(str(ROOT / 'examples'))
    return import_module('ragged')


def environment_without_composer(tmp_path):
    (tmp_path / 'composer.py').write_text("raise ImportError('not here')")
    env = environment()
    env['PYTHONPATH'] = f'{tmp_path}{os.pathsep}{env["PYTHONPATH"]}'
    env['ACCELERATE_CONFIG_FILE'] = ''
    return env


def run_on_two_ranks(example, *arguments, tmp_path):
    """Runs an example under its launcher. Returns its output."""
    env = environment_without_composer(tmp_path)
    command = example.command(*arguments, ranks=2, port=env['MASTER_PORT'])
    done = run_loaded(command, folder=ROOT, environment=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_on_one_rank(example, *arguments, tmp_path):
    """Runs an example without a launcher. Returns its output."""
    env = environment_without_composer(tmp_path)
    env['ACCELERATE_USE_CPU'] = 'true'
    done = run_loaded([f'examples/{example.name}.py', *arguments], folder=ROOT, environment=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_on_whole_batches(ragged, model):
    """Trains by plain gradient descent, one forward a step, in the order of torch's DistributedSampler.

    Returns:
        The loss of each step. The model is changed.
    """
    dataset = ragged.Rows()
    losses = []
    for epoch in range(ragged.EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for start in range(0, len(order), ragged.GLOBAL_BATCH):
            indices = order[start : start + ragged.GLOBAL_BATCH]
            batch = ragged.collate([dataset[index] for index in indices])
            if (batch['labels'][:, 1:] == -100).all():  # a step without a loss token changes nothing
                losses.append(0.0)
                continue
            outputs = model(**batch)
            loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= ragged.LEARNING_RATE * gradient
            losses.append(loss.item())
    return losses


def load_weights(example, checkpoint):
    if example is PLAIN_LOOP:
        return torch.load(checkpoint, weights_only=True)['model']
    if example is ACCELERATE_LOOP:
        return torch.load(checkpoint / 'pytorch_model.bin', weights_only=True)
    return load_file(checkpoint / 'checkpoint-8' / 'model.safetensors')


@pytest.mark.slow
@pytest.mark.parametrize('example', [PLAIN_LOOP, ACCELERATE_LOOP, HF_TRAINER], ids=lambda example: example.name)
def test_loop_ends_where_whole_batches_end(example, ragged, tmp_path):
    pytest.importorskip('accelerate')
    build_model = getattr(ragged, example.model)
    initial = build_model().state_dict()
    model = build_model()
    expected_losses = train_on_whole_batches(ragged, model)
    expected = model.state_dict()
    checkpoint = tmp_path / 'checkpoint'

    printed = run_on_two_ranks(example, str(checkpoint), '--steps=5', tmp_path=tmp_path)
    printed += run_on_one_rank(example, str(checkpoint), tmp_path=tmp_path)

    weights = load_weights(example, checkpoint)
    error = squared_distance(weights, expected)
    change = squared_distance(expected, initial)
    assert (error / change) ** 0.5 < 1e-6, printed
    losses = [float(loss) for loss in re.findall(r"(?:over all tokens |'loss': ')([\d.]+)", printed)]
    tolerance = 1e-3 if example is HF_TRAINER else 1e-6  # Trainer prints four digits
    assert losses == pytest.approx(expected_losses, rel=tolerance)


def squared_distance(weights, other_weights):
    total = 0.0
    for name, weight in weights.items():
        difference = weight - other_weights[name]
        total += float(difference.double().square().sum())
    return total


def run_in_this_process(path, arguments, env):
    """Runs an example as ``python path arguments`` does."""
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name='__main__')


def test_accumulation_steps_of_launcher_are_refused(tmp_path, capfd):
    """``accelerator.backward`` would divide each loss by them, so updates would be 0.24 times the right ones."""
    pytest.importorskip('accelerate')
    env = environment()
    env.update(ACCELERATE_GRADIENT_ACCUMULATION_STEPS='4', ACCELERATE_USE_CPU='true')
    arguments = [str(tmp_path / 'checkpoint'), '--steps=1']
    # A fork, because a new process would load torch again.
    forked = multiprocessing.get_context('fork').Process(
        target=run_in_this_process,
        args=(ROOT / 'examples' / 'accelerate_loop.py', arguments, env),
    )
    forked.start()
    forked.join(timeout=300)
    assert forked.exitcode == 2
    assert 'must have 1 gradient accumulation step, got: 4' in capfd.readouterr().err
    assert not (tmp_path / 'checkpoint').exists()
