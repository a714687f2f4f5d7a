"""Add ``"fx_fusion"`` to the backends that accelerate, and with it transformers' Trainer, accepts.

    import fx_fusion  # anywhere in the script, before the Trainer or the Accelerator is made
    TrainingArguments(..., torch_compile=True, torch_compile_backend="fx_fusion")

``import fx_fusion`` imports this module as soon as accelerate is imported. accelerate looks the name of a backend up in an
enum of the ones that PyTorch brings and refuses every other. An enum asks its ``_missing_`` for values that it does not
know; this answers for ours.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils.dataclasses import DynamoBackend

_NAME = "FX_FUSION"
_before = DynamoBackend._missing_


def _missing(cls: Any, value: object) -> Any:
    return FX_FUSION if value == _NAME else _before(value)


FX_FUSION: Any = str.__new__(DynamoBackend, _NAME)
FX_FUSION._name_ = FX_FUSION._value_ = _NAME
DynamoBackend._missing_ = classmethod(_missing)  # type: ignore[method-assign, assignment]
