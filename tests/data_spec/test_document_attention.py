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
IS_V4 = transformers.__version__.startswith('4.')
# One of a kind; the rest of tests/matrix/packed.py is in docs/packing.md.
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
RELEASE = tuple(map(int, transformers.__version__.split('.')[:2]))
LEAKING = {'bloom'}
if RELEASE < (5, 24):
    LEAKING.add('paligemma')  # makes its mask itself
if IS_V4:
    LEAKING.add('lfm2')  # its convolutions get the mask of its attention


def packed_of(model, batch):
    """Returns the packed row of a batch, and the DocumentAttention, which changes the model until its ``undo``.

    The ``attention_mask`` of a packed row tells the documents apart: bool, of shape (documents, width).
    """
    attention = DocumentAttention(model)
    return pack_rows(BatchLayout.for_model(model), batch, attention), attention


def causal_model(config):
    return transformers.AutoModelForCausalLM.from_config(config)


def logits_of(model, batch):
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        return model.eval()(**tensors, use_cache=False).logits


def assert_same_logits(logits, expected):
    """Compares up to the round-off of float32."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)


def logits_of_rows(model, batch):
    """Returns the logits of each row computed without padding, one row after the other as in a packed row."""
    layout = BatchLayout.for_model(model)
    rows = [layout.trim(layout.select(batch, [row])) for row in range(layout.num_rows(batch))]
    return torch.cat([logits_of(model, row) for row in rows], dim=1)


SLOW = [pair for pair in product(PACKED, ['sdpa', 'eager']) if pair not in QUICK]


@pytest.mark.parametrize(('name', 'kernel'), QUICK + [pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW])
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
    case = FAMILIES[name]()
    model: Any = case.model
    model.set_attn_implementation(kernel)
    batch = family_batch(case)
    row_logits = logits_of_rows(model, batch)
    packed, _ = packed_of(model, batch)
    before = logits_of(model, packed)
    assert_same_logits(before, row_logits)
    embeddings: Any = model.get_input_embeddings()
    for document in packed['attention_mask']:

        def negate(module, args, output, tokens=document):
            return torch.where(tokens[None, :, None], -output, output)

        with embeddings.register_forward_hook(negate):
            after = logits_of(model, packed)
        assert not torch.equal(after[:, document], before[:, document])
        assert torch.equal(after[:, ~document], before[:, ~document])


@pytest.mark.parametrize('side', ['left', 'right'])
def test_documents_of_one_token(side):
    """Also an empty row, which becomes no document."""
    model = one_layer_model()
    batch = ragged_batch(SHAPE, side=side)
    batch['attention_mask'][2] = 0
    batch['labels'][2] = -100
    packed, _ = packed_of(model, batch)
    assert packed['attention_mask'].sum(dim=1).tolist() == [4, 5, 1, 14, 9, 9, 1]
    document_logits = []
    for document in packed['attention_mask']:
        document_logits.append(logits_of(model, {'input_ids': packed['input_ids'][:, document]}))
    assert_same_logits(logits_of(model, packed), torch.cat(document_logits, dim=1))


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputed_layers_see_their_documents(reentrant):
    """Two forwards run before their backwards. A backward must use the bounds of the same forward."""
    model = one_layer_model()
    first_batch = ragged_batch(SHAPE)
    second_batch = ragged_batch(SHAPE[:5])
    expected, _ = reference_gradients(model, first_batch)
    expected_of_second, _ = reference_gradients(model, second_batch)
    for name, gradient in expected_of_second.items():
        expected[name] += gradient
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': reentrant})
    model.enable_input_require_grads()
    model.train()
    first, _ = packed_of(model, first_batch)
    second, _ = packed_of(model, second_batch)
    first_loss = model(**first).loss
    second_loss = model(**second).loss
    first_loss.backward()
    second_loss.backward()
    assert relative_error(composer_gradients(model), expected) < 1e-6


def test_attention_dropout_is_the_models():
    model = one_layer_model(attention_dropout=0.5).train()
    packed, _ = packed_of(model, ragged_batch(SHAPE))
    packed.pop('labels')
    assert not torch.equal(model(**packed).logits, model(**packed).logits)
    assert torch.equal(model.eval()(**packed).logits, model(**packed).logits)


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
    for later in (during, outputs()):
        for output, expected in zip(later, before, strict=True):
            assert torch.equal(output, expected)
    assert model.config._attn_implementation == kernel
    assert 'documents' not in str(model.config.to_dict())


def test_attention_is_restored_after_training(tmp_path):
    model = one_layer_model()
    batch = ragged_batch(SHAPE)
    fit(model, batch, packing=True)
    assert model.config._attn_implementation == 'sdpa'
    model.save_pretrained(tmp_path)
    assert 'documents' not in (tmp_path / 'config.json').read_text()


def test_evaluation_between_steps():
    batch = ragged_batch(SHAPE)
    padded_left = ragged_batch(SHAPE, side='left')

    def evaluation_logits(packing):
        logits = On(Event.EVAL_AFTER_FORWARD, lambda state: state.outputs.clone())
        eval_data = token_data_spec(loader(padded_left))
        evaluator = Evaluator(label='eval', dataloader=eval_data, device_eval_microbatch_size=1)
        options = {'eval_dataloader': evaluator, 'eval_interval': '1ba', 'callbacks': [logits]}
        fit(one_layer_model(), batch, batch, packing=packing, **options)
        return torch.cat(logits.values, dim=1)

    assert torch.equal(evaluation_logits(packing=True), evaluation_logits(packing=False))


def bytes_for_backward(num_rows):
    """Returns the memory that the forward of a packed row keeps for its backward, without the weights."""
    model = one_layer_model(max_position_embeddings=512)
    packed, _ = packed_of(model, ragged_batch([(64, 60)] * num_rows))
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(**packed)
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def test_memory_grows_with_the_documents():
    """Twice the documents, twice the memory: a mask of the packed row would be four times as large."""
    assert bytes_for_backward(32) < 2.05 * bytes_for_backward(16)


def attention_layer(is_causal):
    layer: Any = torch.nn.Module()
    layer.is_causal = is_causal
    return layer


def documents_of(*lengths):
    return document_attention._Documents(list(lengths), [None] * len(lengths))


def attend(layer, states, documents, **options):
    """Returns the attention of packed rows whose model has SDPA. ``states`` are query, key and value."""
    attended, _ = document_attention._attend('sdpa', layer, *states, documents, **options)
    return attended


def check_attention_at_once(dtype, *, is_causal):
    """Compares one call of a kernel for all documents with a call for each. Two heads share a key and a value."""
    torch.manual_seed(0)
    documents = documents_of(3, 1, 7, 7, 2)
    query = torch.randn(1, 4, 20, 8, dtype=dtype)
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


def attend_by_document(query, key, value, ends, _, longest, __, *, causal, scale):
    """Attends in one document after the other. A kernel for documents of any length must return the same."""
    lengths = ends.diff().tolist()
    assert longest == max(lengths)
    outputs = []
    for document in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        query_part, key_part, value_part = (states.transpose(0, 1)[None] for states in document)
        output = torch.nn.functional.scaled_dot_product_attention(
            query_part, key_part, value_part, is_causal=causal, scale=scale, enable_gqa=True
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
    calls = calls_of_gpu_kernel(monkeypatch, model)
    (query, key, _, bounds), (_, _, _, bounds_of_second_layer) = calls
    assert bounds is bounds_of_second_layer
    assert query.shape[1] == 2
    assert key.shape[1] == 1


def test_kernel_gets_the_dtype_of_autocast(monkeypatch):
    """Rotary embeddings make queries and keys of float32 weights float32, which the kernels do not take."""
    [(query, key, value, _)] = calls_of_gpu_kernel(monkeypatch, one_layer_model(), autocast=True)
    assert {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}


@pytest.mark.parametrize('takes_groups', [True, False])
def test_torchs_kernel_is_called_as_declared(takes_groups, monkeypatch):
    varlen: Any = pytest.importorskip('torch.nn.attention.varlen')
    declared = inspect.signature(varlen.varlen_attn)
    if not takes_groups:  # as in torch 2.11
        arguments = [argument for name, argument in declared.parameters.items() if name != 'enable_gqa']
        declared = declared.replace(parameters=arguments)
    head_counts = []

    def stand_in(*args, **kwargs):
        call = declared.bind(*args, **kwargs).arguments
        for name in ('query', 'key', 'value'):
            head_counts.append(call[name].shape[1])
        return attend_by_document(*args, causal=call['window_size'] == (-1, 0), scale=call['scale'])

    stand_in.__signature__ = declared
    monkeypatch.setattr(varlen, 'varlen_attn', stand_in)
    monkeypatch.setattr(document_attention, '_half_kernel', document_attention._half_kernel.__wrapped__)
    check_attention_at_once(torch.bfloat16, is_causal=True)
    assert head_counts == ([4, 2, 2] if takes_groups else [4, 4, 4])


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
    use_kernel_on_cpu(monkeypatch)
    layer = attention_layer(is_causal=True)
    attended = attend(layer, states, documents_of(10), position_bias=bias)
    torch.testing.assert_close(attended, expected.transpose(1, 2))
    with pytest.raises(ValueError, match='softcap'):
        attend(layer, states, documents_of(10), softcap=0.5)


def test_kernel_ignores_what_sdpa_ignores(monkeypatch):
    states = states_of_heads(8, 8, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True)
    kernel = use_kernel_on_cpu(monkeypatch)
    options = {'position_bias': None, 'softcap': None, 'sliding_window': 20}
    attended = attend(attention_layer(is_causal=True), states, documents_of(10), **options)
    torch.testing.assert_close(attended, expected.transpose(1, 2))
    kernel.assert_called_once()


@pytest.mark.skipif(IS_V4, reason='its SDPA has fewer arguments')
def test_kernels_have_the_arguments_of_sdpa():
    """A new argument of SDPA must be known to the kernels, or be listed."""
    sdpa = transformers.AttentionInterface()['sdpa']
    arguments = set(inspect.signature(sdpa).parameters) - {'attention_mask', 'kwargs'}
    arguments_of_kernels = inspect.signature(document_attention._attend_at_once).parameters
    assert arguments <= {*arguments_of_kernels, *document_attention.UNKNOWN_TO_KERNELS}


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
    assert documents.ends(torch.device('cpu')).tolist() == [0, 3, 10]
    assert documents.ends(torch.device('meta')).device.type == 'meta'


class LengthReads(TorchFunctionMode):
    """Counts how often the lengths of documents are read from a packed mask."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.sum and args[0].dtype == torch.bool and args[0].dim() == 2:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(IS_V4, reason='hybrids are refused')
def test_lengths_are_read_once_a_forward():
    layer_types = ['conv', 'full_attention', 'conv', 'conv', 'full_attention']
    model = float32_model(tiny_config('lfm2', {'num_hidden_layers': 5, 'layer_types': layer_types}))
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
    assert not attention.has_masks
    with torch.compiler.set_stance('force_eager'):
        packed_logits = logits_of(model, packed)
    assert_same_logits(packed_logits, expected)
    create_block_mask.assert_called_once()


@pytest.mark.skipif(IS_V4, reason='names its settings otherwise')
def test_attention_in_chunks_is_refused():
    layer_types = ['chunked_attention', 'full_attention']
    model = float32_model(tiny_config('llama4_text', {'layer_types': layer_types}), model_class=causal_model)
    with pytest.raises(RuntimeError, match='chunks'):
        fit(model, ragged_batch(SHAPE), packing=True)
    assert model.config._attn_implementation == 'sdpa'


def test_refused_models_keep_their_attention():
    """The first text model could attend by document, but the second cannot."""
    first, second = one_layer_model(), one_layer_model()
    second.set_attn_implementation = lambda implementation: None
    with pytest.raises(RuntimeError, match='AttentionInterface'):
        DocumentAttention(torch.nn.ModuleList([first, second]))
    assert first.config._attn_implementation == 'sdpa'


class Convolved(torch.nn.Module):
    """A layer whose output has a little of the position before."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, *args, **kwargs):
        return self.layer(hidden_states + 1e-3 * hidden_states.roll(1, dims=1), *args, **kwargs)


def test_convolution_over_documents_is_refused():
    model = one_layer_model()
    model.model.layers[0] = Convolved(model.model.layers[0])
    shape = [(12, 1), (13, 1), (14, 2), (11, 1)]  # labels far from the starts of the documents
    with pytest.raises(RuntimeError, match='packed documents apart'):
        fit(model, ragged_batch(shape), packing=True)


def fresh_inkling():
    """A model with short convolutions inside and outside of its attention. Its fresh weights and logits are small."""
    return float32_model(tiny_config('inkling_text'), std=None, model_class=causal_model)


@pytest.mark.skipif(not hasattr(transformers, 'InklingForCausalLM'), reason='this release has no Inkling')
def test_fresh_convolutions_are_refused():
    """They change the logits by less than round-off, but the gradients of weights by 2 %."""
    with pytest.raises(RuntimeError, match=r'Convolutions .* packed documents apart') as error:
        fit(fresh_inkling(), ragged_batch(SHAPE), packing=True)
    assert str(error.value).count('Set `packing=False`') == 1
    assert_exact(fresh_inkling(), ragged_batch(SHAPE), packing='auto', microbatch_size=3)


# packing='auto'


@pytest.mark.parametrize(
    ('shape', 'microbatch_size', 'options', 'packing'),
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
def test_auto_packs_if_that_costs_less(shape, microbatch_size, options, packing):
    batch = ragged_batch(shape)
    batches = loader(batch)
    data = token_data_spec(batches, packing='auto', **options)
    assert_exact(one_layer_model(), data, batch=batch, microbatch_size=microbatch_size)
    assert split_of(batches).rules.packing == packing


def test_auto_pads_if_packing_is_impossible():
    subject = PACKED['bloom']
    model = subject.model('large')
    batch = subject.batch(0, side='right')
    expected, _ = reference_gradients(model.model, batch)
    batches = loader(batch)
    recorder = fit(model, token_data_spec(batches, packing='auto'))
    assert split_of(batches).rules.packing == ''
    assert relative_error(recorder.gradients, expected) < 2e-6


class NeverPacked(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, position_ids=None, **kwargs):
        assert position_ids is None, 'only packed rows have positions'
        return super().forward(input_ids, attention_mask, labels=labels)


def test_packing_that_failed_is_not_tried_again():
    """The third row has a hole, so it cannot be packed. It is not among the rows that the check takes next."""
    batch = ragged_batch([(30, 6), (2, 1), (12, 4), (13, 3), (5, 3), (6, 3), (16, 3), (7, 3)])
    batch['attention_mask'][2, 5] = 0
    model = NeverPacked(one_layer_model().config)
    assert_exact(model, batch, packing='auto', microbatch_size=4)


def test_auto_pads_from_rows_that_cannot_be_packed():
    """The second batch has a row with a hole."""
    packed = ragged_batch(SHAPE)
    padded = ragged_batch(SHAPE)
    longest = int(padded['attention_mask'].sum(dim=1).argmax())
    padded['attention_mask'][longest, 2] = 0
    padded['labels'][longest, 2] = -100
    batches = loader(packed, padded, packed)
    data = token_data_spec(batches, packing='auto')
    cuts = On(Event.AFTER_TRAIN_BATCH, lambda state: split_of(batches).rules.packing)
    options = {'callbacks': [cuts], 'microbatch_size': 2, 'max_duration': '3ba'}
    assert_exact(one_layer_model(), data, batch=[packed, padded, packed], **options)
    assert cuts.values == ['documents', '', '']


def test_row_without_attention_is_packed():
    """The other rows are padded on the left, and it does not change that."""
    batch = ragged_batch([(4, 2), (9, 7), (5, 3), (14, 11)], side='left')
    batch['attention_mask'][0] = 0
    batch['labels'][0] = -100
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
    model: Any = float32_model(tiny_config(name, HYBRIDS[name]), model_class=causal_model).double()
    batch = ragged_batch(SHAPE)
    before = logits_of_rows(model, batch)
    packed, attention = packed_of(model, batch)
    torch.testing.assert_close(logits_of(model, packed), before, rtol=0, atol=1e-10)
    attention.undo()
    torch.testing.assert_close(logits_of_rows(model, batch), before, rtol=0, atol=0)
