"""SeqIO feature converters for praxis models. Importing this module needs seqio (`spmd-trainer[seqio]`).

Names, arguments and results are those of `seqio_input` in paxml 1.4.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import seqio
import tensorflow as tf
from praxis import base_hyperparams
from praxis.py_utils import NestedMap

Features = Mapping[str, Any]


class LanguageModelFeatures(seqio.DecoderFeatureConverter, base_hyperparams.StrOverride):
    """Feature converter that makes rows for praxis' `LanguageModel` from the features 'targets', or 'inputs' and 'targets'.

    A row has T tokens, where T is the sum of the features' lengths: `ids`, `labels`, `segment_ids` and `segment_pos`, int32
    [T]; `paddings` and `weights`, float32 [T]. If the examples have 'inputs', it also has `inputs_indicator`, int32 [T], which
    is 1 for tokens of 'inputs'.
    """

    def __init__(
        self,
        pack: bool = False,
        use_custom_packing_ops: bool = False,
        weights_on_targets_only: bool | None = None,
        apply_length_check: bool = True,
        bos_id: int = 0,
        reverse_bos_padding: bool = False,
        eos_id: int = 1,
        target_has_suffix: bool = False,
        passthrough_features: Mapping[str, Any] | None = None,
    ):
        """Stores the settings.

        Args:
          pack: put several examples into a row.
          use_custom_packing_ops: pack with the ops of tensor2tensor, which must be installed.
          weights_on_targets_only: which tokens have weight 1. True: tokens of 'targets' whose id is not negative. None: all
            tokens whose id is not negative. False: all tokens.
          apply_length_check: raise an error for examples longer than their feature's length.
          bos_id: id that is put in front of `ids` if `reverse_bos_padding` is False.
          reverse_bos_padding: False: `labels` are the tokens, and `ids` are the tokens shifted right, after `bos_id`. True:
            `ids` are the tokens, and `labels` are the tokens shifted left, with `eos_id` at the end.
          eos_id: id that is put at the end of `labels` if `reverse_bos_padding` is True.
          target_has_suffix: multiply the weights by the examples' feature 'target_suffix_weights'.
          passthrough_features: features that are copied into the rows unchanged.
        """
        self._settings: dict[str, Any] = {
            "pack": pack,
            "use_custom_packing_ops": use_custom_packing_ops,
            "weights_on_targets_only": weights_on_targets_only,
            "bos_id": bos_id,
            "reverse_bos_padding": reverse_bos_padding,
            "eos_id": eos_id,
            "target_has_suffix": target_has_suffix,
        }
        self._passthrough_names = tuple(passthrough_features or ())
        super().__init__(
            loss_on_targets_only=True,
            pack=pack,
            use_custom_packing_ops=use_custom_packing_ops,
            apply_length_check=apply_length_check,
            bos_id=bos_id,
            passthrough_features=passthrough_features,
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._settings.items())})"

    @property
    def weights_on_targets_only(self) -> bool | None:
        return self._settings["weights_on_targets_only"]

    @property
    def target_has_suffix(self) -> bool:
        return bool(self._settings["target_has_suffix"])

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        """Converts a dataset of a task's examples. Returns the rows as a tf.data.Dataset of NestedMaps."""
        return super().__call__(ds, task_feature_lengths).map(self._to_row)

    def row_specs(self, task_feature_lengths: Mapping[str, int]) -> NestedMap | None:
        """Returns a row's shapes and dtypes; None if they can't be known without the data."""
        if self._passthrough_names or self.target_has_suffix:
            return None
        length = sum(task_feature_lengths.values())
        names = {"ids": np.int32, "labels": np.int32, "paddings": np.float32, "weights": np.float32}
        names |= {"segment_ids": np.int32, "segment_pos": np.int32}
        if "inputs" in task_feature_lengths:
            names["inputs_indicator"] = np.int32
        return NestedMap({name: jax.ShapeDtypeStruct((length,), dtype) for name, dtype in names.items()})

    def _to_row(self, features: Features) -> NestedMap:
        tokens, loss_weights = features["decoder_target_tokens"], features["decoder_loss_weights"]
        row = NestedMap(ids=features["decoder_input_tokens"], labels=tokens)
        real = loss_weights > 0
        if "decoder_causal_attention" in features:
            row.inputs_indicator = features["decoder_causal_attention"]
            real = tf.logical_or(real, row.inputs_indicator > 0)
        row.weights = tf.cast(real, tf.float32)
        row.paddings = 1.0 - row.weights
        row.segment_ids, row.segment_pos = _segments(features, "decoder", row.paddings)
        for name in self._passthrough_names:
            row[name] = features[name]
        only = self.weights_on_targets_only
        if only is None or only:
            row.weights *= tf.cast(tokens >= 0, tf.float32)
        if only:
            row.weights *= tf.cast(loss_weights > 0, tf.float32)
        if self.target_has_suffix:
            row.weights *= tf.cast(features["target_suffix_weights"], tf.float32)
        # Negative ids mark tokens without weight.
        row.ids, row.labels = tf.abs(row.ids), tf.abs(row.labels)
        if self._settings["reverse_bos_padding"]:
            row.ids = row.labels
            row.labels = _moved_left(row.labels, self._settings["eos_id"])
            row.weights = _moved_left(row.weights, 0.0)
            row.paddings = _moved_left(row.paddings, 1.0)
        return row


class PackedLanguageModelFeatures(LanguageModelFeatures):
    """`LanguageModelFeatures` for examples that are already packed, with seqio's features ('decoder_target_tokens', ...)."""

    def __init__(self) -> None:
        super().__init__(pack=False)

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        del task_feature_lengths
        return ds.map(self._to_row)

    def row_specs(self, task_feature_lengths: Mapping[str, int]) -> NestedMap | None:
        """Returns None, because the shapes and dtypes depend on the data."""
        del task_feature_lengths
        return None


class SequenceModelFeatures(seqio.EncDecFeatureConverter):
    """Feature converter that makes rows for praxis' `SequenceModel` from the features 'inputs' and 'targets'.

    A row has the NestedMaps `src` and `tgt`. Both have `ids`, `paddings`, `segment_ids` and `segment_pos`; `tgt` also has
    `labels` and `weights`.
    """

    def __init__(self, pack: bool = False, use_custom_packing_ops: bool = False, bos_id: int = 0):
        self._settings = {"pack": pack, "use_custom_packing_ops": use_custom_packing_ops, "bos_id": bos_id}
        super().__init__(pack=pack, use_custom_packing_ops=use_custom_packing_ops, bos_id=bos_id)

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._settings.items())})"

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        return super().__call__(ds, task_feature_lengths).map(self._to_row)

    def _to_row(self, features: Features) -> NestedMap:
        source = NestedMap(ids=features["encoder_input_tokens"])
        source.paddings = tf.cast(tf.equal(source.ids, 0), tf.float32)
        weights = tf.cast(features["decoder_loss_weights"], tf.float32)
        target = NestedMap(
            ids=features["decoder_input_tokens"],
            labels=features["decoder_target_tokens"],
            paddings=1.0 - weights,
            weights=weights,
        )
        source.segment_ids, source.segment_pos = _segments(features, "encoder", source.paddings)
        target.segment_ids, target.segment_pos = _segments(features, "decoder", target.paddings)
        for prefix, side in (("src_", source), ("tgt_", target)):
            for name in ("task_ids", f"{prefix}task_ids"):
                if name in features:
                    side.task_ids = features[name]
        return NestedMap(src=source, tgt=target)


class SequenceModelFeaturesWithTaskInfo(SequenceModelFeatures):
    """`SequenceModelFeatures` that also keeps the features 'task_ids', 'src_task_ids' and 'tgt_task_ids'."""

    def _convert_example(self, features: Features) -> dict[str, Any]:
        kept = {name: features[name] for name in ("task_ids", "src_task_ids", "tgt_task_ids") if name in features}
        return {**super()._convert_example(features), **kept}

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        """Returns the rows as a tf.data.Dataset. Skips seqio's check of the features, which would reject task ids."""
        return self._convert_features(ds, task_feature_lengths).map(self._to_row)


class PackedSequenceModelFeatures(SequenceModelFeatures):
    """`SequenceModelFeatures` for examples that are already packed rows."""

    def __init__(self) -> None:
        super().__init__(pack=False)

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        del task_feature_lengths
        return ds.map(self._to_row)


class RemoveProvenance(seqio.PassThroughFeatureConverter):
    """Passes examples through, without the features whose names begin with 'provenance'."""

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        del task_feature_lengths
        return ds.map(
            lambda example: NestedMap.FromNestedDict(example).FilterKeyVal(
                lambda name, _: not name.startswith("provenance")
            )
        )


class UnflattenAndRemoveProvenance(RemoveProvenance):
    """Like `RemoveProvenance`, but first nests features whose names contain slashes: 'a/b' becomes example['a']['b']."""

    def __call__(self, ds: Any, task_feature_lengths: Mapping[str, int]) -> Any:
        return super().__call__(ds.map(seqio.unflatten_dict), task_feature_lengths)


def _segments(features: Features, side: str, paddings: Any) -> tuple[Any, Any]:
    """Returns a row's segment ids and positions. If the row is not packed, its tokens form one segment."""
    if f"{side}_segment_ids" in features:
        return features[f"{side}_segment_ids"], features[f"{side}_positions"]
    ids = tf.cast(1.0 - paddings, tf.int32)
    return ids, ids * tf.range(tf.shape(ids)[0])


def _moved_left(row: Any, fill: float) -> Any:
    return tf.concat([row[1:], tf.fill([1], tf.cast(fill, row.dtype))], axis=0)
