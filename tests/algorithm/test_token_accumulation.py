# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Each step of the Trainer has the gradient of one plain forward over its batch, or is refused.

``fit`` and ``assert_exact`` split a plain ``batch`` with ``token_data_spec``. Composer itself splits ``loader(batch)``.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
from composer import Trainer
from composer.algorithms import SAM, GradientClipping
from composer.callbacks import NaNMonitor
from composer.core import Algorithm, DataSpec, Event
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from transformers.modeling_outputs import CausalLMOutput

from composer_tokacc import BatchLayout, TokenAccumulation, token_data_spec
from composer_tokacc.algorithm import token_accumulation
from composer_tokacc.algorithm.setup import takes_media
from composer_tokacc.checks.step import MicrobatchRecord
from tests.support.exactness import family_batch
from tests.support.families import FAMILIES
from tests.support.half_precision import SCALE, EnabledScaler, set_precision
from tests.support.launch import ROOT
from tests.support.mixtures import mixture_of_experts
from tests.support.text import (
    ONE_UNLABELLED,
    RAGGED,
    collate,
    next_token_loss,
    one_layer_model,
    packed_row,
    ragged_batch,
    text_rows,
)
from tests.support.training import (
    COMPOSERS_FLAG,
    TOLERANCE,
    GradientRecorder,
    On,
    assert_exact,
    fit,
    hugging_face,
    loader,
    reference_gradients,
    relative_error,
    weights_unchanged,
)
from tests.support.weights import column, weighted_reference


def num_alive(references):
    """Returns how many of these weakly referenced tensors are still in memory."""
    alive = [reference for reference in references if reference() is not None]
    return len(alive)


def assert_same_tensors(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.fixture
def model():
    return one_layer_model()


@pytest.fixture
def batch():
    return ragged_batch()


def split_in_order(data):
    return token_data_spec(data, regroup=False)


@pytest.mark.parametrize(
    ('side', 'make_spec', 'microbatch_size'),
    [
        ('left', DataSpec, 2),
        ('left', split_in_order, 3),
        ('left', token_data_spec, 1),
        ('left', token_data_spec, 3),
        ('right', DataSpec, 2),
        ('right', DataSpec, 6),
        ('right', split_in_order, 1),
        ('right', token_data_spec, 1),
        ('right', token_data_spec, 3),
    ],
)
def test_gradient_does_not_depend_on_the_cut(model, side, make_spec, microbatch_size):
    batch = ragged_batch(side=side)
    data = make_spec(loader(batch))
    assert_exact(model, data, batch=batch, microbatch_size=microbatch_size)


@pytest.mark.parametrize(
    'options',
    [
        pytest.param({}, id='counts samples'),
        pytest.param(COMPOSERS_FLAG, id='counts tokens'),
    ],
)
def test_stock_composer_is_wrong(model, options):
    """Its wrong weights give an error of over 10 % on these rows. Its own counter also counts padding."""
    four_rows = RAGGED[:4]
    batch = ragged_batch(four_rows)
    expected, _ = reference_gradients(model, batch)

    recorder = fit(model, loader(batch), algorithms=[], microbatch_size=1, **options)

    assert relative_error(recorder.gradients, expected) > 0.1


# Composer's own flag.


def test_flag_with_our_counter(model, batch):
    data = token_data_spec(loader(batch), model=model)
    assert_exact(model, data, batch=batch, algorithms=[], **COMPOSERS_FLAG)


def test_flag_with_our_algorithm(model, batch):
    """Composer counts rows times one common width. On one rank that gives the same weights as counting rows."""
    algorithms = [TokenAccumulation()]
    assert_exact(model, loader(batch), batch=batch, algorithms=algorithms, **COMPOSERS_FLAG)


@pytest.mark.parametrize('rule', ['auto', 'causal', 'unshifted'])
def test_flag_needs_a_model_to_count_by(model, batch, rule):
    data = token_data_spec(loader(batch), loss_tokens=rule)
    with pytest.raises(RuntimeError, match=r'Pass `model=`'):
        fit(model, data, algorithms=[], **COMPOSERS_FLAG)


def test_flag_with_wrong_rule_is_refused(model, batch):
    data = token_data_spec(loader(batch), model=model, loss_tokens='unshifted')
    with pytest.raises(RuntimeError, match=r"Set `loss_tokens='causal'`"):
        fit(model, data, algorithms=[], **COMPOSERS_FLAG)


def test_flag_with_our_counter_and_algorithm(model, batch):
    """Both would weigh by tokens. The run is refused before the weights move."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with weights_unchanged(model), pytest.raises(RuntimeError, match='accumulate_train_batch_on_tokens'):
        fit(model, batch, **COMPOSERS_FLAG, optimizer=optimizer)


# Users may change the batch, the split or the loss.


def test_custom_sample_counter_is_refused(model, batch):
    def count_tokens(batch):
        return int(batch['attention_mask'].sum())

    spec = DataSpec(loader(batch), get_num_samples_in_batch=count_tokens)
    with pytest.raises(RuntimeError, match='get_num_samples_in_batch'):
        fit(model, spec)


def test_labels_masked_after_counting_are_refused(model, batch):
    def mask_last_labels(batch):
        batch['labels'][:, -2:] = -100
        return batch

    data = token_data_spec(loader(batch), microbatch_transforms=mask_last_labels)
    with pytest.raises(RuntimeError, match='microbatch_transforms'):
        fit(model, data)


def test_labels_masked_before_counting(model):
    def mask_last_label(batch):
        labels = batch['labels'].clone()
        labels[:, -1:] = -100
        return {**batch, 'labels': labels}

    batch = ragged_batch(side='left')
    masked_batch = mask_last_label(batch)
    assert_exact(model, batch, batch=masked_batch, batch_transforms=mask_last_label)


def test_split_that_drops_rows_is_refused(model, batch):
    def first_microbatch_only(batch, size):
        first_rows = {key: value[:size] for key, value in batch.items()}
        return [first_rows]

    spec = DataSpec(loader(batch), split_batch=first_microbatch_only)
    with pytest.raises(RuntimeError, match='drops or repeats rows'):
        fit(model, spec)


class AlgorithmOn(Algorithm):
    """Does the same as the callback :class:`.On`. An algorithm, because its place among the algorithms matters."""

    def __init__(self, event, function):
        self.event = event
        self.function = function

    def match(self, event, state):
        return event == self.event

    def apply(self, event, state, logger):
        self.function(state)


def test_loss_scaled_by_later_algorithm_is_refused(model, batch):
    def halve(state):
        state.loss = state.loss * 0.5

    algorithms = [TokenAccumulation(), AlgorithmOn(Event.BEFORE_BACKWARD, halve)]
    with pytest.raises(RuntimeError, match='put TokenAccumulation last'):
        fit(model, loader(batch), algorithms=algorithms)


ADDED_TERM = 'another term, which an algorithm or a callback'


def adder_of_term(model, *, is_in_place):
    """Returns a function that adds a term to the loss: a mean over all positions of a microbatch, with padding."""
    hidden_states = []

    def keep_hidden_states(module, args, output):
        hidden_states.append(output)

    model.model.norm.register_forward_hook(keep_hidden_states)

    def add_term(state):
        term = hidden_states[-1].square().mean()
        if is_in_place:
            state.loss += term
        else:
            state.loss = state.loss + term

    return add_term


def loss_of_logits(outputs, batch):
    """Returns the mean over the tokens, as a user computes it from the logits."""
    predictions = outputs['logits'][:, :-1].flatten(0, 1)
    targets = batch['labels'][:, 1:].flatten()
    return cross_entropy(predictions, targets)


def test_loss_that_is_set_on_a_model(batch):
    """It is the model's own loss, and not a term that an algorithm adds to the loss in the outputs."""
    model = hugging_face(one_layer_model())
    expected, _ = reference_gradients(model.model, batch)
    model.loss = loss_of_logits
    recorder = fit(model, loader(batch))
    assert relative_error(recorder.gradients, expected) < 1e-6


@pytest.mark.parametrize('is_in_place', [False, True])
@pytest.mark.parametrize('event', [Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
@pytest.mark.parametrize('is_listed_last', [False, True])
def test_term_of_an_algorithm_is_refused(model, batch, event, is_in_place, is_listed_last):
    """Weighted by tokens, the term would depend on the cut.

    At AFTER_LOSS Composer runs the list of algorithms from the last to the first.
    """
    add_term = adder_of_term(model, is_in_place=is_in_place)
    algorithms = [AlgorithmOn(event, add_term), TokenAccumulation()]
    if is_listed_last:
        algorithms.reverse()
    with weights_unchanged(model), pytest.raises(RuntimeError, match=ADDED_TERM):
        fit(model, loader(batch), algorithms=algorithms)


@pytest.mark.parametrize('is_in_place', [False, True])
@pytest.mark.parametrize('event', [Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
def test_term_of_a_callback_is_refused(model, batch, event, is_in_place):
    """A callback comes too late, so the term would not be scaled."""
    add_term = adder_of_term(model, is_in_place=is_in_place)
    callback = On(event, add_term)
    with weights_unchanged(model), pytest.raises(RuntimeError, match=ADDED_TERM):
        fit(model, loader(batch), callbacks=[callback])


def test_images_leave_the_device_after_their_microbatch(model, batch):
    """A step may have hundreds of microbatches, so the check keeps only the tensors that it reads."""
    images = []

    def with_images(microbatch):
        pixels = torch.zeros(len(microbatch['labels']), 100)
        images.append(weakref.ref(pixels))
        return {**microbatch, 'pixels': pixels}

    def num_images(state):
        """Returns how many images are still in memory."""
        return num_alive(images)

    after_microbatches = On(Event.AFTER_BACKWARD, num_images)
    after_step = On(Event.BATCH_END, num_images)
    data = token_data_spec(loader(batch), microbatch_transforms=with_images)

    fit(model, data, callbacks=[after_microbatches, after_step], microbatch_size=1)

    assert len(after_microbatches.values) > 2
    assert set(after_microbatches.values) == {1}
    assert after_step.values == [0]


# Repeated samples, empty microbatches and steps.


@pytest.fixture
def as_second_rank(monkeypatch):
    """Lets this process stand for the second of two ranks. Otherwise its sampler is refused."""
    monkeypatch.setattr('composer_tokacc.algorithm.token_accumulation.check_plans', lambda sums, plan: None)


@pytest.fixture
def five_rows():
    """Five samples for two ranks: the second rank gets samples 1 and 3, and again sample 0 of the first rank."""
    return text_rows(RAGGED[:5])


def loader_of_second_rank(rows, collate_fn):
    """Returns the loader of the second of two ranks, one batch of three samples."""
    sampler = DistributedSampler(rows, num_replicas=2, rank=1, shuffle=False)
    return DataLoader(rows, batch_size=3, sampler=sampler, collate_fn=collate_fn)


@pytest.mark.usefixtures('as_second_rank')
@pytest.mark.parametrize('microbatch_size', [1, 2, 3])
def test_repeated_sample_counts_nothing(model, five_rows, microbatch_size):
    data = token_data_spec(loader_of_second_rank(five_rows, collate))
    expected_batch = collate([five_rows[1], five_rows[3]])
    assert_exact(model, data, batch=expected_batch, microbatch_size=microbatch_size)


@pytest.mark.usefixtures('as_second_rank')
@pytest.mark.parametrize('microbatch_size', [1, 2, 3])
def test_repeated_sample_in_stock_split(model, five_rows, microbatch_size):
    """Composer's own split counts the repeated sample, when Composer weights microbatches."""
    dataloader = loader_of_second_rank(five_rows, collate)
    expected_batch = collate([five_rows[1], five_rows[3]])
    assert_exact(model, dataloader, batch=expected_batch, microbatch_size=microbatch_size)


@pytest.mark.usefixtures('as_second_rank')
def test_repeated_sample_in_joined_row(model, five_rows, caplog):
    """A collator joins three samples, so no row can be left out. The repeated sample counts twice, with a warning."""
    data = token_data_spec(loader_of_second_rank(five_rows, packed_row))
    expected_batch = packed_row([five_rows[1], five_rows[3], five_rows[0]])
    assert_exact(model, data, batch=expected_batch, microbatch_size=1)
    assert 'counts twice' in caplog.text


def test_epoch_that_ends_early_is_told(model, caplog):
    """Torch and Composer take a StopIteration of the collator for the end of the epoch."""
    num_batches = 0

    def collate_one_batch(samples):
        nonlocal num_batches
        num_batches += 1
        if num_batches > 1:
            raise StopIteration
        return collate(samples)

    stopping_loader = DataLoader(text_rows(RAGGED), batch_size=2, collate_fn=collate_one_batch)
    fit(model, token_data_spec(stopping_loader), max_duration='1ep')
    assert 'after 1 batches, but the length of the train dataloader is 3' in caplog.text


def test_complete_epoch_is_not_told(model, caplog):
    dataloader = DataLoader(text_rows(RAGGED), batch_size=2, collate_fn=collate)
    fit(model, token_data_spec(dataloader), max_duration='1ep')
    assert 'length of the train dataloader' not in caplog.text


def test_sampler_for_missing_ranks_is_refused(model):
    """Half of the samples would never be trained."""
    rows = text_rows(RAGGED)
    sampler = DistributedSampler(rows, num_replicas=2, rank=0)
    dataloader = DataLoader(rows, batch_size=2, sampler=sampler, collate_fn=collate)
    with pytest.raises(RuntimeError, match='rank 0 of 2'):
        fit(model, token_data_spec(dataloader))


@pytest.mark.parametrize('make_spec', [DataSpec, token_data_spec])
def test_microbatches_without_labels(model, make_spec):
    batch = ragged_batch([(4, 2), (9, 0), (14, 11), (6, 0), (3, 1)])
    data = make_spec(loader(batch))
    recorder = assert_exact(model, data, batch=batch, callbacks=[NaNMonitor()], microbatch_size=1)
    assert recorder.logged('token_accumulation/empty_microbatches') == [2]


class MaskedSum(torch.nn.Module):
    """A usual loss that divides a masked sum by the sum of the mask. Without labels its gradients are NaN."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids, attention_mask, labels, use_cache=False):
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=False,
        )
        is_counted = labels[:, 1:] != -100
        mask = is_counted.float().flatten()
        losses = next_token_loss(outputs.logits, labels, reduction='none')
        masked_sum = (losses * mask).sum()
        loss = masked_sum / mask.sum()
        return CausalLMOutput(loss=loss, logits=outputs.logits)


@pytest.fixture
def projector_case():
    """A LLaVA that trains only the projector of its images, so the loss of a row of text has no gradient.

    It has four rows with images and two rows of text.
    """
    case = FAMILIES['llava']()
    case.model.requires_grad_(False)
    case.model.model.multi_modal_projector.requires_grad_(True)
    return case


def test_text_without_gradient_is_computed(projector_case):
    batch = family_batch(projector_case)
    assert_exact(projector_case.model, batch, microbatch_size=1)


def test_images_without_gradient_are_refused(projector_case):
    """Otherwise a model whose encoder is cut off by mistake would train nothing, without an error."""

    def cut_off(module, arguments, output):
        return output.detach()

    model = projector_case.model
    model.model.multi_modal_projector.register_forward_hook(cut_off)
    batch = family_batch(projector_case)
    with pytest.raises(RuntimeError, match='does not require grad'):
        fit(model, batch, microbatch_size=1, loss_tokens='causal', check_loss=False)


def test_nothing_is_trained_any_more(model, batch):
    def freeze(state):
        state.model.requires_grad_(False)

    callback = On(Event.BEFORE_TRAIN_BATCH, freeze)
    with pytest.raises(RuntimeError, match='Unfreeze one'):
        fit(model, batch, callbacks=[callback])


def test_masked_sum_without_labels_is_finite(model):
    summing_model = MaskedSum(model)
    batch = ragged_batch([(4, 2), (9, 0), (14, 11)])
    data = loader(batch)
    assert_exact(summing_model, data, batch=batch, callbacks=[NaNMonitor()], microbatch_size=1)


def test_step_without_labels_moves_nothing(model, batch):
    """Weight decay and momentum do not change the weights. The state of the optimizer does not change either."""
    empty_batch = ragged_batch([(5, 0), (7, 0)])
    weights_after_steps = []
    moments_after_steps = []

    def keep_state(state):
        weights = state.model.state_dict()
        weights_after_steps.append(copy.deepcopy(weights))
        optimizer_state = state.optimizers[0].state_dict()
        moments_after_steps.append(copy.deepcopy(optimizer_state['state']))

    recorder = fit(
        model,
        loader(batch, empty_batch),
        algorithms=[TokenAccumulation(), AlgorithmOn(Event.BATCH_END, keep_state)],
        callbacks=[NaNMonitor()],
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
        max_duration='2ba',
    )

    weights_before, weights_after = weights_after_steps
    assert_same_tensors(weights_after, weights_before)
    moments_before, moments_after = moments_after_steps
    assert len(moments_before) == len(list(model.parameters()))
    for index, moments in moments_before.items():
        assert_same_tensors(moments_after[index], moments)
    assert recorder.logged('token_accumulation/empty_steps') == [0, 1]
    assert recorder.logged('loss/train/total')[1] == 0.0


def test_all_metrics_are_documented():
    """With token weights, because one of the metrics is only logged with them."""
    recorder = fit(one_layer_model(), ragged_batch(), token_weights='sqrt')

    page = (ROOT / 'docs/trainer.md').read_text()
    names = []
    for key in recorder.memory.data:
        room, _, name = key.partition('/')
        if room == 'token_accumulation':
            names.append(name)
    assert 'token_mean_loss' in names
    for name in names:
        assert f'`token_accumulation/{name}`' in page or f'`{name}`' in page, name


# Other parts of a trainer.


class OutOfMemory:
    """Raises in one of its calls, as a GPU does. Then Composer halves the microbatch size, and tries again."""

    def __init__(self, failing_call):
        self.failing_call = failing_call
        self.num_calls = 0

    def __call__(self, state):
        self.num_calls += 1
        state.auto_microbatching = True
        if self.num_calls == self.failing_call:
            raise RuntimeError('CUDA out of memory')


@pytest.mark.parametrize('token_weights', ['token', 'column'])
@pytest.mark.parametrize('make_spec', [DataSpec, token_data_spec])
def test_retry_after_out_of_memory(model, batch, make_spec, token_weights):
    """The second microbatch of the first attempt raises."""
    batch['loss_weights'] = column(batch)
    expected, _, _ = weighted_reference(model, batch, token_weights)
    data = make_spec(loader(batch))
    run_out_of_memory = OutOfMemory(failing_call=2)
    algorithms = [
        AlgorithmOn(Event.BEFORE_LOSS, run_out_of_memory),
        TokenAccumulation(token_weights=token_weights),
    ]

    recorder = fit(model, data, algorithms=algorithms, microbatch_size=4)

    assert relative_error(recorder.gradients, expected) < TOLERANCE
    assert recorder.trainer.state.device_train_microbatch_size == 2


class RunsOutOfMemory(torch.optim.SGD):
    """Raises in its first step, after it has moved the weights."""

    has_raised = False

    def step(self, closure=None):
        loss = super().step(closure)
        if not self.has_raised:
            self.has_raised = True
            raise RuntimeError('CUDA out of memory')
        return loss


def test_memory_runs_out_in_the_optimizer(model, batch):
    """Composer would compute the step again from the moved weights."""
    optimizer = RunsOutOfMemory(model.parameters(), lr=0.1)
    set_auto = AlgorithmOn(Event.BEFORE_LOSS, OutOfMemory(failing_call=None))
    algorithms = [set_auto, TokenAccumulation()]
    with pytest.raises(RuntimeError, match='must move once a batch'):
        fit(model, batch, algorithms=algorithms, optimizer=optimizer, microbatch_size=4)


@pytest.mark.parametrize('uses_closures', [True, False])
def test_step_that_composer_repeats(uses_closures, model, batch, monkeypatch):
    """If the allocator is short of memory in two steps in a row, Composer would train the second batch twice."""
    monkeypatch.setattr(Trainer, '_use_closures', lambda _: uses_closures)
    recorder = GradientRecorder()

    def be_short_of_memory(state):
        state.auto_microbatching = True
        recorder.trainer.num_consecutive_thrashes = 2

    callbacks = [On(Event.BEFORE_TRAIN_BATCH, be_short_of_memory)]
    with pytest.raises(RuntimeError, match='must move once a batch'):
        fit(model, batch, callbacks=callbacks, microbatch_size=4, recorder=recorder)


def test_retry_frees_the_failed_graph(model, batch):
    """Memory runs out in the first backward. The next attempt needs the memory of its graph."""
    saved_tensors = []

    class Saving(torch.autograd.Function):
        """Returns its input, and saves a tensor for the backward."""

        @staticmethod
        def forward(ctx, hidden_states):
            ctx.saved = torch.zeros(1)
            saved_tensors.append(weakref.ref(ctx.saved))
            return hidden_states.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def save_tensor(module, args, output):
        return Saving.apply(output)

    model.model.norm.register_forward_hook(save_tensor)
    run_out_of_memory = OutOfMemory(failing_call=1)
    graphs_in_retry = []

    def count_graphs(state):
        if run_out_of_memory.num_calls == 1:
            graphs_in_retry.append(num_alive(saved_tensors))

    algorithms = [
        TokenAccumulation(),
        AlgorithmOn(Event.BEFORE_FORWARD, count_graphs),
        AlgorithmOn(Event.BEFORE_BACKWARD, run_out_of_memory),
    ]

    fit(model, batch, algorithms=algorithms, microbatch_size=4)

    assert graphs_in_retry == [0]


def test_gradient_clipping_after_the_algorithm(model, batch):
    """The exact gradient is clipped. ``test_composers_algorithms.py`` clips before the algorithm."""
    max_norm = 0.1
    gradients, _ = reference_gradients(model, batch)
    norms = [gradient.norm() for gradient in gradients.values()]
    total_norm = torch.stack(norms).norm().item()
    factor = min(max_norm / total_norm, 1.0)
    expected = {name: gradient * factor for name, gradient in gradients.items()}

    clipping = GradientClipping(clipping_type='norm', clipping_threshold=max_norm)
    recorder = fit(model, loader(batch), algorithms=[TokenAccumulation(), clipping])

    assert relative_error(recorder.gradients, expected) < 1e-5


@pytest.mark.parametrize('optimizer', ['sam', 'lbfgs'])
@pytest.mark.parametrize(
    ('make_model', 'options', 'tolerance'),
    [
        pytest.param(one_layer_model, {}, 1e-5, id='dense'),
        # Its microbatches are also counted more than once. The tolerance is larger, because LBFGS divides by the change
        # of the gradient, which is small here.
        pytest.param(mixture_of_experts, {'router_balance': 'step'}, 1e-4, id='experts'),
    ],
)
def test_step_of_several_closures(make_model, options, tolerance, optimizer):
    """The optimizer computes the gradients of a step more than once. The microbatch size does not change the step."""
    three_rows = ONE_UNLABELLED[:3]
    batch = ragged_batch(three_rows)

    def update_of_step(microbatch_size):
        """Returns by how much a step changes each weight."""
        model = make_model()
        weights_before = copy.deepcopy(model.state_dict())
        algorithms = [TokenAccumulation(**options)]
        if optimizer == 'sam':
            algorithms.insert(0, SAM())
            torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            torch_optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

        fit(
            model,
            batch,
            algorithms=algorithms,
            microbatch_size=microbatch_size,
            optimizer=torch_optimizer,
        )

        update = {}
        for name, weight in model.state_dict().items():
            update[name] = weight - weights_before[name]
        return update

    update_by_single_rows = update_of_step(1)
    update_by_whole_batch = update_of_step(len(three_rows))
    assert relative_error(update_by_single_rows, update_by_whole_batch) < tolerance


def test_step_of_several_closures_counts_once(model, batch):
    """If each closure counted, the first-batch check might miss steps 16, 32 and so on, in which it looks again."""
    algorithm = TokenAccumulation()
    empty_batch = ragged_batch([(5, 0), (7, 0)])

    recorder = fit(
        model,
        loader(batch, empty_batch),
        algorithms=[algorithm],
        optimizer=torch.optim.LBFGS(model.parameters(), lr=0.0, max_iter=3, tolerance_change=-1.0),
        max_duration='2ba',
    )

    assert len(recorder.steps) > 3, 'each closure is recorded, and the two steps have more than three'
    assert algorithm.num_empty_steps == 1
    assert algorithm._run.step_number == 2


@pytest.mark.parametrize('precision', ['fp32', 'amp_fp16'])
def test_scale_of_grad_scaler(precision, model, batch, monkeypatch):
    """The scale is not taken for a wrong weight. On a GPU the scaler is always enabled, but used only in AMP_FP16."""
    callbacks = set_precision(precision, monkeypatch)
    # The model computes in float32. In float16 its round-off would be larger than the tolerance.
    monkeypatch.setattr('composer.trainer.trainer.get_precision_context', lambda *_: nullcontext())
    scaled_losses = []

    def scale(scaler, loss):
        scaled_losses.append(loss)
        return torch.amp.GradScaler.scale(scaler, loss)

    monkeypatch.setattr(EnabledScaler, 'scale', scale)
    recorder = assert_exact(model, loader(batch), batch=batch, callbacks=callbacks)

    assert recorder.trainer.state.scaler.get_scale() == SCALE
    has_scaled = len(scaled_losses) > 0
    assert has_scaled == (precision == 'amp_fp16')


def test_second_fit_and_checkpoint(model, batch, tmp_path):
    """The learning rate is 0, so all steps have the same gradient."""
    expected, _ = reference_gradients(model, batch)

    recorder = fit(model, loader(batch), save_folder=str(tmp_path), save_interval='1ba')
    recorder.trainer.fit(duration='1ba')
    assert len(recorder.steps) == 2
    assert relative_error(recorder.gradients, expected) < TOLERANCE

    new_model = one_layer_model()
    recorder = fit(
        new_model,
        loader(batch),
        microbatch_size=1,
        max_duration='3ba',
        load_path=str(tmp_path / 'latest-rank0.pt'),
    )
    assert relative_error(recorder.gradients, expected) < TOLERANCE


def test_raw_loss_is_restored_for_callbacks(model, batch):
    """After a step ``state.loss`` is the loss of the last microbatch without our weight, as in stock Composer."""
    last_row = {key: value[-1:] for key, value in batch.items()}
    _, expected_loss = reference_gradients(model, last_row)
    recorder = fit(model, loader(batch), microbatch_size=1)
    (loss,) = recorder.losses
    assert loss.item() == pytest.approx(expected_loss, rel=TOLERANCE)


METHODS_THAT_WAIT = (
    'item',
    'tolist',
    'cpu',
    'numpy',
    'nonzero',
    '__bool__',
    '__int__',
    '__float__',
)
"""Methods of a tensor that make the host wait for a GPU."""


def without_waiting(function, calls, label):
    """Wraps a function. A call adds a label to ``calls``. During the call, methods that make the host wait raise."""

    def refuse(*args, **kwargs):
        raise AssertionError('a method of a tensor waits for the device')

    def guarded(*args, **kwargs):
        calls.append(label)
        with pytest.MonkeyPatch.context() as patch:
            for name in METHODS_THAT_WAIT:
                patch.setattr(torch.Tensor, name, refuse)
            return function(*args, **kwargs)

    return guarded


@pytest.mark.parametrize('loss_units', [None, {'lm': 'tokens'}])
def test_microbatch_waits_for_no_gpu(model, monkeypatch, loss_units):
    """Neither at the events of a microbatch, nor in the hook of its backward."""
    events = [
        Event.BEFORE_TRAIN_BATCH,
        Event.AFTER_LOSS,
        Event.BEFORE_BACKWARD,
        Event.AFTER_BACKWARD,
    ]
    calls = []
    algorithm = TokenAccumulation(loss_units=loss_units)
    for event in events:
        method_name = f'_{event.value}'
        method = getattr(algorithm, method_name)
        monkeypatch.setattr(algorithm, method_name, without_waiting(method, calls, event.value))
    for name in ('observe', '_measure'):
        method = getattr(MicrobatchRecord, name)
        monkeypatch.setattr(MicrobatchRecord, name, without_waiting(method, calls, name))
    composer_model = hugging_face(model)
    if loss_units:
        monkeypatch.setattr(composer_model, 'loss', lambda outputs, batch: {'lm': outputs['loss']})
    six_rows_and_one_without_labels = [*RAGGED, (5, 0)]
    batch = ragged_batch(six_rows_and_one_without_labels)

    fit(composer_model, loader(batch), algorithms=[algorithm], microbatch_size=1)

    for event in events:
        assert event.value in calls
    # The row without labels has no token to measure.
    assert calls.count('observe') == 7
    assert calls.count('_measure') == 6


def test_single_rank_waits_for_no_sum(model, batch, monkeypatch):
    """A sum over one rank would only make the host wait for the device."""

    def refuse(values):
        pytest.fail('waits for the device')

    monkeypatch.setattr(token_accumulation, 'sum_over_ranks', refuse)
    assert_exact(model, loader(batch), batch=batch)


# Rules.


@pytest.mark.parametrize('make_spec', [DataSpec, token_data_spec])
def test_labels_on_pads(model, make_spec):
    """If a collator leaves labels on padding, Llama trains on them too."""
    batch = ragged_batch(labels_on_pads=5)
    data = make_spec(loader(batch))
    algorithm = TokenAccumulation()
    assert_exact(model, data, batch=batch, algorithms=[algorithm])
    assert algorithm.rule == 'causal'


@pytest.mark.parametrize(
    'options',
    [
        pytest.param({'loss_tokens': 'causal', 'check_loss': False}, id='loss is not checked'),
        pytest.param({}, id='loss is checked'),
    ],
)
def test_algorithm_leaves_random_state_and_mode(model, batch, options):
    def random_state_after_run(algorithms):
        """Returns the state of torch's generator. The model must still be in training mode."""
        copied_model = copy.deepcopy(model)
        torch.manual_seed(7)
        recorder = fit(copied_model, loader(batch), algorithms=algorithms, microbatch_size=6, seed=7)
        assert recorder.trainer.state.model.training
        return torch.get_rng_state()

    expected_state = random_state_after_run([])
    state = random_state_after_run([TokenAccumulation(**options)])
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'logits': 'some'}, 'logits'),
        ({'loss_tokens': 'all'}, 'loss_tokens'),
        ({'loss_units': {'lm': 'token'}}, "must be .*got: 'token'"),
        ({'loss_units': {'total': 'tokens'}}, 'reserves'),
        ({'loss_units': 'tokens'}, "must be a mapping from .* such as .*got: 'tokens'"),
        ({'token_weights': ['sqrt']}, r"must be .*got: \['sqrt'\]"),
        ({'check_loss': 'no'}, "must be True or False, got: 'no'"),
        ({'check_loss': False}, 'explicit rule'),
        ({'loss_units': {'lm': 'samples'}, 'token_weights': 'sample'}, "`token_weights` must be 'token'"),
        ({'router_balance': 'batch'}, "router_balance.*'microbatch' or 'step'"),
        ({'router_balance': 'step', 'loss_units': {'lm': 'tokens', 'router': 'microbatches'}}, 'loss_units'),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenAccumulation(**arguments)


@pytest.mark.parametrize('check_loss', [True, False])
def test_loss_without_trained_parameters(check_loss):
    """Stock Composer stops, too. A reentrant checkpoint of frozen inputs, for example, loses the gradient."""
    model = one_layer_model().requires_grad_(False)
    model.unused = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"must depend on a trained parameter.*'model.unused.weight' and 1 more"):
        fit(model, ragged_batch(), check_loss=check_loss, loss_tokens='causal')


def test_only_the_projector_is_trained_by_text(projector_case, caplog):
    """This is no mistake if a later batch has images, so it is only a warning."""
    case = projector_case
    rows_of_text = []
    for row, kind in zip(case.rows, case.kinds, strict=True):
        if kind == 'none':
            rows_of_text.append(row)
    layout = BatchLayout.for_model(case.model)
    batch = layout.concat(rows_of_text, pad_token_id=case.pad_token_id)

    recorder = fit(case.model, batch, batch)

    for gradient in recorder.gradients.values():
        assert not gradient.any()
    assert caplog.text.count('depends on no trained parameter') == 1


class ExpertOfOneToken(torch.nn.Embedding):
    """An embedding with an expert for the tokens of one id. It takes part in a forward only if one of them is there."""

    EXPERTS_ID = 7

    def __init__(self, embedding):
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, _weight=embedding.weight)
        self.expert = torch.nn.Linear(embedding.embedding_dim, embedding.embedding_dim)

    def forward(self, input_ids):
        embeddings = super().forward(input_ids)
        is_chosen = input_ids == self.EXPERTS_ID
        if is_chosen.any():
            embeddings = embeddings.clone()
            embeddings[is_chosen] = self.expert(embeddings[is_chosen])
        return embeddings


def test_some_microbatches_choose_no_trained_expert(model):
    """Such microbatches have no gradient, but the run trains."""
    model.set_input_embeddings(ExpertOfOneToken(model.get_input_embeddings()))
    model.requires_grad_(False)
    model.get_input_embeddings().expert.requires_grad_(True)
    batch = ragged_batch()
    batch['input_ids'][batch['input_ids'] == ExpertOfOneToken.EXPERTS_ID] += 1
    batch['input_ids'][0, 0] = ExpertOfOneToken.EXPERTS_ID
    assert_exact(model, batch, regroup=False, microbatch_size=2)


@pytest.mark.parametrize(
    ('argument', 'expected'),
    [
        ('images', True),
        ('flattened_patches', True),
        ('audio_input_ids', True),
        ('inputs_embeds', False),
    ],
)
def test_models_that_take_media(model, argument, expected):
    composer_model = hugging_face(model)
    composer_model.model_forward_args = {'input_ids', 'attention_mask', argument}
    assert takes_media(composer_model) is expected
