# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes a Composer checkpoint, or a model in memory, as a folder that Transformers loads."""

from __future__ import annotations

import json
import os
import shutil
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
from transformers import GenerationConfig, PretrainedConfig

from composer_tokacc.programs.checkpoints import check_checkpoint, read_state, reading_checkpoint, saved_fingerprints
from composer_tokacc.programs.errors import ConfigError, building
from composer_tokacc.programs.host_types import Section
from composer_tokacc.programs.lora import contains_base, identify_base, load_weights, refuse_partial, with_saved_adapter
from composer_tokacc.programs.models import auto_class, empty_model, has_tied_head, note_tying, set_cache

EXPORTED_FILES = (
    '*.safetensors*',
    'config.json',
    'generation_config.json',
    'adapter_config.json',
    'tokenizer_config.json',
    'audio_tokenizer_config.json',
    '*processor_config.json',
    'chat_template.j*',
    'additional_chat_templates/*.jinja',
    'tokenizer.*',
    'added_tokens.json',
    'special_tokens_map.json',
    'vocab.*',
    'merges.txt',
    'spiece.model',
    'sentencepiece.bpe.model',
)
"""Patterns of the files in an exported folder that Transformers loads. :func:`export_model` removes them before it
writes new ones, so they must not match files of the user, such as the results of an evaluation."""


def export_checkpoint(checkpoint: Path, folder: Path, *, merge: bool = False) -> None:
    """Writes a folder that ``from_pretrained`` loads without Composer and this package.

    Args:
        checkpoint: A checkpoint of a ``HuggingFaceModel``: a file, or the folder of a sharded (FSDP) one.
        folder: The folder to write. It must be absent or empty.
        merge: Whether to load the base of a LoRA adapter and write it with the adapter merged into it. Default: only
            the adapter is written. Without an adapter it makes no difference.
    """
    folder = folder.resolve()
    try:
        is_empty_folder = folder.is_dir() and not any(folder.iterdir())
        if folder.exists() and not is_empty_folder:
            raise ConfigError('', f'the folder to export to must be absent or empty, got: {folder}. Give another one')
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Written under another name, so that no incomplete folder is left. In the same parent folder, because a rename
        # works only within one file system.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'{folder.name}-') as scratch:
            unfinished = Path(scratch) / 'folder'
            unfinished.mkdir()
            state = _read_checkpoint(checkpoint, Path(scratch))
            _write_folder(state, checkpoint, unfinished, merge=merge)
            os.replace(unfinished, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError('', f'the folder to export to must be writable, got: {folder} ({error})') from error


def _write_folder(
    state: Section,
    source: Path | str,
    folder: Path,
    *,
    merge: bool,
) -> None:
    """Writes model and processor into an empty folder.

    Args:
        state: The part ``state`` of a checkpoint.
        source: Where it comes from, for errors.
        folder: The empty folder.
        merge: See :func:`export_checkpoint`.
    """
    with reading_checkpoint(source):
        # HuggingFaceModel saves these files of Transformers, each as a mapping with its `content`.
        metadata = state['integrations']['huggingface']
        adapter_file = metadata['model'].get('peft_config')
        generation_file = metadata['model'].get('generation_config')
        # HuggingFaceModel holds the model as its attribute `model`.
        weights = {name.removeprefix('model.'): value for name, value in state['model'].items()}
        _check_finite(weights, source)
        config = get_hf_config_from_composer_state_dict({'state': dict(state)})
        base_fingerprint = saved_fingerprints(state).get('model.pretrained')
    if adapter_file is None:
        _save_model(_model_with_weights(config, weights), generation_file, folder)
    elif merge:
        model = _merged_model(config, adapter_file['content'], weights, base_fingerprint=base_fingerprint)
        _save_model(model, generation_file, folder)
    else:
        _save_adapter(config, adapter_file['content'], weights, folder)
    _write_processor(metadata, folder)


def _save_model(model: Any, generation_file: Section | None, folder: Path) -> None:
    """Writes a model without an adapter, and its generation config.

    Args:
        model: The model.
        generation_file: The generation config of the checkpoint, with its ``content``. None: the one of the model.
        folder: The folder to write into.
    """
    set_cache(model, on=True)  # it is off in training, and generation with the saved model would be slow
    generation_config = getattr(model, 'generation_config', None)  # only of models that can generate
    if generation_file:
        generation_config = GenerationConfig.from_dict(generation_file['content'])
    # Written separately, because Transformers refuses to save some generation configs that it loads, such as Vicuna's:
    # greedy, with a temperature.
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    if generation_config is not None:
        generation_config.to_json_file(folder / 'generation_config.json')


def export_model(model: HuggingFaceModel, folder: Path) -> None:
    """Writes a model in memory as :func:`export_checkpoint` does, and replaces an earlier export in the folder.

    The model must not be sharded. If it has an adapter, only the adapter is written. If writing fails, the earlier
    export stays.
    """
    state = {'model': model.state_dict(), 'integrations': {'huggingface': model.get_metadata()}}
    folder.mkdir(parents=True, exist_ok=True)
    # Inside the folder, because files are moved only within one file system.
    with tempfile.TemporaryDirectory(dir=folder, prefix='unfinished-') as scratch:
        unfinished = Path(scratch) / 'folder'
        unfinished.mkdir()
        _write_folder(state, 'the trained model', unfinished, merge=False)
        # Removes the earlier export first, because this one may not overwrite all of its files, such as an adapter, a
        # further shard or a chat template. Transformers would load them.
        for pattern in EXPORTED_FILES:
            for file in folder.glob(pattern):
                file.unlink()
        shutil.copytree(unfinished, folder, copy_function=os.replace, dirs_exist_ok=True)


def _read_checkpoint(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Returns the part ``state`` of a checkpoint. A sharded one is first written as a single file into ``scratch``."""
    check_checkpoint('CHECKPOINT', checkpoint)
    if not checkpoint.is_dir():
        return read_state(checkpoint)
    with reading_checkpoint(checkpoint):
        dcp_to_torch_save(checkpoint.resolve(), scratch / 'unsharded.pt')
    return read_state(scratch / 'unsharded.pt')


def _check_finite(weights: Mapping[str, torch.Tensor], source: Path | str) -> None:
    """Refuses weights with NaN or infinity, and complex ones. ``source`` names the checkpoint in the error."""
    wrong_names = [name for name, value in weights.items() if value.is_complex() or not value.isfinite().all()]
    if wrong_names:
        raise ConfigError(
            '',
            f'the weights must be finite numbers, got: {source} with NaN, infinite or complex ones in '
            f'{wrong_names[:3]}',
        )


def _save_adapter(
    config: PretrainedConfig,
    adapter_config: Section,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
) -> None:
    """Writes ``adapter_model.safetensors`` and its config, as ``save_pretrained`` of peft does.

    Args:
        config: The config of the base.
        adapter_config: Content of peft's ``adapter_config.json``.
        weights: The weights of the checkpoint by name.
        folder: The folder to write into.
    """
    if not adapter_config.get('base_model_name_or_path'):
        raise ConfigError('', 'the base model of this adapter was not saved elsewhere: export with merge=true')
    model = with_saved_adapter(empty_model(config), adapter_config, weights, assign=True)
    # Only the weights of the checkpoint. With `bias: all` peft would also save biases of the base, which has no memory.
    model.save_pretrained(folder, state_dict=dict(weights), save_embedding_layers=False)


def _model_with_weights(config: PretrainedConfig, weights: Mapping[str, torch.Tensor]) -> Any:
    """Returns a model without an adapter, with the weights of a checkpoint."""
    model = empty_model(config)
    was_tied = has_tied_head(model)
    load_weights(model, weights, assign=True)
    # A weight that the checkpoint lacks is still on the device `meta`.
    if was_tied and _has_head_and_embeddings(model):
        # They may differ, although the config says that they are tied: Transformers 5 does not tie them if the files of
        # a model hold different ones.
        _tie_if_equal(model)
    else:
        model.tie_weights()  # a checkpoint may hold tied head and embeddings once
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    refuse_partial(f'the weights of a {type(model).__name__}', missing)
    return model


def _has_head_and_embeddings(model: Any) -> bool:
    """Returns whether both the head and the embeddings have values. On the device ``meta`` a weight has none."""
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    return not head.weight.is_meta and not embeddings.weight.is_meta


def _merged_model(
    config: PretrainedConfig,
    adapter_config: Section,
    weights: Mapping[str, torch.Tensor],
    *,
    base_fingerprint: str | None,
) -> Any:
    """Returns the base of an adapter with the adapter merged into it.

    Args:
        config: The config of the base.
        adapter_config: Content of peft's ``adapter_config.json``.
        weights: The weights of the checkpoint by name.
        base_fingerprint: Result of :func:`.identify_base` in the run. None: it is not known.
    """
    if contains_base(weights):
        # Its weights do not matter: with_saved_adapter() replaces all of them.
        model = auto_class(config).from_config(config)
    else:
        base = adapter_config.get('base_model_name_or_path')
        with building('base_model_name_or_path'):
            # In the type of the run, because the files of the base may be in a type with fewer bits.
            model = auto_class(config).from_pretrained(base, dtype=config.dtype, trust_remote_code=False)
        # In a run with a base in 4 bits the fingerprint is of the rounded weights. Here the base is not rounded.
        is_rounded = getattr(config, 'quantization_config', None) is not None
        if base_fingerprint is not None and not is_rounded:
            _check_base(model, base_fingerprint, base)
    was_tied = has_tied_head(model)
    if was_tied:
        # Untie head and embeddings for the merge, because perhaps only one of them was trained.
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    merged: Any = with_saved_adapter(model, adapter_config, weights).merge_and_unload()
    if was_tied:
        _tie_if_equal(merged)
    return merged


def _check_base(model: Any, expected_fingerprint: str, base: object) -> None:
    """Refuses another base than the one that the adapter was trained on. ``base`` names it in the error."""
    model.requires_grad_(False)  # as in the run, because only frozen weights are in the fingerprint
    if identify_base(model) != expected_fingerprint:
        raise ConfigError(
            '',
            f'the base of the adapter must have the weights that it was trained on, got: others in {base}. Put them '
            'back there, or export without merge=true and merge with the right base by peft',
        )


def _tie_if_equal(model: Any) -> None:
    """Ties the head to the embeddings if they are equal. Notes in the config whether they are."""
    head = model.get_output_embeddings()
    is_tied = torch.equal(head.weight, model.get_input_embeddings().weight)
    note_tying(model, is_tied=is_tied)
    model.tie_weights()


def _write_processor(metadata: Section, folder: Path) -> None:
    """Writes the processor (tokenizer, image processor, chat template) of a checkpoint. Prints a note if it has none.

    Refuses a file that would lie outside the folder.
    """
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
    """Returns the bytes of a file of a processor.

    This package saves every file as its bytes. Composer saves a ``.txt`` file as its lines, a JSON file as its value, a
    sentencepiece model as bytes, and other files as a string.
    """
    content = file['content']
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    if file['file_extension'] == '.txt':
        return '\n'.join(content).encode()
    return json.dumps(content, ensure_ascii=False).encode()
