"""In a train step, each loop with exchanges is ordered with every other exchange by data.

XLA's CPU runtime starts what has its inputs, so host devices that reach a loop and an exchange beside it in different orders wait
for each other forever. It happened under load, in one run of three.
"""

import re

import pytest
from etils import epath

from spmd_trainer.training import experiment_config, start_up
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import InspectConfig

EXCHANGE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
NAME = re.compile(r"%([\w.\-]+)")


def computations(program):
    """Returns {computation: [(instruction, its text without metadata)]}."""
    found, inside = {}, []
    for line in program.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            inside = found.setdefault(head[1], [])
        elif instruction := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)$", line):
            inside.append((instruction[1], instruction[2].partition(", metadata={")[0]))
    return found


def unordered(program):
    """Returns the number of loops with exchanges, and the pairs of one and another loop or exchange of which neither needs the
    other.
    """
    all_of, known = computations(program), {}

    def has_exchange(name):
        if name not in known:
            known[name] = False
            known[name] = any(EXCHANGE.search(text) or any(map(has_exchange, called(text))) for _, text in all_of[name])
        return known[name]

    def called(text):
        return [
            name
            for name in re.findall(
                r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)", text
            )
            if name in all_of
        ]

    num_loops, pairs = 0, []
    for instructions in all_of.values():
        needs, seen = {}, []
        for name, text in instructions:
            inputs = [found for found in NAME.findall(text) if found in needs]
            needs[name] = set(inputs).union(*(needs[found] for found in inputs))
            is_loop = " while(" in text and any(map(has_exchange, called(text)))
            num_loops += is_loop
            if is_loop or EXCHANGE.search(text):
                pairs += [
                    (other, name) for other, was_loop in seen if (is_loop or was_loop) and other not in needs[name]
                ]
                seen.append((name, is_loop))
    return num_loops, pairs


@pytest.mark.parametrize(
    "name",
    [
        "lm.llama.TinyLlama",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("lm.gpt2.TinyGpt2", "lm.mistral.TinyMixtral")),
    ],
)
def test_no_exchange_may_start_beside_a_loop(name, tmp_path):
    resolved = experiment_config.resolve(name)
    program = start_up.compile_train_step(Job.build(InspectConfig(resolved, epath.Path(tmp_path)))).fn.as_text()
    num_loops, pairs = unordered(program)
    assert num_loops >= 2  # over the layers, forward and backward
    assert pairs == []
