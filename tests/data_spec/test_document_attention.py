# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Documents of a packed row: each gives the same result as if it were computed alone."""

from __future__ import annotations

import inspect
from typing import Any

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
from tests.matrix.packed import FAMILIES as PACKED
from tests.matrix.packed import cell
from tests.support.families import FAMILIES
from tests.support.text import VOCABULARY, collate, text_model, text_rows
from tests.support.training import On, fit, loader, reference_gradients, relative_error

SHAPE = [(4, 2), (5, 3), (9, 7), (1, 0), (14, 11), (9, 3), (9, 2), (1, 1)]
SIZES: dict[str, Any] = {
    'vocab_size': VOCABULARY,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'pad_token_id': 0,
}
IS_V4 = transformers.__version__.startswith('4.')
# One of a kind; the rest of tests/matrix/packed.py is in docs/packing.md.
QUICK = [
    *(('mistral', 'sdpa'), ('gemma2', 'eager'), ('gpt_oss', 'eager'), ('lfm2', 'sdpa'), ('qwen3_next', 'sdpa')),
    *(('gemma3', 'sdpa'), ('qwen2_vl_video', 'sdpa'), ('qwen3_vl', 'sdpa'), ('bloom', 'eager')),
]
MAKES_ITS_MASK = ('paligemma',) if tuple(map(int, transformers.__version__.split('.')[:2])) < (5, 24) else ()
# In transformers 4 the convolutions of LFM2 get the mask of its attention, and Bamba makes its masks itself.
LEAKING = ('bloom', *MAKES_ITS_MASK, *(('lfm2',) if IS_V4 else ()))


def packed_of(model, batch):
    """The packed row, and the model that takes it."""
    attention = DocumentAttention(model)
    return pack_rows(BatchLayout.for_model(model), batch, attention), attention


def logits_of(model, batch):
    inputs = {key: value for key, value in batch.items() if isinstance(value, (torch.Tensor, bool))}
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize(('name', 'kernel'), QUICK, ids='-'.join)
def test_families_are_exact_or_refused(name, kernel):
    outcome = cell(name, kernel, seeds=range(1))
    assert outcome['kind'] == ('refused' if name in LEAKING else 'exact'), outcome


@pytest.mark.slow
@pytest.mark.parametrize('kernel', ['sdpa', 'eager'])
@pytest.mark.parametrize('name', PACKED)
def test_no_family_is_wrong(name, kernel):
    try:
        outcome = cell(name, kernel, seeds=[1])
    except (ValueError, AttributeError) as error:
        pytest.skip(f'transformers {transformers.__version__}: {error}')
    assert outcome['kind'] == ('refused' if name in LEAKING else 'exact'), outcome


@pytest.mark.parametrize('kernel', ['sdpa', 'eager'])
@pytest.mark.parametrize('name', ['llama', 'llava', 'qwen2_5_vl', 'idefics3', 'internvl'])
def test_documents_do_not_see_each_other(name, kernel):
    case = FAMILIES[name]()
    model: Any = case.model
    model.set_attn_implementation(kernel)
    layout = BatchLayout.for_model(model)
    batch = layout.concat(case.rows, pad_token_id=case.pad_token_id)
    row_logits = [logits_of(model, layout.trim(layout.select(batch, [row]))) for row in range(len(case.rows))]
    packed, _ = packed_of(model, batch)
    before = logits_of(model, packed)
    torch.testing.assert_close(before, torch.cat([logits[0] for logits in row_logits])[None], rtol=0, atol=2e-6)
    documents = packed['attention_mask']
    words: Any = model.get_input_embeddings()
    for document in documents:
        hook = words.register_forward_hook(
            lambda module, args, output, at=document: torch.where(at[None, :, None], -output, output)
        )
        after = logits_of(model, packed)
        hook.remove()
        assert not torch.equal(after[:, document], before[:, document])
        assert torch.equal(after[:, ~document], before[:, ~document])


@pytest.mark.parametrize('side', ['left', 'right'])
def test_documents_of_one_token(side):
    model = text_model()
    batch = collate(text_rows(SHAPE), side=side)
    batch['attention_mask'][2] = 0
    batch['labels'][2] = -100
    packed, _ = packed_of(model, batch)
    lengths = [length for place, (length, _) in enumerate(SHAPE) if place != 2]
    assert packed['attention_mask'].sum(dim=1).tolist() == lengths
    one_by_one = [logits_of(model, {'input_ids': packed['input_ids'][:, at]}) for at in packed['attention_mask']]
    torch.testing.assert_close(logits_of(model, packed), torch.cat(one_by_one, dim=1), rtol=0, atol=2e-6)


@pytest.mark.parametrize('reentrant', [True, False])
def test_recomputed_layers_see_their_documents(reentrant):
    """Two forwards run before their backwards. Each backward must use the bounds of its own forward."""
    model = text_model()
    batches = [collate(text_rows(SHAPE)), collate(text_rows(SHAPE[::-1][2:]))]
    expected, _ = reference_gradients(model, batches[0])
    second, _ = reference_gradients(model, batches[1])
    expected = {name: expected[name] + second[name] for name in expected}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': reentrant})
    model.enable_input_require_grads()
    model.train()
    losses = [model(**packed_of(model, batch)[0]).loss for batch in batches]
    for loss in losses:
        loss.backward()
    gradients: Any = {f'model.{name}': parameter.grad for name, parameter in model.named_parameters()}
    assert relative_error(gradients, expected) < 1e-6


def test_attention_dropout_is_the_models():
    model = text_model(attention_dropout=0.5).train()
    packed, _ = packed_of(model, collate(text_rows(SHAPE)))
    packed.pop('labels')
    first, second = model(**packed).logits, model(**packed).logits
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(**packed).logits, model(**packed).logits)


@pytest.mark.parametrize('kernel', ['sdpa', 'eager'])
def test_other_batches_are_computed_as_before(kernel):
    """Padded on either side, with a cache, and generated from."""
    model: Any = text_model(attn_implementation=kernel).eval()
    batches = [collate(text_rows(SHAPE), side=side) for side in ('left', 'right')]

    def answers():
        prompts = {key: batches[0][key] for key in ('input_ids', 'attention_mask')}
        written = model.generate(**prompts, max_new_tokens=4, do_sample=False, pad_token_id=0)
        return [*(logits_of(model, batch) for batch in batches), written, model.generation_config.to_dict()]

    before = answers()
    attention = DocumentAttention(model)
    during = answers()
    attention.undo()
    for later in (during, answers()):
        assert all(torch.equal(a, b) for a, b in zip(later[:-1], before[:-1], strict=True))
    assert model.config._attn_implementation == kernel
    assert 'documents' not in str(model.config.to_dict())


def test_attention_is_restored_after_training(tmp_path):
    model = text_model()
    batch = collate(text_rows(SHAPE))
    fit(model, batch, packing=True)
    assert model.config._attn_implementation == 'sdpa'
    model.save_pretrained(tmp_path)
    assert 'documents' not in (tmp_path / 'config.json').read_text()


def test_evaluation_between_steps():
    batch = collate(text_rows(SHAPE))
    logits_of_runs = []
    for packing in (False, True):
        logits = On(Event.EVAL_AFTER_FORWARD, lambda state: state.outputs.clone())
        padded = token_data_spec(loader(collate(text_rows(SHAPE), side='left')))
        evaluator = Evaluator(label='eval', dataloader=padded, device_eval_microbatch_size=1)
        options = {'eval_dataloader': evaluator, 'eval_interval': '1ba', 'callbacks': [logits]}
        fit(text_model(), batch, batch, packing=packing, **options)
        logits_of_runs.append(torch.cat(logits.values, dim=1))
    assert logits_of_runs[0].numel()
    assert torch.equal(*logits_of_runs)


def test_memory_grows_with_the_documents():
    """Twice the documents, twice the memory: a mask of the packed row would be four times as large."""

    def kept(num_rows):
        model = text_model(max_position_embeddings=512)
        packed, _ = packed_of(model, collate(text_rows([(64, 60)] * num_rows)))
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.train()(**packed)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)

    assert kept(32) < 2.05 * kept(16)


def check_attention_at_once(dtype, *, is_causal):
    """Compares one call of a kernel for all documents with a call for each."""
    torch.manual_seed(0)
    lengths = [3, 1, 7, 7, 2]
    documents = document_attention._Documents(lengths, [None] * len(lengths))
    query, key, value = (torch.randn(1, heads, sum(lengths), 8, dtype=dtype) for heads in (4, 2, 2))
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, is_causal
    attended = document_attention._attend_at_once(documents, module, query, key, value, scaling=0.3)
    expected, _ = document_attention._attend('sdpa', module, query, key, value, documents, scaling=0.3)
    torch.testing.assert_close(attended, expected)


def test_kernel_for_gpus_gives_the_same():
    """Torch's nested tensors, here by its plain kernel, which is for attention in both directions and no gradient."""
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        check_attention_at_once(torch.float32, is_causal=False)


def of_documents(query, key, value, ends, _, longest, __, *, causal, scale, dropout=0.0):
    """Attends in one document after the other. A kernel for documents of any length must return the same."""
    assert longest == int(ends.diff().max())
    assert not dropout
    parts = []
    for q, k, v in zip(*(states.split(ends.diff().tolist()) for states in (query, key, value)), strict=True):
        heads = [part.transpose(0, 1)[None] for part in (q, k, v)]
        options = {'is_causal': causal, 'scale': scale, 'enable_gqa': True}
        parts.append(torch.nn.functional.scaled_dot_product_attention(*heads, **options)[0].transpose(0, 1))
    return torch.cat(parts)


def test_layers_share_bounds_on_the_device(monkeypatch):
    model = text_model(num_key_value_heads=1).to(torch.bfloat16)
    packed, _ = packed_of(model, collate(text_rows(SHAPE)))
    expected = logits_of(model, packed)
    kernel_calls = []

    def kernel(query, key, value, ends, *others, **options):
        kernel_calls.append((ends, query.shape[1], key.shape[1]))
        return of_documents(query, key, value, ends, *others, **options)

    monkeypatch.setattr(document_attention, '_on_gpu', lambda states: True)
    monkeypatch.setattr(document_attention, '_half_kernel', lambda has_dropout: kernel)
    torch.testing.assert_close(logits_of(model, packed), expected, rtol=0, atol=1e-2)
    assert [heads for _, *heads in kernel_calls] == [[2, 1]] * 2
    assert len({id(ends) for ends, *_ in kernel_calls}) == 1


def test_torchs_kernel_is_called_as_declared(monkeypatch):
    varlen: Any = pytest.importorskip('torch.nn.attention.varlen')
    declared = inspect.signature(varlen.varlen_attn)

    def stand_in(*args, **kwargs):
        call = declared.bind(*args, **kwargs).arguments
        assert call['enable_gqa']
        return of_documents(*args, causal=call['window_size'] == (-1, 0), scale=call['scale'])

    stand_in.__signature__ = declared
    monkeypatch.setattr(varlen, 'varlen_attn', stand_in)
    monkeypatch.setattr(document_attention, '_half_kernel', document_attention._half_kernel.__wrapped__)
    check_attention_at_once(torch.bfloat16, is_causal=True)


class Reads(TorchFunctionMode):
    """Counts how often the lengths of documents are read from a mask."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.sum and args[0].dtype == torch.bool and args[0].dim() == 2:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(IS_V4, reason='hybrids are refused')
def test_lengths_are_read_once_a_forward():
    layer_types = ['conv', 'full_attention', 'conv', 'conv', 'full_attention']
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SIZES, num_hidden_layers=5, layer_types=layer_types))
    packed, _ = packed_of(model, collate(text_rows(SHAPE)))
    with Reads() as reads:
        logits_of(model, {**packed, 'use_cache': False})
    assert 0 < reads.count <= 2


@pytest.mark.slow
@pytest.mark.skipif(IS_V4, reason='makes its masks otherwise')
def test_flex_attention_gets_one_block_mask(monkeypatch):
    """On a CPU without its compiled kernel, which has no backward there."""
    made, make = [], transformers.masking_utils.create_block_mask
    monkeypatch.setattr(
        transformers.masking_utils, 'create_block_mask', lambda *args, **kwargs: made.append(1) or make(*args, **kwargs)
    )
    model: Any = text_model()
    batch, layout = collate(text_rows(SHAPE)), BatchLayout.for_model(model)
    one_by_one = [logits_of(model, layout.trim(layout.select(batch, [row]))) for row in range(len(SHAPE))]
    model.set_attn_implementation('flex_attention')
    packed, attention = packed_of(model, batch)
    assert not attention.has_masks
    with torch.compiler.set_stance('force_eager'):
        packed_logits = logits_of(model, packed)
    torch.testing.assert_close(packed_logits, torch.cat(one_by_one, dim=1), rtol=0, atol=2e-6)
    assert len(made) == 1


@pytest.mark.skipif(IS_V4, reason='names its settings otherwise')
def test_attention_in_chunks_is_refused():
    chunks = {'attention_chunk_size': 4, 'layer_types': ['chunked_attention', 'full_attention']}
    config = transformers.Llama4TextConfig(
        **SIZES, **chunks, num_hidden_layers=2, intermediate_size_mlp=32, head_dim=16, num_local_experts=2
    )
    model = transformers.Llama4ForCausalLM(config)
    batch = collate(text_rows(SHAPE))
    with pytest.raises(RuntimeError, match='chunks'):
        fit(model, batch, packing=True)
    assert model.config._attn_implementation == 'sdpa'


class Convolved(torch.nn.Module):
    """A layer whose output has a little of the position before."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, *args, **kwargs):
        return self.layer(hidden_states + 1e-3 * hidden_states.roll(1, dims=1), *args, **kwargs)


def test_convolution_over_documents_is_refused():
    model = text_model()
    model.model.layers[1] = Convolved(model.model.layers[1])
    rows = text_rows([(12, 1), (13, 1), (14, 2), (11, 1)])  # losses far from the bounds
    with pytest.raises(RuntimeError, match='must tell packed documents apart, got: '):
        fit(model, collate(rows), packing=True)


# packing='auto'


def trained(model, batch, **options):
    data = token_data_spec(loader(batch), packing='auto', **options)
    recorder = fit(model, data)
    return recorder, data.split_batch.__self__._split


@pytest.mark.parametrize(('shape', 'packs'), [(SHAPE, True), ([(9, 3)] * 8, False)], ids=['ragged', 'of one length'])
def test_auto_packs_where_that_costs_less(shape, packs):
    model, batch = text_model(), collate(text_rows(shape))
    expected, _ = reference_gradients(model, batch)
    recorder, split = trained(model, batch)
    assert split.packing == packs
    assert relative_error(recorder.gradients, expected) < 1e-6


def test_auto_pads_if_packing_is_impossible():
    subject = PACKED['bloom']
    model, batch = subject.model('large'), subject.batch(0, side='right')
    expected, _ = reference_gradients(model.model, batch)
    recorder, split = trained(model, batch)
    assert not split.packing
    assert relative_error(recorder.gradients, expected) < 2e-6


MAMBA = {'mamba_n_heads': 8, 'mamba_d_head': 8, 'mamba_d_state': 8, 'mamba_chunk_size': 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    'bamba': {**MAMBA, 'attn_layer_indices': [1]},
    'granitemoehybrid': {
        **MAMBA,
        'layer_types': ['mamba', 'attention'],
        'num_local_experts': 0,
        'shared_intermediate_size': 32,
    },
    'mamba2': {'num_heads': 8, 'head_dim': 8, 'state_size': 8, 'n_groups': 2, 'chunk_size': 8},
    'qwen3_5_text': {
        'linear_num_value_heads': 4,
        'linear_num_key_heads': 2,
        'linear_key_head_dim': 8,
        'linear_value_head_dim': 8,
        'layer_types': ['linear_attention', 'full_attention'],
    },
}


@pytest.mark.skipif(IS_V4, reason='refused: hands them masks of attention, or makes its masks itself')
@pytest.mark.parametrize('name', HYBRIDS)
def test_states_end_with_their_document(name):
    sizes = {**SIZES, 'num_hidden_layers': 2, 'max_position_embeddings': 128, 'head_dim': 8}
    try:
        config = transformers.AutoConfig.for_model(name, **{**sizes, **HYBRIDS[name]})
        model: Any = transformers.AutoModelForCausalLM.from_config(config).double()
    except ValueError as error:
        pytest.skip(f'transformers {transformers.__version__}: {error}')
    batch, layout = collate(text_rows(SHAPE)), BatchLayout.for_model(model)
    rows = [layout.trim(layout.select(batch, [row])) for row in range(len(SHAPE))]
    one_by_one = [logits_of(model, {**row, 'use_cache': False}) for row in rows]
    packed, attention = packed_of(model, batch)
    torch.testing.assert_close(logits_of(model, packed), torch.cat(one_by_one, dim=1), rtol=0, atol=1e-10)
    attention.undo()
    torch.testing.assert_close(logits_of(model, {**rows[0], 'use_cache': False}), one_by_one[0], rtol=0, atol=0)
