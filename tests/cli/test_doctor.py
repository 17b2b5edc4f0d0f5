"""What `--doctor` finds, in environments that lack something."""

import importlib.metadata

import pytest
from facts import assert_names

from spmd_trainer.cli import doctor
from spmd_trainer.errors import installation


@pytest.fixture
def without_devices(monkeypatch):
    """Asks no process for the devices."""
    monkeypatch.setattr(doctor, "_run", lambda code: (0, '{"platform": "cpu", "kinds": ["cpu"]}', ""))


def installed(monkeypatch, **versions: str | None) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        if versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_this_environment_is_in_order(without_devices, capsys):
    doctor.check_installation()
    out = capsys.readouterr().out
    assert "praxis 1.4.0" in out
    assert "No problems found." in out


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"optax": None}, "optax is not installed"),
        ({"jax": "0.4.26"}, "jax 0.4.26; "),
        ({"praxis": "1.3.0"}, "praxis 1.3.0; 1.4.0 is required"),
    ],
)
def test_what_is_missing_or_too_old_is_named_with_the_command(without_devices, monkeypatch, capsys, versions, says):
    installed(monkeypatch, **versions)
    with pytest.raises(SystemExit) as left:
        doctor.check_installation()
    assert left.value.code == 2
    out = capsys.readouterr().out
    assert says in out
    (name,) = versions
    to_fix = out.partition("To fix:")[2]
    assert "install" in to_fix
    assert name in to_fix
    assert ("--no-deps" in to_fix) == (name == "praxis")


def test_a_gpu_that_jax_does_not_see(without_devices, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", tmp_path)
    with pytest.raises(SystemExit):
        doctor.check_installation()
    out = capsys.readouterr().out
    assert_names(out, "NVIDIA GPU", "jax[cuda12]==")


def test_a_driver_that_breaks_jax_is_told(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_run", lambda code: (1, "", "RuntimeError: no driver"))
    with pytest.raises(SystemExit):
        doctor.check_installation()
    assert_names(capsys.readouterr().out, "no devices", "RuntimeError: no driver")


def test_the_command_is_pips_where_there_is_pip_and_uvs_elsewhere(monkeypatch):
    real = installation.importlib.util.find_spec
    for there, begins in ((True, " -m pip install --no-deps"), (False, "uv pip install --python ")):
        monkeypatch.setattr(
            installation.importlib.util,
            "find_spec",
            lambda name, there=there: there or None if name == "pip" else real(name),
        )
        command = installation.install_command()
        assert begins in command
        assert command.endswith("--no-deps praxis==1.4.0 lingvo==0.14.2")


@pytest.mark.parametrize("checkout", [True, False])
def test_an_extra_is_installed_as_the_trainer_was(tmp_path, monkeypatch, checkout):
    package = tmp_path / "spmd_trainer" / "errors" / "installation.py"
    if checkout:
        (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(installation, "__file__", str(package))
    command = installation.install_extra("grain")
    assert command.startswith("uv sync --extra grain") == checkout
    assert ("spmd-trainer[grain]" in command) == (not checkout)
