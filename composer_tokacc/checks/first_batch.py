# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks run on the first batch, and the first of a new kind: which labels count, and which cuts leave rows alone."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from typing import Any

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
from composer_tokacc.label_selector import LabelSelector
from composer_tokacc.layout import (
    ROW_KINDS,
    BatchLayout,
    describe,
    describe_all,
    kinds_of,
    media_entries,
    microbatches_of,
)
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
    selector: LabelSelector | None = field(default=None)
    """Has the model compute logits only at labels, if that is to be tried."""
    selection_failure: str | None = field(default=None, init=False)
    """Why logits only at labels would change the loss or its gradient; None: they do not, or nothing was tried."""
    _proven: set[str] = field(default_factory=set, init=False)
    _was_run: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.rule = None if self.check_loss else self.loss_tokens

    def kinds_of(self, batch: Batch) -> tuple[int, ...]:
        """Returns which kinds of rows a batch has, see :data:`.ROW_KINDS`."""
        return kinds_of(describe_all(self.layout, batch))

    def is_due(self, kinds: Sequence[int], step: int) -> bool:
        """Returns whether any of the kinds was not looked at yet; all are looked at again now and then."""
        if step >= LOOK_AGAIN and step & (step - 1) == 0:
            self._was_run = False
        return not self._was_run or bool(_names_of(kinds) - self._proven)

    def prove(self, batch: Batch, cutter: Any) -> Any:
        """Returns the rules by which rows may be cut, of every kind that was not looked at yet; a collective.

        Raises on all ranks if no cut leaves the gradients of the rows alone. ``batch`` is this rank's, on the CPU;
        without ``cutter`` whole rows alone are tried.
        """
        rules = None if cutter is None else cutter.rules
        kinds = self.kinds_of(batch)
        own, present = _names_of(kinds), _names_of(max_over_ranks(kinds))
        while (new := present - self._proven) or not self._was_run:  # of a batch without any kind as well
            try:
                found, shown = self._run(batch, cutter, rules, own & new)
            except IndexError as error:  # as torch says on a CPU; a GPU stops the process
                if 'out of' not in str(error):  # an id that is out of range, a target that is out of bounds
                    raise
                raise RuntimeError(
                    f'The model must take the batch, got: {error}, for {_ids_of(batch)}. Labels must be -100 or ids of '
                    "the model's vocabulary, and its embedding must hold every token. Take the tokenizer that belongs "
                    'to the model (docs/errors.md#counts).'
                ) from error
            if getattr(found, 'packing', False) != getattr(rules, 'packing', False):
                self._proven = set()  # what was proven of packed rows says nothing of padded ones
            rules = found
            # A kind may be that no chosen row shows, such as media that the layout cannot tell apart.
            self._proven |= shown if shown & new else shown | present
        return rules

    def _run(self, batch: Batch, cutter: Any, rules: Any, kinds: set[str]) -> tuple[Any, set[str]]:
        """Finds the rule, if it is not known yet, and the rules of the cut for rows like those of ``batch``.

        All ranks probe the rows of one rank, because FSDP hangs if only some ranks' rows have images: of the rank with
        the most of the wanted kinds. Gives the rules, and which kinds the probed rows were of.
        """
        started = time.perf_counter()
        rows, media = self._shared_rows(batch, kinds)
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
            return rules, set()
        rows = with_unequal_row(self.layout, rows, self.rule)
        comparison = RowComparison(self.probe, self.layout, self._on_device, self.rule, rows, self.check_loss)
        found = comparison.first_exact(cutter, rules)
        comparison.check_media(media)
        failure = None if self.selector is None else comparison.selection_failure(self.selector)
        # Ranks must agree on what they look at again, and on which logits they compute.
        answers = all_gather_object((comparison.token_scale(), failure))
        scales = [scale for scale, _ in answers]
        self.token_scale = None if None in scales else scales[0]
        self.selection_failure = next((failure for _, failure in answers if failure is not None), None)
        self.vocabulary = comparison.whole.vocabulary
        log.info('The first-batch check took %.2f s. %s', time.perf_counter() - started, found)
        shown = _names_of(self.kinds_of(rows))
        return found, shown if comparison.has_shown_trimming else shown - {'left', 'positions', 'right'}

    def _on_device(self, batch: Batch) -> Any:
        return self.to_device(with_own_tensors(without_metadata(batch)))

    def _shared_rows(self, batch: Batch, kinds: set[str]) -> Any:
        """Returns the rows that all ranks probe with, and of some their media as of :func:`media_as_collated`."""
        max_rows = min(max(int(2 * self.microbatch_size), 4), MAX_ROWS)
        offers = all_gather_object((len(kinds), num_rows(batch)))
        if get_global_rank() != offers.index(max(offers)):
            rows = None
        elif self.layout is None:
            rows = dict(batch), {}
        else:
            chosen = chosen_rows(self.layout, batch, kinds, max_rows)
            selected = self.layout.select(without_metadata(batch), chosen)
            rows = _with_labels(self.layout, selected), media_as_collated(self.layout, batch, chosen)
        return from_any_rank(rows)


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


def _names_of(kinds: Sequence[int]) -> set[str]:
    return {name for name, number in zip(ROW_KINDS, kinds, strict=True) if number}


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


def chosen_rows(layout: BatchLayout, batch: Batch, wanted: set[str], max_rows: int) -> list[int]:
    """Returns the numbers of a few unlike rows: first of those of the wanted kinds."""
    facts, labels = describe(layout, batch), labels_of(batch)
    lengths, media, indices = facts.lengths, facts.media, range(len(facts.lengths))
    units = [unit for unit in MODALITIES if any(kind.startswith(unit) for kind in wanted)]
    first = facts.real.int().argmax(dim=1).tolist()
    wishes = [  # the less, the better
        [-length for length in lengths],
        lengths,
        *(
            [(size is None, sign * (size or 0)) for size in facts.media_sizes(unit)]
            for unit in units
            for sign in (1, -1)
        ),
        [count > 0 for count in media],
        *([[not is_so for is_so in facts.has_hole]] if {'holes', 'holes beside media'} & wanted else []),
        # A label on the first token behind padding is the hardest to keep.
        [not 0 < at < len(row) or int(row[at]) == IGNORE_INDEX for at, row in zip(first, labels, strict=True)],
        [-count for count in media],
    ]
    # Rows with labels before those that need made-up ones; of several that are as good the shortest.
    bare = (labels[:, 1:] == IGNORE_INDEX).all(dim=1).tolist()
    best = [min(zip(bare, wish, lengths, indices, strict=True))[-1] for wish in wishes]
    rows = list(dict.fromkeys(best))[: max(max_rows, 2 + 2 * len(units))]
    others = sorted(set(indices) - set(rows), key=lambda row: (bare[row], lengths[row]))
    return rows + others[: max(MIN_ROWS - len(rows), 0)]


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
