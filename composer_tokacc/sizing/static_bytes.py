# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Bytes of a model on a rank that do not depend on the microbatch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from composer_tokacc.compat import storage_key
from composer_tokacc.model_structure import transformer_blocks


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
    def from_model(cls, model: nn.Module, *, optimizer: int, optimizer_step: int, compute_bytes: int) -> StaticBytes:
        """Counts a model after a backward pass; parameters that no loss reaches have no gradient."""
        blocks = transformer_blocks(model)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        parameters = list(model.parameters())
        outside = [parameter for parameter in parameters if id(parameter) not in inside]
        return cls(
            parameters=_num_bytes(parameters),
            buffers=_num_bytes(model.buffers()),
            gradients=_num_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
            optimizer=optimizer,
            optimizer_step=optimizer_step,
            block=max((_numel(block.parameters()) for block in blocks), default=0),
            outside=_numel(outside),
            trained_block=max((_numel(_trained(block.parameters())) for block in blocks), default=0),
            trained_outside=_numel(_trained(outside)),
            compute_bytes=compute_bytes,
        )

    def terms(self, strategy: str, num_ranks: int) -> dict[str, float]:
        """Returns bytes by name on one of `num_ranks` ranks."""
        if num_ranks < 1:
            raise ValueError(f'`num_ranks` must be at least 1, got: {num_ranks}.')
        # FSDP holds one part in `num_ranks` of everything.
        parts = num_ranks if strategy == 'fsdp' else 1
        terms = {
            'parameters': self.parameters / parts,
            'gradients': self.gradients / parts,
            'optimizer states': self.optimizer / parts,
        }
        if self.buffers:
            terms['buffers'] = float(self.buffers)
        if strategy == 'fsdp':
            # In the precision of the forward pass: the parameters outside the blocks, two blocks (the one that runs and
            # the one fetched ahead), and the gradients of what is held. A block's are copied to float32 to be reduced.
            gathered = self.outside + 2 * self.block + self.trained_outside + self.trained_block
            terms['gathered by FSDP'] = float(gathered * self.compute_bytes + self.trained_block * 4)
        elif num_ranks > 1:
            # DDP copies every gradient, because Composer leaves `gradient_as_bucket_view` off.
            terms['DDP buckets'] = float(self.gradients)
        return terms

    def optimizer_peak(self, strategy: str, num_ranks: int) -> float:
        """Returns bytes in the optimizer's step, when activations are gone and its temporary tensors are there."""
        terms = self.terms(strategy, num_ranks)
        terms.pop('gathered by FSDP', None)
        return sum(terms.values()) + self.optimizer_step / (num_ranks if strategy == 'fsdp' else 1)


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Counts memory that several tensors share once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
