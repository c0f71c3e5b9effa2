# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Knows which tensors of a multimodal batch belong to which row. Selects, trims and joins rows.

The entries of a tensor are its slices along one dimension. Each stands for a unit, such as a row, an image or a patch.
An :class:`.Entry` says which unit and which dimension that is: see the example in ``tensors.py``. The layout finds out
how many units each row has (:meth:`BatchLayout.units_per_row`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from composer_tokacc.arguments import check_choice, check_count, check_kind
from composer_tokacc.batch import (
    COUNT_KEYS,
    MODALITIES,
    Batch,
    Reach,
    attended_positions,
    has_input_text,
    labels_at_text,
    real_positions,
    text_of,
)
from composer_tokacc.compat import inner_model, is_encoder_decoder
from composer_tokacc.layout.families import FAMILIES, TEXT_ENTRIES, Family, Media, inferred_family
from composer_tokacc.layout.item_counts import (
    carried_counts,
    entries_per_row,
    items_by_placeholders,
    sums_of_groups,
)
from composer_tokacc.layout.joining import (
    check_are_tensors,
    check_equal_clips,
    check_present,
    check_same_form,
    entry_of_all,
    fill_of,
    pointers_in_joined_pixels,
    values_of_rows,
    widest_shared,
    with_masks,
)
from composer_tokacc.layout.placeholders import has_any_id, named_ids, replaced_ids
from composer_tokacc.layout.readings import (
    Readings,
    entry_of_reading,
    has_audio_along_text,
    joined_readings,
    possible_readings,
)
from composer_tokacc.layout.tensors import (
    PART_UNITS,
    Entry,
    cat_padded,
    inferred_unit,
    parse_unit,
    select_columns,
    select_rows,
)
from composer_tokacc.refusals import InvalidInputError

SCALED_ROTARY_TYPES = ('dynamic', 'longrope')
"""Rotary embeddings that change with the largest position of the batch, once that is over a limit."""
KEYS_AT_LABELS = ('labels', 'loss_weights', 'loss_mask')
"""Keys of tensors with a value for each label."""
NUM_DUMMY_FRAMES = 4
"""Frames of a dummy video. InstructBLIP-Video's processor writes placeholders for as many."""


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the tensors of a batch belong to its rows.

    A batch is a mapping with ``input_ids`` of shape ``(rows, width)``. If it has none, its rows are those of
    ``labels``. If it has no ``inputs_embeds`` either (Whisper), nothing is trimmed. A Python list has one entry per
    row. Strings, numbers, booleans and ``None`` are shared by all rows. ``num_images``, ``num_videos`` and
    ``num_audios`` are lists or tensors with one number per row.

    Args:
        family: The media tensors of the model's family.
        config: The model's config. It names the ids of placeholders and the sizes of images, which tell the images of
            each row. None: only the batch itself tells them.
        extra: How tensors that the user has registered belong to rows, by key: see :meth:`with_entries`.
    """

    family: Family
    config: Any = None
    extra: Mapping[str, Entry] = field(default_factory=dict)
    readings: Readings = field(default_factory=dict, init=False, repr=False, compare=False)
    """The ways in which unregistered tensors may belong to rows, by key, without those that earlier batches of the fit
    have ruled out: see ``readings.py``. A run learns them from its batches. No user knows them, so they are set by
    :meth:`with_readings` and are no argument."""

    def __post_init__(self) -> None:
        check_kind('family', self.family, Family)
        for name, entry in self.extra.items():
            check_kind(name, entry, Entry)

    @classmethod
    def infer(cls, batch: Batch) -> BatchLayout:
        """Returns the layout that the batch's own keys and shapes imply."""
        check_kind('batch', batch, Mapping)
        for family in FAMILIES:
            if family.matches(batch):
                return cls(family=family)
        return cls(family=Family(name='inferred'))

    @classmethod
    def for_model(cls, model: Any) -> BatchLayout:
        """Returns the layout of a Hugging Face model, of its config, or of a Composer model around it."""
        config = config_of(model)
        if config is None:
            config = model  # it may be a config itself
        if not hasattr(config, 'model_type'):
            raise TypeError(f'`model` must have a `config` with a `model_type`, got: {type(model).__name__}.')
        for family in FAMILIES:
            if config.model_type in family.model_types:
                return cls(family=family, config=config)
        return cls(family=inferred_family(config), config=config)

    def with_entries(self, **entries: Entry) -> BatchLayout:
        """Returns a layout that knows more tensors, e.g. ``with_entries(ocr_boxes=Entry(unit='image'))``.

        An ``Entry`` replaces the one that the layout has for the key. The shape of the tensor can only remove its
        ``seq_dims``: see :meth:`entry_of`.
        """
        layout = replace(self, extra={**self.extra, **entries})
        # replace() copies only the arguments, not the readings.
        return layout.with_readings(self.readings)

    def with_readings(self, readings: Readings) -> BatchLayout:
        """Returns a layout with these readings of unregistered keys in place of its own: see :meth:`readings_of`."""
        layout = replace(self)
        # The dataclass is frozen, and `readings` is not an argument.
        object.__setattr__(layout, 'readings', readings)
        return layout

    # Placeholders and positions.

    @property
    def image_token_id(self) -> int | None:
        """Placeholder id of an image, if the config names one."""
        return next(iter(replaced_ids(self.config, 'image')), None)

    def image_tokens_per_row(self, batch: Batch) -> list[int]:
        """Returns the number of image tokens of each row: the placeholders of its images, videos and audios.

        Raises:
            ValueError: If the layout has no config, because only a config tells the ids of placeholders.
        """
        if self.config is None:
            raise InvalidInputError(
                'Image tokens must be known to count them, but this layout has no config of a model, which names them. '
                'Pass `model=`, or use TokenAccumulation.'
            )
        return self.is_placeholder(batch).sum(dim=1).tolist()

    def is_placeholder(self, batch: Batch) -> torch.Tensor:
        """Returns the positions of all placeholders, ``(rows, width)`` bool; none if the layout has no config."""
        ids: list[int] = []
        for modality in MODALITIES:
            ids += replaced_ids(self.config, modality)
        return has_any_id(text_of(batch), ids)

    @cached_property  # read for every microbatch, and reading a config is slow
    def width_limit(self) -> int | None:
        """Largest width of a batch at which the rotary embedding does not depend on the width; None: no limit."""
        config = self.config
        if hasattr(config, 'get_text_config'):
            config = config.get_text_config()
        rope = getattr(config, 'rope_parameters', None)
        if not rope:
            rope = getattr(config, 'rope_scaling', None)  # its name in Transformers 4
        if not rope:
            return None
        # Models with several types of layers nest the parameters of each type.
        parameters_of_types = [rope]
        for value in rope.values():
            if isinstance(value, Mapping):
                parameters_of_types.append(value)
        limits: list[int] = []
        for parameters in parameters_of_types:
            rotary_type = parameters.get('rope_type', parameters.get('type'))
            if rotary_type in SCALED_ROTARY_TYPES:
                limits.append(_rotary_limit(parameters, config))
        return min(limits, default=None)

    def width_matters(self, batch: Batch) -> bool:
        """Returns whether the rotary embedding depends on the width of this batch. Then nothing may be trimmed.

        Returns False without text, because then nothing is trimmed in any case.
        """
        limit = self.width_limit
        if limit is None or not has_input_text(batch):
            return False
        return self.width(batch) > limit

    # How each tensor belongs to rows.

    @cached_property
    def _registered(self) -> Mapping[str, Entry]:
        """The ``Entry`` of each registered key. An ``Entry`` of the user replaces the one of the family."""
        registered = {**TEXT_ENTRIES, **self.family.entries, **self.extra}
        # A collator may write `num_images` as a tensor, one number per row. Its name would make it a tensor of media,
        # so it is registered here. So are numbers of further units: if the user has registered 'page', `num_pages`.
        counted_units: list[str] = list(MODALITIES)
        for entry in registered.values():
            if entry.is_media:
                counted_units.append(entry.modality)
        for unit in counted_units:
            registered.setdefault(f'num_{unit}s', Entry())
        return registered

    def num_rows(self, batch: Batch) -> int:
        """Returns the number of rows."""
        return text_of(batch).shape[0]

    def width(self, batch: Batch) -> int:
        """Returns the padded width of the rows' text."""
        return text_of(batch).shape[1]

    def readings_of(self, batch: Batch) -> Readings:
        """Returns the possible readings of each unregistered tensor of this batch."""
        readings = {}
        for key, value in batch.items():
            if key in self._registered or not isinstance(value, torch.Tensor):
                continue
            possible = possible_readings(batch, key, self.config, self._registered)
            if possible:  # else entry_of() refuses the key
                readings[key] = possible
        return readings

    def entry_of(self, batch: Batch, key: str) -> Entry:
        """Returns how a tensor belongs to rows.

        A tensor gets no ``seq_dims``, and so is not trimmed with the text, if it is not as wide as the text, or if the
        batch or the config shows that it belongs to a decoder. The labels of a decoder may be as wide as the encoder's
        text by chance.

        Raises:
            ValueError: If the key is not registered, and its shape tells nothing, or contradicts earlier batches. Or if
                the tensor has no dimension for its rows or images.
        """
        value: torch.Tensor = batch[key]
        entry = self._registered.get(key)
        if entry is None:
            entry = self._inferred_entry(batch, key)
        elif key not in self.extra:  # an `Entry` of the user keeps its unit, whatever the shape
            num_rows, width = text_of(batch).shape[:2]
            entry = _adapted_to_shape(entry, key, value, num_rows, width)
        if entry.unit != 'shared' and not _has_dim(value, entry.row_dim):
            raise InvalidInputError(
                f'`batch[{key!r}]` must have one entry for each {entry.unit}, got: a tensor of shape '
                f'{tuple(value.shape)}. Give it that dimension in the collator.'
            )
        if entry.seq_dims and not self._lies_along_text(batch, key, entry.seq_dims):
            return replace(entry, seq_dims=())
        return entry

    def _lies_along_text(self, batch: Batch, key: str, seq_dims: Sequence[int]) -> bool:
        """Returns whether a tensor has the width of the text in all these dimensions, and belongs to no decoder."""
        # Without input text (Whisper) the labels are the decoder's, which are not trimmed.
        if not has_input_text(batch):
            return False
        if key in KEYS_AT_LABELS and _labels_are_of_decoder(self.config, batch):
            return False
        value: torch.Tensor = batch[key]
        width = self.width(batch)
        # A tensor may lack the dimension: `loss_weights` may have one weight per row.
        return all(_has_dim(value, dim) and value.shape[dim] == width for dim in seq_dims)

    def _entries_by_key(self, batch: Batch) -> dict[str, Entry]:
        """Returns how each tensor of a batch belongs to rows, by key: see :meth:`entry_of`."""
        entry_by_key = {}
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                entry_by_key[key] = self.entry_of(batch, key)
        return entry_by_key

    def _inferred_entry(self, batch: Batch, key: str) -> Entry:
        """Returns how an unregistered tensor belongs to rows: by the likeliest reading that no batch has ruled out."""
        possible = possible_readings(batch, key, self.config, self._registered)
        if not possible:
            raise InvalidInputError(
                f'`batch[{key!r}]` must be an entry that the {self.family.name} layout knows, or have one entry for '
                f'each of the {len(text_of(batch))} rows, got: a tensor of shape {tuple(batch[key].shape)}. Register '
                f'it: `layout.with_entries({key}=Entry(unit=...))`, '
                "with unit one of 'row', 'image', 'patch', 'video', 'video_patch', 'audio', 'shared'."
            )
        readings = joined_readings(self.readings, {key: possible})
        most_likely = readings[key][0]
        return entry_of_reading(most_likely, batch, key)

    def tensors_of(self, batch: Batch, unit: str) -> dict[str, torch.Tensor]:
        """Returns the registered tensors of media that have one entry for each image (or patch, ...), by key.

        ``unit`` says which. Tensors that are not registered have other units, such as ``'image/12'``, so they are left
        out.
        """
        tensors = {}
        for key, entry in media_entries(self, batch).items():
            if entry.unit == unit:
                tensors[key] = batch[key]
        return tensors

    def media_of(self, batch: Batch) -> list[str]:
        """Returns the modalities that have tensors in the batch."""
        return modalities_of(media_entries(self, batch))

    # How many items each row has.

    def images_per_row(self, batch: Batch) -> list[int]:
        """Returns the number of images of each row. Tiles count as images if the processor makes them (InternVL)."""
        return self.units_per_row(batch, 'image')

    def media_per_row(self, batch: Batch) -> list[int]:
        """Returns the number of images, videos and audios of each row."""
        counts = [self.units_per_row(batch, modality) for modality in MODALITIES]
        return [sum(counts_of_row) for counts_of_row in zip(*counts, strict=True)]

    def units_per_row(self, batch: Batch, unit: str) -> list[int]:
        """Returns how many of a unit (``'image'``, ``'video'``, ``'audio'``, ``'patch'``, ...) each row has.

        The number of patches follows from the items of the row and their grids. An item is an image, a video or an
        audio. If ``unit`` is inferred, such as ``'image/12'``, its entries are counted like items. The first of these
        rules that applies tells the number of items:

        1. If images are in slots (see ``Family.slots``), the slots of the row up to its last image.
        2. If no tensor has the items, the numbers ``num_<unit>s`` of the batch. Without them each row has 0.
        3. If the model does not notice a wrong number of placeholders (InstructBLIP, audios of Qwen-Omni), and the
           config names them: the placeholders. A row has as many items as these fill: see ``Media.sizes``.
        4. If there is one row, it has all items.
        5. The numbers ``num_<unit>s``, if they add up to the items of the batch.
        6. The placeholders, in the ways of ``item_counts.py``.

        Raises:
            ValueError: If nothing tells which items belong to which row.
        """
        if unit == 'row':
            return [1] * self.num_rows(batch)
        if unit in PART_UNITS:
            return self._parts_per_row(batch, unit)
        slots = self.family.slots
        if unit == 'image' and slots is not None and batch.get('pixel_values') is not None:
            return self._needed_slots_per_row(batch, slots(batch))
        return self._items_per_row(batch, unit)

    def _parts_per_row(self, batch: Batch, unit: str) -> list[int]:
        """Returns the number of patches of each row, by the grid of each item."""
        part = PART_UNITS[unit]
        if not isinstance(batch.get(part.grid_key), torch.Tensor):
            raise InvalidInputError(
                f'`{part.grid_key}` must be in the batch, because it tells the patches of each {part.modality}, got: '
                f'{sorted(map(str, batch))}. Keep what the processor returns with the pixels.'
            )
        parts_per_item = batch[part.grid_key].prod(dim=1).tolist()
        items_per_row = self.units_per_row(batch, part.modality)
        return sums_of_groups(parts_per_item, items_per_row)

    def _needed_slots_per_row(self, batch: Batch, is_occupied: torch.Tensor) -> list[int]:
        """Returns the number of slots of each row up to its last image. An empty slot before that image counts.

        ``is_occupied`` says which slots hold an image, ``(rows, slots)`` bool.
        """
        num_rows = self.num_rows(batch)
        if len(is_occupied) != num_rows:
            raise InvalidInputError(
                f'`pixel_values` must have a row of slots for each of {num_rows} rows, got: {len(is_occupied)}. Put '
                'all images, or frames of videos, of a row into its slots.'
            )
        return Reach.of(is_occupied).from_first

    def _items_per_row(self, batch: Batch, unit: str) -> list[int]:
        """Returns the number of items of each row, by the rules 2 to 6 of :meth:`units_per_row`."""
        num_rows = self.num_rows(batch)
        media_entry_by_key = media_entries(self, batch)
        # For example 'image/3' for 'image', if three entries of images are in the batch, and none is registered.
        item_unit = _unit_of_items(media_entry_by_key, unit)
        modality, _ = parse_unit(item_unit)
        carried = carried_counts(batch, modality)
        # If there is not one number for each row, the numbers are ignored, because they are optional. The placeholders
        # tell the items, too.
        if carried is not None and len(carried) != num_rows:
            carried = None
        num_items = _num_items(batch, media_entry_by_key, item_unit)
        if num_items is None:
            # Rule 2. There is no tensor to cut, so wrong numbers do no harm.
            return carried or [0] * num_rows
        # Rule 3. It comes before rules 4 and 5, which need no placeholders, because these models do not notice if there
        # are too few.
        media = self.family.media.get(item_unit, Media())
        if media.sizes is not None:
            is_placeholder = self._placeholders_of_items(batch, item_unit)
            if is_placeholder is not None:
                tokens_per_row = is_placeholder.sum(dim=1).tolist()
                tokens_per_item = media.sizes(batch, self.config, num_items, sum(tokens_per_row))
                return items_by_placeholders(item_unit, tokens_per_row, tokens_per_item)
        # Rule 4.
        if num_rows == 1:
            return [num_items]
        # Rule 5. The numbers may be of images that the processor has cut into tiles. Then they do not add up to the
        # tiles.
        if carried is not None and sum(carried) == num_items:
            return carried
        # Rule 6.
        is_placeholder = self._placeholders_of_items(batch, item_unit)
        if is_placeholder is None:
            raise self._unknown_items_error(batch, modality, num_items)
        # Only tensors of media, and what the family registers with them, such as `batch_num_images`. A tensor with one
        # entry per row, such as the dataset's column `image_id`, tells nothing about items, although its name does.
        keys = media_entry_by_key.keys() | self.family.entries.keys()
        media_batch = {key: value for key, value in batch.items() if key in keys}
        return entries_per_row(media_batch, is_placeholder, modality, num_items)

    def _unknown_items_error(self, batch: Batch, modality: str, num_items: int) -> InvalidInputError:
        """Returns the error that nothing tells which items belong to which row."""
        remedy = (
            f'Carry `num_{modality}s` in the batch, one int per row (of images, tiles are counted), or declare a '
            f'column that is none of {modality}s (`layout.with_entries(name=Entry())`)'
        )
        if self.config is None:
            remedy += ', or pass `layout=BatchLayout.for_model(model)`'
        return InvalidInputError(
            f'`layout` must tell which of {num_items} {modality}s belong to which of {self.num_rows(batch)} rows, got: '
            f'nothing that tells their placeholders, and `num_{modality}s`={batch.get(f"num_{modality}s")}. {remedy}.'
        )

    def _placeholders_of_items(self, batch: Batch, item_unit: str) -> torch.Tensor | None:
        """Returns the positions of the placeholders of some items, bool ``(rows, width)``; None: nothing tells them."""
        modality, num_entries = parse_unit(item_unit)
        is_inferred = num_entries is not None  # such as 'image/12'
        if is_inferred and self.config is not None:
            # Nothing tells which ids the model replaces, so all are taken: see placeholders.py.
            return has_any_id(text_of(batch), named_ids(self.config, modality))
        media = self.family.media.get(modality, Media())
        return media.placeholders(batch, self.config, modality)

    # New batches from existing ones.

    def with_media(self, batch: Batch) -> Batch:
        """Adds one grey dummy image or video if the batch has none and the model needs one: see ``has_queries``.

        The dummy belongs to no row. Its instruction, if the family has instructions, is one token.
        """
        family = self.family
        if not family.has_queries or self.config is None:
            return batch
        if any(batch.get(key) is not None for key in family.entries):
            return batch  # it has media
        device = text_of(batch).device
        side = self.config.vision_config.image_size
        shape = [1, 3, side, side]
        if 'video' in family.media:
            shape.insert(1, NUM_DUMMY_FRAMES)
        grey = torch.full(shape, 0.5, device=device)
        dummy: dict[str, torch.Tensor] = {'pixel_values': grey}
        for key in family.entries:
            if key != 'pixel_values':
                dummy[key] = torch.ones(1, 1, dtype=torch.long, device=device)
        return {**batch, **dummy}

    def select(self, batch: Batch, rows: Sequence[int]) -> dict[str, Any]:
        """Returns a batch of some rows, in the given order, with exactly their images. The width stays.

        Raises:
            ValueError: If nothing tells how a value belongs to rows, or if a row does not exist.
        """
        (selected,) = self.split(batch, [rows])
        return selected

    def split(
        self,
        batch: Batch,
        groups: Iterable[Sequence[int]],
        columns: Sequence[range] | None = None,
    ) -> list[dict[str, Any]]:
        """Returns a batch for each group of rows, as :meth:`select` does. Counts the items of the rows only once.

        A group of all rows in their order shares the tensors of the batch. Other groups get copies, except of tensors
        that all rows share. A tensor that loses columns is copied if it would have gaps in memory. Copies of
        page-locked tensors are page-locked.

        ``columns`` are the columns of the text that each group keeps; None: all. To call :meth:`narrow` on the result
        is not the same, because the shapes of a few rows tell less surely which tensors lie along the text.
        """
        num_rows = self.num_rows(batch)
        for key, value in batch.items():
            self._check_value(key, value, num_rows)
        entry_by_key = self._entries_by_key(batch)
        all_rows = list(range(num_rows))
        groups = list(groups)
        if columns is None:
            columns = [range(self.width(batch))] * len(groups)
        offsets: dict[str, list[int]] | None = None
        selected = []
        for group, kept_columns in zip(groups, columns, strict=True):
            rows = list(group)
            _check_rows(rows, num_rows)
            if rows == all_rows:
                selected.append(select_columns(batch, entry_by_key, kept_columns))
                continue
            # Counted here, because it takes a while, and a group of all rows does not need it.
            if offsets is None:
                offsets = self._offsets_of_rows(batch, entry_by_key)
            selected.append(select_rows(batch, entry_by_key, offsets, rows, kept_columns))
        return selected

    def _offsets_of_rows(self, batch: Batch, entry_by_key: Mapping[str, Entry]) -> dict[str, list[int]]:
        """Returns where the entries of each row begin, for each unit of the batch: see :data:`.RowOffsets`."""
        units = ['row']
        for entry in entry_by_key.values():
            units.append(entry.unit)
            if entry.slot_dim is not None:
                units.append('image')  # their number tells how many slots the selected rows need
        offsets = {}
        # Each unit once, in the order of the keys. A set has another order in each process, so that the ranks would
        # name different tensors if nothing tells the items of several.
        for unit in dict.fromkeys(units):
            if unit == 'shared':
                continue
            offsets[unit] = [0, *accumulate(self.units_per_row(batch, unit))]
        return offsets

    def _check_value(
        self,
        key: str,
        value: object,
        num_rows: int,
    ) -> None:
        """Raises ValueError if nothing tells how to select rows of a value.

        A list has one entry per row. A list under a key of media or of shared values is refused, because it may have as
        many entries as rows only by chance.
        """
        if value is None or isinstance(value, (torch.Tensor, str, bool, int, float)):
            return
        if isinstance(value, (list, tuple)):
            entry = self._registered.get(key, Entry())
            if len(value) == num_rows and _is_of_rows(entry):
                return
            description = f'{type(value).__name__} of {len(value)} {entry.modality} entries for {num_rows} rows'
        else:
            description = type(value).__name__
        raise InvalidInputError(
            f'`batch[{key!r}]` must be a tensor, a list with one entry per row, or a plain value, got: {description}. '
            'Turn it into one of these in the collator.'
        )

    def trim(
        self,
        batch: Batch,
        *,
        width_multiple: int = 1,
    ) -> dict[str, Any]:
        """Returns the batch without the columns that no row needs; all columns if an audio lies along the text.

        Rounds the width up to ``width_multiple``, but not beyond the width of the batch. Trims even if
        :meth:`width_matters`: dummy rows have no loss, and verification measures the effect. Rows with loss are trimmed
        by the ``columns`` of :meth:`split`.

        Do not trim rows that were selected from a larger batch, because the shapes of a few rows tell less surely which
        tensors lie along the text. Use ``split_trimmed`` on the larger batch.
        """
        check_count('width_multiple', width_multiple)
        all_rows = range(self.num_rows(batch))
        (columns,) = needed_columns(self, batch, [all_rows], width_multiple=width_multiple)
        return self.narrow(batch, columns.start, len(columns))

    def narrow(
        self,
        batch: Batch,
        start: int,
        width: int,
    ) -> dict[str, Any]:
        """Returns the batch with ``width`` columns of its text, from column ``start`` on."""
        if width == self.width(batch):
            return dict(batch)
        return select_columns(batch, self._entries_by_key(batch), range(start, start + width))

    def concat(
        self,
        batches: Sequence[Batch],
        *,
        padding_side: str = 'right',
        pad_token_id: int = 0,
    ) -> dict[str, Any]:
        """Returns one batch of all rows, with text padded to the widest row, and the images of all rows in their order.

        A plain value stays one value if all batches with the key have the same. Otherwise it becomes a list with one
        value per row, see ``values_of_rows``. Numpy arrays always become a list. So do values under a key of rows, such
        as ``loss_weights``. Counts such as ``num_images`` are found for batches that lack them.

        Args:
            batches: Batches, or one-row samples; those without images may lack the image entries. If rows are padded
                and no batch has an ``attention_mask``, one is added: see ``with_masks``.
            padding_side: ``'left'`` or ``'right'``.
            pad_token_id: Id to pad ``input_ids`` with. It must not be an image placeholder.

        Raises:
            ValueError: If the layout does not know a tensor, or if tensors do not fit together. Or if only some batches
                have a list or a tensor, except counts, a tensor of media, a shared one, or one with ``Entry.absent``.
        """
        check_choice('padding_side', padding_side, ('left', 'right'))
        if not batches:
            raise InvalidInputError('`batches` must hold at least one batch, got: none.')
        widths = [self.width(batch) for batch in batches]
        width = max(widths)
        if min(widths) < width:
            batches = with_masks(batches)
        keys = dict.fromkeys(chain.from_iterable(batches))  # each key once, in order
        joined: dict[str, Any] = {}
        for key in keys:
            present = [batch for batch in batches if batch.get(key) is not None]
            values = [batch[key] for batch in present]
            if values and key in COUNT_KEYS:
                joined[key] = self._joined_counts(key, batches)
            elif any(isinstance(value, torch.Tensor) for value in values):
                joined[key] = self._joined_tensor(key, present, batches, width, padding_side, pad_token_id)
            elif any(isinstance(value, (list, tuple)) for value in values):
                check_present(key, present, batches)
                joined[key] = values_of_rows(key, batches)
            else:
                joined[key] = self._joined_plain_value(key, values, batches)
        return joined

    def _joined_counts(self, key: str, batches: Sequence[Batch]) -> list[int]:
        """Returns the number of items of each row of all batches. ``key`` is one of ``COUNT_KEYS``.

        A batch may carry the numbers. But if registered tensors have one entry per item, these entries are counted,
        because the carried numbers may be of images that the processor has cut into tiles. A batch that lacks the
        numbers is counted, too. Each batch is counted by itself, because in a batch of one row it is certain that all
        tiles belong to that row.
        """
        modality = COUNT_KEYS[key]
        counts: list[int] = []
        for batch in batches:
            carried = carried_counts(batch, modality)
            if carried is None or self.tensors_of(batch, modality):
                counts += self.units_per_row(batch, modality)
            else:
                counts += carried
        return counts

    def _joined_plain_value(self, key: str, values: Sequence[Any], batches: Sequence[Batch]) -> Any:
        """Returns the plain value that all batches share, or a list with the value of each row.

        It is a list if values differ, or if the key is registered as one of rows. ``values`` has the value of each
        batch that has the key.
        """
        if not values:
            return None
        # Arrays cannot be compared by `!=`, which returns another array.
        differs = any(isinstance(value, np.ndarray) or value != values[0] for value in values)
        # A registered key of rows, such as `loss_weights`, has a value for each row, even if all of them are equal.
        entry = self._registered.get(key)
        is_of_rows = entry is not None and _is_of_rows(entry)
        if differs or is_of_rows:
            return values_of_rows(key, batches)
        return values[0]

    def _joined_tensor(
        self,
        key: str,
        present: Sequence[Batch],
        batches: Sequence[Batch],
        width: int,
        side: str,
        pad_token_id: int,
    ) -> torch.Tensor:
        """Returns one tensor for the rows of all batches, with text padded to ``width`` on this side.

        ``present`` are the batches that have the key.
        """
        values = [batch[key] for batch in present]
        check_are_tensors(key, values)
        entries = [self.entry_of(batch, key) for batch in present]
        check_same_form(key, values, entries)
        entry = entry_of_all(entries)
        if entry.unit == 'shared':
            return widest_shared(key, values, entry, side)
        if entry.unit == 'video' and values[0].dim() == 5:  # clips: (videos, frames, channels, height, width)
            check_equal_clips(self.family.name, key, present)
        # A batch that lacks the key adds no entry to a tensor of media. To a tensor with an entry for each row it must
        # add its rows. If images are in slots, their tensor has an entry for each row, too.
        if not entry.is_media or entry.slot_dim is not None:
            values = self._with_missing_tensors(key, present, batches, entry)
        if entry.points_into is not None:
            # Only media without slots point into pixels, so `values` still has one tensor for each batch of `present`.
            pixels = [batch[entry.points_into] for batch in present]
            values = pointers_in_joined_pixels(values, pixels)
        if key == 'input_ids':
            entry = replace(entry, fill=pad_token_id)
        elif key not in self._registered and not entry.is_media:
            entry = replace(entry, fill=fill_of(key, present))
        return cat_padded(values, entry, width, side)

    def _with_missing_tensors(
        self,
        key: str,
        present: Sequence[Batch],
        batches: Sequence[Batch],
        entry: Entry,
    ) -> list[torch.Tensor]:
        """Returns one tensor for each batch, to be joined: its own one, or a new one if it has none.

        A new tensor has 0 slots, or is filled with ``entry.absent``. Raises ValueError if neither is possible.
        ``present`` are the batches that have the key.
        """
        if entry.slot_dim is None and entry.absent is None:
            check_present(key, present, batches)
        like: torch.Tensor = present[0][key]
        values = []
        for batch in batches:
            if batch.get(key) is not None:
                values.append(batch[key])
                continue
            shape = list(like.shape)
            shape[entry.row_dim] = self.num_rows(batch)
            for dim in entry.seq_dims:
                shape[dim] = self.width(batch)
            if entry.slot_dim is not None:
                shape[entry.slot_dim] = 0
            absent = entry.absent
            if not absent:  # 0, or None if the tensor has 0 slots, so no values
                absent = False  # it is 0 in every dtype. The integer 0 would turn bools into integers
            # `absent` may be NaN, which an integer tensor cannot hold.
            dtype = torch.result_type(like, absent)
            values.append(like.new_full(shape, absent, dtype=dtype))
        return values


# Functions of a layout. Those that other rooms use are not methods, because methods of BatchLayout are public.


# Layouts of models and of several batches.


def config_of(model: Any) -> Any:
    """Returns the Transformers config of a model, or of the model in a wrapper such as DDP; None if it has none."""
    if isinstance(model, torch.nn.Module):
        model = inner_model(model)
    # Other wrappers, such as `AveragedModel`, have no config. A model with a config may have a child named `module`.
    for candidate in (model, getattr(model, 'module', None)):
        config = getattr(candidate, 'config', None)
        if hasattr(config, 'model_type'):
            return config
    return None


def layout_of_model(model: Any) -> BatchLayout | None:
    """Returns the layout of a model, see :meth:`BatchLayout.for_model`; None if it has no config of Transformers."""
    config = config_of(model)
    if config is None:
        return None
    return BatchLayout.for_model(config)


def inferred_layout(batches: Iterable[Batch]) -> BatchLayout:
    """Returns the layout that some batches imply together, as :meth:`BatchLayout.infer` does for one batch.

    The first value of each key is enough, because only keys and numbers of dimensions tell the layout. A batch without
    images may lack their keys, or have None there.
    """
    values: dict[str, Any] = {}
    for batch in batches:
        check_kind('batch', batch, Mapping)
        for key, value in batch.items():
            if values.get(key) is None:
                values[key] = value
    return BatchLayout.infer(values)


def layout_of_rows(layout: BatchLayout, batches: Iterable[Batch]) -> BatchLayout:
    """Returns a layout for rows that are selected from these batches. It allows only readings that all of them allow.

    The shapes of a few rows tell less surely how a tensor that is not registered belongs to them: the codes of two
    images may have the shape of the text of two rows.
    """
    readings = layout.readings
    for batch in batches:
        readings = joined_readings(readings, layout.readings_of(batch))
    return layout.with_readings(readings)


# The text of a batch, and its columns.


def _labels_are_of_decoder(config: Any, batch: Batch) -> bool:
    """Returns whether the labels of a batch are at positions of a decoder, and not at those of the text.

    ``decoder_input_ids`` always show it. So does the config of an encoder-decoder, unless the labels are the only text
    of the batch (Whisper).
    """
    if batch.get('decoder_input_ids') is not None:
        return True
    return has_input_text(batch) and is_encoder_decoder(config)


def labels_along_text(layout: BatchLayout, batch: Batch) -> torch.Tensor | None:
    """Returns the labels if they lie at the positions of the text, else None.

    Unlike :func:`.labels_at_text` it also recognizes an encoder-decoder by its config.
    """
    if _labels_are_of_decoder(layout.config, batch):
        return None
    return labels_at_text(batch)


def real_positions_of(layout: BatchLayout, batch: Batch) -> torch.Tensor:
    """Returns the positions that must not be trimmed, bool ``(rows, width)``: those with attention or with a label.

    Unlike :func:`.real_positions` it also recognizes an encoder-decoder by its config. Labels of a decoder do not
    count, because they lie at other positions.
    """
    if _labels_are_of_decoder(layout.config, batch):
        return attended_positions(batch)
    return real_positions(batch)


def needed_columns(
    layout: BatchLayout,
    batch: Batch,
    groups: Sequence[Sequence[int]],
    *,
    width_multiple: int = 1,
) -> list[range]:
    """Returns the columns of the text that each group of rows needs; all columns if an audio lies along the text.

    A group loses its padding on one side: on the left if all of its rows end in the last column, else on the right. The
    number of columns is rounded up to ``width_multiple``, but not beyond the width of the batch.
    """
    width = layout.width(batch)
    # The frames of such an audio would have to be trimmed with the text.
    if has_audio_along_text(batch, layout.config):
        return [range(width)] * len(groups)
    is_real = real_positions_of(layout, batch)
    columns = []
    for rows in groups:
        reach = Reach.of(is_real[list(rows)])
        longest = max(reach.lengths(reach.side))
        num_multiples = -(-longest // width_multiple)  # rounded up
        num_columns = min(num_multiples * width_multiple, width)
        first_column = 0
        if reach.side == 'left':
            first_column = width - num_columns
        columns.append(range(first_column, first_column + num_columns))
    return columns


def split_trimmed(layout: BatchLayout, batch: Batch, groups: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Returns a batch for each group of rows, without the columns that none of its rows needs.

    The shapes of the whole batch tell which tensors lie along the text. Those of a few rows could mislead.
    """
    return layout.split(batch, groups, needed_columns(layout, batch, groups))


def _rotary_limit(parameters: Mapping[str, Any], config: Any) -> int:
    """Returns the limit of an embedding of :data:`SCALED_ROTARY_TYPES`: its own one, or that of the config."""
    own_limit = parameters.get('original_max_position_embeddings')
    if own_limit:
        return own_limit
    limit_of_config = getattr(config, 'original_max_position_embeddings', None)
    if limit_of_config:
        return limit_of_config
    return config.max_position_embeddings


def _check_rows(rows: Sequence[int], num_rows: int) -> None:
    """Raises ValueError unless these are indices of rows. Refuses a bool, which Python would take for row 0 or 1.

    A bool may be an entry of a mask, which is a tensor or an array.
    """
    for row in rows:
        is_bool = isinstance(row, bool | np.bool_) or getattr(row, 'dtype', None) is torch.bool
        if is_bool or not 0 <= row < num_rows:
            raise InvalidInputError(
                f'`rows` must be numbers of the {num_rows} rows of the batch, from 0, got: {row!r}. Give the number of '
                'each row that is selected.'
            )


# The `Entry` of a tensor.


def media_entries(layout: BatchLayout, batch: Batch) -> dict[str, Entry]:
    """Returns how the tensors of images, videos and audios of a batch belong to rows, by key.

    This is called for every microbatch. To save time it recognises text by its key.
    """
    entry_by_key = {}
    for key, value in batch.items():
        is_text = key in TEXT_ENTRIES and key not in layout.extra and key not in layout.family.entries
        if isinstance(value, torch.Tensor) and not is_text:
            entry = layout.entry_of(batch, key)
            if entry.is_media:
                entry_by_key[key] = entry
    return entry_by_key


def modalities_of(media_entry_by_key: Mapping[str, Entry]) -> list[str]:
    """Returns the modalities of the tensors of a batch, see :func:`media_entries`."""
    present = {entry.modality for entry in media_entry_by_key.values()}
    return [modality for modality in MODALITIES if modality in present]


def _adapted_to_shape(
    entry: Entry,
    key: str,
    value: torch.Tensor,
    num_rows: int,
    width: int,
) -> Entry:
    """Returns the ``Entry`` that is registered for a key, or another one if a mask or positions have another shape.

    A mask may have several dimensions. A mask or positions with one row may be shared by all rows of the text, whose
    shape is ``(num_rows, width)``.
    """
    is_shared = num_rows > 1 and value.shape[:1] == (1,)
    unit = 'shared' if is_shared else 'row'
    if key == 'attention_mask' and value.dim() > 2:
        # (rows, width, width) and (rows, heads, width, width) have the width twice. In an additive mask 0 means
        # "attend", so it is filled with the lowest number.
        fill = torch.finfo(value.dtype).min if value.dtype.is_floating_point else 0
        return Entry(unit=unit, seq_dims=(-2, -1), fill=fill)
    if key == 'position_ids' and value.shape == (1, width):
        return Entry(unit=unit, seq_dims=(1,))
    return entry


def _has_dim(value: torch.Tensor, dim: int) -> bool:
    """Returns whether a tensor has a dimension, which may be counted from the end."""
    return -value.dim() <= dim < value.dim()


def _is_of_rows(entry: Entry) -> bool:
    """Returns whether a value has one entry for each row. A tensor of slots is one of media."""
    return entry.unit == 'row' and not entry.is_media


def _unit_of_items(media_entry_by_key: Mapping[str, Entry], unit: str) -> str:
    """Returns the unit of the tensors that have one entry per item: ``unit`` itself, or an inferred one.

    Unregistered tensors have units like ``'image/12'``: 12 entries in the batch. The tensors with the fewest entries
    have one per item, the others have one per tile or patch. For example, tensors of the units ``'image/3'`` and
    ``'image/12'`` tell that the batch has 3 images.

    Args:
        media_entry_by_key: The entries of all media of the batch: see :func:`media_entries`.
        unit: ``'image'``, ``'video'`` or ``'audio'``, or another unit that the user has registered. An inferred unit is
            returned as it is.
    """
    if any(entry.unit == unit for entry in media_entry_by_key.values()):
        return unit
    numbers_of_entries: list[int] = []
    for entry in media_entry_by_key.values():
        modality, num_entries = parse_unit(entry.unit)
        if modality == unit and num_entries is not None:
            numbers_of_entries.append(num_entries)
    if not numbers_of_entries:
        return unit
    return inferred_unit(unit, min(numbers_of_entries))


def _num_items(batch: Batch, media_entry_by_key: Mapping[str, Entry], unit: str) -> int | None:
    """Returns how many items the tensors of a unit have; None if the batch has no such tensor.

    ``media_entry_by_key`` has the entries of all media of the batch: see :func:`media_entries`.
    """
    for key, entry in media_entry_by_key.items():
        if entry.unit == unit:
            return batch[key].shape[entry.row_dim]
    return None
