"""Which replicas a process has been told of. Ray copies routers' classes from process to process
with what they refer to, so that this stands in a module of its own, which is imported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Replicas = dict[str, dict[str, Any]]
"""Name → metadata of all replicas of one deployment."""


class ReplicaLists:
    """Replicas by deployment; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Replicas] = {}
        self.on_change: Callable[[], None] = lambda: None

    def put(self, deployment: str, replicas: Replicas) -> None:
        with self._lock:
            self._known[deployment] = replicas
        self.on_change()

    def all(self) -> Replicas:
        with self._lock:
            return {name: data for listed in self._known.values() for name, data in listed.items()}


LISTS = ReplicaLists()
"""Ray makes routers by their class's name, so that they cannot be handed anything."""
