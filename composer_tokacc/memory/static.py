# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What every rank holds whatever the microbatch: parameters, gradients, optimizer states, and what DDP or FSDP adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from composer_tokacc.programs.models import transformer_blocks

__all__ = ['STRATEGIES', 'StaticBytes']

STRATEGIES = ('ddp', 'fsdp')


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
        trained_outside: Those of them that train.
        compute_bytes: Bytes of a number in the precision of the forward pass.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_step: int
    block: int
    outside: int
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
            block=max((sum(p.numel() for p in block.parameters()) for block in blocks), default=0),
            outside=sum(p.numel() for p in outside),
            trained_outside=sum(p.numel() for p in outside if p.grad is not None),
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
            gathered = self.outside + 2 * self.block + self.trained_outside + self.block
            terms['gathered by FSDP'] = float(gathered * self.compute_bytes + self.block * 4)
        elif num_ranks > 1:
            terms['DDP buckets'] = float(self.gradients)
        return terms

    def optimizer_peak(self, strategy: str, num_ranks: int) -> float:
        """Bytes in the optimizer's step, when activations are gone and its temporary tensors are there."""
        terms = self.terms(strategy, num_ranks)
        terms.pop('gathered by FSDP', None)
        return sum(terms.values()) + self.optimizer_step / (num_ranks if strategy == 'fsdp' else 1)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
