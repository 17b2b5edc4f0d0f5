"""The command line's refusals: one message with the fix, exit status 2, nothing written."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from facts import assert_names

TINY = "lm.stdlib.StdlibBytesTiny"


def spmd_trainer(*args: str, **env: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | env
    return subprocess.run(
        [sys.executable, "-m", "spmd_trainer.main", *args], capture_output=True, text=True, timeout=300, env=environment
    )


def refused(*args: str, **env: str) -> str:
    result = spmd_trainer(*args, **env)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    own = [line for line in result.stderr.splitlines() if line.startswith("spmd-trainer: ")]
    assert len(own) == 1, result.stderr
    return own[0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--expp=x"], ["--expp", "exp"]),
        ([f"--exp={TINY}", "--fdl.set=task.train.num_train_step=2"], ["num_train_step'", "num_train_steps"]),
        ([f"--exp={TINY}", "--mode=inspect", "--mesh=data4"], ["--mesh", "axis:size"]),
        ([f"--exp={TINY}", "--fdl.NUM_LAYER=3"], ["NUM_LAYER is no attribute of StdlibBytesTiny", "NUM_LAYERS"]),
        (["--mode=page"], ["--mode=page needs --job_log_dir=DIR"]),
        *(
            pytest.param(args, says, marks=pytest.mark.full)
            for args, says in [
                (["--exp=lm.stdlib.StdlibByte"], ["lm.stdlib.StdlibBytes"]),
                (["--job_log_dir=/nonexistent"], ["--exp"]),
                ([f"--exp={TINY}"], ["--job_log_dir"]),
                ([f"--exp={TINY}", "--mode=trian"], ["--mode", "train"]),
                ([f"--exp={TINY}", "--fdl.set=task.train.num_train_steps=many"], ["num_train_steps", "literal"]),
                (
                    [f"--exp={TINY}", "--mode=inspect", "--mesh=data:0,mdl:2"],
                    ["axis 'data': 0 is not a size", "1 or more, or -1"],
                ),
                ([f"--exp={TINY}", "--mode=inspect", "--mesh=data:--1"], ["--mesh", "axis:size"]),
                ([f"--exp={TINY}", "--mode=inspect", "--mesh=data:-1,mdl:-1"], ["only one size may be -1"]),
                (["--exp=.."], ["module.Class"]),
                ([f"--exp={TINY}", "--fdl_config=a.B"], ["--exp", "--fdl_config", "mean the same setting"]),
                ([f"--exp={TINY}", "--dump", "--jax_log_compile"], ["--jax_log_compile", "jax_log_compiles"]),
                (["--study=mine"], ["--study", "--mode=sweep"]),
                (["--mode=port"], ["--module=FILE"]),
                ([f"--exp={TINY}", "--hang_seconds=-1"], ["--hang_seconds", "-1"]),
                (
                    [f"--exp={TINY}", "--job_log_dir=runs", "--hang_seconds=300"],
                    ["--hang_seconds=300", "--watchdog_seconds=600", "--watchdog_seconds=100"],
                ),
                (["--mode=page", "--job_log_dir=/nonexistent/run"], ["/nonexistent/run does not exist", "trained in"]),
                (["--mode=page", "--job_log_dir=/"], ["--job_log_dir=/ holds no run of this trainer"]),
                (["--mode=page", "--job_log_dir=runs", "--port=8080"], ["--port goes with --follow"]),
                (["--mode=page", "--job_log_dir=runs", "--follow", "--page_file=x.html"], ["--follow writes no file"]),
                ([f"--exp={TINY}", "--job_log_dir=runs", "--follow"], ["--follow goes with --mode=page"]),
                ([f"--exp={TINY}", "--module=my_pkg"], ["--module", "--mode=port", "--exp_module"]),
                (["--mode=tokenise", "--output=runs/x"], ["give the files", "--output=runs/x"]),
                (["--mode=tokenizer", "a.jsonl", "--column=b"], ["--output=PATH is needed"]),
                ([f"--exp={TINY}", "--tokenizer=x"], ["--tokenizer goes with --mode=tokenise", "--fdl.TOKENIZER"]),
            ]
        ),
    ],
)
def test_a_bad_command_is_one_message_with_the_fix(args, says):
    message = refused(*args)
    for word in says:
        assert word in message


@pytest.mark.full
def test_no_checkpoint_to_decode(tmp_path: pathlib.Path):
    directory = tmp_path / "run"
    message = refused(f"--exp={TINY}", f"--job_log_dir={directory}", "--mode=decode_once")
    assert "no checkpoint" in message
    assert "--restore_checkpoint_dir" in message
    assert not directory.exists()


@pytest.mark.full
def test_a_foreign_directory_is_left_alone(tmp_path: pathlib.Path):
    (tmp_path / "thesis.txt").write_text("mine")
    message = refused(f"--exp={TINY}", f"--job_log_dir={tmp_path}")
    assert str(tmp_path) in message
    assert "not empty" in message
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.full
def test_another_experiments_directory_is_refused(tmp_path: pathlib.Path):
    (tmp_path / "run.json").write_text('{"experiment": "spmd_trainer.experiments.lm.stdlib.StdlibBytes"}')
    message = refused(f"--exp={TINY}", f"--job_log_dir={tmp_path}")
    assert "spmd_trainer.experiments.lm.stdlib.StdlibBytes," in message


@pytest.mark.full
def test_a_directory_that_cannot_be_written(tmp_path: pathlib.Path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert "can't be written" in refused(f"--exp={TINY}", f"--job_log_dir={blocker / 'run'}")


@pytest.mark.full
def test_a_mesh_that_the_devices_do_not_fit(tmp_path: pathlib.Path):
    message = refused(
        f"--exp={TINY}",
        f"--job_log_dir={tmp_path}",
        "--mesh=data:4,mdl:2",
        XLA_FLAGS="--xla_force_host_platform_device_count=3",
    )
    for word in ("8 devices", "there are 3", "--mesh=replica:1,data:3,mdl:1"):
        assert word in message


@pytest.mark.parametrize(
    ("count", "mesh"),
    [
        pytest.param(1, "data=1, mdl=1", marks=pytest.mark.full),
        (3, "data=3, mdl=1"),
        pytest.param(12, "data=6, mdl=2", marks=pytest.mark.full),
    ],
)
def test_the_first_line_says_which_mesh_was_taken_and_why(tmp_path: pathlib.Path, count, mesh):
    result = spmd_trainer(
        f"--exp={TINY}",
        f"--job_log_dir={tmp_path}",
        "--mode=inspect",
        XLA_FLAGS=f"--xla_force_host_platform_device_count={count}",
    )
    assert result.returncode == 0, result.stderr
    first = result.stderr.splitlines()[0]
    assert f"{TINY}: mesh replica=1, {mesh} on {count} host device" in first
    assert_names(first, "adapted", "declared (replica=1, data=4, mdl=2)", "8 devices")


@pytest.mark.full
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("task.train.inputs_split_mapping={'map_1d': ('data',)}", ["map_2d", "inputs_split_mapping"]),
        ("task.train.inputs_split_mapping={'map_1d': ('dta',), 'map_2d': ('data', None)}", ["map_1d", "dta", "data"]),
    ],
)
def test_a_split_mapping_that_does_not_fit(tmp_path: pathlib.Path, override, says):
    message = refused(f"--exp={TINY}", f"--job_log_dir={tmp_path}", f"--fdl.set={override}")
    for word in says:
        assert word in message


def test_help_is_a_page_and_helpfull_has_every_flag():
    page = spmd_trainer("--help")
    assert page.returncode == 0
    for word in (
        "Usage: spmd-trainer",
        "  decode_once ",
        "--fdl.set=PATH=VALUE",
        "--help=MODE",
        "--help=all",
        "Examples",
    ):
        assert word in page.stdout
    assert len(page.stdout.splitlines()) <= 56
    assert "--export_dir" not in page.stdout
    complete = spmd_trainer("--help=all")
    for word in ("--mode=decode_once", "--export_dir", "Exit status", "Pax's flags"):
        assert word in complete.stdout
    assert "repeat this option" not in page.stdout
    full = spmd_trainer("--helpfull")
    assert full.returncode == 0
    assert "--stderrthreshold" in full.stdout


def test_every_flag_stands_on_the_help_page():
    from absl import flags

    from spmd_trainer.cli import flag_parsing, run_flags

    page = flag_parsing.help_page("all")
    for flag in flags.FLAGS.flags_by_module_dict()[run_flags.__name__]:
        assert re.search(rf"^  --(no)?{re.escape(flag.name)}\b", page, re.MULTILINE), flag.name


def test_help_of_a_mode_shows_its_flags():
    page = spmd_trainer("--help=export").stdout
    assert page == spmd_trainer("--mode=export", "--help").stdout
    assert page.index("--export_dir=DIR") < page.index("--job_log_dir=DIR\n")
    assert "--restore_checkpoint_step" in page
    assert "--tasks" not in page
    unknown = spmd_trainer("--help=exprt")
    assert unknown.returncode == 2
    assert "--help=export" in unknown.stderr


def test_list_and_dump():
    listed = spmd_trainer("--list", "--mode=page", "--plan")  # appended to another command
    assert listed.returncode == 0
    assert any(line.startswith(f"{TINY} ") for line in listed.stdout.splitlines())
    dumped = spmd_trainer(f"--exp={TINY}", "--dump", "--fdl.set=task.train.num_train_steps=77")
    assert dumped.returncode == 0
    lines = dumped.stdout.splitlines()
    assert "task.train.num_train_steps: 77" in lines
    assert all(": " in line for line in lines)


@pytest.mark.full
def test_a_command_for_pax_is_understood(tmp_path: pathlib.Path):
    """As GPU scripts write it: an experiment of paxml, class attributes, JAX's flags, and flags without a meaning here."""
    dumped = spmd_trainer(
        "--fdl_config=paxml.tasks.lm.params.lm_cloud.LmCloudSpmd2B",
        f"--job_log_dir={tmp_path / 'run'}",
        "--alsologtostderr",
        "--fdl.NUM_LAYERS=3",
        "--fdl.ICI_MESH_SHAPE=[1,4,1]",
        "--fdl.task.train.num_train_steps=10",
        "--jax_platforms=cpu",
        "--jax_traceback_filtering_option=off",
        "--maybe_use_persistence_checkpointing",
        "--dump",
    )
    assert dumped.returncode == 0, dumped.stderr
    lines = dumped.stdout.splitlines()
    for line in (
        "NUM_LAYERS: 3",
        "ICI_MESH_SHAPE: [1, 4, 1]",
        "task.model.ici_mesh_shape: [1, 4, 1]",
        "task.train.num_train_steps: 10",
    ):
        assert line in lines
    assert len(dumped.stderr.splitlines()) == 1, dumped.stderr
    assert_names(dumped.stderr, "--maybe_use_persistence_checkpointing=True", "Pax", "one format")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once_without_a_traceback(tmp_path: pathlib.Path):
    code = (
        "import sys\n"
        "from absl import flags\n"
        "from spmd_trainer import main\n"
        "from spmd_trainer.cli import launch\n"
        "def interrupt(*args):\n    raise KeyboardInterrupt\n"
        "launch.run = interrupt\n"
        "sys.argv = ['spmd-trainer', '--exp=x']\n"
        "main.run()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 130
    assert "Traceback" not in result.stderr
    assert_names(result.stderr, "same command")
