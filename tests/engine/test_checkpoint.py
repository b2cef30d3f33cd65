"""Checkpoints: exact round trips, every kind of damage found, and nothing lost when a write fails."""

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from ullage.base.errors import WriteError
from ullage.base.units import bytes_text
from ullage.engine import checkpoint
from ullage.engine.checkpoint import (
    checkpoints,
    latest_verified,
    prune,
    read_checkpoint,
    require_free_space,
    verify,
    write_checkpoint,
)

FACTS = {"data": "abc", "config": "def", "world_size": 1}


def save(root, step, value=None, **changes):
    """A small checkpoint whose content depends on its step."""
    arguments = {
        "tensors": {"optimizer": {"moment": torch.full((5,), float(step if value is None else value))}},
        "state": {"step": step},
        "extra_files": None,
        "facts": FACTS,
    }
    return write_checkpoint(root, step, **{**arguments, **changes})


def write_model(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')


def damage(path, offset=-3):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_round_trip_is_exact(tmp_path):
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(12, generator=generator)
    groups = {
        "optimizer": {
            "float32": torch.randn(3, 4, generator=generator),
            "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
            "bfloat16": torch.randn(7, generator=generator).bfloat16(),
            "float64": torch.tensor(1 / 3, dtype=torch.float64),
            "int64": torch.tensor([2**62 + 1, -5]),
            "empty": torch.zeros(0, 3),
            "transposed": torch.arange(6).view(2, 3).T,
            "first_view": flat[:5],
            "second_view": flat[5:],
        },
        "random": {"cpu": torch.get_rng_state()},
    }
    state = {"epoch": 2, "cursor": 17, "best": float("-inf"), "loss": 0.1 + 0.2, "names": ["ä"]}
    folder = write_checkpoint(tmp_path, 6, tensors=groups, state=state, extra_files=write_model, facts=FACTS)

    assert verify(folder) == []
    loaded = read_checkpoint(folder)
    assert (loaded.step, loaded.state, loaded.facts) == (6, state, FACTS)
    assert {name: set(group) for name, group in loaded.tensors.items()} == {n: set(g) for n, g in groups.items()}
    for name, group in groups.items():
        for key, tensor in group.items():
            copy = loaded.tensors[name][key]
            assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
            assert copy.contiguous().flatten().view(torch.uint8).tolist() == (
                tensor.contiguous().flatten().view(torch.uint8).tolist()
            )
    assert (folder / "model" / "config.json").read_text() == '{"model_type": "llama"}'
    assert (tmp_path / "latest").read_text() == "step_6\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_6"]


def test_manifest_says_what_was_written(tmp_path):
    tensors = {"optimizer": {"moment": torch.zeros(2, 3, dtype=torch.bfloat16)}}

    def model_with_empty_file(folder):
        write_model(folder)
        (folder / "model" / "empty").touch()

    folder = save(tmp_path, 1, tensors=tensors, extra_files=model_with_empty_file, facts={10: "ten", 9: (1, 2)})
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == [
        "model/config.json",
        "model/empty",
        "optimizer.safetensors",
        "state.json",
    ]
    assert manifest["files"]["optimizer.safetensors"]["tensors"] == {"moment": {"dtype": "BF16", "shape": [2, 3]}}
    assert manifest["files"]["model/config.json"]["bytes"] == 23
    # The published XXH3-128 of no bytes at all.
    assert manifest["files"]["model/empty"] == {"bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
    assert manifest["facts"] == {"10": "ten", "9": [1, 2]}
    assert manifest["versions"]["torch"] == torch.__version__
    assert verify(folder) == []


@pytest.mark.parametrize("name", ["optimizer.safetensors", "state.json", "model/config.json"])
def test_one_flipped_bit_is_found_and_named(tmp_path, name):
    folder = save(tmp_path, 1, extra_files=write_model)
    damage(folder / name)
    assert verify(folder) == [f"{folder / name}: content differs from what was written"]


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path):
    folder = save(tmp_path, 1)
    original = (folder / "manifest.json").read_bytes()
    for offset in range(len(original)):
        damage(folder / "manifest.json", offset)
        assert verify(folder), f"byte {offset} of the manifest"
        (folder / "manifest.json").write_bytes(original)
    assert verify(folder) == []


def test_truncated_and_missing_files_are_found_together(tmp_path):
    folder = save(tmp_path, 1, extra_files=write_model)
    (folder / "model" / "config.json").unlink()
    size = (folder / "optimizer.safetensors").stat().st_size
    os.truncate(folder / "optimizer.safetensors", size - 1)
    assert verify(folder) == [
        f"{folder}/model/config.json: missing",
        f"{folder}/optimizer.safetensors: {size - 1} bytes, {size} were written",
    ]


def test_no_manifest_no_checkpoint(tmp_path):
    folder = save(tmp_path, 1)
    (folder / "manifest.json").unlink()
    assert verify(folder) == [f"{folder}/manifest.json: missing"]
    with pytest.raises(WriteError, match=r"manifest\.json: missing"):
        read_checkpoint(folder)


def test_other_format_is_refused_with_the_version_that_wrote_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", 2)
        patch.setattr(checkpoint, "__version__", "9.9")
        folder = save(tmp_path, 1)
    with pytest.raises(WriteError) as caught:
        read_checkpoint(folder)
    assert "checkpoint format 2" in caught.value.cause
    assert "use Ullage 9.9" in caught.value.remedy
    assert verify(folder) == [caught.value.cause]


def test_damaged_tensors_are_an_error_a_user_can_read(tmp_path):
    folder = save(tmp_path, 1)
    os.truncate(folder / "optimizer.safetensors", 20)
    with pytest.raises(WriteError, match="damaged checkpoint") as caught:
        read_checkpoint(folder)
    assert caught.value.code == 74
    assert "another checkpoint" in caught.value.remedy


def test_previous_checkpoint_is_used_when_the_newest_is_damaged(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 6)
    damage(tmp_path / "step_6" / "optimizer.safetensors")
    folder, warnings = latest_verified(tmp_path)
    assert folder == tmp_path / "step_3"
    assert warnings == [
        f"damaged checkpoint: {tmp_path}/step_6/optimizer.safetensors: content differs from what was written"
    ]
    assert read_checkpoint(folder).tensors["optimizer"]["moment"].tolist() == [3.0] * 5


def test_nothing_to_resume_from(tmp_path):
    assert latest_verified(tmp_path / "absent") is None
    assert latest_verified(tmp_path) is None
    save(tmp_path, 1)
    (tmp_path / "step_1" / "manifest.json").unlink()
    assert latest_verified(tmp_path) is None


@pytest.mark.parametrize("content", [None, "", "step_7\n", "../elsewhere\n", "\udce4"])
def test_useless_latest_falls_back_to_the_highest_step(tmp_path, content):
    for step in (2, 9, 10):
        save(tmp_path, step)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content.encode("utf-8", "surrogateescape"))
    folder, warnings = latest_verified(tmp_path)
    assert folder == tmp_path / "step_10"
    assert warnings == [f"{tmp_path}/latest names no checkpoint; looking at the folders themselves"]


def test_latest_wins_over_a_higher_step(tmp_path):
    save(tmp_path, 6)
    save(tmp_path, 4)  # the run was set back
    assert latest_verified(tmp_path) == (tmp_path / "step_4", [])


WRITER = """
import os, signal, sys, torch
from pathlib import Path
from ullage.engine import checkpoint
def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(checkpoint, sys.argv[2], killed)
checkpoint.write_checkpoint(Path(sys.argv[1]), 6, tensors={"optimizer": {"moment": torch.full((5,), 6.0)}},
                            state={"step": 6}, facts={})
"""


@pytest.mark.parametrize(
    ("moment", "leftover", "found"),
    [
        ("_write_manifest", ".tmp-step_6", "step_3"),
        ("_publish", ".tmp-step_6", "step_3"),
        ("_write_latest", "step_6", "step_3"),
    ],
)
def test_killed_while_writing(tmp_path, moment, leftover, found):
    save(tmp_path, 3)
    process = subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), moment], check=False)
    assert process.returncode == -signal.SIGKILL
    assert [path for path in tmp_path.iterdir() if path.name.startswith(leftover)]
    assert latest_verified(tmp_path) == (tmp_path / found, [])

    save(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_3", "step_6"]
    assert latest_verified(tmp_path) == (tmp_path / "step_6", [])


def test_everything_is_on_the_disk_before_it_is_announced(tmp_path, monkeypatch):
    events = []
    sync, rename, replace = checkpoint._sync, os.rename, os.replace

    def logged(kind, action):
        def call(*paths):
            events.append((kind, *(os.path.basename(path) for path in paths)))
            return action(*paths)

        return call

    monkeypatch.setattr(checkpoint, "_sync", logged("sync", sync))
    monkeypatch.setattr(os, "rename", logged("rename", rename))
    monkeypatch.setattr(os, "replace", logged("replace", replace))
    save(tmp_path, 6, extra_files=write_model)
    temporary, latest = f".tmp-step_6.{os.getpid()}", f".tmp-latest.{os.getpid()}"
    assert events == [
        ("sync", "config.json"),
        ("sync", "optimizer.safetensors"),
        ("sync", "state.json"),
        ("sync", "manifest.json"),
        ("sync", "model"),
        ("sync", temporary),
        ("rename", temporary, "step_6"),
        ("sync", tmp_path.name),
        ("sync", latest),
        ("replace", latest, "latest"),
        ("sync", tmp_path.name),
    ]


def test_temporary_folder_of_a_living_process_is_left_alone(tmp_path):
    living = tmp_path / f".tmp-step_9.{os.getppid()}"
    living.mkdir()
    save(tmp_path, 1)
    assert living.is_dir()


def test_writing_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 6, value=1)
    save(tmp_path, 6, value=2)
    assert read_checkpoint(tmp_path / "step_6").tensors["optimizer"]["moment"].tolist() == [2.0] * 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_6"]


def test_step_being_replaced_is_still_found_after_a_crash(tmp_path):
    save(tmp_path, 6)
    (tmp_path / "step_6").rename(tmp_path / "step_6.replaced")
    folder, warnings = latest_verified(tmp_path)
    assert folder == tmp_path / "step_6.replaced"
    assert len(warnings) == 1
    assert read_checkpoint(folder).step == 6
    save(tmp_path, 6)
    assert checkpoints(tmp_path) == [tmp_path / "step_6"]
    assert not (tmp_path / "step_6.replaced").exists()


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        checkpoint.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_names_both_numbers_and_keeps_the_old_checkpoint(tmp_path, monkeypatch, failure):
    save(tmp_path, 3)

    def fail(*arguments):
        raise failure

    monkeypatch.setattr(checkpoint, "save_file", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(8 << 20, 5 << 20, 3 << 20))
    tensors = {"optimizer": {"moment": torch.zeros(1 << 19)}}
    with pytest.raises(WriteError) as caught:
        save(tmp_path, 6, tensors=tensors)
    assert caught.value.code == 74
    assert caught.value.cause == f"disk full, need 2.0 MiB, have 3.0 MiB: {tmp_path}/step_6"
    assert "intact" in caught.value.remedy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_3"]
    assert latest_verified(tmp_path) == (tmp_path / "step_3", [])


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 93, 7))
    with pytest.raises(WriteError, match="disk full, need 20 B, have 7 B"):
        save(tmp_path / "new", 1, extra_files=lambda folder: pytest.fail("started to write"))
    require_free_space(tmp_path / "not" / "there" / "yet", 7)
    with pytest.raises(WriteError, match="need 8 B, have 7 B"):
        require_free_space(tmp_path, 8)


def test_space_is_measured_by_the_previous_checkpoint_too(tmp_path, monkeypatch):
    folder = save(tmp_path, 1, extra_files=lambda folder: (folder / "model.bin").write_bytes(bytes(5000)))
    written = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 4000, 5000))
    with pytest.raises(WriteError, match=f"need {bytes_text(written)}, have 4.9 KiB"):
        save(tmp_path, 2)


def limited_writer():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_a_write_that_really_fails_leaves_nothing_behind(tmp_path):
    save(tmp_path, 3)
    program = """
import sys, torch
from pathlib import Path
from ullage.base.errors import WriteError
from ullage.engine.checkpoint import write_checkpoint
try:
    write_checkpoint(Path(sys.argv[1]), 6, tensors={"optimizer": {"moment": torch.zeros(1 << 16)}}, state={}, facts={})
except WriteError as error:
    sys.exit(f"{error.code} {error.cause}")
"""
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        check=False, capture_output=True, text=True, preexec_fn=limited_writer,
    )  # fmt: skip
    assert process.stderr == f"74 cannot write checkpoint {tmp_path}/step_6: {os.strerror(errno.EFBIG)}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_3"]


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError) as caught:
        save(tmp_path / "file" / "checkpoints", 1)
    assert caught.value.cause == f"cannot write checkpoint {tmp_path}/file/checkpoints/step_1: Not a directory"
    assert "trainer.default_local_dir" in caught.value.remedy


def test_read_only_file_system(tmp_path, monkeypatch):
    save(tmp_path, 3)

    def refuse(*arguments):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(checkpoint, "_write_manifest", refuse)
    with pytest.raises(WriteError, match="step_6: Read-only file system"):
        save(tmp_path, 6)
    assert latest_verified(tmp_path) == (tmp_path / "step_3", [])


def test_a_failing_model_writer_publishes_nothing(tmp_path):
    save(tmp_path, 3)

    def broken(folder):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        save(tmp_path, 6, extra_files=broken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_3"]


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 9, 10, 11):
        save(tmp_path, step)
    assert prune(tmp_path, 2, {tmp_path / "step_2"}) == []
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step_11", "step_10", "step_2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_10", "step_11", "step_2"]


def test_prune_never_removes_the_newest_whole_checkpoint(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step_3" / "state.json")
    prune(tmp_path, 1, set())
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step_3", "step_2"]


def test_prune_never_removes_what_latest_names(tmp_path):
    for step in (5, 6, 4):
        save(tmp_path, step)
    prune(tmp_path, 1, set())
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step_6", "step_4"]


def test_prune_warns_about_what_it_cannot_remove(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)

    def refuse(path, **options):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        warnings = prune(tmp_path, 1, set())
    assert warnings == [
        f"could not remove old checkpoint {tmp_path}/step_2: Device or resource busy",
        f"could not remove old checkpoint {tmp_path}/step_1: Device or resource busy",
    ]
    assert latest_verified(tmp_path) == (tmp_path / "step_3", [])


class Trap:
    """Unpickling it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_planted_pickle_is_never_opened(tmp_path):
    folder = save(tmp_path, 1)
    for name in ("optimizer.pt", "state.pkl", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    assert verify(folder) == []
    assert read_checkpoint(folder).state == {"step": 1}
    (folder / "state.json").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(WriteError, match="damaged checkpoint"):
        read_checkpoint(folder)
    assert not (tmp_path / "sprung").exists()
