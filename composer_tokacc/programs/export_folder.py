# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Writes a folder that Transformers loads, out of a Composer checkpoint or of a model in memory."""

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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from composer_tokacc.programs.checkpoints import check_checkpoint, read_state
from composer_tokacc.programs.errors import ConfigError, must
from composer_tokacc.programs.lora import load_weights, refuse_partial, with_saved_adapter
from composer_tokacc.programs.models import auto_class, empty_model, set_cache


def export_checkpoint(checkpoint: Path, folder: Path, *, merge: bool = False) -> None:
    """Writes a folder, absent or empty, that ``from_pretrained`` loads without Composer and without this package.

    ``checkpoint`` is of a ``HuggingFaceModel``: one file, or the folder of a sharded (FSDP) one. ``merge`` adds a LoRA
    adapter into its base, which is loaded for it.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f'the folder to export to must be absent or empty, got: {folder}. Give another one')
    with must('the folder to export to must be writable', folder, OSError, SafetensorError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Under another name until it is whole, beside the folder because it may be large.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f'{folder.name}-') as unfinished:
            written = Path(unfinished) / 'folder'
            written.mkdir()
            _export(_read(checkpoint, Path(unfinished)), checkpoint, written, merge=merge)
            os.replace(written, folder)


def _export(state: Mapping[str, Any], checkpoint: Path, folder: Path, *, merge: bool) -> None:
    requirement, found = 'the checkpoint must be one of a HuggingFaceModel', f'{checkpoint} with {sorted(state)}'
    with must(requirement, found, KeyError, TypeError, AttributeError, RuntimeError):
        metadata = state['integrations']['huggingface']
        weights = {name.removeprefix('model.'): value for name, value in state['model'].items()}
        _check_finite(weights, str(checkpoint))
        adapter, generation = (metadata['model'].get(key) for key in ('peft_config', 'generation_config'))
        generation = None if generation is None else GenerationConfig.from_dict(generation['content'])
    with must(requirement, found, Exception):  # Composer's, of a type of model that is not known
        config = get_hf_config_from_composer_state_dict({'state': state})
    if adapter is not None and not merge:
        _save_adapter(config, adapter['content'], weights, folder)
    else:
        model = _with_weights(config, adapter, weights)
        if generation is not None:
            model.generation_config = generation
        _save_pretrained(model, folder)
    _write_processor(metadata, folder)


def export_model(model: HuggingFaceModel, folder: Path) -> None:
    """Writes a model in memory, whose weights are whole on this rank, as :func:`export_checkpoint`; overwrites."""
    inner: Any = model.model
    _check_finite(dict(inner.named_parameters()), 'the trained model')
    for pattern in ('*.safetensors*', '*config.json'):  # of an earlier run, perhaps of another kind of model
        for stale in folder.glob(pattern):
            stale.unlink()
    _save_pretrained(inner, folder)
    _write_processor(model.get_metadata(), folder)


def _read(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Reads the ``state`` of a checkpoint; one that is sharded is put together in ``scratch``."""
    check_checkpoint('the checkpoint', checkpoint)
    if not checkpoint.is_dir():
        return read_state(checkpoint)
    # Torch's own is no Exception.
    with must('the checkpoint must be whole and written by Composer', checkpoint, Exception, CheckpointException):
        dcp_to_torch_save(checkpoint.resolve(), scratch / 'whole.pt')
    return read_state(scratch / 'whole.pt')


def _check_finite(weights: Mapping[str, torch.Tensor], owner: str) -> None:
    broken = [name for name, value in weights.items() if value.is_complex() or not value.isfinite().all()]
    if broken:
        raise ConfigError(
            f'the weights must be finite numbers, got: {owner} with NaN, infinite or complex ones in {broken[:3]}'
        )


def _save_pretrained(model: Any, folder: Path) -> None:
    """Saves also a generation config that Transformers reads and does not write, such as Vicuna's: greedy, warm."""
    set_cache(model, on=True)
    generation = getattr(model, 'generation_config', None)
    if not isinstance(model, PreTrainedModel) or generation is None:
        model.save_pretrained(folder)
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = generation
    generation.to_json_file(folder / 'generation_config.json')


def _save_adapter(
    config: PretrainedConfig, content: Mapping[str, Any], weights: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """Writes ``adapter_model.safetensors`` and its config, as peft itself does."""
    import peft  # only those who train adapters need it
    from safetensors.torch import save_file

    if not content.get('base_model_name_or_path'):
        raise ConfigError('an adapter beside a base that is nowhere else must be merged, got: no merge=true. Add it')
    model = with_saved_adapter(empty_model(config), content, weights, assign=True)
    trained = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    # With `bias: all` those are named too that no loss reaches, which are the base's.
    trained = {name: value.contiguous() for name, value in trained.items() if not value.is_meta}
    save_file(trained, folder / 'adapter_model.safetensors', metadata={'format': 'pt'})
    peft.get_peft_config(dict(content)).save_pretrained(str(folder))


def _with_weights(
    config: PretrainedConfig, adapter: Mapping[str, Any] | None, weights: Mapping[str, torch.Tensor]
) -> Any:
    """Returns the whole model, with the adapter that it may have merged into its base."""
    if adapter is None:
        model = empty_model(config)
        found = load_weights(model, weights, assign=True)
        model.tie_weights()  # a head that is tied to the embeddings may be stored once
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        refuse_partial(f'the weights of a {type(model).__name__}', missing, found.unexpected_keys)
        return model
    base = adapter['content'].get('base_model_name_or_path')
    if any('.base_layer.' in name for name in weights):
        model = auto_class(config).from_config(config)
    else:
        with must("the adapter's base must be there to merge into", base, OSError, ValueError):
            # That of the run: the file's own may be one that rounds what was trained.
            model = auto_class(config).from_pretrained(base, dtype=config.dtype)
    head = model.get_output_embeddings()
    was_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if head is not None and was_tied:  # and only one of them may have been trained
        head.weight = nn.Parameter(head.weight.detach().clone())
    merged: Any = with_saved_adapter(model, adapter['content'], weights).merge_and_unload()
    if was_tied:
        is_tied = torch.equal(merged.get_output_embeddings().weight, merged.get_input_embeddings().weight)
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = is_tied
        merged.tie_weights()
    return merged


def _write_processor(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes every file of the processor (tokenizer, image processor, chat template), as it was saved with the run."""
    files = metadata.get('processor') or metadata.get('tokenizer') or {}
    if not files:
        print('The checkpoint holds no processor; save the one of the run beside the weights.', file=sys.stderr)
    for name, file in files.items():
        content, path = file['content'], folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f'files of the processor must lie inside the folder, got: {name}')
        path.parent.mkdir(exist_ok=True)  # a Q-Former's tokenizer has a folder of its own
        if not isinstance(content, str | bytes):  # Composer keeps a vocabulary as its lines, JSON as what it says
            is_text = file['file_extension'] == '.txt'
            content = '\n'.join(content) if is_text else json.dumps(content, ensure_ascii=False)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
