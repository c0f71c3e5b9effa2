# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Attention document by document, so that a packed row costs no more than its documents.

The ``attention_mask`` of a packed row has one row for each document, True at the tokens of that document. Transformers
hands it to the mask function of the model's attention. Ours makes one mask for each document, or none if the document
needs none. The layers hand these masks on to the attention function. Ours calls the plain one for each document.

Layers with a state or a convolution, and embeddings that look at the mask, receive the mask itself. They are called
once for each document. The load-balancing loss of a router gets no mask, because packed rows have no padding.

The documents are passed as arguments of the forward, not kept in the model. So a layer that is computed again in the
backward, or a model that is called twice before its backward, sees the right documents.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer_tokacc.batch import Batch
from composer_tokacc.compat import attention_of
from composer_tokacc.refusals import NotExactError

PREFIX = 'documents_'
"""Our attention is registered under the name of the plain one with this prefix."""
LARGEST_HEAD = 256
"""Largest head size that both kernels for half precision take."""
UNKNOWN_TO_KERNELS = ('position_bias', 'softcap')
"""Arguments that matter to the SDPA attention of Transformers, but that the kernels for all documents at once do not
have. SDPA adds the first to the scores and refuses the second. It ignores all others, such as ``sliding_window``, which
is in the mask."""
SPLIT_ARGUMENTS = {
    'hidden_states': ('hidden_states',),
    'input_ids': ('input_ids', 'position_ids', 'token_type_ids'),
}
"""What layers get for each document if they are called once for each: mixers of hybrids, and embeddings that look at
the mask."""

HostFunction: TypeAlias = Callable[..., Any]
"""A function of Transformers, which has no types for its masks and attention."""
HostMask: TypeAlias = Any


class DocumentAttention:
    """Makes the text layers of a transformers model attend document by document, until :meth:`undo`.

    Batches that are not packed are computed by the plain attention. With ``packing='positions'`` the model keeps its
    own attention, which finds documents by ``position_ids`` that restart at 0. SDPA and eager attention then build a
    mask of the size of the packed row squared.

    Raises RuntimeError if the text attention does not go through ``AttentionInterface`` or attends in chunks.
    """

    def __init__(self, model: nn.Module, packing: str = 'documents') -> None:
        from transformers import PreTrainedModel

        # A multimodal model consists of several transformers models. Only those of text attend document by document.
        hosts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if not hosts:
            raise NotExactError(f'The model must be a model of Transformers, got: {type(model).__name__}.')
        text_config = hosts[0].config.get_text_config(decoder=True)
        text_type = type(text_config)
        self._text_hosts = [host for host in hosts if type(host.config) is text_type]
        config = self._text_hosts[0].config
        layer_types = getattr(config, 'layer_types', None) or ()
        if 'chunked_attention' in layer_types:
            raise NotExactError(
                'Attention must not be in chunks that are counted from column 0, but some layers of this model have '
                'such attention.'
            )
        self._plain = attention_of(config).removeprefix(PREFIX)
        self.packing = packing
        """How rows are packed for this attention: see ``CutRules.packing``."""
        self.has_masks = self._plain in ('sdpa', 'eager') and packing == 'documents'
        """Whether packed rows have a mask of their documents. Flash and flex attention have none. They find the
        documents by ``position_ids`` that restart at 0."""
        self._rope_index = _rope_index_of(model)
        self._padding_position = _padding_position_of(model)
        if self.has_masks:
            self._register()
        self._cached_configs: list[Any] = []
        self._switch_off_cache()
        if self.has_masks:
            # These changes stay after undo(): they act only on masks of documents, and copies of the model share them.
            _call_layers_by_document(model)
            _balance_routers_without_mask(hosts)

    def _switch_off_cache(self) -> None:
        """Switches off the cache of keys and values in the configs of the text models.

        A cache would carry states from one document to the next, and with a cache Transformers does not look for
        positions that restart. Composer could not pass `use_cache=False` instead, because the forward of Qwen3.5 has no
        such argument.
        """
        for host in self._text_hosts:
            if getattr(host.config, 'use_cache', False):
                host.config.use_cache = False
                self._cached_configs.append(host.config)

    def undo(self) -> None:
        """Restores the attention and the cache that the model had before."""
        for config in self._cached_configs:
            config.use_cache = True
        if self.has_masks:
            self._set_attention(self._plain)

    def positions(self, batch: Batch, real: Tensor) -> Tensor:
        """Returns the position of each real token in its own row, as the model counts positions, ``(rows, width)``.

        ``real`` marks the tokens of each row, ``(rows, width)`` bool. Other positions of the result mean nothing.
        """
        padding_position = self._padding_position
        if padding_position is None:
            return real.cumsum(dim=1) - 1
        if 'input_ids' not in batch:
            return real.cumsum(dim=1) + padding_position
        # RoBERTa and ESM never count the padding id, not even within the text, and begin behind the padding position.
        counted = real & (batch['input_ids'] != padding_position)
        return counted.cumsum(dim=1) * counted + padding_position

    def rotary_positions(self, batch: Batch) -> Tensor | None:
        """Returns multimodal rotary positions, ``(3, rows, width)``, or None if text positions are enough."""
        has_images = batch.get('image_grid_thw') is not None
        has_videos = batch.get('video_grid_thw') is not None
        if self._rope_index is None or not (has_images or has_videos):
            return None
        names = inspect.signature(self._rope_index).parameters
        arguments = {key: value for key, value in batch.items() if key in names}
        return self._rope_index(**arguments)[0]

    def _register(self) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        name = PREFIX + self._plain
        attend = partial(_attend, self._plain)
        masks = partial(_masks, self._plain)
        AttentionInterface.register(name, _in_plain_python(attend))
        AttentionMaskInterface.register(name, _in_plain_python(masks))
        self._set_attention(name)

    def _set_attention(self, name: str) -> None:
        for host in self._text_hosts:
            host.set_attn_implementation({'': name})
            if attention_of(host.config) != name:
                raise NotExactError(
                    "The model's attention must go through transformers' AttentionInterface, but the attention of "
                    f'{type(host).__name__} does not.'
                )


def _rope_index_of(model: nn.Module) -> HostFunction | None:
    """Returns the function with which a multimodal model counts its rotary positions; None if it has none."""
    for module in model.modules():
        rope_index: Any = getattr(module, 'get_rope_index', None)
        if rope_index is not None:
            return rope_index
    return None


def _padding_position_of(model: nn.Module) -> int | None:
    """Returns the position that the model's table of positions keeps for padding, or None if it keeps none.

    A model with such a position counts its tokens from the next one. This is the convention of fairseq, which RoBERTa,
    XLM-R, CamemBERT, MPNet and ESM follow.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith('position_embeddings'):
            return module.padding_idx
    return None


# Masks of documents.


class _Run(NamedTuple):
    """Consecutive documents with the same length and the same mask: several without a mask, or one with a mask."""

    length: int
    count: int
    mask: HostMask


class _Documents:
    """The mask of a packed row, as the layers receive it."""

    def __init__(self, lengths: list[int], masks: Sequence[HostMask]) -> None:
        self.runs: list[_Run] = []
        for length, mask in zip(lengths, masks, strict=True):
            last = self.runs[-1] if self.runs else None
            if last is not None and last.length == length and last.mask is mask:
                self.runs[-1] = last._replace(count=last.count + 1)
            else:
                run = _Run(length, count=1, mask=mask)
                self.runs.append(run)
        self.lengths = lengths
        self._ends: dict[torch.device, Tensor] = {}

    def ends(self, device: torch.device) -> Tensor:
        """Returns a 0 and where each document ends, int32 ``(documents + 1,)``. It is moved to a device only once."""
        if device not in self._ends:
            ends = [0, *accumulate(self.lengths)]
            in_main_memory = torch.tensor(ends, dtype=torch.int32)
            self._ends[device] = in_main_memory.to(device, non_blocking=True)
        return self._ends[device]

    def split(self, states: Tensor) -> list[Tensor]:
        """Splits ``(1, heads, tokens, size)`` without a copy: ``(documents, heads, length, size)`` for each run."""
        # narrow() would be wrong: for each document its gradient is as large as the whole row.
        sizes = [run.length * run.count for run in self.runs]
        parts = states[0].split(sizes, dim=1)
        batches = []
        for part, run in zip(parts, self.runs, strict=True):
            documents = part.unflatten(1, (run.count, run.length))
            batches.append(documents.transpose(0, 1))
        return batches


def _lengths_of(documents: Tensor) -> list[int]:
    """Returns the length of each document of a mask. Waits for the device only once, not once for each layer."""
    # The tensor keeps its lengths as an attribute, because all layers receive the same tensor.
    cached: list[int] | None = getattr(documents, 'lengths_of_documents', None)
    if cached is None:
        cached = documents.sum(dim=1).tolist()
        vars(documents)['lengths_of_documents'] = cached
    return cached


def _masks(plain: str, **arguments: Any) -> HostMask:
    """Makes the masks of our attention. Transformers calls it in place of the plain mask function.

    The argument ``attention_mask`` is bool: ``(rows, width)``, or ``(documents, width)`` for a packed row.
    """
    from transformers import AttentionMaskInterface

    # Each document gets the mask that the model would make for it alone.
    make = AttentionMaskInterface()[plain]
    documents = arguments['attention_mask']
    if documents is None or len(documents) == arguments['batch_size']:
        return make(**arguments)
    lengths = _lengths_of(documents)
    ends = [0, *accumulate(lengths)]
    masks = []
    for start, end in pairwise(ends):
        document_arguments = {**arguments, 'batch_size': 1, 'attention_mask': None}
        # The columns keep their numbers in the packed row. Some masks look up which columns of the batch are images.
        document_arguments['kv_length'] = end - start
        document_arguments['kv_offset'] = start
        if 'cache_position' in arguments:  # transformers 4
            document_arguments['cache_position'] = arguments['cache_position'][start:end]
        else:
            document_arguments['q_length'] = end - start
            document_arguments['q_offset'] = start
        masks.append(make(**document_arguments))
    return _Documents(lengths, masks)


# Layers that are called once for each document.


def _call_layers_by_document(model: nn.Module) -> None:
    """Changes the classes of layers that would mix documents, so that they are called once for each document."""
    for states in SPLIT_ARGUMENTS:
        # Classes are changed and not modules, so that copies of a model work too.
        layers = {type(module) for module in _innermost(model, states)}
        for layer in layers:
            if hasattr(layer.forward, 'by_document'):
                continue
            plain_forward = layer.forward
            by_document = partial(_forward_by_document, plain_forward, states)
            forward: Any = wraps(plain_forward)(_in_plain_python(by_document))
            forward.by_document = True
            layer.forward = forward


def _innermost(model: nn.Module, states: str) -> Iterator[nn.Module]:
    """Yields the innermost modules that take ``states`` and a mask: mixers of hybrids, embeddings that see the mask.

    Attention modules (``is_causal``) are left out. They receive :class:`_Documents`, and ``torch.compile`` can compile
    them. Models, and wrappers of models such as PEFT's, are left out too, although they take ids and a mask.
    """
    from transformers import PreTrainedModel

    def takes_mask(module: nn.Module) -> bool:
        signature = inspect.signature(type(module).forward)
        if states not in signature.parameters or 'attention_mask' not in signature.parameters:
            return False
        return not any(isinstance(part, PreTrainedModel) for part in module.modules())

    for module in model.modules():
        is_attention = hasattr(module, 'is_causal')
        if is_attention or not takes_mask(module):
            continue
        _, *inner_modules = module.modules()
        if not any(takes_mask(inner) for inner in inner_modules):
            yield module


def _forward_by_document(plain_forward: HostFunction, states: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer once for each document of its mask, with the columns of that document and without a mask."""
    signature = inspect.signature(plain_forward)
    call = signature.bind(*args, **kwargs)
    documents = call.arguments.get('attention_mask')
    inputs = call.arguments.get(states)
    if not isinstance(documents, Tensor) or not isinstance(inputs, Tensor):
        return plain_forward(*args, **kwargs)
    if documents.dim() != 2 or len(documents) == len(inputs):
        return plain_forward(*args, **kwargs)  # a mask with one row per row of the batch: nothing is packed
    lengths = _lengths_of(documents)
    split_arguments = {}
    for name in SPLIT_ARGUMENTS[states]:
        value = call.arguments.get(name)
        if isinstance(value, Tensor):
            split_arguments[name] = value.split(lengths, dim=1)
    call.arguments['attention_mask'] = None
    outputs = []
    for number in range(len(lengths)):
        for name, parts in split_arguments.items():
            call.arguments[name] = parts[number]
        output = plain_forward(*call.args, **call.kwargs)
        outputs.append(output)
    if not isinstance(outputs[0], tuple):
        return torch.cat(outputs, dim=1)
    # Some mixers return states first and other results behind them.
    _, *other_results = outputs[0]
    joined = torch.cat([output[0] for output in outputs], dim=1)
    return joined, *other_results


def _balance_routers_without_mask(hosts: Sequence[nn.Module]) -> None:
    """Changes the load-balancing loss in the modules of Transformers, so that it accepts a mask of documents."""
    for host in hosts:
        module = sys.modules[type(host).__module__]
        names = vars(module)
        balance = names.get('load_balancing_loss_func')
        if balance is not None and not hasattr(balance, 'by_document'):
            call_without_mask = partial(_balance, balance)
            without_mask: Any = wraps(balance)(call_without_mask)
            without_mask.by_document = True
            names['load_balancing_loss_func'] = without_mask


def _balance(plain: HostFunction, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes the load-balancing loss of a router, without a mask if rows are packed, because they have no padding."""
    signature = inspect.signature(plain)
    call = signature.bind(logits, *args, **kwargs)
    mask = call.arguments.get('attention_mask')
    if logits and mask is not None:
        num_positions = logits[0].shape[:-1].numel()
        if mask.numel() != num_positions:
            call.arguments['attention_mask'] = None
    return plain(*call.args, **call.kwargs)


def _in_plain_python(function: HostFunction) -> HostFunction:
    """Hides a function from ``torch.compile``, because the lengths of documents are new in every batch."""
    return torch.compiler.disable(lambda *args, **kwargs: function(*args, **kwargs))


# The attention function.


def _attend(
    plain: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: HostMask,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends document by document. Transformers calls it; states are ``(1, heads, tokens, size)``."""
    attend = _plain_attention(plain, module)
    documents = attention_mask
    if not isinstance(documents, _Documents):
        return attend(module, query, key, value, attention_mask, **kwargs)
    has_mask = any(run.mask is not None for run in documents.runs)
    is_known_to_kernels = all(kwargs.get(name) is None for name in UNKNOWN_TO_KERNELS)
    is_for_kernels = plain == 'sdpa' and not has_mask and is_known_to_kernels
    if is_for_kernels and _on_gpu(query):
        attended = _attend_at_once(documents, module, query, key, value, **kwargs)
        return attended, None
    outputs = []
    # Consecutive documents of the same length are computed as one batch.
    queries = documents.split(query)
    keys = documents.split(key)
    values = documents.split(value)
    for run, run_query, run_key, run_value in zip(documents.runs, queries, keys, values, strict=True):
        attended, _ = attend(module, run_query, run_key, run_value, run.mask, **kwargs)
        # From (documents, length, heads, size) to (tokens, heads, size).
        attended = attended.flatten(0, 1)
        outputs.append(attended)
    # torch.cat would copy a single output.
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined[None], None


def _on_gpu(states: Tensor) -> bool:
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
    **kwargs: Any,
) -> Tensor:
    """Attends in all documents with one call of a GPU kernel; returns ``(1, tokens, heads, size)``."""
    if is_causal is None:
        is_causal = bool(getattr(module, 'is_causal', True))
    ends = documents.ends(query.device)
    longest = max(documents.lengths)
    head_size = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    # Multi-head latent attention, as in DeepSeek-V3, has smaller values than queries and keys.
    has_one_head_size = value.shape[-1] == head_size
    if is_half and has_one_head_size and head_size <= LARGEST_HEAD and head_size % 8 == 0:
        # A kernel for documents of any length needs neither padding nor a copy.
        attend = _half_kernel(has_dropout=dropout > 0)
        if attend is not None:
            # From (1, heads, tokens, size) to (tokens, heads, size).
            token_states = [states[0].transpose(0, 1) for states in (query, key, value)]
            options = {'causal': is_causal, 'scale': scaling, 'dropout': dropout}
            # Queries and keys are of the same documents, so both get the same ends and the same longest length.
            attended = attend(*token_states, ends, ends, longest, longest, **options)
            return attended[None]
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
    """Returns states as a nested tensor of documents, with as many heads as the query has."""
    # The kernel for nested tensors does not support groups of heads.
    group_size = num_heads // states.shape[1]
    states = states.repeat_interleave(group_size, dim=1)
    # Nested tensors have the tokens of all documents in the first dimension.
    token_states = states[0].transpose(0, 1).contiguous()
    ends = documents.ends(states.device).long()
    shortest = min(documents.lengths)
    longest = max(documents.lengths)
    nested = torch.nested.nested_tensor_from_jagged(token_states, ends, min_seqlen=shortest, max_seqlen=longest)
    return nested.transpose(1, 2)


@cache
def _half_kernel(*, has_dropout: bool) -> Callable[..., Tensor] | None:
    """Returns the first installed kernel that supports groups of heads: torch's or ``flash_attn``'s; None without one.

    The kernel of torch has no dropout.
    """
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found]

        # The first release of the kernel lacks these arguments.
        arguments = inspect.signature(varlen_attn).parameters
        has_arguments = 'window_size' in arguments and 'enable_gqa' in arguments
        if has_arguments and not has_dropout:

            def attend_by_torch(*states: Any, causal: bool, scale: float | None, dropout: float) -> Tensor:
                # A window of -1 columns has no limit.
                window = (-1, 0) if causal else (-1, -1)
                return varlen_attn(*states, scale=scale, window_size=window, enable_gqa=True)

            return attend_by_torch
    with suppress(ImportError):
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        def attend_by_flash_attn(*states: Any, causal: bool, scale: float | None, dropout: float) -> Tensor:
            return flash_attn_varlen_func(*states, dropout_p=dropout, softmax_scale=scale, causal=causal)

        return attend_by_flash_attn
    return None


def _plain_attention(plain: str, module: nn.Module) -> HostFunction:
    """Returns the plain attention function. The eager one is defined in the module that defines the layer."""
    from transformers import AttentionInterface

    if plain != 'eager':
        return AttentionInterface()[plain]
    for layer in type(module).__mro__:
        module_of_layer = sys.modules[layer.__module__]
        names = vars(module_of_layer)
        if 'eager_attention_forward' in names:
            return names['eager_attention_forward']
    raise NotExactError(f'No `eager_attention_forward` was found in the file of {type(module).__name__}.')
