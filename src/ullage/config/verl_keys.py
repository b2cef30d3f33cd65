"""verl's keys of both generations that are not in the tree: without effect here, of a later release, or refused.

Ignoring a key is allowed only where it cannot change the result of training: then it is named once, with the reason.
Everything else is kept for a later release (the config loads, the run does not start) or refused at once.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Leaves = Mapping[str, Any]
"""The config as given: key path to value."""

ALGORITHM_NAMES = {
    "gae": "ppo",
    "vanilla": "ppo",
    "geo_mean": "gmpo",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
"""verl's estimators and losses whose file in ullage/algorithms is called otherwise."""

ALGORITHMS_LATER = frozenset(
    {"optimal_token_baseline", "tir_optimal_token_baseline", "dppo_tv", "dppo_kl", "dro", "bypass_mode"}
)
"""Those that have no file yet."""


@dataclass(frozen=True)
class Rule:
    """What is true of all keys that match one of the patterns; they are separated by spaces, a `*` matches dots too."""

    reason: str
    patterns: str
    unless: tuple[Any, ...] = ()
    """Values that mean "off": with one of these, the key says nothing."""
    when: Callable[[Leaves], bool] | None = None
    """The rule holds only where this is true of the whole config."""
    besides: str = ""
    """A pattern of keys the rule is not about."""

    def names(self, path: str) -> bool:
        named = any(fnmatchcase(path, pattern) for pattern in self.patterns.split())
        return named and not fnmatchcase(path, self.besides)

    def holds(self, path: str, leaves: Leaves) -> bool:
        return self.names(path) and (self.when is None or self.when(leaves))


def rule_for(path: str, leaves: Leaves, rules: tuple[Rule, ...]) -> Rule | None:
    """The first rule that holds for a key."""
    return next((rule for rule in rules if rule.holds(path, leaves)), None)


def groups_of(paths: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Keys kept for a later release, grouped by the reason of their rule."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        found = next((rule for rule in LATER if rule.names(path)), None)
        groups.setdefault(found.reason if found else "not a part of this release", []).append(path)
    yield from groups.items()


# --- conditions ---


def _critic(leaves: Leaves) -> bool:
    wanted = leaves.get("critic.enable")
    estimator = leaves.get("algorithm.adv_estimator") or leaves.get("algorithm.name")
    return wanted is True or (wanted is None and estimator in ("gae", "ppo"))


def _reward_model(leaves: Leaves) -> bool:
    return leaves.get("reward_model.enable") is True


def _lora(leaves: Leaves) -> bool:
    model = "actor_rollout_ref.model."
    return any(leaves.get(model + name) not in (None, 0) for name in ("lora_rank", "lora.rank", "lora_adapter_path"))


def _multi_turn(leaves: Leaves) -> bool:
    return leaves.get("actor_rollout_ref.rollout.multi_turn.enable") is True


def _pf_ppo(leaves: Leaves) -> bool:
    return leaves.get("algorithm.use_pf_ppo") is True


def filters_groups(leaves: Leaves) -> bool:
    """Whether groups without signal are replaced: where that is asked for, and by dapo unless it is switched off."""
    wanted = leaves.get("algorithm.filter_groups.enable")
    return wanted is True or (wanted is None and leaves.get("algorithm.name") == "dapo")


def _other_metric(leaves: Leaves) -> bool:
    """Groups are compared by what their answers are worth: without the penalty on long answers, without the KL."""
    same = ["acc", "score"]
    if leaves.get("reward.overlong_buffer") is None:
        same += ["seq_reward"]
        if leaves.get("algorithm.use_kl_in_reward") is not True:
            same += ["seq_final_reward"]
    return filters_groups(leaves) and leaves.get("algorithm.filter_groups.metric") not in same


def _resuming(leaves: Leaves) -> bool:
    return bool(leaves.get("trainer.resume_mode") == "resume_path")


def _other_schedule(leaves: Leaves) -> bool:
    return bool(leaves.get("actor_rollout_ref.actor.optim.lr_scheduler_type", "constant") != "constant")


# --- refused: would change results, and is not planned ---

REFUSED = (
    Rule(
        "runs code that comes with a model or data set, which Ullage never does; "
        "use a model that `transformers` supports, and set it to false",
        "*.trust_remote_code",
        unless=(False, None),
    ),
    Rule(
        "imports code for its side effects; name an algorithm or a reward by path instead",
        "*.external_lib",
        unless=(None, ""),
    ),
    Rule(
        "verl's data set and sampler classes do not load here; give the rows as JSONL or parquet",
        "data.custom_cls.* data.sampler.* data.datagen.*",
        unless=(None, "RLHFDataset"),
    ),
    Rule(
        "only the attention implementation may be overridden; change the model folder's config.json instead",
        "*.override_config *.override_config.*",
        unless=(None, {}, False),
        besides="*.override_config.attn_implementation",
    ),
    Rule("training samples must be drawn at random; remove it", "*.rollout.do_sample", unless=(True, None)),
    Rule(
        "changes what is sampled without the trainer knowing; remove it",
        "*.rollout.repetition_penalty *.rollout.over_sample_rate",
        unless=(None, 0, 1),
    ),
    Rule(
        "skips the samples that are to be trained on; remove it",
        "*.rollout.skip_rollout *.rollout.skip.enable",
        unless=(None, False),
    ),
    Rule("use `ullage eval` to evaluate without training", "trainer.val_only", unless=(False, None)),
    Rule(
        "a config starts a new run; continue one with `ullage resume <run>`",
        "trainer.resume_from_path",
        unless=(None, False, ""),
        when=_resuming,
    ),
)

# --- of a later release: loads, is kept in `later`, and stops a run before it starts ---

_LORA = "other settings of adapters come in a later release; there are lora_rank, lora_alpha and target_modules"
_TURNS = "verl's tool and agent classes do not load here; name an environment instead, such as environment.name=tools"
_CORRECTION = "comes in a later release; the keys of rollout correction are algorithm.rollout_correction.*"
_RESAMPLING = "resampling by reward comes in a later release"
_VISION = "images, video and sound come in a later release; train on text"
OPTIMIZER = "other optimizers come in a later release; there are adamw, adamw_8bit and sgd"
_OPTIMIZER_MODULES = (None, "torch.optim", "torchao.optim", "bitsandbytes.optim")

LATER = (
    Rule(
        "mini-batches of its own for the critic come in a later release: it is trained on the actor's",
        "critic.ppo_mini_batch_size critic.ppo_epochs critic.shuffle",
        unless=(None,),
        when=_critic,
    ),
    Rule(
        "an adapter for the critic to start from comes in a later release; leave it out",
        "critic.model.lora_adapter_path critic.model.lora.rank",
        unless=(None, 0),
        when=_critic,
    ),
    Rule(_LORA, "actor_rollout_ref.model.lora.rank", unless=(None, 0)),
    Rule(
        _LORA,
        "actor_rollout_ref.model.exclude_modules actor_rollout_ref.model.lora.*",
        unless=(None,),
        when=_lora,
    ),
    Rule(
        "sandboxes and reward managers come in a later release; score with a reward function of your own",
        "*sandbox_fusion.url *reward_loop_module_path *reward_manager.module.path",
        unless=(None, ""),
    ),
    Rule(
        _TURNS,
        "*.multi_turn.enable *.multi_turn.*_path *.agent.agent_loop_* data.tool_config_path",
        unless=(None, False, ""),
    ),
    Rule(_TURNS, "*.multi_turn.*", unless=(None,), when=_multi_turn),
    Rule(_TURNS, "*.agent.default_agent_loop", unless=(None, "single_turn_agent")),
    Rule(
        _CORRECTION,
        "algorithm.rollout_correction.loss_type algorithm.rollout_is algorithm.rollout_rs",
        unless=(None, False, "ppo_clip"),
    ),
    Rule(
        "filtering groups by another number than the whole reward comes in a later release; leave it out",
        "algorithm.filter_groups.metric",
        unless=(None,),
        when=_other_metric,
    ),
    Rule(_RESAMPLING, "algorithm.use_pf_ppo", unless=(None, False)),
    Rule(_RESAMPLING, "algorithm.pf_ppo.*", when=_pf_ppo),
    # The usual column names are in every config of verl's, also for text.
    Rule(_VISION, "data.image_key data.video_key data.audio_key", unless=(None, "images", "videos", "audios")),
    Rule(_VISION, "*.actor.freeze_vision_tower", unless=(None, False)),
    Rule(
        "extra losses of experts and multi-token heads come in a later release",
        "*.moe_aux_loss_coeff *.moe_z_loss_coeff *.mtp.enable *.mtp.enable_train",
        unless=(None, False, 0),
    ),
    Rule("router replay comes in a later release", "*.router_replay.mode", unless=(None, "disabled")),
    Rule("distillation comes in a later release", "distillation.enabled distillation.enable", unless=(None, False)),
    Rule("asynchronous training comes in a later release", "trainer.v1.trainer_mode", unless=(None, "sync")),
    Rule("asynchronous training comes in a later release", "async_training.*", unless=(None,)),
    Rule(
        "other schedules come in a later release",
        """critic.optim.num_cycles critic.optim.lr_warmup_init critic.optim.lr_decay_steps critic.optim.min_lr""",
        unless=(None, 0.5, 0),
        when=_critic,
    ),
    Rule(OPTIMIZER, "critic.optim.optimizer_impl", unless=_OPTIMIZER_MODULES, when=_critic),
    Rule(OPTIMIZER, "*.actor.optim.optimizer_impl", unless=_OPTIMIZER_MODULES),
    # The values that are not ours; see aliases.py.
    Rule(OPTIMIZER, "*.optim.optimizer", unless=(None,)),
    Rule("other schedules come in a later release", "*.actor.optim.num_cycles", unless=(None, 0.5)),
    Rule("other schedules come in a later release", "*.actor.optim.lr_warmup_init", unless=(None, 0)),
    Rule(
        "other schedules come in a later release",
        "*.actor.optim.lr_decay_steps *.actor.optim.min_lr",
        unless=(None, 0),
        when=_other_schedule,
    ),
    Rule("quantised training comes in a later release", "*.qat.enable", unless=(None, False)),
)

# --- without effect: results are the same, said once ---

NO_EFFECT = (
    Rule("padding is never computed", "*.use_remove_padding"),
    Rule("liger's kernels are off", "*.use_liger", unless=(None,)),
    Rule("the prompt of a group is always forwarded once", "*.use_prefix_grouper"),
    Rule("batches are always packed by tokens", "*use_dynamic_bsz"),
    Rule("results do not depend on it; the memory dial is ppo_max_token_len_per_gpu", "*micro_batch_size*"),
    Rule(
        "log-probs and values use the limit of the update",
        """*.rollout.log_prob_max_token_len_per_gpu *.actor.log_prob_max_token_len_per_gpu
        *.forward_max_token_len_per_gpu""",
    ),
    Rule(
        "weights are not sharded or offloaded in this release",
        "*.fsdp_config.* *.fsdp.* *.strategy *.veomni.* *.enable_activation_offload model_engine",
    ),
    Rule("there is no Megatron backend", "*.megatron.* *.megatron"),
    Rule("sequences are not split over GPUs", "*ulysses_sequence_parallel_size"),
    Rule(
        "kernels are chosen for the device",
        "*fused_kernel* *.tiled_mlp.* *torch_compile *.override_config.attn_implementation",
    ),
    Rule("the LM head always works in chunks", "*.entropy_from_logits* *.entropy_checkpointing"),
    Rule(
        "the rollout uses the trainer's own weights",
        """*.rollout.checkpoint_engine.* *.rollout.update_weights* *.rollout.layered_summon *.rollout.load_format
        *.rollout.dtype *.rollout.quantization* *.rollout.*_parallel_size *.rollout.multi_stage_wake_up
        *.rollout.free_cache_engine *.rollout.qat.* *.rollout.mtp.* *.rollout.layer_name_map.* *.load_weight""",
    ),
    Rule(
        "only read by other engines",
        """*.rollout.gpu_memory_utilization *.rollout.enforce_eager *.rollout.cudagraph_capture_sizes
        *.rollout.enable_chunked_prefill *.rollout.max_num_batched_tokens *.rollout.max_model_len
        *.rollout.engine_kwargs *.rollout.engine_kwargs.* *.rollout.mode *.rollout.enable_prefix_caching
        *.rollout.disable_log_stats *.rollout.skip_tokenizer_init *.rollout.limit_images *.rollout.scheduling_policy
        *.rollout.prometheus.* *.rollout.server.* *.rollout.nnodes *.rollout.n_gpus_per_node
        *.rollout.disaggregation.* *.rollout.skip.* *.rollout.skip_*""",
    ),
    Rule("the rollout always returns its log-probs", "*.rollout.calculate_log_probs *.rollout.logprobs_mode"),
    Rule("a prompt has one answer, without an agent loop", "*.agent.* *.multi_turn.*", unless=(None, False)),
    Rule("only text is read", "data.image_key data.video_key data.audio_key", unless=(None,)),
    Rule("groups are compared by their rewards", "algorithm.filter_groups.metric", when=filters_groups),
    Rule("a step's prompts are sampled together", "algorithm.filter_groups.max_inflight_gen_batches"),
    Rule(
        "there is no penalty on long answers",
        "*.overlong_buffer_cfg.* reward_model.overlong_buffer.* *.reward_kwargs.max_resp_len",
        unless=(False,),
    ),
    Rule(
        "only read by features that are off",
        """algorithm.rollout_correction.loss_type algorithm.rollout_is* algorithm.rollout_rs* algorithm.pf_ppo.*
        algorithm.filter_groups.metric *.actor.calculate_* *.actor.sum_pi_squared* *.router_replay.*
        *.rollout.enable_rollout_routing_replay *.model.exclude_modules *.model.target_parameters *.model.lora.*
        *.model.mtp.* distillation.* data.image_patch_size
        data.mm_processor_kwargs* *.qat.* trainer.v1.*""",
        unless=(False, "disabled"),
    ),
    Rule(
        "reward functions always run in worker processes of their own",
        """*reward_manager reward_manager.* reward.reward_manager.* *reward_kwargs *.reward_kwargs.* *reward_loop*
        reward_model.launch_reward_fn_async *sandbox_fusion.*""",
    ),
    Rule("there is no critic", "critic.*", when=lambda leaves: not _critic(leaves)),
    Rule("the critic recomputes where the actor does", "critic.model.enable_gradient_checkpointing"),
    Rule("the critic reads the actor's tokens", "critic.model.tokenizer_path"),
    Rule(
        "the reward model runs beside the trainer",
        """reward_model.model.* reward_model.rollout.* reward_model.enable_resource_pool reward_model.n*_per_node
        reward_model.nnodes reward_model.max_length reward_model.use_reward_loop reward_model.profiler.*""",
        when=_reward_model,
        besides="reward_model.model.lora*",
    ),
    Rule(
        "there is no reward model",
        "reward_model.* reward.reward_model.*",
        when=lambda leaves: not _reward_model(leaves),
    ),
    Rule(
        "a run is resumed with `ullage resume`",
        "trainer.resume_mode trainer.resume_from_path trainer.del_local_ckpt_after_load",
    ),
    Rule(
        "a checkpoint always holds everything",
        "*.checkpoint.* trainer.default_hdfs_dir trainer.esi_* trainer.max_critic_ckpt_to_keep",
    ),
    Rule(
        "samples are written to the run's folder",
        "trainer.rollout_data_dir trainer.validation_data_dir trainer.log_val_generations *.rollout.trace.*",
    ),
    Rule(
        "there is no Ray controller",
        """ray_kwargs.* ray_init.* transfer_queue.* trainer.ray_* trainer.use_legacy_worker_impl trainer.use_v1
        trainer.balance_batch *.nccl_timeout actor_rollout_ref.hybrid_engine""",
    ),
    Rule("Ullage measures itself", "*profiler.* *nsight* trainer.npu_profile.* trainer.profile_steps"),
    Rule(
        "prompts are read as they are needed",
        """data.return_* data.val_batch_size data.dataloader_num_workers data.filter_overlong_prompts_workers
        data.validation_shuffle data.need_tools_kwargs data.cache_dir *.use_shm""",
    ),
    Rule("order within a step follows trainer.seed", "*.data_loader_seed *.rollout.seed"),
    Rule("read from the model folder", "*.model.hf_config_path *.model.input_tokenizer data.tokenizer", unless=(None,)),
    Rule("follows from other keys", "*.optim.total_training_steps *.rollout_n"),
    Rule(
        "an optimizer has no other settings here",
        """*.optim.override_optimizer_config* *.optim.lr_* *.optim.*weight_decay_*
        *.optim.min_lr *.optim.zero_indexed_step *.optim.use_checkpoint_opt_param_scheduler""",
    ),
)
