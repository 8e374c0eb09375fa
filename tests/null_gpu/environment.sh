# . tests/null_gpu/environment.sh   From here on the commands of this shell see one H200 that computes nothing.
# They run with the CUDA build of torch in NULL_GPU_VENV: by default .venvs/torch-2.11.0, which `make null-gpu` makes.
null_gpu=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${NULL_GPU_VENV:-$null_gpu/../../.venvs/torch-2.11.0}
if [ ! -x "$venv/bin/python" ]; then
    echo "error: $venv: there is no torch for CUDA: call \`make null-gpu\` once, or set NULL_GPU_VENV to an environment with it" >&2
    return 2
fi
venv=$(cd "$venv" && pwd)
if [ ! "$venv/null_gpu/libnullgpu.so" -nt "$null_gpu/device.c" ] && ! "$null_gpu/build.sh" "$venv"; then
    return 2
fi
export PATH=$null_gpu/bin:$venv/bin:$PATH PYTHONPATH=$null_gpu/site${PYTHONPATH:+:$PYTHONPATH}
export LD_LIBRARY_PATH=$venv/null_gpu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
unset CUDA_VISIBLE_DEVICES
# The last: each command that starts now has it.
export LD_PRELOAD=$venv/null_gpu/libnullgpu.so
