# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The processors of any model type, for small images, videos and sounds."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers.models.auto import feature_extraction_auto, image_processing_auto, video_processing_auto

from tests.model_types.exceptions import ROWS, RowSettings
from tests.model_types.tiny import IMAGE, MEL, PATCH, PINPOINTS

__all__ = ['processor_name', 'small_processor']

_CLASS_NAMES: dict[str, Any] = {
    'image': image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
    'video': video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
    'audio': feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
}


def processor_name(model_type: str, modality: str) -> str | None:
    """Returns the class of the type's processor for a modality. None: it has none."""
    settings = ROWS.get(model_type, RowSettings())
    name = getattr(settings, modality).get('name')
    if name:
        return name
    if modality == 'image' and settings.proteins:
        return 'none, made here'
    names = _CLASS_NAMES[modality].get(settings.like or model_type) or {}
    if isinstance(names, tuple):  # up to transformers 4
        slow_name, fast_name = names
        return fast_name or slow_name
    if isinstance(names, str):
        return names
    return names.get('torchvision') or names.get('pil')


def small_processor(model_type: str, modality: str, config: Any = None, **settings: Any) -> Any:
    """Returns the type's processor for a modality.

    Args:
        model_type: The model type.
        modality: The modality.
        config: The config of the model that hears the sounds. None: it has the small number of mel bins.
        settings: Settings of the processor, before those for small media.
    """
    name = processor_name(model_type, modality)
    assert name is not None
    processor_class = getattr(transformers, name)
    chosen = {**getattr(ROWS.get(model_type, RowSettings()), modality), **settings}
    chosen.pop('name', None)
    if modality == 'audio':
        arguments = inspect.signature(processor_class).parameters
        accepted = {key: value for key, value in _small_sounds(name, config).items() if key in arguments}
        return processor_class(**accepted | chosen)
    small_settings = {}
    for key, value in processor_class(**chosen).to_dict().items():
        size = _small(key, value)
        if size is not None:
            small_settings[key] = size
    return processor_class(**small_settings | chosen)


def _small_sounds(name: str, config: Any) -> dict[str, int]:
    settings = {}
    if config is None or _has_small_number_of_bins(config):
        settings['feature_size'] = MEL
    if 'Whisper' in name:
        settings['chunk_length'] = 1
    return settings


def _has_small_number_of_bins(config: Any) -> bool:
    for part in ('audio_config', 'encoder_config'):
        audio_config = getattr(config, part, None)
        for key in ('num_mel_bins', 'feature_size'):
            if getattr(audio_config, key, 0) == MEL:
                return True
    return False


_SIZE_KEYS = ('size', 'crop_size', 'max_image_size', 'image_size', 'high_res_size', 'tile_size_dict')
_SMALL = {
    'encoder_patch_size': PATCH,
    'tile_size': IMAGE,
    'min_pixels': 64,
    'max_pixels': 512,
    'scale_resolution': IMAGE,
    'max_image_size': IMAGE,
    'max_patches': 3,
    'max_crops': 3,
    'max_image_tiles': 4,
    'max_slice_nums': 3,
}


def _small(key: str, value: Any) -> Any:
    """Returns a setting of an image processor for small images; None: the setting stays."""
    if key in _SIZE_KEYS and isinstance(value, dict):
        sizes = {'shortest_edge': IMAGE, 'longest_edge': 2 * IMAGE}
        largest = max(size or 0 for size in value.values())
        if largest > 3000:  # numbers of pixels in place of edges
            sizes = {'shortest_edge': _SMALL['min_pixels'], 'longest_edge': _SMALL['max_pixels']}
        return {name: sizes.get(name, IMAGE) for name in value}
    if key == 'patch_size' and isinstance(value, dict):
        return dict.fromkeys(value, PATCH)
    if key == 'patch_size' and isinstance(value, int):
        return PATCH
    if key == 'image_grid_pinpoints' and value:
        return PINPOINTS
    return _SMALL.get(key) if isinstance(value, int) else None
