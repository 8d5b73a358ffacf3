"""Lets the tests of this folder that are marked `interpreter` run in a process of their own."""

from __future__ import annotations

from tests.interpreter import pytest_configure, pytest_runtest_protocol, pytest_runtest_setup

__all__ = ["pytest_configure", "pytest_runtest_protocol", "pytest_runtest_setup"]
