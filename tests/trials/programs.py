# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Command lines of the programs, and checkpoints that they load."""

from __future__ import annotations

import atexit
import functools
import gzip
import json
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from transformers import LlamaConfig

from composer_tokacc import export, look, size, train, verify
from tests.support.programs import DIGITS, QUIET, TINY_DIGITS
from tests.trials.outcomes import LLAVA, WORKS, run_program

MAINS = {'look': look.main, 'train': train.main, 'size': size.main, 'verify': verify.main, 'export': export.main}
RUN = [DIGITS, *TINY_DIGITS, 'trainer.max_duration=1ba', 'trainer.eval_interval=1ba', 'dataset.num_samples=8']


def call_program(folder: Path, program: str, arguments: list[str], write: Callable[[Path], Any] | None = None) -> str:
    """The program's last line, where it ends with status 2; ``write`` writes the files of ``{folder}``, whose code must
    not run.
    """
    if write is not None:
        write(folder)
    if program == 'train':
        arguments = [*arguments, 'report.folder={folder}/report']
    line = run_program(MAINS[program], [one.replace('{folder}', str(folder)) for one in arguments])
    assert not (folder / 'code ran').exists(), f'code ran, then: {line}'
    if program == 'export' and line != WORKS:
        assert not (folder / 'inside' / 'exported').exists()
        assert not list(folder.rglob('evil.txt'))
    return line


def call_in_environment(folder: Path, name: str, value: str) -> str:
    with patch.dict(os.environ, {name: value}):
        return call_program(folder, 'look', [DIGITS])


@functools.cache
def _whole_checkpoint() -> Path:
    """Of one step, once a session."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    assert call_program(folder, 'train', [*RUN, f'trainer.save_folder={folder}']) == WORKS
    return folder / 'latest-rank0.pt'


def whole(folder: Path, name: str = 'a.pt') -> None:
    shutil.copy(_whole_checkpoint(), folder / name)


def cut(folder: Path) -> None:
    (folder / 'a.pt').write_bytes(_whole_checkpoint().read_bytes()[:-5000])


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        checkpoint = torch.load(_whole_checkpoint(), weights_only=False)
        change(checkpoint['state'])
        torch.save(checkpoint, folder / 'a.pt')

    return write


def with_nan(state: dict[str, Any]) -> None:
    next(value for value in state['model'].values() if value.is_floating_point()).fill_(float('nan'))


def metadata(state: dict[str, Any]) -> dict[str, Any]:
    return state['integrations']['huggingface']


def with_a_file_outside(state: dict[str, Any]) -> None:
    files = metadata(state).get('processor') or metadata(state)['tokenizer']
    files['../../evil.txt'] = {**next(iter(files.values()))}


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.pop(key)


class Running:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder / 'code ran'),))


def pickled_code(folder: Path) -> None:
    (folder / 'a.pt').write_bytes(pickle.dumps(Running(folder)))


def code_in_a_checkpoint(folder: Path) -> None:
    torch.save({'state': {'model': {}, 'callbacks': Running(folder)}}, folder / 'a.pt')


def of_bytes(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / 'a.pt').write_bytes(content)


def a_picture(folder: Path) -> None:
    Image.new('RGB', (8, 8)).save(folder / 'a.pt', format='PNG')


def a_folder(folder: Path) -> None:
    (folder / 'a.pt').mkdir()


def saved(value: Any) -> Callable[[Path], Any]:
    return lambda folder: torch.save(value, folder / 'a.pt')


def a_compiled_model(folder: Path) -> None:
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(str(folder / 'a.pt'))


def a_damaged_index(folder: Path) -> None:
    a_folder(folder)
    (folder / 'a.pt' / '.metadata').write_bytes(b'no pickle')


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / 'a.pt')


def a_table(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / 'a.csv').write_text(text)


def half_weighted(folder: Path) -> None:
    turns = [{'from': 'human', 'value': 'A?'}, {'from': 'gpt', 'value': 'B.'}]
    records = [{'id': 'a', 'loss_weights': 1, 'conversations': turns}, {'id': 'b', 'conversations': turns}]
    (folder / 'data.json').write_text(json.dumps(records))


def mine(code: str) -> Callable[[Path], Any]:
    """A module of the user's, ``mine.py``."""

    def write(folder: Path) -> None:
        exec(code, vars(sys.modules.setdefault('mine', ModuleType('mine'))))

    return write


OWN_DATA = 'from examples.digits import DigitsDataset\n'
LOAD = [*RUN, 'trainer.load_path={folder}/a.pt', 'trainer.max_duration=2ba']
EXPORT = ['{folder}/a.pt', '{folder}/inside/exported']
SIZE = [LLAVA, 'dataset.path=x.json', 'device_memory_gib=8', 'folder={folder}/size']


@functools.cache
def _exported() -> Path:
    """A Transformers folder of the checkpoint."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    whole(folder)
    assert call_program(folder, 'export', [f'{folder}/a.pt', f'{folder}/model']) == WORKS
    return folder / 'model'


def a_model(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Its folder with something changed, and data."""

    def write(folder: Path) -> None:
        turns = [{'from': 'human', 'value': 'A?'}, {'from': 'gpt', 'value': 'B.'}]
        (folder / 'data.json').write_text(json.dumps([{'id': 'a', 'conversations': turns}] * 8))
        shutil.copytree(_exported(), folder / 'model')
        change(folder / 'model')

    return write


def weights_cut(folder: Path) -> None:
    path = folder / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:-1000])


def weights_pickled(folder: Path) -> None:
    (folder / 'model.safetensors').unlink()
    (folder / 'pytorch_model.bin').write_bytes(pickle.dumps(Running(folder.parent)))


def generation_config_cut(folder: Path) -> None:
    (folder / 'generation_config.json').write_text('{"eos_token_id": ')


def more_layers(folder: Path) -> None:
    config = json.loads((folder / 'config.json').read_text())
    config['text_config']['num_hidden_layers'] = 4
    (folder / 'config.json').write_text(json.dumps(config))


def code_of_its_own(folder: Path) -> None:
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(
        json.dumps({**config, 'model_type': 'mine', 'auto_map': {'AutoConfig': 'mine.Config'}})
    )


def template(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / 'chat_template.jinja').write_text(text)


PRETRAINED = [
    LLAVA,
    *QUIET,
    'dataset.path={folder}/data.json',
    'model={pretrained: "{folder}/model", config: null}',
    'dataset.processor=null',
    'trainer.save_folder=null',
    'trainer.autoresume=false',
    'trainer.max_duration=1ba',
    'scheduler.t_warmup=1ba',
]


def exporting(write: Callable[[Path], Any], line: str) -> tuple[Any, ...]:
    return 'export', EXPORT, write, line


def loading(write: Callable[[Path], Any], line: str, *overrides: str) -> tuple[Any, ...]:
    return 'train', [*LOAD, *overrides], write, line


def running(line: str, *overrides: str, write: Callable[[Path], Any] | None = None) -> tuple[Any, ...]:
    return 'train', [*RUN, *overrides], write, line


PROGRAMS: dict[str, tuple[Any, ...]] = {
    # name: (program, arguments, perhaps what writes files, what the line names)
    'export of a checkpoint': exporting(whole, WORKS),
    'export of half a checkpoint': exporting(cut, 'a.pt'),
    'export of a text': exporting(of_bytes(b'no checkpoint'), 'a.pt'),
    'export of a folder': exporting(a_folder, 'a.pt'),
    'export of a pipe': exporting(a_pipe, 'a.pt'),
    'export of a pickle that runs code': exporting(pickled_code, 'a.pt'),
    'export of a checkpoint that runs code': exporting(code_in_a_checkpoint, 'must be complete and written'),
    'export of NaN weights': exporting(changed(with_nan), 'must be finite numbers'),
    'export of complex weights': exporting(
        changed(lambda state: state.update(model={key: one.cfloat() for key, one in state['model'].items()})),
        'must be finite numbers',
    ),
    'export of weights alone': exporting(saved({'lm_head.weight': torch.zeros(2)}), "(KeyError: 'state')"),
    'export of a whole module': exporting(saved(torch.nn.Linear(2, 2)), 'Weights only load failed)'),
    'export of a compiled model': exporting(a_compiled_model, 'a.pt'),
    'export of a link to itself': exporting(lambda folder: (folder / 'a.pt').symlink_to('a.pt'), 'which is not there'),
    'export of a folder whose index is damaged': exporting(a_damaged_index, 'a.pt'),
    'export of a file outside of the target': exporting(changed(with_a_file_outside), 'evil.txt'),
    **{
        f'export of a checkpoint whose {key} is {given!r}': exporting(
            changed(lambda state, key=key, given=given: state.update({key: given})), 'HuggingFaceModel'
        )
        for key, given in (
            ('integrations', None),
            ('integrations', 'x'),
            ('integrations', {'huggingface': {}}),
            ('model', [1]),
            ('model', {3: 'x'}),
            ('model', {'lm_head.weight': torch.zeros(2, device='meta')}),
        )
    },
    'export to a store of objects': ('export', ['{folder}/a.pt', 's3://bucket/x'], whole, 'must be written out'),
    'export without the model': exporting(changed(without('model')), 'a.pt'),
    'a column of weights that some samples lack': (
        'train',
        [LLAVA, 'dataset.path={folder}/data.json', 'algorithms.token_accumulation.token_weights=column'],
        half_weighted,
        'sample "b"',
    ),
    'resume from a checkpoint': loading(whole, WORKS),
    'resume from half a checkpoint': loading(cut, 'a.pt'),
    'resume from a folder': loading(a_folder, 'a.pt'),
    'resume from weights alone': loading(saved({'lm_head.weight': torch.zeros(2)}), 'written by Composer'),
    'resume from a Hugging Face folder': loading(lambda folder: LlamaConfig().save_pretrained(folder / 'a.pt'), 'a.pt'),
    'resume from a folder whose index is damaged': loading(a_damaged_index, 'damaged'),
    'resume from a pickle that runs code': loading(pickled_code, 'a.pt'),
    'resume from a checkpoint that runs code': loading(code_in_a_checkpoint, 'hold only tensors and plain values'),
    'resume without the state of the optimizer': loading(changed(without('optimizers')), 'optimizer'),
    'resume without the model': loading(changed(without('model')), 'a.pt'),
    **{
        f'resume from a checkpoint whose {key} is a word': loading(
            changed(lambda state, key=key: state.update({key: 'x'})), 'written by Composer'
        )
        for key in ('model', 'optimizers', 'timestamp')
    },
    'resume without the time': loading(changed(without('timestamp')), 'timestamp'),
    'resume from NaN weights': loading(changed(with_nan), 'must be a number, got: nan (sample'),
    **{
        f'resume with fingerprints {given!r}': loading(
            changed(lambda state, given=given: dict(state['callbacks'])['SameData'].update(fingerprints=given)),
            '`fingerprints`',
        )
        for given in (3, 'no JSON', '[1]')
    },
    'resume from a pickle of another ending': running(
        'a.ckpt',
        'trainer.load_path={folder}/a.ckpt',
        write=lambda folder: (folder / 'a.ckpt').write_bytes(pickle.dumps(Running(folder))),
    ),
    'resume from a compressed pickle': running(
        'compressed',
        'trainer.load_path={folder}/a.pt.gz',
        write=lambda folder: (folder / 'a.pt.gz').write_bytes(gzip.compress(pickle.dumps(Running(folder)))),
    ),
    'saving compressed checkpoints': running(
        'must end in .pt', 'trainer.save_folder={folder}', 'trainer.save_filename=a.pt.gz'
    ),
    'resume with the state of another optimizer': loading(
        changed(lambda state: state.update(optimizers={'SGD': state['optimizers']['AdamW']})), "['SGD']"
    ),
    'resume with the state of an optimizer that is empty': loading(
        changed(lambda state: state.update(optimizers={'AdamW': {}})), '`trainer`: '
    ),
    'resume with another learning rate': loading(whole, 'lr 0.001 there, 0.1 here', 'optimizer.lr=0.1'),
    'resume with callbacks that are a word': loading(
        changed(lambda state: state.update(callbacks='x')), 'written by Composer'
    ),
    'export of a type of model that is not known': exporting(
        changed(lambda state: metadata(state)['model']['config']['content'].update(model_type='x')),
        'for a HuggingFaceModel',
    ),
    **{
        f'a checkpoint of Transformers with {kind}': ('train', PRETRAINED, a_model(change), expected)
        for kind, change, expected in [
            ('nothing wrong', lambda folder: None, WORKS),
            ('cut weights', weights_cut, '`model.pretrained`'),
            ('pickled weights', weights_pickled, '`model.pretrained`'),
            ('a config that is a list', lambda folder: (folder / 'config.json').write_text('[]'), '`model.pretrained`'),
            ('more layers than weights', more_layers, '18 missing'),
            ('code of its own', code_of_its_own, 'custom code'),
            ('a damaged generation config', generation_config_cut, '`model.pretrained`'),
            ('a template that is none', template('{% for %}'), '`chat_template` must write such messages'),
            ('a template that refuses', template("{{ raise_exception('no') }}"), '`chat_template`'),
            ('a template without end', template('{% for i in range(10**9) %}x{% endfor %}'), '`chat_template`'),
            ('a template of one word', template('hello'), '`chat_template`'),
        ]
    },
    'a processor of a checkpoint with a key that is misspelt': (
        'train',
        [*PRETRAINED, 'dataset.processor={do_resise: false}'],
        a_model(lambda folder: None),
        'Did you mean do_resize?',
    ),
    'look at less than nothing': ('look', [DIGITS, 'samples=-1'], '`samples`'),
    'no samples to evaluate': running('`num_samples`', 'dataset.eval.num_samples=0'),
    'a second run into the folder of the first': running(
        'ep0-ba1-rank0.pt may', 'trainer.save_folder={folder}', write=lambda folder: whole(folder, 'ep0-ba1-rank0.pt')
    ),
    'a pipe as the YAML file': ('train', ['{folder}/a.pt'], a_pipe, 'a.pt'),
    'a picture as the YAML file': ('train', ['{folder}/a.pt'], a_picture, 'YAML'),
    'a folder as the YAML file': ('train', ['{folder}/a.pt'], a_folder, 'a.pt'),
    'a dataset of the user that does not know a word': ('look', [DIGITS, 'dataset.split=tset'], None, '`split`'),
    'an algorithm for another model': running('`trainer`: ', 'algorithms.gated_linear_units={}'),
    'a callback that fails in a hook of the model': running(
        'shows where', 'callbacks.activation_monitor={interval: 1ba}'
    ),
    'an algorithm whose labels are elsewhere': running('shows where', 'algorithms.label_smoothing={smoothing: 0.1}'),
    'an optimizer for GPUs': running('capturable', 'optimizer.capturable=true'),
    'a checkpoint of a name that is not there': running(
        "KeyError: 'nope'", 'trainer.save_folder={folder}', 'trainer.save_filename="{nope}.pt"'
    ),
    'pictures of three colours for a model of one': running('channels', 'model.config.vision_config.num_channels=1'),
    'placeholders of another token': running('shows where', 'model.config.image_token_index=5'),
    'a callback that is none': running(
        '`callbacks.mine.C` must be a class', 'callbacks={mine.C: {}}', write=mine('class C: pass')
    ),
    'samples in lists': running(
        'got: list',
        'dataset.name=mine.Lists',
        write=mine(f'{OWN_DATA}class Lists(DigitsDataset):\n    def __getitem__(self, index): return [1, 2]'),
    ),
    'samples of one dimension': running(
        '`input_ids` must be',
        'dataset.name=mine.Flat',
        write=mine(
            f'{OWN_DATA}class Flat(DigitsDataset):\n    def __getitem__(self, index):\n'
            '        return {key: value[0] for key, value in super().__getitem__(index).items()}'
        ),
    ),
    'a result that is a folder': running(
        'result.json', write=lambda folder: (folder / 'report' / 'result.json').mkdir(parents=True)
    ),
    'a run name longer than any file may have': running(
        '`trainer.save_folder`', 'trainer.save_folder={folder}/{run_name}', f'trainer.run_name={"x" * 300}'
    ),
    'checkpoints in a folder below a file': running(
        '`trainer.save_folder`', 'trainer.save_folder={folder}/a.pt/x', write=of_bytes(b'')
    ),
    'a layer of the vision encoder that is not there': running(
        '`model.config.vision_feature_layer`', 'model.config.vision_feature_layer=-99'
    ),
    'groups that do not divide heads': running('shows where', 'model.config.text_config.num_key_value_heads=3'),
    'a level of logging of another name': running('`trainer.python_log_level`', 'trainer.python_log_level=loud'),
    'precision of another name': running('Precision', 'trainer.precision=fp8ish'),
    'a folder that a shell would find': running('`trainer.save_folder`', 'trainer.save_folder=~/x'),
    'an activation that is not there': running("KeyError: 'swishy'", 'model.config.text_config.hidden_act=swishy'),
    'a metrics file that is a pipe': running(
        'metrics.jsonl',
        write=lambda folder: (folder / 'report').mkdir() or os.mkfifo(folder / 'report' / 'metrics.jsonl'),
    ),
    'a size file that is a pipe': (
        'size',
        [*SIZE, 'lengths.mean=50'],
        lambda folder: (folder / 'size').mkdir() or os.mkfifo(folder / 'size' / 'size.json'),
        'size.json',
    ),
    'a value of 200 kB': running('`split`', f'dataset.split={"x" * 200_000}'),
    'a warm-up in another unit than the run': running('arm', 'trainer.max_duration=30sp', 'trainer.eval_interval=30sp'),
    'a mode of compilation that is not there': running('fast', 'trainer.compile_config={mode: fast}'),
    'to go on without a name': running('`trainer`: ', 'trainer.autoresume=true'),
    'prefetching without workers': running('`loader`: ', 'loader.prefetch_factor=2'),
    'a device that nobody has': running('`trainer.device`', 'trainer.device=abacus'),
    'half precision on a CPU': running('AMP_FP16', 'trainer.precision=amp_fp16'),
    'microbatches by trial on a CPU': running('`trainer`: ', 'microbatching.device_train_microbatch_size=auto'),
    'verify of one row': ('verify', [*RUN, '--rows', '1'], None, '--rows'),
    'verify of rows below 0': ('verify', [*RUN, '--rows', '-3'], '--rows'),
    'verify with a tolerance that is no number': ('verify', [*RUN, '--tolerance', 'nan'], '--tolerance'),
    'size into a store of objects': ('size', [*SIZE[:-1], 'lengths.mean=50', 'folder=s3://x/y'], '`folder`'),
    'size of no lengths': ('size', [*SIZE, 'lengths='], '`lengths'),
    'size of lengths of at most 0': ('size', [*SIZE, 'lengths.mean=100', 'lengths.longest=0'], 'longest'),
    'size of lengths from a pipe': ('size', [*SIZE, 'lengths={folder}/a.pt'], a_pipe, 'a.pt'),
    'size of more image tokens than tokens': (
        'size',
        [*SIZE, 'lengths={folder}/a.csv'],
        a_table('tokens,image_tokens\n5,6\n'),
        'image_tokens',
    ),
    'size of more loss tokens than tokens': (
        'size',
        [*SIZE, 'lengths={folder}/a.csv'],
        a_table('tokens,loss_tokens\n5,6\n'),
        'loss_tokens',
    ),
    'size into a folder that cannot be made': (
        'size',
        [DIGITS, 'dataset.num_samples=16', 'device_memory_gib=8', 'folder={folder}/a.pt/size'],
        of_bytes(b''),
        'a.pt/size',
    ),
}
ENVIRONMENTS = {
    # name: (variable, value, what the line names)
    'half a rank': ('LOCAL_RANK', '0.5', 'LOCAL_RANK'),
    'no ranks': ('WORLD_SIZE', '0', 'WORLD_SIZE'),
    'a rank outside of the world': ('RANK', '5', '`RANK`'),
}
