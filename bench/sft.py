"""A step of TRL's trainers and of transformers' Trainer, the ways in which people fine-tune with them.

    python -m bench.sft
    python -m bench.sft trl-inductor trl-fx_fusion dpo-inductor dpo-fx_fusion --together 4
    python -m bench.sft --tiny                    whether all of them run, on a CPU; no figures

Llama of the 1B shape with 8 layers, 4 rows of 2048 tokens, bfloat16, fused AdamW, no gradient checkpointing. Each way in a
process of its own: the median time of a step as the trainer makes it, its own work included, and peak memory. ``--together``
of them compile side by side and measure one after the other.

    trl-eager, trl-inductor, trl-fx_fusion    SFTTrainer: TRL's own head, in chunks; under fx_fusion a part of the graph
    trl-prompts-inductor, -fx_fusion          SFTTrainer, of rows whose first three quarters are prompts without labels
    trl-liger                                 the same with use_liger_kernel=True, whose kernels replace the layers' modules
    dpo-eager, dpo-inductor, dpo-fx_fusion    DPOTrainer with a reference model: 2 pairs of 2048 tokens
    grpo-eager, grpo-inductor, grpo-fx_fusion GRPOTrainer: 4 completions of 256 tokens of one prompt of 1792; a batch is
                                              generated every eighth step, so the median is a step of training
    trainer-inductor, trainer-fx_fusion       Trainer: head and loss in the graph of the model
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

from tabulate import tabulate

from bench.parallel_models import FULL, TINY, Sizes, llama
from bench.process import Row, environment, give, in_turns, wait_for_turn

WAYS = (
    "trl-eager", "trl-inductor", "trl-fx_fusion", "trl-liger", "trl-prompts-inductor", "trl-prompts-fx_fusion", "dpo-eager",
    "dpo-inductor", "dpo-fx_fusion", "grpo-eager", "grpo-inductor", "grpo-fx_fusion", "trainer-inductor",
    "trainer-fx_fusion",
)  # fmt: skip
COMPILED, WARM, TIMED = 3, 6, 20  # steps


def _arguments(way: str, sizes: Sizes) -> dict[str, Any]:
    backend = way.rpartition("-")[2]
    compiled = {} if backend in ("eager", "liger") else {"torch_compile": True, "torch_compile_backend": backend}
    return {
        "output_dir": tempfile.mkdtemp(), "max_steps": WARM + TIMED, "per_device_train_batch_size": sizes.batch,
        "optim": "adamw_torch_fused" if sizes.device == "cuda" else "adamw_torch", "learning_rate": 1e-5, "bf16": False,
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "dataloader_num_workers": 0,
        "gradient_checkpointing": False, "max_grad_norm": 0, "use_cpu": sizes.device == "cpu",
        "use_liger_kernel": backend == "liger", "dataloader_drop_last": True, **compiled,
    }  # fmt: skip


def _trainer(way: str, sizes: Sizes) -> Any:
    """A trainer of a model with random weights, on random tokens."""
    import datasets
    import torch
    from transformers import Trainer, TrainingArguments

    import fx_fusion.accelerate  # noqa: F401

    torch.manual_seed(0)
    model = llama(sizes)
    rows = torch.randint(2, sizes.vocabulary, (4 * sizes.batch, sizes.length)).tolist()
    columns = {"input_ids": rows, "attention_mask": [[1] * sizes.length] * len(rows)}
    if way.startswith("trainer"):
        data = datasets.Dataset.from_dict({**columns, "labels": rows}).with_format("torch")
        return Trainer(model, TrainingArguments(**_arguments(way, sizes)), train_dataset=data)
    import trl

    given: dict[str, Any] = {"processing_class": _tokenizer(sizes)}
    arguments = _arguments(way, sizes)
    if way.startswith("trl"):
        if "prompts" in way:
            columns["completion_mask"] = [[0] * (3 * sizes.length // 4) + [1] * (sizes.length // 4)] * len(rows)
            arguments["completion_only_loss"] = True
        arguments |= {"max_length": sizes.length}
        trainer, config = trl.SFTTrainer, trl.SFTConfig
    elif way.startswith("dpo"):
        prompt, answer = sizes.length // 2, sizes.length - sizes.length // 2 - 1
        texts = [[_text(part) for part in (row[:prompt], row[prompt:][:answer], row[::-1][:answer])] for row in rows]
        columns = dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*texts, strict=True)), strict=True))
        arguments |= {"max_length": sizes.length, "per_device_train_batch_size": sizes.batch // 2}
        trainer, config = trl.DPOTrainer, trl.DPOConfig
        given["ref_model"] = llama(sizes)
    else:
        columns = {"prompt": [_text(row[: 7 * sizes.length // 8]) for row in rows]}
        of_policies = {"num_generations": sizes.batch, "max_completion_length": sizes.length // 8, "num_iterations": 8}
        arguments |= {**of_policies, "beta": 0.0}
        trainer, config = trl.GRPOTrainer, trl.GRPOConfig
        given["reward_funcs"] = lambda completions, **_: [float(len(text)) for text in completions]
    return trainer(model, args=config(**arguments), train_dataset=datasets.Dataset.from_dict(columns), **given)


def _text(row: list[int]) -> str:
    return " ".join(f"w{i}" for i in row)


def _tokenizer(sizes: Sizes) -> Any:
    """A tokenizer of a word for each class."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, sizes.vocabulary)}
    words = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def measure(way: str, sizes: Sizes) -> Row:
    """Trains and returns the row of a way."""
    import torch
    from transformers import TrainerCallback

    import fx_fusion

    cuda, times = sizes.device == "cuda", []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            if state.global_step == COMPILED:
                torch.cuda.empty_cache()
                wait_for_turn()
            if cuda and state.global_step == WARM:
                torch.cuda.reset_peak_memory_stats()
            times.append(time.perf_counter())

    trainer = _trainer(way, sizes)
    trainer.add_callback(Clock())
    with fx_fusion.recording() as report:
        loss = trainer.train().training_loss
    steps = [b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False)]
    fused = sorted({site.fusion for site in report.sites if site.status == "fused"})
    return {
        "way": way, "ms": round(statistics.median(steps) * 1e3, 2), "loss": round(loss, 4), "fused": fused,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else 0.0, "environment": environment(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; all of them unless named")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, a tiny model")
    parser.add_argument("--out", default="bench/results/sft.jsonl")
    parser.add_argument("--together", type=int, default=1, help="how many compile side by side")
    parser.add_argument("--timeout", type=int, default=200, help="seconds for one way to compile, and to be measured")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.ways) - set(WAYS):
        parser.error(f"no way is called {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    if given.inside:
        give(measure(given.ways[0], TINY if given.tiny else FULL))
        return
    ways, table = given.ways or WAYS, []
    for start in range(0, len(ways), given.together):
        beside = ways[start : start + given.together]
        inner = {way: ["bench.sft", way, "--inside", *(["--tiny"] if given.tiny else [])] for way in beside}
        for way, rows in in_turns(inner, given.timeout, given.timeout).items():
            if isinstance(rows, str):
                table.append((way, rows))
                continue
            table.append((way, *(rows[0][name] for name in ("ms", "peak_gib", "loss", "fused"))))
            if not given.tiny:
                with open(given.out, "a") as file:
                    file.write(json.dumps(rows[0]) + "\n")
    print(tabulate(table, headers=("way", "ms", "GiB", "loss", "fused")))


if __name__ == "__main__":
    main()
