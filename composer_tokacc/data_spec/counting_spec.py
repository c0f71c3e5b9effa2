# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Composer's DataSpec with counts of ours; the one module of the split that needs Composer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from composer.core import DataSpec

from composer_tokacc.batch import check_dense, check_ids
from composer_tokacc.checks.first_batch import FirstBatchCheck
from composer_tokacc.checks.probe import Probe
from composer_tokacc.counting import count_tokens, mask_document_starts, real_tokens
from composer_tokacc.data_spec.split import MicrobatchSplit, register_split
from composer_tokacc.layout import BatchLayout, PreSplitBatch, microbatches_of
from composer_tokacc.metadata import annotate, is_annotated, metadata_of, num_samples, without_metadata


class CountingDataSpec(DataSpec):
    """Counts of a batch: carried where the algorithm or the split has counted already, else counted here."""

    def __init__(self, dataloader: Any, split: MicrobatchSplit, model: Any, loss_tokens: str, **kwargs: Any) -> None:
        self._split, self._model, self._rule = split, model, loss_tokens
        self._batch_transforms: Callable[[Any], Any] | None = kwargs.pop('batch_transforms', None)
        self._on_device: tuple[Any, Mapping[str, Any]] = (None, {})
        self._first_batch: FirstBatchCheck | None = None
        super().__init__(
            dataloader, batch_transforms=self._transform, microbatch_transforms=self._transform_microbatch,
            split_batch=self._split_counted, get_num_samples_in_batch=self._num_samples,
            get_num_tokens_in_batch=self._num_tokens, **kwargs,
        )  # fmt: skip

    def get_num_tokens_in_batch(self, batch: Any, token_type: str = 'total') -> int:
        """As Composer's, which asks for ``'loss_generating'`` only if ``accumulate_train_batch_on_tokens`` is on."""
        if token_type == 'loss_generating' and 'microbatches' in metadata_of(batch) and not self._split.checked:
            raise RuntimeError(
                '`token_data_spec` must know the model to count for `accumulate_train_batch_on_tokens`, got: no '
                "`model=`. A rule that is not the model's own would weight tokens wrongly without a word: pass "
                '`model=`, or use TokenAccumulation with the flag off.'
            )
        if token_type == 'total' and 'rule' not in self._carried(batch):
            # Asked before the algorithm counts, which would count the labels a second time.
            return sum(sum(real_tokens(one)) for one in microbatches_of(batch) if num_samples(one))
        return super().get_num_tokens_in_batch(batch, token_type)

    def _transform(self, batch: Any) -> Any:
        transforms = self._batch_transforms
        if transforms is not None:
            batch = batch.map(transforms) if isinstance(batch, PreSplitBatch) else transforms(batch)
        if not isinstance(batch, Mapping):
            raise ValueError(
                f'The dataloader must yield mappings with `input_ids` and `labels`, got: {type(batch).__name__}.'
            )
        for one in microbatches_of(batch):
            check_dense(one)
            check_ids(one)
        # Two specs may share a loader; the algorithm asks for the one that the trainer uses.
        register_split(self.dataloader, self._split)
        self._split.begin_step(copies_microbatches=None)  # until the algorithm, if there is one, begins with this batch
        if 'labels' not in batch or torch.is_grad_enabled():
            return batch  # in training annotate() masks, which knows the rule
        return batch.map(mask_document_starts) if isinstance(batch, PreSplitBatch) else mask_document_starts(batch)

    def _split_counted(self, batch: Any, microbatch_size: int | float) -> list[dict[str, Any]]:
        if self._model is not None and torch.is_grad_enabled() and not is_annotated(batch):
            self._check(batch, microbatch_size)
        if not is_annotated(batch) and 'labels' in batch:
            batch = annotate(batch, 'causal' if self._rule == 'auto' else self._rule)
        return self._split(batch, microbatch_size)

    def _check(self, batch: Any, microbatch_size: int | float) -> None:
        """Without the algorithm: has the check look at rows of every kind that the model was not asked about yet."""
        layout = self._split.given_layout or BatchLayout.infer(batch)
        if self._first_batch is None:
            self._split.start(self._model, self._split.given_layout, batch, microbatch_size)
            self._first_batch = FirstBatchCheck(
                Probe.from_model(self._model), layout, self._on_models_device, loss_tokens=self._rule, check_loss=True,
                microbatch_size=microbatch_size,
            )  # fmt: skip
        readings = {} if self._first_batch.layout is None else self._first_batch.layout.readings
        self._first_batch.layout = layout.with_readings(readings)  # of this batch, if the model does not tell
        rules = self._first_batch.prove(batch, self._split)
        assert rules is not None  # a split always has rules
        self._split.adopt(rules)
        if self._split.given_layout is not None:
            self._split.layout = self._first_batch.layout
        assert self._first_batch.rule is not None
        self._rule = self._first_batch.rule

    def _on_models_device(self, batch: Any) -> Any:
        """As the trainer moves a microbatch to the device and transforms it there."""
        device = next(self._model.parameters()).device
        moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        return self._split.as_the_model_takes_it(moved)

    def _transform_microbatch(self, batch: Any) -> Any:
        batch = self._split.as_the_model_takes_it(batch)
        copies_microbatches = self._split.copies_microbatches
        if type(batch) is dict and copies_microbatches is not None and not copies_microbatches():
            batch = _Uncopied(batch)
        if self._model is None or copies_microbatches is not None or not metadata_of(batch):
            return batch
        # No algorithm hides what the batch carries from a compiled forward, which would be compiled anew for each list.
        self._on_device = (ref(batch['labels']), metadata_of(batch))
        return without_metadata(batch)

    def _carried(self, batch: Any) -> Mapping[str, Any]:
        labels, facts = self._on_device
        return facts if labels is not None and labels() is batch.get('labels') else metadata_of(batch)

    def _num_samples(self, batch: Any) -> int:
        facts = self._carried(batch)
        return sum(facts['samples']) if 'samples' in facts else num_samples(batch)

    def _num_tokens(self, batch: Any) -> dict[str, int]:
        facts = self._carried(batch)
        if 'rule' in facts:
            return {'total': sum(facts['real_tokens']), 'loss_generating': sum(facts['loss_tokens'])}
        rule = 'causal' if self._rule == 'auto' else self._rule
        counts = [count_tokens(microbatch, rule) for microbatch in microbatches_of(batch)]
        total, loss_generating = sum(one.num_real for one in counts), sum(one.num_loss_generating for one in counts)
        return {'total': total, 'loss_generating': loss_generating}


class _Uncopied(dict):
    """A microbatch whose deep copy shares its tensors.

    Composer keeps a deep copy of every microbatch, on its device, for the metrics of training, also where there are
    none: images are copied for nothing then.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(self)
