# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""From the results to a section for docs/benchmarks.md, and a line for each claim that holds or does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]


def write_report(folder: Path) -> None:
    """Reads all results of a folder; writes `section.md` beside them, and prints claims."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob('[a-g]_*.json'))}
    results = {name: file['result'] for name, file in files.items()}
    for name, result in results.items():
        if 'error' in result:
            print(f'{name}: failed, {result["error"][:200]}')
        elif result.get('holds') is not None:
            print(f'{name}: {"holds" if result["holds"] else "DOES NOT HOLD"}')
    throughput = {
        name: result for name, result in results.items() if name.startswith('b_') and 'error' not in result
    }  # fmt: skip
    if throughput:
        machine = files[next(iter(throughput))]['machine']
        (folder / 'section.md').write_text(section(throughput, results, machine))


def set_name(name: str, result: dict[str, Any]) -> str:
    if name.endswith('tables'):
        return f'tables (variation {result["variation"]:.2f})'
    return f'lognormal, variation {result["variation"]:.2f}'


def section(throughput: Results, results: Results, machine: dict[str, Any]) -> str:
    """Markdown: the table, and one line a further part."""
    where = machine.get('gpu', machine['processor'])
    versions = ', '.join(f'{name} {machine[name]}' for name in ('mosaicml', 'torch', 'transformers') if name in machine)
    first = next(iter(throughput.values()))
    lines = [
        '## On a GPU' if 'gpu' in machine else '## A rehearsal on a CPU: figures of no meaning', '',
        f'Real tokens a second against stock Composer, the same global batches of {first["device_batch"]} rows and the '
        f'same memory (`python -m benchmarks.gpu`; a LLaVA of {first["parameters"] / 1e9:.1f} B parameters, '
        f'{where}, {versions}):', '',
        '| lengths | stock, tokens/s | Hugging Face style | `token_data_spec` | packed | no padding at all | '
        'MFU of the best | peak GiB, stock and ours |', '|---|---|---|---|---|---|---|---|',
    ]  # fmt: skip
    for name, result in throughput.items():
        methods = result['methods']
        ran = [one for one in methods.values() if 'seconds' in one]
        best = max(ran, key=lambda one: one['tokens_per_second'])
        packed = methods['packing']
        lines.append(
            f'| {set_name(name, result)} | {methods["stock"]["tokens_per_second"]:,.0f} | '
            f'{methods["collate"]["against_stock"]:.2f}x | **{methods["ours"]["against_stock"]:.2f}x** | '
            + (f'{packed["against_stock"]:.2f}x ({packed["attention"]})' if 'seconds' in packed else 'refused')
            + f' | {result["bound_against_stock"]:.2f}x | {best["mfu_of_measured_ceiling"]:.0%} | '
            f'{methods["stock"]["peak_gib"]:.1f}, {methods["ours"]["peak_gib"]:.1f} |'
        )
    lines += ['', 'MFU counts the operations of real tokens alone, over a large bf16 product on the same machine.']
    for name, text in claims(results).items():
        lines.append(f'- {text}' if 'error' not in results[name] else f'- {name}: failed, see its JSON.')
    return '\n'.join(lines) + '\n'


def claims(results: Results) -> dict[str, str]:
    found = {}
    for name, result in results.items():
        if 'error' in result:
            found[name] = name
        elif name == 'a_exactness':
            bf16 = result.get('worst_bf16_over_noise')
            tail = f', in bf16 within {bf16:.2f} times its own noise' if bf16 is not None else ''
            found[name] = f'Gradient within {result["worst_fp32"]:.1e} of one forward in fp32{tail}.'
        elif name == 'c_overhead':
            shares = [one['share'] for one in result.values() if isinstance(one, dict) and 'share' in one]
            found[name] = f'The algorithm costs {max(shares):.2%} of a step.'
        elif name.startswith('e_') and 'holds' in result:
            found[name] = (
                f'Peak memory, {result["model"]}{", checkpointing" if result["checkpointing"] else ""}: predicted '
                f'{result["worst_under"]:+.1%} to {result["worst_over"]:+.1%} off over {len(result["traced"])} shapes.'
            )
        elif name == 'f_out_of_memory':
            found[name] = (
                f"`device_train_microbatch_size='auto'` settles on {result['settled_on']} rows of {result['rows']} "
                f'after running out of memory; gradient within {result["gradient_error"]:.1e}.'
            )
        elif name.startswith('g_'):
            worst = max(result['errors'].values())
            found[name] = f'{name.removeprefix("g_ranks_").upper()}, two ranks over {result["backend"]}: {worst:.1e}.'
    return found
