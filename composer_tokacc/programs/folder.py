# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A folder that Transformers loads, out of a Composer checkpoint or of a model in memory."""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.models import HuggingFaceModel
from composer.models.huggingface import get_hf_config_from_composer_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import GenerationConfig, PretrainedConfig

from composer_tokacc.programs.models import auto_class, set_cache
from composer_tokacc.programs.schema import ConfigError

__all__ = ['export_checkpoint', 'export_model']


def export_checkpoint(checkpoint: Path, folder: Path, *, merge: bool = False) -> None:
    """Writes a folder that ``from_pretrained`` loads, without Composer and without this package.

    Args:
        checkpoint: A Composer checkpoint of a ``HuggingFaceModel``: one file, or the folder of a sharded (FSDP) one.
        folder: Where to; must be absent or empty.
        merge: Whether a LoRA adapter is added into its base, which is loaded for it.

    Raises:
        ConfigError: If the checkpoint cannot be read or is of another kind of model, or the folder is not empty.
    """
    _check_folder(folder)
    state = _read(checkpoint)
    try:
        metadata = state['integrations']['huggingface']
    except KeyError:
        raise ConfigError(
            f'the checkpoint must be one of a HuggingFaceModel, got: {checkpoint} with {sorted(state)}'
        ) from None
    weights = {name.removeprefix('model.'): value for name, value in state['model'].items()}
    config = get_hf_config_from_composer_state_dict({'state': state})
    folder.mkdir(parents=True, exist_ok=True)
    adapter = metadata['model'].get('peft_config')
    if adapter is None:
        _save_model(_with_weights(_empty_model(config), weights), metadata, folder)
    elif merge:
        _save_model(_merged(config, adapter['content'], weights), metadata, folder)
    else:
        _save_adapter(adapter['content'], weights, folder)
    _write_processor(metadata, folder)


def export_model(model: HuggingFaceModel, folder: Path) -> None:
    """As :func:`export_checkpoint`, of a model in memory whose weights are whole on this rank; overwrites."""
    inner: Any = model.model
    set_cache(inner.config, on=True)
    inner.save_pretrained(folder)
    _write_processor(model.get_metadata(), folder)


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f'the folder to export to must be absent or empty, got: {folder}. Give another one')


def _read(checkpoint: Path) -> dict[str, Any]:
    """The ``state`` of a checkpoint."""
    path = checkpoint.resolve()  # `latest-rank0.pt` is a link
    if not path.exists():
        raise ConfigError(
            f'the checkpoint must be a file, or the folder of a sharded one, got: {checkpoint}, which is not there'
        )
    with tempfile.TemporaryDirectory() as temporary:
        if path.is_dir():
            if not (path / '.metadata').exists():
                raise ConfigError(
                    f'the folder of a sharded checkpoint must hold `.metadata`, got: {checkpoint} without it. Name the '
                    'folder of one step, such as checkpoints/ep1-ba100'
                )
            whole = Path(temporary) / 'whole.pt'
            dcp_to_torch_save(path, whole)
            path = whole
        try:
            # A Composer checkpoint holds more than tensors: random states, timestamps, plain objects.
            loaded = torch.load(path, map_location='cpu', weights_only=False)
            return loaded['state']
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, ValueError, OSError) as error:
            raise ConfigError(
                f'the checkpoint must be whole and written by Composer, got: {checkpoint} ({error})'
            ) from error


def _empty_model(config: PretrainedConfig) -> Any:
    """The model without memory for its weights."""
    with torch.device('meta'):
        return auto_class(config).from_config(config)


def _with_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> Any:
    found = model.load_state_dict(dict(weights), strict=False, assign=True)
    # A head that is tied to the embeddings may be stored once.
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing or found.unexpected_keys:
        raise ConfigError(
            f'the checkpoint must hold the weights of a {type(model).__name__}, got: {len(missing)} missing '
            f'{missing[:3]}, {len(found.unexpected_keys)} unknown {found.unexpected_keys[:3]}'
        )
    return model


def _save_model(model: Any, metadata: Mapping[str, Any], folder: Path) -> None:
    generation = metadata['model'].get('generation_config')
    if generation is not None:
        model.generation_config = GenerationConfig.from_dict(generation['content'])
    set_cache(model.config, on=True)
    model.save_pretrained(folder)


def _save_adapter(content: Mapping[str, Any], weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """``adapter_model.safetensors`` and its config, as peft itself writes them."""
    import peft  # only those who train adapters need it
    from safetensors.torch import save_file

    config = peft.get_peft_config(dict(content))
    # Of the base only what was trained beside the adapter (`modules_to_save`) belongs to it.
    trained = {
        name.replace('.modules_to_save.default.', '.').replace('.default.', '.'): value.contiguous()
        for name, value in weights.items()
        if 'lora_' in name or '.modules_to_save.default.' in name
    }
    save_file(trained, folder / 'adapter_model.safetensors', metadata={'format': 'pt'})
    config.save_pretrained(str(folder))


def _merged(config: PretrainedConfig, content: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Any:
    import peft

    base = content.get('base_model_name_or_path')
    is_whole = any('.base_layer.' in name for name in weights)
    if not is_whole and not base:
        raise ConfigError('a checkpoint without its base needs `base_model_name_or_path`, got: none')
    model = auto_class(config).from_config(config) if is_whole else auto_class(config).from_pretrained(base)
    with_adapter: Any = peft.get_peft_model(model, peft.get_peft_config(dict(content)))
    found = with_adapter.load_state_dict(dict(weights), strict=False)
    if found.unexpected_keys:
        raise ConfigError(f'the adapter must fit its base {base!r}, got: unknown {found.unexpected_keys[:3]}')
    return with_adapter.merge_and_unload()


def _write_processor(metadata: Mapping[str, Any], folder: Path) -> None:
    """Every file of the processor (tokenizer, image processor, chat template), as it was saved with the run."""
    files = metadata.get('processor') or metadata.get('tokenizer') or {}
    if not files:
        print('The checkpoint holds no processor; save the one of the run beside the weights.', file=sys.stderr)
    for name, file in files.items():
        content = file['content']
        if isinstance(content, bytes):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)  # a second tokenizer has a folder of its own
            (folder / name).write_bytes(content)
        elif isinstance(content, str):
            (folder / name).write_text(content, encoding='utf-8')
        else:  # Composer keeps a vocabulary as its lines, JSON as what it says
            text = '\n'.join(content) if file['file_extension'] == '.txt' else json.dumps(content, ensure_ascii=False)
            (folder / name).write_text(text, encoding='utf-8')
