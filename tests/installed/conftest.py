"""Environments as users make them: from a wheel, outside of the checkout, by each way that README documents.

Made once for all tests: by pip in a folder's own environment, and by uv in a uv project. Both have only what their commands
install.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from readme_page import PAGE, ROOT


@dataclasses.dataclass
class Project:
    """A user's folder and the environment in it."""

    folder: pathlib.Path

    def run(self, command: str, *, devices: int | None = None, **environment: str) -> subprocess.CompletedProcess:
        """Runs a shell command in the folder, as in a terminal whose environment is activated."""
        kept = ("HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
        env = {key: value for key, value in os.environ.items() if key in kept or key.startswith(("PIP_", "UV_"))}
        env["PATH"] = f"{self.folder / '.venv' / 'bin'}:{uv().parent}:/usr/bin:/bin"
        env["JAX_PLATFORMS"] = "cpu"
        env["JAX_COMPILATION_CACHE_DIR"] = str(self.folder.parent / "jax_cache")
        if devices is not None:
            env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        return subprocess.run(
            command, shell=True, cwd=self.folder, env=env | environment, capture_output=True, text=True, timeout=300
        )

    def good(self, command: str, **kwargs) -> subprocess.CompletedProcess:
        """Runs a command that must succeed."""
        done = self.run(command, **kwargs)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def refused(self, command: str, **kwargs) -> str:
        """Runs a command that must be refused; returns the one message."""
        done = self.run(command, **kwargs)
        assert done.returncode == 2, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("spmd-trainer: ") == 1, done.stderr
        return done.stderr.partition("spmd-trainer: ")[2]


def uv() -> pathlib.Path:
    """uv, from the PATH or as `make` fetched it."""
    found = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    assert pathlib.Path(found).exists(), "uv is neither on the PATH nor in .uv: run `make setup`"
    return pathlib.Path(found)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([uv(), "build", "--quiet", "--wheel", "--out-dir", folder, ROOT], check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def projects(wheel, tmp_path_factory) -> dict[str, Project]:
    """The two projects, made side by side: pip waits for the network while uv works."""
    ways = {"pip": _by_pip, "uv": _by_uv}
    with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
        futures = {
            name: pool.submit(make, Project(tmp_path_factory.mktemp(name) / "project"), wheel)
            for name, make in ways.items()
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.fixture(scope="session")
def project(projects) -> Project:
    """The project that most tests run in."""
    return projects["pip"]


def _by_pip(project: Project, wheel: pathlib.Path) -> Project:
    _write_sources(project)
    subprocess.run([_python(), "-m", "venv", project.folder / ".venv"], check=True)
    project.good(PAGE.command("pip install PATH").replace("PATH", str(wheel)))
    # What a user meets who has not read on: kept for the tests, then the command that it names is run.
    before = project.run("spmd-trainer --exp=my_pkg.tiny.MyTinyLm --job_log_dir=runs/early")
    (project.folder / "before_praxis.txt").write_text(f"{before.returncode}\n{before.stderr}")
    doctor = project.run("spmd-trainer --doctor")
    (project.folder / "doctor_before_praxis.txt").write_text(f"{doctor.returncode}\n{doctor.stdout}")
    project.good(PAGE.command("pip install --no-deps"))
    return project


def _by_uv(project: Project, wheel: pathlib.Path) -> Project:
    _write_sources(project)
    (project.folder / "pyproject.toml").write_text(
        '[project]\nname = "my-project"\nversion = "0.1"\nrequires-python = ">=3.11"\ndependencies = []\n\n'
        f"{PAGE.entry_point}\n{PAGE.uv_tables}\n"
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["my_pkg"]\n'
    )
    project.good(PAGE.command("uv add PATH").replace("PATH", str(wheel)), UV_PYTHON=_python())
    return project


def _write_sources(project: Project) -> None:
    (project.folder / "my_pkg").mkdir(parents=True)
    (project.folder / "my_pkg" / "__init__.py").write_text("")
    for path, code in PAGE.files.items():
        (project.folder / path).write_text(code)
    project.good(PAGE.command("text/zen.txt"))


def _python() -> str:
    """The machine's own Python, not that of this test's environment."""
    return str(pathlib.Path(sys.base_prefix) / "bin" / "python3")
