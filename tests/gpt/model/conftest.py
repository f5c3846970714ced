"""Fixture for every test of models: the device."""

from tests.device import on_device as on_device
