"""Memory and time of user code: the documents' snippets, and the numbers behind them."""

import logging
import time

import psutil
import pytest
import torch

from ullage import profiler

logger = logging.getLogger("mine")


def test_memory_profiling_of_documents_000_and_002(caplog):
    from ullage.profiler import GPUMemoryLogger, log_gpu_memory_usage

    caplog.set_level(logging.INFO)
    # Log memory usage at specific points
    log_gpu_memory_usage("Before forward pass", logger=logger)

    # Decorator for automatic memory logging
    @GPUMemoryLogger(role="actor")
    def update_actor(self, batch):
        # Training logic
        return batch

    assert update_actor(None, 7) == 7
    assert update_actor.__name__ == "update_actor"
    heads = [(record.name, record.getMessage().split(":")[0]) for record in caplog.records]
    assert heads == [
        ("mine", "Before forward pass"),
        ("ullage.profiler", "before actor update_actor"),
        ("ullage.profiler", "after actor update_actor"),
    ]


def test_the_logger_as_a_block_says_both_even_where_it_fails(caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(ValueError, match="mine"), profiler.GPUMemoryLogger("critic", logger):
        raise ValueError("mine")
    assert [line.split(":")[0] for line in caplog.messages] == ["before critic", "after critic"]


def test_performance_profiling_of_document_002(capsys):
    from ullage.profiler import simple_timer

    model = torch.nn.Linear(4, 1)
    inputs = torch.ones(2, 4)
    timing_dict = {}

    with simple_timer("forward_pass", timing_dict):
        outputs = model(inputs)
    loss = outputs.sum()

    with simple_timer("backward_pass", timing_dict):
        loss.backward()

    print("Timing breakdown:", timing_dict)
    assert list(timing_dict) == ["forward_pass", "backward_pass"]
    assert min(timing_dict.values()) > 0
    assert capsys.readouterr().out.startswith("Timing breakdown: {'forward_pass': ")


def test_a_timer_adds_up_and_counts_a_block_that_fails(monkeypatch):
    clock = iter([1.0, 1.5, 10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timing = {}
    with profiler.timer("step", timing):
        pass
    with pytest.raises(RuntimeError), profiler.timer("step", timing):
        raise RuntimeError
    assert timing == {"step": 2.5}


def test_gradient_monitoring_of_document_002(caplog):
    def monitor_gradients(model):
        total_norm = 0
        for p in model.parameters():
            if p.grad is not None:
                param_norm = p.grad.data.norm(2)
                total_norm += param_norm.item() ** 2
        total_norm = total_norm**0.5
        print(f"Gradient norm: {total_norm}")
        return total_norm

    caplog.set_level(logging.INFO)
    model = torch.nn.Linear(2, 1)
    assert profiler.monitor_gradients(model) == 0.0
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert profiler.monitor_gradients(model) == monitor_gradients(model)
    assert profiler.monitor_gradients(model) == pytest.approx(26**0.5, abs=1e-6)  # 3, 4 and the bias's 1
    assert caplog.messages[-1] == "gradient norm: 5.09902"


def test_built_in_monitoring_of_document_004():
    from ullage.profiler import PerformanceMonitor

    monitor = PerformanceMonitor()
    assert "seconds" not in monitor.get_memory_stats()
    monitor.start()
    block = torch.ones(512 << 20, dtype=torch.uint8)
    stats = monitor.get_memory_stats()
    for _ in range(50):  # some kernels count resident pages with a delay
        if torch.cuda.is_available() or stats["allocated_since_start_gib"] >= 0.25:
            break
        time.sleep(0.1)
        stats = monitor.get_memory_stats()
    assert len(block) / (1 << 30) == 0.5
    if not torch.cuda.is_available():
        assert stats["allocated_since_start_gib"] >= 0.25  # what the process freed meanwhile counts too
        assert stats["peak_allocated_gib"] >= stats["allocated_gib"]
    assert stats["seconds"] > 0


def test_memory_on_a_cpu_is_the_process():
    usage = profiler.get_memory_usage(torch.device("cpu"))
    resident = psutil.Process().memory_info().rss / (1 << 30)
    assert usage["allocated_gib"] == pytest.approx(resident, rel=0.05)
    assert usage["allocated_gib"] == usage["reserved_gib"] <= usage["peak_allocated_gib"]
    assert usage["total_gib"] == psutil.virtual_memory().total / (1 << 30)
    assert profiler.profile_memory_usage().keys() == usage.keys() | {"host_gib"}


def test_lines_of_numbers(caplog):
    caplog.set_level(logging.INFO)
    profiler.log_performance_metrics({"tokens": 1200.0, "loss": 0.25})
    profiler.log_memory_usage("here", logger)
    assert caplog.messages[0] == "loss=0.25 tokens=1200"
    assert caplog.messages[1].startswith("here: allocated ")
    assert caplog.records[1].name == "mine"


def test_optimizing_a_model_recomputes_and_changes_no_result(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    ids = torch.tensor([[4, 5, 6]])
    before = model(ids).logits
    assert not model.is_gradient_checkpointing
    profiler.optimize_memory_usage(model)
    assert model.is_gradient_checkpointing
    assert torch.equal(model(ids).logits, before)
    profiler.optimize_memory_usage(torch.nn.Linear(1, 1))  # knows nothing of it, and needs nothing
