#!/usr/bin/env bash
# tests/null_gpu/build.sh VENV   Build the null device for the CUDA build of torch in VENV, as VENV/null_gpu/libnullgpu.so.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
if [ ! -e "$site/torch/lib/libtorch_cuda.so" ]; then
    echo "error: $1: its torch is not built for CUDA: remove it, and install torch from pip's usual index" >&2
    exit 2
fi
built=$1/null_gpu
headers=$built/headers
mkdir -p "$built"
if [ ! -e "$headers/nvidia/cu13/include/crt/host_defines.h" ]; then
    # The headers of the runtime need those of the compiler, which torch does not depend on.
    version=$(ls -d "$site"/nvidia_cuda_runtime-*.dist-info | sed 's/.*runtime-\([0-9]*\.[0-9]*\)\..*/\1/')
    "$1/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --target "$headers" "nvidia-cuda-crt==$version.*"
fi
# Whatever PyTorch calls, of which device.c has no function, only succeeds.
called() {
    for library in "$site"/torch/lib/lib*cuda*.so "$site"/torch/lib/libcaffe2_nvrtc.so "$site"/torch/lib/libtorch_{python,nvshmem}.so; do
        nm -D --undefined-only "$library"
    done | awk '{ print $2 }' | sed 's/@.*//' | grep -E '^(__cuda|cuda|cu[A-Z]|cublas|nccl)' | grep -v '^cuFile' | sort -u
}
gcc -c -fPIC -O1 -Wno-unused-parameter -I"$site/nvidia/cu13/include" -I"$headers/nvidia/cu13/include" "$here/device.c" -o "$built/device.o"
comm -23 <(called) <(nm --defined-only "$built/device.o" | awk '{ print $3 }' | sort -u) |
    sed 's/.*/int &(void) { return 0; }/' >"$built/others.c"
gcc -shared -fPIC "$built/device.o" "$built/others.c" -o "$built/libnullgpu.so" -lpthread
# PyTorch opens the driver by name.
ln -sf libnullgpu.so "$built/libcuda.so.1"
