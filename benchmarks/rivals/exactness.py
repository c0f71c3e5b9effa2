# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Who is exact where: ``verify_invariance`` attached to every trainer; runs under the composer launcher.

The reference is one plain forward over the rows of all ranks. What a router's loss is depends on the microbatch that it
is taken over, so for Mixtral the routers' part is taken off at its rightful weight, the mean over all microbatches, and
what is left is held to the mean over tokens; both factors are fitted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist, get_device
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.rivals.adapters import ADAPTERS, Gradients, gradients_of, named
from benchmarks.rivals.speed import say
from composer_tokacc import BatchLayout, verify_invariance
from tests.support.families import FAMILIES, ragged_samples
from tests.support.text import VOCABULARY, text_model, text_rows

ROWS = 16
"""On each rank: microbatches of 16, 4 and 1 are accumulations of 1, 4 and 16."""
SUBJECTS = ('Llama', 'LLaVA', 'Qwen2.5-VL', 'Mixtral')
TOLERANCE = 2e-6
Batch = dict[str, Any]


def subject(name: str) -> tuple[Any, list[Batch]]:
    """A tiny model of the family's own class, and rows for two ranks."""
    if name in ('Llama', 'Mixtral'):
        rng = np.random.default_rng(0)
        lengths = rng.integers(4, 40, 2 * ROWS).tolist()
        rows = text_rows([(length, int(rng.integers(1, length))) for length in lengths])
        return (text_model() if name == 'Llama' else mixtral()), rows
    case = FAMILIES[{'LLaVA': 'llava', 'Qwen2.5-VL': 'qwen2_5_vl'}[name]]()
    samples = [one for seed in range(6) for one in ragged_samples(with_images=True, seed=seed)]
    order = np.random.default_rng(0).permutation(len(samples))[: 2 * ROWS]
    return case.model, [{**case.encode(samples[one]), 'num_images': [len(samples[one].images)]} for one in order]


def mixtral() -> Any:
    """With a router loss that can be seen."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1, use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


class Checked:
    """A trainer's gradients without the routers' rightful part, and the factors of both parts."""

    def __init__(self, model: Any, gradients: Callable[[list[Batch]], Gradients], tokens: Gradients) -> None:
        self.model, self.gradients, self.tokens = model, gradients, tokens
        self.fits: list[dict[str, float]] = []

    def __call__(self, microbatches: list[Batch]) -> Gradients:
        environment = dict(os.environ)
        self.model.train().zero_grad(set_to_none=True)
        found = self.gradients(microbatches)
        os.environ.clear()  # Lightning takes WORLD_SIZE away
        os.environ.update(environment)
        self.model.zero_grad(set_to_none=True)
        if not getattr(self.model.config, 'output_router_logits', False):
            return found
        router = self._router(microbatches)
        self.fits.append(_fit(found, self.tokens, router))
        return {name: value - router[name] for name, value in found.items() if name in router}

    def _router(self, microbatches: list[Batch]) -> Gradients:
        """The mean of the microbatches' own router losses, over all ranks."""
        for batch in microbatches:
            loss = self.model.config.router_aux_loss_coef * self.model(**named(self.model, batch)).aux_loss
            (loss / len(microbatches) / dist.get_world_size()).backward()
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.model.named_parameters()}
        for value in found.values():
            dist.all_reduce(value)
        self.model.zero_grad(set_to_none=True)
        return found


def _fit(found: Gradients, tokens: Gradients, router: Gradients) -> dict[str, float]:
    """Least-squares factors of both parts in what was found, and the share of it that they leave unexplained."""
    names = sorted(found.keys() & tokens.keys() & router.keys())
    wanted, *parts = (torch.cat([part[name].flatten().double() for name in names]) for part in (found, tokens, router))
    matrix = torch.stack(parts, dim=1)
    factors = torch.linalg.lstsq(matrix, wanted).solution
    left = float((wanted - matrix @ factors).norm() / wanted.norm())
    return {'token_factor': factors[0].item(), 'router_factor': factors[1].item(), 'unexplained': left}


def token_mean(model: Any, batch: Batch) -> Gradients:
    """Of the mean over all tokens, by a plain forward."""
    model.train().zero_grad(set_to_none=True)
    logits, labels = model(**named(model, batch)).logits[:, :-1], batch['labels'][:, 1:]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    found = gradients_of(model)
    model.zero_grad(set_to_none=True)
    return found


def check(subject_name: str, trainer: str) -> dict[str, Any]:
    """One row: every case of the check."""
    model, rows = subject(subject_name)
    layout = BatchLayout.for_model(model)
    rank = dist.get_global_rank()
    everyone = rows[: ROWS * dist.get_world_size()]
    tokens = token_mean(model, dict(layout.with_media(layout.concat(everyone))))
    checked = Checked(model, ADAPTERS[trainer](model), tokens)
    own = everyone[rank * ROWS : (rank + 1) * ROWS]
    report = verify_invariance(
        checked, own, layout=layout, reference=lambda batch: token_mean(model, batch),
        microbatch_sizes=(1, 4, ROWS), padding_sides=('right',), tolerance=TOLERANCE,
    )  # fmt: skip
    cases = [asdict(case) for case in report.cases]
    for case, fit in zip(cases, checked.fits, strict=False):
        case |= fit
    say(f'{subject_name}, {dist.get_world_size()} ranks, {trainer}\n{report}')
    return {'subject': subject_name, 'ranks': dist.get_world_size(), 'trainer': trainer, 'cases': cases}


def main() -> None:
    warnings.simplefilter('ignore')
    parser = argparse.ArgumentParser()
    parser.add_argument('results', type=Path)
    parser.add_argument('--subjects', nargs='+', default=SUBJECTS)
    parser.add_argument('--rivals', nargs='+', default=list(ADAPTERS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.initialize_dist(get_device('cpu'))
    for noisy in ('transformers', 'lightning.pytorch', 'lightning', 'composer', 'accelerate'):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    rows = []
    for name in given.subjects:
        for trainer in given.rivals:
            try:
                rows.append(check(name, trainer))
            except Exception:
                if dist.get_world_size() > 1:
                    raise
                traceback.print_exc()
                rows.append({'subject': name, 'ranks': 1, 'trainer': trainer, 'error': traceback.format_exc()})
    if dist.get_global_rank() == 0:
        given.results.write_text(json.dumps(rows))


if __name__ == '__main__':
    main()
