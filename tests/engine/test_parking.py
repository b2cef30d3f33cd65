"""Weights that wait on the host: the same numbers, one copy, back home after every phase and after an error."""

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.config.tree import Optim
from ullage.engine.optimizer import Optimizer
from ullage.engine.parking import Ahead, Parked

CPU = torch.device("cpu")


def make():
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2).double()
    return [*first.parameters(), *second.parameters()]


def test_weights_keep_their_values_and_share_a_buffer_of_each_dtype():
    parameters = make()
    before = [p.detach().clone() for p in parameters]
    parked = Parked([*parameters, parameters[0]], CPU, trained=False)
    assert parked.nbytes == 15 * 4 + 8 * 8
    home = [p.data_ptr() for p in parameters]
    with parked.here():
        assert all(torch.equal(p, saved) for p, saved in zip(parameters, before, strict=True))
        assert not set(home) & {p.data_ptr() for p in parameters}
    assert [p.data_ptr() for p in parameters] == home


def test_a_frozen_role_is_not_copied_back_and_a_trained_one_is():
    for trained in (False, True):
        parameters = make()
        parked = Parked(parameters, CPU, trained=trained)
        with parked.here(), torch.no_grad():
            parameters[0].fill_(7.0)
        assert bool((parameters[0] == 7).all()) is trained


def test_updates_equal_those_without_parking():
    def weights(parked):
        torch.manual_seed(1)
        layer = torch.nn.Linear(5, 4)
        optimizer = Optimizer(layer.named_parameters(), Optim(lr=1e-2))
        place = Parked(layer.parameters(), CPU, trained=True) if parked else None
        for step in range(5):
            inputs = torch.full((3, 5), 0.1 * (step + 1))
            if place is None:
                _update(layer, optimizer, inputs)
            else:
                with place.here():
                    _update(layer, optimizer, inputs)
        return [p.detach().clone() for p in layer.parameters()]

    for got, want in zip(weights(True), weights(False), strict=True):
        assert torch.equal(got, want)


def _update(layer, optimizer, inputs):
    optimizer.zero_grad()
    layer(inputs).square().sum().backward()
    optimizer.step(1e-2, Solo())


def test_an_error_inside_brings_the_weights_home():
    parameters = make()
    parked = Parked(parameters, CPU, trained=False)
    home = [p.data_ptr() for p in parameters]
    with pytest.raises(RuntimeError, match="half-way"), parked.here():
        raise RuntimeError("half-way")
    assert [p.data_ptr() for p in parameters] == home


class Watched(Parked):
    """Notes what is done with it."""

    def __init__(self, name, notes):
        super().__init__(make(), CPU, trained=False)
        self.name, self.notes = name, notes

    def bring(self):
        self.notes.append(f"bring {self.name}")
        super().bring()

    def leave(self):
        self.notes.append(f"leave {self.name}")
        super().leave()


def test_weights_that_were_brought_are_those_that_are_used():
    parameters = make()
    before = [p.detach().clone() for p in parameters]
    parked = Parked(parameters, CPU, trained=False)
    parked.bring()
    (early, *_) = parked._arriving
    with parked.here():
        assert parameters[0].data_ptr() == early.data_ptr(), "no second copy"
        assert all(torch.equal(p, saved) for p, saved in zip(parameters, before, strict=True))
    parked.bring()
    parked.leave()
    with parked.here():
        assert all(torch.equal(p, saved) for p, saved in zip(parameters, before, strict=True))


def walk(ahead, *phases):
    for phase in phases:
        ahead.enter(phase)


def test_the_next_phases_weights_come_during_the_one_before_from_the_second_time_on():
    notes = []
    ahead = Ahead(lambda phase: 1 << 20)
    ahead.register("reference", Watched("reference", notes))
    ahead.register("update_critic", Watched("critic", notes))
    step = ("rollout", None, "logprob", None, "reference", None, "update", "update_critic", "update", None)
    walk(ahead, *step)
    # The critic follows the update, and so it is expected again where the update goes on.
    assert notes == ["bring critic"]
    walk(ahead, *step)
    assert notes[1:] == ["leave critic", "bring reference", "bring critic", "bring critic"]
    assert ahead.brought == {"logprob": 15 * 4 + 8 * 8, "update": 15 * 4 + 8 * 8}


def test_nothing_comes_where_there_is_no_room():
    notes = []
    ahead = Ahead({"rollout": 1 << 20, "logprob": 15 * 4 + 8 * 8 - 1}.__getitem__)
    ahead.register("reference", Watched("reference", notes))
    walk(ahead, "rollout", "logprob", "reference")
    ahead._room = {"rollout": 0, "logprob": 15 * 4 + 8 * 8 - 1, "reference": 0}.__getitem__
    walk(ahead, "rollout", "logprob", "reference")
    assert notes == []
    ahead._room = {"rollout": 0, "logprob": 15 * 4 + 8 * 8, "reference": 0}.__getitem__
    walk(ahead, "rollout", "logprob", "reference")
    assert notes == ["bring reference"]
