# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Proves on a run's own model and data that its gradient does not depend on how a batch is cut.

    composer -n 2 -m composer_tokacc.verify yamls/digits.yaml [--rows 8] [--tolerance 1e-6] [key=value ...]

Takes at most `--rows` rows of the first global batch from each rank. Computes their gradient in one forward, and then
through the Trainer for several microbatch sizes, in order and regrouped, padded on either side. Prints the relative
error of each case, next to the error of stock Composer. Exit status 1 if an error of this package is over the
tolerance or a check refuses the run, 2 if the config is wrong. The default tolerance is 1e-6, and 1e-5 on a GPU. If the
model's round-off is larger, it becomes the tolerance up to 2e-4, and a note says so.

Dropout and the noise of routers are off. Weights are float32, without TF32. Trained parameters that are all zero, as in
a new adapter, get small values. FSDP is not used, because DDP computes the same gradient. Cuts do not pack rows, but
rows that the collator has packed stay packed.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from composer_tokacc.programs.process import command_line, prepare, without_warnings

if __name__ == '__main__':
    prepare(__doc__)  # before the imports that take seconds

import torch
from composer import DataSpec, Trainer
from composer.core import Algorithm, Callback, Event, State
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.loggers import Logger
from composer.utils import dist
from pydantic import Field
from torch import Tensor

from composer_tokacc.algorithm import TokenAccumulation
from composer_tokacc.algorithm.setup import check_trains_something
from composer_tokacc.batch import IGNORE_INDEX, Batch, check_batch, labels_of
from composer_tokacc.checks.first_batch import find_loss_rule, rule_batch
from composer_tokacc.checks.logits import router_loss_of
from composer_tokacc.checks.probe import Probe
from composer_tokacc.compat import Dropout
from composer_tokacc.counting import LossRule, document_starts, mask_document_starts
from composer_tokacc.data_spec import token_data_spec
from composer_tokacc.graph import empty_sum, tensors_in
from composer_tokacc.invariance import (
    DEFAULT_SIZES,
    Gradients,
    InvarianceCase,
    InvarianceReport,
    check_batches,
    compare_cuts,
    groups_of,
    joined,
    relative_error,
)
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.joining import with_masks
from composer_tokacc.layout.layout import layout_of_rows, split_trimmed
from composer_tokacc.layout.pre_split import widened
from composer_tokacc.layout.readings import joined_readings
from composer_tokacc.programs import ConfigError, TrainConfig
from composer_tokacc.programs.build import RunParts, build_parts
from composer_tokacc.programs.devices import runs_on_gpu
from composer_tokacc.programs.errors import refuse
from composer_tokacc.programs.registry import build_token_accumulation, uses_composers_flag, weights_tokens
from composer_tokacc.programs.runner import run_program
from composer_tokacc.programs.schema import Count, check_value
from composer_tokacc.refusals import NotExactError
from composer_tokacc.row_counts import without_row_counts
from composer_tokacc.weights import token_weights_of

SIDES = ('right', 'left')
"""Rows are padded on one side, then on the other."""
_TOLERANCE_OF_CPUS = 1e-6
_TOLERANCE_OF_GPUS = 1e-5
"""Higher, because GPU kernels sum in another order for another shape. An H200 had errors of 1.4e-6 in float32."""
COLUMNS_BEFORE = 8
"""Positions of padding that are added on the left to measure the round-off of a model."""
MOST_ROUND_OFF = 2e-4
"""Round-off becomes the tolerance only below this. For Gemma 4, padded on the left, it is 1.1e-4. Faults are larger:
wrong positions of tokens give an error of 1e-2."""
ROUND_OFF_NOTE = (
    'The round-off of this model is larger than the tolerance. So the tolerance is now the change of its gradient, in '
    f'one forward, if the rows come in reverse order and, padded on the left, with {COLUMNS_BEFORE} more positions of '
    'padding.'
)
_NAMES_OF_RANDOMNESS = re.compile('drop|jitter')
"""Matches the names of numbers that make a forward random: dropout rates, and the noise of routers of experts."""
ROUTER_NOTE = (
    'The load-balancing loss of the router is a statistic of each microbatch, so the gradient depends on the cut. With '
    '`algorithms.token_accumulation.router_balance=step` it does not.'
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; see the module's docstring."""
    parser = command_line(__doc__)
    parser.add_argument('--rows', type=int, default=8, help='rows of each rank, at most')
    parser.add_argument('--tolerance', type=float)
    options, overrides = parser.parse_known_args(arguments)
    try:
        check_value('--rows', options.rows, Count)
        if options.tolerance is not None:
            check_value('--tolerance', options.tolerance, Annotated[float, Field(gt=0, lt=1)])
    except ConfigError as error:
        return refuse(error, on_all_ranks=True)
    report = partial(_report, max_rows=options.rows, tolerance=options.tolerance)
    return run_program(report, options.config, overrides)


def _report(config: TrainConfig, *, max_rows: int, tolerance: float | None) -> int:
    """Prints the table and the verdict; returns 1 if the run is not exact.

    Without a tolerance, the default for the run's device is used.
    """
    if tolerance is None:
        tolerance = _TOLERANCE_OF_GPUS if runs_on_gpu(config) else _TOLERANCE_OF_CPUS
    try:
        # There are several Trainers, and each would warn and log.
        with without_warnings(), _without_logs_of_split():
            report = verify(config, max_rows=max_rows, tolerance=tolerance)
    except NotExactError as error:
        print(f'NOT exact: {error}', file=sys.stderr, flush=True)
        return 1
    if dist.get_global_rank() == 0:
        print(f'\n{report}', flush=True)
    return 0 if report.is_exact else 1


@contextmanager
def _without_logs_of_split() -> Iterator[None]:
    """Hides warnings of the split about rows over a cap, such as the token budget of a microbatch.

    They would be about microbatches that the run does not have.
    """
    split_logger = logging.getLogger('composer_tokacc.data_spec')
    level = split_logger.level
    split_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        split_logger.setLevel(level)


def verify(config: TrainConfig, *, max_rows: int = 8, tolerance: float = 1e-6) -> InvarianceReport:
    """Compares gradients of the first global batch of a run; returns the same report on all ranks.

    Args:
        config: The run.
        max_rows: The largest number of rows that are taken from each rank. It is small, because every rank computes one
            forward over the rows of all ranks. If a rank has fewer rows, all ranks take as many as that rank has.
        tolerance: Largest relative error that is taken for round-off. The program has 1e-5 on a GPU.

    Raises:
        RuntimeError: If the run does not weight microbatches by tokens, trains nothing, or is refused by a check.
        ConfigError: If there are fewer than two rows, or their loss has no gradient.
        ValueError: If the batch of a rank is not valid, or the gradient of one forward is zero or not finite.
    """
    if not weights_tokens(config):
        raise NotExactError(
            'The run must weight its microbatches by their tokens, got: no `token_accumulation` in `algorithms`, so '
            'Composer weights them by their samples. Add it: `algorithms.token_accumulation={}`.'
        )
    run = _VerifiedRun(config, max_rows)
    # Calls `reference_gradients` for each side, and then `cases` with the side and these gradients.
    report = compare_cuts(SIDES, run.reference_gradients, run.cases, tolerance=tolerance)
    if report.is_exact:
        return report
    # The load-balancing loss of a router depends on the cut by definition.
    if run.options.router_balance == 'microbatch' and run.has_router_loss:
        return replace(report, note=ROUTER_NOTE)
    # Even plain forwards of the same rows may differ by more than the tolerance. Then this round-off of the model
    # becomes the tolerance, but only below MOST_ROUND_OFF.
    round_off = run.round_off()
    if tolerance < round_off < MOST_ROUND_OFF:
        report_with_round_off = replace(report, tolerance=round_off, note=ROUND_OFF_NOTE)
        if report_with_round_off.is_exact:
            return report_with_round_off
    return report


class _VerifiedRun:
    """A run's model in float32, rows of its first batch, and the options of its TokenAccumulation.

    All ranks must build it together, because they exchange their rows.
    """

    def __init__(self, config: TrainConfig, max_rows: int) -> None:
        self.config = config
        self.parts = _build_deterministic_parts(config)
        # Without TF32, because its round-off would be taken for an error. The device comes after the parts, because
        # build_parts() also makes one, and Composer then switches TF32 on.
        self.device: Device = DeviceGPU(allow_tf32=False) if runs_on_gpu(config) else DeviceCPU()
        self.device.module_to_device(self.parts.model)
        first_batch = next(iter(self.parts.train_loader.dataloader))
        check_batches([first_batch], check_batch)  # all ranks raise if the batch of one is refused
        self.layout = _layout_on_all_ranks(BatchLayout.for_model(self.parts.model), first_batch)
        self.rows = _rows(first_batch, self.layout, max_rows)
        """Single rows of this rank."""
        self.rows_of_all_ranks = joined(dist.all_gather_object(self.rows))
        if len(self.rows_of_all_ranks) < 2:
            raise ConfigError(
                'loader.global_batch_size',
                f'and --rows must leave rows to cut apart, got: {len(self.rows_of_all_ranks)}',
            )
        # A run with Composer's flag has no TokenAccumulation, so it gets the default options.
        algorithm = build_token_accumulation(config) or TokenAccumulation()
        self.options = algorithm.options
        self.has_router_loss = False
        """Whether the model has returned a load-balancing loss of a router. Set by forward_gradients()."""
        is_packed = any(document_starts(row) is not None for row in self.rows_of_all_ranks)
        needs_rule = self.options.is_weighted or is_packed
        self.rule = self._rule_of_run() if needs_rule else None
        """Over which labels the model averages its loss. None if neither token weights nor packed rows need it."""
        # As with_counts() of row_counts.py does in every batch of a run, if the rule shifts labels.
        self.masks_document_starts = is_packed and self.rule is not None and self.rule.shifts_labels
        """Whether the run leaves out the first label of each further document of a packed row."""

    def _rule_of_run(self) -> LossRule:
        """Returns the loss rule of the model. Raises RuntimeError if nothing shows it, or the user has named another.

        With ``check_loss=False``, and without token weights, a run believes the user. So does this function.
        """
        options = self.options
        named_rule = options.rule
        if uses_composers_flag(self.config):  # such a run gives its rule to token_data_spec()
            named_rule = LossRule.named(self.config.microbatching.loss_tokens)
        if named_rule is not None and not options.needs_loss_check:
            return named_rule
        # One row, with labels that tell the rules apart, is enough to find the rule.
        row = rule_batch(self.layout, self.layout.concat(self.rows_of_all_ranks))
        on_device = self.device.batch_to_device(self.layout.with_media(row))
        return find_loss_rule(Probe.from_model(self.parts.model), on_device, named_rule=named_rule)

    def round_off(self) -> float:
        """Returns how much round-off changes the gradient of one forward, as a relative error.

        Compares with a second forward that has the rows in reverse order, and more padding on the left. This moves the
        tokens to other positions, so their rotary embedding is rounded in another way. Without round-off the gradient
        would be the same.
        """
        batch = self.layout.concat(self.rows_of_all_ranks[::-1], padding_side='left')
        (batch,) = with_masks([batch])  # or the model would attend to the added padding
        # `widened` rounds up to a multiple. A multiple that is larger than the width is the new width.
        wider = widened(batch, width_multiple=self.layout.width(batch) + COLUMNS_BEFORE, side='left')
        error, _worst_parameter = relative_error(self.forward_gradients(wider), self.reference_gradients('left'))
        return error

    def reference_gradients(self, padding: str) -> Gradients:
        """Returns the gradient of one plain forward over the rows of all ranks."""
        return self.forward_gradients(self.layout.concat(self.rows_of_all_ranks, padding_side=padding))

    def forward_gradients(self, batch: Batch) -> Gradients:
        """Returns the gradient of one forward without the Trainer, so that nothing of it can scale the loss.

        The loss is the model's own. With token weights, a weighted mean replaces its mean over tokens. In packed rows
        it leaves out the same labels as the run. Notes whether the model has a router loss. Refuses rows whose loss has
        no gradient.
        """
        model = self.parts.model.train()
        if self.masks_document_starts:
            batch = mask_document_starts(batch)
        batch = self.device.batch_to_device(self.layout.with_media(batch))
        model.zero_grad(set_to_none=True)
        outputs = model(batch)
        loss = model.loss(outputs, batch)
        if self.options.is_weighted:
            loss = self._with_weighted_mean(loss, outputs.logits, batch)
        if not loss.requires_grad:
            raise ConfigError(
                '--rows',
                f'must take rows that train something, got: {self.layout.num_rows(batch)} rows whose loss has no '
                'gradient. If only an encoder of images is trained, one row must have an image. Take more rows',
            )
        loss.backward()
        gradients = _read_gradients(model)
        model.zero_grad(set_to_none=True)
        self.has_router_loss |= router_loss_of(outputs) is not None
        return gradients

    def _with_weighted_mean(self, loss: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the loss with a weighted mean over tokens in the place of the plain mean.

        Other terms of the loss, such as a router loss, have no token weights, and stay as they are.
        """
        assert self.rule is not None, 'it is found for token weights'
        weights_of_labels = token_weights_of(batch, self.options.token_weights, self.rule)
        weights = self.rule.at_predictions(weights_of_labels)
        targets = self.rule.targets(batch)
        # cross_entropy takes the vocabulary as dimension 1.
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction='none')
        num_tokens = (targets != IGNORE_INDEX).sum()
        plain_mean = losses.sum() / num_tokens
        weighted_mean = (losses * weights).sum() / weights.sum()
        return loss - plain_mean + weighted_mean

    def cases(self, padding: str, expected: Gradients) -> list[InvarianceCase]:
        """Compares three cuts for each microbatch size: stock Composer, and this package in order and regrouped."""
        batch = self.layout.concat(self.rows, padding_side=padding)
        sizes = _sizes_of_steps(len(self.rows), padding)
        compare = partial(InvarianceCase.from_gradients, expected=expected, padding=padding)
        # The error of stock Composer is only shown. It may be over the tolerance.
        stock = _ComparedSteps(sizes, partial(compare, cut='stock Composer', is_held=False))
        # In reverse order, see _sizes_of_steps().
        in_order = _ComparedSteps(sizes[::-1], partial(compare, cut='in order'))
        regrouped = _ComparedSteps(sizes, partial(compare, cut='regrouped'))
        self._fit_stock(batch, stock)
        self._fit_ours(batch, in_order, regroup=False)
        self._fit_ours(batch, regrouped, regroup=True)
        cases = [*stock.cases, *in_order.cases, *regrouped.cases]
        # The cases of one size stand together in the table.
        return sorted(cases, key=lambda case: case.microbatch_size)

    def _fit_stock(self, batch: dict[str, Any], steps: _ComparedSteps) -> None:
        """Trains with stock Composer, on microbatches of rows in order."""
        rows = range(self.layout.num_rows(batch))

        # Composer's own split does not know which images belong to a row.
        def split(batch: Batch, microbatch_size: int | float) -> Sequence[Batch]:
            return self.layout.split(batch, groups_of(rows, int(microbatch_size)))

        data = DataSpec(
            steps.copies_of(batch),
            split_batch=split,
            microbatch_transforms=self.layout.with_media,
            get_num_samples_in_batch=self.layout.num_rows,
        )
        # Without this hook and UnusedParameters, stock Composer could fail on a microbatch without images.
        with self.parts.model.register_forward_hook(_give_outputs_a_gradient):
            self._fit(data, steps, UnusedParameters())

    def _fit_ours(self, batch: dict[str, Any], steps: _ComparedSteps, *, regroup: bool) -> None:
        """Trains with this package. A microbatch size of n limits microbatches to the tokens of n padded rows."""
        # With Composer's flag Composer itself weights the microbatches, and the data spec counts loss tokens by the
        # model's loss rule. TokenAccumulation counts them itself.
        uses_flag = uses_composers_flag(self.config)
        counted_model = self.parts.model if uses_flag else None
        data = token_data_spec(
            steps.copies_of(batch),
            layout=self.layout,
            regroup=regroup,
            model=counted_model,
            loss_tokens=self.config.microbatching.loss_tokens,
        )
        # A run with Composer's flag has no TokenAccumulation.
        algorithm = build_token_accumulation(self.config) or UnusedParameters()
        self._fit(data, steps, algorithm, uses_flag=uses_flag)

    def _fit(
        self,
        data: DataSpec,
        steps: _ComparedSteps,
        algorithm: Algorithm,
        *,
        uses_flag: bool = False,
    ) -> None:
        """Trains the steps with learning rate 0, so that each of them starts from the same weights.

        ``uses_flag`` is Composer's ``accumulate_train_batch_on_tokens``.
        """
        model = self.parts.model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        trainer = Trainer(
            model=model,
            train_dataloader=data,
            optimizers=torch.optim.SGD(trained, lr=0.0),
            max_duration=f'{len(steps.sizes)}ba',
            device=self.device,
            device_train_microbatch_size=steps.sizes[0],
            algorithms=[algorithm],
            callbacks=[steps],
            accumulate_train_batch_on_tokens=uses_flag,
            precision='fp32',
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()


def _sizes_of_steps(num_rows: int, padding: str) -> list[int]:
    """Returns the microbatch size of each step of a fit, all sizes that differ for this number of rows.

    An error may show only in the first step of a fit, or only in later ones, and only with one size. So each size
    should begin a fit of this package on one of the sides. This package has two fits a side. One has the sizes in this
    order, the other in reverse. With the sizes 1, 2, 3 and 8 they begin as follows:

    - padded on the right, the order is 1, 2, 3, 8: the fits begin with 1 and 8;
    - padded on the left, the order is 3, 8, 1, 2: the fits begin with 3 and 2.

    One or two sizes have the same order on both sides, because each of them begins a fit anyway.
    """
    sizes = sorted({min(size, num_rows) for size in DEFAULT_SIZES})
    if padding == 'left':
        return sizes[2:] + sizes[:2]
    return sizes


def _layout_on_all_ranks(layout: BatchLayout, batch: Batch) -> BatchLayout:
    """Returns a layout for rows that are selected from the batches of all ranks; a collective.

    An unregistered tensor may have several readings, such as one entry for each row or for each image. Keeps the ones
    that fit the batches of all ranks.
    """
    layout = layout_of_rows(layout, [batch])
    readings = layout.readings
    for readings_of_rank in dist.all_gather_object(readings):
        readings = joined_readings(readings, readings_of_rank)
    return layout.with_readings(readings)


def _rows(batch: Batch, layout: BatchLayout, max_rows: int) -> list[dict[str, Any]]:
    """Returns single rows of this rank's batch; a collective. All ranks get equally many, and compute the same cuts.

    If a global batch has fewer samples than ranks, the loader gives some ranks a copy of a sample, without labels. The
    row counts of the copy say 0 samples. Here all row counts are dropped, so the copy is a row like any other.
    """
    num_rows = layout.num_rows(batch)
    num_chosen = min(max_rows, *dist.all_gather_object(num_rows))
    # From the row with the fewest labels to the one with the most, because with equal numbers a wrong mean of means
    # would pass. Evenly spread, because rows of similar length lie next to each other in a planned batch.
    num_labels = (labels_of(batch) != IGNORE_INDEX).sum(dim=1)
    rows_by_labels = num_labels.argsort(stable=True).tolist()
    places = torch.linspace(0, num_rows - 1, num_chosen).tolist()
    chosen = sorted(rows_by_labels[round(place)] for place in places)
    groups = [[row] for row in chosen]
    return [without_row_counts(row) for row in split_trimmed(layout, batch, groups)]


class UnusedParameters(Algorithm):
    """Lets a fit without TokenAccumulation run under DDP if a microbatch of text leaves the vision encoder unused."""

    @property
    def find_unused_parameters(self) -> bool:
        """Tells Composer to set the option of DDP with this name."""
        return True

    def match(self, event: Event, state: State) -> bool:
        """Matches no event."""
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Is never called."""
        raise AssertionError('matches no event')


def _give_outputs_a_gradient(model: torch.nn.Module, batch: tuple[Batch], outputs: Any) -> None:
    """Gives the outputs of a microbatch a gradient of 0 if they have none. This is a forward hook.

    If only the projector is trained, a microbatch of text has no gradient, and the backward of stock Composer would
    raise. A zero that is added to the loss, outside of DDP, would be too late: DDP marks the parameters that the
    outputs do not reach as unused, and refuses a gradient of them.
    """
    if any(value.requires_grad for value in tensors_in(outputs)):
        return
    zero = empty_sum(next(parameter for parameter in model.parameters() if parameter.requires_grad))
    for name, value in list(outputs.items()):
        if isinstance(value, torch.Tensor):
            outputs[name] = value + zero


class _ComparedSteps(Callback):
    """Steps of one fit, each on the same rows with another microbatch size. Compares the gradient of each step.

    One fit has all sizes, because its first-batch check takes more time than a step. The check compares one
    row alone with several rows together. So what it proves does not depend on the microbatch size.

    Args:
        sizes: The microbatch size of each step.
        compare: Compares gradients with the expected ones; a collective. Gets the gradients and ``microbatch_size``.
    """

    def __init__(self, sizes: Sequence[int], compare: Callable[..., InvarianceCase]) -> None:
        self.sizes = sizes
        self.cases: list[InvarianceCase] = []
        """The case of each step that has ended."""
        self._compare = compare

    def copies_of(self, batch: Batch) -> list[Batch]:
        """Returns a copy of the batch for each step."""
        return [dict(batch) for _ in self.sizes]

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Sets the microbatch size of the next step. At BATCH_START the algorithm already reads it."""
        state.device_train_microbatch_size = self.sizes[state.timestamp.batch.value]

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Compares the gradient of the step, before the optimizer may change it."""
        size = self.sizes[state.timestamp.batch.value]
        case = self._compare(_read_gradients(state.model), microbatch_size=size)
        self.cases.append(case)


def _read_gradients(model: torch.nn.Module) -> Gradients:
    """Returns copies of the gradients, by the names of their parameters in the model inside of DDP."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name.removeprefix('module.')] = parameter.grad.clone()
    return gradients


def _build_deterministic_parts(config: TrainConfig) -> RunParts:
    """Builds the model and the loaders of a run, and changes the model so that only errors make gradients differ."""
    # In float32, because the round-off of a shorter type would hide an error.
    model_section = replace(config.model, dtype='float32')
    parts = build_parts(replace(config, model=model_section))
    check_trains_something(parts.model)
    _switch_off_noise(parts.model)
    _fill_zero_parameters(parts.model)
    return parts


def _switch_off_noise(model: torch.nn.Module) -> None:
    """Switches off dropout and the noise of routers, because they differ between cuts."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        # Some layers read such a number from an attribute in each forward, others from their config.
        for holder in (module, getattr(module, 'config', None)):
            for name, value in list(getattr(holder, '__dict__', {}).items()):
                if isinstance(value, float) and _NAMES_OF_RANDOMNESS.search(name):
                    setattr(holder, name, 0.0)


def _fill_zero_parameters(model: torch.nn.Module) -> None:
    """Replaces trained parameters that are all zero by small random values.

    The matrix B of a new LoRA adapter is zero. Then the gradient of A is zero too, and no error could show in it.
    """
    # A fixed seed on the CPU, so that all ranks draw the same values. 0.02 is usual for new weights.
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


if __name__ == '__main__':
    sys.exit(main())
