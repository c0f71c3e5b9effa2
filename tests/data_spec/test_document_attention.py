# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Documents of a packed row: each gives the same result as if it were computed alone."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from composer.core import Evaluator, Event
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from composer_tokacc import BatchLayout, token_data_spec
from composer_tokacc.data_spec import document_attention
from composer_tokacc.data_spec.document_attention import DocumentAttention
from composer_tokacc.data_spec.packing import pack_rows
from composer_tokacc.data_spec.split import split_of
from composer_tokacc.planning import CostModel
from tests.matrix.packed import FAMILIES as PACKED
from tests.matrix.packed import cell
from tests.model_types.tiny import float32_model, tiny_config
from tests.support.exactness import family_batch
from tests.support.families import FAMILIES
from tests.support.text import one_layer_model, ragged_batch, text_model
from tests.support.training import (
    On,
    assert_exact,
    composer_gradients,
    fit,
    loader,
    reference_gradients,
    relative_error,
)

SHAPE = [(4, 2), (5, 3), (9, 7), (1, 0), (14, 11), (9, 3), (9, 2), (1, 1)]
"""Length and number of labels of each of eight rows."""
IS_V4 = transformers.__version__.startswith('4.')
QUICK = [
    ('mistral', 'sdpa'),
    ('gemma2', 'eager'),
    ('gpt_oss', 'eager'),
    ('lfm2', 'sdpa'),
    ('qwen3_next', 'sdpa'),
    ('gemma3', 'sdpa'),
    ('qwen2_vl_video', 'sdpa'),
    ('qwen3_vl', 'sdpa'),
    ('bloom', 'eager'),
]
"""One family of a kind, and its kernel. The others of tests/matrix/packed.py are slow tests, see docs/packing.md."""
RELEASE = tuple(map(int, transformers.__version__.split('.')[:2]))
LEAKING = {'bloom'}
"""Families whose documents see each other, so that packing must be refused."""
if RELEASE < (5, 24):
    LEAKING.add('paligemma')  # makes its mask itself
if IS_V4:
    LEAKING.add('lfm2')  # its convolutions get the mask of its attention


def packed_of(model, batch):
    """Returns the packed row of a batch, and the DocumentAttention, which changes the model until its ``undo``.

    The ``attention_mask`` of a packed row tells the documents apart: bool, of shape (documents, width).
    """
    layout = BatchLayout.for_model(model)
    attention = DocumentAttention(model)
    packed = pack_rows(layout, batch, attention)
    return packed, attention


def causal_model(config):
    return transformers.AutoModelForCausalLM.from_config(config)


def logits_of(model, batch):
    """Returns the logits of a batch in evaluation. Its entries that are not tensors are left out."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    model.eval()
    with torch.no_grad():
        output = model(**tensors, use_cache=False)
    return output.logits


def assert_same_logits(logits, expected):
    """Compares up to the round-off of float32."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)


def logits_of_rows(model, batch):
    """Returns the logits of each row computed without padding, one row after the other as in a packed row."""
    layout = BatchLayout.for_model(model)
    logits = []
    for row in range(layout.num_rows(batch)):
        padded_row = layout.select(batch, [row])
        row_without_padding = layout.trim(padded_row)
        logits.append(logits_of(model, row_without_padding))
    return torch.cat(logits, dim=1)


def without_attention(batch, row):
    """Returns a copy of a batch without the attention and the labels of one row."""
    changed = {key: value.clone() for key, value in batch.items()}
    changed['attention_mask'][row] = 0
    changed['labels'][row] = -100
    return changed


def families_and_kernels():
    """Returns all families of tests/matrix/packed.py with each kernel. Those that are not in QUICK are slow tests."""
    slow = []
    for pair in product(PACKED, ['sdpa', 'eager']):
        if pair not in QUICK:
            slow.append(pytest.param(*pair, marks=pytest.mark.slow))
    return QUICK + slow


@pytest.mark.parametrize(('name', 'kernel'), families_and_kernels())
def test_families_are_exact_or_refused(name, kernel):
    try:
        outcome = cell(name, kernel, seeds=range(1), layouts=['packed'])
        if outcome['kind'] == 'wrong':  # then the round-off of padded rows decides
            outcome = cell(name, kernel, seeds=range(1))
    except (ValueError, AttributeError) as error:
        if (name, kernel) in QUICK:
            raise
        pytest.skip(f'transformers {transformers.__version__}: {error}')

    expected_kind = 'refused' if name in LEAKING else 'exact'
    assert outcome['kind'] == expected_kind, outcome


@pytest.mark.parametrize('kernel', ['sdpa', 'eager'])
@pytest.mark.parametrize('name', ['llama', 'llava', 'qwen2_5_vl', 'idefics3', 'internvl'])
def test_documents_do_not_see_each_other(name, kernel):
    """If the embeddings of one document change, so do its own logits, and no other ones."""
    case = FAMILIES[name]()
    model: Any = case.model
    model.set_attn_implementation(kernel)
    batch = family_batch(case)
    logits_without_padding = logits_of_rows(model, batch)

    packed, _ = packed_of(model, batch)
    before = logits_of(model, packed)

    assert_same_logits(before, logits_without_padding)
    embeddings: Any = model.get_input_embeddings()
    for is_of_document in packed['attention_mask']:

        def negate(module, args, output, tokens=is_of_document):
            return torch.where(tokens[None, :, None], -output, output)

        with embeddings.register_forward_hook(negate):
            after = logits_of(model, packed)
        assert not torch.equal(after[:, is_of_document], before[:, is_of_document])
        assert torch.equal(after[:, ~is_of_document], before[:, ~is_of_document])


@pytest.mark.parametrize('side', ['left', 'right'])
def test_documents_of_one_token(side):
    """Also an empty row, which becomes no document."""
    model = one_layer_model()
    batch = without_attention(ragged_batch(SHAPE, side=side), row=2)

    packed, _ = packed_of(model, batch)
    packed_logits = logits_of(model, packed)

    lengths_of_documents = packed['attention_mask'].sum(dim=1)
    assert lengths_of_documents.tolist() == [4, 5, 1, 14, 9, 9, 1]
    logits_of_documents = []
    for is_of_document in packed['attention_mask']:
        document = {'input_ids': packed['input_ids'][:, is_of_document]}
        logits_of_documents.append(logits_of(model, document))
    assert_same_logits(packed_logits, torch.cat(logits_of_documents, dim=1))


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputed_layers_see_their_documents(reentrant):
    """Two forwards run before their backwards. A backward must use the bounds of the same forward."""
    model = one_layer_model()
    first_batch = ragged_batch(SHAPE)
    second_batch = ragged_batch(SHAPE[:5])
    gradients_of_first, _ = reference_gradients(model, first_batch)
    gradients_of_second, _ = reference_gradients(model, second_batch)
    expected_gradients = {name: gradients_of_first[name] + gradients_of_second[name] for name in gradients_of_first}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': reentrant})
    model.enable_input_require_grads()
    model.train()
    first, _ = packed_of(model, first_batch)
    second, _ = packed_of(model, second_batch)

    first_loss = model(**first).loss
    second_loss = model(**second).loss
    first_loss.backward()
    second_loss.backward()

    assert relative_error(composer_gradients(model), expected_gradients) < 1e-6


def test_attention_dropout_is_the_models():
    """In training two forwards draw two masks of dropout. In evaluation nothing is dropped."""
    model = one_layer_model(attention_dropout=0.5)
    packed, _ = packed_of(model, ragged_batch(SHAPE))
    packed.pop('labels')

    def logits_of_two_forwards():
        return model(**packed).logits, model(**packed).logits

    model.train()
    first, second = logits_of_two_forwards()
    assert not torch.equal(first, second)

    model.eval()
    first, second = logits_of_two_forwards()
    assert torch.equal(first, second)


@pytest.mark.parametrize('kernel', ['sdpa', 'eager'])
def test_other_batches_are_computed_as_before(kernel):
    """Batches that are padded on either side, and generated text."""
    model: Any = one_layer_model(attn_implementation=kernel).eval()
    left = ragged_batch(SHAPE, side='left')
    right = ragged_batch(SHAPE)
    prompts = {key: left[key] for key in ('input_ids', 'attention_mask')}

    def outputs():
        generated = model.generate(**prompts, max_new_tokens=4, do_sample=False, pad_token_id=0)
        return [logits_of(model, left), logits_of(model, right), generated]

    before = outputs()
    attention = DocumentAttention(model)
    during = outputs()
    attention.undo()
    after = outputs()

    for expected, output_during, output_after in zip(before, during, after, strict=True):
        assert torch.equal(output_during, expected)
        assert torch.equal(output_after, expected)
    assert model.config._attn_implementation == kernel
    assert 'documents' not in str(model.config.to_dict())


def test_attention_is_restored_after_training(tmp_path):
    model = one_layer_model()
    model.config.use_cache = True  # packing switches it off in training

    fit(model, ragged_batch(SHAPE), packing=True)
    model.save_pretrained(tmp_path)

    saved_config = (tmp_path / 'config.json').read_text()
    assert model.config._attn_implementation == 'sdpa'
    assert 'documents' not in saved_config
    assert model.config.use_cache


def test_evaluation_between_steps():
    """A model that is trained on packed rows is evaluated on padded rows after each step."""
    train_batch = ragged_batch(SHAPE)
    eval_batch = ragged_batch(SHAPE, side='left')

    def evaluation_logits(packing):
        logits = On(Event.EVAL_AFTER_FORWARD, lambda state: state.outputs.clone())
        eval_data = token_data_spec(loader(eval_batch))
        evaluator = Evaluator(label='eval', dataloader=eval_data, device_eval_microbatch_size=1)
        fit(
            one_layer_model(),
            train_batch,
            train_batch,
            packing=packing,
            eval_dataloader=evaluator,
            eval_interval='1ba',
            callbacks=[logits],
        )
        return torch.cat(logits.values, dim=1)

    logits_beside_packing = evaluation_logits(packing=True)
    logits_beside_padding = evaluation_logits(packing=False)

    assert torch.equal(logits_beside_packing, logits_beside_padding)


def bytes_for_backward(num_rows):
    """Returns the memory that the forward of a packed row keeps for its backward, without the weights."""
    model = one_layer_model(max_position_embeddings=512).train()
    packed, _ = packed_of(model, ragged_batch([(64, 60)] * num_rows))
    storage_of_address = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storage_of_address[storage.data_ptr()] = storage
        return tensor

    def take(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, take):
        model(**packed)

    for parameter in model.parameters():
        address = parameter.untyped_storage().data_ptr()
        storage_of_address.pop(address, None)
    return sum(storage.nbytes() for storage in storage_of_address.values())


def test_memory_grows_with_the_documents():
    """Twice the documents, twice the memory: a mask of the packed row would be four times as large."""
    bytes_of_16 = bytes_for_backward(num_rows=16)
    bytes_of_32 = bytes_for_backward(num_rows=32)

    assert bytes_of_32 < 2.05 * bytes_of_16


def attention_layer(is_causal):
    """Stands in for the layer of a model that calls its attention."""
    layer: Any = torch.nn.Module()
    layer.is_causal = is_causal
    return layer


def documents_of(*lengths):
    """Returns the documents of a packed row, by their lengths."""
    return document_attention._Documents(list(lengths), [None] * len(lengths))


def attend(layer, states, documents, **options):
    """Returns the attention of packed rows whose model has SDPA. ``states`` are query, key and value."""
    attended, _ = document_attention._attend('sdpa', layer, *states, documents, **options)
    return attended


def check_attention_at_once(dtype, *, is_causal):
    """Compares one call of a kernel for all documents with a call for each. Two heads share a key and a value."""
    torch.manual_seed(0)
    documents = documents_of(3, 1, 7, 7, 2)  # 20 tokens
    query = torch.randn(1, 4, 20, 8, dtype=dtype)  # (1, heads, tokens, size)
    key, value = torch.randn(2, 1, 2, 20, 8, dtype=dtype)
    layer = attention_layer(is_causal)
    layer.num_key_value_groups = 2

    attended = document_attention._attend_at_once(documents, layer, query, key, value, scaling=0.3)

    expected = attend(layer, (query, key, value), documents, scaling=0.3)
    torch.testing.assert_close(attended, expected)


def test_kernel_for_gpus_gives_the_same():
    """Torch's nested tensors, here by its plain kernel, which is for attention in both directions and no gradient."""
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        check_attention_at_once(torch.float32, is_causal=False)


def attend_by_document(query, key, value, ends, longest, *, causal, scale):
    """Attends in one document after the other. A kernel for documents of any length must return the same.

    The states are ``(tokens, heads, size)``, as kernels for GPUs take them. SDPA takes ``(1, heads, tokens, size)``.
    """
    lengths = ends.diff().tolist()
    assert longest == max(lengths)
    outputs = []
    for document in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        states = [part.transpose(0, 1)[None] for part in document]
        output = torch.nn.functional.scaled_dot_product_attention(
            *states, is_causal=causal, scale=scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def use_kernel_on_cpu(monkeypatch):
    """Lets the code for GPUs run on a CPU. Returns a mock of its kernel for half precision."""
    kernel = mock.Mock(wraps=attend_by_document)
    monkeypatch.setattr(document_attention, '_on_gpu', lambda states: True)
    monkeypatch.setattr(document_attention, '_half_kernel', lambda: kernel)
    return kernel


def calls_of_gpu_kernel(monkeypatch, model, autocast=False):
    """Returns query, key, value and bounds of each call of the kernel, after comparing its logits with SDPA's."""
    packed, _ = packed_of(model, ragged_batch(SHAPE))
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        expected = logits_of(model, packed)
        kernel = use_kernel_on_cpu(monkeypatch)
        logits = logits_of(model, packed)

    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-2)
    return [call.args[:4] for call in kernel.call_args_list]


def test_layers_share_bounds_on_the_device(monkeypatch):
    """The bounds of documents are moved to the GPU once, not by each layer."""
    model = text_model(num_key_value_heads=1).to(torch.bfloat16)

    call_of_first_layer, call_of_second_layer = calls_of_gpu_kernel(monkeypatch, model)

    query, key, _, bounds = call_of_first_layer
    *_, bounds_of_second_layer = call_of_second_layer
    assert bounds is bounds_of_second_layer
    assert query.shape[1] == 2
    assert key.shape[1] == 1


def test_kernel_gets_the_dtype_of_autocast(monkeypatch):
    """Rotary embeddings make queries and keys of float32 weights float32, which the kernels do not take."""
    model = one_layer_model()

    [call] = calls_of_gpu_kernel(monkeypatch, model, autocast=True)

    query, key, value, _ = call
    assert query.dtype == torch.bfloat16
    assert key.dtype == torch.bfloat16
    assert value.dtype == torch.bfloat16


@pytest.mark.parametrize('takes_groups', [True, False])
def test_torchs_kernel_is_called_as_declared(takes_groups, monkeypatch):
    """Query heads may share a key and a value. A kernel that takes no groups of heads gets them repeated."""
    varlen: Any = pytest.importorskip('torch.nn.attention.varlen')
    signature = inspect.signature(varlen.varlen_attn)
    if not takes_groups:  # as in torch 2.11
        arguments = [argument for name, argument in signature.parameters.items() if name != 'enable_gqa']
        signature = signature.replace(parameters=arguments)
    heads_of_calls = []

    def stand_in(*args, **kwargs):
        call = signature.bind(*args, **kwargs).arguments
        heads_of_calls.append({name: call[name].shape[1] for name in ('query', 'key', 'value')})
        is_causal = call['window_size'] == (-1, 0)
        query, key, value, ends, ends_of_keys, longest, longest_of_keys = args
        assert ends_of_keys is ends
        assert longest_of_keys == longest
        return attend_by_document(query, key, value, ends, longest, causal=is_causal, scale=call['scale'])

    stand_in.__signature__ = signature
    monkeypatch.setattr(varlen, 'varlen_attn', stand_in)
    uncached_half_kernel = document_attention._half_kernel.__wrapped__
    monkeypatch.setattr(document_attention, '_half_kernel', uncached_half_kernel)

    check_attention_at_once(torch.bfloat16, is_causal=True)

    [num_heads] = heads_of_calls
    if takes_groups:
        assert num_heads == {'query': 4, 'key': 2, 'value': 2}
    else:
        assert num_heads == {'query': 4, 'key': 4, 'value': 4}


def states_of_heads(*sizes, num_tokens=10):
    """Returns random states ``(1, 4, tokens, size)`` in half precision, one tensor for each size of a head."""
    torch.manual_seed(0)
    return [torch.randn(1, 4, num_tokens, size, dtype=torch.bfloat16) for size in sizes]


@pytest.mark.skipif(IS_V4, reason='its SDPA has neither argument')
def test_kernels_get_no_position_bias(monkeypatch):
    """The kernels for all documents at once have no such argument, so SDPA itself must be called."""
    states = states_of_heads(8, 8, 8)
    bias = torch.randn(1, 4, 10, 10, dtype=torch.bfloat16)
    is_later = torch.ones(10, 10, dtype=torch.bool).triu(1)
    causal_bias = bias.masked_fill(is_later, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=causal_bias)
    layer = attention_layer(is_causal=True)
    one_document = documents_of(10)
    use_kernel_on_cpu(monkeypatch)

    attended = attend(layer, states, one_document, position_bias=bias)

    torch.testing.assert_close(attended, expected.transpose(1, 2))
    with pytest.raises(ValueError, match='softcap'):
        attend(layer, states, one_document, softcap=0.5)


def test_kernel_ignores_what_sdpa_ignores(monkeypatch):
    """SDPA takes a sliding window, but leaves it to the mask."""
    states = states_of_heads(8, 8, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True)
    layer = attention_layer(is_causal=True)
    one_document = documents_of(10)
    ignored_arguments = {'position_bias': None, 'softcap': None, 'sliding_window': 20}
    kernel = use_kernel_on_cpu(monkeypatch)

    attended = attend(layer, states, one_document, **ignored_arguments)

    torch.testing.assert_close(attended, expected.transpose(1, 2))
    kernel.assert_called_once()


@pytest.mark.skipif(IS_V4, reason='its SDPA has fewer arguments')
def test_kernels_have_the_arguments_of_sdpa():
    """A new argument of SDPA must be known to the kernels, or be listed."""
    sdpa = transformers.AttentionInterface()['sdpa']
    arguments = set(inspect.signature(sdpa).parameters) - {'attention_mask', 'kwargs'}
    arguments_of_kernels = set(inspect.signature(document_attention._attend_at_once).parameters)
    listed_arguments = set(document_attention.UNKNOWN_TO_KERNELS)

    assert arguments <= arguments_of_kernels | listed_arguments


@pytest.mark.parametrize(('value_size', 'dropout'), [(8, 0.0), (16, 1e-9)])
def test_states_for_nested_tensors(value_size, dropout, monkeypatch):
    """The kernel for half precision has no dropout, and takes only one size of heads (DeepSeek-V3 has two)."""
    states = states_of_heads(16, 16, value_size)
    documents = documents_of(3, 7)
    layer = attention_layer(is_causal=False)  # torch's plain kernel for nested tensors looks in both directions
    expected = attend(layer, states, documents)
    kernel = use_kernel_on_cpu(monkeypatch)

    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        attended = attend(layer, states, documents, dropout=dropout)

    torch.testing.assert_close(attended, expected, rtol=0, atol=2e-2)
    kernel.assert_not_called()


def test_bounds_on_two_devices():
    """The layers of one model may be on two devices."""
    documents = documents_of(3, 7)

    bounds_on_cpu = documents.ends(torch.device('cpu'))
    bounds_on_meta = documents.ends(torch.device('meta'))

    assert bounds_on_cpu.tolist() == [0, 3, 10]
    assert bounds_on_meta.device.type == 'meta'


class LengthReads(TorchFunctionMode):
    """Counts how often the lengths of documents are read from a packed mask."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.sum:
            summed = args[0]
            is_packed_mask = summed.dtype == torch.bool and summed.dim() == 2
            self.count += is_packed_mask
        return func(*args, **kwargs)


@pytest.mark.skipif(IS_V4, reason='hybrids are refused')
def test_lengths_are_read_once_a_forward():
    layer_types = ['conv', 'full_attention', 'conv', 'conv', 'full_attention']
    config = tiny_config('lfm2', {'num_hidden_layers': 5, 'layer_types': layer_types})
    model = float32_model(config)
    packed, _ = packed_of(model, ragged_batch(SHAPE))

    with LengthReads() as reads:
        logits_of(model, packed)

    assert 0 < reads.count <= 2, 'not in each of the five layers'


@pytest.mark.slow
@pytest.mark.skipif(IS_V4, reason='makes its masks otherwise')
def test_flex_attention_gets_one_block_mask(monkeypatch):
    """On a CPU, so without its compiled kernel."""
    create_block_mask = mock.Mock(wraps=transformers.masking_utils.create_block_mask)
    monkeypatch.setattr(transformers.masking_utils, 'create_block_mask', create_block_mask)
    model: Any = one_layer_model()
    batch = ragged_batch(SHAPE)
    expected = logits_of_rows(model, batch)
    model.set_attn_implementation('flex_attention')

    packed, attention = packed_of(model, batch)
    with torch.compiler.set_stance('force_eager'):
        packed_logits = logits_of(model, packed)

    assert not attention.uses_packed_masks
    assert_same_logits(packed_logits, expected)
    create_block_mask.assert_called_once()


@pytest.mark.skipif(IS_V4, reason='names its settings otherwise')
def test_attention_in_chunks_is_refused():
    layer_types = ['chunked_attention', 'full_attention']
    config = tiny_config('llama4_text', {'layer_types': layer_types})
    model = float32_model(config, model_class=causal_model)

    with pytest.raises(RuntimeError, match='chunks'):
        fit(model, ragged_batch(SHAPE), packing=True)
    assert model.config._attn_implementation == 'sdpa'


def test_refused_models_keep_their_attention():
    """The first text model could attend by document, but the second cannot."""
    first = one_layer_model()
    second = one_layer_model()
    second.set_attn_implementation = lambda implementation: None
    both_models = torch.nn.ModuleList([first, second])

    with pytest.raises(RuntimeError, match='AttentionInterface'):
        DocumentAttention(both_models)

    assert first.config._attn_implementation == 'sdpa'


class Convolved(torch.nn.Module):
    """A layer whose output has a little of the position before."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, *args, **kwargs):
        states_before = hidden_states.roll(1, dims=1)
        return self.layer(hidden_states + 1e-3 * states_before, *args, **kwargs)


def test_convolution_over_documents_is_refused():
    model = one_layer_model()
    model.model.layers[0] = Convolved(model.model.layers[0])
    labels_far_from_starts = ragged_batch([(12, 1), (13, 1), (14, 2), (11, 1)])

    with pytest.raises(RuntimeError, match='packed documents apart'):
        fit(model, labels_far_from_starts, packing=True)


def fresh_inkling():
    """Returns a model with short convolutions inside and outside of its attention.

    Its fresh weights and logits are small.
    """
    config = tiny_config('inkling_text')
    return float32_model(config, std=None, model_class=causal_model)


@pytest.mark.skipif(not hasattr(transformers, 'InklingForCausalLM'), reason='this release has no Inkling')
def test_fresh_convolutions_are_refused():
    """They change the logits by less than round-off, but the gradients of weights by 2 %."""
    batch = ragged_batch(SHAPE)

    with pytest.raises(RuntimeError, match=r'Convolutions .* packed documents apart') as error:
        fit(fresh_inkling(), batch, packing=True)

    assert str(error.value).count('Set `packing=False`') == 1
    assert_exact(fresh_inkling(), batch, packing='auto', microbatch_size=3)


# packing='auto'


def packing_of(batches):
    """Returns how the rows of a loader are packed: ``'documents'``, or empty if they are padded."""
    return split_of(batches).rules.packing


@pytest.mark.parametrize(
    ('shape', 'microbatch_size', 'options', 'expected_packing'),
    [
        pytest.param(SHAPE, 2, {}, 'documents', id='ragged'),
        pytest.param([(9, 3)] * 8, 2, {}, '', id='one length'),
        pytest.param([(9, 2), (9, 7), (9, 4), (9, 1)], 1, {}, '', id='one length, one row a microbatch'),
        # The row of 40 tokens is over the cap. All rows that are padded would fit into three microbatches of 40 tokens.
        pytest.param(
            [(40, 3), *[(6, 2), (4, 2)] * 4],
            1,
            {'slot_tokens': 10, 'on_oversize': 'warn'},
            'documents',
            id='over the cap',
        ),
        pytest.param(
            [(64, 3), *[(20, 2)] * 7],
            2,
            {'width_multiple': 64, 'cost': CostModel(launch=0.0)},
            'documents',
            id='widths rounded up',
        ),
    ],
)
def test_auto_packs_if_that_costs_less(shape, microbatch_size, options, expected_packing):
    batch = ragged_batch(shape)
    batches = loader(batch)
    data = token_data_spec(batches, packing='auto', **options)

    assert_exact(one_layer_model(), data, batch=batch, microbatch_size=microbatch_size)

    assert packing_of(batches) == expected_packing


def test_auto_pads_if_packing_is_impossible():
    bloom = PACKED['bloom']
    model = bloom.model('large')
    batch = bloom.batch(0, side='right')
    expected_gradients, _ = reference_gradients(model.model, batch)
    batches = loader(batch)

    recorder = fit(model, token_data_spec(batches, packing='auto'))

    assert packing_of(batches) == ''
    assert relative_error(recorder.gradients, expected_gradients) < 2e-6


class NeverPacked(transformers.LlamaForCausalLM):
    """Fails on a packed row."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **kwargs):
        assert position_ids is None, 'only packed rows have positions'
        return super().forward(input_ids, attention_mask, labels=labels)


def test_failed_packing_is_not_tried_again():
    """The third row has a hole, so it cannot be packed. It is not among the rows that the check takes next."""
    batch = ragged_batch([(30, 6), (2, 1), (12, 4), (13, 3), (5, 3), (6, 3), (16, 3), (7, 3)])
    batch['attention_mask'][2, 5] = 0
    config = one_layer_model().config
    model = NeverPacked(config)

    assert_exact(model, batch, packing='auto', microbatch_size=4)


def test_auto_pads_after_unpackable_rows():
    """The second batch has a row with a hole."""
    packable = ragged_batch(SHAPE)
    with_hole = ragged_batch(SHAPE)
    longest_row = 4
    with_hole['attention_mask'][longest_row, 2] = 0
    with_hole['labels'][longest_row, 2] = -100
    batches_of_steps = [packable, with_hole, packable]
    batches = loader(*batches_of_steps)
    data = token_data_spec(batches, packing='auto')
    packing_of_steps = On(Event.AFTER_TRAIN_BATCH, lambda state: packing_of(batches))

    assert_exact(
        one_layer_model(),
        data,
        batch=batches_of_steps,
        callbacks=[packing_of_steps],
        microbatch_size=2,
        max_duration='3ba',
    )

    assert packing_of_steps.values == ['documents', '', '']


def test_row_without_attention_is_packed():
    """The other rows are padded on the left, and it does not change that."""
    padded_left = ragged_batch([(4, 2), (9, 7), (5, 3), (14, 11)], side='left')
    batch = without_attention(padded_left, row=0)

    assert_exact(one_layer_model(), batch, packing=True, reference_dtype=torch.float32)


HYBRIDS: dict[str, dict[str, Any]] = {
    'bamba': {'attn_layer_indices': [1]},
    'granitemoehybrid': {'layer_types': ['mamba', 'attention'], 'num_local_experts': 0},
    'mamba2': {},
    'qwen3_5_text': {},
}
"""Types whose layers have a state, and settings so that one layer of each kind is there."""


@pytest.mark.skipif(IS_V4, reason='refused: hands them masks of attention, or makes its masks itself')
@pytest.mark.parametrize('name', HYBRIDS)
def test_states_end_with_their_document(name):
    config = tiny_config(name, HYBRIDS[name])
    model: Any = float32_model(config, model_class=causal_model).double()
    batch = ragged_batch(SHAPE)
    before = logits_of_rows(model, batch)

    packed, attention = packed_of(model, batch)
    packed_logits = logits_of(model, packed)
    attention.undo()
    after = logits_of_rows(model, batch)

    torch.testing.assert_close(packed_logits, before, rtol=0, atol=1e-10)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
