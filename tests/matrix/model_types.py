# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Every model type of transformers' image, video and audio to text classes: which family it is, or is taken for.

Types without an entry are tried: of what their own image processor, video processor and feature extractor make, as they
come, two rows keep what the model's forward names, and a third has no media. The layout that these rows imply joins
them and takes them apart again.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto import auto_mappings, image_processing_auto, video_processing_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from composer_tokacc import BatchLayout
from composer_tokacc.layout import FAMILIES

__all__ = ['MODEL_TYPES', 'entry_of', 'inferred', 'listing']

CLASSES: dict[str, str] = dict(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
MODEL_TYPES = sorted(CLASSES)
SIZES = ((64, 48), (224, 336))
Row = dict[str, Any]


def listing() -> list[str]:
    """Markdown: three lists, which together hold every type."""
    listed = [f'`{model_type}`' for model_type in MODEL_TYPES if entry_of(model_type)]
    tried = {model_type: inferred(model_type) for model_type in MODEL_TYPES if not entry_of(model_type)}
    taken = [
        f'`{model_type}` ({", ".join(f"{unit}s as {name}" for unit, name in found.items())})'
        for model_type, found in tried.items()
        if found
    ]
    rest = [f'`{model_type}`' for model_type, found in tried.items() if not found]
    return [
        f'- With an entry ({len(listed)}): {", ".join(listed)}.',
        f'- Taken for a known format by keys and shapes ({len(taken)}): {", ".join(taken)}.',
        f'- To be registered ({len(rest)}): {", ".join(rest)}.',
    ]


def entry_of(model_type: str) -> str | None:
    """Name of the family that lists the type."""
    return next((family.name for family in FAMILIES if model_type in family.model_types), None)


def inferred(model_type: str) -> dict[str, str]:
    """What the images, videos and audios of an unlisted type are taken for, as far as anything is."""
    forward = getattr(transformers, CLASSES[model_type]).forward
    named = inspect.signature(forward).parameters
    found = {}
    makers: tuple[tuple[str, Any, Any], ...] = (
        ('image', _image, image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES),
        ('video', _video, video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES),
        ('audio', _audio, auto_mappings.FEATURE_EXTRACTOR_MAPPING_NAMES),
    )
    for unit, make, mapping in makers:
        names = mapping.get(model_type) or {}
        name = names if isinstance(names, str) else names.get('pil') or names.get('torchvision')
        try:
            processor = getattr(transformers, str(name))()
            media = [{key: value for key, value in make(processor, size).items() if key in named} for size in SIZES]
            found[unit] = _tried([_row(unit, one) for one in [*media, {}]])
        except Exception:  # whatever a processor says to a picture that it was not made for
            continue
    return found


def _image(processor: Any, size: tuple[int, int]) -> Any:
    pixels = np.random.default_rng(0).integers(1, 255, (size[1], size[0], 3), dtype=np.uint8)
    return processor(images=[Image.fromarray(pixels)], return_tensors='pt')


def _video(processor: Any, size: tuple[int, int]) -> Any:
    frames = np.random.default_rng(0).integers(1, 255, (4, size[1], size[0], 3), dtype=np.uint8)
    return processor(videos=[frames], do_sample_frames=False, return_tensors='pt')


def _audio(extractor: Any, size: tuple[int, int]) -> Any:
    sound = np.random.default_rng(0).standard_normal(100 * size[0]).astype(np.float32)
    return extractor([sound], sampling_rate=extractor.sampling_rate, return_attention_mask=True, return_tensors='pt')


def _row(unit: str, media: Row) -> Row:
    ids = torch.arange(1, 9)[None]
    row = {'input_ids': ids, 'attention_mask': torch.ones_like(ids), 'labels': ids.clone()}
    return {**row, f'num_{unit}s': [int(len(media) > 0)], **media}


def _tried(rows: list[Row]) -> str:
    """Name of the family, under which the rows are joined and taken apart again."""
    layout = BatchLayout.infer(rows[0])
    assert layout.family.media, 'no media'
    batch = layout.concat(rows)
    for row, part in zip(rows, layout.split(batch, [[place] for place in range(len(rows))]), strict=True):
        tensors = {key: value for key, value in row.items() if isinstance(value, torch.Tensor)}
        assert {key for key, value in part.items() if isinstance(value, torch.Tensor)} == tensors.keys()
        assert all(part[key].double().sum() == value.double().sum() for key, value in tensors.items())
    return layout.family.name
