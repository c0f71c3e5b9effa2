# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""If the machine lacks something, one line says what, wherever in torch the error shows."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistBackendError, TCPStore
from torch.utils.data import DataLoader

from composer_tokacc.programs.machine_faults import fault_of_machine, has_lost_rank
from composer_tokacc.programs.process import allow_open_files


def collate_or_die(samples):
    """Kills the process that reads sample 3."""
    if 3 in samples:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.tensor(samples)


def test_killed_loader_process_is_named():
    samples = iter(DataLoader(range(8), num_workers=1, collate_fn=collate_or_die))
    # Torch's handler raises wherever this process happens to be, perhaps in pytest.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A connection that was reset, an early end, or torch's own words: the moment decides.
    with pytest.raises((RuntimeError, OSError, EOFError)) as caught:
        list(samples)
    fault = fault_of_machine(caught.value)
    del samples, caught  # and torch's memory of the process
    signal.signal(signal.SIGCHLD, handler)
    assert 'processes that read samples' in fault
    assert 'lower `loader.num_workers`' in fault


def read_damaged_archive(samples):
    raise EOFError('Compressed file ended before the end-of-stream marker was reached')


@pytest.mark.parametrize('num_workers', [0, 1])
def test_errors_of_samples_are_no_fault(num_workers):
    with pytest.raises(EOFError) as caught:
        list(DataLoader(range(1), num_workers=num_workers, collate_fn=read_damaged_archive))
    assert fault_of_machine(caught.value) == ''


def test_open_files_up_to_the_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def caused_by(cause):
    error = RuntimeError('PytorchStreamWriter failed')
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ('error', 'fault'),
    [
        (caused_by(OSError(errno.ENOSPC, 'No space left on device')), 'the disk .* No space left on device'),
        (RuntimeError('[enforce fail at inline_container.cc:603] . unexpected pos 474 vs 473'), 'the disk'),
        (OSError(errno.EMFILE, 'Too many open files'), 'the limit of open files'),
        (OSError(errno.EROFS, 'Read-only file system', '/runs/.lock'), 'can be written .*/runs/.lock'),
        (OSError(errno.ENOMEM, 'Cannot allocate memory'), 'enough memory'),
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE)), 'file system'),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            'enough memory',
        ),
        (MemoryError(), 'enough memory'),
        # NCCL's own buffers are not torch's, so torch does not raise its OutOfMemoryError.
        (DistBackendError("ncclUnhandledCudaError ... Last error:\nCuda failure 2 'out of memory'"), 'the device must'),
        (DistBackendError('ncclSystemError ... Last error:\nFailed to CUDA calloc 4194304 bytes'), 'the device must'),
        (RuntimeError('DataLoader worker (pid 26997) is killed by signal: Killed.'), 'processes that read samples'),
        (RuntimeError('[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer'), 'another rank'),
        # In a backward of DDP no frame is torch.distributed's.
        (RuntimeError('Application timeout caused pair closure'), 'another rank'),
    ],
)
def test_faults_of_the_machine(error, fault):
    assert re.search(fault, fault_of_machine(error))


@pytest.mark.parametrize(
    'error',
    [
        RuntimeError('something else'),
        RuntimeError('unexpected position of a token'),
        OSError(errno.ENOENT, 'No such file or directory'),
        ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),  # of a hub, for example
    ],
)
def test_other_errors_are_no_fault(error):
    assert fault_of_machine(error) == ''


def test_error_in_a_handler_is_no_fault():
    """A bug in a fallback of the user needs its traceback."""
    error = KeyError('width')
    error.__context__ = PermissionError(errno.EACCES, 'Permission denied')
    assert fault_of_machine(error) == ''


def test_error_that_causes_itself():
    """A user's code may raise an error from itself, or two errors from each other."""
    error = ValueError('a bug')
    error.__cause__ = error
    assert fault_of_machine(error) == ''
    error.__cause__ = caused_by(error)
    assert fault_of_machine(error) == ''


def test_rank_that_never_joins_a_group():
    """To form a group, a rank waits in the store for the addresses of the others."""
    store = TCPStore('127.0.0.1', 0, is_master=True)
    with pytest.raises(RuntimeError) as caught:
        store.wait(['address of rank 1'], timedelta(milliseconds=10))
    assert has_lost_rank(caught.value)
    assert 'another rank ended, or did not answer' in fault_of_machine(caught.value)


def test_taken_port_is_named(monkeypatch):
    with socket.socket() as server:
        server.bind(('', 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setenv('MASTER_PORT', str(port))
        with pytest.raises(RuntimeError) as caught:
            TCPStore('127.0.0.1', port, is_master=True)
    assert f'must be free, got: {port}, used by another program' in fault_of_machine(caught.value)
