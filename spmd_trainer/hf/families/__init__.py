"""The supported architectures of transformers. Each file describes some of them: config.json format and tensor names."""

from spmd_trainer.hf.families import deepseek, gemma, gpt2, gpt_oss, llama, llama4, olmo, qwen, qwen_next
from spmd_trainer.hf.families.family import Family

# The order matters for `config_of`: a model that several families describe is written as the first of them.
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for module in (llama, llama4, qwen, qwen_next, deepseek, gpt_oss, gemma, gpt2, olmo)
    for family in module.FAMILIES
}

__all__ = ["FAMILIES", "Family"]
