# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""A hub that does not answer is asked once. Its other errors are left to the library that reads from it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from composer_tokacc import size, train
from composer_tokacc.data import ask_hub, hub
from composer_tokacc.data.files import read_raw_records
from tests.support.launch import ROOT

LLAVA_7B = str(ROOT / 'yamls' / 'llava15_7b.yaml')


def point_to(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the effect of HF_ENDPOINT, which is read only when huggingface_hub is imported."""
    monkeypatch.setattr(constants, 'ENDPOINT', f'http://127.0.0.1:{port}')
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    path = template[template.index('/{repo_id}') :]
    for module in (constants, file_download):  # older releases read it from the second
        monkeypatch.setattr(module, 'HUGGINGFACE_CO_URL_TEMPLATE', constants.ENDPOINT + path, raising=False)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Starts a server that accepts connections and does not answer, and returns the list of connections."""
    connections: list[socket.socket] = []
    with socket.create_server(('127.0.0.1', 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        point_to(server.getsockname()[1], monkeypatch)
        monkeypatch.setattr(hub, 'TIMEOUT', 0.2)
        yield connections
        server.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()


def count_file_requests(connections: list[socket.socket]) -> int:
    """Counts the requests for files. The client of a fresh process may also send others."""
    for connection in connections:
        connection.setblocking(False)
    return sum(b'/resolve/' in connection.recv(1 << 16) for connection in connections)


@pytest.mark.parametrize('program', [train, size])
def test_model_of_a_silent_hub(program, silent_hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'data.json').write_text('[]')
    overrides = [
        f'dataset.path={tmp_path}/data.json',
        f'report.folder={tmp_path}',
        f'trainer.save_folder={tmp_path}',
        'trainer.parallelism_config=null',
        'trainer.precision=fp32',
        'trainer.device=cpu',
    ]
    assert program.main([LLAVA_7B, *overrides]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith('error: ')]
    assert '`model.pretrained`' in line
    assert 'does not answer' in line
    assert 'set HF_HUB_OFFLINE=1' in line
    assert count_file_requests(silent_hub) == 1


def test_dataset_of_a_silent_hub(silent_hub) -> None:
    pytest.importorskip('datasets')
    with pytest.raises(ValueError, match=r'got: hf://datasets/some/data.*does not answer.*Give a folder'):
        list(read_raw_records('hf://datasets/some/data'))
    assert count_file_requests(silent_hub) == 1


def test_what_a_hub_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotThere(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(('127.0.0.1', 0), NotThere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        point_to(server.server_port, monkeypatch)
        ask_hub('some/model', 'model')
        server.shutdown()


def test_no_request_for_folders_or_offline(silent_hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_hub(str(tmp_path), 'model')
    cached_model = tmp_path / 'models--some--model'
    snapshot = cached_model / 'snapshots' / 'abc'
    snapshot.mkdir(parents=True)
    (snapshot / 'config.json').write_text('{}')
    (cached_model / 'refs').mkdir()
    (cached_model / 'refs' / 'main').write_text('abc')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    ask_hub('some/model', 'model')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    ask_hub('other/model', 'model')
    assert silent_hub == []


def test_name_of_neither_folder_nor_hub() -> None:
    with pytest.raises(OSError, match='no such folder'):
        ask_hub('/no/such/folder', 'model')
