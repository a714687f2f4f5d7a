"""``python -m fx_fusion explain``, ``verify``, ``run``, ``profile``, ``bisect``, ``replay`` and ``report``."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fx_fusion import benching
from fx_fusion.cost import gpus
from fx_fusion.cost.table import rates_of_tables
from fx_fusion.errors import OptionError, TargetError
from fx_fusion.explaining import explain
from fx_fusion.graph.devices import planning_for
from fx_fusion.pipeline import LAST_REPLACEMENT
from fx_fusion.profiling import Measured, Steps, read, side_by_side
from fx_fusion.report.recording import recording
from fx_fusion.report.report import Report
from fx_fusion.rewrite.verify_site import NotComparable, replayed, table
from fx_fusion.scripts import compiling, compiling_what_trains, run_script, why_nothing
from fx_fusion.showing import check_files, show
from fx_fusion.targets import Target, check_fusions, names_a_function, target_of
from fx_fusion.torch_internals.fakes import NO_VALUES
from fx_fusion.torch_internals.inductor import name_kernels_on_cpu
from fx_fusion.transformers_models import Sizes, config_of
from fx_fusion.verifying import verify

_DEFAULT_GPU = "H200"
_LARGE = 1e9


def explain_command(
    name: str, *, sizes: dict[str, Any], device: str | None, gpu: str | None, options: dict[str, Any],
    output: dict[str, Any], download: bool = False,
) -> int:  # fmt: skip
    """Explain a target, or run it where it is a script; the exit code: 1 where a requirement does not hold.

    Args:
        device: where a model of transformers is: ``cpu`` or ``cuda``. Without a GPU here, all but ``cpu`` is planned.
        gpu: the GPU to plan for, whatever is here: by its table, or by that of the GPU whose memory is nearest in speed.
        download: whether the config of a model of the Hub may be fetched.

    Raises TargetError, OptionError.
    """
    check_files(output, reads=name)
    check_fusions(output, before=name)
    if name.endswith(".py"):
        if device or gpu or download or any(sizes.values()):
            raise TargetError(f"{name} is a script, which chooses its device and sizes itself: give no option for these, or "
                              f"name a function that makes a model, {name}:function")  # fmt: skip
        if Path(name).is_file():
            print(f"fx_fusion: runs the script, as `python -m fx_fusion run {name}` does", file=sys.stderr)
        return run_command(name, (), options=options, output=output)
    if sizes["mask"] and names_a_function(name):
        raise TargetError(f"--mask is for models of transformers; {name} gives its own arguments")
    if gpu and device == "cpu":
        raise OptionError("--gpu plans for a GPU, --device cpu for a CPU: give one of them")
    planned, there = "", torch.cuda.is_available()
    unasked = not gpu and not there and device is None and options.get("select") != "measure"
    device = "cuda" if unasked else device
    if gpu or (device == "cuda" and not there):
        planned, device = gpus.named(gpu or _DEFAULT_GPU, rates_of_tables()), "cpu"  # where it is captured
    if sizes["mask"] == "padded" and sizes["tiny"] is False:  # tensors without memory would not tell that they hold a 0
        options = {"speculate": False, **options}
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints is no report
        target = _target(name, fake=not sizes["tiny"], device=device, usual=None, download=download, **sizes)
        check_fusions(output)  # it may have registered some
        if unasked:
            print(f"fx_fusion: there is no GPU here: planned for an {_DEFAULT_GPU}; --gpu NAME: another, --device cpu: this "
                  "CPU")  # fmt: skip
        with target.mode or contextlib.nullcontext(), planning_for(planned):
            try:
                report = explain(target.call, *target.args, options=options, **target.kwargs)
            except NO_VALUES as error:
                raise TargetError(
                    f"{name} reads values of its tensors ({error}), and at full size these have no memory: take --tiny, or "
                    "a function that makes the model, file.py:function"
                ) from error
    return show(report, **output)


def verify_command(name: str, *, sizes: dict[str, Any], device: str | None, options: dict[str, Any]) -> int:
    """Verify a target; the exit code: 1 where something is wrong. Raises TargetError, OptionError, VerificationError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise TargetError("verify runs the model, and there is no GPU here")
    with contextlib.redirect_stdout(sys.stderr):
        torch.manual_seed(0)
        target = _target(name, fake=False, device=device, usual=64, **{**sizes, "layers": sizes["layers"] or 2})
        if not isinstance(target.call, torch.nn.Module):
            raise TargetError(f"{name}() must return a module (torch.nn.Module) and its arguments, to be verified; it "
                              f"returned {target.call!r}")  # fmt: skip
        found = verify(target.call, *target.args, options=options, **target.kwargs)
    print(found)
    if found.nothing_replaced:
        print(f"fx_fusion: warning: {found.nothing_replaced}", file=sys.stderr)
    return 0 if found.ok else 1


def bench_command(
    name: str, *, sizes: dict[str, Any], device: str | None, steps: int, variant: str | None, command: Sequence[str],
    json: str | None,
) -> int:  # fmt: skip
    """Measure training steps of a target under each variant, in turns, and print the table; the exit code: 1 where
    fx_fusion has no numbers. ``variant``: train this one in this process. ``command``: this one, for the inner processes."""
    if device == "cuda" and not torch.cuda.is_available():
        raise TargetError("bench runs the model, and there is no GPU here")
    config = None if names_a_function(name) else config_of(name)[0]
    kind = None if config is None else config.model_type
    if variant is not None:
        if variant == "liger":
            benching.patch(kind)
        torch.manual_seed(0)
        usual = min(2048, getattr(config, "max_position_embeddings", 2048))
        given = {**sizes, "batch": sizes["batch"] or (1 if sizes["tiny"] else 4)}
        with contextlib.redirect_stdout(sys.stderr):
            target = _target(name, fake=False, device=device, usual=usual, **given)
        benching.train(target, variant, steps)
        return 0
    variants = [*benching.variants_here(kind), benching.AGAIN]
    title = ", ".join([name, *(key if value is True else f"{key} {value}" for key, value in sizes.items() if value)])
    found = benching.compare(command, variants, lambda said: print(f"fx_fusion: {said}", file=sys.stderr))
    if json is not None:
        text = benching.as_json(found, title)
        print(text) if json == "-" else Path(json).write_text(text)
    if json != "-":
        print(benching.shown(found, title))
    return int(any(one.failed for one in found if one.variant == "fx_fusion"))


def _target(
    name: str, *, fake: bool, device: str | None, usual: int | None, download: bool = False, **given: Any
) -> Target:  # fmt: skip
    """``usual``: tokens in a row where no ``length`` is given, of a model that is not tiny; None for what suits it."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    length = given["length"] or (16 if given["tiny"] else usual)
    mask = given.get("mask") or "none"
    sizes = Sizes(batch=given["batch"], length=length, layers=given["layers"], tiny=bool(given["tiny"]), mask=mask)
    dtype = getattr(torch, given["dtype"] or "bfloat16")
    target = target_of(name, sizes, device=device, dtype=dtype, fake=fake, download=download)
    model: Any = target.call
    if target.mode is not None and (count := sum(p.numel() for p in model.parameters())) > _LARGE:
        print(f"fx_fusion: {type(model).__name__}, {count / 1e9:.1f} billion parameters, without memory; --layers 2 is "
              "quicker, --tiny a small model", file=sys.stderr)  # fmt: skip
    return target


def run_command(
    script: str, arguments: Sequence[str], *, options: dict[str, Any], output: dict[str, Any], module: bool = False,
    compile: bool = False,
) -> int:  # fmt: skip
    """Run a script as it is, or a module, under fx_fusion where it compiles with Inductor; show the report when it ends,
    however it does, if anything was compiled. Of several processes of ``torchrun`` the first one shows it.

    Args:
        compile: whether the first model that is trained is compiled, for a script that compiles none.

    Returns the exit code: the script's, 1 where a requirement does not hold, 2 where nothing was compiled.
    """
    check_files(output, reads=script)
    check_fusions(output, before=script)
    where = Path(script).absolute()
    training = compiling_what_trains(options) if compile else contextlib.nullcontext()
    with recording() as report, compiling("fx_fusion", options), training:
        code = run_script(script, arguments, module=module)
    if os.environ.get("RANK", "0") != "0":
        return code
    if report.graphs:
        shown = show(report, **output)
        return code or shown
    if code:  # what it raised is printed, and there is nothing to add
        return code
    check_fusions(output)
    unwritten = " (no report is written)" * bool(output["html"] or output["json"])
    print(f"fx_fusion: {why_nothing(script, where, tried=compile)}{unwritten}", file=sys.stderr)
    return 1 if output["require"] else 2


def profile_command(script: str, arguments: Sequence[str], *, after: int, steps: int, trace: str | None) -> int:
    """Run a script under Inductor and then under fx_fusion, each in a process of its own, until enough steps are measured;
    print where their time goes. The exit code: of a script that fails, or 2 where it trains or compiles too little."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("inductor", "fx_fusion"):
            file = str(Path(folder) / backend)
            traced = [] if trace is None else ["--trace", f"{trace}_{backend}.json"]
            command = [sys.executable, "-m", "fx_fusion", "profile", "--backend", backend, "--result", file, *traced]
            command += ["--after", str(after), "--steps", str(steps), script, "--", *arguments]
            code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
            if code:
                return code
            found.append(read(file))
    print(side_by_side(found))
    if trace is not None:
        print(f"traces, for Perfetto: {trace}_inductor.json {trace}_fx_fusion.json")
    return 0 if found[-1].graphs else 2


def profile_one(
    script: str, arguments: Sequence[str], *, backend: str, after: int, steps: int, trace: str | None, result: str
) -> int:  # fmt: skip
    """Run a script under one backend and write what was measured; 2 where it ends before there was enough."""
    name_kernels_on_cpu()
    with recording() as report, compiling(backend, {}), Steps(backend, after, steps, trace) as measured:
        try:
            code = run_script(script, arguments)
        except Measured:
            measured.result.graphs = len(report.graphs)
            measured.result.fused = sum(site.status == "fused" for site in report.sites)
            measured.result.save(result)
            return 0
    print(f"fx_fusion: the script ended after {measured.made} step(s) of its optimizer; {measured.needed} are needed "
          f"(--after {after} and twice --steps {steps})", file=sys.stderr)  # fmt: skip
    return code or 2


def bisect_command(command: Sequence[str]) -> int:
    """Find the replacement with which a command starts to fail, by running it with fewer of them (``FX_FUSION_FUEL``). The
    exit code: 0 where it was found, 2 where the command does not fail, or fails without any."""

    errors = ""

    def run(fuel: int | None) -> tuple[bool, list[str]]:
        nonlocal errors
        environment = {name: value for name, value in os.environ.items() if name != "FX_FUSION_FUEL"}
        if fuel is not None:
            environment["FX_FUSION_FUEL"] = str(fuel)
        try:
            done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise ValueError(f"{command[0]!r} can't be run: {error.strerror}. Name a program and its arguments, as python "
                             "check.py") from error  # fmt: skip
        errors = done.stderr[-2000:]
        told = [line for line in done.stderr.splitlines() if line.startswith(LAST_REPLACEMENT)]
        fine = done.returncode == 0
        print(f"{'all' if fuel is None else fuel} replacements: {'right' if fine else 'wrong'}", file=sys.stderr)
        return fine, [line.removeprefix(LAST_REPLACEMENT) for line in told]

    if run(None)[0]:
        print("fx_fusion: the command does not fail (its exit code is 0)", file=sys.stderr)
        return 2
    if not run(0)[0]:
        print(f"{errors}\nfx_fusion: the command fails without any replacement too: it is not fx_fusion's", file=sys.stderr)
        return 2
    right, wrong = 0, 1
    while (found := run(wrong))[0]:
        right, wrong = wrong, 2 * wrong
        if not found[1]:  # there are no more than that
            print(f"fx_fusion: the command is right with {right}, and there are no more; it does not always fail, or not by "
                  "a replacement", file=sys.stderr)  # fmt: skip
            return 2
    told = found[1]
    while wrong - right > 1:
        middle = (right + wrong) // 2
        fine, names = run(middle)
        right, wrong, told = (middle, wrong, told) if fine else (right, middle, names)
    print("\n".join(told) or f"replacement {wrong} of a graph")
    return 0


def replay_command(file: str) -> int:
    """Compare the site that a file holds with float64, here and now; 1 if it is wrong."""
    none = f"{file!r} is no site that was found wrong: it must be the file that an error of verify= names"
    if not _saved_by_torch(file):
        raise ValueError(none if Path(file).is_file() else f"there is no file {file!r}")
    try:
        check, rows = replayed(file)
    except NotComparable as error:
        raise ValueError(f"{file!r} can't be compared here: {error}") from error
    except (OSError, pickle.UnpicklingError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(f"{none}; {type(error).__name__}: {error}") from error
    print(f"{check.place}\n{table(rows)}")
    return 0 if rows[0].ok else 1


def _saved_by_torch(file: str) -> bool:
    return zipfile.is_zipfile(file) and any(name.endswith("/data.pkl") for name in zipfile.ZipFile(file).namelist())


def report_command(file: str, *, output: dict[str, Any]) -> int:
    """Show a report that was written as JSON, here or on another machine; 2 where it is none."""
    check_files(output, reads=file)
    check_fusions(output)
    try:
        report = Report.from_json(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"fx_fusion: {file!r} can't be read as a report, as --json writes it: {error}", file=sys.stderr)
        return 2
    return show(report, **output)
