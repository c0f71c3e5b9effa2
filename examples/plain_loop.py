# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Planned batches and exact weights in a loop of your own. Neither Composer nor Transformers is imported.

python examples/plain_loop.py last.pt
torchrun --nproc-per-node 2 examples/plain_loop.py last.pt --steps 5   # until step 5
python examples/plain_loop.py last.pt                                  # resumes at step 6, in the middle of an epoch
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import torch
from ragged import EPOCHS, GLOBAL_BATCH, LEARNING_RATE, Rows, SmallModel, collate

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, weighted_microbatches
from composer_tokacc.layout import PreSplitBatch


def accumulate(model: torch.nn.Module, batch: PreSplitBatch) -> torch.Tensor:
    """Computes the gradient of a step. Returns a loss whose mean over the ranks is the mean over all tokens."""
    microbatches = list(weighted_microbatches(batch))
    mean = torch.zeros(())
    for number, (microbatch, weight) in enumerate(microbatches, start=1):
        # Ranks reduce gradients only in the last microbatch, because they may have unequal numbers of them.
        # Without DDP there is no `no_sync`.
        synchronizes = number == len(microbatches) or not hasattr(model, 'no_sync')
        with contextlib.nullcontext() if synchronizes else model.no_sync():
            loss = model(**microbatch) * weight
            loss.backward()
        mean += loss.detach()
    return mean


def main() -> None:
    """Trains for two epochs, or until step ``--steps``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', type=Path)
    parser.add_argument('--steps', type=int)
    options = parser.parse_args()
    if 'RANK' in os.environ:
        torch.distributed.init_process_group('gloo')  # on GPUs 'nccl', and device='cuda' for weighted_microbatches

    dataset = Rows()
    model = SmallModel()
    trained = model
    if torch.distributed.is_initialized():
        trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    # A microbatch may hold 64 tokens, padding included. The sampler groups rows of similar lengths into a microbatch.
    sampler = RegroupingBatchSampler(dataset, lengths=dataset.lengths, global_batch_size=GLOBAL_BATCH, max_tokens=64)
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved['model'])
        optimizer.load_state_dict(saved['optimizer'])
        loader.load_state_dict(saved['loader'])  # also on another number of ranks
        step = saved['step']
    if options.steps is not None and step >= options.steps:
        return

    for epoch in range(sampler.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:  # this rank's microbatches of a step
            mean = accumulate(trained, batch)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(mean)
                mean /= torch.distributed.get_world_size()
            if sampler.rank == 0:
                print(
                    f'step {step}: {len(batch.microbatches)} microbatches, mean loss over all tokens {mean:.6f}',
                    flush=True,
                )
            if step == options.steps:
                break
        if step == options.steps:
            break
    if sampler.rank == 0:
        states = {
            'model': model.state_dict(),
            'optimizer': optimizer.state_dict(),
            'loader': loader.state_dict(),
            'step': step,
        }
        torch.save(states, options.checkpoint)


if __name__ == '__main__':
    main()
