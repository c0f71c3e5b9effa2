# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Compares the gradient of llm-foundry's first step with that of one forward over the same global batch.

    python examples/llm_foundry/check_exactness.py examples/llm_foundry/tiny.yaml
    composer -n 2 examples/llm_foundry/check_exactness.py examples/llm_foundry/tiny.yaml variables.model=llama

Each line is a run of llm-foundry's own ``train`` on one batch, most in microbatches of one row. The program fails if

- a run with TokenAccumulation is off by more than 1e-6;
- the run with neither TokenAccumulation nor llm-foundry's flag is exact, because then the check shows nothing;
- the two together are not refused.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from llmfoundry import registry
from llmfoundry.command_utils import train
from omegaconf import DictConfig
from omegaconf import OmegaConf as om

TOLERANCE = 1e-6
ALGORITHM = {'algorithms': {'token_accumulation': {}}}
MONITOR = {'callbacks': {'token_monitor': {}}}
FLAG = {'accumulate_train_batch_on_tokens': True}
DATA_SPEC = {'code_paths': ['examples/llm_foundry/token_data_spec.py'], 'device_train_microbatch_size': 2}
# Settings of each run. The algorithms and callbacks of the YAML file are removed, and its flag is turned off. The run
# with `code_paths` is last, because its data spec stays registered.
RUNS: dict[str, dict[str, Any]] = {
    'neither': {},
    'flag': FLAG,
    'flag + token_monitor': FLAG | MONITOR,
    'token_accumulation': ALGORITHM,
    'token_accumulation + token_monitor': ALGORITHM | MONITOR,
    'token_accumulation + flag': ALGORITHM | FLAG,
    'token_accumulation + token_data_spec': ALGORITHM | MONITOR | DATA_SPEC,
}
REFUSED = 'token_accumulation + flag'


class FirstGradient(Callback):
    """Compares the gradient of a step, before the optimizer uses it, with that of one forward over the batch."""

    error = float('nan')  # of the latest run. On the class, because llm-foundry makes the instance

    def batch_start(self, state: State, logger: Logger) -> None:
        """Computes the reference before any microbatch: the mean over the labels of all ranks, in one forward."""
        rows = {key: state.batch[key] for key in ('input_ids', 'attention_mask', 'labels')}
        rows_of_ranks = [rows] * dist.get_world_size()
        if len(rows_of_ranks) > 1:
            torch.distributed.all_gather_object(rows_of_ranks, rows)
        batch = {}
        for key in rows:
            batch[key] = torch.cat([rows_of_rank[key] for rows_of_rank in rows_of_ranks])
        model: Any = getattr(state.model, 'module', state.model).model  # without DDP and Composer's wrapper
        if model.config.is_encoder_decoder:
            loss = model(**batch).loss
        else:
            logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten())
        # Not backward(), because the hooks of DDP would reduce its gradients.
        self.expected = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Compares the gradient of the step, before the optimizer moves."""
        gradients = [p.grad for p in state.model.parameters() if p.requires_grad]
        assert len(gradients) == len(self.expected)
        squared_error = 0.0
        squared_norm = 0.0
        for gradient, expected in zip(gradients, self.expected, strict=True):
            difference = gradient.double() - expected.double()
            squared_error += float(difference.square().sum())
            squared_norm += float(expected.double().square().sum())
        FirstGradient.error = math.sqrt(squared_error / squared_norm)


def first_step(config: DictConfig, run: dict[str, Any]) -> float:
    """Returns the relative error of the gradient of one step of llm-foundry's ``train``."""
    settings = {
        'device_train_microbatch_size': 1,
        'accumulate_train_batch_on_tokens': False,
        'log_to_console': False,
        'max_duration': '1ba',
    }
    config = om.merge(config, settings, run)
    # Assigned, because a merge would keep those of the YAML file.
    config.algorithms = run.get('algorithms', {})
    config.callbacks = {**run.get('callbacks', {}), 'first_gradient': {}}
    FirstGradient.error = float('nan')
    train(config).close()
    return FirstGradient.error


def is_expected_error(name: str, error: float) -> bool:
    """Returns whether a run that was not refused has the error that it should have."""
    if name == REFUSED:
        return False
    if name == 'neither':
        return error > TOLERANCE
    if 'algorithms' in RUNS[name]:
        return error <= TOLERANCE
    return True  # the error of llm-foundry's flag is only printed


def main() -> None:
    """Prints a line for each run on rank 0. Each rank exits with an error if its own gradients are not as expected."""
    path, *overrides = sys.argv[1:]
    config = om.merge(om.load(path), om.from_cli(overrides))
    assert isinstance(config, DictConfig)
    registry.callbacks.register('first_gradient', func=FirstGradient)
    wrong = []
    for name, run in RUNS.items():
        try:
            error = first_step(config, run)
        except RuntimeError as refusal:
            outcome = f'refused: {refusal}'
            is_expected = name == REFUSED
        else:
            outcome = f'{error:.1e}'
            is_expected = is_expected_error(name, error)
        if not is_expected:
            wrong.append(name)
        if dist.get_global_rank() == 0:
            print(f'{config.variables.model}, {dist.get_world_size()} rank(s), {name}: {outcome}', flush=True)
    if wrong:
        sys.exit(f'Not as expected: {wrong}.')


if __name__ == '__main__':
    main()
