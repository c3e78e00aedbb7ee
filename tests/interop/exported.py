"""Runs of tiny models of every kind: see models.py."""

from models import FORMS, text, write_run

__all__ = ["FORMS", "text", "write_run"]
