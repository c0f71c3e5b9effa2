# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes a folder that Transformers loads, from a Composer checkpoint or from a model in memory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.models import HuggingFaceModel
from composer.models.huggingface import get_hf_config_from_composer_state_dict
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from composer_tokacc.programs.checkpoints import check_checkpoint, read_state, reading_checkpoint
from composer_tokacc.programs.errors import ConfigError, building
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.lora import load_weights, refuse_partial, with_saved_adapter
from composer_tokacc.programs.models import auto_class, empty_model, set_cache


def export_checkpoint(checkpoint: Path, folder: Path, *, merge: bool = False) -> None:
    """Writes a folder, absent or empty before, that ``from_pretrained`` loads without Composer and this package.

    Args:
        checkpoint: A checkpoint of a ``HuggingFaceModel``: a file, or the folder of a sharded (FSDP) one.
        folder: Where to write.
        merge: Whether to load the base of a LoRA adapter and add the adapter to it.
    """
    folder = folder.resolve()
    try:
        is_empty_folder = folder.is_dir() and not any(folder.iterdir())
        if folder.exists() and not is_empty_folder:
            raise ConfigError('', f'the folder to export to must be absent or empty, got: {folder}. Give another one')
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name until it is complete. On the same disk, so that the rename copies nothing.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'{folder.name}-') as scratch:
            unfinished = Path(scratch) / 'folder'
            unfinished.mkdir()
            _export(_read(checkpoint, Path(scratch)), checkpoint, unfinished, merge=merge)
            os.replace(unfinished, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError('', f'the folder to export to must be writable, got: {folder} ({error})') from error


def _export(
    state: Section,
    checkpoint: Path,
    folder: Path,
    *,
    merge: bool,
) -> None:
    with reading_checkpoint(checkpoint):
        metadata = state['integrations']['huggingface']
        adapter = metadata['model'].get('peft_config')
        generation_config = metadata['model'].get('generation_config')
        if generation_config is not None:
            generation_config = GenerationConfig.from_dict(generation_config['content'])
        weights = {}
        for name, value in state['model'].items():
            weights[name.removeprefix('model.')] = value
        _check_finite(weights, str(checkpoint))
        config = get_hf_config_from_composer_state_dict({'state': dict(state)})
    if adapter is not None and not merge:
        _save_adapter(config, adapter['content'], weights, folder)
    else:
        model = _with_weights(config, adapter, weights)
        if generation_config is not None:
            model.generation_config = generation_config
        _save_pretrained(model, folder)
    _write_processor(metadata, folder)


def export_model(model: HuggingFaceModel, folder: Path) -> None:
    """Writes a model in memory like :func:`export_checkpoint`, over an earlier one. The model must not be sharded."""
    inner_model: Any = model.model
    _check_finite(dict(inner_model.named_parameters()), 'the trained model')
    for pattern in ('*.safetensors*', '*config.json'):  # of an earlier run, perhaps of another kind of model
        for stale_file in folder.glob(pattern):
            stale_file.unlink()
    _save_pretrained(inner_model, folder)
    _write_processor(model.get_metadata(), folder)


def _read(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Reads the ``state`` of a checkpoint. A sharded one is put together in ``scratch``."""
    check_checkpoint('CHECKPOINT', checkpoint)
    if not checkpoint.is_dir():
        return read_state(checkpoint)
    with reading_checkpoint(checkpoint):
        dcp_to_torch_save(checkpoint.resolve(), scratch / 'whole.pt')
    return read_state(scratch / 'whole.pt')


def _check_finite(weights: Mapping[str, torch.Tensor], owner: str) -> None:
    broken = []
    for name, value in weights.items():
        if value.is_complex() or not value.isfinite().all():
            broken.append(name)
    if broken:
        raise ConfigError(
            '', f'the weights must be finite numbers, got: {owner} with NaN, infinite or complex ones in {broken[:3]}'
        )


def _save_pretrained(model: Any, folder: Path) -> None:
    """Saves the model, and its generation config separately.

    Transformers refuses to write some generation configs that it reads, such as Vicuna's: greedy, with a temperature.
    """
    set_cache(model, on=True)
    generation_config = getattr(model, 'generation_config', None)
    if not isinstance(model, PreTrainedModel) or generation_config is None:
        model.save_pretrained(folder)
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = generation_config
    generation_config.to_json_file(folder / 'generation_config.json')


def _save_adapter(
    config: PretrainedConfig,
    content: Section,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
) -> None:
    """Writes ``adapter_model.safetensors`` and its config, as peft itself does."""
    import peft  # an optional package
    from safetensors.torch import save_file

    if not content.get('base_model_name_or_path'):
        raise ConfigError('', 'the base model of this adapter was not saved elsewhere: export with merge=true')
    model = with_saved_adapter(empty_model(config), content, weights, assign=True)
    adapter_weights = {}
    for name, value in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items():
        # With `bias: all` peft also lists biases that were not trained. They belong to the base and have no data here.
        if not value.is_meta:
            adapter_weights[name] = value.contiguous()
    save_file(adapter_weights, folder / 'adapter_model.safetensors', metadata={'format': 'pt'})
    peft.get_peft_config(dict(content)).save_pretrained(str(folder))


def _with_weights(
    config: PretrainedConfig,
    adapter: Section | None,
    weights: Mapping[str, torch.Tensor],
) -> Any:
    """Returns the model with its weights. An adapter, if there is one, is merged into the base."""
    if adapter is not None:
        return _merged(config, adapter['content'], weights)
    model = empty_model(config)
    _, unknown = load_weights(model, weights, assign=True)
    model.tie_weights()  # a head that is tied to the embeddings may be stored once
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    refuse_partial(f'the weights of a {type(model).__name__}', missing, unknown)
    return model


def _merged(
    config: PretrainedConfig,
    content: Section,
    weights: Mapping[str, torch.Tensor],
) -> Any:
    """Returns the base with an adapter merged into it."""
    # Only a base with random weights is in the checkpoint itself.
    if any('.base_layer.' in name for name in weights):
        model = auto_class(config).from_config(config)
    else:
        base = content.get('base_model_name_or_path')
        with building('base_model_name_or_path'):
            # In the type of the run, because the type of the file may round the trained weights.
            model = auto_class(config).from_pretrained(base, dtype=config.dtype, trust_remote_code=False)
    head = model.get_output_embeddings()
    was_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if head is not None and was_tied:
        # Head and embeddings are untied for the merge, because perhaps only one of them was trained.
        head.weight = nn.Parameter(head.weight.detach().clone())
    merged: Any = with_saved_adapter(model, content, weights).merge_and_unload()
    if was_tied:
        # They are tied again only if they are still equal after the merge.
        head = merged.get_output_embeddings()
        embedding = merged.get_input_embeddings()
        is_tied = torch.equal(head.weight, embedding.weight)
        merged.config.tie_word_embeddings = is_tied
        merged.config.get_text_config().tie_word_embeddings = is_tied
        merged.tie_weights()
    return merged


def _write_processor(metadata: Section, folder: Path) -> None:
    """Writes every file of the processor (tokenizer, image processor, chat template) that was saved with the run."""
    files = metadata.get('processor') or metadata.get('tokenizer') or {}
    if not files:
        print('The checkpoint holds no processor. Save the one of the run beside the weights.', file=sys.stderr)
    for name, file in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError('', f'files of the processor must lie inside the folder, got: {name}')
        path.parent.mkdir(exist_ok=True)  # the tokenizer of a Q-Former has its own folder
        path.write_bytes(_bytes_of(file))


def _bytes_of(file: Section) -> bytes:
    """Returns the bytes of a file of a processor. Composer itself saves a vocabulary as lines and JSON as a value."""
    content = file['content']
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str):
        is_text = file['file_extension'] == '.txt'
        content = '\n'.join(content) if is_text else json.dumps(content, ensure_ascii=False)
    return content.encode()
