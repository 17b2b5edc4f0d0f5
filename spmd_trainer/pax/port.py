"""Reports which changes and packages an experiment file written for paxml needs on this trainer. Does not import the file."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from spmd_trainer.errors import terminal
from spmd_trainer.pax import port_names, port_settings, port_source
from spmd_trainer.pax.port_names import Finding


@dataclasses.dataclass(frozen=True)
class Report:
    """The porting report of one experiment file: what the file, written for paxml, needs to run on this trainer.

    Attributes:
      path: the file.
      names: entries (`Finding`s) about paxml and praxis names that this trainer doesn't have, or that can't be used.
      settings: entries about task fields that this trainer ignores, refuses or doesn't have.
      methods: entries about overridden methods of Pax's BaseExperiment that this trainer treats differently from Pax.
      extras: entries about names that need an optional extra of this package, a different package, or an environment setting.
      packages: entries about other imported packages that are not installed.
      mentions: line numbers of the strings that begin with 'paxml.'. Such strings are not renamed.
      diff: unified diff that renames the file's imports.
    """

    path: pathlib.Path
    names: Sequence[Finding]
    settings: Sequence[Finding]
    methods: Sequence[Finding]
    extras: Sequence[Finding]
    packages: Sequence[Finding]
    mentions: Sequence[int]
    diff: str

    @classmethod
    def of_file(cls, path: pathlib.Path) -> Report:
        """Returns the report of a file.

        Raises:
          UserError: the file can't be read, is not Python, or nests too deeply.
        """
        source = port_source.Source(path)
        try:
            return cls._of_source(source)
        except RecursionError as error:
            raise port_source.nested_too_deeply(path) from error

    @classmethod
    def _of_source(cls, source: port_source.Source) -> Report:
        names, extras = list(port_names.missing_names(source)), list(port_names.extras(source))
        known = tuple(extra.name for extra in extras)
        return cls(
            path=source.path,
            names=[name for name in names if name.blocks],
            settings=list(port_settings.settings(source)),
            methods=list(port_settings.methods(source)),
            extras=[*extras, *(name for name in names if not name.blocks and not name.name.startswith(known))],
            packages=list(port_names.absent_packages(source)),
            mentions=source.strings(f"{port_source.PAX}."),
            diff=source.diff(),
        )

    @property
    def runs(self) -> bool:
        """True if the file runs after its imports are renamed, without other changes."""
        return not any(finding.blocks for finding in [*self.names, *self.settings, *self.methods])

    def _summary(self) -> str:
        if not self.runs:
            return "it needs the changes below"
        what = "renaming its imports is enough" if self.diff else "it imports nothing from paxml"
        lacks = any(finding.lacks for finding in [*self.extras, *self.packages])
        return f"{what}, once its requirements are installed and set" if lacks else what

    def text(self) -> str:
        """Returns the report as text: one line per entry, then the diff."""
        mentions = [Finding(line, "'paxml.…'", "a string; not renamed", blocks=False) for line in self.mentions]
        sections = {
            "Without a counterpart here": self.names,
            "Settings of the task": self.settings,
            "Methods of the experiment": self.methods,
            "What it needs": [*self.extras, *self.packages],
            "Strings": mentions,
        }
        lines = [f"{self.path}: {self._summary()}"]
        for title, findings in sections.items():
            if findings:
                lines += ["", title, *_table(findings)]
        if self.diff:
            lines += ["", "Renamed (`patch -p0` applies it)", self.diff.rstrip("\n")]
        return "\n".join([*lines, ""])


def print_reports(module: str) -> bool:
    """Prints the porting report of each file. Returns True if renaming the imports is enough for all of the files.

    `module`: path of a file or folder, or the dotted name of a module.

    Raises:
      UserError: the file doesn't exist, or is not Python.
    """
    reports = [Report.of_file(path) for path in port_source.find_files(module)]
    terminal.write("\n".join(report.text() for report in reports))
    return all(report.runs for report in reports)


def _table(findings: Sequence[Finding]) -> list[str]:
    ordered = sorted(findings, key=lambda finding: finding.line)
    digits = max(len(str(finding.line)) for finding in ordered)
    width = min(60, max(len(finding.name) for finding in ordered))
    return [f"  line {finding.line:>{digits}}  {finding.name:<{width}}  {finding.text}" for finding in ordered]
