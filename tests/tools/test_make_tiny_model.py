"""The tiny models are real model folders: they load, run, repeat exactly and speak in characters."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_tiny_model import make_tiny_model

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "gemma2", "gemma3_text", "qwen3_moe", "mixtral",
)  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_loads_and_runs(tiny_architecture, architecture):
    folder = tiny_architecture(architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.config.model_type == architecture
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 0)
    logits = model(torch.arange(4, 12)[None]).logits
    assert logits.shape == (1, 8, 36)
    assert torch.isfinite(logits).all()


def test_same_seed_same_weights(tmp_path):
    before = torch.get_rng_state()
    first, again, other = (
        load_file(make_tiny_model(tmp_path / name, seed=seed, layers=1, hidden=32) / "model.safetensors")
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(torch.get_rng_state(), before)


def test_tokenizer_is_one_token_per_character(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "12+3 = ?\ncopy: 07"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert ids[:3] == [5, 6, 15]
    assert tokenizer.decode(ids) == text
    assert tokenizer("z").input_ids == [tokenizer.unk_token_id] == [3]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_chat_template(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chat = [{"role": "user", "content": "2+3=?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "<bos>u:2+3=?\na:"
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 11
    answered = [*chat, {"role": "assistant", "content": "5"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == "<bos>u:2+3=?\na:5<eos>"


def test_unknown_architecture_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="no tiny bert; there are: gpt2, llama"):
        make_tiny_model(tmp_path, architecture="bert")
