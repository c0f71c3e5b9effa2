# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks run on the first batch, and the first of a new kind: which labels count, and which cuts leave rows alone."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from composer_tokacc.batch import (
    IGNORE_INDEX,
    MODALITIES,
    Batch,
    labels_of,
    real_positions,
    sample_name,
    with_own_tensors,
)
from composer_tokacc.checks.comparison import MEAN, NAME_TERMS, NOT_A_NUMBER, RowComparison
from composer_tokacc.checks.logits import TINY, targets_of
from composer_tokacc.checks.probe import Probe
from composer_tokacc.collectives import all_gather_object, from_any_rank, get_global_rank, max_over_ranks
from composer_tokacc.compat import gradient_hooks, steps_after_gradients
from composer_tokacc.counting import LOSS_RULES, loss_mask
from composer_tokacc.layout import (
    BatchLayout,
    describe,
    describe_all,
    media_entries,
    microbatches_of,
)
from composer_tokacc.layout.found import joined_readings
from composer_tokacc.layout.ranges import RowRanges, ranges_of
from composer_tokacc.metadata import num_rows, without_metadata

log = logging.getLogger(__name__)

LOOK_AGAIN = 16
"""Step from which on rows are looked at again: 16, 32, 64 and so on. Models and losses change in what steps do not
measure: rows that begin to see each other, terms of inner states."""
MAX_ROWS = 6
"""Rows of a check at the most. Without gradients a row takes about half of the memory that it takes in training, so a
microbatch of k rows leaves room for 2 k; at least four are needed to show the ways in which rows differ."""
MIN_ROWS = 4
"""Rows of it, where the batch has as many: what one of them sees of the others differs."""
MAX_LOOKED_ROWS = 12
"""Rows of a look at new widths, group by group. A model with a top-k of keys changes only rows in which keys tie, which
repeated tokens do: of a tiny Doge about every third row."""
NUM_TIED_TOKENS = 3
"""Distinct tokens of a row with ties."""
NUM_LABELS = 4
"""Labels of the row that is asked for the rule."""
SCALES = (1e-4, 1.0, 1e4)
"""Sizes of the gradients that a hook is tried on: clamps show at one of them."""


@dataclass(eq=False)
class FirstBatchCheck:
    """Probes the model with rows of a batch, on all ranks alike; without a layout only the loss rule is found."""

    probe: Probe
    layout: BatchLayout | None
    to_device: Callable[[Any], Any]
    _: KW_ONLY
    loss_tokens: str
    check_loss: bool
    microbatch_size: float
    rule: str | None = field(default=None, init=False)
    token_scale: float | None = field(default=None, init=False)
    """What all tokens weigh in the loss of one forward, times their number: 1 for a mean of cross-entropies. None: they
    do not weigh the same there (label smoothing, focal losses), or nothing tells."""
    vocabulary: int | None = field(default=None, init=False)
    """Ids that a label may have, by the model's logits."""
    _proven: RowRanges = field(default_factory=RowRanges, init=False)
    """Ranges of the rows that were looked at, the same on all ranks."""
    _was_run: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.rule = None if self.check_loss else self.loss_tokens

    def ranges_of(self, batch: Batch, cutter: Any) -> RowRanges:
        """Returns the ranges of a batch's rows."""
        sources = describe_all(self.layout, batch)
        packed_total = 0 if cutter is None else cutter.largest_packed_row(sources, self.microbatch_size)
        return ranges_of(sources, packed_total)

    def has_new_rows(self, batch: Batch, cutter: Any) -> bool:
        """Returns whether this rank has a row outside of the ranges that were looked at."""
        return bool(self._proven.missing(self.ranges_of(batch, cutter)))

    def is_due(self, step: int, *, has_new_rows: bool) -> bool:
        """Returns whether to look at rows: if some rank has new ones, and at steps 16, 32, 64 and so on."""
        if step >= LOOK_AGAIN and step & (step - 1) == 0:
            self._was_run = False
        return has_new_rows or not self._was_run

    def prove(self, batch: Batch, cutter: Any) -> Any:
        """Returns the rules by which rows may be cut, of all that were not looked at yet; a collective.

        Raises on all ranks if no cut leaves the gradients of the rows alone. ``batch`` is this rank's, on the CPU;
        without ``cutter`` only whole rows are tried.
        """
        rules = None if cutter is None else cutter.rules
        while True:
            local = self.ranges_of(batch, cutter)
            missing = self._proven.missing(local)
            (is_any_missing,) = max_over_ranks([bool(missing)])
            if self._was_run and not is_any_missing:
                return rules
            offers = all_gather_object(RowOffer(len(missing), num_rows(batch), local))
            offer = max(offers, key=lambda offer: (offer.num_missing, offer.num_rows))
            self._learn_readings([one.ranges for one in offers])
            try:
                found, shown = self._run(batch, cutter, rules, missing, is_chosen=offers[get_global_rank()] is offer)
            except IndexError as error:  # as torch says on a CPU; a GPU stops the process
                if 'out of' not in str(error):  # an id that is out of range, a target that is out of bounds
                    raise
                raise RuntimeError(
                    f'The model must take the batch, got: {error}, for {_ids_of(batch)}. Labels must be -100 or ids of '
                    "the model's vocabulary, and its embedding must hold every token. Take the tokenizer that belongs "
                    'to the model (docs/errors.md#counts).'
                ) from error
            if rules is not None and not found.cuts_like(rules):
                # What was shown for one cut says nothing of another.
                self._proven = RowRanges(readings=self._proven.readings)
            rules = found
            self._proven = self._proven.joined(shown)
            # The chosen rows may not show everything, such as media that the layout cannot tell apart.
            if len(self._proven.missing(offer.ranges)) >= offer.num_missing:
                self._proven = self._proven.joined(offer.ranges)

    def _learn_readings(self, ranges: Sequence[RowRanges]) -> None:
        """Rules out what a key cannot mean by the batch of some rank, on all ranks alike."""
        readings = self._proven.readings
        for rows in ranges:
            readings = joined_readings(readings, rows.readings)
        self._proven = replace(self._proven, readings=readings)
        if self.layout is not None and readings != self.layout.readings:
            self.layout = self.layout.with_readings(readings)

    def _run(
        self, batch: Batch, cutter: Any, rules: Any, missing: Sequence[str], *, is_chosen: bool
    ) -> tuple[Any, RowRanges]:
        """Finds the rule, if it is not known yet, and the rules of the cut for rows like those of ``batch``.

        All ranks probe the rows of one rank, because FSDP hangs if only some ranks' rows have images: of the rank with
        the most that is new. Returns the rules, and the ranges of the probed rows.
        """
        started = time.perf_counter()
        shared = self._shared_rows(batch, cutter, missing, is_chosen=is_chosen)
        rows = shared.rows
        if self.rule is None:
            self.rule = find_loss_rule(
                self.probe, self._on_device(rule_batch(self.layout, rows)), loss_tokens=self.loss_tokens
            )
        self._was_run = True
        if self.layout is None:
            log.warning(
                'Rows of the batch could not be told apart, so it was not checked that they are independent of each '
                'other. Use token_data_spec(), with a `layout` that knows every entry.'
            )
            return rules, RowRanges()
        rows = with_unequal_row(self.layout, rows, self.rule)
        comparison = RowComparison(self.probe, self.layout, self._on_device, self.rule, rows, self.check_loss)
        found = comparison.first_exact(cutter, rules, shared.packed_total)
        comparison.check_media(shared.media)
        scales = all_gather_object(comparison.token_scale())  # ranks must agree on what they look at again
        self.token_scale = None if None in scales else scales[0]
        self.vocabulary = comparison.whole.vocabulary
        shown = self._shown(comparison, rows, found, shared.packed_total)
        ordinary = comparison
        groups = shared.more if shared.tied is None else [*shared.more, shared.tied]
        for more_rows in groups:
            # Rounding breaks ties in any order, so it says nothing of rows that are full of them.
            is_tied = more_rows is shared.tied
            comparison = RowComparison(
                self.probe,
                self.layout,
                self._on_device,
                self.rule,
                more_rows,
                self.check_loss,
                noise_of=ordinary if is_tied else None,
            )
            stricter = comparison.first_exact(cutter, found, shared.packed_total)
            # Rules that only some rows need are shown for all of them by the next look.
            shown_now = self._shown(comparison, more_rows, stricter, shared.packed_total)
            is_same = cutter is None or stricter.cuts_like(found)
            shown = shown.joined(shown_now) if is_same else shown_now
            found = stricter
        log.info('The first-batch check took %.2f s. %s', time.perf_counter() - started, found)
        return found, shown

    def _shown(self, comparison: RowComparison, rows: Batch, rules: Any, packed_total: int) -> RowRanges:
        """Returns the ranges of rows that were compared under some rules."""
        is_packed = bool(getattr(rules, 'packing', ''))
        shown = ranges_of(describe_all(self.layout, rows), packed_total if is_packed else 0)
        return shown if comparison.has_shown_trimming else shown.without_padding()

    def _on_device(self, batch: Batch) -> Any:
        return self.to_device(with_own_tensors(without_metadata(batch)))

    def _shared_rows(self, batch: Batch, cutter: Any, missing: Sequence[str], *, is_chosen: bool) -> SharedRows:
        """Returns the rows that all ranks probe with: those of the chosen rank."""
        max_rows = min(max(int(2 * self.microbatch_size), 4), MAX_ROWS)
        shared = None
        if is_chosen and self.layout is None:
            shared = SharedRows(dict(batch), {}, [], None, 0)
        elif is_chosen and self.layout is not None:
            batch_of_loader = without_metadata(batch)
            chosen = chosen_rows(self.layout, batch, missing, max_rows)
            more = []
            tied = None
            if any(name.startswith(('rows padded', 'packed rows')) for name in missing):
                more = further_rows(batch, chosen, max_rows)
                tied = rows_with_ties(self.layout, batch)
            packed = self.ranges_of(batch, cutter).packed
            shared = SharedRows(
                rows=_with_labels(self.layout, self.layout.select(batch_of_loader, chosen)),
                media=media_as_collated(self.layout, batch, chosen),
                more=[_with_labels(self.layout, self.layout.select(batch_of_loader, rows)) for rows in more],
                tied=tied,
                packed_total=0 if packed is None else packed.total,
            )
        shared = from_any_rank(shared)
        assert shared is not None
        return shared


class SharedRows(NamedTuple):
    """Rows of one rank that all ranks look at."""

    rows: dict[str, Any]
    media: dict[int, dict[str, Any]]
    """Media of some rows as their own microbatch pads them, by place among the rows."""
    more: list[dict[str, Any]]
    """Further rows, to be looked at in these groups."""
    tied: dict[str, Any] | None
    """Rows as of :func:`rows_with_ties`."""
    packed_total: int
    """The most tokens of a packed row in training; 0: rows are not packed."""


@dataclass(frozen=True)
class RowOffer:
    """A rank's rows that might be looked at."""

    num_missing: int
    num_rows: int
    ranges: RowRanges


def find_loss_rule(probe: Probe, row: Batch, *, loss_tokens: str = 'auto') -> str:
    """Finds, or confirms, the rule by which the model counts labels: where the gradient of its loss is not 0.

    The rule depends on the model class and the transformers version, and a wrong one is silent: raises RuntimeError if
    no rule, or not the given one, is the model's. ``row`` is as of :func:`.rule_batch`, on the model's device.
    """
    result = probe.run(row)
    if result.is_nan:
        raise RuntimeError(NOT_A_NUMBER.format(sample_name(row, 0)))
    gradients = next(iter(result.gradients.values()))
    gradient = next((one for one in reversed(gradients) if one is not None), torch.zeros(*row['labels'].shape, 1))
    norms, matching = gradient.norm(dim=-1), []
    for rule in LOSS_RULES:
        predicts = targets_of(row, rule).cpu() != IGNORE_INDEX
        elsewhere = float(norms[~predicts].norm() / norms[predicts].norm().clamp(min=TINY))
        if elsewhere < 0.1 and bool((norms[predicts] > 0).all()):
            matching.append((elsewhere, rule))
    where = _listed(norms)
    if not matching:
        raise RuntimeError(
            f'{MEAN}a gradient at the positions {where} for labels at {_listed(row["labels"] != IGNORE_INDEX)}, which '
            'no rule explains. The model changes labels inside forward, or its loss holds a term over other positions. '
            f'{NAME_TERMS}'
        )
    # Rules that agree even here (no attention mask) count the same: the first of them.
    found = min(matching, key=lambda pair: pair[0])[1]
    if loss_tokens not in ('auto', *(rule for _, rule in matching)):
        raise RuntimeError(
            f'`loss_tokens` must be the rule by which the model averages its loss, got: {loss_tokens!r}, but the model '
            f'averages by {found!r} (the gradient of its loss is at the positions {where}). Set '
            f'`loss_tokens={found!r}` (docs/errors.md#loss-rule).'
        )
    return found if loss_tokens == 'auto' else loss_tokens


def _listed(marked: torch.Tensor) -> str:
    places = marked.nonzero()[:, 1].tolist()
    return str(places[:8])[:-1] + (', ...]' if len(places) > 8 else ']')


def _ids_of(batch: Batch) -> str:
    """Returns the ids of a batch, for a message."""
    ends = []
    for key in ('labels', 'input_ids'):
        ids = [one[key][one[key] != IGNORE_INDEX] for one in microbatches_of(batch) if one.get(key) is not None]
        if ids and (joined := torch.cat(ids)).numel():
            ends.append(f'`{key}` of {int(joined.min())} to {int(joined.max())}')
    return ' and '.join(ends)


def chosen_rows(layout: BatchLayout, batch: Batch, wanted: Sequence[str], max_rows: int) -> list[int]:
    """Returns the numbers of a few unlike rows; ``wanted``: what is new, as of :meth:`RowRanges.missing`."""
    facts, labels = describe(layout, batch), labels_of(batch)
    lengths, media, indices = facts.lengths, facts.media, range(len(facts.lengths))
    units = [unit for unit in MODALITIES if any(name.startswith(unit) for name in wanted)]
    # For each row a number or tuple; the row with the least is chosen.
    wishes: list[list[Any]] = [[-length for length in lengths], lengths]
    for unit in units:
        for sign in (1, -1):
            wishes.append([(size is None, sign * (size or 0)) for size in facts.media_sizes(unit)])
    if {'holes', 'holes beside media'}.intersection(wanted):
        wishes.append([not has_hole for has_hole in facts.has_hole])
    if any(facts.has_label_behind_padding):  # the hardest label to keep
        wishes.append([not has_label for has_label in facts.has_label_behind_padding])
    # A row as wide as the batch is not trimmed. Only long rows with little padding, and rows with as much padding as
    # tokens, show a model that changes above some width.
    about_half = (min(lengths) + facts.width) / 2
    wishes_of_widths = [
        [-length if length < facts.width else 0 for length in lengths],
        [abs(length - about_half) for length in lengths],
    ]
    if any(name.startswith('rows padded') for name in wanted):
        wishes += wishes_of_widths
    wishes.append([count > 0 for count in media])
    wishes.append([-count for count in media])
    wishes += wishes_of_widths
    # Rows with labels before those that need made-up ones; of several that are as good the shortest.
    bare = (labels[:, 1:] == IGNORE_INDEX).all(dim=1).tolist()
    best = [min(zip(bare, wish, lengths, indices, strict=True))[-1] for wish in wishes]
    rows = list(dict.fromkeys(best))[: max(max_rows, 2 + 2 * len(units))]
    others = sorted(set(indices) - set(rows), key=lambda row: (bare[row], lengths[row]))
    return rows + others[: max(MIN_ROWS - len(rows), 0)]


def further_rows(batch: Batch, chosen: Sequence[int], max_rows: int) -> list[list[int]]:
    """Returns groups of further rows with labels, evenly spread over the batch."""
    has_labels = (labels_of(batch)[:, 1:] != IGNORE_INDEX).any(dim=1).tolist()
    others = [row for row in range(len(has_labels)) if has_labels[row] and row not in chosen]
    num_more = max(MAX_LOOKED_ROWS - len(chosen), 0)
    step = max(len(others) // max(num_more, 1), 1)
    others = others[::step][:num_more]
    return [others[start : start + max_rows] for start in range(0, len(others), max_rows)]


def rows_with_ties(layout: BatchLayout, batch: Batch) -> dict[str, Any] | None:
    """Returns two padded rows of text, with few distinct tokens; None: the batch has no such rows.

    A model that attends to the best k keys breaks ties between them in an order that depends on the width. Equal tokens
    have equal keys, so in such rows there are ties everywhere, and in other rows only by chance.
    """
    facts = describe(layout, batch)
    ids, labels = batch.get('input_ids'), labels_of(batch)
    if ids is None or ids.shape != labels.shape or 'decoder_input_ids' in batch:
        return None
    lengths = facts.lengths
    padded = [row for row, length in enumerate(lengths) if 2 < length < facts.width and not facts.media[row]]
    if not padded:
        return None
    about_half = (min(lengths) + facts.width) / 2
    longest = max(padded, key=lambda row: lengths[row])
    middle = min(padded, key=lambda row: abs(lengths[row] - about_half))
    rows = layout.select(without_metadata(batch), [longest, middle])
    rows['input_ids'] = rows['input_ids'].clone()
    rows['labels'] = torch.full_like(rows['labels'], IGNORE_INDEX)
    for place, row in enumerate((longest, middle)):
        columns = facts.real[row].nonzero().flatten()
        tokens = rows['input_ids'][place, columns]
        numbers = torch.arange(len(columns)) % NUM_TIED_TOKENS
        rows['input_ids'][place, columns] = tokens[numbers]
        # Labels that a model does not expect, or little would be left of the gradient but round-off. The first token
        # has none, because padding may predict it.
        unexpected = tokens[(numbers + 1) % NUM_TIED_TOKENS]
        rows['labels'][place, columns[1:]] = unexpected[1:]
    return rows


def media_as_collated(layout: BatchLayout, batch: Batch, rows: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Returns media that a pre-split microbatch pads to another size than all together, by place among the rows."""
    starts = [0, *accumulate(num_rows(one) for one in microbatches_of(batch))]
    found = {}
    for place, row in enumerate(rows if len(starts) > 2 else ()):
        number = bisect_right(starts, row) - 1
        own = layout.select(without_metadata(microbatches_of(batch)[number]), [row - starts[number]])
        media = {key: own[key] for key in media_entries(layout, own)}
        if any(value.shape[1:] != batch[key].shape[1:] for key, value in media.items()):
            found[place] = media
    return found


def _with_labels(layout: BatchLayout, batch: dict[str, Any]) -> dict[str, Any]:
    """Gives rows labels on all real positions but the first, as what leaks into a row may show nowhere else.

    Rows with media, whose placeholders a model may not count, keep theirs, as does the row with the longest prompt, by
    which a term over other positions shows; without any they get one on their last real position.
    """
    labels, ids = batch['labels'], batch.get('input_ids')
    if ids is None or ids.shape != labels.shape or 'decoder_input_ids' in batch:
        return batch
    labels = labels.clone()
    real, media = real_positions(batch), layout.media_per_row(batch)
    unlabelled = (real & (labels == IGNORE_INDEX)).sum(dim=1)
    for row in range(len(labels)):
        places = real[row].nonzero().flatten()[1:]
        own = labels[row, 1:][labels[row, 1:] != IGNORE_INDEX]
        if not own.numel() and len(places):
            labels[row, places[-1]] = ids[row, places[-1]]
        elif own.numel() and not media[row] and row != int(unlabelled.argmax()):
            empty = places[labels[row, places] == IGNORE_INDEX]
            labels[row, empty] = own[torch.arange(len(empty)) % len(own)]
    return {**batch, 'labels': labels}


def with_unequal_row(layout: BatchLayout, rows: dict[str, Any], rule: str) -> dict[str, Any]:
    """Adds a row of fewer or more labels to rows of nearly as many.

    Among rows of equally many tokens a mean of the rows' means is a mean over tokens, and the formula proves nothing.
    """
    counts = loss_mask(rows, rule).sum(dim=1).tolist()
    if max(counts) >= 2 * min(counts) and max(counts) > min(counts):
        return rows
    lengths = describe(layout, rows).lengths
    copied = layout.select(rows, [*range(len(counts)), min(range(len(counts)), key=lambda row: lengths[row] < 4)])
    labels = copied['labels'] = copied['labels'].clone()
    counted = loss_mask(copied, rule)[-1].nonzero().flatten().tolist()
    if len(counted) > 1:
        labels[-1, counted[:-1]] = IGNORE_INDEX
    elif counted and (ids := copied.get('input_ids')) is not None and ids.shape == labels.shape:
        # Behind its first token, as a label there may be predicted from padding; ids of placeholders are no labels.
        places = real_positions(copied)[-1].nonzero().flatten().tolist()[1:]
        labels[-1, places] = int(labels[-1, counted[0]])
    return copied


def rule_batch(layout: BatchLayout | None, rows: Batch) -> dict[str, Any]:
    """Returns one of the rows with labels at which the rules differ: on its first position, and on an unattended one.

    All labels are one and the same token, of which the model can be sure at one position at most. Where rows cannot be
    told apart the others stay, without labels.
    """
    if layout is not None:
        counts = (labels_of(rows)[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
        media = layout.media_per_row(rows)  # with media if it can be, as some models take no other
        best = min(range(len(counts)), key=lambda row: (counts[row] < 2, counts[row] < NUM_LABELS, not media[row]))
        rows = layout.select(rows, [best])
    labels, mask, ids = labels_of(rows), rows.get('attention_mask'), rows.get('input_ids')
    mask = mask if isinstance(mask, torch.Tensor) and mask.shape == labels.shape else None
    attended = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask != 0
    places = (labels[0, 1:] != IGNORE_INDEX).nonzero().flatten() + 1
    if len(places) < 2:
        places = attended[0, 1:].nonzero().flatten() + 1
    places = places[-NUM_LABELS:].tolist() or [labels.shape[1] - 1]
    own = labels[labels != IGNORE_INDEX]  # else one of the row's tokens
    own = own if own.numel() or ids is None or ids.shape != labels.shape else ids.flatten()
    changed = {**rows, 'labels': torch.full_like(labels, IGNORE_INDEX)}
    changed['labels'][0, [0, *places]] = int(own[-1]) if own.numel() else 0
    if mask is not None and len(places) > 1:
        changed['attention_mask'] = mask.clone()
        changed['attention_mask'][0, places[-1]] = 0
    return changed


def check_gradient_hooks(model: torch.nn.Module) -> None:
    """Checks that hooks on parameters are linear, as a step's gradient is the sum of its microbatches'.

    Raises:
        RuntimeError: If one is not (clipping, quantising), or a parameter is stepped as soon as it has a gradient.
    """
    for name, parameter in model.named_parameters():
        if steps_after_gradients(parameter):
            raise RuntimeError(
                'Optimizers must step once a batch, got: a `register_post_accumulate_grad_hook` on '
                f'{name!r}. Give the optimizer to the Trainer (docs/errors.md#gradient-hooks).'
            )
        for hook in gradient_hooks(parameter):
            if not _is_linear(hook, parameter):
                raise RuntimeError(
                    f'Gradient hooks must be linear, got: {getattr(hook, "__qualname__", hook)} on {name!r}. Clip in '
                    'the algorithm `gradient_clipping`, which sees the whole step (docs/errors.md#gradient-hooks).'
                )


def _is_linear(hook: Callable[[torch.Tensor], Any], parameter: torch.Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    for scale in SCALES:
        first, second = (torch.randn(local.shape, generator=generator).to(local) * scale for _ in range(2))
        together, apart = _changed(hook, first + second), _changed(hook, first) + _changed(hook, second)
        tolerance = max(1e-4, 8 * torch.finfo(first.dtype).eps)
        if float((together - apart).float().norm()) > tolerance * float(apart.float().norm()):
            return False
    return True


def _changed(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor) -> torch.Tensor:
    changed = hook(gradient.clone())
    return gradient if changed is None else changed
