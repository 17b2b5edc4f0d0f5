"""Every documented field of a task and a learner is read by the trainer: no setting is silently ignored."""

import ast
import functools
import pathlib
import re

import pytest

from spmd_trainer import learners, tasks_lib

ROOT = pathlib.Path(tasks_lib.__file__).parent
TASK = tasks_lib.SingleTask
# The class of the object behind a name or an attribute, wherever the trainer uses it.
CLASSES = {
    "task": TASK,
    "train": TASK.Train,
    "evaluate": TASK.Evaluate,
    "decode": TASK.Decode,
    "infer": TASK.Infer,
    "learner": learners.Learner,
}
SECTIONS = ("train", "evaluate", "decode", "infer", "learner")
# Names of parameters and variables that hold such a config.
USUAL_NAMES = {"task": "task", "task_p": "task", "train_p": "train", "learner": "learner", "learner_p": "learner"}


def documented(cls):
    """Returns the fields under 'Attributes:' in a class's docstring."""
    _, _, text = cls.__doc__.partition("Attributes:\n")
    lines = text.splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    return [match[1] for line in lines if (match := re.match(rf" {{{indent}}}(\w+): ", line))]


def declared(cls):
    """Returns the public fields that a class itself declares, without the `name` that praxis adds to every class."""
    return [name for name in cls.__annotations__ if not name.startswith("_") and name != "name"]


class Readers(ast.NodeVisitor):
    """Collects the fields that a file reads, as (kind of object, field): ('train', 'num_train_steps'), ..."""

    def __init__(self, owner_of_self):
        self.found = set()
        self._owner_of_self = owner_of_self
        self._names = dict(USUAL_NAMES)
        self._class = None

    def visit_ClassDef(self, node):
        before, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = before

    def visit_Assign(self, node):
        # `train_p = job.task.train`, and `settings, train_p = job.settings, job.task.train`.
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
            for name, value in pairs:
                if isinstance(name, ast.Name) and self._kind(value) in SECTIONS:
                    self._names[name.id] = self._kind(value)
        self.generic_visit(node)

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load) and (kind := self._kind(node.value)):
            self.found.add((kind, node.attr))
        self.generic_visit(node)

    def _kind(self, node):
        """Returns the kind of object of an expression: 'train' for `job.task.train`."""
        if isinstance(node, ast.Attribute):
            attr = node.attr.removeprefix("_")  # `self._task` holds a task like `job.task`
            if attr == "task" or (attr in SECTIONS and self._kind(node.value) in ("task", "train")):
                return attr
            return None
        if not isinstance(node, ast.Name):
            return None
        return self._owner_of_self.get(self._class) if node.id == "self" else self._names.get(node.id)


@functools.cache
def reads():
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        if {"experiments", "tasks", "task_defaults.py"} & set(path.parts):
            continue  # these set fields instead of reading them
        # Learner and SingleTask read their own fields through `self`.
        owner_of_self = (
            {"Learner": "learner", "SingleTask": "task"} if path.name in ("learner.py", "tasks_lib.py") else {}
        )
        readers = Readers(owner_of_self)
        readers.visit(ast.parse(path.read_text()))
        found |= readers.found
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_documented_fields_are_the_declared_fields(kind):
    assert sorted(documented(CLASSES[kind])) == sorted(declared(CLASSES[kind]))


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, cls in CLASSES.items() for field in declared(cls)])
def test_every_field_has_a_reader(kind, field):
    assert (kind, field) in reads(), f"nothing reads {field} of {CLASSES[kind].__qualname__}: implement or refuse it"


def test_reads_are_assigned_to_the_right_section():
    readers = Readers({})
    program = """
def f(job):
    a, p = 1, job.task.train
    return p.seed, job.task.decode.key, job.other.train.x
"""
    readers.visit(ast.parse(program))
    assert readers.found >= {("train", "seed"), ("decode", "key"), ("task", "train"), ("task", "decode")}
    assert not {("infer", "seed"), ("train", "x"), ("task", "key")} & readers.found
