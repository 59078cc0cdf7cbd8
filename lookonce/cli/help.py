"""Help by group: `lookonce --help` sorts commands, `lookonce serve --help` options.

`--help=GROUP` shows one group alone.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from lookonce.cli.options import GROUPS, OTHER
from lookonce.errors import ConfigError

COMMANDS: dict[str, tuple[str, ...]] = {
    "Serve": ("serve", "fleet", "render"),
    "Ask": ("chat",),
    "Models": ("models", "ls", "pull"),
    "Watch": ("ps", "top", "doctor"),
    "Measure": ("bench", "simulate"),
}
"""Heading → commands."""
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
HELP_FLAG = "--help="


class GroupedCommand(TyperCommand):
    """A command whose help has a heading for each group of options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            if word == "--":
                break
            if word.startswith(HELP_FLAG):
                print(self._help_of(ctx, word.removeprefix(HELP_FLAG)))
                ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments = [p.get_help_record(ctx) for p in self.get_params(ctx) if _is_argument(p)]
        if listed := [record for record in arguments if record]:
            with formatter.section("Arguments"):
                formatter.write_dl(listed)
        for group, records in self._records(ctx).items():
            with formatter.section(_heading(group)):
                formatter.write_dl(records)

    def _help_of(self, ctx: Any, wanted: str) -> str:
        """Raises `ConfigError` for a group that there is not."""
        records = self._records(ctx)
        if wanted not in records:
            known = ", ".join(records)
            raise ConfigError(f"--help={wanted}: there is no such group; there are: {known}")
        formatter = ctx.make_formatter()
        with formatter.section(_heading(wanted)):
            formatter.write_dl(records[wanted])
        return str(formatter.getvalue()).rstrip("\n")

    def _records(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Group → option and help: the command's own first, then as in `GROUPS`."""
        found: dict[str, list[tuple[str, str]]] = {name: [] for name in (OTHER, *GROUPS)}
        for parameter in self.get_params(ctx):
            if not _is_argument(parameter) and (record := parameter.get_help_record(ctx)):
                found[GROUP_OF.get(parameter.name or "", OTHER)].append(record)
        return {group: records for group, records in found.items() if records}


class GroupedCommands(TyperGroup):
    """The commands, with a heading for each group of them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        left = list(self.list_commands(ctx))
        for heading, names in COMMANDS.items():
            present = [name for name in names if name in left]
            left = [name for name in left if name not in present]
            self._section(ctx, formatter, heading, present)
        self._section(ctx, formatter, "Other", left)

    def _section(self, ctx: Any, formatter: Any, heading: str, names: list[str]) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in names]
        width = formatter.width - 6 - max(map(len, names), default=0)
        rows = [(name, c.get_short_help_str(width)) for name, c in commands if c is not None]
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)


def _heading(group: str) -> str:
    return "Options" if group == OTHER else f"{group.capitalize()} options"


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")
