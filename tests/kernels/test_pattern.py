"""How logits are scaled and capped."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_trainer.kernels.kernels import Pattern


@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
def test_logits_are_scaled_and_then_capped(scale):
    products = np.array([-40.0, -1, 0, 0.5, 2, 40], np.float32)
    np.testing.assert_allclose(Pattern(scale=scale).logits(jnp.array(products)), scale * products)
    capped = Pattern(scale=scale, softcap=2.0).logits(jnp.array(products))
    np.testing.assert_allclose(capped, 2 * np.tanh(scale * products / 2), rtol=1e-6)
