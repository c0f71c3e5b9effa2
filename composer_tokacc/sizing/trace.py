# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A step of the run's own model without its memory: weights and activations are fake, what comes from the data is real.

It tells what the model takes as a whole, what a microbatch holds at its peak, by part, and how much it computes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from composer_tokacc.batch import Batch
from composer_tokacc.compat import DataDependentOutputException, attention_of, let_fake_weights_be_swapped
from composer_tokacc.counting import loss_mask
from composer_tokacc.label_selector import LabelSelector
from composer_tokacc.layout import BatchLayout
from composer_tokacc.model_structure import cast_model
from composer_tokacc.sizing.memory_model import MemoryModel, StaticBytes, fit_activations, relative_fit, rough_fit
from composer_tokacc.sizing.shapes import BatchShape, probe_batches, with_share_of_labels
from composer_tokacc.sizing.torch_modes import CudaAutocast, MemoryTracker, RealInputs, SharedFakeMode

log = logging.getLogger(__name__)

AUTOCAST = {'fp32': None, 'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
"""What Composer's precisions compute in."""
FLOP_TERMS = ('tokens', 'area', 'image_tokens', 'image_area')
"""Sizes that the operations are a sum of: linear layers, attention of text, vision encoder and its attention."""

TRACED_LOGITS = ('all', 'labels')
"""Where the traced run computes logits."""
LABEL_SHARES = (4, 16, 8, 32, 4, 8)
"""One in so many positions of each traced microbatch has a label, if logits are computed only there."""

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class MicrobatchPeaks(NamedTuple):
    """What one microbatch held beyond parameters, gradients, optimizer states and inputs."""

    shape: BatchShape
    phases: Mapping[str, Mapping[str, int]]
    """Bytes by part at the peak of each phase: ``head`` is the forward pass, the loss and the head's backward pass,
    ``blocks`` the rest; the shape decides which of them is higher."""


class TracedStep:
    """Steps of a run whose tensors take no memory. Sizes are those of a GPU run of the same model.

    Arguments are those of :func:`.calibrate_fake`; `first_batch` is a small one that reaches every parameter, with
    images where the run has any.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        first_batch: Mapping[str, Any],
        *,
        make_optimizer: MakeOptimizer = torch.optim.AdamW,
        precision: str = 'fp32',
        strategy: str = 'ddp',
        on_gpu: bool = True,
        logits: str = 'all',
    ) -> None:
        for name, value, choices in (
            ('precision', precision, AUTOCAST),
            ('strategy', strategy, ('ddp', 'fsdp')),
            ('logits', logits, TRACED_LOGITS),
        ):
            if value not in choices:
                raise ValueError(f'`{name}` must be one of {", ".join(choices)}, got: {value!r}.')
        self._mode = SharedFakeMode(allow_non_fake_inputs=True)
        with self._mode, let_fake_weights_be_swapped():  # peft calls `Module.to`
            model = build()
        self.model: Any = model.model if hasattr(model, 'shift_labels') else model
        self.layout = BatchLayout.for_model(self.model)
        self.strategy = strategy
        self._dtype, self._on_gpu = AUTOCAST[precision], on_gpu
        is_adapted = hasattr(self.model, 'get_base_model')  # peft's forward takes any name
        self._named = inspect.signature((self.model.get_base_model() if is_adapted else self.model).forward).parameters
        self.vocab_size = self.model.config.get_text_config().vocab_size
        self._logits_dtype: torch.dtype | None = None  # of the step before: none yet
        self._counter: FlopCounterMode | None = None
        self._selector = LabelSelector(self.model) if logits == 'labels' else None
        self._warm_up(first_batch)
        self.static = self._count_static(make_optimizer)
        if strategy == 'fsdp' and self._dtype is not None:
            self._tracker.close()
            with self._mode:
                cast_model(self.model, self._dtype)
            self._warm_up(first_batch)

    def _warm_up(self, first_batch: Mapping[str, Any]) -> None:
        """Runs a step from which gradients and logits stay, as every later step finds them."""
        self._tracker = MemoryTracker(self.model, self.vocab_size)
        self._logits_dtype = self._step(first_batch)

    def measure(self, batch: Mapping[str, Any]) -> MicrobatchPeaks:
        """Runs one microbatch of a step that has gradients from an earlier one."""
        before = dict(self._tracker.current)
        self._tracker.restart_peak()
        phases: dict[str, dict[str, int]] = {}

        def end_phase(name: str) -> None:
            phases[name] = {part: held - before[part] for part, held in self._tracker.peak.items()}
            self._tracker.restart_peak()

        handle = self.model.get_output_embeddings().register_full_backward_hook(lambda *_: end_phase('head'))
        self._step(batch)
        handle.remove()
        end_phase('blocks')
        shape = BatchShape.from_batch(batch, self.layout)
        if self._selector is not None:
            shape = replace(shape, labels=self._num_logits(batch))
        return MicrobatchPeaks(shape, phases)

    def _num_logits(self, batch: Mapping[str, Any]) -> int:
        """Returns the number of positions of which logits are computed."""
        if self._selector is None:
            return batch['input_ids'].numel()
        return _num_labels(batch) + 1  # a model that shifts labels drops the last

    def count_flops(self, batch: Mapping[str, Any]) -> int:
        """Returns the floating point operations of a microbatch's matrix products, forward and backward."""
        self._counter = FlopCounterMode(display=False)
        self._step(batch)
        counter, self._counter = self._counter, None
        return counter.get_total_flops()

    def _step(self, batch: Mapping[str, Any]) -> torch.dtype | None:
        """Runs forward and backward, as the Trainer does them; returns the type of the logits."""
        inputs = {key: value for key, value in self.layout.with_media(batch).items() if key in self._named}
        num_logits = self._num_logits(batch)  # out here, where tensors are real
        # Around the backward pass too: checkpointing recomputes there, under the autocast of the forward pass.
        with self._tracked(), CudaAutocast() if self._on_gpu else nullcontext():
            # Composer's state.outputs holds the logits of the microbatch before until the new ones are there.
            previous = None
            if self._logits_dtype is not None:
                with self._mode:
                    previous = torch.empty(num_logits, self.vocab_size, dtype=self._logits_dtype)
                self._tracker.enter(previous, 'logits')
            if self._selector is not None:
                self._selector.arm('causal', num_logits - 1)
            # Fake tensors of a GPU need its driver; those of the CPU do not, and their sizes are the same.
            with torch.autocast('cpu', self._dtype, enabled=self._dtype is not None):
                outputs = self.model(**inputs)
            del previous
            # Not from the loss itself: a function mode is off inside what it sees, and it sees what takes a tensor.
            root = torch.autograd.graph.get_gradient_edge(outputs.loss)
            torch.autograd.backward([root], grad_tensors=[torch.ones_like(outputs.loss)])
        logits = outputs.get('logits')
        return None if logits is None else logits.dtype

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        try:
            with RealInputs(self._mode), self._tracker, self._counter or nullcontext():
                yield
        except (DataDependentOutputException, RuntimeError) as error:
            raise ValueError(
                f'The model must not look at values of its weights to be traced without a GPU, got: '
                f'{type(error).__name__} in {type(self.model).__name__} ({str(error).splitlines()[0]}). '
                'Calibrate on a GPU.'
            ) from error

    def _count_static(self, make_optimizer: MakeOptimizer) -> StaticBytes:
        optimizer = make_optimizer([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        for group in optimizer.param_groups:
            if self._on_gpu and group.get('foreach', True) is None and not group.get('fused'):
                group['foreach'] = True  # torch's default on GPUs
        before = sum(self._tracker.current.values())
        self._tracker.restart_peak()
        with self._tracked():
            optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        states = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
        return StaticBytes.from_model(
            self.model,
            optimizer=states,
            optimizer_step=max(sum(self._tracker.peak.values()) - before - states, 0),
            compute_bytes=(self._dtype or next(self.model.parameters()).dtype).itemsize,
        )


def _num_labels(batch: Mapping[str, Any]) -> int:
    return int(loss_mask(batch, 'causal').sum())


def calibrate_fake(
    build: Callable[[], nn.Module],
    config: Any,
    samples: Sequence[Mapping[str, Any]],
    *,
    width: int,
    make_optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: str = 'fp32',
    strategy: str = 'ddp',
    on_gpu: bool = True,
    has_mask: bool = True,
    logits: str = 'all',
) -> MemoryModel:
    """Traces four to six microbatches of the model under fake tensors and fits the terms to them.

    Args:
        build: Makes the model on the CPU, in training mode: ``lambda: LlamaForCausalLM(config)``. A Composer
            ``HuggingFaceModel`` is unwrapped.
        config: Its Transformers config.
        samples: Samples as the processor returns them; see ``probe_batches``.
        width: Width of the widest microbatch: about the longest sample of the dataset.
        make_optimizer: Makes the optimizer of the parameters that train.
        precision: ``'fp32'``, ``'amp_bf16'`` or ``'amp_fp16'``, as in ``Trainer(precision=...)``.
        strategy: ``'ddp'`` or ``'fsdp'``, which runs a copy of the parameters in the type of `precision`.
        on_gpu: Whether the run is on GPUs, where autocast keeps more in float32 and optimizers work on all tensors
            at once.
        has_mask: Whether attention holds a mask where there is padding, as SDPA does; flash attention has none.
        logits: ``'all'``, or ``'labels'`` if the run computes logits only at labels.

    Raises:
        ValueError: Precision or strategy is unknown, or the model's control flow depends on values of its weights.
    """
    batches = probe_batches(BatchLayout.for_model(config), samples, width)
    if logits == 'labels':  # other shares of labels than of positions, so that both are told apart
        batches = [with_share_of_labels(batch, one_in) for batch, one_in in zip(batches, LABEL_SHARES, strict=False)]
    step = TracedStep(
        build,
        batches[0],
        make_optimizer=make_optimizer,
        precision=precision,
        strategy=strategy,
        on_gpu=on_gpu,
        logits=logits,
    )
    if not has_mask:
        for batch in batches:
            batch['attention_mask'] = torch.ones_like(batch['attention_mask'])
    shapes, peaks = zip(*map(step.measure, batches), strict=True)
    area = 'always' if attention_of(step.model.config) == 'eager' else 'padded' if has_mask else 'never'
    memory = MemoryModel(
        static=step.static,
        phases={name: fit_activations(shapes, [phases[name] for phases in peaks], area=area) for name in peaks[0]},
        strategy=strategy,
        logits=logits,
        pixel_bytes_per_image_token=max(shape.pixel_bytes / max(shape.image_tokens, 1) for shape in shapes),
    )
    for line in rough_fit(memory.residual):
        log.warning(line)
    return memory


@dataclass(frozen=True, kw_only=True)
class FlopModel:
    """Operations of forward and backward, by ``FLOP_TERMS``; padding is computed, and so it counts."""

    coefficients: Mapping[str, float]
    layout: BatchLayout
    residual: float
    """Largest relative error over the traced microbatches."""

    def text(self, rows: int, width: int) -> float:
        """Returns the operations of the language model."""
        return self._sum(BatchShape(rows=rows, width=width), FLOP_TERMS[:2])

    def media(self, batch: Batch) -> float:
        """Returns the operations of encoders and what follows them."""
        return self._sum(BatchShape.from_batch(batch, self.layout), FLOP_TERMS[2:])

    def _sum(self, shape: BatchShape, names: Sequence[str]) -> float:
        return sum(self.coefficients[name] * getattr(shape, name) for name in names)


def count_flops(
    build: Callable[[], nn.Module], config: Any, samples: Sequence[Mapping[str, Any]], *, width: int
) -> FlopModel:
    """Counts the matrix products of four to six microbatches without computing them; see :func:`.calibrate_fake`.

    Build the model with eager attention, whose products are seen, and without activation checkpointing, whose second
    forward is no use of the model.
    """
    batches = probe_batches(BatchLayout.for_model(config), samples, width)
    step = TracedStep(build, batches[0], on_gpu=False)
    shapes = [BatchShape.from_batch(batch, step.layout) for batch in batches]
    counted = np.array([step.count_flops(batch) for batch in batches], dtype=np.float64)
    table = np.array([[getattr(shape, name) for name in FLOP_TERMS] for shape in shapes], dtype=np.float64)
    solution = relative_fit(table, counted)
    return FlopModel(
        coefficients=dict(zip(FLOP_TERMS, solution.tolist(), strict=True)),
        layout=step.layout,
        residual=float(np.abs(table @ solution / counted - 1).max()),
    )
