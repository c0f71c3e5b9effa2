# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Checks the model on the first batch, and on the first batch with a new kind of rows.

It finds out which labels count in the loss, and which cuts keep the gradient of every row.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_tokacc.batch import (
    IGNORE_INDEX,
    MODALITIES,
    Batch,
    labels_of,
    own_labels,
    real_positions,
    sample_name,
    with_own_tensors,
)
from composer_tokacc.checks.comparison import MEAN, NAME_TERMS, NOT_A_NUMBER, RowComparison
from composer_tokacc.checks.cutter import Cutter, RulesT
from composer_tokacc.checks.logits import TINY, targets_of
from composer_tokacc.checks.probe import Probe
from composer_tokacc.collectives import all_gather_object, from_any_rank, get_global_rank, max_over_ranks
from composer_tokacc.compat import gradient_hooks, steps_after_gradients
from composer_tokacc.counting import LOSS_RULES, loss_mask
from composer_tokacc.layout import (
    ROW_KINDS,
    BatchLayout,
    RowFacts,
    describe,
    describe_all,
    kinds_of,
    media_entries,
    microbatches_of,
)
from composer_tokacc.metadata import num_rows, without_metadata

log = logging.getLogger(__name__)

LOOK_AGAIN = 16
"""Rows are checked again in this step, and in each step of twice the number: 32, 64 and so on. Models and losses may
change in a way that steps do not measure: rows begin to see each other, or a term of inner states begins."""
MAX_ROWS = 6
"""Most rows of a check. Without gradients a row takes about half of its memory in training, so a microbatch of k rows
leaves room for 2 k. At least four rows are needed to show how rows differ."""
MIN_ROWS = 4
"""Fewest rows of a check, if the batch has as many: each sees something else of the others."""
NUM_LABELS = 4
"""Number of labels of the row that shows the loss rule."""
ENOUGH_TOKENS = 4
"""Number of tokens of a row that was lengthened."""
LARGEST_ELSEWHERE = 0.1
"""Largest part of a gradient that may be at positions without a label. More means that another rule is the model's."""
TRIMMING_KINDS = frozenset(('left', 'positions', 'right'))
"""Kinds of rows about which only a trimmed row says something."""
GRADIENT_SIZES = (1e-4, 1.0, 1e4)
"""Sizes of the gradients that a hook is tried on. A clamp shows at one of them."""

BatchDict: TypeAlias = dict[str, Any]
Cost: TypeAlias = Any
"""A number or a tuple, of the same type for all rows."""
GradientHook: TypeAlias = Callable[[Tensor], Tensor | None]


class SharedRows(NamedTuple):
    """The rows that all ranks probe."""

    rows: BatchDict
    media: dict[int, BatchDict]  # of some of the rows, see :func:`media_as_collated`


@dataclass(eq=False)
class FirstBatchCheck:
    """Probes the model with rows of a batch, the same ones on all ranks. Without a layout it finds only the rule."""

    probe: Probe
    layout: BatchLayout | None
    to_device: Callable[[Batch], Batch]
    _: KW_ONLY
    loss_tokens: str
    check_loss: bool
    microbatch_size: float
    rule: str | None = field(default=None, init=False)
    """The loss rule of the model."""
    token_scale: float | None = field(default=None, init=False)
    """The weight of a token in the loss of one forward, times the number of tokens: 1 for a mean of cross-entropies.
    None: the weights differ (label smoothing, focal losses), or nothing is known."""
    vocabulary: int | None = field(default=None, init=False)
    """Number of ids that a label may have, from the model's logits."""
    has_logits: bool = field(default=True, init=False)
    """False if the loss shows that the output of the model holds hidden states, and that the loss holds the head."""
    _proven: set[str] = field(default_factory=set, init=False)
    _was_run: bool = field(default=False, init=False)
    _num_harmless: int = field(default=0, init=False)
    """Number of harmless states that were named in a warning."""

    def __post_init__(self) -> None:
        # Without a check the given rule is taken for true.
        self.rule = None if self.check_loss else self.loss_tokens

    def kinds_of(self, batch: Batch) -> tuple[int, ...]:
        """Returns which kinds of rows a batch has, see :data:`.ROW_KINDS`."""
        return kinds_of(describe_all(self.layout, batch))

    def is_due(self, kinds: Sequence[int], step: int) -> bool:
        """Returns whether a kind was not checked yet. In some later steps all are checked again."""
        # The second test is true for powers of two.
        if step >= LOOK_AGAIN and step & (step - 1) == 0:
            self._was_run = False
        return not self._was_run or bool(_names_of(kinds) - self._proven)

    @overload
    def prove(self, batch: Batch, cutter: Cutter[RulesT]) -> RulesT: ...

    @overload
    def prove(self, batch: Batch, cutter: None) -> None: ...

    def prove(
        self,
        batch: Batch,
        cutter: Cutter[RulesT] | None,
    ) -> RulesT | None:
        """Returns the rules by which rows may be cut. It checks rows of every kind that was not checked yet.

        A collective. ``batch`` is the batch of this rank, on the CPU. Without a cutter rows are only compared with
        themselves alone. Raises RuntimeError on all ranks if no cut keeps the gradients of the rows.
        """
        rules = None if cutter is None else cutter.rules
        # FSDP needs the same forwards on all ranks, so ranks agree on the kinds.
        kinds = self.kinds_of(batch)
        rank_kinds = _names_of(kinds)
        all_kinds = _names_of(max_over_ranks(kinds))
        while True:
            new_kinds = all_kinds - self._proven
            if self._was_run and not new_kinds:  # a batch without any kind is checked once too
                return rules
            try:
                new_rules, proven = self._run(batch, cutter, rules, rank_kinds & new_kinds)
            except IndexError as error:
                # An id that is out of range, a target that is out of bounds. On a GPU the process stops instead.
                if 'out of' not in str(error):
                    raise
                raise RuntimeError(
                    f'The model must take the batch, got: {error}, for {_ids_of(batch)}. Labels must be -100 or ids of '
                    "the model's vocabulary, and its embedding must hold every token. Take the tokenizer that belongs "
                    'to the model (docs/errors.md#counts).'
                ) from error
            if rules is not None and new_rules is not None and new_rules.packing != rules.packing:
                self._proven = set()  # packed rows prove nothing about padded ones
            rules = new_rules
            if not proven & new_kinds:
                # The chosen rows may not show a kind: the layout may not be able to tell media from each other.
                proven = proven | all_kinds
            self._proven |= proven

    def _run(
        self,
        batch: Batch,
        cutter: Cutter[RulesT] | None,
        rules: RulesT | None,
        kinds: set[str],
    ) -> tuple[RulesT | None, set[str]]:
        """Finds the loss rule, if it is not known yet, and the rules of the cut for rows like those of ``batch``.

        All ranks probe the rows of one rank, because FSDP hangs if only some ranks have images. It is the rank with the
        most kinds of ``kinds``. Returns the rules, and the kinds of the probed rows.
        """
        started = time.perf_counter()
        rows, media = self._shared_rows(batch, kinds)
        if self.rule is None:
            # One row is enough for the rule.
            row = self._on_device(rule_batch(self.layout, rows))
            self.rule = find_loss_rule(self.probe, row, loss_tokens=self.loss_tokens)
            if self.layout is None:
                result = self.probe.run(row, targets=targets_of(row, self.rule))
                self.has_logits = result.has_logits is not False
                self._check_written_state(row)
        self._was_run = True
        if self.layout is None:
            log.warning(
                'Rows of the batch could not be told apart, so it was not checked that they are independent of each '
                'other. Use token_data_spec(), with a `layout` that knows every entry.'
            )
            return rules, set()
        # From here on rows are compared with each other.
        rows = with_unequal_row(self.layout, rows, self.rule)
        comparison: RowComparison[RulesT] = RowComparison(
            self.probe,
            self.layout,
            self._on_device,
            self.rule,
            rows,
            self.check_loss,
        )
        self._check_written_state(comparison.batch)
        if cutter is None or rules is None:
            comparison.check_single_rows()
        else:
            rules = comparison.first_exact(cutter, rules)
        # Microbatches that the loader collated may pad media to other sizes.
        comparison.check_media(media)
        # Ranks must agree on what they measure, and check again, later.
        scales = all_gather_object(comparison.token_scale())
        self.token_scale = None if None in scales else scales[0]
        self.vocabulary = comparison.reference.vocabulary
        self.has_logits = comparison.reference.has_logits is not False
        log.info('The first-batch check took %.2f s. %s', time.perf_counter() - started, rules)
        proven = _names_of(self.kinds_of(rows))
        # If no row was narrower, nothing is known about padding.
        if not comparison.has_shown_trimming:
            proven -= TRIMMING_KINDS
        return rules, proven

    def _check_written_state(self, rows: Batch) -> None:
        """Raises RuntimeError if forwards write state that their result depends on."""
        self.probe.judge_written_state(rows)
        name = self.probe.state_dependence
        if name is not None:
            raise RuntimeError(
                f'A forward must not change the result of the next one, got: {name!r}, which every forward in training '
                'writes and the result depends on. A step would depend on its number of microbatches. Put its module '
                'in eval mode, or write it once a step, outside of the forward (docs/errors.md#row-coupling).'
            )
        new_names = self.probe.harmless_states[self._num_harmless :]
        self._num_harmless += len(new_names)
        if new_names:
            log.warning(
                'Every forward writes %d states of the model, such as %r. Gradients do not depend on them. The states '
                'depend on the number of microbatches.',
                len(new_names),
                new_names[0],
            )

    def _on_device(self, batch: Batch) -> Batch:
        return self.to_device(with_own_tensors(without_metadata(batch)))

    def _shared_rows(self, batch: Batch, kinds: set[str]) -> SharedRows:
        """Returns the rows that all ranks probe."""
        # A rank whose rows have one token each cannot show the loss rule.
        # Of several ranks with the same offer the first one sends.
        offers = all_gather_object((_has_label_to_predict(batch), len(kinds), num_rows(batch)))
        is_sender = get_global_rank() == offers.index(max(offers))
        shared = from_any_rank(self._selected_rows(batch, kinds) if is_sender else None)
        assert shared is not None
        return shared

    def _selected_rows(self, batch: Batch, kinds: set[str]) -> SharedRows:
        if self.layout is None:
            return SharedRows(dict(batch), {})
        # Rows of a probe take about half of the memory of training.
        max_rows = min(max(int(2 * self.microbatch_size), 4), MAX_ROWS)
        chosen = chosen_rows(self.layout, batch, kinds, max_rows)
        rows = self.layout.select(without_metadata(batch), chosen)
        rows = _with_labels(self.layout, lengthened(self.layout, rows))
        return SharedRows(rows, media_as_collated(self.layout, batch, chosen))


# The loss rule.


def find_loss_rule(
    probe: Probe,
    row: Batch,
    *,
    loss_tokens: str = 'auto',
) -> str:
    """Finds the rule by which the model counts labels, or confirms the given one: the gradient is at these labels.

    The rule depends on the model class and the version of transformers, and a wrong rule shows nowhere else.

    Args:
        probe: Of the model.
        row: As returned by :func:`rule_batch`, on the device of the model.
        loss_tokens: The given rule, or ``'auto'``.

    Raises:
        RuntimeError: If no rule, or not the given one, is the model's.
    """
    result = probe.run(row)
    if result.is_nan:
        raise RuntimeError(NOT_A_NUMBER.format(sample_name(row, 0)))
    first_unit = next(iter(result.gradients.values()))
    norms = torch.zeros(row['labels'].shape)
    for gradient in first_unit:
        if gradient is not None:
            norms = gradient.norm(dim=-1)  # the last one is nearest to the loss
    matching: dict[str, float] = {}  # the part of the gradient that a rule does not explain, by rule
    # A rule fits if the gradient is at the positions that it names, at each of them, and nowhere else.
    for rule in LOSS_RULES:
        predicts = targets_of(row, rule).cpu() != IGNORE_INDEX
        # The rest is round-off, or another loss term, which the comparison refuses later.
        elsewhere = float(norms[~predicts].norm() / norms[predicts].norm().clamp(min=TINY))
        if elsewhere < LARGEST_ELSEWHERE and bool((norms[predicts] > 0).all()):
            matching[rule] = elsewhere
    positions = _listed(norms)
    if not matching:
        raise RuntimeError(
            f'{MEAN}a gradient at the positions {positions} for labels at '
            f'{_listed(row["labels"] != IGNORE_INDEX)}, which '
            'no rule explains. The model changes labels inside forward, or its loss holds a term over other positions. '
            f'{NAME_TERMS}'
        )
    # Rules may agree even here (without an attention mask). Then they count the same, and the first is taken.
    best_rule = min(matching, key=lambda rule: matching[rule])
    if loss_tokens == 'auto':
        return best_rule
    if loss_tokens not in matching:
        raise RuntimeError(
            f'`loss_tokens` must be the rule by which the model averages its loss, got: {loss_tokens!r}, but the model '
            f'averages by {best_rule!r} (the gradient of its loss is at the positions {positions}). Set '
            f'`loss_tokens={best_rule!r}` (docs/errors.md#loss-rule).'
        )
    return loss_tokens


def rule_batch(layout: BatchLayout | None, rows: Batch) -> BatchDict:
    """Returns one of the rows with labels that tell the rules apart: on its first position, and on an unattended one.

    All labels are the same token, so that the model can be sure of one position at most. If the layout is unknown the
    other rows stay, without labels.
    """
    if layout is not None:
        rows = layout.select(rows, [_row_for_rule(layout, rows)])
    labels = labels_of(rows)
    mask = rows.get('attention_mask')
    if not isinstance(mask, Tensor) or mask.shape != labels.shape:
        mask = None
    positions = (labels[0, 1:] != IGNORE_INDEX).nonzero().flatten() + 1
    if len(positions) < 2:
        attended = torch.ones_like(labels) if mask is None else mask
        positions = (attended[0, 1:] != 0).nonzero().flatten() + 1
    label_positions = positions[-NUM_LABELS:].tolist() or [labels.shape[1] - 1]
    # The first label is counted only by unshifted rules, the last one only if padding is counted.
    changed = {**rows, 'labels': torch.full_like(labels, IGNORE_INDEX)}
    changed['labels'][0, [0, *label_positions]] = _any_token(rows)
    if mask is not None and len(label_positions) > 1:
        changed['attention_mask'] = mask.clone()
        # The last label is on a position that is not attended now.
        changed['attention_mask'][0, label_positions[-1]] = 0
    return changed


def _row_for_rule(layout: BatchLayout, rows: Batch) -> int:
    """Returns the number of a row with enough labels, with media if possible: some models cannot compute others."""
    num_labels = (labels_of(rows)[:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
    num_media = layout.media_per_row(rows)

    def cost(row: int) -> tuple[bool, bool, bool]:
        return num_labels[row] < 2, num_labels[row] < NUM_LABELS, num_media[row] == 0

    return min(range(len(num_labels)), key=cost)


def _any_token(rows: Batch) -> int:
    """Returns a token that the model knows: a label of the rows, or one of their ids."""
    labels = labels_of(rows)
    tokens = labels[labels != IGNORE_INDEX]
    if tokens.numel():
        return int(tokens[-1])
    ids = rows.get('input_ids')
    if ids is not None and ids.shape == labels.shape:
        return int(ids.flatten()[-1])
    return 0


def _names_of(kinds: Sequence[int]) -> set[str]:
    return {
        name
        for name, number in zip(
            ROW_KINDS,
            kinds,
            strict=True,
        )
        if number
    }


def _listed(is_marked: Tensor) -> str:
    """Returns the marked columns, for a message."""
    columns = is_marked.nonzero()[:, 1].tolist()
    if len(columns) <= 8:
        return str(columns)
    return str(columns[:8])[:-1] + ', ...]'


def _ids_of(batch: Batch) -> str:
    """Returns the range of the ids of a batch, for a message."""
    ranges = []
    for key in ('labels', 'input_ids'):
        parts = []
        for microbatch in microbatches_of(batch):
            ids = microbatch.get(key)
            if ids is not None:
                parts.append(ids[ids != IGNORE_INDEX])
        if parts:
            joined = torch.cat(parts)
            if joined.numel():
                ranges.append(f'`{key}` of {int(joined.min())} to {int(joined.max())}')
    return ' and '.join(ranges)


# The rows of a check.


@dataclass(frozen=True)
class Criterion:
    """One way in which a row is worth a check."""

    reason: str
    costs: Sequence[Cost]
    """Of each row: the row of the lowest cost is chosen."""


def chosen_rows(
    layout: BatchLayout,
    batch: Batch,
    wanted_kinds: set[str],
    max_rows: int,
) -> list[int]:
    """Returns the numbers of a few rows that differ from each other, first those of the wanted kinds."""
    facts = describe(layout, batch)
    labels = labels_of(batch)
    lengths = facts.lengths
    row_numbers = range(len(lengths))
    # A row with labels is better than one that gets them for the check.
    has_no_label = (labels[:, 1:] == IGNORE_INDEX).all(dim=1).tolist()
    rows: list[int] = []
    for criterion in _criteria(facts, labels, wanted_kinds):

        def cost(row: int, costs: Sequence[Cost] = criterion.costs) -> tuple[bool, Cost, int]:
            return has_no_label[row], costs[row], lengths[row]

        row = min(row_numbers, key=cost)
        if row not in rows:
            rows.append(row)
    # All rows for wanted media are kept, because they are why this check runs.
    num_media_criteria = 2 * len(_wanted_modalities(wanted_kinds))
    rows = rows[: max(max_rows, 2 + num_media_criteria)]
    # Fill up with short rows, which cost little.
    others = sorted(set(row_numbers) - set(rows), key=lambda row: (has_no_label[row], lengths[row]))
    num_missing = max(MIN_ROWS - len(rows), 0)
    return rows + others[:num_missing]


def _wanted_modalities(wanted_kinds: Iterable[str]) -> list[str]:
    kinds = list(wanted_kinds)
    return [modality for modality in MODALITIES if any(kind.startswith(modality) for kind in kinds)]


def _criteria(
    facts: RowFacts,
    labels: Tensor,
    wanted_kinds: set[str],
) -> list[Criterion]:
    """Returns why rows are worth a check, the most important reason first."""
    lengths = facts.lengths
    criteria = [
        Criterion('the longest row: it has no padding', [-length for length in lengths]),
        Criterion('the shortest row: it loses the most padding', lengths),
    ]
    for modality in _wanted_modalities(wanted_kinds):
        sizes = facts.media_sizes(modality)
        smallest = [(size is None, size or 0) for size in sizes]
        largest = [(size is None, -(size or 0)) for size in sizes]
        criteria.append(Criterion(f'the smallest {modality}', smallest))
        criteria.append(Criterion(f'the largest {modality}', largest))
    criteria.append(Criterion('a row without media', [count > 0 for count in facts.media]))
    if wanted_kinds & {'holes', 'holes beside media'}:
        criteria.append(Criterion('a row with a hole', [not has_hole for has_hole in facts.has_hole]))
    has_label_behind_padding = []
    for column, row_labels in zip(
        facts.real.int().argmax(dim=1).tolist(),
        labels,
        strict=True,
    ):
        is_inside = 0 < column < len(row_labels)
        has_label_behind_padding.append(is_inside and int(row_labels[column]) != IGNORE_INDEX)
    # The padding before it predicts this label, so it is the hardest one to keep.
    not_behind_padding = [not has_label for has_label in has_label_behind_padding]
    criteria.append(Criterion('a label on the first token behind padding', not_behind_padding))
    criteria.append(Criterion('the most media', [-count for count in facts.media]))
    return criteria


def media_as_collated(
    layout: BatchLayout,
    batch: Batch,
    rows: Sequence[int],
) -> dict[int, BatchDict]:
    """Returns the media of rows whose pre-split microbatch pads them to another size than the whole batch.

    The keys are places among ``rows``.
    """
    microbatches = microbatches_of(batch)
    if len(microbatches) < 2:
        return {}
    starts = [0, *accumulate(num_rows(microbatch) for microbatch in microbatches)]
    collated: dict[int, BatchDict] = {}
    for place, row in enumerate(rows):
        # The microbatch that holds the row.
        number = bisect_right(starts, row) - 1
        microbatch = without_metadata(microbatches[number])
        row_batch = layout.select(microbatch, [row - starts[number]])
        media = {key: row_batch[key] for key in media_entries(layout, row_batch)}
        if any(value.shape[1:] != batch[key].shape[1:] for key, value in media.items()):
            collated[place] = media
    return collated


def _has_label_to_predict(batch: Batch) -> bool:
    """Returns whether a row has a label behind its first token, or a second token that a label can be put on."""
    for microbatch in microbatches_of(batch):
        has_label = (labels_of(microbatch)[:, 1:] != IGNORE_INDEX).any()
        has_two_tokens = (real_positions(microbatch).sum(dim=1) > 1).any()
        if bool(has_label | has_two_tokens):
            return True
    return False


def lengthened(layout: BatchLayout, rows: BatchDict) -> BatchDict:
    """Repeats the token of each row, if all rows have only one: a causal model has no loss on such rows.

    Rows with media stay as they are, because a placeholder cannot be repeated.
    """
    ids = rows.get('input_ids')
    if _has_label_to_predict(rows) or own_labels(rows) is None or ids is None or any(layout.media_per_row(rows)):
        return rows
    real = real_positions(rows)
    with_token = real.any(dim=1).nonzero().flatten().tolist()
    if not with_token:
        return rows
    longer = layout.select(rows, with_token)
    # The column of the only token of each row.
    columns = real[with_token].int().argmax(dim=1)[:, None]
    for key, value in longer.items():
        if isinstance(value, Tensor) and value.shape == real[with_token].shape:
            longer[key] = value.gather(1, columns).repeat(1, ENOUGH_TOKENS)
    if 'position_ids' in longer:
        longer['position_ids'] = torch.arange(ENOUGH_TOKENS).repeat(len(with_token), 1)
    longer['labels'] = longer['input_ids'].clone()
    # The first token has no token before it.
    longer['labels'][:, 0] = IGNORE_INDEX
    return longer


def _with_labels(layout: BatchLayout, batch: BatchDict) -> BatchDict:
    """Puts labels on all tokens of a row except the first: a leak may show only at some of them.

    Rows with media keep their labels, because a model may not count placeholders. So does the row with the longest
    prompt, which shows a loss term over positions without a label. If such a row has no label it gets one on its last
    token.
    """
    labels = batch['labels']
    ids = batch.get('input_ids')
    if ids is None or ids.shape != labels.shape or 'decoder_input_ids' in batch:
        return batch
    labels = labels.clone()
    real = real_positions(batch)
    num_media = layout.media_per_row(batch)
    num_unlabelled = (real & (labels == IGNORE_INDEX)).sum(dim=1)
    longest_prompt = int(num_unlabelled.argmax())
    for row in range(len(labels)):
        columns = real[row].nonzero().flatten()[1:]
        row_labels = labels[row, 1:]
        # New labels repeat labels of the row, as ids may be placeholders without an embedding of the head.
        tokens = row_labels[row_labels != IGNORE_INDEX]
        if not tokens.numel():
            if len(columns):
                labels[row, columns[-1]] = ids[row, columns[-1]]
        elif not num_media[row] and row != longest_prompt:
            empty_columns = columns[labels[row, columns] == IGNORE_INDEX]
            labels[row, empty_columns] = tokens[torch.arange(len(empty_columns)) % len(tokens)]
    return {**batch, 'labels': labels}


def with_unequal_row(layout: BatchLayout, rows: BatchDict, rule: str) -> BatchDict:
    """Adds a row with fewer or more labels, if the rows have nearly the same number.

    If rows have the same number of tokens a mean of the rows' means is a mean over tokens, and the check shows nothing.
    """
    counts = loss_mask(rows, rule).sum(dim=1).tolist()
    if max(counts) >= 2 * min(counts) and max(counts) > min(counts):
        return rows
    lengths = describe(layout, rows).lengths
    # The first row that is long enough for several labels.
    copied_row = min(range(len(counts)), key=lambda row: lengths[row] < 4)
    copied = layout.select(rows, [*range(len(counts)), copied_row])
    labels = copied['labels'] = copied['labels'].clone()
    counted_columns = loss_mask(copied, rule)[-1].nonzero().flatten().tolist()
    ids = copied.get('input_ids')
    if len(counted_columns) > 1:
        labels[-1, counted_columns[:-1]] = IGNORE_INDEX
    elif counted_columns and ids is not None and ids.shape == labels.shape:
        # Not on the first token, which may be predicted from padding. The label is the row's own, as ids may be
        # placeholders.
        columns = real_positions(copied)[-1].nonzero().flatten().tolist()[1:]
        labels[-1, columns] = int(labels[-1, counted_columns[0]])
    return copied


# Hooks on parameters.


def check_gradient_hooks(model: torch.nn.Module) -> None:
    """Checks that hooks on parameters are linear. A step's gradient is the sum of its microbatches' gradients.

    Raises:
        RuntimeError: If a hook is not linear (clipping, quantising), or an optimizer steps as soon as a gradient comes.
    """
    for name, parameter in model.named_parameters():
        if steps_after_gradients(parameter):
            raise RuntimeError(
                'Optimizers must step once a batch, got: a `register_post_accumulate_grad_hook` on '
                f'{name!r}. Give the optimizer to the Trainer (docs/errors.md#gradient-hooks).'
            )
        for hook in gradient_hooks(parameter):
            if not _is_linear(hook, parameter):
                hook_name = getattr(hook, '__qualname__', hook)
                raise RuntimeError(
                    f'Gradient hooks must be linear, got: {hook_name} on {name!r}. Clip in '
                    'the algorithm `gradient_clipping`, which sees the whole step (docs/errors.md#gradient-hooks).'
                )


def _is_linear(hook: GradientHook, parameter: Tensor) -> bool:
    """Returns whether a hook changes a sum of gradients as it changes each of them."""
    generator = torch.Generator().manual_seed(0)
    # A hook of FSDP gets the part of this rank.
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    for size in GRADIENT_SIZES:
        first = torch.randn(local.shape, generator=generator).to(local) * size
        second = torch.randn(local.shape, generator=generator).to(local) * size
        # Linear: the change of a sum is the sum of the changes.
        changed_sum = _changed(hook, first + second)
        sum_of_changed = _changed(hook, first) + _changed(hook, second)
        difference = float((changed_sum - sum_of_changed).float().norm())
        tolerance = max(1e-4, 8 * torch.finfo(first.dtype).eps)
        if difference > tolerance * float(sum_of_changed.float().norm()):
            return False
    return True


def _changed(hook: GradientHook, gradient: Tensor) -> Tensor:
    changed = hook(gradient.clone())
    return gradient if changed is None else changed
