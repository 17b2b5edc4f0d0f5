"""The house: a file imports from its own floor or below, and there are no circles."""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "spmd_trainer"
# Lowest first. A package's files share its floor; what is not named here stands on the floor of its package.
FLOORS = [
    [
        "praxis_bridge",
        "installation",
        "quiet_tensorflow",
        "user_code",
        "errors",
        "garbage",
        "hardware",
        "hlo_collectives",
        "hlo_liveness",
    ],
    ["sharding"],
    [
        "train_states",
        "variable_masks",
        "optax_bridge",
        "learners",
        "tasks_lib",
        "base_experiment",
        "experiment_registry",
        "experiment_modules",
        "experiments",
        "experiment_config",
        "tasks",
        "inputs",
    ],
    ["collectives", "step_fns", "minibatches"],
    [
        "state_specs",
        "moving",
        "carried_padding",
        "batch_rows",
        "partitioning",
        "gathered_on_use",
        "shard_map_passes",
        "shard_map_partitioning",
        "checkpointing",
        "metrics",
    ],
    ["programs"],
    ["main", "cli", "api", "__init__"],
]
LIBRARY_ONLY = {"praxis", "tensorflow", "flax", "fiddle", "clu", "orbax", "lingvo", "optax", "absl", "etils", "jinja2"}


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imports(path: pathlib.Path, *, top_level_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from package import module` needs the module; the package's own face only where a name is not a module.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in FILES else node.module or "")
    return found


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def floor(module: str) -> int:
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else "__init__"
    return next(level for level, names in enumerate(FLOORS) if top in names)


@pytest.mark.parametrize("module", sorted(FILES))
def test_nothing_imports_upward(module):
    for imported in imports(FILES[module], top_level_only=False) & FILES.keys():
        assert floor(imported) <= floor(module), f"{module} imports {imported}"


def test_no_circles():
    graph = {
        module: {i for i in imports(path, top_level_only=True) & FILES.keys() if i != module and i != "spmd_trainer"}
        for module, path in FILES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_sharding_stands_alone():
    for module, path in FILES.items():
        if module.startswith("spmd_trainer.sharding"):
            for imported in imports(path, top_level_only=False):
                assert imported.split(".")[0] not in LIBRARY_ONLY, f"{module} imports {imported}"
                if imported.startswith("spmd_trainer."):
                    assert imported.startswith("spmd_trainer.sharding"), f"{module} imports {imported}"


def test_only_the_bridge_knows_that_praxis_is_old():
    for module, path in FILES.items():
        if module != "spmd_trainer.praxis_bridge":
            text = path.read_text()
            for word in ("jax.tree_map(", "thread_resources", "jax.lib", "pxla"):
                assert word not in text, f"{module} mentions {word}"
