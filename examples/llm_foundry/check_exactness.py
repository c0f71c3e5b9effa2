# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Gradient of llm-foundry's first step against one whole forward of the same global batch, by who weights microbatches.

    python examples/llm_foundry/check_exactness.py examples/llm_foundry/mpt.yaml
    composer -n 2 examples/llm_foundry/check_exactness.py examples/llm_foundry/llama.yaml

Each line is a run of llm-foundry's own ``train`` with the YAML, one batch long, one row a microbatch. Ends with an error
if the algorithm or llm-foundry's flag is off by more than 1e-6, if neither is exact (the check would then see nothing),
or if both at once are not refused.
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
# Name of the run: its algorithms, llm-foundry's flag, its callbacks.
RUNS: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    'neither': ({}, False, {}),
    'accumulate_train_batch_on_tokens': ({}, True, {}),
    'token_accumulation': ({'token_accumulation': {}}, False, {}),
    'token_accumulation and token_monitor': ({'token_accumulation': {}}, False, {'token_monitor': {}}),
    'the flag and token_monitor': ({}, True, {'token_monitor': {}}),
}


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


def first_step(config: DictConfig, algorithms: dict[str, Any], flag: bool, callbacks: dict[str, Any]) -> float:
    """Relative error of the gradient of one step of llm-foundry's ``train``."""
    config = om.merge(config, {'max_duration': '1ba', 'device_train_microbatch_size': 1, 'log_to_console': False})
    config.accumulate_train_batch_on_tokens = flag
    config.algorithms = algorithms
    config.callbacks = {'first_gradient': {}, **callbacks}
    FirstGradient.error = float('nan')
    train(config).close()
    return FirstGradient.error


def main() -> None:
    """Prints a line a run; rank 0 speaks for all."""
    config = om.load(sys.argv[1])
    assert isinstance(config, DictConfig)
    registry.callbacks.register('first_gradient', func=FirstGradient)
    errors: dict[str, float | str] = {}
    for name, run in RUNS.items():
        try:
            errors[name] = first_step(config, *run)
        except KeyError as error:  # token_monitor alone, until it has keys of its own in the batch
            errors[name] = f'{type(error).__name__}: {error}'
        if dist.get_global_rank() == 0:
            print(f'{sys.argv[1]}, {dist.get_world_size()} rank(s), {name}: {errors[name]}', flush=True)
    try:
        first_step(config, {'token_accumulation': {}}, True, {})
        refusal = None
    except RuntimeError as error:
        refusal = str(error)
    if dist.get_global_rank() == 0:
        print(f'{sys.argv[1]}, {dist.get_world_size()} rank(s), both: {refusal or "not refused"}', flush=True)
    print(errors)


if __name__ == '__main__':
    main()
