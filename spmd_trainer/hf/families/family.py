"""Classes that describe a transformers model family: its config.json format, and the names and layouts of its tensors.

A layout is an einops-style pattern, 'tensor -> variable'. E.g. '(n h) d -> d n h' says that a tensor [heads * head width,
model width] stores a variable [model width, heads, head width]. A '+' separates variables that are fused in one dimension;
`Rule.part` is the index of the rule's variable among them. So '(n h + k h + k h) d' has all queries, then all keys, then all
values, and '(n (h + h)) d' has two vectors for the first head, then two for the next one.

Each letter stands for a size: v vocabulary, p positions, d model width, c also model width, n query heads, k key/value heads,
h head width, u width of a value, f feed-forward width, e experts, x width of an expert, s width of the shared experts. The
digit 1 is a dimension of size 1. In latent attention, q is query_dims, r is key_value_dims, l is r + the rotated width of a
key, and m is u + the unrotated width of a key. In linear attention, g is the number of key heads, j the number of value heads
per key head, a the width of a key, b the width of a value, and w the width of the convolutions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from spmd_trainer.models.decoder_spec import DecoderSpec

Settings: TypeAlias = dict[str, Any]

ROOT = "mdl_vars/params/lm/"
# Key in config.json: number of multi-token prediction layers.
MTP_LAYERS = "num_nextn_predict_layers"
# Path prefix of non-trainable variables.
NON_TRAINABLE = "mdl_vars/non_trainable/lm/"
# Path prefixes of the variables of multi-token prediction layers.
MTP_ROOTS = (f"{ROOT}mtp/", f"{NON_TRAINABLE}mtp/")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Says which tensor stores a variable, for every layer and, if experts have separate tensors, for every expert.

    Attributes:
      path: path of the variable, relative to `root` or to a layer.
      name: name of the tensor, relative to the model or to a layer; '{expert}' stands for the number of the expert.
      layout: dimensions of the tensor and of the variable, see the module docstring. It omits the variable's leading
        dimensions: stacked layers, and experts if the name has '{expert}'.
      part: index of the variable among those that are fused in the tensor.
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
      base: name prefix of all tensors except the projection to the vocabulary.
      layer: name prefix of a layer's tensors, after `base`; '{layer}' stands for the number of the layer.
      model: rules for the variables outside the layers.
      in_layer: function (kind of a layer, True if the layer has experts) -> rules for that layer's variables.
      in_mtp_layer: rules for a multi-token prediction layer, without those for the decoder layer inside it. In the folder,
        these layers are numbered after the others. () if the family has none.
      mtp_copies: tensors of a multi-token prediction layer that are copies: {name in the layer: name of the original}.
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
      keys: {field of DecoderSpec: key in config.json}, for values that both store in the same way.
      defaults: transformers' default values for keys that a config.json may lack.
      fixed: {field of DecoderSpec: value} that all models of the family share.
      read: function (config with defaults, fields) that adds the fields that need more than renaming a key.
      write: function (spec, config) that adds keys to the config; the inverse of `read`.
      names: function (spec) -> the `Names` of the model with this spec.
      rotary_by_layer_type: True if the config has separate rotary settings for each kind of layer.
      heads_divide_dims: True if transformers requires the number of heads to divide the hidden size.
      off: {key of an unsupported option: values that turn the option off}, in addition to `config_json._SWITCHED_OFF`.
      without_effect: keys without an effect on the model's output, in addition to those of `setting_types.py`.
      in_mxfp4: True if the family's folders may have weights in MXFP4.
      fused_experts: True if the family's folders may have the matrices of all experts in one tensor, see `text_part`.
      not_read: name prefixes of tensors that are not read, because their kind of multi-token prediction is not supported.
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
