# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A step of the run's own model without its memory: weights and activations are fake, what comes from the data is real.

It tells what the model takes as a whole, and what a microbatch holds at its peak, by part.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from composer_tokacc.compat import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    let_fake_weights_be_swapped,
    storage_key,
    tree_flatten,
    tree_iter,
    tree_map_only,
    tree_unflatten,
)
from composer_tokacc.layout import BatchLayout, with_media
from composer_tokacc.sizing.shapes import BatchShape

__all__ = [
    'AUTOCAST',
    'VISION_MODULES',
    'FakeRun',
    'Ledger',
    'Probe',
    'StaticBytes',
    'cast_model',
    'transformer_blocks',
]

aten: Any = torch.ops.aten
STRATEGIES = ('ddp', 'fsdp')
AUTOCAST = {'fp32': None, 'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
"""What Composer's precisions compute in."""
PARTS = ('text', 'logits', 'vision', 'weights')
"""``weights`` are copies that autocast makes of parameters."""
# Transformers' names of what turns pixels into embeddings of the language model.
VISION_MODULES = frozenset(
    (
        'vision_tower', 'visual', 'vision_model', 'image_tower', 'video_tower', 'audio_tower', 'qformer',
        'multi_modal_projector', 'connector',
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StaticBytes:
    """Bytes of the whole model on one rank, before anything is sharded.

    Args:
        parameters: All parameters, frozen ones too.
        buffers: Buffers.
        gradients: Gradients of the parameters that train.
        optimizer: States of the optimizer.
        optimizer_step: Temporary tensors of the optimizer's step, when no activation is held.
        block: Numbers of the largest transformer block, which FSDP gathers whole.
        outside: Numbers outside all blocks (embeddings, head), which FSDP gathers whole and keeps for the step.
        trained_block: Numbers that train of the block that has most of them.
        trained_outside: Those outside all blocks that train.
        compute_bytes: Bytes of a number in the precision of the forward pass.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_step: int
    block: int
    outside: int
    trained_block: int
    trained_outside: int
    compute_bytes: int

    @classmethod
    def of(cls, model: nn.Module, *, optimizer: int, optimizer_step: int, compute_bytes: int) -> StaticBytes:
        """Counts a model after a backward pass; parameters that no loss reaches have no gradient."""
        blocks = transformer_blocks(model)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        parameters = list(model.parameters())
        outside = [parameter for parameter in parameters if id(parameter) not in inside]
        return cls(
            parameters=_nbytes(parameters),
            buffers=_nbytes(model.buffers()),
            gradients=_nbytes(p.grad for p in parameters if p.grad is not None),
            optimizer=optimizer,
            optimizer_step=optimizer_step,
            block=max((_numbers(block.parameters()) for block in blocks), default=0),
            outside=_numbers(outside),
            trained_block=max((_numbers(block.parameters(), trained=True) for block in blocks), default=0),
            trained_outside=_numbers(outside, trained=True),
            compute_bytes=compute_bytes,
        )

    def terms(self, strategy: str, num_ranks: int) -> dict[str, float]:
        """Bytes by name on one of `num_ranks` ranks.

        DDP copies every gradient into its buckets, because Composer leaves ``gradient_as_bucket_view`` off. FSDP holds
        a share of everything, and in the precision of the forward pass the parameters outside the blocks, two blocks
        (the one that runs and the one fetched ahead), and the gradients of what it holds; a block's gradients are
        copied to float32 to be reduced.

        Raises:
            ValueError: `num_ranks` is out of range.
        """
        if num_ranks < 1:
            raise ValueError(f'`num_ranks` must be at least 1, got: {num_ranks}.')
        share = num_ranks if strategy == 'fsdp' else 1
        terms = {
            'parameters': self.parameters / share,
            'gradients': self.gradients / share,
            'optimizer states': self.optimizer / share,
        }
        if self.buffers:
            terms['buffers'] = float(self.buffers)
        if strategy == 'fsdp':
            gathered = self.outside + 2 * self.block + self.trained_outside + self.trained_block
            terms['gathered by FSDP'] = float(gathered * self.compute_bytes + self.trained_block * 4)
        elif num_ranks > 1:
            terms['DDP buckets'] = float(self.gradients)
        return terms

    def optimizer_peak(self, strategy: str, num_ranks: int) -> float:
        """Bytes in the optimizer's step, when activations are gone and its temporary tensors are there."""
        terms = self.terms(strategy, num_ranks)
        terms.pop('gathered by FSDP', None)
        return sum(terms.values()) + self.optimizer_step / (num_ranks if strategy == 'fsdp' else 1)


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
            if name.rpartition('.')[2] in VISION_MODULES
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
        if func is aten._to_copy.default and storage_key(args[0]) in self._parameters:
            return 'weights'
        if self._depth:
            return 'vision'
        # Attention over as many positions has four dimensions.
        return 'logits' if tensor.dim() in (2, 3) and tensor.shape[-1] == self.vocab_size else 'text'

    def _watch(self, module: nn.Module) -> list[Any]:
        def move(by: int) -> None:
            self._depth += by

        return [
            module.register_forward_pre_hook(lambda *_: move(1)),
            module.register_forward_hook(lambda *_: move(-1)),
        ]


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
        self._mode = _SharedMode(allow_non_fake_inputs=True)
        with self._mode, let_fake_weights_be_swapped():  # peft calls `Module.to`
            model = build()
        self.model: Any = model.model if hasattr(model, 'shift_labels') else model
        self.layout = BatchLayout.for_model(self.model)
        self.strategy = strategy
        self._dtype, self._on_gpu = AUTOCAST[precision], on_gpu
        inner = (
            self.model.get_base_model() if hasattr(self.model, 'get_base_model') else self.model
        )  # peft takes any name
        self._named = inspect.signature(inner.forward).parameters
        self.vocab_size = self.model.config.get_text_config().vocab_size
        self._ledger = Ledger(self.model, self.vocab_size)
        self._logits_dtype: torch.dtype | None = None  # of the step before: none yet
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
        inputs = {key: value for key, value in with_media(self.layout, batch).items() if key in self._named}
        # Around the backward pass too: checkpointing recomputes there, under the autocast of the forward pass.
        with self._tracked(), CudaAutocast() if self._on_gpu else nullcontext():
            # Composer's state.outputs holds the logits of the microbatch before until the new ones are there.
            previous = None
            if self._logits_dtype is not None:
                size = (*batch['input_ids'].shape, self.vocab_size)
                with self._mode:
                    previous = torch.empty(size, dtype=self._logits_dtype)
                self._ledger.enter(previous, 'logits')
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
            with RealInputs(self._mode), self._ledger:
                yield
        except (DataDependentOutputException, RuntimeError) as error:
            raise ValueError(
                f'The model must not look at values of its weights to be traced without a GPU, got: '
                f'{type(error).__name__} in {type(self.model).__name__} ({str(error).splitlines()[0]}). '
                'Calibrate on a GPU.'
            ) from error

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


class _SharedMode(FakeTensorMode):
    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedMode:
        """Itself: peft copies modules, with their tensors and the mode of these, whose memory would be freed twice."""
        return self


_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
# A mask in floats is rows x width^2 values, and SDPA makes one a layer.
_LARGEST_REAL = 1 << 16


class RealInputs(TorchDispatchMode):
    """Computes for real what no weight enters; everything else is a fake tensor.

    Vision-language models look at their inputs: how many image tokens there are, how large each image's grid is, which
    images are padding, whether any row is padded. ``FakeTensorMode`` alone stops there. A batch is small, so it stays
    real, and so does what follows from it alone; only large floats that do (masks, cast pixels) are made fake.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        if not any(isinstance(value, FakeTensor) for value in tensors):
            own = {storage_key(tensor) for tensor in tensors}
            return tree_map_only(torch.Tensor, lambda made: self._thin(made, own), func(*args, **(kwargs or {})))
        if func in _INDEXING:
            args = (args[0], _by_position(args[1]), *args[2:])
            flat, spec = tree_flatten((args, kwargs or {}))
        elif func is aten.masked_select.default and not isinstance(args[1], FakeTensor):
            mask = args[1].expand(args[0].shape)
            return self.__torch_dispatch__(aten.index.Tensor, types, (args[0], [mask]))
        with self.fake_mode:
            flat = [self._fake(value) if isinstance(value, torch.Tensor) else value for value in flat]
            args, kwargs = tree_unflatten(flat, spec)
            return func(*args, **kwargs)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake_mode.from_tensor(tensor, static_shapes=True)

    def _thin(self, tensor: torch.Tensor, inputs: set[int]) -> torch.Tensor:
        is_new = storage_key(tensor) not in inputs
        large = tensor.is_floating_point() and tensor.numel() > _LARGEST_REAL
        return self._fake(tensor) if large and is_new else tensor


def _by_position(indices: Any) -> list[Any]:
    """Real boolean indices as positions: the size of the result is then known."""
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            positions.extend(index.nonzero().unbind(dim=1))
        else:
            positions.append(index)
    return positions


class CudaAutocast(TorchFunctionMode):
    """Makes autocast on the CPU compute in float32 what autocast on a GPU does, since its outputs are larger then.

    The list is that of ``torch/amp`` ("CUDA ops that autocast to float32"), as far as transformers use it.
    """

    FLOAT32 = (
        nn.functional.layer_norm,
        nn.functional.group_norm,
        nn.functional.softmax,
        nn.functional.log_softmax,
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
        torch.softmax,
        torch.log_softmax,
        torch.layer_norm,
        torch.pow,
        torch.Tensor.pow,
        torch.rsqrt,
        torch.exp,
        torch.log,
        torch.cumsum,
        torch.Tensor.cumsum,
        torch.sum,
        torch.Tensor.sum,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FLOAT32 and torch.is_autocast_enabled('cpu'):
            args, kwargs = tree_map_only(torch.Tensor, _upcast, (args, kwargs))
            with torch.autocast('cpu', enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts a model as ``model.to(dtype)`` does, real or fake.

    Newer versions of torch swap the tensors of fake parameters in ``nn.Module.to``, and fail where anything else refers
    to them. Here the module gets new parameters, so call it before an optimizer holds the old ones.
    """
    cast_of: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for name, tensor in [*module.named_parameters('', False, False), *module.named_buffers('', False, False)]:
            if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            if id(tensor) not in cast_of:
                converted = tensor.detach().to(dtype)
                is_weight = isinstance(tensor, nn.Parameter)
                cast_of[id(tensor)] = nn.Parameter(converted, tensor.requires_grad) if is_weight else converted
            setattr(module, name, cast_of[id(tensor)])


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of every tower: members of the outermost module lists, experts inside a block excluded."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += [block for block in child if any(True for _ in block.parameters())]
        else:
            blocks += transformer_blocks(child)
    return blocks


def _numbers(parameters: Iterable[nn.Parameter], *, trained: bool = False) -> int:
    return sum(p.numel() for p in parameters if p.grad is not None or not trained)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
