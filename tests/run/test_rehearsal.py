"""A rehearsed step does about memory what its config says."""

from contextlib import nullcontext

import pytest
import torch

from ullage.bench.fit import Case, case_config
from ullage.bench.shapes import shape_config
from ullage.model.target import Target
from ullage.run.rehearsal import Rehearsal

CPU = Target("cpu", 0, (0, 0), 8 << 30)


def rehearsal(replay):
    case = Case(
        shape="tiny",
        cap_gib=None,
        settings={"memory.recompute": "none", "memory.replay": replay},
        prompts=2,
        samples=2,
        prompt_tokens=8,
        response_tokens=8,
        micro_batch=48,
        slots=4,
    )
    return Rehearsal(case_config(case), shape_config("tiny"), CPU, lambda name: nullcontext())


@pytest.mark.parametrize("replay", [True, False])
def test_a_pass_that_runs_out_is_repeated_only_where_the_config_allows_it(replay):
    run = rehearsal(replay)
    fails = iter([True])

    def hook(*_):
        if torch.is_grad_enabled() and next(fails, False):
            raise torch.OutOfMemoryError("injected")

    run.actor.model.module.get_input_embeddings().register_forward_hook(hook)
    if replay:
        run.step()
        assert run.actor.limits.max_tokens == 22  # half of two groups: a prompt of 8 and twice 7 tokens each
    else:
        with pytest.raises(torch.OutOfMemoryError):
            run.step()
