"""clu metrics on the host: merged over batches and steps, and computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from clu import metrics

from spmd_trainer.errors import UserError

CluMetrics = Mapping[str, metrics.Metric]


def merged(old: CluMetrics, new: CluMetrics) -> dict[str, metrics.Metric]:
    """Merges the metrics of two sets of batches; `old` may be empty."""
    with jax.transfer_guard_device_to_host("allow"):
        return {name: old[name].merge(metric) if name in old else metric for name, metric in new.items()}


def computed(clu: CluMetrics) -> dict[str, float]:
    """Computes metrics; a metric that computes a dict gives 'metric/key'.

    Raises:
      UserError: a metric (named) fails, or computes something other than a scalar or a dict of scalars.
    """
    found: dict[str, float] = {}
    with jax.transfer_guard_device_to_host("allow"):
        for name, metric in clu.items():
            value = _computed(name, metric)
            for key, part in value.items() if isinstance(value, Mapping) else [("", value)]:
                if np.shape(part):
                    raise UserError(
                        f"the clu metric {name!r} ({type(metric).__name__}) computes an array of shape {np.shape(part)}; its "
                        "`compute` must return a scalar, or a dict of scalars"
                    )
                found[f"{name}/{key}" if key else name] = float(part)
    return found


def _computed(name: str, metric: metrics.Metric) -> Any:
    try:
        return metric.compute()
    except Exception as error:  # a user's code may fail in any way, and clu's own `Std` does with JAX 0.10
        raise UserError(
            f"the clu metric {name!r} ({type(metric).__name__}) can't be computed: {type(error).__name__}: {error}"
        ) from error
