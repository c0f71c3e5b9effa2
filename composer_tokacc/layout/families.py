# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Which tensors a family of multimodal models puts into a batch, and how each belongs to rows.

To add a family, add one :class:`Family` to :data:`FAMILIES`. Most models need no entry: :func:`inferred_family`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import IGNORE_INDEX, MODALITIES, Batch, text_of
from composer_tokacc.layout.placeholders import audio_tokens, has_any_id, named_ids, query_tokens, replaced_ids
from composer_tokacc.layout.tensors import Entry


def _never(batch: Batch) -> bool:
    """Matches no batch. For families that only the config of a model can tell."""
    return False


@dataclass(frozen=True, kw_only=True)
class Media:
    """One modality of a family. Its items are images, videos or audios.

    Args:
        sizes: Returns the number of placeholders of each item. Called as ``sizes(batch, config, num_items,
            num_tokens)``, with the numbers of items and of placeholders in the batch. Needed only for models that
            do not notice a wrong number, see ``query_tokens`` and ``audio_tokens`` of ``placeholders.py``. None: the
            numbers are inferred, see ``item_counts.py``.
        token_type: The value of ``mm_token_type_ids`` at the placeholders of this modality; 0: there is none.
        frames: For GLM-4V, where images and frames of videos share the placeholder of an image:
            ``<image> ... <start of video> <image> <image> <end of video>``. True: this modality (videos) has the
            placeholders between start and end. False: this modality (images) has all others. None, the usual case: the
            modality has its own placeholder.
    """

    sizes: Callable[[Batch, Any, int, int], list[int]] | None = None
    token_type: int = 0
    frames: bool | None = None

    def placeholders(
        self,
        batch: Batch,
        config: Any,
        unit: str,
    ) -> torch.Tensor | None:
        """Returns the positions of the placeholders of this modality, ``(rows, width)`` bool.

        Returns None if neither the ids in the config nor ``mm_token_type_ids`` tell them. ``unit`` is the name of the
        modality.
        """
        text = text_of(batch)
        modality_of_id = unit
        if self.frames is not None:
            modality_of_id = 'image'  # videos have the placeholder of an image, too
        ids = replaced_ids(config, modality_of_id)
        if not ids:
            types = batch.get('mm_token_type_ids')
            if types is None or not self.token_type:
                return None
            return types == self.token_type
        is_placeholder = has_any_id(text, ids)
        if self.frames is None:
            return is_placeholder
        num_starts = (text == config.video_start_token_id).cumsum(dim=1)
        num_ends = (text == config.video_end_token_id).cumsum(dim=1)
        is_in_video = num_starts > num_ends  # up to here, a video has started and not ended
        return is_placeholder & (is_in_video == self.frames)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The batch format of one model family.

    Args:
        name: Name for error messages.
        model_types: ``config.model_type`` values that use it.
        entries: Media tensors by key. Text tensors are the same for all families: ``TEXT_ENTRIES``.
        media: Its modalities, by the names ``'image'``, ``'video'`` and ``'audio'``.
        matches: Returns whether a batch has this format. Only called if the model is not known.
        slots: Returns which image slots of a batch hold an image, ``(rows, slots)`` bool. The others are padding. None:
            the images of a batch have no slots, see ``Entry.slot_dim``.
        one_kind: Whether a forward takes only images or only videos, never both.
        has_queries: Whether a transformer with query tokens (Q-Former) turns each item into a fixed number of tokens.
            Such models need media in every batch, so ``BatchLayout.with_media()`` adds a dummy. They also do not notice
            missing placeholders, so their ``Media`` need ``sizes``.
        coupling: Why a row with an image changes the loss of a row without an image. Empty: no reason is known, and the
            first-batch check finds out whether it does.
    """

    name: str
    model_types: tuple[str, ...] = ()
    entries: Mapping[str, Entry] = field(default_factory=dict)
    media: Mapping[str, Media] = field(default_factory=dict)
    matches: Callable[[Batch], bool] = _never
    slots: Callable[[Batch], torch.Tensor] | None = None
    one_kind: bool = False
    has_queries: bool = False
    coupling: str = ''


# `fill` pads a row. `absent` is the value for the rows of a batch that lacks the tensor.
TEXT_ENTRIES: dict[str, Entry] = {
    'input_ids': Entry(seq_dims=(1,)),
    'inputs_embeds': Entry(seq_dims=(1,)),
    'attention_mask': Entry(seq_dims=(1,)),  # BatchLayout.entry_of() changes it for (rows, heads, width, width)
    'labels': Entry(seq_dims=(1,), fill=IGNORE_INDEX),
    # (rows,) or (rows, width). NaN marks samples without weights. A run that uses weights refuses such samples.
    'loss_weights': Entry(seq_dims=(1,), absent=float('nan')),
    # (rows, width), or (3, rows, width) for multimodal rotary positions.
    'position_ids': Entry(row_dim=-2, seq_dims=(-1,)),
    'token_type_ids': Entry(seq_dims=(1,)),
    'mm_token_type_ids': Entry(seq_dims=(1,), absent=0),  # 0 is text
    'special_tokens_mask': Entry(seq_dims=(1,)),
    'loss_mask': Entry(seq_dims=(1,)),
    'sequence_id': Entry(seq_dims=(1,), fill=-1),  # llm-foundry: which document of a packed row, -1 for padding
    # Encoder-decoder: the decoder's text has its own width, so it is not padded with `input_ids`. For its `labels`
    # BatchLayout.entry_of() drops `seq_dims`. `attention_mask` belongs to the encoder.
    'decoder_input_ids': Entry(),
    'decoder_attention_mask': Entry(),
}

_IMAGE = Entry(unit='image')
_VIDEO = Entry(unit='video')
_AUDIO = Entry(unit='audio')
# Pixels are the patches of all images (videos) one after the other. A grid tells how many an image (a video) has.
_PATCHES = {
    'pixel_values': Entry(unit='patch'),
    'image_grid_thw': _IMAGE,
    'pixel_values_videos': Entry(unit='video_patch'),
    'video_grid_thw': _VIDEO,
}


def _entries_of_instructblip(entry: Entry) -> dict[str, Entry]:
    """Returns the tensors that InstructBLIP has for each image or video: its pixels and an instruction."""
    return {'pixel_values': entry, 'qformer_input_ids': entry, 'qformer_attention_mask': entry}


class _Format(NamedTuple):
    """Matches batches by the keys of their tensors: a function for ``Family.matches``.

    Args:
        has: Keys of the tensors that a batch must have, with their number of dimensions; None: any number. Pixels have
            4 dimensions, (images, channels, height, width), or 5 if there are several tiles, slots or frames.
        lacks: Keys that it must not have.
    """

    has: Mapping[str, int | None] = {}
    lacks: tuple[str, ...] = ()

    def __call__(self, batch: Batch) -> bool:
        for key, num_dims in self.has.items():
            value = batch.get(key)
            if not isinstance(value, torch.Tensor):
                return False
            if num_dims is not None and value.dim() != num_dims:
                return False
        return all(batch.get(key) is None for key in self.lacks)


def _is_qwen(batch: Batch) -> bool:
    """Returns whether a batch has grids of patches, or audios without images and videos (Qwen-Audio)."""
    if 'image_grid_thw' in batch or 'video_grid_thw' in batch:
        return True
    has_only_audios = _Format({'input_features': None}, lacks=('pixel_values', 'pixel_values_videos'))
    return has_only_audios(batch)


_FORMATS_OF_LLAVA = (
    _Format({'image_sizes': None, 'pixel_values': 5}),
    _Format({'pixel_values_videos': 5}),
    _Format({'pixel_values_images': None}),
    # MiniCPM-V also has `target_sizes`. It has the patches of all images side by side, which `readings.py` knows.
    _Format({'pixel_values': 4}, lacks=('target_sizes',)),
)


def _is_llava(batch: Batch) -> bool:
    return any(has_format(batch) for has_format in _FORMATS_OF_LLAVA)


def _slots_of_idefics(batch: Batch) -> torch.Tensor:
    """Returns which slots hold an image, by the mask of pixels: see ``Family.slots``."""
    mask = batch.get('pixel_attention_mask')
    if mask is None:
        # Without a mask only the pixels tell: padding images are all 0.
        pixels = batch['pixel_values'].flatten(2)
        return (pixels != 0).any(dim=2)
    # The mask has one value per pixel, or one per image (Granite Docling). Images are padded on the right and at the
    # bottom, so the first pixel of a real image is real.
    flat_mask = mask.reshape(*mask.shape[:2], -1)
    return flat_mask[:, :, 0] != 0


def _slots_of_mllama(batch: Batch) -> torch.Tensor:
    # The id of an image is at least 1. Padding has id 0.
    return batch['aspect_ratio_ids'] != 0


TEXT_FAMILY = Family(name='text', matches=_Format(lacks=('pixel_values',)))
# The comment above each family says why the family is needed. To find out, each family was removed in turn, and tiny
# models of its types were trained without it.
#
# Some are only needed if the model is not known. Then only the keys of a batch tell its format, and no config names the
# placeholders. The first family that matches is taken, so a special format stands before the more general ones.
#
# token_data_spec() knows the model by `model=`, by `layout=` or from TokenAccumulation. A collator and
# verify_invariance() know it only by `layout=`. Two places never know it: `widened()`, which pads microbatches, and a
# pre-split batch when a callback reads a tensor of all its rows.
FAMILIES: tuple[Family, ...] = (
    # Only needed if the model is not known.
    Family(
        # Whisper, TrOCR: one audio or image per row, and the labels are the only text.
        name='encoder-decoder',
        model_types=(
            'whisper',
            'speech_to_text',
            'speech-encoder-decoder',
            'vision-encoder-decoder',
        ),
        entries={
            'input_features': Entry(),
            'input_values': Entry(),
            'pixel_values': Entry(),
        },
        matches=_Format(lacks=('input_ids',)),
    ),
    # If the model is not known, `mm_token_type_ids` tell the placeholders. If it is known, only the sizes of audios are
    # needed: they show a row that is cut inside an audio, which the model does not notice.
    Family(
        name='Qwen',
        model_types=(
            'qwen2_vl',
            'qwen2_5_vl',
            'qwen3_vl',
            'qwen3_vl_moe',
            'qwen2_5_omni_thinker',
            'qwen2_audio',
        ),
        entries={
            **_PATCHES,
            'second_per_grid_ts': _VIDEO,
            'video_second_per_grid': _VIDEO,
            'input_features': _AUDIO,
            'feature_attention_mask': _AUDIO,
            'audio_feature_lengths': _AUDIO,
        },
        media={
            'image': Media(token_type=1),
            'video': Media(token_type=2),
            # Qwen-Omni does not notice missing placeholders of an audio. It gives the next row the rest of the audio.
            'audio': Media(sizes=audio_tokens),
        },
        matches=_is_qwen,
    ),
    # Without it batches with videos are refused, because frames have the placeholder of an image.
    Family(
        name='GLM-4V',
        model_types=(
            'glm4v',
            'glm4v_moe',
            'glm46v',
            'glmga',
            'glm_ocr',
            'glm5_next',
        ),
        entries=_PATCHES,
        one_kind=True,
        media={
            # Frames of a video are written like images, between the tokens that start and end it.
            'image': Media(frames=False),
            'video': Media(frames=True),
        },
    ),
    # Without it batches with unequal numbers of images are refused: nothing else tells which slots hold images.
    Family(
        name='Mllama',
        model_types=('mllama',),
        entries={
            'pixel_values': Entry(slot_dim=1),
            'aspect_ratio_ids': Entry(slot_dim=1),
            'aspect_ratio_mask': Entry(slot_dim=1),
            'cross_attention_mask': Entry(seq_dims=(1,), slot_dim=2),
        },
        media={'image': Media()},
        slots=_slots_of_mllama,
        # For rows without images, MllamaCrossAttentionDecoderLayer masks its MLP, but not its attention.
        coupling='Mllama skips cross-attention in a batch without images, but if any row has an image, rows without '
        'one attend to padding images',
        matches=_Format({'aspect_ratio_ids': None}),
    ),
    # Without it these models are refused, because all slots of a row would be taken for one image.
    Family(
        name='Idefics',
        model_types=(
            'idefics2',
            'idefics3',
            'smolvlm',
            'granite_docling',
        ),
        entries={
            'pixel_values': Entry(slot_dim=1),
            'pixel_attention_mask': Entry(slot_dim=1),
            'tile_fine_mask': Entry(absent=0),  # (rows,), Granite Docling
        },
        media={'image': Media()},
        slots=_slots_of_idefics,
        # LFM2-VL has `pixel_attention_mask` too, but no slots.
        matches=_Format({'pixel_attention_mask': None, 'pixel_values': 5}),
    ),
    # Without it the type is refused: only the family tells that instructions belong to images.
    Family(
        name='InstructBLIP',
        model_types=('instructblip',),
        has_queries=True,
        entries=_entries_of_instructblip(_IMAGE),
        media={'image': Media(sizes=query_tokens)},
        matches=_Format({'qformer_input_ids': None, 'pixel_values': 4}),
    ),
    # Without it the forward raises: only the family tells that instructions belong to videos.
    Family(
        name='InstructBLIP-Video',
        model_types=('instructblipvideo',),
        has_queries=True,
        entries=_entries_of_instructblip(_VIDEO),
        media={'video': Media(sizes=query_tokens)},
        matches=_Format({'qformer_input_ids': None, 'pixel_values': 5}),
    ),
    # Without it the forward raises if a batch has no image. With it such a batch gets a dummy image by `has_queries`.
    Family(
        name='BLIP-2',
        model_types=('blip-2',),
        has_queries=True,
        entries={'pixel_values': _IMAGE},
        media={'image': Media(sizes=query_tokens)},
    ),
    # LLaVA-OneVision needs it: without it batches with several images in a row are refused, because `batch_num_images`
    # would be read as a tensor with an entry for each image. The others need it only if the model is not known.
    Family(
        name='LLaVA',
        model_types=(
            'llava',
            'mistral3',
            'llava_next',
            'llava_next_video',
            'llava_onevision',
            'video_llava',
        ),
        entries={
            'pixel_values': _IMAGE,
            'pixel_values_images': _IMAGE,
            'image_sizes': _IMAGE,
            'batch_num_images': Entry(absent=0),  # images of each row: an image is tiled only if its row has no other
            # Videos whose frames are kept together.
            'pixel_values_videos': _VIDEO,
            'image_sizes_videos': _VIDEO,
        },
        media={'image': Media(), 'video': Media()},
        matches=_is_llava,
    ),
    TEXT_FAMILY,
)


def inferred_family(config: Any) -> Family:
    """Returns the family of a model that is not in :data:`FAMILIES`, with the modalities that its config names.

    A config names a modality by its placeholders, or by the config of its encoder; videos only by their placeholders.
    """
    vision_config = getattr(config, 'vision_config', None)
    audio_config = getattr(config, 'audio_config', None)
    encoders = {'image': vision_config, 'audio': audio_config}
    media = {}
    for modality in MODALITIES:
        has_encoder = encoders.get(modality) is not None
        if has_encoder or named_ids(config, modality):
            media[modality] = Media()
    if not media:
        return TEXT_FAMILY
    return Family(name=config.model_type, media=media)
