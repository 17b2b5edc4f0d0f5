"""What tests assert about a message: the facts that it must name, not its wording."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest


def missing_facts(text: str, *facts: object) -> list[object]:
    """Returns the facts that a message does not name. A fact is a name, a path, a number, a shape, a flag, a nearest spelling.

    Upper and lower case count as the same. A number or a name must stand alone: 4 is not in "data=42".
    """
    return [fact for fact in facts if not _names(text, str(fact))]


def _names(text: str, fact: str) -> bool:
    before = r"(?<![A-Za-z0-9_])" if re.match(r"\w", fact) else ""
    after = r"(?![A-Za-z0-9_])" if re.search(r"\w$", fact) else ""
    return re.search(before + re.escape(fact) + after, text, re.IGNORECASE) is not None


def assert_names(text: object, *facts: object) -> None:
    """Asserts that a message, an error or an output names each fact."""
    missing = missing_facts(str(text), *facts)
    assert not missing, f"{missing} not named in:\n{text}"


def raises_naming(
    error: type[BaseException] | tuple[type[BaseException], ...], *facts: object
) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[BaseException]]:
    """As `with pytest.raises`, for an error whose message names each fact."""
    if any(map(callable, facts)):
        raise TypeError("raises_naming takes no function to call: use it with `with`")
    return _raises(error, facts)


@contextlib.contextmanager
def _raises(
    error: type[BaseException] | tuple[type[BaseException], ...], facts: tuple[object, ...]
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    with pytest.raises(error) as info:
        yield info
    assert_names(info.value, *facts)
