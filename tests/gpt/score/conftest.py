"""Fixture for every test of scoring: the device."""

from tests.device import on_device as on_device
