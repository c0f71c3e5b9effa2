# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Attention document by document: a packed row costs what its documents cost, by the model's own attention.

A packed row's ``attention_mask`` has a row for each document, True where its tokens are. Transformers hands that to the
mask function of the model's attention, which makes one mask a document, or none where a document is plainly causal; the
layers hand these on to the attention function, which calls the plain one for each document. Layers with a state or a
convolution get the mask itself, and are called for each document; a router's load-balancing loss gets none. All of it
are arguments of the forward: a layer that is computed again in the backward, or a model that is called twice, sees its
own documents.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial, wraps
from itertools import accumulate, groupby, islice, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from composer_tokacc.batch import Batch
from composer_tokacc.compat import attention_of

PREFIX = 'documents_'
"""Of the names by which our attention is registered, before that of the plain one."""


class DocumentAttention:
    """Has the text layers of a model of transformers attend document by document, until :meth:`undo`.

    Batches that are not packed are computed by the plain attention, whatever the model had before. ``by_positions``
    leaves the model its attention, which finds documents where ``position_ids`` start anew: with SDPA and eager
    attention by a mask of the packed row squared. Raises RuntimeError if its text attention does not go through
    ``AttentionInterface``, or is in chunks.
    """

    def __init__(self, model: torch.nn.Module, *, by_positions: bool = False) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

        hosts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if not hosts:
            raise RuntimeError(f"The model must be one of transformers', got: {type(model).__name__}.")
        text = type(hosts[0].config.get_text_config(decoder=True))
        self._parts = [host for host in hosts if type(host.config) is text]
        if 'chunked_attention' in (getattr(self._parts[0].config, 'layer_types', None) or ()):
            raise RuntimeError('Attention must not be in chunks that are counted from column 0, got: such layers.')
        self._plain = attention_of(self._parts[0].config).removeprefix(PREFIX)
        self.has_masks = self._plain in ('sdpa', 'eager') and not by_positions
        """Whether packed rows say by their mask which documents they have. Flash and flex attention take no mask: they
        find the documents themselves where ``position_ids`` restart."""
        owners = (module for module in model.modules() if hasattr(module, 'get_rope_index'))
        self._rope_index: Any = getattr(next(owners, None), 'get_rope_index', None)
        if self.has_masks:
            name = PREFIX + self._plain
            AttentionInterface.register(name, _in_plain_python(partial(_attend, self._plain)))
            AttentionMaskInterface.register(name, _in_plain_python(partial(_masks, self._plain)))
            self._set(name)
        # States would go from one document into the next by a cache, and beside one Transformers does not look where
        # positions start anew. In the config: Qwen3.5's forward names no `use_cache` for Composer to pass.
        self._cached = [part.config for part in self._parts if getattr(part.config, 'use_cache', False)]
        for config in self._cached:
            config.use_cache = False
        if not self.has_masks:
            return
        # What is changed stays so: other masks pass through, and copies of a model too.
        for layer in {type(module) for module in _mixers(model)}:
            if not hasattr(layer.forward, 'by_document'):
                changed: Any = wraps(layer.forward)(_in_plain_python(partial(_mix, layer.forward)))
                changed.by_document, layer.forward = True, changed
        for names in (vars(sys.modules[type(host).__module__]) for host in hosts):
            balance: Any = names.get('load_balancing_loss_func')
            if balance is not None and not hasattr(balance, 'by_document'):
                names['load_balancing_loss_func'] = changed = wraps(balance)(partial(_balance, balance))
                changed.by_document = True

    def undo(self) -> None:
        """Sets the attention, and the cache, that the model had before."""
        for config in self._cached:
            config.use_cache = True
        if self.has_masks:
            self._set(self._plain)

    def _set(self, name: str) -> None:
        for part in self._parts:
            part.set_attn_implementation({'': name})
            if attention_of(part.config) != name:
                raise RuntimeError(
                    "The model's attention must go through transformers' AttentionInterface, got: that of "
                    f'{type(part).__name__} does not.'
                )

    def rotary_positions(self, batch: Batch) -> torch.Tensor | None:
        """Multimodal rotary positions, ``(3, rows, width)``; None where those of text do."""
        grids = [batch.get(f'{unit}_grid_thw') for unit in ('image', 'video')]
        if self._rope_index is None or all(grid is None for grid in grids):
            return None
        named = inspect.signature(self._rope_index).parameters
        return self._rope_index(**{key: value for key, value in batch.items() if key in named})[0]


class _Run(NamedTuple):
    """Documents one after the other that are of one length and have no mask, or one document."""

    length: int
    count: int
    mask: Any


class _Documents:
    """What the layers get as the mask of a packed row."""

    def __init__(self, lengths: list[int], masks: list[Any]) -> None:
        alike = groupby(zip(lengths, masks, strict=True), key=lambda document: (document[0], id(document[1])))
        groups = [list(group) for _, group in alike]
        self.runs = [_Run(group[0][0], len(group), group[0][1]) for group in groups]
        self.lengths = lengths
        self._ends: torch.Tensor | None = None

    def ends(self, device: torch.device) -> torch.Tensor:
        """Returns where documents end, ``(documents + 1,)`` int32, on a device: put there once, for all layers."""
        if self._ends is None:
            self._ends = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32).to(device, non_blocking=True)
        return self._ends

    def split(self, states: torch.Tensor) -> list[torch.Tensor]:
        """``(1, heads, tokens, size)`` as ``(documents, heads, length, size)`` for each run, without a copy."""
        # Not narrow(), whose gradient is as large as the whole for each document.
        parts = states[0].split([run.length * run.count for run in self.runs], dim=1)
        return [
            part[None] if run.count == 1 else part.unflatten(1, (run.count, run.length)).transpose(0, 1)
            for part, run in zip(parts, self.runs, strict=True)
        ]


def _lengths_of(documents: Any) -> list[int]:
    """Returns the length of each document of a mask, read from the device once, however many layers ask."""
    if not hasattr(documents, 'lengths_of_documents'):
        documents.lengths_of_documents = documents.sum(dim=1).tolist()
    return documents.lengths_of_documents


def _mixers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Gives the innermost modules that take states and a mask: mixers of hybrids. Attention (``is_causal``) has its own
    way, and stays what ``torch.compile`` takes whole.
    """

    def takes_mask(module: torch.nn.Module) -> bool:
        return {'hidden_states', 'attention_mask'} <= inspect.signature(type(module).forward).parameters.keys()

    for module in model.modules():
        is_innermost = takes_mask(module) and not any(map(takes_mask, islice(module.modules(), 1, None)))
        if is_innermost and not hasattr(module, 'is_causal'):
            yield module


def _mix(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a mixer once for each document of its mask; attention passes, as its mask is :class:`_Documents`."""
    call = inspect.signature(forward).bind(*args, **kwargs)
    states, documents = call.arguments['hidden_states'], call.arguments.get('attention_mask')
    if not isinstance(documents, torch.Tensor) or documents.dim() != 2 or len(documents) == len(states):
        return forward(*args, **kwargs)
    outputs = []
    for part in states.split(_lengths_of(documents), dim=1):
        call.arguments |= {'hidden_states': part, 'attention_mask': None}
        outputs.append(forward(*call.args, **call.kwargs))
    if isinstance(outputs[0], tuple):
        return torch.cat([output[0] for output in outputs], dim=1), *outputs[0][1:]
    return torch.cat(outputs, dim=1)


def _balance(plain: Callable[..., Any], logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the load-balancing loss of a router, which takes a mask of rows alone; packed rows have no padding."""
    call = inspect.signature(plain).bind(logits, *args, **kwargs)
    mask = call.arguments.get('attention_mask')
    if logits and mask is not None and mask.numel() != logits[0].shape[:-1].numel():
        call.arguments['attention_mask'] = None
    return plain(*call.args, **call.kwargs)


def _in_plain_python(function: Callable[..., Any]) -> Any:
    """Not to be traced by a compiler: the number of documents and their lengths are new in every batch."""
    return torch.compiler.disable(lambda *args, **kwargs: function(*args, **kwargs))


def _masks(plain: str, **arguments: Any) -> Any:
    """Makes the masks of our attention, as transformers asks for them; each document gets the plain one's.

    Among the arguments is ``attention_mask``, bool: ``(rows, width)``, or ``(documents, width)`` of a packed row.
    """
    from transformers import AttentionMaskInterface

    make = AttentionMaskInterface()[plain]
    documents = arguments['attention_mask']
    if documents is None or len(documents) == arguments['batch_size']:
        return make(**arguments)
    lengths = _lengths_of(documents)
    masks = []
    for start, end in pairwise([0, *accumulate(lengths)]):
        # Columns keep their numbers, by which a mask may look at the batch (which tokens are those of an image).
        rows = {'batch_size': 1, 'attention_mask': None, 'kv_length': end - start, 'kv_offset': start}
        if 'cache_position' in arguments:  # transformers 4
            rows['cache_position'] = arguments['cache_position'][start:end]
        else:
            rows |= {'q_length': end - start, 'q_offset': start}
        masks.append(make(**{**arguments, **rows}))
    return _Documents(lengths, masks)


def _attend(
    plain: str, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, **kwargs: Any,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """Returns the attention function, as transformers calls it: states are ``(1, heads, tokens, size)``."""
    attend, documents = _plain_attention(plain, module), attention_mask
    if not isinstance(documents, _Documents):
        return attend(module, query, key, value, attention_mask, **kwargs)
    if _on_gpu(query) and plain == 'sdpa' and all(run.mask is None for run in documents.runs):
        return _attend_at_once(documents, module, query, key, value, **kwargs), None
    # (documents, length, heads, size) of each run.
    outputs = [
        attend(module, q, k, v, run.mask, **kwargs)[0].flatten(0, 1)
        for run, q, k, v in zip(documents.runs, *map(documents.split, (query, key, value)), strict=True)
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _on_gpu(states: torch.Tensor) -> bool:
    return states.is_cuda


def _attend_at_once(
    documents: _Documents, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """As above, by a GPU's kernel for documents of any length; ``(1, tokens, heads, size)``."""
    causal = getattr(module, 'is_causal', True) if is_causal is None else is_causal
    ends, longest = documents.ends(query.device), max(documents.lengths)
    size, is_half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    takes_size = is_half and size <= LARGEST_HEAD and size % 8 == 0
    if takes_size and (attend := _half_kernel(has_dropout=dropout > 0)) is not None:
        rows = [states[0].transpose(0, 1) for states in (query, key, value)]  # (tokens, heads, size)
        options = {'causal': causal, 'scale': scaling, 'dropout': dropout}
        return attend(*rows, ends, ends, longest, longest, **options)[None]

    def nested(states: torch.Tensor) -> torch.Tensor:
        states = states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)  # it knows no groups of heads
        rows = states[0].transpose(0, 1).contiguous()
        return torch.nested.nested_tensor_from_jagged(
            rows, ends.long(), min_seqlen=min(documents.lengths), max_seqlen=longest
        ).transpose(1, 2)  # fmt: skip

    found = F.scaled_dot_product_attention(
        nested(query), nested(key), nested(value), dropout_p=dropout, is_causal=causal, scale=scaling
    )
    return found.transpose(1, 2).values()[None]


LARGEST_HEAD = 256
"""Of both kernels for half precision."""


@cache
def _half_kernel(*, has_dropout: bool) -> Callable[..., torch.Tensor] | None:
    """Returns the first kernel that is there and takes groups of heads as they are: torch's, or ``flash_attn``'s."""
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found]

        needed = {'window_size', 'enable_gqa'}  # which its first release lacks
        if needed <= inspect.signature(varlen_attn).parameters.keys() and not has_dropout:
            return lambda *states, causal, scale, dropout: varlen_attn(
                *states, scale=scale, window_size=(-1, 0 if causal else -1), enable_gqa=True
            )
    with suppress(ImportError):
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        return lambda *states, causal, scale, dropout: flash_attn_varlen_func(
            *states, dropout_p=dropout, softmax_scale=scale, causal=causal
        )
    return None


def _plain_attention(plain: str, module: torch.nn.Module) -> Callable[..., Any]:
    """As transformers finds it: the eager one is a function of the file that the layer is written in."""
    from transformers import AttentionInterface

    if plain != 'eager':
        return AttentionInterface()[plain]
    files = (vars(sys.modules[one.__module__]) for one in type(module).__mro__)
    found = next((names['eager_attention_forward'] for names in files if 'eager_attention_forward' in names), None)
    if found is None:
        raise RuntimeError(f'`eager_attention_forward` must be beside a layer, got: none for {type(module).__name__}.')
    return found
