"""Which of several processes this one is, by the names that verl users know; see ullage/compat/distributed.py."""

from ullage.compat.distributed import get_rank, get_world_size, is_main_process, setup_distributed_environment

__all__ = ["get_rank", "get_world_size", "is_main_process", "setup_distributed_environment"]
