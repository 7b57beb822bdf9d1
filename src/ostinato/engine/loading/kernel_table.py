"""Which kernel table an engine uses instead of the package's own: see `kernels.linear.choice`."""

import logging
import os
import re
from pathlib import Path

import torch

from ostinato.graphs import ConfigError
from ostinato.kernels.gpu import gpu_of
from ostinato.kernels.linear.choice import fallbacks, table_name, use_table
from ostinato.kernels.linear.tables import KernelTableError, load_table
from ostinato.kernels.registry import unmeasured
from ostinato.models.cache_folder import cache_folder

logger = logging.getLogger("ostinato.engine")

TABLE_VARIABLE = "OSTINATO_KERNEL_TABLE"
NO_TABLE = "none"
"""Instead of a file name: no table is used, not even the package's; the rules for any matrix decide."""


def tuned_table(device: torch.device) -> Path:
    """Where `ostinato tune` writes the table for this kind of GPU."""
    return cache_folder() / "kernel-tables" / table_name(gpu_of(device))


def use_table_of_user(asked: str | None, device: torch.device) -> None:
    """Use the table of this option, of the environment, or of `ostinato tune`, in this order; or none."""
    if device.type != "cuda":
        if asked:
            raise ConfigError(f"kernel_table needs a GPU, and the engine runs on {device}: leave it out")
        return
    named = asked or os.environ.get(TABLE_VARIABLE)
    if named == NO_TABLE:
        use_table(None, package=False)
        logger.info("kernels are chosen by rules: kernel tables are off")
    else:
        _use_file(named, device)
    for told in fallbacks(device):
        logger.warning("linear layers: %s", told)
    for told in unmeasured(gpu_of(device)):
        logger.warning("%s", told)


def _use_file(named: str | None, device: torch.device) -> None:
    file = Path(named).expanduser() if named else tuned_table(device)
    try:
        table = load_table(file) if named or file.is_file() else None
    except KernelTableError as error:
        if named:
            raise ConfigError(str(error)) from error
        # The user did not ask for this table, and it may be of another version.
        logger.warning("%s; make it again with `ostinato tune`, or delete it", error)
        table = None
    use_table(table)
    if table is None:
        _tell_of_old_table(device)
        return
    logger.info("kernels are chosen by the table %s", file)
    if table.gpu != str(gpu_of(device)):
        logger.warning("the kernel table %s was made on %s, not on %s", file, table.gpu, gpu_of(device))


def _tell_of_old_table(device: torch.device) -> None:
    """Warn of a table named by the GPU's product name, as older versions did: it is not used."""
    product = torch.cuda.get_device_name(device)
    old = tuned_table(device).with_name(re.sub(r"[^a-z0-9]+", "-", product.lower()) + ".json")
    if old.is_file():
        logger.warning(
            "the kernel table %s is not used: tables are for %s now, not for %s; make it again with "
            "`ostinato tune`, or delete it",
            old,
            gpu_of(device),
            product,
        )
