"""Every class of the installed transformers, a process each: ``python -m tests.coverage.run [--kind causal] [--out FILE]``.

Resumable: classes that the output file already has are left out. Prints a table and the totals.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import resource
from importlib.util import find_spec
from pathlib import Path

from rich.progress import Progress
from tabulate import tabulate

SECONDS, GIB = 120, 12


def classes(kind: str) -> list[str]:
    if kind in ("timm", "diffusers"):
        from tests.coverage import others

        return list({"timm": others.TIMM, "diffusers": others.DIFFUSERS}[kind]) if find_spec(kind) else []
    from transformers.models.auto import modeling_auto as auto

    mappings = {
        "causal": ("CAUSAL_LM",), "masked": ("MASKED_LM",), "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
        "image": ("IMAGE_CLASSIFICATION",), "speech": ("CTC", "SPEECH_SEQ_2_SEQ", "AUDIO_CLASSIFICATION"),
    }[kind]  # fmt: skip
    found = [name for m in mappings for name in getattr(auto, f"MODEL_FOR_{m}_MAPPING_NAMES").values()]
    flat = (n for name in found for n in ((name,) if isinstance(name, str) else name))
    return sorted(dict.fromkeys(flat))


def _child(name: str, kind: str, dtype: str, pipe: multiprocessing.connection.Connection) -> None:
    import torch

    from tests.coverage.measure import measure

    resource.setrlimit(resource.RLIMIT_AS, (GIB << 30, GIB << 30))
    torch.set_num_threads(1)
    pipe.send(measure(name, kind, getattr(torch, dtype)))


def one(name: str, kind: str, dtype: str) -> dict:
    """The row of a class; a process that dies or hangs is a row too."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=_child, args=(name, kind, dtype, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        row = mine.recv() if mine.poll(SECONDS) else {"status": "timeout", "error": f"no result after {SECONDS} s"}
    except EOFError:
        row = {"status": "died", "error": f"exit code {child.exitcode}"}
    child.kill()
    child.join()
    return {"class": name, "kind": kind, "dtype": dtype, **row}


def slim(row: dict) -> dict:
    """Return what is written of a row: no zeros, three digits of the worst error."""
    written = dict(row)
    if "kinds" in row:
        written["kinds"] = {kind: {name: n for name, n in found.items() if n} for kind, found in row["kinds"].items()}
    if "worst" in row:
        written["worst"] = [float(f"{row['worst'][0]:.3g}"), row["worst"][1]]
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", default="causal,masked,seq2seq,image,speech,timm,diffusers")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th class, to run several at once")
    parser.add_argument("--out", default="coverage.jsonl")
    given = parser.parse_args()
    import torch  # noqa: F401  before the fork: children start at once
    import transformers  # noqa: F401

    import fx_fusion.testing  # noqa: F401

    out = Path(given.out)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(r["class"], r["kind"], r["dtype"]) for r in rows}
    at, of = map(int, given.part.split("/"))
    work = [(name, kind) for kind in given.kind.split(",") for name in classes(kind)][at::of]
    work = [w for w in work if (*w, given.dtype) not in known and (not given.only or w[0] in given.only)]
    with Progress() as progress, out.open("a") as file:
        for name, kind in progress.track(work, description="models"):
            rows.append(slim(one(name, kind, given.dtype)))
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    print(tabulate(collections.Counter((r["kind"], r["status"]) for r in rows).items(), headers=("kind, status", "classes")))
    for row in rows:
        missing = {kind: n["missing"] for kind, n in row.get("kinds", {}).items() if n.get("missing")}
        if row["status"] not in ("ok", "not built"):
            print(row["class"], row["status"], row.get("error", row.get("worst")))
        elif missing:
            print(row["class"], "misses", missing)


if __name__ == "__main__":
    main()
