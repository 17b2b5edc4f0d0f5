"""What a saved position of a corpus input says about its files, its tokenizer and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_trainer.errors import did_you_mean
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus.mixture import OpenSource


def describe(
    settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, sources: Sequence[OpenSource]
) -> dict[str, Any]:
    """Returns what batches depend on besides the position, as JSON values.

    Args:
      settings: the input's own settings.
      tokenizer: the tokenizer.
      sources: the sources.
    """
    return {
        "settings": dict(settings),
        "tokenizer": {**tokenizer.fingerprint(), "name": _name_of(tokenizer)},
        "order": [one.name for one in sources],
        "sources": {one.name: {"settings": one.settings(), "files": one.source.fingerprint()} for one in sources},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], sources: Sequence[OpenSource]) -> list[str]:
    """Returns what has changed since a position was saved, a clause for each change.

    Args:
      before: the saved result of `describe`.
      now: today's.
      sources: the sources of today.

    Raises:
      KeyError, TypeError, AttributeError: `before` is not such a result.
    """
    found = _differences(before["settings"], now["settings"])
    old, new = dict(before["tokenizer"]), dict(now["tokenizer"])
    names = old.pop("name"), new.pop("name")
    if old != new:
        found.append(f"the tokenizer was {names[0]} ({_listed(old)}) and is {names[1]} ({_listed(new)})")
    found += _changed_sources(before["sources"], now["sources"], sources)
    # The order decides between sources that are equally far behind.
    if not found and before["order"] != now["order"]:
        found.append(f"the sources were in the order {', '.join(before['order'])}")
    return found


def _changed_sources(before: Mapping[str, Any], now: Mapping[str, Any], sources: Sequence[OpenSource]) -> list[str]:
    found = [f"the mixture no longer has {name!r}{did_you_mean(name, list(now))}" for name in before if name not in now]
    for one in sources:
        if one.name not in before:
            found.append(f"the mixture did not have {one.name!r}")
            continue
        old, new = before[one.name], now[one.name]
        of_source = "" if len(sources) == 1 else f" of {one.name!r}"
        found += [f"{text}{of_source}" for text in _differences(old["settings"], new["settings"])]
        if old["files"] != new["files"]:
            found.append(f"the files{of_source} have changed: {one.source.changed_text(old['files'])}")
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted({*before, *now})
    return [
        f"{name} was {before.get(name)} and is {now.get(name)}" for name in names if before.get(name) != now.get(name)
    ]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _name_of(tokenizer: tokenizers.Tokenizer) -> str:
    return str(getattr(tokenizer, "name", getattr(tokenizer, "model", type(tokenizer).__name__)))
