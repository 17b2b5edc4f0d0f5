"""What became of hostile files: what each should not have done, and a table of all."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from cases import Command
from processes import Ended

MOST_SECONDS, MOST_MIB = 10, 2_048
_DOCUMENTED = frozenset({0, 2, 5})
_TRACEBACK = b"Traceback (most recent call last)"
# Controls of C0 and C1 but tabs and line ends, marks of direction, and bytes that are not UTF-8.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udcff]")


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
      kind: its kind.
      number: its number among those of the seed.
      command: what ran.
      ended: how it ended.
      written: what it wrote outside of the folders that it may write to.
      output: what it wrote to stdout and stderr.
    """

    kind: str
    number: int
    command: Command
    ended: Ended
    written: Sequence[str]
    output: bytes

    @property
    def traceback(self) -> bool:
        return _TRACEBACK in self.output

    @property
    def commands_terminal(self) -> bool:
        return _ACTS.search(self.output.decode("utf-8", "surrogateescape")) is not None

    @property
    def accepted(self) -> bool:
        return self.command.must_refuse and self.ended.status == 0

    def faults(self) -> Iterator[str]:
        """Yields what should not have happened."""
        documented = _DOCUMENTED | ({1} if "--mode=port" in self.command.arguments else set())
        if self.ended.killed:
            yield self.ended.killed
        elif self.ended.status not in documented:
            yield f"status {self.ended.status}"
        if self.ended.seconds > MOST_SECONDS:
            yield f"{self.ended.seconds:.0f} s"
        if self.ended.mib > MOST_MIB:
            yield f"{self.ended.mib:,.0f} MiB"
        if self.traceback:
            yield f"traceback: {self.output.decode(errors='replace').rstrip().splitlines()[-1][:120]}"
        if self.commands_terminal:
            yield "commands to the terminal"
        if self.written:
            yield f"wrote {', '.join(self.written)}"
        if self.accepted:
            yield "accepted though damaged"


def table(results: Sequence[Result]) -> str:
    """Returns a row for each kind: how its cases ended, the worst time and memory, and the faults."""
    rows = [
        "| kind | cases | statuses | worst s | worst MiB | tracebacks | to the terminal | written outside | accepted |",
        "|---" * 9 + "|",
    ]
    names = [*dict.fromkeys(result.kind for result in results), ""]
    for kind in names:
        found = [result for result in results if kind in ("", result.kind)]
        counts = collections.Counter(result.ended.killed or str(result.ended.status) for result in found)
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        cells = [
            kind or "all",
            len(found),
            statuses,
            f"{max((result.ended.seconds for result in found), default=0):.1f}",
            f"{max((result.ended.mib for result in found), default=0):,.0f}",
            sum(result.traceback for result in found),
            sum(result.commands_terminal for result in found),
            sum(bool(result.written) for result in found),
            sum(result.accepted for result in found),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
