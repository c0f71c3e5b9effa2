# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads entries of LLaMA-Factory's ``dataset_info.json``, which describe a dataset by its columns and tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from composer_tokacc.data.records import JsonObject, short_repr

# LLaMA-Factory's name of a column -> the key of a record that `formats.py` reads.
KEY_OF_COLUMN = {
    'prompt': 'instruction',
    'query': 'input',
    'response': 'output',
    'messages': 'conversations',
    'history': 'history',
    'system': 'system',
    'tools': 'tools',
    'images': 'images',
    'videos': 'videos',
    'audios': 'audios',
    'chosen': 'chosen',
    'rejected': 'rejected',
    'kto_tag': 'kto_tag',
}
DEFAULT_COLUMNS = {
    'alpaca': {'prompt': 'instruction', 'query': 'input', 'response': 'output'},
    'sharegpt': {'messages': 'conversations'},
    'openai': {'messages': 'messages'},
}
# Tags name the keys of a turn, and the speakers. These are the names in a file that gives no tags; below are the key or
# the role that `formats.py` reads.
DEFAULT_TAGS = {
    'role_tag': 'from',
    'content_tag': 'value',
    'user_tag': 'human',
    'assistant_tag': 'gpt',
    'observation_tag': 'observation',
    'function_tag': 'function_call',
    'system_tag': 'system',
}
KEY_OF_TAG = {'role_tag': 'role', 'content_tag': 'content'}
ROLE_OF_TAG = {
    'user_tag': 'user',
    'assistant_tag': 'assistant',
    'observation_tag': 'tool',
    'function_tag': 'function_call',
    'system_tag': 'system',
}
ENTRY_TEXTS = ('file_name', 'hf_hub_url', 'subset', 'split', 'formatting')
NAME_MAPS = ('columns', 'tags')


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset of a ``dataset_info.json``."""

    file_name: str | None
    """Relative to the folder of the ``dataset_info.json``. None for a dataset of the hub."""
    hub_name: str | None
    """``owner/name``, or ``owner/name/subset``."""
    split: str
    columns: Mapping[str, str]
    """Names in the file by column."""
    tags: Mapping[str, str]
    """Names in the file by tag."""

    @classmethod
    def parse(cls, entry: JsonObject) -> DatasetEntry:
        """Checks an entry and fills in the defaults.

        Raises:
            ValueError: If the entry is wrong, or asks for something that is not supported.
        """
        for key in ENTRY_TEXTS:
            if not isinstance(entry.get(key), str | None):
                raise ValueError(f'`{key}` must be a string, got: {short_repr(entry[key])}')
        for key in NAME_MAPS:
            if entry.get(key) and not _maps_names(entry[key]):
                raise ValueError(f'`{key}` must map names to names, got: {short_repr(entry[key])}')
        formatting = entry.get('formatting') or 'alpaca'
        if formatting not in DEFAULT_COLUMNS:
            raise ValueError(f'`formatting` must be one of {list(DEFAULT_COLUMNS)}, got: {short_repr(formatting)}')
        columns = {
            **DEFAULT_COLUMNS[formatting],
            **(entry.get('columns') or {}),
        }
        tags = {**DEFAULT_TAGS, **(entry.get('tags') or {})}
        _check_supported(entry, columns, tags)
        hub_name = entry.get('hf_hub_url')
        if hub_name and entry.get('subset'):
            hub_name = f'{hub_name}/{entry["subset"]}'
        if not hub_name and not entry.get('file_name'):
            raise ValueError('`file_name` or `hf_hub_url` must be given')
        return cls(
            entry.get('file_name'),
            hub_name or None,
            entry.get('split') or 'train',
            columns,
            tags,
        )

    def path_from(self, folder: Path) -> str:
        """Returns the path of the file. Only for a dataset with a ``file_name``."""
        assert self.file_name is not None
        return str(folder / self.file_name)

    def rename(self, data: JsonObject) -> JsonObject:
        """Returns a record with the keys that `formats.py` knows. A column that the entry does not name is left out."""
        record = {}
        for column, name in self.columns.items():
            if name in data:
                record[KEY_OF_COLUMN[column]] = data[name]
        for key in ('id', 'loss_weights'):
            record[key] = data.get(key)
        turns = record.get('conversations')
        if isinstance(turns, list) and all(isinstance(turn, Mapping) for turn in turns):
            record['conversations'] = [self._rename_turn(turn) for turn in turns]
        return record

    def _rename_turn(self, turn: JsonObject) -> JsonObject:
        keys = {self.tags[tag]: key for tag, key in KEY_OF_TAG.items()}
        roles = {self.tags[tag]: role for tag, role in ROLE_OF_TAG.items()}
        renamed = {}
        for key, value in turn.items():
            renamed[keys.get(key, key)] = value
        role = renamed.get('role')
        if isinstance(role, str):
            renamed['role'] = roles.get(role, role)
        return renamed


def _maps_names(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str | None) for name in value.values())


def _check_supported(entry: JsonObject, columns: Mapping[str, str], tags: Mapping[str, str]) -> None:
    unsupported = []
    for key, value in entry.items():
        if key not in ENTRY_TEXTS and key not in NAME_MAPS and value:  # `ranking: false` asks for nothing
            unsupported.append(key)
    for column in columns:
        if column not in KEY_OF_COLUMN:
            unsupported.append(column)
    for tag in tags:
        if tag not in DEFAULT_TAGS:
            unsupported.append(tag)
    if unsupported:
        raise ValueError(f'`{unsupported[0][:60]}` is not supported')
