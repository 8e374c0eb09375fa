"""Count the product's code by package: lines without docstrings, comments and blank lines.

python tests/architecture/count_code.py
"""

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core/src",
    "stages/profile/src",
    "stages/search/src",
    "stages/train/src",
    "workflow",
)
MAX_FILE_LINES = 700
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    held = {line for t in tokens if t.type not in _LAYOUT for line in range(t.start[0], t.end[0] + 1)}
    return held - _docstring_lines(ast.parse(source))


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of texts that stand alone: docstrings of modules, classes, functions and attributes."""
    texts = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def function_lengths(source: str) -> list[int]:
    """Code lines of each function's body and signature, nested ones counted apart too."""
    held, tree = code_lines(source), ast.parse(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [sum(f.lineno <= line <= (f.end_lineno or f.lineno) for line in held) for f in functions]


def main() -> int:
    """Print the counts; the longest files and functions are named, nothing fails."""
    total, lengths, long_files = 0, [], []
    for package in PACKAGES:
        files = sorted(p for p in (ROOT / package).rglob("*.py"))
        sources = {path: path.read_text() for path in files}
        count = sum(len(code_lines(source)) for source in sources.values())
        total += count
        lengths += [length for source in sources.values() for length in function_lengths(source)]
        long_files += [path for path, source in sources.items() if len(source.splitlines()) > MAX_FILE_LINES]
        if files:
            print(f"{count:7,} code lines in {len(files):3} files of {package}")
    rules = [ROOT / "Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]
    lines = [line.strip() for path in rules for line in path.read_text().splitlines()]
    count = sum(bool(line) and not line.startswith("#") for line in lines)
    total += count
    print(f"{count:7,} code lines in {len(rules):3} files of Snakemake rules")
    percentile = statistics.quantiles(lengths, n=20)[-1]
    print(f"{total:7,} in all; functions: median {statistics.median(lengths):g}, 95th percentile {percentile:g} lines")
    for path in long_files:
        print(f"        over {MAX_FILE_LINES} lines: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
