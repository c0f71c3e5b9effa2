# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Joins samples of a Hugging Face processor into one padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composer_tokacc.batch import check_ids
from composer_tokacc.data.records import EncodedSample
from composer_tokacc.layout import BatchLayout
from composer_tokacc.layout.layout import inferred_layout
from composer_tokacc.refusals import InvalidInputError


class VisionLanguageCollator:
    """Pads the text of samples, and concatenates their images, videos and audio.

    Args:
        tokenizer: The tokenizer, or the processor that holds it. Gives the padding side and the pad token. A tokenizer
            without a pad token pads with its eos token.
        layout: Which parts of the media tensors belong to which row. ``None``: inferred from the samples.

    Raises:
        ValueError: If the tokenizer has neither a pad token nor an eos token.
    """

    def __init__(self, tokenizer: Any, *, layout: BatchLayout | None = None) -> None:
        tokenizer = getattr(tokenizer, 'tokenizer', tokenizer)
        pad_token_id = getattr(tokenizer, 'pad_token_id', None)
        if pad_token_id is None:  # Llama and Mistral. Padding is masked, so any token can be used.
            pad_token_id = getattr(tokenizer, 'eos_token_id', None)
        if pad_token_id is None:
            raise InvalidInputError('`tokenizer` must have a pad token or an eos token. Set `tokenizer.pad_token`.')
        self.pad_token_id: int = pad_token_id
        self.padding_side: str = tokenizer.padding_side
        self.layout = layout

    def __call__(self, samples: Sequence[EncodedSample]) -> dict[str, Any]:
        """Joins samples into a batch. Raises ValueError if they are malformed or do not fit together.

        Args:
            samples: For each conversation, what the processor returned for it, with ``labels``, ``sample_ids`` and
                ``num_images``. Possibly also ``num_videos`` and ``num_audios``.

        Returns:
            The batch. Its first entry is ``input_ids`` of shape ``(len(samples), width)``. It also has the lists
            ``sample_ids``, ``num_images``, ...
        """
        check_samples(samples)
        layout = self.layout or inferred_layout(samples)
        batch = layout.concat(
            samples,
            padding_side=self.padding_side,
            pad_token_id=self.pad_token_id,
        )
        # The ids come first, because StreamingDataLoader takes the batch size from the first entry.
        return {'input_ids': batch.pop('input_ids'), **batch}


def check_samples(samples: Sequence[EncodedSample]) -> None:
    """Raises ValueError if there are no samples, or if a sample has no ``input_ids`` of shape ``(1, length)``.

    Also raises it if the mask or the positions of a sample do not fit its ids.
    """
    # If a single sample or a batch was passed by mistake, it is a mapping, and this loop gets its keys.
    if len(samples) == 0 or not all(_has_ids(sample) for sample in samples):
        raise InvalidInputError(
            '`samples` must be a list of samples, each with the tensor `input_ids` of shape (1, length). Call the '
            "processor with return_tensors='pt'."
        )
    for sample in samples:
        check_ids(sample)
        shape = tuple(sample['input_ids'].shape)
        if shape[0] != 1:
            raise InvalidInputError(
                f'`samples` must be single rows, each with `input_ids` of shape (1, length), got: {shape}. Make one '
                'sample of each row.'
            )


def _has_ids(value: object) -> bool:
    """Tells whether a value is a mapping with the tensor ``input_ids``."""
    return isinstance(value, Mapping) and isinstance(value.get('input_ids'), torch.Tensor)
