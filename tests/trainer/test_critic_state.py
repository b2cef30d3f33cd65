"""A critic in a checkpoint: its weights, optimizer and counters, bit for bit."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from experience_samples import CPU, load, make_rollouts
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.config.tree import Config
from ullage.data.sampler import Sampler
from ullage.model.value_model import load_value_model, share_trunk
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.tally import Tally
from ullage.trainer.schedule import Schedule
from ullage.trainer.state import Keeper
from ullage.workers.critic import Critic

CONFIG = Config.model_validate({"data": {"train_batch_size": 4}})


def make_critic(folder, *, shared, dtype):
    model = share_trunk(load(folder, dtype)) if shared else load_value_model(str(folder), CPU, dtype=dtype)
    return Critic(model, CONFIG.critic, Limits(max_tokens=4096), Solo(), max_nonfinite_steps=3)


def make_keeper(tmp_path, critic):
    directory = RunDirectory(tmp_path, "run")
    if not directory.path.exists():
        directory.create()
    moments = torch.zeros(2)
    actor = SimpleNamespace(
        optimizer=SimpleNamespace(tensors=lambda: {"moment": moments}, restore=lambda tensors: None),
        model=SimpleNamespace(save=lambda folder: folder.mkdir()),
        nonfinite_steps=0,
    )
    recorder = SimpleNamespace(phase=lambda name: nullcontext())
    algorithm = SimpleNamespace(state=dict, restore=lambda state: None)
    sampler = Sampler(8, 4, seed=1, shuffle=True)
    return Keeper(directory, actor, sampler, recorder, Solo(), algorithm=algorithm, critic=critic, keep=1, facts={})


def make_batch():
    rollouts = make_rollouts()
    valid = torch.ones(16, dtype=torch.bool)
    zeros = torch.zeros(rollouts.mask_NT.shape)
    experience = rollouts.scored(rewards_N=zeros[:, 0], valid_N=valid).evaluated(
        old_logprobs=None, ref_logprobs=None, values=zeros
    )
    batch = experience.credited(advantages_NT=zeros, returns_NT=zeros + 0.5)
    (mini_batch,) = Schedule(CONFIG, "token-mean", Solo()).mini_batches(batch, step=1)
    return mini_batch


@pytest.mark.invariant
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_critic_goes_on_as_if_nothing_had_happened(tiny_model, tmp_path, shared, dtype):
    critic, batch = make_critic(tiny_model, shared=shared, dtype=dtype), make_batch()
    for _ in range(2):
        critic.update(batch, 1e-3, Tally())
    critic.nonfinite_steps = 2
    keeper = make_keeper(tmp_path, critic)
    keeper.advance(1)
    keeper.save()
    critic.update(batch, 1e-3, Tally())

    resumed = make_critic(tiny_model, shared=shared, dtype=dtype)
    make_keeper(tmp_path, resumed).restore(keeper.directory.checkpoint_of(1))
    assert resumed.nonfinite_steps == 2
    resumed.update(batch, 1e-3, Tally())
    for got, want in (
        (resumed.model.tensors(), critic.model.tensors()),
        (resumed.optimizer.tensors(), critic.optimizer.tensors()),
    ):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert critic.model.weight.abs().max() > 1e-3
