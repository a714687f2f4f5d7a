"""docs/command_line.md names every command and every option of the command line, and no other."""

import argparse
import re
from pathlib import Path

import pytest

from fx_fusion.__main__ import _parser

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
COMMANDS = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
SECTIONS = dict(re.findall(r"^## `([\w-]+)`[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))


def test_every_command_has_a_section_and_a_row():
    assert sorted(SECTIONS) == sorted(COMMANDS)
    assert re.findall(r"^\| \[`([\w-]+)`\]", PAGE, re.M) == list(SECTIONS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_in_its_section(command):
    shown = [a for a in COMMANDS[command]._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]
    rows = re.findall(r"^\| `([^`\s]+)[^`]*` \|", SECTIONS[command], re.M)
    assert sorted(rows) == sorted(a.option_strings[-1] if a.option_strings else (a.metavar or a.dest).upper() for a in shown)
    for action in shown:  # values and defaults
        row = next((r for r in SECTIONS[command].splitlines() if r.startswith(f"| `{(action.option_strings or [''])[-1]}")), "")
        wanted = [*(action.choices or ()), *([action.default] if isinstance(action.default, (int, str)) and action.option_strings else [])]
        if not isinstance(action, argparse._StoreTrueAction):
            assert [value for value in wanted if f"`{value}`" not in row] == [], row
