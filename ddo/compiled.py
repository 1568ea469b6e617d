"""Compiled code and the weights it uses.

What is compiled together computes without telling when a layer in it begins and ends. So a
compiled module is one *region*: its weights come before it is called and go after it has
returned, and nothing of ours is inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from torch import nn

_CALL = "_compiled_call_impl"  # where `module.compile()` puts the compiled code
_ORIGINAL = "_orig_mod"  # of the module that `torch.compile(module)` makes

WHOLE_MODULE = "the module is attached: compile its blocks by block.compile(), not the whole"


def is_region(module: nn.Module) -> bool:
    """Whether a module is compiled, by its own `compile` or by `torch.compile`."""
    return _ORIGINAL in module._modules or vars(module).get(_CALL) is not None


def original_name(name: str) -> str:
    """A weight's name without what `torch.compile` puts into it."""
    return ".".join(part for part in name.split(".") if part != _ORIGINAL)


class Surrounded:
    """Compiled code with something before and after it.

    Args:
        module: Compiled by its own `compile`.
        before: Called first, with module and arguments.
        after: Called last, also after an error.
    """

    def __init__(
        self,
        module: nn.Module,
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any], None],
    ) -> None:
        self.compiled: Callable[..., Any] = vars(module)[_CALL]
        self._module = module
        self._before = before
        self._after = after
        vars(module)[_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._before(self._module, args)
            return self.compiled(*args, **kwargs)
        finally:
            self._after(self._module, args, None)

    def remove(self) -> None:
        """Leave the compiled code as it was found, unless somebody has replaced it meanwhile."""
        if vars(self._module).get(_CALL) is self:
            vars(self._module)[_CALL] = self.compiled


def is_compiled_by_itself(module: nn.Module) -> bool:
    """Whether a module was compiled by its own `compile`: torch's hooks run inside then."""
    return vars(module).get(_CALL) is not None


def compiled_code(tables: Iterable[dict[str, Any]]) -> list[int]:
    """Identities of the compiled code among the attributes of modules."""
    found = filter(None, map(dict.get, tables, repeat(_CALL)))
    return [id(getattr(code, "compiled", code)) for code in found]
