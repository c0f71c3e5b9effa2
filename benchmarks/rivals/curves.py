# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A longer epoch of the contenders that change what a step holds, and of ours; runs under the composer launcher.

Once with the loss of every step, as the mean over its tokens; once with the times of every step, which that would
disturb. Stock's curve with exact weights is Hugging Face's own, which is exact for this model.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
from composer.utils import dist

from benchmarks.rivals.contenders import takes
from benchmarks.rivals.data import Samples, Sizes, lengths_of
from benchmarks.rivals.speed import HELD_OUT, begin, end, held_out_loss, run, say

NAMES = ('hf', 'hf_group', 'odb', 'ours_sampler', 'ours_packed')
STOCK = 'hf'
WINDOW = 21
"""Steps of the running mean that a curve is held to."""


def curve(name: str, sizes: Sizes, samples: Samples, held_out: Samples) -> dict[str, Any]:
    """Loss of every step, and how many samples had been seen by its end."""
    seen, model, _ = run(name, sizes, samples, curve=True)
    losses = [total / count for total, count in seen.losses]
    return {
        'losses': [round(loss, 6) for loss in losses],
        'samples_seen': np.cumsum([len(ids) for ids in seen.ids]).tolist(),
        'held_out_loss': held_out_loss(model, held_out),
        'unrest': unrest(losses),
    }


def unrest(losses: Sequence[float]) -> float:
    """Standard deviation about the running mean, over the second half."""
    values = np.asarray(losses)
    smooth = np.convolve(values, np.ones(WINDOW) / WINDOW, mode='valid')
    rest = values[WINDOW // 2 : WINDOW // 2 + len(smooth)] - smooth
    return float(rest[len(rest) // 2 :].std())


def stalls(name: str, sizes: Sizes, samples: Samples) -> dict[str, Any]:
    seen, *_ = run(name, sizes, samples)
    steps = [end - start for start, end in pairwise(seen.ends)]
    tokens = seen.tokens[1:]
    return {
        'steps': len(steps),
        'p50': statistics.median(steps),
        'p99': float(np.quantile(steps, 0.99)),
        'max': max(steps),
        'p99_per_token': float(np.quantile(np.array(steps) / tokens, 0.99) / np.median(np.array(steps) / tokens)),
        'loader_wait_share': sum(seen.waits[1:]) / sum(steps),
        'longest_wait': max(seen.waits[1:]),
        'tokens_per_second': sum(tokens) / sum(steps),
    }


def main() -> None:
    plan, path = begin()
    sizes = Sizes(**plan['sizes'])
    lengths = lengths_of(plan['set'], sizes.mean)
    samples, held_out = Samples(sizes, lengths), Samples(sizes, lengths, seed=1, count=HELD_OUT)
    found: dict[str, Any] = {'set': plan['set'], 'sizes': asdict(sizes)}
    for part, measure in (('curves', lambda name: curve(name, sizes, samples, held_out)),
                          ('stalls', lambda name: stalls(name, sizes, samples))):  # fmt: skip
        if part in plan['parts']:
            found[part] = {}
            for name in plan['rivals']:
                assert takes(name, sizes.model), name
                found[part][name] = measure(name)
                shown = {key: value for key, value in found[part][name].items() if not isinstance(value, list)}
                say(f'{part}, {name}: {shown}')
    if dist.get_global_rank() == 0:
        path.write_text(json.dumps(found))
    end()


if __name__ == '__main__':
    main()
