# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Guards the checkpoints of a run.

Only one run at a time writes to a folder, of checkpoints or of results. A run resumes only from a complete checkpoint
of the same model and data.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist, format_name_with_dist, partial_format
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composer_tokacc.compat import composer_state_types, inner_model, read_sharded
from composer_tokacc.data import identify_data, identify_processor, identify_vocabulary
from composer_tokacc.programs.errors import ConfigError, shorten
from composer_tokacc.programs.host_types import Processor, Section
from composer_tokacc.programs.machine_faults import fault_of_machine
from composer_tokacc.programs.process import say

log = logging.getLogger(__name__)

ERRORS_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Numbers of the errors of a file system that has no locks, such as some network file systems."""


def checkpoint_folder(trainer: Section) -> Path | None:
    """Returns the folder that the run saves checkpoints to; None if it saves none, or saves them to an object store."""
    folder = trainer.get('save_folder')
    if folder is None or '://' in folder:  # such as s3://bucket/run
        return None
    return Path(format_name_with_dist(folder, str(run_name_of(trainer))))


def run_name_of(trainer: Section) -> str | None:
    """Returns the name of the run from the same places as Composer; None if Composer will generate one."""
    name = trainer.get('run_name')
    if name is not None:
        return str(name)
    return os.environ.get('COMPOSER_RUN_NAME', os.environ.get('RUN_NAME'))


def latest_link(trainer: Section) -> Path | None:
    """Returns the path of Composer's link to this rank's latest checkpoint; None if the run uses no link.

    It uses one with ``autoresume``, a local folder, and names of the run and of the link. The link may not exist yet.
    """
    folder = checkpoint_folder(trainer)
    run_name = run_name_of(trainer)
    link_name = trainer.get('save_latest_filename', 'latest-rank{rank}.pt')  # Composer's default
    if folder is None or run_name is None or not link_name or not trainer.get('autoresume'):
        return None
    return folder.absolute() / format_name_with_dist(link_name, run_name)


@contextmanager
def lock_folders(folders: Mapping[str, Path | None]) -> Iterator[None]:
    """Makes folders and locks them while the block runs. Raises ConfigError if another run has locked one of them.

    The system releases the locks if the process is killed. On a file system without locks this only prints a note.

    Args:
        folders: The folders by their keys in the config; None if a key has no folder. Several keys may have the same
            folder.
    """
    locked = set()
    with ExitStack() as stack:
        for key, folder in folders.items():
            if folder is None or folder.resolve() in locked:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(folder / '.lock').acquire(timeout=0))
            except Timeout as error:
                raise ConfigError(
                    key,
                    f'must be free, got: {folder}, into which another run is writing. Wait for it, or give this one a '
                    f'`trainer.run_name` and a `{key}` of its own',
                ) from error
            except (OSError, NotImplementedError) as error:  # older releases of filelock turn ENOSYS into the latter
                # Other errors are raised: if the folder cannot be written, or belongs to another user, who may be
                # writing into it, the run must not begin.
                if isinstance(error, OSError) and error.errno not in ERRORS_WITHOUT_LOCKS:
                    raise
                say(f'note: {folder} cannot be locked ({error}), so a second run there would not be refused')
            locked.add(folder.resolve())
        yield


def arguments_to_resume(trainer: Section, loggers: Sequence[LoggerDestination] = ()) -> dict[str, Any]:
    """Returns arguments of the Trainer that replace ``autoresume``; empty if it can stay. A collective.

    Composer's ``autoresume`` loads the checkpoint behind its link, even if a killed process or a full disk has left it
    incomplete. It also writes a file into the folder of each node and removes it. If nodes share the folder, the first
    one removes the file of all, and the others crash.

    Rank 0 looks for the newest complete checkpoint. What the run does depends on the ranks that can read it:

    - All ranks: the run goes on from this checkpoint, by ``load_path``.
    - Some ranks, because each node has a folder of its own: ``autoresume`` stays, and sends it to the other nodes.
    - No rank: the run is new. On one node ``autoresume`` stays if a logger may have a checkpoint.

    Raises ConfigError if no checkpoint can be used.

    Args:
        trainer: Section ``trainer`` of the config.
        loggers: Loggers of the run. On one node Composer may download the latest checkpoint from one of them.
    """
    link = latest_link(trainer)
    if link is None:
        return {}
    newest = None
    if dist.get_global_rank() == 0:
        newest = newest_checkpoint(link, run_name_of(trainer))
    checkpoint: Path | None = dist.all_gather_object(newest)[0]
    exists_here = checkpoint is not None and checkpoint.exists()
    exists_on_ranks = dist.all_gather_object(exists_here)
    if all(exists_on_ranks):
        say(f'going on from {checkpoint}')
        # As with `autoresume`, these arguments that the user gave for a `load_path` have no effect.
        return {
            'autoresume': False,
            'load_path': str(checkpoint),
            'load_object_store': None,
            'load_weights_only': False,
            'load_ignore_keys': None,
            'load_exclude_algorithms': None,
        }
    if any(exists_on_ranks):
        _check_link_of_first_rank(link, str(checkpoint))
        return {}
    # Some loggers are only enabled on rank 0.
    can_upload_here = any(logger.can_upload_files() for logger in loggers)
    has_uploader = any(dist.all_gather_object(can_upload_here))
    is_one_node = dist.get_world_size() == dist.get_local_world_size()
    if has_uploader and is_one_node:
        return {}  # `autoresume` searches the loggers
    # On several nodes no logger is searched, because `autoresume` may crash, see above.
    return {'autoresume': False}


def _check_link_of_first_rank(link: Path, checkpoint: str) -> None:
    """Refuses a checkpoint that the link of the first rank does not lead to; a collective.

    ``autoresume`` only finds the checkpoint behind this link. Without it the run would begin at step 0.
    """
    is_linked = os.path.realpath(link) == os.path.realpath(checkpoint)
    first_link, is_first_linked = dist.all_gather_object((link, is_linked))[0]
    if not is_first_linked:
        raise ConfigError(
            'trainer.save_folder',
            f'must have a link to the checkpoint to go on from, because each node has a folder of its own, got: '
            f'{checkpoint} without a link. Make it on the first node: ln -sfn {checkpoint} {first_link}',
        )


def newest_checkpoint(link: Path, run_name: str | None) -> Path | None:
    """Returns the newest complete checkpoint of a run; None if there is no checkpoint.

    The link leads to it. If there is no link, or a damaged checkpoint behind it, the folder is searched. A copy of a
    folder may have no link, and a run that was killed at its first checkpoint has none yet. Without the search such a
    run would begin at step 0 again, and overwrite its checkpoints.

    Raises ConfigError if a folder is in the place of the link, or if there is a link, but no complete checkpoint.
    Without a link, damaged checkpoints count as absent.

    Args:
        link: Composer's link to the latest checkpoint. A copy of a folder may hold a file in its place.
        run_name: The name of the run. Other runs may save into the same folder, with links of their own.
    """
    # A link is not followed here. The system may refuse to, and then find_damage() says why.
    if not link.is_symlink() and link.is_dir():
        raise ConfigError(
            'trainer.save_folder',
            f'must have a link to its latest checkpoint, got: {link}, a folder, which Composer cannot replace by the '
            f'next link. Rename it, and make a link to it: ln -s NEW_NAME {link}',
        )
    latest = link  # a file in the place of the link, or nothing
    if link.is_symlink():
        latest = link.parent / os.readlink(link)
    has_link = os.path.lexists(link)  # also if it leads to nothing
    if has_link:
        damage = find_damage(latest)
        if not damage:
            return latest
        say(f'{latest} is damaged ({damage})')
    for path in _other_checkpoints(latest, run_name):
        if not find_damage(path):
            return path
    if not has_link:
        return None
    raise ConfigError(
        'trainer.save_folder',
        f'must hold a complete checkpoint to go on from, got: {latest}, which is damaged, and no other of the run '
        f'{run_name} in {latest.parent}. Remove {link} to start from the beginning, or give `trainer.load_path` with '
        '`trainer.autoresume=false`',
    )


def _other_checkpoints(latest: Path, run_name: str | None) -> list[Path]:
    """Returns the checkpoints of a run in the folder of ``latest``, except that one. The newest comes first.

    Their names tell nothing, because `save_filename` may give each checkpoint another ending, or none. So every file
    and folder is read. Some of the checkpoints may be damaged.
    """
    saved_runs = []
    for path in latest.parent.glob('*'):  # finds nothing if this folder is gone
        if path == latest or path.is_symlink():
            continue
        is_file_or_folder = path.is_file() or path.is_dir()  # a pipe would be waited for
        if not is_file_or_folder:
            continue
        with suppress(ConfigError):  # a damaged checkpoint, or a file of another program
            saved = SavedRun.read(path)
            if saved.run_name == run_name and saved.optimizers:  # without an optimizer no run can go on from it
                saved_runs.append(saved)
    # By steps, because a copy may have other times.
    saved_runs.sort(key=lambda saved: saved.num_steps, reverse=True)
    return [saved.path for saved in saved_runs]


def find_damage(path: Path) -> str:
    """Returns why a checkpoint file, or the folder of a sharded one, cannot be loaded; empty if nothing is wrong."""
    try:
        if path.is_dir():
            # Only sizes are compared, because a sharded checkpoint may be too large to be read before training.
            index = FileSystemReader(path).read_metadata().storage_data or {}
            for entry in index.values():
                num_bytes = (path / entry.relative_path).stat().st_size
                if num_bytes < entry.offset + entry.length:
                    return f'{entry.relative_path} is too short'
            return ''
        with zipfile.ZipFile(path) as archive:  # torch.save() writes a zip archive
            # Reads the whole file and compares its checksums. This is faster than loading the file.
            damaged_member = archive.testzip()
        if damaged_member:
            return f'{damaged_member} is not what was written'
        return ''
    except Exception as error:  # reading the pickled index of a damaged folder may raise anything
        return shorten(error, 300) or type(error).__name__


def check_checkpoint(key: str, path: Path) -> None:
    """Refuses a path that is not a checkpoint, such as a folder of checkpoints, a text file or a pipe.

    Also refuses the damaged folder of a sharded checkpoint. Of a file it only checks that it is a zip archive.

    Args:
        key: The key of the config, or the argument, that the user gave the path under.
        path: A file, or the folder of a sharded checkpoint.
    """
    reason = ''
    if os.path.isdir(path):
        damage = find_damage(path)
        if damage:
            reason = f'damaged ({damage})'
    elif not os.path.isfile(path):
        reason = 'which is not there, is no file, or may not be read'
    elif not zipfile.is_zipfile(path):  # also if the file may not be read
        reason = 'which is compressed, incomplete, unreadable or not written by Composer'
    if reason:
        raise ConfigError(
            key,
            'must be a checkpoint file, or the folder of one step of a sharded run, such as checkpoints/ep1-ba100, '
            f'got: {path}, {reason}',
        )


@contextmanager
def reading_checkpoint(path: Path | str) -> Iterator[None]:
    """Turns any error in the block, which reads a checkpoint, into one line for the user.

    All kinds of errors are possible, because the file may come from another program. The block may also write: an
    export first rewrites a sharded checkpoint as one file. So the error may be a full disk, too.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        # Only the first sentence: torch's next one recommends `weights_only=False`, which would run code in the file.
        reason = str(error).partition('. ')[0]
        damage = (
            'the checkpoint must be complete and written by Composer for a HuggingFaceModel, and hold only tensors and '
            f'plain values, got: {path} ({type(error).__name__}: {shorten(reason)})'
        )
        raise ConfigError('', fault_of_machine(error) or damage) from error


def read_state(path: Path) -> dict[str, Any]:
    """Returns the part ``state`` of a checkpoint file. Runs no code that the file may hold.

    The weights stay on the disk until they are used.

    Args:
        path: A file that Composer wrote on one rank; not a sharded checkpoint.

    Raises:
        ConfigError: If another program wrote it, or it holds objects of classes that ``compat`` does not list.
    """
    with reading_checkpoint(path), torch.serialization.safe_globals(composer_state_types()):
        return dict(torch.load(path, map_location='cpu', mmap=True, weights_only=True)['state'])


def save_empty_states(optimizer: torch.optim.Optimizer) -> None:
    """Lets ``optimizer.state_dict()`` return an empty state for each parameter that never had a gradient.

    Without this hook it has none, but torch's ``set_optimizer_state_dict()`` looks one up for every parameter.
    """

    def add_empty_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        for group in state_dict['param_groups']:
            for index in group['params']:
                state_dict['state'].setdefault(index, {})
        return state_dict

    optimizer.register_state_dict_post_hook(add_empty_states)


@dataclass(frozen=True)
class Shape:
    """The sizes of a weight, and whether its values are floats."""

    sizes: tuple[int, ...]
    has_floats: bool
    """Torch would load a weight of floats into one of integers without an error."""

    def __str__(self) -> str:
        """Returns ``[8, 4]``, or ``[8, 4] not of floats`` for a weight of integers."""
        sizes = str(list(self.sizes))
        if self.has_floats:
            return sizes
        return f'{sizes} not of floats'


def _shapes_of(model_state: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of a model's weights by name. Leaves out entries that are no tensors (``_extra_state``)."""
    shapes = {}
    for name, value in model_state.items():
        if isinstance(value, torch.Tensor):
            shapes[name] = Shape(tuple(value.shape), value.is_floating_point())
    return shapes


@dataclass(frozen=True)
class ModelShapes:
    """The parts of a model that are compared with a checkpoint."""

    shapes: dict[str, Shape]
    """Shapes of the weights that the model saves, by name."""
    needed: list[str]
    """Names of the weights that a checkpoint must have. If two weights are tied, such as head and embeddings, only one
    of them is needed. The frozen base of an adapter is not needed if checkpoints leave it out."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelShapes:
        """Describes a model."""
        shapes = _shapes_of(model.state_dict())
        # Tied weights are one parameter, with the first of their names.
        needed = [name for name, _ in model.named_parameters() if name in shapes]
        return cls(shapes, needed)


@dataclass(frozen=True)
class SavedRun:
    """The parts of a checkpoint that decide whether a run may load it."""

    path: Path
    fingerprints: dict[str, Any]
    """The fingerprints of :class:`SameData`; empty if it saved none."""
    shapes: dict[str, Shape]
    """Shapes of the model's weights, by name."""
    optimizers: list[str]
    """Class names of the optimizers that a run can resume with. Empty if a file has no timestamp. From such a file
    Composer would train step 0 with the optimizer state of a later step."""
    run_name: str | None
    num_steps: int
    """The number of steps that were trained; 0 without a timestamp."""

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Reads a checkpoint file, or the folder of a sharded one, without its weights."""
        with reading_checkpoint(path):
            if path.is_dir():
                state = _state_of_folder(path)
            else:
                state = read_state(path)
            timestamp = dict(state.get('timestamp') or {})
            optimizers = set()
            if timestamp:
                for name in state.get('optimizers') or {}:
                    # In a sharded checkpoint the names are `AdamW.state...` and `AdamW.param_groups...`.
                    optimizers.add(re.split(r'\.(?:state|param_groups)\.', name)[0])
            return cls(
                path=path,
                fingerprints=saved_fingerprints(state),
                shapes=_shapes_of(state.get('model') or {}),
                optimizers=sorted(optimizers),
                run_name=state.get('run_name'),
                num_steps=timestamp.get('Timestamp', {}).get('batch', 0),
            )


def saved_fingerprints(state: Section) -> dict[str, Any]:
    """Returns the fingerprints in the part ``state`` of a checkpoint; empty if there are none."""
    callbacks = state.get('callbacks') or {}
    return _decode_fingerprints(callbacks.get(SameData.__qualname__) or {})


def _decode_fingerprints(callback_state: Section) -> dict[str, Any]:
    """Returns the fingerprints in a saved state of :class:`SameData`; empty if it saved none."""
    return json.loads(callback_state.get('fingerprints') or '{}')


def _state_of_folder(path: Path) -> dict[str, Any]:
    """Returns the part ``state`` of a sharded checkpoint, without values, except for what :class:`SavedRun` needs.

    Its sections are flat: the keys of their entries have dots. Weights are tensors without memory.
    """
    state: dict[str, Any] = {}
    entries: Section = FileSystemReader(path).read_metadata().state_dict_metadata
    for key, entry in entries.items():
        section, _, name = key.removeprefix('state.').partition('.')
        value = None
        if isinstance(entry, TensorStorageMetadata):
            value = torch.empty(entry.size, dtype=entry.properties.dtype, device='meta')
        state.setdefault(section, {})[name] = value
    # The entries whose values are read. An entry that the checkpoint lacks keeps the value that it has here.
    entries_with_value: dict[str, Any] = {'callbacks': {SameData.__qualname__: {'fingerprints': ''}}, 'run_name': None}
    # Not added to a checkpoint without a timestamp, because SavedRun.read() would think that a run can resume from it.
    if 'timestamp' in state:
        entries_with_value['timestamp'] = {'Timestamp': {'batch': 0}}
    read_sharded(path, {'state': entries_with_value})  # replaces the values in this dict
    return state | entries_with_value


SPEED_SETTINGS = ('foreach', 'fused', 'capturable', 'differentiable')
"""Settings of torch's optimizers that choose how an update is computed, and do not change its result. A resumed run may
change them."""


COMPARED_WITH_WEIGHTS = ('vocabulary', 'model.lora.alpha', 'model.lora.use_rslora', 'model.pretrained')
"""Fingerprints that are compared even if a run loads only the weights of a checkpoint. With another vocabulary the rows
of the embeddings stand for other tokens. An adapter with another scale, or on another base, is another model."""


class SameData(Callback):
    """Refuses to resume with another model, data, order, processor, vocabulary, adapter or optimizer, on all ranks.

    Models are compared by the names and shapes of their weights. For everything else this callback saves fingerprints
    in each checkpoint and compares them. If the run loads only weights, it compares only ``COMPARED_WITH_WEIGHTS``. The
    number of ranks may change, and so may every setting that decides how batches are cut into microbatches.

    Composer calls three methods, in this order:

    1. :meth:`before_load` compares everything except the batches, if the checkpoint is on this machine.
    2. :meth:`load_state_dict` compares the fingerprints if the checkpoint is on another machine. This works only for a
       file: for a sharded checkpoint nothing is compared then, see :meth:`state_dict`.
    3. :meth:`after_load` knows whether the run goes on within an epoch. If it does, it refuses other batches.

    Args:
        dataset: The training set.
        processor: The processor or tokenizer of the training set.
        adapter: Fingerprints of the LoRA adapter, see :func:`.identify_adapter`.
        optimizer: Settings of the optimizer by name. They are compared, because Composer would silently replace them by
            the settings in the checkpoint.
        batches: Settings that decide which samples a batch holds, by their keys in the config. They are compared if the
            run goes on within an epoch: with other batches it would repeat some samples and lose others. None if the
            dataset orders its samples itself. Its settings are then in the fingerprint ``order``.
        model: The model before FSDP divides it. With None neither weights nor the optimizer's class are compared.
        trainer: Arguments of the Trainer, which name the checkpoint. See :func:`arguments_to_resume`.
        on_other_data: What to do if fingerprints differ: ``'raise'`` an error, or ``'warn'`` and go on.
    """

    def __init__(
        self,
        dataset: Any,
        processor: Processor,
        *,
        adapter: Section,
        optimizer: Section,
        batches: Section | None,
        model: torch.nn.Module | None = None,
        trainer: Section,
        on_other_data: str,
    ) -> None:
        self.trainer = trainer
        self.on_other_data = on_other_data
        self._shapes_before_fsdp = None if model is None else ModelShapes.of(model)
        """FSDP later divides the weights. FSDP 1 also changes their names."""
        fingerprints = _fingerprints_of_data(dataset, processor)
        fingerprints.update(adapter)
        for name, value in optimizer.items():
            if name not in SPEED_SETTINGS:
                fingerprints[f'optimizer.{name}'] = value
        if batches is not None:
            fingerprints['batches'] = batches
        # Through JSON and back, because a checkpoint holds them as JSON, in which tuples become lists.
        self._fingerprints = json.loads(json.dumps(fingerprints, default=str))
        self._difference_of_batches = ''
        """Text that shows how the settings of the batches differ from the checkpoint's; empty if they do not."""
        self._is_loading = False
        """Whether the Trainer is loading a checkpoint."""
        self._is_compared = False
        """Whether :meth:`before_load` has read the checkpoint that is loaded. Then :meth:`load_state_dict` compares
        nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the fingerprints as one string of JSON; an empty dict while a checkpoint is loaded.

        Torch reads from a sharded checkpoint whatever the state of the run has at this time, and raises an error if it
        is missing. Older checkpoints have no entry of this callback.
        """
        if self._is_loading:
            return {}
        return {'fingerprints': json.dumps(self._fingerprints)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compares the fingerprints if :meth:`before_load` did not, because the checkpoint is not on this machine."""
        if not self._is_compared:
            self._compare_fingerprints(_decode_fingerprints(state))

    def before_load(self, state: State, logger: Logger) -> None:
        """Refuses a checkpoint with other fingerprints, weights or optimizer, if it is on this machine.

        Composer's own error would only say which shapes do not fit. From now until :meth:`after_load`,
        :meth:`state_dict` is empty.
        """
        self._is_loading = True
        path = _checkpoint_to_load(self.trainer, state.run_name)
        if path is None:
            return
        saved = SavedRun.read(path)
        # With `autoresume` load_state_dict() compares again, because Composer may load another checkpoint than `path`.
        self._is_compared = not self.trainer.get('autoresume')
        if self.trainer.get('load_weights_only'):
            self._check_start_from_weights(saved, state)
        else:
            self._check_resume(saved, state)

    def after_load(self, state: State, logger: Logger) -> None:
        """Ends the loading, so that checkpoints hold the fingerprints again. Refuses other batches within an epoch."""
        self._is_loading = False
        # At the end of an epoch every sample was trained once, so the next epoch may have other batches.
        if self._difference_of_batches and int(state.timestamp.batch_in_epoch) > 0:
            self._refuse(
                'a run that is resumed within an epoch must have the batches of its checkpoint, or some samples are '
                f'repeated and others left out, got: {self._difference_of_batches}'
            )

    def _check_resume(self, saved: SavedRun, state: State) -> None:
        """Refuses a checkpoint that the run cannot go on from: it needs the same data, and every weight and optimizer.

        With ``load_ignore_keys`` the user decides which weights and optimizers are loaded.
        """
        self._compare_fingerprints(saved.fingerprints)
        if self._shapes_before_fsdp is None or self.trainer.get('load_ignore_keys'):
            return
        _compare_shapes(saved, _shapes_now(state, self._shapes_before_fsdp), is_strict=True)
        optimizer = type(state.optimizers[0]).__qualname__
        if optimizer not in saved.optimizers:  # Composer would start with a new optimizer
            raise ConfigError(
                '',
                f'the checkpoint must hold timestamp and the state of the optimizer {optimizer} to go on from, got: '
                f'{saved.path} with {saved.optimizers}. Set `trainer.load_weights_only=true` to start from its weights',
            )

    def _check_start_from_weights(self, saved: SavedRun, state: State) -> None:
        """Refuses a checkpoint whose weights cannot be loaded, or mean something else in this run.

        With ``load_ignore_keys`` the user decides which weights are loaded.
        """
        if self.trainer.get('load_ignore_keys'):
            return
        self._compare_meaning(saved)
        if self._shapes_before_fsdp is None:
            return
        is_strict = bool(self.trainer.get('load_strict_model_weights', True))
        _compare_shapes(saved, _shapes_now(state, self._shapes_before_fsdp), is_strict=is_strict)

    def _compare_fingerprints(self, saved: Section) -> None:
        """Refuses other fingerprints than those of this run. Notes other batches for :meth:`after_load`.

        Older checkpoints may lack some fingerprints. These are not compared.
        """
        compared = dict(saved)
        # Batches are not refused yet. Only after_load() knows whether they may differ.
        self._note_other_batches(compared.pop('batches', None))
        differences = self._differences(compared)
        if differences:
            self._refuse(
                'a resumed run must have the data, order, processor, vocabulary, adapter and optimizer of its '
                f'checkpoint, got: other {differences}'
            )

    def _note_other_batches(self, saved_batches: Section | None) -> None:
        """Keeps the text that :meth:`after_load` shows if the batches differ from those of the checkpoint.

        ``saved_batches`` is None if the checkpoint has no such settings.
        """
        self._difference_of_batches = ''
        batches = self._fingerprints.get('batches')
        if saved_batches is None or batches is None:
            return
        saved_batches = _batches_as_saved_today(saved_batches, batches)
        if saved_batches != batches:
            self._difference_of_batches = f'{saved_batches} there, {batches} here'

    def _differences(self, saved: Section) -> str:
        """Returns text that shows which saved fingerprints this run does not have; empty if it has them all."""
        differing = {}
        for name, saved_value in saved.items():
            # Another release of torch may have saved settings of the optimizer that this release does not have.
            is_unknown_setting = name.startswith('optimizer.') and name not in self._fingerprints
            value = self._fingerprints.get(name)
            if saved_value != value and not is_unknown_setting:
                differing[name] = f'{name} {saved_value} there, {value} here'
        if not differing:
            return ''
        details = ', '.join(differing.values())
        return f'{" and ".join(differing)} ({details})'

    def _compare_meaning(self, saved: SavedRun) -> None:
        """Refuses weights that mean something else in this run, see ``COMPARED_WITH_WEIGHTS``."""
        compared = {}
        for name in COMPARED_WITH_WEIGHTS:
            if name in saved.fingerprints:
                compared[name] = saved.fingerprints[name]
        differences = self._differences(compared)
        if differences:
            self._refuse(
                'a run that loads the weights of a checkpoint must have its vocabulary, and the scale and the base of '
                f'its adapter, got: {saved.path} with other {differences}',
                remedy='Set it back. A run has the vocabulary of the weights if it starts from an export of the '
                'checkpoint: model.pretrained=FOLDER',
            )

    def _refuse(
        self,
        message: str,
        *,
        remedy: str = 'Set it back, or for a new run give another trainer.run_name and trainer.save_folder, with '
        'trainer.load_path and trainer.load_weights_only=true if it starts from these weights',
    ) -> None:
        """Raises ConfigError with this message and the remedy. With ``on_other_data='warn'`` it only warns."""
        if self.on_other_data == 'warn':
            log.warning('%s; goes on because of `loader.on_other_data`.', message)
            return
        raise ConfigError('', f'{message}. {remedy}; to go on: loader.on_other_data=warn')


def _batches_as_saved_today(saved_batches: Section, batches: Section) -> Section:
    """Returns the settings of batches that any version has saved, with the names of this version.

    If a setting is added to ``FileSource.settings_of_batches``, older checkpoints lack it, and would be refused. So
    give it here the value that all earlier versions had, such as ``completed.setdefault('loader.reverse', False)``.

    Args:
        saved_batches: The saved settings.
        batches: Those of this run.
    """
    completed = dict(saved_batches)
    # Nothing tells the value in older checkpoints, so it is not compared. Only runs with parts have this setting.
    if 'loader.regroup_ranks' in batches:
        completed.setdefault('loader.regroup_ranks', batches['loader.regroup_ranks'])
    return completed


def _fingerprints_of_data(dataset: Any, processor: Processor) -> dict[str, Any]:
    """Returns the fingerprints of a dataset and of its processor, by name."""
    # The length of a StreamingDataset counts only the samples of this rank. Its `size` counts all samples.
    num_samples = getattr(dataset, 'size', None)
    if not isinstance(num_samples, int):
        num_samples = len(dataset)
    fingerprints = {
        'data': f'{identify_data(dataset)} of {num_samples} samples',
        'processor': identify_processor(processor),
        'vocabulary': identify_vocabulary(processor),
    }
    if hasattr(dataset, 'identity_of_order'):
        fingerprints['order'] = dataset.identity_of_order()
    return fingerprints


def _shapes_now(state: State, shapes_before_fsdp: ModelShapes) -> ModelShapes:
    """Returns the shapes of the run's model when a checkpoint is loaded."""
    if state.fsdp_enabled:  # FSDP has divided the weights by now
        return shapes_before_fsdp
    return ModelShapes.of(inner_model(state.model))  # algorithms may have changed it since the callback was made


def _checkpoint_to_load(trainer: Section, run_name: str) -> Path | None:
    """Returns the checkpoint at ``load_path``; None if there is none, or if it is not on this machine."""
    load_path = trainer.get('load_path')
    if load_path is None:
        return None
    # Composer replaces {run_name} and {rank} in the same way. All ranks compare the checkpoint of rank 0.
    path = Path(partial_format(load_path, run_name=run_name, rank=0, local_rank=0, node_rank=0))
    if path.exists():
        return path
    return None


def _compare_shapes(saved: SavedRun, model: ModelShapes, *, is_strict: bool) -> None:
    """Refuses a checkpoint of another model. If ``is_strict`` is False, only weights that both have must agree."""
    differing = {}
    if is_strict:
        for name in model.needed:
            if name not in saved.shapes:
                differing[name] = 'missing'
    for name, saved_shape in saved.shapes.items():
        shape = model.shapes.get(name)
        if shape is None and is_strict:
            differing[name] = 'unknown'
        elif shape is not None and shape != saved_shape:
            differing[name] = f'{saved_shape} there, {shape} here'
    if differing:
        name = next(iter(differing))
        raise ConfigError(
            '',
            f'the checkpoint must be of the same model, got: {saved.path} with {len(differing)} others among '
            f'{len(saved.shapes)} weights ({name}: {differing[name]}). Give the `model` of that run, or another '
            '`trainer.run_name` and `trainer.save_folder`',
        )
