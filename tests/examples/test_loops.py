# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The engine outside of Composer's Trainer: each example ends where plain gradients of the whole batch end.

Each is started on two ranks, ends in the middle of an epoch, and goes on on one. The data hold a row without a loss
token, and steps of fewer samples than ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.launch import ROOT, environment

STOP = 5
PROGRAMS = {
    'plain_loop': ('torchrun --nproc-per-node', '', 'SmallModel'),
    'accelerate_loop': ('accelerate launch --cpu --num_processes', 'pytorch_model.bin', 'small_llama'),
    'hf_trainer': ('torchrun --nproc-per-node', 'checkpoint-8/model.safetensors', 'small_llama'),
}
"""Launcher, where the weights lie in the checkpoint, which model it trains."""


@pytest.fixture
def ragged(monkeypatch):
    """The module beside the examples, found as they find it."""
    monkeypatch.syspath_prepend(str(ROOT / 'examples'))
    return import_module('ragged')


def run(program: str, *arguments: str, ranks: int, tmp_path: Path) -> str:
    """What it prints, where importing Composer is refused."""
    (tmp_path / 'composer.py').write_text("raise ImportError('not here')")
    launcher, *words = PROGRAMS[program][0].split()
    env = environment()
    env['PYTHONPATH'] = f'{tmp_path}{os.pathsep}{env["PYTHONPATH"]}'
    env['ACCELERATE_CONFIG_FILE'] = ''
    port = ['--master-port' if launcher == 'torchrun' else '--main_process_port', env['MASTER_PORT']]
    command = [str(Path(sys.executable).with_name(launcher)), *words, str(ranks), *port, f'examples/{program}.py']
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def whole_batches(ragged, model) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after plain gradient descent on one forward a step, over the samples of torch's DistributedSampler."""
    dataset, losses = ragged.Rows(), []
    for epoch in range(ragged.EPOCHS):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(0, len(order), ragged.GLOBAL_BATCH):
            batch = ragged.collate([dataset[index] for index in order[start : start + ragged.GLOBAL_BATCH]])
            if not (batch['labels'][:, 1:] != -100).any():  # a step without a loss token moves nothing
                losses.append(0.0)
                continue
            found = model(**batch)
            loss = found if isinstance(found, torch.Tensor) else found.loss
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                parameter.data -= ragged.LEARNING_RATE * gradient
            losses.append(loss.item())
    return model.state_dict(), losses


@pytest.mark.slow
@pytest.mark.parametrize('program', PROGRAMS)
def test_loop_ends_where_whole_batches_end(program, ragged, tmp_path):
    _, weights, name = PROGRAMS[program]
    pytest.importorskip('accelerate')
    checkpoint = tmp_path / 'checkpoint'
    printed = run(program, str(checkpoint), f'--steps={STOP}', ranks=2, tmp_path=tmp_path)
    printed += run(program, str(checkpoint), ranks=1, tmp_path=tmp_path)
    first = getattr(ragged, name)().state_dict()
    expected, losses = whole_batches(ragged, getattr(ragged, name)())
    if weights.endswith('.safetensors'):
        from safetensors.torch import load_file

        found = load_file(checkpoint / weights)
    else:
        found = torch.load(checkpoint / weights if weights else checkpoint, weights_only=True)
        found = found.get('model', found)
    error = sum(float((found[key] - expected[key]).double().square().sum()) for key in found)
    moved = sum(float((expected[key] - first[key]).double().square().sum()) for key in found)
    assert (error / moved) ** 0.5 < 1e-6, printed
    logged = [float(loss) for loss in re.findall(r"(?:over all tokens |'loss': ')([\d.]+)", printed)]
    assert logged == pytest.approx(losses, rel=1e-3 if program == 'hf_trainer' else 1e-6)  # Trainer prints four digits


def test_accumulation_steps_of_launcher_are_refused(tmp_path):
    """``accelerator.backward`` would divide each loss by them: updates are 0.24 of what they should be."""
    pytest.importorskip('accelerate')
    env = environment()
    env.update(ACCELERATE_GRADIENT_ACCUMULATION_STEPS='4', ACCELERATE_USE_CPU='true')
    command = [sys.executable, 'examples/accelerate_loop.py', str(tmp_path / 'checkpoint'), '--steps=1']
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert 'must have 1 gradient accumulation step, got: 4' in done.stderr
    assert not (tmp_path / 'checkpoint').exists()


ALONE = """
import doctest, sys
import composer_tokacc
assert composer_tokacc.__file__.startswith(sys.prefix)
names = 'RegroupingBatchSampler count_tokens measure_token_weights plan_microbatches verify_invariance'.split()
for name in [*names, 'verify_isolation', 'weighted_microbatches', 'token_data_spec', 'BatchLayout']:
    getattr(composer_tokacc, name)
known = {'torch': __import__('torch'), **vars(sys.modules['composer_tokacc.planning']), **vars(composer_tokacc)}
for name in names:
    doctest.run_docstring_examples(getattr(composer_tokacc, name), known)
assert not {'composer', 'numba', 'transformers'} & set(sys.modules)
"""


@pytest.mark.slow
def test_torch_and_numpy_are_enough(tmp_path):
    uv = shutil.which('uv') or shutil.which('uv', path=Path(sys.executable).parent) or shutil.which(ROOT / '.uv/bin/uv')
    if uv is None:
        pytest.skip('uv makes the environment')
    alone = {key: value for key, value in environment().items() if key != 'PYTHONPATH'}

    def do(*command: str | Path) -> str:
        done = subprocess.run([*map(str, command)], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python = tmp_path / 'bin' / 'python'
    do(uv, 'venv', '--quiet', '--clear', '--python', sys.executable, tmp_path)
    hosts = [f'torch=={torch.__version__.split("+")[0]}', f'numpy=={np.__version__}']
    do(uv, 'pip', 'install', '--quiet', '--python', python, *hosts)
    do(uv, 'pip', 'install', '--quiet', '--python', python, '--no-deps', '.')
    assert not do(python, '-I', '-c', ALONE)  # doctests print what fails
    assert 'step 8: ' in do(python, 'examples/plain_loop.py', tmp_path / 'last.pt')
