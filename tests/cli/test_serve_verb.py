"""`ullage serve` before it serves: what it refuses, what it needs, and the names of what it serves."""

import socket
import sys

import pytest

from ullage.cli.main import main
from ullage.cli.serve import served_name
from ullage.run.locate import locate
from ullage.serve.guard import Guard, is_loopback


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["no-such-model"], 66, "no such model"),
        (["MODEL", "--slots", "0"], 2, "--slots 0: must be at least 1"),
        (["MODEL", "--max-length", "0"], 2, "--max-length 0: must be at least 1"),
        (["MODEL", "--max-waiting", "-1"], 2, "--max-waiting -1: must be at least 1"),
        (["MODEL", "--max-length", "2000"], 2, "--max-length 2000: the model's context is 1024 tokens"),
        (["MODEL", "--port", "70000"], 2, "--port 70000: must be at most 65535"),
        (["MODEL", "--host", "0.0.0.0"], 2, "--host 0.0.0.0: other machines could use this server without a key"),
        (["MODEL", "--host", "no.such.host.invalid", "--api-key", "k"], 2, "cannot listen on no.such.host.invalid"),
        (["MODEL", "--api-key", "two words"], 2, "the API key must be printable ASCII without blanks"),
        (["MODEL", "trainer.seed=3"], 2, "serve takes no config overrides"),
    ],
)
def test_mistakes_have_their_codes(tiny_model, words, code, says, capsys, monkeypatch):
    monkeypatch.delenv("ULLAGE_API_KEY", raising=False)
    words = [str(tiny_model) if word == "MODEL" else word for word in words]
    assert main(["serve", "--port", "0", *words]) == code
    assert says in capsys.readouterr().err


def test_a_port_that_is_taken(tiny_model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(tiny_model), "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in err
    assert "loading" not in err, "said before the model is loaded"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_its_extra(tiny_model, missing, monkeypatch, capsys):
    for name in list(sys.modules):
        if name.partition(".")[0] == missing or name == "ullage.serve.server":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["serve", str(tiny_model), "--port", "0"]) == 78
    assert "pip install 'ullage[serve]'" in capsys.readouterr().err


def test_names_of_runs_checkpoints_folders_and_files(finished, tiny_model, monkeypatch):
    checkpoint = finished / "checkpoints" / "step_2"
    for given, name in [
        (str(finished), "small"),
        (str(finished / "final"), "small"),
        (str(checkpoint), "small/step_2"),
        (str(tiny_model), tiny_model.name),
        (f"{tiny_model}/", tiny_model.name),
    ]:
        assert served_name(given, locate(given)) == name
    monkeypatch.chdir(finished.parent.parent)
    assert served_name("small", locate("small")) == "small"


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.4", False), ("gpu-box", False), ("localhost.evil.example", False)],
)  # fmt: skip
def test_which_hosts_are_this_machine_alone(host, local):
    assert is_loopback(host) is local


def test_a_server_for_other_machines_has_many_names_and_one_key():
    guard = Guard("0.0.0.0", "k")
    guard.check("anything.example:8000", "Bearer k")
    guard.check(None, "bearer  k")
