# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Calls from Python. A call works, or raises a ValueError, a TypeError or a RuntimeError with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.models import HuggingFaceModel
from transformers import BatchEncoding, LlamaForSequenceClassification

from composer_tokacc import (
    BatchLayout,
    RegroupingBatchSampler,
    RegroupingDataLoader,
    TokenAccumulation,
    TokenMonitor,
    measure_token_weights,
    plan_microbatches,
    step_loss_weights,
    suggest_microbatching,
    token_data_spec,
    verify_invariance,
    verify_isolation,
)
from composer_tokacc.algorithm import apply_token_weights, token_weight
from composer_tokacc.counting import count_tokens
from composer_tokacc.data import ConversationEncoder, LengthTable, VisionLanguageCollator, identify_data, length_table
from composer_tokacc.data.lengths import build_length_table
from composer_tokacc.planning import CostModel
from composer_tokacc.sampling import LossShares, Mixture
from tests.data.chat_processors import small
from tests.support.text import collate, next_token_loss, one_layer_model, text_row, text_rows
from tests.support.training import loader, train
from tests.trials.outcomes import WORKS, refusal


@dataclass(frozen=True)
class PythonCall:
    function: Callable[[], Any]
    expected: str

    def run(self, folder: Path) -> str:
        return refusal(self.function, ValueError, TypeError, RuntimeError)


def batch(**changes: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Returns three ragged rows, some entries changed."""
    entries = collate(text_rows([(6, 3), (4, 4), (9, 2)]))
    for key, change in changes.items():
        entries[key] = change(entries[key])
    return entries


def without(key: str) -> dict[str, Any]:
    entries = batch()
    del entries[key]
    return entries


def step(*batches: Any, num_algorithms: int = 1, **options: Any) -> Callable[[], Any]:
    """Trains one step on the first batch, with the options of a data spec."""

    def run() -> None:
        algorithms = [TokenAccumulation() for _ in range(num_algorithms)]
        train(one_layer_model(), token_data_spec(loader(*batches), **options), algorithms=algorithms)

    return run


def step_with(**entries: Any) -> Callable[[], Any]:
    """Trains one step with further entries of the batch."""
    return step({**batch(), **entries})


def step_with_mask(change: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    """Trains one step with a changed attention mask."""
    return step(batch(attention_mask=change))


def weighted(weights: torch.Tensor) -> Callable[[], Any]:
    """Trains one step with weights of the tokens, one for each row."""

    def run() -> None:
        spec = token_data_spec(loader({**batch(), 'loss_weights': weights}))
        train(one_layer_model(), spec, algorithms=[TokenAccumulation(token_weights='column')])

    return run


LAYOUT = BatchLayout.infer(batch())


def sampler(**options: Any) -> RegroupingBatchSampler:
    """Returns a sampler of two global batches of two samples."""
    return RegroupingBatchSampler([0] * 4, lengths=[4] * 4, global_batch_size=2, max_tokens=8, **options)


def plan(lengths: Any, *, num_ranks: Any = 1, max_tokens: int = 8) -> Callable[[], Any]:
    return lambda: plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)


def regrouping(**options: Any) -> Callable[[], Any]:
    """Reads the first batch of a loader over that sampler."""

    def read() -> None:
        loader = RegroupingDataLoader([0] * 4, batch_sampler=sampler(num_replicas=1, rank=0), **options)
        next(iter(loader))

    return read


def invariance(gradients: Any = lambda cut: {}, **options: Any) -> Callable[[], Any]:
    return lambda: verify_invariance(gradients, text_rows([(6, 3), (9, 2)]), **options)


def isolation(model: Any = None, documents: Any = None, **inputs: Any) -> Callable[[], Any]:
    """Checks a Llama on two documents in a row of three ids, unless other values are given."""
    inputs = inputs or {'input_ids': torch.tensor([[3, 4, 5]])}
    if documents is None:
        documents = torch.tensor([[0, 0, 1]])

    def check() -> None:
        checked_model = one_layer_model() if model is None else model
        verify_isolation(checked_model, inputs, documents)

    return check


def suggestion(lengths: Any) -> Callable[[], Any]:
    return lambda: suggest_microbatching(lengths, num_ranks=1, global_batch_size=2, memory=None, device_memory_gib=1.0)


class MeanOverRows(HuggingFaceModel):
    """Its loss has one term, a mean over rows."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss = next_token_loss(outputs['logits'], batch['labels'], reduction='sum')
        num_rows = len(batch['labels'])
        return {'lm': loss / num_rows}


def loss_of_samples() -> None:
    model: Any = MeanOverRows(one_layer_model(), use_logits=True)
    train(model, token_data_spec(loader(batch())), algorithms=[TokenAccumulation(loss_units={'lm': 'samples'})])


def train_a_classifier() -> None:
    """Trains a head that gives a class for each row, with the labels in one column."""
    config = one_layer_model().config
    config.num_labels = 2
    config.pad_token_id = 0
    model: Any = HuggingFaceModel(LlamaForSequenceClassification(config), use_logits=True)
    spec = token_data_spec(loader(batch(labels=lambda labels: labels[:, :1] * 0)))
    train(model, spec, algorithms=[TokenAccumulation()])


def train_a_frozen_model() -> None:
    train(one_layer_model().requires_grad_(False), token_data_spec(loader(batch())), algorithms=[TokenAccumulation()])


def fit_again_with_nothing() -> None:
    *_, trainer = train(one_layer_model(), token_data_spec(loader(batch())), algorithms=[TokenAccumulation()])
    trainer.fit(train_dataloader=token_data_spec(loader()), duration='1ba', reset_time=False)


def encoded(*turns: Any, **options: Any) -> Callable[[], Any]:
    return lambda: ConversationEncoder(small(), **options)(list(turns))


QUESTION = {'role': 'user', 'content': 'A?'}
FUNCTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    # name: (function, expected)
    'a step': (step(batch()), WORKS),
    'labels of another width': (step(batch(labels=lambda labels: labels[:, :-1])), 'labels'),
    'a mask of another width': (step_with_mask(lambda mask: mask[:, :-1]), 'attention_mask'),
    'ids that are floats': (step(batch(input_ids=torch.Tensor.float)), 'input_ids'),
    'ids of one dimension': (step(batch(input_ids=lambda ids: ids[0])), 'input_ids'),
    'sparse labels': (step(batch(labels=torch.Tensor.to_sparse)), "`batch['labels']` must be a dense tensor"),
    'a mask on the meta device': (step_with_mask(lambda mask: mask.to('meta')), 'attention_mask'),
    'a mask with a gradient': (step_with_mask(lambda mask: mask.float().requires_grad_()), 'detach'),
    'positions of another width': (step_with(position_ids=torch.arange(5).expand(3, 5)), 'position_ids'),
    'a mask of booleans': (step_with_mask(torch.Tensor.bool), WORKS),
    'a mask of floats': (step_with_mask(torch.Tensor.float), WORKS),
    'a key that is a number': (step({**batch(), 3: torch.ones(3)}), WORKS),
    'a batch in a tuple': (step(tuple(batch().values())), 'mappings'),
    'a set in a batch': (step_with(extra={1, 2}), "`batch['extra']`"),
    'a state of another class': (lambda: TokenAccumulation().load_state_dict({'x': 1}), 'num_empty_steps'),
    'a mask of NaN': (step_with_mask(lambda mask: mask * float('nan')), 'attention_mask'),
    'an inverted mask': (step_with_mask(lambda mask: 1 - mask), 'must be 1 where tokens are'),
    'a mask that hides all': (step_with_mask(lambda mask: mask * 0), 'no token in row 0'),
    'positions that are floats': (step_with(position_ids=torch.arange(9.0).expand(3, 9)), WORKS),
    'weights that are integers': (weighted(torch.ones(3, dtype=torch.long)), WORKS),
    'loss shares that are a number': (lambda: sampler(loss_shares=3), '`loss_shares`'),
    'an epoch of 70 bits': (lambda: sampler(num_replicas=1, rank=0).set_epoch(2**70), '`epoch`'),
    'an epoch before the first': (
        lambda: sampler(num_replicas=1, rank=0).set_epoch(-1),
        '`epoch` must be an integer from 0',
    ),
    'gradients that are no function': (invariance(3), '`gradients`'),
    'microbatches of one and a half rows': (invariance(microbatch_sizes=[1.5]), '`microbatch_sizes`'),
    'half a document': (isolation(documents=torch.tensor([[0, 0.5, 1]])), '`documents`'),
    'lengths that are dates': (plan(np.array(['2020'], dtype='datetime64[D]')), 'must be integers'),
    'a loader that shuffles': (regrouping(shuffle=True), 'mutually exclusive with batch_size, shuffle'),
    'a model without trained parameters': (train_a_frozen_model, 'requires a gradient'),
    'a collator that is a word': (regrouping(collate_fn='pad'), '`collate_fn`'),
    'lengths of lists': (plan([[3], [4, 5]]), '`lengths`'),
    'a sampler with a word for a seed': (lambda: sampler(seed='a'), '`seed`'),
    'a sampler whose drop_last is a word': (lambda: sampler(drop_last='maybe'), '`drop_last`'),
    'a sampler that skips to a word': (lambda: sampler(num_replicas=1, rank=0).skip_to('a'), '`batch`'),
    'a collator that loses a sample': (regrouping(collate_fn=lambda samples: text_row(4, 2)), 'a row for each sample'),
    'a mask of complex numbers': (step_with_mask(lambda mask: mask.to(torch.complex64)), 'real'),
    'a quantised mask': (
        step_with_mask(lambda mask: torch.quantize_per_tensor(mask.float(), 1.0, 0, torch.qint8)),
        'dequantize',
    ),
    'a mask in a list': (step_with_mask(torch.Tensor.tolist), 'attention_mask'),
    'a mask of two of three rows': (step_with_mask(lambda mask: torch.ones(2, 1, 9, 9)), 'attention_mask'),
    'complex weights': (weighted(torch.ones(3, dtype=torch.complex64)), 'real tensor'),
    'a BatchEncoding': (step(BatchEncoding(batch())), WORKS),
    'embeddings of NaN': (
        step({**without('input_ids'), 'inputs_embeds': torch.full((3, 9, 32), float('nan'))}),
        'must be a number, got: nan (row 0)',
    ),
    'a sampler of data without a length': (
        lambda: RegroupingBatchSampler(iter([0]), lengths=[4], global_batch_size=1, max_tokens=8),
        '`dataset`',
    ),
    'a rank above the number of replicas': (lambda: sampler(num_replicas=2, rank=5), '`rank`'),
    'half a rank': (lambda: sampler(num_replicas=2, rank=0.5), '`rank`'),
    'lengths in a tensor': (plan(torch.tensor([3, 4])), WORKS),
    'weights of None': (lambda: step_loss_weights(None), '`microbatches`'),
    'a batch without labels': (step(without('labels')), 'labels'),
    'a batch without ids': (step(without('input_ids')), 'input_ids'),
    'numbers of images that are text': (step_with(num_images=['a', 'b', 'c']), 'num_images'),
    'negative numbers of images': (step_with(num_images=[-1, 0, 1]), 'num_images'),
    'one number of images for all rows': (step_with(num_images=3), 'num_images'),
    'numbers of images in a tensor': (step_with(num_images=torch.zeros(3, dtype=torch.long)), WORKS),
    'a layout of a number': (lambda: BatchLayout.infer(3), '`batch`'),
    'device_tflops that are a word': (lambda: TokenMonitor(device_tflops='1'), 'device_tflops'),
    'sources of a monitor that are a word': (lambda: TokenMonitor(sources='files'), '`sources`'),
    'a dataloader that is a number': (lambda: token_data_spec(3), 'dataloader'),
    'token_data_spec twice': (lambda: token_data_spec(token_data_spec(loader(batch()))), 'DataSpec'),
    'the algorithm twice': (step(batch(), num_algorithms=2), 'once'),
    'a loss of samples alone': (loss_of_samples, WORKS),
    'a model that classifies rows': (train_a_classifier, 'classifies whole rows'),
    'a plan of one and a half ranks': (plan([2], num_ranks=1.5), 'num_ranks'),
    'a plan of a word': (plan('abc'), 'lengths'),
    'a plan of a set': (plan({3, 4}), 'in a set'),
    'a sampler for 0 ranks': (lambda: sampler(num_replicas=0, rank=0), '`num_replicas`'),
    'a sample of 62 bits': (plan([2**62], max_tokens=2**62), 'finite and below 2147483648'),
    'a length that wraps around': (plan(np.array([2**63 + 5], np.uint64), max_tokens=9), 'below 2147483648'),
    'a seed of numpy': (lambda: next(iter(sampler(num_replicas=1, rank=0, seed=np.int64(3)))), WORKS),
    'loss shares of other data': (lambda: sampler(loss_shares=LossShares([1], [1.0], [3])), 'one entry per sample'),
    'loss shares of NaN': (lambda: LossShares([2, 2], [float('nan'), 1], [1] * 4), '`shares`'),
    'loss shares of an empty list': (lambda: LossShares([], [], []), '`shares`'),
    'a mixture of fractions of samples': (lambda: Mixture([1.5, 2.5]), '`sizes` must be integers'),
    'a mixture of an array': (lambda: Mixture(np.array([2, 2])), WORKS),
    'a mixture of one number': (lambda: Mixture(3), '`sizes`'),
    'epochs of a mixture that are words': (lambda: Mixture([2, 2], epochs=['a', 'b']), '`epochs`'),
    '100,000 epochs of a mixture': (lambda: Mixture([2], epochs=[1e5]), '`epochs` must be above 0'),
    'a cost in seconds that is a word': (lambda: CostModel(seconds_per_token='fast'), '`seconds_per_token`'),
    'a transform that returns nothing': (step(batch(), microbatch_transforms=lambda batch: None), 'be a Mapping'),
    'a family by its name': (lambda: BatchLayout(family='llava'), '`family` must be a Family'),
    'an entry by its name': (lambda: LAYOUT.with_entries(boxes='row'), '`boxes` must be a Entry'),
    'a conversation as one text': (encoded('A?'), '`messages`'),
    'a turn without a role': (encoded({'content': 'A?'}), '`messages`'),
    'a turn whose content is None': (encoded({'role': 'user', 'content': None}), '`messages`'),
    'a part of an unknown type': (encoded({'role': 'user', 'content': [{'type': 'imag'}]}), '`messages`'),
    'an answer that weighs twice': (
        encoded(QUESTION, {'role': 'assistant', 'content': 'B.', 'weight': 2}),
        '`weight` of 0 or 1',
    ),
    'a choice of frames in a dict': (encoded(QUESTION, video={'fps': 2}), '`video` must be a VideoSampling'),
    'a sample that is not in a list': (
        lambda: VisionLanguageCollator(small())(encoded(QUESTION, {'role': 'assistant', 'content': 'B.'})()),
        '`samples`',
    ),
    'a fingerprint of no samples': (lambda: identify_data([]), WORKS),
    'a mixture that is a word': (lambda: sampler(mixture='x'), '`mixture`'),
    'a plan of a batch that does not exist': (lambda: sampler().plan(1000), '`batch` must be an integer from 0 to 1'),
    'a suggestion without a memory model': (suggestion([5, 6]), '`memory`'),
    'a row that does not exist': (lambda: LAYOUT.select(batch(), [99]), '`rows`'),
    'a width multiple of 0': (lambda: LAYOUT.trim(batch(), width_multiple=0), '`width_multiple`'),
    'the number of rows of None': (lambda: LAYOUT.num_rows(None), '`batch`'),
    'a layout that is a word': (invariance(layout='x'), '`layout`'),
    'isolation of a number': (isolation(3), '`model`'),
    'isolation of no ids': (isolation(x=torch.ones(1, 3)), 'input_ids'),
    'weights of a word': (lambda: step_loss_weights(['a']), '`batch`'),
    'weights of boolean labels': (lambda: step_loss_weights([batch(labels=torch.Tensor.bool)]), 'must be integers'),
    'token weights for logits of another width': (
        lambda: apply_token_weights(torch.zeros(3, 8, 5, requires_grad=True) * 1, batch(), 'sqrt'),
        '`logits`',
    ),
    'a token weight on 0 ranks': (lambda: token_weight(3, 9, world_size=0), '`world_size`'),
    'more tokens in a microbatch than in the step': (lambda: token_weight(9, 3), '`num_tokens`'),
    'a token weight of NaN tokens': (lambda: token_weight(1, float('nan')), '`num_tokens`'),
    'isolation of an id outside the vocabulary': (isolation(input_ids=torch.tensor([[1, 10**6, 3]])), '`packed`'),
    'invariance without a padding side': (invariance(padding_sides=()), '`padding_sides`'),
    'an empty list of batches to join': (lambda: LAYOUT.concat([]), '`batches`'),
    'lengths of more samples than labels': (
        lambda: LengthTable(
            lengths=np.ones(3), image_tokens=np.ones(3), loss_tokens=np.ones(2), vision_patches=np.ones(3)
        ),
        'of one shape',
    ),
    'weights of an unknown scheme': (lambda: step_loss_weights([batch()], token_weights='squared'), 'token_weights'),
    'a loader of another dataset': (lambda: RegroupingDataLoader([0] * 3, batch_sampler=sampler()), 'of 4 samples'),
    'gradients without names': (invariance(lambda cut: None), 'by name'),
    'a tolerance of NaN': (invariance(tolerance=float('nan')), 'tolerance'),
    'isolation of a layer': (isolation(torch.nn.Linear(2, 2)), 'Hugging Face model'),
    'documents in a list': (isolation(documents=[[0, 0, 1]]), WORKS),
    'a batch of lists': (step({key: value.tolist() for key, value in batch().items()}), 'tensors'),
    'token weights of a number': (lambda: measure_token_weights(3).__enter__(), '`model`'),
    'token counts of a number': (lambda: count_tokens(3), '`batch`'),
    'a collator of no samples': (lambda: VisionLanguageCollator(small())([]), '`samples`'),
    'a collator of samples of one dimension': (
        lambda: VisionLanguageCollator(small())([{'input_ids': torch.ones(3, dtype=torch.long)}]),
        '`input_ids`',
    ),
    'a conversation of plain texts': (encoded(QUESTION, {'role': 'assistant', 'content': 'B.'}), WORKS),
    'lengths of an empty dataset': (lambda: length_table([], small()), '`dataset`'),
    'lengths without labels': (lambda: build_length_table([{'input_ids': torch.ones(1, 3)}], small()), 'labels'),
    'samples whose labels are all ignored': (
        lambda: build_length_table([text_row(9, 0)], small()),
        'labels to learn',
    ),
    'a second fit with an empty loader': (fit_again_with_nothing, 'at least one batch'),
    'an empty loader': (step(), 'batch'),
}
CALLS = {name: PythonCall(function, expected) for name, (function, expected) in FUNCTIONS.items()}
