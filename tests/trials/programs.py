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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from transformers import LlamaConfig

from composer_tokacc import export, look, size, train, verify
from tests.support.conversations import turns, write_json
from tests.support.programs import DIGITS, LLAVA, QUIET, TINY_DIGITS
from tests.trials.outcomes import WORKS, run_program

MAINS = {
    'look': look.main,
    'train': train.main,
    'size': size.main,
    'verify': verify.main,
    'export': export.main,
}
RUN = [DIGITS, *TINY_DIGITS, 'trainer.max_duration=1ba', 'trainer.eval_interval=1ba', 'dataset.num_samples=8']

Write = Callable[[Path], Any]
"""Writes files into the folder of a trial."""


@dataclass(frozen=True)
class Call:
    """A command line. ``{folder}`` in its arguments is the trial's folder, into which `write` writes files."""

    program: str
    arguments: list[str]
    expected: str
    write: Write | None = None

    def run(self, folder: Path) -> str:
        if self.write is not None:
            self.write(folder)
        arguments = [argument.replace('{folder}', str(folder)) for argument in self.arguments]
        if self.program == 'train':
            arguments.append(f'report.folder={folder}/report')
        line = run_program(MAINS[self.program], arguments)
        assert not (folder / 'code ran').exists(), f'code ran, then: {line}'
        if self.program == 'export' and line != WORKS:
            assert not (folder / 'inside' / 'exported').exists()
            assert not list(folder.rglob('evil.txt'))
        return line


@dataclass(frozen=True)
class CallWithVariable:
    """A call of ``look`` with a variable of the environment."""

    name: str
    value: str
    expected: str

    def run(self, folder: Path) -> str:
        call = Call('look', [DIGITS], self.expected)
        with patch.dict(os.environ, {self.name: self.value}):
            return call.run(folder)


def _folder_of_session() -> Path:
    """Returns a new folder that is removed when Python ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _checkpoint() -> Path:
    """Returns a checkpoint of one step, which is trained once a session."""
    folder = _folder_of_session()
    call = Call('train', [*RUN, 'trainer.save_folder={folder}'], WORKS)
    assert call.run(folder) == WORKS
    return folder / 'latest-rank0.pt'


def intact(folder: Path, name: str = 'a.pt') -> None:
    shutil.copy(_checkpoint(), folder / name)


def cut(folder: Path) -> None:
    content = _checkpoint().read_bytes()
    (folder / 'a.pt').write_bytes(content[:-5000])


def changed(change: Callable[[dict[str, Any]], Any]) -> Write:
    """Writes a checkpoint with another state."""

    def write(folder: Path) -> None:
        checkpoint = torch.load(_checkpoint(), weights_only=False)
        change(checkpoint['state'])
        torch.save(checkpoint, folder / 'a.pt')

    return write


def with_entry(key: str, value: Any) -> Write:
    """Writes a checkpoint with another entry of the state."""
    return changed(lambda state: state.update({key: value}))


def without(key: str) -> Write:
    return changed(lambda state: state.pop(key))


def with_fingerprints(value: Any) -> Write:
    """Writes a checkpoint with other fingerprints of the data."""

    def change(state: dict[str, Any]) -> None:
        callbacks = dict(state['callbacks'])
        callbacks['SameData']['fingerprints'] = value

    return changed(change)


def with_nan(state: dict[str, Any]) -> None:
    weight, *_ = state['model'].values()
    weight.fill_(float('nan'))


def with_complex_weights(state: dict[str, Any]) -> None:
    for name, weight in state['model'].items():
        state['model'][name] = weight.cfloat()


def with_another_optimizer(state: dict[str, Any]) -> None:
    adam = state['optimizers']['AdamW']
    state['optimizers'] = {'SGD': adam}


def metadata(state: dict[str, Any]) -> dict[str, Any]:
    return state['integrations']['huggingface']


def with_an_unknown_model_type(state: dict[str, Any]) -> None:
    metadata(state)['model']['config']['content']['model_type'] = 'x'


def with_a_file_outside(state: dict[str, Any]) -> None:
    entries = metadata(state)
    files = entries.get('processor') or entries['tokenizer']
    some_file = next(iter(files.values()))
    files['../../evil.txt'] = some_file.copy()


class MakesFolder:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        new_folder = str(self.folder / 'code ran')
        return (os.mkdir, (new_folder,))


def pickled_code(folder: Path, name: str = 'a.pt') -> None:
    content = pickle.dumps(MakesFolder(folder))
    (folder / name).write_bytes(content)


def compressed_code(folder: Path) -> None:
    content = pickle.dumps(MakesFolder(folder))
    (folder / 'a.pt.gz').write_bytes(gzip.compress(content))


def code_in_a_checkpoint(folder: Path, name: str = 'a.pt') -> None:
    state = {'model': {}, 'callbacks': MakesFolder(folder)}
    torch.save({'state': state}, folder / name)


def result_folder(folder: Path) -> None:
    path = folder / 'report' / 'result.json'
    path.mkdir(parents=True)


def metrics_pipe(folder: Path) -> None:
    report = folder / 'report'
    report.mkdir()
    os.mkfifo(report / 'metrics.jsonl')


def size_pipe(folder: Path) -> None:
    size_folder = folder / 'size'
    size_folder.mkdir()
    os.mkfifo(size_folder / 'size.json')


def of_bytes(content: bytes) -> Write:
    return lambda folder: (folder / 'a.pt').write_bytes(content)


def a_picture(folder: Path) -> None:
    black_square = Image.new('RGB', (8, 8))
    black_square.save(folder / 'a.pt', format='PNG')


def a_folder(folder: Path) -> None:
    (folder / 'a.pt').mkdir()


def a_link_to_itself(folder: Path) -> None:
    (folder / 'a.pt').symlink_to('a.pt')


def a_hugging_face_folder(folder: Path) -> None:
    LlamaConfig().save_pretrained(folder / 'a.pt')


def saved(value: Any) -> Write:
    return lambda folder: torch.save(value, folder / 'a.pt')


def a_compiled_model(folder: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    compiled = torch.jit.trace(layer, torch.ones(1, 2))
    compiled.save(str(folder / 'a.pt'))


def a_damaged_index(folder: Path) -> None:
    a_folder(folder)
    (folder / 'a.pt' / '.metadata').write_bytes(b'no pickle')


def a_pipe(folder: Path) -> None:
    os.mkfifo(folder / 'a.pt')


def a_table(text: str) -> Write:
    return lambda folder: (folder / 'a.csv').write_text(text)


TURNS = turns('A?', 'B.')


def one_sample_without_weight(folder: Path) -> None:
    with_weight = {'id': 'a', 'loss_weights': 1, 'conversations': TURNS}
    without_weight = {'id': 'b', 'conversations': TURNS}
    write_json(folder, [with_weight, without_weight])


def module_of_user(code: str) -> Write:
    """Runs code in a module ``mine``."""

    def write(folder: Path) -> None:
        module = sys.modules.setdefault('mine', ModuleType('mine'))
        exec(code, vars(module))

    return write


SAMPLES_IN_LISTS = """
from examples.digits import DigitsDataset

class Lists(DigitsDataset):
    def __getitem__(self, index):
        return [1, 2]
"""
SAMPLES_OF_ONE_DIMENSION = """
from examples.digits import DigitsDataset

class Flat(DigitsDataset):
    def __getitem__(self, index):
        return {key: value[0] for key, value in super().__getitem__(index).items()}
"""
LOAD = [*RUN, 'trainer.load_path={folder}/a.pt', 'trainer.max_duration=2ba']
EXPORT = ['{folder}/a.pt', '{folder}/inside/exported']
SIZE = [LLAVA, 'dataset.path=x.json', 'device_memory_gib=8', 'folder={folder}/size']


@functools.cache
def _exported() -> Path:
    """Returns the checkpoint as a Transformers folder."""
    folder = _folder_of_session()
    call = Call('export', [str(_checkpoint()), '{folder}/model'], WORKS)
    assert call.run(folder) == WORKS
    return folder / 'model'


def a_model(change: Callable[[Path], Any]) -> Write:
    """Writes data, and that folder with something changed."""
    record = {'id': 'a', 'conversations': TURNS}

    def write(folder: Path) -> None:
        write_json(folder, [record] * 8)
        model = folder / 'model'
        shutil.copytree(_exported(), model)
        change(model)

    return write


def unchanged(folder: Path) -> None:
    pass


def weights_cut(folder: Path) -> None:
    path = folder / 'model.safetensors'
    content = path.read_bytes()
    path.write_bytes(content[:-1000])


def weights_pickled(folder: Path) -> None:
    (folder / 'model.safetensors').unlink()
    content = pickle.dumps(MakesFolder(folder.parent))
    (folder / 'pytorch_model.bin').write_bytes(content)


def generation_config_cut(folder: Path) -> None:
    (folder / 'generation_config.json').write_text('{"eos_token_id": ')


def config_of_a_list(folder: Path) -> None:
    (folder / 'config.json').write_text('[]')


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / 'config.json'
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def more_layers(folder: Path) -> None:
    change_config(folder, lambda config: config['text_config'].update(num_hidden_layers=4))


def code_of_its_own(folder: Path) -> None:
    auto_map = {'AutoConfig': 'mine.Config'}
    change_config(folder, lambda config: config.update(model_type='mine', auto_map=auto_map))


def template(text: str) -> Write:
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


def exporting(write: Write, expected: str) -> Call:
    return Call('export', EXPORT, expected, write)


def loading(write: Write, expected: str, *overrides: str) -> Call:
    """Resumes from a checkpoint."""
    return Call('train', [*LOAD, *overrides], expected, write)


def running(expected: str, *overrides: str, write: Write | None = None) -> Call:
    """Trains a step of the digits."""
    return Call('train', [*RUN, *overrides], expected, write)


def of_pretrained(change: Callable[[Path], Any], expected: str, *overrides: str) -> Call:
    """Trains a step of a Transformers folder with something changed."""
    return Call('train', [*PRETRAINED, *overrides], expected, a_model(change))


EXPORTS: dict[str, Call] = {
    'export of a checkpoint': exporting(intact, WORKS),
    'export of half a checkpoint': exporting(cut, 'a.pt'),
    'export of a text': exporting(of_bytes(b'no checkpoint'), 'a.pt'),
    'export of a folder': exporting(a_folder, 'a.pt'),
    'export of a pipe': exporting(a_pipe, 'a.pt'),
    'export of a pickle that runs code': exporting(pickled_code, 'a.pt'),
    'export of a checkpoint that runs code': exporting(code_in_a_checkpoint, 'must be complete and written'),
    'export of NaN weights': exporting(changed(with_nan), 'must be finite numbers'),
    'export of complex weights': exporting(changed(with_complex_weights), 'must be finite numbers'),
    'export of weights alone': exporting(saved({'lm_head.weight': torch.zeros(2)}), "(KeyError: 'state')"),
    'export of a whole module': exporting(saved(torch.nn.Linear(2, 2)), 'Weights only load failed)'),
    'export of a TorchScript model': exporting(a_compiled_model, 'a.pt'),
    'export of a link to itself': exporting(a_link_to_itself, 'which is not there'),
    'export of a folder whose index is damaged': exporting(a_damaged_index, 'a.pt'),
    'export of a file outside the target': exporting(changed(with_a_file_outside), 'evil.txt'),
    'export of a checkpoint whose integrations are null': exporting(
        with_entry('integrations', None), 'HuggingFaceModel'
    ),
    'export of a checkpoint whose integrations have no model': exporting(
        with_entry('integrations', {'huggingface': {}}), 'HuggingFaceModel'
    ),
    'export of a checkpoint whose model is a list': exporting(with_entry('model', [1]), 'HuggingFaceModel'),
    'export of a checkpoint whose model is on no device': exporting(
        with_entry('model', {'lm_head.weight': torch.zeros(2, device='meta')}), 'HuggingFaceModel'
    ),
    'export to an object store': Call(
        'export', ['{folder}/a.pt', 's3://bucket/x'], 'must be a folder on this machine', write=intact
    ),
    'export without the model': exporting(without('model'), 'a.pt'),
    'export of an unknown model type': exporting(changed(with_an_unknown_model_type), 'for a HuggingFaceModel'),
}

CHECKPOINTS: dict[str, Call] = {
    'resume from a checkpoint': loading(intact, WORKS),
    'resume from half a checkpoint': loading(cut, 'a.pt'),
    'resume from a folder': loading(a_folder, 'a.pt'),
    'resume from weights alone': loading(saved({'lm_head.weight': torch.zeros(2)}), 'written by Composer'),
    'resume from a Hugging Face folder': loading(a_hugging_face_folder, 'a.pt'),
    'resume from a folder whose index is damaged': loading(a_damaged_index, 'damaged'),
    'resume from a pickle that runs code': loading(pickled_code, 'a.pt'),
    'resume from a checkpoint that runs code': loading(code_in_a_checkpoint, 'hold only tensors and plain values'),
    'resume from a checkpoint that runs code, by a pattern': running(
        'hold only tensors and plain values',
        'trainer.load_path={folder}/rank{rank}.pt',
        write=functools.partial(code_in_a_checkpoint, name='rank0.pt'),
    ),
    'resume without the state of the optimizer': loading(without('optimizers'), 'optimizer'),
    'resume without the model': loading(without('model'), 'a.pt'),
    'resume from a checkpoint whose model is a word': loading(with_entry('model', 'x'), 'written by Composer'),
    'resume from a checkpoint whose timestamp is a word': loading(with_entry('timestamp', 'x'), 'written by Composer'),
    'resume without the time': loading(without('timestamp'), 'timestamp'),
    'resume from NaN weights': loading(changed(with_nan), 'must be a number, got: nan (sample'),
    'resume with fingerprints that are no JSON': loading(with_fingerprints('no JSON'), 'JSONDecodeError'),
    'resume with fingerprints in a list': loading(with_fingerprints('[1]'), '`trainer` cannot be used: TypeError'),
    'resume from a pickle that ends in .ckpt': running(
        'a.ckpt', 'trainer.load_path={folder}/a.ckpt', write=functools.partial(pickled_code, name='a.ckpt')
    ),
    'resume from a compressed pickle': running(
        'compressed', 'trainer.load_path={folder}/a.pt.gz', write=compressed_code
    ),
    'saving compressed checkpoints': running(
        'must end in .pt', 'trainer.save_folder={folder}', 'trainer.save_filename=a.pt.gz'
    ),
    'resume with the state of another optimizer': loading(changed(with_another_optimizer), "['SGD']"),
    'resume with the state of an optimizer that is empty': loading(
        with_entry('optimizers', {'AdamW': {}}), '`trainer` cannot be used: '
    ),
    'resume with another learning rate': loading(intact, 'lr 0.001 there, 0.1 here', 'optimizer.lr=0.1'),
}

PRETRAINED_MODELS: dict[str, Call] = {
    'a checkpoint of Transformers': of_pretrained(unchanged, WORKS),
    'a checkpoint of Transformers with cut weights': of_pretrained(weights_cut, '`model.pretrained`'),
    'a checkpoint of Transformers with pickled weights': of_pretrained(weights_pickled, '`model.pretrained`'),
    'a checkpoint of Transformers whose config is a list': of_pretrained(config_of_a_list, '`model.pretrained`'),
    'a checkpoint of Transformers with more layers than weights': of_pretrained(more_layers, '18 missing'),
    'a checkpoint of Transformers with code of its own': of_pretrained(code_of_its_own, 'custom code'),
    'a checkpoint of Transformers whose generation config is cut': of_pretrained(
        generation_config_cut, '`model.pretrained`'
    ),
    'a template with an error': of_pretrained(template('{% for %}'), '`chat_template` must write such messages'),
    'a template that refuses': of_pretrained(template("{{ raise_exception('no') }}"), '`chat_template`'),
    'a template without end': of_pretrained(template('{% for i in range(10**9) %}x{% endfor %}'), '`chat_template`'),
    'a template of one word': of_pretrained(template('hello'), '`chat_template`'),
    'a processor of a checkpoint with a key that is misspelt': of_pretrained(
        unchanged, 'Did you mean do_resize?', 'dataset.processor={do_resise: false}'
    ),
}

RUNS: dict[str, Call] = {
    'a column of weights that one sample lacks': Call(
        'train',
        [LLAVA, 'dataset.path={folder}/data.json', 'algorithms.token_accumulation.token_weights=column'],
        'sample "b"',
        write=one_sample_without_weight,
    ),
    'no samples to evaluate': running('`num_samples`', 'dataset.eval.num_samples=0'),
    'a second run into the folder of the first': running(
        'ep0-ba1-rank0.pt may', 'trainer.save_folder={folder}', write=functools.partial(intact, name='ep0-ba1-rank0.pt')
    ),
    'a pipe as the YAML file': Call('train', ['{folder}/a.pt'], 'a.pt', write=a_pipe),
    'a picture as the YAML file': Call('train', ['{folder}/a.pt'], 'must be a YAML file', write=a_picture),
    'a YAML file below a file': Call('train', ['{folder}/a.pt/run.yaml'], 'must be a YAML file', write=of_bytes(b'')),
    'a folder as the YAML file': Call('train', ['{folder}/a.pt'], 'a.pt', write=a_folder),
    'fewer samples than a batch': running(
        'got: 8 > 7 samples. Lower it or set drop_last=False', 'dataset.num_samples=7'
    ),
    'fewer samples than a batch, in their own order': running(
        'every rank a batch', 'loader.regroup_ranks=false', 'dataset.num_samples=7'
    ),
    'an algorithm for another model': running('`trainer` cannot be used: ', 'algorithms.gated_linear_units={}'),
    'a callback whose hook fails': running('shows where', 'callbacks.activation_monitor={interval: 1ba}'),
    'an algorithm that finds no labels': running('shows where', 'algorithms.label_smoothing={smoothing: 0.1}'),
    'an optimizer for GPUs': running('capturable', 'optimizer.capturable=true'),
    'an unknown placeholder in the name of a checkpoint': running(
        "KeyError: 'nope'", 'trainer.save_folder={folder}', 'trainer.save_filename="{nope}.pt"'
    ),
    'images of three channels for a model of one': running('channels', 'model.config.vision_config.num_channels=1'),
    'another image token than the processor has': running('shows where', 'model.config.image_token_index=5'),
    'a class that is no callback': running(
        '`callbacks.mine.C` must be a class', 'callbacks={mine.C: {}}', write=module_of_user('class C: pass')
    ),
    'samples in lists': running('got: a list', 'dataset.name=mine.Lists', write=module_of_user(SAMPLES_IN_LISTS)),
    'samples of one dimension': running(
        '`input_ids` must be', 'dataset.name=mine.Flat', write=module_of_user(SAMPLES_OF_ONE_DIMENSION)
    ),
    'a result that is a folder': running(
        '`report.folder`',
        write=result_folder,
    ),
    'a run name longer than any file may have': running(
        '`trainer.save_folder`', 'trainer.save_folder={folder}/{run_name}', f'trainer.run_name={"x" * 300}'
    ),
    'checkpoints in a folder below a file': running(
        '`trainer.save_folder`', 'trainer.save_folder={folder}/a.pt/x', write=of_bytes(b'')
    ),
    'a missing layer of the vision encoder': running(
        '`model.config.vision_feature_layer`', 'model.config.vision_feature_layer=-99'
    ),
    'no layer of the vision encoder': running('shows where', 'model.config.vision_feature_layer=[]'),
    'hidden size of 0': running('`model` cannot be used', 'model.config.text_config.hidden_size=0'),
    'a negative number of layers': running('shows where', 'model.config.text_config.num_hidden_layers=-1'),
    'a dropout of 2.0': running('shows where', 'model.config.text_config.attention_dropout=2.0'),
    'a model without trained parts': running(
        '`optimizer` cannot be used: ValueError',
        'model.freeze=[language_model,vision_tower,multi_modal_projector,lm_head]',
    ),
    'groups that do not divide heads': running('shows where', 'model.config.text_config.num_key_value_heads=3'),
    'an unknown level of logging': running('`trainer.python_log_level`', 'trainer.python_log_level=loud'),
    'an unknown precision': running('Precision', 'trainer.precision=fp8ish'),
    'a folder with a tilde': running('`trainer.save_folder`', 'trainer.save_folder=~/x'),
    'an unknown activation': running("KeyError: 'swishy'", 'model.config.text_config.hidden_act=swishy'),
    'a metrics file that is a pipe': running('metrics.jsonl', write=metrics_pipe),
    'a value of 200 kB': running('`split`', f'dataset.split={"x" * 200_000}'),
    'a warm-up in another unit than the run': running('arm', 'trainer.max_duration=30sp', 'trainer.eval_interval=30sp'),
    'an unknown mode of compilation': running('fast', 'trainer.compile_config={mode: fast}'),
    'autoresume without a run name': running('`trainer` cannot be used: ', 'trainer.autoresume=true'),
    'prefetching without workers': running('`loader` cannot be used: ', 'loader.prefetch_factor=2'),
    'an unknown device': running('`trainer.device`', 'trainer.device=abacus'),
    'half precision on a CPU': running('AMP_FP16', 'trainer.precision=amp_fp16'),
    'microbatches by trial on a CPU': running(
        '`trainer` cannot be used: ', 'microbatching.device_train_microbatch_size=auto'
    ),
}

OTHER_PROGRAMS: dict[str, Call] = {
    'look at a negative number of samples': Call('look', [DIGITS, 'samples=-1'], '`samples`'),
    'an unknown split of a dataset': Call('look', [DIGITS, 'dataset.split=tset'], '`split`'),
    'a size file that is a pipe': Call('size', [*SIZE, 'lengths.mean=50'], 'size.json', write=size_pipe),
    'verify of one row': Call('verify', [*RUN, '--rows', '1'], '--rows'),
    'verify of a negative number of rows': Call('verify', [*RUN, '--rows', '-3'], '--rows'),
    'verify with a tolerance of NaN': Call('verify', [*RUN, '--tolerance', 'nan'], '--tolerance'),
    'size into an object store': Call('size', [*SIZE[:-1], 'lengths.mean=50', 'folder=s3://x/y'], '`folder`'),
    'size of no lengths': Call('size', [*SIZE, 'lengths='], '`lengths'),
    'size of lengths of at most 0': Call('size', [*SIZE, 'lengths.mean=100', 'lengths.longest=0'], 'longest'),
    'size of lengths from a pipe': Call('size', [*SIZE, 'lengths={folder}/a.pt'], 'a.pt', write=a_pipe),
    'size of more image tokens than tokens': Call(
        'size', [*SIZE, 'lengths={folder}/a.csv'], 'image_tokens', write=a_table('tokens,image_tokens\n5,6\n')
    ),
    'size of more loss tokens than tokens': Call(
        'size', [*SIZE, 'lengths={folder}/a.csv'], 'loss_tokens', write=a_table('tokens,loss_tokens\n5,6\n')
    ),
    'size into a folder that cannot be made': Call(
        'size',
        [DIGITS, 'dataset.num_samples=16', 'device_memory_gib=8', 'folder={folder}/a.pt/size'],
        'a.pt/size',
        write=of_bytes(b''),
    ),
}

PROGRAMS = {**EXPORTS, **CHECKPOINTS, **PRETRAINED_MODELS, **RUNS, **OTHER_PROGRAMS}
ENVIRONMENTS = {
    'a local rank of 0.5': CallWithVariable('LOCAL_RANK', '0.5', 'LOCAL_RANK'),
    'a world size of 0': CallWithVariable('WORLD_SIZE', '0', 'WORLD_SIZE'),
    'a rank above the world size': CallWithVariable('RANK', '5', 'RANK'),
}
