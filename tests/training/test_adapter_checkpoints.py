"""What a run with adapters saves, and how every mode gets the whole state back: the base is loaded from where it was."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from facts import assert_names, raises_naming
from praxis.pax_fiddle import Config

import spmd_trainer as st
from spmd_trainer.checkpointing import (
    LOAD_ALL,
    Checkpointer,
    CheckpointError,
    CheckpointLoadingRules,
    CheckpointMismatchError,
    CheckpointSource,
    frozen_base,
)
from spmd_trainer.checkpointing.records import SavedVariable
from spmd_trainer.decoder.lora import is_adapter
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.finetune import LoraFromFolder
from spmd_trainer.experiments.lm.hf import FromFolder
from spmd_trainer.hf.safetensors_file import read_header
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.training import adapter_checkpoints, checkpoint_sources, checkpoints, start_checks, start_up, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

FOLDER = pathlib.Path(__file__).parents[1] / "interop" / "data" / "hf" / "llama_tokenizer"
STEPS = 3
ONE_STEP = ["task.train.num_train_steps=1"]
MESH, OTHER_MESH = (1, 4, 2), (1, 2, 4)
SETTINGS = {
    "SEQ_LEN": 8,
    "GLOBAL_BATCH_SIZE": 8,
    "NUM_TRAIN_STEPS": STEPS,
    "CHECKPOINT_EVERY_N_STEPS": 1,
    "EVAL_INTERVAL_STEPS": 0,
    "LEARNING_RATE": 1e-2,
    "FILES": [str(pathlib.Path(__file__))],
    "FOLDER": str(FOLDER),
}
LORA = {"LORA_TARGETS": ["attention/.*/w", "up/w"], "LORA_RANK": 3, "DORA": True, **SETTINGS}


def experiment(base=LoraFromFolder, mesh=MESH, **attributes):
    """The experiment on the golden folder, or `FromFolder` without adapters."""
    settings = LORA if base is LoraFromFolder else SETTINGS
    return type("Tuned", (base,), {"__module__": __name__, "ICI_MESH_SHAPE": mesh, **settings, **attributes})


def job_of(directory, exp=None, *, mode="train", overrides=(), rules=None, **settings):
    """A job that builds and allocates nothing; `rules` replaces the experiment's init_from_checkpoint_rules."""
    config = make_run_config(exp or experiment(), directory, mode=mode, overrides=overrides, **settings)
    if rules is not None:
        config.experiment.config.task.train.init_from_checkpoint_rules = rules
    return Job.build(config)


def first_state(job):
    with Checkpointer(job.config.job_log_dir / "checkpoints") as own:
        return start_up.first_state(job, own)


def restored(directory, exp=None, **settings):
    """The variables that evaluation restores, by path, at logical shapes."""
    job = job_of(directory, exp, mode="eval", **settings)
    state = checkpoints.restore_for_inference(job, "none").state
    return logical(job.partitioner.layout.without_opt_states(), state)


def logical(metadata, state):
    leaves = jax.tree.leaves(jax.tree.map(np.asarray, state))
    specs = metadata.records()
    return {spec.path: leaf[tuple(map(slice, spec.logical_shape))] for spec, leaf in zip(specs, leaves, strict=True)}


def record_of(run, step=STEPS):
    return json.loads((run / "checkpoints" / str(step) / "record" / "record.json").read_text())


def assert_equal(found, wanted, only=lambda path: True):
    paths = [path for path in wanted if only(path)]
    assert paths
    for path in paths:
        np.testing.assert_array_equal(found[path], wanted[path], err_msg=path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run with adapters, and its last state. To be read only."""
    directory = epath.Path(tmp_path_factory.mktemp("trained")) / "run"
    result = st.train(experiment(), directory)
    return directory, {path: np.asarray(leaf) for path, leaf in named_leaves(result.state)}


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run's directory."""
    return epath.Path(shutil.copytree(trained[0], tmp_path / "run"))


def test_a_checkpoint_holds_what_is_trained_and_names_its_base(trained):
    run, state = trained
    record = record_of(run)
    assert all(is_adapter(path) or path == "step" or path.startswith("opt_states/") for path in record["variables"])
    base = {path for path in state if frozen_base.is_base(path)}
    noted = record["metadata"]["base"]
    assert noted["checksum"].keys() == noted["dtype"].keys() == base
    assert all(len(checksum) == 16 for checksum in noted["checksum"].values())
    assert noted["path"] == [str(FOLDER)]
    assert noted["source"] == [f"Hugging Face folder {FOLDER}"]
    assert record["metadata"]["adapters"] == {"rank": 3, "alpha": 32.0, "rslora": False, "dora": True}
    assert record["metadata"]["hugging_face_folder"] == {"path": str(FOLDER)}
    # The first checkpoint, of step 0, has the same base.
    assert record_of(run, 0)["metadata"]["base"] == noted


def test_orbax_reads_the_adapters_by_itself(trained):
    run, state = trained
    tree = ocp.PyTreeCheckpointer().restore(run / "checkpoints" / str(STEPS) / "state")
    assert set(tree["mdl_vars"]) == {"params"}
    assert set(tree["mdl_vars"]["params"]) == {"lora"}
    rank = tree["mdl_vars"]["params"]["lora"]["lm"]["layers"]["sub"]["layer_0"]["attention"]["query"]["w"]["a"]
    assert rank.shape[-1] == 3
    assert sum(leaf.size for leaf in jax.tree.leaves(tree["mdl_vars"])) < sum(
        leaf.size for path, leaf in state.items() if frozen_base.is_base(path)
    )


@pytest.mark.full
def test_adapters_alone_are_not_given_as_the_models_variables(trained):
    run, state = trained
    count = sum(map(frozen_base.is_base, state))
    with raises_naming(
        CheckpointError,
        "load_variables",
        f"step {STEPS}",
        "adapters alone",
        f"the {count} variables",
        FOLDER,
        "export(",
    ):
        st.load_variables(run)


@pytest.mark.full
def test_every_mesh_restores_the_same_state_and_computes_the_same_checksums(trained):
    run, state = trained
    for mesh in (MESH, OTHER_MESH, (1, 1, 8)):
        found = restored(run, experiment(mesh=mesh))
        assert_equal(found, {path: found[path] for path in found}, lambda path: path != "step")
        if mesh == MESH:
            first = found
            slices = {path: tuple(map(slice, leaf.shape)) for path, leaf in found.items()}
            assert_equal(found, {path: state[path][slices[path]] for path in found})
        assert_equal(found, first)


@pytest.mark.full
def test_a_resumed_run_ends_like_an_uninterrupted_one(trained, tmp_path):
    """At another place, because the first start of the run read a folder that has been moved since."""
    folder = shutil.copytree(FOLDER, tmp_path / "folder")
    begun = experiment(FOLDER=str(folder))
    st.train(begun, tmp_path / "run", overrides=ONE_STEP)
    folder.rename(tmp_path / "moved")
    moved = experiment(FOLDER=str(tmp_path / "moved"))
    result = st.train(moved, tmp_path / "run")
    assert_equal({path: np.asarray(leaf) for path, leaf in named_leaves(result.state)}, trained[1])
    assert record_of(tmp_path / "run")["metadata"]["base"]["path"] == [str(tmp_path / "moved")]


def changed_folder(tmp_path, name):
    """A copy of the folder in which one number of a tensor differs in its last bit."""
    folder = shutil.copytree(FOLDER, tmp_path / "changed")
    file = folder / "model.safetensors"
    tensor = read_header(str(file))[name]
    content = bytearray(file.read_bytes())
    content[tensor.start] ^= 1
    file.write_bytes(bytes(content))
    return folder


@pytest.mark.parametrize("mode", [pytest.param("train", marks=pytest.mark.full), "eval"])
@pytest.mark.full
def test_another_base_is_refused(mode, run, tmp_path):
    folder = changed_folder(tmp_path, "model.layers.1.mlp.up_proj.weight")
    exp = experiment(FOLDER=str(folder))
    with pytest.raises(CheckpointMismatchError) as error:
        first_state(job_of(run, exp)) if mode == "train" else restored(run, exp)
    total = len(record_of(run)["metadata"]["base"]["checksum"])
    message = str(error.value)
    assert_names(message, f"step 3 in {run}/checkpoints", "another base", f"1 of {total} variables")
    base = "Hugging Face folder"
    assert_names(message, f"adapters: {base} {FOLDER}\n", f"job: {base} {folder}\n")
    assert_names(message, "other values: mdl_vars/params/lm/layers/sub/layer_0/mlp/up/w\nFix")
    assert message.count("mdl_vars") == 1
    assert_names(message, "task.train.init_from_checkpoint_rules", "CheckpointLoadingRules(step=N)")


@pytest.mark.full
def test_a_base_of_another_dtype_is_refused(run):
    with raises_naming(
        CheckpointMismatchError, "other dtype: mdl_vars/", "float32 then, bfloat16 now", "Fix", "the dtype"
    ):
        restored(run, experiment(VARIABLE_DTYPE="bfloat16"))


@pytest.mark.parametrize(
    ("attributes", "facts"),
    [
        ({"LORA_ALPHA": 8.0}, ("trained with alpha=32.0", "task.lora has alpha=8.0", "task.lora.alpha=32.0")),
        pytest.param({"DORA": False}, ("magnitude, saved",), marks=pytest.mark.full),
        pytest.param({"LORA_RANK": 4}, ("task.lora.rank", "was 3", "is 4"), marks=pytest.mark.full),
    ],
)
def test_other_settings_of_the_adapters_are_refused(attributes, facts, trained):
    with raises_naming(CheckpointMismatchError, *facts):
        first_state(job_of(trained[0], experiment(**attributes)))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_run_without_adapters_says_what_the_checkpoint_is(mode, trained):
    plain = experiment(FromFolder)
    with raises_naming(CheckpointMismatchError, "adapters alone", "task.lora is None", "--mode=export") as error:
        first_state(job_of(trained[0], plain)) if mode == "train" else restored(trained[0], plain)
    assert "missing" not in str(error.value)
    rules = {str(trained[0]): CheckpointLoadingRules(load_rules=[LOAD_ALL])}
    with raises_naming(CheckpointMismatchError, "adapters alone"):
        first_state(job_of(trained[0].parent / "none", plain, rules=rules))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run without adapters, with steps 0 and 2."""
    directory = epath.Path(tmp_path_factory.mktemp("whole")) / "run"
    exp = experiment(FromFolder)
    st.train(exp, directory, overrides=["task.train.num_train_steps=2"])
    return directory


@pytest.mark.full
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_run_with_adapters_says_that_the_checkpoint_is_a_whole_model(mode, whole):
    with raises_naming(
        CheckpointMismatchError, "a whole model", "task.train.init_from_checkpoint_rules", "task.lora=None"
    ):
        first_state(job_of(whole)) if mode == "train" else restored(whole)


class OtherTrainers(CheckpointSource):
    """A checkpoint of another trainer, with an experiment's variables."""

    def read(self, wanted, mesh, source):
        return dict.fromkeys(wanted)


@pytest.mark.parametrize("holds_base", [True, False])
@pytest.mark.parametrize("partial", [True, False])
def test_adapters_of_another_trainer_are_refused_with_what_is_there(holds_base, partial, tmp_path, monkeypatch):
    """Evaluation took them without the base; training named each variable of the base as one that the model lacks."""
    job = job_of(tmp_path / "run", mode="eval", restore_checkpoint_dir=tmp_path / "theirs")
    layout = job.partitioner.layout.without_opt_states()
    saved = {
        spec.path: SavedVariable.from_spec(spec)
        for spec in layout.records()
        if holds_base or not frozen_base.is_base(spec.path)
    }
    label = f"Pax checkpoint {tmp_path / 'theirs'}"
    theirs = OtherTrainers(label, 20, saved, {})
    monkeypatch.setattr(checkpoint_sources, "open_whole_model", lambda *args: theirs)
    first = next(filter(is_adapter, saved))
    number = sum(map(is_adapter, saved))
    with raises_naming(CheckpointMismatchError, label, f"{number} variables", first, "init_from_checkpoint_rules"):
        checkpoints.restore_from(job, layout, step=None, partial=partial, with_input=False)


@pytest.mark.full
def test_a_base_from_a_run(whole, tmp_path):
    """The run went on since: its newest step is another base, and the step must be named."""
    exp, all_of = experiment(), {"load_rules": [LOAD_ALL], "load_step": True}
    rules = {str(whole): CheckpointLoadingRules(step=0, **all_of)}
    job = job_of(tmp_path / "run", exp, rules=rules)
    begun = first_state(job)
    assert begun.origin["base"]["source"] == [f"step 0 in {whole}/checkpoints"]
    with Checkpointer(tmp_path / "run" / "checkpoints") as own:
        variables = job.partitioner.metadata.variables
        trained = (frozen_base.trained_part(tree, variables) for tree in (begun.state, variables))
        own.save(0, *trained, input_state=None, metadata=begun.origin)
    again = restored(tmp_path / "run", exp, rules=rules)
    assert_equal(again, logical(job.partitioner.metadata, begun.state), frozen_base.is_base)
    newest = {str(whole): CheckpointLoadingRules(**all_of)}
    with pytest.raises(CheckpointMismatchError, match=r"(?s)adapters: step 0 in .*this job: step 2 in .*step=N"):
        restored(tmp_path / "run", exp, rules=newest)


@pytest.mark.full
def test_adapters_of_another_run(trained, tmp_path):
    run, _ = trained
    adapters = CheckpointLoadingRules(load_rules=[("params/lora/(.*)", "params/lora/{}")])
    everything = CheckpointLoadingRules(load_rules=[LOAD_ALL])
    saved = restored(run)
    for rules in ({FOLDER: everything, run: adapters}, {run: everything, FOLDER: everything}):
        job = job_of(tmp_path / "run", rules={str(path): rule for path, rule in rules.items()})
        begun = first_state(job)
        found = logical(job.partitioner.metadata, begun.state)
        assert int(begun.state.step) == 0
        assert_equal(found, saved, lambda path: path != "step")
        assert begun.origin["base"]["path"] == [str(FOLDER)]
        moments = [leaf for path, leaf in found.items() if path.startswith("opt_states/") and leaf.ndim > 1]
        assert moments
        assert not any(leaf.any() for leaf in moments)
    job = job_of(tmp_path / "run", experiment(LORA_ALPHA=1.0), rules={str(run): everything, str(FOLDER): everything})
    with pytest.raises(CheckpointMismatchError, match=r"adapters of step 3 in .* trained with alpha=32.0"):
        first_state(job)


@pytest.mark.full
def test_rules_for_adapters_must_find_some(tmp_path):
    rules = {str(FOLDER): CheckpointLoadingRules(load_rules=[("params/lora/(.*)", "params/lora/{}"), LOAD_ALL])}
    with raises_naming(CheckpointMismatchError, "load_rules[0]", "mdl_vars/params/lora/lm/", "no adapters"):
        first_state(job_of(tmp_path / "run", rules=rules))


def test_a_fresh_run_begins_as_its_base(tmp_path):
    """b is 0, and with DoRA the magnitudes are the norms of the base that was loaded, not of the initial one."""
    job = job_of(tmp_path / "run")
    found = logical(job.partitioner.metadata, first_state(job).state)
    prefix = "lm/layers/sub/layer_0/attention/query/w"
    weight = found[f"mdl_vars/params/{prefix}"]
    norms = np.sqrt((weight.astype(np.float64) ** 2).sum(axis=1))
    np.testing.assert_allclose(found[f"mdl_vars/params/lora/{prefix}/magnitude"], norms, rtol=1e-6)
    assert not found[f"mdl_vars/params/lora/{prefix}/b"].any()
    assert found[f"mdl_vars/params/lora/{prefix}/a"].any()


@pytest.mark.full
def test_a_damaged_step_gives_way_to_an_older_one(run):
    manifest = run / "checkpoints" / str(STEPS) / "manifest.json"
    manifest.write_text(manifest.read_text()[:50])
    state, _, _ = first_state(job_of(run))
    assert int(state.step) == STEPS - 1
    assert (run / "checkpoints" / f"refused-{STEPS}").exists()


@pytest.mark.full
def test_following_a_run_loads_the_base_once(trained, monkeypatch):
    run, _ = trained
    loads = []
    load = adapter_checkpoints._load_base
    monkeypatch.setattr(adapter_checkpoints, "_load_base", lambda *args: loads.append(1) or load(*args))
    monkeypatch.setattr(checkpoints, "iterate_checkpoints", lambda *_, **__: iter([0, 2, STEPS]))
    job = job_of(run, mode="eval")
    states = [
        logical(job.partitioner.layout.without_opt_states(), state)
        for state in (restored.state for restored in checkpoints.follow(job, "none"))
    ]
    assert len(loads) == 1
    assert [int(state["step"]) for state in states] == [0, 2, STEPS]
    assert_equal(states[2], restored(run))
    adapter = "mdl_vars/params/lora/lm/layers/sub/layer_0/attention/query/w/b"
    assert not states[0][adapter].any()
    assert states[1][adapter].any()


@pytest.mark.full
def test_a_base_that_no_rule_loads_is_initialised_again(tmp_path, caplog):
    job = job_of(tmp_path / "run", rules={})
    begun = first_state(job)
    assert_names(
        caplog.text, "frozen base", "such as mdl_vars/params/lm/", "from no checkpoint", "task.train.random_seed"
    )
    with Checkpointer(tmp_path / "run" / "checkpoints") as own:
        variables = job.partitioner.metadata.variables
        trained = (frozen_base.trained_part(tree, variables) for tree in (begun.state, variables))
        own.save(0, *trained, input_state=None, metadata=begun.origin)
    found = restored(tmp_path / "run", experiment(mesh=OTHER_MESH), rules={})
    assert_equal(found, logical(job.partitioner.metadata, begun.state), lambda path: not path.startswith("opt_states"))
    with pytest.raises(CheckpointMismatchError, match=r"initialised from task.train.random_seed\n .*other values"):
        restored(tmp_path / "run", rules={}, overrides=["task.train.random_seed=5"])


@pytest.mark.full
def test_the_folder_of_restore_checkpoint_dir_is_the_base_from_then_on(tmp_path):
    """Without rules, and without the flag at the next start."""
    job = job_of(tmp_path / "run", rules={}, restore_checkpoint_dir=epath.Path(FOLDER))
    begun = first_state(job)
    assert begun.origin["base"]["restored_from"] == str(FOLDER)
    with Checkpointer(tmp_path / "run" / "checkpoints") as own:
        variables = job.partitioner.metadata.variables
        trained = (frozen_base.trained_part(tree, variables) for tree in (begun.state, variables))
        own.save(0, *trained, input_state=None, metadata=begun.origin)
    again = first_state(job_of(tmp_path / "run", rules={}))
    assert again.origin == begun.origin
    assert_equal(logical(job.partitioner.metadata, again.state), logical(job.partitioner.metadata, begun.state))
    # Evaluated before training, the model is the base.
    before = restored(tmp_path / "none", restore_checkpoint_dir=epath.Path(FOLDER))
    assert_equal(before, logical(job.partitioner.metadata, begun.state), frozen_base.is_base)


def values(folder):
    """All tensors of a folder by name."""
    tensors = read_header(str(folder / "model.safetensors"))
    return {name: tensor.read_rows(0, tensor.shape[0]) for name, tensor in tensors.items()}


@pytest.mark.full
def test_adapters_are_exported_merged_or_alone_and_read_again(trained, tmp_path):
    run, _ = trained
    assert st.export(experiment(), run, tmp_path / "merged") == STEPS
    assert st.export(experiment(mesh=OTHER_MESH), run, tmp_path / "adapter", adapter=True) == STEPS
    merged, base = values(tmp_path / "merged"), values(FOLDER)
    assert merged.keys() == base.keys()
    adapted = {name for name in base if not np.array_equal(merged[name], base[name])}
    assert {name.split(".")[-2] for name in adapted} == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj"}
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(FOLDER)
    # As a checkpoint to evaluate or to export, to begin with, and in rules.
    folder = epath.Path(tmp_path / "adapter")
    assert_equal(restored(tmp_path / "a", restore_checkpoint_dir=folder), restored(run), lambda path: path != "step")
    begun = first_state(job_of(tmp_path / "b", rules={}, restore_checkpoint_dir=folder))
    assert begun.origin["base"]["restored_from"] == str(FOLDER)
    everything = CheckpointLoadingRules(load_rules=[LOAD_ALL])
    job = job_of(tmp_path / "c", rules={str(FOLDER): everything, str(folder): everything})
    for state in (begun.state, first_state(job).state):
        assert_equal(logical(job.partitioner.metadata, state), restored(run), lambda path: path != "step")


@pytest.mark.full
def test_what_is_refused_of_folders_and_flags(trained, tmp_path):
    run, _ = trained
    with pytest.raises(UserError, match="writes float32"):
        st.export(experiment(), run, tmp_path / "out", adapter=True, dtype="bfloat16")
    with raises_naming(UserError, "--export_adapter", "no adapters", "task.lora is None"):
        st.export(experiment(FromFolder), tmp_path, tmp_path / "out", adapter=True, restore_checkpoint_dir=FOLDER)
    st.export(experiment(), run, tmp_path / "adapter", adapter=True)
    with raises_naming(CheckpointError, tmp_path / "adapter", "adapters of PEFT", "task.lora is None"):
        restored(tmp_path / "a", experiment(FromFolder), restore_checkpoint_dir=epath.Path(tmp_path / "adapter"))
    plain = job_of(tmp_path / "b", experiment(FromFolder), restore_checkpoint_dir=epath.Path(tmp_path / "adapter"))
    with raises_naming(CheckpointError, tmp_path / "adapter", "adapters of PEFT", "task.lora is None"):
        first_state(plain)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "org/model"}))
    with raises_naming(UserError, tmp_path / "adapter", "adapter_config.json", "task.train.init_from_checkpoint_rules"):
        first_state(job_of(tmp_path / "c", rules={}, restore_checkpoint_dir=epath.Path(tmp_path / "adapter")))


def test_folders_in_restore_checkpoint_dir_are_checked_at_the_start(tmp_path, caplog):
    adapters = epath.Path(FOLDER).parents[1] / "peft" / "lora"

    def check(directory, **settings):
        config = make_run_config(
            experiment(), tmp_path / "run", restore_checkpoint_dir=epath.Path(directory), **settings
        )
        start_checks.check_directories(config)

    check(adapters, mode="eval")
    check(adapters)
    assert "init_from_checkpoint_rules" not in caplog.text  # the base is loaded by them
    check(FOLDER)
    assert_names(caplog.text, "init_from_checkpoint_rules", "not used", f"--restore_checkpoint_dir={FOLDER}")
    with pytest.raises(UserError, match=f"no step 7 in {adapters}; there are 0"):
        check(adapters, mode="eval", restore_checkpoint_step=7)


@pytest.mark.full
def test_a_run_remembers_the_folder_that_it_was_restored_from(tmp_path):
    """Without the flag, the folder that `lm.hf` reads is not known; before, the export had no tokenizer."""
    folder = shutil.copytree(FOLDER, tmp_path / "folder")
    exp, runs = experiment(FromFolder, VARIABLE_DTYPE="float32"), tmp_path / "run"

    class WithoutRules(exp):
        def task(self) -> Config:
            task_p = super().task()
            task_p.train.init_from_checkpoint_rules = {}
            return task_p

    train.train(job_of(runs, WithoutRules, restore_checkpoint_dir=epath.Path(folder), overrides=ONE_STEP))
    assert record_of(runs, 1)["metadata"]["hugging_face_folder"] == {"path": str(folder)}
    st.train(WithoutRules, runs, overrides=["task.train.num_train_steps=2"])
    assert record_of(runs, 2)["metadata"]["hugging_face_folder"] == {"path": str(folder)}
    st.export(WithoutRules, runs, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    # Another run that goes on from this one's checkpoint is of the same folder.
    other = job_of(tmp_path / "other", WithoutRules, restore_checkpoint_dir=epath.Path(runs / "checkpoints"))
    assert first_state(other).origin == {"hugging_face_folder": {"path": str(folder)}}


def test_the_bases_of_two_records_are_compared_by_variable():
    record = frozen_base.BaseRecord(
        ("a",), ("folder a",), {"x": "1", "y": "2", "z": "3"}, dict.fromkeys("xyz", "float32")
    )
    record.require_same(frozen_base.BaseRecord.from_json(record.to_json()), "step 1")
    other = dataclasses.replace(
        record, checksums={"x": "1", "y": "9", "w": "3"}, dtypes=dict.fromkeys("xyw", "float32")
    )
    with pytest.raises(
        CheckpointMismatchError, match=r"3 of 3 variables(?s:.*)any more: z\n.*then: w\n.*other values: y\n"
    ):
        record.require_same(other, "step 1")
