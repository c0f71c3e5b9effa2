# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``token_data_spec`` and its split: caps, exactness, counters, evaluation, train metrics, bad arguments."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Evaluator, Event
from composer.metrics import LanguageCrossEntropy

from composer_tokacc import BatchLayout, TokenAccumulation, row_counts, token_data_spec
from composer_tokacc.data_spec.pieces import CutRules, padded_candidates
from composer_tokacc.data_spec.split import layout_of, split_of
from composer_tokacc.layout import describe
from composer_tokacc.planning import CostModel
from tests.matrix.harness import measure, plain_gradients
from tests.matrix.native_models import NativeModel
from tests.matrix.subjects import SUBJECTS
from tests.support.exactness import rows_of, split
from tests.support.small_batches import TEXT, text_batch
from tests.support.text import RAGGED, named_batch, one_layer_model, ragged_batch
from tests.support.training import On, fit, hugging_face, loader, reference_gradients, relative_error, train

for_each_side = pytest.mark.parametrize('side', ['left', 'right'])


@for_each_side
@pytest.mark.parametrize('regroup', [True, False])
def test_cap_is_hard_and_rows_complete(side, regroup):
    rng = random.Random(0)
    for _ in range(100):
        num_rows = rng.randint(1, 24)
        lengths = [rng.randint(1, 40) for _ in range(num_rows)]
        batch = text_batch(lengths, side=side)
        size = rng.choice([1, 1.5, 2, 3, 5, 8])
        multiple = rng.choice([1, 1, 8])
        slot_tokens = max(lengths) + rng.choice([0, 0, 7])
        microbatches = split(batch, size, slot_tokens=slot_tokens, regroup=regroup, width_multiple=multiple)
        assert rows_of(microbatches) == rows_of([batch])
        for microbatch in microbatches:
            num_rows, width = microbatch['input_ids'].shape
            assert num_rows * width <= size * slot_tokens
            if side == 'left':
                assert width == max(lengths)  # nothing is trimmed before the check has seen the model
            else:
                longest = int(microbatch['attention_mask'].sum(dim=1).max())
                rounded_up = math.ceil(longest / multiple) * multiple
                assert width == min(rounded_up, max(lengths))


def test_rounded_widths_stay_within_the_cap():
    """A collator may pad to a fixed width, which is over the cap."""
    batch = text_batch([33, 20, 7], width=48)
    microbatches = split(batch, 1, slot_tokens=34, width_multiple=16)
    assert [microbatch['input_ids'].shape for microbatch in microbatches] == [(1, 34), (1, 32), (1, 16)]


@for_each_side
@pytest.mark.parametrize('regroup', [True, False])
def test_bfloat16_rows_of_either_side(side, regroup):
    """The error against double precision must be about as small as for one bfloat16 forward over the batch."""
    model = one_layer_model().bfloat16()
    batch = ragged_batch(side=side)
    expected, _ = reference_gradients(model, batch)
    gradients = plain_gradients(hugging_face(model), batch)
    round_off = relative_error(gradients, expected)
    for microbatch_size in (1, 3):
        recorder = fit(model, batch, regroup=regroup, microbatch_size=microbatch_size)
        assert relative_error(recorder.gradients, expected) < 2 * round_off
    stock, _, _ = train(model, loader(batch))
    assert relative_error(stock.gradients, expected) > 10 * round_off  # so the test can fail


@for_each_side
@pytest.mark.parametrize('loss', ['per row', 'all positions'])
def test_bfloat16_refusals_of_either_side(side, loss):
    batch = ragged_batch(side=side)
    assert measure(NativeModel(loss).bfloat16(), batch, 2).kind == 'refused'
    assert fit(NativeModel('causal').bfloat16(), batch).gradients  # a mean over tokens is trained


@for_each_side
def test_rows_without_padding_prove_no_trimming(side):
    """On rows of equal length there is nothing to trim, so they must not prove that trimming is right."""
    layout = BatchLayout(family=TEXT)
    rules = CutRules()
    equal_rows = describe(layout, text_batch([5, 5], side=side))
    assert list(padded_candidates(equal_rows, rules)) == [rules]
    padded_rows = describe(layout, text_batch([5, 3], side=side))
    assert len(list(padded_candidates(padded_rows, rules))) > 1


@for_each_side
@pytest.mark.parametrize(('width', 'widths'), [(5, [5, 3]), (6, [6, 6])])
def test_wider_batches_keep_their_padding(side, width, widths):
    """The check has looked at batches of up to 5 tokens."""
    batch = text_batch([width, 3], side=side)
    batch['labels'].fill_(-100)
    facts = describe(BatchLayout(family=TEXT), batch)
    assert CutRules(left=5, right=5).widths(facts) == widths


def test_same_batch_is_cut_alike():
    batch = ragged_batch()
    spec = token_data_spec(loader(batch))
    first = spec.split_batch(batch, 2)
    second = spec.split_batch(batch, 2)
    original = ragged_batch()
    for key, value in original.items():
        assert torch.equal(batch[key], value)
        for first_part, second_part in zip(first, second, strict=True):
            assert torch.equal(first_part[key], second_part[key])


def test_order_is_kept_without_regrouping():
    lengths = []
    for microbatch in split(ragged_batch(), 2, regroup=False):
        lengths += [row.real_tokens for row in row_counts.row_counts_of(microbatch)]
    assert lengths == [length for length, _ in RAGGED]


def test_microbatch_without_room_is_refused():
    with pytest.raises(ValueError, match='must be positive, got: 0'):
        split(ragged_batch(), 0)
    with pytest.raises(ValueError, match="got: sample 'sample-3' of 14 tokens, over the cap of 12"):
        split(named_batch(), 2, slot_tokens=6)


def test_counters_are_exact_ints():
    batch = ragged_batch()
    spec = token_data_spec(loader(batch))
    for counted in (batch, spec.batch_transforms(batch)):
        assert spec.get_num_tokens_in_batch(counted, token_type='loss_generating') == 26
        assert spec.get_num_tokens_in_batch(counted) == sum(length for length, _ in RAGGED)
        assert spec.get_num_samples_in_batch(counted) == 6


def test_config_without_a_model_type():
    """A model of another library may have a config of its own type. The batch tells the layout."""
    model = NativeModel('unshifted')
    model.config = {'width': 8}
    batch = ragged_batch()
    data = token_data_spec(loader(batch), model=model)
    recorder = fit(model, data)
    assert relative_error(recorder.gradients, plain_gradients(model, batch)) < 1e-6


# Evaluation and metrics of training.


def evaluator_of(*batches: Any, microbatch_size: int | None = 2, **options: Any) -> Evaluator:
    data = token_data_spec(loader(*batches), **options)
    return Evaluator(label='eval', dataloader=data, device_eval_microbatch_size=microbatch_size)


@pytest.mark.parametrize('microbatch_size', [2, None])
def test_evaluation_gives_the_true_mean(microbatch_size):
    """The collator of an eval loader may leave out all rows of a batch, and the loader may have no batch size."""
    model = one_layer_model()
    batch = ragged_batch()
    parts = []
    for rows in (slice(0, 4), slice(0, 0), slice(4, 6)):
        parts.append({key: value[rows] for key, value in batch.items()})
    _, loss = reference_gradients(model, batch)
    composer_model = hugging_face(model, eval_metrics=[LanguageCrossEntropy()])
    trainer = fit(composer_model, batch).trainer
    trainer.eval(evaluator_of(*parts, microbatch_size=microbatch_size))
    metric = trainer.state.eval_metrics['eval']['LanguageCrossEntropy']
    assert metric.compute().item() == pytest.approx(loss, rel=1e-6)


def two_documents() -> dict[str, Any]:
    """Returns a packed row of two documents. All tokens have a label."""
    return {**ragged_batch([(12, 12)]), 'position_ids': torch.tensor([[*range(5), *range(7)]])}


class EvaluatedLabels(NativeModel):
    """A model whose loss is not shifted. It records the labels that it is evaluated with."""

    def __init__(self) -> None:
        super().__init__('unshifted')
        self.labels: list[torch.Tensor] = []

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        self.labels.append(batch['labels'].clone())
        return self(batch)


@pytest.mark.parametrize(('rule', 'is_masked'), [('auto', True), ('causal', True), ('unshifted', False)])
def test_document_starts_in_evaluation(rule, is_masked):
    """A label that no other document predicts stays."""
    batch = two_documents()
    model = EvaluatedLabels()
    evaluator = evaluator_of(batch, loss_tokens=rule)
    Trainer(model=model, eval_dataloader=evaluator, progress_bar=False).eval()
    (labels,) = model.labels
    expected = batch['labels'].clone()
    if is_masked:
        expected[0, 5] = -100
    assert torch.equal(labels, expected)


def test_evaluation_has_the_rule_of_training():
    """Labels that no other token predicts stay in packed rows, because the check of the first batch has shown it."""
    batch = two_documents()
    model = EvaluatedLabels()
    fit(model, batch, eval_dataloader=evaluator_of(batch), eval_interval='1ba')
    assert torch.equal(model.labels[-1], batch['labels'])


def test_evaluation_before_training_has_the_named_rule():
    batch = two_documents()
    model = EvaluatedLabels()
    algorithm = TokenAccumulation(loss_tokens='unshifted')
    Trainer(model=model, eval_dataloader=evaluator_of(batch), algorithms=[algorithm], progress_bar=False).eval()
    (labels,) = model.labels
    assert torch.equal(labels, batch['labels'])


def test_evaluation_has_the_layout_of_the_model():
    """Without a model, an integer for each row whose name speaks of images could belong to images."""
    model = one_layer_model()
    batch = ragged_batch()
    batch['image_id'] = torch.arange(len(batch['labels']))
    composer_model = hugging_face(model, eval_metrics=[LanguageCrossEntropy()])
    recorder = fit(composer_model, batch, eval_dataloader=evaluator_of(batch), eval_interval='1ba')
    metric = recorder.trainer.state.eval_metrics['eval']['LanguageCrossEntropy']
    _, loss = reference_gradients(model, ragged_batch())
    assert metric.compute().item() == pytest.approx(loss, rel=1e-6)


def test_training_keeps_its_layout_if_evaluation_shares_the_loader():
    data = token_data_spec(loader(ragged_batch()))
    evaluator = Evaluator(label='eval', dataloader=data, device_eval_microbatch_size=2)
    layouts = [On(event, lambda state: split_of(data.dataloader).layout) for event in (Event.BATCH_END, Event.EVAL_END)]
    fit(one_layer_model(), data, eval_dataloader=evaluator, eval_interval='1ba', callbacks=layouts)
    assert layouts[0].values[-1] is layouts[1].values[-1]


def test_evaluation_keeps_the_order():
    """The trainer drops the repeated samples of a sampler from the end of a batch, after the batch was split."""
    batch = ragged_batch()
    spec = token_data_spec(loader(batch))
    with torch.no_grad():
        microbatches = spec.split_batch(spec.batch_transforms(batch), 4)
        assert [len(microbatch['input_ids']) for microbatch in microbatches] == [4, 2]
        first = spec.split_batch(microbatches[0], 3)[0]
    assert first['attention_mask'].sum(dim=1).tolist() == [4, 5, 9]


def test_total_loss_equals_composer_metric():
    composer_model = hugging_face(one_layer_model(), metrics=[LanguageCrossEntropy()])
    recorder = fit(composer_model, ragged_batch())
    metric = recorder.logged('metrics/train/LanguageCrossEntropy')[-1:]
    assert recorder.logged('loss/train/total') == pytest.approx(metric, rel=1e-6)


class StepsTwice(torch.optim.SGD):
    """Calls the closure twice for each step, as L-BFGS may."""

    def step(self, closure):
        closure()
        return super().step(closure)


def test_late_train_metrics_keep_labels(monkeypatch):
    """Composer's eval_forward shifts the labels of the copy in place. A closure called again would train on them."""
    monkeypatch.setattr(Trainer, '_use_closures', lambda _: True)

    def set_metrics(state):
        state.train_metrics = {'late': LanguageCrossEntropy()}

    composer_model = hugging_face(one_layer_model())
    batch = ragged_batch([(4, 1), (9, 5), (14, 11), (6, 2)])
    expected, loss = reference_gradients(composer_model.model, batch)
    recorder = fit(
        composer_model,
        batch,
        callbacks=[On(Event.BEFORE_TRAIN_BATCH, set_metrics)],
        optimizer=StepsTwice(composer_model.parameters(), lr=0.0),
    )
    first, second = recorder.steps
    assert relative_error(first, expected) < 1e-6
    assert relative_error(second, expected) < 1e-6
    assert recorder.logged('metrics/train/late')[-1] == pytest.approx(loss, rel=1e-6)


# Arguments.


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'loss_tokens': 'shifted'}, "must be .*got: 'shifted'"),
        ({'on_oversize': 'skip'}, "`on_oversize` must be 'raise' or 'warn', got: 'skip'"),
        ({'slot_tokens': 0}, '`slot_tokens` must be a positive integer, got: 0'),
        ({'width_multiple': -8}, '`width_multiple` must be a positive integer, got: -8'),
        ({'slot_tokens': True}, '`slot_tokens` must be a positive integer, got: True'),
        ({'max_image_tokens': 0}, '`max_image_tokens` must be a positive integer, got: 0'),
        ({'width_multiple': None}, '`width_multiple` must be a positive integer, got: None'),
        ({'equal_counts': 'always'}, "`equal_counts` must be True, False or 'auto'"),
        ({'regroup': 'no'}, "`regroup` must be True or False, got: 'no'"),
        ({'packing': 1}, "`packing` must be True, False or 'auto', got: 1"),
        ({'layout': 'llava'}, "`layout` must be a BatchLayout, got: 'llava'"),
        ({'model': 'llama'}, "`model` must be a Module, got: 'llama'"),
        ({'cost': 'auto'}, "`cost` must be a CostModel, got: 'auto'"),
    ],
)
def test_bad_arguments_get_one_clear_line(kwargs, message):
    with pytest.raises(ValueError, match=message):
        token_data_spec(loader(), **kwargs)


@pytest.mark.parametrize('name', ['split_batch', 'get_num_samples_in_batch', 'get_num_tokens_in_batch'])
def test_own_functions_are_refused(name):
    with pytest.raises(TypeError, match=name):
        token_data_spec(loader(), **{name: len})


def test_costlier_launch_makes_fewer_microbatches():
    batch = ragged_batch([(length, 2) for length in range(4, 36)])
    counts = []
    for launch in (1.0, 1000.0):
        microbatches = split(batch, 8, cost=CostModel(launch=launch))
        for microbatch in microbatches:
            assert microbatch['input_ids'].numel() <= 8 * 35
        counts.append(len(microbatches))
    cheap, costly = counts
    assert costly < cheap


# Several models, several specs.


@pytest.mark.parametrize('has_spec', [True, False])
def test_unshifted_first_labels_of_documents(has_spec):
    batch = ragged_batch([(12, 12)] * 3)
    batch['labels'] = batch['input_ids'].roll(-1, dims=1)
    batch['labels'][:, [4, 11]] = -100  # last tokens of the two documents of each row
    batch['position_ids'] = torch.tensor([[*range(5), *range(7)]] * 3)
    model = NativeModel('unshifted')
    data = loader(batch)
    recorder = fit(model, token_data_spec(data) if has_spec else data, microbatch_size=1)
    assert relative_error(recorder.gradients, plain_gradients(model, batch)) < 1e-6


def test_second_model_is_checked_again():
    """Trimming that is right for a Llama changes the positions of GPT-2."""
    full = ragged_batch([(9, 3)] * 4)
    padded_left = ragged_batch(side='left')
    batches = loader(padded_left, full)
    spec = token_data_spec(batches)
    fit(SUBJECTS['llama'].model('large'), spec, max_duration='2ba')
    batches.dataset.batches = [full, padded_left]  # pyright: ignore[reportAttributeAccessIssue]
    model = SUBJECTS['gpt2'].model('large')
    recorder = fit(model, spec, max_duration='2ba')
    for gradients, batch in zip(recorder.steps, (full, padded_left), strict=True):
        assert relative_error(gradients, plain_gradients(model, batch)) < 1e-6


def test_only_used_spec_is_checked():
    batch = ragged_batch()
    data = loader(batch)
    used = token_data_spec(data)
    unused = token_data_spec(data, packing=True)
    assert unused.dataloader is used.dataloader
    model = SUBJECTS['bloom'].model('large')  # would refuse to be packed
    recorder = fit(model, used)
    assert relative_error(recorder.gradients, plain_gradients(model, batch)) < 1e-6


def test_entry_that_only_another_rank_has(monkeypatch):
    """All ranks do without a layout then, because their checks must run the same forwards."""
    state: Any = SimpleNamespace(model=hugging_face(one_layer_model()), batch=ragged_batch())
    assert layout_of(state, None) is not None
    monkeypatch.setattr('composer_tokacc.data_spec.split.all_gather_object', lambda can_tell: [can_tell, False])
    assert layout_of(state, None) is None


def test_unknown_entry_with_and_without_our_split():
    """If the user's own split cuts the batch, an entry that nothing tells by row only means that rows stay unknown."""
    batch = {**ragged_batch(), 'notes': ['one', 'two']}  # of six rows
    state: Any = SimpleNamespace(model=hugging_face(one_layer_model()), batch=batch)
    assert layout_of(state, None) is None
    data = loader(batch)
    spec = token_data_spec(data)
    assert layout_of(state, split_of(data)) is not None
    with pytest.raises(ValueError, match=r"batch\['notes'\].*list of 2 row entries for 6 rows"):
        spec.split_batch(batch, 1)
