# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of unequal length for any model type.

Its own processors make the media, and its encoder tells the number of placeholders.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from composer_tokacc.layout.placeholders import named_ids
from tests.model_types.exceptions import ROWS, RowSettings
from tests.model_types.processors import processor_name, small_processor
from tests.model_types.tiny import FIRST_MARK

Tensors: TypeAlias = dict[str, torch.Tensor]
Batch: TypeAlias = dict[str, Any]
ItemsOfRows: TypeAlias = Sequence[Sequence[int]]
"""For each row, the numbers of its media."""

ITEMS: Mapping[str, ItemsOfRows] = {
    'image': [[0, 1], [], [2], []],
    'video': [[0], [], [1, 2]],
    'audio': [[0, 1], [], [2]],
}
"""For each modality, the numbers of the media in each row."""
NUM_ITEMS = 1000
"""Media that random rows choose from. Every fourth one has the same size, and other pixels."""
WORDS = [7, 3, 12, 5]
"""The number of words in each row."""
FIRST_WORD = 4
NUM_WORDS = 90
NO_MARK = 4
"""The word that replaces a start or end token, if the type has none."""
SIZES = [(32, 16), (16, 16), (16, 32), (32, 32)]
"""Width and height of images and videos."""
TYPES = {'image': 1, 'video': 2, 'audio': 3}
"""Token types of placeholders."""
_AUDIO_MASKS = ('attention_mask', 'input_features_mask', 'padding_mask', 'feature_attention_mask')
_MASKS = ('input_features_mask', 'feature_attention_mask', 'padding_mask', 'audio_attention_mask', 'input_values_mask')
NUMBER_OF_FEATURES = re.compile(r'features:? *(\d+)|tensor of shape \[(\d+), |Got (\d+) feature')
"""Finds the number of features in the error of a model that got another number of placeholders."""
_SEQ2SEQ_LABELS = [
    [4, 5, 6, 7],
    [8, 9, -100, -100],
    [9, 8, 7, -100],
    [5, 6, -100, -100],
]
_TOKEN_TYPE_KEYS = ('mm_token_type_ids', 'moe_mm_token_type_ids', 'token_type_ids')


@dataclass
class _Text:
    """The ids of a row, and the token type of each of them. Words have type 0."""

    ids: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], token_type: int = 0) -> None:
        """Adds ids of one type."""
        self.ids += ids
        self.types += [token_type] * len(ids)


class Maker:
    """Makes batches and rows for a model type.

    Args:
        model_type: The model type.
        model: A model of the type. It counts the placeholders.
    """

    side = 'right'
    """The side of the padding. A test may change it."""

    def __init__(self, model_type: str, model: Any) -> None:
        self.model_type = model_type
        self.model = model
        self.config = model.config
        self.arguments = inspect.signature(type(model).forward).parameters
        self.settings = ROWS.get(model_type, RowSettings())
        self._counts: dict[tuple[str, int], int] = {}

    def modalities(self) -> list[str]:
        """Returns the modalities of the type that have a processor."""
        modalities = []
        for modality in self.settings.modalities:
            if processor_name(self.model_type, modality):
                modalities.append(modality)
        return modalities

    def batch(self, modality: str, *, has_media: bool = True, runs: int = 1) -> Tensors:
        """Returns rows with two media, with none and with one.

        Args:
            modality: The modality; ``'text'``: no row has media.
            has_media: Whether any row has media. Types that need one image in each row have them anyway.
            runs: Into how many runs the placeholders of a medium are divided.
        """
        one_each = ''
        items: ItemsOfRows = [[]] * len(WORDS)
        if modality != 'text':
            one_each = self.settings.one_each
            if one_each:
                items = [[0], [1], [2]]
            elif has_media:
                items = self.settings.items.get(modality, ITEMS[modality])

        media = {}
        if any(items):
            media = self.media(modality, items)
        texts = []
        for row, items_of_row in enumerate(items):
            text = _Text()
            for item in items_of_row:
                self._add_placeholders(text, modality, item, runs, word=5 + row)
            num_words = WORDS[row]
            if self.settings.words is not None:
                media_of_row = self.media(modality, [items_of_row])
                num_tokens = self.settings.words(media_of_row)
                num_words = num_tokens - len(text.ids)
            text.add(_words(row, num_words))
            texts.append(text)

        joined = self._joined(texts, one_each)
        image_masks = self._image_masks(modality, joined, media)
        return media | joined | image_masks

    def random_row(self, modalities: Sequence[str], rng: random.Random) -> Batch:
        """Returns a row of words with none to two media between them. The last words have labels."""
        items: dict[str, list[int]] = {modality: [] for modality in modalities}
        text = _Text()
        self._add_random_words(text, rng, 1, 6)
        for _ in range(self._random_number_of_items(modalities, rng)):
            modality = rng.choice(modalities)
            item = rng.randrange(NUM_ITEMS)
            items[modality].append(item)
            runs = self.settings.video_runs if modality == 'video' else 1
            self._add_placeholders(text, modality, item, runs, word=rng.randint(5, 90))
            self._add_random_words(text, rng, 0, 2)
        num_answer_words = self._add_random_words(text, rng, 1, 9)

        row: Batch = self._joined([text])
        num_labels = rng.randint(0, num_answer_words)
        num_unlabelled = len(text.ids) - num_labels
        row['labels'] = row['input_ids'].clone()
        row['labels'][:, :num_unlabelled] = -100
        for modality, items_of_modality in items.items():
            row[f'num_{modality}s'] = [len(items_of_modality)]
            if items_of_modality:
                media = self.media(modality, [items_of_modality])
                image_masks = self._image_masks(modality, row, media)
                row |= media
                row |= image_masks
        return row

    def _random_number_of_items(self, modalities: Sequence[str], rng: random.Random) -> int:
        """Returns 0, 1 or 2, or at most 1 for types that take no more."""
        number = rng.choice((0, 1, 1, 2))
        takes_one_item = any(modality in self.settings.items for modality in modalities)
        if takes_one_item:
            return min(number, 1)
        return number

    def _add_random_words(self, text: _Text, rng: random.Random, least: int, most: int) -> int:
        """Adds from ``least`` to ``most`` random words to a text. Returns their number."""
        num_words = rng.randint(least, most)
        all_words = range(FIRST_WORD, FIRST_WORD + NUM_WORDS)
        words = [rng.choice(all_words) for _ in range(num_words)]
        text.add(words)
        return num_words

    def _add_placeholders(self, text: _Text, modality: str, item: int, runs: int, word: int) -> None:
        """Adds the ids of a medium.

        The placeholders are divided into runs, for example of its frames or lines. Before each run comes a word.
        """
        placeholder = self._token(modality)
        number_in_run = self._number(modality, item) // runs
        text.add([self._mark(f'{modality}_start_token_id')])
        for _ in range(runs):
            text.add([word])
            text.add([placeholder] * number_in_run, TYPES[modality])
        text.add([self._mark(f'{modality}_end_token_id')])

    def _token(self, modality: str) -> int:
        """Returns the id of the placeholder of a modality."""
        if self.settings.frames_as_images and modality == 'video':
            return self._mark('image_token_id')
        known_ids = named_ids(self.config, modality)
        return known_ids[0] if known_ids else FIRST_MARK

    def _number(self, modality: str, item: int) -> int:
        """Returns the number of placeholders of a medium."""
        if self.settings.one_each == 'masked':
            return self.config.latent_query_num
        if self.settings.one_each:
            return 0
        size = item % len(SIZES)
        if (modality, size) not in self._counts:
            self._counts[modality, size] = self.count(modality, size)
        return self._counts[modality, size]

    def _image_masks(self, modality: str, joined: Batch, media: Tensors) -> Batch:
        """Returns which tokens see which images, for types that take such a mask. For Idefics also images in slots."""
        if self.settings.slots:
            pixels_in_slots = media['pixel_values'].unflatten(0, (-1, 1))
            image_mask = joined['attention_mask'][..., None]
            return {'pixel_values': pixels_in_slots, 'image_attention_mask': image_mask}
        if 'cross_attention_mask' in self.arguments and media:
            is_placeholder = joined['input_ids'] == self._token(modality)
            sees_image = is_placeholder.cumsum(dim=1)[..., None, None]  # from the placeholder on
            return {'cross_attention_mask': sees_image * media['aspect_ratio_mask'][:, None]}
        return {}

    def _mark(self, name: str) -> int:
        """Returns the id of a start or end token, as the config names it."""
        mark = getattr(self.config, name, None)
        return mark if isinstance(mark, int) else NO_MARK

    def _joined(self, texts: Sequence[_Text], one_each: str = '') -> Batch:
        """Returns a padded batch without its media. ``one_each``: see :class:`RowSettings`."""
        ids_of_rows = []
        types_of_rows = []
        mask_of_rows = []
        for text in texts:
            ids_of_rows.append(text.ids)
            types_of_rows.append(text.types)
            mask_of_rows.append([1] * len(text.ids))
        ids = self._padded(ids_of_rows)
        token_types = self._padded(types_of_rows)
        mask = self._padded(mask_of_rows)
        is_padding = mask == 0
        is_placeholder = token_types > 0
        labels = ids.masked_fill(is_padding | is_placeholder, -100)
        if self.side == 'left':  # otherwise a pad would predict the first label
            is_first_token = mask.cumsum(dim=1) == 1
            labels = labels.masked_fill(is_first_token, -100)

        batch = {'input_ids': ids, 'attention_mask': mask, 'labels': labels}
        self._add_entries_of_type(batch, token_types, one_each)
        return batch

    def _add_entries_of_type(self, batch: Batch, token_types: torch.Tensor, one_each: str) -> None:
        """Gives a batch of text the entries that the forward of this type takes, in place."""
        ids = batch['input_ids']
        num_rows = len(ids)
        if self.settings.decoder_ids:
            batch['decoder_input_ids'] = ids
        if one_each == 'decoder':
            del batch['input_ids']
            del batch['attention_mask']
        elif one_each == 'seq2seq' or self.config.is_encoder_decoder:
            batch['labels'] = torch.tensor(_SEQ2SEQ_LABELS)[:num_rows]
        if self.settings.codes:  # text and sound in one tensor
            codes = torch.ones(*ids.shape, self.config.num_codebooks, dtype=torch.long)
            batch['input_ids'] = torch.cat([ids[..., None], codes], dim=-1)
        if self.settings.robot:
            del batch['labels']
            batch['state'] = torch.zeros(num_rows, 32)
            batch['actions'] = torch.zeros(num_rows, 4, 32)
        if one_each == 'masked':
            is_placeholder = token_types > 0
            batch['image_embeds_position_mask'] = is_placeholder.long()
        if 'bbox' in self.arguments:
            batch['bbox'] = torch.zeros(*ids.shape, 4, dtype=torch.long)
        for key in _TOKEN_TYPE_KEYS:
            if key in self.arguments and not one_each:
                batch[key] = token_types

    def _padded(self, rows: list[list[int]]) -> torch.Tensor:
        """Returns rows, padded with 0."""
        width = max(map(len, rows))
        padded_rows = []
        for row in rows:
            pads = [0] * (width - len(row))
            if self.side == 'left':
                padded_rows.append(pads + row)
            else:
                padded_rows.append(row + pads)
        return torch.tensor(padded_rows)

    def count(self, modality: str, item: int) -> int:
        """Returns the number of placeholders of a medium, which is the number of features that the encoder returns.

        A model without a method for features is tried with one placeholder. Its error tells the number.
        """
        number = self.settings.counts.get(modality)
        if callable(number):
            return number(item)
        if number is not None:
            return number
        media = self.media(modality, [[item]])
        with torch.no_grad():
            num_features = self._num_features(modality, media)
            if num_features is None:
                num_features = self._num_features_by_error(modality, media)
        return num_features

    def _num_features_by_error(self, modality: str, media: Tensors) -> int:
        """Returns the number of features that the model names in its error if it gets one placeholder. No error: 1."""
        text = _Text()
        text.add([4])
        text.add([self._token(modality)], TYPES[modality])
        text.add([5])
        batch = media | self._joined([text])
        try:
            self.model(**batch, use_cache=False)
        except Exception as error:
            match = NUMBER_OF_FEATURES.search(str(error))
            if match is None:
                raise
            [number_of_features] = filter(None, match.groups())
            return int(number_of_features)
        return 1

    def _num_features(self, modality: str, media: Tensors) -> int | None:
        """Returns the number of features of ``get_image_features``. None: the method is not there, or fails."""
        name = f'get_{modality}_features'
        inner_model = getattr(self.model, 'model', None)
        encode = getattr(self.model, name, None) or getattr(inner_model, name, None)
        if encode is None:
            return None
        accepted_media = _accepted(media, encode, takes_all='args')
        try:
            outputs = encode(**accepted_media)
            features = getattr(outputs, 'pooler_output', outputs)
            if torch.is_tensor(features):
                features = [features]
            num_features = 0
            for tensor in features:
                num_features += tensor[..., 0].numel()
            return num_features
        except Exception:
            return None

    def media(self, modality: str, items: ItemsOfRows) -> Tensors:
        """Returns the tensors of media, row after row, as the type's processor makes them, in the model's precision."""
        processed = self._processed(modality, items)
        if isinstance(processed, tuple):
            processed = processed[0]
        if torch.is_tensor(processed):
            processed = {'pixel_values': processed}
        entries = dict(processed)
        if 'qformer_input_ids' in self.arguments:
            num_items = sum(map(len, items))
            questions = torch.arange(4, 7).repeat(num_items, 1)
            entries['qformer_input_ids'] = questions
            entries['qformer_attention_mask'] = torch.ones_like(questions)

        media = {}
        for key, value in entries.items():
            if modality == 'audio' and key in _AUDIO_MASKS:
                key = self._name_of_audio_mask(key)
            if key in self.arguments:
                media[key] = self._as_tensor(value)
        for key in self.settings.lists:
            media[key] = media[key].tolist()
        return media

    def _name_of_audio_mask(self, name: str) -> str:
        """Returns the name that the mask of sounds has in the forward. ``name`` is its name in the processor."""
        for argument in _MASKS:
            if argument in self.arguments:
                return argument
        return name

    def _as_tensor(self, value: Any) -> torch.Tensor:
        """Returns a value of a processor as a tensor, in the model's precision."""
        tensor = value if torch.is_tensor(value) else torch.as_tensor(np.array(value))
        if tensor.is_floating_point():
            weight = next(self.model.parameters())
            tensor = tensor.to(weight.dtype)
        return tensor

    def _processed(self, modality: str, items: ItemsOfRows) -> Any:
        """Returns the output of the type's processor."""
        all_items = list(chain.from_iterable(items))
        if self.settings.proteins:
            return _proteins(all_items)
        if self.settings.sound_size:
            return self._sounds(all_items)
        processor = small_processor(self.model_type, modality, self.config)
        if modality == 'image':
            images = self._drawn(_image, items)
            return processor(images=images, return_tensors='pt')
        if modality == 'video':
            videos = self._drawn(_video, items)
            return processor(videos=videos, do_sample_frames=False, return_tensors='pt')
        options = {
            'sampling_rate': processor.sampling_rate,
            'return_attention_mask': True,
            'padding': True,
            'return_tensors': 'pt',
            **self.settings.audio_call,
        }
        accepted_options = _accepted(options, processor.__call__, takes_all='kwargs')
        sounds = [_audio(item, self.settings.sound_length) for item in all_items]
        return processor(sounds, **accepted_options)

    def _drawn(self, draw: Callable[[int], Any], items: ItemsOfRows) -> list[Any]:
        """Returns the images or videos of rows, as a list for each row if the processor wants them so."""
        media = []
        for row in items:
            media_of_row = [draw(item) for item in row]
            if self.settings.nested:
                media.append(media_of_row)
            else:
                media.extend(media_of_row)
        return media

    def _sounds(self, items: Sequence[int]) -> Tensors:
        """Returns padded frames of sounds and their mask, as the forward documents them.

        For types whose processor needs a package that is not installed.
        """
        size = self.settings.sound_size
        num_frames = torch.tensor([15 * (item + 1) for item in items])
        most_frames = int(num_frames.max())
        features = torch.zeros(len(items), most_frames, size)
        for row, item in enumerate(items):
            generator = torch.Generator().manual_seed(item)
            end = int(num_frames[row])
            features[row, :end] = torch.randn(end, size, generator=generator)

        num_tokens = num_frames // self.settings.frames_per_token
        tokens = torch.arange(most_frames // self.settings.frames_per_token)
        mask = tokens[None] < num_tokens[:, None]
        return {'input_features': features, 'input_features_mask': mask}


def _accepted(entries: Mapping[str, Any], function: Callable[..., Any], *, takes_all: str) -> Batch:
    """Returns the entries that are arguments of a function, or all of them if it has the argument ``takes_all``."""
    arguments = inspect.signature(function).parameters
    if takes_all in arguments:
        return dict(entries)
    return {key: value for key, value in entries.items() if key in arguments}


def _words(row: int, count: int) -> list[int]:
    """Returns words that differ from row to row."""
    words = []
    for place in range(count):
        number = (11 * row + 5 * place) % NUM_WORDS
        words.append(FIRST_WORD + number)
    return words


def _image(item: int) -> Any:
    width, height = SIZES[item % len(SIZES)]
    return Image.fromarray(_pixels(item, height, width, 3))


def _video(item: int) -> Any:
    width, height = SIZES[item % len(SIZES)]
    return _pixels(item, 4, height, width, 3)


def _pixels(item: int, *shape: int) -> Any:
    """Returns random numbers from 1 to 254."""
    return np.random.default_rng(item).integers(1, 255, shape, dtype=np.uint8)


def _proteins(items: Sequence[int]) -> Tensors:
    """Returns proteins of at most four amino acids, and their mask. An item of number n lacks the first n of them."""
    pad = 1
    rows = []
    for item in items:
        amino_acids = [5, 6, 7, 8][item:]
        rows.append(amino_acids + [pad] * item)
    proteins = torch.tensor(rows)
    is_acid = proteins != pad
    return {
        'protein_input_ids': proteins,
        'protein_attention_mask': is_acid.long(),
    }


def _audio(item: int, length: int) -> Any:
    """Returns noise. Of four sounds each is 8 frames of 10 ms longer than the one before."""
    num_samples = length + 1280 * (item % len(SIZES))
    noise = np.random.default_rng(item).standard_normal(num_samples)
    return (0.1 * noise).astype(np.float32)
