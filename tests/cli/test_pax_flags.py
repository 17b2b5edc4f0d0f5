"""Pax's flags: every one of paxml's main.py does what it means, says what happens instead, or is refused."""

import ast
import copy
import importlib.util
import logging
import os
import pathlib

import jax
import pytest
from absl import flags
from facts import assert_names

from spmd_trainer.cli import flag_parsing, pax_flags, run_flags
from spmd_trainer.errors import UserError

PAXML = pathlib.Path(importlib.util.find_spec("praxis").origin).parents[1] / "paxml"


def parsed(*arguments):
    """The trainer's flags and Pax's after parsing a command line, apart from the process's own."""
    own = flags.FlagValues()
    for flag in flags.FLAGS.flags_by_module_dict()[run_flags.__name__]:
        own[flag.name] = copy.deepcopy(flag)
    own["exp"].unparse()
    of_pax = pax_flags.define()
    rest = flag_parsing.parse_into(own, of_pax, ["spmd-trainer", *arguments])
    assert rest == ["spmd-trainer"]
    return own, of_pax


def refused(*arguments):
    with pytest.raises(UserError) as error:
        parsed(*arguments)
    return str(error.value)


def flags_of_paxml():
    """Names of all flags that paxml's main.py defines."""
    names = set()
    for node in ast.walk(ast.parse((PAXML / "main.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("DEFINE_"):
            names.add(node.args[0].value)
    return sorted(names)


def a_value(flag):
    """A value that is not Pax's default and not what happens here anyway."""
    if flag.kind is bool:
        return str(False in flag.silent)
    return "1" if flag.kind is int else "x"


@pytest.mark.parametrize("name", flags_of_paxml())
def test_every_flag_of_paxml_is_known(name):
    own = {flag.name for flag in flags.FLAGS.flags_by_module_dict()[run_flags.__name__]}
    assert name in own | {flag.name for flag in pax_flags.FLAGS}


@pytest.mark.parametrize("flag", [flag for flag in pax_flags.FLAGS if flag.refused], ids=lambda flag: flag.name)
def test_a_refused_flag_says_what_to_use_instead(flag):
    message = refused(f"--{flag.name}={a_value(flag)}")
    assert_names(message, f"--{flag.name}", "flag of Pax", "not supported", flag.instead)
    for value in flag.silent:
        parsed(f"--{flag.name}={value}")


@pytest.mark.parametrize(
    "flag", [flag for flag in pax_flags.FLAGS if flag.instead and not flag.refused], ids=lambda flag: flag.name
)
def test_an_ignored_flag_is_one_line(flag, caplog):
    _, of_pax = parsed(f"--{flag.name}={a_value(flag)}")
    with caplog.at_level(logging.WARNING):
        pax_flags.take_effect(of_pax, [])
    (line,) = caplog.messages
    assert_names(line, f"--{flag.name}={of_pax[flag.name].value}", "flag of Pax", flag.instead)
    caplog.clear()
    for value in flag.silent:
        pax_flags.take_effect(parsed(f"--{flag.name}={value}")[1], [])
    assert not caplog.messages


def test_class_attributes_and_fields_have_pax_spellings():
    own, _ = parsed(
        "--fdl_config=a.B",
        "--fdl.NUM_LAYERS=3",
        "--fdl.ICI_MESH_SHAPE=[1,8,1]",
        "--fdl.task.train.num_train_steps",
        "7",
        "--fdl_set=MODEL_DIMS=64",
        "--fdl=set:DROPOUT_PROB=0.1",
        "--fdl.set=MAX_STEPS=5",
    )
    assert own.exp == "a.B"
    assert sorted(own["fdl.set"].value) == [
        "DROPOUT_PROB=0.1",
        "ICI_MESH_SHAPE=[1,8,1]",
        "MAX_STEPS=5",
        "MODEL_DIMS=64",
        "NUM_LAYERS=3",
        "task.train.num_train_steps=7",
    ]


@pytest.mark.parametrize("spelling", ["--fdl_config=a.B", "--fdl=config:a.B", "--exp=a.B"])
def test_the_experiment_has_three_spellings(spelling):
    assert parsed(spelling)[0].exp == "a.B"
    assert parsed(spelling, "--exp=a.B")[0].exp == "a.B"


def test_an_experiment_of_paxml_is_looked_up_here():
    own, _ = parsed("--fdl_config=paxml.tasks.lm.params.lm_cloud.LmCloudSpmd2B")
    assert own.exp == "spmd_trainer.tasks.lm.params.lm_cloud.LmCloudSpmd2B"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--exp=a.B", "--fdl_config=a.C"], "--exp=a.B and --fdl_config=a.C mean the same setting"),
        (["--fdl=fiddler:f"], "give a registered experiment with --exp=NAME"),
        (["--mode=tf_data_service_worker"], "there is no tf.data service here"),
        (["--num_processes=2", "--num_hosts=3"], "--num_processes=2 and --num_hosts=3 mean the same setting"),
        (["--server_adr=a:1"], "unknown flag --server_adr; did you mean --server_addr"),
        (["--num_hosts=two"], "num_hosts"),
        (["--num_hosts=0"], "num_processes"),
        (
            ["--mode=decode_once", "--restore_checkpoint_step=1", "--restore_checkpoint_step=2"],
            "run the command once for each step",
        ),
    ],
)
def test_contradictions_and_mistakes_are_refused(arguments, says):
    assert says in refused(*arguments)


def test_processes_are_described_in_pax_words():
    own, _ = parsed("--multiprocess_gpu", "--server_addr=10.0.0.1:8476", "--num_hosts=4", "--host_idx=0")
    assert (own.coordinator_address, own.num_processes, own.process_id) == ("10.0.0.1:8476", 4, 0)
    assert own.distributed is None
    assert parsed("--multiprocess_gpu")[0].distributed == "auto"
    assert parsed("--nomultiprocess_gpu")[0].distributed is None


def test_flags_of_jax_are_set_in_its_config(monkeypatch):
    monkeypatch.setattr(jax.config, "update", (updates := {}).__setitem__)
    _, of_pax = parsed(
        "--jax_log_compiles",
        "--nojax_enable_checks",
        "--jax_platforms",
        "cpu",
        "--jax_debug_nans=true",
        "--globally_use_hardware_rng",
        "--jax_traceback_filtering_option=off",
        "--exp=a.B",
    )
    pax_flags.take_effect(of_pax, [])
    assert updates == {
        "jax_log_compiles": True,
        "jax_enable_checks": False,
        "jax_platforms": "cpu",
        "jax_debug_nans": True,
        "jax_default_prng_impl": "rbg",
        "jax_traceback_filtering": "off",
    }


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--jax_log_compile", "unknown flag --jax_log_compile; did you mean --jax_log_compiles"),
        ("--jax_cach_dir=x", "unknown flag --jax_cach_dir; did you mean --jax_cache_dir"),
        ("--jax_default_prng_impl=fast", "jax_default_prng_impl"),
        ("--jax_debug_nans=maybe", "jax_debug_nans"),
    ],
)
def test_flags_that_jax_does_not_take_are_refused(argument, says, monkeypatch):
    monkeypatch.setattr(jax.config, "update", pytest.fail)
    own, of_pax = parsed(argument)
    with pytest.raises(UserError, match=says):
        pax_flags.take_effect(of_pax, [*own, *of_pax])


def test_the_folder_of_tfds_is_set_for_all_that_read_it(monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/elsewhere")
    pax_flags.take_effect(parsed("--tfds_data_dir=/data/tfds")[1], [])
    assert os.environ["TFDS_DATA_DIR"] == "/data/tfds"


def test_arguments_behind_two_dashes_are_left_alone():
    assert pax_flags.without_dotted(["--exp", "a.B", "--", "--fdl.X=1", "--jax_y"], ["exp"]) == (
        ["--exp", "a.B", "--", "--fdl.X=1", "--jax_y"],
        [],
    )
