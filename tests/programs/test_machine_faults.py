# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""What a machine lacks is said in one line, wherever in torch it shows."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket

import pytest
import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Dataset

from composer_tokacc.programs.machine_faults import fault_of_machine
from composer_tokacc.programs.process import allow_open_files


class Fatal(Dataset):
    """Sample 3 is read by a process that ends there."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)


def test_killed_loader_process_is_named():
    samples = iter(DataLoader(Fatal(), num_workers=1))
    # Torch's handler raises wherever this process happens to be, perhaps in pytest.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A connection that was reset, an early end, or torch's own words: the moment decides.
    with pytest.raises((RuntimeError, OSError, EOFError)) as caught:
        list(samples)
    fault = fault_of_machine(caught.value)
    del samples, caught  # and torch's memory of the process
    signal.signal(signal.SIGCHLD, handler)
    assert fault.startswith('the processes that read samples ended during the run, got: ')
    assert 'lower `loader.num_workers`' in fault
    assert fault_of_machine(RuntimeError('DataLoader worker (pid 26997) is killed by signal: Killed.'))
    assert fault_of_machine(ConnectionResetError(errno.ECONNRESET, 'of another connection')) == ''


def test_open_files_up_to_the_limit():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, limits[1]), limits[1]))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_full_disk_is_recognised():
    error = RuntimeError('PytorchStreamWriter failed')
    error.__cause__ = OSError(errno.ENOSPC, 'No space left on device')
    assert 'No space left on device' in fault_of_machine(error)
    assert fault_of_machine(RuntimeError('[enforce fail at inline_container.cc:603] . unexpected pos 474 vs 473'))
    assert fault_of_machine(OSError(errno.EMFILE, 'Too many open files'))
    assert fault_of_machine(RuntimeError('something else')) == ''
    assert fault_of_machine(OSError(errno.ENOENT, 'No such file or directory')) == ''


def test_taken_port_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(('', 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv('MASTER_PORT', str(port))
        with pytest.raises(RuntimeError) as caught:
            TCPStore('127.0.0.1', port, is_master=True)
    assert f'must be free, got: {port}, used by another program' in fault_of_machine(caught.value)
