"""The `Model` interface that a step calls, and its implementations for praxis, Flax NNX, Flax Linen and plain functions.

    task_p.model = Config(models.NnxModel, module=Config(MyNet, features=64), inputs="images", loss=my_loss)

Sharding, padding, partitioners and checkpoints work in the same way for all kinds of models.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
