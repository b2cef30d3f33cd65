"""Operators of torch that a GPU's host calls without asking torch, which costs it more than to start their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """A function whose first argument, given by its place, is a tensor; for passes without gradients.

    Tensors on a GPU go straight to the function. All others go through torch, so that whoever traces tensors without
    memory sees one operator, what it allocates and what it changes.
    """

    def __init__(self, name: str, function: Callable[P, R], mutates_args: Sequence[str]) -> None:
        self.function = function
        self.registered = torch.library.custom_op(name, function, mutates_args=mutates_args)
        self.register_fake: Callable[..., Any] = self.registered.register_fake
        """For the function that says what comes out of tensors without memory; not needed where nothing does."""
        if signature(function).return_annotation in (None, "None"):
            self.register_fake(lambda *_, **__: None)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if type(args[0]) is Tensor and args[0].is_cuda:
            return self.function(*args, **kwargs)
        result: R = self.registered(*args, **kwargs)
        return result


def operator(name: str, *, mutates_args: Sequence[str] = ()) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an operator of a function, by the name that torch knows it by."""
    return lambda function: Operator(name, function, mutates_args)
