"""A one-shot finder: calls back once when a module that is not loaded yet has been imported.

Interpreter start-up imports this module, so it uses only what is loaded by then.
"""

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class Finder:
    """Finds `name` through the finders after it, with a loader that calls back when it is done.

    It leaves `sys.meta_path` after the first import of `name` that succeeds; one that fails leaves
    it there. The import itself goes exactly as it would without this finder: the module and its
    spec have their real loader back before any code of the module runs.
    """

    def __init__(self, name: str, callback: "Callable[[], None]") -> None:
        self._name = name
        # Taking the callback out of the list is what makes it happen once: list.pop is atomic, and
        # no lock of ours is ever held while foreign code runs.
        self._callbacks = [callback]
        self._asking: set[int] = set()

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """The spec that the import system would have found, or None to leave it to that."""
        thread = _thread.get_ident()
        # One of the finders asked here may itself ask all the finders, hence us again.
        if fullname != self._name or not self._callbacks or thread in self._asking:
            return None
        self._asking.add(thread)
        try:
            spec = self._ask_the_others(fullname, path, target)
        finally:
            self._asking.discard(thread)
        try:
            loader = getattr(spec, "loader", None)
            if spec is not None and type(loader) is not Loader and hasattr(loader, "exec_module"):
                spec.loader = Loader(loader, self)  # type: ignore[assignment]
        except Exception:
            pass  # a spec that cannot be changed, or a hostile loader: the host's import goes on
        return spec

    def _ask_the_others(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
    ) -> "ModuleSpec | None":
        finders = list(sys.meta_path)
        # Those in front of us were asked already, and found nothing.
        place = next((i for i, finder in enumerate(finders) if finder is self), -1)
        for finder in finders[place + 1 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec and find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    def module_ran(self) -> None:
        """Call back if `name` is loaded now and nobody has called back yet."""
        if self._name not in sys.modules:
            return  # somebody ran a private copy of the module; the import is still to come
        try:
            callback = self._callbacks.pop()
        except IndexError:
            return
        try:
            callback()
        except KeyboardInterrupt:
            self._callbacks.append(callback)  # fails the host's import, so the next one counts
            raise
        except BaseException:
            pass  # the host's import succeeds whatever a callback does
        try:  # noqa: SIM105, contextlib is one more import
            sys.meta_path.remove(self)
        except ValueError:
            pass  # somebody else took it out


class Loader:
    """The real loader of one module, with a call back after the module ran."""

    def __init__(self, real: "Any", finder: Finder) -> None:
        self._real = real
        self._finder = finder

    def __getattr__(self, name: str) -> "Any":
        # For whoever looks at a spec without importing: resources, source, file name.
        # object.__getattribute__ does not come back here on a copy without the attribute.
        return getattr(object.__getattribute__(self, "_real"), name)

    def exec_module(self, module: "ModuleType") -> None:
        """Put the real loader back, run the module with it, and tell the finder."""
        spec: Any = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._real
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._real
        self._real.exec_module(module)
        self._finder.module_ran()


def is_waiting() -> bool:
    """Whether a finder of ours is in place, by name: a reload makes a new class."""
    return any(
        type(finder).__module__ == __name__ and type(finder).__qualname__ == "Finder"
        for finder in list(sys.meta_path)
    )


def call_after_import(name: str, callback: "Callable[[], None]") -> None:
    """Call back once when the module `name` has been imported; does nothing if one waits."""
    if not is_waiting():
        sys.meta_path.insert(0, Finder(name, callback))
