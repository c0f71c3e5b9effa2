# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Composer's DataSpec with exact counts of samples and tokens.

Of this subpackage only this module imports Composer when it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.core import DataSpec

from composer_tokacc.batch import Batch, BatchDict, check_dense, check_ids, map_tensors
from composer_tokacc.checks.first_batch import FirstBatchCheck
from composer_tokacc.checks.probe import Probe
from composer_tokacc.collectives import all_gather_object, get_world_size, max_over_ranks
from composer_tokacc.counting import LossRule, real_tokens
from composer_tokacc.data_spec.rank_widths import RankWidth, WidthSums, check_widths
from composer_tokacc.data_spec.split import MicrobatchSplit, register_split
from composer_tokacc.layout import PreSplitBatch, describe_all, microbatches_of
from composer_tokacc.refusals import InvalidInputError, NotExactError
from composer_tokacc.row_counts import (
    RowCounts,
    is_counted,
    num_samples,
    row_counts_of,
    with_counts,
    without_row_counts,
)
from composer_tokacc.weights import check_weights_are_used


class _RemovedCounts(NamedTuple):
    """The counts of the rows of a microbatch that :meth:`CountingDataSpec._transform_microbatch` has removed."""

    labels: torch.Tensor  # of the microbatch. Composer asks about a batch that holds this very tensor
    counts: Sequence[RowCounts]


class CountingDataSpec(DataSpec):
    """A DataSpec that tells Composer how many samples and tokens a batch has, and splits it by a ``MicrobatchSplit``.

    The numbers are sums over the row counts that travel with the batch, see :class:`.RowCounts`. If no algorithm has
    counted the rows, this class does.

    Args:
        dataloader: Yields the batches.
        split: Cuts them into microbatches.
        model: The model. Only needed without :class:`.TokenAccumulation`, which gets it from the trainer.
        rule: The loss rule that the user has named; None: it is to be found.
        batch_transforms: The user's own transforms of the whole batch.
        **kwargs: Passed to :class:`composer.core.DataSpec`.
    """

    def __init__(
        self,
        dataloader: Any,
        split: MicrobatchSplit,
        model: torch.nn.Module | None,
        rule: LossRule | None,
        batch_transforms: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._split = split
        self._model = model
        self._named_rule = rule
        # Set by the first-batch check of _check_rows(), which finds the rule of the model.
        self._proven_rule: LossRule | None = None
        self._batch_transforms = batch_transforms
        self._first_batch_check: FirstBatchCheck | None = None
        # Composer asks for samples and tokens of the current microbatch after its counts were removed.
        self._removed: _RemovedCounts | None = None
        super().__init__(
            dataloader,
            batch_transforms=self._begin_step,
            microbatch_transforms=self._transform_microbatch,
            split_batch=self._count_and_split,
            get_num_samples_in_batch=self._samples_for_composer,
            get_num_tokens_in_batch=None,  # this class has the method
            **kwargs,
        )

    def get_num_tokens_in_batch(self, batch: Any, token_type: str = 'total') -> int:
        """Returns the number of real tokens of a batch. For ``'loss_generating'``, the number of its loss tokens.

        Composer asks for loss tokens only if ``accumulate_train_batch_on_tokens`` is on.

        Raises:
            RuntimeError: If the loss tokens were counted by a rule that was not compared with the model's own.
        """
        counts = self._counts_of(batch)
        were_counted = all(row.rule for row in counts)  # rows that were not counted have none
        if token_type == 'total':
            # Composer also asks for a batch that the algorithm has not counted yet.
            if not were_counted:
                return _num_real_tokens(batch)
            return sum(row.real_tokens for row in counts)
        if not were_counted:
            # A user's own code asks. Composer asks for loss tokens only after the split, which has counted them. The
            # rule need not be proven, because this number weights no loss.
            counts = row_counts_of(with_counts(batch, self._counting_rule))
        elif not self._split.checked:
            # Composer would weight the loss of a microbatch by this number, but no check has compared the rule with the
            # model.
            raise NotExactError(
                '`token_data_spec` must know the model to count for `accumulate_train_batch_on_tokens`, got: no '
                '`model=`, or an evaluation before any training. The loss rule was not compared with the model, and a '
                'wrong one would weight tokens wrongly. Pass `model=`, or use TokenAccumulation with the flag off.'
            )
        return sum(row.loss_tokens for row in counts)

    # Before the split.

    def _begin_step(self, batch: Any) -> Any:
        """Begins a step: returns a batch of the loader after the user's transforms, and makes the split ready for it.

        Raises ValueError if the batch cannot be split.
        """
        if self._batch_transforms is not None:
            if isinstance(batch, PreSplitBatch):
                batch = batch.map(self._batch_transforms)
            else:
                batch = self._batch_transforms(batch)
        if not isinstance(batch, Mapping):
            raise InvalidInputError(
                f'The dataloader must yield mappings with `input_ids` and `labels`, got: {type(batch).__name__}.'
            )
        for microbatch in microbatches_of(batch):
            check_dense(microbatch)
            check_ids(microbatch)
        # Two specs may share a loader. The trainer uses this one, so the algorithm must find the split of this one.
        register_split(self.dataloader, self._split)
        # Forgets the previous step. If there is an algorithm, Composer calls it after this, and it sets the new step.
        self._split.step = None
        return batch

    def _count_and_split(self, batch: Batch, microbatch_size: int | float | None) -> list[BatchDict]:
        """Splits a batch, after checking and counting it if no algorithm did. This is Composer's ``split_batch``.

        The check is left out without ``model=``, in evaluation, and in a run that wants packing.
        """
        if microbatch_size is None:  # in evaluation, if the loader has no `batch_size` but a batch sampler
            microbatch_size = sys.maxsize  # so the batch stays whole
        if not is_counted(batch):
            is_training = torch.is_grad_enabled()  # Composer evaluates without gradients
            # Packing changes the model's attention, and only an algorithm can restore it at the end of a fit. So a run
            # that wants packing is not checked here, and without a check the split refuses to pack.
            wants_packing = bool(self._split.options.packing)
            if self._model is not None and is_training and not wants_packing:
                self._check_rows(self._model, batch, microbatch_size)
            if 'labels' in batch:
                batch = with_counts(batch, self._counting_rule)
        return self._split(batch, microbatch_size)

    @property
    def _counting_rule(self) -> LossRule:
        """The loss rule to count by.

        This is the first one that is known: the rule that the check has found, the one that the user has named, or the
        one of a model that is evaluated. If none is known, it is the rule of most models.
        """
        return self._proven_rule or self._named_rule or self._split.eval_rule or LossRule.CAUSAL

    def _check_rows(
        self,
        model: torch.nn.Module,
        batch: Batch,
        microbatch_size: int | float,
    ) -> None:
        """Runs the first-batch check and compares the widths of the ranks, because no algorithm does; a collective.

        It is called with every batch. The first call starts the split, which infers a layout if it has none, and makes
        the check. The check gives the split its rules, and computes only rows unlike those that it has seen before.
        """
        split = self._split
        if self._first_batch_check is None:
            check_weights_are_used(self.dataloader, batch, 'token')  # Composer weights all tokens alike
            split.start(model, batch, microbatch_size)
            self._first_batch_check = FirstBatchCheck(
                Probe.from_model(model, all_gather_object),
                split.layout,
                self._as_model_input,
                cutter=split,
                named_rule=self._named_rule,
                check_loss=True,
            )
        loss_facts = self._first_batch_check.prove(batch, microbatch_size)
        self._proven_rule = loss_facts.rule
        self._check_widths(batch, loss_facts.rule)

    def _check_widths(self, batch: Batch, rule: LossRule) -> None:
        """Raises RuntimeError on all ranks if they pad to different widths and this changes a row; a collective."""
        if get_world_size() == 1:
            return
        width = RankWidth.of(describe_all(self._split.layout, batch), self._split.rules, rule)
        # In most runs nothing depends on the width, and these two numbers are all that ranks exchange. Ranks lie on
        # different sides of the rotary limit only if one of them is beyond it.
        is_beyond = width.is_beyond_rotary_limit is True  # None: no limit, or no labels
        may_matter = max_over_ranks([width.pads_left, is_beyond])
        if not any(may_matter):
            return
        sums_of_ranks = np.array(all_gather_object(WidthSums.of(width)))
        sums = WidthSums._make(sums_of_ranks.sum(axis=0).tolist())
        # The sums are not outdated, because the first-batch check ran before they were made.
        check_widths(sums, lambda: width, are_sums_outdated=False, is_trimmed=True)

    def _as_model_input(self, batch: Batch) -> Any:
        """Returns a microbatch on the device of the model, transformed there as by the trainer."""
        assert self._model is not None
        device = next(self._model.parameters()).device
        on_device = map_tensors(batch, lambda tensor: tensor.to(device))
        return self._split.for_model(on_device)

    # On the device.

    def _transform_microbatch(self, batch: Any) -> Any:
        """Returns a microbatch as the model gets it: transformed, and perhaps without the counts of its rows.

        An algorithm needs the counts, and takes them out before the forward. Without one, but with ``model=``, they are
        removed here, because a compiled model would be compiled again for each new list of counts. Without both they
        stay, and ``HuggingFaceModel.forward`` drops them.
        """
        batch = self._split.for_model(batch)
        has_algorithm = self._split.step is not None
        if has_algorithm or self._model is None or not is_counted(batch):
            return batch
        self._removed = _RemovedCounts(batch['labels'], row_counts_of(batch))
        return without_row_counts(batch)

    # The counts behind the numbers that Composer asks for.

    def _counts_of(self, batch: Any) -> Sequence[RowCounts]:
        """Returns the counts of each row, even if :meth:`_transform_microbatch` has removed them from the batch."""
        if self._removed is not None and self._removed.labels is batch.get('labels'):
            return self._removed.counts
        return row_counts_of(batch)

    def _samples_for_composer(self, batch: Any) -> int:
        return sum(row.samples for row in self._counts_of(batch))


def _num_real_tokens(batch: Batch) -> int:
    """Returns the number of real tokens of a batch whose rows were not counted.

    It does not count the labels, to save time.
    """
    num_real = 0
    for microbatch in microbatches_of(batch):
        # Leaves out repeated samples, which count as 0 samples if they are marked. So far only a loader that plans
        # microbatches may have marked them, and it puts each into its own microbatch. The algorithm marks others later.
        if num_samples(microbatch) > 0:
            num_real += sum(real_tokens(microbatch))
    return num_real
