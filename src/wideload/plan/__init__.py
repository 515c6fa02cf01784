"""Turns an expression and the layouts of its operands into kernels to run: family, vector width, index width, grid, and why.

What changes the code is a ``Variant``; what does not (sizes, strides, numbers) is passed at run time, so a new shape compiles
nothing. Knows no driver and writes no CUDA. `kernel_plan` asks the families' modules in turn; each says of a call whether it takes it.
"""

from wideload.plan.choice import Reason
from wideload.plan.columns import find_parts
from wideload.plan.kernel_plan import KernelPlan, Operand, Target, Total, plan_kernels, walked_targets
from wideload.plan.tuning import ALLOWED, BUILT_IN, DEFAULT, Tuning, built_in_tuning
from wideload.plan.variant import (
    ACCESS_BYTES,
    COLUMNS_BLOCKS,
    HALO_BLOCKS,
    MANY_LOADS,
    MANY_LOADS_BLOCKS,
    MAX_INLINED_FUNCTIONS,
    NARROW_RING_BLOCKS,
    REGISTER_BYTES,
    RING_BLOCKS,
    STARTING_BLOCKS,
    THREADS,
    TILE_BLOCKS,
    Access,
    Columns,
    Family,
    Pace,
    Strip,
    Table,
    Tile,
    Variant,
)

__all__ = [
    "ACCESS_BYTES",
    "ALLOWED",
    "BUILT_IN",
    "COLUMNS_BLOCKS",
    "DEFAULT",
    "HALO_BLOCKS",
    "MANY_LOADS",
    "MANY_LOADS_BLOCKS",
    "MAX_INLINED_FUNCTIONS",
    "NARROW_RING_BLOCKS",
    "REGISTER_BYTES",
    "RING_BLOCKS",
    "STARTING_BLOCKS",
    "THREADS",
    "TILE_BLOCKS",
    "Access",
    "Columns",
    "Family",
    "KernelPlan",
    "Operand",
    "Pace",
    "Reason",
    "Strip",
    "Table",
    "Target",
    "Tile",
    "Total",
    "Tuning",
    "Variant",
    "built_in_tuning",
    "find_parts",
    "plan_kernels",
    "walked_targets",
]
