"""A file imports from its own layer or below, without cycles."""

import ast
import functools
import graphlib
import pathlib

from spmd_trainer.pax import import_table

ROOT = pathlib.Path(__file__).parents[1] / "spmd_trainer"
# Lowest first. A package's files share its layer.
LAYERS = [
    ["errors", "settings", "multihost", "storage", "pax/bridge", "pax/task_fields", "sharding"],
    ["train_states", "models", "kernels", "inputs"],
    [
        *("step", "tasks_lib", "base_experiment", "experiment_registry", "experiment_modules", "experiments"),
        *("task_defaults", "decoder", "decoder/lora"),
    ],
    ["checkpointing"],
    ["pax", "hf", "lm_eval/settings"],
    ["callbacks", "training"],
    [
        *("watch", "lm_eval", "sweeps", "planner"),
        *("pax/port", "pax/port_names", "pax/port_settings", "pax/port_source", "pax/import_names", "hf/export_mode"),
    ],
    ["main", "cli", "api", "__init__"],
]
# Import names for users. The trainer itself imports from the rooms behind them.
FOR_USERS = {f"spmd_trainer.{name}" for name in import_table.STANDING}
LIBRARY_ONLY = {"praxis", "tensorflow", "flax", "fiddle", "clu", "orbax", "lingvo", "optax", "absl", "etils", "jinja2"}


PAX_NAMES = ROOT / "pax" / "import_names"


def module_name(path: pathlib.Path) -> str:
    """The name by which a file is imported: those of pax/import_names/ as if they lay in the package itself."""
    inside = path != PAX_NAMES / "__init__.py" and path.is_relative_to(PAX_NAMES)
    relative = ROOT.name / path.relative_to(PAX_NAMES) if inside else path.relative_to(ROOT.parent)
    return ".".join(relative.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
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
                found.add(inner if inner in FILES or inner in FOR_USERS else node.module or "")
    return found


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def room(module: str) -> str:
    """The longest entry of LAYERS that holds a module: a folder, or a file of one that stands on another layer."""
    place = FILES[module].relative_to(ROOT).with_suffix("").parts
    entries = {entry for names in LAYERS for entry in names}
    return next("/".join(place[:n]) for n in range(len(place), 0, -1) if "/".join(place[:n]) in entries)


def layer(module: str) -> int:
    return next(level for level, names in enumerate(LAYERS) if room(module) in names)


def test_nothing_imports_upward():
    upward = [
        f"{module} imports {imported}"
        for module, path in FILES.items()
        for imported in sorted(imports(path, top_level_only=False) & FILES.keys())
        if layer(imported) > layer(module)
    ]
    assert upward == []


def test_no_circles():
    graph = {
        module: {i for i in imports(path, top_level_only=True) & FILES.keys() if i != module and i != "spmd_trainer"}
        for module, path in FILES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_rooms_have_no_circles():
    rooms: dict[str, set[str]] = {}
    for module, path in FILES.items():
        if module != "spmd_trainer":
            needed = {room(i) for i in imports(path, top_level_only=True) & FILES.keys() if i != "spmd_trainer"}
            rooms.setdefault(room(module), set()).update(needed - {room(module)})
    graphlib.TopologicalSorter(rooms).prepare()


def test_the_trainer_imports_from_the_rooms():
    others = {module: imports(path, top_level_only=False) & FOR_USERS for module, path in FILES.items()}
    assert {module: found for module, found in others.items() if found} == {}


def test_sharding_stands_alone():
    def is_foreign(imported: str) -> bool:
        own = imported.startswith("spmd_trainer.") and not imported.startswith("spmd_trainer.sharding")
        return own or imported.split(".")[0] in LIBRARY_ONLY

    foreign = [
        f"{module} imports {imported}"
        for module, path in FILES.items()
        if module.startswith("spmd_trainer.sharding")
        for imported in sorted(imports(path, top_level_only=False))
        if is_foreign(imported)
    ]
    assert foreign == []


def test_only_the_bridge_knows_that_praxis_is_old():
    mentions = [
        f"{module} mentions {word}"
        for module, path in FILES.items()
        if module != "spmd_trainer.pax.bridge"
        for word in ("jax.tree_map(", "thread_resources", "jax.lib", "pxla")
        if word in path.read_text()
    ]
    assert mentions == []


def test_one_place_writes_to_the_terminal():
    # The live line draws with control characters.
    own = {"spmd_trainer.errors.terminal", "spmd_trainer.cli.live_line"}
    writes = [
        f"{module}:{node.lineno}"
        for module, path in FILES.items()
        if module not in own
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert writes == []


def figures() -> str:
    """The size of the package: what `docs/code_layout.md` publishes."""
    from test_rooms import is_core

    def size(paths):
        return f"{len(paths)} files, {sum(len(path.read_text().splitlines()) for path in paths):,} lines"

    paths = sorted(ROOT.rglob("*.py"))
    rooms = {path.relative_to(ROOT).parts[0] for path in paths if path.parent != ROOT}
    core = [path for path in paths if is_core(path)]
    return f"package: {size(paths)}\ncore: {size(core)}\nrooms: {len(rooms)}\nfloors: {len(LAYERS)}"


if __name__ == "__main__":
    print(figures())  # noqa: T201
