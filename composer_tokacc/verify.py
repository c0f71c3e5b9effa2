# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Proves on a run's own model and data that its gradient does not depend on how a batch is cut.

    composer -n 2 -m composer_tokacc.verify yamls/digits.yaml [--rows 8] [--tolerance 1e-6] [key=value ...]

Takes the first global batch, computes its gradient once whole, and then through the Trainer for every microbatch size,
split and padding side. Prints the relative error of each beside stock Composer's. Exit status 1 if one of ours is over
the tolerance, 2 if the config is wrong. Dropout is off, weights are float32, adapters have left zero, and FSDP is left
out: DDP computes the same gradient.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any

from composer_tokacc.programs.process import prepare

if __name__ == '__main__':
    prepare(__doc__)

import torch
from composer import DataSpec, Trainer
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.utils import dist
from pydantic import Field
from torch.utils.data import DataLoader, IterableDataset

from composer_tokacc.algorithm import TokenAccumulation
from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.checks.first_batch import find_loss_rule, rule_batch
from composer_tokacc.checks.logits import at_predictions, router_loss_of, targets_of
from composer_tokacc.checks.probe import Probe
from composer_tokacc.compat import Dropout
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.invariance import Gradients, InvarianceCase, InvarianceReport, relative_error
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.programs import ConfigError, TrainConfig
from composer_tokacc.programs.build import RunParts, build_parts
from composer_tokacc.programs.errors import raised_here, refuse
from composer_tokacc.programs.process import command_line, without_warnings
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.schema import Count, check_value
from composer_tokacc.weights import token_weights_of

SIDES = ('right', 'left')
COLUMNS_BEFORE = 8
MOST_ROUND_OFF = 2e-4
"""Gemma 4's is 1.1e-4, padded on the left; positions that a wrong cut moves make 1e-2."""
ROUND_OFF_NOTE = (
    'Round-off of this model is larger: the tolerance is what one forward over the same rows differs by, the last row '
    f'first and, padded on the left, with {COLUMNS_BEFORE} columns more of padding.'
)
ROUTER_NOTE = (
    'The load-balancing loss of the router is a statistic of each microbatch, so the gradient depends on the cut. That '
    'of the step does not: `algorithms.token_accumulation.router_balance=step`.'
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see the module's docstring."""
    parser = command_line(__doc__)
    parser.add_argument('--rows', type=int, default=8, help='rows of each rank, at most')
    parser.add_argument('--tolerance', type=float, default=1e-6)
    given, overrides = parser.parse_known_args(arguments)
    try:
        check_value('--rows', given.rows, Count)
        check_value('--tolerance', given.tolerance, Annotated[float, Field(gt=0, lt=1)])
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    return run_program(partial(_report, given.rows, given.tolerance), given.config, overrides)


def _report(max_rows: int, tolerance: float, config: TrainConfig) -> int:
    """Prints the table and the verdict; gives 1 where the run is not exact."""
    try:
        with without_warnings(), _without_caps():  # a Trainer for every case
            report = verify(config, max_rows=max_rows, tolerance=tolerance)
    except RuntimeError as error:  # TokenAccumulation says why the run cannot be exact
        if type(error) is not RuntimeError or not raised_here(error):
            raise
        print(f'NOT exact: {error}', file=sys.stderr, flush=True)
        return 1
    if dist.get_global_rank() == 0:
        print(f'\n{report}', flush=True)
    return 0 if report.is_exact else 1


@contextmanager
def _without_caps() -> Iterator[None]:
    """Leaves out what a split says of its caps, which are of one to three rows here and not those of the run."""
    of_split = logging.getLogger(token_data_spec.__module__.rpartition('.')[0])
    level = of_split.level
    of_split.setLevel(logging.ERROR)
    try:
        yield
    finally:
        of_split.setLevel(level)


def verify(config: TrainConfig, *, max_rows: int = 8, tolerance: float = 1e-6) -> InvarianceReport:
    """Compares gradients of the first global batch of a run, the same on all ranks.

    Args:
        config: The run.
        max_rows: Rows of each rank, at most: the whole global batch goes through one forward on every rank. Where a
            rank has fewer, all take as many.
        tolerance: Largest relative error that is taken for round-off.
    """
    # In a shorter type, round-off would hide what is looked for.
    parts = build_parts(replace(config, model=replace(config.model, dtype='float32')))
    _steady(parts.model)
    layout = BatchLayout.for_model(parts.model)
    rows = _rows(next(iter(parts.train_loader.dataloader)), layout, max_rows)
    everyone = [row for rows_of_rank in dist.all_gather_object(rows) for row in rows_of_rank]
    if len(everyone) < 2:
        raise ConfigError('loader.global_batch_size', f'and --rows must leave rows to cut apart, got: {len(everyone)}')
    given = config.algorithms.get('token_accumulation') or {}
    weights, balance = given.get('token_weights', 'token'), given.get('router_balance', 'microbatch')
    rule = ''
    if weights != 'token':
        labelled = max(everyone, key=lambda row: int((row['labels'] != IGNORE_INDEX).sum()))
        probed = _on_device(parts.model, layout.with_media(rule_batch(layout, labelled)))
        rule = find_loss_rule(Probe.from_model(parts.model), probed)
    cases, references, has_router_loss = [], [], False
    for padding in SIDES:
        together = layout.with_media(layout.concat(everyone, padding_side=padding))
        expected, has_router_loss = _whole_gradient(parts, together, weights, rule)
        references.append(expected)
        own = layout.concat(rows, padding_side=padding)
        cases += _cases(parts, layout, own, padding, expected, token_weights=weights, router_balance=balance)
    report = InvarianceReport(cases=tuple(cases), tolerance=tolerance)
    if report.is_exact or (has_router_loss and balance == 'microbatch'):
        return report if report.is_exact else replace(report, note=ROUTER_NOTE)
    round_off = 0.0
    for padding, expected in zip(SIDES, references, strict=True):
        moved = layout.concat(everyone[::-1], padding_side=padding)
        moved = widened(moved, layout.width(moved) + COLUMNS_BEFORE) if padding == 'left' else moved
        found, _ = _whole_gradient(parts, layout.with_media(moved), weights, rule)
        round_off = max(round_off, relative_error(found, expected)[0])
    held = replace(report, tolerance=round_off, note=ROUND_OFF_NOTE)
    return held if tolerance < round_off < MOST_ROUND_OFF and held.is_exact else report


def _rows(batch: Mapping[str, Any], layout: BatchLayout, most: int) -> list[dict[str, Any]]:
    """Returns single rows of this rank's batch: as many on every rank, so that all go through the same cases."""
    num_rows = layout.num_rows(batch)
    num_chosen = min(most, *dist.all_gather_object(num_rows))
    # Evenly spread, since a planned batch has rows of like length beside each other.
    chosen = [round(place) for place in torch.linspace(0, num_rows - 1, num_chosen).tolist()]
    return [layout.trim(layout.select(batch, [row])) for row in chosen]


def _cases(
    parts: RunParts, layout: BatchLayout, batch: dict[str, Any], padding: str, expected: Gradients, **settings: Any
) -> Iterator[InvarianceCase]:
    """Gives the cases of stock Composer, with a split that keeps image rows, and ours."""
    num_rows = layout.num_rows(batch)

    def stock(batch: dict[str, Any], size: int | float) -> list[dict[str, Any]]:
        starts = range(0, num_rows, int(size))
        return [layout.select(batch, range(start, min(start + int(size), num_rows))) for start in starts]

    sizes = [size for size in sorted({1, 2, 3, num_rows}) if size <= num_rows]
    for size, (cut, regroup) in product(sizes, (('stock Composer', None), ('in order', False), ('regrouped', True))):
        loader = DataLoader(_OneBatch(batch), batch_size=None)
        if regroup is None:
            algorithm, data = UnusedParameters(), DataSpec(
                loader, split_batch=stock, microbatch_transforms=layout.with_media,
                get_num_samples_in_batch=lambda batch: len(batch['input_ids']),
            )  # fmt: skip
        else:
            algorithm, data = TokenAccumulation(**settings), token_data_spec(loader, layout=layout, regroup=regroup)
        found = _trained_gradient(parts, data, size, algorithm)
        yield InvarianceCase.from_gradients(
            found, expected, cut=cut, padding=padding, microbatch_size=size, is_held=regroup is not None
        )


class _OneBatch(IterableDataset):
    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield dict(self.batch)


class UnusedParameters(Algorithm):
    """Stock Composer needs this under DDP where a microbatch of text alone leaves a vision tower unused."""

    @property
    def find_unused_parameters(self) -> bool:
        """What DDP is asked for."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """At no event."""
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Never called."""
        raise AssertionError('matches no event')


class _Recorder(Callback):
    """Keeps the gradients before the optimizer sees them."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.gradients = _gradients_of(state.model)


def _trained_gradient(parts: RunParts, data: DataSpec, size: int, algorithm: Algorithm) -> Gradients:
    recorder = _Recorder()
    trainer = Trainer(
        model=parts.model,
        train_dataloader=data,
        optimizers=torch.optim.SGD([p for p in parts.model.parameters() if p.requires_grad], lr=0.0),
        max_duration='1ba',
        device_train_microbatch_size=size,
        algorithms=[algorithm],
        callbacks=[recorder],
        precision='fp32',
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return recorder.gradients


def _on_device(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _whole_gradient(parts: RunParts, batch: Mapping[str, Any], weights: str, rule: str) -> tuple[Gradients, bool]:
    """Returns the gradient of one plain forward over the global batch, and whether its loss holds a router's.

    No Trainer, no scaling, the model's own mean. Where tokens do not all weigh the same, their mean is computed here,
    of the logits.
    """
    model = parts.model.train()
    batch = _on_device(model, batch)
    model.zero_grad(set_to_none=True)
    outputs = model(batch)
    if weights == 'token':
        loss = model.loss(outputs, batch)
    else:
        weight, _ = token_weights_of(batch, weights, rule)
        weight = at_predictions(weight, rule)
        targets = targets_of(batch, rule)
        losses = torch.nn.functional.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction='none')
        loss = (losses * weight).sum() / weight.sum()
    loss.backward()
    gradients = _gradients_of(model)
    model.zero_grad(set_to_none=True)
    return gradients, router_loss_of(outputs) is not None


def _gradients_of(model: torch.nn.Module) -> Gradients:
    """Returns them by name, as the model has it before DDP is around it."""
    named = ((name.removeprefix('module.'), p) for name, p in model.named_parameters())
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _steady(model: torch.nn.Module) -> None:
    """Switches off dropout, whose masks would differ, and moves what is trained and all zero.

    That is a fresh adapter's B, without which A has no gradient that could be wrong.
    """
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        for name in ('attention_dropout', 'dropout'):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


if __name__ == '__main__':
    sys.exit(main())
