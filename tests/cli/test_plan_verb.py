"""`ullage plan` as a user meets it: real processes, no torch, one line for what is wrong."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.base.units import bytes_text
from ullage.cli import main
from ullage.planner.components import PROCESS

SOURCE = Path(__file__).parents[2] / "src"


def test_it_loads_neither_torch_nor_transformers():
    """Time depends on the machine; what is loaded does not."""
    script = (
        "import sys\nbefore = set(sys.modules)\nfrom ullage.cli.main import main\ncode = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'psutil', 'yaml', 'asyncio', 'http', 'ssl', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "own = {name for name in sys.modules if name.startswith('ullage.')}\n"
        "print(len(own), len(set(sys.modules) - before - own), file=sys.stderr)\nsys.exit(code)"
    )
    words = ["plan", "Qwen2.5-7B", "--gpu", "h200", "--json", "memory.recompute=none"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True)
    heavy, counts = done.stderr.splitlines()
    assert (done.returncode, heavy) == (0, "[]")
    assert json.loads(done.stdout)["binding_phase"] == "update"
    own, others = map(int, counts.split())
    assert own <= 50  # config, planner, and what they stand on
    assert others <= 240  # pydantic, most of them


def test_it_shows_phases_verdict_and_levers(capsys):
    assert main.main(["plan", "Qwen2.5-7B", "--gpu", "4090 x2", "memory.optimizer_state=device"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Qwen2.5-7B: 7.62 B parameters on 2x RTX 4090\n")
    assert "does not fit: update needs" in told
    assert "\nrollout        ###" in told
    assert "\nchosen, what needs least:\n" in told
    assert "\nwhat would fit, the cheapest change first:\n  memory.optimizer_state=auto " in told
    assert "  memory.optimizer_state=streamed" in told
    assert "assumed:" in told


def test_it_chooses_and_says_why(capsys):
    assert main.main(["plan", "Qwen2.5-7B", "memory.budget=24GiB", "--check"]) == 0
    told = capsys.readouterr().out
    assert "\nchosen, the fastest that fits:\n" in told
    assert re.search(r"\n  memory.optimizer_state=streamed +update would need [\d.]+ GiB of 24.0 GiB with dev", told)
    assert re.search(r"\na step         \d+:\d\d: rollout [\d.]+ s, update ", told)
    assert "of 24.0 GiB, " in told
    assert "what would fit" not in told
    assert main.main(["plan", "Qwen2.5-7B", "--gpu", "h200", "memory.budget=24GiB", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["capacity_bytes"] == 24 * 2**30
    assert made["chosen"]["memory.gradients"]["value"] == "host"
    assert set(made["chosen"]["memory.gradients"]) == {"value", "why"}
    assert made["seconds"]["step"] > made["seconds"]["rollout"] > 0


def test_it_draws(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main.main(["plan", "0.5B", "--gpu", "24GiB", "--html", str(page)]) == 0
    assert "update" in page.read_text(encoding="utf-8")
    assert main.main(["plan", "0.5B", "--html", str(tmp_path / "none" / "plan.html")]) == 74
    *_, cause, remedy = capsys.readouterr().err.splitlines()
    assert cause.endswith("none/plan.html: No such file or directory")
    assert remedy == "  fix: make the folder and make it writable"


def test_it_explains_every_number(capsys):
    assert main.main(["plan", "Qwen2.5-7B", "--explain"]) == 0
    told = capsys.readouterr().out
    assert "weights = 14.2 GiB = 2 B x P  [P=7,615,616,512]" in told
    assert "master = 28.4 GiB = 4 B x P" in told
    assert " of device memory; update binds\n" in told
    assert "\nseconds:\n  a pass = FLOPs / " in told


def test_it_says_what_every_part_is(capsys):
    words = ["plan", "Qwen2.5-7B", "--gpu", "h200"]
    assert main.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    named = {name for phase in told["phases"] for name in phase["components"]}
    assert set(told["parts"]) == named >= {"weights", "graphs", "slack"}
    for phase in told["phases"]:
        assert sum(phase["components"].values()) == phase["total_bytes"]  # captured graphs too
    assert "counts against the device in every phase" in told["parts"]["graphs"]
    assert main.main([*words, "--explain"]) == 0
    explained = capsys.readouterr().out
    assert f"\n  graphs = {told['parts']['graphs']}\n" in explained


def test_it_explains_what_takes_nothing_and_where_numbers_were_read(capsys):
    lent = ["memory.gradients=weights", "actor_rollout_ref.rollout.max_num_seqs=64"]
    assert main.main(["plan", "Qwen2.5-7B", "--gpu", "h200", "--explain", *lent]) == 0
    told = capsys.readouterr().out
    assert "gather = 0 B = nothing: the embedded engine reads the trainer's own weights" in told
    assert re.search(r"(working_layer|head) = 0 B = (prefill|decode): [\d,]+ B, less than", told)
    assert re.search(r"kv_cache = 0 B = [\d,]+ B, lying in the gradients' memory", told)
    process = bytes_text(PROCESS)
    assert f"\n  process = {process} = a rank with torch, CUDA and transformers loaded: measured\n" in told
    assert "\n  pinned, of these = " in told
    assert "\n  final = 14.2 GiB = the actor's weights\n" in told
    assert re.search(r"\n  rollout = [\d.]+ s  \[prefill: flops=.*steps=[\d,]+, ", told)
    assert "\n  memory, GB/s = 4,800: NVIDIA H200 " in told
    assert "\nsources:\n  memory: src/ullage/planner/components.py" in told


def test_weights_shared_out_are_told_apart_and_do_not_fit(capsys):
    assert main.main(["plan", "Llama-3.1-70B", "--gpu", "h100 x8", "--check"]) == 79
    told = capsys.readouterr().out
    assert "\ndoes not fit: the weights alone are 131.4 GiB of 79.2 GiB\n" in told
    part = told[told.index("shared out over 8 GPUs (") :]
    assert part.splitlines()[0].endswith(" it would fit, which Ullage cannot do yet:")
    assert re.search(r"\nupdate +#+\|? +[67]\d\.\d GiB <- binds\n", part)
    assert re.search(r"\na step +\d:\d\d: rollout", part)
    assert "by formula only: Ullage does not shard yet (" in part


def test_a_trace_decides_where_it_is_asked_for(tmp_path, capsys):
    config = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", str(tmp_path), "--gpu", "h100", "--trace", "--json", "data.train_batch_size=2"]
    assert main.main(words) == 0
    told = json.loads(capsys.readouterr().out)
    traced = told["traced"]
    assert list(traced["phases"]) == ["load", "rollout", "logprob", "update"]
    assert max(traced["phases"].values()) <= traced["least_bytes"]
    update = next(phase for phase in told["phases"] if phase["name"] == "update")
    around, slack = (sum(update["components"][name] for name in names) for names in (("context", "graphs"), ("slack",)))
    # What is planned is what was traced, and three percent for the allocator.
    assert update["total_bytes"] - around == pytest.approx(1.03 * traced["phases"]["update"], abs=4)
    assert slack != 0
    assert main.main(["plan", "8B", "--trace"]) == 2
    assert capsys.readouterr().err.startswith("ullage: error: --trace needs --gpu")


def test_check_turns_the_verdict_into_a_code(capsys):
    assert main.main(["plan", "0.5B", "--gpu", "h200", "--check"]) == 0
    assert main.main(["plan", "70B", "--gpu", "24GiB", "--check"]) == 79
    assert main.main(["plan", "70B", "--gpu", "24GiB"]) == 0
    assert main.main(["plan", "70B", "--check"]) == 2
    capsys.readouterr()


def test_a_config_file_names_its_model(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref:\n  model:\n    path: Qwen/Qwen2.5-1.5B\n")
    assert main.main(["plan", str(path), "--json", "memory.gradients=host"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == 1_543_714_304
    assert told["host"]["gradients"] > 3e9
    path.write_text("algorithm:\n  name: grpo\n")
    assert main.main(["plan", str(path)]) == 78
    assert "actor_rollout_ref.model.path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["qwen2.5-7bb"], 66, "nearest: Qwen2.5-7B"),
        (["8B", "--gpu", "h2000"], 2, "nearest: H200"),
        (["8B", "--gpu", "0GiB"], 2, "0GiB"),
        (["8B", "--gpu", "24"], 2, "a size has a unit: 24GiB"),
        (["8B", "--gpu", "0x"], 2, "'0x' names no GPU"),
        (["8B", "--gpu", ""], 2, "names no GPU"),
        (["8B", "--gpu", "24GiB", "x2"], 2, "unrecognized arguments: x2"),
        (["8B", "--gpu", "h200", "--nodes", "0"], 2, "0 nodes"),
        (["8B", "--nodes", "2"], 2, "--nodes needs --gpu"),
        (["meta-llama/Llama-3.1-8B-Instrukt"], 66, "nearest: Llama-3.1-8B,"),
        (["nosuch.gguf"], 66, "nosuch.gguf: cannot be read"),
        ([""], 66, "no model is named"),
        (["8B", "memory.recomput=full"], 78, "memory.recompute"),
        (["8B", "memory.budget=lots"], 78, "memory.budget"),
        (["8B", "memory.budget=100MiB"], 78, "memory.budget = 100MiB: too small for a GPU"),
        (["8B", "memory.budget=24"], 78, "memory.budget = 24: must be a size with its unit, such as 24GiB, or auto"),
        (["8B", "--gpu", "4090 x0"], 2, "'4090 x0': 0 GPUs"),
        (["8B", "--gpu", "4090 x-2"], 2, "'4090 x-2': -2 GPUs"),
        (["8B", "data.max_response_length=-5"], 78, "data.max_response_length = -5: must be a whole number above 0"),
        (["8B", "--ram", "64GiB"], 2, "--ram needs --gpu"),
        (["8B", "--gpu", "h200", "--ram", "lots"], 2, "'lots' is no size"),
        (["9000B"], 66, "between 0.2B and 2000B"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(words, code, told, capsys):
    assert main.main(["plan", *words]) == code
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.startswith("ullage: error: ")
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("- a\n- b\n", 78, "a config is sections of keys, this is list"),
        ("a: [1", 78, "not valid YAML"),
        ("actor_rollout_ref:\n  model:\n    path: ./nosuch\n", 66, "./nosuch: no config.json there"),
        ("", 78, "actor_rollout_ref.model.path is empty"),
    ],
)
def test_a_config_that_is_none_or_names_no_model_is_one_line(text, code, told, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main.main(["plan", str(path)]) == code
    shown = capsys.readouterr().err
    assert told in shown
    assert len(shown.splitlines()) == 2


def test_experts_without_their_numbers_are_one_line(tmp_path, capsys):
    known = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(known | {"model_type": "qwen3_moe", "vocab_size": 100}))
    assert main.main(["plan", str(tmp_path)]) == 66
    shown = capsys.readouterr().err
    assert "but its config has no num_experts and no num_experts_per_tok and no moe_intermediate_size" in shown
    assert len(shown.splitlines()) == 2


def test_lines_are_folded_for_a_person_and_whole_for_a_program(monkeypatch, capsys):
    words = ["plan", "Qwen2.5-7B", "--gpu", "24GiB"]
    assert main.main(words) == 0
    whole = capsys.readouterr().out.splitlines()
    assert max(map(len, whole)) > 120
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main.main(words) == 0
    folded = capsys.readouterr().out.splitlines()
    assert max(map(len, folded)) <= 60
    assert sum(line.count("#") > 0 for line in folded) == sum(line.count("#") > 0 for line in whole)
    assert not any(line.endswith((" 783.0", " 24.0")) for line in folded)  # a number and its unit stay together


def test_a_reader_that_leaves_and_a_disk_that_is_full():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "ullage", "plan", "8B", "--explain"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.close()
        assert (running.stderr.read(), running.wait(60)) == (b"", 0)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 74
    assert done.stderr == (
        "ullage: error: cannot write: No space left on device\n  fix: make room, or write elsewhere\n"
    )


def told_by_the_command(*words):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "ullage", "plan", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["Qwen2.5-7B", "memory.budget=8GiB"], "does not fit: the weights alone are 14.2 GiB of 8.0 GiB"),
        (["Qwen2.5-7B", "--gpu", "24GiB", "--ram", "16GiB"], "does not fit: host memory needs "),
    ],
)
def test_the_impossible_is_one_line_and_a_code(words, line):
    done = told_by_the_command(*words, "--check")
    assert (done.returncode, done.stderr) == (79, "")
    assert [text for text in done.stdout.splitlines() if text.startswith(line)]


def test_what_was_guessed_is_said():
    told = told_by_the_command("8B", "--gpu", "24GiB").stdout
    assert "8B: a dense shape between Qwen2.5-7B and Qwen2.5-14B is assumed" in told
    assert "24GiB: the speed of " in told
    assert "host memory suffices; say what there is with --ram" in told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--gpu", "4090", "memory.budget=50GiB"],
            "memory.budget = 50GiB: there are only 23.6 GiB, which is what counts",
        ),
        (["--gpu", "MI300X"], "MI300X is no CUDA device: Ullage does not train on it"),
        (["--gpu", "T4"], "T4 has no bf16 in its tensor cores: Ullage does not train on it"),
    ],
)
def test_a_machine_that_is_not_as_asked_is_said(words, line, capsys):
    assert main.main(["plan", "Qwen2.5-0.5B", *words]) == 0
    assert f"\n  {line}\n" in capsys.readouterr().out


def test_where_nothing_helps_that_is_said(capsys):
    assert main.main(["plan", "DeepSeek-V3", "--gpu", "4060 Ti", "--ram", "64GiB"]) == 0
    told = capsys.readouterr().out
    assert "\ndoes not fit: the weights alone are 1249.9 GiB of " in told  # said before the host
    assert "\nnothing known here would make it fit: no setting, no adapter, no GPU; take a smaller model\n" in told


def test_a_folder_without_weights_is_planned_and_that_is_said(tmp_path, capsys):
    known = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(known | {"model_type": "llama", "vocab_size": 100}))
    line = "\n  there are no weights (*.safetensors) beside the config.json, which is what these numbers are of\n"
    assert main.main(["plan", str(tmp_path), "--gpu", "4090"]) == 0
    assert line in capsys.readouterr().out
    (tmp_path / "model.safetensors").touch()
    assert main.main(["plan", str(tmp_path), "--gpu", "4090"]) == 0
    assert line not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a":', "not valid JSON: Expecting value"),
        ('{"hidden_size": "512"}', "its config has '512' as hidden_size"),
        ('{"model_type": "gpt2"}', "layers of model type gpt2 are not known here"),
    ],
)
def test_a_models_config_that_cannot_be_used_is_two_lines(text, told, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main.main(["plan", str(tmp_path)]) == 66
    shown = capsys.readouterr().err
    assert told in shown
    assert len(shown.splitlines()) == 2


def test_it_says_what_it_plans(capsys):
    assert main.main(["plan", "smollm2", "--gpu", "24GiB"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "SmolLM2-135M: 0.13 B parameters on 24GiB\n"
        "grpo, all parameters; 64 prompts x 8 samples a step, 512 + 512 tokens\n\n"
    )
    settings = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.quantization=nf4", "algorithm=ppo"]
    assert main.main(["plan", "8B", *settings, "data.train_batch_size=4"]) == 0
    assert "\nppo, LoRA of rank 8 on nf4; 4 prompts x 8 samples a step, 512 + 512 tokens\n" in capsys.readouterr().out
    assert main.main(["plan", "8B", *settings, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == {
        "algorithm": "ppo",
        "lora_rank": 8,
        "quantization": "nf4",
        "prompts": 64,
        "samples": 8,
        "prompt_tokens": 512,
        "response_tokens": 512,
    }


def test_an_algorithm_that_no_run_would_know_is_not_planned(capsys):
    assert main.main(["plan", "8B", "--gpu", "h200", "algorithm.name=pppo"]) == 78
    assert "algorithm.name = 'pppo': unknown; did you mean ppo?" in capsys.readouterr().err


def test_a_folder_is_no_page(tmp_path, capsys):
    assert main.main(["plan", "8B", "--gpu", "h200", "--html", str(tmp_path)]) == 74
    assert f"cannot write {tmp_path}: it is a folder" in capsys.readouterr().err


def test_long_answers_are_drawn_few_at_once(capsys):
    words = ["plan", "8B", "--gpu", "h100", "--json", "data.max_response_length=131072"]
    assert main.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"]
    assert made["chosen"]["actor_rollout_ref.rollout.max_num_seqs"]["value"] == 2


def test_a_gpu_without_a_number_is_as_many_as_the_config_has(capsys):
    for name, ranks, said in (("h100", 8, "8x H100"), ("h100 x2", 8, "2x H100"), ("h100", 1, "on H100")):
        assert main.main(["plan", "8B", "--gpu", name, f"trainer.n_gpus_per_node={ranks}"]) == 0
        assert said in capsys.readouterr().out.splitlines()[0]
