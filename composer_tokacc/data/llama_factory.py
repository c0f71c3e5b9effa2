# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Reads entries of LLaMA-Factory's ``dataset_info.json``.

An entry names the file of a dataset and how to read it: its columns (the keys of a record that hold prompt, answer,
images, ...), and its tags (the keys of a turn, and the names of its speakers).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from composer_tokacc.data.formats import KEYS_OF_SYSTEM, REFUSED_KEYS
from composer_tokacc.data.hub import HUB
from composer_tokacc.data.records import JsonObject, short_repr
from composer_tokacc.data.unread_media import announces_medium
from composer_tokacc.refusals import InvalidInputError

KEY_OF_COLUMN = {
    'prompt': 'instruction',
    'query': 'input',
    'response': 'output',
    'messages': 'conversations',
}
"""The key of a record that `formats.py` reads, by LLaMA-Factory's name of a column. For all other columns both names
are the same."""
MEDIA_COLUMNS = ('images', 'videos', 'audios')
"""The columns of an entry that hold media."""
COLUMNS = (*KEY_OF_COLUMN, 'history', 'system', *MEDIA_COLUMNS, *KEYS_OF_SYSTEM, *REFUSED_KEYS)
"""The columns that an entry may name. `formats.py` refuses most values of ``KEYS_OF_SYSTEM`` and ``REFUSED_KEYS``. An
entry may name such a column with null, so that it is ignored."""
DEFAULT_COLUMNS = {
    'alpaca': {
        'prompt': 'instruction',
        'query': 'input',
        'response': 'output',
    },
    'sharegpt': {'messages': 'conversations'},
    'openai': {'messages': 'messages'},
}
"""By ``formatting``: the columns of an entry that names none, or only columns with null. Those with null are not read.
If an entry names other columns, only these are read, as in LLaMA-Factory."""
DEFAULT_TAGS = {
    'role_tag': 'from',
    'content_tag': 'value',
    'user_tag': 'human',
    'assistant_tag': 'gpt',
    'observation_tag': 'observation',
    'function_tag': 'function_call',
    'system_tag': 'system',
}
"""The key of a turn, or the name of a speaker, for each tag that an entry does not name. They are also the names in the
records that :meth:`.DatasetEntry.rename` returns, because `formats.py` reads them."""
TAGS_OF_KEYS = ('role_tag', 'content_tag')
"""The tags that name a key. The others name a speaker."""
KEYS_OF_ENTRY = ('file_name', 'hf_hub_url', 'subset', 'split', 'formatting', 'columns', 'tags')
"""Keys of an entry that are read. Any other is refused, unless its value is false or empty."""


class DatasetEntry:
    """One dataset of a ``dataset_info.json``. Has its path or its name on the hub, and renames the keys of its records.

    Args:
        entry: The object under the name of the dataset.
        folder: The folder of ``dataset_info.json``.

    Raises:
        ValueError: If the entry is wrong, or asks for something that is not supported.
    """

    def __init__(self, entry: JsonObject, folder: Path) -> None:
        for key, value in entry.items():
            if value and key not in KEYS_OF_ENTRY:  # `ranking: false` asks for nothing
                raise InvalidInputError(f'`{key[:60]}` is not supported')
        formatting = entry.get('formatting') or 'alpaca'
        formattings = list(DEFAULT_COLUMNS)
        if formatting not in formattings:
            raise InvalidInputError(f'`formatting` must be one of {formattings}, got: {short_repr(formatting)}')
        self.split: str | None = None
        """The split of a dataset of the hub. None for a file."""
        # If the entry names both, the hub's dataset is used, as in LLaMA-Factory.
        if entry.get('hf_hub_url'):
            subset = entry.get('subset') or ''
            name = f'{HUB}{entry["hf_hub_url"]}/{subset}'
            self.path = name.rstrip('/')
            self.split = str(entry.get('split') or 'train')
        elif entry.get('file_name'):
            path = folder / str(entry['file_name'])
            self.path = str(path)
        else:
            raise InvalidInputError('`file_name` or `hf_hub_url` must be given')
        columns = _names_of(entry, 'columns', COLUMNS)
        if not any(columns.values()):
            columns = {**DEFAULT_COLUMNS[formatting], **columns}
        self._columns = columns
        """The file's name of each column, by its name in ``COLUMNS``. None: the column is not read."""
        self._names_media = not self._columns.keys().isdisjoint(MEDIA_COLUMNS)
        """Whether the entry says which media are read."""
        tags = {**DEFAULT_TAGS, **_names_of(entry, 'tags', DEFAULT_TAGS)}
        self._keys_of_turn = {tags[tag]: DEFAULT_TAGS[tag] for tag in TAGS_OF_KEYS}
        """The key of a turn that `formats.py` reads, by the file's key."""
        self._roles = {name: DEFAULT_TAGS[tag] for tag, name in tags.items() if tag not in TAGS_OF_KEYS}
        """The name of a speaker that `formats.py` reads, by the file's name."""

    def rename(self, data: JsonObject) -> JsonObject:
        """Returns a record with the keys that `formats.py` reads.

        LLaMA-Factory ignores keys that no column of the entry names. Two kinds of them are kept here, so that
        `formats.py` checks them: keys that are not supported, and other names of ``system``. The entry can ignore them,
        too: ``"chosen": null``.
        """
        record = {
            'id': data.get('id'),
            'loss_weights': data.get('loss_weights'),
        }
        for column, name in self._columns.items():
            if name in data:
                record[KEY_OF_COLUMN.get(column, column)] = data[name]
        for key, value in data.items():
            is_checked = key in REFUSED_KEYS or key in KEYS_OF_SYSTEM
            if is_checked and not self._names(key):
                record[key] = value
        turns = record.get('conversations')
        if isinstance(turns, list):
            record['conversations'] = [self._rename_turn(turn) for turn in turns]
        return record

    def unnamed_media(self, data: JsonObject) -> JsonObject:
        """Returns the keys of a record that announce a medium, if the entry names no column of media.

        LLaMA-Factory ignores them, but perhaps the columns were forgotten. So `formats.py` checks their values.
        """
        unnamed: dict[str, Any] = {}
        if self._names_media:
            return unnamed
        for key, value in data.items():
            if announces_medium(key) and not self._names(key):
                unnamed[key] = value
        return unnamed

    def _names(self, key: str) -> bool:
        """Tells whether the entry names a key of the file, or a column of this name."""
        return key in self._columns or key in self._columns.values()

    def _rename_turn(self, turn: object) -> object:
        """Returns a turn with the keys and the speaker that `formats.py` reads.

        If the tags name other keys, a key such as ``from`` in the file is overwritten. LLaMA-Factory ignores it.
        """
        if not isinstance(turn, Mapping):
            return turn  # `formats.py` refuses it, and names the record
        renamed = {key: value for key, value in turn.items() if key not in self._keys_of_turn}
        for key_in_file, key in self._keys_of_turn.items():
            renamed[key] = turn.get(key_in_file)
        role = renamed.get('from')
        if isinstance(role, str):
            renamed['from'] = self._roles.get(role, role)
        return renamed


def _names_of(entry: JsonObject, key: str, supported: Collection[str]) -> JsonObject:
    """Returns the mapping of an entry under ``columns`` or ``tags``: names in the file, by LLaMA-Factory's names.

    A name in the file is None if the file has no such column, or no such speaker.

    Args:
        entry: The entry.
        key: ``columns`` or ``tags``.
        supported: LLaMA-Factory's names that are read. Any other is refused.
    """
    names = entry.get(key) or {}
    if not isinstance(names, Mapping) or not all(isinstance(name, str | None) for name in names.values()):
        raise InvalidInputError(f'`{key}` must map names to names, got: {short_repr(names)}')
    for name in names:
        if name not in supported:
            raise InvalidInputError(f'`{name[:60]}` is not supported')
    return names
