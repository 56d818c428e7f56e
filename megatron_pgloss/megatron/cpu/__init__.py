"""The installed Megatron-Core, run on CPU processes under gloo: for laptops, tests and CI.

``enable_cpu`` answers Megatron-Core's calls of CUDA without it; ``cpu_layer_spec`` gives GPT layers whose attention and
norms do what the local ones refuse (context and sequence parallelism, packed sequences), and
``cpu.hybrid.cpu_hybrid_spec`` does the same for HybridModel, where megatron-core has one.
"""

from megatron_pgloss.megatron.cpu.attention import CoreAttention
from megatron_pgloss.megatron.cpu.norm import Norm
from megatron_pgloss.megatron.cpu.patches import enable_cpu
from megatron_pgloss.megatron.cpu.spec import cpu_layer_spec, cpu_mtp_spec

__all__ = ["CoreAttention", "Norm", "cpu_layer_spec", "cpu_mtp_spec", "enable_cpu"]
