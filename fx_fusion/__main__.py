"""``python -m fx_fusion demo | doctor``."""

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
    given = parser.parse_args()
    if given.command == "doctor":
        from fx_fusion.doctor import main as doctor

        return doctor()
    from fx_fusion.demo import main as demo_main

    return demo_main(steps=given.steps, variant=given.variant)


if __name__ == "__main__":
    sys.exit(main())
