"""Pax's experiment files work after renaming their imports, and the experiments that ship have the sizes in their names."""

import importlib
import math
import re
import sys

import jax
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lm_cloud_helpers import TINY, differences, load, moved_over, num_params, train
from praxis import layers, pax_fiddle

from spmd_trainer import base_experiment, experiment_registry, tasks_lib
from spmd_trainer.experiments.lm import cloud
from spmd_trainer.inputs import batches
from spmd_trainer.tasks.lm import model_params, transformer_experiment
from spmd_trainer.training import experiment_config

PUBLISHED = ("lm_cloud", "optimal_scaling", "bert")
CLOUD = {
    name.rpartition(".")[2]: cls
    for name, cls in experiment_registry.get_all().items()
    if cls.__module__ == cloud.__name__
}


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as monkeypatch:
        # What the published files register is known to this module's tests alone.
        for table in ("_registry", "_tags", "_full_names_by_key"):
            monkeypatch.setattr(experiment_registry, table, getattr(experiment_registry, table).copy())
        yield monkeypatch


@pytest.fixture(scope="module")
def published(patch):
    """The published files as modules of `spmd_trainer.tasks.lm.params`, where their own imports look for each other."""
    package = "spmd_trainer.tasks.lm.params"
    for module in [package, *(f"{package}.{name}" for name in PUBLISHED)]:
        patch.delitem(sys.modules, module, raising=False)
    yield {name: importlib.import_module(f"{package}.{name}") for name in PUBLISHED}
    for module in [package, *(f"{package}.{name}" for name in PUBLISHED)]:
        sys.modules.pop(module)


@pytest.fixture(scope="module")
def pax(patch):
    """Pax's own model_params, which says what a config must be."""
    return load(patch, "pax_model_params", moved_over("model_params.py"))


def classes(module):
    registered = experiment_registry.get_all().values()
    found = [cls for cls in vars(module).values() if isinstance(cls, type) and cls in registered]
    return [cls for cls in found if cls.__module__ == module.__name__]


def test_only_import_lines_are_renamed():
    renamed = moved_over("params/lm_cloud.py").splitlines()
    touched = [line for line in renamed if "spmd_trainer" in line]
    assert len(touched) == 5
    assert all(line.startswith("from spmd_trainer") for line in touched)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lm_cloud", "optimal_scaling"])
def test_every_published_experiment_resolves_and_builds_at_its_size(published, name):
    assert len(classes(published[name])) > 10
    for cls in classes(published[name]):
        resolved = experiment_config.resolve(f"{name}.{cls.__name__}")
        assert [len(resolved.config.train_datasets), len(resolved.config.eval_datasets)] == [1, 1]
        task = tasks_lib.build_task(resolved.task_p)
        shapes = batches.dataset_input_specs(resolved.config.train_datasets[0])
        size = re.search(r"(\d+)B", cls.__name__)
        if size:
            assert num_params(task, shapes) == pytest.approx(int(size[1]) * 1e9, rel=0.1), cls


@pytest.mark.full
def test_every_published_config_is_the_one_that_pax_makes(published, pax, patch):
    for name in ("lm_cloud", "bert"):
        text = moved_over(f"params/{name}.py")
        on_pax = text.replace(
            "from spmd_trainer.tasks.lm import model_params", "import pax_model_params as model_params"
        )
        reference = load(patch, f"pax_{name}", on_pax)
        for cls in classes(published[name]):
            differing = differences(cls().task(), getattr(reference, cls.__name__)().task())
            # Pax repeats the model's mesh here; the layer inherits it.
            differing.pop("task.model.mlp_tpl.ici_mesh_shape", None)
            assert not differing, cls


class NoData(base_experiment.BaseExperiment):
    def datasets(self):
        return []


SWITCHES = (
    "USE_REPEATED_LAYER",
    "SEPARATE_EMBEDDING",
    "TRAINABLE_POSITION_EMB",
    "RELATIVE_BIAS",
    "ENABLE_DCONV",
    "COMBINE_QKV",
    "USE_GATED_ACTIVATION",
    "TRAINING_OPTIMIZED_SHARDING",
)
ATTRIBUTES = {
    "TransformerLmSpmdAdafactor": {**dict.fromkeys(SWITCHES, st.booleans()), "ICI_MESH_SHAPE": st.just([1, 4, 2])},
    "TransformerLmSpmdPipelineAdafactor": {
        **dict.fromkeys(SWITCHES, st.booleans()),
        "ICI_MESH_SHAPE": st.just([2, 1, 2, 2]),
        "NUM_STAGES": st.just(2),
        "NUM_LAYERS": st.sampled_from([4, 12]),
        "CIRCULAR_REPEAT": st.integers(1, 2),
        "MICROBATCH_SIZE": st.integers(1, 8),
        "STREAM_IO": st.booleans(),
    },
    "TransformerLmPmapAdam": {
        "USE_REPEATED_LAYER": st.booleans(),
        "USE_BIAS": st.booleans(),
        "REL_POS_EMB_DIM": st.sampled_from([None, 16]),
        "INPUT_DROPOUT_PROB": st.sampled_from([0.0, 0.1]),
    },
    "TransformerBertPmapAdam": {"USE_REPEATED_LAYER": st.booleans(), "FORCE_MASK_GENERATION": st.booleans()},
}


@pytest.mark.full
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_any_class_attributes_make_the_config_that_pax_makes(pax, name):
    # No shrinking: it would build hundreds of configs, and the differing fields say enough.
    @settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.fixed_dictionaries(ATTRIBUTES[name]))
    def check(attributes):
        ours, theirs = (
            type("Mine", (getattr(module, name), NoData), attributes)().task() for module in (model_params, pax)
        )
        assert not differences(ours, theirs)

    check()


def test_experts_take_over_what_pax_takes_over(pax):
    def set_up(module, hidden_dims):
        stack_p = pax_fiddle.Config(layers.StackedTransformer, model_dims=8, hidden_dims=16, num_experts=4)
        stack_p.transformer_layer_params_tpl.tr_fflayer_tpl.residual_dropout_prob = 0.3
        stack_p.transformer_layer_params_tpl.tr_fflayer_tpl.hidden_dims = 16
        stack_p.moe_layer_tpl.hidden_dims = hidden_dims
        repeated_p = pax_fiddle.Config(layers.StackedTransformerRepeated, block=stack_p, x_times=2)
        module.maybe_setup_moe_params(repeated_p)
        return repeated_p

    for hidden_dims in (0, 24):
        ours = set_up(model_params, hidden_dims)
        assert not differences(ours, set_up(pax, hidden_dims))
        assert ours.block.moe_layer_tpl.residual_dropout_prob == 0.3
        assert ours.block.moe_layer_tpl.hidden_dims == (hidden_dims or 16)


@pytest.mark.full
@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        ("LmCloudSpmdTest", {"ICI_MESH_SHAPE": [1, 4, 2]}),
        ("LmCloudTransformerAdamTest", {"NUM_HEADS": 4}),
        (
            "LmCloudSpmdPipelineMultislice2BCircular",
            {
                "ICI_MESH_SHAPE": [2, 2, 2, 1],
                "DCN_MESH_SHAPE": [1, 1, 1, 1],
                "NUM_LAYERS": 6,
                "MICROBATCH_SIZE": 2,
                "DIMS_PER_HEAD": 8,
            },
        ),
    ],
)
def test_a_published_experiment_trains_when_its_sizes_are_overridden(published, base, overrides):
    cls = type(f"Tiny{base}", (getattr(published["lm_cloud"], base),), {**TINY, **overrides})
    experiment = cls()
    batch = pax_fiddle.build(experiment.train_datasets()[0]).get_next()
    losses = train(experiment.task(), batch)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.full
def test_the_published_perceptron_steps(published):
    """Its loss is its accuracy, without a gradient: praxis' model has it so."""
    cls = type(
        "TinyMlp",
        (published["lm_cloud"].SmallMlp,),
        {
            "NUM_LAYER": 2,
            "INPUT_DIM": 32,
            "OUTPUT_DIM": 32,
            "HIDDEN_DIM": 48,
            "MAX_SEQ_LEN": 8,
            "PERCORE_BATCH_SIZE": 1,
        },
    )
    experiment = cls()
    batch = pax_fiddle.build(experiment.train_datasets()[0]).get_next()
    losses = train(experiment.task(), batch, steps=2)
    assert all(0 <= loss <= 1 for loss in losses)


def expected_params(cls) -> int:
    """Counted by hand: per layer the four attention projections, two norms, and the feed-forward's weights and biases."""
    dims, hidden = cls.MODEL_DIMS, cls.HIDDEN_DIMS
    attention = 4 * dims * dims + cls.DIMS_PER_HEAD  # and the scale of the queries
    feed_forward = 2 * dims * hidden + hidden + dims
    layer = attention + feed_forward + 2 * 2 * dims
    return cls.NUM_LAYERS * layer + 2 * dims + (dims + 1) * cls.VOCAB_SIZE


SHORT = ("LmCloudSpmd2B", "LmCloudSpmdPipeline9B")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in CLOUD]
)
@pytest.mark.full
def test_a_size_has_the_parameters_and_the_batch_that_it_says(name):
    cls = CLOUD[name]
    resolved = experiment_config.resolve(f"lm.cloud.{name}")
    shapes = batches.dataset_input_specs(resolved.config.train_datasets[0])
    count = num_params(tasks_lib.build_task(resolved.task_p), shapes)
    assert count == expected_params(cls)
    size = re.search(r"(\d+)B", name)
    if size:
        assert count == pytest.approx(int(size[1]) * 1e9, rel=0.1)
    devices = math.prod(cls.ICI_MESH_SHAPE) * math.prod(cls.DCN_MESH_SHAPE)
    assert shapes.ids.shape == (cls.PERCORE_BATCH_SIZE * devices, cls.MAX_SEQ_LEN)
    promised = re.search(r"global batch (\d+)", cls.__doc__)
    if promised:
        assert shapes.ids.shape[0] == int(promised[1])


def test_a_global_batch_is_shared_among_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert cloud.rows_per_process(96) == 24
    with pytest.raises(ValueError, match=r"98 rows.*4 processes.*PERCORE_BATCH_SIZE"):
        cloud.rows_per_process(98)


@pytest.mark.parametrize(
    ("base", "attributes", "message"),
    [
        ("LmCloudSpmd2B", {"DIMS_PER_HEAD": 100}, r"MODEL_DIMS=3072 is not a multiple of DIMS_PER_HEAD=100"),
        ("LmCloudSpmd2B", {"NUM_HEADS": 5}, r"NUM_HEADS=5 times DIMS_PER_HEAD=128 is 640, and MODEL_DIMS is 3072"),
        ("LmCloudSpmd2B", {"DIMS_PER_HEAD": None}, r"neither NUM_HEADS nor DIMS_PER_HEAD"),
        ("LmCloudSpmd2B", {"ICI_MESH_SHAPE": [4, 2]}, r"ICI_MESH_SHAPE is \[4, 2\].*replica, data, mdl"),
        ("LmCloudSpmd2B", {"DCN_MESH_SHAPE": [2]}, r"DCN_MESH_SHAPE is \[2\].*replica, data, mdl"),
        ("LmCloudSpmd2B", {"RELATIVE_BIAS": True, "USE_ROTARY_POSITION_EMB": True}, r"both True"),
        ("LmCloudSpmd2B", {"USE_FP8": True}, r"set USE_FP8 = False"),
        ("LmCloudSpmdPipeline9B", {"ICI_MESH_SHAPE": [1, 4, 2]}, r"stage, replica, data, mdl"),
        ("LmCloudSpmdPipeline9B", {"NUM_STAGES": None}, r"NUM_STAGES is not set"),
        ("LmCloudSpmdPipeline9B", {"NUM_STAGES": 8}, r"NUM_STAGES=8.*= 16 along 'stage'"),
        ("LmCloudSpmdPipeline9B", {"NUM_LAYERS": 50}, r"NUM_LAYERS=50 is not a multiple.*16 \* 1"),
        ("LmCloudSpmdPipeline9B", {"MICROBATCH_SIZE": None}, r"neither NUM_MICROBATCHES nor MICROBATCH_SIZE"),
    ],
)
def test_attributes_that_contradict_each_other_are_refused(base, attributes, message):
    with pytest.raises(ValueError, match=message):
        type("Wrong", (CLOUD[base],), attributes)().task()


def test_fp8_is_refused_as_not_implemented():
    with pytest.raises(NotImplementedError):
        type("Fp8", (cloud.LmCloudSpmd2B,), {"USE_FP8": True})().task()


@given(st.integers(1, 64), st.integers(1, 256))
def test_heads_and_their_width_make_the_model_width(heads, per_head):
    def count(num_heads, dims_per_head):
        attributes = {"MODEL_DIMS": heads * per_head, "NUM_HEADS": num_heads, "DIMS_PER_HEAD": dims_per_head}
        return transformer_experiment.heads_of(type("Sizes", (), attributes))

    assert count(heads, None) == count(None, per_head) == count(heads, per_head) == heads


def test_the_optimizers_of_the_sizes():
    def optimizer(name):
        return CLOUD[name]().task().train.learner.optimizer

    adam, adafactor = optimizer("LmCloudSpmd2B"), optimizer("LmCloudSpmd2BAdafactor")
    assert (adam.beta1, adam.beta2, adam.lr_schedule.warmup_steps) == (0.9, 0.99, 4000)
    assert (adafactor.decay_adam, adafactor.lr_schedule.decay_end) == (0.99, 100000)
    assert CLOUD["LmCloudSpmd2BLimitSteps"]().task().train.num_train_steps == 300
