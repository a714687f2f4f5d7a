"""``python -m fx_fusion``: what is made of a model, a script under fx_fusion, a demonstration, what a machine can do."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from fx_fusion import __version__
from fx_fusion.errors import VerificationError
from fx_fusion.pipes import READER_ENDED, discard_output, reader_ended

_EXAMPLES = """examples:
  python -m fx_fusion explain llama                      a model type of transformers, full size, no memory
  python -m fx_fusion explain llama --layers 2 --gpu a100 --mask padded
                                                         two layers, padded batches, planned for a GPU that is not here
  python -m fx_fusion explain vit --tiny                 small widths too
  python -m fx_fusion explain ./my-model --html r.html   a config.json, or its folder; the report as a page
  python -m fx_fusion explain train.py:make --why layers.0.norm
                                                         make() returns a model and its arguments
  python -m fx_fusion explain llama --select always --require rms_norm=1 --require rope=2
                                                         exit code 1 where that does not hold: for CI
  python -m fx_fusion bench llama --layers 4 --batch 8   training steps beside eager, Inductor and Liger, on this GPU
  python -m fx_fusion verify train.py:make               one step beside eager's and float64's: exit code 1 if it is wrong
  python -m fx_fusion run train.py --epochs 1            a script as it is: what it gives to torch.compile, under fx_fusion
  python -m fx_fusion run --compile -m my.trainer a.yml  a module that compiles nothing: the first model that it trains
  python -m fx_fusion profile train.py --epochs 1        where the time of its steps goes, under Inductor and under fx_fusion
  python -m fx_fusion bisect python check.py             which replacement makes check.py fail
  python -m fx_fusion replay fx_fusion_rms_norm_x.pt     a site that options={"verify": ...} found wrong, alone
  python -m fx_fusion report r.json --html r.html        a report that --json wrote, as a page
  python -m fx_fusion new-fusion my_op                   the files of a new fusion, which work as they stand
  python -m fx_fusion new-fusion my_op --into src/my_fusions
                                                         the same in a package of your own: one module
  python -m fx_fusion doctor                             what this machine can do
"""


def main() -> int:
    """Run a command and return its exit code: 141 if the program that reads its output ended first."""
    try:
        try:
            return _command()
        finally:
            sys.stdout.flush()  # here, because an error of the flush at exit can't be caught
    except BrokenPipeError:
        if not reader_ended():
            raise
        discard_output()
        return READER_ENDED


def _command() -> int:
    if not sys.argv[1:]:
        _parser().print_help()
        return 0
    given, rest = _parser().parse_known_args()
    if "--" in rest:  # which some versions of Python leave there
        rest.remove("--")
    if rest and given.command not in ("run", "bisect", "profile"):
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if given.command == "doctor":
        from fx_fusion.doctor import main as doctor

        return doctor(as_json=given.json)
    if given.command == "demo":
        from fx_fusion.demo import main as demo_main

        try:
            return demo_main(**{name: getattr(given, name) for name in ("steps", "variant", "device", "layers", "hidden")})
        except ValueError as error:  # a width or a device that can't be
            print(f"fx_fusion: {error}", file=sys.stderr)
            return 2
    if given.command == "new-fusion":
        from fx_fusion.skeleton import new_fusion

        try:
            print(new_fusion(given.name, given.into))
        except ValueError as error:  # a name or a folder that can't be used
            print(f"fx_fusion: {error}", file=sys.stderr)
            return 2
        return 0
    options: dict[str, Any] = {} if getattr(given, "select", None) is None else {"select": given.select}
    from fx_fusion.commands import (
        bench_command,
        bisect_command,
        explain_command,
        profile_command,
        profile_one,
        replay_command,
        report_command,
        run_command,
        verify_command,
    )

    def chosen(*names: str) -> dict[str, Any]:
        return {name: getattr(given, name) for name in names}

    output, sizes = ("html", "json", "diff", "fusion", "why", "require"), ("batch", "length", "layers", "tiny", "dtype")
    try:
        if given.command == "run":
            return run_command(given.script, rest, options=options, output=chosen(*output), **chosen("module", "compile"))
        if given.command == "profile":
            measured = chosen("after", "steps", "trace")
            if given.backend:
                return profile_one(given.script, rest, backend=given.backend, result=given.result, **measured)
            return profile_command(given.script, rest, **measured)
        if given.command == "bisect":
            return bisect_command([given.program, *rest])
        if given.command == "replay":
            return replay_command(given.file)
        if given.command == "report":
            return report_command(given.file, output=chosen(*output))
        if given.command == "bench":
            command = [sys.executable, "-W", "ignore", "-m", "fx_fusion", *sys.argv[1:]]
            measured = chosen("device", "steps", "variant", "json")
            return bench_command(given.target, sizes=chosen(*sizes, "mask"), command=command, **measured)
        if given.command == "verify":
            return verify_command(given.target, sizes=chosen(*sizes), options=options, **chosen("device"))
        where = chosen("device", "gpu", "download")
        return explain_command(given.target, sizes=chosen(*sizes, "mask"), options=options, output=chosen(*output), **where)
    except (ValueError, VerificationError) as error:  # a target, an option, a fusion or a place that is none
        print(f"fx_fusion: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are listed."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"fx_fusion: {message} (see {self.prog} --help)\n")


# -- what arguments must be: none of it needs torch --------------------------------------------------------------------
def _at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more; got {text!r}")
    return int(text)


def _place(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError(f"must be a module or a line, as layers.0.norm or model.py:12; got {text!r}")
    return text


def _requirement(text: str) -> str:
    name, equals, number = text.partition("=")
    if not name or (equals and not number.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be FUSION or FUSION=N with a whole number N; got {text!r}")
    return text


def _in_a_folder(text: str) -> str:
    """A file that can be written later on, or the start of its name."""
    folder = os.path.dirname(text)
    if not os.path.isdir(folder or "."):
        raise argparse.ArgumentTypeError(f"must be in a folder that exists; there is no folder {folder!r}, make it before")
    if not os.access(folder or ".", os.W_OK):
        raise argparse.ArgumentTypeError(f"must be in a folder that can be written to; {folder or '.'!r} can't")
    return text


def _target(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must name a model: llama, a folder with config.json, train.py:make; got {text!r}")
    return text


def _json(text: str) -> str:
    return text if text == "-" else _file(text)


def _file(text: str) -> str:
    if not text or os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"must be the name of a file; {text!r} is {'a folder' if text else 'none'}")
    if text.endswith(".py"):
        raise argparse.ArgumentTypeError(f"must be a file for the report; {text!r} is a program: name a .html or .json")
    return _in_a_folder(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fx_fusion", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="See what fx_fusion makes of a model.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fx_fusion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser("explain", help="what would be fused in a model, and why the rest would not")
    verify = commands.add_parser("verify", help="one training step beside eager's and float64's, and which fusion is wrong")
    bench = commands.add_parser("bench", help="training steps under eager, Inductor, Liger and fx_fusion, in turns")
    target = "a model type of transformers, a config.json or its folder, a model of the Hub, or module:function"
    explain.add_argument("target", type=_target, help=f"{target}; a script (file.py) is run as it is")
    verify.add_argument("target", type=_target, help=target)
    bench.add_argument("target", type=_target, nargs="?", default="llama", help=f"{target} (llama)")
    defaults = (explain, "4; 1", 2048, "all"), (verify, "1", 64, "2"), (bench, "4; 1", 2048, "all")
    for command, batch, length, layers in defaults:
        command.add_argument("--batch", type=_at_least_1, help=f"rows of the batch ({batch} with --tiny)")
        command.add_argument("--length", type=_at_least_1, help=f"tokens in a row ({length}; 16 with --tiny)")
        command.add_argument("--layers", type=_at_least_1, help=f"at most so many layers; they are alike ({layers})")
        command.add_argument("--tiny", action="store_true", help="a small model of this type, with memory")
        command.add_argument("--device", choices=("cpu", "cuda"), help="where the model is (the GPU, if there is one)")
        command.add_argument(
            "--dtype", choices=("bfloat16", "float16", "float32"), help="of the parameters and images (bfloat16)"
        )
    explain.add_argument("--gpu", metavar="NAME", help="plan for this GPU, as h200, a100 or 4090; none has to be here")
    for command in (explain, bench):
        command.add_argument(
            "--mask", choices=("none", "ones", "padded", "packed"), help="what a model of text gets beside its tokens (none)"
        )
    explain.add_argument("--download", action="store_true", help="fetch the config of a model of the Hub")
    run = commands.add_parser("run", help="run a script as it is, under fx_fusion, and report", allow_abbrev=False)
    run.add_argument(
        "script", help="a Python file, or with -m a module; what is not known here, and all behind --, are its own arguments"
    )
    run.add_argument("-m", dest="module", action="store_true", help="it is a module, as of python -m")
    run.add_argument(
        "--compile", action="store_true", help="compile the first model that is trained, for a script that compiles none"
    )
    profile = commands.add_parser(
        "profile", help="where the time of a script's steps goes, under Inductor and fx_fusion", allow_abbrev=False
    )
    profile.add_argument("script", help="a Python file that trains; its own arguments behind --")
    profile.add_argument("--after", type=_at_least_1, default=10, help="steps to warm up, compilations included")
    profile.add_argument("--steps", type=_at_least_1, default=5, help="steps to time, and as many to profile")
    profile.add_argument(
        "--trace", type=_in_a_folder, metavar="NAME", help="write NAME_inductor.json and NAME_fx_fusion.json, for Perfetto"
    )
    profile.add_argument("--backend", choices=("inductor", "fx_fusion"), help=argparse.SUPPRESS)
    profile.add_argument("--result", help=argparse.SUPPRESS)
    bench.add_argument("--steps", type=_at_least_1, default=10, help="steps of each turn; there are five")
    bench.add_argument("--json", type=_json, metavar="FILE", help="write what was measured as JSON; - prints it alone")
    bench.add_argument("--variant", help=argparse.SUPPRESS)
    bisect = commands.add_parser("bisect", help="find the replacement with which a command starts to fail")
    bisect.add_argument("program", help="what is run, again and again, and its arguments; it fails by its exit code")
    replay = commands.add_parser("replay", help="compare a site that was found wrong once more, alone")
    replay.add_argument("file", help="what the error names; it holds code, so open only what your own run wrote")
    report = commands.add_parser("report", help="show a report that was written as JSON")
    report.add_argument("file", help="what --json wrote, here or on another machine")
    for command in (explain, run, report):
        command.add_argument("--html", type=_file, metavar="FILE", help="write the report as a page")
        command.add_argument("--json", type=_json, metavar="FILE", help="write the report as JSON; - prints it alone")
        command.add_argument("--diff", action="store_true", help="print the graphs before and after")
        command.add_argument(
            "--why", type=_place, metavar="PLACE", help="print what became of a module or of a line (model.py:12)"
        )
        command.add_argument("--fusion", metavar="FUSION", help="show the sites of one fusion")
        command.add_argument(
            "--require", type=_requirement, metavar="FUSION[=N]", action="append", default=[],
            help="exit code 1 unless it was fused (N times)",
        )  # fmt: skip
    for command in (explain, verify, run):
        command.add_argument("--select", choices=("auto", "measure", "always", "never"), help="as in the options")
    demo = commands.add_parser("demo", help="train a small Llama under eager, Inductor and fx_fusion, side by side")
    demo.add_argument("--steps", type=_at_least_1, default=8, help="training steps of each")
    demo.add_argument("--layers", type=_at_least_1, help="of the model (3 on a CPU, 16 on a GPU)")
    demo.add_argument("--hidden", type=_at_least_1, help="its width; all of it gets wider (128 on a CPU, 2048 on a GPU)")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="where it trains (the GPU, if there is one)")
    demo.add_argument("--variant", choices=("eager", "inductor", "fx_fusion"), help=argparse.SUPPRESS)
    new = commands.add_parser("new-fusion", help="write the files of a new fusion, which work as they stand")
    new.add_argument("name", help="of the fusion, its op and its files")
    new.add_argument("--into", metavar="PACKAGE_DIR", help="the folder of a package of yours; else this checkout, or here")
    doctor = commands.add_parser("doctor", help="check what this machine can do")
    doctor.add_argument("--json", action="store_true", help="as a JSON list")
    return parser


if __name__ == "__main__":
    sys.exit(main())
