# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""The program on the digits run, and training at the size it suggests."""

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
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, SiglipVisionConfig

from composer_tokacc import size, train
from composer_tokacc.data import LengthTable, build_small_processor
from composer_tokacc.programs import load_config, rehearsal
from composer_tokacc.programs.length_tables import StandIns, lengths_of, read_lengths
from composer_tokacc.programs.models import build_model
from composer_tokacc.sizing.profile import SampleSizes
from examples.digits import build_digits_processor

YAML = str(Path(__file__).parents[1] / 'yamls' / 'digits.yaml')
YAML_OF_FILES = Path(YAML).with_name('llava_json.yaml')
CAUSAL = 'algorithms.token_accumulation.loss_tokens=causal'
SMALL = ['dataset.num_samples=256', 'loader.global_batch_size=32']


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


def run_size(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    assert size.main([YAML, *SMALL, f'folder={tmp_path}/size', *arguments]) == 0
    assert (tmp_path / 'size' / 'size.png').exists()
    return json.loads((tmp_path / 'size' / 'size.json').read_text())


def test_digits_are_sized_and_a_smaller_device_gets_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roomy = run_size(tmp_path, 'num_ranks=2', 'device_memory_gib=8')
    printed = capsys.readouterr().out
    assert roomy['device_train_microbatch_size'] == 16
    assert roomy['yaml'].splitlines()[1] in printed
    assert 'size.json' in printed
    assert roomy['speedup']['split'] > 1
    # The second run finds length table and calibration in the cache.
    assert len(list((tmp_path / 'cache' / 'composer_tokacc' / 'memory').iterdir())) == 1
    held = sum(roomy['terms'].values())
    activations = held - roomy['terms']['parameters'] * 5  # gradients, two moments, DDP's buckets
    tight = run_size(tmp_path, 'num_ranks=2', f'device_memory_gib={(held - activations / 2) / 0.92}')
    assert len(list((tmp_path / 'cache' / 'composer_tokacc' / 'memory').iterdir())) == 1
    assert 1 <= tight['device_train_microbatch_size'] < 16
    assert tight['binds'] == 'text'


@pytest.mark.slow
def test_of_an_adapter_only_what_is_trained_has_gradients_and_states(tmp_path: Path) -> None:
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
    config = load_config(YAML).model.config
    model = build_model(config=config, processor=build_digits_processor(), lora=lora, dtype='bfloat16')
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - numbers
    assert all(parameter.dtype == torch.float32 for parameter in trained)
    held = {name: round(gib * 2**30) for name, gib in sized['terms'].items()}
    assert held['parameters'] == 4 * numbers + 2 * frozen
    assert held['gradients'] == held['DDP buckets'] == 4 * numbers
    # Two moments, and four bytes to count the steps of each tensor.
    assert held['optimizer states'] == 8 * numbers + 4 * len(trained)


@pytest.mark.slow
def test_a_table_of_lengths_stands_for_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processor, config = build_digits_processor(), load_config(YAML).model.config
    build_model(config=config, processor=processor).model.save_pretrained(tmp_path / 'base')
    processor.save_pretrained(tmp_path / 'base')
    path = tmp_path / 'lengths.csv.gz'
    with gzip.open(path, 'wt', encoding='utf-8-sig') as file:  # as spreadsheets write it
        file.write('tokens,image_tokens\n' + ''.join(f'{6 + row % 40},{row % 5}\n' for row in range(256)))
    arguments = [str(YAML_OF_FILES), f'lengths={path}', f'model.pretrained={tmp_path / "base"}', 'model.config=null']
    arguments += ['dataset.processor=null', 'loader.global_batch_size=32', 'device_memory_gib=4', f'folder={tmp_path}']
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
def test_a_stated_distribution_and_a_config_need_neither_data_nor_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe of LLaVA-1.5 7B with smaller layers, on eight GPUs."""
    small = ['hidden_size=64', 'intermediate_size=96', 'num_hidden_layers=2', 'num_attention_heads=2']
    arguments = [LLAVA_7B, *FRESH_LLAVA, f'folder={tmp_path}', 'num_ranks=8', 'device_memory_gib=6']
    arguments += [f'model.config.{part}_config.{size}' for part in ('text', 'vision') for size in small]
    arguments += ['model.config.text_config.num_key_value_heads=2', 'model.config.vision_config.image_size=336']
    arguments += ['model.config.vision_config.patch_size=14', 'lengths.mean=150', 'lengths.image_tokens=576']
    assert size.main([*arguments, 'lengths.with_images=0.9']) == 0
    figures = json.loads((tmp_path / 'size.json').read_text())
    assert figures['slot_tokens'] == 2048
    assert figures['terms']['vision activations'] > 0
    assert figures['profile']['mean'] == pytest.approx(150 + 0.9 * 576, rel=0.02)
    assert figures['profile']['text_only_share'] == pytest.approx(0.1, abs=0.01)
    screen = capsys.readouterr().out
    table = screen[: screen.index('Paste into')]
    assert max(len(line) for line in table.splitlines() if not line.startswith('note: ')) <= 80
    assert len(figures['sizes']) > 2
    for row in figures['sizes']:
        assert f'{row["cost"]["planned"] / figures["figures"]["stock"]["cost"]:.2f}' in table


def test_lengths_are_as_the_figures_say() -> None:
    table = lengths_of({'mean': 200, 'variation': 0.5, 'samples': 50_000}, longest=None, seed=0)
    assert table.lengths.mean() == pytest.approx(200, rel=0.01)
    assert table.lengths.std() == pytest.approx(100, rel=0.03)
    assert not table.image_tokens.any()
    short = lengths_of({'mean': 200, 'image_tokens': 64, 'with_images': 0.5}, longest=300, seed=0)
    assert short.lengths.max() == 300
    assert (short.lengths > short.image_tokens).all()
    assert set(short.image_tokens.tolist()) == {0, 64}


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['lengths.mean=-3'], '`lengths.mean` must be greater than or equal to 1, got: -3'),
        (['lengths.mean=nan'], "`lengths.mean` must be a valid number, got: 'nan'"),
        (['lengths.variation=1'], '`lengths.mean` must be given'),
        (
            ['lengths.mean=200', 'lengths.image_tokens=4000'],
            '`lengths.image_tokens` must be below the longest sample, got: 4000',
        ),
        (
            ['lengths.mean=200', 'lengths.with_images=90'],
            '`lengths.with_images` must be less than or equal to 1, got: 90',
        ),
        (['lengths.mean=200', 'lengths.longst=9'], 'longst. Did you mean longest?'),
        (['lengths.mean=many'], '`lengths.mean`'),
        (['lengths=150'], '`lengths` must be a CSV file, plain or .gz, got: 150'),
    ],
)
def test_figures_that_no_data_has_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert size.main([LLAVA_7B, *FRESH_LLAVA, 'device_memory_gib=80', *arguments]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ('encoder', 'strategy', 'tokens'),
    [(CLIPVisionConfig, 'default', 576), (CLIPVisionConfig, 'full', 577), (SiglipVisionConfig, 'full', 576)],
)
def test_samples_of_several_images_are_sized_by_one_of_the_config(encoder, strategy, tokens) -> None:
    vision = encoder(image_size=336, patch_size=14)
    config = LlavaConfig(vision_config=vision, vision_feature_select_strategy=strategy)
    counts = np.array([2 * tokens, 0])
    table = LengthTable(lengths=counts + 9, image_tokens=counts, loss_tokens=counts * 0, vision_patches=counts)
    image, text = (StandIns(table, None, config)[index] for index in range(2))
    assert (image['input_ids'] == config.image_token_index).sum() == image['input_ids'].numel() == tokens
    assert image['pixel_values'].shape == (1, 3, 336, 336)
    assert 'pixel_values' not in text


def test_images_of_any_size_need_a_processor(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ['model.pretrained=null', 'model.config.model_type=qwen2_vl', 'lengths.mean=150']
    assert size.main([LLAVA_7B, *arguments, 'lengths.image_tokens=300', 'device_memory_gib=80']) == 2
    assert 'needs `model.pretrained`, got: a' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (None, 'must be a CSV file, plain or .gz, got: '),
        ('tokens,image_tiles\n5,1\n', 'must have the columns tokens, image_tokens, loss_tokens,'),
        ('image_tokens\n5\n', 'got: image_tokens in '),
        ('', 'must have the columns tokens'),
        ('tokens\n', 'must hold at least one sample, got: none'),
        ('tokens,image_tokens\n5,1\n6\n', 'the number of columns changed from 2 to 1 at row 2'),
        ('tokens\n5\nabc\n', "could not convert string 'abc' to float64 at row 1, column 1"),
        ('tokens\n-5\n', 'got: -5 tokens in row 1 of '),
        ('tokens\n0\n', 'must be at least 1, got: 0'),
    ],
)
def test_a_damaged_table_is_refused_by_line(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / 'lengths.csv'
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as refused:
        SampleSizes.from_lengths(read_lengths(str(path)))
    assert message in str(refused.value)


@pytest.mark.slow
def test_the_lora_recipe_fits_a_gpu_of_24_gib(tmp_path: Path) -> None:
    pytest.importorskip('peft')
    processor = build_small_processor(['a picture'], vocab_size=300, image_size=336, patch_size=14)
    processor.save_pretrained(tmp_path)
    # LLaVA-1.5 7B: the other defaults are those of Llama 7B and of CLIP's large encoder.
    text_config = LlamaConfig(vocab_size=32064)
    LlavaConfig(text_config=text_config, image_token_index=processor.image_token_id).save_pretrained(tmp_path)
    lengths = tmp_path / 'lengths.csv'
    lengths.write_text('tokens,image_tokens\n' + '2048,576\n700,576\n90,0\n' * 100)
    recipe = str(YAML_OF_FILES.with_name('llava15_7b_lora.yaml'))
    arguments = [recipe, f'lengths={lengths}', f'model.pretrained={tmp_path}', f'folder={tmp_path}']
    assert size.main([*arguments, 'device_memory_gib=24']) == 0
    figures = json.loads((tmp_path / 'size.json').read_text())
    chosen = load_config(recipe, ['dataset.path=x']).microbatching.device_train_microbatch_size
    assert figures['device_train_microbatch_size'] >= chosen
    peaks = {one['size']: one['peak_gib'] for one in figures['sizes']}
    assert peaks[chosen] == pytest.approx(17.8, abs=0.1), 'what its comment and docs/lora.md say'
    assert figures['terms']['parameters'] == pytest.approx(13.4, abs=0.1)
    assert figures['peak_gib'] < 0.92 * 24


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['num_ranks=0'], '`num_ranks` must be greater than or equal to 1, got: 0'),
        (['num_ranks=two'], "`num_ranks` must be a valid integer, got: 'two'"),
        (['num_ranks=3'], 'must be divisible by the number of ranks, got: 32 on 3 ranks'),
        (['device_memory_gib=-1'], '`microbatching.device_memory_gib` must be greater than 0, got: -1'),
        (['device_memory_gib=0.01'], 'What would help: sharding with FSDP'),
        (['nonsense=1'], 'nonsense'),
    ],
)
def test_mistakes_are_said_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert size.main([YAML, *SMALL, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith('error: ')
    assert message in error


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
def test_logits_count_where_the_run_computes_them(tmp_path: Path, options: list[str], logits: str) -> None:
    sized = run_size(tmp_path, 'num_ranks=2', 'device_memory_gib=8', *options)
    assert sized['logits'] == logits
    assert (sized['most_logits'] < 0.8 * sized['max_tokens']) == (logits == 'labels')


class MostLogits(Callback):
    """Counts the positions at which a run computes logits, for `callbacks` of a config."""

    num_logits: ClassVar[list[int]] = []

    def before_backward(self, state: State, logger: Logger) -> None:
        self.num_logits.append(state.outputs['logits'].shape[:2].numel())


@pytest.mark.slow
def test_a_run_computes_no_more_logits_than_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[int | None] = []
    choose_heaviest = rehearsal.heaviest_of_run

    def noted(*arguments: Any) -> tuple[list[rehearsal.Candidate], int]:
        candidates, num_batches = choose_heaviest(*arguments)
        rehearsed.extend(candidate.logits for candidate in candidates)
        return candidates, num_batches

    monkeypatch.setattr(rehearsal, 'heaviest_of_run', noted)
    sized = run_size(tmp_path, 'device_memory_gib=8')
    MostLogits.num_logits.clear()
    arguments = [
        'trainer.max_duration=1ep',
        'report.num_samples=0',
        'report.picture=false',
        'trainer.eval_interval=1ep',
    ]
    arguments += [f'report.folder={tmp_path}/run', 'dataset.eval.num_samples=16', 'trainer.progress_bar=false']
    arguments += ['microbatching.device_train_microbatch_size=suggest']
    arguments += ['microbatching.rehearse=heaviest', 'callbacks={tests.test_size.MostLogits: {}}']
    assert train.main([YAML, *SMALL, *arguments, 'microbatching.device_memory_gib=0.01']) == 2
    assert train.main([YAML, *SMALL, *arguments, 'microbatching.device_memory_gib=8']) == 0
    most_logits = max(MostLogits.num_logits)
    assert most_logits <= sized['most_logits'] < 0.8 * sized['max_tokens']
    # The rehearsal has run the microbatch with most logits.
    assert most_logits in rehearsed


@pytest.mark.slow
def test_timed_steps_give_seconds(tmp_path: Path) -> None:
    timed = run_size(tmp_path, 'time_steps=true', 'num_ranks=1', 'device_memory_gib=8')
    assert min(timed['step_seconds']['stock'], timed['step_seconds']['split']) > 0
    # The tower was timed by itself, and its cost stands in the lines to paste.
    cost = timed['measured_cost']
    assert cost['vision_per_square'] + cost['vision_per_patch'] + cost['vision_per_image'] > 0
    assert cost['vision_per_token'] == 0
    assert '\n  cost:\n' in timed['yaml']
