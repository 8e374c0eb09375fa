"""The commands of `shardwright profile`."""

from typing import NoReturn

from shardwright.command import Command, CommandLine, run
from shardwright_profile import options

_ROOM = "shardwright_profile"
_IMPORTERS = f"{_ROOM}.importers"

APP = CommandLine(
    name="shardwright profile",
    purpose="Measure hardware, write the probes of a model, fit, import or estimate profiles, and show them.",
    commands={
        "hardware": Command(options.HardwareOptions, f"{_ROOM}.hardware.start:start_sweep"),
        "probes": Command(options.ProbesOptions, f"{_ROOM}.commands:write_probes"),
        "model": Command(options.ModelOptions, f"{_ROOM}.commands:profile_model"),
        "fit": Command(options.FitOptions, f"{_ROOM}.commands:fit"),
        "show": Command(options.ShowOptions, f"{_ROOM}.commands:show"),
        "import galvatron": Command(options.GalvatronOptions, f"{_IMPORTERS}.galvatron.model:write_galvatron"),
        "import galvatron-hardware": Command(
            options.GalvatronHardwareOptions, f"{_IMPORTERS}.galvatron.hardware:write_galvatron_hardware"
        ),
        "import fasop": Command(options.FasopOptions, f"{_IMPORTERS}.fasop:write_fasop"),
        "import fasop-hardware": Command(options.FasopHardwareOptions, f"{_IMPORTERS}.fasop:write_fasop_hardware"),
        "devices": Command(options.DevicesOptions, f"{_ROOM}.commands:list_devices"),
        "analytic": Command(options.AnalyticOptions, f"{_ROOM}.analytic:write_analytic"),
    },
)


def main() -> NoReturn:
    """Run the command line."""
    run(APP)
