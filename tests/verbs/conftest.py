"""Guests of the lab for this folder's tests."""

from __future__ import annotations

from tests.lab.fixtures import figure, inside, lab, run_inside, start_guests

__all__ = ["figure", "inside", "lab", "run_inside", "start_guests"]
