# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Rooms of the package and their imports, read from the source: ``make docs`` draws the SVG again."""

from __future__ import annotations

import ast
import textwrap
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

PACKAGE = Path(__file__).resolve().parents[2] / 'composer_tokacc'
PLUGIN, BESIDE = '#dbe7f5', '#f5e6dc'


def rooms() -> dict[str, list[Path]]:
    """Folders and single modules of the package, with their files; what is run by its name in one."""
    single = [path for path in sorted(PACKAGE.glob('*.py')) if path.stem != '__init__']
    commands = [path for path in single if "__name__ == '__main__'" in path.read_text()]
    folders = sorted(path.parent for path in PACKAGE.glob('*/__init__.py'))
    found = {folder.name: sorted(folder.glob('*.py')) for folder in folders}
    return {**found, **{path.stem: [path] for path in single if path not in commands}, 'commands': commands}


def imports(files: list[Path], names: set[str]) -> set[str]:
    """Rooms that these files name in an import, within functions and for type checkers included."""
    modules = [
        node.module or ''
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
    ]
    return {
        parts[1] for module in modules if (parts := module.split('.'))[0] == PACKAGE.name and len(parts) > 1
    } & names


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """How many imports lie below each room, at most."""
    found: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        found[room] = max((found[below] + 1 for below in graph[room]), default=0)
    return found


def direct(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that no chain of others makes: arrows that are worth drawing."""

    def reached(room: str) -> set[str]:
        return graph[room].union(*map(reached, graph[room]))

    return [
        (room, below)
        for room, all_below in graph.items()
        for below in sorted(all_below)
        if not any(below in reached(other) for other in all_below if other != below)
    ]


def plugin(graph: dict[str, set[str]]) -> set[str]:
    """What `TokenAccumulation`, `token_data_spec`, the sampler and the monitor load."""
    found, waiting = set(), ['algorithm', 'data_spec', 'sampling', 'monitor']
    while waiting:
        room = waiting.pop()
        if room not in found:
            found.add(room)
            waiting += graph[room]
    return found


def draw(path: Path) -> None:
    """Writes the picture where it differs; leaves it as it is while imports go round in a circle."""
    files = rooms()
    graph = {room: imports(own, set(files)) - {room} for room, own in files.items()}
    try:
        level = levels(graph)
    except CycleError:
        return
    inner = plugin(graph)
    rows = [[room for room in sorted(files) if level[room] == number] for number in range(max(level.values()) + 1)]
    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'
    figure = Figure(figsize=(10, 1.15 * len(rows)), layout='constrained')
    axes = figure.subplots()
    places = {
        room: ((k + 0.5) / len(row) + 0.05 * (-1) ** number, number)
        for number, row in enumerate(rows)
        for k, room in enumerate(row)
    }
    boxes = {}
    for room, (x, y) in places.items():
        modules = ', '.join(file.stem for file in files[room] if file.stem not in ('__init__', room))
        text = '\n'.join([room + '/' * (len(files[room]) > 1), *textwrap.wrap(modules, 34)])
        style = {'boxstyle': 'round', 'fc': PLUGIN if room in inner else BESIDE, 'ec': '#555555', 'lw': 0.6}
        boxes[room] = axes.text(x, y, text, ha='center', va='center', fontsize=6.5, bbox=style)
    for room, below in direct(graph):
        ends = {'patchA': boxes[room].get_bbox_patch(), 'patchB': boxes[below].get_bbox_patch()}
        style = {'arrowstyle': '->', 'color': '#999999', 'lw': 0.8, 'shrinkA': 0, 'shrinkB': 0}
        axes.annotate('', places[below], places[room], arrowprops={**style, **ends}, zorder=0)
    axes.set(xlim=(0, 1), ylim=(-0.5, len(rows) - 0.5))
    axes.axis('off')
    figure.savefig(path, metadata={'Date': None})


if __name__ == '__main__':
    draw(Path(__file__).with_suffix('.svg'))
