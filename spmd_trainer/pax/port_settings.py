"""Finds settings and methods of a paxml experiment file that this trainer ignores, refuses or treats differently from Pax."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from spmd_trainer import tasks_lib
from spmd_trainer.base_experiment import BaseExperiment
from spmd_trainer.errors import did_you_mean
from spmd_trainer.pax import port_names, task_fields
from spmd_trainer.pax.port_names import Finding
from spmd_trainer.pax.port_source import Source
from spmd_trainer.step.learner import Learner

# {path below the task: class of the settings at this path}. Each is called a section of the task.
SECTIONS: Mapping[str, type] = {
    "": tasks_lib.SingleTask,
    "train": tasks_lib.SingleTask.Train,
    "train.learner": Learner,
    "evaluate": tasks_lib.SingleTask.Evaluate,
    "decode": tasks_lib.SingleTask.Decode,
    "infer": tasks_lib.SingleTask.Infer,
    "vn": task_fields.VariationalNoise,
}
# Fields of Pax's Learner that are refused here unless they are None.
_REFUSED_OF_LEARNER = {
    "train.learner.stochastic_gradient": "gradients are those of the mean loss over the batch",
    "train.learner.skip_zero_gradients": "leave it None",
}
# {method of Pax's BaseExperiment: (effect of overriding it here, whether overriding it is refused)}
METHODS = {
    "train_programs": ("a custom training program is refused; use task.train.callbacks", True),
    "eval_programs": ("only SingleTaskEvalPrograms of eval_datasets() are accepted", False),
    "decode_programs": ("only SingleTaskDecodePrograms of decode_datasets() are accepted", False),
    "executor": ("a custom executor is refused; use task.train.callbacks", True),
    "sub_experiments": ("has no effect: the experiment itself is trained", False),
}
_CONFIG_MAKERS = ("Config", "PaxConfig")
# Usual names of a task's config in experiment files.
_TASK_NAMES = ("task_p", "task")


def settings(source: Source) -> Iterator[Finding]:
    """Yields a `Finding` for each task field that the file sets and that this trainer ignores, refuses or doesn't know."""
    seen = set()
    for path, value, line in sorted(_assignments(source), key=lambda found: found[2]):
        found = _judge(path, value, line)
        if found is not None and (found.name, found.text) not in seen:
            seen.add((found.name, found.text))
            yield found


def methods(source: Source) -> Iterator[Finding]:
    """Yields a `Finding` for each overridden experiment method that this trainer treats differently from Pax."""
    classes = {node.name: node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)}
    for cls in classes.values():
        if not _is_experiment(cls, classes, source, set()):
            continue
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name in METHODS:
                text, refused = METHODS[node.name]
                yield Finding(node.lineno, f"{cls.name}.{node.name}()", text, blocks=refused)


def _judge(path: str, value: ast.expr | None, line: int) -> Finding | None:
    """Returns a `Finding` about setting the task field `path`, e.g. 'train.async_summary_writing'; None if the field works."""
    section, _, field = path.rpartition(".")
    cls = SECTIONS[section]
    known = {item.name: item for item in dataclasses.fields(cls)}
    name = f"task.{path}"
    refused: Mapping[str, str] = {**task_fields.REFUSED, **_REFUSED_OF_LEARNER}
    if path in refused or path in task_fields.IGNORED:
        if field in known and _is_default(value, known[field].default):
            return None
        if path in refused:
            return Finding(line, name, f"is refused: {refused[path]}")
        return Finding(line, name, f"is ignored: {task_fields.IGNORED[path]}", blocks=False)
    if field in known:
        return None
    # Fields that fiddle and praxis give every config, such as `name`.
    if field in ("name", "cls") or hasattr(cls, field):
        return None
    return Finding(line, name, f"does not exist here{did_you_mean(field, known, otherwise='')}")


def _is_default(value: ast.expr | None, default: Any) -> bool:
    try:
        return value is not None and ast.literal_eval(value) == default
    except ValueError:
        return False


def _assignments(source: Source) -> Iterator[tuple[str, ast.expr | None, int]]:
    """Yields (path, value, line number) for each task field that the file sets. A path is e.g. 'train.num_train_steps'."""
    scopes = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.Module)]
    for scope in scopes:
        known = dict.fromkeys(_TASK_NAMES, "")
        for node in _in_order(scope):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from _set_by(target, node.value, known)
                    if isinstance(target, ast.Name):
                        section = _section(node.value, known, source)
                        if section is not None:
                            known[target.id] = section
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                yield from _set_by(node.target, None, known)
            elif isinstance(node, ast.Call):
                yield from _set_in_call(node, known, source)


def _set_by(
    target: ast.expr, value: ast.expr | None, known: Mapping[str, str]
) -> Iterator[tuple[str, ast.expr | None, int]]:
    if not isinstance(target, ast.Attribute):
        return
    section = _section_of_target(target.value, known)
    if section is not None:
        yield f"{section}.{target.attr}".lstrip("."), value, target.lineno


def _set_in_call(
    call: ast.Call, known: Mapping[str, str], source: Source
) -> Iterator[tuple[str, ast.expr | None, int]]:
    """Yields the fields that a call's keywords set, as in Config(SingleTask.Train, x=1), SingleTask.Train(x=1), p.set(x=1)."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "set":
        section = _section_of_target(call.func.value, known)
    else:
        section = _section(call, known, source)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "task":
            section = None  # super().task()
    if section is not None:
        for keyword in call.keywords:
            if keyword.arg:
                yield f"{section}.{keyword.arg}".lstrip("."), keyword.value, keyword.lineno


def _section(value: ast.expr, known: Mapping[str, str], source: Source) -> str | None:
    """Returns the task's section, e.g. 'train', that an expression creates or names; '' for a whole task, otherwise None."""
    if not isinstance(value, ast.Call):
        return _section_of_target(value, known)
    if isinstance(value.func, ast.Attribute) and value.func.attr == "task":
        return ""  # super().task()
    made = source.full_name(value.func)
    if made is not None and made.rpartition(".")[2] in _CONFIG_MAKERS and value.args:
        made = source.full_name(value.args[0])
    if made is None or not made.startswith(("paxml.", "spmd_trainer.")):
        return None
    cls = made.removesuffix("HParams")
    endings = {f"SingleTask.{name.capitalize()}": name for name in ("train", "evaluate", "decode", "infer")} | {
        "SingleTask": "",
        "learners.Learner": "train.learner",
        "SingleTask.VariationalNoise": "vn",
    }
    return next((section for ending, section in endings.items() if cls.endswith(f".{ending}")), None)


def _section_of_target(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """Returns the task's section that an expression such as `task_p.train.learner` names; None for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return None
    path = ".".join([*known[node.id].split("."), *names]).strip(".")
    return path if path in SECTIONS else None


def _in_order(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the syntax nodes of a function or module in text order, without those of nested functions and classes."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        yield child
        yield from _in_order(child)


def _is_experiment(cls: ast.ClassDef, classes: Mapping[str, ast.ClassDef], source: Source, seen: set[str]) -> bool:
    """Returns True if a class is registered as an experiment, or the file shows that it derives from one."""
    if cls.name in seen:
        return False
    seen.add(cls.name)
    for decorator in cls.decorator_list:
        named = source.full_name(decorator.func if isinstance(decorator, ast.Call) else decorator) or ""
        if named.endswith("experiment_registry.register"):
            return True
    return any(_is_experiment_base(base, classes, source, seen) for base in cls.bases)


def _is_experiment_base(base: ast.expr, classes: Mapping[str, ast.ClassDef], source: Source, seen: set[str]) -> bool:
    if isinstance(base, ast.Name) and base.id in classes:
        return _is_experiment(classes[base.id], classes, source, seen)
    path = source.full_name(base)
    if path is None or not path.startswith(("paxml.", "spmd_trainer.")):
        return False
    try:
        found = port_names.find(path)
    except Exception:  # a module's import may fail in any way; `missing_names` reports it
        return False
    return isinstance(found, type) and issubclass(found, BaseExperiment)
