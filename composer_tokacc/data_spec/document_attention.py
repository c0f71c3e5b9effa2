# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Attention document by document, so that a packed row costs no more than its documents.

Three things are passed on, one after the other:

1. The packed mask is the ``attention_mask`` of a packed row. It has one row for each document, bool
   ``(documents, width)``, True at the tokens of that document.
2. Transformers calls the mask function of the model's attention with the packed mask. Our function, :func:`_masks`,
   returns :class:`_Documents`: their lengths, and for each document the mask that it would have alone. It is None if
   no mask is needed, as in causal attention.
3. The layers hand :class:`_Documents` to the attention function. Our function, :func:`_attend`, calls the model's own
   attention function for each document.

Layers with a state or a convolution, and embeddings that look at the mask, receive the packed mask. They are called
once for each document. The load-balancing loss of a router gets no mask, because packed rows have no padding.

The documents are passed as arguments of the forward, not kept in the model. So a layer that is computed again in the
backward, or a model that is called twice before its backward, sees the right documents.

"Plain" functions are the ones that the model calls without this module.
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
"""Arguments that are split among the documents if a layer is called once for each. The keys tell the layers apart:
those with a state or a convolution take ``hidden_states``, embeddings take ``input_ids``."""

HostFunction: TypeAlias = Callable[..., Any]
"""A function of Transformers, which has no types for its masks and attention."""
HostMask: TypeAlias = Any


class DocumentAttention:
    """Makes the text layers of a transformers model attend document by document, until :meth:`undo`.

    Batches that are not packed are computed by the plain attention. With ``packing='positions'`` the model keeps its
    own attention, which finds documents by ``position_ids`` that restart at 0. SDPA and eager attention then build a
    mask of the size of the packed row squared.

    Raises RuntimeError if the text attention does not go through ``AttentionInterface`` or attends in chunks, or if a
    convolution would mix documents.
    """

    def __init__(self, model: nn.Module, packing: str = 'documents') -> None:
        from transformers import PreTrainedModel

        # A multimodal model contains several models of Transformers. Only the text models attend document by document.
        submodels = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        if not submodels:
            raise NotExactError(f'The model must be a model of Transformers, got: {type(model).__name__}.')
        text_config = submodels[0].config.get_text_config(decoder=True)
        text_type = type(text_config)
        self._text_models = [submodel for submodel in submodels if type(submodel.config) is text_type]
        config = self._text_models[0].config
        layer_types = getattr(config, 'layer_types', None) or ()
        if 'chunked_attention' in layer_types:
            raise NotExactError(
                'Attention must not be in chunks that are counted from column 0, but some layers of this model have '
                'such attention.'
            )
        # The prefix is there if another DocumentAttention has not been undone yet.
        self._plain_name = attention_of(config).removeprefix(PREFIX)
        self.packing = packing
        """How rows are packed for this attention: see ``CutRules.packing``."""
        self.has_masks = self._plain_name in ('sdpa', 'eager') and packing == 'documents'
        """Whether packed rows have a mask of their documents. Flash and flex attention have none. They find the
        documents by ``position_ids`` that restart at 0."""
        self._rope_index = _rope_index_of(model)
        self._padding_position = _padding_position_of(model)
        if self.has_masks:
            self._register()
        self._cached_configs: list[Any] = []
        self._switch_off_cache()
        if self.has_masks:
            # These changes stay after undo(): they act only on packed masks, and copies of the model share them.
            _call_layers_by_document(model)
            _balance_routers_without_mask(submodels)
        try:
            self._check_convolutions()
        except NotExactError:
            self.undo()
            raise

    def _switch_off_cache(self) -> None:
        """Switches off the cache of keys and values in the configs of the text models.

        A cache would carry states from one document to the next, and with a cache Transformers does not look for
        positions that restart. Composer could not pass `use_cache=False` instead, because the forward of Qwen3.5 has no
        such argument.
        """
        for text_model in self._text_models:
            config = text_model.config
            if getattr(config, 'use_cache', False):
                config.use_cache = False
                self._cached_configs.append(config)

    def _check_convolutions(self) -> None:
        """Refuses a convolution over tokens outside of the layers that are called once for each document.

        It cannot tell documents apart, because Transformers does not give it the positions. The first-batch check may
        miss this: in a fresh model, convolutions may change the logits by less than round-off.
        """
        for text_model in self._text_models:
            for layer in _convolved_layers(text_model, by_document=self.has_masks):
                raise NotExactError(
                    f'Convolutions must tell packed documents apart, but the one in {type(layer).__name__} does not. '
                    'Set `packing=False`, which is exact (docs/errors.md#packing).'
                )

    def undo(self) -> None:
        """Restores the attention and the cache that the model had before."""
        for config in self._cached_configs:
            config.use_cache = True
        if self.has_masks:
            self._set_attention(self._plain_name)

    def positions(self, batch: Batch, real: Tensor) -> Tensor:
        """Returns the position of each real token in its own row, as the model counts positions, ``(rows, width)``.

        ``real`` marks the tokens of each row, ``(rows, width)`` bool. Other positions of the result mean nothing.
        """
        padding_position = self._padding_position
        if padding_position is None:
            return real.cumsum(dim=1) - 1
        if 'input_ids' not in batch:
            return real.cumsum(dim=1) + padding_position
        # The id of padding is the padding position too. RoBERTa and ESM never count that id, not even within the text:
        # such a token has the padding position. The first counted token has the next one.
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
            text_model.set_attn_implementation({'': name})
            # Transformers only logs a warning if it cannot set the attention.
            if attention_of(text_model.config) != name:
                raise NotExactError(
                    "The model's attention must go through transformers' AttentionInterface, but the attention of "
                    f'{type(text_model).__name__} does not.'
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
    """The documents of a packed row: their lengths and masks. The layers receive it in place of a mask."""

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
        # Not by narrow(). Each call of it would fill a gradient of the size of the whole row in the backward.
        sizes = [run.length * run.count for run in self.runs]
        parts = states[0].split(sizes, dim=1)
        states_of_runs = []
        for part, run in zip(parts, self.runs, strict=True):
            # From (heads, tokens, size) to (documents, heads, length, size).
            by_document = part.unflatten(1, (run.count, run.length))
            states_of_runs.append(by_document.transpose(0, 1))
        return states_of_runs


def _lengths_of(packed_mask: Tensor) -> list[int]:
    """Returns the length of each document of a packed mask. Waits for the GPU only once, not once for each layer."""
    # The tensor keeps its lengths as an attribute, because all layers receive the same tensor.
    lengths: list[int] | None = getattr(packed_mask, 'lengths_of_documents', None)
    if lengths is None:
        lengths = packed_mask.sum(dim=1).tolist()
        vars(packed_mask)['lengths_of_documents'] = lengths
    return lengths


def _masks(plain_name: str, **arguments: Any) -> HostMask:
    """Makes the masks of our attention. Transformers calls it in place of the plain mask function.

    The argument ``attention_mask`` is the packed mask, ``(documents, width)``. Returns :class:`_Documents` for it. If
    rows are not packed it is ``(rows, width)`` or None, and the plain function makes their mask.
    """
    from transformers import AttentionMaskInterface

    plain_masks = AttentionMaskInterface()[plain_name]
    packed_mask = arguments['attention_mask']
    # A packed batch has one row. One document in it has the mask of a row without padding.
    if packed_mask is None or len(packed_mask) == arguments['batch_size']:
        return plain_masks(**arguments)
    # Each document gets the mask that the model would make for it alone.
    lengths = _lengths_of(packed_mask)
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
        masks.append(plain_masks(**document_arguments))
    return _Documents(lengths, masks)


# Layers that are called once for each document.


def _call_layers_by_document(model: nn.Module) -> None:
    """Changes the classes of layers that would mix documents, so that they are called once for each document."""
    for states_name in SPLIT_ARGUMENTS:
        # Classes are changed and not modules, so that copies of a model work too.
        layer_classes = {type(module) for module in _innermost(model, states_name)}
        for layer_class in layer_classes:
            plain_forward = layer_class.forward
            by_document = partial(_forward_by_document, plain_forward, states_name)
            layer_class.forward = _in_place_of(plain_forward, _in_plain_python(by_document))


def _in_place_of(
    plain: HostFunction,
    function: HostFunction,
) -> HostFunction:
    """Returns a function that looks like the plain one, or the plain one if it is ours already, for another model."""
    if hasattr(plain, 'by_document'):
        return plain
    replacement: Any = wraps(plain)(function)
    replacement.by_document = True
    return replacement


def _innermost(model: nn.Module, states_name: str) -> Iterator[nn.Module]:
    """Yields the innermost modules that take a mask and the argument ``states_name``.

    These are layers with a state or a convolution, or embeddings that look at the mask. Attention modules
    (``is_causal``) are left out. They receive :class:`_Documents`, and ``torch.compile`` can compile them. Models, and
    wrappers of models such as PEFT's, are left out too, although they take ids and a mask.
    """
    from transformers import PreTrainedModel

    def takes_mask(module: nn.Module) -> bool:
        signature = inspect.signature(type(module).forward)
        if states_name not in signature.parameters or 'attention_mask' not in signature.parameters:
            return False
        return not any(isinstance(part, PreTrainedModel) for part in module.modules())

    for module in model.modules():
        is_attention = hasattr(module, 'is_causal')
        if is_attention or not takes_mask(module):
            continue
        _, *inner_modules = module.modules()
        if not any(takes_mask(inner) for inner in inner_modules):
            yield module


def _convolved_layers(module: nn.Module, *, by_document: bool) -> Iterator[nn.Module]:
    """Yields the layers of a text model that hold a convolution over tokens.

    Other models inside it, such as encoders of images and sounds, are left out. If layers are called ``by_document``,
    these are left out too.
    """
    from transformers import PreTrainedModel

    for part in module.children():
        if isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1:
            yield module
        is_split = by_document and hasattr(type(part).forward, 'by_document')
        if not is_split and not isinstance(part, PreTrainedModel):
            yield from _convolved_layers(part, by_document=by_document)


def _forward_by_document(plain_forward: HostFunction, states_name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer once for each document of a packed mask, with the tokens of that document and without a mask."""
    signature = inspect.signature(plain_forward)
    call = signature.bind(*args, **kwargs)
    mask = call.arguments.get('attention_mask')
    states = call.arguments.get(states_name)
    if not isinstance(mask, Tensor) or not isinstance(states, Tensor):
        return plain_forward(*args, **kwargs)
    if mask.dim() != 2 or len(mask) == len(states):
        return plain_forward(*args, **kwargs)  # a mask with one row per row of the batch: nothing is packed
    lengths = _lengths_of(mask)
    parts_by_name = {}
    for name in SPLIT_ARGUMENTS[states_name]:
        value = call.arguments.get(name)
        if isinstance(value, Tensor):
            parts_by_name[name] = value.split(lengths, dim=1)
    call.arguments['attention_mask'] = None
    outputs = []
    for document_number in range(len(lengths)):
        for name, parts in parts_by_name.items():
            call.arguments[name] = parts[document_number]
        output = plain_forward(*call.args, **call.kwargs)
        outputs.append(output)
    if not isinstance(outputs[0], tuple):
        return torch.cat(outputs, dim=1)
    # Some layers return further results after their output, such as MiniMax the state at the end of its linear
    # attention. They are for a cache, which is off, so those of the first document only keep their place.
    _, *further_results = outputs[0]
    first_results = [output[0] for output in outputs]
    joined = torch.cat(first_results, dim=1)
    return joined, *further_results


def _balance_routers_without_mask(submodels: Sequence[nn.Module]) -> None:
    """Changes the load-balancing loss in the files of Transformers, so that it accepts a packed mask."""
    for submodel in submodels:
        # Each file that defines a model with experts has its own function.
        file = sys.modules[type(submodel).__module__]
        names = vars(file)
        plain_balance = names.get('load_balancing_loss_func')
        if plain_balance is not None:
            without_mask = partial(_balance, plain_balance)
            names['load_balancing_loss_func'] = _in_place_of(plain_balance, without_mask)


def _balance(plain_balance: HostFunction, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes the load-balancing loss of a router, without a mask if rows are packed, because they have no padding."""
    signature = inspect.signature(plain_balance)
    call = signature.bind(logits, *args, **kwargs)
    mask = call.arguments.get('attention_mask')
    if logits and mask is not None:
        # The logits of a layer are (positions, experts). A packed mask has more entries: positions times documents.
        num_positions = logits[0].shape[:-1].numel()
        if mask.numel() != num_positions:
            call.arguments['attention_mask'] = None
    return plain_balance(*call.args, **call.kwargs)


def _in_plain_python(function: HostFunction) -> HostFunction:
    """Hides a function from ``torch.compile``, because the lengths of documents are new in every batch."""
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
) -> tuple[Tensor, None]:
    """Attends document by document. Transformers calls it; states are ``(1, heads, tokens, size)``."""
    plain_attention = _plain_attention(plain_name, module)
    documents = attention_mask
    if not isinstance(documents, _Documents):
        return plain_attention(module, query, key, value, attention_mask, **kwargs)
    has_mask = any(run.mask is not None for run in documents.runs)
    is_known_to_kernels = all(kwargs.get(name) is None for name in UNKNOWN_TO_KERNELS)
    is_for_kernels = plain_name == 'sdpa' and not has_mask and is_known_to_kernels
    if is_for_kernels and _on_gpu(query):
        attended = _attend_at_once(documents, module, query, key, value, **kwargs)
        return attended, None
    outputs = []
    # Consecutive documents of the same length are computed as one batch.
    queries = documents.split(query)
    keys = documents.split(key)
    values = documents.split(value)
    for run, run_query, run_key, run_value in zip(documents.runs, queries, keys, values, strict=True):
        attended, _ = plain_attention(module, run_query, run_key, run_value, run.mask, **kwargs)
        # From (documents, length, heads, size) to (tokens, heads, size).
        attended = attended.flatten(0, 1)
        outputs.append(attended)
    # torch.cat would copy a single output.
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined[None], None


def _on_gpu(states: Tensor) -> bool:
    # A function, so that tests can take the way of a GPU.
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

    ``ignored`` are arguments that SDPA ignores as well.
    """
    if is_causal is None:
        is_causal = bool(getattr(module, 'is_causal', True))
    ends = documents.ends(query.device)
    longest = max(documents.lengths)
    head_size = query.shape[-1]
    # Rotary embeddings in float32 make float32 queries and keys. Autocast casts them for SDPA, not for other kernels.
    device_type = query.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else query.dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    # Multi-head latent attention, as in DeepSeek-V3, has smaller values than queries and keys.
    has_one_head_size = value.shape[-1] == head_size
    if is_half and has_one_head_size and head_size <= LARGEST_HEAD and head_size % 8 == 0:
        # A kernel for documents of any length needs neither padding nor a copy.
        half_kernel = _half_kernel(has_dropout=dropout > 0)
        if half_kernel is not None:
            # From (1, heads, tokens, size) to (tokens, heads, size).
            token_states = [states[0].transpose(0, 1).to(dtype) for states in (query, key, value)]
            options = {'causal': is_causal, 'scale': scaling, 'dropout': dropout}
            # Queries and keys are of the same documents, so both get the same ends and the same longest length.
            attended = half_kernel(*token_states, ends, ends, longest, longest, **options)
            return attended[None]
    # Nested tensors are for everything else: float32, other head sizes, no kernel installed.
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
    # Nested tensors have the tokens of all documents in the first dimension. Their kernel takes no groups of heads.
    token_states = _without_groups(states[0].transpose(0, 1), num_heads).contiguous()
    ends = documents.ends(states.device).long()
    shortest = min(documents.lengths)
    longest = max(documents.lengths)
    nested = torch.nested.nested_tensor_from_jagged(token_states, ends, min_seqlen=shortest, max_seqlen=longest)
    return nested.transpose(1, 2)


def _without_groups(states: Tensor, num_heads: int) -> Tensor:
    """Repeats each head of keys or values, ``(tokens, heads, size)``, for all queries of its group."""
    group_size = num_heads // states.shape[1]
    return states.repeat_interleave(group_size, dim=1)


@cache
def _half_kernel(*, has_dropout: bool) -> Callable[..., Tensor] | None:
    """Returns the first installed kernel for documents of any length: torch's or ``flash_attn``'s; None without one.

    The kernel of torch has no dropout.
    """
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found]

        # The first releases of the kernel lack some arguments.
        arguments = inspect.signature(varlen_attn).parameters
        takes_groups = 'enable_gqa' in arguments
        if 'window_size' in arguments and not has_dropout:

            def attend_by_torch(
                query: Tensor,
                key: Tensor,
                value: Tensor,
                *bounds: Any,
                causal: bool,
                scale: float | None,
                dropout: float,
            ) -> Tensor:
                # A window of -1 columns has no limit.
                options: dict[str, Any] = {'scale': scale, 'window_size': (-1, 0) if causal else (-1, -1)}
                if takes_groups:
                    options['enable_gqa'] = True
                else:
                    num_heads = query.shape[1]
                    key = _without_groups(key, num_heads)
                    value = _without_groups(value, num_heads)
                return varlen_attn(query, key, value, *bounds, **options)

            return attend_by_torch
    with suppress(ImportError):
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        def attend_by_flash_attn(*states: Any, causal: bool, scale: float | None, dropout: float) -> Tensor:
            return flash_attn_varlen_func(*states, dropout_p=dropout, softmax_scale=scale, causal=causal)

        return attend_by_flash_attn
    return None


def _plain_attention(plain_name: str, module: nn.Module) -> HostFunction:
    """Returns the plain attention function. The eager one is defined in the file that defines the layer."""
    from transformers import AttentionInterface

    if plain_name != 'eager':
        return AttentionInterface()[plain_name]
    # The layer may be a subclass that is defined in another file, so the files of its bases are tried too.
    for layer_class in type(module).__mro__:
        file = sys.modules[layer_class.__module__]
        names = vars(file)
        if 'eager_attention_forward' in names:
            return names['eager_attention_forward']
    raise NotExactError(f'No `eager_attention_forward` was found in the file of {type(module).__name__}.')
