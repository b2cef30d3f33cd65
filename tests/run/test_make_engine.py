"""The rollout engine of a config."""

import pytest

from experience_samples import load
from ullage.config.load import load_mapping
from ullage.config.settle import plainly
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.run.supply import make_engine


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_of_the_rollout_reach_the_engine(tiny_model, deterministic):
    rollout = {"max_num_seqs": 24, "kv_cache_tokens": 640, "deterministic": deterministic}
    given = {"actor_rollout_ref": {"model": {"path": str(tiny_model)}, "rollout": rollout}}
    config = plainly(load_mapping(given | {"data": {"max_response_length": 16}}).config, "cpu")
    engine = make_engine(config, load(tiny_model, "float32"), prompt_tokens=30, samples=100, n=8)
    assert (engine.slots, engine.max_length, engine.pages.total) == (24, 46, 40)
    rows = []
    step = engine.decoder._step
    engine.decoder._step = lambda count, *rest: (rows.append(count), step(count, *rest))[1]
    engine.generate([GroupRequest(prompt=(5, 6, 7), seeds=(1,))], Sampling(max_tokens=3, ignore_eos=True))
    # A CPU's products need some rows to round alike; what is to be the same in all company has all of them.
    assert set(rows) == {24 if deterministic else 16}
