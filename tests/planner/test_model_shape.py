"""Shapes: parameter counts against the published ones, every family's config.json, sizes, and what cannot be read."""

import json

import pytest

from ullage.base.errors import ModelError
from ullage.planner.model_shape import Shape, bundled_shapes, find_shape

PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512, "Qwen2.5-14B": 14_770_033_664, "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648, "Qwen3-0.6B": 596_049_920, "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096, "Qwen3-8B": 8_190_735_360, "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264, "Qwen3-30B-A3B": 30_532_122_624, "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-Coder-480B-A35B": 480_154_875_392, "Llama-2-7B": 6_738_415_616, "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192, "Llama-3.1-8B": 8_030_261_248, "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800, "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824,
    "TinyLlama-1.1B": 1_100_048_384, "Mistral-7B-v0.1": 7_241_732_096, "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-12B": 12_247_782_400, "Mistral-Small-24B": 23_572_403_200, "Ministral-8B": 8_019_808_256,
    "Mistral-Large-123B": 122_610_069_504, "Mixtral-8x7B": 46_702_792_704, "Mixtral-8x22B": 140_630_071_296,
    "Gemma-2B": 2_506_172_416, "Gemma-7B": 8_537_680_896, "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984, "Gemma-2-27B": 27_227_128_320, "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952, "Phi-3-mini": 3_821_079_552, "Phi-3-medium": 13_960_238_080,
    "Phi-4-mini": 3_836_021_760, "Phi-4": 14_659_507_200, "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120, "SmolLM2-1.7B": 1_711_376_384, "SmolLM3-3B": 3_075_098_624,
    "DeepSeek-V2-Lite": 15_706_484_224, "DeepSeek-V3": 671_026_404_352, "Yi-1.5-6B": 6_061_035_520,
    "Yi-1.5-9B": 8_829_407_232, "Yi-1.5-34B": 34_388_917_248, "OLMo-2-7B": 7_298_617_344,
    "OLMo-2-13B": 13_716_198_400, "Falcon3-7B": 7_455_550_464, "Granite-3.1-2B": 2_533_531_648,
    "Granite-3.1-8B": 8_170_848_256, "gpt-oss-20B": 20_914_757_184, "gpt-oss-120B": 116_829_156_672,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
}  # fmt: skip
"""What the models' pages say; DeepSeek-V3 without its 14,848 correction biases, which are buffers."""


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_bundled_shapes_have_the_published_number_of_parameters(name, count):
    assert find_shape(name).parameters == count


def test_about_sixty_models_are_bundled_and_active_parameters_leave_idle_experts_out():
    assert len(bundled_shapes()) >= 60
    # 3.35 B with the embedding, which nothing is multiplied with.
    assert find_shape("Qwen3-30B-A3B").active_parameters == 30_532_122_624 - 48 * 120 * 3 * 2048 * 768 - 151936 * 2048
    assert find_shape("Qwen2.5-3B").active_parameters == 3_085_938_688


QWEN2 = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 131072,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "tie_word_embeddings": False, "attention_bias": True, "sliding_window": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (QWEN2, "Qwen2.5-7B"),
        (DEEPSEEK, "DeepSeek-V3"),
        (GEMMA3, "Gemma-3-1B"),
        (MIXTRAL, "Mixtral-8x7B"),
        (QWEN3_MOE, "Qwen3-30B-A3B"),
        (GPT_OSS, "gpt-oss-20B"),
    ],
)
def test_a_config_json_gives_the_same_shape_as_the_bundled_one(config, name):
    assert Shape.from_config(config, name) == find_shape(name)


def test_a_folder_and_a_multimodal_config_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": GEMMA3}))
    assert find_shape(str(tmp_path)).parameters == 999_885_952
    assert find_shape(str(tmp_path / "config.json")).sliding_window == 512


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Qwen/Qwen2.5-Math-1.5B", "Qwen2.5-1.5B"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen3-Coder-480B-A35B"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("google/gemma-2-9b-it", "Gemma-2-9B"),
    ],
)
def test_names_may_carry_an_owner_and_what_a_model_was_tuned_for(given, name):
    assert find_shape(given).name == name


@pytest.mark.parametrize("size", [0.35, 0.5, 1.3, 3, 7, 8, 13, 34, 70, 180, 400])
def test_a_size_gives_a_dense_shape_of_that_size_and_says_so(size):
    shape = find_shape(f"{size}B")
    assert shape.parameters == pytest.approx(size * 1e9, rel=0.01)
    assert shape.heads % shape.kv_heads == 0
    assert shape.heads * shape.head_size == shape.hidden
    assert "is assumed" in shape.assumption


def test_latent_attention_is_cached_compressed_by_others_and_whole_by_ullage():
    shape = find_shape("DeepSeek-V3")
    assert shape.compressed_kv_bytes_per_token == 61 * (512 + 64) * 2
    assert shape.kv_bytes_per_token == 61 * 128 * 192 * 2 * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("qwen2.5-7bb", "nearest: Qwen2.5-7B"),
        ("meta-llama/Llama-3.1-8B-Instrukt", "nearest: Llama-3.1-8B,"),
        (" ", "no model is named"),
        ("5000B", "between 0.2B and 2000B"),
        ("./nowhere", "no config.json there"),
    ],
)
def test_what_is_not_known_is_told_in_one_line(given, words):
    with pytest.raises(ModelError) as failure:
        find_shape(given)
    assert words in str(failure.value)
    assert "\n" not in failure.value.cause


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {key: value for key, value in QWEN3_MOE.items() if key != "moe_intermediate_size"},
            "no moe_intermediate_size",
        ),
        ({key: value for key, value in MIXTRAL.items() if key != "num_experts_per_tok"}, "no num_experts_per_tok"),
        ({key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}, "(?m)has no num_experts$"),
        (QWEN2 | {"model_type": "qwen2_moe"}, "no num_experts and no num_experts_per_tok and no moe_intermediate_size"),
        (MIXTRAL | {"num_local_experts": "8"}, "'8' as num_local_experts"),
        ({key: value for key, value in QWEN2.items() if key != "vocab_size"}, "has no vocab_size"),
        (QWEN2 | {"num_hidden_layers": "28"}, "has '28' as num_hidden_layers"),
        (QWEN2 | {"model_type": "gpt2"}, "model type gpt2"),
    ],
)
def test_a_config_with_missing_fields_names_the_field(config, words):
    with pytest.raises(ModelError, match=words) as failure:
        Shape.from_config(config, "mine")
    assert failure.value.remedy
    assert "\n" not in failure.value.cause


def test_dense_layers_among_layers_with_experts_are_counted():
    """Qwen2-MoE's own rule: experts in every `decoder_sparse_step`th layer that is not listed."""
    every_other = Shape.from_config(QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, "mine")
    assert every_other.dense_layers == 24 + 1
    assert Shape.from_config(QWEN3_MOE | {"decoder_sparse_step": 1, "mlp_only_layers": []}, "mine").dense_layers == 0


@pytest.mark.parametrize(
    ("name", "embedded", "billions", "digits"),
    [
        ("Mixtral-8x7B", True, 12.9, 0.05),  # mistral.ai/news/mixtral-of-experts: 46.7B in total, 12.9B a token
        ("Qwen3-30B-A3B", True, 3.3, 0.06),  # the model's page: 30.5B in total, 3.3B activated
        ("DeepSeek-V2-Lite", False, 2.4, 0.06),  # arXiv:2405.04434: 15.7B in total, 2.4B activated
        ("DeepSeek-V3", True, 37, 0.6),  # arXiv:2412.19437: 671B in total, 37B activated
    ],
)
def test_active_parameters_are_the_published_ones(name, embedded, billions, digits):
    """Some count the embedding, which nothing is multiplied with."""
    shape = find_shape(name)
    assert (shape.active_parameters + embedded * shape.table) / 1e9 == pytest.approx(billions, abs=digits)


def test_layers_of_mixtures_by_hand():
    mixtral, qwen = find_shape("Mixtral-8x7B"), find_shape("Qwen3-30B-A3B")
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert mixtral.layer_parameters == attention + 8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096 == 1_451_270_144
    assert mixtral.fused_experts == 8 * 2 * 14336 * 4096
    assert qwen.fused_experts == 128 * 2 * 768 * 2048 == 402_653_184
    assert qwen.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    lite = find_shape("DeepSeek-V2-Lite")  # no compressed queries; one dense layer; 2 shared experts
    latent = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048 + 512
    assert lite.dense_parameters == latent + 3 * 2048 * 10944 + 2 * 2048
    assert lite.layer_parameters == latent + 66 * 3 * 2048 * 1408 + 64 * 2048 + 2 * 2048
    assert lite.compressed_kv_bytes_per_token == 27 * 576 * 2


def test_a_window_changes_nothing_in_what_ullage_caches():
    plain, windowed = find_shape("Mistral-7B-v0.3"), find_shape("Mistral-7B-v0.1")
    assert (plain.sliding_window, windowed.sliding_window) == (0, 4096)
    assert plain.kv_bytes_per_token == windowed.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2


def test_a_number_alone_is_told_what_it_lacks():
    with pytest.raises(ModelError, match="no shape is bundled for '7'") as error:
        find_shape("7")
    assert error.value.remedy.startswith("7B is a size; ")
