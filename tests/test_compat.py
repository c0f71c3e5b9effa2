# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Private names of the hosts: each is still there, and still does what we use it for."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import composer
import numba
import numpy as np
import pytest
import torch
from composer.models import HuggingFaceModel
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composer_tokacc import compat
from tests.support.launch import ROOT, environment

PUBLIC_UNDERSCORES = {'_replace', '_fields', '_exit'}
"""Of named tuples and of ``os``."""


NEEDED = [(module, name) for module, names in compat._NEEDED_BY_COMPOSER.items() for name in names]


def test_what_composer_takes_from_private_places_of_torch_is_listed():
    taken = set()
    for path in Path(composer.__file__).parent.rglob('*.py'):
        for node in ast.parse(path.read_text()).body:  # at the top: what is taken later breaks only what takes it
            if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('torch'):
                private = '._' in (node.module or '')
                taken |= {(node.module, alias.name) for alias in node.names if private or alias.name.startswith('_')}
    assert taken <= {*NEEDED}


@pytest.mark.parametrize(('module', 'name'), NEEDED)
def test_a_name_that_torch_dropped_is_put_back(module, name, monkeypatch):
    there = import_module(module)
    before = getattr(there, name)
    monkeypatch.delattr(there, name)
    compat.put_back_torch_names()
    now = getattr(there, name)
    if now is not before:
        with pytest.raises(NotImplementedError, match=f'This torch has no {module}.{name}'):
            now(1)


WITHOUT = """
import importlib, sys
import composer, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp  # with what torch itself needs of them
from composer_tokacc import compat
for module, names in compat._NEEDED_BY_COMPOSER.items():
    for name in names:
        delattr(importlib.import_module(module), name)
class Dropped:
    def find_spec(self, name, *_):
        if name.startswith('torch.distributed._tensor'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Dropped())
for name in [name for name in sys.modules if name.startswith(('torch.distributed._tensor', 'composer.'))]:
    del sys.modules[name]
del sys.modules['composer']
if 'with' in sys.argv:
    compat.put_back_torch_names()
import composer
import pytest
tests = ['tests/foreign/test_composers_suite.py', '-k', 'trains or bitwise']
sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *tests]))
"""


@pytest.mark.slow
@pytest.mark.parametrize('how', ['with', 'without'])
def test_composer_trains_and_resumes_where_torch_has_dropped_them_all(how):
    command = [sys.executable, '-c', WITHOUT, how]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if how == 'without':
        assert 'ModuleNotFoundError: torch.distributed._tensor' in done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr


def test_bases_of_layers_hold_what_we_look_for():
    assert all(issubclass(layer, compat.BatchNorm) for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm))
    assert all(issubclass(layer, compat.Dropout) for layer in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


def test_the_model_is_found_inside_of_a_compiled_one():
    model = nn.Sequential(nn.Linear(2, 2))
    assert compat.inner_model(torch.compile(model)) is model
    assert compat.inner_model(model) is model


def test_ddp_still_asks_itself_whether_its_gradients_are_reduced():
    from torch.nn.parallel import DistributedDataParallel

    assert callable(DistributedDataParallel._check_reducer_finalized)


def test_backward_changes_the_state_of_a_gradient_and_no_other_does():
    reached, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for _ in range(3):
        before = [compat.state_of_gradient(one) for one in (reached, other)]
        reached.sum().backward()
        assert compat.state_of_gradient(reached) != before[0]
        assert compat.state_of_gradient(other) == before[1]
        reached.grad.clone()


def test_hooks_of_a_parameter_are_listed():
    parameter = nn.Parameter(torch.ones(2))
    assert (compat.gradient_hooks(parameter), compat.steps_after_gradients(parameter)) == ([], [])
    parameter.register_hook(torch.neg)
    parameter.register_hook(print)
    parameter.register_post_accumulate_grad_hook(print)
    assert (compat.gradient_hooks(parameter)[1], compat.steps_after_gradients(parameter)) == (print, [print])


def test_shared_memory_is_shared_from_the_beginning():
    tensor = torch.empty(0, dtype=torch.uint8).set_(compat.new_shared_storage(8))
    assert tensor.is_shared()
    assert tensor.numel() == 8


def test_views_have_the_key_of_their_memory_fake_ones_too():
    mode = compat.FakeTensorMode()
    for one, other in (torch.zeros(2, 3), torch.zeros(2, 3)), (mode.from_tensor(torch.zeros(2)), torch.zeros(2)):
        assert compat.storage_key(one) == compat.storage_key(one[0])
        assert compat.storage_key(one) != compat.storage_key(other)


def test_fake_weights_may_be_cast_as_peft_does():
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, compat.let_fake_weights_be_swapped():
        assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype == torch.bfloat16


def test_nested_tensors_are_found():
    values, spec = compat.tree_flatten({'a': [1, 2], 'b': 3})
    assert values == list(compat.tree_iter({'a': [1, 2], 'b': 3})) == [1, 2, 3]
    assert compat.tree_unflatten([2, 3, 4], spec) == compat.tree_map_only(int, lambda n: n + 1, {'a': [1, 2], 'b': 3})


def test_the_attention_that_transformers_chose_is_read():
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    config._attn_implementation = 'eager'
    assert compat.attention_of(LlamaForCausalLM(config).config) == 'eager'


def test_numba_reads_machine_code_through_the_cache_it_is_given():
    asked = []

    class Cache(type(numba.njit(cache=True)(lambda: 0)._cache)):
        def load_overload(self, sig, target_context):
            asked.append(sig)

        def save_overload(self, sig, data):
            pass

    def double(numbers):
        return numbers * 2

    compiled = numba.njit(double)
    compiled._cache = Cache(double)
    assert compiled(np.ones(1)) == 2
    assert asked


def test_composers_check_of_embeddings_is_off():
    name = '_check_tokenizer_and_maybe_resize_embeddings'
    assert callable(getattr(HuggingFaceModel, name))
    model_class = compat.skip_embedding_resize(type('Model', (HuggingFaceModel,), {}))
    assert getattr(model_class, name) is not getattr(HuggingFaceModel, name)


def test_no_other_module_uses_a_private_name_of_a_host():
    found = {}
    for path in (ROOT / 'composer_tokacc').rglob('*.py'):
        tree = ast.parse(path.read_text())
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        own = {node.attr for node in attributes if ast.unparse(node.value) == 'self'} | PUBLIC_UNDERSCORES
        own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        used = {node.attr for node in attributes if not ast.unparse(node.value).endswith(('self', 'cls', 'aten'))} - own
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module != '__future__':
                used |= {*(node.module or '').split('.'), *(alias.name for alias in node.names)}
        found[path.name] = {name for name in used if name.startswith('_') and not name.startswith('__')}
    assert not {name: names for name, names in found.items() if names and name not in ('compat.py', 'compiled.py')}
