"""The worker process on its own: its protocol, its weight and its limits."""

import json
import subprocess
import sys


def conversation(messages, num_replies):
    """A worker's replies. Its input stays open until they are there: at its end the guard kills."""
    command = [sys.executable, "-P", "-m", "ullage.rewards.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        worker.stdin.write("".join(json.dumps(message) + "\n" for message in messages))
        worker.stdin.flush()
        return [json.loads(worker.stdout.readline()) for _ in range(num_replies)]


def test_problems_are_listed():
    (reply,) = conversation([{"functions": [{"path": None, "name": "nonsense", "kwargs": {}}]}], 1)
    assert [cause for cause, _ in reply["problems"]] == ["no reward called 'nonsense'"]


def test_one_reply_per_function_up_to_the_first_that_failed(tmp_path):
    functions = []
    for name, body in (("one", "return 1"), ("two", "return 1 / int(response)"), ("three", "return 3")):
        path = tmp_path / f"{name}.py"
        path.write_text(f"def score(response):\n    {body}\n")
        functions.append({"path": str(path), "name": "", "kwargs": {}})
    row = {"prompt": "", "target": "", "source": "", "extra": {}, "response_length": 0, "response_ids": None}
    requests = [{**row, "functions": [0, 1, 2], "response": response} for response in ("2", "0", "4")]
    requests.append({**row, "functions": [2, 0], "response": "0"})
    replies = conversation([{"functions": functions}, *requests], 11)
    assert [reward["label"] for reward in replies[0]["rewards"]] == ["one", "two", "three"]
    error = {"error": "score in two.py raised ZeroDivisionError: division by zero at two.py:2"}
    assert [reply.get("score", reply) for reply in replies[1:]] == [
        *(1.0, 0.5, 3.0),
        *(1.0, error),
        *(1.0, 0.25, 3.0),
        *(3.0, 1.0),  # those asked for
    ]


def test_importing_a_worker_is_light():
    program = "import sys, ullage.rewards.worker; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pydantic", "asyncio", "transformers", "yaml"} & set(loaded)


def test_pool_does_not_load_torch():
    program = "import sys, ullage.rewards.pool; sys.stdout.write(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "transformers"} & set(loaded)
