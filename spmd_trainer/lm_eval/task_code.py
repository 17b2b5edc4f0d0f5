"""Finds code that lm-eval would run for a task file, e.g. the function that a `!function` tag names."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from spmd_trainer.errors import UserError

if TYPE_CHECKING:
    import yaml

_CODE_TAG = "!function"
# A metric whose name has a slash is code in a folder or a Hugging Face space, which lm-eval runs if it doesn't know the name.
_METRIC = "metric"
# Looked for at any depth, because a mapping may be merged into another.
_INCLUDE = "include"


def refuse(directory: str | None, files: Iterable[str], library: str) -> None:
    """Raises UserError if a task file names code to run. Call this before lm-eval loads any file.

    lm-eval's own task files are allowed to name code. With `--confirm_run_unsafe_code`, the caller skips this check.

    Args:
      directory: directory of the user's task files, searched recursively; None: there is none.
      files: paths of further task files.
      library: folder of the lm-eval package.

    Raises:
      UserError: a file, or a file that it includes, names code or can't be read.
    """
    found = [] if directory is None else sorted(pathlib.Path(directory).rglob("*.yaml"))
    waiting, seen = [*found, *map(pathlib.Path, files)], set[pathlib.Path]()
    own = pathlib.Path(library).resolve()
    while waiting:
        path = waiting.pop().expanduser().resolve()
        if path in seen or path.is_relative_to(own):
            continue
        seen.add(path)
        if not path.is_file():  # lm-eval itself refuses a missing include
            continue
        for what, value in _named(path):
            if what == _INCLUDE:
                waiting.append(path.parent / value)
                continue
            raise UserError(
                f"--tasks: {path} runs code of others, {what} {value}: read it, then allow it with --confirm_run_unsafe_code, or "
                "leave the file out"
            )


def _named(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields the code and files that a task file names, e.g. ('!function', 'utils.f') and ('include', 'base.yaml')."""
    import yaml

    # The parser that lm-eval uses. `compose` makes no Python objects, so it runs no code.
    loader = yaml.CSafeLoader if getattr(yaml, "__with_libyaml__", False) else yaml.SafeLoader
    try:
        root = yaml.compose(path.read_bytes(), Loader=loader)
    except yaml.YAMLError:
        return  # lm-eval leaves it out, or says what is wrong with it
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--tasks: {path} can't be read: {type(error).__name__}: {error}") from error
    if root is not None:
        yield from _of_nodes(root)


def _of_nodes(root: yaml.Node) -> Iterator[tuple[str, str]]:
    """Yields the code and files that a YAML tree names, see `_named`. Visits each node once, even if aliases repeat it."""
    import yaml

    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.tag == _CODE_TAG:
            yield _CODE_TAG, str(node.value)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield from _of_key(str(key.value), value)
                waiting += [key, value]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _of_key(key: str, value: yaml.Node) -> Iterator[tuple[str, str]]:
    import yaml

    values = value.value if isinstance(value, yaml.SequenceNode) else [value]
    for one in values:
        if isinstance(one, yaml.ScalarNode) and (
            key == _INCLUDE or (key == _METRIC and {"/", os.sep} & set(one.value))
        ):
            yield key, one.value
