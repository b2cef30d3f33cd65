"""Makes tiny random-weight language models with a character tokenizer: real folders for tests, in a second.

python tools/make_tiny_model.py build/tiny-llama
python tools/make_tiny_model.py build/tiny-qwen3 --architecture qwen3 --seed 7
"""

import argparse
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ALPHABET = "0123456789 +-*=?:\nacdemnoprstuwy"
"""Small on purpose: a model that starts from nothing has to find the right symbol by chance."""

MAX_POSITIONS = 1024
SLIDING_WINDOW = 16
"""Shorter than the sequences of most tests, so that they notice where it is ignored."""

# `u:2+3=?` newline `a:` -> `5<eos>`: each message opens with the first letter of its role.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_tiny_model(
    folder: Path | str,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    architecture: str = "llama",
    alphabet: str = ALPHABET,
) -> Path:
    """Write a Hugging Face folder (float32 safetensors, tokenizer, chat template) and return its path."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    tokenizer = make_tokenizer(alphabet)
    settings = _settings(architecture, hidden, layers)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(alphabet: str = ALPHABET) -> Any:  # noqa: ANN401 -- transformers is imported only when needed
    """One token per character; what is not in the alphabet becomes `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = (*SPECIAL, *alphabet)
    tokenizer = Tokenizer(models.WordLevel({symbol: index for index, symbol in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _settings(architecture: str, hidden: int, layers: int) -> dict[str, Any]:
    """The sizes of one architecture, under the names its configuration has for them."""
    if architecture == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": MAX_POSITIONS, **no_dropout}
    common = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": MAX_POSITIONS,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": hidden, "decoder_sparse_step": 1}
    own: dict[str, dict[str, Any]] = {
        "llama": {},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"tie_word_embeddings": True},
        "mistral": {"sliding_window": SLIDING_WINDOW},
        "phi3": {},
        "gemma2": {"sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": hidden // 4},
        "gemma3_text": {"sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": hidden // 4},
        "qwen3_moe": {"num_experts": 4, **experts},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    }
    if architecture not in own:
        raise ValueError(f"no tiny {architecture}; there are: gpt2, {', '.join(own)}")
    return {**common, **own[architecture]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random-weight model folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    print(make_tiny_model(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
