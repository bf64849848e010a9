"""Parsers of commands that cost nothing until they are called, and whose mistakes are one line.

A module with a command has `add_arguments(parser)` and `main(arguments) -> int`. It is imported
when its command is called, not when the commands are listed: `chunkserve --help` would else import
all that any of them needs.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Parses one command.

    Args:
        module: brings the arguments and `main`; its docstring is what `--help` begins with. None:
            the caller adds them.
        options: as `argparse.ArgumentParser` takes them.
    """

    def __init__(self, module: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)
        self._module = module

    def load(self) -> None:
        """Import the module, if that is yet to be done, and take over its arguments."""
        if self._module is None:
            return
        module = import_module(self._module)
        self._module = None
        self.description = module.__doc__
        module.add_arguments(self)
        # A command that only has commands below it leaves `main` to them.
        self.set_defaults(run=getattr(module, "main", None))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class does, with the module's arguments."""
        self.load()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line: the usage, of dozens of flags, would bury it."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")
