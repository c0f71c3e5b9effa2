# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Planned batches and exact weights in a loop with accelerate. Composer is not imported.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py checkpoint --steps 5
accelerate launch --cpu --num_processes 1 examples/accelerate_loop.py checkpoint       # resumes at step 6
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
from accelerate import Accelerator
from ragged import EPOCHS, GLOBAL_BATCH, LEARNING_RATE, Rows, collate, small_llama

from composer_tokacc import RegroupingBatchSampler, RegroupingDataLoader, weighted_microbatches


def main() -> None:
    """Trains for two epochs, or until step ``--steps``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('checkpoint', type=Path)
    parser.add_argument('--steps', type=int)
    options = parser.parse_args()

    dataset = Rows()
    # The sampler decides how many microbatches a step has, and their weights are exact already. With any value but 1,
    # `accelerator.backward` would divide each loss by it. `accelerate launch` may override this argument, so check it.
    accelerator = Accelerator(gradient_accumulation_steps=1)
    if accelerator.gradient_accumulation_steps != 1:
        parser.error(
            f'accelerate must have 1 gradient accumulation step, got: {accelerator.gradient_accumulation_steps}, from '
            '`accelerate launch --gradient_accumulation_steps` or ACCELERATE_GRADIENT_ACCUMULATION_STEPS. Leave it out.'
        )
    model = small_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    sampler = RegroupingBatchSampler(
        dataset,
        lengths=dataset.lengths,
        global_batch_size=GLOBAL_BATCH,
        max_tokens=64,
        num_replicas=accelerator.num_processes,
        rank=accelerator.process_index,
    )
    # Not passed to `accelerator.prepare`, because the sampler already gives each rank its own samples.
    loader = RegroupingDataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
    accelerator.register_for_checkpointing(loader)
    if options.checkpoint.exists():
        accelerator.load_state(str(options.checkpoint))

    for epoch in range(sampler.epoch, EPOCHS):
        loader.set_epoch(epoch)
        # A resumed loader starts at batch `first_batch` of the epoch.
        for number_in_epoch, batch in enumerate(loader, start=sampler.first_batch + 1):
            microbatches = list(weighted_microbatches(batch, device=accelerator.device))
            mean = torch.zeros((), device=accelerator.device)
            for number, (microbatch, weight) in enumerate(microbatches, start=1):
                # Ranks reduce gradients only in the last microbatch, because they may have unequal numbers of them.
                with contextlib.nullcontext() if number == len(microbatches) else accelerator.no_sync(model):
                    on_device = {key: value.to(accelerator.device) for key, value in microbatch.items()}
                    loss = model(**on_device).loss * weight
                    accelerator.backward(loss)
                mean += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            step = epoch * len(loader) + number_in_epoch
            mean = accelerator.reduce(mean, 'mean')
            accelerator.print(f'step {step}: {len(microbatches)} microbatches, mean loss over all tokens {mean:.6f}')
            if step == options.steps:
                break
        if step == options.steps:
            break
    accelerator.save_state(str(options.checkpoint), safe_serialization=False)
    accelerator.end_training()


if __name__ == '__main__':
    main()
