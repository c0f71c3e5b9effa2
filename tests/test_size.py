# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The program `size`: its figures for several runs, and training at the size that it suggests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

from composer_tokacc import size, train
from composer_tokacc.data import LengthTable, build_small_processor
from composer_tokacc.programs import ConfigError, load_config, rehearsal
from composer_tokacc.programs.length_tables import MadeUpSamples, lengths_of, read_lengths
from composer_tokacc.programs.models import build_model
from examples.digits import build_digits_processor

YAML = str(Path(__file__).parents[1] / 'yamls' / 'digits.yaml')
YAML_OF_FILES = Path(YAML).with_name('llava_json.yaml')
CAUSAL = 'algorithms.token_accumulation.loss_tokens=causal'
# A trace takes time for each layer.
SMALL = [
    'dataset.num_samples=128',
    'loader.global_batch_size=32',
    'model.config.text_config.num_hidden_layers=1',
    'model.config.vision_config.num_hidden_layers=1',
]
TOO_LITTLE_MEMORY = 'device_memory_gib=0.003'


@pytest.fixture(autouse=True, scope='module')
def cache_folder(tmp_path_factory):
    """The user's cache. All tests share it, so that equal runs are traced once."""
    folder = tmp_path_factory.mktemp('cache')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('XDG_CACHE_HOME', str(folder))
        yield folder / 'composer_tokacc'


def run_size(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Sizes the digits run, and returns its figures."""
    assert size.main([YAML, *SMALL, f'folder={tmp_path}/size', *arguments]) == 0
    assert (tmp_path / 'size' / 'size.png').exists()
    return json.loads((tmp_path / 'size' / 'size.json').read_text())


@pytest.mark.slow
def test_smaller_device_gets_smaller_microbatches(cache_folder, tmp_path, capsys):
    large_device = run_size(tmp_path, 'num_ranks=2', 'device_memory_gib=8')
    printed = capsys.readouterr().out
    assert large_device['device_train_microbatch_size'] == 16
    assert large_device['yaml'].splitlines()[1] in printed
    assert 'size.json' in printed
    assert large_device['speedup']['split'] > 1
    calibrations = set((cache_folder / 'memory').iterdir())
    assert calibrations

    needed_gib = sum(large_device['terms'].values())
    # Parameters, gradients, two moments, and the buckets of DDP have equal sizes.
    state_gib = 5 * large_device['terms']['parameters']
    activations_gib = needed_gib - state_gib
    small_gib = (needed_gib - activations_gib / 2) / 0.92
    small_device = run_size(tmp_path, 'num_ranks=2', f'device_memory_gib={small_gib}')
    assert 1 <= small_device['device_train_microbatch_size'] < 16
    assert small_device['binds'] == 'text'
    # The second run has found the calibration of the first.
    assert set((cache_folder / 'memory').iterdir()) == calibrations


@pytest.mark.slow
def test_states_of_an_adapter(tmp_path):
    """Only trained parameters have gradients and states of the optimizer."""
    pytest.importorskip('peft')
    lora = {'r': 4, 'modules_to_save': ['multi_modal_projector']}
    sized = run_size(
        tmp_path,
        'device_memory_gib=8',
        'num_ranks=2',
        f'model.lora={lora}',
        'model.dtype=bfloat16',
        'trainer.precision=amp_bf16',
        'trainer.device=gpu',
    )
    config = load_config(YAML, SMALL).model.config
    model = build_model(config=config, processor=build_digits_processor(), lora=lora, dtype='bfloat16')
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    num_frozen = sum(parameter.numel() for parameter in model.parameters()) - num_trained
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    bytes_of = {name: round(gib * 2**30) for name, gib in sized['terms'].items()}
    assert bytes_of['parameters'] == 4 * num_trained + 2 * num_frozen
    assert bytes_of['gradients'] == 4 * num_trained
    assert bytes_of['DDP buckets'] == 4 * num_trained
    # Two moments, and four bytes to count the steps of each tensor.
    assert bytes_of['optimizer states'] == 8 * num_trained + 4 * len(trained)


@pytest.mark.slow
def test_lengths_from_a_table(tmp_path, capsys):
    processor = build_digits_processor()
    model = build_model(config=load_config(YAML).model.config, processor=processor)
    model.model.save_pretrained(tmp_path / 'base')
    processor.save_pretrained(tmp_path / 'base')
    table = tmp_path / 'lengths.csv.gz'
    with gzip.open(table, 'wt', encoding='utf-8-sig') as file:  # as spreadsheets write it
        file.write('tokens,image_tokens\n')
        for row in range(256):
            file.write(f'{6 + row % 40},{row % 5}\n')
    arguments = [
        str(YAML_OF_FILES),
        f'lengths={table}',
        f'model.pretrained={tmp_path / "base"}',
        'model.config=null',
        'dataset.processor=null',
        'loader.global_batch_size=32',
        'device_memory_gib=4',
        f'folder={tmp_path}',
    ]
    assert size.main(arguments) == 0
    figures = json.loads((tmp_path / 'size.json').read_text())
    assert figures['slot_tokens'] == 45
    assert figures['terms']['vision activations'] > 0
    assert '256 samples' in capsys.readouterr().out
    assert size.main([*arguments, 'model.lora={target_modules: [nothing]}']) == 2
    error = capsys.readouterr().err
    assert '`model.lora`' in error
    assert 'nothing' in error


LLAVA_7B = str(YAML_OF_FILES.with_name('llava15_7b.yaml'))
FRESH_LLAVA = ['model.pretrained=null', 'model.config.model_type=llava']


@pytest.mark.slow
def test_sizes_without_data(tmp_path, capsys):
    """The recipe of LLaVA-1.5 7B with smaller layers, on eight GPUs, for lengths of which only a few figures are known.

    Neither data nor the hub is needed.
    """
    small_layers = {'hidden_size': 64, 'intermediate_size': 96, 'num_hidden_layers': 2, 'num_attention_heads': 2}
    arguments = [
        LLAVA_7B,
        *FRESH_LLAVA,
        f'folder={tmp_path}',
        'num_ranks=8',
        'device_memory_gib=6',
        'model.config.text_config.num_key_value_heads=2',
        'model.config.vision_config.image_size=336',
        'model.config.vision_config.patch_size=14',
        'lengths.mean=150',
        'lengths.image_tokens=576',
        'lengths.with_images=0.9',
    ]
    for name, value in small_layers.items():
        arguments += [f'model.config.text_config.{name}={value}', f'model.config.vision_config.{name}={value}']
    assert size.main(arguments) == 0
    figures = json.loads((tmp_path / 'size.json').read_text())
    assert figures['slot_tokens'] == 2048
    assert figures['terms']['vision activations'] > 0
    assert figures['profile']['mean'] == pytest.approx(150 + 0.9 * 576, rel=0.02)
    assert figures['profile']['text_only_share'] == pytest.approx(0.1, abs=0.01)
    table, _ = capsys.readouterr().out.split('Paste into')
    for line in table.splitlines():
        assert len(line) <= 80 or line.startswith('note: ')
    assert len(figures['sizes']) > 2
    stock_cost = figures['figures']['stock']['cost']
    for row in figures['sizes']:
        relative_cost = row['figures']['planned']['cost'] / stock_cost
        assert f'{relative_cost:.2f}' in table


@pytest.mark.slow
@pytest.mark.parametrize('name', ['digits.yaml', 'llava_mixture.yaml'])
def test_sizes_of_any_dataset_without_data(name, tmp_path):
    """The first has a dataset without a `path`. The second has several paths that are still to be given."""
    yaml = str(Path(YAML).with_name(name))
    assert size.main([yaml, 'lengths.mean=150', 'device_memory_gib=16', f'folder={tmp_path}']) == 0
    figures = json.loads((tmp_path / 'size.json').read_text())
    assert figures['profile']['mean'] == pytest.approx(150, rel=0.05)


def test_drawn_lengths_fit_the_figures():
    table = lengths_of({'mean': 200, 'variation': 0.5, 'samples': 50_000}, max_length=None, seed=0)
    assert table.lengths.mean() == pytest.approx(200, rel=0.01)
    assert table.lengths.std() == pytest.approx(100, rel=0.03)
    assert not table.image_tokens.any()
    short = lengths_of({'mean': 200, 'image_tokens': 64, 'with_images': 0.5}, max_length=300, seed=0)
    assert short.lengths.max() == 300
    assert (short.lengths > short.image_tokens).all()
    assert set(short.image_tokens.tolist()) == {0, 64}


DIGITS_RUN = [YAML, *SMALL]
WITHOUT_DATA = [LLAVA_7B, *FRESH_LLAVA, 'device_memory_gib=80']
OF_ANY_SIZE = [*WITHOUT_DATA, 'model.config.model_type=qwen2_vl']


@pytest.mark.parametrize(
    ('run', 'arguments', 'message'),
    [
        (DIGITS_RUN, 'num_ranks=0', '`num_ranks` must be greater than or equal to 1, got: 0'),
        (DIGITS_RUN, 'num_ranks=two', "`num_ranks` must be a valid integer, got: 'two'"),
        (DIGITS_RUN, 'safety=2', '`safety` must be less than or equal to 1, got: 2'),
        (DIGITS_RUN, 'num_ranks=3', 'must be divisible by the number of ranks, got: 32 on 3 ranks'),
        (DIGITS_RUN, 'device_memory_gib=-1', '`microbatching.device_memory_gib` must be greater than 0, got: -1'),
        (DIGITS_RUN, TOO_LITTLE_MEMORY, 'What would help: sharding with FSDP'),
        (DIGITS_RUN, 'nonsense=1', 'nonsense'),
        (WITHOUT_DATA, 'lengths.mean=-3', '`lengths.mean` must be greater than or equal to 1, got: -3'),
        (WITHOUT_DATA, 'lengths.mean=nan', "`lengths.mean` must be a valid number, got: 'nan'"),
        (WITHOUT_DATA, 'lengths.mean=many', '`lengths.mean`'),
        (WITHOUT_DATA, 'lengths.variation=1', '`lengths.mean` must be given'),
        (
            WITHOUT_DATA,
            'lengths.mean=200 lengths.image_tokens=4000',
            'must be below the longest sample, got: 4000',
        ),
        (
            WITHOUT_DATA,
            'lengths.mean=200 lengths.with_images=90',
            '`lengths.with_images` must be less than',
        ),
        (WITHOUT_DATA, 'lengths.mean=200 lengths.longst=9', 'longst. Did you mean longest?'),
        (WITHOUT_DATA, 'lengths=150', '`lengths` must be a CSV file, plain or .gz, got: 150'),
        (OF_ANY_SIZE, 'lengths.mean=150 lengths.image_tokens=300', 'from which no image can be made. Name a'),
    ],
)
def test_mistake_is_one_line(run, arguments, message, capsys):
    assert size.main([*run, *arguments.split()]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith('error: ')
    assert message in error


def test_missing_memory_is_noticed_before_the_data(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(size, 'source_of', None)
    assert size.main([*DIGITS_RUN, 'trainer.device=null']) == 2
    assert '`device_memory_gib` must be given' in capsys.readouterr().err


def test_timed_microbatches_are_not_packed(monkeypatch):
    """In a packed row attention stays inside of short documents. The timer would take it for one long row."""
    configs = []

    def build_parts(config):
        configs.append(config)
        raise InterruptedError

    monkeypatch.setattr(size, 'build_parts', build_parts)
    with pytest.raises(InterruptedError):
        size.time_steps(load_config(YAML, ['microbatching.packing=true']), size=4, slot_tokens=64, num_steps=3)
    assert configs[0].microbatching.packing is False


def test_stand_in_by_the_template_of_a_tokenizer():
    processor = build_small_processor(['a picture'], vocab_size=300)
    ones = np.ones(1, dtype=np.int32)
    table = LengthTable(lengths=9 * ones, image_tokens=ones, loss_tokens=ones, vision_patches=ones)
    by_processor = MadeUpSamples(table, processor, None)[0]
    processor.tokenizer.chat_template = processor.chat_template
    processor.chat_template = None
    by_tokenizer = MadeUpSamples(table, processor, None)[0]
    assert by_tokenizer['input_ids'].tolist() == by_processor['input_ids'].tolist()


@pytest.mark.parametrize(
    ('strategy', 'tokens'),
    [('default', 576), ('full', 577)],
)
def test_stand_in_has_one_image(strategy, tokens):
    """A sample of two images is represented by one image, of the size that the config says."""
    vision_config = CLIPVisionConfig(image_size=336, patch_size=14)
    config = LlavaConfig(vision_config=vision_config, vision_feature_select_strategy=strategy)
    image_tokens = np.array([2 * tokens, 0])
    table = LengthTable(
        lengths=image_tokens + 9,
        image_tokens=image_tokens,
        loss_tokens=np.zeros_like(image_tokens),
        vision_patches=image_tokens,
    )
    made_up_samples = MadeUpSamples(table, None, config)
    sample_of_images, sample_of_text = made_up_samples[0], made_up_samples[1]
    assert sample_of_images['input_ids'].tolist() == [[config.image_token_index] * tokens]
    assert sample_of_images['pixel_values'].shape == (1, 3, 336, 336)
    assert 'pixel_values' not in sample_of_text


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b'tokens\n5\n'))
    content[10] ^= 0xFF  # the first byte of the data
    path = tmp_path / 'lengths.csv.gz'
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r'must be a CSV file of numbers, plain or \.gz, got: .*while decompressing'):
        read_lengths(str(path))


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (None, 'must be a CSV file, plain or .gz, got: '),
        ('tokens,image_tiles\n5,1\n', 'must have the columns tokens, image_tokens, loss_tokens,'),
        ('image_tokens\n5\n', 'got: image_tokens in '),
        ('', 'must have the columns tokens'),
        ('tokens,tokens\n5,5\n', 'must have the columns tokens'),
        ('5\n6\n', 'must have the columns tokens'),
        ('tokens\n', 'must hold at least one sample, got: none'),
        ('tokens,image_tokens\n\n5,1\n6\n', '1 cells in line 4, and 2 columns'),
        ('tokens\n5\nabc\n', "line 3: could not convert string to float: 'abc'"),
        ('tokens,image_tokens\n6,2#3\n', "line 2: could not convert string to float: '2#3'"),
        ('tokens\n5\n# 6\n"#7"\n', "line 4: could not convert string to float: '#7'"),
        ('tokens,image_tokens\n5,\n', "line 2: could not convert string to float: ''"),
        ('tokens,image_tokens\n5,nan\n', 'got: nan image_tokens in row 1 of '),
        ('tokens\n1.5\n', 'than tokens, got: 1.5 tokens in row 1 of '),
        ('tokens\n-5\n', 'whole numbers up to 16777216, at least'),
        ('tokens,image_tokens\n5,9\n', 'than tokens, got: 9 image_tokens in row 1 of '),
        ('tokens\n5\n0\n', 'than tokens, got: 0 tokens in row 2 of '),
    ],
)
def test_damaged_table_is_refused(tmp_path, content, message):
    path = tmp_path / 'lengths.csv'
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as refused:
        read_lengths(str(path))
    assert message in str(refused.value)


def test_table_of_savetxt(tmp_path):
    """Its header begins with #."""
    path = tmp_path / 'lengths.csv'
    np.savetxt(path, [[5, 1], [7, 2]], fmt='%d', delimiter=',', header='tokens,image_tokens')
    table = read_lengths(str(path))
    assert table.lengths.tolist() == [5, 7]
    assert table.image_tokens.tolist() == [1, 2]


LORA_RECIPE = str(YAML_OF_FILES.with_name('llava15_7b_lora.yaml'))


def size_lora_recipe(folder, num_blocks):
    """Returns the figures of `size` for the LoRA recipe of LLaVA-1.5 7B, with some of Llama's 32 blocks."""
    processor = build_small_processor(['a picture'], vocab_size=300, image_size=336, patch_size=14)
    processor.save_pretrained(folder)
    # The other defaults are those of Llama 7B and of CLIP's large encoder.
    text_config = LlamaConfig(vocab_size=32064, num_hidden_layers=num_blocks)
    LlavaConfig(text_config=text_config, image_token_index=processor.image_token_id).save_pretrained(folder)
    lengths = folder / 'lengths.csv'
    lengths.write_text('tokens,image_tokens\n' + '2048,576\n700,576\n90,0\n' * 100)
    arguments = [LORA_RECIPE, f'lengths={lengths}', f'model.pretrained={folder}', f'folder={folder}']
    assert size.main([*arguments, 'device_memory_gib=24']) == 0
    return json.loads((folder / 'size.json').read_text())


def extrapolate(gib_of_1_and_3_blocks, num_blocks):
    """Returns the GiB of a model with more blocks, all of which take the same."""
    first, last = gib_of_1_and_3_blocks
    gib_of_block = (last - first) / 2
    return last + (num_blocks - 3) * gib_of_block


@pytest.mark.slow
def test_lora_recipe_fits_24_gib(tmp_path):
    """Each block adds the same bytes, so models of 1 and 3 blocks tell the memory of all 32. Their trace takes minutes.

    Both are written to one folder. The second must not get the calibration of the first.
    """
    pytest.importorskip('peft')
    recipe_size = load_config(LORA_RECIPE, ['dataset.path=x']).microbatching.device_train_microbatch_size
    peaks = []
    parameters = []
    for num_blocks in (1, 3):
        figures = size_lora_recipe(tmp_path, num_blocks)
        peak_of_size = {row['size']: row['peak_gib'] for row in figures['sizes']}
        peaks.append(peak_of_size[recipe_size])
        parameters.append(figures['terms']['parameters'])
    peak = extrapolate(peaks, num_blocks=32)
    assert peak == pytest.approx(17.8, abs=0.1), 'docs/lora.md and a comment in the recipe say so'
    assert extrapolate(parameters, num_blocks=32) == pytest.approx(13.4, abs=0.1)
    assert peak < 0.92 * 24


@pytest.mark.parametrize(
    ('options', 'logits'),
    [
        ([], 'labels'),
        (['algorithms.token_accumulation.logits=all'], 'all'),
        pytest.param(['algorithms.token_accumulation.check_loss=false', CAUSAL], 'all', marks=pytest.mark.slow),
        pytest.param(['algorithms.token_accumulation.loss_units={loss: tokens}'], 'all', marks=pytest.mark.slow),
        pytest.param(['model.train_metrics=true'], 'all', marks=pytest.mark.slow),
        pytest.param(['trainer.compile_config={}'], 'all', marks=pytest.mark.slow),
        pytest.param(['algorithms.token_accumulation.token_weights=sample'], 'labels', marks=pytest.mark.slow),
    ],
)
def test_positions_of_logits(tmp_path, options, logits):
    sized = run_size(tmp_path, 'num_ranks=2', 'device_memory_gib=8', *options)
    assert sized['logits'] == logits
    assert (sized['most_logits'] < 0.8 * sized['max_tokens']) == (logits == 'labels')


class LogitsCounter(Callback):
    """Counts the positions at which a run computes logits in each microbatch. A config names it."""

    num_logits: ClassVar[list[int]] = []

    def before_backward(self, state: State, logger: Logger):
        self.num_logits.append(state.outputs['logits'].shape[:2].numel())


@pytest.mark.slow
def test_run_computes_the_predicted_logits(tmp_path, monkeypatch):
    rehearsed_logits = []
    heaviest_of_run = rehearsal.heaviest_of_run

    def recorded(*arguments):
        candidates, num_batches = heaviest_of_run(*arguments)
        rehearsed_logits.extend(candidate.shape.logits for candidate in candidates)
        return candidates, num_batches

    monkeypatch.setattr(rehearsal, 'heaviest_of_run', recorded)
    sized = run_size(tmp_path, 'device_memory_gib=8')
    LogitsCounter.num_logits.clear()
    arguments = [
        'trainer.max_duration=1ep',
        'trainer.eval_interval=1ep',
        'trainer.progress_bar=false',
        'report.num_samples=0',
        'report.picture=false',
        f'report.folder={tmp_path}/run',
        'dataset.eval.num_samples=16',
        'microbatching.device_train_microbatch_size=suggest',
        'microbatching.rehearse=heaviest',
        'callbacks={tests.test_size.LogitsCounter: {}}',
    ]
    assert train.main([YAML, *SMALL, *arguments, f'microbatching.{TOO_LITTLE_MEMORY}']) == 2
    assert train.main([YAML, *SMALL, *arguments, 'microbatching.device_memory_gib=8']) == 0
    most_logits = max(LogitsCounter.num_logits)
    assert most_logits <= sized['most_logits'] < 0.8 * sized['max_tokens']
    # The rehearsal has run the microbatch with most logits.
    assert most_logits in rehearsed_logits


@pytest.mark.slow
def test_timed_steps_give_seconds(tmp_path):
    timed = run_size(tmp_path, 'time_steps=true', 'num_ranks=1', 'device_memory_gib=8')
    assert timed['step_seconds']['stock'] > 0
    assert timed['step_seconds']['split'] > 0
    # The vision encoder was timed by itself. The lines to paste hold its cost.
    cost = timed['measured_cost']
    assert cost['vision_per_square'] + cost['vision_per_patch'] + cost['vision_per_image'] > 0
    assert cost['vision_per_token'] == 0
    assert '\n  cost:\n' in timed['yaml']
