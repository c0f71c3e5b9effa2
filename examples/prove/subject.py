# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A small Llama, eight ragged rows, and the two measurements that each program makes: token weights and invariance."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import LlamaConfig, LlamaForCausalLM

from composer_tokacc import BatchLayout, measure_token_weights, verify_invariance

LENGTHS = (5, 9, 14, 30, 7, 22, 11, 3)
Batch = dict[str, Any]


def rows_of_text() -> list[Batch]:
    """Returns batches of one row of random tokens. All tokens have a label."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(3, 64, (1, length), generator=generator)
        rows.append({'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids.clone()})
    return rows


def small_llama() -> Any:
    """Returns a Llama with the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def unsharded_copy(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a gradient, and all of it if it is sharded (FSDP2)."""
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    return gradient.clone()


def prove(trainer: str, package: str, step: Callable[[Any, list[Batch]], None], model: Any = None) -> None:
    """Prints what tokens weigh in a step with three rows in a microbatch, and whether the gradient depends on the cut.

    Args:
        trainer: Name of the trainer in the last line.
        package: The package whose version is printed.
        step: Makes one optimizer step of the trainer on these microbatches, at learning rate 0.
        model: A model that the caller has made, for example a sharded one, with the parameter names of `small_llama`.
            None: a new small Llama.
    """
    model = model or small_llama()
    plain = small_llama()
    rows = rows_of_text()
    layout = BatchLayout.infer(rows[0])
    recorded: dict[str, torch.Tensor] = {}

    def record(*_: Any) -> None:
        # Called after the optimizer step, before the trainer clears the gradients.
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                recorded[name.removeprefix('module.')] = unsharded_copy(parameter.grad)

    def gradients_of_trainer(microbatches: list[Batch]) -> dict[str, torch.Tensor]:
        recorded.clear()
        model.train().zero_grad()
        step(model, microbatches)
        return dict(recorded)

    def gradients_of_one_forward(batch: Batch) -> dict[str, torch.Tensor]:
        parameters = dict(plain.named_parameters())
        gradients = torch.autograd.grad(plain(**batch).loss, list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True))

    hook = register_optimizer_step_post_hook(record)
    microbatches_of_three = [layout.concat(rows[start : start + 3]) for start in (0, 3, 6)]  # 3, 3 and 2
    with measure_token_weights(model) as report:
        gradients_of_trainer(microbatches_of_three)
    print(report)
    cuts = verify_invariance(
        gradients_of_trainer,
        rows,
        layout=layout,
        reference=gradients_of_one_forward,
        padding_sides=['right'],
    )
    hook.remove()
    print(cuts)
    weights = torch.cat(report.weights)
    relative_weights = weights / weights.mean()
    lightest = float(relative_weights.min())
    heaviest = float(relative_weights.max())
    error = cuts.worst.error
    verdict = 'exact' if cuts.is_exact else 'NOT exact'
    print(f'{trainer} | {package} {version(package)} | {lightest:.2f} to {heaviest:.2f} | {error:.0e} | {verdict}')
