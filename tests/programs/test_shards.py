# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What the config says of streaming where mosaicml-streaming is not installed, or is not meant."""

from __future__ import annotations

import sys

import pytest

from composer_tokacc.data.to_mds import main
from composer_tokacc.programs import ConfigError, load_config
from composer_tokacc.programs.config_checks import check_config
from tests.support.launch import ROOT


def mistake(file, *overrides):
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(ROOT / 'yamls' / file, overrides), num_ranks=2)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'streaming', None)  # as if it were not installed
    message = mistake('llava_streaming.yaml', 'dataset.local=shards')
    assert message.startswith('`dataset.name` llava_streaming needs mosaicml-streaming, got: none.')
    assert message.endswith("pip install 'composer_tokacc[streaming]'")


def test_converter_says_the_same(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, 'streaming', None)
    assert main(['data.json', 'images', str(tmp_path / 'out')]) == 2
    error = capsys.readouterr().err
    assert error == "error: shards need mosaicml-streaming, got: none. pip install 'composer_tokacc[streaming]'\n"


def test_exchange_is_refused_for_samples_read_by_index():
    message = mistake('digits.yaml', 'loader.exchange_ranks=true')
    assert (
        'got: true with `dataset.name` examples.digits.DigitsDataset. `loader.regroup_ranks` does the same' in message
    )
