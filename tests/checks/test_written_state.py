# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""State that a forward writes: refused if the result depends on it, kept if it is a cache or a statistic."""

from __future__ import annotations

import pytest
import torch
from composer.core import Event
from torch.nn.utils import parametrize

from composer_tokacc.checks import written_state
from composer_tokacc.checks.written_state import StateSnapshot, perturb
from tests.support.text import one_layer_model, ragged_batch
from tests.support.training import GradientRecorder, On, assert_exact, fit, weights_unchanged


def mean_of(states):
    """Returns the mean over rows and columns, without a graph."""
    return states.detach().mean(dim=(0, 1))


class RunningMean(torch.nn.Module):
    """Subtracts the running mean of its inputs, as a normalisation may."""

    def __init__(self):
        super().__init__()
        self.register_buffer('running', torch.zeros(32))

    def forward(self, states):
        self.update(mean_of(states))
        return states - self.running

    def update(self, mean):
        self.running.lerp_(mean, 0.1)


class RunningData(RunningMean):
    """Writes into ``.data``, so torch does not count the write."""

    def update(self, mean):
        self.running.data.lerp_(mean, 0.1)


class ReplacedMean(RunningMean):
    """Puts a new tensor in the place of the old one."""

    def update(self, mean):
        self.running = self.running.lerp(mean, 0.1)


class LastMean(RunningMean):
    """Subtracts the mean of the forward before. A second forward of the same rows does not change it."""

    def forward(self, states):
        shifted = states - self.running
        self.running = mean_of(states)
        return shifted


class ListedMean(RunningMean):
    """Reads and writes its state by a list, which a forward may hold in the place of the buffer."""

    def __init__(self):
        super().__init__()
        self.means = [self.running]

    def forward(self, states):
        self.means[0].lerp_(mean_of(states), 0.1)
        return states - self.means[0]


def scripted_mean():
    return torch.jit.script(RunningMean())


class Codebook(torch.nn.Module):
    """Keeps its state in a frozen parameter."""

    def __init__(self):
        super().__init__()
        ones = torch.ones(32)
        self.code = torch.nn.Parameter(ones, requires_grad=False)

    def forward(self, states):
        with torch.no_grad():
            self.code.mul_(0.999)
        return states * self.code


class WarmUp(torch.nn.Module):
    """Counts its forwards in a plain number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, states):
        self.count += 1
        return states * min(1.0, self.count / 1000)


def spectral_norm():
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 32)
    return torch.nn.utils.parametrizations.spectral_norm(linear)


def converged_norm():
    """Returns a spectral norm whose vectors have converged, so that one more forward does not move them."""
    linear = spectral_norm()
    for _ in range(500):
        linear(torch.zeros(1, 32))
    return linear


class Statistic(torch.nn.Module):
    """Counts positive entries, for a log. In some tests the next module depends on its own state."""

    def __init__(self):
        super().__init__()
        self.register_buffer('load', torch.zeros(32))
        self.register_buffer('number', torch.zeros((), dtype=torch.int64))
        self.calls = 0

    def forward(self, states):
        is_positive = states.detach() > 0
        self.load = self.load + is_positive.sum(dim=(0, 1))
        self.number += 1
        self.calls += 1
        return states


class Cache(torch.nn.Module):
    """Keeps a table that grows with the width, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.register_buffer('table', torch.zeros(0))
        self.width = 0

    def forward(self, states):
        width = states.shape[1]
        if width > self.width:
            self.width = width
            self.register_buffer('table', torch.linspace(1, 2, 64)[:width])
        return states * self.table[:width, None]


class InferenceStatistic(torch.nn.Module):
    """Keeps statistics that can only be written in inference mode."""

    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.sum = torch.zeros(())

    def forward(self, states):
        with torch.inference_mode():
            self.sum += states.detach().abs().mean()
        return states


class AdaptedForward(torch.nn.Module):
    """Has a parametrization only while it computes, as PEFT adapts experts. It writes the parameter into itself."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)
        self.added = torch.nn.Parameter(torch.eye(32))

    def forward(self, states):
        parametrize.register_parametrization(self.linear, 'weight', AddsTo(self.added))
        outputs = self.linear(states)
        parametrize.remove_parametrizations(self.linear, 'weight', leave_parametrized=False)
        return outputs


class AddsTo(torch.nn.Module):
    """Adds a tensor that belongs to another module."""

    def __init__(self, added):
        super().__init__()
        self.get_added = lambda: added

    def forward(self, weight):
        return weight + self.get_added()


class ExpandedMean(torch.nn.Module):
    """Keeps an expanded tensor, which cannot be written."""

    def forward(self, states):
        self.mean = states.detach().mean().expand(4)
        return states


class UnusualConstants(torch.nn.Module):
    """Reads a sparse matrix and a vector with NaN, and writes nothing."""

    def __init__(self):
        super().__init__()
        priors = torch.full((32,), 0.5)
        priors[0] = torch.nan
        self.register_buffer('links', torch.eye(32).to_sparse())
        self.register_buffer('priors', priors)
        self.best = float('nan')

    def forward(self, states):
        columns = states.flatten(0, 1).T
        linked = torch.sparse.mm(self.links, columns).T
        priors = self.priors.nan_to_num(1.0)
        return states + linked.view_as(states) * priors


def with_layers(*layers):
    """Returns a model in training mode with further layers behind its embedding, at ``embed_tokens[1]`` and so on."""
    model = one_layer_model().train()
    embed = model.model.embed_tokens
    model.model.embed_tokens = torch.nn.Sequential(embed, *layers)
    return model


@pytest.mark.parametrize(
    ('make_layer', 'name'),
    [
        (RunningMean, 'running'),
        (RunningData, 'running'),
        (ReplacedMean, 'running'),
        (LastMean, 'running'),
        (ListedMean, 'running'),
        (scripted_mean, 'running'),
        (Codebook, 'code'),
        (WarmUp, 'count'),
        (converged_norm, r'parametrizations\.weight\.0\._[uv]'),
    ],
)
def test_decisive_state_is_refused(make_layer, name):
    model = with_layers(Statistic(), make_layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    message = rf"must not change the result of the next one, got: '.*\.{name}'"
    with weights_unchanged(model), pytest.raises(RuntimeError, match=message):
        fit(model, ragged_batch(), optimizer=optimizer)


class HiddenMean(torch.nn.Module):
    """Keeps its running mean, or with a weight of 1 the mean of the last forward, where no snapshot finds it."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.means = {'states': torch.zeros(32)}

    def forward(self, states):
        mean = self.means['states']
        self.means['states'] = mean.lerp(mean_of(states), self.weight)
        return states - mean


@pytest.mark.parametrize('weight', [0.1, 1.0])
def test_hidden_state_is_refused(weight):
    """The loss changes from forward to forward. That is not taken for random numbers."""
    model = with_layers(HiddenMean(weight))
    with weights_unchanged(model), pytest.raises(RuntimeError, match='although all random numbers were the same'):
        fit(model, ragged_batch())


class AnyOrder(torch.nn.Module):
    """Rounds in another way in each call, as ``index_add_`` on a GPU. It computes only in bfloat16."""

    def __init__(self):
        super().__init__()
        self.generators = [torch.Generator()]

    def forward(self, states):
        if states.dtype != torch.bfloat16:
            raise TypeError('This kernel accepts only bfloat16.')
        zeros_and_ones = torch.randint(2, states.shape, generator=self.generators[0])
        signs = 2 * zeros_and_ones - 1
        # Four digits, because a change by one may be lost in the mean over the tokens.
        four_digits = 4 * torch.finfo(states.dtype).eps
        factors = 1 + four_digits * signs
        return states * factors.to(states.dtype)


def test_round_off_is_not_hidden_state(caplog):
    torch.manual_seed(0)
    model = with_layers(AnyOrder()).to(torch.bfloat16)
    with caplog.at_level('INFO', logger='composer_tokacc.checks.probe'):
        fit(model, ragged_batch())
    assert 'The loss is random in training' in caplog.text


class LateMean(RunningMean):
    """Writes its state in every forward, but uses it only later."""

    is_used = False

    def forward(self, states):
        shifted = states - self.running if self.is_used else states
        self.update(mean_of(states))
        return shifted


def test_state_that_is_used_later():
    """The first check takes it for a statistic. The check of step 16 looks again."""
    model = with_layers(LateMean())
    layer = model.model.embed_tokens[1]
    recorder = GradientRecorder()

    def use(state):
        layer.is_used = state.timestamp.batch >= 5

    batches = [ragged_batch()] * 17
    callback = On(Event.BATCH_START, use)
    with pytest.raises(RuntimeError, match=r"must not change the result of the next one, got: '.*\.running'"):
        fit(model, *batches, callbacks=[callback], recorder=recorder)

    assert len(recorder.steps) == 16


class ReplacedAttribute(ReplacedMean):
    """Keeps its state in a plain attribute."""

    def __init__(self):
        super().__init__()
        del self.running
        self.running = torch.zeros(32)


def test_replaced_large_state_is_refused(monkeypatch):
    monkeypatch.setattr(written_state, 'LARGEST_COPY', 0)
    model = with_layers(ReplacedAttribute())

    with pytest.raises(RuntimeError, match=r'must not change the result of the next one.*\.running'):
        fit(model, ragged_batch())


@pytest.mark.parametrize(
    ('layer', 'side'),
    [
        (Statistic, 'left'),
        (Cache, 'left'),
        (Cache, 'right'),
        (InferenceStatistic, 'right'),
        (ExpandedMean, 'left'),
        (AdaptedForward, 'left'),
        (UnusualConstants, 'right'),
    ],
)
def test_caches_and_statistics_are_exact(layer, side):
    model = with_layers(layer())
    assert_exact(model, ragged_batch(side=side), microbatch_size=1)


def test_state_in_evaluation_is_left_alone():
    model = with_layers(RunningMean())
    layer = model.model.embed_tokens[1]
    with torch.no_grad():
        layer.running.fill_(0.1)
    layer.forward = lambda states: states - layer.running
    assert_exact(model, ragged_batch())


def test_check_leaves_state_alone():
    """Also plain numbers, and buffers that every forward replaces."""
    model = with_layers(Statistic())
    layer = model.model.embed_tokens[1]
    layer.load += 0.5
    batch = ragged_batch([(9, 4)] * 3)

    fit(model, batch, microbatch_size=1)

    # Only the forwards of training count: one for each row.
    assert int(layer.number) == 3
    assert layer.calls == 3
    embeddings = model.model.embed_tokens[0](batch['input_ids'])
    num_positive = (embeddings > 0).sum(dim=(0, 1))
    assert torch.equal(layer.load, num_positive + 0.5)


class LazyTable(torch.nn.Module):
    """Fills its table in the first forward, and notes that in a flag."""

    def __init__(self):
        super().__init__()
        self.register_buffer('table', torch.zeros(32))
        self.is_filled = False

    def forward(self, states):
        if not self.is_filled:
            self.table.fill_(2.0)
            self.is_filled = True
        return states * self.table


def test_table_of_first_forward_is_filled():
    """The check takes the table back. If it left the flag, the model would train with a table of zeros."""
    model = with_layers(LazyTable())

    fit(model, ragged_batch())

    layer = model.model.embed_tokens[1]
    assert torch.equal(layer.table, torch.full((32,), 2.0))


@pytest.mark.parametrize('value', [0.0, 0.005, -0.005, 1.0])
def test_noise_moves_states_of_any_size(value):
    """Entries near 0 get noise as if they were of size 0.01."""
    model = torch.nn.Module()
    model.register_buffer('state', torch.full((1000,), value))
    snapshot = StateSnapshot.of_model(model)

    perturb(snapshot.states)

    noise = (model.state - value).abs() / written_state.PERTURBATION
    mean_size_of_normal_number = 0.8
    # The size of an entry, the mean size, which is the same here, and 0.01.
    expected_noise = mean_size_of_normal_number * (2 * abs(value) + 0.01)
    assert noise.mean() == pytest.approx(expected_noise, rel=0.1)


def test_state_in_float8_gets_the_written_value():
    """Torch cannot add noise to it."""
    model = torch.nn.Module()
    model.register_buffer('state', torch.zeros(4).to(torch.float8_e4m3fn))
    snapshot = StateSnapshot.of_model(model)
    model.state.copy_(torch.ones(4))
    written = snapshot.written()
    snapshot.restore()

    perturb(written)

    assert model.state.tolist() == [1.0] * 4


def test_quantized_weights_are_not_copied(monkeypatch):
    """They are buffers of integers. A write is noticed nevertheless."""
    monkeypatch.setattr(written_state, 'LARGEST_COPY', 0)
    model = torch.nn.Module()
    model.register_buffer('qweight', torch.zeros(8, dtype=torch.int32))
    model.register_buffer('mean', torch.zeros(8))
    snapshot = StateSnapshot.of_model(model)
    copied = []
    for state in snapshot.states:
        if isinstance(state.content, torch.Tensor):
            copied.append(state.name)
    assert copied == ['mean']

    model.qweight.add_(1)

    written = [state.name for state in snapshot.written()]
    assert written == ['qweight']


class Quantized(torch.Tensor):
    """Wraps a tensor and takes none of torch's functions, as weights of torchao take only some of them."""

    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __tensor_flatten__(self):
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f'{func} is not known')


@pytest.mark.parametrize(
    'constant',
    [
        pytest.param(Quantized(torch.zeros(3)), id='wrapper'),
        pytest.param(torch.zeros(3, device='meta'), id='meta'),
        pytest.param(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), id='nested'),
    ],
)
def test_constants_that_torch_cannot_compare(constant):
    model = torch.nn.Module()
    model.register_buffer('constant', constant)

    snapshot = StateSnapshot.of_model(model)
    assert snapshot.written() == []

    snapshot.restore()
    assert model.constant is constant
