#!/usr/bin/env bash
# Runs every test marked `gpu` on one GPU, then the bench of log-probs and fused head, in under 8 minutes.
#   bash tools/gpu_check.sh [pytest arguments]
# Needs this checkout, PyTorch with CUDA, pydantic and pytest; megatron-core for the model test. PYTHON names the interpreter.
# Not run on a GPU so far: no task that wrote it had one.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" - <<'PY'
import datetime, torch
if not torch.cuda.is_available():
    raise SystemExit("gpu_check: torch.cuda.is_available() is False: nothing can be shown here")
print(f"gpu_check: {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {datetime.date.today()}")
PY
# The bare machine may lack the plugins that pyproject.toml configures, so its pytest section is left out.
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=1
timeout 240 "$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -m gpu -q -rs tests/test_gpu.py "$@"
exec timeout 220 "$python" tools/bench_loss.py --dtypes bf16 --rounds 7 --no-memory --backends triton eager \
    --shapes 16384x18992 16384x37984 16384x75968 16384x151936 --heads 16384x4096x131072
