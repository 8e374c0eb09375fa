"""A process that compiles the models of S3 into inductor's cache during S1, which leaves most cores idle."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from gpu_kit.rows import Values
from gpu_kit.setting import Setting

_started: list["subprocess.Popen[bytes]"] = []
_NICE = 10
_ORDERLY_END_S = 5.0


def start(setting: Setting) -> Values:
    """Start the process that compiles; return its id."""
    setting.work.mkdir(parents=True, exist_ok=True)
    job, log = setting.work / "compile-ahead.job", setting.work / "compile-ahead.log"
    job.write_bytes(msgspec.json.encode(setting, enc_hook=str))
    command = [sys.executable, "-m", "gpu_kit.compile_ahead", str(job)]
    with log.open("wb") as file:
        _started.append(subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True))
    return {"pid": _started[-1].pid}


def wait(seconds: float) -> str:
    """Wait for the process; end it after `seconds`, so that it disturbs no measurement; return how it ended."""
    if not _started:
        return "was not begun"
    try:
        code = _started[-1].wait(seconds)
    except subprocess.TimeoutExpired:
        stop()
        return "was ended"
    return "ended well" if code == 0 else f"failed with {code}: see compile-ahead.log"


def stop() -> None:
    """End the process if it still runs."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_ORDERLY_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> None:
    """Compile the models that S3 runs compiled, at its sizes."""
    os.nice(_NICE)
    from gpu_kit import fast

    setting = msgspec.json.decode(
        Path(sys.argv[1]).read_bytes(), type=Setting, dec_hook=lambda kind, value: kind(value)
    )
    fast.compile_ahead(setting)


if __name__ == "__main__":
    main()
