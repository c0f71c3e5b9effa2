# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks in each step that all ranks have planned the same global batch.

Every rank plans the whole global batch by itself and computes its own part of it. That is exact only if all ranks make
the same plan. Otherwise some samples would be trained twice and others never, without any sign of it.

So each rank has a *record* of its plan: a checksum, the rank, and a *witness*, a digest of two samples that every rank
reads. The record also holds the learning rates of the step, because ranks with different ones would train different
weights. Three integers of it travel with the counts that are summed over the ranks in each step anyway. Their sums tell
all ranks whether the records agree. Only if they do not, the ranks exchange their records, and all of them raise the
same error about the difference. A normal step has no further collective. Arguments of the run are compared once, at its
first batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from composer_tokacc.collectives import (
    Gather,
    all_gather_object,
    are_equal_on_ranks,
    get_global_rank,
    get_world_size,
)
from composer_tokacc.refusals import NotExactError
from composer_tokacc.repeated_samples import has_torchs_order, sampler_of

Facts = dict[str, object]
"""Arguments of a plan by name. They are compared as text. An error reports the first one that differs between ranks."""

CHECKSUM_BITS = 20
"""Squares of checksums, below 2**40, are summed over the ranks. The sum is exact in float64 up to 2**53, so on up to
8,192 ranks."""

ALIGN_PLANS = (
    'Give all ranks the same arguments, list the samples in the same order (sort what a glob or a set returns), and '
    'call `set_epoch`, `skip_to` and `load_state_dict` on every rank. Otherwise some samples are trained twice and '
    'others never.'
)
"""What to do if ranks plan different global batches."""

MOST_SHOWN = 4
"""The largest number of ranks whose samplers an error shows."""

NOT_COMPARED = ('params', 'param_names', 'lr', 'initial_lr', 'foreach', 'fused', 'capturable')
"""Entries of a group of parameters that :func:`optimizer_settings_of` leaves out."""

RANDOM = 'random'
"""The witness of a rank if its dataset draws random numbers itself, so that every read differs."""

STREAMING_OPTIONS = (
    'batch_size',
    'replication',
    'epoch_size',
    'shuffle',
    'shuffle_algo',
    'shuffle_seed',
    'shuffle_block_size',
    'num_canonical_nodes',
    'partition_algo',
    'batching_method',
    'sampling_method',
    'sampling_granularity',
)
"""Arguments of a StreamingDataset that decide which rank reads which sample. It keeps each as an attribute."""


@dataclass(frozen=True)
class PlanRecord:
    """Summary of one rank's plan of a global batch."""

    plan_checksum: int = 0
    """Checksum of the arguments of the plan. With a RegroupingBatchSampler it also covers the samples of the global
    batch, and with a RegroupingDataLoader the microbatch and the rank of each sample."""
    rank: int = field(default_factory=get_global_rank)
    """The rank whose part of the plan this process computes."""
    num_ranks: int = field(default_factory=get_world_size)
    """Number of ranks that the batch was planned for."""
    witness: str = ''
    """Digest of two samples that every rank reads with its first batch, to see that the datasets are the same. Empty if
    the rank has not read them, or could not. RANDOM if it has read them repeatedly with different results."""
    facts: Facts = field(default_factory=dict)
    """The arguments of the plan."""
    learning_rates: tuple[str, ...] = ()
    """Learning rates of the step, see :func:`learning_rates_of`. Empty in a loop whose optimizer is not known."""

    @property
    def checksum(self) -> int:
        """Checksum of everything that must be equal on all ranks: the plan, the witness and the learning rates."""
        return extended_checksum(self.plan_checksum, f'{self.witness}{self.learning_rates}'.encode())


def plan_record_of(batch: Any, dataloader: Any, batch_index: int) -> PlanRecord | None:
    """Returns the record of the plan of a batch; None for loaders that have no plan.

    A batch of a :class:`.RegroupingDataLoader` has its own record, and a :class:`.RegroupingBatchSampler` makes one for
    a plain DataLoader. For all other loaders the plan is the arguments of a DistributedSampler or a StreamingDataset.

    Args:
        batch: This rank's batch.
        dataloader: The loader of the batch.
        batch_index: Counts the batches of the epoch from 0.
    """
    record = getattr(batch, 'plan', None)
    if isinstance(record, PlanRecord):  # a batch of Hugging Face gives its entries as attributes, also one named `plan`
        return record
    if not isinstance(dataloader, DataLoader):
        return None
    record_of_sampler = getattr(dataloader.batch_sampler, 'plan_record', None)
    if record_of_sampler is not None:
        return record_of_sampler(batch_index)
    facts = reading_facts(dataloader)
    if not facts:
        return None
    record = PlanRecord(checksum_of(facts), facts=facts)
    sampler, _ = sampler_of(dataloader)
    if has_torchs_order(sampler):
        return replace(record, rank=sampler.rank, num_ranks=sampler.num_replicas)
    return record


def learning_rates_of(optimizers: Iterable[Optimizer]) -> tuple[str, ...]:
    """Returns the learning rate of each group of parameters, as text, without the digits that are round-off.

    Ranks on machines of different kinds may differ in the last digits, because a cosine is not the same to the last
    bit. Near the end of a cosine schedule, where the rate is nearly 0, they may differ in all digits. So the rate is
    rounded to 1e-8 of the initial rate, or of itself if it is higher. Tensors on a GPU are left out, because the host
    would wait for them.
    """
    learning_rates = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            learning_rate = group.get('lr')
            is_on_device = isinstance(learning_rate, torch.Tensor) and learning_rate.device.type != 'cpu'
            if learning_rate is None or is_on_device:
                continue
            rate = float(learning_rate)
            # Only a scheduler writes the initial rate. A schedule may rise above it, or begin at 0.
            largest_rate = max(float(group.get('initial_lr', rate)), rate) or 1.0
            rounded_rate = round(rate / largest_rate, 8) * largest_rate + 0.0  # 0 instead of -0
            learning_rates.append(f'{rounded_rate:.8g}')
    return tuple(learning_rates)


def optimizer_settings_of(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Returns the class of each optimizer, and the settings of each of its groups of parameters, as text, by name.

    Settings are numbers, texts and sequences of them, such as ``weight_decay`` and ``betas``. Floats have 8 digits,
    because a scheduler may compute them, and machines of different kinds may round the last digits in another way.
    Learning rates are left out, because :func:`learning_rates_of` returns them. So are the choices of a kernel, which
    may depend on the machine of a rank.
    """
    settings = {}
    for number, optimizer in enumerate(optimizers):
        place = f'optimizers[{number}]'
        settings[place] = type(optimizer).__name__
        for group_number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                text = _text_of_setting(value)
                if text is not None and name not in NOT_COMPARED:
                    settings[f'{place}.param_groups[{group_number}].{name}'] = text
    return settings


def _text_of_setting(value: object) -> str | None:
    """Returns a setting of an optimizer as text. None: it is no number, no text and no sequence of them."""
    if isinstance(value, (tuple, list)):  # a loaded checkpoint may turn a tuple into a list
        texts = []
        for entry in value:
            text = _text_of_setting(entry)
            if text is None:
                return None
            texts.append(text)
        return f'({", ".join(texts)})'
    if isinstance(value, float):
        return f'{value:.8g}'
    if isinstance(value, bool | int | str):
        return str(value)
    return None


class PlanSums(NamedTuple):
    """Sums over ranks that show whether their records agree, see :func:`check_plans`.

    The first two compare the checksums. The third shows whether each rank has its own part of the plan.
    """

    checksums: float = 0
    squared_checksums: float = 0
    squared_ranks: float = 0

    @classmethod
    def of(cls, record: PlanRecord) -> PlanSums:
        """Returns what one rank adds to the sums. A rank without a plan takes part with an empty record."""
        return cls(record.checksum, record.checksum**2, record.rank**2)


def check_plans(sums: PlanSums, record: PlanRecord) -> None:
    """Raises RuntimeError on all ranks if their records do not agree.

    Exchanges the records only if the sums, or the number of ranks in the records, show that something is wrong. So this
    is a collective on all ranks, or on none.

    Args:
        sums: The sums over the ranks, equal on all ranks.
        record: The record of this rank.
    """
    world_size = get_world_size()
    # As integers, whose products are not rounded.
    are_equal = are_equal_on_ranks(int(sums.checksums), int(sums.squared_checksums), world_size)
    # A process may have the sampler of a wrong rank. Then one part of the plan is usually computed twice and another
    # never, which changes the sum of squares: of 3 ranks it must be 0 + 1 + 4, and not 0 + 1 + 1. If two processes have
    # swapped their samplers, the sum stays. That does no harm, because each part is computed once.
    has_all_ranks = sums.squared_ranks == sum(rank**2 for rank in range(world_size))
    # This is the only condition that is not a sum. If it holds on some ranks only, the checksums differ, because they
    # cover the number of ranks. So all ranks call compare_plans(), or none.
    is_for_all_ranks = record.num_ranks == world_size
    if not (are_equal and has_all_ranks and is_for_all_ranks):
        compare_plans(record)


def compare_plans(record: PlanRecord, gather: Gather = all_gather_object) -> None:
    """Raises RuntimeError about the difference between the ranks if there is one; a collective.

    Args:
        record: The record of this rank.
        gather: Returns the records of all ranks.
    """
    difference = find_difference(gather(record))
    if difference is not None:
        raise NotExactError(difference)


def check_equal_on_ranks(arguments: Facts) -> None:
    """Raises RuntimeError on all ranks if an argument is not the same on all of them; a collective.

    Args:
        arguments: The arguments of this rank. They are compared as text. A rank may lack some.
    """
    texts = {name: str(value) for name, value in arguments.items()}
    difference = _unequal_argument(all_gather_object(texts))
    if difference is not None:
        raise NotExactError(f'{difference} Give all ranks the same arguments (docs/errors.md#ranks).')


def checksum_of(facts: Facts) -> int:
    """Returns the checksum of the arguments of a plan."""
    texts = {name: str(value) for name, value in facts.items()}
    return extended_checksum(0, repr(texts).encode())


def extended_checksum(checksum: int, data: bytes) -> int:
    """Returns a checksum of ``data`` and of all earlier data, whose checksum is ``checksum``."""
    return zlib.crc32(data, checksum) % 2**CHECKSUM_BITS


def table_summary(values: np.ndarray) -> str:
    """Returns a text about a table, such as the length of each sample, ``(n,)``. It changes with the order, too."""
    digest = zlib.crc32(np.ascontiguousarray(values).tobytes())
    return f'{len(values)} numbers of sum {values.sum()} (in this order {digest:08x})'


def reading_facts(dataloader: DataLoader) -> Facts:
    """Returns the arguments of a DistributedSampler or a StreamingDataset that decide which rank reads which sample.

    Empty for other samplers and datasets.
    """
    sampler, _ = sampler_of(dataloader)
    dataset = dataloader.dataset
    facts: Facts = {}
    if has_torchs_order(sampler):
        facts['number of ranks'] = sampler.num_replicas
        facts['number of samples'] = len(sampler.dataset)  # pyright: ignore[reportArgumentType]
        for name in ('shuffle', 'drop_last', 'seed', 'epoch'):
            facts[name] = getattr(sampler, name)
    # Only a StreamingDataset has this attribute. The package `streaming` may not be installed.
    if hasattr(dataset, 'num_canonical_nodes'):
        for name in STREAMING_OPTIONS:
            facts[name] = getattr(dataset, name, None)
    return facts


def find_difference(records: Sequence[PlanRecord]) -> str | None:
    """Returns the error for the first difference between the records of all ranks; None if they agree."""
    # The arguments come first, because they explain most other differences. A rank with another loader may lack some.
    unequal_argument = _unequal_argument([record.facts for record in records])
    if unequal_argument is not None:
        return f'{unequal_argument} {ALIGN_PLANS}'
    return (
        _unequal_learning_rates(records)
        or _unequal_first_samples(records)
        or _wrong_ranks(records)
        or _unequal_plans(records)
    )


def _unequal_learning_rates(records: Sequence[PlanRecord]) -> str | None:
    """Returns the error for a learning rate that differs between ranks; None if all are equal."""
    rates_of_ranks = [record.learning_rates for record in records]
    for rates in zip_longest(*rates_of_ranks, fillvalue='none'):
        if len(set(rates)) > 1:
            rank = _first_unlike_rank_0(rates)
            return (
                f'Every learning rate must be the same on all ranks, got: {rates[0]} on rank 0, {rates[rank]} on rank '
                f'{rank}. Otherwise the weights of the ranks differ after the step. A schedule in epochs follows the '
                'length of the loader of its rank, so give all ranks loaders of one length '
                '(`train_subset_num_batches`), or `max_duration` and the schedule in batches.'
            )
    return None


def _unequal_first_samples(records: Sequence[PlanRecord]) -> str | None:
    """Returns the error for datasets that differ between ranks by their witnesses; None if no difference is known."""
    witnesses = [record.witness or 'unknown' for record in records]
    known_witnesses = set(witnesses) - {'unknown'}
    # If the dataset of one rank is random, the datasets of the others are, too, even if a repeated read returned the
    # same by chance. Then the witnesses say nothing.
    if RANDOM in known_witnesses or len(known_witnesses) < 2:
        return None
    return f'{_sentence_about("first samples", witnesses)} {ALIGN_PLANS}'


def _wrong_ranks(records: Sequence[PlanRecord]) -> str | None:
    """Returns the error unless there is a sampler for each rank, and all samplers are for all ranks."""
    num_ranks = len(records)
    planned = [f'rank {record.rank} of {record.num_ranks}' for record in records]
    launched = [f'rank {rank} of {num_ranks}' for rank in range(num_ranks)]
    if sorted(planned) == sorted(launched):
        return None
    first_ranks = ', '.join(planned[:MOST_SHOWN])
    return (
        f'The sampler of each rank must be for that rank, of {num_ranks}, got: {first_ranks}. Leave `rank` and '
        '`num_replicas` out, or give the rank and the number of ranks as launched.'
    )


def _unequal_plans(records: Sequence[PlanRecord]) -> str | None:
    """Returns the error for plans that differ although their arguments are equal; None if all are equal."""
    checksums = {record.plan_checksum for record in records}
    if len(checksums) == 1:
        return None
    return (
        'Ranks have made different plans of the same global batch. Give all ranks the same arguments and the same '
        'place in the epoch. If they have them, install the same versions of numpy and numba on every node.'
    )


def _unequal_argument(facts_of_ranks: Sequence[Mapping[str, object]]) -> str | None:
    """Returns a sentence about the first argument that differs between ranks; None if all are equal, as text."""
    names = dict.fromkeys(chain.from_iterable(facts_of_ranks))
    for name in names:
        values = [str(facts.get(name, 'none')) for facts in facts_of_ranks]
        if len(set(values)) > 1:
            return _sentence_about(name, values)
    return None


def _sentence_about(name: str, values: Sequence[str]) -> str:
    """Returns a sentence about an argument that differs between ranks. ``values`` has one text for each rank."""
    rank = _first_unlike_rank_0(values)
    return f'`{name}` must be the same on all ranks, got: {values[0]} on rank 0, {values[rank]} on rank {rank}.'


def _first_unlike_rank_0(values: Sequence[str]) -> int:
    """Returns the first rank whose value differs from that of rank 0. ``values`` has one text for each rank."""
    differs = [value != values[0] for value in values]
    return differs.index(True)
