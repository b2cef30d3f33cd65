"""Weights that wait on the host: the same numbers, one copy, back home after every phase and after an error."""

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.config.tree import Optim
from ullage.engine.optimizer import Optimizer
from ullage.engine.parking import Parked

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
