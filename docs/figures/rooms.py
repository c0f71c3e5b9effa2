# Copyright 2026 composer_tokacc authors
# SPDX-License-Identifier: Apache-2.0

"""Draws the rooms of the package and their imports, which it reads from the source. ``make docs`` draws the SVG again.

A graph maps each room to the rooms that it imports.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

PACKAGE = Path(__file__).resolve().parents[2] / 'composer_tokacc'
# Plugin: the entrances, and all that they import, directly or through others.
COLOUR_OF_PLUGIN = '#dbe7f5'
COLOUR_OF_OTHERS = '#f5e6dc'
ENTRANCES = ('algorithm', 'data_spec', 'sampling', 'monitor')
"""The rooms of `TokenAccumulation`, `token_data_spec`, the sampler and the monitor."""

Graph = Mapping[str, Collection[str]]


def files_of_rooms() -> dict[str, list[Path]]:
    """Returns the files of each room: folders and single modules. All programs together are the room ``commands``."""
    files = {}
    for init_file in sorted(PACKAGE.glob('*/__init__.py')):
        folder = init_file.parent
        files[folder.name] = sorted(folder.glob('*.py'))
    commands = []
    for path in sorted(PACKAGE.glob('*.py')):
        if "__name__ == '__main__'" in path.read_text():
            commands.append(path)
        elif path.stem != '__init__':
            files[path.stem] = [path]
    files['commands'] = commands
    return files


def imported_rooms(files: Sequence[Path]) -> set[str]:
    """Returns the rooms in all ``from composer_tokacc.ROOM import``, those within functions included."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                package, _, module = node.module.partition('.')
                if package == PACKAGE.name and module:
                    names.add(module.split('.')[0])
    return names


def import_graph(files: Mapping[str, Sequence[Path]]) -> dict[str, set[str]]:
    """Returns the rooms that each room imports."""
    graph = {}
    for room, files_of_room in files.items():
        graph[room] = (imported_rooms(files_of_room) & files.keys()) - {room}
    return graph


def levels_of(graph: Graph) -> dict[str, int]:
    """Returns the level of each room: 0 if it imports no room, else one more than the highest room that it imports.

    Raises:
        CycleError: If rooms import each other.
    """
    levels: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        levels_below = [levels[imported] for imported in graph[room]]
        levels[room] = max(levels_below, default=-1) + 1
    return levels


def reachable_from(graph: Graph, rooms: Collection[str]) -> set[str]:
    """Returns these rooms, and all that they import, directly or through others."""
    reachable: set[str] = set()
    waiting = list(rooms)
    while waiting:
        room = waiting.pop()
        if room not in reachable:
            reachable.add(room)
            waiting += graph[room]
    return reachable


def arrows_of(graph: Graph) -> list[tuple[str, str]]:
    """Returns the imports that are drawn as arrows. Leaves out those that follow from a chain of others."""
    arrows = []
    for room, imported_by_room in graph.items():
        for imported in sorted(imported_by_room):
            others = [other for other in imported_by_room if other != imported]
            if imported not in reachable_from(graph, others):
                arrows.append((room, imported))
    return arrows


def text_of(room: str, files: Sequence[Path]) -> str:
    """Returns the name of a room, with a slash if it has several files, and the names of its other modules below."""
    name = f'{room}/' if len(files) > 1 else room
    modules = [file.stem for file in files if file.stem not in ('__init__', room)]
    return '\n'.join([name, *textwrap.wrap(', '.join(modules), 34)])


def places_of(rows: Sequence[Sequence[str]]) -> dict[str, tuple[float, int]]:
    """Returns the place of each room: a row for each level. Every other row is shifted, so that arrows overlap less."""
    places = {}
    for level, rooms in enumerate(rows):
        shift = 0.05 if level % 2 == 0 else -0.05
        for number, room in enumerate(rooms):
            places[room] = ((number + 0.5) / len(rooms) + shift, level)
    return places


def draw(path: Path) -> None:
    """Writes the picture. Leaves it as it is if rooms import each other, because they have no levels then."""
    files = files_of_rooms()
    graph = import_graph(files)
    try:
        levels = levels_of(graph)
    except CycleError:
        return
    rows: list[list[str]] = [[] for _ in range(max(levels.values()) + 1)]
    for room in sorted(files):
        rows[levels[room]].append(room)
    places = places_of(rows)
    plugin = reachable_from(graph, ENTRANCES)

    mpl.rcParams['svg.hashsalt'] = 'composer_tokacc'  # otherwise the file differs each time
    figure = Figure(figsize=(10, 1.15 * len(rows)), layout='constrained')
    axes = figure.subplots()
    boxes = {}
    for room, (x, y) in places.items():
        colour = COLOUR_OF_PLUGIN if room in plugin else COLOUR_OF_OTHERS
        style = {'boxstyle': 'round', 'fc': colour, 'ec': '#555555', 'lw': 0.6}
        text = text_of(room, files[room])
        boxes[room] = axes.text(x, y, text, ha='center', va='center', fontsize=6.5, bbox=style)
    for room, imported in arrows_of(graph):
        arrow = {
            'arrowstyle': '->',
            'color': '#999999',
            'lw': 0.8,
            'shrinkA': 0,
            'shrinkB': 0,
            'patchA': boxes[room].get_bbox_patch(),
            'patchB': boxes[imported].get_bbox_patch(),
        }
        axes.annotate('', places[imported], places[room], arrowprops=arrow, zorder=0)
    axes.set(xlim=(0, 1), ylim=(-0.5, len(rows) - 0.5))
    axes.axis('off')
    figure.savefig(path, metadata={'Date': None})


if __name__ == '__main__':
    draw(Path(__file__).with_suffix('.svg'))
