# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A pre-split batch: a batch that consists of microbatches. The loader collates each of them by itself."""

from __future__ import annotations

import sys
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import Batch, common_padding_side, map_tensors, padding_side
from composer_tokacc.compat import new_shared_storage, num_writes
from composer_tokacc.layout.families import TEXT_ENTRIES
from composer_tokacc.layout.joining import values_of_rows
from composer_tokacc.layout.layout import BatchLayout
from composer_tokacc.layout.readings import Reading
from composer_tokacc.layout.tensors import cat_padded
from composer_tokacc.plan_agreement import PlanRecord
from composer_tokacc.refusals import InvalidInputError

ALIGNMENT = 64
"""In shared memory each tensor begins at a multiple of this many bytes, which suits tensors of any type."""
HOW_TO_CHANGE = (
    'Change the samples in the collator or in `batch_transforms`, or all microbatches at AFTER_DATALOADER: '
    '`state.batch = state.batch.map(function)`'
)
KEYS_OF_ROWS = frozenset({'input_ids', 'inputs_embeds', 'attention_mask', 'labels', 'decoder_input_ids'})
""":class:`.BatchLayout` finds the rows of a batch, their width and their padding by these keys."""


def _not_of_one_mapping(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``PreSplitBatch.__init__``: raises a TypeError that names the remedy if it is called with one mapping.

    Transformers and accelerate make a batch again from its entries, ``type(batch)({...})``, when they move it to a
    device. Torch does the same, and takes a dict if that raises a TypeError. The check is not in ``__init__`` itself,
    because Python would raise before, about the missing ``max_tokens``.
    """

    @wraps(init)
    def checked_init(self: PreSplitBatch, microbatches: Sequence[Batch], **options: Any) -> None:
        if isinstance(microbatches, Mapping):
            raise TypeError(
                'A batch of a RegroupingDataLoader holds several microbatches, and cannot be made of one mapping. If a '
                'trainer moves it to a device as one batch, compute its microbatches instead: '
                '`for microbatch, weight in weighted_microbatches(batch)` (docs/trainer.md#a-loop-without-a-trainer).'
            )
        init(self, microbatches, **options)

    return checked_init


class PreSplitBatch(Mapping[str, Any]):
    """One rank's part of a global batch, in the planned microbatches, each collated by itself.

    The model is trained on the microbatches. For callbacks that look at the whole batch, the object is also a mapping:
    ``batch['input_ids']`` is the tensor of all rows, as if they had been collated together. This tensor is a copy, made
    when it is first read. The model does not see it, so changing it has no effect, and items cannot be set. Lists and
    tuples with one value per row are joined to one list. Any other value is taken from the first microbatch that has
    one.

    A worker process sends all microbatches in one piece of shared memory. The receiver copies nothing.

    Args:
        microbatches: Mappings of tensors and of lists with one entry per row.
        max_tokens: Token budget (rows x padded width) within which the loader planned each microbatch.
            ``token_data_spec`` splits by the same budget, unless it is given ``slot_tokens``.
        indices: Index in the dataset of each row of each microbatch, for messages; None: not known.
    """

    @_not_of_one_mapping
    def __init__(
        self,
        microbatches: Sequence[Batch],
        *,
        max_tokens: int,
        indices: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.microbatches = [dict(microbatch) for microbatch in microbatches]
        self.max_tokens = max_tokens
        self.indices = indices
        self.plan: PlanRecord | None = None
        """This rank's record of the plan of the global batch. Ranks compare their records. None: no plan."""
        self._joined: dict[str, Any] = {}  # the joined values that were already read, by key
        self._writes: dict[str, int] = {}  # how often each joined tensor was written when it was made

    def __repr__(self) -> str:
        """Returns keys and sizes."""
        return f'PreSplitBatch({len(self.microbatches)} microbatches of {list(self)}, max_tokens={self.max_tokens})'

    def map(self, function: Callable[[dict[str, Any]], Batch]) -> PreSplitBatch:
        """Returns a batch of the results of calling ``function`` with each microbatch."""
        changed = [function(microbatch) for microbatch in self.microbatches]
        batch = PreSplitBatch(changed, max_tokens=self.max_tokens, indices=self.indices)
        batch.plan = self.plan
        return batch

    def joined(self, layout: BatchLayout) -> dict[str, Any]:
        """Returns one plain batch of all rows, padded to the widest row, on the side of the microbatches' padding."""
        return _joined_microbatches(self.microbatches, layout)

    def pin_memory(self) -> PreSplitBatch:
        """Returns the batch in page-locked memory. Torch's own pinning would turn the mapping into a plain dict."""
        return self.map(lambda microbatch: map_tensors(microbatch, torch.Tensor.pin_memory))

    def __iter__(self) -> Iterator[str]:
        """Iterates over the keys of all microbatches. Microbatches with images have more keys than others."""
        keys = dict.fromkeys(chain.from_iterable(self.microbatches))  # each key once, in order
        return iter(keys)

    def __len__(self) -> int:
        """Returns the number of keys."""
        return sum(1 for _ in self)  # not len(list(self)), because list() calls __len__()

    def __contains__(self, key: object) -> bool:
        """Returns whether a microbatch has the key. Joins nothing."""
        return any(key in microbatch for microbatch in self.microbatches)

    def __getitem__(self, key: str) -> Any:
        """Returns the value for all rows, joined when it is first read."""
        if key not in self:
            raise KeyError(key)
        if key not in self._joined:
            value = self._joined_value(key)
            self._joined[key] = value
            # A tensor without rows, such as a scalar, may be that of a microbatch, which the model sees.
            is_copy = all(value is not microbatch.get(key) for microbatch in self.microbatches)
            if isinstance(value, torch.Tensor) and is_copy:
                self._writes[key] = num_writes(value)
        return self._joined[key]

    def __setitem__(self, key: str, value: object) -> None:
        """Raises TypeError, which says how to change a batch."""
        raise TypeError(
            'A batch of a RegroupingDataLoader does not support item assignment, because it holds several '
            f'microbatches, got: a new {key!r}. {HOW_TO_CHANGE} (docs/errors.md#counts).'
        )

    def _check_unchanged(self) -> None:
        """Raises ValueError if somebody has written into a joined tensor. The model would not see the change."""
        changed = [key for key, writes in self._writes.items() if num_writes(self._joined[key]) != writes]
        if changed:
            raise InvalidInputError(
                f'The entries {changed} of a batch of a RegroupingDataLoader are copies, but a callback or an '
                f'algorithm has written into them. The model would not see this. {HOW_TO_CHANGE} '
                '(docs/errors.md#counts).'
            )

    def _joined_value(self, key: str) -> Any:
        """Returns the value for all rows; None if it is None in all microbatches."""
        for microbatch in self.microbatches:
            value = microbatch.get(key)
            if isinstance(value, torch.Tensor):
                return self._joined_tensor(key, microbatch)
            if isinstance(value, (list, tuple)):
                return values_of_rows(key, self.microbatches)
            if value is not None:
                return value
        return None

    def _joined_tensor(self, key: str, example: Batch) -> torch.Tensor:
        """Returns the tensor for all rows. Joins no other tensors, except those that are needed for it.

        ``example`` is a microbatch that has the key. All its keys together tell the model family. They may also tell
        the ``Entry`` of the tensor: sizes of images show whether images lie side by side.
        """
        layout = BatchLayout.infer(example)
        entry = layout.entry_of(example, key)
        if entry.is_media:
            # Without the other keys, which are left out below, the `Entry` could be inferred wrongly.
            layout = replace(layout, extra={key: entry})
        needed_keys = KEYS_OF_ROWS | {key}
        if entry.points_into is not None:
            # The values are indices of patches in the pixel tensor. They are shifted by the number of patches of the
            # earlier microbatches, which their pixels tell.
            needed_keys |= {entry.points_into}
        needed_parts = []
        for microbatch in self.microbatches:
            needed_parts.append({name: value for name, value in microbatch.items() if name in needed_keys})
        return _joined_microbatches(needed_parts, layout)[key]

    # A worker process pickles the batch to send it.

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for pickle, with all plain CPU tensors in one piece of shared memory.

        Torch would open a file for each tensor that it sends, and the open files of a process are limited.
        """
        memory, with_places = _copied_to_shared_memory(self.microbatches)
        return {
            **vars(self),
            'microbatches': with_places,
            'memory': memory,
            '_joined': {},  # not sent: the receiver joins values again if they are read
            '_writes': {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets the attributes from pickle. Each tensor is a view of the shared memory."""
        memory = state.pop('memory')
        vars(self).update(state)
        for microbatch in self.microbatches:
            for key, value in microbatch.items():
                if isinstance(value, _Place):
                    microbatch[key] = value.view_of(memory)


def microbatches_of(batch: Batch) -> Sequence[Batch]:
    """Returns the microbatches of a pre-split batch, or a list of the batch itself if it is any other batch.

    Raises ValueError if somebody has written into a copy that a pre-split batch has returned.
    """
    if isinstance(batch, PreSplitBatch):
        batch._check_unchanged()
        return batch.microbatches
    return [batch]


def _joined_microbatches(microbatches: Sequence[Batch], layout: BatchLayout) -> dict[str, Any]:
    """Returns one plain batch of all rows, padded to the widest row, on the side of the microbatches' padding."""
    side = common_padding_side(microbatches)
    pad_token_id = id_for_padding(layout, microbatches)
    return layout.concat(microbatches, padding_side=side, pad_token_id=pad_token_id)


def widened(
    batch: Batch,
    width_multiple: int,
    limit: int = sys.maxsize,
    *,
    side: str | None = None,
) -> Batch:
    """Returns the batch with its text padded to a multiple of ``width_multiple``, but to no more than ``limit``.

    The new padding is on ``side``; by default on the side of the old one. The caller adds a mask before, so that the
    new columns are hidden; packed rows get none, see ``with_masks``.

    Two kinds of batches keep their width: a batch without a tensor ``input_ids``, and one with an unregistered tensor
    that may lie along the text. If it does, it would have to be padded too. Only the model's config tells whether it
    does, and the loader, which calls this function, does not know the model.
    """
    if width_multiple == 1 or not isinstance(batch.get('input_ids'), torch.Tensor):
        return batch
    layout = BatchLayout.infer(batch)
    old_width = layout.width(batch)
    num_multiples = -(-old_width // width_multiple)  # rounded up
    new_width = min(num_multiples * width_multiple, limit)
    if new_width <= old_width:
        return batch
    for possible in layout.readings_of(batch).values():
        if Reading.TEXT in possible or Reading.SHARED_TEXT in possible:
            return batch
    if side is None:
        side = padding_side(batch)
    wider: dict[str, Any] = dict(batch)
    # Only registered tensors, because the unregistered ones do not lie along the text.
    for key in TEXT_ENTRIES.keys() | layout.family.entries.keys():
        value = batch.get(key)
        if not isinstance(value, torch.Tensor):
            continue
        entry = layout.entry_of(batch, key)
        if key == 'input_ids':
            entry = replace(entry, fill=id_for_padding(layout, [batch]))
        if entry.seq_dims:
            wider[key] = cat_padded([value], entry, new_width, side)
    return wider


def id_for_padding(layout: BatchLayout, batches: Iterable[Batch]) -> int:
    """Returns an id to pad with: the outermost id that a mask hides, or if none is hidden, an id of the text.

    The outermost hidden id is nearly always the id of padding. The id matters for some models, although the new padding
    is masked: RoBERTa counts the positions of its text by the ids that are not padding. If nothing is hidden, any id
    will do that is not a placeholder, because placeholders are counted.

    Hidden ids farther in may be placeholders: LLaMA-Factory's collator hides the placeholders of a dummy image between
    text and padding. A layout without a config does not recognise them, so the outermost id is taken.

    Without ``input_ids``, or if they are of another type than a tensor, it returns 0, which is not used.
    """
    id_of_text = 0
    for batch in batches:
        ids = batch.get('input_ids')
        if not isinstance(ids, torch.Tensor):
            continue
        is_allowed = ~layout.is_placeholder(batch)
        mask = batch.get('attention_mask')
        if mask is not None and mask.shape == ids.shape:
            is_hidden = is_allowed & (mask == 0)
            hidden_ids = ids.T[is_hidden.T]  # column by column, so that the outermost id is the first or the last
            if len(hidden_ids) > 0:
                outermost = 0 if padding_side(batch) == 'left' else -1
                return int(hidden_ids[outermost])
        text_ids = ids[is_allowed]
        if len(text_ids) > 0:
            id_of_text = int(text_ids[-1])
    return id_of_text


class _Place(NamedTuple):
    """Where a tensor lies in the shared memory. It stands for the tensor in a pickled microbatch."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    """The first byte."""

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor at this place of the memory, uint8 ``(bytes,)``."""
        count = self.shape.numel()
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        # The storage of a slice of `memory` would be the whole memory, and Composer's deep copy for metrics would copy
        # all of it. frombuffer() makes a storage that covers only this tensor.
        buffer = memory.numpy()
        values = torch.frombuffer(buffer, dtype=self.dtype, count=count, offset=self.start)
        return values.view(self.shape)


def _copied_to_shared_memory(microbatches: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Returns shared memory with all tensors, uint8 ``(bytes,)``, and the microbatches with a place for each tensor."""
    size = 0  # bytes of the tensors so far, each rounded up to ALIGNMENT
    with_places = [dict(microbatch) for microbatch in microbatches]
    tensors: list[tuple[_Place, torch.Tensor]] = []
    for microbatch in with_places:
        for key, value in microbatch.items():
            # Only plain tensors on the CPU are copied to the memory. Others, such as subclasses and tensors on a GPU,
            # stay in the microbatch, and torch sends them.
            is_dense = type(value) is torch.Tensor and value.layout == torch.strided
            if is_dense and value.device.type == 'cpu' and not (value.is_nested or value.is_quantized):
                place = _Place(value.dtype, value.shape, size)
                microbatch[key] = place
                tensors.append((place, value))
                num_blocks = -(-value.nbytes // ALIGNMENT)  # rounded up
                size += num_blocks * ALIGNMENT
    # Storage that is shared from the start is sent without a copy. Torch's default_collate does the same in a worker.
    storage = new_shared_storage(size)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    for place, value in tensors:
        place.view_of(memory).copy_(value)
    return memory, with_places
