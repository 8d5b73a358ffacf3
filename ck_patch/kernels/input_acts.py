"""The input activations that the rotating quantizer folds in, by comfy_kitchen's names."""

from __future__ import annotations

from typing import Literal, get_args

InputAct = Literal["gelu_tanh", "swiglu", "situ", "rms_norm"]
INPUT_ACTS: tuple[InputAct, ...] = get_args(InputAct)


def columns(act: InputAct | None) -> int:
    """How many columns of x make one that is quantized. Of a pair, one half of the row has the
    first and the other half the second."""
    return 2 if act in ("swiglu", "situ") else 1
