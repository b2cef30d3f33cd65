"""Compares ullage.maths with stored outputs of verl in float64: `python tests/golden/check_algorithms.py FILE`.

Prints the largest error per function, taken where the mask is 1, and exits with 1 if any is above 1e-9 or a function
of the file is not known here. The format is that of algorithms.json beside this script: a list of cases with `inputs`
and `expected` values of advantages, policy losses with gradients, KL estimators, aggregation and value losses.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from ullage.maths import advantages, advantages_token, aggregate, covariance, critic, kl, losses, masked
from ullage.maths.aggregate import Counts

TOLERANCE = 1e-9
UNKNOWN = float("inf")


class Case:
    """The inputs of one case as float64 tensors."""

    def __init__(self, inputs):
        self.tensors = {name: tensor(values) for name, values in inputs.items() if name != "group"}
        self.mask = self.tensors.pop("mask").bool()
        numbers = {name: number for number, name in enumerate(dict.fromkeys(inputs["group"]))}
        self.group = torch.tensor([numbers[name] for name in inputs["group"]])
        self.valid = torch.ones(len(self.group), dtype=torch.bool)
        self.sample = torch.arange(len(self.group))

    def __getattr__(self, name):
        return self.tensors[name]

    @property
    def grouped_rewards(self):
        return self.token_level_rewards.sum(-1), self.group, self.valid

    def error(self, got, want):
        """Largest difference on sampled tokens, 0 without any; NaN if there is one."""
        differences = (got - tensor(want))[self.mask].abs()
        return differences.max().item() if len(differences) else 0.0

    def weights(self, mode, sequences=None):
        tokens, filled = aggregate.count(self.mask)
        counts = Counts(tokens, filled if sequences is None else sequences)
        scale = float(self.mask.shape[1])
        return aggregate.token_weights(self.mask, mode, counts, scale=scale, dtype=torch.float64)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def gae(case, params):
    advantages_NT, returns_NT = advantages_token.gae(case.token_level_rewards, case.values, case.mask, **params)
    return masked.whitened(advantages_NT, case.mask), returns_NT


def both(advantage, case):
    """One advantage per response is also its return."""
    advantages_NT = (advantage if advantage.dim() == 2 else advantage[:, None]) * case.mask
    return advantages_NT, advantages_NT


def divide_by_std(params):
    return {"divide_by_std": params.get("norm_adv_by_std", True)}


ADVANTAGES = {
    "gae": gae,
    "grpo": lambda c, p: both(advantages.group_relative(*c.grouped_rewards, **divide_by_std(p)), c),
    "rloo": lambda c, p: both(advantages.rloo(*c.grouped_rewards), c),
    "opo": lambda c, p: both(advantages.opo(*c.grouped_rewards, c.mask), c),
    "gpg": lambda c, p: both(advantages.gpg(*c.grouped_rewards), c),
    "grpo_passk": lambda c, p: both(advantages.grpo_passk(*c.grouped_rewards, **divide_by_std(p)), c),
    "reinforce_plus_plus": lambda c, p: advantages_token.reinforce_plus_plus(c.token_level_rewards, c.mask, **p),
    "reinforce_plus_plus_baseline": lambda c, p: both(
        advantages_token.reinforce_plus_plus_baseline(*c.grouped_rewards, c.mask), c
    ),
    "remax": lambda c, p: advantages_token.remax(c.token_level_rewards, c.baseline, c.mask),
}


def clips(params):
    return {"clip_low": params["clip_low"], "clip_high": params["clip_high"]}


def vanilla(case, logprobs, params):
    ratios = (logprobs, case.old_logprobs, case.advantages)
    return losses.clipped_surrogate(*ratios, **clips(params), dual_clip=params["clip_c"])[0]


def gspo(case, logprobs, params):
    return losses.gspo(logprobs, case.old_logprobs, case.advantages, case.mask, **clips(params))[0]


def sapo(case, logprobs, params):
    taus = {"tau_positive": params["tau_pos"], "tau_negative": params["tau_neg"]}
    return losses.sapo(logprobs, case.old_logprobs, case.advantages, **taus)


def gpg(case, logprobs, params):
    return losses.gpg(logprobs, case.advantages)


def cispo(case, logprobs, params):
    return losses.cispo(logprobs, case.old_logprobs, case.advantages, **clips(params))[0]


def geo_mean(case, logprobs, params):
    return losses.geo_mean(logprobs, case.old_logprobs, case.advantages, case.mask, **clips(params))[0]


def kl_cov(case, logprobs, params):
    chosen = covariance.kl_cov_select(
        logprobs, case.advantages, case.mask, case.sample, fraction=params["kl_cov_ratio"]
    )
    coefficient = params["ppo_kl_coef"]
    return covariance.kl_cov(logprobs, case.old_logprobs, case.advantages, chosen, coefficient=coefficient)


POLICY_LOSSES = {
    "vanilla": vanilla, "gspo": gspo, "sapo": sapo, "gpg": gpg, "cispo": cispo, "geo_mean": geo_mean, "kl_cov": kl_cov,
}  # fmt: skip


def check_advantages(case, expected):
    name = expected["name"]
    if name not in ADVANTAGES:
        return {f"advantages {name}": UNKNOWN}
    got, returns = ADVANTAGES[name](case, expected["params"])
    return {
        f"advantages {name}": case.error(got, expected["advantages"]),
        f"returns {name}": case.error(returns, expected["returns"]),
    }


def check_policy_loss(case, expected):
    name, mode = expected["name"], expected["aggregate"]
    if name not in POLICY_LOSSES:
        return {f"loss {name}": UNKNOWN}
    logprobs = case.logprobs.clone().requires_grad_()
    # verl's GMPO is a mean over all rows, whatever the mode.
    weights = case.weights("seq-mean-token-mean", len(case.mask)) if name == "geo_mean" else case.weights(mode)
    loss = (POLICY_LOSSES[name](case, logprobs, expected["params"]) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, [logprobs])
    return {
        f"loss {name}": abs(loss.item() - expected["loss"]),
        f"gradient {name}": case.error(gradient, expected["grad"]),
    }


def check_kl(case, expected):
    name = expected["name"]
    if name not in kl.ESTIMATORS:
        return {f"kl {name}": UNKNOWN}
    logprobs = case.logprobs.clone().requires_grad_()
    values = kl.ESTIMATORS[name](logprobs, case.ref_logprobs)
    (gradient,) = torch.autograd.grad((values * case.mask).sum(), [logprobs])
    return {
        f"kl {name}": case.error(values.detach(), expected["value"]),
        f"gradient kl {name}": case.error(gradient, expected["grad_of_masked_sum"]),
    }


def check_aggregate(case, expected):
    got = (getattr(case, expected["of"]) * case.weights(expected["name"])).sum().item()
    return {f"aggregate {expected['name']}": abs(got - expected["value"])}


def check_value_loss(case, expected):
    predicted, clip = getattr(case, expected["vpreds"]), expected["cliprange_value"]
    loss, _ = critic.value_loss(predicted, case.values, case.returns, clip=clip)
    got = (loss * case.weights(expected.get("aggregate", "token-mean"))).sum().item()
    return {"value loss": abs(got - expected["value"])}


CHECKS = {
    "advantages": check_advantages,
    "policy_loss": check_policy_loss,
    "kl": check_kl,
    "aggregate": check_aggregate,
    "value_loss": check_value_loss,
}


def largest_errors(cases):
    """Function -> largest error over all cases; infinite for what cannot be checked, NaN stays NaN."""
    errors = {}
    for stored in cases:
        case = Case(stored["inputs"])
        for kind, entries in stored["expected"].items():
            for expected in entries:
                found = CHECKS[kind](case, expected) if kind in CHECKS else {kind: UNKNOWN}
                for name, error in found.items():
                    worst = errors.get(name, 0.0)
                    errors[name] = error if not error <= worst else worst
    return errors


def main(arguments):
    if len(arguments) != 1:
        print(f"usage: python {Path(__file__).name} FILE", file=sys.stderr)
        return 2
    try:
        cases = json.loads(Path(arguments[0]).read_text())["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{arguments[0]} is not a file of cases: {error!r}", file=sys.stderr)
        return 2
    errors = largest_errors(cases)
    for name, error in errors.items():
        verdict = "" if error <= TOLERANCE else "  not known here" if error == UNKNOWN else "  too large"
        print(f"{name:45} {error:.1e}{verdict}")
    failed = [name for name, error in errors.items() if not error <= TOLERANCE]
    print(f"{len(cases)} cases, {len(errors)} functions, {len(failed)} above {TOLERANCE:.0e}")
    return 1 if failed or not errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
