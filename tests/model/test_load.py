"""Loading models: dtypes, end tokens, heads, and every way a folder can be wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from experience_samples import CPU, load
from make_tiny_model import make_tiny_model
from ullage.base.errors import ModelError
from ullage.model.load import load_model, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model", hidden=32, layers=1)


@pytest.mark.parametrize(("dtype", "want"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_weights_have_the_dtype_and_rotary_frequencies_keep_theirs(tiny_model, dtype, want):
    model = load(tiny_model, dtype)
    assert model.dtype == want
    assert {parameter.dtype for parameter in model.module.parameters()} == {want}
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=want)
    for (name, ours), (_, theirs) in zip(model.module.named_buffers(), reference.named_buffers(), strict=True):
        assert ours.dtype == torch.float32, name
        assert torch.equal(ours, theirs), name


def test_all_end_tokens_count(folder):
    GenerationConfig(eos_token_id=[2, 7], temperature=0.3, top_k=5, do_sample=True).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": 9}))
    assert load(folder).stop_ids == frozenset({2, 7, 9})


def test_no_end_token_is_refused(folder):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        settings = {key: value for key, value in settings.items() if key not in ("eos_token_id", "eos_token")}
        (folder / name).write_text(json.dumps(settings))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": None}))
    with pytest.raises(ModelError, match="neither the model nor its tokenizer names an end-of-sequence token"):
        load(folder)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2"])
def test_the_head_gives_the_models_own_logits(tiny_architecture, architecture):
    model = load(tiny_architecture(architecture))
    reference = AutoModelForCausalLM.from_pretrained(tiny_architecture(architecture), dtype=torch.float64)
    ids = torch.tensor([[5, 9, 6, 20, 4]])
    out = reference(ids, output_hidden_states=True)
    torch.testing.assert_close(model.head.logits(out.hidden_states[-1][0], 1.0), out.logits[0], rtol=0, atol=1e-12)
    assert model.head.weight is model.module.get_output_embeddings().weight


def test_cache_shape_is_measured(tiny_architecture):
    assert load(tiny_architecture("llama")).cache_shape == (2, 2, 32)
    assert load(tiny_architecture("gpt2")).cache_shape == (2, 4, 32)


@pytest.mark.parametrize(("architecture", "stack"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_layers_are_the_decoder_blocks(tiny_architecture, architecture, stack):
    model = load(tiny_architecture(architecture))
    assert model.layers == list(model.module.get_submodule(stack))


def test_save_and_load_again(tiny_model, tmp_path):
    model = load(tiny_model, "float32")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(0.01)
    model.save(tmp_path)
    again = load(tmp_path, "float32")
    for (name, ours), (_, theirs) in zip(again.module.named_parameters(), model.module.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert again.tokenizer.encode("1+2=") == model.tokenizer.encode("1+2=")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.architectures == ["LlamaForCausalLM"]


def test_a_chat_template_can_be_replaced(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model), chat_template="{{ messages[0]['content'] }}!")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1!"


def refused(path):
    with pytest.raises(ModelError) as caught:
        load_model(str(path), CPU)
    assert caught.value.remedy
    return caught.value.cause


def test_no_path():
    assert refused("") == "no model given"


def test_missing_folder(tmp_path):
    assert refused(tmp_path / "nowhere") == f"no such model folder: {tmp_path / 'nowhere'}"


def test_missing_gguf(tmp_path):
    assert refused(tmp_path / "model.gguf") == f"no such GGUF file: {tmp_path / 'model.gguf'}"


def test_damaged_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    assert refused(tmp_path / "model.gguf").startswith(f"cannot load {tmp_path / 'model.gguf'}")


def test_a_hub_id_without_network():
    with pytest.raises(ModelError, match="cannot load nobody/nothing") as caught:
        load_model("nobody/nothing", CPU)
    assert "download it where there is one" in caught.value.remedy
    assert "HF_HUB_OFFLINE=1 is set" in caught.value.remedy


def test_no_config(folder):
    (folder / "config.json").unlink()
    assert refused(folder) == f"{folder} has no config.json: not a Hugging Face model folder"


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert refused(folder) == f"{folder} has no weights (*.safetensors)"


def test_only_pickle_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pickle weights (pytorch_model.bin), which can run code" in refused(folder)


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(folder).startswith(f"{file} is damaged")


def test_a_shard_that_is_missing(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    assert refused(folder) == f"{folder} lacks model-2.safetensors"
    (folder / "model.safetensors.index.json").write_text("{")
    assert refused(folder) == f"{folder / 'model.safetensors.index.json'} is damaged"


def test_a_tensor_of_the_wrong_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert refused(folder).startswith(f"cannot load {folder}")


def test_a_tensor_that_is_missing(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refused(folder)


def test_an_unknown_architecture(folder):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "surely_unknown"}))
    assert refused(folder).startswith(f"cannot load {folder}")


def test_a_folder_that_wants_to_run_code(folder):
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "mine.py").write_text("raise SystemExit('executed')\n")
    refused(folder)


def test_the_folder_is_not_written_to(tiny_model, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    before = {file.name: file.stat().st_mtime_ns for file in copy.iterdir()}
    load(copy)
    assert {file.name: file.stat().st_mtime_ns for file in copy.iterdir()} == before
