# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A batch that comes in its microbatches: collated one by one where samples are read, never joined on the way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from composer_tokacc.batch import Batch, padding_side
from composer_tokacc.compat import new_shared_storage
from composer_tokacc.layout.families import TEXT_ENTRIES, TEXT_FAMILY
from composer_tokacc.layout.layout import BatchLayout
from composer_tokacc.layout.tensors import cat_padded
from composer_tokacc.plan_agreement import PlanRecord

ALIGNMENT = 64
"""Bytes; tensors of any type may begin there."""


class PreSplitBatch(Mapping[str, Any]):
    """One rank's share of a global batch, in the microbatches that were planned, each collated by itself.

    Its microbatches are what is trained on. For callbacks that look at the whole batch it is a mapping as well:
    ``batch['input_ids']`` is what collating all rows at once would have given. That is made on the first reading, at
    the cost of a copy, and is not what the model sees: changing it changes nothing, and items cannot be set. Lists of
    facts by row are put together without copying a tensor.

    From a worker process it is sent in one piece of shared memory, whatever the number of its microbatches, and is not
    copied on arrival.

    Args:
        microbatches: Mappings of tensors and of lists with one entry per row.
        max_tokens: Token budget that the microbatches were planned for.
        indices: Index in the dataset of each row of each microbatch, for messages; None: not known.
    """

    def __init__(
        self, microbatches: Sequence[Batch], *, max_tokens: int, indices: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.microbatches = [dict(microbatch) for microbatch in microbatches]
        self.max_tokens = max_tokens
        self.indices = indices
        self.described: Any = None
        """Facts of the microbatches' rows, and what they were found in: see ``describe_all``."""
        self.plan: PlanRecord | None = None
        """What this rank knows of the plan of the global batch, for the comparison of the ranks."""
        self._joined: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Returns keys and sizes."""
        return f'PreSplitBatch({len(self.microbatches)} microbatches of {list(self)}, max_tokens={self.max_tokens})'

    def map(self, function: Callable[[dict[str, Any]], Batch]) -> PreSplitBatch:
        """Returns the batch whose microbatches are ``function`` of these."""
        changed = [function(microbatch) for microbatch in self.microbatches]
        batch = PreSplitBatch(changed, max_tokens=self.max_tokens, indices=self.indices)
        batch.plan = self.plan
        return batch

    def joined(self, layout: BatchLayout) -> dict[str, Any]:
        """One plain batch of all rows, padded to the widest, on the side that the microbatches are padded on."""
        is_left = any(padding_side(one) == 'left' for one in self.microbatches)
        pad_token_id = _pad_token_id(self.microbatches)
        return layout.concat(self.microbatches, padding_side='left' if is_left else 'right', pad_token_id=pad_token_id)

    def pin_memory(self) -> PreSplitBatch:
        """Returns the batch in page-locked memory. Torch's own pinning would make a plain dict of a mapping."""
        return self.map(lambda microbatch: {
            key: value.pin_memory() if isinstance(value, torch.Tensor) else value for key, value in microbatch.items()
        })  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        """Returns keys of all microbatches: those with images have more."""
        return iter(dict.fromkeys(key for microbatch in self.microbatches for key in microbatch))

    def __len__(self) -> int:
        """Returns the number of keys."""
        return sum(1 for _ in self)  # not len(list(self)), which asks for the length itself

    def __contains__(self, key: object) -> bool:
        """Returns whether a microbatch has the key; joins nothing."""
        return any(key in microbatch for microbatch in self.microbatches)

    def __getitem__(self, key: str) -> Any:
        """Returns the entry for all rows, joined on the first reading."""
        if key not in self:
            raise KeyError(key)
        if key not in self._joined:
            values = [microbatch[key] for microbatch in self.microbatches if microbatch.get(key) is not None]
            if values and isinstance(values[0], torch.Tensor):
                self._joined[key] = self._joined_tensor(key)
            elif values and isinstance(values[0], list):
                self._joined[key] = [item for value in values for item in value]
            else:
                self._joined[key] = values[0] if values else None
        return self._joined[key]

    def _joined_tensor(self, key: str) -> torch.Tensor:
        with_it = next(microbatch for microbatch in self.microbatches if microbatch.get(key) is not None)
        layout = BatchLayout.infer(with_it)
        wanted = {'input_ids', 'attention_mask', 'labels', 'decoder_input_ids', key}
        parts = [{name: value for name, value in one.items() if name in wanted} for one in self.microbatches]
        return PreSplitBatch(parts, max_tokens=self.max_tokens).joined(layout)[key]

    # On the way from a worker process.

    def __deepcopy__(self, memo: dict[int, Any]) -> PreSplitBatch:
        """Returns a copy of its own, not by way of shared memory."""
        return self.map(lambda microbatch: copy.deepcopy(microbatch, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """All tensors in one, because each is sent through a file of its own, of which a process may have too few."""
        memory, places = _packed(self.microbatches)
        return _unpacked, (memory, places, self.max_tokens, self.indices, self.plan)


def microbatches_of(batch: Batch) -> Sequence[Batch]:
    """Returns the microbatches of a ready batch; any other one is taken as a whole."""
    return batch.microbatches if isinstance(batch, PreSplitBatch) else [batch]


def widened(batch: Batch, width_multiple: int) -> Batch:
    """Returns the batch with its text padded to a width that is a multiple, on the side where it is padded already."""
    if width_multiple == 1 or batch.get('input_ids') is None:
        return batch
    layout, side = BatchLayout(family=TEXT_FAMILY), padding_side(batch)
    width = -(-layout.width(batch) // width_multiple) * width_multiple
    wider: dict[str, Any] = dict(batch)
    for key, value in batch.items():
        if width > layout.width(batch) and key in TEXT_ENTRIES and isinstance(value, torch.Tensor):
            entry = layout.entry_of(batch, key)
            entry = replace(entry, fill=_pad_token_id([batch])) if key == 'input_ids' else entry
            wider[key] = cat_padded([value], entry, width, side)
    return wider


def _pad_token_id(batches: Sequence[Batch]) -> int:
    """An id to pad with: of padding that is there, else the last one of a row, which is no placeholder of an image."""
    batches = [batch for batch in batches if batch.get('input_ids') is not None]
    for batch in batches:
        ids, mask = batch['input_ids'], batch.get('attention_mask')
        if mask is not None and mask.shape == ids.shape and not bool(mask.all()):
            return int(ids[mask == 0][0])
    return int(batches[0]['input_ids'][0, -1]) if batches else 0


class _Place(NamedTuple):
    """Where a tensor lies in the memory that is sent."""

    dtype: torch.dtype
    shape: torch.Size
    start: int

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor there."""
        if (count := self.shape.numel()) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        # No view of one tensor: Composer deep-copies microbatches for metrics, and of a view all that it is a view of.
        return torch.frombuffer(memory.numpy(), dtype=self.dtype, count=count, offset=self.start).view(self.shape)


def _packed(microbatches: Sequence[Mapping[str, Any]]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Shared memory, uint8 (bytes,), that holds all tensors, and the microbatches with places in their stead."""
    end, places, tensors = 0, [dict(microbatch) for microbatch in microbatches], []
    for of_microbatch in places:
        for key, value in of_microbatch.items():
            if type(value) is torch.Tensor and value.device.type == 'cpu' and value.layout == torch.strided:
                of_microbatch[key] = place = _Place(value.dtype, value.shape, end)
                tensors.append((place, value))
                end += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
    # As torch's own default_collate does in a worker: what is shared from the beginning is not copied for sending.
    memory = torch.empty(0, dtype=torch.uint8).set_(new_shared_storage(max(end, 1)))
    for place, value in tensors:
        place.of(memory).copy_(value)
    return memory, places


def _unpacked(
    memory: torch.Tensor,
    places: list[dict[str, Any]],
    max_tokens: int,
    indices: list[list[int]] | None,
    plan: PlanRecord | None,
) -> PreSplitBatch:
    """Returns the batch, whose tensors are windows on the memory that arrived."""
    microbatches = [
        {key: value.of(memory) if isinstance(value, _Place) else value for key, value in one.items()} for one in places
    ]
    batch = PreSplitBatch(microbatches, max_tokens=max_tokens, indices=indices)
    batch.plan = plan
    return batch
