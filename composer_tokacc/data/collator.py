# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples of a Hugging Face processor -> one padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_tokacc.batch import MODALITIES, check_ids
from composer_tokacc.layout import BatchLayout


class VisionLanguageCollator:
    """Pads text and strings images, videos and audio one after the other.

    Args:
        tokenizer: The tokenizer, or the processor that holds it; says with what and on which side to pad.
        layout: How media entries belong to rows. ``None``: read off the samples.

    Raises:
        ValueError: If the tokenizer has no pad token.
    """

    def __init__(self, tokenizer: Any, *, layout: BatchLayout | None = None) -> None:
        tokenizer = getattr(tokenizer, 'tokenizer', tokenizer)
        if getattr(tokenizer, 'pad_token_id', None) is None:
            remedy = 'Set it: `tokenizer.pad_token = tokenizer.eos_token` (padding is masked, so any will do)'
            raise ValueError(f'`tokenizer` must have a pad token, got: none. {remedy}.')
        self.pad_token_id: int = tokenizer.pad_token_id
        self.padding_side: str = tokenizer.padding_side
        self.layout = layout

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Joins samples into a batch.

        Args:
            samples: What a processor returns for one sample each, with ``labels``, ``sample_ids`` and ``num_images``;
                perhaps ``num_videos`` and ``num_audios``.

        Returns:
            The batch, ``input_ids`` of shape ``(len(samples), width)`` first, with the lists ``sample_ids``,
            ``num_images``, ...
        """
        given = [] if isinstance(samples, Mapping) else samples  # one alone
        shapes = [getattr(dict(sample).get('input_ids'), 'shape', ()) for sample in given]
        if not shapes or any(len(shape) != 2 for shape in shapes):
            raise ValueError(
                f'`samples` must each hold `input_ids` of shape (1, length), got: {[*map(tuple, shapes[:3])]}. Call '
                "the processor with return_tensors='pt'."
            )
        for sample in samples:
            check_ids(sample)
        counts = [sum(sample.get(f'num_{modality}s', [0])[0] for modality in MODALITIES) for sample in samples]
        layout = self.layout or BatchLayout.infer(samples[counts.index(max(counts))])
        batch = layout.concat(samples, padding_side=self.padding_side, pad_token_id=self.pad_token_id)
        # `input_ids` first: StreamingDataLoader takes the batch size from the first entry.
        return {'input_ids': batch.pop('input_ids'), **batch}
