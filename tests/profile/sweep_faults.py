"""What happens to a rank of a sweep, in tests, before it begins its work (forked_command.Fault)."""

import os
import signal
import time
from pathlib import Path

from shardwright.types.hardware_profile import HardwareProfile, write_hardware_profile
from shardwright_profile.hardware import worker

_RELAYED_S = 1.0


def stop_once_written() -> None:
    """Signal the launcher as soon as the profile is there, and wait until it has relayed that."""

    def write_and_stop(path: Path, profile: HardwareProfile) -> None:
        write_hardware_profile(path, profile)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(_RELAYED_S)

    worker.write_hardware_profile = write_and_stop  # type: ignore[attr-defined]
