"""Recurrent layers, taken apart so that their weights are those of linear layers."""

from __future__ import annotations

from typing import Any

RECURRENT: dict[Any, Any] = {}
