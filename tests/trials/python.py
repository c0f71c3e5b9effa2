# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Calls from Python. A call works, or raises a ValueError, a TypeError or a RuntimeError with a remedy.

Each section has a function that makes the call, and a table of the values that it is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
from tests.support.text import next_token_loss, one_layer_model, ragged_batch, text_row, text_rows
from tests.support.training import loader, train
from tests.trials.outcomes import WORKS, refusal


@dataclass(frozen=True)
class PythonCall:
    function: Callable[[], Any]
    expected: str

    def run(self, folder: Path) -> str:
        return refusal(self.function, ValueError, TypeError, RuntimeError)


Table = Mapping[str, tuple[Any, str]]
"""A value, and the key words of its refusal, by the name of the trial."""


def calls_with(call: Callable[[Any], Any], table: Table) -> dict[str, PythonCall]:
    """Returns a trial for each row of a table: the call with its value."""
    trials = {}
    for name, (value, expected) in table.items():
        function = functools.partial(call, value)
        trials[name] = PythonCall(function, expected)
    return trials


# Batches: one step of training.


def batch(**entries: Any) -> dict[str, Any]:
    """Returns three ragged rows, 9 columns wide, with these further entries."""
    ragged_rows = ragged_batch([(6, 3), (4, 4), (9, 2)])
    return {**ragged_rows, **entries}


def without(key: str, **entries: Any) -> dict[str, Any]:
    """Returns the batch without a key, and with these further entries."""
    entries_of_batch = batch(**entries)
    del entries_of_batch[key]
    return entries_of_batch


def train_on(spec: Any, model: Any = None, **options: Any) -> Any:
    """Trains a step with the algorithm, which has these options. Returns the Trainer."""
    if model is None:
        model = one_layer_model()
    algorithm = TokenAccumulation(**options)
    *_, trainer = train(model, spec, algorithms=[algorithm])
    return trainer


def train_step(batch_of_step: Any) -> None:
    spec = token_data_spec(loader(batch_of_step))
    train_on(spec)


BATCH = batch()
IDS = BATCH['input_ids']
LABELS = BATCH['labels']
NAN = float('nan')
VECTORS_OF_NAN = torch.full((3, 9, 32), NAN)
IN_LISTS = {key: value.tolist() for key, value in BATCH.items()}
IN_A_TUPLE = tuple(BATCH.values())
NARROW_POSITIONS = torch.arange(5).expand(3, 5)
FLOAT_POSITIONS = torch.arange(9.0).expand(3, 9)
NO_IMAGES = torch.zeros(3, dtype=torch.long)
BATCHES: Table = {
    'a step': (BATCH, WORKS),
    'a BatchEncoding': (BatchEncoding(BATCH), WORKS),
    'a batch in a tuple': (IN_A_TUPLE, 'mappings'),
    'a batch of lists': (IN_LISTS, 'tensors'),
    'a key that is a number': ({**BATCH, 3: torch.ones(3)}, WORKS),
    'a set in a batch': (batch(extra={1, 2}), "`batch['extra']`"),
    'ids that are floats': (batch(input_ids=IDS.float()), 'input_ids'),
    'ids of one dimension': (batch(input_ids=IDS[0]), 'input_ids'),
    'a batch without ids': (without('input_ids'), 'input_ids'),
    'embeddings of NaN': (
        without('input_ids', inputs_embeds=VECTORS_OF_NAN),
        'must be a number, got: nan (row 0)',
    ),
    'a batch without labels': (without('labels'), 'labels'),
    'labels of another width': (batch(labels=LABELS[:, :-1]), 'labels'),
    'sparse labels': (batch(labels=LABELS.to_sparse()), "`batch['labels']` must be a dense tensor"),
    'positions of another width': (batch(position_ids=NARROW_POSITIONS), 'position_ids'),
    'positions that are floats': (batch(position_ids=FLOAT_POSITIONS), WORKS),
    'numbers of images that are text': (batch(num_images=['a', 'b', 'c']), 'num_images'),
    'negative numbers of images': (batch(num_images=[-1, 0, 1]), 'num_images'),
    'one number of images for all rows': (batch(num_images=3), 'num_images'),
    'numbers of images in a tensor': (batch(num_images=NO_IMAGES), WORKS),
}


# Attention masks of a step.


def train_step_with_mask(mask: Any) -> None:
    changed_batch = batch(attention_mask=mask)
    train_step(changed_batch)


MASK = BATCH['attention_mask']
FLOAT_MASK = MASK.float()
MASK_WITH_GRADIENT = FLOAT_MASK.clone().requires_grad_()
QUANTISED_MASK = torch.quantize_per_tensor(FLOAT_MASK, 1.0, 0, torch.qint8)
MASKS: Table = {
    'a mask of booleans': (MASK.bool(), WORKS),
    'a mask of floats': (FLOAT_MASK, WORKS),
    'a mask of another width': (MASK[:, :-1], 'attention_mask'),
    'a mask of two of three rows': (torch.ones(2, 1, 9, 9), 'attention_mask'),
    'a mask on the meta device': (MASK.to('meta'), 'attention_mask'),
    'a mask with a gradient': (MASK_WITH_GRADIENT, 'detach'),
    'a mask of NaN': (MASK * NAN, 'attention_mask'),
    'an inverted mask': (1 - MASK, 'must be 1 where tokens are'),
    'a mask that hides all': (MASK * 0, 'no token in row 0'),
    'a mask of complex numbers': (MASK.to(torch.complex64), 'real'),
    'a quantised mask': (QUANTISED_MASK, 'dequantize'),
    'a mask in a list': (MASK.tolist(), 'attention_mask'),
}


# Token weights of a step, one for each row.


def train_step_with_weights(weights: torch.Tensor) -> None:
    weighted_batch = batch(loss_weights=weights)
    spec = token_data_spec(loader(weighted_batch))
    train_on(spec, token_weights='column')


WEIGHTS: Table = {
    'weights that are integers': (torch.ones(3, dtype=torch.long), WORKS),
    'complex weights': (torch.ones(3, dtype=torch.complex64), 'real tensor'),
}


# Runs with other models, losses and loaders.


class MeanOverRows(HuggingFaceModel):
    """Its loss has one term, a mean over rows."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        loss = next_token_loss(outputs['logits'], batch['labels'], reduction='sum')
        num_rows = len(batch['labels'])
        return {'lm': loss / num_rows}


def loss_of_samples() -> None:
    model: Any = MeanOverRows(one_layer_model(), use_logits=True)
    spec = token_data_spec(loader(BATCH))
    train_on(spec, model, loss_units={'lm': 'samples'})


def train_a_classifier() -> None:
    """Trains a head that gives a class for each row, with the labels in one column."""
    config = one_layer_model().config
    config.num_labels = 2
    config.pad_token_id = 0
    classifier = LlamaForSequenceClassification(config)
    model: Any = HuggingFaceModel(classifier, use_logits=True)
    class_of_rows = LABELS[:, :1] * 0
    spec = token_data_spec(loader(batch(labels=class_of_rows)))
    train_on(spec, model)


def train_a_frozen_model() -> None:
    model = one_layer_model()
    model.requires_grad_(False)
    spec = token_data_spec(loader(BATCH))
    train_on(spec, model)


def train_with_two_algorithms() -> None:
    spec = token_data_spec(loader(BATCH))
    algorithms = [TokenAccumulation(), TokenAccumulation()]
    train(one_layer_model(), spec, algorithms=algorithms)


def train_on_transformed_batches() -> None:
    spec = token_data_spec(loader(BATCH), microbatch_transforms=lambda microbatch: None)
    train_on(spec)


def train_on_nothing() -> None:
    empty_spec = token_data_spec(loader())
    train_on(empty_spec)


def fit_again_with_nothing() -> None:
    spec = token_data_spec(loader(BATCH))
    empty_spec = token_data_spec(loader())
    trainer = train_on(spec)
    trainer.fit(train_dataloader=empty_spec, duration='1ba', reset_time=False)


def token_data_spec_twice() -> None:
    spec = token_data_spec(loader(BATCH))
    token_data_spec(spec)


RUNS: Table = {
    'a loss of samples alone': (loss_of_samples, WORKS),
    'a model that classifies rows': (train_a_classifier, 'classifies whole rows'),
    'a model without trained parameters': (train_a_frozen_model, 'requires a gradient'),
    'the algorithm twice': (train_with_two_algorithms, 'once'),
    'a transform that returns nothing': (train_on_transformed_batches, 'be a Mapping'),
    'an empty loader': (train_on_nothing, 'batch'),
    'a second fit with an empty loader': (fit_again_with_nothing, 'at least one batch'),
    'token_data_spec twice': (token_data_spec_twice, 'DataSpec'),
    'a dataloader that is a number': (lambda: token_data_spec(3), 'dataloader'),
    'a state of another class': (lambda: TokenAccumulation().load_state_dict({'x': 1}), 'num_empty_steps'),
    'device_tflops that are a word': (lambda: TokenMonitor(device_tflops='1'), 'device_tflops'),
    'sources of a monitor that are a word': (lambda: TokenMonitor(sources='files'), '`sources`'),
}


# Plans of microbatches.


def plan(options: Mapping[str, Any]) -> None:
    plan_microbatches(**{'num_ranks': 1, 'max_tokens': 8, **options})


def suggestion_without_memory() -> None:
    suggest_microbatching([5, 6], num_ranks=1, global_batch_size=2, memory=None, device_memory_gib=1.0)


DATES = np.array(['2020'], dtype='datetime64[D]')
OVER_63_BITS = np.array([2**63 + 5], np.uint64)
PLANS: Table = {
    'lengths in a tensor': ({'lengths': torch.tensor([3, 4])}, WORKS),
    'lengths that are dates': ({'lengths': DATES}, 'must be integers'),
    'lengths of lists': ({'lengths': [[3], [4, 5]]}, '`lengths`'),
    'a plan of a word': ({'lengths': 'abc'}, 'lengths'),
    'a plan of a set': ({'lengths': {3, 4}}, 'in a set'),
    'a plan of one and a half ranks': ({'lengths': [2], 'num_ranks': 1.5}, 'num_ranks'),
    'a sample of 62 bits': ({'lengths': [2**62], 'max_tokens': 2**62}, 'finite and below 2147483648'),
    'a length that wraps around': ({'lengths': OVER_63_BITS, 'max_tokens': 9}, 'below 2147483648'),
}
COSTS: Table = {
    'a cost in seconds that is a word': (lambda: CostModel(seconds_per_token='fast'), '`seconds_per_token`'),
    'a suggestion without a memory model': (suggestion_without_memory, '`memory`'),
}


# Samplers and loaders of two global batches of two samples.


def sampler(**options: Any) -> RegroupingBatchSampler:
    return RegroupingBatchSampler([0] * 4, lengths=[4] * 4, global_batch_size=2, max_tokens=8, **options)


def sampler_of_rank(**options: Any) -> RegroupingBatchSampler:
    """Returns the sampler of the only rank."""
    return sampler(num_replicas=1, rank=0, **options)


def make_sampler(options: Mapping[str, Any]) -> None:
    sampler(**options)


def read_regrouped(options: Mapping[str, Any]) -> None:
    """Reads the first batch of a loader that has these options."""
    regrouping_loader = RegroupingDataLoader([0] * 4, batch_sampler=sampler_of_rank(), **options)
    next(iter(regrouping_loader))


def sampler_of_an_iterator() -> None:
    RegroupingBatchSampler(iter([0]), lengths=[4], global_batch_size=1, max_tokens=8)


def read_with_a_seed_of_numpy() -> None:
    seeded_sampler = sampler_of_rank(seed=np.int64(3))
    next(iter(seeded_sampler))


SHARES_OF_ONE_SAMPLE = LossShares([1], [1.0], [3])
SAMPLERS: Table = {
    'loss shares that are a number': ({'loss_shares': 3}, '`loss_shares`'),
    'loss shares of other data': ({'loss_shares': SHARES_OF_ONE_SAMPLE}, 'one entry per sample'),
    'a mixture that is a word': ({'mixture': 'x'}, '`mixture`'),
    'a sampler with a word for a seed': ({'seed': 'a'}, '`seed`'),
    'a sampler whose drop_last is a word': ({'drop_last': 'maybe'}, '`drop_last`'),
    'a rank above the number of replicas': ({'num_replicas': 2, 'rank': 5}, '`rank`'),
    'half a rank': ({'num_replicas': 2, 'rank': 0.5}, '`rank`'),
    'a sampler for 0 ranks': ({'num_replicas': 0, 'rank': 0}, '`num_replicas`'),
}
CALLS_OF_SAMPLERS: Table = {
    'an epoch of 70 bits': (lambda: sampler_of_rank().set_epoch(2**70), '`epoch`'),
    'an epoch before the first': (lambda: sampler_of_rank().set_epoch(-1), '`epoch` must be an integer from 0'),
    'a sampler that skips to a word': (lambda: sampler_of_rank().skip_to('a'), '`batch`'),
    'a plan of a batch that does not exist': (lambda: sampler().plan(1000), '`batch` must be an integer from 0 to 1'),
    'a sampler of data without a length': (sampler_of_an_iterator, '`dataset`'),
    'a seed of numpy': (read_with_a_seed_of_numpy, WORKS),
    'a loader of another dataset': (lambda: RegroupingDataLoader([0] * 3, batch_sampler=sampler()), 'of 4 samples'),
}
LOADERS: Table = {
    'a loader that shuffles': ({'shuffle': True}, 'mutually exclusive with batch_size, shuffle'),
    'a collator that is a word': ({'collate_fn': 'pad'}, '`collate_fn`'),
    'a collator that loses a sample': ({'collate_fn': lambda samples: text_row(4, 2)}, 'a row for each sample'),
}
MIXTURES: Table = {
    'loss shares of NaN': (lambda: LossShares([2, 2], [NAN, 1], [1] * 4), '`shares`'),
    'loss shares of an empty list': (lambda: LossShares([], [], []), '`shares`'),
    'a mixture of fractions of samples': (lambda: Mixture([1.5, 2.5]), '`sizes` must be integers'),
    'a mixture of an array': (lambda: Mixture(np.array([2, 2])), WORKS),
    'a mixture of one number': (lambda: Mixture(3), '`sizes`'),
    'epochs of a mixture that are words': (lambda: Mixture([2, 2], epochs=['a', 'b']), '`epochs`'),
    '100,000 epochs of a mixture': (lambda: Mixture([2], epochs=[1e5]), '`epochs` must be above 0'),
}


# Proofs that a model is exact.


def check_invariance(options: Mapping[str, Any]) -> None:
    """Checks a function that returns no gradients, unless other options are given."""
    arguments: dict[str, Any] = {
        'gradients': lambda cut: {},
        'rows': text_rows([(6, 3), (9, 2)]),
        **options,
    }
    verify_invariance(**arguments)


INVARIANCE: Table = {
    'gradients that are no function': ({'gradients': 3}, '`gradients`'),
    'gradients without names': ({'gradients': lambda cut: None}, 'by name'),
    'microbatches of one and a half rows': ({'microbatch_sizes': [1.5]}, '`microbatch_sizes`'),
    'a layout that is a word': ({'layout': 'x'}, '`layout`'),
    'invariance without a padding side': ({'padding_sides': ()}, '`padding_sides`'),
    'a tolerance of NaN': ({'tolerance': NAN}, 'tolerance'),
}


def check_isolation(options: Mapping[str, Any]) -> None:
    """Checks a Llama on two documents in a row of three ids, unless other options are given."""
    arguments: dict[str, Any] = {
        'model': one_layer_model(),
        'packed': {'input_ids': torch.tensor([[3, 4, 5]])},
        'documents': torch.tensor([[0, 0, 1]]),
        **options,
    }
    verify_isolation(**arguments)


HALF_A_DOCUMENT = torch.tensor([[0, 0.5, 1]])
NO_IDS = {'x': torch.ones(1, 3)}
UNKNOWN_ID = {'input_ids': torch.tensor([[1, 10**6, 3]])}
ISOLATION: Table = {
    'documents in a list': ({'documents': [[0, 0, 1]]}, WORKS),
    'half a document': ({'documents': HALF_A_DOCUMENT}, '`documents`'),
    'isolation of a number': ({'model': 3}, '`model`'),
    'isolation of a layer': ({'model': torch.nn.Linear(2, 2)}, 'Hugging Face model'),
    'isolation of no ids': ({'packed': NO_IDS}, 'input_ids'),
    'isolation of an id outside the vocabulary': ({'packed': UNKNOWN_ID}, '`packed`'),
}


# Layouts, counts and weights of a batch.


def weigh_narrow_logits() -> None:
    """The logits are one column narrower than the text."""
    weights = torch.zeros(3, 8, 5, requires_grad=True)
    logits = weights * 1
    apply_token_weights(logits, BATCH, 'sqrt')


def weights_of_boolean_labels() -> None:
    batch_with_booleans = batch(labels=LABELS.bool())
    step_loss_weights([batch_with_booleans])


LAYOUT = BatchLayout.infer(BATCH)
LAYOUTS: Table = {
    'a layout of a number': (lambda: BatchLayout.infer(3), '`batch`'),
    'a family by its name': (lambda: BatchLayout(family='llava'), '`family` must be a Family'),
    'an entry by its name': (lambda: LAYOUT.with_entries(boxes='row'), '`boxes` must be a Entry'),
    'a row that does not exist': (lambda: LAYOUT.select(BATCH, [99]), '`rows`'),
    'a width multiple of 0': (lambda: LAYOUT.trim(BATCH, width_multiple=0), '`width_multiple`'),
    'the number of rows of None': (lambda: LAYOUT.num_rows(None), '`batch`'),
    'an empty list of batches to join': (lambda: LAYOUT.concat([]), '`batches`'),
}
FORMULA: Table = {
    'token counts of a number': (lambda: count_tokens(3), '`batch`'),
    'weights of None': (lambda: step_loss_weights(None), '`microbatches`'),
    'weights of a word': (lambda: step_loss_weights(['a']), '`batch`'),
    'weights of boolean labels': (weights_of_boolean_labels, 'must be integers'),
    'weights of an unknown scheme': (lambda: step_loss_weights([BATCH], token_weights='squared'), 'token_weights'),
    'token weights for logits of another width': (weigh_narrow_logits, '`logits`'),
    'token weights of a number': (lambda: measure_token_weights(3).__enter__(), '`model`'),
    'a token weight on 0 ranks': (lambda: token_weight(3, 9, world_size=0), '`world_size`'),
    'a token weight of NaN tokens': (lambda: token_weight(1, NAN), '`num_tokens`'),
    'more tokens in a microbatch than in the step': (lambda: token_weight(9, 3), '`num_tokens`'),
}


# Conversations and datasets.


def encode(turns: Any) -> Any:
    encoder = ConversationEncoder(small())
    return encoder(turns)


def collate_samples(samples: Any) -> Any:
    collator = VisionLanguageCollator(small())
    return collator(samples)


def encode_with_frames_in_a_dict() -> None:
    encoder = ConversationEncoder(small(), video={'fps': 2})
    encoder([QUESTION])


def collate_one_sample() -> None:
    sample = encode([QUESTION, ANSWER])
    collate_samples(sample)


def lengths_of_more_samples_than_labels() -> None:
    three = np.ones(3)
    two = np.ones(2)
    LengthTable(lengths=three, image_tokens=three, loss_tokens=two, vision_patches=three)


QUESTION = {'role': 'user', 'content': 'A?'}
ANSWER = {'role': 'assistant', 'content': 'B.'}
CONVERSATIONS: Table = {
    'a conversation of plain texts': ([QUESTION, ANSWER], WORKS),
    'a conversation as one text': (['A?'], '`messages`'),
    'a turn without a role': ([{'content': 'A?'}], '`messages`'),
    'a turn whose content is None': ([{'role': 'user', 'content': None}], '`messages`'),
    'a part of an unknown type': ([{'role': 'user', 'content': [{'type': 'imag'}]}], '`messages`'),
    'an answer that weighs twice': ([QUESTION, {**ANSWER, 'weight': 2}], '`weight` of 0 or 1'),
}
SAMPLE_OF_ONE_DIMENSION = {'input_ids': torch.ones(3, dtype=torch.long)}
SAMPLE_WITHOUT_LABELS = {'input_ids': torch.ones(1, 3)}
SAMPLES: Table = {
    'a choice of frames in a dict': (encode_with_frames_in_a_dict, '`video` must be a VideoSampling'),
    'a sample that is not in a list': (collate_one_sample, '`samples`'),
    'a collator of no samples': (lambda: collate_samples([]), '`samples`'),
    'a collator of samples of one dimension': (lambda: collate_samples([SAMPLE_OF_ONE_DIMENSION]), '`input_ids`'),
    'a fingerprint of no samples': (lambda: identify_data([]), WORKS),
    'lengths of an empty dataset': (lambda: length_table([], small()), '`dataset`'),
    'lengths without labels': (lambda: build_length_table([SAMPLE_WITHOUT_LABELS], small()), 'labels'),
    'samples whose labels are all ignored': (
        lambda: build_length_table([text_row(9, 0)], small()),
        'labels to learn',
    ),
    'lengths of more samples than labels': (lengths_of_more_samples_than_labels, 'of one shape'),
}


def call(function: Callable[[], Any]) -> Any:
    return function()


CALLS: dict[str, PythonCall] = {
    **calls_with(train_step, BATCHES),
    **calls_with(train_step_with_mask, MASKS),
    **calls_with(train_step_with_weights, WEIGHTS),
    **calls_with(call, RUNS),
    **calls_with(plan, PLANS),
    **calls_with(call, COSTS),
    **calls_with(make_sampler, SAMPLERS),
    **calls_with(call, CALLS_OF_SAMPLERS),
    **calls_with(read_regrouped, LOADERS),
    **calls_with(call, MIXTURES),
    **calls_with(check_invariance, INVARIANCE),
    **calls_with(check_isolation, ISOLATION),
    **calls_with(call, LAYOUTS),
    **calls_with(call, FORMULA),
    **calls_with(encode, CONVERSATIONS),
    **calls_with(call, SAMPLES),
}
