"""Reviewed blocks as Python modules, executed from the bytes of their lock and nothing else.

No file of theirs is opened, no cache is written, no folder enters `sys.path`; each lock has a
package of its own, so that two folders with files of one name do not meet.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from stages.block_locks import read_lock
from stages.block_sources import BlockSources
from stages.errors import ModelError

PREFIX = "exeunt_blocks_"


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of one lock, in memory."""

    def __init__(self, package: str, sources: BlockSources) -> None:
        self._package = package
        self._texts = {
            ".".join(filter(None, (package, name))): (path, sources.files[path])
            for name, path in sources.modules.items()
        }
        for name in list(self._texts):  # folders without an __init__.py are packages, too
            while name := name.rpartition(".")[0]:
                self._texts.setdefault(name, ("", ""))

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """The module of this name, if it is one of the lock's."""
        if fullname not in self._texts:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self._texts)
        is_package |= self._texts[fullname][0].endswith("__init__.py")
        return ModuleSpec(fullname, self, origin=self._shown(fullname), is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's reviewed text."""
        exec(self.get_code(module.__name__), vars(module))

    def get_code(self, fullname: str) -> CodeType:
        """The compiled text of a module; tracebacks show its lines."""
        shown, text = self._shown(fullname), self._texts[fullname][1]
        linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
        return compile(text, shown, "exec", dont_inherit=True)

    def _shown(self, fullname: str) -> str:
        return f"<{self._package}>/{self._texts[fullname][0]}"


def reviewed_class(home: Path, digest: str) -> type[Any]:
    """The class of reviewed blocks.

    Raises:
        ModelError: They were not reviewed here, or the class is none of diffusers' blocks.

    Executes their code.
    """
    from diffusers.modular_pipelines import ModularPipelineBlocks

    sources = read_lock(home, digest)
    package = f"{PREFIX}{digest}"
    if not any(isinstance(each, _Finder) and each._package == package for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package, sources))
    module, _, name = sources.entry.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"{package}.{module}"), name)
    except Exception as error:
        raise ModelError(
            f"reviewed blocks {digest[:16]} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, ModularPipelineBlocks)):
        raise ModelError(f"{sources.entry} of blocks {digest[:16]} is no ModularPipelineBlocks")
    return found
