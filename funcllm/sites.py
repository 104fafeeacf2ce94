"""Sites: named places in a model where an experiment reads or changes what passes.

`x = site("residual_mid", x, context)` applies this layer's edits of that name, then records `x[capture_tokens_k]` if
the name is captured; with neither, it is x. Full names carry the layer: layers.3.residual_mid; inside a layer the name
is local. At tensor-parallel sizes above 1, the sites of heads and of mlp.hidden see this rank's share.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from funcllm.types import Context

LAYER_SITES = (
    "residual_pre",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.heads",
    "attention.out",
    "residual_mid",
    "mlp.hidden",
    "mlp.out",
    "residual_post",
)
MODEL_SITES = ("embed", "final", "logits")


def active(name: str, context: Context) -> bool:
    """Whether anything edits or captures the site in this layer."""
    return name in context.layer.captures or any(site_name == name for site_name, _ in context.layer.edits)


def check_passed(context: Context) -> None:
    """Refuses edits and captures of sites that nothing passed: the functions in use do not mark them."""
    wanted = [*(name for name, _ in context.layer.edits), *context.layer.captures]
    unseen = [name for name in wanted if name not in context.passed]
    if unseen:
        raise ValueError(
            f"nothing passed the site {unseen[0]!r}, which is edited or captured: the functions of its layer do not "
            "mark it with site(...)"
        )


def site(name: str, x: Tensor, context: Context, /) -> Tensor:
    """x as it passes the site: edited, then recorded. The rows of `final` and `logits` are recorded whole.

    Raises ValueError where an edit changes the shape or the dtype.
    """
    if active(name, context):
        context.passed[name] = None
    for site_name, edit in context.layer.edits:
        if site_name != name:
            continue
        edited = edit(x, context)
        if not isinstance(edited, Tensor) or edited.shape != x.shape or edited.dtype != x.dtype:
            raise ValueError(
                f"the edit of site {name!r} returned {describe(edited)}; it must return what it got, {describe(x)}"
            )
        x = edited
    if name in context.layer.captures:
        tokens_k = context.inputs.capture_tokens_k
        by_token = name not in ("final", "logits") and isinstance(tokens_k, Tensor)
        context.captured[name] = x.index_select(0, cast(Tensor, tokens_k)) if by_token else x
    return x


def describe(x: object) -> str:
    """A tensor's dtype and shape for an error message."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
