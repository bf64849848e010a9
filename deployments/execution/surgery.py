"""Makes a model's forward on a CPU cheap by replacing parts of it that compute the same, and undoes
that.

Owns the order, and what happens when a model does not take it; the parts are files of their own.

    norms, gated blocks, rotary embedding    where the compiled operations are at hand
    layers of the same input become one      then linear layers are quantised or packed
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from deployments.execution.fused_linear import fuse_linears, restore_fused
from deployments.execution.gated_mlp import replace_gated_mlps, restore_gated_mlps
from deployments.execution.norms import replace_norms, restore_norms
from deployments.execution.rotary import replace_rotary, restore_rotary
from deployments.execution.small_ops import SmallOps

logger = logging.getLogger(__name__)


def operate(model: nn.Module, probe: Callable[[], object], ops: SmallOps | None) -> None:
    """Replace what can be replaced; a model that does not run afterwards is left as it was.

    Args:
        probe: runs one forward of `model`.
        ops: None: only linear layers are fused.
    """
    num_norms = num_mlps = num_rotations = 0
    try:
        if ops is not None:
            num_norms = replace_norms(model, ops)
            num_mlps = replace_gated_mlps(model, ops)
            num_rotations = replace_rotary(model, ops)
        num_groups = fuse_linears(model, probe)
        probe()
    except Exception as error:  # whatever a model does with parts that are not its own
        logger.warning("the model's layers stay as they are: other ones fail with %r", error)
        undo(model)
        return
    logger.info(
        "%d norms, %d gated blocks, %d rotations, %d fused inputs",
        num_norms,
        num_mlps,
        num_rotations,
        num_groups,
    )


def undo(model: nn.Module) -> None:
    """Put the model's own parts back. Linear layers must be plain ones again."""
    restore_fused(model)
    restore_gated_mlps(model)
    restore_rotary(model)
    restore_norms(model)
