"""What is put into a module while a session is attached, and taken out again.

Streamed layers get a hook before and one after their `forward`; the methods by which the module
is entered are wrapped, since a step begins and ends there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddo.compiled import WHOLE_MODULE, Surrounded, is_compiled_by_itself


class Layers(Protocol):
    """Told by the hooks which blocks a layer is about to use, and has used."""

    def reach(self, blocks: Sequence[int]) -> None: ...

    def leave(self, blocks: Sequence[int]) -> None: ...


class LayerHooks:
    """Hooks on the modules that use blocks."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._handles: list[RemovableHandle | Surrounded] = []
        self._entered = threading.local()

    def install(self, users: Sequence[tuple[nn.Module, Sequence[int]]]) -> None:
        """Replace all hooks by those for these modules and the blocks that each uses."""
        self.remove()
        for module, blocks in users:
            self._install_on(module, tuple(blocks))

    def remove(self) -> None:
        """Take every hook out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def leave_all(self) -> int:
        """End the uses that this thread has begun and an interrupt has kept from ending."""
        stack = self._stack()
        count = len(stack)
        while stack:
            _, blocks = stack.pop()
            self._layers.leave(blocks)
        return count

    def _stack(self) -> list[tuple[nn.Module, tuple[int, ...]]]:
        try:
            stack: list[tuple[nn.Module, tuple[int, ...]]] = self._entered.stack
        except AttributeError:
            stack = self._entered.stack = []
        return stack

    def _install_on(self, module: nn.Module, blocks: tuple[int, ...]) -> None:
        def before(module: nn.Module, _args: Any) -> None:
            self._layers.reach(blocks)
            self._stack().append((module, blocks))

        def after(module: nn.Module, _args: Any, _output: Any) -> None:
            # After an error torch calls this even if `before` itself has failed.
            stack = self._stack()
            if stack and stack[-1][0] is module:
                stack.pop()
                self._layers.leave(blocks)

        if is_compiled_by_itself(module):
            self._handles.append(Surrounded(module, before, after))
            return
        # First of all: hooks such as weight_norm's compute with the weights.
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))


EDITS = ("fuse_lora", "unfuse_lora")  # methods that compute with weights outside of a step


def _passed_on(method: Callable[..., Any], edit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def passed_on(*args: Any, **kwargs: Any) -> Any:
        return edit(method, args, kwargs)

    return passed_on


class EntryPoints:
    """The methods by which a module is entered, wrapped on the instance."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module = module
        self._names = [name for name in names if callable(getattr(module, name, None))]
        self._found: dict[str, Any] = {}
        self._installed: list[str] = []

    def install(
        self,
        run: Callable[..., Any],
        refuse: Callable[[Any], None],
        traced: Callable[[], None],
        edit: Callable[..., Any],
    ) -> None:
        """Let every entry go through `run(method, args, kwargs)`, every edit through `edit(...)`.

        Code that is compiled around an entry ends there: `traced` is told, and the module runs
        as it does otherwise.

        `to`, `cuda`, `half` and the like all end in `_apply`: it asks `refuse`, which raises if
        the function that weights would go through changes one.
        """

        def run_apart(method: Any, args: Any, kwargs: Any, is_traced: bool) -> Any:
            if is_traced:
                traced()
            return run(method, args, kwargs)

        disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
        run_uncompiled = disable(run_apart, reason=WHOLE_MODULE)

        for name in self._names:
            method = getattr(self._module, name)

            @functools.wraps(method)
            def entry(*args: Any, _method: Callable[..., Any] = method, **kwargs: Any) -> Any:
                return run_uncompiled(_method, args, kwargs, torch.compiler.is_compiling())

            self._put(name, entry)

        for name in EDITS:
            if callable(method := getattr(self._module, name, None)):
                self._put(name, _passed_on(method, edit))

        def apply(change: Callable[[Any], Any], recurse: bool = True) -> nn.Module:  # noqa: ARG001
            refuse(change)
            return self._module

        self._put("_apply", apply)

    def _put(self, name: str, value: Any) -> None:
        own = vars(self._module)
        if name in own:
            self._found[name] = own[name]
        own[name] = value
        self._installed.append(name)

    def remove(self) -> None:
        """Leave the methods as they were found."""
        for name in self._installed:
            if name in self._found:
                vars(self._module)[name] = self._found[name]
            else:
                vars(self._module).pop(name, None)
        self._installed.clear()
        self._found.clear()
