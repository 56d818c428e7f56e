"""Everything that a spec can be put together from. Each file names the kinds that it exports in its own ``__all__``.

This module has no ``__all__``: it holds these names and nothing else, and `spec` and the package itself pass them on.
"""

from megatron_pgloss.spec.components import *  # noqa: F403
from megatron_pgloss.spec.corrections import *  # noqa: F403
from megatron_pgloss.spec.functions import *  # noqa: F403
from megatron_pgloss.spec.gates import *  # noqa: F403
from megatron_pgloss.spec.masks import *  # noqa: F403
from megatron_pgloss.spec.ratios import *  # noqa: F403
from megatron_pgloss.spec.surrogates.held import *  # noqa: F403
from megatron_pgloss.spec.surrogates.joined import *  # noqa: F403
from megatron_pgloss.spec.surrogates.likelihood import *  # noqa: F403
from megatron_pgloss.spec.surrogates.moving import *  # noqa: F403
from megatron_pgloss.spec.surrogates.surrogate import *  # noqa: F403
