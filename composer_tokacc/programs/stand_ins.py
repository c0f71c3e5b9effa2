# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Samples for the memory model of a run whose data is not at hand. For ``size lengths=...``."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from transformers import PretrainedConfig

from composer_tokacc.data import LengthTable
from composer_tokacc.layout import BatchLayout
from composer_tokacc.programs.errors import ConfigError
from composer_tokacc.programs.host_types import Row
from composer_tokacc.programs.models import tokenizer_of

CLASS_TOKENS = {'clip_vision_model': 1, 'siglip_vision_model': 0}
"""Features in addition to the patches, for the encoders that have one fixed image size."""
SMALL_SIDE, LARGE_SIDE = 336, 1344
"""Side of a small and a large image, in pixels. If tokens depend on the size, these two differ in their number."""


class StandIns:
    """Samples with the shapes that the memory model must see: no image, a small image, a large image.

    Their lengths are not those of the table, because the memory model brings its batches to a width of its own.

    Args:
        table: The lengths of the samples. They decide which samples have an image.
        processor: The processor of the run; None for a fresh model.
        config: The config of the model. Without a processor it must tell the shape of an image.
    """

    def __init__(
        self,
        table: LengthTable,
        processor: Any,
        config: PretrainedConfig,
    ) -> None:
        self.image_tokens = table.image_tokens
        self.processor = processor
        self._image_sample: dict[str, torch.Tensor] | None = None
        if processor is None and table.image_tokens.any():
            self._image_sample = _image_sample_of(config)
            if self._image_sample is None:
                raise ConfigError(
                    'lengths',
                    f'with images of any size needs `model.pretrained`, got: a `model.config` of {config.model_type}. '
                    'Name a checkpoint; its folder needs no weights',
                )

    def __len__(self) -> int:
        return len(self.image_tokens)

    def __getitem__(self, index: int) -> Row:
        """Returns a sample, with an image if the table has one. The row with the most tokens has the large image."""
        has_image = bool(self.image_tokens[index])
        if self.processor is not None:
            sample = self._processed(index)
        elif has_image and self._image_sample is not None:
            sample = dict(self._image_sample)
        else:
            token = torch.ones(1, 1, dtype=torch.long)
            sample = {'input_ids': token, 'attention_mask': token}
        return {**sample, 'labels': sample['input_ids'].clone(), 'num_images': [int(has_image)]}

    def _processed(self, index: int) -> Row:
        content = [{'type': 'text', 'text': 'a'}]
        has_image = bool(self.image_tokens[index])
        if has_image:
            content.insert(0, {'type': 'image'})
        text = self.processor.apply_chat_template([{'role': 'user', 'content': content}], tokenize=False)
        if not has_image:
            return dict(tokenizer_of(self.processor)(text=text, return_tensors='pt'))
        is_largest = self.image_tokens[index] == self.image_tokens.max()
        side = LARGE_SIDE if is_largest else SMALL_SIDE
        image = Image.new('RGB', (side, side))
        return dict(self.processor(text=text, return_tensors='pt', images=[image]))


def _image_sample_of(config: Any) -> dict[str, torch.Tensor] | None:
    """Returns a sample of one image for LLaVA with an encoder of one image size; None for other models.

    If an encoder takes images of any size, or cuts them into tiles, its config does not tell how large they are.
    """
    vision_config: Any = getattr(config, 'vision_config', None)
    token_id = BatchLayout.for_model(config).image_token_id
    if config.model_type != 'llava' or vision_config.model_type not in CLASS_TOKENS or token_id is None:
        return None
    side = vision_config.image_size
    num_tokens = (side // vision_config.patch_size) ** 2 + CLASS_TOKENS[vision_config.model_type]
    if config.vision_feature_select_strategy == 'default':  # drops the first feature
        num_tokens -= 1
    token_ids = torch.full((1, num_tokens), token_id)
    return {
        'input_ids': token_ids,
        'attention_mask': torch.ones_like(token_ids),
        'pixel_values': torch.zeros(1, vision_config.num_channels, side, side),
    }
