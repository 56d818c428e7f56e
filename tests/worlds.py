"""Kept for imports by plain name while the tests move."""

from support.worlds import World, run_world, world_fixture

__all__ = ["World", "run_world", "world_fixture"]
