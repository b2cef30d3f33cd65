"""Config -> objects: the only place that knows every room."""

from __future__ import annotations

import math
import time
from pathlib import Path

from ullage.algorithms._compose import compose, name_of
from ullage.config.check import SUPERVISED
from ullage.config.tree import Config
from ullage.rollout.embedded.engine import Engine
from ullage.run.roles import make_actor, make_critic, make_reference, open_model, register_memory
from ullage.run.supply import open_scorers, supply_answers, supply_samples
from ullage.run.surroundings import Surroundings
from ullage.telemetry.reader import read_run
from ullage.telemetry.run_directory import RunInfo
from ullage.trainer.correct import Corrector
from ullage.trainer.loop import Trainer
from ullage.trainer.schedule import Schedule
from ullage.trainer.state import Keeper


def assemble(given: Surroundings, resume_from: Path | None) -> Trainer:
    """Everything a run needs, from its config or, for what changes, from a checkpoint."""
    config, ranks, recorder = given.config, given.ranks, given.recorder
    algorithm = compose(config)
    scorers = open_scorers(given)
    model = open_model(config, given.target, weights=resume_from and resume_from / "model")
    actor = make_actor(config, model, ranks, recorder.phase, given.replays)
    critic = make_critic(config, algorithm, actor, recorder.phase, given.replays, ahead=given.ahead)
    supply = (supply_answers if "completions" in algorithm.needs else supply_samples)(given, scorers, actor, algorithm)
    facts = {"data_fingerprint": supply.fingerprint, "model_type": model.module.config.model_type}
    keeper = Keeper(
        given.directory,
        actor,
        supply.sampler,
        recorder,
        ranks,
        algorithm=algorithm,
        critic=critic,
        keep=config.trainer.max_ckpt_to_keep,
        facts=facts,
    )
    if resume_from is not None:
        keeper.restore(resume_from)
        recorder.current_step = keeper.step
    batches = supply.sampler.batches_per_epoch
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * batches
    reference = None
    uses_reference = config.actor_rollout_ref.actor.use_kl_loss or "reference" in algorithm.needs
    if uses_reference:
        reference = make_reference(config, actor, recorder.phase, given.replays, ahead=given.ahead)
    trainer = Trainer(
        config=config,
        total_steps=total_steps,
        actor=actor,
        critic=critic,
        reference=reference,
        algorithm=algorithm,
        collector=supply.collector,
        evaluator=supply.evaluator,
        corrector=Corrector(config.algorithm.rollout_correction, ranks, exact_engine=Engine.reads_trainer_weights),
        schedule=Schedule(config, algorithm.aggregation, ranks),
        keeper=keeper,
        recorder=recorder,
        replays=given.replays,
        ranks=ranks,
        stop=given.stop,
    )
    register_memory(given.probe, actor, critic, trainer.reference, supply.engine)
    announce(given, total_steps)
    return trainer


def announce(given: Surroundings, total_steps: int) -> None:
    """Tell readers and views what this run is."""
    config, directory = given.config, given.directory
    for note in given.planned.notes:
        given.recorder.event(note)
    given.recorder.event(derivation(config, given.ranks.size))
    info = RunInfo(
        name=directory.name,
        algorithm=name_of(config),
        model=Path(config.actor_rollout_ref.model.path).name,
        total_steps=total_steps,
        created_at=read_run(directory.path).created_at or time.time(),
        capacity_bytes=given.planned.capacity_bytes or given.target.memory_bytes,
    )
    if given.ranks.rank == 0:
        directory.write_info(info)
    given.recorder.start(info)


def derivation(config: Config, num_ranks: int) -> str:
    """How the batch words of the config combine, in one line."""
    supervised = config.algorithm.name == SUPERVISED  # a prompt comes with its one answer
    prompts, samples = config.data.train_batch_size, 1 if supervised else config.actor_rollout_ref.rollout.n
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size or prompts
    updates = math.ceil(prompts / mini) * config.actor_rollout_ref.actor.ppo_epochs
    return (
        f"each step: {prompts} prompts x {samples} samples = {prompts * samples} sequences on {num_ranks} rank(s), "
        f"{updates} optimizer update(s) of {mini} prompts"
    )
