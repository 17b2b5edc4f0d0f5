"""Makes masks (trees of bools) of the variables without a gradient or an optimizer state, and matches paths with regexes."""

from __future__ import annotations

import fractions
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from praxis import base_layer, py_utils, trees

from spmd_trainer.sharding.variables import path_str

# A collection of WeightHParams: the variable never changes, so it has no optimizer state and no moving average.
FROZEN = "_frozen"
# Prefix of the collection of variables of which a token reads only a part; the fraction follows, such as '8/128' for experts.
READ_PER_TOKEN = "_read_per_token:"
# Name of a layer's summary, a histogram of the tokens of each expert in a training step: [experts], or [repetitions, experts]
# of a repeated layer. With minibatches, or under `jax.shard_map`, the mean over the parts of the batch.
LOAD = "expert_load"
# Prefix of the collection of variables that each training step moves by the load: up by the rate where an expert's load is
# below the mean, down where it is above. The rate follows the prefix.
MOVED_BY_LOAD = "_moved_by_load:"
# How a regex writes the index of a list: Pax's `x_layers\[0\]` or `x_layers.0.`, and this project's `x_layers/0`.
_PAX_INDEX = re.compile(r"\\\[|\[\[\]|(?<!\\)\.\d+\.")
_OWN_INDEX = re.compile(r"/(?:\d|\\d|\[\d)")


def get_excluded_var_mask_for_grad(var_weight_hparams: Any, learner: Any) -> Any:
    """Returns a tree of bools: True for variables without a gradient (non-trainable, or excluded by regex).

    Raises:
      ValueError: the learner excludes every variable, or one of its regexes matches no variable.
    """
    excluded = explicitly_excluded(var_weight_hparams, learner)
    mask = jax.tree.map(lambda p, e: e or base_layer.var_not_trainable(p), var_weight_hparams, excluded)
    if all(jax.tree.leaves(mask)):
        raise ValueError(
            f"the learner excludes every variable: bprop_variable_inclusion={learner.bprop_variable_inclusion!r}, "
            f"bprop_variable_exclusion={learner.bprop_variable_exclusion!r}; variables: {paths_text(var_weight_hparams)}"
        )
    return mask


def get_excluded_var_mask_for_opt(var_weight_hparams: Any, learner: Any) -> Any:
    """Returns a tree of bools: True for variables without an optimizer state.

    If the optimizer keeps moving averages (`ema_decay`), non-trainable variables have an optimizer state too.
    """
    if learner.keep_optimizer_state_for_excluded_vars:
        return jax.tree.map(is_frozen, var_weight_hparams)
    excluded = explicitly_excluded(var_weight_hparams, learner)

    def is_excluded(p: Any, by_regex: bool) -> bool:
        if by_regex or is_frozen(p) or base_layer.var_overwrite_with_gradient(p):
            return True
        return not learner.optimizer.ema_decay and base_layer.var_not_trainable(p)

    return jax.tree.map(is_excluded, var_weight_hparams, excluded)


def is_frozen(hparams: Any) -> bool:
    """Returns True for a variable in the collection `FROZEN`; such a variable never changes."""
    return FROZEN in hparams.collections


def read_per_token(hparams: Any) -> float:
    """Returns the fraction of a variable's elements that is used for one token: less than 1 for experts."""
    shares = [name.removeprefix(READ_PER_TOKEN) for name in hparams.collections if name.startswith(READ_PER_TOKEN)]
    return float(fractions.Fraction(shares[0])) if shares else 1.0


def load_rate(hparams: Any) -> float | None:
    """Returns the amount by which a step adjusts a variable marked with `MOVED_BY_LOAD`; None for all other variables."""
    rates = [name.removeprefix(MOVED_BY_LOAD) for name in hparams.collections if name.startswith(MOVED_BY_LOAD)]
    return float(rates[0]) if rates else None


def explicitly_excluded(var_weight_hparams: Any, learner: Any) -> Any:
    """Returns a tree of bools: True for variables that the learner's regexes exclude from training.

    Raises:
      ValueError: a regex matches no variable, or is not valid.
    """
    for field in ("bprop_variable_inclusion", "bprop_variable_exclusion"):
        patterns = _as_list(getattr(learner, field))
        for pattern in patterns:
            if not any(jax.tree.leaves(matches(var_weight_hparams, [pattern]))):
                known = paths_text(var_weight_hparams)
                raise ValueError(
                    f"{field}: {pattern!r} does not match the whole path of any variable; paths are {known}"
                )
    if learner.bprop_variable_inclusion:
        included = matches(var_weight_hparams, _as_list(learner.bprop_variable_inclusion))
        return jax.tree.map(lambda x: not x, included)
    return matches(var_weight_hparams, _as_list(learner.bprop_variable_exclusion))


def _as_list(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def matches(tree: Any, patterns: Sequence[str]) -> Any:
    """Returns a tree of bools: True for leaves whose whole path matches a pattern (`re.fullmatch`).

    List indices may be written in two ways, see `match_paths`. A pattern without '/' may also match the path with '.' instead
    of '/', as in older Pax files.

    Raises:
      ValueError: a pattern is not a valid regex.
    """
    try:
        masks = [match_paths(tree, pattern, _fullmatch) for pattern in patterns]
    except re.error as error:
        raise ValueError(f"one of the learner's regexes {list(patterns)} doesn't compile: {error}") from error
    found = [any(mask[i] for mask in masks) for i in range(len(jax.tree.leaves(tree)))]
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def _fullmatch(pattern: re.Pattern[str], path: str) -> bool:
    dotted = "/" not in pattern.pattern and pattern.fullmatch(path.replace("/", "."))
    return bool(pattern.fullmatch(path) or dotted)


def match_paths(tree: Any, regex: str, match: Callable[[re.Pattern[str], str], object]) -> list[bool]:
    r"""Returns a bool for each leaf of a tree, in order: True if a regex matches the leaf's path.

    A path with a list index has two spellings: Pax's `x_layers[0]/w`, and `x_layers/0/w` as in this project's messages. A regex
    that contains an index in Pax's spelling (`\[` or `.0.`) or in the other (`/` followed by a digit, `\d` or `[0-9]`) is
    matched against that spelling only, so that a negative lookahead such as `(?!.*x_layers\[0\]/).*` works. Any other regex
    may match either spelling.

    Args:
      tree: any pytree.
      regex: the regex.
      match: (pattern, path) -> true if it matches, such as `re.Pattern.match` or `re.Pattern.fullmatch`.

    Raises:
      re.error: the regex does not compile.
    """
    pattern = re.compile(regex)
    has_pax, has_own = bool(_PAX_INDEX.search(regex)), bool(_OWN_INDEX.search(regex))
    try_pax, try_own = has_pax or not has_own, has_own or not has_pax
    pax_paths = jax.tree.leaves(trees.to_path_tree(tree))
    return [
        bool((try_own and match(pattern, own)) or (try_pax and match(pattern, pax)))
        for (own, _), pax in zip(with_paths(tree), pax_paths, strict=True)
    ]


def with_paths(tree: Any) -> list[tuple[str, Any]]:
    """Returns (path, leaf) for every leaf, with paths such as 'params/lm/x_layers/0/w'."""
    return [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def paths_text(tree: Any) -> str:
    """Returns the first ten leaf paths of a tree as text, for messages."""
    paths = [path for path, _ in with_paths(tree)]
    more = f" and {len(paths) - 10} more" if len(paths) > 10 else ""
    return ", ".join(paths[:10]) + more


def mask_out(tree: Any, masked: Any) -> Any:
    """Returns `tree` with praxis' BpropMaskedNode, a pytree without leaves, in place of the leaves where `masked` is True."""
    return jax.tree.map(lambda m, x: py_utils.BpropMaskedNode() if m else x, masked, tree)
