"""How long searches take: CPU seconds of whole commands, one thread, and their memory.

    python benchmarks/search_scale.py [--cases WORD ...] [--repeats N] [--write]

All is estimated from shapes; no such machine is needed. Printed as a table; `--write` also writes it to
benchmarks/results/search-scale.md, with the load of the machine.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks/results/search-scale.md"
COMMANDS = {
    "llama-3-8b on 64 H100": ("advise llama-3-8b --gpus 8x8:H100-SXM --batch 512", "1.5"),
    "llama-3-70b on 64 H100": ("advise llama-3-70b --gpus 8x8:H100-SXM --batch 512", "2.5"),
    "llama-3-8b for megatron-lm": ("advise llama-3-8b --gpus 8x8:H100-SXM --batch 512 --for megatron", "4"),
    "llama-3-70b for torchtitan": ("advise llama-3-70b --gpus 8x8:H100-SXM --batch 512 --for torchtitan", "4"),
    "mixtral-8x7b, one strategy": ("advise mixtral-8x7b --gpus 8x8:H100-SXM --batch 512 --seq 4096 --uniform", "4"),
    "qwen3-235b-a22b on 256 H100": ("advise qwen3-235b-a22b --gpus 32x8:H100-SXM --batch 1024 --seq 4096", "12"),
    "llama-3.1-70b, 131,072 tokens": ("advise llama-3.1-70b --gpus 64x8:H100-SXM --batch 64 --seq 131072", "8"),
    "deepseek-v3 on 2,048 H100": ("advise deepseek-v3 --gpus 256x8:H100-SXM --batch 15360 --seq 4096", "6"),
    "llama-3.1-405b on 16,384 H100": ("advise llama-3.1-405b --gpus 2048x8:H100-SXM --batch 2048 --seq 8192", "5"),
    "gpt2-xl on 512 GPUs of two types": (
        "advise gpt2-xl --gpus 32x8:A100-40+32x8:V100-16 --batch 2048 --precision float16 --inter-node-gbit-s 100",
        "",
    ),
    "llama-7b on 192 GPUs of three types": (
        "advise llama-7b --gpus 8x8:A100-80+8x8:A100-40+8x8:A10 --batch 256 --inter-node-gbit-s 100",
        "",
    ),
    "front of gpt2-xl, 8 + 8 nodes": ("rent gpt2-xl --gpus 0-8x8:A100-80+0-8x8:A10 --batch 128", ""),
    "front of llama-7b, 8 + 8 + 8 nodes": (
        "rent llama-7b --gpus 0-8x8:A100-80+0-8x8:A100-40+0-8x8:A10 --batch 256",
        "",
    ),
}
"""Arguments of `shardwright`, and the goal in CPU seconds."""


def main() -> None:
    """Run the commands, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="runs of each command, of which the median counts")
    parser.add_argument("--cases", nargs="+", default=[""], help="those with one of these words in their names")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    if asked.repeats < 1:
        parser.error("--repeats must be at least 1")
    lines = ["| case | CPU s | goal | MiB | proven |", "| --- | ---: | ---: | ---: | --- |"]
    print("\n".join(lines))
    for name, (words, goal) in COMMANDS.items():
        if any(word in name for word in asked.cases):
            cpu_s, peak_mib, said = measured(words.split(), asked.repeats)
            lines.append(f"| {name} | {cpu_s:.2f} | {goal} | {peak_mib} | {said} |")
            print(lines[-1], flush=True)
    if asked.write:
        text = f"Medians of {asked.repeats} runs on {datetime.now(UTC):%Y-%m-%d}, on {os.cpu_count()} virtual cores"
        text += f" with a load of {os.getloadavg()[0]:.1f} processes in the last minute."
        PAGE.write_text("\n".join((*lines, "", text)) + "\n", encoding="utf-8")


def measured(words: list[str], repeats: int) -> tuple[float, int, str]:
    """The median run's CPU seconds, the most MiB of any, and what the command said to be proven."""
    with tempfile.TemporaryDirectory() as place:
        # Bytecode is compiled once, as an installation does: the first run does not count.
        used = [_used(words, Path(place), number) for number in range(repeats + 1)][1:]
    times = sorted(cpu_s for cpu_s, _, _ in used)
    return times[len(times) // 2], max(peak_mib for _, peak_mib, _ in used), used[0][2]


def _used(words: list[str], place: Path, number: int) -> tuple[float, int, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(place / "bytecode")}
    command = [str(Path(sys.executable).with_name("shardwright")), *words]
    if words[0] == "rent":
        command += ["--out", str(place / str(number))]
    out = place / "out.txt"
    with out.open("w") as said:
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(words)} ended with {process.returncode}")
    found = re.search(r"proven optimal.*|no plan is more than.*|\d+ of \d+ .*front.*", out.read_text(encoding="utf-8"))
    return used.ru_utime + used.ru_stime, used.ru_maxrss // 1024, found.group() if found else ""


if __name__ == "__main__":
    main()
