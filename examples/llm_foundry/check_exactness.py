# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Gradient of llm-foundry's first step against one whole forward of the same global batch, by who weights microbatches.

    python examples/llm_foundry/check_exactness.py examples/llm_foundry/tiny.yaml
    composer -n 2 examples/llm_foundry/check_exactness.py examples/llm_foundry/tiny.yaml variables.model=llama

Each line is a run of llm-foundry's own ``train``, one batch long, one row a microbatch. Ends with an error where a run
with TokenAccumulation is off by more than 1e-6, where neither it nor llm-foundry's flag is exact (the check would see
nothing), or where both at once are not refused.
"""

from __future__ import annotations

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
# What is set on top of the YAML, which has no algorithm, no callback and the flag off here. The last stays registered.
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
    """Compares the step's gradient, as the optimizer is about to get it, with that of one whole forward."""

    error = float('nan')  # of the latest run: llm-foundry builds the callback, so there is no instance to ask

    def batch_start(self, state: State, logger: Logger) -> None:
        """The reference, before any microbatch: all ranks' rows, padded to the same width, in one mean over labels."""
        shards = [None] * dist.get_world_size()
        rows = {key: state.batch[key] for key in ('input_ids', 'attention_mask', 'labels')}
        if len(shards) > 1:
            torch.distributed.all_gather_object(shards, rows)
        batch = {key: torch.cat([(shard or rows)[key] for shard in shards]) for key in rows}
        model: Any = getattr(state.model, 'module', state.model).model  # without DDP and Composer's wrapper
        if model.config.is_encoder_decoder:
            loss = model(**batch).loss
        else:
            logits = model(input_ids=batch['input_ids'], attention_mask=batch['attention_mask']).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten())
        # Not backward(): DDP would take part in it.
        self.expected = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """The step's gradient is whole, and the optimizer has not moved."""
        found = [p.grad for p in state.model.parameters() if p.requires_grad]
        assert len(found) == len(self.expected)
        difference = sum((a.double() - b.double()).square().sum() for a, b in zip(found, self.expected, strict=True))
        norm = sum(b.double().square().sum() for b in self.expected)
        FirstGradient.error = float((difference / norm).sqrt())


def first_step(config: DictConfig, run: dict[str, Any]) -> float:
    """Relative error of the gradient of one step of llm-foundry's ``train``."""
    plain = {'device_train_microbatch_size': 1, 'accumulate_train_batch_on_tokens': False, 'log_to_console': False}
    config = om.merge(config, plain, {'max_duration': '1ba'}, {key: run[key] for key in run if key != 'callbacks'})
    config.algorithms = run.get('algorithms', {})
    config.callbacks = {**run.get('callbacks', {}), 'first_gradient': {}}
    FirstGradient.error = float('nan')
    train(config).close()
    return FirstGradient.error


def main() -> None:
    """Prints a line a run on rank 0; every rank exits with an error where its own gradients say so."""
    path, *overrides = sys.argv[1:]
    config = om.merge(om.load(path), om.from_cli(overrides))
    assert isinstance(config, DictConfig)
    registry.callbacks.register('first_gradient', func=FirstGradient)
    wrong = []
    for name, run in RUNS.items():
        try:
            error = first_step(config, run)
            outcome, as_it_should = f'{error:.1e}', error <= TOLERANCE or 'algorithms' not in run
            as_it_should = as_it_should and name != REFUSED and (name != 'neither' or error > TOLERANCE)
        except RuntimeError as error:
            outcome, as_it_should = f'refused: {error}', name == REFUSED
        if not as_it_should:
            wrong.append(name)
        if dist.get_global_rank() == 0:
            print(f'{config.variables.model}, {dist.get_world_size()} rank(s), {name}: {outcome}', flush=True)
    if wrong:
        sys.exit(f'Not as expected: {wrong}.')


if __name__ == '__main__':
    main()
