"""The registered families have the published numbers of parameters, and their settings can be overridden."""

import math

import jax
import jax.numpy as jnp
import pytest
from decoder_helpers import evaluating
from praxis import base_layer

from spmd_trainer import experiment_modules, experiment_registry
from spmd_trainer.decoder import experiment
from spmd_trainer.training import experiment_config

experiment_modules.import_package(experiment_registry.EXPERIMENTS_PACKAGE)

# Numbers of parameters of the published checkpoints, tied embeddings counted once; of the text part alone for Gemma 3 from 4B on.
PUBLISHED = {
    "llama.Llama2_7B": 6_738_415_616,
    "llama.Llama2_13B": 13_015_864_320,
    "llama.Llama2_70B": 68_976_648_192,
    "llama.Llama3_8B": 8_030_261_248,
    "llama.Llama3_70B": 70_553_706_496,
    "llama.Llama3_1_8B": 8_030_261_248,
    "llama.Llama3_1_70B": 70_553_706_496,
    "llama.Llama3_1_8BLong": 8_030_261_248,
    "llama.Llama3_1_8BLora": 8_030_261_248,
    "llama.Llama3_1_70BLora": 70_553_706_496,
    "llama.Llama3_2_1B": 1_235_814_400,
    "llama.Llama3_2_3B": 3_212_749_824,
    "llama4.Llama4Scout": 107_769_861_120,
    "llama4.Llama4Maverick": 400_711_848_960,
    "qwen.Qwen2_5_0_5B": 494_032_768,
    "qwen.Qwen2_5_1_5B": 1_543_714_304,
    "qwen.Qwen2_5_3B": 3_085_938_688,
    "qwen.Qwen2_5_7B": 7_615_616_512,
    "qwen.Qwen2_5_14B": 14_770_033_664,
    "qwen.Qwen2_5_32B": 32_763_876_352,
    "qwen.Qwen2_5_72B": 72_706_203_648,
    "qwen.Qwen3_0_6B": 596_049_920,
    "qwen.Qwen3_1_7B": 1_720_574_976,
    "qwen.Qwen3_4B": 4_022_468_096,
    "qwen.Qwen3_8B": 8_190_735_360,
    "qwen.Qwen3_14B": 14_768_307_200,
    "qwen.Qwen3_32B": 32_762_123_264,
    "qwen.Qwen3_30B_A3B": 30_532_122_624,
    "qwen_next.Qwen3Next80B": 79_674_391_296,
    "qwen_next.Qwen3_5_4B": 4_205_751_296,
    "qwen_next.Qwen3_5_9B": 8_953_803_264,
    "qwen_next.Qwen3_5_27B": 26_895_998_464,
    "qwen_next.Qwen3_5_35B_A3B": 34_660_610_688,
    "mistral.Mistral7B": 7_241_732_096,
    "mistral.Mistral7BV3": 7_248_023_552,
    "mistral.Mixtral8x7B": 46_702_792_704,
    "glm.Glm4_5Air": 106_852_245_504,
    "glm.Glm4_5": 352_797_814_784,
    "gpt_oss.GptOss20B": 20_914_757_184,
    "gpt_oss.GptOss120B": 116_829_156_672,
    "deepseek.DeepSeekV3": 671_026_404_352,
    "deepseek.KimiK2": 1_026_408_209_408,
    "deepseek.Moonlight16B": 15_960_108_544,
    "gemma.Gemma2_2B": 2_614_341_888,
    "gemma.Gemma2_9B": 9_241_705_984,
    "gemma.Gemma2_27B": 27_227_128_320,
    "gemma.Gemma3_1B": 999_885_952,
    "gemma.Gemma3_4B": 3_880_263_168,
    "gemma.Gemma3_12B": 11_766_034_176,
    "gemma.Gemma3_27B": 27_009_346_304,
    "gemma.Gemma4_31B": 30_697_345_280,
    "gpt2.Gpt2Small": 124_439_808,
    "gpt2.Gpt2Medium": 354_823_168,
    "gpt2.Gpt2Large": 774_030_080,
    "gpt2.Gpt2Xl": 1_557_611_200,
    "olmo.Olmo2_1B": 1_484_916_736,
    "olmo.Olmo2_7B": 7_298_617_344,
    "olmo.Olmo2_13B": 13_716_198_400,
    "olmo.Olmo2_32B": 32_234_279_936,
    "olmo.Olmo3_7B": 7_298_011_136,
    "olmo.Olmo3_32B": 32_233_522_176,
}


def test_every_published_size_is_counted():
    registered = {
        experiment_registry.short_name(name).removeprefix("lm.")
        for name, cls in experiment_registry.get_all().items()
        if issubclass(cls, experiment.DecoderExperiment) and name.startswith("spmd_trainer.experiments.lm.")
        if not {"tiny", "needs_folder"} & set(experiment_registry.get_registry_tags(name))
    }
    assert registered - {"own_text.OwnText"} == set(PUBLISHED)  # whose size is the user's


# One size of each family.
SHORT = (
    "llama.Llama3_1_8B",
    "llama4.Llama4Maverick",
    "qwen.Qwen3_30B_A3B",
    "mistral.Mixtral8x7B",
    "qwen_next.Qwen3_5_35B_A3B",
    "glm.Glm4_5Air",
    "deepseek.Moonlight16B",
    "gemma.Gemma3_4B",
    "gemma.Gemma4_31B",
    "gpt2.Gpt2Small",
    "gpt_oss.GptOss20B",
    "olmo.Olmo2_1B",
    "olmo.Olmo3_7B",
)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in PUBLISHED]
)
def test_numbers_of_parameters(name):
    model_p = experiment_config.resolve(f"lm.{name}").task_p.model
    layer = base_layer.instantiate(model_p.lm_tpl.clone().set(name="lm"))
    ids = jnp.zeros((1, 2), jnp.int32)
    with evaluating():
        variables = jax.eval_shape(lambda: layer.init(jax.random.key(0), ids, jnp.zeros(ids.shape)))["params"]
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(variables)) == PUBLISHED[name]


def test_class_attributes_and_fields_can_be_overridden():
    overrides = ["NUM_LAYERS=3", "task.model.lm_tpl.spec.rotary_scaling.factor=2.0"]
    spec_p = experiment_config.resolve("lm.llama.Llama3_1_8B", overrides).task_p.model.lm_tpl.spec
    assert (spec_p.num_layers, spec_p.rotary_scaling.factor, spec_p.rotary_scaling.kind) == (3, 2.0, "llama3")
    assert experiment_config.resolve("lm.llama.Llama3_1_8B").task_p.model.lm_tpl.spec.num_layers == 32
