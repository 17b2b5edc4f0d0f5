"""Logical axes of the decoder map to mesh axes, and mistakes in the mapping are named."""

import jax
import jax.numpy as jnp
from decoder_helpers import evaluating, small_spec
from facts import raises_naming
from praxis import base_layer
from praxis.pax_fiddle import Config

from spmd_trainer.decoder import axes, lm
from spmd_trainer.errors import UserError
from spmd_trainer.models.decoder_spec import MoeSpec

MESH = ("replica", "data", "mdl")


def split_of(path, *, mesh=MESH, moe=None, **fields):
    """Returns how a variable is split: a tuple of mesh axes, or None, for each dimension."""
    lm_p = Config(lm.DecoderLm, name="lm", spec=small_spec(moe=moe), mesh_axis_names=list(mesh), **fields)
    lm_p.ici_mesh_shape = [1] * len(mesh)
    layer = base_layer.instantiate(lm_p)
    ids = jnp.zeros((1, 2), jnp.int32)
    with evaluating():
        hparams = layer.abstract_init_with_metadata(ids, jnp.zeros(ids.shape))["params"]
    for name in path.split("/"):
        hparams = hparams[name]
    return [dim if dim != -1 else None for dim in jax.tree.leaves(hparams)[0].full_split_dims_mapping]


def test_weights_are_split_over_data_and_mdl():
    layer = "layers/sub/layer_0"
    assert split_of("token_emb/w") == [("mdl",), ("data",)]
    assert split_of(f"{layer}/attention/query/w") == [None, ("data",), ("mdl",), None]
    assert split_of(f"{layer}/mlp/down/w") == [None, ("mdl",), ("data",)]
    assert split_of(f"{layer}/mlp_norm/scale") == [None, None]
    moe = Config(MoeSpec, num_experts=3, num_experts_per_token=2, hidden_dims=5)
    assert split_of(f"{layer}/moe/up/w", moe=moe) == [None, ("mdl",), ("data",), None]


def test_axes_can_be_changed_and_missing_mesh_axes_are_left_out():
    changed = {"embed": ("replica", "data"), "mlp": None}
    assert split_of("layers/sub/layer_0/mlp/up/w", axes=changed) == [None, ("replica", "data"), None]
    assert split_of("token_emb/w", mesh=("data",)) == [None, ("data",)]


def test_mistakes_are_named():
    with raises_naming(UserError, "logical axis 'head'", "mean heads"):
        axes.resolve_axes({"head": "mdl"}, MESH)
    with raises_naming(UserError, "axes['mlp']='model'", "no axis 'model'"):
        axes.resolve_axes({"mlp": "model"}, MESH)


def test_pax_sharding_parameters():
    lm_p = Config(lm.DecoderLm, axes={"vocab": None})
    lm_p = lm.DecoderLm.set_sharding_params_v1(
        lm_p,
        replica_axis="replica",
        data_axis="fsdp",
        mdl_axis="tensor",
        ici_mesh_shape=[1, 4, 2],
        mesh_axis_names=["replica", "fsdp", "tensor"],
        training_optimized=True,
    )
    resolved = axes.resolve_axes(lm_p.axes, lm_p.mesh_axis_names)
    assert resolved["embed"] == ("fsdp",)
    assert resolved["heads"] == resolved["activation_embed"] == ("tensor",)
    assert resolved["batch"] == ("replica", "fsdp")
    assert resolved["vocab"] is None
