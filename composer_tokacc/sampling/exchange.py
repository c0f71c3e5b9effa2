# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A DataLoader whose ranks exchange the samples of a global batch, so that each rank gets equal work.

A sample is sent only to the ranks that compute it and have not read it themselves. The loader has its own process group
with the backend gloo, because samples are in the memory of the CPU.

In each step the samples of all ranks have *numbers*: first the samples that rank 0 has read, then those of rank 1, and
so on. If rank 0 has read three samples and rank 1 two, the samples of rank 1 have the numbers 3 and 4.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict
from functools import cached_property
from itertools import chain, count
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.batch import IGNORE_INDEX
from composer_tokacc.collectives import get_global_rank, get_world_size
from composer_tokacc.compat import keep_from_accelerate, tree_map_only
from composer_tokacc.layout import PreSplitBatch
from composer_tokacc.plan_agreement import PlanRecord, compare_plans, reading_facts
from composer_tokacc.planning import CostModel, CutOptions, Rows
from composer_tokacc.planning.plan import plan_checked_rows
from composer_tokacc.refusals import InvalidInputError
from composer_tokacc.repeated_samples import check_order, num_repeated_by
from composer_tokacc.sampling.rank_assignment import ENDED_BY_AN_ERROR, RankAssignment, collate

Value = TypeVar('Value')
DatasetSample = Mapping[str, Any]
"""A sample as the dataset returns it, one row: tensors or lists."""


class SampleSize(NamedTuple):
    """Sizes of a sample. All ranks get those of all samples, and make the plan from them."""

    length: int
    """In tokens."""
    image_tokens: int
    patches: int
    loss_tokens: int


class ExchangingDataLoader(DataLoader):
    """Regroups samples across ranks after loading, for datasets that divide themselves among the ranks.

    In every step each rank reads the samples that a plain DataLoader would read. The ranks exchange the lengths of all
    samples, and each of them makes the same plan. Then each sample is sent to the rank that computes it. So a global
    batch holds the same samples as without this loader, each once. Only the grouping of samples into microbatches and
    ranks changes, which changes no gradient with token accumulation. Samples that torch's DistributedSampler repeats to
    fill up the ranks are thrown away. Ranks may get unequal numbers of samples. If there are fewer samples than ranks,
    a rank without a sample gets a copy that weighs nothing and does not count.

    Iterating is a collective. So either all ranks or none may look at a batch (``next(iter(loader))``).

    To resume a run, Composer saves and restores the state of the dataset, and tells it how many samples all ranks have
    read. It does not call :meth:`state_dict` of this loader, which is for other trainers. The number of ranks must stay
    the same.

    Args:
        dataset: Its samples are mappings with ``input_ids`` of shape ``(1, length)`` or ``(length,)``, as tensors or
            lists. On several ranks it is iterable and divides itself among them, as StreamingDataset does, or is used
            with a DistributedSampler.
        collate_fn: Returns a mapping, the batch of a list of samples. Called once a microbatch.
        max_tokens: Token budget of a microbatch, padding included: ``device_train_microbatch_size * slot_tokens``.
        image_token_ids: Ids of the image placeholders in ``input_ids``. Needed for `max_image_tokens`, for ``'fsdp'``,
            and if `cost` has a price of an image token. Without them no sample has image tokens in the plan.
        max_image_tokens, max_loss_tokens, objective, cost: As for :func:`.plan_microbatches`. For `max_loss_tokens`
            each sample needs ``labels``.
        patches: Function that returns how many patches of a sample the vision encoder computes, for the prices of
            patches in `cost`. Default: only image tokens have a price.
        width_multiple: The same value as for ``token_data_spec``, because it widens the planned microbatches.
        pin_memory: Whether to copy batches to page-locked memory, if there is a GPU. Done after the exchange, so
            torch's DataLoader does not see it.
        **kwargs: Further arguments of :class:`torch.utils.data.DataLoader`; ``batch_size`` counts samples of one rank.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: On iterating, on all ranks, if their arguments differ.
    """

    marks_added_rows = True
    """Tells ``repeated_samples.num_repeated`` that copies for ranks without a sample have weight 0 here."""
    waits_for_ranks = True
    """Tells TokenAccumulation that a rank can read a batch only if all ranks read one."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        collate_fn: Callable[[list[Any]], Any],
        max_tokens: int,
        image_token_ids: Sequence[int] = (),
        max_image_tokens: int | None = None,
        max_loss_tokens: int | None = None,
        objective: Literal['ddp', 'fsdp'] = 'ddp',
        cost: CostModel | None = None,
        patches: Callable[[Any], int] | None = None,
        width_multiple: int = 1,
        pin_memory: bool = False,
        **kwargs: Any,
    ) -> None:
        # Torch draws the seed of the workers from this generator, so the random numbers of the run do not change. Each
        # rank has another seed, so that its workers draw other numbers.
        generator = torch.Generator()
        generator.manual_seed(torch.initial_seed() + get_global_rank())
        kwargs.setdefault('generator', generator)
        # Samples are collated only after the exchange, so torch's `collate_fn` returns the list of samples. A worker
        # sends the list as one tensor of bytes, because torch opens a file for each tensor that is sent, and the number
        # of open files is limited. `_read` makes a list of it again.
        as_list_or_bytes: Callable[[list[Any]], Any] = list
        if kwargs.get('num_workers'):
            as_list_or_bytes = to_bytes
        super().__init__(dataset, collate_fn=as_list_or_bytes, **kwargs)
        if self.batch_size is None:
            raise InvalidInputError('`batch_size` must be what each rank reads in a step, got: None. Pass a number.')
        check_order(self)
        keep_from_accelerate(self)  # accelerate would divide the batches of a rank again
        self._collate = collate_fn
        self._pin = pin_memory and torch.cuda.is_available()
        self._image_token_ids = torch.tensor(list(image_token_ids))
        if max_image_tokens is not None and not len(self._image_token_ids):
            raise InvalidInputError(
                f'`image_token_ids` must be given with `max_image_tokens`, got: none, and {max_image_tokens}. Without '
                'them no image token is counted. Pass `image_token_ids(processor)` of `composer_tokacc.data`.'
            )
        self._options = CutOptions(
            max_tokens=max_tokens,
            max_image_tokens=max_image_tokens,
            max_loss_tokens=max_loss_tokens,
            width_multiple=width_multiple,
            objective=objective,
            cost=cost or CostModel(),
        )
        # In the default cost model patches have no price, so they are not counted.
        self._patches = None if cost is None else patches
        self._exchange = SampleExchange()
        self._num_samples = 0
        """Samples of all ranks in the batches that the newest iterator has yielded."""

    def __iter__(self) -> Iterator[PreSplitBatch]:
        """Yields this rank's part of each global batch, until no rank has samples left."""
        # A streamed dataset begins its next epoch with every iterator. So only the samples of the newest one count.
        self._num_samples = 0
        # There is no plan yet, so the ranks compare only their arguments.
        facts = {**reading_facts(self), **asdict(self._options), 'image_token_ids': self._image_token_ids.tolist()}
        compare_plans(PlanRecord(facts=facts), self._exchange.gather)
        reading = super().__iter__()
        rank = get_global_rank()
        # The ranks may run out of samples at different times. A rank without samples still takes part in each step, and
        # computes samples of others, until no rank has any.
        for batch_index in count():
            samples = self._read(reading, batch_index)
            sizes_of_ranks = self._exchange.gather([self._measure(sample) for sample in samples])
            sizes_of_all = list(chain.from_iterable(sizes_of_ranks))
            if not sizes_of_all:
                return
            assignments = self._assign(sizes_of_all)
            # The samples of this rank are numbered after those of all lower ranks.
            first_number = sum(len(sizes) for sizes in sizes_of_ranks[:rank])
            # Each rank's numbers, microbatch by microbatch.
            assigned_numbers = [list(assignment) for assignment in assignments]
            samples_to_compute = self._exchange.swap(samples, first_number, assigned_numbers)
            self._num_samples += len(sizes_of_all)
            batch = collate(self._collate, samples_to_compute, assignments[rank], self._options)
            # The numbers of the samples are not indices in the dataset, so no message may show them.
            batch.indices = None
            if self._pin:
                batch = batch.pin_memory()
            yield batch

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state of the dataset after the batches that were yielded; None if it has no ``state_dict``.

        The dataset's ``state_dict`` must take the same arguments as that of StreamingDataset.
        """
        dataset: Any = self.dataset
        if not hasattr(dataset, 'state_dict'):
            return None
        # Samples are counted from the place at which the iterator began, not from the beginning of the epoch.
        return dataset.state_dict(self._num_samples, from_beginning=False)

    def load_state_dict(
        self,
        state: dict[str, Any],
    ) -> None:
        """Lets the next iteration continue where :meth:`state_dict` was taken."""
        dataset: Any = self.dataset
        dataset.load_state_dict(state)

    def _assign(self, sizes: Sequence[SampleSize]) -> list[RankAssignment]:
        """Returns the assignment of each rank, by the numbers of the samples.

        It only depends on the sizes and the arguments, so every rank computes the same assignments.
        """
        image_tokens = np.array([size.image_tokens for size in sizes])
        patches = np.array([size.patches for size in sizes])
        rows = Rows(
            np.array([size.length for size in sizes]),
            self._options,
            image_tokens=image_tokens,
            loss_tokens=np.array([size.loss_tokens for size in sizes]),
            vision_cost=self._options.cost.vision(image_tokens, patches),
        )
        plan = plan_checked_rows(rows, get_world_size())
        numbers = np.arange(len(sizes))
        assignments = []
        for microbatches in plan.ranks:
            assignments.append(RankAssignment.from_plan(microbatches, numbers))
        return assignments

    def _read(
        self,
        reading: Iterator[list[DatasetSample] | torch.Tensor],
        batch_index: int,
    ) -> list[DatasetSample]:
        """Returns this rank's samples of a step, an empty list if the epoch has no further samples for it.

        Samples that torch's DistributedSampler repeats are left out.
        """
        loaded = next(reading, [])  # an empty list after the end
        # If the loader ends before its length, the dataset has raised StopIteration. The length is known only if the
        # sampler has one. Samplers of iterable datasets have none, and samplers of users may have none.
        if len(loaded) == 0 and isinstance(self.sampler, Sized) and batch_index < len(self):
            raise RuntimeError(ENDED_BY_AN_ERROR)
        if isinstance(loaded, torch.Tensor):  # from a worker
            loaded = from_bytes(loaded)
        assert self.batch_size is not None
        num_repeated = num_repeated_by(self.sampler, self.batch_size, batch_index)
        return loaded[: len(loaded) - num_repeated]

    def _measure(self, sample: DatasetSample) -> SampleSize:
        """Measures a sample. Sizes that no option needs are 0."""
        ids = torch.as_tensor(sample['input_ids'])
        is_image_token = torch.isin(ids, self._image_token_ids)
        num_image_tokens = int(is_image_token.sum())
        num_patches = 0
        if self._patches is not None:
            num_patches = self._patches(sample)
        num_labels = 0
        if self._options.max_loss_tokens is not None:
            has_label = torch.as_tensor(sample['labels']) != IGNORE_INDEX
            num_labels = int(has_label.sum())
        return SampleSize(ids.shape[-1], num_image_tokens, num_patches, num_labels)


class SampleExchange:
    """Exchanges values and samples between ranks. Every rank must make the same calls in the same order."""

    @cached_property
    def _gloo(self) -> Any:
        """The process group for tensors on the CPU, made on first use.

        Not the default group: if a thread reads ahead, a collective of the loader could be matched with one of the
        training on another rank.
        """
        return torch.distributed.new_group(backend='gloo')

    def gather(self, value: Value) -> list[Value]:
        """Returns the values of all ranks, in the order of the ranks. They are pickled, so they should be small."""
        values = [value] * get_world_size()
        if len(values) > 1:
            torch.distributed.all_gather_object(values, value, group=self._gloo)
        return values

    def swap(
        self,
        samples: Sequence[DatasetSample],
        first_number: int,
        assigned_numbers: Sequence[Sequence[int]],
    ) -> list[DatasetSample]:
        """Sends each sample to the ranks that compute it. Returns the samples of this rank, in the assigned order.

        Args:
            samples: The samples that this rank has read.
            first_number: Number of the first of these samples, see the module.
            assigned_numbers: For each rank the numbers of the samples that it computes. Several ranks may get a copy of
                the same sample.
        """
        read_here = dict(enumerate(samples, start=first_number))
        this_rank = get_global_rank()
        parcels = []  # one for each rank
        for receiver, numbers in enumerate(assigned_numbers):
            parcel = torch.empty(0, dtype=torch.uint8)
            # This rank has its own samples already, so it sends itself nothing.
            if receiver != this_rank:
                samples_to_send = {number: read_here[number] for number in numbers if number in read_here}
                if samples_to_send:
                    parcel = to_bytes(samples_to_send)
            parcels.append(parcel)
        sample_by_number = dict(read_here)
        for received in self._all_to_all(parcels):
            if len(received) > 0:
                sample_by_number.update(from_bytes(received))
        return [sample_by_number[number] for number in assigned_numbers[this_rank]]

    def _all_to_all(self, parcels: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Sends each rank its parcel, uint8 (number of bytes,). Returns the parcels from all ranks for this one.

        The lengths of the parcels are sent first, because a receiver must know how many bytes to expect.
        """
        if len(parcels) == 1:
            return parcels
        num_sent = torch.tensor([len(parcel) for parcel in parcels])
        num_received = torch.empty_like(num_sent)
        torch.distributed.all_to_all_single(num_received, num_sent, group=self._gloo)
        received = torch.empty(int(num_received.sum()), dtype=torch.uint8)
        all_sent = torch.cat(parcels)
        torch.distributed.all_to_all_single(
            received, all_sent, num_received.tolist(), num_sent.tolist(), group=self._gloo
        )
        return received.split(num_received.tolist())


def to_bytes(samples: object) -> torch.Tensor:
    """Returns samples as bytes, uint8 (number of bytes,)."""
    # Copies, because torch.save writes the whole storage of a tensor, even if the tensor is only a small view of it.
    samples = tree_map_only(torch.Tensor, torch.clone, samples)
    buffer = io.BytesIO()
    torch.save(samples, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def from_bytes(packed: torch.Tensor) -> Any:
    """Returns the samples in the bytes of :func:`to_bytes`."""
    # Not weights_only, because a sample may hold any object. This is safe, because a process of this run has sent it.
    buffer = io.BytesIO(packed.numpy().tobytes())
    return torch.load(buffer, weights_only=False)
