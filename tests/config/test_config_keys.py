import pytest

from ullage.config.keys import key_listing, nearest, sections_by_path

LISTING = {key.path: key for key in key_listing()}


def test_the_listing_has_every_key_once():
    paths = [key.path for key in key_listing()]
    assert len(paths) == len(set(paths))
    assert len(paths) < 150, "\n".join(paths)
    assert paths[0] == "data.train_files"
    assert "actor_rollout_ref.rollout.val_kwargs.top_k" in paths


@pytest.mark.parametrize(
    ("path", "kind", "default", "doc"),
    [
        ("data.train_batch_size", "a whole number above 0", 64, "Prompts per training step, over all ranks."),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "a whole number above 0, or 'auto'", "auto",
         "Tokens of one forward and backward pass: a hard limit, and the memory dial."),
        ("actor_rollout_ref.rollout.top_p", "a number above 0 and at most 1", 1.0, ""),
        ("actor_rollout_ref.actor.optim.betas", "a list of 2 items, each a number", (0.9, 0.999), ""),
        ("actor_rollout_ref.model.dtype", "one of 'auto', 'float32', 'bfloat16', 'float64'", "auto",
         "auto: float32 on a CPU, bfloat16 weights with a float32 master on a GPU."),
        ("critic.enable", "true or false, or null", None, "null: on when the algorithm needs one."),
        ("critic.optim.lr", "a number above 0", 1e-5, ""),
        ("critic.optim.clip_grad", "a number above 0", 1.0,
         "Global gradient norm above which the gradient is scaled down."),
        ("data.columns", "a mapping of keys to values", {},
         "Where to find `prompt`, `target`, `source` in data whose columns have other names."),
        ("trainer.logger", "a list, each item one of 'console', 'tensorboard', 'wandb'", ["console"], ""),
        ("actor_rollout_ref.actor.kl_loss_coef", "a number at least 0", 0.001, ""),
    ],
)  # fmt: skip
def test_one_key(path, kind, default, doc):
    key = LISTING[path]
    assert (key.type, key.default, key.doc) == (kind, default, doc)


def test_sections():
    assert {"", "data", "actor_rollout_ref", "actor_rollout_ref.actor.optim", "trainer"} <= set(sections_by_path())
    assert "data.columns" not in sections_by_path()


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("trainer.sav_freq", "trainer.save_freq"),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("learning.lr", "actor_rollout_ref.actor.optim.lr"),
        ("critc.optim.lr", "critic.optim.lr"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("val_kwargs.temperature", "actor_rollout_ref.rollout.val_kwargs.temperature"),
        ("rollout.temperature", "actor_rollout_ref.rollout.temperature"),
        ("trainer.loggers", "trainer.logger"),
        ("dta.train_files", "data.train_files"),
        ("x.qqqqq", None),
    ],
)
def test_nearest(typo, meant):
    assert nearest(typo) == meant
