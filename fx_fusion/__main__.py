"""``python -m fx_fusion demo | doctor | coverage``."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fx_fusion", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small Llama under eager, Inductor and fx_fusion, side by side")
    demo.add_argument("--steps", type=int, default=8)
    demo.add_argument("--variant", choices=("eager", "inductor", "fx_fusion"), help=argparse.SUPPRESS)
    commands.add_parser("doctor", help="check what this machine can do")
    commands.add_parser("coverage", help="every class of the installed transformers (from a checkout)", add_help=False)
    given, rest = parser.parse_known_args()
    if given.command == "coverage":
        return _coverage(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if given.command == "doctor":
        from fx_fusion.doctor import main as doctor

        return doctor()
    from fx_fusion.demo import main as demo_main

    return demo_main(steps=given.steps, variant=given.variant)


def _coverage(arguments: list[str]) -> int:
    """The suite is part of the tests, which are not installed."""
    try:
        from tests.coverage.run import main as run
    except ImportError as error:
        print(f"the coverage suite lies in tests/ of a checkout; run this from its root ({error})", file=sys.stderr)
        return 1
    sys.argv[1:] = arguments
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
