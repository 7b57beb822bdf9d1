"""Which table of kernels an engine runs with, before that of the package: see `kernels.linear.choice`."""

import logging
import os
from pathlib import Path

import torch

from ostinato.graphs import ConfigError
from ostinato.kernels.linear.choice import table_name, use_table
from ostinato.kernels.linear.table_file import KernelTableError, load_table
from ostinato.models.cache_folder import cache_folder

logger = logging.getLogger("ostinato.engine")

TABLE_VARIABLE = "OSTINATO_KERNEL_TABLE"


def tuned_table(device: torch.device) -> Path:
    """Where `ostinato tune` leaves the table for this GPU."""
    return cache_folder() / "kernel-tables" / table_name(device)


def use_table_of_user(asked: str | None, device: torch.device) -> None:
    """Use the table that was asked for, that of the environment, or what `ostinato tune` made; or none."""
    if device.type != "cuda":
        if asked:
            raise ConfigError(f"kernel_table is for kernels of a GPU, and the engine runs on {device}")
        return
    named = asked or os.environ.get(TABLE_VARIABLE)
    file = Path(named).expanduser() if named else tuned_table(device)
    try:
        table = load_table(file) if named or file.is_file() else None
    except KernelTableError as error:
        if named:
            raise ConfigError(str(error)) from error
        # Nobody asked for this one; it may be of another version.
        logger.warning("%s; make it again with `ostinato tune`, or delete it", error)
        table = None
    use_table(table)
    if table is None:
        return
    logger.info("kernels by the table %s", file)
    name = torch.cuda.get_device_name(device)
    if table.gpu != name:
        logger.warning("the kernel table %s was made on %s, not on %s", file, table.gpu, name)
