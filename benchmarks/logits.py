# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Speed of trainers on data with few labels, and the shares of layers and logits in the time of a microbatch.

    .venv-rivals/bin/python -m benchmarks.logits [--ranks 1 2] [--rounds 5]
    python -m benchmarks.logits --report     # only the picture and the tables of docs/logits.md, from the results

Two text models have the ratio of vocabulary to hidden size of SmolVLM-256M (85) and Qwen2.5-VL-3B (74). They are small
enough for two cores, and have a sixth of the layers. Image tokens are tokens without a label. The lengths are a quarter
of the lengths in the real tables (folder COMPOSER_TOKACC_LENGTHS), and answers have 4 to 48 tokens. The contenders come
from `benchmarks.rivals` and take turns in each round. A microbatch is also timed with all layers of the real models.

Writes results/logits.json. The picture takes the memory from results/logits_memory.json.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM

from benchmarks.logits_memory import IMAGE_TOKENS, ROW_TOKENS, model_config
from benchmarks.logits_memory import RESULT as MEMORY_FILE
from benchmarks.machine import machine
from benchmarks.record import RESULTS, ROOT, fill_page, parser_of, ranks_text, table, write_rows
from benchmarks.rivals.__main__ import keep, launch
from benchmarks.rivals.data import SHAPES, Sizes, new_model
from benchmarks.rivals.report import TITLES, by_rival, worst_error
from composer_tokacc.labelled import LabelSelector

PAGE = ROOT / 'docs' / 'logits.md'
PICTURE = ROOT / 'docs' / 'figures' / 'logits.svg'
RESULTS_FILE = RESULTS / 'logits.json'
CONTENDERS = ('composer', 'hf', 'hf_rebalance', 'odb', 'trl', 'ours_all_logits', 'ours_sampler')
# Layers of the models that are trained, and of the real models.
LAYERS = {'smolvlm': (5, 30), 'qwen': (6, 36)}
ANSWER = (4, 48)
MICROBATCH = (4, 290)
"""Rows and width of the microbatch that is timed by parts."""
PARTS = ('speed', 'microbatches')
Row = dict[str, Any]
# Sizes of the parts of a bar by name.
Parts = dict[str, float]


def sizes_of(model: str) -> Row:
    """Returns the sizes of the run of a model."""
    least, longest = ANSWER
    return {
        'model': model,
        'layers': LAYERS[model][0],
        'mean': MICROBATCH[1],
        'samples': 48,
        'global_batch': 16,
        'microbatch': MICROBATCH[0],
        'least_answer': least,
        'longest_answer': longest,
        'extremes_first': True,
    }


def time_microbatch(model: LlamaForCausalLM, rounds: int) -> dict[str, float]:
    """Returns the seconds of forward and backward of a microbatch: for the layers only, and with head and loss.

    Args:
        model: A model on the CPU.
        rounds: How often each forward is timed, after a first time that does not count. The forwards take turns.
    """
    rows, width = MICROBATCH
    answer = sum(ANSWER) // 2
    ids = torch.randint(3, model.config.vocab_size, (rows, width))
    labels = ids.clone()
    labels[:, :-answer] = -100
    selector = LabelSelector(model)

    def layers() -> torch.Tensor:
        return model.model(input_ids=ids).last_hidden_state.sum()

    def all_logits() -> torch.Tensor:
        return model(input_ids=ids, labels=labels).loss

    def logits_at_labels() -> torch.Tensor:
        selector.arm('causal', rows * answer)
        return model(input_ids=ids, labels=labels).loss

    forwards = {'layers_seconds': layers, 'all_seconds': all_logits, 'labels_seconds': logits_at_labels}
    seconds: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(rounds + 1):
        for name, forward in forwards.items():
            model.zero_grad()
            start = time.perf_counter()
            forward().backward()
            seconds[name].append(time.perf_counter() - start)
    selector.remove()
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def microbatch_rows(rounds: int) -> list[Row]:
    """Times a microbatch of each model at both depths."""
    rows = []
    for name, depths in LAYERS.items():
        for num_layers in depths:
            model = new_model(Sizes(model=name, layers=num_layers))
            seconds = time_microbatch(model, rounds)
            rows.append({'model': name, 'layers': num_layers, **seconds, 'machine': machine()})
    return rows


def smolvlm_config() -> transformers.SmolVLMConfig:
    """Returns the config of SmolVLM-256M-Instruct."""
    text = {
        'model_type': 'llama',
        'vocab_size': 49_280,
        'hidden_size': 576,
        'intermediate_size': 1536,
        'num_hidden_layers': 30,
        'num_attention_heads': 9,
        'num_key_value_heads': 3,
    }
    vision = {
        'hidden_size': 768,
        'intermediate_size': 3072,
        'num_hidden_layers': 12,
        'num_attention_heads': 12,
        'image_size': 512,
        'patch_size': 16,
    }
    return transformers.SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=4)


def work_rows() -> list[Row]:
    """Returns the share of the head in the multiplications of the real models, for rows like those of AI2D.

    Each weight of a matrix is multiplied once for each position, or for each patch of an image. Attention scores are
    not counted. `of_text` is the share in the text model, `of_all` in the whole model.
    """
    cases = {
        # Config, image tokens of a row, and patches that become one image token.
        'smolvlm': (smolvlm_config(), 640, 16),
        'qwen': (model_config(), IMAGE_TOKENS, 4),
    }
    rows = []
    for name, (config, image_tokens, patches_per_token) in cases.items():
        with torch.device('meta'):
            model = transformers.AutoModelForImageTextToText.from_config(config)
        text_weights = 0
        vision_weights = 0
        for key, parameter in model.named_parameters():
            if 'vision' in key or 'visual' in key:
                vision_weights += parameter.numel()
            elif '.layers.' in key:
                text_weights += parameter.numel()
        head = model.get_output_embeddings().weight.numel() * ROW_TOKENS
        text = text_weights * ROW_TOKENS
        vision = vision_weights * image_tokens * patches_per_token
        of_text = head / (head + text)
        of_all = head / (head + text + vision)
        rows.append({'model': name, 'of_text': of_text, 'of_all': of_all})
    return rows


def ratio(cells: dict[str, Row], rival: str, figure: str) -> float:
    """Returns how many times as fast as a rival ours is with logits at labels: the median over the rounds."""
    pairs = zip(cells['ours_sampler']['rounds'], cells[rival]['rounds'], strict=False)
    return statistics.median(our[figure] / their[figure] for our, their in pairs)


def speed_table(results: Row) -> str:
    """Returns the table of real tokens a second.

    In parentheses: how many times as fast as this rival ours is, by time and by processor time.
    """
    cases: dict[str, list[Row]] = {}
    for cell in results['cells']:
        if 'rounds' not in cell:
            continue
        title = f'{SHAPES[cell["model"]].title}, {ranks_text(cell["ranks"])}'
        cases.setdefault(title, []).append(cell)
    columns = {title: by_rival(cells) for title, cells in cases.items()}
    rows = []
    for name in CONTENDERS:
        texts = []
        for cells in columns.values():
            if name not in cells:
                texts.append('')
                continue
            _, median, _ = cells[name]['tokens_per_second']
            text = f'{median:,.0f}'
            if name != 'ours_sampler':
                by_time = ratio(cells, name, 'tokens_per_second')
                by_processor_time = ratio(cells, name, 'tokens_per_processor_second')
                text += f' ({by_time:.2f}; {by_processor_time:.2f})'
            texts.append(text)
        error = worst_error([cells[name] for cells in columns.values() if name in cells])
        rows.append([TITLES[name], error, *texts])
    return table(['', 'first gradient', *columns], rows)


def share_table(results: Row) -> str:
    """Returns the table of the shares of head and loss: in the time of a microbatch, and in the work of real models."""
    work = {row['model']: row for row in results['work']}
    rows = []
    for row in results['microbatches']:
        name = row['model']
        of_text = ''
        of_all = ''
        if row['layers'] == LAYERS[name][1]:  # the depth of the real model
            of_text = f'{work[name]["of_text"]:.0%}'
            of_all = f'{work[name]["of_all"]:.0%}'
        rows.append(
            [
                f'{SHAPES[name].title}, {row["layers"]} layers',
                f'{1 - row["layers_seconds"] / row["all_seconds"]:.0%}',
                f'{row["all_seconds"] / row["labels_seconds"]:.2f}',
                of_text,
                of_all,
            ]
        )
    columns = ('', 'head and loss', 'times as fast at labels', 'work of the real text model', 'with vision encoder')
    return table(columns, rows)


def parts_of(results: Row) -> dict[str, str]:
    """Returns the tables of the page by name."""
    return {'logits_speed': speed_table(results), 'logits_shares': share_table(results)}


def draw(results: Row, memory: Row, path: Path) -> None:
    """Draws the parts of the measured time of a microbatch, and of its computed memory."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'
    figure = Figure(figsize=(9, 3.4), layout='constrained')
    time_axes, memory_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    time_bars: dict[str, Parts] = {}
    for row in results['microbatches']:
        layers = row['layers_seconds'] / row['all_seconds']
        for logits in ('all', 'labels'):
            head = max(row[f'{logits}_seconds'] - row['layers_seconds'], 0) / row['all_seconds']
            label = f'{SHAPES[row["model"]].title}\n{row["layers"]} layers, {logits}'
            time_bars[label] = {'layers': layers, 'head and loss': head}
    stack(time_axes, time_bars, {'layers': '#b8c4d6', 'head and loss': '#c8553d'})
    time_axes.set_title('Time of a microbatch (measured; all logits: 1)', loc='left', fontsize=9)
    colors = {
        'text activations': '#b8c4d6',
        'vision activations': '#3b6fb6',
        'inputs': '#555555',
        'logits': '#c8553d',
    }
    memory_bars = {logits: memory[logits]['gib_by_part'] for logits in ('all', 'labels')}
    stack(memory_axes, memory_bars, colors)
    memory_axes.set_title('Qwen2.5-VL-3B, 8,192 positions:\nGiB beyond the model (computed)', loc='left', fontsize=9)
    figure.savefig(path, metadata={'Date': None})


def stack(axes: Any, bars: dict[str, Parts], colors: dict[str, str]) -> None:
    """Draws horizontal bars of stacked parts by label, the first bar on top."""
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for name, color in colors.items():
            label = name if place == 0 else None
            axes.barh(place, parts[name], left=left, color=color, label=label)
            left += parts[name]
    axes.set_yticks(range(len(bars)), list(bars), fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc='upper center', bbox_to_anchor=(0.5, -0.08), ncols=len(colors))


def measure_speed(path: Path, ranks: int, model: str, rounds: int) -> None:
    """Measures all contenders with a model, and writes their cells into the results file."""
    plan = {'sizes': sizes_of(model), 'set': 'tables', 'rivals': CONTENDERS, 'rounds': rounds}
    keep(path, launch(ranks, plan, limit=3600))


def measure_microbatches(path: Path, rounds: int) -> None:
    """Times the microbatches and computes the work, and writes both into the results file."""
    torch.set_num_threads(1)
    results = json.loads(path.read_text())
    results['microbatches'] = microbatch_rows(rounds)
    results['work'] = work_rows()
    write_rows(path, results)


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__, results=RESULTS_FILE)
    parser.add_argument('--report', action='store_true', help='only draw the picture and write the tables')
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=PARTS, help='what to measure')
    parser.add_argument('--models', nargs='+', choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--rounds', type=int, default=5)
    arguments = parser.parse_args()
    path = arguments.results
    parts = () if arguments.report else arguments.parts
    if 'speed' in parts:
        for ranks, model in product(arguments.ranks, arguments.models):
            measure_speed(path, ranks, model, arguments.rounds)
    if 'microbatches' in parts:
        measure_microbatches(path, arguments.rounds)
    results = json.loads(path.read_text())
    print(speed_table(results))
    print(share_table(results))
    if path == RESULTS_FILE:
        draw(results, json.loads(MEMORY_FILE.read_text()), PICTURE)
        fill_page(PAGE, parts_of(results))


if __name__ == '__main__':
    main()
