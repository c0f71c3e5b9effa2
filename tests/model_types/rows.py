# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Ragged rows for any model type. Its own processors make the media, and its encoder counts the placeholders."""

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
"""For each modality, the numbers of the media in each row."""
NUM_ITEMS = 1000
"""Media that random rows choose from. Every fourth one has the same size, and other pixels."""
WORDS = [7, 3, 12, 5]
FIRST_WORD, NUM_WORDS = 4, 90
NO_MARK = 4
"""The word that replaces a start or end token, if the type has none."""
SIZES = [(32, 16), (16, 16), (16, 32), (32, 32)]
TYPES = {'image': 1, 'video': 2, 'audio': 3}
_AUDIO_MASKS = ('attention_mask', 'input_features_mask', 'padding_mask', 'feature_attention_mask')
_MASKS = ('input_features_mask', 'feature_attention_mask', 'padding_mask', 'audio_attention_mask', 'input_values_mask')
_SEQ2SEQ_LABELS = [[4, 5, 6, 7], [8, 9, -100, -100], [9, 8, 7, -100], [5, 6, -100, -100]]
_TOKEN_TYPE_KEYS = ('mm_token_type_ids', 'moe_mm_token_type_ids', 'token_type_ids')


class Maker:
    """Makes batches and rows for a model type.

    ``settings`` are those of its processors, see ``PROCESSORS`` in ``exceptions.py``. ``one_each`` is set for types
    that need one image in each row; see ``ONE_EACH`` there.
    """

    side = 'right'
    """The side of the padding."""

    def __init__(self, model_type: str, model: Any) -> None:
        self.model_type = model_type
        self.model = model
        self.config = model.config
        self.arguments = inspect.signature(type(model).forward).parameters
        self.settings = PROCESSORS.get(model_type, {})
        self.one_each = ONE_EACH.get(model_type)
        self._counts: dict[tuple[str, int], int] = {}

    def modalities(self) -> list[str]:
        """Returns the modalities for which the type has a processor."""
        candidates = self.settings.get('modalities', MODALITIES)
        return [modality for modality in candidates if self._class_name(modality)]

    def batch(self, modality: str, *, has_media: bool = True, runs: int = 1) -> dict[str, torch.Tensor]:
        """Returns rows with two media, with none and with one.

        Args:
            modality: The modality; ``'text'``: no row has media.
            has_media: Whether any row has media. Types that need one medium in each row have them anyway.
            runs: Into how many runs the placeholders of a medium are divided.
        """
        if modality == 'text':
            text_rows = [_words(row, count) for row, count in enumerate(WORDS)]
            return self._joined(text_rows, [[0] * len(row) for row in text_rows], None)
        items = [[]] * len(WORDS)
        if has_media or self.one_each:
            items = self._items(modality)
        media = self.media(modality, items) if any(items) else {}
        rows = []
        types_of_rows = []
        for row, items_of_row in enumerate(items):
            ids, token_types = self._placeholders(modality, items_of_row, runs, 5 + row)
            words = _words(row, self._num_words(row, modality, items_of_row, len(ids)))
            rows.append(ids + words)
            types_of_rows.append(token_types + [0] * len(words))
        joined = self._joined(rows, types_of_rows, self.one_each)
        return media | joined | self._image_masks(modality, joined, media)

    def random_row(self, modalities: Sequence[str], rng: random.Random) -> dict[str, Any]:
        """Returns a row of words with none to two media between them. The last words have labels."""
        takes_one_item = any(f'{modality}_items' in self.settings for modality in modalities)
        most_items = 1 if takes_one_item else 2
        chosen: dict[str, list[int]] = {modality: [] for modality in modalities}
        ids = _random_words(rng, rng.randint(1, 6))
        token_types = [0] * len(ids)
        num_items = min(most_items, rng.choice((0, 1, 1, 2)))
        for _ in range(num_items):
            modality = rng.choice(modalities)
            item = rng.randrange(NUM_ITEMS)
            chosen[modality].append(item)
            runs = self.settings.get('video_runs', 1) if modality == 'video' else 1
            placeholders, types_of_placeholders = self._placeholders(modality, [item], runs, rng.randint(5, 90))
            words = _random_words(rng, rng.randint(0, 2))
            ids += placeholders + words
            token_types += types_of_placeholders + [0] * len(words)
        answer = _random_words(rng, rng.randint(1, 9))
        row: dict[str, Any] = self._joined([ids + answer], [token_types + [0] * len(answer)], None)
        row['labels'] = row['input_ids'].clone()
        row['labels'][:, : row['labels'].shape[1] - rng.randint(0, len(answer))] = -100
        for modality, items in chosen.items():
            row[f'num_{modality}s'] = [len(items)]
            if items:
                media = self.media(modality, [items])
                row |= media | self._image_masks(modality, row, media)
        return row

    def _items(self, modality: str) -> Sequence[Sequence[int]]:
        return [[0], [1], [2]] if self.one_each else self.settings.get(f'{modality}_items', ITEMS[modality])

    def _placeholders(self, modality: str, items: Sequence[int], runs: int, word: int) -> tuple[list[int], list[int]]:
        """Returns ids and token types of media.

        The placeholders of each medium are divided into runs, for example of its frames or lines. Before each run
        comes a word.
        """
        token = self._token(modality)
        ids = []
        token_types = []
        for item in items:
            number = self._number(modality, item) // runs
            ids.append(self._mark(f'{modality}_start_token_id'))
            token_types.append(0)
            for _ in range(runs):
                ids += [word] + [token] * number
                token_types += [0] + [TYPES[modality]] * number
            ids.append(self._mark(f'{modality}_end_token_id'))
            token_types.append(0)
        return ids, token_types

    def _token(self, modality: str) -> int:
        if self.settings.get('frames') and modality == 'video':
            return self._mark('image_token_id')
        known_ids = placeholder_ids(self.config, modality)
        return known_ids[0] if known_ids else self.settings.get(f'{modality}_token', FIRST_MARK)

    def _number(self, modality: str, item: int) -> int:
        """Returns the number of placeholders of a medium."""
        if self.one_each == 'masked':
            return self.config.latent_query_num
        if self.one_each:
            return 0
        size = item % len(SIZES)
        if (modality, size) not in self._counts:
            self._counts[modality, size] = self.count(modality, size)
        return self._counts[modality, size]

    def _num_words(self, row: int, modality: str, items: Sequence[int], num_ids: int) -> int:
        """Returns the number of words after the media of a row."""
        words_of_media = self.settings.get('words')
        if words_of_media is None:
            return WORDS[row]
        return words_of_media(self.media(modality, [items])) - num_ids

    def _image_masks(self, modality: str, joined: Mapping[str, Any], media: Mapping[str, Any]) -> dict[str, Any]:
        """Returns which tokens see which images, for types that take such a mask. For Idefics also images in slots."""
        if self.settings.get('slots'):
            pixels = media['pixel_values'].unflatten(0, (-1, 1))
            return {'pixel_values': pixels, 'image_attention_mask': joined['attention_mask'][..., None]}
        if 'cross_attention_mask' in self.arguments and media:
            sees = (joined['input_ids'] == self._token(modality)).cumsum(dim=1)
            return {'cross_attention_mask': sees[..., None, None] * media['aspect_ratio_mask'][:, None]}
        return {}

    def _mark(self, name: str) -> int:
        mark = getattr(self.config, name, None)
        return mark if isinstance(mark, int) else NO_MARK

    def _joined(self, rows: list[list[int]], types: list[list[int]], one_each: str | None) -> dict[str, Any]:
        """Returns padded ids, mask, labels, and what else the forward needs apart from media."""
        ids = self._padded(rows)
        token_types = self._padded(types)
        mask = self._padded([[1] * len(row) for row in rows])
        labels = ids.masked_fill((mask == 0) | (token_types > 0), -100)
        if self.side == 'left':  # otherwise a pad would predict the first label
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
            batch['image_embeds_position_mask'] = (token_types > 0).long()
        if 'bbox' in self.arguments:
            batch['bbox'] = torch.zeros(*ids.shape, 4, dtype=torch.long)
        for key in _TOKEN_TYPE_KEYS:
            if key in self.arguments and one_each is None:
                batch[key] = token_types
        return batch

    def _padded(self, rows: list[list[int]]) -> torch.Tensor:
        width = max(map(len, rows))
        padded = []
        for row in rows:
            pads = [0] * (width - len(row))
            padded.append(pads + row if self.side == 'left' else row + pads)
        return torch.tensor(padded)

    def count(self, modality: str, item: int) -> int:
        """Returns the number of placeholders of a medium.

        It is the number of features that the encoder returns. If there is no method for that, a forward with one
        placeholder fails, and its message tells the number.
        """
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
        """Returns how many features ``get_image_features`` gives; None if there is no such method, or it fails."""
        name = f'get_{modality}_features'
        encode = getattr(self.model, name, None) or getattr(getattr(self.model, 'model', None), name, None)
        if encode is None:
            return None
        arguments = inspect.signature(encode).parameters
        try:
            features = encode(**{key: value for key, value in media.items() if key in arguments or 'args' in arguments})
            features = getattr(features, 'pooler_output', features)
            tensors = [features] if torch.is_tensor(features) else list(features)
            return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)
        except Exception:
            return None

    def media(self, modality: str, items: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Returns the tensors of media, row after row, as the type's processor makes them, in the model's precision."""
        all_items = [item for row in items for item in row]
        processed = self._processed(modality, items, all_items)
        if isinstance(processed, tuple):
            processed = processed[0]
        if torch.is_tensor(processed):
            processed = {'pixel_values': processed}
        if 'qformer_input_ids' in self.arguments:
            words = torch.arange(4, 7).expand(len(all_items), 3).contiguous()
            processed = {**processed, 'qformer_input_ids': words, 'qformer_attention_mask': torch.ones_like(words)}
        dtype = next(self.model.parameters()).dtype
        media = {}
        for key, value in dict(processed).items():
            if modality == 'audio' and key in _AUDIO_MASKS:
                key = next((name for name in _MASKS if name in self.arguments), key)
            if key in self.arguments:
                tensor = value if torch.is_tensor(value) else torch.as_tensor(np.array(value))
                media[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key in self.settings.get('lists', ()):
            media[key] = media[key].tolist()
        return media

    def _processed(self, modality: str, items: Sequence[Sequence[int]], all_items: Sequence[int]) -> Any:
        """Returns what the type's processor returns."""
        if self.settings.get('image_media') == 'protein':
            proteins = torch.tensor([[5, 6, 7, 8][item:] + [1] * item for item in all_items])
            return {'protein_input_ids': proteins, 'protein_attention_mask': (proteins != 1).long()}
        if 'sound_size' in self.settings:
            return self._sounds(all_items, self.settings['sound_size'])
        processor = self.processor(modality)
        if modality == 'image':
            images: Any = [_image(item) for item in all_items]
            if self.settings.get('nested'):
                images = [[_image(item) for item in row] for row in items]
            return processor(images=images, return_tensors='pt')
        if modality == 'video':
            videos: Any = [_video(item) for item in all_items]
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
        arguments = inspect.signature(processor.__call__).parameters
        options = {key: value for key, value in options.items() if key in arguments or 'kwargs' in arguments}
        return processor([_audio(item, self.settings.get('length', 3200)) for item in all_items], **options)

    def _sounds(self, items: Sequence[int], size: int) -> dict[str, torch.Tensor]:
        """Returns padded frames of sounds and their mask, as the forward documents them.

        For types whose processor needs a package that is not installed.
        """
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
        """Returns the type's processor, with settings for small media."""
        name = self._class_name(modality)
        processor_class = getattr(transformers, name)
        chosen = {key: value for key, value in self.settings.get(modality, {}).items() if key != 'name'}
        if modality == 'audio':
            parts = [getattr(self.config, part, None) for part in ('audio_config', 'encoder_config')]
            small_settings = {}
            for part in parts:
                if MEL in (getattr(part, 'num_mel_bins', 0), getattr(part, 'feature_size', 0)):
                    small_settings['feature_size'] = MEL
            if 'Whisper' in name:
                small_settings['chunk_length'] = 1
            arguments = inspect.signature(processor_class).parameters
            accepted = {key: value for key, value in small_settings.items() if key in arguments}
            return processor_class(**accepted | chosen)
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
    """Returns a setting of an image processor for small images; None: the setting stays."""
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
    """Returns noise. Of four sounds each is 8 frames of 10 ms longer than the one before."""
    num_samples = length + 1280 * (item % len(SIZES))
    noise = np.random.default_rng(item).standard_normal(num_samples)
    return (0.1 * noise).astype(np.float32)
