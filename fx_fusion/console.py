"""The console that commands print colors and progress with."""

from __future__ import annotations

from rich.console import Console


class Output(Console):
    """A console of rich that raises BrokenPipeError, so that ``main`` ends all commands with one exit code."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, where rich would exit with 1."""
        raise BrokenPipeError
