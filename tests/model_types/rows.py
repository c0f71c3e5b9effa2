# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ragged rows of any model type: media as its own processors make them, placeholders as its own encoder wants them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto import auto_mappings, image_processing_auto, video_processing_auto

from composer_tokacc.layout.placeholders import placeholder_ids
from tests.model_types.exceptions import ONE_EACH, PROCESSORS
from tests.model_types.tiny import FIRST_MARK, IMAGE, MEL, PATCH

MODALITIES = ('image', 'video', 'audio')
ITEMS: Mapping[str, Sequence[Sequence[int]]] = {
    'image': [[0, 1], [], [2], []],
    'video': [[0], [], [1, 2]],
    'audio': [[0, 1], [], [2]],
}
"""Items of each row."""
WORDS = [7, 3, 12, 5]
SIZES = [(32, 16), (16, 16), (16, 32)]
TYPES = {'image': 1, 'video': 2, 'audio': 3}
_MASKS = ('input_features_mask', 'feature_attention_mask', 'padding_mask', 'audio_attention_mask', 'input_values_mask')


class Maker:
    """Makes batches of a model type."""

    side = 'right'
    """Where rows are padded."""

    def __init__(self, model_type: str, model: Any) -> None:
        self.model_type, self.model, self.config = model_type, model, model.config
        self.named = inspect.signature(type(model).forward).parameters
        self.settings = PROCESSORS.get(model_type, {})

    def modalities(self) -> list[str]:
        """Those that the type has a processor for, and its forward a name."""
        given = self.settings.get('modalities', MODALITIES)
        return [one for one in given if self._class_name(one)]

    def batch(self, modality: str, *, has_media: bool = True, runs: int = 1) -> dict[str, torch.Tensor]:
        """Rows with two items, with none and with one."""
        if modality == 'text':
            rows = [[4 + (row * 11 + 5 * place) % 90 for place in range(count)] for row, count in enumerate(WORDS)]
            return self._joined(rows, [[0] * len(row) for row in rows], None)
        one_each = ONE_EACH.get(self.model_type)
        given = self.settings.get(f'{modality}_items', ITEMS[modality]) if has_media else [[]] * len(WORDS)
        items = [[0], [1], [2]] if one_each else given
        flat = [item for row in items for item in row]
        media = self.media(modality, items) if flat else {}
        counts = dict.fromkeys(flat, 0) if one_each else {item: self.count(modality, item) for item in set(flat)}
        if one_each == 'masked':
            counts = dict.fromkeys(flat, self.config.latent_query_num)
        ids = placeholder_ids(self.config, modality) or (self.settings.get(f'{modality}_token', FIRST_MARK),)
        rows, types = [], []
        for row, chosen in enumerate(items):
            text, kinds = [], []
            for item in chosen:
                marks = [self._mark(f'{modality}_{edge}_token_id') for edge in ('start', 'end')]
                token = self._mark('image_token_id') if self.settings.get('frames') and modality == 'video' else ids[0]
                text += marks[:1]
                kinds += [0]
                for _ in range(runs):  # frames, or lines
                    number = counts[item] // runs
                    text += [5 + row] + [token] * number
                    kinds += [0] + [TYPES[modality]] * number
                text += marks[1:]
                kinds += [0]
            told = self.settings.get('words')
            num_words = told(self.media(modality, [chosen])) - len(text) if told else WORDS[row]
            words = [4 + (row * 11 + 5 * place) % 90 for place in range(num_words)]
            rows.append(text + words)
            types.append(kinds + [0] * len(words))
        joined = self._joined(rows, types, one_each)
        if self.settings.get('slots'):  # Idefics: a slot an image, and who sees it
            media['pixel_values'] = media['pixel_values'].unflatten(0, (-1, 1))
            joined['image_attention_mask'] = joined['attention_mask'][..., None]
        if 'cross_attention_mask' in self.named and media:
            sees = (joined['input_ids'] == ids[0]).cumsum(dim=1)
            joined['cross_attention_mask'] = sees[..., None, None] * media['aspect_ratio_mask'][:, None]
        return media | joined

    def _sounds(self, items: Sequence[int], size: int) -> dict[str, torch.Tensor]:
        """Where a package for sounds is missing: frames as the forward documents them, padded, and their mask."""
        per = self.settings.get('frames_a_token', 1)
        frames = [15 * (item + 1) for item in items]
        features = torch.zeros(len(items), max(frames), size)
        for row, (item, count) in enumerate(zip(items, frames, strict=True)):
            features[row, :count] = torch.randn(count, size, generator=torch.Generator().manual_seed(item))
        ends = torch.tensor(frames)[:, None] // per
        return {'input_features': features, 'input_features_mask': torch.arange(max(frames) // per)[None] < ends}

    def _mark(self, name: str) -> int:
        found = getattr(self.config, name, None)
        return found if isinstance(found, int) else 4

    def _joined(self, rows: list[list[int]], types: list[list[int]], one_each: str | None) -> dict[str, Any]:
        ids, kinds, mask = map(self._padded, (rows, types, [[1] * len(row) for row in rows]))
        labels = ids.masked_fill((mask == 0) | (kinds > 0), -100)
        if self.side == 'left':  # or a pad would predict it
            labels = labels.masked_fill(mask.cumsum(dim=1) == 1, -100)
        batch = {'input_ids': ids, 'attention_mask': mask, 'labels': labels}
        if self.settings.get('decoder_ids'):
            batch['decoder_input_ids'] = ids
        if one_each == 'decoder':
            del batch['input_ids'], batch['attention_mask']
        if one_each == 'seq2seq' or (self.config.is_encoder_decoder and one_each != 'decoder'):
            batch['labels'] = torch.tensor([[4, 5, 6, 7], [8, 9, -100, -100], [9, 8, 7, -100], [5, 6, -100, -100]])[
                : len(rows)
            ]
        if self.settings.get('codes'):  # text and sound in one tensor
            codes = torch.ones(*ids.shape, self.config.num_codebooks, dtype=torch.long)
            batch['input_ids'] = torch.cat([ids[..., None], codes], dim=-1)
        if self.settings.get('robot'):
            del batch['labels']
            batch |= {'state': torch.zeros(len(ids), 32), 'actions': torch.zeros(len(ids), 4, 32)}
        if one_each == 'masked':
            batch['image_embeds_position_mask'] = (kinds > 0).long()
        if 'bbox' in self.named:
            batch['bbox'] = torch.zeros(*ids.shape, 4, dtype=torch.long)
        for key in ('mm_token_type_ids', 'moe_mm_token_type_ids', 'token_type_ids'):
            if key in self.named and one_each is None:
                batch[key] = kinds
        return batch

    def _padded(self, rows: list[list[int]]) -> torch.Tensor:
        width = max(map(len, rows))
        pads = [[0] * (width - len(row)) for row in rows]
        return torch.tensor(
            [pad + row if self.side == 'left' else row + pad for row, pad in zip(rows, pads, strict=True)]
        )

    def count(self, modality: str, item: int) -> int:
        """Placeholders of one item: features that the encoder makes of it, or those that the forward asks for."""
        if given := self.settings.get(f'{modality}_count'):
            return int(given(self, item) if callable(given) else given)
        media = self.media(modality, [[item]])
        ask = getattr(self.model, f'get_{modality}_features', None)
        ask = ask or getattr(getattr(self.model, 'model', None), f'get_{modality}_features', None)
        with torch.no_grad():
            if ask is not None:
                try:
                    named = inspect.signature(ask).parameters
                    found = ask(**{key: value for key, value in media.items() if key in named or 'args' in named})
                    found = getattr(found, 'pooler_output', found)
                    tensors = [found] if torch.is_tensor(found) else list(found)
                    return sum(one.numel() // one.shape[-1] for one in tensors)
                except Exception:
                    pass
            token = (placeholder_ids(self.config, modality) or (FIRST_MARK,))[0]
            batch = media | self._joined([[4, token, 5]], [[0, TYPES[modality], 0]], None)
            try:
                self.model(**batch, use_cache=False)
            except Exception as error:
                numbers = re.search(r'features:? *(\d+)|tensor of shape \[(\d+), |Got (\d+) feature', str(error))
                if numbers is None:
                    raise
                return int(next(filter(None, numbers.groups())))
        return 1

    def media(self, modality: str, items: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Tensors of items, rows one after the other, as the type's processor makes them, in the model's precision."""
        processor = None if 'sound_size' in self.settings else self.processor(modality)
        length = self.settings.get('length', 3200)
        make = {'image': _image, 'video': _video, 'audio': lambda item: _audio(item, length)}[modality]
        made = [[make(item) for item in row] for row in items]
        num_items = sum(map(len, items))
        given: Any = made if self.settings.get('nested') else [one for row in made for one in row]
        if self.settings.get('image_media') == 'protein':
            proteins = torch.tensor([[5, 6, 7, 8][item:] + [1] * item for row in items for item in row])
            found = {'protein_input_ids': proteins, 'protein_attention_mask': (proteins != 1).long()}
        elif size := self.settings.get('sound_size'):
            found = self._sounds([item for row in items for item in row], size)
        elif modality == 'image':
            found = processor(images=given, return_tensors='pt', **self.settings.get('image_call', {}))
        elif modality == 'video':
            found = processor(videos=given, do_sample_frames=False, return_tensors='pt')
        else:
            asked = inspect.signature(processor.__call__).parameters
            options = {
                'sampling_rate': processor.sampling_rate,
                'return_attention_mask': True,
                'padding': True,
                'return_tensors': 'pt',
            }
            options |= self.settings.get('audio_call', {})
            found = processor(
                given, **{key: value for key, value in options.items() if key in asked or 'kwargs' in asked}
            )
        found = found[0] if isinstance(found, tuple) else found
        found = {'pixel_values': found} if torch.is_tensor(found) else found
        if 'qformer_input_ids' in self.named:
            words = torch.arange(4, 7).expand(num_items, 3).contiguous()
            found = {**found, 'qformer_input_ids': words, 'qformer_attention_mask': torch.ones_like(words)}
        media = {}
        for key, value in dict(found).items():
            if (
                key in ('attention_mask', 'input_features_mask', 'padding_mask', 'feature_attention_mask')
                and modality == 'audio'
            ):
                key = next((name for name in _MASKS if name in self.named), key)
            key = self.settings.get('rename', {}).get(key, key)
            if key in self.named:
                media[key] = value if torch.is_tensor(value) else torch.as_tensor(np.array(value))
        dtype = next(self.model.parameters()).dtype
        media = {key: value.to(dtype) if value.is_floating_point() else value for key, value in media.items()}
        return media | {key: media[key].tolist() for key in self.settings.get('lists', ())}

    def _class_name(self, modality: str) -> str | None:
        if given := self.settings.get(modality, {}).get('name'):
            return given
        if f'{modality}_media' in self.settings:
            return 'given'
        mapping = {
            'image': image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
            'video': video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
            'audio': auto_mappings.FEATURE_EXTRACTOR_MAPPING_NAMES,
        }[modality]
        found = mapping.get(self.settings.get('like', self.model_type)) or {}
        return found if isinstance(found, str) else found.get('torchvision') or found.get('pil')

    def processor(self, modality: str) -> Any:
        """The type's own, for pictures and sounds of a few numbers."""
        name = self._class_name(modality)
        if name == 'given':
            return None
        chosen = dict(self.settings.get(modality, {}))
        chosen.pop('name', None)
        if modality == 'audio':
            parts = [getattr(self.config, name, None) for name in ('audio_config', 'encoder_config')]
            is_small = any(MEL in (getattr(p, 'num_mel_bins', 0), getattr(p, 'feature_size', 0)) for p in parts)
            small = {
                **({'feature_size': MEL} if is_small else {}),
                **({'chunk_length': 1} if 'Whisper' in name else {}),
            }
            asked = inspect.signature(getattr(transformers, name)).parameters
            return getattr(transformers, name)(**{key: v for key, v in small.items() if key in asked} | chosen)
        plain = getattr(transformers, name)(**chosen)
        settings = {}
        for key, value in plain.to_dict().items():
            if (small := _small(key, value)) is not None:
                settings[key] = small
        return getattr(transformers, name)(**settings | chosen)


def _small(key: str, value: Any) -> Any:
    """A setting of an image processor for pictures of a few pixels; None: as it is."""
    if key in ('size', 'crop_size', 'max_image_size', 'image_size', 'high_res_size', 'tile_size_dict') and isinstance(
        value, dict
    ):
        is_area = max(one or 0 for one in value.values()) > 3000
        sizes = {'shortest_edge': 64 if is_area else IMAGE, 'longest_edge': 512 if is_area else 2 * IMAGE}
        return {name: sizes.get(name, IMAGE) for name in value}
    if key == 'patch_size':
        return PATCH if isinstance(value, int) else dict.fromkeys(value, PATCH) if isinstance(value, dict) else None
    known = {
        'encoder_patch_size': PATCH, 'tile_size': IMAGE, 'min_pixels': 64, 'max_pixels': 512, 'scale_resolution': IMAGE,
        'max_image_size': IMAGE, 'max_patches': 3, 'max_crops': 3, 'max_image_tiles': 4, 'max_slice_nums': 3,
    }  # fmt: skip
    if key == 'image_grid_pinpoints' and value:
        return [[16, 32], [32, 16], [32, 32]]
    return known.get(key) if isinstance(value, int) else None


def _image(item: int) -> Any:
    width, height = SIZES[item % 3]
    return Image.fromarray(np.random.default_rng(item).integers(1, 255, (height, width, 3), dtype=np.uint8))


def _video(item: int) -> Any:
    width, height = SIZES[item % 3]
    return np.random.default_rng(item).integers(1, 255, (4, height, width, 3), dtype=np.uint8)


def _audio(item: int, length: int) -> Any:
    """Every item is 8 frames of 10 ms longer than the one before."""
    return (0.1 * np.random.default_rng(item).standard_normal(length + 1280 * item)).astype(np.float32)
