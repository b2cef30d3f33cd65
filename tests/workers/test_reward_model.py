"""The reward model against transformers' own forward: one by one, and in padded micro-batches."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaConfig, RobertaConfig

from make_tiny_model import make_tokenizer
from ullage.base.errors import ModelError
from ullage.engine.replay import Replays
from ullage.model.classifier import classify
from ullage.model.target import find_target
from ullage.workers.reward_model import RewardModel, completed, load_reward_model, micro_batches

CPU = find_target("cpu", 0)
CHAT = [{"role": "user", "content": "2+3?"}]
TEXTS = ["5", "it was 2+3=5, no more", "", "a rather long answer to a rather short question: 5"]
SHAPES = {
    "llama": (LlamaConfig, {"num_key_value_heads": 2, "max_position_embeddings": 80}),
    "bert": (BertConfig, {"max_position_embeddings": 80}),
    "roberta": (RobertaConfig, {"max_position_embeddings": 80, "pad_token_id": 0}),
}


def save_classifier(folder, shape, *, num_labels=1, **changes):
    """A folder of a tiny classifier with random weights, the head's large enough to matter."""
    tokenizer = make_tokenizer()
    kind, settings = SHAPES[shape]
    settings = {"pad_token_id": tokenizer.pad_token_id, **settings, **changes}
    config = kind(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=num_labels,
        **settings,
    )
    torch.manual_seed(3)
    module = AutoModelForSequenceClassification.from_config(config)
    head = module.score if shape == "llama" else module.classifier
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    made = {}

    def folder(shape, **changes):
        key = json.dumps([shape, changes])
        if key not in made:
            made[key] = save_classifier(tmp_path_factory.mktemp("classifiers") / shape, shape, **changes)
        return str(made[key])

    return folder


def alone(folder, token_ids):
    """What transformers says to one text by itself."""
    module = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [module(input_ids=torch.tensor([ids])).logits[0, 0].item() for ids in token_ids]


@pytest.mark.parametrize("shape", ["llama", "bert", "roberta"])
@pytest.mark.parametrize("prompt", [CHAT, "2+3?"])
def test_exactly_what_transformers_says_one_by_one(classifier, shape, prompt):
    folder = classifier(shape)
    model = load_reward_model(folder, CPU, max_tokens=70)  # two of the longest do not fit
    tokenizer = model.tokenizer
    form = "<bos>u:2+3?\na:{}<eos>" if prompt is CHAT else "2+3?{}"
    expected = alone(folder, [tokenizer(form.format(text))["input_ids"] for text in TEXTS])
    assert [model.scores([prompt], [text])[0] for text in TEXTS] == expected
    assert len(set(expected)) == len(TEXTS)


@pytest.mark.parametrize(("shape", "changes"), [
    ("llama", {}), ("bert", {}), ("roberta", {}), ("llama", {"pad_token_id": None}), ("llama", {"pad_token_id": 2}),
])  # fmt: skip
def test_scores_do_not_depend_on_the_micro_batches(classifier, shape, changes):
    """Also without a padding token, and with the end token as one, where decoders look for the last other token."""
    folder = classifier(shape, **changes)
    prompts = [CHAT, "2+3?", CHAT, "1"]
    one_by_one = [
        load_reward_model(folder, CPU, max_tokens=70).scores([prompt], [text])[0]
        for prompt, text in zip(prompts, TEXTS, strict=True)
    ]
    for max_tokens in (70, 150, 8192):
        model = load_reward_model(folder, CPU, max_tokens=max_tokens)
        assert model.scores(prompts, TEXTS) == pytest.approx(one_by_one, rel=0, abs=1e-6)
        assert model.module.config.pad_token_id == changes.get("pad_token_id", 0)


def test_a_decoder_without_a_padding_token_reads_the_last_token(classifier):
    folder = classifier("llama", pad_token_id=None)
    model = load_reward_model(folder, CPU, max_tokens=8192)
    texts = ["5", "it was 2+3=5"]
    ids = [model.tokenizer(f"<bos>u:2+3?\na:{text}<eos>")["input_ids"] for text in texts]
    assert model.scores([CHAT, CHAT], texts) == pytest.approx(alone(folder, ids), rel=0, abs=1e-6)


def test_micro_batches_are_bounded_with_their_padding():
    lengths = {"a": 4, "b": 10, "c": 9, "d": 2, "e": 3, "f": 30}
    batches = list(micro_batches(lengths, 30))
    assert batches == [["f"], ["b", "c", "a"], ["e", "d"]]
    assert list(micro_batches({}, 30)) == []


@pytest.mark.parametrize(("shape", "limit"), [("llama", 80), ("bert", 80), ("roberta", 79)])
def test_a_conversation_over_the_limit_is_not_cut(classifier, shape, limit):
    model = load_reward_model(classifier(shape), CPU, max_tokens=8192)
    assert model.limit == limit
    fits, over = model.scores(["1", "1"], ["2" * (limit - 1), "2" * limit])
    assert isinstance(fits, float)
    assert over == f"the conversation has {limit + 1} tokens, the reward model reads at most {limit}"


def test_the_token_limit_is_a_limit_too(classifier):
    model = load_reward_model(classifier("llama"), CPU, max_tokens=10)
    assert model.scores(["1"], ["2" * 10]) == ["the conversation has 11 tokens, the reward model reads at most 10"]
    assert model.scores([""], [""]) == ["the reward model was given an empty text"]
    assert model.scores([], []) == []


def test_a_conversation_without_a_template(classifier):
    model = load_reward_model(classifier("bert"), CPU, max_tokens=8192)
    model.tokenizer.chat_template = None
    system = {"role": "system", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]}
    joined = model.scores([[system, *CHAT]], ["5"])
    assert joined == model.scores(["system: one two\n\nuser: 2+3?\n\nassistant: "], ["5"])


def test_a_template_that_refuses(classifier):
    model = load_reward_model(classifier("bert"), CPU, max_tokens=8192)
    model.tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    assert model.scores([CHAT, "2+3?"], ["5", "5"])[0] == (
        "the chat template of the reward model raised TemplateError: no system role"
    )
    assert isinstance(model.scores([CHAT, "2+3?"], ["5", "5"])[1], float)


def test_a_reply_that_was_begun_in_the_prompt():
    begun = [*CHAT, {"role": "assistant", "content": "It is "}]
    assert completed(begun, "5") == [*CHAT, {"role": "assistant", "content": "It is 5"}]
    assert begun[-1]["content"] == "It is "


def test_nothing_is_trained(classifier):
    model = load_reward_model(classifier("llama"), CPU, max_tokens=8192)
    assert isinstance(model, RewardModel)
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert not model.module.training


# --- folders that are no reward model ---


def test_two_labels(classifier):
    with pytest.raises(ModelError, match=r"has 2 labels; a reward model has one output"):
        load_reward_model(classifier("llama", num_labels=2), CPU, max_tokens=10)


def test_a_language_model(tiny_model):
    with pytest.raises(ModelError, match="has 2 labels"):
        load_reward_model(str(tiny_model), CPU, max_tokens=10)


@pytest.mark.parametrize(("shape", "head"), [("llama", "score.weight"), ("bert", "classifier.bias")])
def test_a_head_that_is_not_in_the_files(classifier, tmp_path, shape, head):
    folder = tmp_path / "headless"
    shutil.copytree(classifier(shape), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[head]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"lacks 1 of the model's tensors, such as {head}"):
        load_reward_model(str(folder), CPU, max_tokens=10)


def test_pickled_weights(classifier, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(classifier("bert"), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickle weights"):
        load_reward_model(str(folder), CPU, max_tokens=10)


def test_a_gguf_file(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="has no classification head"):
        load_reward_model(str(tmp_path / "model.gguf"), CPU, max_tokens=10)


def test_smaller_batches_where_memory_runs_out(classifier, monkeypatch):
    said = []
    model = load_reward_model(classifier("llama"), CPU, max_tokens=8192, replays=Replays(say=said.append))
    prompts = [CHAT, "2+3?", CHAT, "1"]
    expected = model.scores(prompts, TEXTS)
    sizes = []

    def small_ones(module, token_ids, target):
        sizes.append(len(token_ids))
        if len(token_ids) * max(map(len, token_ids)) > 70:
            raise torch.OutOfMemoryError("injected")
        return classify(module, token_ids, target)

    monkeypatch.setattr("ullage.workers.reward_model.classify", small_ones)
    assert model.scores(prompts, TEXTS) == pytest.approx(expected, rel=0, abs=1e-6)
    assert sizes[:2] == [4, 2]  # the longest is about 60
    assert sum(sizes[2:]) == 4
    assert [line.split(":")[0] for line in said] == ["the reward model ran out of memory"] * 2
