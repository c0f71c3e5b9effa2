# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ragged rows of any model type: its own processors make the media, its own encoder says how many placeholders."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto import feature_extraction_auto, image_processing_auto, video_processing_auto

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
NUM_ITEMS = 1000
"""Of random rows. Every fourth has the same size, and other pixels."""
WORDS = [7, 3, 12, 5]
FIRST_WORD, NUM_WORDS = 4, 90
NO_MARK = 4
"""The word in place of a start or end token that the type does not have."""
SIZES = [(32, 16), (16, 16), (16, 32), (32, 32)]
TYPES = {'image': 1, 'video': 2, 'audio': 3}
_AUDIO_MASKS = ('attention_mask', 'input_features_mask', 'padding_mask', 'feature_attention_mask')
_MASKS = ('input_features_mask', 'feature_attention_mask', 'padding_mask', 'audio_attention_mask', 'input_values_mask')
_SEQ2SEQ_LABELS = [[4, 5, 6, 7], [8, 9, -100, -100], [9, 8, 7, -100], [5, 6, -100, -100]]
_TOKEN_TYPE_KEYS = ('mm_token_type_ids', 'moe_mm_token_type_ids', 'token_type_ids')


class Maker:
    """Makes batches of a model type."""

    side = 'right'
    """Where rows are padded."""

    def __init__(self, model_type: str, model: Any) -> None:
        self.model_type, self.model, self.config = model_type, model, model.config
        self.named = inspect.signature(type(model).forward).parameters
        self.settings = PROCESSORS.get(model_type, {})
        self.one_each = ONE_EACH.get(model_type)
        self._counts: dict[tuple[str, int], int] = {}

    def modalities(self) -> list[str]:
        """Those that the type has a processor for, and its forward a name."""
        candidates = self.settings.get('modalities', MODALITIES)
        return [modality for modality in candidates if self._class_name(modality)]

    def batch(self, modality: str, *, has_media: bool = True, runs: int = 1) -> dict[str, torch.Tensor]:
        """Rows with two items, with none and with one."""
        if modality == 'text':
            rows = [_words(row, count) for row, count in enumerate(WORDS)]
            return self._joined(rows, [[0] * len(row) for row in rows], None)
        items = self._items(modality) if has_media or self.one_each else [[]] * len(WORDS)
        media = self.media(modality, items) if any(items) else {}
        rows, types = [], []
        for row, items_of_row in enumerate(items):
            ids, kinds = self._placeholders(modality, items_of_row, runs, 5 + row)
            words = _words(row, self._num_words(row, modality, items_of_row, len(ids)))
            rows.append(ids + words)
            types.append(kinds + [0] * len(words))
        joined = self._joined(rows, types, self.one_each)
        return media | joined | self._sights(modality, joined, media)

    def random_row(self, modalities: Sequence[str], rng: random.Random) -> dict[str, Any]:
        """One row: words, none to two items with words between them, and words, the last of which have labels."""
        most = 1 if any(f'{modality}_items' in self.settings for modality in modalities) else 2
        chosen: dict[str, list[int]] = {modality: [] for modality in modalities}
        ids = _random_words(rng, rng.randint(1, 6))
        kinds = [0] * len(ids)
        for _ in range(min(most, rng.choice((0, 1, 1, 2)))):
            modality, item = rng.choice(modalities), rng.randrange(NUM_ITEMS)
            chosen[modality].append(item)
            runs = self.settings.get('video_runs', 1) if modality == 'video' else 1
            placeholders, their_kinds = self._placeholders(modality, [item], runs, rng.randint(5, 90))
            words = _random_words(rng, rng.randint(0, 2))
            ids += placeholders + words
            kinds += their_kinds + [0] * len(words)
        answer = _random_words(rng, rng.randint(1, 9))
        row: dict[str, Any] = self._joined([ids + answer], [kinds + [0] * len(answer)], None)
        row['labels'] = row['input_ids'].clone()
        row['labels'][:, : row['labels'].shape[1] - rng.randint(0, len(answer))] = -100
        for modality, items in chosen.items():
            row[f'num_{modality}s'] = [len(items)]
            if items:
                media = self.media(modality, [items])
                row |= media | self._sights(modality, row, media)
        return row

    def _items(self, modality: str) -> Sequence[Sequence[int]]:
        return [[0], [1], [2]] if self.one_each else self.settings.get(f'{modality}_items', ITEMS[modality])

    def _placeholders(self, modality: str, items: Sequence[int], runs: int, word: int) -> tuple[list[int], list[int]]:
        """Ids and token types of items: so many runs of placeholders (frames, lines), each behind a word."""
        token = self._token(modality)
        ids, kinds = [], []
        for item in items:
            number = self._number(modality, item) // runs
            ids.append(self._mark(f'{modality}_start_token_id'))
            kinds.append(0)
            for _ in range(runs):
                ids += [word] + [token] * number
                kinds += [0] + [TYPES[modality]] * number
            ids.append(self._mark(f'{modality}_end_token_id'))
            kinds.append(0)
        return ids, kinds

    def _token(self, modality: str) -> int:
        if self.settings.get('frames') and modality == 'video':
            return self._mark('image_token_id')
        known_ids = placeholder_ids(self.config, modality)
        return known_ids[0] if known_ids else self.settings.get(f'{modality}_token', FIRST_MARK)

    def _number(self, modality: str, item: int) -> int:
        """Placeholders of an item."""
        if self.one_each == 'masked':
            return self.config.latent_query_num
        if self.one_each:
            return 0
        size = item % len(SIZES)
        if (modality, size) not in self._counts:
            self._counts[modality, size] = self.count(modality, size)
        return self._counts[modality, size]

    def _num_words(self, row: int, modality: str, items: Sequence[int], num_ids: int) -> int:
        """Words behind the items of a row."""
        words_of_media = self.settings.get('words')
        if words_of_media is None:
            return WORDS[row]
        return words_of_media(self.media(modality, [items])) - num_ids

    def _sights(self, modality: str, joined: Mapping[str, Any], media: Mapping[str, Any]) -> dict[str, Any]:
        """Which tokens see which images, of the types that take such a mask."""
        if self.settings.get('slots'):  # Idefics: a slot an image
            pixels = media['pixel_values'].unflatten(0, (-1, 1))
            return {'pixel_values': pixels, 'image_attention_mask': joined['attention_mask'][..., None]}
        if 'cross_attention_mask' in self.named and media:
            sees = (joined['input_ids'] == self._token(modality)).cumsum(dim=1)
            return {'cross_attention_mask': sees[..., None, None] * media['aspect_ratio_mask'][:, None]}
        return {}

    def _mark(self, name: str) -> int:
        mark = getattr(self.config, name, None)
        return mark if isinstance(mark, int) else NO_MARK

    def _joined(self, rows: list[list[int]], types: list[list[int]], one_each: str | None) -> dict[str, Any]:
        """Padded ids, mask, labels and what else the forward asks for besides media."""
        ids, kinds = self._padded(rows), self._padded(types)
        mask = self._padded([[1] * len(row) for row in rows])
        labels = ids.masked_fill((mask == 0) | (kinds > 0), -100)
        if self.side == 'left':  # or a pad would predict it
            labels = labels.masked_fill(mask.cumsum(dim=1) == 1, -100)
        batch = {'input_ids': ids, 'attention_mask': mask, 'labels': labels}
        if self.settings.get('decoder_ids'):
            batch['decoder_input_ids'] = ids
        if one_each == 'decoder':
            del batch['input_ids'], batch['attention_mask']
        if one_each == 'seq2seq' or (self.config.is_encoder_decoder and one_each != 'decoder'):
            batch['labels'] = torch.tensor(_SEQ2SEQ_LABELS)[: len(rows)]
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
        for key in _TOKEN_TYPE_KEYS:
            if key in self.named and one_each is None:
                batch[key] = kinds
        return batch

    def _padded(self, rows: list[list[int]]) -> torch.Tensor:
        width = max(map(len, rows))
        padded = []
        for row in rows:
            pads = [0] * (width - len(row))
            padded.append(pads + row if self.side == 'left' else row + pads)
        return torch.tensor(padded)

    def count(self, modality: str, item: int) -> int:
        """Placeholders of one item: features that the encoder makes of it, or those that the forward asks for."""
        number = self.settings.get(f'{modality}_count')
        if number is not None:
            return int(number(self, item) if callable(number) else number)
        media = self.media(modality, [[item]])
        with torch.no_grad():
            num_features = self._num_features(modality, media)
            if num_features is not None:
                return num_features
            batch = media | self._joined([[4, self._token_or_first(modality), 5]], [[0, TYPES[modality], 0]], None)
            try:
                self.model(**batch, use_cache=False)
            except Exception as error:
                numbers = re.search(r'features:? *(\d+)|tensor of shape \[(\d+), |Got (\d+) feature', str(error))
                if numbers is None:
                    raise
                return int(next(filter(None, numbers.groups())))
        return 1

    def _token_or_first(self, modality: str) -> int:
        known_ids = placeholder_ids(self.config, modality)
        return known_ids[0] if known_ids else FIRST_MARK

    def _num_features(self, modality: str, media: Mapping[str, Any]) -> int | None:
        """What ``get_image_features`` and its like make; None if the model has no such method that takes the media."""
        name = f'get_{modality}_features'
        encode = getattr(self.model, name, None) or getattr(getattr(self.model, 'model', None), name, None)
        if encode is None:
            return None
        named = inspect.signature(encode).parameters
        try:
            features = encode(**{key: value for key, value in media.items() if key in named or 'args' in named})
            features = getattr(features, 'pooler_output', features)
            tensors = [features] if torch.is_tensor(features) else list(features)
            return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)
        except Exception:
            return None

    def media(self, modality: str, items: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Tensors of items, rows one after the other, as the type's processor makes them, in the model's precision."""
        flat = [item for row in items for item in row]
        processed = self._processed(modality, items, flat)
        if isinstance(processed, tuple):
            processed = processed[0]
        if torch.is_tensor(processed):
            processed = {'pixel_values': processed}
        if 'qformer_input_ids' in self.named:
            words = torch.arange(4, 7).expand(len(flat), 3).contiguous()
            processed = {**processed, 'qformer_input_ids': words, 'qformer_attention_mask': torch.ones_like(words)}
        dtype = next(self.model.parameters()).dtype
        media = {}
        for key, value in dict(processed).items():
            if modality == 'audio' and key in _AUDIO_MASKS:
                key = next((name for name in _MASKS if name in self.named), key)
            if key in self.named:
                tensor = value if torch.is_tensor(value) else torch.as_tensor(np.array(value))
                media[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key in self.settings.get('lists', ()):
            media[key] = media[key].tolist()
        return media

    def _processed(self, modality: str, items: Sequence[Sequence[int]], flat: Sequence[int]) -> Any:
        """What the type's processor returns."""
        if self.settings.get('image_media') == 'protein':
            proteins = torch.tensor([[5, 6, 7, 8][item:] + [1] * item for item in flat])
            return {'protein_input_ids': proteins, 'protein_attention_mask': (proteins != 1).long()}
        if 'sound_size' in self.settings:
            return self._sounds(flat, self.settings['sound_size'])
        processor = self.processor(modality)
        if modality == 'image':
            images: Any = [_image(item) for item in flat]
            if self.settings.get('nested'):
                images = [[_image(item) for item in row] for row in items]
            return processor(images=images, return_tensors='pt')
        if modality == 'video':
            videos: Any = [_video(item) for item in flat]
            if self.settings.get('nested'):
                videos = [[_video(item) for item in row] for row in items]
            return processor(videos=videos, do_sample_frames=False, return_tensors='pt')
        options = {
            'sampling_rate': processor.sampling_rate,
            'return_attention_mask': True,
            'padding': True,
            'return_tensors': 'pt',
            **self.settings.get('audio_call', {}),
        }
        named = inspect.signature(processor.__call__).parameters
        options = {key: value for key, value in options.items() if key in named or 'kwargs' in named}
        return processor([_audio(item, self.settings.get('length', 3200)) for item in flat], **options)

    def _sounds(self, items: Sequence[int], size: int) -> dict[str, torch.Tensor]:
        """Without a package for sounds: frames as the forward documents them, padded, and their mask."""
        frames_per_token = self.settings.get('frames_a_token', 1)
        counts = [15 * (item + 1) for item in items]
        features = torch.zeros(len(items), max(counts), size)
        for row, (item, count) in enumerate(zip(items, counts, strict=True)):
            features[row, :count] = torch.randn(count, size, generator=torch.Generator().manual_seed(item))
        ends = torch.tensor(counts)[:, None] // frames_per_token
        mask = torch.arange(max(counts) // frames_per_token)[None] < ends
        return {'input_features': features, 'input_features_mask': mask}

    def _class_name(self, modality: str) -> str | None:
        name = self.settings.get(modality, {}).get('name')
        if name:
            return name
        if f'{modality}_media' in self.settings:
            return 'none, made here'
        mapping: Mapping[str, Any] = {
            'image': image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
            'video': video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
            'audio': feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES,
        }[modality]
        names = mapping.get(self.settings.get('like', self.model_type)) or {}
        if isinstance(names, tuple):  # (slow, fast) up to transformers 4
            return names[1] or names[0]
        return names if isinstance(names, str) else names.get('torchvision') or names.get('pil')

    def processor(self, modality: str) -> Any:
        """The type's own, for pictures and sounds of a few numbers."""
        name = self._class_name(modality)
        processor_class = getattr(transformers, name)
        chosen = {key: value for key, value in self.settings.get(modality, {}).items() if key != 'name'}
        if modality == 'audio':
            parts = [getattr(self.config, part, None) for part in ('audio_config', 'encoder_config')]
            small = {}
            if any(MEL in (getattr(part, 'num_mel_bins', 0), getattr(part, 'feature_size', 0)) for part in parts):
                small['feature_size'] = MEL
            if 'Whisper' in name:
                small['chunk_length'] = 1
            named = inspect.signature(processor_class).parameters
            return processor_class(**{key: value for key, value in small.items() if key in named} | chosen)
        settings = {}
        for key, value in processor_class(**chosen).to_dict().items():
            size = _small(key, value)
            if size is not None:
                settings[key] = size
        return processor_class(**settings | chosen)


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
    """A setting of an image processor for pictures of a few pixels; None: as it is."""
    if key in _SIZE_KEYS and isinstance(value, dict):
        is_area = max(size or 0 for size in value.values()) > 3000
        sizes = {'shortest_edge': 64 if is_area else IMAGE, 'longest_edge': 512 if is_area else 2 * IMAGE}
        return {name: sizes.get(name, IMAGE) for name in value}
    if key == 'patch_size' and isinstance(value, dict):
        return dict.fromkeys(value, PATCH)
    if key == 'patch_size' and isinstance(value, int):
        return PATCH
    if key == 'image_grid_pinpoints' and value:
        return [[16, 32], [32, 16], [32, 32]]
    return _SMALL.get(key) if isinstance(value, int) else None


def _words(row: int, count: int) -> list[int]:
    return [FIRST_WORD + (row * 11 + 5 * place) % NUM_WORDS for place in range(count)]


def _random_words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_WORD, FIRST_WORD + NUM_WORDS) for _ in range(count)]


def _image(item: int) -> Any:
    width, height = SIZES[item % len(SIZES)]
    return Image.fromarray(np.random.default_rng(item).integers(1, 255, (height, width, 3), dtype=np.uint8))


def _video(item: int) -> Any:
    width, height = SIZES[item % len(SIZES)]
    return np.random.default_rng(item).integers(1, 255, (4, height, width, 3), dtype=np.uint8)


def _audio(item: int, length: int) -> Any:
    """Of four items each is 8 frames of 10 ms longer than the one before."""
    return (0.1 * np.random.default_rng(item).standard_normal(length + 1280 * (item % len(SIZES)))).astype(np.float32)
