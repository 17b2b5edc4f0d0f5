"""`ShardMapPartitioner`: data parallelism and FSDP under `jax.shard_map`, with all collectives written out.

`ShardMapPartitioner` runs the forward and backward pass of a pure step on each device's own rows. All communication between
devices is in `shard_map_passes.py` and `collectives.py`. The learner then runs on the reduced gradients under ordinary jit. The
learner works element by element, and communicates only the scalars of its norms. Besides these scalars, the compiled train step
contains these collectives:

- with 'dp' (parameters replicated): one all-reduce per step, of all gradients and metrics together, for any number of
  minibatches. (The compiler may split it if it exceeds the compiler's limit for combined collectives.)
- with 'fsdp' (parameters of at least `min_weight_size` elements sharded over `axis_name`): for each use of a sharded parameter,
  one all-gather in the forward pass, a second one in the backward pass if the parameter is gathered again instead of kept, and
  one reduce-scatter of its gradient. All other gradients and the metrics share one all-reduce. The collectives of a repeated
  layer are in the body of its loop, which runs once per layer.

With `gather='layer'` a parameter is gathered where its layer reads it (`GatheredOnUse`). In a model that rematerializes
blocks itself (praxis' repeated layers, or other models with `remat=True`) the gathered copy is freed when the block ends;
parameters outside these blocks (embedding, softmax) stay gathered from their first use to their last use in the backward
pass. A model without rematerialization runs under a `jax.checkpoint` policy that does not keep gathered parameters for
the backward pass, and recomputes only these and plain data movement. (Outside loops, the CPU compiler undoes this: it
merges equal values across `jax.checkpoint`'s barriers.) With `gather='step'` all parameters are gathered once per step and
the gradients of whole parameters are accumulated: one all-gather and one reduce-scatter per parameter and step, for any number of
minibatches. The peak memory then includes the whole model and its gradients.

praxis and Flax Linen fetch a parameter where a layer reads it. An NNX module holds its parameters, and functions get them as
arguments, so `NnxModel` and `FunctionModel` gather all parameters before the module runs, and the sharding report says so. The
compiler may move a gather to the parameter's first use. But layers that are stacked for `nnx.scan` are gathered as one array, and
parameters of an `nnx.remat` block stay gathered until its backward pass. For large models of these kinds, use `PjitPartitioner`.

The loss is the mean over the global batch: sums and weights are reduced first and divided afterwards. Functions of the rows other
than weighted means (batch normalization, load-balancing losses of experts) see the rows of one minibatch on one device, as is
usual in data-parallel training. A metric whose weight is constant is averaged over all minibatches and devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import jax
from jax.sharding import Mesh
from praxis import base_layer

from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.models.base import GatheredVariables, ModuleModel
from spmd_trainer.sharding.variables import VariableSpec, make_variable_spec, named_leaves
from spmd_trainer.step import collectives, minibatches, shard_map_passes
from spmd_trainer.step.compiled_step import CompiledStep, StepFn, compile_step
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.step.partitioner import ElasticBatch, Partitioner
from spmd_trainer.step.shard_map_passes import PassSettings
from spmd_trainer.step.state_layout import NestedVariableSpec
from spmd_trainer.train_states import NestedShapeDtypeStruct

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask


class ShardMapPartitioner(Partitioner):
    """Partitions a task's train and eval steps with `jax.shard_map`; the compiler partitions decoding.

    The batch is sharded over all axes of the mesh. The layers' split mappings, the task's `sharding_strategy` and its
    `inputs_split_mapping` have no effect on training and evaluation. The sharding report gives the reason for each variable's
    sharding. Dropout masks differ between devices, and so depend on the mesh. See `Partitioner` for attributes and methods.
    """

    def __init__(
        self,
        sharding: Literal["dp", "fsdp"] = "dp",
        axis_name: collectives.Axes | None = None,
        min_weight_size: int = collectives.MIN_WEIGHT_SIZE,
        *,
        num_minibatches: int = 1,
        gather: Literal["layer", "step"] | None = None,
        mesh: Mesh | None = None,
        devices: Sequence[jax.Device] | None = None,
        elastic: bool = False,
        elastic_batch: ElasticBatch = "whole",
    ):
        """Stores the settings. The module's docstring explains their effects.

        Args:
          sharding: 'dp' (replicated parameters) or 'fsdp' (sharded parameters).
          axis_name: the mesh axes over which 'fsdp' shards parameters; None for all axes of the mesh.
          min_weight_size: 'fsdp' replicates parameters with fewer elements than this.
          num_minibatches: number of minibatches into which each device divides its rows; they are computed one after the other.
          gather: 'fsdp' gathers parameters where a layer reads them ('layer'), or all of them once per step ('step'). None:
            'layer' with one minibatch, 'step' with several.
          mesh: the mesh; None for the one that the task's model declares.
          devices: the devices for the mesh that the model declares; None for all.
          elastic, elastic_batch: see `Partitioner`.

        Raises:
          ValueError: a setting has an unknown value, or two settings contradict each other.
        """
        super().__init__(
            mesh, devices=devices, num_minibatches=num_minibatches, elastic=elastic, elastic_batch=elastic_batch
        )
        require_one_of("ShardMapPartitioner: sharding", sharding, ("dp", "fsdp"))
        if gather not in ("layer", "step", None):
            raise ValueError(f"ShardMapPartitioner: gather is {gather!r}; it must be 'layer', 'step' or None")
        if sharding == "dp" and (axis_name is not None or gather is not None):
            raise ValueError("ShardMapPartitioner: axis_name and gather are settings of sharding='fsdp'; 'dp' has none")
        self.sharding = sharding
        self.axis_name = axis_name
        self.min_weight_size = min_weight_size
        self._requested_gather = gather

    @property
    def gather(self) -> Literal["layer", "step"]:
        """'layer' if parameters are gathered where a layer reads them; 'step' if once per step (always so with 'dp')."""
        once_per_step = self.sharding == "dp" or self.num_minibatches > 1
        return self._requested_gather or ("step" if once_per_step else "layer")

    def setup(self, task: SingleTask, inputs_shape_dtype: NestedShapeDtypeStruct) -> None:
        """See `Partitioner.setup`. The setting `sharding`, 'dp' or 'fsdp', decides the sharding of every variable."""
        # Added rows repeat rows of the batch and weigh nothing: on rows of zeros, a model's own means could be 0 / 0.
        self.layout = self.make_layout(task, inputs_shape_dtype, "wrap", self._plan)
        minibatches.check_no_overwritten(self.layout, "ShardMapPartitioner")
        if task.train.saved_activations or task.train.offloaded_activations:
            raise UserError(
                "task.train.saved_activations and offloaded_activations need PjitPartitioner; ShardMapPartitioner uses the "
                "model's own policies: leave both lists empty"
            )

    def _plan(self, layout: LogicalLayout, mesh: Mesh) -> NestedVariableSpec:
        task, hparams, sizes = layout.task, layout.var_weight_hparams, dict(mesh.shape)
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(tuple(p.full_shape), p.dtype), hparams)
        if task.lora is not None and task.lora.rank_axis is not None:
            raise ValueError(
                f"task.lora.rank_axis is {task.lora.rank_axis!r}, and ShardMapPartitioner splits a variable on one dimension "
                "only, an adapter on that of its weight; set rank_axis=None, or use PjitPartitioner"
            )

        def whole(tree: NestedShapeDtypeStruct, reason: str) -> NestedVariableSpec:
            records = [
                make_variable_spec(path, x.shape, x.dtype, None, sizes, reason) for path, x in named_leaves(tree)
            ]
            return jax.tree.unflatten(jax.tree.structure(tree), records)

        if self.sharding == "dp":
            return whole(shapes, "replicated: shard_map dp")
        plan = whole(shapes, "replicated: the forward pass may write it")
        # praxis' layers are gathered where they are read, and say themselves which of their dimensions are stacked.
        model = task.model
        read = model.gathered_variables if isinstance(model, ModuleModel) else GatheredVariables(where_read=True)

        def first_dim(p: base_layer.WeightHParams) -> int:
            return len(p.repeat_prefix) if p.repeat_prefix else max(0, min(read.stacked_dims, len(p.shape) - 1))

        shards = collectives.plan_shards(
            shapes[base_layer.PARAMS],
            self.axis_name or tuple(mesh.axis_names),
            mesh,
            min_weight_size=self.min_weight_size,
            first_dim=jax.tree.map(first_dim, hparams[base_layer.PARAMS]),
        )
        if self.gather == "layer" and not read.where_read:
            shards = jax.tree.map(_gathered_before, shards)
        plan[base_layer.PARAMS] = shards
        return plan

    def partition(self, step_fn: StepFn, inputs_shape_dtype: NestedShapeDtypeStruct, is_eval: bool) -> CompiledStep:
        """See `Partitioner.partition`. The step's `grad_fn` or `eval_fn` is a function from `shard_map_passes`.

        Raises:
          ValueError: the job has several processes, and the device count doesn't divide the rows.
        """
        num_rows = jax.tree.leaves(inputs_shape_dtype)[0].shape[0]
        if jax.process_count() > 1 and num_rows % self.mesh.size:
            raise ValueError(
                f"ShardMapPartitioner: the global batch has {num_rows} rows, and {jax.process_count()} processes with "
                f"{self.mesh.size} devices need a multiple of {self.mesh.size}; choose another batch size, or PjitPartitioner"
            )
        # Each parameter's padding is sliced off where it is gathered, so the step sees logical shapes everywhere.
        layout = self.layout.without_opt_states() if is_eval else self.layout
        settings = PassSettings(
            layout=layout,
            num_rows=num_rows,
            num_minibatches=self.num_minibatches,
            gather_on_use=self.gather == "layer",
        )
        run = functools.partial(shard_map_passes.evaluate if is_eval else shard_map_passes.gradients, settings)
        return compile_step(
            layout,
            step_fn,
            inputs_shape_dtype,
            is_eval=is_eval,
            own_pass=lambda mdl_vars, inputs: lambda _, key, __: run(mdl_vars, key, inputs),
        )

    def rows_to_split(self, num_rows: int, num_devices: int) -> int:
        """See `Partitioner.rows_to_split`. Each device divides its own rows into minibatches."""
        return -(-num_rows // num_devices)


def _gathered_before(variable: VariableSpec) -> VariableSpec:
    if variable.is_replicated:
        return variable
    return dataclasses.replace(variable, reason=f"{variable.reason}; gathered before the model runs")
