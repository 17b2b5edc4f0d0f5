"""Variables for the tests of the report."""

import html
import re

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from spmd_trainer.sharding import VariableSpec, make_variable_spec

MESH = jax.sharding.AbstractMesh((1, 4, 2), ("replica", "data", "mdl"))
LONG_PATH = "mdl_vars/params/lm/" + "transformer/repeat/sub/" * 6 + "ffn/w"
LONG_REASON = (
    "rule 7 ('.*/(query|key|value)/w', [shard_dim(dim=1, axis='mdl'), fsdp(axis='data', min_size_to_shard_mb=0)])"
)


def record(path: str, shape: tuple[int, ...], spec: P | None = None, reason: str = "declared") -> VariableSpec:
    return make_variable_spec(path, shape, np.float32, spec, MESH.shape, reason)


VARIABLES = {
    "emb": record("emb/table", (101, 64), P("data", "mdl"), "declared"),
    "scale": record("ln/scale", (64,), P(), "replicated: no rule matched"),
    "kernel": record("out/kernel", (64, 8), P("data"), "rule 2 ('kernel', fsdp(axis='data'))"),
    "evil": record("evil/</script><b>x", (), P(), "replicated: <b>bold</b>"),
}
# Variables of every kind, the largest split one neither first nor the largest of all.
TRAIN_STATE = [
    record("step", (), P(), "replicated: a scalar"),
    record("mdl_vars/params/bias", (512,), P("mdl")),
    record(LONG_PATH, (30, 16), P("data", "mdl"), LONG_REASON),
    record(
        "mdl_vars/non_trainable/mean",
        (1000,),
        P(),
        "replicated: no split mapping; task.train.sharding_strategy=[...] gives one",
    ),
    record("opt_states/0/m/params/bias", (512,), P("mdl"), "follows its variable"),
    record("opt_states/0/m/" + LONG_PATH, (30, 16), P("data", "mdl"), "follows its variable"),
    record("extra_state/0", (3,)),
]


def texts(dom: str, pattern: str) -> list[str]:
    return [html.unescape(re.sub(r"<[^>]*>", "", found)) for found in re.findall(pattern, dom, flags=re.DOTALL)]
