# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Attention document by document, so that a packed row costs no more than its documents.

A packed row holds the tokens of all rows of a microbatch, one row after the other. Each of these rows is a document of
the packed row. Three steps tell the attention where the documents are:

1. The ``attention_mask`` of a packed row is a packed mask. It has one row for each document, bool
   ``(documents, width)``, True at the tokens of that document.
2. Transformers calls the mask function of the model's attention with the packed mask. Our function, :func:`_masks`,
   returns :class:`_Documents`: the length of each document, and the mask that the document would have alone. This mask
   is None if none is needed, as in causal attention.
3. The layers hand :class:`_Documents` to the attention function. Our function, :func:`_attend`, computes the documents
   apart, by one call of a GPU kernel or by the model's own attention function.

Layers with a state or a convolution, and embeddings that look at the mask, do not use step 2. The model hands them the
packed mask itself, and they are called once for each document.

The load-balancing loss of a router gets no mask, because packed rows have no padding.

The documents are passed as arguments of the forward, not kept in the model. So a layer that is computed again in the
backward, or a model that is called twice before its backward, sees the right documents.

"Plain" functions are the ones that the model calls without this module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, wraps
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer_tokacc.batch import Batch
from composer_tokacc.compat import attention_of
from composer_tokacc.layout.tensors import GRID_KEYS
from composer_tokacc.model_structure import HALF_PRECISION
from composer_tokacc.refusals import NotExactError

PREFIX = 'documents_'
"""Our attention is registered under the name of the plain one with this prefix."""
LARGEST_HEAD = 256
"""Largest head size of the kernel for half precision, see :func:`_half_kernel`. It also needs a multiple of 8."""
UNKNOWN_TO_KERNELS = ('position_bias', 'softcap')
"""Arguments that rule out :func:`_attend_at_once`, because it would ignore them. The SDPA attention of
Transformers adds ``position_bias`` to the scores, and refuses ``softcap``. It ignores other arguments, such as
``sliding_window``, too, because the mask says the same."""
SPLIT_ARGUMENTS = {
    'hidden_states': ('hidden_states',),
    'input_ids': ('input_ids', 'position_ids', 'token_type_ids'),
}
"""The arguments of a layer that are split into documents if it is called once for each document. The keys tell the two
types of layers apart, by the argument that holds the tokens: layers with a state or a convolution take
``hidden_states``, embeddings take ``input_ids``."""

HostFunction: TypeAlias = Callable[..., Any]
"""A function of Transformers, which has no types for its masks and attention."""
HostMask: TypeAlias = Any
"""The mask of an attention function of Transformers, usually a tensor or None."""


class DocumentAttention:
    """Makes the text layers of a transformers model attend document by document, without a cache, until :meth:`undo`.

    Batches that are not packed are computed by the plain attention. The class also counts positions as the model does,
    because a packed row must bring them along.

    Args:
        model: The model, or a module that contains it.
        packing: See ``CutRules.packing``. With ``'documents'``, our attention replaces SDPA and eager attention; flash
            and flex attention are kept. With ``'positions'`` every attention is kept, and only the cache is switched
            off. An attention that is kept finds documents by ``position_ids`` that restart. For this, SDPA and eager
            attention make a mask of ``(width, width)`` for a packed row.

    Raises:
        RuntimeError: If the model is not one of Transformers, if its text attention does not go through
            ``AttentionInterface`` or attends in chunks, or if a convolution would mix documents.
    """

    def __init__(self, model: nn.Module, packing: str = 'documents') -> None:
        from transformers import PreTrainedModel

        # A multimodal model contains several models of Transformers. Only the text models attend document by document.
        # The outermost model comes first, and its config holds the text config.
        submodels = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if not submodels:
            raise NotExactError(f'The model must be a model of Transformers, got: {type(model).__name__}.')
        text_config = submodels[0].config.get_text_config(decoder=True)
        # Several submodels may have the text config: a model with a head contains one without a head.
        text_type = type(text_config)
        self._text_models = [submodel for submodel in submodels if type(submodel.config) is text_type]
        config = self._text_models[0].config
        layer_types = getattr(config, 'layer_types', None) or ()
        if 'chunked_attention' in layer_types:
            raise NotExactError(
                'Attention must not be in chunks that are counted from column 0, but some layers of this model have '
                'such attention.'
            )
        # The name has the prefix if another DocumentAttention was not undone, for example after an error in a fit.
        self._plain_name = attention_of(config).removeprefix(PREFIX)
        self.packing = packing
        """How rows are packed for this attention: see ``CutRules.packing``."""
        self.uses_packed_masks = self._plain_name in ('sdpa', 'eager') and packing == 'documents'
        """Whether packed rows have a packed mask, because our attention replaces the plain one."""
        self._rope_index = _rope_index_of(model)
        self._padding_position = _padding_position_of(model)
        self._cached_configs: list[Any] = []
        try:
            if self.uses_packed_masks:
                # Comes first, so that no class has changed yet if it refuses a model without AttentionInterface.
                self._register()
                # undo() does not undo these two. They act only on packed masks, and copies of the model share them.
                _call_layers_by_document(model)
                _drop_packed_mask_in_router_losses(submodels)
            self._switch_off_cache()
            self._check_convolutions()
        except Exception:
            self.undo()
            raise

    def _switch_off_cache(self) -> None:
        """Switches off the cache of keys and values in the configs of the text models.

        A cache would carry states from one document to the next, and with a cache Transformers does not look for
        positions that restart. It is switched off in the config, because the forward of Qwen3.5 has no argument
        `use_cache`.
        """
        for text_model in self._text_models:
            config = text_model.config
            if getattr(config, 'use_cache', False):
                config.use_cache = False
                self._cached_configs.append(config)

    def _check_convolutions(self) -> None:
        """Refuses a convolution over tokens outside of the layers that are called once for each document.

        Such a convolution mixes documents, because Transformers does not tell it where they start. The first-batch
        check may miss this: in a model with fresh weights, a convolution may change the logits by less than round-off.
        """
        for text_model in self._text_models:
            for layer in _convolved_layers(text_model, by_document=self.uses_packed_masks):
                raise NotExactError(
                    f'Convolutions must tell packed documents apart, but the one in {type(layer).__name__} does not.'
                )

    def undo(self) -> None:
        """Restores the attention and the cache that the model had before."""
        for config in self._cached_configs:
            config.use_cache = True
        if self.uses_packed_masks:
            self._set_attention(self._plain_name)

    def positions(self, batch: Batch, real: Tensor) -> Tensor:
        """Returns the position of each real token in its own row, as the model counts positions, ``(rows, width)``.

        ``real`` marks the tokens of each row, ``(rows, width)`` bool. Positions at padding have no meaning.
        """
        padding_position = self._padding_position
        if padding_position is None:
            return real.cumsum(dim=1) - 1
        # In these models the id of padding and the position of padding are the same number. RoBERTa and ESM do not
        # count a token with this id, even within the text, and give it the position of padding. For example, with
        # padding 1 the ids 5 1 7 get the positions 2 1 3.
        is_counted = real & (batch['input_ids'] != padding_position)
        return is_counted.cumsum(dim=1) * is_counted + padding_position

    def rotary_positions(self, batch: Batch) -> Tensor | None:
        """Returns multimodal rotary positions, ``(3, rows, width)``, or None if text positions are enough."""
        has_grids = any(batch.get(key) is not None for key in GRID_KEYS)
        if self._rope_index is None or not has_grids:
            return None
        names = inspect.signature(self._rope_index).parameters
        arguments = {key: value for key, value in batch.items() if key in names}
        return self._rope_index(**arguments)[0]  # the other result is only needed to generate text

    def _register(self) -> None:
        """Registers our mask and attention functions with Transformers, and makes the text models use them."""
        from transformers import AttentionInterface, AttentionMaskInterface

        name = PREFIX + self._plain_name
        attend = partial(_attend, self._plain_name)
        masks = partial(_masks, self._plain_name)
        AttentionInterface.register(name, _in_plain_python(attend))
        AttentionMaskInterface.register(name, _in_plain_python(masks))
        self._set_attention(name)

    def _set_attention(self, name: str) -> None:
        for text_model in self._text_models:
            # The key '' stands for the model itself. Without a dict, models inside of it would change too.
            text_model.set_attn_implementation({'': name})
            # Transformers only logs a warning if it cannot set the attention.
            if attention_of(text_model.config) != name:
                raise NotExactError(
                    "The model's attention must go through transformers' AttentionInterface, but the attention of "
                    f'{type(text_model).__name__} does not.'
                )


def _rope_index_of(model: nn.Module) -> HostFunction | None:
    """Returns the method by which a multimodal model counts its rotary positions; None if it has no such method."""
    for module in model.modules():
        rope_index: Any = getattr(module, 'get_rope_index', None)
        if rope_index is not None:
            return rope_index
    return None


def _padding_position_of(model: nn.Module) -> int | None:
    """Returns the position that the model's embedding of positions reserves for padding, or None.

    A model with such a position counts its tokens from the next position. This is the convention of fairseq, which
    RoBERTa, XLM-R, CamemBERT, MPNet and ESM follow.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith('position_embeddings'):
            return module.padding_idx
    return None


# Masks of documents.


class _Documents:
    """The documents of a packed row: their lengths and masks. The layers receive it in place of a mask.

    Args:
        lengths: The number of tokens of each document.
        masks: The mask that each document would have if it were the whole batch; None: it needs no mask.
    """

    def __init__(self, lengths: list[int], masks: list[HostMask]) -> None:
        self.lengths = lengths
        self.masks = masks
        self._ends: dict[torch.device, Tensor] = {}

    def ends(self, device: torch.device) -> Tensor:
        """Returns 0, then the column at which each document ends (exclusive), int32 ``(documents + 1,)``.

        All layers share the tensor, so that it is moved to a device only once.
        """
        if device not in self._ends:
            ends = [0, *accumulate(self.lengths)]
            ends_on_cpu = torch.tensor(ends, dtype=torch.int32)
            self._ends[device] = ends_on_cpu.to(device, non_blocking=True)
        return self._ends[device]


def _lengths_of(packed_mask: Tensor) -> list[int]:
    """Returns the length of each document of a packed mask. Waits for the GPU only once, not once for each layer."""
    # All layers receive the same tensor. It keeps its lengths as an attribute, which the first call sets.
    attributes = vars(packed_mask)
    if 'lengths_of_documents' not in attributes:
        attributes['lengths_of_documents'] = packed_mask.sum(dim=1).tolist()
    return attributes['lengths_of_documents']


def _masks(plain_name: str, **arguments: Any) -> HostMask:
    """Returns the masks for our attention. Transformers calls it in place of the plain mask function.

    For a packed mask, ``(documents, width)``, it returns :class:`_Documents`. If rows are not packed,
    ``attention_mask`` is ``(rows, width)`` or None, and the plain function makes the mask.
    """
    from transformers import AttentionMaskInterface

    plain_masks = AttentionMaskInterface()[plain_name]
    attention_mask = arguments['attention_mask']
    # A packed row is a batch of one row, and its mask has a row for each document. So a packed mask has more rows than
    # the batch. With only one document it has one row, as the mask of a row that is not packed. Then the plain function
    # makes the right mask, too.
    if attention_mask is None or len(attention_mask) == arguments['batch_size']:
        return plain_masks(**arguments)
    # Each document gets the mask that the model would make for it alone.
    lengths = _lengths_of(attention_mask)
    bounds = [0, *accumulate(lengths)]
    masks = []
    for start, end in pairwise(bounds):
        document_arguments = {**arguments, 'batch_size': 1, 'attention_mask': None}
        # The offsets say where the document lies in the packed row, because some masks look up which columns of the row
        # are images.
        document_arguments['kv_length'] = end - start
        document_arguments['kv_offset'] = start
        if 'cache_position' in arguments:  # transformers 4
            document_arguments['cache_position'] = arguments['cache_position'][start:end]
        else:
            document_arguments['q_length'] = end - start
            document_arguments['q_offset'] = start
        masks.append(plain_masks(**document_arguments))
    return _Documents(lengths, masks)


# Layers that are called once for each document.


def _call_layers_by_document(model: nn.Module) -> None:
    """Changes classes of layers that would mix documents, so that their forward runs once for each document.

    The change is never undone. It also acts on other models with these layers, but only on packed rows.
    """
    for tokens_name in SPLIT_ARGUMENTS:
        # The forward of their class is changed, not of single modules, so that copies of a model work too.
        layer_classes = {type(layer) for layer in _layers_that_mix(model, tokens_name)}
        for layer_class in layer_classes:
            plain_forward = layer_class.forward
            if not _is_replacement(plain_forward):  # another model may have changed the class before
                by_document = partial(_forward_by_document, plain_forward, tokens_name)
                layer_class.forward = _marked(_in_plain_python(by_document), plain_forward)


def _marked(function: HostFunction, plain: HostFunction) -> HostFunction:
    """Returns a function with the name and signature of the plain one that it replaces, and our mark."""
    replacement: Any = wraps(plain)(function)
    replacement.replaces_plain = True
    return replacement


def _is_replacement(function: HostFunction) -> bool:
    return hasattr(function, 'replaces_plain')


def _layers_that_mix(model: nn.Module, tokens_name: str) -> Iterator[nn.Module]:
    """Yields layers that would mix documents: the innermost modules that take a mask and ``tokens_name``.

    They have a state or a convolution, or are embeddings that look at the mask. Left out are:

    - attention modules, which have an attribute ``is_causal``. They receive :class:`_Documents`, and tell documents
      apart. To call them once for each document would only hide them from ``torch.compile``;
    - decoder layers, which hold an attention module that takes a mask;
    - models, and wrappers of models such as PEFT's, which take ids and a mask, too.
    """
    from transformers import PreTrainedModel

    def takes_mask(module: nn.Module) -> bool:
        """Returns whether a module that is no model takes a mask and the tokens."""
        parameters = inspect.signature(type(module).forward).parameters
        if tokens_name not in parameters or 'attention_mask' not in parameters:
            return False
        contains_model = any(isinstance(part, PreTrainedModel) for part in module.modules())
        return not contains_model

    for module in model.modules():
        is_attention = hasattr(module, 'is_causal')
        if is_attention or not takes_mask(module):
            continue
        _, *inner_modules = module.modules()  # the first one is the module itself
        # Attention modules count as inner modules that take a mask, so that a decoder layer is not yielded.
        is_innermost = not any(takes_mask(inner) for inner in inner_modules)
        if is_innermost:
            yield module


def _convolved_layers(module: nn.Module, *, by_document: bool) -> Iterator[nn.Module]:
    """Yields the modules within a text model that hold a convolution over tokens.

    Other models inside it, such as encoders of images and sounds, are left out. If ``by_document``, layers that are
    called once for each document are left out too.
    """
    from transformers import PreTrainedModel

    for part in module.children():
        if isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1:
            yield module
        is_called_by_document = by_document and _is_replacement(type(part).forward)
        if not is_called_by_document and not isinstance(part, PreTrainedModel):
            yield from _convolved_layers(part, by_document=by_document)


def _forward_by_document(
    plain_forward: HostFunction,
    tokens_name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a layer once for each document of a packed mask, without a mask, because a document has no padding."""
    signature = inspect.signature(plain_forward)
    call = signature.bind(*args, **kwargs)
    mask = call.arguments.get('attention_mask')
    tokens = call.arguments.get(tokens_name)
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor):
        return plain_forward(*args, **kwargs)
    # A packed mask has a row for each document. Any other mask of two dimensions has a row for each row of the batch.
    is_packed = mask.dim() == 2 and len(mask) != len(tokens)
    if not is_packed:
        return plain_forward(*args, **kwargs)
    lengths = _lengths_of(mask)
    # The arguments that are split, each with its part for each document.
    parts_of_arguments = {}
    for name in SPLIT_ARGUMENTS[tokens_name]:
        value = call.arguments.get(name)
        if isinstance(value, Tensor):
            parts_of_arguments[name] = value.split(lengths, dim=1)
    call.arguments['attention_mask'] = None
    outputs = []
    for document_number in range(len(lengths)):
        for name, parts in parts_of_arguments.items():
            call.arguments[name] = parts[document_number]
        output = plain_forward(*call.args, **call.kwargs)
        outputs.append(output)
    return _joined_outputs(outputs)


def _joined_outputs(outputs: list[Any]) -> Any:
    """Returns the output of a layer for a packed row, from its outputs for each document."""
    if not isinstance(outputs[0], tuple):
        return torch.cat(outputs, dim=1)
    # Some layers return more than their states. MiniMax also returns the state at the end of its linear attention, for
    # a cache. The cache is off, so no one reads the further results. They are taken from the first document.
    _, *further_results = outputs[0]
    states_of_documents = [output[0] for output in outputs]
    joined = torch.cat(states_of_documents, dim=1)
    return joined, *further_results


def _drop_packed_mask_in_router_losses(submodels: Sequence[nn.Module]) -> None:
    """Replaces the load-balancing loss in the files of the models by :func:`_balancing_loss`. Never undone."""
    for submodel in submodels:
        # Each file of Transformers that defines a model with experts has its own function.
        file = sys.modules[type(submodel).__module__]
        names = vars(file)
        plain_loss = names.get('load_balancing_loss_func')
        if plain_loss is not None and not _is_replacement(plain_loss):
            loss_of_packed_rows = partial(_balancing_loss, plain_loss)
            names['load_balancing_loss_func'] = _marked(loss_of_packed_rows, plain_loss)


def _balancing_loss(plain_loss: HostFunction, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the load-balancing loss of the routers. Drops a packed mask, because packed rows have no padding.

    ``logits`` is a tuple with the logits of each router, ``(positions, experts)``.
    """
    signature = inspect.signature(plain_loss)
    call = signature.bind(logits, *args, **kwargs)
    mask = call.arguments.get('attention_mask')
    if logits and mask is not None:
        num_positions = logits[0].shape[:-1].numel()
        # A mask of rows has one value for each position. A packed mask has as many for each document.
        if mask.numel() != num_positions:
            call.arguments['attention_mask'] = None
    return plain_loss(*call.args, **call.kwargs)


def _in_plain_python(function: HostFunction) -> HostFunction:
    """Hides a function from ``torch.compile``, which would compile again for the document lengths of every batch."""
    # A lambda, because disable() is meant for functions, and a partial() has no name.
    return torch.compiler.disable(lambda *args, **kwargs: function(*args, **kwargs))


# The attention function.


def _attend(
    plain_name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: HostMask,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attends document by document. Transformers calls it in place of the plain attention function.

    For packed rows, query, key and value are ``(1, heads, tokens, size)``, and the result is
    ``(1, tokens, heads, size)``, with None for the attention weights, which no one needs.

    There are three ways: :func:`_attend_at_once` on a GPU, if a kernel can do it; :func:`_attend_as_batch`, if the
    documents are equally long; else :func:`_attend_one_by_one`.
    """
    plain_attention = _plain_attention(plain_name, module)
    if not isinstance(attention_mask, _Documents):
        return plain_attention(module, query, key, value, attention_mask, **kwargs)
    documents = attention_mask
    have_masks = any(mask is not None for mask in documents.masks)
    has_unknown_argument = any(kwargs.get(name) is not None for name in UNKNOWN_TO_KERNELS)
    fits_kernels = plain_name == 'sdpa' and not have_masks and not has_unknown_argument
    if fits_kernels and _on_gpu(query):
        attended = _attend_at_once(documents, module, query, key, value, **kwargs)
        return attended, None
    # In these two ways the plain function raises if it reads an argument as wide as the row, such as `position_bias`.
    attend_in_document = partial(plain_attention, module, **kwargs)
    are_equally_long = len(set(documents.lengths)) == 1
    if are_equally_long and not have_masks:
        attended = _attend_as_batch(attend_in_document, documents, query, key, value)
    else:
        attended = _attend_one_by_one(attend_in_document, documents, query, key, value)
    return attended, None


def _attend_as_batch(
    attend_in_document: HostFunction,
    documents: _Documents,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Attends in documents of equal length, which are one batch for the plain attention function.

    The states of this batch are views, so neither they nor the result are copied.
    """
    num_documents = len(documents.lengths)
    states_by_document = []
    for states in (query, key, value):
        # From (1, heads, tokens, size) to (documents, heads, length, size).
        with_documents = states[0].unflatten(1, (num_documents, -1))
        states_by_document.append(with_documents.transpose(0, 1))
    attended, _ = attend_in_document(*states_by_document, None)
    return attended.flatten(0, 1)[None]


def _attend_one_by_one(
    attend_in_document: HostFunction,
    documents: _Documents,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Attends in one document after the other, each with its own mask."""
    # split() instead of narrow(): in the backward each narrow() would fill a gradient as large as the whole row.
    queries = query.split(documents.lengths, dim=2)
    keys = key.split(documents.lengths, dim=2)
    values = value.split(documents.lengths, dim=2)
    outputs = []
    for query_part, key_part, value_part, mask in zip(queries, keys, values, documents.masks, strict=True):
        attended, _ = attend_in_document(query_part, key_part, value_part, mask)
        outputs.append(attended)
    return torch.cat(outputs, dim=1)


def _on_gpu(states: Tensor) -> bool:
    # This is a function, so that tests can replace it and use the code for GPUs on a CPU.
    return states.is_cuda


def _attend_at_once(
    documents: _Documents,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **ignored: Any,
) -> Tensor:
    """Attends in all documents with one call of a GPU kernel; returns ``(1, tokens, heads, size)``.

    Query, key and value are ``(1, heads, tokens, size)``. ``ignored`` are arguments that SDPA ignores as well.
    """
    if is_causal is None:
        # As in the SDPA attention of Transformers.
        is_causal = bool(getattr(module, 'is_causal', True))
    # Queries and keys may be float32 even under autocast, if rotary embeddings are. Autocast casts them for SDPA, but
    # not for other kernels, so they are cast below.
    device_type = query.device.type
    dtype = query.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    # In multi-head latent attention (DeepSeek-V3) values have smaller heads than queries and keys.
    head_size = query.shape[-1]
    has_one_head_size = value.shape[-1] == head_size
    fits_kernel = has_one_head_size and head_size <= LARGEST_HEAD and head_size % 8 == 0
    half_kernel = None
    if dtype in HALF_PRECISION and fits_kernel and not dropout:
        half_kernel = _half_kernel()
    if half_kernel is None:
        return _attend_nested(documents, query, key, value, dropout=dropout, scaling=scaling, is_causal=is_causal)
    # From (1, heads, tokens, size) to (tokens, heads, size).
    token_states = [states[0].transpose(0, 1).to(dtype) for states in (query, key, value)]
    ends = documents.ends(query.device)
    longest = max(documents.lengths)
    attended = half_kernel(*token_states, ends, longest, causal=is_causal, scale=scaling)
    return attended[None]


def _attend_nested(
    documents: _Documents,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dropout: float,
    scaling: float | None,
    is_causal: bool,
) -> Tensor:
    """Attends in all documents with one call of torch's SDPA, for which they are nested tensors.

    It works with every dtype and head size, and with dropout, but the nested tensors are copies of the states.
    """
    num_heads = query.shape[1]
    attended = F.scaled_dot_product_attention(
        _nested(query, num_heads, documents),
        _nested(key, num_heads, documents),
        _nested(value, num_heads, documents),
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
    )
    return attended.transpose(1, 2).values()[None]


def _nested(states: Tensor, num_heads: int, documents: _Documents) -> Tensor:
    """Returns states ``(1, heads, tokens, size)`` as a nested tensor ``(documents, num_heads, length, size)``.

    Keys and values may have fewer heads than the query. They are repeated, because SDPA takes nested tensors only with
    equally many heads.
    """
    token_states = states[0].transpose(0, 1)
    token_states = _with_repeated_heads(token_states, num_heads).contiguous()
    ends = documents.ends(states.device).long()
    shortest = min(documents.lengths)
    longest = max(documents.lengths)
    nested = torch.nested.nested_tensor_from_jagged(token_states, ends, min_seqlen=shortest, max_seqlen=longest)
    return nested.transpose(1, 2)


def _with_repeated_heads(states: Tensor, num_heads: int) -> Tensor:
    """Returns keys or values, ``(tokens, heads, size)``, with one head for each of ``num_heads`` query heads.

    A head that several query heads share (grouped-query attention) is repeated for each of them.
    """
    group_size = num_heads // states.shape[1]
    return states.repeat_interleave(group_size, dim=1)


@cache
def _half_kernel() -> Callable[..., Tensor] | None:
    """Returns a kernel for documents of any length in half precision; None if torch's kernel is missing or too old.

    The kernel takes query, key and value, ``(tokens, heads, size)``; the ends of the documents, see
    :meth:`_Documents.ends`; and the length of the longest one. It returns ``(tokens, heads, size)``. It has no dropout.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found]
    except ImportError:
        return None
    # The first releases of the kernel lack some arguments.
    arguments = inspect.signature(varlen_attn).parameters
    if 'window_size' not in arguments:
        return None
    shares_heads = 'enable_gqa' in arguments

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        longest: int,
        *,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        # How many columns a token sees before and after itself; -1: all of them.
        window = (-1, 0) if causal else (-1, -1)
        options: dict[str, Any] = {'scale': scale, 'window_size': window}
        if shares_heads:
            options['enable_gqa'] = True
        else:
            num_heads = query.shape[1]
            key = _with_repeated_heads(key, num_heads)
            value = _with_repeated_heads(value, num_heads)
        # It takes the ends and the longest length twice, of queries and of keys. Here they are the same.
        return varlen_attn(query, key, value, ends, ends, longest, longest, **options)

    return attend


def _plain_attention(plain_name: str, module: nn.Module) -> HostFunction:
    """Returns the attention function that the model calls without this module.

    Transformers registers all of them except the eager one, which is defined in the file of the model.
    """
    from transformers import AttentionInterface

    if plain_name != 'eager':
        return AttentionInterface()[plain_name]
    # A subclass of the layer may be defined in another file, so the files of its base classes are searched too.
    for layer_class in type(module).__mro__:
        file = sys.modules[layer_class.__module__]
        names = vars(file)
        if 'eager_attention_forward' in names:
            return names['eager_attention_forward']
    raise NotExactError(f'No `eager_attention_forward` was found in the file of {type(module).__name__}.')
