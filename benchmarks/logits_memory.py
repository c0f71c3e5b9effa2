# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Memory of a microbatch of Qwen2.5-VL-3B, with logits at all positions and only at labels.

The memory is computed, not measured. A step of the whole model, in bfloat16 and with checkpointed activations as on one
GPU, is traced with tensors that have a size but no data. Rows are like those of AI2D: 625 image tokens, a question and
an answer. 16 tokens of the answer have a label.

    python -m benchmarks.logits_memory

Writes results/logits_memory.json.
"""

from __future__ import annotations

import bisect
import json

import torch
import transformers

from benchmarks.machine import machine
from benchmarks.models import qwen_config, with_labels
from benchmarks.record import RESULTS, Row, parser_of, write
from composer_tokacc.batch import BatchDict
from composer_tokacc.sizing.memory_model import GIB, MemoryModel
from composer_tokacc.sizing.shapes import BatchShape
from composer_tokacc.sizing.trace import calibrate_fake

RESULTS_FILE = RESULTS / 'logits_memory.json'
POSITIONS = 8192
# Tokens of a row: all, those of its image, and those of its answer that have a label.
ROW_TOKENS = 691
IMAGE_TOKENS = 625
LABELS = 16
# Values in a patch: 3 colours, 2 frames, 14 x 14 pixels.
PATCH_VALUES = 1176
DEVICE_BYTES = 80 * GIB
# Part of the device that may be used, as by default in `size`.
SAFETY = 0.92


def build() -> torch.nn.Module:
    """Makes the model in bfloat16, with checkpointed activations."""
    model = transformers.Qwen2_5_VLForConditionalGeneration(qwen_config()).to(torch.bfloat16)
    model.gradient_checkpointing_enable({'use_reentrant': False})
    return model.train()


def sample(side: int, num_text_tokens: int) -> BatchDict:
    """Returns a sample as the processor returns it. It has one square image, with `side` patches on each side."""
    config = qwen_config()
    num_image_tokens = side * side // 4  # 2 x 2 patches become one token
    image_ids = [config.image_token_id] * num_image_tokens
    text_ids = range(1000, 1000 + num_text_tokens)
    ids = torch.tensor([[config.vision_start_token_id, *image_ids, config.vision_end_token_id, *text_ids]])
    return {
        **with_labels(ids, ids.shape[1] - LABELS),
        'pixel_values': torch.zeros(side * side, PATCH_VALUES, dtype=torch.bfloat16),
        'image_grid_thw': torch.tensor([[1, side, side]]),
    }


def shape_of(positions: int, memory: MemoryModel) -> BatchShape:
    """Returns the shape of a microbatch of rows like those of AI2D, with this number of positions."""
    exact_num_rows = positions / ROW_TOKENS
    num_rows = max(round(exact_num_rows), 1)
    image_tokens = round(exact_num_rows * IMAGE_TOKENS)
    return BatchShape(
        rows=num_rows,
        width=round(positions / num_rows),
        image_tokens=image_tokens,
        image_area=float(image_tokens * IMAGE_TOKENS),  # the sum of squared image tokens over the images
        pixel_bytes=int(image_tokens * memory.pixel_bytes_per_image_token),
        # One more than there are labels; see `logit_positions` of sizing.
        labels=round(exact_num_rows * LABELS) + 1 if memory.logits == 'labels' else None,
    )


def most_positions(memory: MemoryModel) -> int:
    """Returns the most positions that fit into 80 GiB with model, gradients and optimizer."""

    def peak(positions: int) -> float:
        return memory.peak(shape_of(positions, memory))

    # `bisect` returns how many numbers of the range fit. The range begins at 1, so this is also the largest of them.
    return bisect.bisect(range(1, 1 << 24), SAFETY * DEVICE_BYTES, key=peak)


def figures(logits: str) -> Row:
    """Returns the memory of a microbatch by part, and how many positions fit."""
    samples = [sample(50, 64), sample(32, 64)]
    memory = calibrate_fake(build, qwen_config(), samples, width=1024, has_mask=False, logits=logits)
    terms = memory.terms(shape_of(POSITIONS, memory))
    parts = {}
    for name in ('text activations', 'logits', 'vision activations', 'inputs'):
        parts[name] = terms[name] / GIB
    return {
        'positions': POSITIONS,
        'gib_by_part': parts,
        'gib': sum(parts.values()),
        'model_gib': sum(terms.values()) / GIB - sum(parts.values()),
        'positions_that_fit_in_80_gib': most_positions(memory),
        'residual': memory.residual,
    }


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    results = {logits: figures(logits) for logits in ('all', 'labels')}
    print(json.dumps(results, indent=1))
    write(arguments.results / RESULTS_FILE.name, {'machine': machine(), **results})


if __name__ == '__main__':
    main()
