# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""``token_data_spec`` and its split: caps, exactness, counters, evaluation, train metrics, bad arguments."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Evaluator, Event
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel

from composer_tokacc import BatchLayout, TokenAccumulation, row_counts, token_data_spec
from composer_tokacc.checks.cut_rules import CutRules, padded_candidates
from composer_tokacc.data_spec.split import layout_without_split, split_of
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


def mean_of_evaluation(trainer):
    """Returns the mean loss of the last evaluation, as Composer's metric has it."""
    metric = trainer.state.eval_metrics['eval']['LanguageCrossEntropy']
    return metric.compute().item()


def two_documents(num_rows: int = 1) -> dict[str, Any]:
    """Returns packed rows of two documents, of 5 and 7 tokens. All tokens have a label."""
    positions = torch.tensor([*range(5), *range(7)])
    batch = ragged_batch([(12, 12)] * num_rows)
    batch['position_ids'] = positions.expand(num_rows, 12)
    return batch


def shapes_of(microbatches):
    """Returns number and width of the rows of each microbatch."""
    return [microbatch['input_ids'].shape for microbatch in microbatches]


@for_each_side
@pytest.mark.parametrize('regroup', [True, False])
def test_cap_is_hard_and_rows_complete(side, regroup):
    rng = random.Random(0)
    for _ in range(100):
        num_rows = rng.randint(1, 24)
        lengths = [rng.randint(1, 40) for _ in range(num_rows)]
        longest_of_batch = max(lengths)
        batch = text_batch(lengths, side=side)
        size = rng.choice([1, 1.5, 2, 3, 5, 8])
        multiple = rng.choice([1, 1, 8])
        slot_tokens = longest_of_batch + rng.choice([0, 0, 7])

        microbatches = split(batch, size, slot_tokens=slot_tokens, regroup=regroup, width_multiple=multiple)

        assert rows_of(microbatches) == rows_of([batch])
        for microbatch in microbatches:
            num_rows, width = microbatch['input_ids'].shape
            assert num_rows * width <= size * slot_tokens
            if side == 'left':
                assert width == longest_of_batch  # nothing is trimmed before the check has seen the model
            else:
                lengths_of_rows = microbatch['attention_mask'].sum(dim=1)
                longest = int(lengths_of_rows.max())
                rounded_up = math.ceil(longest / multiple) * multiple
                assert width == min(rounded_up, longest_of_batch)


def test_rounded_widths_stay_within_the_cap():
    """A collator may pad to a fixed width, which is over the cap.

    The row of 33 tokens would get 48 columns, so it gets as many as the cap allows.
    """
    batch = text_batch([33, 20, 7], width=48)

    microbatches = split(batch, 1, slot_tokens=34, width_multiple=16)

    assert shapes_of(microbatches) == [(1, 34), (1, 32), (1, 16)]


@pytest.mark.parametrize('trains', [True, False], ids=['training', 'evaluation'])
def test_image_codes_are_not_trimmed(trains):
    """Two images of 6 codes each, in a batch of three rows. Text is 6 columns wide, too.

    The batch shows that the codes are not text, because they are not three rows. The two rows with images, selected
    from the batch, would not show it.
    """
    image_codes = torch.arange(12).reshape(2, 6)
    batch = text_batch([4, 4, 6], num_images=[1, 1, 0], image_codes=image_codes)

    with torch.set_grad_enabled(trains):
        with_images, without_image = split(batch, 2, slot_tokens=6)

    assert with_images['input_ids'].shape == (2, 4)
    assert torch.equal(with_images['image_codes'], image_codes)
    assert 'image_codes' not in without_image


@for_each_side
@pytest.mark.parametrize('regroup', [True, False])
def test_bfloat16_rows_of_either_side(side, regroup):
    """The error against double precision must be about as small as for one bfloat16 forward over the batch."""
    model = one_layer_model().bfloat16()
    batch = ragged_batch(side=side)
    expected_gradients, _ = reference_gradients(model, batch)
    gradients_of_one_forward = plain_gradients(hugging_face(model), batch)
    round_off = relative_error(gradients_of_one_forward, expected_gradients)

    single_rows = fit(model, batch, regroup=regroup, microbatch_size=1)
    three_rows = fit(model, batch, regroup=regroup, microbatch_size=3)
    stock, _, _ = train(model, loader(batch))

    assert relative_error(single_rows.gradients, expected_gradients) < 2 * round_off
    assert relative_error(three_rows.gradients, expected_gradients) < 2 * round_off
    # Stock Composer is off by more, so the test can fail.
    assert relative_error(stock.gradients, expected_gradients) > 10 * round_off


@for_each_side
@pytest.mark.parametrize('loss', ['per row', 'all positions'])
def test_bfloat16_refusals_of_either_side(side, loss):
    """A mean over rows or over all positions is refused, also in bfloat16. A mean over tokens is trained."""
    batch = ragged_batch(side=side)
    refused_model = NativeModel(loss).bfloat16()
    mean_over_tokens = NativeModel('causal').bfloat16()

    outcome = measure(refused_model, batch, 2)
    recorder = fit(mean_over_tokens, batch)

    assert outcome.kind == 'refused'
    assert recorder.gradients


@for_each_side
def test_rows_without_padding_prove_no_trimming(side):
    """On rows of equal length there is nothing to trim, so they must not prove that trimming is right."""
    layout = BatchLayout(family=TEXT)
    rules = CutRules()
    equal_rows = describe(layout, text_batch([5, 5], side=side))
    padded_rows = describe(layout, text_batch([5, 3], side=side))

    rules_for_equal_rows = list(padded_candidates(equal_rows, rules))
    rules_for_padded_rows = list(padded_candidates(padded_rows, rules))

    assert rules_for_equal_rows == [rules]
    assert len(rules_for_padded_rows) > 1


@for_each_side
@pytest.mark.parametrize(
    ('width', 'expected_widths'),
    [
        pytest.param(5, [5, 3], id='checked width'),
        pytest.param(6, [6, 6], id='wider'),
    ],
)
def test_wider_batches_keep_their_padding(side, width, expected_widths):
    """The check has looked at batches of up to 5 tokens."""
    rules_of_the_check = CutRules(left=5, right=5)
    batch = text_batch([width, 3], side=side)
    batch['labels'].fill_(-100)
    layout = BatchLayout(family=TEXT)
    facts = describe(layout, batch)

    widths = rules_of_the_check.widths(facts)

    assert widths == expected_widths


def test_same_batch_is_cut_alike():
    """A split changes nothing in the batch, so a second split gives the same microbatches."""
    batch = ragged_batch()
    unchanged = ragged_batch()
    spec = token_data_spec(loader(batch))

    first_split = spec.split_batch(batch, 2)
    second_split = spec.split_batch(batch, 2)

    for key, value in unchanged.items():
        assert torch.equal(batch[key], value)
        for first, second in zip(first_split, second_split, strict=True):
            assert torch.equal(first[key], second[key])


def test_order_is_kept_without_regrouping():
    microbatches = split(ragged_batch(), 2, regroup=False)

    lengths = []
    for microbatch in microbatches:
        for counts in row_counts.row_counts_of(microbatch):
            lengths.append(counts.real_tokens)
    expected_lengths = [length for length, _ in RAGGED]
    assert lengths == expected_lengths


def test_microbatch_of_no_row_is_refused():
    batch = ragged_batch()

    with pytest.raises(ValueError, match='must be positive, got: 0'):
        split(batch, 0)


def test_row_over_the_cap_is_refused():
    batch = named_batch()

    with pytest.raises(ValueError, match="got: sample 'sample-3' of 14 tokens, over the cap of 12"):
        split(batch, 2, slot_tokens=6)


@pytest.mark.parametrize('is_transformed', [False, True])
def test_counters_are_exact_ints(is_transformed):
    batch = ragged_batch()
    spec = token_data_spec(loader(batch))
    if is_transformed:
        batch = spec.batch_transforms(batch)

    loss_tokens = spec.get_num_tokens_in_batch(batch, token_type='loss_generating')
    tokens = spec.get_num_tokens_in_batch(batch)
    samples = spec.get_num_samples_in_batch(batch)

    # The rows of RAGGED have 2 + 3 + 7 + 11 + 1 + 2 labels, at 4 + 5 + 9 + 14 + 6 + 3 tokens.
    assert loss_tokens == 26
    assert tokens == 41
    assert samples == 6


def test_config_without_a_model_type():
    """A model of another library may have a config of its own type. The batch tells the layout."""
    model = NativeModel('unshifted')
    model.config = {'width': 8}
    batch = ragged_batch()
    data = token_data_spec(loader(batch), model=model)
    expected_gradients = plain_gradients(model, batch)

    recorder = fit(model, data)

    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


# Evaluation and metrics of training.


def evaluator_of(*batches: Any, microbatch_size: int | None = 2, **options: Any) -> Evaluator:
    """Returns an evaluator of these batches. Takes the options of ``token_data_spec``."""
    data = token_data_spec(loader(*batches), **options)
    return Evaluator(label='eval', dataloader=data, device_eval_microbatch_size=microbatch_size)


def model_with_metric(model: torch.nn.Module) -> HuggingFaceModel:
    """Returns a model of Composer that :func:`mean_of_evaluation` can read."""
    return hugging_face(model, eval_metrics=[LanguageCrossEntropy()])


@pytest.mark.parametrize('microbatch_size', [2, None])
def test_evaluation_gives_the_true_mean(microbatch_size):
    """The collator of an eval loader may leave out all rows of a batch, and the loader may have no batch size."""
    model = one_layer_model()
    batch = ragged_batch()
    layout = BatchLayout(family=TEXT)
    four_rows = layout.select(batch, range(4))
    no_rows = layout.select(batch, [])
    last_rows = layout.select(batch, [4, 5])
    evaluator = evaluator_of(four_rows, no_rows, last_rows, microbatch_size=microbatch_size)
    _, expected_loss = reference_gradients(model, batch)
    trainer = fit(model_with_metric(model), batch).trainer

    trainer.eval(evaluator)

    assert mean_of_evaluation(trainer) == pytest.approx(expected_loss, rel=1e-6)


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
    """If labels are shifted, another document would predict the first label of the second document, token 5."""
    batch = two_documents()
    expected_labels = batch['labels'].clone()
    if is_masked:
        expected_labels[0, 5] = -100
    model = EvaluatedLabels()
    evaluator = evaluator_of(batch, loss_tokens=rule)
    trainer = Trainer(model=model, eval_dataloader=evaluator, progress_bar=False)

    trainer.eval()

    [labels] = model.labels
    assert torch.equal(labels, expected_labels)


def test_evaluation_has_the_rule_of_training():
    """Labels that no other token predicts stay in packed rows, because the check of the first batch has shown it."""
    batch = two_documents()
    model = EvaluatedLabels()
    evaluator = evaluator_of(batch)

    fit(model, batch, eval_dataloader=evaluator, eval_interval='1ba')

    assert torch.equal(model.labels[-1], batch['labels'])


def test_evaluation_before_training_uses_named_rule():
    batch = two_documents()
    model = EvaluatedLabels()
    evaluator = evaluator_of(batch)
    algorithm = TokenAccumulation(loss_tokens='unshifted')
    trainer = Trainer(model=model, eval_dataloader=evaluator, algorithms=[algorithm], progress_bar=False)

    trainer.eval()

    [labels] = model.labels
    assert torch.equal(labels, batch['labels'])


def test_evaluation_has_layout_of_the_model():
    """Without a model, an integer for each row whose name speaks of images could belong to images."""
    model = one_layer_model()
    batch = ragged_batch()
    _, expected_loss = reference_gradients(model, batch)
    with_id = {**batch, 'image_id': torch.arange(6)}
    evaluator = evaluator_of(with_id)

    recorder = fit(model_with_metric(model), with_id, eval_dataloader=evaluator, eval_interval='1ba')

    assert mean_of_evaluation(recorder.trainer) == pytest.approx(expected_loss, rel=1e-6)


def test_shared_loader_keeps_its_layout():
    """Training and evaluation read the same loader. An evaluation must not change the layout of its split."""
    data = token_data_spec(loader(ragged_batch()))
    evaluator = Evaluator(label='eval', dataloader=data, device_eval_microbatch_size=2)

    def layout_of_split(state):
        return split_of(data.dataloader).layout

    after_training = On(Event.BATCH_END, layout_of_split)
    after_evaluation = On(Event.EVAL_END, layout_of_split)
    callbacks = [after_training, after_evaluation]

    fit(one_layer_model(), data, eval_dataloader=evaluator, eval_interval='1ba', callbacks=callbacks)

    assert after_training.values[-1] is after_evaluation.values[-1]


def test_evaluation_keeps_the_order():
    """The trainer drops the repeated samples of a sampler from the end of a batch, after the batch was split."""
    batch = ragged_batch()
    spec = token_data_spec(loader(batch))
    counted = spec.batch_transforms(batch)

    with torch.no_grad():
        four_rows, two_rows = spec.split_batch(counted, 4)
        three_rows, _ = spec.split_batch(four_rows, 3)

    assert len(four_rows['input_ids']) == 4
    assert len(two_rows['input_ids']) == 2
    lengths = three_rows['attention_mask'].sum(dim=1)
    assert lengths.tolist() == [4, 5, 9]


def test_total_loss_equals_composer_metric():
    batch = ragged_batch()
    composer_model = hugging_face(one_layer_model(), metrics=[LanguageCrossEntropy()])

    recorder = fit(composer_model, batch)

    [total] = recorder.logged('loss/train/total')
    *_, metric = recorder.logged('metrics/train/LanguageCrossEntropy')
    assert total == pytest.approx(metric, rel=1e-6)


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

    model = hugging_face(one_layer_model())
    batch = ragged_batch([(4, 1), (9, 5), (14, 11), (6, 2)])
    expected_gradients, expected_loss = reference_gradients(model.model, batch)
    late_metrics = On(Event.BEFORE_TRAIN_BATCH, set_metrics)
    optimizer = StepsTwice(model.parameters(), lr=0.0)

    recorder = fit(model, batch, callbacks=[late_metrics], optimizer=optimizer)

    first, second = recorder.steps
    *_, metric = recorder.logged('metrics/train/late')
    assert relative_error(first, expected_gradients) < 1e-6
    assert relative_error(second, expected_gradients) < 1e-6
    assert metric == pytest.approx(expected_loss, rel=1e-6)


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
    own_function = {name: len}

    with pytest.raises(TypeError, match=name):
        token_data_spec(loader(), **own_function)


def test_costlier_launch_makes_fewer_microbatches():
    """The longest row has 35 tokens, so a microbatch of 8 slots has the budget of 8 * 35."""
    lengths = list(range(4, 36))
    batch = text_batch(lengths)

    cheap = split(batch, 8, cost=CostModel(launch=1.0))
    costly = split(batch, 8, cost=CostModel(launch=1000.0))

    assert len(costly) < len(cheap)
    for shape in shapes_of(cheap + costly):
        assert shape.numel() <= 8 * 35


# Several models, several specs.


@pytest.mark.parametrize('has_spec', [True, False])
def test_unshifted_first_labels_of_documents(has_spec):
    """Each token has the next one as its label. So the first token of a document has a label, and its last has none."""
    batch = two_documents(num_rows=3)
    batch['labels'] = batch['input_ids'].roll(-1, dims=1)
    last_tokens = [4, 11]
    batch['labels'][:, last_tokens] = -100
    model = NativeModel('unshifted')
    expected_gradients = plain_gradients(model, batch)
    data = loader(batch)
    if has_spec:
        data = token_data_spec(data)

    recorder = fit(model, data, microbatch_size=1)

    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


def test_second_model_is_checked_again():
    """Trimming that is right for a Llama changes the positions of GPT-2.

    GPT-2 trains first on a batch without padding, which does not show it.
    """
    unpadded = ragged_batch([(9, 3)] * 4)
    padded_left = ragged_batch(side='left')
    batches = loader(padded_left, unpadded)
    spec = token_data_spec(batches)
    llama = SUBJECTS['llama'].model('large')
    gpt2 = SUBJECTS['gpt2'].model('large')
    expected_of_unpadded = plain_gradients(gpt2, unpadded)
    expected_of_padded = plain_gradients(gpt2, padded_left)

    fit(llama, spec, max_duration='2ba')
    batches.dataset.batches = [unpadded, padded_left]  # pyright: ignore[reportAttributeAccessIssue]
    recorder = fit(gpt2, spec, max_duration='2ba')

    first_step, second_step = recorder.steps
    assert relative_error(first_step, expected_of_unpadded) < 1e-6
    assert relative_error(second_step, expected_of_padded) < 1e-6


def test_only_used_spec_is_checked():
    batch = ragged_batch()
    data = loader(batch)
    used = token_data_spec(data)
    unused = token_data_spec(data, packing=True)
    assert unused.dataloader is used.dataloader
    model = SUBJECTS['bloom'].model('large')  # would refuse to be packed
    expected_gradients = plain_gradients(model, batch)

    recorder = fit(model, used)

    assert relative_error(recorder.gradients, expected_gradients) < 1e-6


@pytest.mark.parametrize('other_rank_can_tell', [True, False])
def test_entry_that_only_another_rank_has(other_rank_can_tell, monkeypatch):
    """All ranks do without a layout then, because their checks must run the same forwards."""
    model = hugging_face(one_layer_model())
    batch = ragged_batch()

    def answers_of_ranks(can_tell):
        return [can_tell, other_rank_can_tell]

    monkeypatch.setattr('composer_tokacc.data_spec.split.all_gather_object', answers_of_ranks)

    layout = layout_without_split(model, batch)

    has_layout = layout is not None
    assert has_layout == other_rank_can_tell


def test_split_learns_readings_from_check():
    """An entry of no model family may belong to the rows in several ways. The check finds out which are possible."""
    batch = ragged_batch()
    batch['scores'] = torch.arange(6.0)  # one for each row
    layouts = On(Event.BEFORE_TRAIN_BATCH, lambda state: split_of(state.train_dataloader).layout)

    fit(one_layer_model(), batch, callbacks=[layouts])

    [layout] = layouts.values
    assert layout.readings.keys() == {'scores'}


def test_unknown_entry_under_either_split():
    """Nothing tells the rows of an entry. Under the user's split there is no layout. Our split refuses the batch."""
    batch = ragged_batch()
    batch['notes'] = ['one', 'two']  # of six rows
    model = hugging_face(one_layer_model())
    spec = token_data_spec(loader(batch))

    assert layout_without_split(model, batch) is None
    with pytest.raises(ValueError, match=r"batch\['notes'\].*list of 2 row entries for 6 rows"):
        spec.split_batch(batch, 1)


def test_mask_that_a_callback_writes_into():
    """At BATCH_START facts about the rows are known already. The row must not be trimmed by its old mask."""
    model = one_layer_model()
    batch = ragged_batch(side='left')

    def attend(batch):
        batch['attention_mask'][0, :3] = 1

    changed = copy.deepcopy(batch)
    attend(changed)
    expected, _ = reference_gradients(model, changed)
    callback = On(Event.BATCH_START, lambda state: attend(state.batch))

    recorder = fit(model, batch, microbatch_size=1, callbacks=[callback])

    assert relative_error(recorder.gradients, expected) < 1e-6
