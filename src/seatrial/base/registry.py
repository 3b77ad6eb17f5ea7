"""Named entries of one kind (launchers, schedules, optimizers, model families): built in, or added by other packages as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from seatrial.base.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # equal if it is the same, so that it can be hashed
class Registry(Generic[T]):
    """All entries of one kind, by name. A package adds one with an entry point NAME = "module:OBJECT" in `group`.

    A package is imported only when its entry is requested. A built-in name cannot be replaced.
    """

    kind: str  # in messages: "launcher"
    group: str
    own: Mapping[str, T]
    of: type[T]  # what an entry point must name

    def names(self) -> list[str]:
        """All names, the built-in ones first."""
        return [*self.own, *sorted(entry_points(group=self.group).names - self.own.keys())]

    def named(self, name: str) -> T:
        """The entry of this name. Raises InputError if there is none, or if it cannot be imported."""
        if name in self.own:
            return self.own[name]
        others = entry_points(group=self.group)
        if name not in others.names:
            known = ", ".join(self.names())
            hint = f"there are: {known}" if known else "no installed package adds one"
            raise InputError(f'there is no {self.kind} "{name}"', hint=hint)
        found = self.imported(name, others[name].value)
        if not isinstance(found, self.of):
            raise InputError(
                f'the {self.kind} "{name}" of {others[name].value} is not a {self.of.__name__}',
                hint=f"see {self.of.__module__}.{self.of.__name__}",
            )
        return found

    def imported(self, name: str, path: str) -> Any:
        """What `path`, "module:OBJECT", names; `name` is the entry's name. Raises InputError if it cannot be imported."""
        try:
            return resolve_name(path)
        except Exception as error:  # an import runs the code of others, which can raise anything
            raise InputError(
                f'the {self.kind} "{name}" of {path} cannot be imported: {type(error).__name__}: {error}',
                hint="repair or reinstall the package that provides it",
            ) from error
