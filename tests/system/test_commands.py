"""``python -m fx_fusion``: commands as a user types them, what they print, and their exit codes."""

import contextlib
import json
import os
import re
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch

from fx_fusion.__main__ import main
from fx_fusion.demo import ON_CPU, ON_GPU, configuration
from tests.helpers import a_little_more, sabotaged

SCRIPT = '''
import sys
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return self.up(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight).square().mean()


def make():
    return Model(), torch.randn(4, 32)


def nothing():
    return None


if __name__ == "__main__":
    step = torch.compile(Model(), mode="default")
    step(torch.randn(4, 32)).backward()
    print("trained with", sys.argv[1:])
    sys.exit(3 if "--fail" in sys.argv else 0)
'''


def run(*arguments, code=0):
    found = subprocess.run([sys.executable, "-m", "fx_fusion", *arguments], capture_output=True, text=True, check=False)
    assert found.returncode == code, found.stderr
    return found


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_help_needs_no_torch():
    """Nobody waits for an import to read the help."""
    code = "import sys; sys.argv = ['fx_fusion', '--help']; import fx_fusion.__main__ as m\ntry: m.main()\nfinally: assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "examples:" in found.stdout
    assert run("--version").stdout.startswith("fx_fusion 0.")


@contextlib.contextmanager
def streams(monkeypatch, writer):
    """Stdout goes to a file descriptor; stderr is a copy, because a command may send it to nowhere."""
    with open(writer, "w") as stdout, open(os.dup(2), "w") as stderr, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        patched.setattr(sys, "stderr", stderr)
        yield


@pytest.mark.parametrize("command", ["doctor", "doctor --json", "new-fusion my_op --into .", "report r.json", "run prints.py"])
def test_command_without_reader_ends_quietly(command, monkeypatch, tmp_path, capfd):
    from fx_fusion.report.report import Report

    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text(Report().to_json())
    (tmp_path / "prints.py").write_text("for _ in range(10_000): print('a line')\n")
    monkeypatch.setattr(sys, "argv", ["fx_fusion", *command.split()])
    reader, writer = os.pipe()
    os.close(reader)
    with streams(monkeypatch, writer):
        assert main() == 141
    assert "Traceback" not in capfd.readouterr().err


def test_help_without_reader_ends_quietly():
    """Argparse ends the program, and Python flushes its output."""
    with subprocess.Popen(
        [sys.executable, "-m", "fx_fusion", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    ) as command:
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 141


def test_broken_pipe_of_a_script_is_an_error(tmp_path, monkeypatch, capfd):
    """The output has a reader: the pipe is another one."""
    (tmp_path / "raises.py").write_text("raise BrokenPipeError('of a worker')\n")
    monkeypatch.setattr(sys, "argv", ["fx_fusion", "run", str(tmp_path / "raises.py")])
    with streams(monkeypatch, os.dup(1)):
        assert main() == 1
    assert "BrokenPipeError: of a worker" in capfd.readouterr().err


def test_a_type_of_transformers(tmp_path):
    """Llama 7B's width in seconds and without its memory."""
    page, facts = tmp_path / "page.html", tmp_path / "facts.json"
    found = run("explain", "llama", "--layers", "2", "--select", "always", "--require", "rope=2", "--html", str(page), "--json", str(facts))
    assert "linear_cross_entropy" in found.stdout
    assert "fused" in page.read_text()
    shapes = [site["shapes"] for site in json.loads(facts.read_text())["sites"] if site["fusion"] == "rms_norm"]
    assert shapes[0]["x"] == "bfloat16[4, 2048, 4096]"


@pytest.mark.slow
def test_a_report_of_another_machine(script, tmp_path):
    facts, page = tmp_path / "facts.json", tmp_path / "page.html"
    said = run("explain", f"{script}:make", "--select", "always", "--json", str(facts)).stdout
    assert run("report", str(facts), "--html", str(page), "--require", "rms_norm=1").stdout == said
    assert "rms_norm" in page.read_text()
    (tmp_path / "none.json").write_text("{}")
    assert "no report of schema 1" in run("report", str(tmp_path / "none.json"), code=2).stderr
    assert "can't be read" in run("report", str(tmp_path / "nowhere.json"), code=2).stderr


@pytest.mark.slow
def test_a_config_of_ones_own(tmp_path):
    config = {
        "model_type": "gpt2", "n_embd": 48, "n_layer": 5, "n_head": 4, "vocab_size": 97, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = run("explain", str(tmp_path), "--select", "always", "--layers", "3", "--fusion", "layer_norm").stdout
    assert "h.0.ln_1" in said
    assert "near" not in said  # of another fusion
    assert "h.4" not in run("explain", str(tmp_path), "--select", "always", "--layers", "3").stdout
    assert "h.{1-4}" in run("explain", str(tmp_path), "--select", "always").stdout.replace("\n", "")  # all of them


def test_a_function_of_ones_own(script):
    assert "fused: rms_norm" in run("explain", f"{script}:make", "--select", "always", "--why", "train.py:14").stdout
    assert "+rms_norm" in run("explain", f"{script}:make", "--select", "always", "--diff").stdout.replace(" ", "")


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("lama", "Did you mean 'llama'"),
        ("{script}:mak", "has no function 'mak'"),
        ("{script}:nothing", "must return a model and its arguments"),
        ("no.such.module:make", "can't be imported"),
    ],
)
def test_targets_that_are_none(script, target, sentence):
    found = run("explain", target.format(script=script), code=2)
    assert sentence in found.stderr
    assert "Traceback" not in found.stderr


# What is typed ({there} is a folder with the files of ``inputs``), and what is said: what must hold, what was found, what to do.
WRONG = {
    "explain llama --tiny --html {there}/no/r.html": "there is no folder '{there}/no'",
    "explain llama --tiny --json {there}/no/r.json": "there is no folder '{there}/no'",
    "explain llama --tiny --html {there}": "is a folder",
    "run {there}/train.py --html {there}/train.py": "must be a file for the report; '{there}/train.py' is a program",
    "explain {there}/train.py:make --json {there}/other.py": "'{there}/other.py' is a program: name a .html or .json",
    "run {there}/link --html {there}/train.txt": "--html must be another file than the one that is read; '{there}/train.txt' is",
    "explain {there}/model --json {there}/model/config.json": "--json must be another file than the one that is read",
    "explain {there}/model/config.json --html {there}/model/../model/config.json": "--html must be another file than the one that is read",
    "report {there}/report.json --json {there}/report.json": "--json must be another file than the one that is read",
    "report {there}/report.json --json {there}/r --html {there}/r": "--html and --json must be two files; both are '{there}/r'",
    "report {there}/report.json --html {there}/no/r.html": "there is no folder",
    "run {there}/train.py --json {there}/no/r.json": "there is no folder",
    "profile {there}/train.py --trace {there}/no/trace": "there is no folder",
    "replay {there}/empty.pt": "'{there}/empty.pt' is no site that was found wrong: it must be the file that an error of verify= names",
    "replay {there}/cut.pt": "is no site that was found wrong",
    "replay {there}/zip.pt": "is no site that was found wrong",
    "replay {there}/weights.pt": "is no site that was found wrong",
    "replay {there}/nowhere.pt": "there is no file '{there}/nowhere.pt'",
    "bisect nosuchprogram": "'nosuchprogram' can't be run: No such file or directory. Name a program and its arguments, as python check.py",
    "bisect {there}/train.py": "can't be run: Permission denied",
    "explain llama --batch 0": "--batch: must be a whole number, 1 or more; got '0'",
    "explain llama --layers 0": "--layers: must be a whole number",
    "explain llama --length -3": "--length: must be a whole number, 1 or more; got '-3'",
    "verify llama --length many": "--length: must be a whole number, 1 or more; got 'many'",
    "profile {there}/train.py --steps 0": "--steps: must be a whole number",
    "profile {there}/train.py --after 0": "--after: must be a whole number",
    "demo --steps 0": "--steps: must be a whole number",
    "demo --device cpu --hidden 100": "--hidden: must be a multiple of 64; got 100",
    "explain llama --require rope=x": "--require: must be FUSION or FUSION=N with a whole number N; got 'rope=x'",
    "explain llama --require rope=": "--require: must be FUSION or FUSION=N",
    "explain llama --require rope=-1": "--require: must be FUSION or FUSION=N",
    "explain llama --require rop=2": "no fusion is called 'rop'. Did you mean 'rope'?",
    "explain llama --fusion rms_nrom": "no fusion is called 'rms_nrom'. Did you mean 'rms_norm'?",
    "explain {there}/train.py --fusion rop": "Did you mean 'rope'?",
    "explain {there}/train.py:make --require rop": "Did you mean 'rope'?",
    "run {there}/train.py --require rop": "One of your own: register it in {there}/train.py",
    "report {there}/report.json --fusion rop": "Did you mean 'rope'?",
    "explain ": "target: must name a model: llama, a folder with config.json, train.py:make; got ''",
    "verify nothing.py": "'nothing.py' is a script that does not exist: name a function of a script",
    "verify {there}/train.py": "'{there}/train.py' is a script: name a function of a script, which returns a model and its arguments",
    "explain nothing.py": "there is no script 'nothing.py'",
    "explain meta-llama/Llama-3.2-1B": "its config is not in the local cache; --download fetches it: name a type of model, as llama, or a local folder",
    "verify {there}/no/config.json": "there is no file or folder '{there}/no/config.json'",
    "report {there}/cut.json": "'{there}/cut.json' can't be read as a report, as --json writes it: ",
    "report {there}/weights.pt": "can't be read as a report",
    "report {there}/damaged.json": "the document is damaged (KeyError: 'environment'): write it anew",
    "report {there}/numbers.json": "the document is damaged (AttributeError: ",
    "explain llama --why ": "--why: must be a module or a line, as layers.0.norm or model.py:12; got ''",
    "explain llama --color red": "unrecognized arguments: --color red",
    "explain": "required: target",
}


def test_the_sizes_of_the_demo():
    """What was not asked for stays; of another width the heads have the same size, and as many of them share keys."""
    for device, usual in (("cpu", ON_CPU), ("cuda", ON_GPU)):
        assert {**configuration(device), **usual} == configuration(device)
        wide = configuration(device, layers=5, hidden=2 * usual["hidden_size"])
        assert wide["num_hidden_layers"] == 5
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
            assert wide[name] == 2 * usual[name], name
        assert wide["head_dim"] == usual["hidden_size"] // usual["num_attention_heads"]


@pytest.mark.slow
def test_a_small_demo():
    """Its processes get the options, and what it prints says so."""
    pytest.importorskip("transformers")
    said = run("demo", "--layers", "1", "--hidden", "64", "--steps", "2", "--device", "cpu").stdout
    assert "4 x 1024 tokens, 1 layer, width 64, vocabulary 32000, cpu, forward + backward + AdamW" in said
    assert "2/2" in said
    assert re.search(r"^fused +linear_cross_entropy +1 ", said, re.M)
    assert said.endswith("losses agree\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_demo_on_a_gpu_that_is_not_there():
    assert run("demo", "--device", "cuda", code=2).stderr == "fx_fusion: --device: torch finds no GPU here; leave it out, or take cpu\n"


def test_a_config_that_can_not_be_made_smaller(monkeypatch, capsys):
    """Some say that their numbers of layers must fit each other."""
    pytest.importorskip("transformers")

    def shrunk_from(config):
        raise KeyError("layer_types")

    monkeypatch.setattr("fx_fusion.transformers_models.shrunk_from", shrunk_from)
    assert typed(monkeypatch, "explain", "llama", "--tiny") == 2
    said = "fx_fusion: LlamaForCausalLM's config can't be made smaller (--tiny): KeyError: 'layer_types'\n"
    assert capsys.readouterr().err == said


def test_a_field_that_a_config_derives():
    """Bamba's kinds of layers are a property without a setter in new versions of transformers."""
    transformers = pytest.importorskip("transformers")
    from fx_fusion.tiny_configs import shrunk_from

    assert shrunk_from(transformers.BambaConfig()).num_hidden_layers <= 4


DAMAGED = {
    "cut.json": b'{"schema": 4, "sites": [', "damaged.json": b'{"schema": 4, "sites": [], "graphs": []}',
    "numbers.json": b'{"schema": 4, "sites": [1], "graphs": [], "environment": {}}',
}  # fmt: skip


@pytest.fixture
def inputs(script, tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    whole = (tmp_path / "weights.pt").read_bytes()
    for name, content in {"empty.pt": b"", "cut.pt": whole[: len(whole) // 2], "report.json": b"{}", **DAMAGED}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "train.txt").write_text(SCRIPT)
    (tmp_path / "link").symlink_to(tmp_path / "train.txt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as file:
        file.writestr("a.txt", "a")
    return tmp_path


def typed(monkeypatch, *arguments):
    """The exit code of a command, in this process."""
    monkeypatch.setattr(sys, "argv", ["fx_fusion", *arguments])
    try:
        return main()
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line(line, inputs, monkeypatch, capsys):
    """On stderr, with exit code 2, before a model is captured or a script runs."""

    def works(*given, **named):
        raise AssertionError("it began to work")

    finds = ("train.py:make", "verify", "Llama-3")  # what makes the model may register fusions; what there is, is looked up
    for work in ("_target", "run_script", "profile_one", "profile_command"):
        if not (work == "_target" and any(word in line for word in finds)) and not (work == "run_script" and "nothing.py" in line):
            monkeypatch.setattr(f"fx_fusion.commands.{work}", works)
    monkeypatch.setattr("fx_fusion.commands.explain", works)
    code = typed(monkeypatch, *line.format(there=inputs).split(" "))
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("fx_fusion: ")
    assert WRONG[line].format(there=inputs) in said.err


@pytest.mark.parametrize(
    ("text", "frames", "sentence"),
    [
        ("def make():\n    return inner()\n\ndef inner():\n    raise ValueError('no data')\n", 2, "ValueError: no data"),
        ("def make(:\n    pass\n", 1, "SyntaxError: "),
        ("import no_such_module\n", 1, "No module named 'no_such_module'"),
    ],
)
def test_a_target_that_raises(text, frames, sentence, tmp_path, monkeypatch, capsys):
    """As a script that does: the frames that are the user's, what was raised, exit code 1; and a line that says whose it is."""
    file = tmp_path / "boom.py"
    file.write_text(text)
    for command, target in (("explain", f"{file}:make"), ("verify", f"{file}:make"), ("run", str(file))):
        if command == "run" and "def make():" in text:
            file.write_text(f"{text}\nmake()\n")
            frames += 1
        assert typed(monkeypatch, command, target) == 1
        err = capsys.readouterr().err
        assert sentence in err
        assert err.count('File "') == err.count(str(file)) - (command != "run") == frames, err
        if command != "run":
            assert err.splitlines()[-1].startswith(f"fx_fusion: '{file}:make' failed by its own error, above: ")


def test_a_target_that_exits(tmp_path, monkeypatch, capsys):
    file = tmp_path / "leaves.py"
    file.write_text("import sys\nsys.exit(0)\n")
    assert typed(monkeypatch, "explain", f"{file}:make") == 2
    assert 'keep its own work behind if __name__ == "__main__"' in capsys.readouterr().err


def test_a_fusion_that_a_script_registers(tmp_path, monkeypatch, capsys):
    """It is not known before the script runs."""
    file = tmp_path / "mine.py"
    file.write_text("from fx_fusion import register  # (MINE)\nprint('it ran')\n")
    assert typed(monkeypatch, "run", str(file), "--require", "mine") == 2
    said = capsys.readouterr()
    assert "it ran" in said.out
    assert "no fusion is called 'mine'" in said.err


def test_json_on_stdout_is_all_there_is(script, monkeypatch, capsys):
    """For a pipe."""
    assert typed(monkeypatch, "explain", f"{script}:make", "--select", "always", "--json", "-", "--require", "rms_norm=1") == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"fused/rms_norm": 1}


@pytest.mark.slow
def test_what_is_required(script):
    assert "rope: 0 fused, 1 required" in run("explain", f"{script}:make", "--require", "rope=1", code=1).stderr
    assert "no fusion is called 'rop'" in run("explain", f"{script}:make", "--require", "rop=1", code=2).stderr
    run("explain", f"{script}:make", "--select", "always", "--require", "rms_norm")


def test_verify_where_nothing_is_replaced(script, tmp_path, monkeypatch, capsys):
    """A warning on stderr, with what to do; a function can't be verified, and that is one line."""
    assert typed(monkeypatch, "verify", f"{script}:make", "--select", "never") == 0
    said = capsys.readouterr()
    assert "fx_fusion: warning: nothing was replaced: 1 site kept with Inductor; options=" in said.err
    assert "0 sites fused: all right" in said.out
    other = tmp_path / "other.py"
    other.write_text("import torch\ndef function():\n    return torch.tanh, torch.randn(2)\n")
    assert typed(monkeypatch, "verify", f"{other}:function") == 2
    said = capsys.readouterr().err
    assert "must return a module (torch.nn.Module) and its arguments" in said
    assert said.count("\n") == 1


def test_verify_of_a_wrong_replacement_fails(script, monkeypatch, capsys):
    with sabotaged(monkeypatch, "rms_norm", 1, a_little_more):
        assert typed(monkeypatch, "verify", f"{script}:make", "--select", "always") == 1
    assert "WRONG" in capsys.readouterr().out


def test_verify(script):
    assert "2 sites" not in (said := run("verify", f"{script}:make", "--select", "always").stdout)
    assert "1 site fused: all right" in said
    assert "has no function" in run("verify", f"{script}:mak", code=2).stderr


@pytest.mark.slow
def test_a_script_as_it_is(script, tmp_path):
    page = tmp_path / "page.html"
    found = run("run", script, "--html", str(page), "--select", "always", "--require", "rms_norm=1", "--epochs", "2")
    assert "trained with ['--epochs', '2']" in found.stdout
    assert "rms_norm" in page.read_text()
    own = run("run", script, "--sel", "x", "--", "--html", "y")  # no option of ours is cut short, and none stands behind --
    assert "trained with ['--sel', 'x', '--html', 'y']" in own.stdout
    assert "there is no script" in run("run", "nowhere.py", code=2).stderr


def test_a_script_that_changes_where_it_is(tmp_path, monkeypatch, capsys):
    """As hydra does; and one that tidies up sys.path."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper_of_a_script.py").write_text("word = 'helped'\n")
    file = tmp_path / "scripts" / "train.py"
    file.write_text("import os, sys\nos.chdir('/')\nimport helper_of_a_script as h\nprint(h.word, __file__)\nsys.path.pop(0)\n")
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "run", "scripts/train.py") == 2
    said = capsys.readouterr()
    assert said.out == f"helped {file}\n"
    assert "fx_fusion: nothing was compiled" in said.err


@pytest.mark.parametrize("head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe9\n"], ids=["mark", "latin-1"])
def test_a_script_in_another_encoding(head, tmp_path, monkeypatch, capsys):
    file = tmp_path / "train.py"
    file.write_bytes(head + b"print('it ran')\n")
    assert typed(monkeypatch, "run", str(file)) == 2
    assert "fx_fusion: nothing was compiled" in capsys.readouterr().err


def test_a_question_that_is_none_costs_no_report(script, tmp_path, monkeypatch, capsys):
    page, document = tmp_path / "r.html", tmp_path / "r.json"
    assert typed(monkeypatch, "run", script, "--html", str(page), "--json", str(document), "--why", "no such module") == 2
    assert page.exists()
    assert json.loads(document.read_text())["graphs"]


@pytest.mark.parametrize(
    ("end", "code", "sentence"),
    [
        ("raise ValueError('it broke')", 1, "ValueError: it broke"),
        *(
            pytest.param(*end, marks=pytest.mark.slow)
            for end in [
                ("sys.exit(3)", 3, ""),
                ("sys.exit('no data')", 1, "no data"),
                ("sys.exit()", 0, ""),
                ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
            ]
        ),
    ],
)
def test_a_report_of_a_script_however_it_ends(script, tmp_path, end, code, sentence):
    text = SCRIPT.replace('sys.exit(3 if "--fail" in sys.argv else 0)', end)
    assert end in text
    (tmp_path / "train.py").write_text(text)
    page = tmp_path / "page.html"
    found = run("run", script, "--html", str(page), "--select", "always", code=code)
    assert "rms_norm" in page.read_text()
    assert "fused" in found.stdout
    assert sentence in found.stderr
    assert "runpy" not in found.stderr, "the frames are the script's"
    assert "fx_fusion: it broke" not in found.stderr, "it is no error of ours"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("print('it ran')\n", "model.compile(), in this process; or give --compile\n"),
        ("def make(size=1):\n    pass\n\ndef _own():\n    pass\n\ndef step(x):\n    pass\n", "python -m fx_fusion explain {file}:make\n"),
        ("def make():\n    pass\n\ndef main():\n    pass\n", "explain {file}:FUNCTION (make, main)\n"),
    ],
)
def test_a_script_that_compiles_nothing(text, sentence, tmp_path, monkeypatch, capsys):
    """Nobody has to reset Dynamo: the script has to compile."""
    file, page = tmp_path / "plain.py", tmp_path / "r.html"
    file.write_text(text)
    for command in ("run", "explain"):
        assert typed(monkeypatch, command, str(file)) == 2
        said = capsys.readouterr()
        assert "fx_fusion: nothing was compiled: the script has to call torch.compile, or model.compile()" in said.err
        assert said.err.endswith(sentence.format(file=file))
        assert "reset" not in said.out + said.err
    assert typed(monkeypatch, "run", str(file), "--html", str(page), "--require", "rope") == 1
    assert capsys.readouterr().err.endswith(" (no report is written)\n")
    assert not page.exists()


PLAIN = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 1))
optimizer, loss_of = torch.optim.SGD(model.parameters(), 0.1), torch.nn.MSELoss()
for step in range(3):
    with torch.no_grad():
        model(torch.randn(1, 8))  # as generate() does
    loss = loss_of(model(torch.randn(4, 8)), torch.zeros(4, 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.6f} {sys.argv[1:]} {__name__}")
"""


def test_a_script_that_compiles_nothing_is_compiled(tmp_path, monkeypatch, capsys):
    """The first model that it trains, for the calls that train it: the loss's own module has no parameters."""
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "run", "plain.py") == 2
    eager = capsys.readouterr()
    assert eager.err.endswith("; or give --compile\n")
    call = torch.nn.Module.__call__
    assert typed(monkeypatch, "run", "--compile", "--select", "always", "--require", "rms_norm=1", "plain.py") == 0
    compiled = capsys.readouterr()
    assert compiled.out.splitlines()[0] == eager.out.splitlines()[0]
    assert "1 graph," in compiled.out
    assert torch.nn.Module.__call__ is call


def test_a_script_that_compiles_a_function_is_left_to_do_so(tmp_path, monkeypatch, capsys):
    """With one graph around the model, as without the option."""
    whole = "step = torch.compile(lambda x: model(x).square().mean(), fullgraph=True)\n"
    text = PLAIN[: PLAIN.index("for step")] + whole + "for _ in range(2):\n    step(torch.randn(4, 8)).backward()\n"
    (tmp_path / "own.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert typed(monkeypatch, "run", "--compile", "--select", "always", "own.py") == 0
    assert "1 graph," in capsys.readouterr().out


def test_a_module_is_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "trainer_of_mine").mkdir()
    (tmp_path / "trainer_of_mine" / "__init__.py").write_text("")
    (tmp_path / "trainer_of_mine" / "train.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    given = ("run", "--compile", "--select", "always", "-m", "trainer_of_mine.train", "config.yml", "--epochs", "1")
    assert typed(monkeypatch, *given) == 0
    said = capsys.readouterr().out
    assert "['config.yml', '--epochs', '1'] __main__" in said
    assert "fused" in said
    assert typed(monkeypatch, "run", "-m", "trainer_of_mine.nothing") == 2
    assert "there is no module 'trainer_of_mine.nothing'" in capsys.readouterr().err
    assert typed(monkeypatch, "run", "trainer_of_mine.train") == 2
    assert "there is no script 'trainer_of_mine.train'; -m runs a module" in capsys.readouterr().err


def test_the_first_of_several_processes_reports(tmp_path, monkeypatch, capsys):
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert typed(monkeypatch, "run", "--compile", "--html", "r.html", "plain.py") == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


def test_no_command_is_help(monkeypatch, capsys):
    assert typed(monkeypatch) == 0
    assert "explain llama" in capsys.readouterr().out


def test_a_script_that_raises_before_any_graph(tmp_path, monkeypatch, capsys):
    file, page = tmp_path / "boom.py", tmp_path / "r.html"
    file.write_text("raise ValueError('no data')\n")
    assert typed(monkeypatch, "run", str(file), "--html", str(page)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("ValueError: no data\n")
    assert "fx_fusion" not in said.err
    assert not page.exists()


@pytest.mark.parametrize("options", ["options={'slect': 'always'}", "backend='fx_fusion', options={'max_autotune': 'yes'}"])
def test_options_of_a_script_that_are_none(options, tmp_path, monkeypatch, capsys):
    """One line, with the place in the script, and no frame of torch."""
    file = tmp_path / "train.py"
    file.write_text(f"import torch\nmodel = torch.compile(torch.nn.Linear(2, 2), {options})\nmodel(torch.ones(1, 2))\n")
    assert typed(monkeypatch, "run", str(file)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith(f"fx_fusion: {file}:3: ")
    assert "Did you mean 'select'" in said.err or "Unexpected type of attr max_autotune" in said.err


CHECK = """
import sys
import torch
from torch import nn
import fx_fusion
from fx_fusion.testing import rewriting_backend

model = nn.Sequential(*(nn.RMSNorm(8) if i % 2 else nn.Linear(8, 8) for i in range(10)))
with fx_fusion.recording() as report:
    torch.compile(model, backend=rewriting_backend())(torch.randn(4, 8))
fused = [site.module for site in report.sites if site.status == "fused"]
sys.exit({})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "code", "sentence"),
    [
        ("'7' in fused", 0, "rms_norm in 7 ("),
        ("'it breaks'", 2, "fails without any replacement too"),
        ("0", 2, "does not fail"),
    ],
)
def test_bisect(tmp_path, fails, code, sentence):
    check = tmp_path / "check.py"
    check.write_text(CHECK.format(fails))
    found = run("bisect", sys.executable, str(check), code=code)
    assert sentence in found.stdout + found.stderr
    assert ("it breaks" in found.stderr) == (fails == "'it breaks'")  # what the command itself said


def test_doctor(monkeypatch, tmp_path, capsys):
    """Each fact by itself, for people and for programs."""
    from fx_fusion import doctor

    monkeypatch.setenv("FX_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor.main(as_json=True) == 0
    facts = {fact["about"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert facts["backend"]["good"]
    assert torch.__version__ in facts["versions"]["says"]
    assert str(tmp_path) in facts["measurements"]["says"]
    assert (tmp_path / "cache").exists()
    assert "FX_FUSION_CACHE_DIR=" in facts["environment"]["says"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FX_FUSION_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: None)
    assert doctor.main() == (0 if torch.cuda.is_available() else 1), "nothing can be compiled for"
    said = capsys.readouterr().out
    assert "can't be written to" in said
    assert "missing, install g++" in said


def test_doctor_names_a_package_that_is_not_installed(monkeypatch):
    from fx_fusion import doctor

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **given: ())
    fact = next(fact for fact in doctor.facts() if fact.about == "backend")
    assert not fact.good
    assert "the package is not installed: torch finds the backend only after `import fx_fusion`" in fact.says


def test_doctor_of_a_mistake_in_the_environment(monkeypatch, capsys):
    """Each compilation would raise, or do something else than was asked for."""
    from fx_fusion import doctor

    monkeypatch.setattr("fx_fusion.options._warned", set())
    monkeypatch.setenv("FX_FUSION_FUZIONS", "-rope")
    monkeypatch.setenv("FX_FUSION_MEMORY", "mni")
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "no  the variable FX_FUSION_FUZIONS is read by nobody. Did you mean 'FX_FUSION_FUSIONS'?" in said
    assert "no  FX_FUSION_MEMORY = 'mni'. Did you mean 'min'?" in said
    monkeypatch.delenv("FX_FUSION_FUZIONS")
    monkeypatch.delenv("FX_FUSION_MEMORY")
    doctor.main()
    assert "no  " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "says"),
    [("echo 580.65.06; echo 580.65.06", ", driver 580.65.06"), ("exit 9", ""), ("true", "")],
    ids=["two GPUs", "it fails", "it says nothing"],
)
def test_the_driver_is_nvidia_smis_to_say(script, says, monkeypatch, tmp_path):
    from fx_fusion import doctor

    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver() == "", "there is no nvidia-smi"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert doctor.driver() == says


def test_doctor_of_a_gpu(monkeypatch):
    """Which table decides, or that none does."""
    from fx_fusion import doctor

    def seen(name):
        properties = SimpleNamespace(name=name, total_memory=141 << 30, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(doctor, "triton_compiles", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return {fact.about: fact for fact in doctor._gpu()}

    monkeypatch.setattr(doctor.table, "bytes_per_second", lambda device: 4e12)
    known, unknown = seen("NVIDIA H200"), seen("Another GPU")
    assert "141 GiB, compute capability 9.0" in known["GPU"].says
    assert "2 of them" in known["GPU"].says
    assert known["table"].good
    assert not unknown["table"].good
    assert "of an NVIDIA H200: this GPU was not measured" in unknown["table"].says
    assert 'options={"select": "measure"}' in unknown["table"].says


def test_every_option_has_a_help_text():
    from fx_fusion.__main__ import _parser

    commands = next(action.choices for action in _parser()._actions if action.dest == "command")
    silent = [f"{name} {action.dest}" for name, parser in commands.items() for action in parser._actions if not action.help]
    assert not silent


@pytest.mark.parametrize("kind", ["llama4", "emu3", "musicgen"])
def test_types_that_read_images_and_sounds_too(kind):
    """Their causal models take the part of the config that is about text."""
    pytest.importorskip("transformers")
    from fx_fusion.transformers_models import config_of

    config, made_by = config_of(kind)
    assert isinstance(config, made_by.config_class)
