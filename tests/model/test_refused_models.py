"""Architectures that packing or the cache would compute wrongly are refused, and what is wrong is said."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experience_samples import CPU
from make_tiny_model import make_tokenizer
from ullage.base.errors import ModelError
from ullage.model.load import load_model

REFUSED = {
    "bloom": (
        {"hidden_size": 32, "n_layer": 2, "n_head": 2},
        r"attends in layers \[\] instead of once in each of its 2",
    ),
    "codegen": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, r"attends in layers \[\]"),
    "rwkv": ({"hidden_size": 32, "num_hidden_layers": 2}, r"attends in layers \[\]"),
    "gptj": ({"n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, "has an attention of its own"),
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}, "has linear_attention"),
    "diffllama": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        r"attends in layers \[0, 0\]",
    ),
    "doge": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        "makes an attention mask of its own",
    ),
    "stablelm": (
        {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        "does not pass keyword arguments on",
    ),
    "deepseek_v3": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
        "keys and values of several shapes",
    ),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused(tmp_path, architecture):
    settings, message = REFUSED[architecture]
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(
        architecture, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(str(tmp_path), CPU)
    assert caught.value.remedy
