"""Which sites a list of globs selects, and which of its globs selected nothing.

    "blocks.3"          everything in block 3          "*.mlp.*:grad_output"   one role of some modules
    "!blocks.3.attn"    but not this                   no glob without "!"     everything

As elsewhere, `*` crosses dots, and a name covers everything below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from narrowgauge.errors import there_are
from narrowgauge.metrics.site import OPERAND_ROLES, ROLES, covers_name


class SiteGlobs:
    """Selects sites by globs on `module` or `module:role`, and by role.

    Args:
        key: where the globs stand in the settings, for `unmatched`.
        sites: the globs; those that begin with "!" leave out.
        skip: further globs that leave out.
        roles: the roles to select from.

    >>> globs = SiteGlobs("watch.sites", ["blocks.*", "!*:weight"])
    >>> globs.selects("blocks.0.mlp", "input"), globs.selects("blocks.0.mlp", "weight"), globs.selects("head", "input")
    (True, False, False)
    """

    def __init__(
        self, key: str, sites: Iterable[str] = (), skip: Iterable[str] = (), roles: Iterable[str] = ()
    ) -> None:
        sites, skip = list(sites), list(skip)
        self._table = key.rpartition(".")[0]
        self._in = [glob for glob in sites if not glob.startswith("!")]
        self._out = [glob.removeprefix("!") for glob in (*(g for g in sites if g.startswith("!")), *skip)]
        self._written = [(key, glob, glob.startswith("!")) for glob in sites]
        self._written += [(f"{self._table}.skip", glob, True) for glob in skip]
        self._roles = frozenset(roles) or frozenset(ROLES)
        self._asked: dict[tuple[str, str], bool] = {}
        self._modules: dict[str, bool] = {}

    def selects(self, module: str, role: str) -> bool:
        """Whether a site is selected."""
        site = module, role
        known = self._asked.get(site)
        if known is None:
            known = self._asked[site] = self._chosen(module, role)
        return known

    def reaches(self, module: str) -> bool:
        """Whether any site of a module may be selected."""
        known = self._modules.get(module)
        if known is None:
            known = self._modules[module] = any(self._chosen(module, role) for role in ROLES)
        return known

    @property
    def asked(self) -> bool:
        """Whether any site, or any module, was asked for."""
        return bool(self._asked or self._modules)

    @property
    def closed(self) -> bool:
        """Whether nothing can be selected, whatever a program has."""
        return "*" in self._out

    def unmatched(self) -> list[str]:
        """One sentence for each glob that matched nothing that was asked for, or that all leave nothing; if any was."""
        seen = list(dict.fromkeys([*self._modules, *(module for module, _ in self._asked)]))
        every = [(module, role) for module in seen for role in ROLES]
        told = [
            f"{key}: {glob!r} matched nothing in this program; {self._of_roles(glob) or _hint(glob, seen)}"
            for key, glob, leaves_out in self._written
            # What is left out may never be asked for: its module was.
            if seen and not _any(glob.removeprefix("!"), self._asked if ":" in glob and not leaves_out else every)
        ]
        chosen_by = bool(self._written) or self._roles != frozenset(ROLES)
        if seen and chosen_by and not told and not any(self._asked.values()):
            only = "" if self._roles.intersection(OPERAND_ROLES) else " Only converted layers have results."
            told.append(
                f"{self._table}: its sites and roles together matched nothing in this program; {_there_is(seen)}{only}"
            )
        return [*told, *self._roles_that_never_came()]

    def _of_roles(self, glob: str) -> str:
        """What is to be said of a glob on roles that the choice has not; "" of another."""
        _, colon, wanted = glob.rpartition(":")
        if not colon or any(fnmatchcase(role, wanted) for role in self._roles):
            return ""
        return f"{self._table} has no other roles than {', '.join(role for role in ROLES if role in self._roles)}."

    def _roles_that_never_came(self) -> list[str]:
        """One sentence for each role that was chosen, if others of the choice came and it did not."""
        came = {role for (_, role), chosen in self._asked.items() if chosen}
        if not came or self._roles == frozenset(ROLES) or self._roles == frozenset(OPERAND_ROLES):
            return []  # what a table has that names none
        return [
            f"{self._table}.roles: {role!r} matched nothing in this program"
            + ("." if role in OPERAND_ROLES else "; only converted layers have results.")
            for role in ROLES
            if role in self._roles and role not in came
        ]

    def _chosen(self, module: str, role: str) -> bool:
        chosen = not self._in or any(_matches(glob, module, role) for glob in self._in)
        return chosen and role in self._roles and not any(_matches(glob, module, role) for glob in self._out)


def _any(glob: str, sites: Iterable[tuple[str, str]]) -> bool:
    return any(_matches(glob, *site) for site in sites)


def _matches(glob: str, module: str, role: str) -> bool:
    name, colon, of_role = glob.rpartition(":")
    if not colon:
        return covers_name(glob, module)
    return fnmatchcase(role, of_role) and covers_name(name, module)


def _hint(glob: str, modules: list[str]) -> str:
    bare = (glob.rpartition(":")[0] or glob).strip("!*.")
    ends = {name.rpartition(".")[2]: name for name in modules} | {name: name for name in modules}
    close = get_close_matches(bare, ends, n=1, cutoff=0.5)
    module = glob.removeprefix("!").rpartition(":")[0]
    if close and not any(covers_name(module, name) for name in modules):  # else it has no such role
        return f"did you mean {ends[close[0]]!r}?"
    return _there_is(modules)


def _there_is(modules: list[str]) -> str:
    return f"{there_are(list(map(repr, modules)), most=5)}."
