"""Draws mutants of product code at random, and says which test notices each of them.

    uv run --no-sync --with cosmic-ray python tests/planted/mutants.py --seed 36

A mutant is one change that cosmic-ray makes to code that runs: `<` becomes `<=`, 1 becomes 2, a loop takes no turn. Places are
drawn first, then a change for each, because cosmic-ray knows eleven changes of a sum and one of a condition. A survivor is either
equivalent to the code as it is, or the reason for a test.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import difflib
import random
import sys
from pathlib import Path

import run
from cosmic_ray import mutating, plugins
from cosmic_ray.ast import ast_nodes, get_ast

# Rooms of `spmd_trainer/`, and the tests that run before all others.
ROOMS = {
    "sharding": "tests/sharding tests/step",
    "step": "tests/step tests/sharding",
    "checkpointing": "tests/checkpointing",
}
Position = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Mutant(run.Fault):
    """A fault that changes a file to `text`; `old` and `new` are the lines that differ."""

    text: str = ""

    def changed(self, root: Path) -> str:
        """Returns the file's text with the fault; `root` is not read."""
        return self.text


def places(text: str) -> dict[tuple[Position, Position], list[tuple[str, int]]]:
    """Returns where a module can be changed, but for its annotations: (first, last) place to (operator, occurrence) pairs."""
    found, tree, annotations = collections.defaultdict(list), get_ast(text), annotation_spans(text)
    for name in plugins.operator_names():
        operator_class = plugins.get_operator(name)
        if operator_class.arguments():
            continue
        operator = operator_class()
        spans = (span for node in ast_nodes(tree) for span in operator.mutation_positions(node))
        for occurrence, (first, last) in enumerate(spans):
            if not any(start <= first < end for start, end in annotations):
                found[first, last].append((name, occurrence))
    return found


def annotation_spans(text: str) -> list[tuple[Position, Position]]:
    """Returns where a module's annotations begin and end, as (line, column) from (1, 0) on."""
    nodes = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes if node is not None
    ]


def draw(count: int, seed: int) -> list[Mutant]:
    """Returns `count` mutants of different places of `ROOMS`; the same for a seed and the same files."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for room in ROOMS
        for path in sorted((run.ROOT / "spmd_trainer" / room).rglob("*.py"))
    }
    found = [(path, *item) for path, text in texts.items() for item in sorted(places(text).items())]
    drawn = random.Random(seed)
    mutants = []
    for path, ((line, _), _), changes in drawn.sample(found, count):
        name, occurrence = drawn.choice(changes)
        text = mutating.mutate_code(texts[path], plugins.get_operator(name)(), occurrence)
        differ = [row for row in difflib.ndiff(texts[path].splitlines(), text.splitlines()) if row[0] in "-+"]
        old, new = (" ".join(row[2:].strip() for row in differ if row[0] == sign) for sign in "-+")
        file, room = str(path.relative_to(run.ROOT)), path.relative_to(run.ROOT / "spmd_trainer").parts[0]
        mutants.append(Mutant(f"{path.name}:{line}: {old}  ->  {new}", room, file, old, new, ROOMS[room], text))
    return mutants


def main() -> int:
    """Draws and tries mutants; returns 0 if tests noticed all of them."""
    parser = argparse.ArgumentParser(description="Draws mutants of product code at random, and runs the tests.")
    parser.add_argument("--seed", type=int, required=True, help="draws the same mutants again")
    parser.add_argument("--count", type=int, default=20, metavar="N", help="how many (default 20)")
    parser.add_argument("--hints-only", action="store_true", help="run only the tests of the mutant's room")
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    mutants = draw(options.count, options.seed)
    if options.list:
        sys.stdout.writelines(f"{mutant.file}: {mutant.name}\n" for mutant in mutants)
        return 0
    return run.report(mutants, hints_only=options.hints_only, jobs=1)


if __name__ == "__main__":
    sys.exit(main())
