"""``options=`` of ``torch.compile``: ours are validated here, Inductor's pass through."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fx_fusion.errors import OptionError, nearest
from fx_fusion.float8.choice import RECIPES
from fx_fusion.fusion import registry
from fx_fusion.graph.masks.assumed import GUESS
from fx_fusion.memory.recompute import MEMORY
from fx_fusion.torch_internals.inductor import captures_cuda_graphs, configuration, modes, option_names

SELECT = ("auto", "measure", "always", "never")
VERIFY = (False, True, "first", "sample", "graph")
LAYERS = ("flat", "once")
EXPERTS = ("exact", "autocast")
_OURS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "select": (str, f"one of {', '.join(SELECT)}: which legal fusions replace their site"),
    "fusions": (list, 'names to use, as ["rms_norm"], or to leave out, as ["-swiglu"]'),
    "defer_outputs": (bool, "whether logits are computed only when they are read"),
    "speculate": (bool, "whether to compile for an attention_mask without padding, checked at run time"),
    "memory": (str, f"one of {', '.join(MEMORY)}: how much of what is cheap the backward computes again"),
    "float8": (str, f"one of {', '.join(RECIPES)}: the recipe by which linears multiply in float8"),
    "float8_keep": (list, 'paths of modules whose linears stay in bfloat16, as ["*.down_proj"]'),
    "verify": ((bool, str), "False, True, 'first', 'sample' or 'graph': in which calls what runs is compared with float64"),
    "front_ends": (bool, "whether calls of other libraries that would end a graph become part of it"),
    "layers": (str, f"one of {', '.join(LAYERS)}: whether equal layers are compiled once, as calls of one function"),
    "experts": (str, f"one of {', '.join(EXPERTS)}: whether autocast also casts float32 weights of experts"),
    "strict": (bool, "whether an error of fx_fusion is raised instead of falling back to Inductor"),
}
NAMES = frozenset(_OURS)
_PREFIX = "FX_FUSION_"
# Variables that are no options, and where they are read.
_READ_ELSEWHERE = (
    "FX_FUSION_FUEL",  # here
    "FX_FUSION_DEBUG",  # report.trace
    "FX_FUSION_CACHE_DIR",  # cost.measure
    "FX_FUSION_REPRODUCERS",  # rewrite.verify_site
)
VARIABLES = (*(f"{_PREFIX}{name.upper()}" for name in _OURS), *_READ_ELSEWHERE)
_FLAGS = {"0": False, "false": False, "1": True, "true": True}
_warned: set[str] = set()


@dataclass(frozen=True)
class Options:
    """Validated options of one compilation."""

    select: str
    fusions: frozenset[str]
    defer_outputs: bool
    speculate: bool
    memory: str
    float8: str
    float8_keep: tuple[str, ...]
    verify: bool | str
    front_ends: bool
    layers: str
    experts: str
    strict: bool
    fuel: int | None
    inductor: Mapping[str, Any]
    # Nobody's options: versions of a graph (fx_fusion.runtime.reads, graph.masks.assumed).
    outputs_are_read: bool = False
    masks: str | None = None
    eager: bool = False  # the graph runs op by op

    @property
    def cuda_graphs(self) -> bool:
        """Return True if Inductor captures CUDA graphs, so that the host's time counts for nothing."""
        return captures_cuda_graphs(self.inductor)

    def for_inputs(self, inputs: tuple[bool, str | None] | None) -> Options:
        """Return those of a version for such inputs (``runtime.speculate.Inputs``)."""
        if inputs is None:
            return self
        ones, masks = inputs
        return replace(self, speculate=self.speculate and ones, masks=self.masks if masks == GUESS else masks)

    def key(self) -> tuple[Any, ...]:
        """Return what decides about our rewrite, for the compile cache."""
        names = tuple(sorted(self.fusions))
        version = self.outputs_are_read, self.masks
        float8 = self.float8, self.float8_keep
        asked = (self.select, names, self.defer_outputs, self.speculate, self.memory, float8, self.layers, self.experts)
        return (*asked, version, self.cuda_graphs, self.fuel)

    def given(self) -> dict[str, Any]:
        """All of them as ``options=`` takes them, Inductor's too: to be shown, and written as JSON."""
        known = sorted(fusion.name for fusion in registry.all_fusions())
        chosen = [name for name in known if name in self.fusions]
        left_out = [f"-{name}" for name in known if name not in self.fusions]
        ours = {name: getattr(self, name) for name in _OURS}
        ours["fusions"] = min(chosen, left_out, key=len) if chosen else left_out  # an empty list means all
        ours["float8_keep"] = list(self.float8_keep)
        plain = (str, int, float, bool, type(None))
        return {**ours, **{name: v if isinstance(v, plain) else repr(v) for name, v in self.inductor.items()}}


def parse(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Split and check options; raises OptionError with the valid names and the nearest one. ``options["mode"]`` is a mode,
    as torch.compile takes one of the two; what is not given is taken from the environment (``FX_FUSION_SELECT`` ...)."""
    _warn_of_unknown_variables()
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f'options must be a dictionary, as {{"select": "always"}}; got {options!r}.')
    options = dict(options or {})
    if mode is not None and "mode" in options:
        raise OptionError(f"mode={mode!r} and options['mode'] = {options['mode']!r}: give one of them.")
    mode = options.pop("mode", mode)
    if mode is not None and mode not in modes():
        raise OptionError(f"mode={mode!r} is not known. {nearest(str(mode), modes())}")
    inductors = option_names()
    ours = _from_environment()
    theirs: dict[str, Any] = {}
    for name, given in options.items():
        if name in _OURS:
            kind, meaning = _OURS[name]
            if not isinstance(given, (list, tuple) if kind is list else kind):
                named = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
                raise OptionError(f"options[{name!r}] must be a {named} ({meaning}); got {given!r}.")
            ours[name] = given
        elif isinstance(name, str) and name.replace("-", "_") in inductors:
            theirs[name] = given
        else:
            raise OptionError(
                f"options[{name!r}] is known neither to fx_fusion nor to Inductor. "
                f"{nearest(str(name), (*_OURS, 'mode'), also=inductors)}"
            )
    try:  # Inductor's own wrapper translates the mode and checks the types of its options
        inductor = configuration(mode, theirs)
    except RuntimeError as error:
        raise OptionError(f"Inductor does not take these options: {error}") from error
    said = {name: f"options[{name!r}] =" if name in options else f"{_PREFIX}{name.upper()} =" for name in _OURS}
    select = ours.get("select", "auto")
    if select not in SELECT:
        raise OptionError(f"{said['select']} {select!r}. {nearest(select, SELECT)}")
    memory = ours.get("memory", "auto")
    if memory not in MEMORY:
        raise OptionError(f"{said['memory']} {memory!r}. {nearest(memory, MEMORY)}")
    float8 = ours.get("float8", "off")
    if float8 not in RECIPES:
        raise OptionError(f"{said['float8']} {float8!r}. {nearest(float8, RECIPES)}")
    float8_keep = ours.get("float8_keep", [])
    if not all(isinstance(pattern, str) for pattern in float8_keep):
        raise OptionError(f"options['float8_keep'] must be a list of patterns, as [\"*.down_proj\"]; got {float8_keep!r}.")
    verify = ours.get("verify", False)
    if verify == "graph" and float8 != "off":
        raise OptionError(
            f"{said['verify']} 'graph' holds the whole graph to eager's accuracy, which float8 = {float8!r} has not: "
            "take 'sample', and fx_fusion.float8_stats(model, **batch) for the linears."
        )
    if verify not in VERIFY:
        raise OptionError(f"{said['verify']} {verify!r}. {nearest(str(verify), tuple(map(str, VERIFY)))}")
    layers = ours.get("layers", "flat")
    if layers not in LAYERS:
        raise OptionError(f"{said['layers']} {layers!r}. {nearest(layers, LAYERS)}")
    experts = ours.get("experts", "exact")
    if experts not in EXPERTS:
        raise OptionError(f"{said['experts']} {experts!r}. {nearest(experts, EXPERTS)}")
    return Options(
        select=select,
        fusions=_chosen(ours.get("fusions", []), said["fusions"].removesuffix(" =")),
        defer_outputs=ours.get("defer_outputs", True),
        speculate=ours.get("speculate", True),
        memory=memory,
        float8=float8,
        float8_keep=tuple(float8_keep),
        verify=verify,
        front_ends=ours.get("front_ends", True),
        layers=layers,
        experts=experts,
        strict=ours.get("strict", False),
        fuel=_fuel(),
        inductor=inductor,
        masks=GUESS if ours.get("speculate", True) else None,
    )


def wants_front_ends(options: Mapping[str, Any]) -> bool:
    """Return True if the options that a backend was given, or the environment's, want front ends. A value that ``parse``
    refuses counts as True."""
    given = options.get("front_ends", _FLAGS.get(os.environ.get(f"{_PREFIX}FRONT_ENDS", "").lower()))
    return given is not False


def inductors_own(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that are not ours."""
    return {name: given for name, given in (options or {}).items() if name not in _OURS and name != "mode"}


def _from_environment() -> dict[str, Any]:
    """Options of ours for those who can't pass any (TrainingArguments): ``FX_FUSION_MEMORY=min``,
    ``FX_FUSION_FUSIONS=-rope,-swiglu``, ``FX_FUSION_STRICT=1``."""
    found: dict[str, Any] = {}
    for name, (kind, meaning) in _OURS.items():
        variable = f"{_PREFIX}{name.upper()}"
        text = os.environ.get(variable, "")
        if not text:
            continue
        flag = _FLAGS.get(text.lower()) if kind is not list and kind is not str else None
        if kind is bool and flag is None:
            raise OptionError(f"{variable}={text!r} must be 0 or 1 ({meaning}).")
        if flag is not None:
            found[name] = flag
        else:
            found[name] = [part for item in text.split(",") if (part := item.strip())] if kind is list else text
    return found


def unknown_variables() -> dict[str, str]:
    """A sentence for each variable of the environment that begins as ours do and that nobody reads."""
    unknown = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in VARIABLES)
    return {name: f"the variable {name} is read by nobody. {nearest(name, VARIABLES)}" for name in unknown}


def _warn_of_unknown_variables() -> None:
    """Once in a process: a name that was mistyped chose nothing, and a run would not show it."""
    for name, sentence in unknown_variables().items():
        if name not in _warned:
            _warned.add(name)
            warnings.warn(f"fx_fusion: {sentence}", stacklevel=3)


def _chosen(names: list[str], said: str) -> frozenset[str]:
    known = [f.name for f in registry.all_fusions()]
    for name in names:
        if not isinstance(name, str) or name.removeprefix("-") not in known:
            raise OptionError(f"{said} names {name!r}. {nearest(str(name).removeprefix('-'), tuple(known))}")
    wanted = [n for n in names if not n.startswith("-")] or known
    return frozenset(wanted) - {n.removeprefix("-") for n in names if n.startswith("-")}


def _fuel() -> int | None:
    given = os.environ.get("FX_FUSION_FUEL", "")
    if not given:
        return None
    if not given.isdigit():
        raise OptionError(f"FX_FUSION_FUEL={given!r} must be a number of replacements, 0 or more.")
    return int(given)
