# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks run on the first batch: how the model averages its loss, and which cuts leave the loss of every row alone.

Everything this package does rests on one fact: the loss of a row's tokens does not depend on the rows beside it, nor on
how the row is padded, trimmed or packed. It is true of most models and false of some, and where it is false nothing
shows. So a few rows go through the run's own model twice, once as the loader padded them and once as the split would
cut them, and the losses of all their tokens must agree to round-off.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from composer.utils import dist
from torch.distributed.tensor import DTensor

from composer_tokacc.algorithm.probe import (
    NOISE_FACTOR,
    Answer,
    Probe,
    confirm_in_training,
    find_loss_rule,
    logit_factor,
    predicting,
    token_losses,
    tolerance,
    tolerance_besides,
)
from composer_tokacc.counting import (
    IGNORE_INDEX,
    LOSS_WEIGHTS,
    Batch,
    labels_of,
    loss_mask,
    num_rows,
    sample_name,
    with_own_tensors,
    without_carried,
)
from composer_tokacc.layout import BatchLayout, microbatches_of
from composer_tokacc.layout.families import UNITS
from composer_tokacc.layout.layout import own_labels, padding_side_of

if TYPE_CHECKING:
    from composer_tokacc.data_spec.split import MicrobatchSplit

__all__ = ['KINDS', 'CutRules', 'FirstBatchCheck', 'check_sharding', 'kinds_of', 'register_split', 'split_of']

log = logging.getLogger(__name__)

WIDTHS = tuple(2**power for power in range(4, 21))
KINDS = ('left', 'right', *UNITS, 'mixed', 'positions', *(f'left over {width}' for width in WIDTHS))
"""What rows of a batch can be like, as far as it matters to a cut: padded on the left or right, with media of a kind,
or some with media and some without; padded on the left with ``position_ids`` given, or wider than any before (Llama 4
and Ministral 3 scale attention by the column, but not in the first thousands of columns)."""
MORE_COLUMNS = 256
"""Padding before a row that shows whether columns matter: a scale that grows with them hardly moves with a few."""
MAX_ROWS = 6
"""Rows of a check at the most. Without gradients a row takes about half of the memory that it takes in training, so a
microbatch of k rows leaves room for 2 k; at least four are needed to show the ways in which rows differ."""

OTHER_POSITIONS_REMEDY = (
    'The loss holds a mean over other positions (prompts, padding) or over rows. Take it over the positions whose '
    'labels count, return the terms as a dict and name the unit of each in `loss_units`, or leave it out.'
)
GRADIENT_TOLERANCE = 0.1
"""Of the factor between two gradients. Round-off of bfloat16 makes the gradients differ by 5 % (large GPT-Neo)."""

ROUTER_REMEDY = (
    'Name what it is multiplied by in `router_aux_loss_coef` of its config, or set `output_router_logits=False` there, '
    'or return a dict of terms from `loss` and declare it: '
    "`loss_units={'lm': 'tokens', 'router': 'microbatches'}` with `token_data_spec(..., regroup=False)`."
)


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How rows may be cut so that their losses stay what they are in the device batch.

    Args:
        left: For rows padded on the left: ``'trim'``; ``'columns'``: trim, and write the columns that are left as
            ``position_ids``, for models that count positions from column 0; ``'keep'`` the padding.
        left_width: Width up to which ``left`` was shown to hold. Wider batches keep their padding until one was looked
            at as well.
        left_given: Whether it was shown for batches that bring ``position_ids``; of the others the same is true.
        right: For rows padded on the right: ``'trim'`` or ``'keep'``.
        companions: Whether a microbatch without media needs a zero-weight row with media beside it, where others of
            the step have media. (Mllama skips its cross-attention in a batch without images, but lets a text row
            beside a row with an image attend to padding.)
    """

    left: str = 'keep'
    left_width: int = sys.maxsize
    left_given: bool = False
    right: str = 'keep'
    companions: bool = False

    def way(self, side: str, batch: Batch) -> str:
        """What becomes of the padding of a batch of tokens that is on such a side."""
        if side == 'right':
            return self.right
        is_shown = has_positions(batch) == self.left_given and batch['input_ids'].shape[1] <= self.left_width
        return self.left if is_shown else 'keep'


_SPLITS: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register_split(dataloader: Any, split: Any) -> None:
    """Lets :func:`split_of` find the split of a loader; the split must hold on to its loader."""
    _SPLITS[id(dataloader)] = split


def split_of(dataloader: Any) -> MicrobatchSplit | None:
    """The split that ``token_data_spec`` made for a loader.

    The trainer shows an algorithm the loader, not the DataSpec, and nothing of ours may lie in a batch before
    BATCH_START: Composer's own algorithms clone every entry of it.
    """
    return _SPLITS.get(id(dataloader))


def check_sharding(model: torch.nn.Module) -> None:
    """Raises RuntimeError if FSDP2 leaves out parameters: nobody reduces them, and every rank trains its own copy."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)]
    if 0 < len(whole) < len(trained):
        raise RuntimeError(
            f'FSDP must shard every trained parameter, got: {len(whole)} whole ones, such as {whole[:3]}, which no '
            'rank shares. Let Composer wrap the model itself (no `_fsdp_wrap = False` on it), or freeze them.'
        )


def kinds_of(layout: BatchLayout | None, batch: Batch) -> tuple[int, ...]:
    """Which of :data:`KINDS` the batch has, as ones and zeros."""
    of_each = [_names_of_kinds(layout, one) for one in microbatches_of(batch)]
    found = set().union(*of_each)
    has_media = [not names.isdisjoint(UNITS) for names in of_each]
    if any(has_media) and not all(has_media):
        found.add('mixed')
    return tuple(int(kind in found) for kind in KINDS)


def _names_of_kinds(layout: BatchLayout | None, batch: Batch) -> set[str]:
    if layout is None or batch.get('input_ids') is None:
        return set()
    real = layout.real_positions(batch)
    side = '' if bool(real.all()) else padding_side_of(real)
    media = {unit: layout.units_per_row(batch, unit) for unit in layout.media_of(batch)}
    has_media = [any(counts) for counts in zip(*media.values(), strict=True)]
    found = {side, *(unit for unit, counts in media.items() if any(counts))}
    if any(has_media) and not all(has_media):
        found.add('mixed')
    if side == 'left':
        found ^= {'left', 'positions'} if has_positions(batch) else set()
        found |= {f'left over {width}' for width in WIDTHS if layout.width(batch) > width}
    return found


def has_positions(batch: Batch) -> bool:
    """Whether the batch says which positions its tokens have."""
    return batch.get('position_ids') is not None


class FirstBatchCheck:
    """Asks the model about the rows of a batch, on all ranks alike.

    Args:
        probe: The model.
        layout: How tensors belong to rows; None: rows cannot be told apart, so only the rule is found.
        to_device: Moves a batch to the model's device.
        loss_tokens: ``'auto'``, or the rule that must be confirmed.
        check_loss: Whether to hold the rule, and the formula, to the model's own loss.
        microbatch_size: Rows of a microbatch, by which the memory of the check is kept.
        is_weighted: Whether tokens may weigh unlike: then the rows are asked with weights, another for every token.
    """

    def __init__(
        self,
        probe: Probe,
        layout: BatchLayout | None,
        to_device: Callable[[Any], Any],
        *,
        loss_tokens: str,
        check_loss: bool,
        microbatch_size: float,
        is_weighted: bool = False,
    ) -> None:
        self._is_weighted = is_weighted
        self._max_rows = min(max(int(2 * microbatch_size), 4), MAX_ROWS)
        self._microbatch_size = microbatch_size
        self._probe = probe
        self.layout = layout
        self._to_device = to_device
        self._loss_tokens = loss_tokens
        self._check_loss = check_loss
        self.rule: str | None = None if check_loss else loss_tokens
        self._proven = [False] * len(KINDS)
        self.was_run = False
        self.is_plain = check_loss
        """Whether the model's own loss is the mean of its tokens' cross-entropies: not so with label smoothing, say."""
        self.vocabulary: int | None = None
        """Ids that a label may have, by the model's logits."""

    def is_new(self, kinds: Sequence[int]) -> bool:
        """Whether any of the kinds was not looked at yet."""
        return any(kind and not seen for kind, seen in zip(kinds, self._proven, strict=True))

    def prove(
        self, batch: Batch, split: MicrobatchSplit | None, kinds: Sequence[int], of_ranks: Sequence[Sequence[int]]
    ) -> None:
        """Looks at rows of every kind that was not looked at yet, and gives the split its rules; a collective.

        Args:
            batch: This rank's device batch, on the CPU.
            split: The split whose cuts are tried; None: whole rows alone.
            kinds: Which of :data:`KINDS` this rank's batch has.
            of_ranks: Those of the ranks' batches, so that all ranks agree on what is new.

        Raises:
            RuntimeError: See :meth:`run`.
        """
        if split is not None and not split.checked:
            split.rules = CutRules()
            if self.layout is not None:
                split.choose_packing(self.layout, batch, self._microbatch_size)
        present = [any(of_kind) for of_kind in zip(*of_ranks, strict=True)]
        # The first check looks at the rows of a batch without any kind as well.
        while self.is_new(present) or not self.was_run:
            new = [bool(kind and not seen) for kind, seen in zip(present, self._proven, strict=True)]
            wanted = [int(kind and is_new) for kind, is_new in zip(kinds, new, strict=True)]
            packed = split is not None and split.packing
            try:
                rules, shown = self.run(batch, split, wanted)
            except IndexError as error:  # as torch says on a CPU; a GPU stops the process
                raise RuntimeError(
                    f'The model must take the batch, got: {_without_stop(error)}, for {_ids_of(batch)}. Labels must be '
                    "-100 or ids of the model's vocabulary, and its embedding must hold every token. Take the "
                    'tokenizer that belongs to the model.'
                ) from error
            if split is not None:
                split.rules, split.checked = rules, True
                if split.packing != packed:  # what was proven of packed rows says nothing of padded ones
                    self._proven = [False] * len(KINDS)
            self._proven = [bool(old or kind) for old, kind in zip(self._proven, shown, strict=True)]
            if not any(kind and is_new for kind, is_new in zip(shown, new, strict=True)):
                # A kind that no chosen row shows, such as media that the layout cannot tell apart.
                self._proven = [bool(old or kind) for old, kind in zip(self._proven, present, strict=True)]

    def run(
        self, batch: Batch, split: MicrobatchSplit | None, kinds: Sequence[int]
    ) -> tuple[CutRules, tuple[int, ...]]:
        """Finds the rule, if it is not known yet, and the rules of the cut for rows like those of ``batch``.

        Every rank must call it. All probe the rows of one rank, because FSDP hangs if only some ranks' rows have
        images: of the rank with the most of the wanted kinds.

        Args:
            batch: This rank's device batch, on the CPU.
            split: The split whose cuts are tried; None: whole rows alone.
            kinds: Which of :data:`KINDS` this rank's batch has that were not looked at before.

        Returns:
            The rules, and which kinds the probed rows were of.

        Raises:
            RuntimeError: On all ranks, if no cut leaves the losses of the rows alone.
        """
        started = time.perf_counter()
        rows = self._shared_rows(batch, kinds)
        if self.layout is None:
            self.rule = self.rule or find_loss_rule(self._probe, self._on_device(rows), loss_tokens=self._loss_tokens)
            self.was_run = True
            log.warning(
                'Rows of the batch could not be told apart, so it was not checked that they are independent of each '
                'other. Use token_data_spec(), with a `layout` that knows every entry.'
            )
            return CutRules(), kinds_of(None, batch)
        if self.rule is None:
            telling = self.layout.select(rows, [_telling_row(rows, self.layout.media_per_row(rows))])
            telling = self._on_device(telling)
            self.rule = find_loss_rule(self._probe, telling, loss_tokens=self._loss_tokens)
            confirm_in_training(self._probe, telling, self.rule)
        rows = _with_unequal_row(self.layout, rows, self.rule)
        if self._is_weighted:
            rows[LOSS_WEIGHTS] = _unlike_weights(rows)
            self._probe.weighing_rule = self.rule
        with self._probe.varied():
            probed = _Rows(self._probe, self.layout, self._on_device, self.rule, rows, self._check_loss)
            found = probed.cut_rules(split)
            self.is_plain = self.is_plain and probed.is_plain()
            self.vocabulary = probed.vocabulary
        self.was_run = True
        log.info('The first-batch check took %.2f s. %s', time.perf_counter() - started, found)
        shown = kinds_of(self.layout, rows)
        if not probed.has_shown_trimming:
            shown = tuple(
                int(seen and kind not in ('left', 'positions', 'right'))
                for kind, seen in zip(KINDS, shown, strict=True)
            )
        return found, shown

    def _on_device(self, batch: Batch) -> Any:
        return self._to_device(with_own_tensors(without_carried(batch)))

    def _shared_rows(self, batch: Batch, kinds: Sequence[int]) -> dict[str, Any]:
        """The rows that all ranks probe with."""
        offers = dist.all_gather_object((sum(kinds), num_rows(batch)))
        owner = max(range(len(offers)), key=lambda rank: (offers[rank], -rank))
        shared: list[Any] = [None]
        if dist.get_global_rank() == owner:
            shared = [dict(batch)]
            if self.layout is not None:
                shared = [_chosen_rows(self.layout, batch, kinds, self._max_rows)]
        dist.broadcast_object_list(shared, src=owner)
        return shared[0]


def _num_columns(batch: Batch) -> int:
    """Padded width of the rows, by the labels."""
    return labels_of(batch).shape[1]


def _chosen_rows(layout: BatchLayout, batch: Batch, wanted: Sequence[int], max_rows: int) -> dict[str, Any]:
    """A few unlike rows, as the loader padded them: first those that show the wanted kinds; each with a label.

    Args:
        layout: How tensors belong to rows.
        batch: The device batch.
        wanted: Which of :data:`KINDS` must be shown.
        max_rows: Rows at the most.
    """
    lengths, media = layout.lengths(batch), layout.media_per_row(batch)
    labels = labels_of(batch)
    indices = range(len(lengths))
    # Rows with labels before those that need made-up ones.
    labelled = (labels[:, 1:] != IGNORE_INDEX).any(dim=1).tolist()

    def best(key: Callable[[int], Any]) -> int:
        return min(indices, key=lambda row: (not labelled[row], key(row), lengths[row]))

    units = [unit for unit, is_wanted in zip(KINDS, wanted, strict=True) if is_wanted and unit in UNITS]
    counts = {unit: layout.units_per_row(batch, unit) for unit in units}
    first = layout.real_positions(batch).int().argmax(dim=1).tolist()
    # A label on the first token behind padding is the hardest to keep.
    hardest = [
        row for row in indices
        if 0 < first[row] < labels.shape[1] and int(labels[row, first[row]]) != IGNORE_INDEX
    ]  # fmt: skip
    roles = [
        best(lambda row: -lengths[row]),
        best(lambda row: lengths[row]),
        *(best(lambda row, unit=unit: not counts[unit][row]) for unit in units),
        *([best(lambda row: media[row] > 0)] if any(media) else []),
        *hardest[:1],
        best(lambda row: -media[row]),
        *sorted(indices, key=lambda row: (not labelled[row], lengths[row])),
    ]
    rows = list(dict.fromkeys(roles))[: max(max_rows, 2 + len(units))]
    return _with_labels(layout, layout.select(without_carried(batch), rows))


def _without_stop(error: Exception) -> str:
    """What an error says, for the middle of a sentence."""
    return str(error).rstrip('.')


def _ids_of(batch: Batch) -> str:
    """The ids of a batch, for a message."""
    ends = []
    for key in ('labels', 'input_ids'):
        ids = [one[key][one[key] != IGNORE_INDEX] for one in microbatches_of(batch) if one.get(key) is not None]
        joined = torch.cat(ids) if ids else torch.empty(0)
        ends += [f'`{key}` of {int(joined.min())} to {int(joined.max())}'] if joined.numel() else []
    return ' and '.join(ends)


def _with_labels(layout: BatchLayout, batch: dict[str, Any]) -> dict[str, Any]:
    """Rows without a label get one on their last real position, where labels are as wide as the tokens."""
    labels, ids = batch['labels'], batch.get('input_ids')
    if ids is None or ids.shape != labels.shape:
        return batch
    labels = labels.clone()
    real = layout.real_positions(batch)
    for row in range(len(labels)):
        places = real[row].nonzero().flatten().tolist()
        if not bool((labels[row, 1:] != IGNORE_INDEX).any()) and places and places[-1] > 0:
            labels[row, places[-1]] = ids[row, places[-1]]
    return {**batch, 'labels': labels}


def _covered(width: int) -> int:
    """The widest batch that is of the kinds of one so wide."""
    return next((limit for limit in WIDTHS if width <= limit), sys.maxsize)


def _documents_of(packed: Batch) -> torch.Tensor:
    """Which document each position of a packed row belongs to, ``(1, width)``."""
    mask = packed.get('attention_mask')
    if mask is not None:
        return mask.int().argmax(dim=0)[None]
    positions = packed['position_ids']  # of text come first
    return (positions.flatten(0, -2)[:1] == 0).cumsum(dim=1) - 1


def _with_unequal_row(layout: BatchLayout, rows: dict[str, Any], rule: str) -> dict[str, Any]:
    """Rows of nearly as many labels get one of fewer or more beside them.

    Among rows of equally many tokens a mean of the rows' means is a mean over tokens, and the formula proves nothing.
    """
    counts = loss_mask(rows, rule).sum(dim=1).tolist()
    if max(counts) >= 2 * min(counts) and max(counts) > min(counts):
        return rows
    lengths = layout.lengths(rows)
    copied = layout.select(rows, [*range(len(counts)), min(range(len(counts)), key=lambda row: lengths[row] < 4)])
    labels = copied['labels'] = copied['labels'].clone()
    counted = loss_mask(copied, rule)[-1].nonzero().flatten().tolist()
    if len(counted) > 1:
        labels[-1, counted[:-1]] = IGNORE_INDEX
    elif counted and (ids := copied.get('input_ids')) is not None and ids.shape == labels.shape:
        # Behind its first token, as a label there may be predicted from padding; ids of placeholders are no labels.
        places = layout.real_positions(copied)[-1].nonzero().flatten().tolist()[1:]
        labels[-1, places] = int(labels[-1, counted[0]])
    return copied


def _unlike_weights(rows: Batch) -> torch.Tensor:
    """Weights by which every token, and every row, can be told from the others; float32 ``(rows, width)``."""
    generator = torch.Generator().manual_seed(0)
    shape = labels_of(rows).shape
    return (0.5 + torch.rand(shape, generator=generator)) * (1 + torch.rand(shape[0], 1, generator=generator))


def _telling_row(rows: Batch, media: Sequence[int]) -> int:
    """A row with enough labels to tell the rules apart; with media if it can be, as some models take no other."""
    counts = (labels_of(rows)[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
    return min(range(len(counts)), key=lambda row: (counts[row] < 2, counts[row] < 4, not media[row]))


class _Rows:
    """The probe rows together, as the loader padded them, and every cut of them that is held against that."""

    def __init__(
        self,
        probe: Probe,
        layout: BatchLayout,
        on_device: Callable[[Batch], Any],
        rule: str,
        rows: dict[str, Any],
        check_loss: bool,
    ) -> None:
        self._probe, self._layout, self._on_device, self._rule = probe, layout, on_device, rule
        self._rows = rows
        self._check_loss = check_loss
        self.has_shown_trimming = True
        self._count = num_rows(rows)
        counted = loss_mask(rows, rule).sum(dim=1).tolist()
        self._counted = counted
        moved = on_device(rows)
        found = loss_mask(moved, rule).sum(dim=1).tolist()
        if found != counted:
            raise RuntimeError(
                f'`microbatch_transforms` must leave labels alone, got: {sum(found)} loss-generating tokens where '
                f'{sum(counted)} were counted. Change labels in `batch_transforms`, which runs before the count.'
            )
        together = probe.ask(moved)
        self._together = together
        self._noise = probe.noise(moved, rule, together)
        self._weights: torch.Tensor | None = rows[LOSS_WEIGHTS] if together.weighted is not None else None
        self._weight_of_rows = counted
        self._router = together.has_router_loss
        if self._weights is not None and together.weighted is not None:
            self._weight_of_rows = (self._weights * loss_mask(rows, rule)).sum(dim=1).tolist()
            if not self._agree(together.weighted, together.own):
                raise RuntimeError(
                    f"The model's own loss must be the weighted mean of its tokens' losses, got: {together.own:.6f} "
                    f'where they give {together.weighted:.6f}. It adds a term, or divides by something else than its '
                    'loss-generating tokens. Leave the term out, name terms in `loss_units`, or set '
                    "`token_weights='token'`."
                )
        self._expected = self._row_losses(moved, together, range(self._count))

    def cut_rules(self, split: MicrobatchSplit | None) -> CutRules:
        """The first rules, cheapest first, under which every row keeps its losses."""
        self._refuse_router_loss()
        if split is not None and split.packing:
            try:
                self._prove_packed(split)
            except RuntimeError as error:
                split.attend_as_before()
                if split.must_pack:
                    raise
                log.info('Rows are padded: %s', error)
                split.packing = False
            else:
                if self._check_loss and sum(self._counted):
                    self._check_unlike_rows(None, split.rules)  # padded, as a packed row is one row
                return split.rules
        failure = None
        for rules in self._candidates(split):
            failure = self._failure(lambda row, rules=rules: self._cut(split, [row], rules))
            if failure is None and (rules.left, self._side) == ('trim', 'left'):
                failure = self._failure_behind_padding()
            if failure is None:
                self._check_mean(split, rules)
                return self._as_shown(split, rules)
        raise RuntimeError(self._explained(failure or ''))

    def _as_shown(self, split: MicrobatchSplit | None, rules: CutRules) -> CutRules:
        """The rules, but for a trimming that no row has shown: a label behind padding keeps a row as wide as it is."""
        self.has_shown_trimming = self._narrowest < _num_columns(self._rows)
        if split is None or self.has_shown_trimming:
            return rules
        kept = [name for name in vars(rules) if name.startswith(self._side)]
        return replace(rules, **{name: getattr(split.rules, name) for name in kept})

    @property
    def vocabulary(self) -> int | None:
        """Width of the model's logits, if it gives any."""
        return None if self._together.logits is None else self._together.logits.shape[-1]

    def is_plain(self) -> bool:
        """Whether the model's own loss of all rows is the mean of their tokens' cross-entropies."""
        if self._together.logits is None or not sum(self._counted):
            return False
        losses = torch.cat(self._expected)
        weights = torch.ones_like(losses) if self._weights is None else self._weights[loss_mask(self._rows, self._rule)]
        mean = float((losses * weights).sum() / weights.sum())
        return self._agree(self._together.own, mean)

    def _refuse_router_loss(self) -> None:
        """A statistic of the microbatch, however small its weight: below every tolerance it is still not exact."""
        if not (self._check_loss and self._together.has_router_loss) or self.is_plain():
            return
        raise RuntimeError(
            "The model's own loss must be the mean over its loss-generating tokens, got: one that holds the "
            f'load-balancing loss of its router as well, a statistic of the microbatch. {ROUTER_REMEDY}'
        )

    def _candidates(self, split: MicrobatchSplit | None) -> Iterator[CutRules]:
        if split is None:
            yield CutRules()
            return
        side = self._side
        companions = [False] if all(self._media()) or not any(self._media()) else [False, True]
        known = replace(split.rules, companions=split.rules.companions or bool(self._layout.family.coupling))
        ways: tuple[str, ...] = ('trim', 'columns', 'keep') if side == 'left' else ('trim', 'keep')
        if bool(self._layout.real_positions(self._rows).all()):
            ways = (getattr(known, side),)  # nothing to trim, so nothing is learnt of trimming
        elif side == 'left':
            known = replace(
                known, left_width=_covered(self._layout.width(self._rows)), left_given=has_positions(self._rows)
            )
        for way in ways:
            for companion in companions:
                yield replace(known, **{side: way, 'companions': companion or known.companions})

    @property
    def _side(self) -> str:
        return self._layout.padding_side(self._rows)

    def _media(self) -> list[int]:
        return self._layout.media_per_row(self._rows)

    def _cut(self, split: MicrobatchSplit | None, rows: Sequence[int], rules: CutRules) -> dict[str, Any]:
        if split is None:
            return self._layout.select(self._rows, rows)
        return split.assemble(self._layout, self._rows, rows, rules)

    def _failure(self, cut: Callable[[int], dict[str, Any]]) -> str | None:
        """How the first row fails whose losses another cut changes; None: none does."""
        self._owns: list[float] = []
        self._by_sample: list[float | None] = []
        self._narrowest = _num_columns(self._rows)
        for row in range(self._count):
            part, name = cut(row), sample_name(self._rows, row)
            self._narrowest = min(self._narrowest, _num_columns(part))
            microbatch = self._on_device(part)
            try:
                answer = self._probe.ask(microbatch)
            except (AttributeError, IndexError, TypeError, ValueError) as error:  # BLIP-2 takes no batch without images
                return f'{name}: {type(error).__name__} by itself, and none beside others ({error})'
            found = self._row_losses(microbatch, answer, [0])[0]
            failure = self._difference(name, 'by itself', self._expected[row], found)
            if failure is not None:
                return failure
            self._owns.append(answer.own)
            self._by_sample.append(answer.by_sample)
        return None

    def _failure_behind_padding(self) -> str | None:
        """How a row fails behind more padding than the loader gave it; None: it does not, or it cannot be told."""
        columns = min(MORE_COLUMNS, (self._layout.num_positions or 0) - self._layout.width(self._rows))
        mask, labels = self._rows.get('attention_mask'), own_labels(self._rows)
        if columns <= 0 or mask is None or mask.dim() != 2:
            return None
        rows = list(range(self._count))
        if labels is not None:  # a label on a row's first token is predicted from padding
            first = self._layout.real_positions(self._rows).int().argmax(dim=1, keepdim=True)
            rows = [row for row in rows if int(labels[row, first[row]]) == IGNORE_INDEX]
        if not rows:
            return None
        row = max(rows, key=self._counted.__getitem__)
        padded = self._on_device(self._layout.pad_left(self._layout.select(self._rows, [row]), columns))
        found = self._row_losses(padded, self._probe.ask(padded), [0])[0]
        return self._difference(sample_name(self._rows, row), 'behind more padding', self._expected[row], found)

    def _row_losses(self, batch: Batch, answer: Answer, rows: Sequence[int]) -> list[torch.Tensor]:
        """Losses of the tokens of each row; without logits, the one loss of the row that the model gives."""
        if answer.logits is not None:
            losses = token_losses(answer.logits, batch, self._rule)
            counts = loss_mask(batch, self._rule).sum(dim=1).tolist()
            split = list(losses.split(counts))
            return [split[row] for row in rows]
        labels = labels_of(batch)
        found = []
        for row in rows:
            only = torch.full_like(labels, IGNORE_INDEX)
            only[row] = labels[row]
            found.append(torch.tensor([self._probe.ask({**batch, 'labels': only}).own]))
        return found

    def _difference(self, what: str, how: str, expected: torch.Tensor, found: torch.Tensor) -> str | None:
        if len(found) != len(expected):
            return f'{what}: {len(found)} loss-generating tokens instead of {len(expected)}'
        if len(expected) == 0:
            return None
        differences = (found - expected).abs().nan_to_num(nan=torch.inf)
        worst = int(differences.argmax())
        allowed = tolerance(float(expected[worst].abs()), self._noise)
        if float(differences[worst]) <= allowed:
            return None
        return (
            f'{what}: a token whose loss is {float(found[worst]):.6f} {how} and {float(expected[worst]):.6f} as '
            f'the loader padded it, beside {self._count - 1} others (round-off is {allowed:.1e})'
        )

    def _check_mean(self, split: MicrobatchSplit | None, rules: CutRules) -> None:
        """The formula itself: the loss of all rows is the mean of the rows' losses, weighted by their tokens."""
        if not self._check_loss or sum(self._counted) == 0:
            return
        self._compare_mean(self._together.own, self._owns, self._weight_of_rows)
        by_sample, of_rows = self._together.by_sample, [term for term in self._by_sample if term is not None]
        mean = sum(of_rows) / self._count
        # A term that is absent for one row alone says nothing of the others.
        is_told = len(of_rows) == self._count
        if by_sample is not None and is_told and not self._agree(by_sample, mean):
            raise RuntimeError(
                f"The terms that `loss_units` calls 'samples' must be means over samples, got: {by_sample:.6f} for "
                f'{self._count} rows together, and {mean:.6f} as the mean of the rows one by one. Give their own unit.'
            )
        self._check_unlike_rows(split, rules)

    def _check_unlike_rows(self, split: MicrobatchSplit | None, rules: CutRules) -> None:
        """The same in training mode, of rows made unlike: the row of most tokens, and all others together.

        Rows and tokens then weigh unlike, and no term is so much the same in all rows that its weight does not show:
        fresh weights give each position nearly the same entropy.
        """
        probe, everything = self._probe, list(range(self._count))
        rows = self._on_device(self._rows)
        is_random = probe.is_random_in_training(rows)
        if is_random:
            log.info('The loss is random in training even without dropout, so it was looked at in evaluation only.')
        first = max(everything, key=self._counted.__getitem__)
        groups = [group for group in ([first], [row for row in everything if row != first]) if group]

        def ask(group: list[int], batch: Batch) -> tuple[Answer, float | None]:
            with probe.unlike_rows(batch, self._together, [row != first for row in group]):
                answer = probe.ask(batch)
            return answer, probe.besides(batch, self._rule, answer)

        with contextlib.nullcontext() if is_random else probe.in_training():
            together, besides = ask(everything, rows)
            with probe.rounded_otherwise():
                moved, besides_moved = ask(everything, rows)
            parts = [ask(group, self._on_device(self._cut(split, group, rules))) for group in groups]
        counts = [sum(self._weight_of_rows[row] for row in group) for group in groups]
        noise = max(self._noise * max(logit_factor(self._together), 1), abs(moved.own - together.own))
        self._compare_mean(
            together.own,
            [part.own for part, _ in parts],
            counts,
            noise=noise,
            how=' in training mode' * (not is_random),
        )
        self._compare_samples(together, moved, [part for part, _ in parts], list(map(len, groups)))
        if besides is not None and besides_moved is not None:
            found = [one or 0.0 for _, one in parts]
            self._compare_besides(together, besides, found, counts, noise=abs(besides_moved - besides))
        with probe.in_training(), probe.with_gradients(self._together):
            self._check_gradients(split, rules, is_random=is_random)

    def _compare_besides(
        self, together: Answer, besides: float, found: Sequence[float], counts: Sequence[float], *, noise: float
    ) -> None:
        mean = sum(one * count for one, count in zip(found, counts, strict=True)) / sum(counts)
        if abs(mean - besides) <= tolerance_besides(together.own, noise, together.eps):
            return
        raise RuntimeError(
            "The model's own loss must be the mean over its loss-generating tokens, got: a term besides their "
            f'cross-entropy that is {besides:.8f} for {self._count} rows together, and {mean:.8f} as the mean of '
            f'its parts. {OTHER_POSITIONS_REMEDY}'
        )

    def _compare_samples(self, together: Answer, moved: Answer, parts: Sequence[Answer], counts: Sequence[int]) -> None:
        """The terms that are said to be means over samples; one that is absent somewhere says nothing."""
        found = [part.by_sample for part in parts if part.by_sample is not None]
        if together.by_sample is None or moved.by_sample is None or len(found) < len(parts):
            return
        mean = sum(one * count for one, count in zip(found, counts, strict=True)) / sum(counts)
        noise = abs(moved.by_sample - together.by_sample)
        if abs(mean - together.by_sample) > tolerance_besides(together.by_sample, noise, together.eps):
            raise RuntimeError(
                "The terms that `loss_units` calls 'samples' must be means over samples, got: "
                f'{together.by_sample:.8f} for {self._count} rows together, and {mean:.8f} as the mean of their parts. '
                'A mean over columns changes with the padding: take it over the tokens of each row, or give its unit.'
            )

    def _check_gradients(self, split: MicrobatchSplit | None, rules: CutRules, *, is_random: bool) -> None:
        """The gradient by the logits, of two rows: none but where a label counts, and there what the formula says.

        A loss may be a mean over tokens whose gradient is none: terms whose value is taken out again by ``detach()``,
        custom backwards.
        """
        order = sorted(range(self._count), key=self._counted.__getitem__)
        pair = [next(row for row in order if self._counted[row]), order[-1]]

        def ask(rows: list[int], batch: Batch) -> tuple[torch.Tensor, float] | None:
            """The gradient at the tokens times their number, and the size of what lies elsewhere."""
            gradient = self._probe.ask(batch).gradient
            if gradient is None:
                return None
            counted = predicting(batch, self._rule).to(gradient.device)
            number = sum(self._weight_of_rows[row] for row in rows)
            at_tokens = gradient[counted].float() * number
            elsewhere = gradient.masked_fill_(counted[..., None], 0).float().norm().item() * number
            return at_tokens, elsewhere

        together = ask(pair, self._on_device(self._layout.select(self._rows, pair)))
        if together is None:
            return
        size = together[0].norm().item()
        share = together[1] / max(size, torch.finfo(torch.float32).tiny)
        if share > NOISE_FACTOR * torch.finfo(torch.float32).eps:  # 0 in every model without such a term
            raise RuntimeError(
                "The gradient of the model's own loss by its logits must be 0 where no label counts, got: "
                f'{share:.1e} of what it is where one does. {OTHER_POSITIONS_REMEDY}'
            )
        if is_random:  # dropout leaves a zero a zero, but no two gradients alike
            return
        alone = [ask([row], self._on_device(self._cut(split, [row], rules))) for row in pair]
        if any(one is None for one in alone):
            return
        expected = torch.cat([one[0] for one in alone if one is not None])
        # By how much it is longer or shorter, as round-off of the layers, which it shows as well, turns it a little.
        factor = float((together[0] * expected).sum() / together[0].square().sum().clamp(min=1e-30)) if size else 1.0
        if abs(factor - 1) > GRADIENT_TOLERANCE:
            raise RuntimeError(
                "The gradient of the model's own loss by its logits must be the mean of its tokens' gradients, as the "
                f'loss is of their losses, got: that of two rows one by one is {factor:.3f} times that of both. '
                'A custom backward or `detach()` makes another gradient than that of the loss; scale it by tokens, not '
                'by rows or columns.'
            )

    def _agree(self, found: float, expected: float, noise: float | None = None) -> bool:
        """Whether two losses are the same but for round-off; NaN agrees with nothing."""
        noise = self._noise if noise is None else noise
        allowed = max(tolerance(expected, noise), tolerance_besides(expected, noise, self._together.eps))
        return abs(found - expected) <= allowed

    def _compare_mean(
        self,
        own: float,
        owns: Sequence[float],
        counts: Sequence[float],
        *,
        noise: float | None = None,
        how: str = '',
    ) -> None:
        weighted = [loss * n for loss, n in zip(owns, counts, strict=True) if n]
        mean = sum(weighted) / sum(counts)
        if self._agree(mean, own, noise):
            return
        hint = (
            f'The model adds the load-balancing loss of its router, a statistic of the microbatch. {ROUTER_REMEDY}'
            if self._router
            else 'It holds a term that depends on which rows share a microbatch. Return the terms as a dict and name '
            "the unit of each in `loss_units` ('samples', 'coupled_samples' or 'microbatches'), or leave the term out."
        )
        raise RuntimeError(
            f"The model's own loss must be the mean over its loss-generating tokens, got: {own:.6f} for {self._count} "
            f'rows together{how}, and {mean:.6f} as the mean of the rows one by one. {hint}'
        )

    def _prove_packed(self, split: MicrobatchSplit) -> None:
        # A leak runs from one document into the next, so every document must have been behind the others.
        orders = [list(range(self._count)), list(range(self._count - 1, -1, -1))]
        failure = self._failure_behind_padding() if self._side == 'left' else None
        if failure is not None:
            raise RuntimeError(
                f"A row's losses must not depend on its columns for it to be packed, got: {failure}. Pad on the right, "
                'or set `packing=False`, which is exact.'
            )
        try:
            for order in orders:
                self._check_packed(split, order)
        except RuntimeError as refusal:
            if split.checked or not split.must_pack:
                raise
            try:
                for order in orders:
                    self._check_packed(split, order, by_positions=True)
            except RuntimeError:
                raise refusal from None
            log.warning('Every packed row gets a mask as wide as all its documents. %s', refusal)

    def _check_packed(self, split: MicrobatchSplit, order: list[int], *, by_positions: bool = False) -> None:
        if self._layout.family.coupling:
            raise RuntimeError(
                f'Rows must be independent to be packed, got: {self._layout.family.coupling}. Set `packing=False`, '
                'which is exact.'
            )
        try:
            split.attend_by_document(self._probe.model, by_positions=by_positions)
            packed = self._on_device(split.assemble(self._layout, self._rows, order, split.rules))
            answer = self._probe.ask(packed)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            raise RuntimeError(
                f'The model must take packed rows, got: {_without_stop(error)}. Set `packing=False`.'
            ) from error
        if answer.logits is not None:
            found = token_losses(answer.logits, packed, self._rule)
            failure = self._difference(
                f'{self._count} rows', 'packed', torch.cat([self._expected[row] for row in order]), found
            )
        else:
            failure = self._packed_one_by_one(packed, order)
        if failure is None and answer.logits is not None:
            failure = self._neighbours_seen(packed, answer.logits)
        is_compared = self._check_loss and any(self._counted)
        if failure is None and is_compared and not self._agree(answer.own, self._together.own):
            failure = f'packed: a mean loss of {answer.own:.6f}, and of {self._together.own:.6f} padded'
        if failure is not None:
            pads = ', or a pad predicts a label on the first token of a row (mask it, -100)' * (self._side == 'left')
            raise RuntimeError(
                f'The model must tell packed documents apart, got: {failure}. Attention, positions or states leak from '
                f'one document to the next{pads}. Set `packing=False`, which is exact.'
            )

    def _neighbours_seen(self, packed: Batch, logits: torch.Tensor) -> str | None:
        """How a document's logits change with the words of the first document, or of the last; None: they do not.

        What runs on from one document to the next (a convolution, a state) may hardly move the losses behind it.
        """
        documents = _documents_of(packed)
        for changed in (0, int(documents.max())):
            with self._probe.other_words((documents == changed).to(logits.device)):
                moved = self._probe.ask(packed).logits
            assert moved is not None
            others = (documents != changed).to(logits.device)
            difference = (moved[others].float() - logits[others].float()).abs()
            if not difference.numel():
                continue
            worst = difference.amax().nan_to_num(nan=torch.inf).item()
            if worst > tolerance(logits[others].abs().max().item(), self._noise):
                return f'logits that change by {worst:.1e} with the words of another document'
        return None

    def _packed_one_by_one(self, packed: Batch, order: list[int]) -> str | None:
        """Without logits: the loss of each document of the packed row, its labels alone."""
        labels = labels_of(packed)
        documents = _documents_of(packed).to(labels.device)
        for place, row in enumerate(order):
            only = labels.masked_fill(documents != place, IGNORE_INDEX)
            found = torch.tensor([self._probe.ask({**packed, 'labels': only}).own])
            failure = self._difference(sample_name(self._rows, row), 'packed', self._expected[row], found)
            if failure is not None:
                return failure
        return None

    def _explained(self, failure: str) -> str:
        return (
            f"A row's losses must not depend on the rows beside it nor on its padding, got: {failure}. No cut leaves "
            'them alone: rows see each other in this model (statistics of the batch, attention over padding, a state '
            'that runs on). Exact is one microbatch a rank that holds the whole device batch, on one rank; else pad '
            'rows on the other side, freeze the layer, or pass `position_ids` and an `attention_mask` that tell '
            'padding apart.'
        )
