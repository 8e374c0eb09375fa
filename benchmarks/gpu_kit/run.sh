#!/usr/bin/env bash
# bash benchmarks/gpu_kit/run.sh [--rehearse | --null] [--only STEP ...] [--limit SECONDS]
# The GPU kit with what is here: see docs/gpu.md. Results go to $OUT; without it, to results/gpu.
set -u
cd "$(dirname "$0")/../.."
[ -n "${KIT_WORK:-}" ] || trap 'rm -rf "$KIT_WORK"' EXIT
mkdir -p "${OUT:=results/gpu}" "${KIT_WORK:=$(mktemp -d)}/bin"
OUT=$(cd "$OUT" && pwd) work=$(cd "$KIT_WORK" && pwd)

limit=500 pinned=
case " $* " in
*" --limit 0 "*) limit=0 ;;
*" --limit "*) limit=$(printf '%s\n' "$@" | awk 'asked { print $1 + 20; exit } /^--limit$/ { asked = 1 }') ;;
*" --rehearse "* | *" --null "*) limit=0 ;;
esac
case " $* " in
*" --rehearse "*)
    # One thread per rank: several threads wait for one another if other programs use the cores as well.
    pinned="taskset -c $(taskset -cp $$ | sed 's/.*: //; s/[,-].*//')"
    ;;
*" --null "*)
    [ -f .kit/null/predictions.json ] || PYTHONPATH=benchmarks python3 -m gpu_kit.prepare --null || exit 2
    # From here on this shell sees a CUDA device whose kernels do nothing: a test instrument.
    . tests/null_gpu/environment.sh || exit 3
    ;;
esac

# Packages that this Python does not have, or has in another version than the tests used, come as wheels.
if ! python3 -c 'import msgspec, transformers; assert tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)' 2>/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$work/site" .whl/*.whl || exit 3
fi
sources=benchmarks
for package in core stages/profile stages/search stages/train; do
    sources=$sources:$PWD/$package/src
done
export PYTHONPATH=$work/site:$PWD/${sources}${PYTHONPATH:+:$PYTHONPATH}
printf '#!/bin/sh\nexec python3 -c "import sys; from shardwright.cli import main; sys.exit(main())" "$@"\n' >"$work/bin/shardwright"
chmod +x "$work"/bin/*
# The metadata of an installation, by which the command finds the commands of the stages.
version=$(cat VERSION)
info=$work/site/shardwright-$version.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: shardwright\nVersion: %s\n' "$version" >"$info/METADATA"
printf '[shardwright.commands]\nprofile = shardwright_profile.cli:APP\nsearch = shardwright_search.cli:APP\ntrain = shardwright_train.cli:APP\n' >"$info/entry_points.txt"
export PATH=$work/bin:$PATH PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton

# Without caches and checkpoints, because the amount that comes back from a lent machine is limited.
pack() { tar -C "$work" --exclude site --exclude inductor --exclude triton --exclude checkpoints --exclude kept -czf "$OUT/.packing" . 2>/dev/null; mv "$OUT/.packing" "$OUT/everything.tgz"; }
# If the machine is taken away, only the results of the last 15 seconds are lost.
(while sleep 15; do pack; done) &
packer=$!
$pinned timeout --foreground -k 10 $limit python3 -m gpu_kit.kit --out "$OUT" --work "$work/kit" "$@" > >(tee "$OUT/log.txt") 2>&1 &
kit=$!
trap 'kill $kit' INT TERM
wait $kit
code=$?
while kill -0 $kit 2>/dev/null; do wait $kit; code=$?; done
kill $packer 2>/dev/null
pack
[ -f "$OUT/report.md" ] && tail -n 60 "$OUT/report.md"
exit "$code"
