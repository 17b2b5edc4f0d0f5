"""`--doctor`: checks the installed packages and the devices, and prints the command that fixes each problem."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.metadata
import json
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from spmd_trainer.errors import installation, terminal

_DISTRIBUTION = "spmd-trainer"
_PROBE_SECONDS = 120
# On Linux this file exists when the NVIDIA kernel driver is loaded.
_NVIDIA_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# Runs in a subprocess: a driver that hangs or aborts must not take this process down.
_PROBE = """
import json, jax
devices = jax.devices()
print(json.dumps({"platform": devices[0].platform, "kinds": [d.device_kind for d in devices]}))
"""
_PRAXIS_PROBE = "import spmd_trainer; from praxis import layers"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      what: what was found, e.g. 'jax 0.10.2'.
      fix: the command or step that fixes the problem; None if nothing is wrong.
    """

    what: str
    fix: str | None = None


def check_installation() -> None:
    """Runs `--doctor`: prints the result of every check.

    Raises:
      SystemExit: with status 2 if a check failed, after all results were printed.
    """
    version = installation.installed_version(_DISTRIBUTION) or "(imported from its source tree, not installed)"
    terminal.write(f"spmd-trainer {version}, {pathlib.Path(__file__).resolve().parents[1]}\n")
    fixes = []
    for finding in _findings():
        terminal.write(f"  {'ok ' if finding.fix is None else 'BAD'}  {finding.what}\n")
        if finding.fix is not None:
            fixes.append(finding.fix)
            terminal.write(f"       -> {finding.fix}\n")
    if fixes:
        terminal.write("To fix:\n" + "".join(f"  {fix}\n" for fix in dict.fromkeys(fixes)))
        raise SystemExit(2)
    terminal.write("No problems found.\n")


def _findings() -> Iterator[Finding]:
    yield Finding(f"Python {platform.python_version()} ({sys.executable})")
    packages = [*_packages(), *_unresolvable_packages()]
    yield from packages
    yield from _devices()
    if all(finding.fix is None for finding in packages):
        status, _, error = _run(_PRAXIS_PROBE)
        shows = f"{sys.executable} -c '{_PRAXIS_PROBE}'  (shows the whole error)"
        yield Finding(f"praxis can't be imported: {error}", shows) if status else Finding("praxis can be imported")


def _packages() -> list[Finding]:
    """Returns one finding for all dependencies that are in order, and one for each that is missing or has a wrong version."""
    try:
        declared = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    findings, good = [], []
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installation.installed_version(requirement.name)
        fix = _install(f"{requirement.name}{requirement.specifier}")
        if version is None:
            findings.append(Finding(f"{requirement.name} is not installed", fix))
        elif not requirement.specifier.contains(version, prereleases=True):
            findings.append(Finding(f"{requirement.name} {version}; {requirement.specifier} is required", fix))
        else:
            good.append(f"{requirement.name} {version}")
    return [Finding(", ".join(good)), *findings] if good else findings


def _unresolvable_packages() -> Iterator[Finding]:
    for name, wanted in installation.UNRESOLVABLE.items():
        version = installation.installed_version(name)
        if version is None:
            # A source tree on the path can be imported, but has no version.
            if importlib.machinery.PathFinder.find_spec(name) is not None:
                yield Finding(f"{name}, imported from a source tree; {wanted} is expected")
            else:
                yield Finding(f"{name} is not installed; {wanted} is required", installation.install_command())
        elif version != wanted:
            yield Finding(f"{name} {version}; {wanted} is required", installation.install_command())
        else:
            yield Finding(f"{name} {version}")


def _devices() -> Iterator[Finding]:
    version = installation.installed_version("jax")
    if version is None:
        return
    status, output, error = _run(_PROBE)
    if status:
        yield Finding(
            f"JAX finds no devices: {error}", "run `python -c 'import jax; jax.devices()'` to see the whole error"
        )
        return
    found = json.loads(output.splitlines()[-1])
    count, kind = len(found["kinds"]), found["kinds"][0]
    fix = None
    if found["platform"] == "cpu":
        if _NVIDIA_DRIVER.exists():
            kind, fix = f"{kind}, although there is an NVIDIA GPU", _install(f"jax[cuda12]=={version}")
        elif any(pathlib.Path("/dev").glob("accel[0-9]*")):
            kind, fix = f"{kind}, although there is a TPU", _install(f"jax[tpu]=={version}")
    training = "; training takes as many host devices as its mesh has" if found["platform"] == "cpu" else ""
    yield Finding(f"devices: {count} x {kind} ({found['platform']}){training}", fix)


def _install(requirement: str) -> str:
    return f"{installation.pip_install()} {shlex.quote(requirement)}"


def _run(code: str) -> tuple[int, str, str]:
    """Runs Python code in a subprocess. Returns its exit status, its stdout and the last line of its stderr."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer after {_PROBE_SECONDS} s"
    lines = done.stderr.strip().splitlines()
    return done.returncode, done.stdout, lines[-1] if lines else f"status {done.returncode}"
