"""What describes a family of models of transformers: its config.json, and the names and layouts of its tensors.

A layout writes both shapes as in einops: '(n h) d -> d n h' is a tensor with first dimension heads * head width, for a variable
[D, N, H]. A '+' joins the parts of a fused dimension; `Rule.part` says which one the variable is. So '(n h + k h + k h) d' has
all queries, then all keys and values, and '(n (h + h)) d' has two vectors for each head in turn.

Letters: v vocabulary, p positions, d and c model width, n and k query and key/value heads, h head width, u a value's width, f
feed-forward width, e experts, x an expert's width, s the shared experts' width; 1 is a dimension of size 1. For latent attention:
q and r are the widths of its vectors, query_dims and key_value_dims; l is r + the rotated width of a key; m is the other width of
a key + u. For linear attention: g key heads, j value heads for each of them, a and b the widths of a key and of a value, w the
width of its convolutions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from spmd_trainer.models.decoder_spec import DecoderSpec

Settings: TypeAlias = dict[str, Any]

ROOT = "mdl_vars/params/lm/"
# Number of the layers that predict further tokens, in a config.json.
MTP_LAYERS = "num_nextn_predict_layers"
# Of variables that don't learn.
NON_TRAINABLE = "mdl_vars/non_trainable/lm/"
# Of layers that predict further tokens.
MTP_ROOTS = (f"{ROOT}mtp/", f"{NON_TRAINABLE}mtp/")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A variable and the tensor that holds it, for one layer and one expert.

    Attributes:
      path: path of the variable, below `root` or below a layer.
      name: name of the tensor, below the model or below a layer; '{expert}' is the number of an expert.
      layout: order of the dimensions, see the module docstring. It omits the variable's leading dimensions (stacked layers,
        experts in '{expert}').
      part: index among the parts of a fused dimension.
      root: prefix of the variable's path.
    """

    path: str
    name: str
    layout: str
    part: int = 0
    root: str = ROOT

    @property
    def of_experts(self) -> bool:
        """True if each expert has a separate tensor."""
        return "{expert}" in self.name


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of a model.

    Attributes:
      base: prefix of all tensors except the projection to the vocabulary.
      layer: prefix of a layer, below `base`.
      model: rules of the variables outside the layers.
      in_layer: returns the rules of a layer's variables: (kind of the layer, True if it has experts).
      in_mtp_layer: rules of a layer that predicts a further token, besides those of the layer in it. Such layers follow the
        others. () if the family has none.
      mtp_copies: tensors of such a layer that are copies of the model's: {name in the layer: name in the model}.
    """

    base: str
    layer: str
    model: tuple[Rule, ...]
    in_layer: Callable[[str, bool], tuple[Rule, ...]]
    in_mtp_layer: tuple[Rule, ...] = ()
    mtp_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
    """The config.json format and the tensor names of one architecture of transformers.

    Attributes:
      architecture: the model's class in transformers.
      model_type: value of `model_type` in config.json.
      keys: {field of DecoderSpec: key} of values stored unchanged.
      defaults: transformers' values of keys that a config.json may lack.
      fixed: fields of DecoderSpec that all models of the family share.
      read: adds fields that need more than a renaming: (config with defaults, fields).
      write: the inverse of `read`: (spec, config).
      names: returns the names of a model's tensors.
      rotary_by_layer_type: True if the config has separate rotary settings for each kind of layer.
      heads_divide_dims: True if transformers requires the number of heads to divide the hidden size.
      off: further unsupported options, {key: values that switch it off}, besides `_SWITCHED_OFF` of `config_json.py`.
      without_effect: further keys without an effect on the model's output, besides those of `setting_types.py`.
      in_mxfp4: True if the family's folders may have weights in MXFP4.
      fused_experts: True if the family's folders may have the matrices of all experts in one tensor, see `text_part`.
      not_read: prefixes of tensors that are not read, which belong to layers that predict further tokens in another way.
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    read: Callable[[Settings, Settings], None]
    write: Callable[[DecoderSpec, Settings], None]
    names: Callable[[DecoderSpec], Names]
    rotary_by_layer_type: bool = False
    heads_divide_dims: bool = False
    off: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    in_mxfp4: bool = False
    fused_experts: bool = False
    not_read: tuple[str, ...] = ()
