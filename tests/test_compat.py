# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Private names of Composer, torch, transformers and numba: each still exists, and still does what we use it for."""

from __future__ import annotations

import ast
from unittest import mock

import numba
import numpy as np
import pytest
import torch
from composer.algorithms.sam import SAMOptimizer
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from composer_tokacc import compat
from composer_tokacc.planning.compiled import compiled
from tests.support.launch import ROOT
from tests.support.process_group import group_of_one_rank

PUBLIC_IN_SPITE_OF_UNDERSCORE = {'_replace', '_fields', '_make', '_exit'}
"""Names of named tuples and of ``os``."""


@pytest.mark.parametrize(
    ('base', 'layers'),
    [
        (compat.BatchNorm, [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm]),
        (compat.Dropout, [nn.Dropout, nn.Dropout2d, nn.AlphaDropout]),
    ],
)
def test_bases_of_layers(base, layers):
    for layer in layers:
        assert issubclass(layer, base)


def test_names_in_a_state_dict():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    names = [name for name, _ in model.named_parameters()]
    assert names != list(model.state_dict())
    assert [compat.name_in_state_dict(name) for name in names] == list(model.state_dict())


def test_inner_model_of_a_compiled_model():
    model = nn.Sequential(nn.Linear(2, 2))
    assert compat.inner_model(torch.compile(model)) is model
    assert compat.inner_model(model) is model
    assert compat.inner_model(nn.DataParallel(model)) is model
    model.module = nn.Linear(2, 2)  # a user's part of this name is not unwrapped
    assert compat.inner_model(model) is model


def test_only_backward_changes_state_of_gradient():
    reached = nn.Parameter(torch.ones(2))
    not_reached = nn.Parameter(torch.ones(2))
    for _ in range(3):
        state_of_reached = compat.state_of_gradient(reached)
        state_of_not_reached = compat.state_of_gradient(not_reached)
        reached.sum().backward()
        assert compat.state_of_gradient(reached) != state_of_reached
        assert compat.state_of_gradient(not_reached) == state_of_not_reached
        # Reading a gradient is no change. The next round would show it.
        reached.grad.clone()


class NamedOutputs(nn.Module):
    """Its outputs are not only tensors."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, inputs):
        logits = self.layer(inputs)
        return {'number': 3, 'constant': torch.zeros(2), 'none': None, 'loss': logits.sum(), 'logits': logits}


def test_outputs_of_ddp_are_found_before_its_sink(tmp_path):
    with group_of_one_rank(tmp_path):
        model = nn.parallel.DistributedDataParallel(NamedOutputs(), find_unused_parameters=True)
        outputs = model(torch.ones(1, 2))
    names_before_sink = []
    for name in ('loss', 'logits'):
        output = outputs[name]
        assert output.grad_fn.name() == compat.DDP_SINK
        node, _ = compat.edge_before_sink(output.grad_fn, output.output_nr)
        names_before_sink.append(node.name())
    assert names_before_sink == ['SumBackward0', 'AddmmBackward0']


def test_reduction_is_reset_after_an_error(tmp_path):
    with group_of_one_rank(tmp_path):
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        # A backward that does not reach the first layer, as if memory had run out before.
        output = model.module[1](torch.ones(1, 2))
        model.reducer.prepare_for_backward([])
        output.sum().backward()
        with pytest.raises(RuntimeError, match='Expected to have finished reduction'):
            model(torch.ones(1, 2))
        model.require_forward_param_sync = False
        compat.reset_reduction(model)
        assert model.require_forward_param_sync
        model(torch.ones(1, 2)).sum().backward()
        assert compat.has_finished_reduction(model)


@pytest.mark.parametrize('is_scheduled', [False, True])
def test_optimizers_that_use_closures(is_scheduled):
    """A learning rate scheduler replaces the method of the optimizer."""
    weights = [nn.Parameter(torch.ones(2))]
    adam = DecoupledAdamW(weights)
    expected = {
        torch.optim.SGD(weights): False,
        torch.optim.AdamW(weights): False,
        adam: False,
        torch.optim.LBFGS(weights): True,
        SAMOptimizer(adam): True,
    }
    for optimizer, uses_closure in expected.items():
        if is_scheduled:
            torch.optim.lr_scheduler.ConstantLR(optimizer)
        assert compat.uses_closure(optimizer) == uses_closure, optimizer


def test_mixed_precision_of_a_unit(tmp_path):
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    with group_of_one_rank(tmp_path):
        unit = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh('cpu', (1,)), mp_policy=precision)
    assert compat.mixed_precision_of(unit) == precision


def test_hooks_of_a_parameter_are_listed():
    parameter = nn.Parameter(torch.ones(2))
    assert compat.gradient_hooks(parameter) == []
    assert compat.hooks_after_gradients(parameter) == []
    assert compat.hook_numbers([parameter]) == []
    parameter.register_hook(torch.neg)
    parameter.register_hook(print)
    parameter.register_post_accumulate_grad_hook(print)
    assert len(set(compat.hook_numbers([parameter, nn.Parameter()]))) == 3
    assert compat.gradient_hooks(parameter) == [torch.neg, print]
    assert compat.hooks_after_gradients(parameter) == [print]


def test_new_shared_storage_is_shared():
    tensor = torch.empty(0, dtype=torch.uint8).set_(compat.new_shared_storage(8))
    assert tensor.is_shared()
    assert tensor.numel() == 8


@pytest.mark.parametrize('is_fake', [False, True])
def test_views_have_the_key_of_their_memory(is_fake):
    tensor = torch.zeros(2, 3)
    if is_fake:
        tensor = compat.FakeTensorMode().from_tensor(tensor)
    assert compat.storage_key(tensor) == compat.storage_key(tensor[0])
    assert compat.storage_key(tensor) != compat.storage_key(torch.zeros(2, 3))


def test_fake_weights_may_be_cast():
    """As peft casts the weights of an adapter."""
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, compat.let_fake_weights_be_swapped():
        assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16


def test_attention_chosen_by_transformers():
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    config._attn_implementation = 'eager'
    assert compat.attention_of(LlamaForCausalLM(config).config) == 'eager'


def test_broken_cache_of_numba_stops_nothing(monkeypatch):
    """Numba reads and writes machine code by the two methods of `_cache` that `compiled` replaces."""
    cache_class = type(numba.njit(cache=True)(lambda: 0)._cache)
    read = mock.Mock(side_effect=EOFError('the file is damaged'))
    write = mock.Mock(side_effect=OSError('the disk is full'))
    monkeypatch.setattr(cache_class, 'load_overload', read)
    monkeypatch.setattr(cache_class, 'save_overload', write)
    double = compiled(lambda numbers: numbers * 2)
    assert double(np.ones(1)) == 2
    read.assert_called_once()
    write.assert_called_once()


def test_composers_check_of_embeddings_is_off():
    name = '_check_tokenizer_and_maybe_resize_embeddings'
    assert callable(getattr(HuggingFaceModel, name))
    model_class = compat.skip_embedding_resize(type('Model', (HuggingFaceModel,), {}))
    assert getattr(model_class, name) is not getattr(HuggingFaceModel, name)


def imported_names(tree):
    """Returns the parts of the modules, and the names, that a file imports from."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != '__future__':
            names.update((node.module or '').split('.'))
            names.update(alias.name for alias in node.names)
    return names


def private_names_of_others(path):
    """Returns the private names that a file uses, and does not define itself."""
    tree = ast.parse(path.read_text())
    defined = set(PUBLIC_IN_SPITE_OF_UNDERSCORE)
    used = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        if not isinstance(node, ast.Attribute) or not node.attr.startswith('_'):
            continue
        owner = ast.unparse(node.value)
        if owner == 'self':
            defined.add(node.attr)
        elif not owner.endswith(('self', 'cls', 'aten')):
            used.add(node.attr)
    return {name for name in used - defined if name.startswith('_') and not name.startswith('__')}


def test_only_compat_uses_private_names():
    for path in (ROOT / 'composer_tokacc').rglob('*.py'):
        if path.name != 'compat.py':
            assert not private_names_of_others(path), path
