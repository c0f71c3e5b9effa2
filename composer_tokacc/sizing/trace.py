# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Traces steps of the run's own model without allocating its memory.

Weights and activations are fake tensors, which have a size but no memory. The batch is real. :class:`StepTracer` runs
one microbatch as a step. It measures the bytes at the peak, part by part, or counts the operations.
:func:`calibrate_fake` fits a memory model to a few traced microbatches, and :func:`count_flops` fits a model of the
operations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig

from composer_tokacc.arguments import check_choice
from composer_tokacc.batch import Batch
from composer_tokacc.compat import (
    DataDependentOutputException,
    attention_of,
    let_fake_weights_be_swapped,
    tree_iter,
)
from composer_tokacc.counting import LossRule
from composer_tokacc.labelled import LabelSelector
from composer_tokacc.layout import BatchLayout
from composer_tokacc.model_structure import forward_parameters, input_embedding, output_embedding, transformers_model
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.sizing.memory_model import (
    ActivationFit,
    MemoryModel,
    StaticBytes,
    activation_bytes,
    bytes_of_states,
    fit_activations,
    relative_fit,
)
from composer_tokacc.sizing.shapes import BatchShape, probe_batches, with_spaced_labels
from composer_tokacc.sizing.torch_modes import CudaAutocast, MemoryTracker, OnesForValues, RealInputs, SharedFakeMode

log = logging.getLogger(__name__)

AUTOCAST = {'fp32': None, 'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
"""The type in which autocast computes, by the name of Composer's precision. None: no autocast."""
TEXT_TERMS = ('tokens', 'area')
"""Attributes of ``BatchShape`` that set the operations of the language model: ``tokens`` (rows x width) in linear
layers, ``area`` (rows x width^2) in attention."""
MEDIA_TERMS = ('image_tokens', 'image_area')
"""The same two sizes for the vision encoder."""
FLOP_TERMS = TEXT_TERMS + MEDIA_TERMS
LOGITS_CHOICES = ('all', 'labels', 'auto')
"""Where logits are computed: see `calibrate_fake`."""
LABEL_SPACINGS = (4, 16, 1, 32, 2, 8)
"""For logits at labels, each traced microbatch has a label at every n-th position, with another n for each. So the
number of labels is not in proportion to the number of positions, and the fit can tell their bytes apart. A run may have
a label at every position, so 1 is among the first four: without images only four microbatches are traced."""

PHASES = ('forward', 'loss', 'head', 'blocks', 'embedding')
"""The phases of a traced step. They follow each other, and each has a peak:

* ``forward``: the forward pass. Ends when the output embedding (the head) is called.
* ``loss``: the head and the loss, and the backward pass of the loss. Ends when the gradient reaches the logits.
* ``head``: the backward pass of the head. Ends when the gradient reaches the hidden states.
* ``blocks``: the backward pass of the blocks. Ends when the gradient reaches the output of the input embedding.
* ``embedding``: the backward pass of the input embedding, and all else up to the end of the step.

Which one has the highest peak depends on the shape of the microbatch. The two embeddings have phases of their own,
because the gradients of their weights are large, and do not depend on the shape."""

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class MicrobatchPeaks(NamedTuple):
    """Bytes that one microbatch takes on top of parameters, gradients, optimizer states and inputs.

    The logits of the microbatch before it are included, because Composer still holds them, see
    ``StepTracer._logits_of_previous_microbatch``.
    """

    shape: BatchShape
    phases: Mapping[str, Mapping[str, int]]
    """Bytes at the peak of each phase (``PHASES``), by part (``TRACKED_PARTS`` of ``torch_modes.py``)."""


class _PhaseRecorder:
    """Records the bytes at the peak of each phase of a step, from when it is made until :meth:`finish`.

    Bytes that are in memory when it is made do not count.
    """

    def __init__(self, model: nn.Module, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._bytes_before = dict(tracker.current)
        self._peaks: dict[str, dict[str, int]] = {}
        """Bytes by part at the peak of each phase that has ended."""
        self._handles = self._add_hooks(model)
        tracker.restart_peak()

    def finish(self) -> dict[str, dict[str, int]]:
        """Ends the last phase. Returns the bytes by part at the peak of each phase."""
        # The ends of other phases may not have been seen: no gradient came, or the model does not name an embedding. If
        # the end of a phase was not seen, the phase that ends next has its peak. The highest peak stays the same.
        for phase in PHASES:
            self._end(phase)
        for handle in self._handles:
            handle.remove()
        return self._peaks

    def _end(self, phase: str, *_: object) -> None:
        """Ends a phase. It may be called several times, as a hook of several tensors: only the first call counts."""
        if phase in self._peaks:
            return
        peaks = {}
        for part, num_bytes in self._tracker.peak.items():
            peaks[part] = num_bytes - self._bytes_before[part]
        self._peaks[phase] = peaks
        self._tracker.restart_peak()

    def _end_at_gradient(self, phase: str, values: object) -> None:
        """Ends a phase when the gradient reaches one of the tensors in ``values``."""
        # Not a backward hook on the module, because with one torch forbids the model to change the tensor in place.
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(partial(self._end, phase))

    def _add_hooks(self, model: nn.Module) -> list[RemovableHandle]:
        """Adds hooks to the model that end each phase except the last (``PHASES``)."""

        def before_head(module: nn.Module, args: object) -> None:
            self._end('forward')
            self._end_at_gradient('head', args)

        def after_head(module: nn.Module, args: object, outputs: object) -> None:
            self._end_at_gradient('loss', outputs)

        def after_embedding(module: nn.Module, args: object, embedded: object) -> None:
            self._end_at_gradient('blocks', embedded)

        head = output_embedding(model)
        embedding = input_embedding(model)
        handles = []
        if head is not None:
            # Before the hook of the selector, so that it gets the hidden states of all positions, not only at labels.
            handles.append(head.register_forward_pre_hook(before_head, prepend=True))
            handles.append(head.register_forward_hook(after_head))
        if embedding is not None:
            handles.append(embedding.register_forward_hook(after_embedding))
        return handles


class StepTracer:
    """Runs steps of one microbatch with fake tensors, forward and backward, and counts the bytes that they would take.

    The attribute ``static`` holds the bytes that do not depend on the microbatch.

    Args:
        build: Makes the model.
        first_batch: A small batch, with images if the run has any, so that every trained parameter gets a gradient.
        make_optimizer, precision, strategy, on_gpu: See :func:`.calibrate_fake`.
        logits: ``'all'`` or ``'labels'``.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        first_batch: Batch,
        *,
        make_optimizer: MakeOptimizer = torch.optim.AdamW,
        precision: str = 'fp32',
        strategy: str = 'ddp',
        on_gpu: bool = True,
        logits: str = 'all',
    ) -> None:
        check_choice('precision', precision, tuple(AUTOCAST))
        check_choice('strategy', strategy, ('ddp', 'fsdp'))
        # Real inputs are allowed, because a model may compute with a tensor that exists already, such as a constant of
        # its module.
        self._mode = SharedFakeMode(allow_non_fake_inputs=True)
        with self._mode, let_fake_weights_be_swapped():  # otherwise a cast in `build` (`model.to(dtype)`) fails
            self.model: Any = transformers_model(build())
        self.layout = BatchLayout.for_model(self.model)
        self.strategy = strategy
        self.vocab_size = self.model.config.get_text_config().vocab_size
        self._autocast_dtype = AUTOCAST[precision]
        self._on_gpu = on_gpu
        self._forward_parameters = forward_parameters(self.model)
        # Type of the logits of the last microbatch. None: there was no microbatch yet, or its outputs had no logits.
        self._logits_dtype: torch.dtype | None = None
        self._selector: LabelSelector | None = None
        if logits == 'labels':
            self._selector = LabelSelector(self.model)
        self._tracker = MemoryTracker(self.model, self.vocab_size)
        # This step brings the tracer into the state that it has before all microbatches of a run except the first:
        # gradients are in memory, and `_step` knows the type of the logits of the microbatch before it.
        self._step(first_batch)
        self.static = self._count_static(make_optimizer)
        if strategy == 'fsdp' and self._autocast_dtype is not None:
            # FSDP computes with a cast copy of the parameters. The optimizer works on the parameters before the cast,
            # so its states were counted first.
            with self._mode, let_fake_weights_be_swapped():
                self.model.to(self._autocast_dtype)
            self._tracker.note_parameters(self.model)  # the cast has made new tensors
            self._step(first_batch)  # again, so that the next microbatch begins with gradients of the cast type

    def measure(self, batch: Batch) -> MicrobatchPeaks | None:
        """Returns the peaks of one microbatch. Gradients do not count, because the first step has left them in memory.

        Returns None if the loss needs no gradient, for example without images if only the projector is trained. Such a
        microbatch has no backward pass, so nothing can be fitted to it.
        """
        recorder = _PhaseRecorder(self.model, self._tracker)
        has_gradient = self._step(batch)
        phases = recorder.finish()
        if not has_gradient:
            return None
        shape = BatchShape.from_batch(batch, self.layout)
        if self._selector is not None:
            shape = replace(shape, labels=self._num_logits(batch))
        return MicrobatchPeaks(shape, phases)

    def _num_logits(self, batch: Batch) -> int:
        """Returns the number of positions of a batch at which logits are computed.

        Labels are selected as for a causal model, also if the model has another loss rule. Fake logits have no values,
        so only the number of labels matters.
        """
        if self._selector is None:
            return batch['input_ids'].numel()
        num_labels = int(LossRule.CAUSAL.mask(batch).sum())
        return num_labels + 1  # LabelSelector adds a position, because causal models shift labels

    def measure_flops(self, batch: Batch) -> int | None:
        """Returns the floating point operations of a microbatch's matrix products, forward and backward.

        Returns None if the loss needs no gradient, see `measure`.
        """
        counter = FlopCounterMode(display=False)
        has_gradient = self._step(batch, counter)
        return counter.get_total_flops() if has_gradient else None

    def _step(self, batch: Batch, counter: FlopCounterMode | None = None) -> bool:
        """Runs forward and backward as the Trainer does, and keeps the gradients.

        Returns whether the loss has a gradient. If not, there is no backward.

        Notes the type of the logits for the next call, which holds logits of this type during its forward.
        """
        batch_with_media = self.layout.with_media(batch)  # some models need an image in every batch
        inputs = {key: value for key, value in batch_with_media.items() if key in self._forward_parameters}
        num_logits = self._num_logits(batch)  # before the modes are on, so that the memory of counting is not tracked
        autocast_of_gpu = CudaAutocast() if self._on_gpu else nullcontext()
        # The modes are on in the backward pass, too. There checkpointing repeats parts of the forward pass.
        with self._tracked(), counter or nullcontext(), autocast_of_gpu:
            last_logits = self._logits_of_previous_microbatch(num_logits)
            if self._selector is not None:
                num_labels = num_logits - 1  # without the position that LabelSelector adds
                self._selector.arm(LossRule.CAUSAL, num_labels=num_labels)
            # Fake tensors of a GPU would need its driver. Fake tensors of the CPU have the same sizes.
            with torch.autocast('cpu', self._autocast_dtype, enabled=self._autocast_dtype is not None):
                outputs = self.model(**inputs)
            del last_logits
            if outputs.loss.requires_grad:
                _backward(outputs.loss)
        logits = outputs.get('logits')
        if logits is not None:
            self._logits_dtype = logits.dtype
        return outputs.loss.requires_grad

    def _logits_of_previous_microbatch(self, num_logits: int) -> torch.Tensor | None:
        """Returns fake logits, which stand for those of the previous microbatch; None if it had none.

        Composer's `state.outputs` holds these until the new ones exist. Here the previous microbatch counts as equally
        large. The tracker sees by their width that they are logits.
        """
        if self._logits_dtype is None:
            return None
        with self._mode:
            return torch.empty(num_logits, self.vocab_size, dtype=self._logits_dtype)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Counts the tensors of the code inside, which computes with fake weights and a real batch.

        Raises ValueError if the code raises a RuntimeError: most likely it cannot run with fake tensors.
        """
        try:
            with RealInputs(self._mode), self._tracker:
                yield
        except (DataDependentOutputException, RuntimeError) as error:
            first_line = str(error).partition('\n')[0]
            raise InvalidInputError(
                f'A step of {type(self.model).__name__} cannot be traced with fake tensors: {type(error).__name__}, '
                f'{first_line}. A common reason is control flow, of the model or of the optimizer, that depends on '
                'values of the weights. Set the microbatch size yourself.'
            ) from error

    def _count_static(self, make_optimizer: MakeOptimizer) -> StaticBytes:
        """Runs a step of the optimizer. Returns the bytes of the model, of the optimizer's states and of that step."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(trained)
        for group in optimizer.param_groups:
            # None: torch decides, and takes foreach on GPUs. The traced tensors are on the CPU, so it is set here. An
            # optimizer without the option has no such key.
            torch_decides = 'foreach' in group and group['foreach'] is None
            if self._on_gpu and torch_decides and not group.get('fused'):
                group['foreach'] = True
        bytes_before = sum(self._tracker.current.values())
        self._tracker.restart_peak()
        with self._tracked(), OnesForValues():  # an optimizer may read values
            optimizer.step()
        state_bytes = bytes_of_states(optimizer)
        # The peak holds the new states, too.
        step_bytes = sum(self._tracker.peak.values()) - bytes_before - state_bytes
        compute_dtype = self._autocast_dtype or next(self.model.parameters()).dtype
        return StaticBytes.from_model(
            self.model,
            optimizer=state_bytes,
            optimizer_step=max(step_bytes, 0),  # below 0 if the states existed before the step
            compute_bytes=compute_dtype.itemsize,
        )


def _backward(loss: torch.Tensor) -> None:
    """Runs the backward pass of a loss.

    Not `loss.backward()`, because torch turns CudaAutocast off while it handles a call on a tensor: here for the whole
    backward pass. A call on an edge of the graph leaves it on.
    """
    root = torch.autograd.graph.get_gradient_edge(loss)
    torch.autograd.backward([root], grad_tensors=[torch.ones_like(loss)])


def calibrate_fake(
    build: Callable[[], nn.Module],
    config: PretrainedConfig,
    samples: Sequence[Batch],
    *,
    width: int,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: str = 'fp32',
    strategy: str = 'ddp',
    on_gpu: bool = True,
    has_mask: bool = True,
    logits: str = 'all',
) -> MemoryModel:
    """Traces four to six microbatches of the model with fake tensors, and fits a memory model to them.

    Args:
        build: Makes the model on the CPU, in training mode: ``lambda: LlamaForCausalLM(config)``. A Composer
            ``HuggingFaceModel`` is unwrapped.
        config: The model's Transformers config. The microbatches are laid out by it, before there is a model.
        samples: Samples as the processor returns them; see ``probe_batches``.
        width: Tokens of a row in the widest microbatch: about the longest sample of the dataset.
        make_optimizer: Makes the optimizer of the parameters that are trained.
        precision: ``'fp32'``, ``'amp_bf16'`` or ``'amp_fp16'``, as in ``Trainer(precision=...)``.
        strategy: ``'ddp'`` or ``'fsdp'``. FSDP computes with a copy of the parameters in the type of `precision`.
        on_gpu: Whether the run is on GPUs. On a GPU autocast keeps more tensors in float32, and optimizers need memory
            for all parameters at once.
        has_mask: Whether attention holds a mask if there is padding, as SDPA does. Flash attention has none.
        logits: Where the run computes logits, as for :class:`.TokenAccumulation`: ``'all'``, ``'labels'`` or
            ``'auto'``. ``'auto'`` means at labels if a trace of this succeeds; ``MemoryModel.logits`` tells whether it
            did. The trace cannot tell whether the loss stays the same, because fake tensors have no values. The
            first-batch check of the run tells that.

    Raises:
        ValueError: Precision, strategy or logits is unknown, no sample gives a gradient, or the model's control flow
            depends on values of its weights.
    """
    check_choice('logits', logits, LOGITS_CHOICES)
    batches = probe_batches(BatchLayout.for_model(config), samples, width)
    make_tracer = partial(
        StepTracer,
        build,
        make_optimizer=make_optimizer,
        precision=precision,
        strategy=strategy,
        on_gpu=on_gpu,
    )
    if logits == 'auto':
        try:
            return _traced_memory(make_tracer, batches, 'labels', has_mask=has_mask)
        # A model that needs all logits fails with one of these errors. The first-batch check catches the same ones.
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            log.info('Memory is counted with logits of all positions: %s', error)
            logits = 'all'
    return _traced_memory(make_tracer, batches, logits, has_mask=has_mask)


def _traced_memory(
    make_tracer: Callable[..., StepTracer],
    batches: Sequence[Batch],
    logits: str,
    *,
    has_mask: bool,
) -> MemoryModel:
    """Traces the batches with ``'all'`` logits or only those at ``'labels'``, and fits a memory model to them."""
    if logits == 'labels':
        pairs = zip(batches, LABEL_SPACINGS, strict=False)  # there may be fewer batches than spacings
        batches = [with_spaced_labels(batch, spacing) for batch, spacing in pairs]
    tracer = make_tracer(batches[0], logits=logits)
    measured = []
    for batch in batches:
        if not has_mask:
            # The attention of the run (Flash) holds no mask. The traced one builds none if no position is padding.
            batch = {**batch, 'attention_mask': torch.ones_like(batch['attention_mask'])}
        peaks = tracer.measure(batch)
        if peaks is not None:
            measured.append(peaks)
    _check_any_gradient(measured)
    is_eager = attention_of(tracer.model.config) == 'eager'
    shapes = [peaks.shape for peaks in measured]
    pixel_ratios = [shape.pixel_bytes / shape.image_tokens for shape in shapes if shape.image_tokens > 0]
    return MemoryModel(
        static=tracer.static,
        phases=_fit_phases(measured, _when_area_counts(is_eager, has_mask)),
        strategy=tracer.strategy,
        logits=logits,
        pixel_bytes_per_image_token=max(pixel_ratios, default=0.0),
    )


def _when_area_counts(is_eager: bool, has_mask: bool) -> str:
    """Returns when attention holds a matrix of rows x width^2, see :class:`.ActivationFit`."""
    if is_eager:
        return 'always'
    return 'padded' if has_mask else 'never'


def _check_any_gradient(measured: Sequence[object]) -> None:
    """Raises ValueError if nothing was measured, because no microbatch had a gradient."""
    if not measured:
        raise InvalidInputError('No gradient comes from any of the samples. Train a part of the model that they use.')


def _fit_phases(measured: Sequence[MicrobatchPeaks], area: str) -> dict[str, ActivationFit]:
    """Fits the activations of each phase to the measured microbatches.

    The residual of a phase is relative to the highest phase of the microbatch, because only the highest one counts.
    """
    shapes = [peaks.shape for peaks in measured]
    # For each phase, the bytes of each microbatch: by part, and of all activations.
    bytes_of_phases = {}
    totals_of_phases = {}
    for name in measured[0].phases:
        bytes_of_phases[name] = [peaks.phases[name] for peaks in measured]
        totals_of_phases[name] = activation_bytes(bytes_of_phases[name])
    highest = np.max(list(totals_of_phases.values()), axis=0)
    fits = {}
    for name, totals in totals_of_phases.items():
        # A phase in which nothing is computed, such as `embedding` with frozen weights, is never the highest.
        if (totals > 0).all():
            fits[name] = fit_activations(shapes, bytes_of_phases[name], area=area, peaks=highest)
    return fits


@dataclass(frozen=True, kw_only=True)
class FlopModel:
    """Predicts the floating point operations of a microbatch: a sum of coefficients times sizes, padding included."""

    coefficients: Mapping[str, float]
    """For each size in ``FLOP_TERMS``: operations of forward and backward for one unit of it. For ``'logits'``: the
    operations of the output embedding for one position. ``'tokens'`` contains them."""
    layout: BatchLayout
    residual: float
    """Largest relative error among the traced microbatches."""

    def text(self, rows: int, width: int) -> float:
        """Returns the operations of the language model for this many rows of this padded width.

        Counts logits at every position. If the run computes them only at labels, subtract :meth:`logits`.
        """
        return self._sum(BatchShape(rows=rows, width=width), TEXT_TERMS)

    def media(self, batch: Batch) -> float:
        """Returns the operations of encoders and projectors."""
        return self._sum(BatchShape.from_batch(batch, self.layout), MEDIA_TERMS)

    def logits(self, positions: int) -> float:
        """Returns the operations of the output embedding at this many positions. :meth:`text` contains them."""
        return self.coefficients.get('logits', 0.0) * positions

    def _sum(self, shape: BatchShape, names: Sequence[str]) -> float:
        return sum(self.coefficients[name] * getattr(shape, name) for name in names)


def count_flops(
    build: Callable[[], nn.Module],
    config: PretrainedConfig,
    samples: Sequence[Batch],
    *,
    width: int,
) -> FlopModel:
    """Counts the matrix products of four to six traced microbatches, and fits a model of the operations to them.

    The model that ``build`` makes must have eager attention, because the products inside of fused kernels cannot be
    counted, and no activation checkpointing, because its second forward is not useful work. For the arguments see
    :func:`.calibrate_fake`.
    """
    batches = probe_batches(BatchLayout.for_model(config), samples, width)
    tracer = StepTracer(build, batches[0], on_gpu=False)  # the types on a GPU change no product
    table = []
    flops = []
    for batch in batches:
        flops_of_batch = tracer.measure_flops(batch)
        if flops_of_batch is not None:
            shape = BatchShape.from_batch(batch, tracer.layout)
            table.append([getattr(shape, name) for name in FLOP_TERMS])
            flops.append(flops_of_batch)
    _check_any_gradient(flops)
    sizes = np.array(table, dtype=np.float64)
    counted = np.array(flops, dtype=np.float64)
    solution = relative_fit(sizes, counted)
    relative_errors = sizes @ solution / counted - 1
    coefficients: dict[str, float] = dict(zip(FLOP_TERMS, solution.tolist(), strict=True))
    coefficients['logits'] = _flops_of_logits(tracer.model)
    return FlopModel(
        coefficients=coefficients,
        layout=tracer.layout,
        residual=float(np.abs(relative_errors).max()),
    )


def _flops_of_logits(model: Any) -> float:
    """Returns the operations of the output embedding for one position, forward and backward."""
    weight = getattr(output_embedding(model), 'weight', None)
    if weight is None:
        return 0.0
    # The forward has one product. The backward has one for the gradient of the hidden states, and one for the gradient
    # of the weight.
    num_products = 3 if weight.requires_grad else 2
    # A product takes two operations for each entry of the weight.
    return 2.0 * num_products * weight.numel()
