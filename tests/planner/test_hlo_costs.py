"""FLOPs and bytes of small programs, computed by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer import sharding
from spmd_trainer.planner import hlo_costs, hlo_kernels, hlo_text

LAYERS, ROWS, WIDTH, HIDDEN = 6, 64, 32, 128


def entry(*instructions, others=""):
    lines = "\n".join(f"  {line}" for line in instructions)
    return f"HloModule m, is_scheduled=true\n\n{others}ENTRY %main (p: f32[4]) -> f32[4] {{\n{lines}\n}}\n"


def costs(text):
    return {cost.instruction.name: cost for cost in hlo_costs.instruction_costs(text)}


def total_flops(text):
    return sum(cost.times * cost.flops for cost in hlo_costs.instruction_costs(text))


def test_a_scanned_mlp_on_a_mesh_has_exactly_the_flops_of_its_products():
    mesh = sharding.create_device_mesh([("data", 4), ("mdl", 2)])

    def loss(weights, x):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w[0]) @ w[1], None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    def shape(*sizes, spec):
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    weights = (
        shape(LAYERS, WIDTH, HIDDEN, spec=(None, None, "mdl")),
        shape(LAYERS, HIDDEN, WIDTH, spec=(None, "mdl", None)),
    )
    x = shape(ROWS, WIDTH, spec=("data",))
    forward = LAYERS * 2 * (2 * ROWS * WIDTH * HIDDEN) / mesh.size
    assert total_flops(jax.jit(loss).lower(weights, x).compile().as_text()) == forward
    # The gradient takes two products for each of the forward pass.
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x).compile().as_text()
    assert total_flops(gradient) == 3 * forward


def test_products_inside_of_fusions_and_calls_count():
    fused = """%fused (a: bf16[8,16], b: bf16[16,4]) -> bf16[8,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,4]{1,0} parameter(1)
  ROOT %dot = bf16[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

"""
    text = entry(
        "%p = bf16[8,16]{1,0} parameter(0)",
        "%q = bf16[16,4]{1,0} parameter(1)",
        "ROOT %f = bf16[8,4]{1,0} fusion(%p, %q), kind=kOutput, calls=%fused",
        others=fused,
    )
    found = costs(text)["f"]
    assert (found.flops, found.num_bytes) == (2 * 8 * 16 * 4, 2 * (8 * 16 + 16 * 4 + 8 * 4))


def test_a_cublas_product():
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]}}}'
    text = entry(
        "%p = bf16[3,8,16]{2,1,0} parameter(0)",
        "%q = bf16[3,16,4]{2,1,0} parameter(1)",
        'ROOT %g = (bf16[3,8,4]{2,1,0}, s8[64]{0}) custom-call(%p, %q), custom_call_target="__cublas$gemm", '
        f"backend_config={config}",
    )
    assert costs(text)["g"].flops == 2 * 3 * 8 * 16 * 4


@pytest.mark.parametrize(
    ("convolution", "flops"),
    [
        # An image of 10 x 10, a kernel of 3 x 3, 8 to 16 features, no padding: 8 x 8 outputs.
        (
            "f32[2,8,8,16] convolution(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f",
            2 * 2 * 8 * 8 * 16 * 8 * 9,
        ),
        # One row of padding on each side: outputs at the border see two rows of the kernel instead of three.
        (
            "f32[2,10,8,16] convolution(%x, %k), window={size=3x3 pad=1_1x0_0}, dim_labels=b01f_01io->b01f",
            2 * 2 * (8 * 3 + 2 * 2) * 8 * 16 * 8 * 3,
        ),
        # Every second position: 4 x 4 outputs.
        (
            "f32[2,4,4,16] convolution(%x, %k), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f",
            2 * 2 * 4 * 4 * 16 * 8 * 9,
        ),
        # Two groups of the batch, each with half of the kernel's features: an output is of one group's image.
        (
            "f32[1,8,8,16] convolution(%x, %k), window={size=3x3}, dim_labels=b01f_01io->b01f, batch_group_count=2",
            2 * 1 * 8 * 8 * 16 * 8 * 9,
        ),
    ],
)
def test_convolutions(convolution, flops):
    text = entry(
        "%x = f32[2,10,10,8]{3,2,1,0} parameter(0)",
        "%k = f32[3,3,8,16]{3,2,1,0} parameter(1)",
        f"ROOT %c = {convolution}",
    )
    assert costs(text)["c"].flops == flops


@pytest.mark.parametrize(
    ("kernel", "operands", "result"),
    [
        ("convForward", ("x", "k"), "y"),
        ("convBackwardInput", ("y", "k"), "x"),
        ("convBackwardFilter", ("x", "y"), "k"),
    ],
)
def test_cudnn_convolutions_and_their_gradients_have_the_same_products(kernel, operands, result):
    shapes = {"x": "bf16[8,33,33,64]{3,2,1,0}", "k": "bf16[128,3,3,64]{3,2,1,0}", "y": "bf16[8,16,16,128]{3,2,1,0}"}
    left, right = operands
    text = entry(
        f"%{left} = {shapes[left]} parameter(0)",
        f"%{right} = {shapes[right]} parameter(1)",
        f"ROOT %c = ({shapes[result]}, u8[0]{{0}}) custom-call(%{left}, %{right}), window={{size=3x3 stride=2x2}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn${kernel}"',
    )
    assert costs(text)["c"].flops == 2 * 8 * 16 * 16 * 128 * 64 * 9


def test_float32_products_are_told_apart():
    text = entry(
        "%p = f32[8,16]{1,0} parameter(0)",
        "%q = f32[16,4]{1,0} parameter(1)",
        "%d = f32[8,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%b = bf16[4,8]{1,0} parameter(2)",
        "ROOT %e = f32[8,8]{1,0} dot(%d, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    found = costs(text)
    assert (found["d"].float32_flops, found["d"].flops) == (2 * 8 * 16 * 4, 2 * 8 * 16 * 4)
    assert (found["e"].float32_flops, found["e"].flops) == (0, 2 * 8 * 4 * 8)


def test_element_wise_operations_and_reductions_are_counted_in_fusions_too():
    fused = """%fused (a: f32[8,16]) -> f32[8] {
  %a = f32[8,16]{1,0} parameter(0)
  %e = f32[8,16]{1,0} exponential(%a)
  %s = f32[8,16]{1,0} multiply(%e, %a)
  %t = f32[16,8]{1,0} transpose(%s), dimensions={1,0}
  %zero = f32[] constant(0)
  ROOT %r = f32[8]{0} reduce(%t, %zero), dimensions={0}, to_apply=%add
}

"""
    text = entry("%p = f32[8,16]{1,0} parameter(0)", "ROOT %f = f32[8]{0} fusion(%p), calls=%fused", others=fused)
    assert costs(text)["f"].vector_ops == 3 * 8 * 16


def test_a_batched_product_that_tpus_write_as_a_convolution():
    # 5 products of [7, 3] with [3, 4]: the batch is a spatial dimension, padded so that each output meets one element.
    text = entry(
        "%x = bf16[5,7,3]{2,1,0} parameter(0)",
        "%k = bf16[5,3,4]{2,1,0} parameter(1)",
        "ROOT %c = bf16[5,7,4]{2,1,0} convolution(%x, %k), window={size=5 stride=4 lhs_dilate=5}, dim_labels=0bf_0io->0bf",
    )
    assert costs(text)["c"].flops == 5 * 2 * 7 * 3 * 4


def test_only_the_part_that_is_read_or_written_counts():
    fused = """%fused (a: f32[10,4], i: s32[], u: f32[4], b: f32[10,4]) -> f32[10,4] {
  %a = f32[10,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[4]{0} parameter(2)
  %b = f32[10,4]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %slice = f32[1,4]{1,0} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,4}
  %row = f32[4]{0} bitcast(%slice)
  %sum = f32[4]{0} add(%row, %u)
  %update = f32[1,4]{1,0} bitcast(%sum)
  ROOT %d = f32[10,4]{1,0} dynamic-update-slice(%b, %update, %i, %zero)
}

"""
    text = entry(
        "%p = f32[10,4]{1,0} parameter(0)",
        "%n = s32[] parameter(1)",
        "%q = f32[4]{0:S(1)} parameter(2)",
        "%r = f32[10,4]{1,0} parameter(3)",
        "%f = f32[10,4]{1,0} fusion(%p, %n, %q, %r), kind=kLoop, calls=%fused",
        "ROOT %s = f32[1,4]{1,0} dynamic-slice(%f, %n, %n), dynamic_slice_sizes={1,4}",
        others=fused,
    )
    found = costs(text)
    # It reads a row of %p and the index, and writes a row; %q is in the core's own memory.
    assert found["f"].num_bytes == 16 + 4 + 16
    assert found["s"].num_bytes == 16 + 16


def test_asynchronous_copies_overlap():
    text = entry(
        "%p = f32[8]{0} parameter(0)",
        "%c = (f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%p)",
        "%d = f32[8]{0:S(1)} copy-done(%c)",
        "ROOT %e = f32[8]{0} add(%d, %d)",
    )
    found = costs(text)
    assert (found["c"].num_bytes, found["c"].overlaps) == (32, True)
    assert (found["e"].num_bytes, found["e"].overlaps) == (32, False)


BATCH, HEADS, LENGTH, HEAD = 2, 4, 512, 64


@pytest.mark.parametrize(
    ("mask", "window", "pairs"),
    [
        ("NO_MASK", 0, LENGTH * LENGTH),
        ("CAUSAL", 0, LENGTH * (LENGTH + 1) / 2),
        ("CAUSAL", 100, 100 * LENGTH - 100 * 99 / 2),
    ],
)
@pytest.mark.parametrize(("kernel", "products"), [("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)])
def test_cudnn_attention(mask, window, pairs, kernel, products):
    config = (
        f'{{"cudnn_fmha_backend_config":{{"intermediate_tensor_shape":{{"element_type":"BF16","dimensions":["{BATCH}","{HEADS}",'
        f'"{LENGTH}","{LENGTH}"]}},"mask_type":"{mask}","sliding_window_length":{window}}}}}'
    )
    shape = f"bf16[{BATCH},{LENGTH},{HEADS},{HEAD}]{{3,2,1,0}}"
    text = entry(
        f"%q = {shape} parameter(0)",
        f'ROOT %a = ({shape}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="__cudnn${kernel}", '
        f"backend_config={config}",
    )
    assert costs(text)["a"].flops == products * 2 * BATCH * HEADS * HEAD * pairs


def splash(kernel, tables, settings, *, integers=1):
    """A splash attention kernel for 4 rows of heads, 4,096 tokens, width 128; keys have 2 heads."""
    numbers = ", ".join(f'\\"{name}\\": {size}' for name, size in settings.items())
    positions = "".join(", s32[4096,128]{1,0}" for _ in range(integers))
    table, heads = f"s8[1,{tables}]{{2,1,0}}", "4096,128]{2,1,0}"
    constraints = f"{table}, {table}, bf16[4,{heads}, bf16[2,{heads}{positions}"
    return entry(
        "%q = bf16[4,4096,128]{2,1,0} parameter(0)",
        'ROOT %a = bf16[4,4096,128]{2,1,0} custom-call(%q), custom_call_target="tpu_custom_call", '
        f"operand_layout_constraints={{{constraints}}}, "
        f'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{{{numbers}}}"\n}}}}, '
        f'metadata={{op_name="jit(f)/{kernel}/pallas_call"}}',
    )


FORWARD = {"block_q": 1024, "block_kv": 1024, "block_kv_compute": 512}


@pytest.mark.parametrize(
    ("kernel", "tables", "settings", "integers", "blocks", "products"),
    [
        ("splash_mha_fwd_residuals", "4,4", FORWARD, 1, 4 + 3 + 2 + 1, 2),
        ("splash_mha_fwd_residuals", "4,4", FORWARD, 3, 4 + 3 + 2 + 1, 2),  # with segments
        ("splash_mha_fwd_residuals", "4,4", FORWARD, 0, 16, 2),  # bidirectional
        ("splash_mha_fwd_residuals", "4,2", FORWARD, 1, 1 + 2 + 2 + 2, 2),  # with a window
        ("splash_mha_dkv_no_residuals", "2,4", {"block_q_dkv": 1024, "block_kv_dkv": 1024}, 1, 2 + 2 + 2 + 1, 4),
        ("splash_mha_dq_no_residuals", "4,8", {"block_q_dq": 1024, "block_kv_dq": 512}, 1, (2 + 4 + 6 + 8) / 2, 3),
    ],
)
def test_splash_attention_skips_blocks(kernel, tables, settings, integers, blocks, products):
    text = splash(kernel, tables, settings, integers=integers)
    found = costs(text)["a"]
    assert found.flops == products * 2 * 4 * 128 * blocks * 1024**2
    assert (found.attention.width, found.attention.is_backward) == (128, "fwd" not in kernel)
    assert found.vector_ops == {2: 9, 3: 10, 4: 11}[products] * 4 * blocks * 1024**2


def test_a_pallas_kernel_that_states_its_flops():
    text = entry(
        "%q = f32[8]{0} parameter(0)",
        'ROOT %a = f32[8]{0} custom-call(%q), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"cost_estimate":{"flops":123,"bytes_accessed":64}}}',
    )
    assert costs(text)["a"].flops == 123


@pytest.mark.parametrize("target", ["tpu_custom_call", "mosaic_gpu_v2"])
def test_products_of_experts_count_the_rows_that_are_there_on_average(target):
    """A part of 8 experts of 32 x 16 has room for 64 rows, and 16 on average."""

    def program(result, one, other):
        return entry(
            f"%p = {one} parameter(0)",
            f"%q = {other} parameter(1)",
            "%g = s32[8]{0} parameter(2)",
            f'ROOT %a = {result} custom-call(%g, %p, %q), custom_call_target="{target}", '
            'metadata={op_name="jit(step)/moe/up/shard_map/rows_of_part_16/pallas_call"}',
        )

    rows, out, weights = "bf16[64,32]{1,0}", "bf16[64,16]{1,0}", "bf16[8,32,16]{2,1,0}"
    of_weights, of_rows = 2 * 8 * 32 * 16, 2 * 16 * (32 + 16)
    for text in (program(out, rows, weights), program(weights, "bf16[32,64]{1,0}", out)):
        found = costs(text)["a"]
        assert found.flops == 2 * 16 * 32 * 16
        assert found.num_bytes == of_weights + of_rows + 4 * 8


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 9), (9, 3), (1, 8)])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 20])
def test_pairs_of_causal_attention(queries, keys, window):
    seen = [key <= query and (not window or query - key < window) for query in range(queries) for key in range(keys)]
    assert hlo_kernels.seen_pairs(queries, keys, causal=True, window=window) == sum(seen)


@pytest.mark.parametrize("image_dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel_dilation", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize(("kernel", "low"), [(1, 0), (4, 3), (3, -2)])
def test_products_of_a_convolution_without_padding(image_dilation, kernel_dilation, stride, kernel, low):
    image, output = 5, 6
    # Each place of the padded, dilated image that the kernel visits; elements of the image have a number.
    elements = {element * image_dilation for element in range(image)}
    visited = [o * stride + k * kernel_dilation - low for o in range(output) for k in range(kernel)]
    convolution = hlo_text.Instruction(
        "c",
        f"f32[1,{output},1]",
        "convolution",
        (),
        f"window={{size={kernel} stride={stride} pad={low}_0 lhs_dilate={image_dilation} rhs_dilate={kernel_dilation}}}, "
        "dim_labels=b0f_0io->b0f",
        is_root=True,
    )
    shapes = (f"f32[1,{image},1]", f"f32[{kernel},1,1]", f"f32[1,{output},1]")
    assert hlo_kernels.convolution_flops(convolution, *shapes) == 2 * sum(place in elements for place in visited)


def test_products_of_a_large_convolution_are_counted_at_once():
    """As many pairs of an output and a kernel position as a loop over them would take minutes for."""
    size = 100_000
    convolution = hlo_text.Instruction(
        "c",
        "",
        "convolution",
        (),
        f"window={{size={size} pad=0_{size - 1} lhs_dilate=2}}, dim_labels=b0f_0io->b0f",
        is_root=True,
    )
    shapes = (f"f32[1,{size},1]", f"f32[{size},1,1]", f"f32[1,{size},1]")
    pairs = sum(len(range(o + o % 2, o + size, 2)) for o in range(size))
    assert hlo_kernels.convolution_flops(convolution, *shapes) == 2 * pairs
