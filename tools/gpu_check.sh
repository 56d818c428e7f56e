#!/usr/bin/env bash
# On one GPU, in under 8 minutes: every test marked `gpu`, then one report: log-probs at four widths of a vocabulary shard
# (Triton, torch.compile and the peers that are there), the fused head, its modes keep, forward and recompute over sizes
# of chunk, each with its peak memory, and the rest of the loss.
#   bash tools/gpu_check.sh [arguments of bench_loss.py, --page docs/performance.md say]
#   bash tools/gpu_check.sh --device cpu --small     every part but the tests, in seconds, at sizes that show nothing
# Needs this checkout, PyTorch with CUDA (it brings Triton), pydantic and pytest; megatron-core for the model test and
# for Megatron's and verl's rows. PYTHON names the interpreter.
# Not run on a GPU so far: no task that wrote it had one.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
shapes=(16384x18992 16384x37984 16384x75968 16384x151936) heads=(16384x4096x131072) chunks=(1024 2048 4096 8192)
tokens=(100000 400000) rounds=7 device=cuda backends=(triton compiled eager)
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift ;;
        --small)
            shapes=(64x512 64x1024) heads=(64x32x512) chunks=(16 32) tokens=(5000) rounds=1 backends=(triton eager)
            export TORCHDYNAMO_DISABLE=1 ;;  # nothing is compiled
        *) arguments+=("$1") ;;
    esac
    shift
done
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=1
if [ "$device" = cuda ]; then
    "$python" - <<'PY'
import datetime, torch
if not torch.cuda.is_available():
    raise SystemExit("gpu_check: torch.cuda.is_available() is False: nothing can be shown here")
print(f"gpu_check: {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {datetime.date.today()}")
PY
    # The bare machine may lack the plugins that pyproject.toml configures, so its pytest section is left out.
    timeout 200 "$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -m gpu -q -rs tests/test_gpu.py
fi
exec timeout 270 "$python" tools/bench_loss.py --device "$device" --dtypes bf16 --rounds "$rounds" \
    --backends "${backends[@]}" --shapes "${shapes[@]}" --heads "${heads[@]}" --sweep "${chunks[@]}" \
    --tokens "${tokens[@]}" --no-collectives $([ "$device" = cuda ] || echo --no-memory) ${arguments[@]+"${arguments[@]}"}
