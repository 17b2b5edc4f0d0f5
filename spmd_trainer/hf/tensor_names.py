"""Maps a decoder's variables to the tensors of a Hugging Face folder, and reorders the tensors' dimensions.

Dimensions are named by letters; `families.family` explains the letters and the notation for layouts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from spmd_trainer.hf.families.family import NON_TRAINABLE, ROOT, Family, Names, Rule
from spmd_trainer.models.decoder_spec import DecoderSpec, DeltaSpec, LatentSpec


@dataclasses.dataclass(frozen=True)
class Group:
    """One dimension of a stored tensor. It merges one or more dimensions of a variable, and may fuse several variables.

    Attributes:
      outer: letters of the merged dimensions, in order. If variables are fused: only the letters before the fused part.
      parts: letters of each fused variable, in order; () if no variables are fused.
    """

    outer: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor that stores a variable, or one slice of a variable that stacks layers, experts or adapters.

    Attributes:
      name: the tensor's name in the folder.
      leading: index of the slice in the variable's leading dimensions, e.g. (repeat, expert); () for a whole variable.
      groups: the dimensions of the tensor, each as a group of letters.
      order: the letters of the variable's dimensions after the leading ones.
      sizes: {letter: size of the dimension that the letter stands for}.
      part: index of the variable among those that are fused in the tensor.
    """

    name: str
    leading: tuple[int, ...]
    groups: tuple[Group, ...]
    order: tuple[str, ...]
    sizes: Mapping[str, int]
    part: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._size(group.outer) * self._fused(group)[2] for group in self.groups)

    @property
    def is_fused(self) -> bool:
        """True if the tensor holds several variables."""
        return any(group.parts for group in self.groups)

    @property
    def outermost(self) -> str:
        """The first letter of the tensor's first dimension, ignoring other variables that are fused there."""
        return self._letters(self.groups[0])[0]

    def rows(self, first: int, last: int) -> tuple[int, int]:
        """Returns (start, stop): the tensor's rows that store the indices [first, last) of the dimension `outermost`."""
        group = self.groups[0]
        start, _, total = self._fused(group)
        if group.outer:
            unit, start = self._size(group.outer[1:]) * total, 0
        else:
            unit = self._size(group.parts[self.part][1:])
        return start + first * unit, start + last * unit

    def of_rows(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns a view of `rows`, some rows of the tensor, with the variable's dimensions in the order `order`."""
        shape: list[int] = []
        index: list[slice] = []
        letters: list[str] = []
        for axis, group in enumerate(self.groups):
            shape += [self.sizes[letter] for letter in group.outer]
            index += [slice(None)] * len(group.outer)
            if group.parts:
                start, size, total = self._fused(group)
                is_cut = axis == 0 and not group.outer  # these rows belong to this variable alone
                shape.append(size if is_cut else total)
                index.append(slice(None) if is_cut else slice(start, start + size))
            letters += self._letters(group)
        parts = rows.reshape(-1, *shape[1:])[tuple(index)]
        view = parts.reshape(-1, *(self.sizes[letter] for letter in letters[1:]))
        dropped = [axis for axis, letter in enumerate(letters) if letter not in self.order]
        kept = [letter for letter in letters if letter in self.order]
        return view.squeeze(tuple(dropped)).transpose([kept.index(letter) for letter in self.order])

    def _letters(self, group: Group) -> tuple[str, ...]:
        return (*group.outer, *group.parts[self.part]) if group.parts else group.outer

    def _fused(self, group: Group) -> tuple[int, int, int]:
        """Returns (offset of the variable in a fused dimension, its size there, total size of all variables fused there)."""
        sizes = [self._size(part) for part in group.parts]
        return (sum(sizes[: self.part]), sizes[self.part], sum(sizes)) if sizes else (0, 1, 1)

    def _size(self, letters: Sequence[str]) -> int:
        return math.prod(self.sizes[letter] for letter in letters)


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of a model and the tensors that hold it.

    Attributes:
      path: path of the variable in the train state.
      shape: shape without padding.
      pieces: the tensors that hold the variable, in the order of its leading dimensions.
    """

    path: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def learns(self) -> bool:
        """True if the optimizer updates the variable."""
        return not self.path.startswith(NON_TRAINABLE)


def variables_of(spec: DecoderSpec, family: Family) -> dict[str, Variable]:
    """Returns the variables of a model by path, each with the tensors that hold it in a folder of this family."""
    names, sizes = family.names(spec), _sizes(spec, spec.layers[0].kind)
    found = {}
    for rule in names.model:
        base = "" if rule.name.startswith("lm_head.") else names.base
        found[ROOT + rule.path] = _variable(ROOT + rule.path, (), [((), base, rule)], sizes)
    for prefix, layers in _layers(spec):
        layer = spec.layers[layers[0]]
        sizes = _sizes(spec, layer.kind)
        for rule in names.in_layer(layer.kind, layer.has_experts):
            path = f"{rule.root}{prefix}/{rule.path}"
            stacked = (len(layers),) if prefix.startswith("layers/") else ()
            entries = [
                ((r,) if stacked else (), names.base + names.layer.format(layer=layer), rule)
                for r, layer in enumerate(layers)
            ]
            found[path] = _variable(path, stacked, entries, sizes)
    for path_of_layer, name_of_layer in _mtp_layers(spec, names):
        inside = names.in_layer(spec.layers[-1].kind, spec.layers[-1].has_experts)
        sizes = _sizes(spec, spec.layers[-1].kind)
        rules = [*names.in_mtp_layer, *(dataclasses.replace(rule, path=f"layer/{rule.path}") for rule in inside)]
        for rule in rules:
            path = f"{rule.root}{path_of_layer}/{rule.path}"
            found[path] = _variable(path, (), [((), name_of_layer, rule)], sizes)
    return found


def mtp_copies_of(spec: DecoderSpec, family: Family) -> dict[str, str]:
    """Returns {copy: original} for tensors of multi-token prediction layers that are copies of other tensors of the model."""
    names = family.names(spec)
    return {layer + copy: name for _, layer in _mtp_layers(spec, names) for copy, name in names.mtp_copies.items()}


def _mtp_layers(spec: DecoderSpec, names: Names) -> Iterator[tuple[str, str]]:
    """Yields (path in the model, prefix of the tensor names) of each multi-token prediction layer."""
    for k in range(spec.mtp_layers):
        yield f"mtp/layer_{k}", names.base + names.layer.format(layer=spec.num_layers + k)


def _layers(spec: DecoderSpec) -> Iterator[tuple[str, list[int]]]:
    """Yields (path in the model, layer numbers in the folder) of each separate layer and of each stack of layers."""
    period, repeats, first = len(spec.repeated_layers), spec.num_repeats, len(spec.first_layers)
    for j in range(first):
        yield f"first_layers_{j}", [j]
    if repeats:
        for p in range(period):
            yield f"layers/sub/layer_{p}", [first + r * period + p for r in range(repeats)]
    for j in range(len(spec.last_layers)):
        yield f"last_layers_{j}", [first + repeats * period + j]


def _variable(
    path: str, stacked: tuple[int, ...], entries: Sequence[tuple[tuple[int, ...], str, Rule]], sizes: Mapping[str, int]
) -> Variable:
    rule = entries[0][2]
    groups, order = parse_layout(rule.layout)
    experts = (sizes["e"],) if rule.of_experts else ()
    pieces = []
    for leading, prefix, _ in entries:
        for expert in range(sizes["e"]) if rule.of_experts else [None]:
            name = prefix + (rule.name if expert is None else rule.name.format(expert=expert))
            index = leading if expert is None else (*leading, expert)
            pieces.append(Piece(name, index, groups, order, sizes, rule.part))
    shape = (*stacked, *experts, *(sizes[letter] for letter in order))
    return Variable(path, shape, tuple(pieces))


def parse_layout(layout: str) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Parses a layout, e.g. 'd (n h) -> d n h'. Returns the letters of each tensor dimension, and the variable's letters."""
    tensor, _, variable = layout.partition(" -> ")
    groups = []
    for dimension in re.findall(r"\((?:[^()]|\([^()]*\))*\)|\w", tensor):
        inside = dimension.removeprefix("(").removesuffix(")") if dimension.startswith("(") else dimension
        outer, _, fused = inside.rpartition("(") if "(" in inside else ("", "", inside)
        if "+" in inside:
            parts = [tuple(part.split()) for part in fused.removesuffix(")").split("+")]
            groups.append(Group(tuple(outer.split()), tuple(parts)))
        else:
            groups.append(Group(tuple(inside.split())))
    return tuple(groups), tuple(variable.split())


def _sizes(spec: DecoderSpec, kind: str) -> dict[str, int]:
    """Returns {letter of a layout: size that it stands for} in layers of this kind, such as 'local'."""
    latent, delta, heads = spec.latent or LatentSpec(), spec.delta or DeltaSpec(), spec.heads_of(kind)
    return {
        "v": spec.vocab_size,
        "p": spec.max_positions,
        "d": spec.model_dims,
        "c": spec.model_dims,
        "n": spec.num_heads,
        "k": heads.num_kv_heads,
        "h": heads.head_dims,
        "u": spec.value_dims_of(kind),
        "f": spec.hidden_dims,
        "e": 0 if spec.moe is None else spec.moe.num_experts,
        "x": 0 if spec.moe is None else spec.moe.hidden_dims,
        "s": 0 if spec.moe is None else spec.moe.shared_dims,
        "q": latent.query_dims,
        "r": latent.key_value_dims,
        "l": latent.key_value_dims + spec.rotary_dims,
        "m": spec.head_dims - spec.rotary_dims + spec.value_dims_of(kind),
        "g": delta.num_heads,
        "j": delta.values_per_head,
        "a": delta.key_dims,
        "b": delta.value_dims,
        "w": delta.conv_width,
        "1": 1,
    }
