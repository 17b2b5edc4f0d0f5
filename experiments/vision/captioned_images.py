"""Images, boxes, captions and labels in one batch: inputs of rank 1 to 4, each with a split mapping.

README's "Add a split mapping" explains this example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from praxis import base_model, layers, optimizers, pax_fiddle, schedules
from praxis.py_utils import NestedMap

from spmd_trainer import base_experiment, experiment_registry, sharding, tasks_lib
from spmd_trainer.inputs import synthetic

Config = pax_fiddle.Config


class CaptionedImageModel(base_model.BaseModel):
    """Classifies an image by its pixels, boxes and caption: each is embedded and averaged, and the three are added up.

    Attributes:
      num_classes: number of labels.
      vocab_size: number of caption tokens.
      channels: channels of an image.
      dims: width of the embeddings.
    """

    num_classes: int = 10
    vocab_size: int = 0
    channels: int = 0
    dims: int = 0

    def setup(self) -> None:
        self.create_child("pixels", Config(layers.Linear, input_dims=self.channels, output_dims=self.dims))
        self.create_child("boxes", Config(layers.Linear, input_dims=4, output_dims=self.dims))
        self.create_child("words", Config(layers.Embedding, num_classes=self.vocab_size, input_dims=self.dims))
        self.create_child("hidden", Config(layers.FeedForward, input_dims=self.dims, output_dims=self.dims))
        self.create_child("logits", Config(layers.Linear, input_dims=self.dims, output_dims=self.num_classes))

    def compute_predictions(self, input_batch: NestedMap) -> jax.Array:
        """Returns logits float32 [batch, num_classes].

        Args:
          input_batch: `images` [batch, height, width, channels], `boxes` [batch, boxes, 4], caption tokens `ids` [batch, words].
        """
        pixels = jax.nn.relu(self.pixels(input_batch.images)).mean((1, 2))
        boxes = jax.nn.relu(self.boxes(input_batch.boxes)).mean(1)
        words = self.words.emb_lookup(input_batch.ids).mean(1)
        return self.logits(self.hidden(pixels + boxes + words))

    def compute_loss(self, predictions: jax.Array, input_batch: NestedMap) -> tuple[Any, Any]:
        """Returns mean cross-entropy and accuracy with their weights, and the logits per example."""
        weights = input_batch.eval_sample_weights
        total = weights.sum()
        label = jax.nn.one_hot(input_batch.labels, self.num_classes)
        xent = -(label * jax.nn.log_softmax(predictions)).sum(-1)
        correct = (predictions.argmax(-1) == input_batch.labels).astype(jnp.float32)

        def mean(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (x * weights).sum() / jnp.maximum(total, 1e-6), total

        return NestedMap(loss=mean(xent), accuracy=mean(correct)), NestedMap(logits=predictions)


@experiment_registry.register(tags=["tiny"])
class CaptionedImages(base_experiment.BaseExperiment):
    """Inputs of rank 1 to 4 in one batch; `by_name` splits the images' channels over 'mdl'."""

    ICI_MESH_SHAPE = (1, 4, 2)
    MESH_AXIS_NAMES = ("replica", "data", "mdl")
    PERCORE_BATCH_SIZE = 1
    NUM_CLASSES = 10
    VOCAB_SIZE = 61
    CHANNELS = 2
    DIMS = 18

    def datasets(self) -> list[Any]:
        specs = {
            "labels": ((), "int32", self.NUM_CLASSES),
            "ids": ((16,), "int32", self.VOCAB_SIZE),
            "boxes": ((5, 4), "float32", 1.0),
            "images": ((8, 8, self.CHANNELS), "float32", 1.0),
        }
        fields = {"specs": specs, "batch_size": self.PERCORE_BATCH_SIZE * 8}
        train = Config(synthetic.SyntheticInput, name="train", is_training=True, **fields)
        return [train, Config(synthetic.SyntheticInput, name="heldout", num_examples=10, **fields)]

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")

    def task(self) -> Config[tasks_lib.SingleTask]:
        """Returns the task, with a split mapping for each rank of inputs and one exception by name."""
        task_p = Config(tasks_lib.SingleTask, name="captioned_images")
        task_p.model = Config(
            CaptionedImageModel,
            name="classifier",
            num_classes=self.NUM_CLASSES,
            vocab_size=self.VOCAB_SIZE,
            channels=self.CHANNELS,
            dims=self.DIMS,
            ici_mesh_shape=list(self.ICI_MESH_SHAPE),
            mesh_axis_names=list(self.MESH_AXIS_NAMES),
        )
        train_p = task_p.train
        train_p.num_train_steps = 20
        batch_axes = ("replica", "data")
        train_p.inputs_split_mapping = NestedMap(
            map_1d=(batch_axes,),
            map_2d=(batch_axes, None),
            map_3d=(batch_axes, None, None),
            by_name={"images": ("data", None, None, "mdl")},
        )
        # The layers declare no split: the largest dimension of each variable is split over 'data', with padding.
        train_p.sharding_strategy = [(".*", 'fsdp(axis="data", min_size_to_shard_mb=0, allow_uneven=True)')]
        train_p.learner.loss_name = "loss"
        train_p.learner.optimizer = Config(
            optimizers.Adam, learning_rate=1e-3, epsilon=1e-3, lr_schedule=Config(schedules.Constant, value=1.0)
        )
        return task_p
