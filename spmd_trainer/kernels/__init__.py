"""Kernels: self-attention over whole rows, grouped matrix products for sparse experts, and cross entropy without stored logits.

Start with `attend.py`: layers call its `attend`, which picks a kernel for the device, the shapes and the attention pattern, and
runs it on each device's part of the arrays. `kernels.py` defines which keys a query sees, the interface of a kernel, and the
order in which kernels are tried:

- `splash.py`: JAX's splash attention for TPUs.
- `cudnn.py`: cuDNN's fused attention for CUDA GPUs.
- `chunked.py`: blocks with an online softmax in `jax.numpy`, for every device.
- `reference.py`: plain logits and probabilities; for short rows, for dropout, and as the reference in tests.

A new attention kernel is one new file and one line in `kernels.py`. `ring.py` and `all_to_all.py` split the tokens of a row over
a mesh axis (context parallelism).

For experts, `token_groups.py` sorts tokens by expert, and `grouped_dot.py` multiplies them by the experts' weights; it uses
`megablox.py` on TPUs, `hopper.py` on Hopper GPUs, and `grouped_blocks.py` elsewhere. `cross_entropy.py` computes the loss of a
language model in blocks of tokens.
"""
