# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Measures trainers on data with few labels, and the shares of layers and logits in the time of a microbatch.

    .venv-rivals/bin/python -m benchmarks.logits [--ranks 1 2] [--rounds 5]
    python -m benchmarks.logits --report     # only the picture and the tables of docs/logits.md, from the results

Two text models have the ratio of vocabulary to hidden size of SmolVLM-256M (85) and Qwen2.5-VL-3B (74). They are small
enough for two cores, and have a sixth of the layers. Image tokens are tokens without a label. The lengths are a quarter
of the lengths in the real tables (folder COMPOSER_TOKACC_LENGTHS), and answers have 4 to 48 tokens. The contenders of
`benchmarks.rivals` take turns in each round. A microbatch is also timed with the number of layers of the real models.

Writes results/logits.json. The picture takes the memory from results/logits_memory.json.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaForCausalLM

from benchmarks.logits_memory import IMAGE_TOKENS, ROW_TOKENS
from benchmarks.logits_memory import RESULTS_FILE as MEMORY_FILE
from benchmarks.machine import machine
from benchmarks.models import qwen_config, smolvlm_config, text_batch
from benchmarks.record import DOCS, RESULTS, Row, fill_page, new_figure, parser_of, read, table, write_rows
from benchmarks.rivals.__main__ import keep, launch
from benchmarks.rivals.data import Sizes, new_model
from benchmarks.rivals.report import MODEL_TITLES, TITLES, by_rival, grouped, median_text, ratio_of_rounds, worst_error
from composer_tokacc.counting import LossRule
from composer_tokacc.labelled import LabelSelector

PAGE = DOCS / 'logits.md'
PICTURE = DOCS / 'figures' / 'logits.svg'
RESULTS_FILE = RESULTS / 'logits.json'
OURS = 'ours_sampler'
CONTENDERS = ('composer', 'hf', 'hf_rebalance', 'odb', 'trl', 'ours_all_logits', OURS)
# Layers of the models that are trained, and of the real models.
LAYERS = {'smolvlm': (5, 30), 'qwen': (6, 36)}
LEAST_ANSWER = 4
LONGEST_ANSWER = 48
MICROBATCH = 4
# Mean length of a sample. The microbatch that is timed by parts has rows of this length.
MEAN_LENGTH = 290
# Sizes of the parts of a bar by name.
Parts = dict[str, float]


def sizes_of(model: str) -> Row:
    """Returns the sizes of the run of a model."""
    layers, _ = LAYERS[model]
    return {
        'model': model,
        'layers': layers,
        'mean': MEAN_LENGTH,
        'samples': 48,
        'global_batch': 16,
        'microbatch': MICROBATCH,
        'least_answer': LEAST_ANSWER,
        'longest_answer': LONGEST_ANSWER,
    }


def time_microbatch(model: LlamaForCausalLM, rounds: int) -> dict[str, float]:
    """Returns the seconds of forward and backward of a microbatch: for the layers only, and with head and loss.

    The forwards take turns in each round. A first round does not count.
    """
    labels_per_row = (LEAST_ANSWER + LONGEST_ANSWER) // 2
    batch = text_batch(model.config.vocab_size, MICROBATCH, MEAN_LENGTH, labels_per_row)
    ids = batch['input_ids']
    labels = batch['labels']
    selector = LabelSelector(model)

    def layers() -> torch.Tensor:
        return model.model(input_ids=ids).last_hidden_state.sum()

    def all_logits() -> torch.Tensor:
        return model(input_ids=ids, labels=labels).loss

    def logits_at_labels() -> torch.Tensor:
        selector.arm(LossRule.CAUSAL, MICROBATCH * labels_per_row)  # for the next forward
        return model(input_ids=ids, labels=labels).loss

    forwards = {'layers_seconds': layers, 'all_seconds': all_logits, 'labels_seconds': logits_at_labels}
    seconds = defaultdict(list)
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


def work_rows() -> list[Row]:
    """Returns the share of the head in the multiplications of the real models, for rows like those of AI2D.

    Each weight of a matrix is multiplied once for each position, or for each patch of an image. Attention scores are
    not counted. `of_text` is the share in the text model, `of_all` in the whole model.
    """
    cases = {
        # Config, image tokens of a row, and patches that become one image token.
        'smolvlm': (smolvlm_config(), 640, 16),
        'qwen': (qwen_config(), IMAGE_TOKENS, 4),
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
        head_work = model.get_output_embeddings().weight.numel() * ROW_TOKENS
        text_work = text_weights * ROW_TOKENS
        vision_work = vision_weights * image_tokens * patches_per_token
        of_text = head_work / (head_work + text_work)
        of_all = head_work / (head_work + text_work + vision_work)
        rows.append({'model': name, 'of_text': of_text, 'of_all': of_all})
    return rows


def speed_table(results: Row) -> str:
    """Returns the table of real tokens a second."""
    cells = [cell for cell in results['cells'] if 'rounds' in cell]
    cases = {title: by_rival(group) for title, group in grouped(cells).items()}
    rows = []
    for name in CONTENDERS:
        texts = [speed_text(case, name) for case in cases.values()]
        measured = [case[name] for case in cases.values() if name in case]
        rows.append([TITLES[name], worst_error(measured), *texts])
    return table(['', 'first gradient', *cases], rows)


def speed_text(case: dict[str, Row], rival: str) -> str:
    """Returns a speed. In parentheses: how many times as fast ours is, by time and by processor time."""
    if rival not in case:
        return ''
    median = median_text(case[rival])
    if rival == OURS:
        return median
    by_time = ratio_of_rounds(case[OURS], case[rival])
    by_processor_time = ratio_of_rounds(case[OURS], case[rival], 'tokens_per_processor_second')
    return f'{median} ({by_time:.2f}; {by_processor_time:.2f})'


def share_table(results: Row) -> str:
    """Returns the table of the shares of head and loss: in the time of a microbatch, and in the work of real models."""
    work_by_model = {row['model']: row for row in results['work']}
    rows = []
    for row in results['microbatches']:
        _, real_layers = LAYERS[row['model']]
        of_text = ''
        of_all = ''
        if row['layers'] == real_layers:
            work = work_by_model[row['model']]
            of_text = f'{work["of_text"]:.0%}'
            of_all = f'{work["of_all"]:.0%}'
        rows.append(
            [
                f'{MODEL_TITLES[row["model"]]}, {row["layers"]} layers',
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
    time_bars: dict[str, Parts] = {}
    for row in results['microbatches']:
        layers = row['layers_seconds'] / row['all_seconds']
        for logits in ('all', 'labels'):
            head = max(row[f'{logits}_seconds'] - row['layers_seconds'], 0) / row['all_seconds']
            label = f'{MODEL_TITLES[row["model"]]}\n{row["layers"]} layers, {logits}'
            time_bars[label] = {'layers': layers, 'head and loss': head}
    memory_bars = {logits: memory[logits]['gib_by_part'] for logits in ('all', 'labels')}
    figure = new_figure(9, 3.4, font_size=7)
    time_axes, memory_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    stack(time_axes, time_bars, {'layers': '#b8c4d6', 'head and loss': '#c8553d'})
    time_axes.set_title('Time of a microbatch (measured; all logits: 1)')
    colors = {
        'text activations': '#b8c4d6',
        'vision activations': '#3b6fb6',
        'inputs': '#555555',
        'logits': '#c8553d',
    }
    stack(memory_axes, memory_bars, colors)
    memory_axes.set_title('Qwen2.5-VL-3B, 8,192 positions:\nGiB beyond the model (computed)')
    figure.savefig(path, metadata={'Date': None})


def stack(axes: Any, bars: dict[str, Parts], colors: dict[str, str]) -> None:
    """Draws horizontal bars of stacked parts by label, the first bar on top."""
    left = np.zeros(len(bars))
    for name, color in colors.items():
        widths = [parts[name] for parts in bars.values()]
        axes.barh(list(bars), widths, left=left, color=color, label=name)
        left += widths
    axes.invert_yaxis()
    axes.legend(frameon=False, loc='upper center', bbox_to_anchor=(0.5, -0.08), ncols=len(colors))


def main() -> None:
    warnings.simplefilter('ignore')
    parser = parser_of(__doc__, report=True)
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--rounds', type=int, default=5)
    arguments = parser.parse_args()
    path = arguments.results / RESULTS_FILE.name
    if not arguments.report:
        for ranks, model in product(arguments.ranks, LAYERS):
            sizes = sizes_of(model)
            cells = launch(ranks, sizes, set_name='tables', names=CONTENDERS, rounds=arguments.rounds)
            keep(path, cells)
        torch.set_num_threads(1)
        results = read(path)
        results['microbatches'] = microbatch_rows(arguments.rounds)
        results['work'] = work_rows()
        write_rows(path, results)
    results = read(path)
    parts = parts_of(results)
    for text in parts.values():
        print(text)
    if path == RESULTS_FILE:
        draw(results, read(MEMORY_FILE), PICTURE)
        fill_page(PAGE, parts)


if __name__ == '__main__':
    main()
