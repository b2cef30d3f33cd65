"""How torch is to allocate GPU memory: said in the environment, before it first does."""

import os


def expand_segments() -> None:
    """Segments that grow leave no gaps between them: memory that is free can be had. The user's own settings stay."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
