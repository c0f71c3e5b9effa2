# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A step of the run's own model without its memory: what it holds at its peak, by part."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from composer_tokacc.layout import BatchLayout
from composer_tokacc.sizing.fake import CudaAutocast, RealInputs, build_fake, cast_model, storage_key
from composer_tokacc.sizing.memory_model import STRATEGIES, StaticBytes
from composer_tokacc.sizing.shapes import BatchShape

__all__ = ['AUTOCAST', 'FakeRun', 'Ledger', 'Probe']

AUTOCAST = {'fp32': None, 'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
"""What Composer's precisions compute in."""
PARTS = ('text', 'logits', 'vision', 'weights')
"""``weights`` are copies that autocast makes of parameters."""
# Transformers' names of what turns pixels into embeddings of the language model.
_VISION_MODULES = frozenset(
    ('vision_tower', 'visual', 'vision_model', 'image_tower', 'audio_tower', 'multi_modal_projector', 'connector')
)
_TO_COPY: Any = torch.ops.aten._to_copy.default  # type: ignore[attr-defined]


class Ledger(TorchDispatchMode):
    """Counts the bytes of every tensor made while it is active, by part, until the tensor dies.

    torch's own ``MemTracker`` tells activations from gradients, but not the text from the logits and the vision tower;
    the tests hold the two against each other.

    Args:
        model: The model that runs.
        vocab_size: Tensors whose last dimension has this size are logits.
    """

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.current: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.peak = dict(self.current)
        self.part_of: dict[int, str] = {}
        self._total = self._peak_total = 0
        self._depth = 0
        self._finalizers: dict[int, weakref.finalize] = {}
        self._parameters = {storage_key(parameter) for parameter in model.parameters()}
        self._parameters |= {storage_key(buffer) for buffer in model.buffers()}
        self._handles = [
            handle
            for name, module in model.named_modules()
            if name.rpartition('.')[2] in _VISION_MODULES
            for handle in self._watch(module)
        ]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def restart_peak(self) -> None:
        """Forgets the peak: it is what is held now."""
        self.peak, self._peak_total = dict(self.current), self._total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            if is_dense and storage_key(tensor) not in self.part_of:
                self.enter(tensor, self._part(tensor, func, args))
        if self._total > self._peak_total:
            self.peak, self._peak_total = dict(self.current), self._total
        return result

    def enter(self, tensor: torch.Tensor, part: str) -> None:
        """Counts a tensor under a part, unless its memory is counted already or a parameter's."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self.part_of or key in self._parameters:
            return
        num_bytes = storage.nbytes()
        self.part_of[key] = part
        self.current[part] += num_bytes
        self._total += num_bytes
        self._finalizers[key] = weakref.finalize(storage, self._leave, key, part, num_bytes)

    def _leave(self, key: int, part: str, num_bytes: int) -> None:
        self.part_of.pop(key, None)
        self._finalizers.pop(key, None)
        self.current[part] -= num_bytes
        self._total -= num_bytes

    def _part(self, tensor: torch.Tensor, func: Any, args: Any) -> str:
        if func is _TO_COPY and storage_key(args[0]) in self._parameters:
            return 'weights'
        if self._depth:
            return 'vision'
        # Attention over as many positions has four dimensions.
        return 'logits' if tensor.dim() in (2, 3) and tensor.shape[-1] == self.vocab_size else 'text'

    def _watch(self, module: nn.Module) -> list[Any]:
        def enter(*_: Any) -> None:
            self._depth += 1

        def leave(*_: Any) -> None:
            self._depth -= 1

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


@dataclass(frozen=True)
class Probe:
    """What one microbatch took, in bytes by part (``text``, ``logits``, ``vision``, ``weights``)."""

    shape: BatchShape
    peaks: Mapping[str, Mapping[str, int]]
    """What was held beyond parameters, gradients, optimizer states and inputs, at the peak of each phase.

    ``head`` is the forward pass, the loss and the head's backward pass, ``blocks`` the rest; the shape decides which of
    them is higher.
    """


class FakeRun:
    """The steps of a run whose tensors take no memory. Sizes are those of a GPU run of the same model.

    Args:
        build: Makes the model on the CPU, in training mode: ``lambda: LlamaForCausalLM(config)``. A Composer
            ``HuggingFaceModel`` is unwrapped.
        first_batch: A small batch that reaches every parameter: with images, where the run has any.
        make_optimizer: Makes the optimizer of the parameters that train; AdamW by default.
        precision: ``'fp32'``, ``'amp_bf16'`` or ``'amp_fp16'``, as in ``Trainer(precision=...)``.
        strategy: ``'ddp'`` or ``'fsdp'``, which runs a copy of the parameters in the type of `precision`.
        on_gpu: Whether the run is on GPUs, where autocast keeps more in float32 and optimizers work on all tensors
            at once.

    Raises:
        ValueError: Precision or strategy is unknown, or the model's control flow depends on values of its weights.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        first_batch: Mapping[str, Any],
        *,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        precision: str = 'fp32',
        strategy: str = 'ddp',
        on_gpu: bool = True,
    ) -> None:
        if precision not in AUTOCAST:
            raise ValueError(f'`precision` must be one of {", ".join(AUTOCAST)}, got: {precision!r}.')
        if strategy not in STRATEGIES:
            raise ValueError(f'`strategy` must be one of {STRATEGIES}, got: {strategy!r}.')
        model, self._mode = build_fake(build)
        self.model: Any = model.model if hasattr(model, 'shift_labels') else model
        self.layout = BatchLayout.for_model(self.model)
        self.strategy = strategy
        self._dtype, self._on_gpu = AUTOCAST[precision], on_gpu
        self._named = inspect.signature(self.model.forward).parameters
        self.vocab_size = self.model.config.get_text_config().vocab_size
        self._ledger = Ledger(self.model, self.vocab_size)
        self._logits_dtype: torch.dtype | None = None
        self._logits_dtype = self._step(first_batch)
        self.static = self._count_static(make_optimizer or torch.optim.AdamW)
        if strategy == 'fsdp' and self._dtype is not None:
            self._ledger.close()
            with self._mode:
                cast_model(self.model, self._dtype)
            self._ledger = Ledger(self.model, self.vocab_size)
            self._logits_dtype = self._step(first_batch)

    def measure(self, batch: Mapping[str, Any]) -> Probe:
        """Runs one microbatch of a step that has gradients from an earlier one.

        Raises:
            ValueError: The model cannot run on the batch.
        """
        before = dict(self._ledger.current)
        self._ledger.restart_peak()
        peaks: dict[str, dict[str, int]] = {}

        def end_phase(name: str) -> None:
            peaks[name] = {part: held - before[part] for part, held in self._ledger.peak.items()}
            self._ledger.restart_peak()

        handle = self.model.get_output_embeddings().register_full_backward_hook(lambda *_: end_phase('head'))
        self._step(batch)
        handle.remove()
        end_phase('blocks')
        return Probe(BatchShape.of(batch, self.layout), peaks)

    def _step(self, batch: Mapping[str, Any]) -> torch.dtype | None:
        """Forward and backward, as the Trainer does them; returns the type of the logits."""
        inputs = {key: value for key, value in batch.items() if key in self._named}
        # Around the backward pass too: checkpointing recomputes there, under the autocast of the forward pass.
        with self._tracked(), CudaAutocast() if self._on_gpu else nullcontext():
            # Composer's state.outputs holds the logits of the microbatch before until the new ones are there.
            previous = None
            if self._logits_dtype is not None:
                size = (*batch['input_ids'].shape, self.vocab_size)
                with self._mode:
                    previous = torch.empty(size, dtype=self._logits_dtype)
                self._ledger.enter(previous, 'logits')
            with self._autocast():
                outputs = self.model(**inputs)
            del previous
            # Not loss.backward(): a function mode is off inside the methods that pass through it.
            torch.autograd.backward(outputs.loss)
        logits = outputs.get('logits')
        return None if logits is None else logits.dtype

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        try:
            with RealInputs(self._mode), self._ledger:
                yield
        except (DataDependentOutputException, RuntimeError) as error:
            raise ValueError(
                f'The model must not look at values of its weights to be traced without a GPU, got: '
                f'{type(error).__name__} in {type(self.model).__name__} ({str(error).splitlines()[0]}). '
                'Calibrate on a GPU.'
            ) from error

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self._dtype is None:
            yield
            return
        # Fake tensors of a GPU need its driver; those of the CPU do not, and their sizes are the same.
        with torch.autocast('cpu', self._dtype):
            yield

    def _count_static(self, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> StaticBytes:
        optimizer = make_optimizer([parameter for parameter in self.model.parameters() if parameter.requires_grad])
        for group in optimizer.param_groups:
            if self._on_gpu and group.get('foreach', True) is None and not group.get('fused'):
                group['foreach'] = True  # torch's default on GPUs
        before = sum(self._ledger.current.values())
        self._ledger.restart_peak()
        with self._tracked():
            optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        states = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
        return StaticBytes.of(
            self.model,
            optimizer=states,
            optimizer_step=max(sum(self._ledger.peak.values()) - before - states, 0),
            compute_bytes=(self._dtype or next(self.model.parameters()).dtype).itemsize,
        )
