"""Adapters as folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ullage.base.errors import ModelError
from ullage.model.lora import Adapter, Pair, Settings, shortest_targets
from ullage.model.quantise import KINDS, Quantisation

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NOTE = "ullage.json"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_DAMAGED = "copy or download the adapter again"
_UNSUPPORTED = (
    "use_dora", "use_qalora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices",
    "layer_replication", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Keys that, when set, change what a layer computes beyond a low-rank product."""
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Those that leave the base weights alone; the others put part of them into the adapter."""


def is_adapter_folder(path: str | Path) -> bool:
    return (Path(path).expanduser() / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a PEFT folder; `ModelError` where it is none, damaged, or of a kind we do not compute."""
    config = _read_config(folder)
    _refuse_unsupported(folder, config)
    settings = _settings(folder, config)
    layers = _by_layer(folder, _read_tensors(folder))
    for name, pair in layers.items():
        rank = settings.rank_of(name)
        if (pair.down.shape[0], pair.up.shape[1]) != (rank, rank):
            raise ModelError(
                f"{folder}: the tensors of {name} have rank {pair.down.shape[0]}, {CONFIG} says {rank}", _DAMAGED
            )
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():  # a text is a pattern of names
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise ModelError(f"{folder / WEIGHTS} has no tensors for {target}, which {CONFIG} names", _DAMAGED)
    return Adapter(settings, layers)


def base_of(folder: Path) -> str:
    """The model that the adapter was made for, as its config names it."""
    named = _read_config(folder).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelError(
            f"{folder / CONFIG} does not name the model it adapts",
            "write the model's folder there as base_model_name_or_path",
        )
    return named


def stored_dtype(folder: Path) -> str:
    """Half precision where the adapter is, otherwise full: what its model was trained in."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in _read_tensors(folder).values()}
    (dtype,) = dtypes if len(dtypes) == 1 else ("float32",)
    return dtype if dtype in ("bfloat16", "float64") else "float32"


def stored_quantization(folder: Path) -> Quantisation | None:
    """What the model was quantised to when the adapter was trained, where we wrote it."""
    path = folder / NOTE
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_bytes())["quantization"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is damaged: {error}", _DAMAGED) from None
    for kind in KINDS:
        if kind == named:
            return kind
    raise ModelError(f"{path}: quantization = {named} is not known here", "use a newer release")


def write_adapter(
    folder: Path, adapter: Adapter, base: str, layers: Mapping[str, object], quantization: Quantisation | None = None
) -> None:
    """A folder that `peft` and `vllm serve` load; `layers` are all linear layers of the module.

    Its config names the plain model, as after training with bitsandbytes; what that was quantised to is in a file that
    others pass over.
    """
    settings = adapter.settings
    place = Path(base).expanduser()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(place.absolute()) if place.exists() else base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "use_rslora": settings.rank_stabilised,
        "rank_pattern": dict(settings.rank_pattern),
        "alpha_pattern": dict(settings.alpha_pattern),
        "target_modules": shortest_targets(layers, list(adapter.layers)),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
    }
    tensors = {}
    for name, pair in adapter.layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = pair.down.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = pair.up.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if quantization is not None:
        (folder / NOTE).write_text(json.dumps({"quantization": quantization}) + "\n", encoding="utf-8")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(f"{folder} is not a PEFT adapter folder: it has no {CONFIG}", "give the folder of an adapter")
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}", _DAMAGED) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is damaged: it holds no settings", _DAMAGED)
    return config


def _refuse_unsupported(folder: Path, config: dict[str, Any]) -> None:
    found = [f"{key} = {config[key]!r}" for key in _UNSUPPORTED if config.get(key)]
    for key, known in (
        ("peft_type", ("LORA",)),
        ("bias", (None, "none")),
        ("init_lora_weights", _INITIALISATIONS),
    ):
        if config.get(key) not in known:
            found.append(f"{key} = {config.get(key)!r}")
    if found:
        raise ModelError(
            f"{folder} is a kind of adapter that is not supported: {', '.join(found)}",
            "merge it into its model with peft, and give the merged model as the path",
        )


def _settings(folder: Path, config: dict[str, Any]) -> Settings:
    try:
        settings = Settings(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            rank_stabilised=bool(config.get("use_rslora")),
            rank_pattern={str(name): int(rank) for name, rank in (config.get("rank_pattern") or {}).items()},
            alpha_pattern={str(name): float(alpha) for name, alpha in (config.get("alpha_pattern") or {}).items()},
        )
        for pattern in (*settings.rank_pattern, *settings.alpha_pattern):
            re.compile(pattern)
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise ModelError(f"{folder / CONFIG} is damaged: r, lora_alpha or a pattern ({error})", _DAMAGED) from None
    if min((settings.rank, *settings.rank_pattern.values())) < 1:
        raise ModelError(f"{folder / CONFIG} is damaged: a rank below 1", _DAMAGED)
    return settings


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = folder / "adapter_model.bin"
        if pickled.is_file():
            raise ModelError(
                f"{folder} has only pickle weights ({pickled.name}), which can run code when loaded",
                "convert them to safetensors where you trust them",
            )
        raise ModelError(f"{folder} has no {WEIGHTS}", _DAMAGED)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged: {error}", _DAMAGED) from None


def _by_layer(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Pair]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise ModelError(
                f"{folder} changes more than linear layers: {key}",
                "merge it into its model with peft, and give the merged model as the path",
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    half = next((name for name, parts in found.items() if len(parts) < 2), None)
    if half is not None or not found:
        raise ModelError(f"{folder / WEIGHTS} lacks tensors of {half or 'every layer'}", _DAMAGED)
    return {name: Pair(parts["A"], parts["B"]) for name, parts in found.items()}
