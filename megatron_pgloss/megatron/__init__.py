"""The loss inside Megatron-Core. Only this subpackage and ``verify`` import ``megatron.core``."""

from megatron_pgloss.megatron.arguments import add_pgloss_args, spec_from_args, split_from_args
from megatron_pgloss.megatron.layout import Layout
from megatron_pgloss.megatron.sharing import broadcast
from megatron_pgloss.megatron.step import PolicyLossStep
from megatron_pgloss.megatron.value import ValueHead

__all__ = ["Layout", "PolicyLossStep", "ValueHead", "add_pgloss_args", "broadcast", "spec_from_args", "split_from_args"]
